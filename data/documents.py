"""Input files to documents, in units of work that can be shared out.

A text file is one document, a line of JSONL or a row of Parquet is one; `.gz` and `.zst` files of text and JSONL are
read as they stream. How the input is cut into units depends on the files alone, never on who does the work:

- a text file is cut into parts of about 1 MiB (at the first line end after each whole MiB), so that one of 10 GB is
  shared out like ten thousand small ones; it stays one document, its parts become that document's sequences;
- JSONL is cut by bytes (a line belongs to the range in which it begins), Parquet by row groups;
- what is compressed cannot be entered in the middle, so each such file is one unit.
"""

from __future__ import annotations

import fnmatch
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.streams import open_stream

PART = 1 << 20
LOOK_AHEAD = 1 << 16  # bytes after a whole MiB in which a line end is looked for
SMALLEST_UNIT, LARGEST_UNIT, UNITS = 1 << 20, 1 << 26, 1024
JSON_LINES = (".jsonl", ".ndjson")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Some programs write it, of UTF-8, at the start of a file; it is no part of the first line's JSON."""


@dataclass(frozen=True)
class Keys:
    """Names of the fields to read: one text, or a prompt and its completion."""

    text: str = "text"
    prompt: str | None = None
    completion: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The fields in the order in which they stand in a document."""
        return (self.prompt, self.completion) if self.prompt and self.completion else (self.text,)


@dataclass(frozen=True)
class Segment:
    """A part of one file."""

    path: str
    identity: str
    """Size and time of the file, so that work on another version of it is never taken for work on this one."""
    kind: str
    """text, jsonl or parquet."""
    compression: str
    """Empty, gz or zst."""
    start: int
    """First byte (text, jsonl) or row group (parquet)."""
    stop: int
    """Byte or row group after the last; for what is compressed, the size of the file."""
    size: int
    """Bytes of the file that this stands for, for progress and sharing."""


@dataclass(frozen=True)
class Part:
    """A document, or a part of a long one."""

    fields: tuple[str, ...]
    """One text, or prompt and completion."""
    begins_document: bool
    ends_document: bool
    replaced: bool
    """Whether bytes that are not UTF-8 (or lone surrogates) were replaced by U+FFFD."""


Unit = tuple[Segment, ...]


def find_files(
    inputs: Sequence[str], include: Sequence[str], exclude: Sequence[str], without: Path | None = None
) -> list[Path]:
    """Files of `inputs` in order, those of a folder sorted by path; patterns match a path below the folder, a name, or
    (to leave a folder out) any folder's name on the way. `without` is a folder never looked into."""
    files: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            for inside in sorted(path.rglob("*")):
                relative = inside.relative_to(path)
                if without is not None and inside.is_relative_to(without):
                    continue
                if _matches(relative, include) and not _matches(relative, exclude) and inside.is_file():
                    files.append(inside)
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"--input {name}: expected a file or a folder, found nothing of this name")
    if not files:
        raise DataError(
            f"--input {' '.join(inputs)}: expected at least one file, found none (see --include, --exclude)"
        )
    return files


def _matches(relative: Path, patterns: Sequence[str]) -> bool:
    names = (str(relative), *relative.parts)
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)


def plan_units(files: Sequence[Path], keys: Keys) -> list[Unit]:
    """The units of work in the order of their documents. Depends on the files' names, sizes and times only."""
    segments = [segment for file in files for segment in _segments(file, keys)]
    target = min(max(sum(segment.size for segment in segments) // UNITS, SMALLEST_UNIT), LARGEST_UNIT)
    units: list[list[Segment]] = [[]]
    filled = 0
    for segment in (piece for whole in segments for piece in _split_lines(whole, target)):
        if units[-1] and filled + segment.size > target:
            units.append([])
            filled = 0
        units[-1].append(segment)
        filled += segment.size
    return [tuple(unit) for unit in units if unit]


def _segments(path: Path, keys: Keys) -> Iterator[Segment]:
    status = path.stat()
    size, identity = status.st_size, f"{status.st_size}:{status.st_mtime_ns}"
    suffixes = path.suffixes
    compression = {".gz": "gz", ".zst": "zst"}.get(path.suffix, "")
    inner = suffixes[-2] if compression and len(suffixes) > 1 else path.suffix
    kind = "jsonl" if inner in JSON_LINES else "parquet" if path.suffix == ".parquet" else "text"
    if kind == "text" and len(keys.names) > 1:
        raise DataError(f"{path}: expected JSONL or Parquet for --prompt-key and --completion-key, found a text file")
    if size == 0:
        return
    if kind == "parquet":
        groups = _open_parquet(path, keys).num_row_groups
        for group in range(groups):
            share = size * (group + 1) // groups - size * group // groups
            yield Segment(str(path), identity, kind, "", group, group + 1, share)
    elif compression or kind == "jsonl":
        yield Segment(str(path), identity, kind, compression, 0, size, size)
    else:
        for start in range(0, size, PART):
            stop = min(start + PART, size)
            yield Segment(str(path), identity, kind, "", start, stop, stop - start)


def _split_lines(segment: Segment, target: int) -> Iterator[Segment]:
    if segment.kind != "jsonl" or segment.compression:
        yield segment
        return
    for start in range(0, segment.stop, target):
        stop = min(start + target, segment.stop)
        yield Segment(segment.path, segment.identity, "jsonl", "", start, stop, stop - start)


def read_segment(segment: Segment, keys: Keys) -> Iterator[Part]:
    """The documents (or parts of one) of a segment. Raises DataError for what is not what its name says."""
    try:
        if segment.kind == "parquet":
            yield from _read_parquet(segment, keys)
        elif segment.kind == "jsonl":
            yield from _read_lines(segment, keys)
        elif segment.compression:
            yield from _read_text_stream(segment)
        else:
            yield _read_text(segment)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{segment.path}: expected a file that can be read to its end, found: {error}") from error


def _decode(raw: bytes) -> tuple[str, bool]:
    try:
        return raw.decode("utf-8"), False
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace"), True


def _cut(window: bytes) -> int:
    """Where to cut, given the bytes from a whole MiB on: after the first line end, else at the first character."""
    line_end = window.find(b"\n", 0, LOOK_AHEAD)
    if line_end >= 0:
        return line_end + 1
    return next((index for index, byte in enumerate(window[:8]) if byte & 0xC0 != 0x80), 0)


def _read_text(segment: Segment) -> Part:
    with open(segment.path, "rb") as file:
        size = int(segment.identity.split(":")[0])

        def bound(nominal: int) -> int:
            if nominal == 0 or nominal >= size:
                return min(nominal, size)
            file.seek(nominal)
            return nominal + _cut(file.read(LOOK_AHEAD))

        start, stop = bound(segment.start), bound(segment.stop)
        file.seek(start)
        text, replaced = _decode(file.read(stop - start))
    return Part((text,), segment.start == 0, segment.stop >= size, replaced)


def _read_text_stream(segment: Segment) -> Iterator[Part]:
    """The same parts as of the uncompressed file, read in one pass."""
    with open_stream(segment.path, segment.compression) as stream:
        buffer, begun, is_last = b"", 0, False  # `begun` bytes of the text come before the buffer
        nominal = PART
        while not is_last:
            while not is_last and begun + len(buffer) <= nominal + LOOK_AHEAD:
                more = stream.read(PART)
                is_last = not more
                buffer += more
            while begun + len(buffer) > nominal and (is_last or begun + len(buffer) > nominal + LOOK_AHEAD):
                at = nominal - begun
                cut = at + _cut(buffer[at : at + LOOK_AHEAD]) if at >= 0 else 0
                text, replaced = _decode(buffer[:cut])
                yield Part((text,), begun == 0, False, replaced)
                buffer, begun, nominal = buffer[cut:], begun + cut, nominal + PART
        text, replaced = _decode(buffer)
        yield Part((text,), begun == 0, True, replaced)


def _read_lines(segment: Segment, keys: Keys) -> Iterator[Part]:
    with open_stream(segment.path, segment.compression) as stream:
        at = segment.start
        if at > 0:  # the line that runs over our first byte belongs to the range before
            stream.seek(at - 1)
            at += len(stream.readline()) - 1
        stop = segment.stop if not segment.compression else None
        number = 0
        while stop is None or at < stop:
            line = stream.readline()
            if not line:
                break
            number += 1
            content = line.removeprefix(BYTE_ORDER_MARK) if at == 0 else line
            if content.strip():
                text, replaced = _decode(content)
                yield _part(_record(text, segment, at, number), keys, replaced, segment, at, number)
            at += len(line)


def _record(line: str, segment: Segment, at: int, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{_place(segment, at, number)}: expected a JSON object, found: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{_place(segment, at, number)}: expected a JSON object, found {type(record).__name__}")
    return record


def _part(record: dict[str, Any], keys: Keys, replaced: bool, segment: Segment, at: int, number: int) -> Part:
    fields = []
    for name in keys.names:
        if name not in record:
            there = ", ".join(map(str, record)) or "none"
            raise DataError(f"{_place(segment, at, number)}: expected the key {name!r}, found the keys: {there}")
        text = record[name]
        if not isinstance(text, str):
            raise DataError(
                f"{_place(segment, at, number)}: expected a text under {name!r}, found {type(text).__name__}"
            )
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell and UTF-8 cannot
            text, replaced = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True
        fields.append(text)
    return Part(tuple(fields), True, True, replaced)


def _place(segment: Segment, at: int, number: int) -> str:
    """`FILE line N`, counted only now that it is needed."""
    if segment.kind == "parquet":
        return f"{segment.path} row {number} of row group {segment.start}"
    if segment.start > 0:
        with open(segment.path, "rb") as file:
            left, number = at, 1
            while left > 0:
                block = file.read(min(left, 1 << 24))
                number += block.count(b"\n")
                left -= len(block)
    return f"{segment.path} line {number}"


def _open_parquet(path: Path | str, keys: Keys) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: expected the package pyarrow to read Parquet, found none installed") from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: expected a Parquet file, found: {error}") from error
    there = file.schema_arrow.names
    for name in keys.names:
        if name not in there:
            raise DataError(f"{path}: expected the column {name!r}, found the columns: {', '.join(there)}")
    return file


def _read_parquet(segment: Segment, keys: Keys) -> Iterator[Part]:
    file = _open_parquet(segment.path, keys)
    number = 0
    groups = list(range(segment.start, segment.stop))
    for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=list(keys.names), use_threads=False):
        for record in batch.to_pylist():
            number += 1
            yield _part(record, keys, False, segment, 0, number)
