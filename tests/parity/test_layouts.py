"""Every layout gives what one process gives: losses, norms, clipping, gradients, weights."""

import pytest

from tests.parity import features
from tests.parity.cases import Case
from tests.parity.compare import PIPELINE_ALONE, difference
from tests.parity.harness import Harness, with_one_stage


@pytest.mark.parametrize("case", features.LAYOUTS, ids=lambda case: case.name)
def test_a_layout_agrees_with_one_process(harness: Harness, case: Case) -> None:
    outcome = harness.run(case)
    verdict = harness.judge_trace(case, outcome.trace)
    assert verdict.sound, verdict
    # The clip is at work in this configuration: a wrong one would show.
    assert min(outcome.trace.coefficients) < 0.99
    # Every rank reports the same metrics, not only the one that writes them.
    for records in outcome.records[1:]:
        for mine, first in zip(records, outcome.records[0], strict=True):
            assert all(mine[key] == first[key] for key in ("step", "loss", "grad_norm", "clip_coefficient", "skipped"))


@pytest.mark.parametrize("case", features.PIPELINES, ids=lambda case: case.name)
def test_a_pipeline_alone_changes_next_to_nothing(harness: Harness, case: Case) -> None:
    cut, whole = harness.run(case).trace, harness.run(with_one_stage(case)).trace
    apart = difference(cut, whole, 1e-3)
    quantities = ("first_loss", "first_norm", "gradients", "loss", "norm", "coefficient")
    assert apart.over(dict.fromkeys(quantities, PIPELINE_ALONE)) == {}
