"""Each fault of the field, planted, makes the comparison fail that passes without it.

Numbers such as A1 are those of the collection of reported faults; `tests.parity.faults` says what each is.
"""

from dataclasses import dataclass

import pytest

from tests.parity.cases import Case, small
from tests.parity.harness import Harness

FEW_STEPS = ("training.steps=3",)
RAGGED = (512, True, False)


@dataclass(frozen=True)
class Fault:
    """A fault, a case that shows it, and the quantities of which at least these must be out of bounds."""

    name: str
    case: Case
    seen_in: tuple[str, ...]


def _case(*layout: int, **keywords: object) -> Case:
    return small(*layout, overrides=FEW_STEPS, **keywords)


FAULTS = [
    Fault("boundary_divides", _case(2, 1, 1, micro_batches=8), ("gradients", "first_norm")),
    Fault("boundary_divides", _case(4, 1, 1, micro_batches=8), ("gradients", "first_norm")),
    Fault("gradients_summed", _case(2, 1, 1), ("gradients", "first_norm")),
    Fault("gradients_summed", _case(1, 1, 2, zero=2), ("gradients", "first_norm")),
    Fault("last_stage_reads_others", _case(2, 1, 1), ("first_loss", "gradients")),
    Fault("replicas_read_the_same", _case(1, 1, 2), ("first_loss", "gradients")),
    Fault("labels_are_inputs", _case(2, 1, 2), ("first_loss", "gradients")),
    Fault("tied_counted_twice", _case(2, 1, 1, tied=True), ("first_norm", "coefficient")),
    Fault("gains_not_summed", _case(1, 2, 1, sequence_parallel=True), ("gradients", "first_norm")),
    Fault("gains_averaged", _case(1, 2, 1, sequence_parallel=True), ("gradients",)),
    Fault("norm_of_own_part", _case(2, 1, 1), ("first_norm", "coefficient")),
    Fault("norm_of_own_part", _case(1, 2, 1), ("first_norm", "coefficient")),
    Fault("replicated_counted_by_all", _case(1, 2, 1), ("first_norm",)),
    Fault("ignored_gives_nan", _case(1, 1, 2, table=RAGGED, micro_batches=8), ("first_loss", "first_norm")),
    Fault("ignored_is_an_index", _case(1, 2, 1, table=RAGGED), ("first_loss", "gradients")),
    Fault("mean_of_means", _case(1, 1, 1, table=RAGGED, micro_batches=8), ("first_loss", "gradients")),
    Fault("mean_of_means", _case(1, 1, 2, table=RAGGED), ("first_loss", "gradients")),
    Fault("loss_of_one_replica", _case(1, 1, 2), ("first_loss",)),
]


@pytest.mark.parametrize("case", dict.fromkeys(fault.case for fault in FAULTS), ids=lambda case: case.name)
def test_without_a_fault_the_case_is_sound(harness: Harness, case: Case) -> None:
    verdict = harness.judge(case)
    assert verdict.sound, verdict


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.name}, {fault.case.name}")
def test_a_planted_fault_is_seen(harness: Harness, fault: Fault) -> None:
    verdict = harness.judge(fault.case, fault.name)
    assert not verdict.sound
    # And it is seen where it is to be seen, by far more than rounding could do.
    for quantity in fault.seen_in:
        assert verdict.times[quantity] > 100, f"{quantity}: {verdict}"
