"""Plain and compressed files as streams of bytes, which fail where a file is cut."""

from __future__ import annotations

import gzip
import io
from typing import Any, BinaryIO, cast

from data.errors import DataError

BUFFER = 1 << 20


def open_stream(path: str, compression: str) -> BinaryIO:
    """The bytes that `path` stands for: `compression` is gz, zst or empty. Raises OSError or EOFError in reading."""
    if compression == "gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if compression == "zst":
        try:
            import zstandard
        except ImportError as error:
            raise DataError(f"{path}: expected the package zstandard to read it, found none installed") from error
        return cast(BinaryIO, io.BufferedReader(_ZstdStream(path, zstandard), BUFFER))
    return open(path, "rb")


class _ZstdStream(io.RawIOBase):
    """What a zstd file holds, all its frames; a file that ends inside one is an error, which the package's own readers
    let pass as an ordinary end."""

    def __init__(self, path: str, zstandard: Any) -> None:
        decompressor, self._problem = zstandard.ZstdDecompressor(), zstandard.ZstdError
        self._file = open(path, "rb")  # noqa: SIM115
        self._decompressor, self._frame = decompressor, decompressor.decompressobj()
        self._is_inside, self._left = False, b""

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, target: Any) -> int:
        """Fill `target` as far as it goes; 0 at the end."""
        while not self._left:
            packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._is_inside = self._decompressor.decompressobj(), False
            packed = packed or self._file.read(1 << 14)
            if not packed:
                if self._is_inside:
                    raise EOFError("it ends inside a compressed frame (cut off)")
                return 0
            self._is_inside = True
            try:
                self._left = self._frame.decompress(packed)
            except self._problem as error:
                raise OSError(str(error)) from error
        size = min(len(target), len(self._left))
        target[:size] = self._left[:size]
        self._left = self._left[size:]
        return size

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()
