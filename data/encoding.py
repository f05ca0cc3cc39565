"""One unit of work: documents to a shard of tokens, written complete or not at all.

A shard is `KEY.tokens` (ids, end-of-document tokens in place), `KEY.mask` for fine-tuning data, and `KEY.npz` with the
sizes; the last is renamed into place when all is there. KEY is a digest of all that the shard depends on, so a second
start finds what is done and never takes other work for it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data.documents import LOOK_AHEAD, PART, Keys, Part, Unit, read_segment
from data.errors import writing
from data.indexed import token_dtype
from data.tokenizer import load_tokenizer

LONGEST_TEXT = (
    PART + LOOK_AHEAD
)  # characters encoded in one call: byte-pair encoding needs some 100 bytes of memory for each
BATCH_CHARACTERS = 1 << 18

Tick = Callable[[int], None]
"""Called now and then with the bytes of input done since the last call."""


@dataclass(frozen=True)
class Job:
    """What every process must know to work on a unit."""

    folder: str
    """Where shards are written."""
    tokenizer: str
    """Path of the tokenizer."""
    tokenizer_digest: str
    keys: Keys

    def shard(self, unit: Unit) -> Path:
        """Path of the unit's shard, without its suffix."""
        described = repr((unit, self.tokenizer_digest, self.keys, LONGEST_TEXT))
        return Path(self.folder) / hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


@dataclass
class ShardSummary:
    """What the coordinator needs to know of a shard."""

    sequences: int
    documents: int
    """Documents that end in it."""
    empty: int
    """Documents left out because they hold no text."""
    replaced: int
    """Documents (or parts of one) that were not valid UTF-8."""
    digest: str
    """Of the texts."""
    peak_memory: int = 0
    """Most bytes that the process which did it ever held; 0 where it was found done."""


@functools.lru_cache(maxsize=2)
def _tokenizer(path: str) -> Any:
    return load_tokenizer(path)


def encode_unit(job: Job, unit: Unit, tick: Tick) -> ShardSummary:
    """Write the shard of `unit`, or find it written."""
    with writing(job.folder):
        return _encode_unit(job, unit, tick)


def _encode_unit(job: Job, unit: Unit, tick: Tick) -> ShardSummary:
    shard = job.shard(unit)
    done = read_summary(shard)
    if done is not None:
        tick(sum(segment.size for segment in unit))
        return done
    tokenizer = _tokenizer(job.tokenizer)
    has_mask = len(job.keys.names) > 1
    suffixes = ("tokens", "mask", "npz") if has_mask else ("tokens", "npz")
    # A name that ends in .npz is a finished shard's.
    partial = {suffix: f"{shard}.{suffix}.partial-{os.uname().nodename}-{os.getpid()}" for suffix in suffixes}
    with contextlib.ExitStack() as files:
        tokens = files.enter_context(open(partial["tokens"], "wb"))
        mask = files.enter_context(open(partial["mask"], "wb")) if has_mask else None
        writer = _ShardWriter(tokenizer, tokens, mask)
        for segment in unit:
            reported = 0
            for part in read_segment(segment, job.keys):
                if writer.add(part):
                    # Bytes of text stand in for bytes of file; what is compressed runs ahead, and waits at its end.
                    step = min(writer.flush(), segment.size - reported)
                    reported += step
                    tick(step)
            tick(segment.size - reported)
        writer.flush()
        for file in (tokens, mask):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
    summary = writer.summary()
    summary_values = np.array([summary.sequences, summary.documents, summary.empty, summary.replaced], dtype=np.int64)
    with open(partial["npz"], "wb") as file:
        np.savez(
            file,
            summary=summary_values,
            digest=np.frombuffer(bytes.fromhex(summary.digest), dtype=np.uint8),
            sizes=np.array(writer.sizes, dtype=np.int32),
            ends=np.array(writer.ends, dtype=bool),
            text_bytes=np.array(writer.text_bytes, dtype=np.int64),
        )
        file.flush()
        os.fsync(file.fileno())
    for suffix in suffixes:
        os.replace(partial[suffix], f"{shard}.{suffix}")
    summary.peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return summary


def read_summary(shard: Path) -> ShardSummary | None:
    """The summary of a finished shard, or None."""
    try:
        with np.load(f"{shard}.npz", allow_pickle=False) as file:
            sequences, documents, empty, replaced = file["summary"].tolist()
            return ShardSummary(sequences, documents, empty, replaced, file["digest"].tobytes().hex())
    except FileNotFoundError:
        return None


@dataclass
class _ShardWriter:
    tokenizer: Any
    tokens: BinaryIO
    mask: BinaryIO | None
    sizes: list[int] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    text_bytes: list[int] = field(default_factory=list)
    empty: int = 0
    replaced: int = 0
    _waiting: list[Part] = field(default_factory=list)
    _characters: int = 0
    _digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def __post_init__(self) -> None:
        self._dtype = token_dtype(self.tokenizer.vocab_size)
        self._end = np.array([self.tokenizer.end_of_document], dtype=np.int32)

    def add(self, part: Part) -> bool:
        """Take a part; says whether enough wait to be encoded together."""
        self._waiting.append(part)
        self._characters += sum(map(len, part.fields))
        return self._characters >= BATCH_CHARACTERS or len(self._waiting) >= 4096

    def flush(self) -> int:
        """Encode and write what waits; the bytes of its text."""
        pieces = [[list(_pieces(text)) for text in part.fields] for part in self._waiting]
        encoded = iter(self.tokenizer.encode_batch([text for part in pieces for texts in part for text in texts]))
        arrays: list[np.ndarray] = []
        targets: list[np.ndarray] = []
        written = 0
        for part, texts_of_fields in zip(self._waiting, pieces, strict=True):
            size = sum(len(text.encode()) for text in part.fields)
            self.replaced += part.replaced
            if size == 0 and part.begins_document and part.ends_document:
                self.empty += 1
                continue
            own = []
            for place, texts in enumerate(texts_of_fields):
                of_field = [next(encoded) for _ in texts]
                own += of_field
                if self.mask is not None:
                    targets.append(np.full(sum(map(len, of_field)), place > 0, dtype=np.uint8))
            if part.ends_document:
                own.append(self._end)
                if self.mask is not None:
                    targets.append(np.ones(1, dtype=np.uint8))
            tokens = sum(map(len, own))
            if tokens == 0:  # a tokenizer by others may make nothing of a part; the document goes on in the next
                continue
            arrays += own
            self.sizes.append(tokens)
            self.ends.append(part.ends_document)
            self.text_bytes.append(size)
            written += size
            for text in part.fields:
                self._digest.update(text.encode())
            self._digest.update(b"\0" if part.ends_document else b"\1")
        if arrays:
            self.tokens.write(np.concatenate(arrays).astype(self._dtype).data)
        if targets and self.mask is not None:
            self.mask.write(np.concatenate(targets).data)
        self._waiting, self._characters = [], 0
        return written

    def summary(self) -> ShardSummary:
        return ShardSummary(len(self.sizes), sum(self.ends), self.empty, self.replaced, self._digest.hexdigest())


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces that are short enough to encode, cut after a line end or, failing that, before a space."""
    at = 0
    while len(text) - at > LONGEST_TEXT:
        middle, limit = at + LONGEST_TEXT // 2, at + LONGEST_TEXT
        line_end, space = text.rfind("\n", middle, limit), text.rfind(" ", middle, limit)
        cut = line_end + 1 if line_end >= 0 else space if space >= 0 else limit
        yield text[at:cut]
        at = cut
    if len(text) > at:
        yield text[at:]
