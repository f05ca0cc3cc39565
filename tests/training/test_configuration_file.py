"""The strict YAML loader and the overrides: what is read, and one sentence for what is not."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from training.configuration_file import (
    ConfigurationError,
    Dumper,
    apply_overrides,
    describe,
    parse,
    read_file,
    read_overrides,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("3E8", 3e8),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("12", 12),
        ("010", 10),
        ("0x10", 16),
        ("0o17", 15),
        ("-7", -7),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("[1, 2.5, a]", [1, 2.5, "a"]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
        ("'1'", "1"),
        # Words and forms that YAML 1.1 takes for truth values, numbers and dates.
        ("on", "on"),
        ("no", "no"),
        ("1f1b", "1f1b"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
    ],
)
def test_values_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    found = parse(text, "x.yaml")
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 1\nb: 2\na: 3", "x.yaml: line 3: the key a is given twice"),
        ("a: {b: 1,\n    b: 2}", "x.yaml: line 2: the key b is given twice"),
        ("1: 2", "x.yaml: line 1: a key is 1, expected text"),
        ("a: b: c", "x.yaml: line 1: mapping values are not allowed here"),
        ("a: 1\n---\nb: 2", "x.yaml: line 2: a second document begins, expected one"),
        ("a: &x [*x]", "x.yaml: line 1: a value contains itself"),
        ("a: 1\nb: " + "9" * 5000, "x.yaml: line 2: a number has 5000 digits, expected at most 100"),
        ("a: [1", "x.yaml: line 1: expected ',' or ']', but got '<stream end>'"),
    ],
)
def test_what_is_not_sound_yaml_is_one_sentence_with_the_line(text: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse(text, "x.yaml")
    assert str(error.value) == sentence


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!!binary", "!!timestamp", "!!set", "!mine"])
def test_tags_construct_nothing(tag: str) -> None:
    with pytest.raises(ConfigurationError, match="tag .* is not allowed"):
        parse(f"a: {tag} 'x'", "x.yaml")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "no such file, expected a configuration in YAML"),
        ("", "is empty, expected sections"),
        ("# only a comment\n", "is empty, expected sections"),
        ("- 1\n- 2\n", "is [1, 2], expected sections"),
        ("word", "is 'word', expected sections"),
        (b"\xff\xfe\x00", "is not text in UTF-8"),
        (b"a: \x00", "unacceptable character"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: str | bytes | None, problem: str) -> None:
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigurationError) as error:
        read_file(path)
    assert str(error.value).startswith(f"{path}: {problem}")
    assert "\n" not in str(error.value)


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: Is a directory"):
        read_file(tmp_path)


def test_overrides_are_read_like_the_file() -> None:
    assert read_overrides(["a.b=1e-3", "a.c=[1, 2]", "d.e=x=y", "f.g=", "h.i={j: true}"]) == {
        "a.b": 0.001,
        "a.c": [1, 2],
        "d.e": "x=y",
        "f.g": None,
        "h.i": {"j": True},
    }


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["a.b"], "command line: found 'a.b', expected section.key=value"),
        (["=1"], "command line: found '=1', expected section.key=value"),
        (["a..b=1"], "command line: found 'a..b=1', expected section.key=value"),
        (["a.b=1", "a.b=2"], "command line: a.b is given twice"),
        (["a.b={c: 1, c: 2}"], "command line: a.b is '{c: 1, c: 2}', which is not YAML: the key c is given twice"),
        (["a.b=[1"], "command line: a.b is '[1', which is not YAML: expected ',' or ']', but got '<stream end>'"),
    ],
)
def test_an_override_that_is_none(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        read_overrides(overrides)
    assert str(error.value) == sentence


def test_overrides_take_their_places() -> None:
    sections: dict[str, Any] = {"a": {"b": 1, "c": 2}, "d": None}
    apply_overrides(sections, {"a.b": 5, "d.e.f": 6, "g.h": 7})
    assert sections == {"a": {"b": 5, "c": 2}, "d": {"e": {"f": 6}}, "g": {"h": 7}}


def test_an_override_has_no_place_inside_a_value() -> None:
    with pytest.raises(ConfigurationError, match="a.b.c has no place, because a.b is 'x'"):
        apply_overrides({"a": {"b": "x"}}, {"a.b.c": 1})


@pytest.mark.parametrize(
    "value", ["1e-3", "1.0e-3", "on", "2024-01-01", "0o7", "true", "", "null", "a: b", "x\ny", "é"]
)
def test_text_that_looks_like_something_else_survives_writing_and_reading(value: str) -> None:
    assert parse(yaml.dump({"a": value}, Dumper=Dumper), "x.yaml") == {"a": value}


def test_values_are_shown_as_yaml_writes_them() -> None:
    values = [True, None, "a", 1e-3, [1, {"b": None}], {"c": 1, "a": 2}]
    assert [describe(value) for value in values] == ["true", "null", "'a'", "0.001", "[1, {b: null}]", "{c: 1, a: 2}"]
    assert len(describe("x" * 100)) == 60
