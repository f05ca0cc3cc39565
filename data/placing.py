"""Shards to the two finished data sets: which documents are held out, and where each shard's tokens go.

The place of every shard in the finished files follows from the sizes of those before it, so shards are copied in any
order by any process, and the files are the same byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.encoding import Tick
from data.errors import DataError, writing
from data.indexed import write_index
from data.permutation import derive_key

PARTS = ("train", "validation")


def held_out_hashes(seed: int, first: int, count: int) -> np.ndarray:
    """uint64 hashes of (seed, document number) for `count` documents from number `first` on: even over all 64 bits."""
    values = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    values += np.uint64(derive_key("held out", seed))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the mixer of splitmix64
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(31))


@dataclass
class Totals:
    """What one of the two sets holds."""

    tokens: int = 0
    sequences: int = 0
    documents: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Placement:
    """Where one shard goes."""

    shard: str
    first_document: int
    """Number of the document in which the shard begins."""
    offsets: tuple[int, int]
    """Tokens before it in train and in validation."""


@dataclass(frozen=True)
class Split:
    """How documents are held out."""

    seed: int
    threshold: float
    """A document is held out whose hash is below this."""
    only: int | None = None
    """The one document held out where no hash is below the threshold."""

    def held_out(self, first: int, count: int) -> np.ndarray:
        """Bool for `count` documents from number `first` on."""
        if self.only is not None:
            return np.arange(first, first + count) == self.only
        return held_out_hashes(self.seed, first, count) < self.threshold


@dataclass
class Layout:
    """The finished data sets before they are written."""

    split: Split
    placements: list[Placement] = field(default_factory=list)
    totals: tuple[Totals, Totals] = field(default_factory=lambda: (Totals(), Totals()))


def plan_layout(shards: Sequence[str], documents: int, seed: int, fraction: float) -> Layout:
    """Read the shards' sizes, one shard at a time, and say where each goes. DataError: nothing to train on."""
    layout = Layout(_split(documents, seed, fraction))
    number = 0
    for shard in shards:
        placement = Placement(shard, number, (layout.totals[0].tokens, layout.totals[1].tokens))
        layout.placements.append(placement)
        with np.load(f"{shard}.npz", allow_pickle=False) as file:
            sizes, ends, text_bytes = file["sizes"], file["ends"], file["text_bytes"]
        if not len(sizes):
            continue
        held = _held_out(placement, ends, layout.split)
        for which, chosen in enumerate((~held, held)):
            totals = layout.totals[which]
            totals.tokens += int(sizes[chosen].sum(dtype=np.int64))
            totals.sequences += int(chosen.sum())
            totals.documents += int((ends & chosen).sum())
            totals.bytes += int(text_bytes[chosen].sum())
        number += int(ends.sum())
    return layout


def _split(documents: int, seed: int, fraction: float) -> Split:
    split = Split(seed, fraction * 2.0**64)
    if documents == 0:
        raise DataError("--input: expected at least one document with text in it, found none")
    if fraction <= 0:
        return split
    check_divisible(documents)
    block = 1 << 20
    lowest, where, held = 2**64, 0, 0
    for first in range(0, documents, block):
        hashes = held_out_hashes(seed, first, min(block, documents - first))
        held += int((hashes < split.threshold).sum())
        if hashes.min() < lowest:
            lowest, where = int(hashes.min()), first + int(hashes.argmin())
    if held == documents:
        raise DataError(f"--validation-fraction {fraction}: expected documents left to train on, found none")
    return split if held else Split(seed, split.threshold, only=where)


def check_divisible(documents: int) -> None:
    """Raise DataError where there are too few documents to hold one out."""
    if documents < 2:
        raise DataError(
            "--validation-fraction: expected at least 2 documents, so that one can be held out, found 1: give more, or "
            "--validation-fraction 0 and no validation set"
        )


def _held_out(placement: Placement, ends: np.ndarray, split: Split) -> np.ndarray:
    """[sequences] bool: whether each sequence of the shard belongs to a held-out document."""
    document = np.cumsum(ends) - ends  # of each sequence, counted within the shard
    held = split.held_out(placement.first_document, int(document[-1]) + 1)
    return held[document]


def place_shard(folder: str, split: Split, has_mask: bool, placement: Placement, tick: Tick) -> int:
    """Copy one shard into `folder`/train.bin and validation.bin (and the masks). Gives the tokens copied."""
    with writing(folder):
        return _place_shard(folder, split, has_mask, placement, tick)


def _place_shard(folder: str, split: Split, has_mask: bool, placement: Placement, tick: Tick) -> int:
    with np.load(f"{placement.shard}.npz", allow_pickle=False) as file:
        sizes, ends = file["sizes"], file["ends"]
    if not len(sizes):
        return 0
    held = _held_out(placement, ends, split)
    stops = np.cumsum(sizes, dtype=np.int64)
    for name, suffix in ((".tokens", ".bin"), (".mask", ".mask.bin"))[: 2 if has_mask else 1]:
        path = Path(f"{placement.shard}{name}")
        item = path.stat().st_size // int(stops[-1])  # bytes a token
        source = np.memmap(path, mode="r", dtype=np.uint8)
        for which, chosen in enumerate((~held, held)):
            if not chosen.any():
                continue
            with open(Path(folder) / f"{PARTS[which]}{suffix}", "r+b") as target:
                target.seek(placement.offsets[which] * item)
                for start, stop in _runs(chosen):
                    first = int(stops[start - 1]) if start else 0
                    target.write(source[first * item : int(stops[stop - 1]) * item].data)
    tick(int(stops[-1]))
    return int(stops[-1])


def _runs(chosen: np.ndarray) -> Iterator[tuple[int, int]]:
    """[start, stop) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def write_indexes(folder: Path, layout: Layout, dtype: np.dtype) -> None:
    """train.idx and validation.idx, streamed from the shards."""
    for which, name in enumerate(PARTS):
        totals = layout.totals[which]
        if totals.documents:
            chunks = _chunks(layout, which)
            write_index(
                folder / f"{name}.idx",
                dtype,
                totals.sequences,
                totals.documents + 1,
                lambda chunks=chunks: (sizes for sizes, _ in chunks()),  # type: ignore[misc]
                _bounds(chunks),
            )


def _chunks(layout: Layout, which: int) -> Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]:
    def chunks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for placement in layout.placements:
            with np.load(f"{placement.shard}.npz", allow_pickle=False) as file:
                sizes, ends = file["sizes"], file["ends"]
            if len(sizes):
                held = _held_out(placement, ends, layout.split)
                chosen = held if which else ~held
                yield sizes[chosen], ends[chosen]

    return chunks


def _bounds(chunks: Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]) -> Iterator[np.ndarray]:
    yield np.zeros(1, dtype=np.int64)
    before = 0
    for sizes, ends in chunks():
        yield np.flatnonzero(ends) + 1 + before
        before += len(sizes)
