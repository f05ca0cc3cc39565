"""The pairwise selection of all combinations: each agrees with one process. `make parity-full` runs every one."""

import random
from dataclasses import replace
from itertools import product

import pytest

from tests.parity import matrix
from tests.parity.cases import Case
from tests.parity.harness import Harness

FEWER_STEPS = 5


@pytest.mark.parametrize("case", matrix.pairwise().cases, ids=lambda case: case.name)
def test_a_cell_agrees_with_one_process(harness: Harness, case: Case) -> None:
    if case.world == 8 and case.micro_batches == 8:
        # Half a minute each on two cores, most of it in messages. `make parity` takes all 20 steps.
        case = replace(case, overrides=(*case.overrides, f"training.steps={FEWER_STEPS}"))
    verdict = harness.judge(case)
    assert verdict.sound, verdict


def test_every_pair_of_choices_that_can_be_is_in_the_selection() -> None:
    def pairs(case: Case) -> set[tuple]:
        chosen = {"layout": (case.pipeline, case.tensor, case.data)}
        chosen |= {name: getattr(case, name) for name in matrix.FACTORS if name != "layout"}
        return set(matrix._pairs(tuple(chosen[name] for name in matrix.FACTORS)))

    selected = set().union(*map(pairs, matrix.pairwise().cases))
    possible = set().union(*map(pairs, matrix.everything()))
    assert selected == possible and len(possible) == matrix.pairwise().pairs


def test_what_the_validator_does_not_look_at_never_excludes_a_cell() -> None:
    draw = random.Random(0)
    for values in draw.sample(list(product(*matrix.FACTORS.values())), 300):
        neutral = matrix.case_of(matrix._neutral(values))
        assert (matrix.refusal(matrix.case_of(values)) is None) == (matrix.refusal(neutral) is None)


def test_cells_and_excluded_cells_are_all_there_is() -> None:
    free = 1
    for name in matrix.FREE:
        free *= len(matrix.FACTORS[name])
    refused = sum(len(cases) for cases in matrix.excluded().values())
    everything = len(list(product(*matrix.FACTORS.values())))
    assert len(matrix.cells()) + refused * free == everything
