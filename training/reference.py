"""The reference of all configuration keys, made from their docstrings: `python -m training.reference` prints it."""

import types
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from training.configuration import RunConfiguration
from training.configuration_checks import DEEPSPEED_ALLOWED, NOT_YET
from training.configuration_file import describe

HEAD = """\
# Configuration

A run is described by one YAML file and, on the command line, by `section.key=value` for what is to differ:

    python launcher/train.py configs/tiny.yaml optimizer.learning_rate=1e-3 parallel.recompute=block

`--show` prints the resolved whole. Unknown keys, keys given twice and values that cannot be are refused in one sentence
before anything is built. Relative paths start at the current folder. YAML is read as version 1.2: `1e-3` is a number.

This page is made from the docstrings of the keys by `make reference`.
"""

_PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path"}


def reference() -> str:
    """The whole page, in Markdown."""
    parts = [HEAD]
    for name, field in RunConfiguration.model_fields.items():
        kind = field.annotation
        parts.append(f"\n## {name}\n\n{_one_line(field.description)}\n")
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            parts.append(_table(kind, name))
        if name == "deepspeed":
            parts.append(_deepspeed())
    return "".join(parts)


def _table(kind: type[BaseModel], section: str) -> str:
    rows, nested = ["\n| key | type | default | meaning |\n|---|---|---|---|\n"], []
    for name, field in kind.model_fields.items():
        meaning = _one_line(field.description)
        if NOT_YET.get(f"{section}.{name}", ()) is None:
            meaning += " Not built yet: only the default is allowed."
        rows.append(f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {meaning} |\n")
        for inner in _sections_in(field.annotation):
            nested.append(f"\n### {section}.{name}\n\n{_one_line(inner.__doc__)}\n{_table(inner, f'{section}.{name}')}")
    return "".join(rows + nested)


def _deepspeed() -> str:
    lines = ["\nPassed on as they are, everything else being refused:\n\n"]
    for key, inner in DEEPSPEED_ALLOWED.items():
        lines.append(f"- `{key}`" + (f": {', '.join(f'`{name}`' for name in sorted(inner))}" if inner else "") + "\n")
    return "".join(lines)


def _default(field: FieldInfo) -> str:
    if "(default" in (field.description or ""):
        return "see right"
    return "must be given" if field.default is PydanticUndefined else f"`{describe(field.default)}`"


def _type(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inner[0])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(part) for part in inner if part is not types.NoneType)
    if origin is tuple:
        return (
            f"list of {_type(inner[0]).removesuffix('s')}s"
            if len(inner) == 2 and inner[1] is ...
            else f"{len(inner)} numbers"
        )
    if origin is dict:
        return "names to text"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{choice.value}`" for choice in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "keys"
    return _PLAIN[annotation]


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in get_args(annotation) for found in _sections_in(inner)]


def _one_line(text: str | None) -> str:
    # A bar would end the cell, an angle bracket begin a tag.
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(reference(), end="")
