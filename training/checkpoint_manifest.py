"""What a checkpoint's manifest.json says, and the check that its pieces make up every tensor exactly once.

A *piece* is a flat range of a *box*; a box is the slice of a global tensor that one tensor-parallel rank holds (the
true vocabulary, without padding rows). Rank files hold pieces; the manifest says which piece lies where. A reader in
another layout needs nothing but these boxes and ranges, so no layout is special and nothing is ever converted.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from training.tensor_file import CheckpointError, digest

FORMAT = 1
MANIFEST = "manifest.json"
KINDS = ("weight", "exp_avg", "exp_avg_sq")
NO_CHECKSUM = "0" * 64

Box = tuple[tuple[int, int], ...]


def box_size(box: Box) -> int:
    """Elements in a box."""
    return math.prod(stop - start for start, stop in box)


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is the whole tensor."""
    return tuple((0, size) for size in shape)


@dataclass(frozen=True)
class Piece:
    """One flat range of one tensor, as a process hands it over to be saved.

    `tensor` is 1-D float32 on any device and stands at `offset` in the flattened `box` of the tensor called `name`,
    whose true shape is `global_shape`. `kind` is weight, exp_avg or exp_avg_sq.
    """

    name: str
    kind: str
    global_shape: tuple[int, ...]
    box: Box
    offset: int
    tensor: Tensor


@dataclass(frozen=True)
class Entry:
    """Where one piece lies: `length` elements under the key `tensor` of `file`."""

    name: str
    kind: str
    global_shape: tuple[int, ...]
    box: Box
    offset: int
    length: int
    file: str
    tensor: str

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """From the manifest's JSON; ValueError, KeyError or TypeError where it does not fit."""
        shape = tuple(int(size) for size in value["global_shape"])
        box = tuple((int(start), int(stop)) for start, stop in value["box"])
        entry = cls(**{**value, "global_shape": shape, "box": box})
        if entry.kind not in KINDS:
            raise ValueError(f"kind {entry.kind!r} of {entry.name} is none of {', '.join(KINDS)}")
        return entry


@dataclass(frozen=True)
class RankFile:
    """One rank's file and what is in it; plain values only, to be gathered by the process that publishes."""

    name: str
    size: int
    checksum: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the tensors. Steps, samples and tokens are those done when it was written."""

    run_id: str
    step: int
    attempt: int = 0
    saved_at: float = 0.0
    """When it was published, in seconds since the epoch."""
    samples: int = 0
    """Samples consumed (skipped steps' and passed-over ones included): the number of the next one."""
    tokens: int = 0
    adam_step: int | None = None
    """Adam's own count of updates, less than `step` where steps were skipped; None where there are weights only."""
    best_validation: float | None = None
    validation: float | dict[str, float] | None = None
    """The newest validation loss, or one for each validation set."""
    layout: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    """The model's configuration as JSON, `vocab_size` the true one."""
    tokenizer: dict[str, str] | None = None
    """`path` and `digest` of the tokenizer file (training.loading.tokenizer_identity)."""
    sequence_length: int | None = None
    """Tokens of a training sequence; an export gives it as the longest the model has seen."""
    document_mask: bool | None = None
    """Whether attention kept within documents (`data.document_mask`); None where that is not known."""
    passed_over: list[list[int]] = field(default_factory=list)
    """Ranges [first, end) of sample numbers left out after a loss spike."""
    counters: dict[str, Any] = field(default_factory=dict)
    """What else the trainer restores: loss scale, skipped steps, ..."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    entries: tuple[Entry, ...] = ()
    format: int = FORMAT

    @property
    def age(self) -> tuple[int, float, int]:
        """Orders the checkpoints of a run from the oldest to the newest.

        Not by step alone: after a fall back to an older checkpoint, in the next attempt or within one (a loss spike),
        higher steps than the newest one's belong to a past that was given up.
        """
        return self.attempt, self.saved_at, self.step

    def with_files(self, rank_files: Iterable[RankFile]) -> "Manifest":
        """The same with these rank files as its content."""
        ordered = sorted(rank_files, key=lambda file: file.name)
        files = {file.name: {"size": file.size, "checksum": file.checksum} for file in ordered}
        if len(files) != len(ordered):
            raise ValueError("two rank files have one name")
        return replace(self, files=files, entries=tuple(entry for file in ordered for entry in file.entries))

    def dumps(self) -> bytes:
        """The JSON text. Its own checksum stands in it, taken over the text with zeros in the checksum's place."""
        values = {"checksum": NO_CHECKSUM, **vars(self)}
        entries = [vars(entry) for entry in values.pop("entries")]
        head = json.dumps(values, indent=1, allow_nan=False)
        lines = ",\n".join("  " + json.dumps(entry, separators=(",", ":")) for entry in entries)
        text = f'{head[:-2]},\n "entries": [\n{lines}\n ]\n}}\n'.encode()
        return text.replace(NO_CHECKSUM.encode(), _checksum(text).encode(), 1)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a manifest.json and checks its own checksum, its format and that the pieces cover every tensor once."""
        try:
            text = path.read_bytes()
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing, so {path.parent} is no complete checkpoint") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        try:
            values = json.loads(text)
            checksum = values.pop("checksum")
            if values["format"] != FORMAT:
                raise CheckpointError(f"{path} has format {values['format']}, this Mainline reads format {FORMAT}")
            if _checksum(text.replace(checksum.encode(), NO_CHECKSUM.encode(), 1)) != checksum:
                raise ValueError("its checksum does not fit its content")
            entries = tuple(Entry.from_json(entry) for entry in values.pop("entries"))
            manifest = cls(**values, entries=entries)
            manifest.check_coverage()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            detail = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(f"{path} is damaged: {detail}") from error
        return manifest

    def check_coverage(self) -> None:
        """ValueError unless the entries lie in files of the manifest and make up each tensor exactly once."""
        tensors: dict[tuple[str, str], list[Entry]] = defaultdict(list)
        for entry in self.entries:
            if entry.file not in self.files:
                raise ValueError(f"{entry.tensor} lies in {entry.file}, which is not among its files")
            tensors[entry.name, entry.kind].append(entry)
        if not tensors:
            raise ValueError("it holds no tensors")
        for entries in tensors.values():
            _check_tensor(entries)
        names = {name for name, _ in tensors}
        for kind in sorted({kind for _, kind in tensors}):
            missing = sorted(name for name in names if (name, kind) not in tensors)
            if missing:
                raise ValueError(f"{missing[0]}/{kind} is missing")
        shapes: dict[str, tuple[int, ...]] = {}
        for (name, _), entries in tensors.items():
            if shapes.setdefault(name, entries[0].global_shape) != entries[0].global_shape:
                raise ValueError(f"{name} has two shapes")


def _checksum(text: bytes) -> str:
    hasher = digest()
    hasher.update(text)
    return hasher.hexdigest()


def _check_tensor(entries: list[Entry]) -> None:
    """ValueError unless boxes tile the global shape, and ranges tile each box, without gap or overlap."""
    label, shape = f"{entries[0].name}/{entries[0].kind}", entries[0].global_shape
    boxes: dict[Box, list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.global_shape != shape:
            raise ValueError(f"{label} has two shapes")
        boxes[entry.box].append(entry)
    for box, pieces in boxes.items():
        if len(box) != len(shape) or not all(0 <= a < b <= n for (a, b), n in zip(box, shape, strict=True)):
            raise ValueError(f"{label} has a slice outside its shape")
        end = 0
        for piece in sorted(pieces, key=lambda piece: piece.offset):
            if piece.offset != end or piece.length < 1:
                raise ValueError(f"{label} has {'a gap' if piece.offset > end else 'an overlap'} at element {end}")
            end += piece.length
        if end != box_size(box):
            raise ValueError(f"{label} has {end} elements where its slice has {box_size(box)}")
    if sum(map(box_size, boxes)) != math.prod(shape) or any(_overlap(a, b) for a, b in combinations(boxes, 2)):
        raise ValueError(f"the slices of {label} do not make up its shape {shape} exactly once")


def _overlap(one: Box, other: Box) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))


def in_model_order(names: Iterable[str]) -> list[str]:
    """Names sorted with numbers as numbers (block 9 before block 10)."""
    return sorted(names, key=lambda name: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", name)])
