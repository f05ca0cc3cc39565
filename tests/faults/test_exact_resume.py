"""A run that was stopped and resumed in the same layout is the uninterrupted one, bit for bit; E5, E10."""

import json
from pathlib import Path

import pytest
import torch

from tests.faults.runs import exact, records, run_all
from training.checkpoint import Checkpoint

STEPS = ["training.steps=8", "training.eval_every=4", "optimizer.schedule=constant"]
CASES = {
    "pipeline": ["parallel.pipeline=2"],
    "dualpipev": ["parallel.pipeline=2", "parallel.schedule=dualpipev", "model.num_layers=4"],
    "pipeline-bf16-tied": ["parallel.pipeline=2", "precision.dtype=bf16", "model.tie_embeddings=true"],
    "tensor": ["parallel.tensor=2"],
    "data": [],
    "data-bf16": ["precision.dtype=bf16"],
    "zero0": ["parallel.zero_stage=0"],
    "zero2": ["parallel.zero_stage=2"],
    "zero2-bf16": ["parallel.zero_stage=2", "precision.dtype=bf16"],
    "zero3": ["parallel.zero_stage=3"],
}
FP16 = ["precision.dtype=fp16", "deepspeed.fp16={initial_scale_power: 40, loss_scale_window: 3}"]
FORTY = ["training.steps=40", "optimizer.warmup_steps=6", "optimizer.schedule=linear", "parallel.pipeline=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact")
    runs: list = []
    for name, overrides in CASES.items():
        runs.append((f"{name}-straight", [*STEPS, *overrides], []))
        runs.append((f"{name}-resumed", [*STEPS, *overrides, "training.stop_after=5"], []))
        runs.append((f"{name}-resumed", [*STEPS, *overrides], []))
    supported = ["fp16_without_its_instructions", []]
    for stop in ([], ["training.stop_after=21"]):
        for name in ("straight", "resumed") if not stop else ("resumed",):
            rates = ["record_rates", [str(folder / f"rates-{name}")]]
            if name == "straight" or stop:
                runs.append((f"rates-{name}-run", [*FORTY, *stop], [rates]))
    runs.append(("rates-resumed-run", FORTY, [["record_rates", [str(folder / "rates-resumed")]]]))
    for name, overrides in (("fp16", FP16), ("fp16-zero2", [*FP16, "parallel.zero_stage=2"])):
        steps = ["training.steps=24", "training.skipped_in_a_row=24", *overrides]
        runs.append((f"{name}-straight", steps, [supported]))
        runs.append((f"{name}-resumed", [*steps, "training.stop_after=14"], [supported]))
        runs.append((f"{name}-resumed", steps, [supported]))
    folder.joinpath("log").write_text(run_all(folder, runs))
    return folder


def assert_same_state(one: Path, other: Path, step: int) -> None:
    """Weights, moments and everything of the manifest that says where the run stands."""
    first, second = (Checkpoint.open(run / "checkpoints" / f"step_{step:08d}") for run in (one, other))
    for name in first.names():
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            assert torch.equal(first.read(name, kind), second.read(name, kind)), (name, kind)
    for key in ("step", "samples", "tokens", "adam_step", "best_validation", "validation", "counters", "passed_over"):
        assert getattr(first.manifest, key) == getattr(second.manifest, key), key


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_uninterrupted_one(folder: Path, case: str) -> None:
    straight, resumed = folder / f"{case}-straight", folder / f"{case}-resumed"
    assert exact(resumed) == exact(straight) and len(exact(straight)) == 8
    assert records(resumed, "validation") == records(straight, "validation")
    assert_same_state(straight, resumed, 8)


@pytest.mark.parametrize("case", ["fp16", "fp16-zero2"])
def test_the_loss_scale_is_resumed(folder: Path, case: str) -> None:
    """It begins far too high, so the first steps are skipped, and moves both ways before and after the stop."""
    straight, resumed = folder / f"{case}-straight", folder / f"{case}-resumed"
    assert exact(resumed) == exact(straight)
    skipped = [record["step"] for record in records(straight) if record["skipped"]]
    assert min(skipped) < 14 < max(skipped) and len(skipped) < 24
    assert_same_state(straight, resumed, 24)
    scales = [
        Checkpoint.open(resumed / "checkpoints" / f"step_{step:08d}").manifest.counters["loss_scale"]["cur_scale"]
        for step in (4, 14, 24)
    ]
    assert scales[0] > scales[1]


def test_the_learning_rate_in_the_optimizers_own_groups(folder: Path) -> None:
    """E5: 1 to 40 straight are 21 and, resumed, 19 more, as the updates found them."""
    straight, resumed = (
        [json.loads(line) for line in (folder / f"rates-{name}").read_text().splitlines()]
        for name in ("straight", "resumed")
    )
    assert straight == resumed and [step for step, _ in straight] == list(range(1, 41))
    rates = [groups[0] for _, groups in straight]
    assert all(set(groups) == {rate} for (_, groups), rate in zip(straight, rates, strict=True))
    assert rates[:6] == pytest.approx([1e-3 * step / 6 for step in range(1, 7)])
    assert all(later < earlier for earlier, later in zip(rates[6:], rates[7:], strict=False))
