"""Megatron's indexed token files, MMIDIDX version 1: `PREFIX.bin` holds tokens end to end, `PREFIX.idx` their bounds.

The index: magic, version (uint64), type code (uint8), number of sequences and of document bounds (uint64 each), then
sizes (int32, tokens a sequence), pointers (int64, bytes) and document bounds (int64, sequence numbers, from 0 to the
number of sequences). A document is usually one sequence; a very long one is several. Everything is little-endian.
Source: megatron/core/datasets/indexed_dataset.py. Offsets are 64-bit throughout; the reader maps the
index and reads tokens by position.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = len(MAGIC) + 8 + 1 + 8 + 8
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
TOKEN_CODES = (1, 2, 3, 4, 5, 8)  # floats are in Megatron's table, but no token is one

CHECK_AT_ONCE = 1 << 22  # sequences up to which the whole index is checked at opening (some 50 ms)
SCAN_WHOLE = 1 << 27  # tokens up to which a vocabulary check reads every one
CHUNK = 1 << 22


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that Megatron itself would choose for so many ids: uint16 below 65500, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def bin_path(prefix: str | Path) -> Path:
    """`PREFIX.bin`."""
    return Path(f"{prefix}.bin")


def index_path(prefix: str | Path) -> Path:
    """`PREFIX.idx`."""
    return Path(f"{prefix}.idx")


class FlatFile:
    """Numbers of one type end to end, read by position: from any thread, and after a fork.

    Each read is one call to the system for just these bytes. A memory map would fetch the pages around each place too,
    which made random reads of a set larger than memory a thousand times slower.
    """

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path, self.dtype = path, dtype
        self._file = path.open("rb")

    def read(self, start: int, stop: int) -> np.ndarray:
        """Numbers [start, stop), read-only. Raises DataError where the file has become shorter."""
        at, left = start * self.dtype.itemsize, (stop - start) * self.dtype.itemsize
        data = os.pread(self._file.fileno(), left, at)
        while len(data) < left:  # the system reads 2 GiB at most at once
            more = os.pread(self._file.fileno(), left - len(data), at + len(data))
            if not more:
                raise DataError(f"{self.path}: expected {at + left} bytes or more as at its opening, found fewer")
            data += more
        return np.frombuffer(data, dtype=self.dtype)


class IndexedDataset:
    """A read-only view of `PREFIX.bin` and `PREFIX.idx`.

    Attributes: `dtype`, `token_count`, `sequence_count`, `document_count`, `sizes` (int32, tokens a sequence),
    `pointers` (int64, bytes), `document_indices` (int64, document_count + 1 sequence numbers).
    Raises DataError where the files are missing, cut, foreign or do not belong together.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self._read_index()
        self._map_tokens()
        self.is_checked = False
        if self.sequence_count <= CHECK_AT_ONCE:
            self.check()

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.prefix,)  # another process maps the files anew

    def _read_index(self) -> None:
        path = index_path(self.prefix)
        if not path.is_file():
            raise DataError(
                f"{path}: expected the index of a data set (PREFIX.idx beside PREFIX.bin), found no such file"
            )
        size = path.stat().st_size
        if size < HEADER_BYTES:
            raise DataError(f"{path}: expected at least {HEADER_BYTES} bytes of index header, found {size} bytes")
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
        if not header.startswith(MAGIC):
            raise DataError(f"{path}: expected an index that begins with {MAGIC!r}, found {header[: len(MAGIC)]!r}")
        version, code, sequences, bounds = struct.unpack("<QBQQ", header[len(MAGIC) :])
        if version != VERSION:
            raise DataError(f"{path}: expected index version {VERSION}, found {version}")
        if code not in TOKEN_CODES:
            raise DataError(f"{path}: expected a token type code of {TOKEN_CODES}, found {code}")
        expected = HEADER_BYTES + sequences * (4 + 8) + bounds * 8
        # A multimodal index has one more byte a sequence; the tokens in it are read as they are.
        if size not in (expected, expected + sequences):
            raise DataError(
                f"{path}: expected {expected} bytes for {sequences} sequences and {bounds} document bounds, "
                f"found {size} bytes"
            )
        if bounds < 2 or sequences < 1:
            raise DataError(f"{path}: expected at least one document, found {max(0, bounds - 1)} documents")
        self.dtype = np.dtype(DTYPES[code])
        self.sequence_count, self.document_count = int(sequences), int(bounds) - 1
        raw = np.memmap(path, mode="r", dtype=np.uint8)
        at = HEADER_BYTES
        self.sizes = np.frombuffer(raw, dtype="<i4", count=sequences, offset=at)
        self.pointers = np.frombuffer(raw, dtype="<i8", count=sequences, offset=at + 4 * sequences)
        self.document_indices = np.frombuffer(raw, dtype="<i8", count=bounds, offset=at + 12 * sequences)

    def _map_tokens(self) -> None:
        path = bin_path(self.prefix)
        if not path.is_file():
            raise DataError(f"{path}: expected the tokens that {index_path(self.prefix)} describes, found no such file")
        expected = int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize
        found = path.stat().st_size
        if found != expected:
            raise DataError(
                f"{path}: expected {expected} bytes as {index_path(self.prefix)} says, found {found} bytes "
                "(cut off, or the index of another file)"
            )
        if found == 0:
            raise DataError(f"{path}: expected tokens, found an empty file (0 bytes)")
        self._tokens = FlatFile(path, self.dtype.newbyteorder("<"))
        self.token_count = found // self.dtype.itemsize

    def check(self) -> None:
        """Read the whole index once: no empty sequence or document, pointers that follow from sizes, bounds in order.

        Small data sets are checked at opening; for large ones the order of samples calls this before it is built.
        """
        if self.is_checked:
            return
        path = index_path(self.prefix)
        at = 0
        for first in range(0, self.sequence_count, CHUNK):
            sizes = self.sizes[first : first + CHUNK].astype(np.int64)
            if sizes.min() < 1:
                number = first + int(np.argmax(sizes < 1))
                raise DataError(
                    f"{path}: expected sequences of at least 1 token, found {sizes.min()} in number {number}"
                )
            ends = np.cumsum(sizes * self.dtype.itemsize) + at
            starts = np.concatenate(([at], ends[:-1]))
            pointers = self.pointers[first : first + CHUNK]
            if not np.array_equal(starts, pointers):
                number = int(np.argmax(starts != pointers))
                raise DataError(
                    f"{path}: expected sequence {first + number} at byte {starts[number]}, "
                    f"found a pointer to byte {pointers[number]}"
                )
            at = int(ends[-1])
        bounds = self.document_indices
        if bounds[0] != 0 or bounds[-1] != self.sequence_count:
            raise DataError(
                f"{path}: expected document bounds from 0 to {self.sequence_count}, found {bounds[0]} to {bounds[-1]}"
            )
        for first in range(0, self.document_count, CHUNK):
            steps = np.diff(bounds[first : first + CHUNK + 1])
            if steps.min() < 1:
                number = first + int(np.argmax(steps < 1))
                raise DataError(f"{path}: expected at least 1 sequence a document, found none in document {number}")
        self.is_checked = True

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise DataError where an id is not below `vocab_size`.

        Up to 134 million tokens every one is read (a fraction of a second). Of a larger set 1024 blocks of 131,072,
        spread evenly, are; TrainingData looks at the rest as it reads them, so that none reaches the model.
        """
        if self.token_count <= SCAN_WHOLE:
            starts, length = range(0, self.token_count, CHUNK), CHUNK
        else:
            blocks = 1024
            length = SCAN_WHOLE // blocks
            starts = range(0, self.token_count - length + 1, (self.token_count - length) // (blocks - 1))
        for start in starts:
            ids = self.read(start, min(start + length, self.token_count))
            check_ids(ids, vocab_size, bin_path(self.prefix))

    def document_starts(self, documents: np.ndarray) -> np.ndarray:
        """int64 token offsets at which `documents` begin; number `document_count` gives the end of the last."""
        sequences = self.document_indices[documents]
        inside = np.minimum(sequences, self.sequence_count - 1)
        starts = self.pointers[inside] // self.dtype.itemsize
        return np.where(sequences == self.sequence_count, self.token_count, starts)

    def document_sizes(self, first: int, stop: int) -> np.ndarray:
        """int64 tokens of the documents [first, stop)."""
        return np.diff(self.document_starts(np.arange(first, stop + 1)))

    def document(self, number: int) -> np.ndarray:
        """Tokens of one document, in the file's own type."""
        start, stop = self.document_starts(np.array([number, number + 1]))
        return self.read(int(start), int(stop))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the whole file, in the file's own type."""
        return self._tokens.read(start, stop)

    def __len__(self) -> int:
        return self.sequence_count

    def __getitem__(self, number: int) -> np.ndarray:
        """Tokens of sequence `number`, as Megatron's own reader gives them."""
        start = int(self.pointers[number]) // self.dtype.itemsize
        return self.read(start, start + int(self.sizes[number]))


def check_ids(ids: np.ndarray, vocab_size: int, path: Path) -> None:
    """Raise DataError where one of `ids`, read from `path`, is negative or not below `vocab_size`."""
    largest, smallest = int(ids.max()), int(ids.min())
    if largest >= vocab_size or smallest < 0:
        wrong = largest if largest >= vocab_size else smallest
        raise DataError(
            f"{path}: expected token ids from 0 to {vocab_size - 1} (the vocabulary has {vocab_size}), "
            f"found {wrong}: was it written with another tokenizer?"
        )


class IndexedWriter:
    """Writes a data set document by document; the files appear under their names, complete, at `finish`.

    with IndexedWriter(prefix, token_dtype(vocab_size)) as writer:
        writer.add_document(ids)
    Left by an exception, nothing remains.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        self._sizes, self._bounds = array("i"), array("q", [0])
        self._partial = Path(f"{prefix}.bin.partial-{os.getpid()}")
        self._file: BinaryIO = self._partial.open("wb")

    def add_document(self, *sequences: np.ndarray | Sequence[int]) -> None:
        """Append one document, in one or several sequences (more than one only where it is very long)."""
        for sequence in sequences:
            ids = np.asarray(sequence)
            if ids.size == 0:
                raise DataError(f"{bin_path(self.prefix)}: expected a document with tokens, found one of 0 tokens")
            self._file.write(np.ascontiguousarray(ids, dtype=self.dtype).data)
            self._sizes.append(ids.size)
        self._bounds.append(len(self._sizes))

    def finish(self) -> None:
        """Write the index and put both files in place, the index last."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        sizes, bounds = np.frombuffer(self._sizes, np.int32), np.frombuffer(self._bounds, np.int64)
        partial = Path(f"{self.prefix}.idx.partial-{os.getpid()}")
        write_index(partial, self.dtype, len(sizes), len(bounds), lambda: iter([sizes]), iter([bounds]))
        os.replace(self._partial, bin_path(self.prefix))
        os.replace(partial, index_path(self.prefix))

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self._file.close()
            self._partial.unlink(missing_ok=True)


def write_index(
    path: Path,
    dtype: np.dtype,
    sequences: int,
    bounds: int,
    sizes: Callable[[], Iterable[np.ndarray]],
    document_bounds: Iterable[np.ndarray],
) -> None:
    """Write an index of any length in bounded memory: `sizes` gives the same chunks of int32 at each of two passes."""
    with path.open("wb") as file:
        file.write(MAGIC + struct.pack("<QBQQ", VERSION, CODES[dtype], sequences, bounds))
        for chunk in sizes():
            file.write(np.ascontiguousarray(chunk, dtype="<i4").data)
        at = 0
        for chunk in sizes():
            ends = np.cumsum(chunk.astype(np.int64) * dtype.itemsize) + at
            if len(ends):
                file.write(np.concatenate(([at], ends[:-1])).astype("<i8").data)
                at = int(ends[-1])
        for chunk in document_bounds:
            file.write(np.ascontiguousarray(chunk, dtype="<i8").data)
        file.flush()
        os.fsync(file.fileno())


def merge(prefixes: Sequence[str | Path], output: str | Path) -> None:
    """Write one data set with the documents of all `prefixes`, one set after the other; all have one token type."""
    parts = [IndexedDataset(prefix) for prefix in prefixes]
    for part in parts[1:]:
        if part.dtype != parts[0].dtype:
            raise DataError(
                f"{index_path(part.prefix)}: expected tokens of type {parts[0].dtype} as in "
                f"{index_path(parts[0].prefix)}, found {part.dtype}"
            )
    partial = Path(f"{output}.partial-{os.getpid()}")
    with bin_path(partial).open("wb") as file:
        for part in parts:
            for start in range(0, part.token_count, CHUNK):
                file.write(part.read(start, min(start + CHUNK, part.token_count)).data)
        file.flush()
        os.fsync(file.fileno())

    def bounds() -> Iterator[np.ndarray]:
        yield np.zeros(1, dtype=np.int64)
        before = 0
        for part in parts:
            for first in range(1, part.document_count + 1, CHUNK):
                yield part.document_indices[first : first + CHUNK] + before
            before += part.sequence_count

    sequences, documents = sum(part.sequence_count for part in parts), sum(part.document_count for part in parts)
    sizes = [part.sizes for part in parts]
    write_index(index_path(partial), parts[0].dtype, sequences, documents + 1, lambda: iter(sizes), bounds())
    os.replace(bin_path(partial), bin_path(output))
    os.replace(index_path(partial), index_path(output))
