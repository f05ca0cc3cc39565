"""Section B of the reported faults, and A3, A20 and B13's skip: norms, clipping, losses, what is not finite."""

from dataclasses import replace

import pytest
import torch

from model.rotary import rotary_tables
from tests.parity.cases import Case, small
from tests.parity.compare import FIRST_STEP
from tests.parity.harness import Harness
from tests.parity.test_field_pipeline import experiment

EVERYWHERE = [
    small(2, 1, 1, tied=True), small(2, 2, 1), small(2, 1, 2, tied=True), small(1, 1, 2, zero=0),
    small(1, 2, 1, zero=0), small(1, 1, 2, zero=2), small(1, 1, 2, zero=3), small(1, 4, 1),
    small(2, 1, 1, "dualpipev", micro_batches=4),
    small(1, 2, 2, dtype="bf16"), small(2, 1, 1, dtype="bf16"),
]  # fmt: skip


def name(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", EVERYWHERE, ids=name)
def test_b2_b4_a_clip_at_half_the_norm_halves_the_update_on_every_rank(harness: Harness, case: Case) -> None:
    whole = experiment(harness, "update_lengths", case, clip=0.0)
    norm = whole[0]["norm"]
    half = experiment(harness, "update_lengths", case, clip=norm / 2)
    for free, clipped in zip(whole, half, strict=True):
        # The norm is the same on every rank, and the one before clipping.
        assert free["norm"] == norm == pytest.approx(clipped["norm"], rel=1e-6)
        assert clipped["update"] == pytest.approx(free["update"] / 2, rel=1e-5)
        assert free["update"] > 0


@pytest.mark.parametrize("case", [small(2, 1, 1), small(1, 2, 1)], ids=name)
def test_b2_with_a_norm_of_the_own_part_it_is_not(harness: Harness, case: Case) -> None:
    true = experiment(harness, "update_lengths", case, clip=0.0)[0]["norm"]
    ranks = experiment(harness, "update_lengths", case, clip=true / 2, fault="norm_of_own_part")
    assert any(rank["norm"] < 0.99 * true for rank in ranks)


def test_a20_b3_the_norm_is_one_number_with_tying_and_without(harness: Harness) -> None:
    for tied in (True, False):
        norms = []
        for layout in ((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1), (2, 1, 2)):
            norms.append(experiment(harness, "update_lengths", Case(*layout, tied=tied), clip=0.0)[0]["norm"])
        assert norms == pytest.approx([norms[0]] * len(norms), rel=FIRST_STEP)


@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 2, 2)], ids=str)
def test_b1_gains_stay_equal_on_all_tensor_parallel_processes(harness: Harness, layout: tuple[int, int, int]) -> None:
    case = small(*layout, sequence_parallel=True, overrides=("model.qk_norm=true",))
    held: dict[str, set[str]] = {}
    for rank in experiment(harness, "replicas", case):
        for parameter, (box, digest) in rank["parameters"].items():
            held.setdefault(f"{parameter} {box}", set()).add(digest)
    assert sum("gain" in key for key in held) == 2 * 4 + 1
    # Also what data-parallel processes hold twice.
    assert {key: len(digests) for key, digests in held.items() if len(digests) > 1} == {}


SKIPPING = [
    (small(1, 1, 2), 1), (small(2, 1, 1), 0), (small(2, 2, 1), 3), (small(1, 1, 2, dtype="bf16"), 1),
    (small(2, 1, 1, dtype="bf16"), 0), (small(2, 1, 1, "dualpipev", micro_batches=4), 1), (small(1, 1, 2, zero=0), 1),
    (small(1, 2, 1, zero=0), 1), (small(1, 1, 2, zero=2), 0), (small(1, 1, 2, zero=3), 1),
    (small(1, 1, 2, zero=2, dtype="bf16"), 1), (small(1, 1, 2, zero=3, dtype="bf16"), 0),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["gradient", "loss"])
@pytest.mark.parametrize(("case", "rank"), SKIPPING, ids=str)
def test_b13_what_is_not_finite_on_one_rank_is_skipped_on_all(
    harness: Harness, case: Case, rank: int, kind: str
) -> None:
    if kind == "loss":
        # Only a process that computes the loss can have one that is not finite.
        rank = 0 if case.schedule == "dualpipev" else case.world - 1
    for found in experiment(harness, "skipped_step", case, kind=kind, rank=rank):
        assert [record["step"] for record in found["records"]] == ["1", "2", "3", "4"]
        assert [record["skipped"] for record in found["records"]] == ["False", "False", "True", "False"]
        # Weights and moments are those of the step before, and the next step moves them.
        assert found["before"] == found["after"] != found["last"]
        assert found["adam"] == 2


ZERO = [
    small(1, 1, 2), small(2, 1, 1), small(1, 2, 1), small(1, 1, 2, dtype="bf16"), small(2, 1, 1, dtype="bf16"),
    small(1, 1, 2, zero=0), small(1, 1, 2, zero=2), small(1, 1, 2, zero=3), small(1, 2, 1, zero=0),
]  # fmt: skip


@pytest.mark.parametrize("case", ZERO, ids=name)
def test_b6_b11_a_step_without_targets_is_an_ordinary_step_that_decays_matrices_alone(
    harness: Harness, case: Case
) -> None:
    decay = ("optimizer.learning_rate=0.5", "optimizer.weight_decay=0.2", "optimizer.warmup_steps=0")
    case = replace(case, overrides=(*case.overrides, *decay))
    for found in experiment(harness, "step_without_targets", case):
        assert (found["loss"], found["grad_norm"], found["skipped"], found["adam"]) == (0.0, 0.0, False, 1)
        for parameter, ratio in found["changes"].items():
            expected = 1.0 if parameter.endswith(".gain") else 1 - 0.5 * 0.2
            assert ratio == pytest.approx(expected, rel=1e-5), parameter


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a6_the_norm_in_bf16_is_the_norm_and_does_not_accumulate_over_steps(harness: Harness, zero: int) -> None:
    case = small(1, 1, 2, zero=zero)
    exact = experiment(harness, "same_batch_twice", case)[0]
    found = experiment(harness, "same_batch_twice", replace(case, dtype="bf16"))[0]
    assert exact[0] == exact[1] and found[0] == found[1]
    assert found[0] == pytest.approx(exact[0], rel=0.01)


LONG = ("batch.sequence_length=8192", "model.num_layers=2", "batch.global_batch_size=1", "batch.micro_batch_size=1")


def _rotary_error(harness: Harness, fault: str | None) -> tuple[float, bool]:
    case = Case(micro_batches=1, dtype="bf16", overrides=LONG)
    cos, sin = map(torch.tensor, experiment(harness, "rotary_in_use", case, fault=fault)[0])
    expected = rotary_tables(torch.arange(8192), 8, 10000.0)
    errors = [float((found - table).abs().max()) for found, table in zip((cos, sin), expected, strict=True)]
    return max(errors), torch.equal(cos[256], cos[257])


def test_b8_rotary_tables_of_a_bf16_model_tell_position_256_from_257(harness: Harness) -> None:
    error, equal = _rotary_error(harness, None)
    assert error < 4e-3 and not equal
    error, equal = _rotary_error(harness, "rotary_cast")
    assert error > 0.5 and equal
