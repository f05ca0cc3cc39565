"""The order of one epoch: every document once, shuffled, and where each begins in the stream of tokens that results.

The order itself is a Permutation and costs nothing. What is computed is `starts`, the running sum of the shuffled
documents' lengths: int64, one number a document. For large data sets it is kept in a file, so that a second start, and
the other processes of a first one, open it in milliseconds:

    PREFIX.order/<fingerprint>.starts    beside the data, or, where that cannot be written, in a folder of this machine

The fingerprint covers the data files (size, time, head and tail of the index), the seed and the epoch. The sample
length is not in it: samples of any length are found in the same file by binary search.

Many processes may start together, on nodes that share the file system or do not: one of them builds while the others
wait for its lock (which the system drops when a builder dies), and the file appears by rename, complete or not at all.
Where locks are not to be had, several build the same bytes and the last rename wins.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.indexed import IndexedDataset, bin_path, index_path
from data.permutation import Permutation, derive_key

CACHE_FROM_DOCUMENTS = 1 << 20
"""Data sets with fewer documents than this are ordered anew in each process: it takes less than a second."""
BLOCK = 1 << 20
HEADER = 4096  # bytes before the numbers: magic and fingerprint, padded to a page
MAGIC = b"MLORDER1"


class EpochOrder:
    """Documents of `dataset` in the order of `epoch`.

    Attributes: `starts` (int64, document_count + 1): token at which the document in each place begins in the epoch's
    stream; `documents(places)`: numbers of the documents in those places.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        seed: int,
        epoch: int,
        cache: Path | None = None,
        cache_from: int = CACHE_FROM_DOCUMENTS,
    ) -> None:
        """`cache` is a folder to use instead of the one beside the data; `cache_from` documents on, a file is kept."""
        self.documents = Permutation(dataset.document_count, derive_key("documents", seed, epoch))
        if dataset.document_count < cache_from:
            dataset.check()
            self.starts = np.zeros(dataset.document_count + 1, dtype=np.int64)
            for first, ends in _ends(dataset, self.documents):
                self.starts[first + 1 : first + 1 + len(ends)] = ends
        else:
            print_ = _fingerprint(dataset, seed, epoch)
            self.starts = _cached(dataset, self.documents, print_, cache or Path(f"{dataset.prefix}.order"))


def _ends(dataset: IndexedDataset, documents: Permutation) -> Iterator[tuple[int, np.ndarray]]:
    """Running sums of the shuffled sizes, block by block: (first place, int64 ends)."""
    total = 0
    simple = dataset.sequence_count == dataset.document_count  # then a document is a sequence, and its size is at hand
    for first in range(0, documents.count, BLOCK):
        places = np.arange(first, min(first + BLOCK, documents.count))
        numbers = documents(places)
        if simple:
            sizes = dataset.sizes[numbers].astype(np.int64)
        else:
            sizes = dataset.document_starts(numbers + 1) - dataset.document_starts(numbers)
        ends = np.cumsum(sizes) + total
        total = int(ends[-1])
        yield first, ends


def _fingerprint(dataset: IndexedDataset, seed: int, epoch: int) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for path in (index_path(dataset.prefix), bin_path(dataset.prefix)):
        status = path.stat()
        digest.update(repr((path.name, status.st_size, status.st_mtime_ns)).encode())
    with index_path(dataset.prefix).open("rb") as file:
        digest.update(file.read(1 << 16))
        file.seek(max(0, index_path(dataset.prefix).stat().st_size - (1 << 16)))
        digest.update(file.read())
    digest.update(repr((seed, epoch)).encode())
    return digest.hexdigest()


def _cached(dataset: IndexedDataset, documents: Permutation, fingerprint: str, folder: Path) -> np.ndarray:
    folder = _writable(folder)
    path = folder / f"{fingerprint}.starts"
    count = dataset.document_count + 1
    starts = _open(path, fingerprint, count, dataset.token_count)
    if starts is not None:
        return starts
    with _lock(folder / f"{fingerprint}.lock"):
        starts = _open(path, fingerprint, count, dataset.token_count)  # another process may have built it meanwhile
        if starts is None:
            dataset.check()
            _build(path, fingerprint, dataset, documents)
            starts = _open(path, fingerprint, count, dataset.token_count)
    assert starts is not None, f"{path} was written and cannot be read back"
    return starts


def _build(path: Path, fingerprint: str, dataset: IndexedDataset, documents: Permutation) -> None:
    partial = path.with_name(f"{path.name}.partial-{os.uname().nodename}-{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write((MAGIC + fingerprint.encode()).ljust(HEADER, b"\0"))
            file.write(np.zeros(1, dtype="<i8").data)
            for _, ends in _ends(dataset, documents):
                file.write(ends.astype("<i8", copy=False).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    for left in path.parent.glob("*.partial-*"):  # of builders that were killed; a live one holds the lock or is young
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 3600:
                left.unlink()


def _open(path: Path, fingerprint: str, count: int, tokens: int) -> np.ndarray | None:
    """The numbers in `path`, or None where it is not there or is not what its name says."""
    try:
        if path.stat().st_size != HEADER + 8 * count:
            return None
        with path.open("rb") as file:
            if not file.read(HEADER).startswith(MAGIC + fingerprint.encode() + b"\0"):
                return None
        starts = np.asarray(np.memmap(path, mode="r", dtype="<i8", offset=HEADER, shape=(count,)))
    except OSError:
        return None
    return starts if starts[0] == 0 and starts[-1] == tokens else None


def _writable(folder: Path) -> Path:
    """`folder`, made; or, where it cannot be written, one of the same name for this user on this machine."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    name = hashlib.blake2b(str(folder.absolute()).encode(), digest_size=8).hexdigest()
    local = Path(tempfile.gettempdir()) / f"mainline-order-{os.getuid()}" / name
    local.mkdir(parents=True, exist_ok=True, mode=0o700)
    return local


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` where the file system has locks; it ends with the process whatever happens."""
    with path.open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
