"""How far two runs are apart, and the bounds that a layout is held to.

All differences are relative to the largest magnitude of the reference, but for final parameters, which are in units of
the learning rate.
"""

import math
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.parity.oracle import Trace
from training import checkpoint

# fp32, as docs/parity.md states them.
FIRST_STEP = 1e-6
LOSS = 1e-5
NORM = 2e-5
PIPELINE_ALONE = 1e-6
TIMES_AS_FAR = 4.0


@dataclass(frozen=True)
class Difference:
    """How far one run is from another."""

    first_loss: float
    first_norm: float
    gradients: float
    """The worst parameter's, at step 1."""
    worst_gradient: str
    loss: float
    """Over all steps."""
    norm: float
    coefficient: float
    parameters: float
    """Largest after the last step, in units of the learning rate."""

    def over(self, bounds: "dict[str, float]") -> dict[str, float]:
        """The quantities that exceed their bound."""
        return {name: getattr(self, name) for name, bound in bounds.items() if not getattr(self, name) <= bound}


FP32 = {
    "first_loss": FIRST_STEP,
    "first_norm": FIRST_STEP,
    "gradients": FIRST_STEP,
    "loss": LOSS,
    "norm": NORM,
    "coefficient": NORM,
}
"""Bounds of a layout against one process in fp32. Final parameters are published, not bounded."""

SIXTEEN_BITS = ("gradients", "loss", "norm", "coefficient")
"""What has a bound in 16 bits: of the loss and the norm, the worst of all steps, as one step's may be right by luck."""

TIMES_ITSELF = 3.0
"""With 16 bits rounding is another one on every processor, so nobody can write its size down: it is measured where the
test runs. In bfloat16 a layout may be this many times as far from one process as runs of one process that differ only
in the order of summation are from each other."""


def trace_of(records: list[dict[str, Any]], folder: Path) -> Trace:
    """What the product left of a run."""
    weights = checkpoint.read(folder / "checkpoints")
    return Trace(
        losses=[record["loss"] for record in records],
        norms=[record["grad_norm"] for record in records],
        coefficients=[record["clip_coefficient"] for record in records],
        gradients=load_file(folder / "gradients" / "step_00000001.safetensors"),
        parameters={name: weights[name] for name in weights},
    )


def _relative(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected), f"{len(found)} steps, expected {len(expected)}"
    worst = max(abs(a - b) if math.isfinite(a) else math.inf for a, b in zip(found, expected, strict=True))
    return worst / max(map(abs, expected))


def _distance(found: torch.Tensor, expected: torch.Tensor, unit: float | None = None) -> float:
    assert found.shape == expected.shape, f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    largest = (found.double() - expected.double()).abs().max().item()
    scale = unit if unit is not None else expected.double().abs().max().item()
    return largest / scale if scale else (0.0 if largest == 0 else math.inf)


def difference(found: Trace, expected: Trace, learning_rate: float) -> Difference:
    """How far `found` is from the reference `expected`."""
    for kind in ("gradients", "parameters"):
        names, wanted = set(getattr(found, kind)), set(getattr(expected, kind))
        assert names == wanted, f"{kind}: missing {sorted(wanted - names)}, unknown {sorted(names - wanted)}"
    of_gradients = {name: _distance(found.gradients[name], g) for name, g in expected.gradients.items()}
    worst = max(of_gradients, key=of_gradients.__getitem__)
    return Difference(
        first_loss=_relative(found.losses[:1], expected.losses[:1]),
        first_norm=_relative(found.norms[:1], expected.norms[:1]),
        gradients=of_gradients[worst],
        worst_gradient=worst,
        loss=_relative(found.losses, expected.losses),
        norm=_relative(found.norms, expected.norms),
        coefficient=_relative(found.coefficients, expected.coefficients),
        parameters=max(_distance(found.parameters[n], p, learning_rate) for n, p in expected.parameters.items()),
    )


def spread(runs: list[Trace], learning_rate: float) -> dict[str, float]:
    """How far any two of these runs are apart at most, in each quantity that has a bound in 16 bits."""
    pairs = [difference(one, other, learning_rate) for one, other in combinations(runs, 2)]
    return {quantity: max(getattr(pair, quantity) for pair in pairs) for quantity in SIXTEEN_BITS}


@dataclass(frozen=True)
class Verdict:
    """What a case came to."""

    difference: Difference
    over: dict[str, float]
    """Quantities beyond the bound against one process."""
    times: dict[str, float]
    """For those: distance from the float64 oracle, in units of one fp32 process's."""

    @property
    def sound(self) -> bool:
        """Within the bounds, or by the float64 rule."""
        return all(times <= TIMES_AS_FAR for times in self.times.values())

    def __str__(self) -> str:
        lines = [f"{name} {value:.2e}, {self.times[name]:.1f} x one process" for name, value in self.over.items()]
        return "; ".join(lines) or "within the bounds"


def judge(found: Trace, single: Trace, exact: Any, learning_rate: float) -> Verdict:
    """Hold a run in fp32 to the bounds; `exact` gives the float64 oracle where it is needed."""
    apart = difference(found, single, learning_rate)
    over = apart.over(FP32)
    times: dict[str, float] = {}
    if over:
        reference = exact()
        far, near = difference(found, reference, learning_rate), difference(single, reference, learning_rate)
        times = {name: getattr(far, name) / max(getattr(near, name), 1e-30) for name in over}
    return Verdict(apart, over, times)
