"""Safetensors files, written as a stream and read by ranges.

The safetensors library writes a file from tensors that are all in memory and reads through a memory map, whose pages
count as the process's memory. A checkpoint of hundreds of gigabytes wants neither: here one tensor at a time passes
through, its bytes are hashed on the way to the disk, and a reader takes just the range it asks for. The format is the
public one (8 bytes of header length, a JSON header, the raw little-endian data), so any other reader of safetensors
opens these files too. Nothing is ever unpickled.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK_BYTES = 4 * 2**20
LONGEST_HEADER = 100_000_000  # the library's own bound


class CheckpointError(Exception):
    """A checkpoint or weight file that cannot be used: one sentence that names the file."""


@dataclass(frozen=True)
class TensorSpec:
    """What the header says of one tensor before its data is written."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def digest() -> "hashlib.blake2b":
    """The hash of every checksum in a checkpoint (blake2b of 32 bytes)."""
    return hashlib.blake2b(digest_size=32)


def file_checksum(path: Path) -> str:
    """The checksum of a whole file, read in chunks (OSError as the file system gives it)."""
    hasher = digest()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder (files created or renamed in it) survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class TensorFileWriter:
    """Writes one safetensors file: the header at once, then the data in the order of `specs`.

    `append` takes a tensor or any consecutive part of it. `close` refuses a file that did not get all its data, makes
    it durable and leaves `size` and `checksum`.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        start = 0
        for spec in specs:
            if spec.key in header:
                raise ValueError(f"two tensors of one file are called {spec.key}")
            header[spec.key] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [start, start + spec.nbytes],
            }
            start += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
        self.path = path
        self.size = 0
        self.checksum = ""
        self._expected = 8 + len(text) + start
        self._hasher = digest()
        self._file: BinaryIO = path.open("wb")
        self._write(len(text).to_bytes(8, "little"))
        self._write(text)

    def _write(self, data: bytes | memoryview) -> None:
        self._hasher.update(data)
        self._file.write(data)
        self.size += len(data)

    def append(self, tensor: Tensor) -> None:
        """Adds the data of the next tensor, or of the next part of it; its type must be the announced one."""
        data = _bytes_of(tensor.detach().cpu().contiguous())
        if sys.byteorder != "little":
            raise CheckpointError(f"{self.path}: safetensors data is little-endian and this processor is not")
        for start in range(0, len(data), CHUNK_BYTES):
            self._write(data[start : start + CHUNK_BYTES])

    def close(self) -> None:
        """Syncs the file and leaves `size` and `checksum`; ValueError where data is missing."""
        if self.size != self._expected:
            self._file.close()
            raise ValueError(f"{self.path} got {self.size} bytes, its header announces {self._expected}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.checksum = self._hasher.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


class TensorFile:
    """Reads tensors, or ranges of them, of one safetensors file. The header is checked against the file's size."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb")
            size = os.fstat(self._file.fileno()).st_size
            length = int.from_bytes(self._file.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER):
                raise ValueError("its header is longer than the file")
            header = json.loads(self._file.read(length))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self._starts: dict[str, int] = {}
            self.specs: dict[str, TensorSpec] = {}
            for key, value in header.items():
                spec = TensorSpec(key, DTYPES[value["dtype"]], tuple(int(n) for n in value["shape"]))
                start, stop = value["data_offsets"]
                if not 0 <= start <= stop <= size - 8 - length or stop - start != spec.nbytes:
                    raise ValueError(f"the data of {key} does not lie in the file")
                self.specs[key] = spec
                self._starts[key] = 8 + length + start
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            detail = f"dtype {error} is not known" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(f"{path} is not a sound safetensors file: {detail}") from error

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """The elements `start` to `stop` of the flattened tensor `key`: 1-D, in the file's own type."""
        if key not in self.specs:
            raise CheckpointError(f"{self.path} holds no tensor {key}")
        spec = self.specs[key]
        stop = math.prod(spec.shape) if stop is None else stop
        if not 0 <= start <= stop <= math.prod(spec.shape):
            raise ValueError(f"range {start}:{stop} lies outside {key} with shape {spec.shape}")
        tensor = torch.empty(stop - start, dtype=spec.dtype)
        if stop > start:
            self._fill(_bytes_of(tensor), self._starts[key] + start * spec.dtype.itemsize)
        return tensor

    def _fill(self, data: memoryview, position: int) -> None:
        try:
            self._file.seek(position)
            done = 0
            while done < len(data):
                count = self._file.readinto(data[done : done + CHUNK_BYTES])  # type: ignore[attr-defined]
                if not count:
                    raise CheckpointError(f"{self.path} is truncated: it ends at byte {position + done}")
                done += count
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def close(self) -> None:
        """Closes the file; nothing can be read any more."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
