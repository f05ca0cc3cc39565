"""All combinations of layout, schedule, recomputation, model and engine; which are refused; a pairwise selection.

A cell is a `Case`. The product's own validator says which cells there are: a cell is excluded if and only if the
configuration is refused, and the reason that is listed is its sentence. From the cells that are left, `pairwise` picks
a few so that any two choices that occur together in some cell occur together in a picked one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any

from tests.parity.cases import Case, small
from training.configuration import ConfigurationError

WORLDS = (1, 2, 4, 8)
LAYOUTS = [
    (pipeline, tensor, world // pipeline // tensor)
    for world in WORLDS
    for pipeline in WORLDS
    for tensor in WORLDS
    if world % (pipeline * tensor) == 0
]

FACTORS: dict[str, Sequence[Any]] = {
    "layout": LAYOUTS,
    "schedule": ("1f1b", "dualpipev"),
    "recompute": ("none", "sublayer", "block"),
    "tied": (False, True),
    "activation": ("gelu", "swiglu"),
    "sequence_parallel": (False, True),
    "micro_batches": (1, 2, 8),
    "zero": (1, 0, 2, 3),
}
"""Each choice with its values; `zero` 1 is the pipeline engine, 0, 2 and 3 are the plain one."""

FREE = ("recompute", "tied", "activation")
"""Choices that the validator has nothing to say about; a test tries all of them."""

Values = tuple[Any, ...]


def case_of(values: Values) -> Case:
    """The case that these values, in the order of FACTORS, stand for."""
    chosen = dict(zip(FACTORS, values, strict=True))
    pipeline, tensor, data = chosen.pop("layout")
    # More chunks than the model has blocks are for the validator to refuse.
    chunks = pipeline * (2 if chosen["schedule"] == "dualpipev" else 1)
    return (Case if chunks > 8 else small)(pipeline, tensor, data, **chosen)


@cache
def refusal(case: Case) -> str | None:
    """The validator's sentence, or None where the case is one that runs."""
    try:
        case.configuration()
    except ConfigurationError as error:
        return str(error).removeprefix("command line: ").removeprefix("configs/parity.yaml: ")
    return None


def _neutral(values: Values) -> Values:
    return tuple(FACTORS[name][0] if name in FREE else value for name, value in zip(FACTORS, values, strict=True))


@cache
def cells() -> list[Values]:
    """All combinations that run."""
    return [values for values in product(*FACTORS.values()) if refusal(case_of(_neutral(values))) is None]


def excluded() -> dict[str, list[Case]]:
    """Sentence to the cells that it excludes, over the choices that the validator looks at."""
    found: dict[str, list[Case]] = {}
    for values in product(*(FACTORS[name][:1] if name in FREE else FACTORS[name] for name in FACTORS)):
        sentence = refusal(case_of(values))
        if sentence is not None:
            found.setdefault(sentence, []).append(case_of(values))
    return found


def _pairs(values: Values) -> Iterator[tuple[int, Any, int, Any]]:
    for (i, a), (j, b) in combinations(enumerate(values), 2):
        yield i, a, j, b


@dataclass(frozen=True)
class Selection:
    """A pairwise covering set."""

    cases: list[Case]
    pairs: int
    """Pairs of choices that occur together in some cell; each occurs in one of the cases."""


@cache
def pairwise() -> Selection:
    """Greedy: of all cells take the one with most pairs not yet seen, among equals the one with fewest processes.

    The same on every machine: cells are in a fixed order, and the first of the best is taken.
    """
    candidates = cells()
    pairs_of = [frozenset(_pairs(values)) for values in candidates]
    cost = [case_of(values).world for values in candidates]
    missing = set().union(*pairs_of)
    total = len(missing)
    chosen: list[Case] = []
    gains = [len(pairs) for pairs in pairs_of]
    while missing:
        # Gains only shrink, so an old gain is an upper bound: look again only where it could still be the best.
        best, best_key = -1, (0, 0)
        for index, bound in enumerate(gains):
            if bound < best_key[0] or bound == 0:
                continue
            gains[index] = len(pairs_of[index] & missing)
            key = (gains[index], -cost[index])
            if key > best_key:
                best, best_key = index, key
        missing -= pairs_of[best]
        chosen.append(case_of(candidates[best]))
    return Selection(sorted(chosen, key=lambda case: (case.world, case.pipeline, case.tensor)), total)


def everything() -> list[Case]:
    """Every cell, for `make parity-full`."""
    return [case_of(values) for values in cells()]
