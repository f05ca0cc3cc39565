"""Micro-batches for the trainer: by sample number for training, by window for evaluation.

The trainer says which global sample numbers it wants; nothing here knows of ranks. Two processes that ask for the same
numbers get the same bytes, which is how the first and the last stage of a pipeline read the same batch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.blend import Blend
from data.errors import DataError
from data.indexed import IndexedDataset, bin_path, check_ids
from data.order import CACHE_FROM_DOCUMENTS
from data.samples import Sample, TokenSamples, target_mask

NO_TARGET = -100


@dataclass
class MicroBatch:
    """What one forward and backward pass reads (CPU tensors, int64)."""

    tokens: torch.Tensor
    """[b, s] ids that go in."""
    targets: torch.Tensor
    """[b, s] ids to be predicted, -100 where there is none."""
    sample_numbers: torch.Tensor
    """[b] global sample (or window) numbers."""
    document_ids: torch.Tensor | None
    """[b, s] number, within the row, of the document that each input token belongs to; None without document_mask."""


@dataclass(frozen=True)
class Source:
    """One data set of a blend."""

    path: str
    """Prefix of the .bin and .idx files."""
    weight: float = 1.0
    """Share of samples, in any unit."""


Sources = str | Path | Sequence[Source | Mapping[str, Any] | str | Path]


class TrainingData:
    """The samples of one or several data sets in an order that depends on (sources, sequence length, seed) alone."""

    def __init__(
        self,
        sources: Sources,
        sequence_length: int,
        seed: int,
        end_of_document: int | None = None,
        document_mask: bool = False,
        vocab_size: int | None = None,
        pin_memory: bool = False,
        cache: Path | None = None,
        cache_from: int = CACHE_FROM_DOCUMENTS,
    ) -> None:
        """`sources`: a prefix, or a list of {path, weight}. `vocab_size`, where given, is what no id may reach.

        `end_of_document` makes a document end at that token even where a foreign index knows of no bound there.
        Raises DataError, naming the file, for anything that is not as it should be.
        """
        self.sources = as_sources(sources)
        self.sequence_length, self.seed = sequence_length, seed
        self._end, self._document_mask = end_of_document, document_mask
        self._vocab_size, self._pin_memory = vocab_size, pin_memory
        self._lock = threading.Lock()
        self.blend = Blend([source.weight for source in self.sources])
        self.samples = [TokenSamples(source.path, sequence_length, seed, cache, cache_from) for source in self.sources]
        if vocab_size is not None:
            for part in self.samples:
                part.dataset.check_vocabulary(vocab_size)

    @property
    def tokens_per_epoch(self) -> list[int]:
        """Targets in an epoch of each source."""
        return [len(part) * self.sequence_length for part in self.samples]

    @property
    def every_token_is_a_target(self) -> bool:
        """Whether no source has a target mask, so that every micro-batch has as many targets as tokens."""
        return not any(part.has_mask for part in self.samples)

    def micro_batch(self, sample_numbers: np.ndarray | Sequence[int]) -> MicroBatch:
        """The samples of these global numbers, in this order. May be called from several threads."""
        numbers = np.asarray(sample_numbers, dtype=np.int64)
        with self._lock:
            sources, inner = self.blend.locate(numbers)
            places = zip(sources.tolist(), inner.tolist(), strict=True)
            rows = [self.samples[source].read(number) for source, number in places]
        batch = _assemble(rows, numbers, self._end, self._document_mask)
        if self._vocab_size is not None:
            paths = [bin_path(self.sources[source].path) for source in sources.tolist()]
            for row, path in zip(rows, paths, strict=True):
                check_ids(row.tokens, self._vocab_size, path)
        return _pin(batch) if self._pin_memory else batch


class ValidationData:
    """A data set in file order, in windows of L + 1 tokens with stride L: each token but the first is a target once.

    `len()` is the number of windows. The last is padded, and a number at or beyond `len()` gives a row without targets.
    """

    def __init__(
        self,
        prefix: str | Path,
        sequence_length: int,
        end_of_document: int | None = None,
        document_mask: bool = False,
        vocab_size: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        """Arguments as for TrainingData. Raises DataError where the set has fewer than two tokens."""
        self.dataset = IndexedDataset(prefix)
        self.dataset.check()
        if self.dataset.token_count < 2:
            raise DataError(f"{bin_path(prefix)}: expected at least 2 tokens (one target), found 1")
        if vocab_size is not None:
            self.dataset.check_vocabulary(vocab_size)
        self.sequence_length = sequence_length
        self._end, self._document_mask, self._pin_memory = end_of_document, document_mask, pin_memory
        self._mask = target_mask(self.dataset)
        self._starts: np.ndarray | None = None

    def __len__(self) -> int:
        return -(-(self.dataset.token_count - 1) // self.sequence_length)

    def windows(self, count: int | None = None) -> np.ndarray:
        """Numbers of `count` fixed windows spread evenly over the set, ascending (all of them without `count`).

        Where the set has fewer, the numbers go on beyond its end, and those rows are without targets.
        """
        if count is None or count >= len(self):
            return np.arange(len(self) if count is None else count)
        return np.arange(count) * len(self) // count

    def micro_batch(self, window_numbers: np.ndarray | Sequence[int]) -> MicroBatch:
        """These windows, in this order."""
        numbers = np.asarray(window_numbers, dtype=np.int64)
        batch = _assemble([self._window(int(number)) for number in numbers], numbers, self._end, self._document_mask)
        return _pin(batch) if self._pin_memory else batch

    def _window(self, number: int) -> Sample:
        length = self.sequence_length + 1
        start = min(number * self.sequence_length, self.dataset.token_count)
        found = self.dataset.read(start, min(start + length, self.dataset.token_count))
        tokens = np.full(length, self._end or 0, dtype=np.int64)
        tokens[: len(found)] = found
        is_target = np.arange(length) < len(found)
        if len(found) < 2:  # beyond the end, or nothing but the last target of the window before
            is_target[:] = False
        elif self._mask is not None:
            is_target[: len(found)] &= self._mask.read(start, start + len(found)).astype(bool)
        documents = np.zeros(length, dtype=np.int64)
        if self._document_mask and len(found):
            if self._starts is None:
                self._starts = self.dataset.document_starts(np.arange(self.dataset.document_count + 1))
            owners = np.searchsorted(self._starts, np.arange(start, start + length), side="right")
            documents = owners - owners[0]
        return Sample(tokens, documents, is_target)


def as_sources(sources: Sources) -> list[Source]:
    """`data.train` as a list of Source, whichever way it was written."""
    if isinstance(sources, str | Path):
        return [Source(str(sources))]
    result = []
    for source in sources:
        if isinstance(source, str | Path):
            source = Source(str(source))
        elif isinstance(source, Mapping):
            unknown = set(source) - {"path", "weight"}
            if unknown or "path" not in source:
                raise DataError(f"data.train: expected entries of path and weight, found {dict(source)}")
            source = Source(str(source["path"]), source.get("weight", 1.0))
        result.append(source)
    if not result:
        raise DataError("data.train: expected at least one data set, found an empty list")
    return result


def _assemble(rows: list[Sample], numbers: np.ndarray, end: int | None, document_mask: bool) -> MicroBatch:
    tokens = np.stack([row.tokens for row in rows])
    targets = tokens[:, 1:].copy()
    for index, row in enumerate(rows):
        if row.is_target is not None:
            targets[index, ~row.is_target[1:]] = NO_TARGET
    inputs = tokens[:, :-1]
    document_ids = None
    if document_mask:
        begins = np.diff(np.stack([row.documents for row in rows])[:, :-1], axis=1, prepend=0) > 0
        if end is not None:
            begins[:, 1:] |= inputs[:, :-1] == end
        document_ids = torch.from_numpy(np.cumsum(begins, axis=1))
    return MicroBatch(
        torch.from_numpy(np.ascontiguousarray(inputs)),
        torch.from_numpy(targets),
        torch.from_numpy(numbers),
        document_ids,
    )


def _pin(batch: MicroBatch) -> MicroBatch:
    """The batch in page-locked memory, so that its copy to a GPU need not wait."""
    ids = batch.document_ids
    return MicroBatch(
        batch.tokens.pin_memory(),
        batch.targets.pin_memory(),
        batch.sample_numbers,
        ids.pin_memory() if ids is not None else None,
    )
