"""YAML files and `section.key=value` overrides, read into plain dictionaries by one strict loader.

The loader is PyYAML's safe one, made to follow YAML 1.2: `1e-3` is a number, `on` and `no` are text, and there are no
dates, merge keys or binary values. PyYAML takes the last of two equal keys without a word; here that is an error.
"""

import re
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import BaseModel

COMMAND_LINE = "command line"


class ConfigurationError(Exception):
    """One sentence about a mistake that the user can mend: the key or file, the value found, what is allowed."""


class Loader(yaml.SafeLoader):
    """The safe loader with the types of the YAML 1.2 core schema, and no key given twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}


class Dumper(yaml.SafeDumper):
    """Writes what `Loader` reads back; text that either YAML 1.1 or 1.2 would take for a number or a date is quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal values out in full: anchors save no space here and puzzle the reader."""
        return True


_CORE_TYPES = {
    "null": (re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")),
    "int": (re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"), list("-+0123456789")),
    "float": (
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
        ),
        list("-+.0123456789"),
    ),
}


def _construct_null(loader: Loader, node: yaml.Node) -> None:
    return None


def _construct_bool(loader: Loader, node: yaml.ScalarNode) -> bool:
    return loader.construct_scalar(node).lower() == "true"


LONGEST_NUMBER = 100


def _construct_int(loader: Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    # int(text, 0) refuses "010", which YAML 1.2 reads as ten.
    if len(text) > LONGEST_NUMBER:
        problem = f"a number has {len(text)} digits, expected at most {LONGEST_NUMBER}"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _construct_float(loader: Loader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _construct_text(loader: Loader, node: yaml.ScalarNode) -> str:
    return loader.construct_scalar(node)


def _construct_list(loader: Loader, node: yaml.SequenceNode) -> list[Any]:
    return loader.construct_sequence(node, deep=True)


def _construct_mapping(loader: Loader, node: yaml.MappingNode) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            problem = f"a key is {key!r}, expected text"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        if key in mapping:
            problem = f"the key {key} is given twice"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


def _construct_unknown(loader: Loader, node: yaml.Node) -> None:
    problem = f"the tag {node.tag} is not allowed, only plain values are"
    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


for _name, (_pattern, _first) in _CORE_TYPES.items():
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, _first)
    Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, _first)
_CONSTRUCTORS: dict[str, Callable[[Any, Any], Any]] = {
    "null": _construct_null,
    "bool": _construct_bool,
    "int": _construct_int,
    "float": _construct_float,
    "str": _construct_text,
    "seq": _construct_list,
    "map": _construct_mapping,
}
for _name, _constructor in _CONSTRUCTORS.items():
    Loader.add_constructor(f"tag:yaml.org,2002:{_name}", _constructor)
Loader.add_constructor(None, _construct_unknown)


def parse(text: str, source: str) -> Any:
    """The plain values that `text` stands for. Raises ConfigurationError, one sentence that begins with `source`."""
    try:
        return yaml.load(text, Loader)  # noqa: S506 (Loader is a safe loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        # An override is one line, so its number would say nothing.
        where = f" line {mark.line + 1}:" if mark and source != COMMAND_LINE else ""
        problem = " ".join((error.problem or error.context or "not YAML").split())
        problem = {
            "but found another document": "a second document begins, expected one",
            "found unconstructable recursive node": "a value contains itself",
        }.get(problem, problem)
        raise ConfigurationError(f"{source}:{where} {problem}") from None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise ConfigurationError(f"{source}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigurationError(f"{source}: nested too deeply, or a value that contains itself") from None


def read_file(path: Path) -> dict[str, Any]:
    """The sections of a YAML file, as written. Raises ConfigurationError if there is no such thing in `path`."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: no such file, expected a configuration in YAML") from None
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: is not text in UTF-8, expected a configuration in YAML") from None
    content = parse(text, str(path))
    if content is None:
        raise ConfigurationError(f"{path}: is empty, expected sections such as model and data")
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: is {describe(content)}, expected sections such as model and data")
    return content


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Dotted key to value, as `section.key=value` arguments say, in their order. Raises ConfigurationError."""
    values: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not re.fullmatch(r"[^.\s]+(\.[^.\s]+)*", key):
            raise ConfigurationError(f"{COMMAND_LINE}: found {override!r}, expected section.key=value")
        if key in values:
            raise ConfigurationError(f"{COMMAND_LINE}: {key} is given twice")
        try:
            values[key] = parse(text, COMMAND_LINE)
        except ConfigurationError as error:
            problem = str(error).removeprefix(f"{COMMAND_LINE}: ")
            raise ConfigurationError(f"{COMMAND_LINE}: {key} is {text!r}, which is not YAML: {problem}") from None
    return values


def apply_overrides(sections: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Put each override's value in its place in `sections`.

    Raises ConfigurationError where that place would be inside a value.
    """
    for dotted, value in overrides.items():
        *parents, last = dotted.split(".")
        place = sections
        for depth, part in enumerate(parents):
            inner = place.get(part)
            if inner is None:
                inner = place[part] = {}
            if not isinstance(inner, dict):
                outer = ".".join(parents[: depth + 1])
                raise ConfigurationError(f"{COMMAND_LINE}: {dotted} has no place, because {outer} is {describe(inner)}")
            place = inner
        place[last] = value


def describe(value: Any) -> str:
    """A value as an error shows it: text in quotes, the rest as YAML writes it, in at most 60 characters."""
    if isinstance(value, Enum):
        shown = str(value)
    elif isinstance(value, str):
        shown = repr(value)
    elif value is None:
        shown = "null"
    elif isinstance(value, bool):
        shown = str(value).lower()
    elif isinstance(value, float):
        shown = repr(value)
    elif isinstance(value, dict | list | tuple | BaseModel):
        shown = yaml.dump(_plain(value), Dumper=Dumper, default_flow_style=True, sort_keys=False, width=10**6).strip()
    else:
        shown = str(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
