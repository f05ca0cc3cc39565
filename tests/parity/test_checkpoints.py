"""What any layout saves, any other loads: weights and moments bit for bit, the next losses as if uninterrupted."""

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.parity import compare
from tests.parity.cases import Case
from tests.parity.harness import Harness
from training.checkpoint import Checkpoint

SAVED_AFTER, GO_ON = 7, 3
FOUR = ("model.num_layers=4",)
EIGHT = ("model.num_layers=8",)
ODD = (509, False, False)


def case(*layout: int, overrides: tuple[str, ...] = FOUR, **keywords: object) -> Case:
    return Case(*layout, overrides=overrides, **keywords)  # type: ignore[arg-type]


WHOLE, FULL = case(1, 1, 1), case(2, 2, 2)
SHARDED, V_SHAPED = case(1, 1, 2, zero=3), case(2, 1, 1, schedule="dualpipev", micro_batches=8)
PAIRS = [
    (WHOLE, FULL),
    (WHOLE, case(1, 1, 2, zero=0)),
    (WHOLE, V_SHAPED),
    (FULL, WHOLE),
    (FULL, case(1, 4, 1)),
    (FULL, case(4, 1, 1)),
    (FULL, case(1, 1, 8, zero=2)),
    (SHARDED, case(2, 1, 1)),
    (SHARDED, case(1, 2, 1, sequence_parallel=True)),
    (V_SHAPED, case(1, 1, 4, zero=3)),
    (V_SHAPED, case(1, 8, 1)),
    (case(1, 2, 1, zero=0), case(1, 2, 2, zero=3)),
    (case(1, 2, 1, zero=2), case(2, 2, 1)),
    (case(2, 2, 1, tied=True, table=ODD), case(1, 4, 1, tied=True, table=ODD)),
    (case(1, 4, 1, tied=True, table=ODD), case(3, 1, 1, tied=True, table=ODD)),
    (case(8, 1, 1, overrides=EIGHT), case(3, 1, 1, overrides=EIGHT)),
    (case(2, 1, 2, dtype="bf16"), case(1, 2, 1, dtype="bf16")),
    (case(1, 1, 2, zero=3, dtype="bf16"), case(2, 1, 1, dtype="bf16")),
]


@cache
def saved(harness: Harness, source: Case) -> Path:
    """The checkpoint that this layout leaves after a few steps; each is made once."""
    folder = harness.new_folder()
    arguments = source.arguments(folder)
    arguments["overrides"].append(f"training.stop_after={SAVED_AFTER}")
    harness.pool.run(source.world, "tests.parity.probes:train", arguments)
    return folder / "checkpoints" / f"step_{SAVED_AFTER:08d}"


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda case: case.name)
def test_another_layout_goes_on(harness: Harness, source: Case, target: Case) -> None:
    path, folder = saved(harness, source), harness.new_folder()
    arguments = {**target.arguments(folder), "checkpoint": str(path), "steps": GO_ON}
    records = harness.pool.run(target.world, "tests.parity.experiments:resume", arguments)[0]
    one, other = Checkpoint.open(path), Checkpoint.open(folder / "checkpoints" / path.name)
    assert one.names() == other.names()
    assert one.manifest.adam_step == other.manifest.adam_step == SAVED_AFTER
    for name in one.names():
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            assert torch.equal(one.read(name, kind), other.read(name, kind)), f"{name}/{kind}"
    straight = harness.oracle(target, target.dtype)
    bounds = compare.FP32 if target.dtype == "fp32" else compare.BF16
    assert [record["step"] for record in records] == [SAVED_AFTER + 1 + n for n in range(GO_ON)]
    for record in records:
        step = record["step"] - 1
        assert record["loss"] == pytest.approx(straight.losses[step], rel=bounds["loss"])
        assert record["grad_norm"] == pytest.approx(straight.norms[step], rel=bounds["norm"])
