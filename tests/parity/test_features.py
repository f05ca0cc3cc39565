"""Features of the model, number formats and odd sizes, each against the oracle's own use of the same."""

from dataclasses import replace

import pytest
import torch

from tests.parity import features
from tests.parity.cases import Case, small
from tests.parity.harness import Harness


@pytest.mark.parametrize("case", features.FEATURES, ids=lambda case: case.name)
def test_a_feature_agrees_with_one_process(harness: Harness, case: Case) -> None:
    verdict = harness.judge(case)
    assert verdict.sound, verdict


@pytest.mark.parametrize("case", features.BF16, ids=lambda case: case.name)
def test_bf16_differs_by_no_more_than_the_order_of_summation(harness: Harness, case: Case) -> None:
    apart = harness.apart(case, harness.run(case).trace)
    assert apart.over(harness.bounds(case)) == {}


@pytest.mark.parametrize(
    "case", [small(1, 1, 1, dtype="bf16"), small(2, 1, 1, dtype="bf16")], ids=lambda case: case.name
)
def test_bf16_gradients_are_accumulated_and_averaged_in_fp32(harness: Harness, case: Case) -> None:
    # With the same micro-batches there is nothing that could round otherwise: gradients are equal bit for bit.
    found, expected = harness.run(case).trace, harness.oracle(case, "bf16", 8)
    assert all(torch.equal(found.gradients[name], gradient) for name, gradient in expected.gradients.items())


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_a3_the_gradient_in_bf16_is_the_mean_over_replicas(harness: Harness, data: int, micro_batches: int) -> None:
    case = small(1, 1, data, dtype="bf16", micro_batches=micro_batches, overrides=("training.steps=5",))
    assert harness.apart(case, harness.run(case).trace).over(harness.bounds(case)) == {}


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_a3_with_the_last_micro_batch_added_late_it_is_not(harness: Harness, micro_batches: int) -> None:
    case = small(1, 1, 2, dtype="bf16", micro_batches=micro_batches, overrides=("training.steps=5",))
    apart = harness.apart(case, harness.run(case, "last_micro_batch_after_reduce").trace)
    assert {"gradients", "norm"} <= set(apart.over(harness.bounds(case)))


@pytest.mark.parametrize("case", features.FP16, ids=lambda case: case.name)
def test_fp16_with_a_loss_scale_is_as_close_to_fp32_as_one_process(harness: Harness, case: Case) -> None:
    outcome = harness.run(case, "fp16_allowed")
    assert not any(record["skipped"] for record in outcome.records[0])
    assert harness.apart(case, outcome.trace).over(harness.bounds(case)) == {}


@pytest.mark.parametrize("case", [Case(2, 1, 1), Case(1, 1, 2), Case(1, 1, 2, zero=3)], ids=lambda case: case.name)
def test_fp16_skips_and_lowers_a_scale_that_is_too_high(harness: Harness, case: Case) -> None:
    scale = "deepspeed.fp16={initial_scale_power: 26, hysteresis: 1}"
    case = replace(case, dtype="fp16", overrides=("model.num_layers=2", scale))
    outcome = harness.run(case, "fp16_allowed")
    for records in outcome.records:
        skipped = [record["skipped"] for record in records]
        count = skipped.index(False)
        # At the beginning, on all ranks, with weights as they were; then training begins, at the edge of the range.
        assert 1 <= count <= 9 and sum(skipped[count:]) <= 2
        assert [record["loss"] for record in records[:count]] == pytest.approx(
            _initial_losses(harness, case, count), rel=1e-5
        )
        assert records[-1]["loss"] < records[0]["loss"] - 0.3


def _initial_losses(harness: Harness, case: Case, count: int) -> list[float]:
    """Losses of the first steps' samples with the initial weights: the oracle at a learning rate of 0."""
    return harness.oracle(replace(case, overrides=(*case.overrides, "optimizer.learning_rate=0.0"))).losses[:count]
