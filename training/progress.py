"""How far a run has come: what of it stands in every checkpoint besides tensors."""

from dataclasses import dataclass, field
from typing import Any

from training.checkpoint import Manifest


@dataclass
class Progress:
    """How far the run has come; stands in every checkpoint."""

    step: int = 0
    """Steps attempted, skipped ones included."""
    samples: int = 0
    """Samples consumed; the number of the next one."""
    tokens: int = 0
    skipped: int = 0
    """Steps skipped because a loss or gradient was not finite, or the loss a spike."""
    skipped_in_a_row: int = 0
    spikes: int = 0
    """Loss spikes found."""
    best_validation: float | None = None
    """Lowest mean validation loss so far, nats a target."""
    validation: float | dict[str, float] | None = None
    """The newest validation loss, one for each set."""
    evaluated_step: int = 0
    """Step of the newest evaluation. A stop comes before an evaluation that is due: the next start makes up for it."""
    passed_over: list[list[int]] = field(default_factory=list)
    """Ranges [first, end) of sample numbers left out after a spike."""
    recent_losses: list[float] = field(default_factory=list)
    """What the next loss is compared with where spikes are looked for."""

    @classmethod
    def of(cls, manifest: Manifest) -> "Progress":
        """What a checkpoint says."""
        counters = manifest.counters
        return cls(
            step=manifest.step,
            samples=manifest.samples,
            tokens=manifest.tokens,
            skipped=int(counters.get("skipped", 0)),
            skipped_in_a_row=int(counters.get("skipped_in_a_row", 0)),
            spikes=int(counters.get("spikes", 0)),
            best_validation=manifest.best_validation,
            validation=manifest.validation,
            evaluated_step=int(counters.get("evaluated_step", manifest.step)),
            passed_over=[list(span) for span in manifest.passed_over],
            recent_losses=list(counters.get("recent_losses", [])),
        )

    def counters(self) -> dict[str, Any]:
        """What the manifest has no field of its own for."""
        names = ("skipped", "skipped_in_a_row", "spikes", "evaluated_step", "recent_losses")
        return {name: getattr(self, name) for name in names}

    def pass_over(self, end: int) -> None:
        """Leave out the samples from the next one to `end`."""
        if self.passed_over and self.passed_over[-1][1] == self.samples:
            self.passed_over[-1][1] = end
        else:
            self.passed_over.append([self.samples, end])
        self.samples = end
