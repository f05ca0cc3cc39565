"""Pydantic's findings about a configuration, turned into sentences a user can act on."""

import difflib
import re
from collections.abc import Sequence
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from training.configuration_checks import NOT_YET, OUT_OF_SCOPE
from training.configuration_file import describe

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text (in quotes, if it looks like a number)",
    "path_type": "text (in quotes, if it looks like a number)",
    "string_too_short": "text that is not empty",
    "string_pattern_mismatch": "letters, digits, '.', '_' and '-' only",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "keys with values",
    "model_type": "keys with values",
    "model_attributes_type": "keys with values",
}
_BOUNDS = {
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "too_long": "{max_length} values",
    "too_short": "at least {min_length} values",
}


_OTHER_NAMES = {
    "lr": "optimizer.learning_rate",
    "pp": "parallel.pipeline",
    "tp": "parallel.tensor",
    "dp": "parallel.data",
    "batch_size": "batch.global_batch_size",
    "gradient_accumulation_steps": "batch.global_batch_size",
    "seq_len": "batch.sequence_length",
    "seq_length": "batch.sequence_length",
    "max_steps": "training.steps",
    "train_iters": "training.steps",
}
"""Names from other trainers that are not similar to ours."""


def known_keys(kind: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a configuration class, sections included, in order."""
    keys = []
    for name, field in kind.model_fields.items():
        keys.append(prefix + name)
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                keys += known_keys(inner, f"{prefix}{name}.")
    return keys


def nearest_key(unknown: str, known: Sequence[str]) -> str:
    """The known dotted key that `unknown` was most likely meant to be.

    A key of that very name in another section comes first (learning_rate under training is optimizer.learning_rate),
    then the most similar one beside it, then the most similar of all.
    """
    parent, _, last = unknown.rpartition(".")
    if last in _OTHER_NAMES:
        return _OTHER_NAMES[last]
    for key in known:
        if "." in key and key.rpartition(".")[2] == last:
            return key
    beside = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    everywhere = {key.rpartition(".")[2]: key for key in reversed(known)}
    for names, least in ((beside, 0.5), (everywhere, 0.7), (beside or everywhere, 0.0)):
        if close := difflib.get_close_matches(last, names, n=1, cutoff=least):
            return names[close[0]]
    raise AssertionError("a configuration has keys")


def as_sentences(error: ValidationError, kind: type[BaseModel]) -> str:
    """What is wrong, without a line break; several findings are separated by semicolons."""
    known = known_keys(kind)
    sentences: list[str] = []
    for details in error.errors(include_url=False):
        # A default that depends on a wrong key says nothing that the wrong key does not.
        if details["type"] != "default_factory_not_called":
            sentence = _sentence(details, known)
            if sentence not in sentences:
                sentences.append(sentence)
    return "; ".join(sentences)


def _sentence(details: ErrorDetails, known: Sequence[str]) -> str:
    kind, context = details["type"], details.get("ctx", {})
    key = _dotted(details["loc"])
    if kind == "extra_forbidden":
        if feature := OUT_OF_SCOPE.get(key):
            return f"{key} is {describe(details['input'])}, but {feature} is out of scope and not supported"
        return f"unknown key {key}, the nearest known one is {nearest_key(key, known)}"
    if kind == "missing":
        return f"{key} is missing and must be given"
    if kind == "value_error":
        problem = str(context["error"])
        if problem.startswith("expected "):
            return f"{key} is {describe(details['input'])}, {problem}"
        return f"{key}.{problem}" if key else problem
    if kind in ("enum", "literal_error"):
        choices, why = str(context["expected"]).replace("'", "").replace(" or ", ", "), ""
        if details["input"] in (NOT_YET.get(key) or ()):
            why = ", which is not built yet"
        elif key == "precision.dtype" and re.search(r"f(p|loat)_?8", str(details["input"]).lower()):
            why = ", but FP8 is out of scope and not supported"
        return f"{key} is {describe(details['input'])}{why}, expected one of {choices}"
    expected = _BOUNDS[kind].format_map(context) if kind in _BOUNDS else _EXPECTED.get(kind, details["msg"])
    return f"{key} is {describe(details['input'])}, expected {expected}"


def _dotted(location: Sequence[int | str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")
