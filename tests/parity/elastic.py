"""What one layout saves, another loads: pairs of layouts, and what is compared after each."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.parity.cases import Case
from tests.parity.harness import Harness
from training.checkpoint import Checkpoint

SAVED_AFTER, GO_ON = 7, 3
FOUR = ("model.num_layers=4",)
EIGHT = ("model.num_layers=8",)
ODD = (509, False, False)


def _case(*layout: int, overrides: tuple[str, ...] = FOUR, **keywords: Any) -> Case:
    return Case(*layout, overrides=overrides, **keywords)


WHOLE, FULL = _case(1, 1, 1), _case(2, 2, 2)
SHARDED, V_SHAPED = _case(1, 1, 2, zero=3), _case(2, 1, 1, schedule="dualpipev", micro_batches=8)
PAIRS = [
    (WHOLE, FULL),
    (WHOLE, _case(1, 1, 2, zero=0)),
    (WHOLE, V_SHAPED),
    (FULL, WHOLE),
    (FULL, _case(1, 4, 1)),
    (FULL, _case(4, 1, 1)),
    (FULL, _case(1, 1, 8, zero=2)),
    (SHARDED, _case(2, 1, 1)),
    (SHARDED, _case(1, 2, 1, sequence_parallel=True)),
    (V_SHAPED, _case(1, 1, 4, zero=3)),
    (V_SHAPED, _case(1, 8, 1)),
    (_case(1, 2, 1, zero=0), _case(1, 2, 2, zero=3)),
    (_case(1, 2, 1, zero=2), _case(2, 2, 1)),
    (_case(2, 2, 1, tied=True, table=ODD), _case(1, 4, 1, tied=True, table=ODD)),
    (_case(1, 4, 1, tied=True, table=ODD), _case(3, 1, 1, tied=True, table=ODD)),
    (_case(8, 1, 1, overrides=EIGHT), _case(3, 1, 1, overrides=EIGHT)),
    (_case(2, 1, 2, dtype="bf16"), _case(1, 2, 1, dtype="bf16")),
    (_case(1, 1, 2, zero=3, dtype="bf16"), _case(2, 1, 1, dtype="bf16")),
]
"""(saved by, loaded by)."""


@dataclass(frozen=True)
class Resumed:
    """What loading in another layout came to."""

    unequal: list[str]
    """Weights and moments that the loading layout, saving them at once, did not write bit for bit as it found them."""
    loss: float
    """Of the steps after, the largest relative difference from one process that was never interrupted."""
    norm: float

    def over(self, bounds: dict[str, float]) -> dict[str, float]:
        """What exceeds the bounds of an uninterrupted run."""
        return {name: getattr(self, name) for name in ("loss", "norm") if not getattr(self, name) <= bounds[name]}


class Elastic:
    """Saves with one layout, once for all who load it, and loads with another."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self._saved: dict[Case, Path] = {}

    def _save(self, source: Case) -> Path:
        if source not in self._saved:
            folder = self.harness.new_folder()
            arguments = source.arguments(folder)
            arguments["overrides"].append(f"training.stop_after={SAVED_AFTER}")
            self.harness.pool.run(source.world, "tests.parity.probes:train", arguments)
            self._saved[source] = folder / "checkpoints" / f"step_{SAVED_AFTER:08d}"
        return self._saved[source]

    def resume(self, source: Case, target: Case) -> Resumed:
        """Load what `source` saved, save it again from there, and go on for a few steps."""
        path, folder = self._save(source), self.harness.new_folder()
        arguments = {**target.arguments(folder), "checkpoint": str(path), "steps": GO_ON}
        records = self.harness.pool.run(target.world, "tests.parity.experiments:resume", arguments)[0]
        assert [record["step"] for record in records] == [SAVED_AFTER + 1 + n for n in range(GO_ON)]
        one, other = Checkpoint.open(path), Checkpoint.open(folder / "checkpoints" / path.name)
        assert one.names() == other.names()
        assert one.manifest.adam_step == other.manifest.adam_step == SAVED_AFTER
        unequal = [
            f"{name}/{kind}"
            for name in one.names()
            for kind in ("weight", "exp_avg", "exp_avg_sq")
            if not torch.equal(one.read(name, kind), other.read(name, kind))
        ]
        straight = self.harness.oracle(target, target.dtype)
        steps = [record["step"] - 1 for record in records]
        found = [(record["loss"], record["grad_norm"]) for record in records]
        return Resumed(
            unequal,
            loss=max(abs(loss / straight.losses[step] - 1) for step, (loss, _) in zip(steps, found, strict=True)),
            norm=max(abs(norm / straight.norms[step] - 1) for step, (_, norm) in zip(steps, found, strict=True)),
        )
