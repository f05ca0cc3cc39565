"""Input files to documents: every format gives the same documents, however the work is cut."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import data.documents
from data.documents import Keys, Part, find_files, plan_units, read_segment
from data.errors import DataError

TEXT = Keys()


def parts_of(paths: Sequence[Path], keys: Keys = TEXT) -> list[list[Part]]:
    """The parts of each unit, in order."""
    return [[part for segment in unit for part in read_segment(segment, keys)] for unit in plan_units(paths, keys)]


def documents_of(paths: Sequence[Path], keys: Keys = TEXT) -> list[tuple[str, ...]]:
    """Whole documents, put together from their parts."""
    documents: list[tuple[str, ...]] = []
    is_open = False
    for part in (part for unit in parts_of(paths, keys) for part in unit):
        assert part.begins_document != is_open
        if is_open:
            documents[-1] = (documents[-1][0] + part.fields[0],)
        else:
            documents.append(part.fields)
        is_open = not part.ends_document
    assert not is_open
    return documents


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 1000 bytes, cut within the next 200: what is true of them is true of parts of a MiB."""
    monkeypatch.setattr(data.documents, "PART", 1000)
    monkeypatch.setattr(data.documents, "LOOK_AHEAD", 200)
    monkeypatch.setattr(data.documents, "SMALLEST_UNIT", 1000)


LONG = {
    "lines": "a line of some words\n" * 500,
    "no line ends": "abcdefghij" * 900,
    "wide characters": "漢字😀é" * 800,
    "line ends at whole parts": ("x" * 999 + "\n") * 5,
    "one byte": "a",
    "one part": "b" * 1000,
    "ends in a line end": "word\n" * 200,
    "last line runs into the next part": "y" * 950 + "\n" + "z" * 60 + "\n",
}


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("text", LONG.values(), ids=LONG.keys())
def test_a_long_text_is_one_document_in_parts(tmp_path: Path, text: str) -> None:
    path = tmp_path / "long.txt"
    path.write_text(text, encoding="utf-8")
    assert documents_of([path]) == [(text,)]
    parts = [part for unit in parts_of([path]) for part in unit]
    assert all(len(part.fields[0].encode()) <= 1200 for part in parts)
    assert not any(part.replaced for part in parts), "no character is cut in two"


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("text", LONG.values(), ids=LONG.keys())
@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_compressed_text_gives_the_same_parts(tmp_path: Path, text: str, kind: str) -> None:
    plain, packed = tmp_path / "long.txt", tmp_path / f"long.txt.{kind}"
    plain.write_text(text, encoding="utf-8")
    packed.write_bytes(compress(text.encode(), kind))
    assert [part for unit in parts_of([packed]) for part in unit] == [
        part for unit in parts_of([plain]) for part in unit
    ]


def compress(content: bytes, kind: str) -> bytes:
    if kind == "gz":
        return gzip.compress(content)
    import zstandard

    return zstandard.compress(content[: len(content) // 2]) + zstandard.compress(content[len(content) // 2 :])


RECORDS = [
    {"text": f"document {number}\nwith lines\u2028and 漢字 " + "x" * (number * 7 % 400), "id": number}
    for number in range(60)
]


@pytest.fixture
def json_lines(tmp_path: Path) -> Path:
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS), encoding="utf-8")
    return path


@pytest.mark.parametrize("size", [1, 37, 1000, 10**6])
def test_a_line_belongs_to_one_range(json_lines: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(data.documents, "SMALLEST_UNIT", size)
    monkeypatch.setattr(data.documents, "LARGEST_UNIT", size)
    assert documents_of([json_lines]) == [(record["text"],) for record in RECORDS]


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_lines(json_lines: Path, tmp_path: Path, kind: str) -> None:
    packed = tmp_path / f"packed.jsonl.{kind}"
    packed.write_bytes(compress(json_lines.read_bytes(), kind))
    assert documents_of([packed]) == documents_of([json_lines])


def test_parquet_rows(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "set.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path, row_group_size=7)
    assert documents_of([path]) == [(record["text"],) for record in RECORDS]
    with pytest.raises(DataError, match=r"set\.parquet: expected the column 'body', found the columns: text, id"):
        documents_of([path], Keys("body"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"set\.parquet: expected a Parquet file"):
        documents_of([path])


def test_last_line_needs_no_line_end_and_blank_lines_are_none(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(b'{"text": "a"}\r\n\n  \n{"text": "b"}')
    assert documents_of([path]) == [("a",), ("b",)]


@pytest.mark.parametrize("kind", ["", "gz", "zst"])
@pytest.mark.parametrize("size", [1, 10**6])
def test_a_byte_order_mark_is_no_part_of_the_first_line(
    json_lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, size: int
) -> None:
    monkeypatch.setattr(data.documents, "SMALLEST_UNIT", size)
    monkeypatch.setattr(data.documents, "LARGEST_UNIT", size)
    marked = tmp_path / f"marked.jsonl{'.' if kind else ''}{kind}"
    content = b"\xef\xbb\xbf" + json_lines.read_bytes()
    marked.write_bytes(compress(content, kind) if kind else content)
    assert documents_of([marked]) == [(record["text"],) for record in RECORDS]


@pytest.mark.parametrize(
    ("content", "documents"),
    [
        (b"\xef\xbb\xbf", []),
        (b'\xef\xbb\xbf\n{"text": "a"}', [("a",)]),
        (b'{"text": "\xef\xbb\xbfa"}', [("\ufeffa",)]),
    ],
)
def test_a_byte_order_mark_alone_is_no_line(tmp_path: Path, content: bytes, documents: list[tuple[str, ...]]) -> None:
    (tmp_path / "set.jsonl").write_bytes(content)
    assert documents_of([tmp_path / "set.jsonl"]) == documents


def test_half_a_surrogate_pair_is_replaced_and_told(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"text": "x\\ud800y"}\n{"text": "\\ud83d\\ude00"}\n')
    (parts,) = parts_of([path])
    assert [(part.fields[0], part.replaced) for part in parts] == [("x\ufffdy", True), ("😀", False)]


def test_bytes_that_are_not_utf8_are_replaced_and_told(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("caf\u00e9".encode("latin-1"))
    (parts,) = parts_of([path])
    assert (parts[0].fields[0], parts[0].replaced) == ("caf\ufffd", True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', "expected a JSON object"),
        ("[1, 2]", "found list"),
        ('{"body": "x"}', "expected the key 'text', found the keys: body"),
        ('{"text": null}', "expected a text under 'text', found NoneType"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str) -> None:
    monkeypatch.setattr(data.documents, "SMALLEST_UNIT", 50)
    monkeypatch.setattr(data.documents, "LARGEST_UNIT", 50)
    path = tmp_path / "set.jsonl"
    path.write_text('{"text": "sound"}\n' * 41 + line + "\n" + '{"text": "sound"}\n' * 5)
    with pytest.raises(DataError, match=message) as caught:
        documents_of([path])
    assert "set.jsonl line 42" in str(caught.value)


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("left", [0.3, 0.5, 0.9, -4])
def test_a_cut_archive_is_named(tmp_path: Path, kind: str, left: float) -> None:
    """Of a text that is cut, what there is would pass for all of it."""
    packed = tmp_path / f"cut.txt.{kind}"
    content = compress(bytes(np.random.default_rng(0).integers(32, 127, 30_000, dtype=np.uint8)), kind)
    packed.write_bytes(content[: int(left * len(content))] if left > 0 else content[: int(left)])
    with pytest.raises(DataError, match=rf"cut\.txt\.{kind}: expected a file that can be read to its end"):
        documents_of([packed])


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_what_is_no_archive_is_named(tmp_path: Path, kind: str) -> None:
    packed = tmp_path / f"plain.txt.{kind}"
    packed.write_text("this is not compressed")
    with pytest.raises(DataError, match=rf"plain\.txt\.{kind}"):
        documents_of([packed])


def test_prompts_and_completions_need_records(tmp_path: Path) -> None:
    path = tmp_path / "set.txt"
    path.write_text("words")
    with pytest.raises(DataError, match=r"set\.txt: expected JSONL or Parquet"):
        plan_units([path], Keys(prompt="q", completion="a"))


def test_folders_are_read_sorted_with_patterns(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "c.txt", "test/x.py", "deep/test/y.py", "deep/z.py", "work.partial/old.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")

    def found(include: Sequence[str] = ("*",), exclude: Sequence[str] = ()) -> list[str]:
        files = find_files([str(tmp_path)], include, exclude, without=tmp_path / "work.partial")
        return [str(path.relative_to(tmp_path)) for path in files]

    assert found() == ["a.py", "b.py", "c.txt", "deep/test/y.py", "deep/z.py", "test/x.py"]
    assert found(["*.py"], ["test"]) == ["a.py", "b.py", "deep/z.py"]
    assert found(["*.py"], ["deep/*"]) == ["a.py", "b.py", "test/x.py"]
    with pytest.raises(DataError, match="found none"):
        found(["*.rs"])


def test_small_files_share_a_unit_and_large_ones_are_cut(tmp_path: Path, text: Callable[..., str]) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(text(number))
    (tmp_path / "large.txt").write_text("a line\n" * 500_000)
    units = plan_units(find_files([str(tmp_path)], ["*"], []), Keys())
    assert len(units[0]) == 20
    assert len(units) == 5
    assert max(sum(segment.size for segment in unit) for unit in units) <= 1 << 20
