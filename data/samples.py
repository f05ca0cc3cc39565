"""Samples of L + 1 tokens from one data set, found by number.

An epoch is the data set's documents end to end in the epoch's own order. It is cut into samples of L + 1 tokens that
begin every L tokens, so that each token but the first is a target once; a document that runs over a sample's end goes
on in the next. The samples of an epoch are shuffled too, so that neighbours do not come from one document. What is left
at an epoch's end, at most L tokens of another document each time, is passed over.

Everything is a function of (seed, sample number): no state, nothing to save, nothing to skip on resume.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.errors import DataError
from data.indexed import FlatFile, IndexedDataset, bin_path
from data.order import CACHE_FROM_DOCUMENTS, EpochOrder
from data.permutation import Permutation, derive_key


@dataclass(frozen=True)
class Sample:
    """One sample: L + 1 tokens, and what is known of each."""

    tokens: np.ndarray
    """[L + 1] int64."""
    documents: np.ndarray
    """[L + 1] int64: 0 for the first document in the sample, 1 for the next, ... (an end-of-document token is its own
    document's last)."""
    is_target: np.ndarray | None
    """[L + 1] bool where the data set has a target mask (fine-tuning data), else None: every token is a target."""


class TokenSamples:
    """Samples of one data set. `len()` is the number in an epoch; numbers at and beyond it go on in further epochs."""

    def __init__(
        self,
        prefix: str | Path,
        sequence_length: int,
        seed: int,
        cache: Path | None = None,
        cache_from: int = CACHE_FROM_DOCUMENTS,
    ) -> None:
        """`cache` and `cache_from` as in EpochOrder. Raises DataError for a data set with less than one sample."""
        self.dataset = IndexedDataset(prefix)
        self.sequence_length, self.seed = sequence_length, seed
        self._cache, self._cache_from = cache, cache_from
        self._length = samples_in(self.dataset.token_count, sequence_length)
        if self._length < 1:
            raise DataError(
                f"{bin_path(prefix)}: expected at least {sequence_length + 1} tokens (one sample of sequence_length "
                f"{sequence_length} and its last target), found {self.dataset.token_count}"
            )
        self._mask = target_mask(self.dataset)
        self._orders: dict[int, tuple[EpochOrder, Permutation]] = {}
        self._built_ahead: set[int] = set()

    def __len__(self) -> int:
        return self._length

    @property
    def has_mask(self) -> bool:
        """Whether this is fine-tuning data, in which only some tokens are targets."""
        return self._mask is not None

    def sample(self, number: int) -> np.ndarray:
        """[L + 1] int64 tokens of sample `number` >= 0."""
        return self.read(number).tokens

    def read(self, number: int) -> Sample:
        """Sample `number` >= 0 with its document numbers and target mask."""
        first_place, bounds, documents = self._locate(number)
        length = self.sequence_length + 1
        tokens = np.empty(length, dtype=np.int64)
        owners = np.empty(length, dtype=np.int64)
        is_target = None if self._mask is None else np.empty(length, dtype=bool)
        origins = self.dataset.document_starts(documents)
        filled = 0
        for index, origin in enumerate(origins.tolist()):
            skipped = first_place if index == 0 else 0
            take = int(min(bounds[index + 1] - bounds[index] - skipped, length - filled))
            start = origin + skipped
            tokens[filled : filled + take] = self.dataset.read(start, start + take)
            owners[filled : filled + take] = index
            if is_target is not None and self._mask is not None:
                is_target[filled : filled + take] = self._mask.read(start, start + take)
            filled += take
        return Sample(tokens, owners, is_target)

    def documents(self, number: int) -> np.ndarray:
        """int64 numbers, in the data set, of the documents that sample `number` has tokens of."""
        return self._locate(number)[2]

    def _locate(self, number: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Tokens to skip in the sample's first document, int64 bounds of its documents in the stream, their numbers."""
        epoch, place = divmod(int(number), self._length)
        order, shuffle = self._order(epoch)
        if 2 * place >= self._length and self.dataset.document_count >= self._cache_from:
            self._build_ahead(epoch + 1)
        start = shuffle.at(place) * self.sequence_length
        first = int(np.searchsorted(order.starts, start, side="right")) - 1
        stop = int(np.searchsorted(order.starts, start + self.sequence_length + 1, side="left"))
        bounds = order.starts[first : stop + 1]
        if stop - first < 6:  # then one by one is faster
            documents = np.array([order.documents.at(index) for index in range(first, stop)])
        else:
            documents = order.documents(np.arange(first, stop))
        return start - int(bounds[0]), bounds, documents

    def _order(self, epoch: int) -> tuple[EpochOrder, Permutation]:
        if epoch not in self._orders:
            order = self._document_order(epoch)
            shuffle = Permutation(self._length, derive_key("samples", self.seed, epoch, self.sequence_length))
            while len(self._orders) > 1:  # a batch spans two epochs at most
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = (order, shuffle)
        return self._orders[epoch]

    def _document_order(self, epoch: int) -> EpochOrder:
        return EpochOrder(self.dataset, self.seed, epoch, self._cache, self._cache_from)

    def _build_ahead(self, epoch: int) -> None:
        """Have the order of a coming epoch on disk before it is needed: of a large set it takes seconds."""
        if epoch not in self._built_ahead:
            self._built_ahead.add(epoch)
            threading.Thread(target=self._document_order, args=(epoch,), name="data-order", daemon=True).start()


def samples_in(tokens: int, sequence_length: int) -> int:
    """Whole samples of L + 1 tokens with stride L in a stream of `tokens`."""
    return (tokens - 1) // sequence_length


def mask_path(prefix: str | Path) -> Path:
    """`PREFIX.mask.bin`: one byte a token, 1 where it is a target; only fine-tuning data has one."""
    return Path(f"{prefix}.mask.bin")


def target_mask(dataset: IndexedDataset) -> FlatFile | None:
    """The uint8 mask of `dataset`, one a token, or None. Raises DataError where its size is wrong."""
    path = mask_path(dataset.prefix)
    if not path.is_file():
        return None
    found = path.stat().st_size
    if found != dataset.token_count:
        raise DataError(f"{path}: expected {dataset.token_count} bytes (one a token), found {found} bytes")
    return FlatFile(path, np.dtype(np.uint8))
