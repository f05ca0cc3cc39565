"""Loss spikes: a step whose loss lies far above those of the steps before it."""

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, pstdev


class SpikeDetector:
    """Compares each loss with the mean and the standard deviation of the last `window` ones.

    Nothing is a spike before the window is full. A spike that was only warned of joins the window, so that a new level
    of the loss is got used to; one whose update was refused does not. The same losses give the same decisions on every
    rank, and after a resume: `losses` stands in the checkpoint.
    """

    def __init__(self, window: int, threshold: float, losses: Sequence[float] = ()) -> None:
        self.threshold = threshold
        self._losses: deque[float] = deque(losses, maxlen=window)

    @property
    def losses(self) -> list[float]:
        """The losses that the next one is compared with, oldest first."""
        return list(self._losses)

    def score(self, loss: float) -> float:
        """Standard deviations above the mean; 0 where the window is not full, where the loss is not finite."""
        if len(self._losses) < (self._losses.maxlen or 0) or not math.isfinite(loss):
            return 0.0
        mean, deviation = fmean(self._losses), pstdev(self._losses)
        # Losses that do not move at all make every change infinitely unlikely, which says nothing.
        return (loss - mean) / max(deviation, 1e-6 * abs(mean), 1e-12)

    def is_spike(self, loss: float) -> bool:
        """Whether the loss lies more than `threshold` standard deviations above the mean."""
        return self.score(loss) > self.threshold

    def describe(self, loss: float) -> str:
        """The loss and what it is compared with, for a person."""
        return (
            f"loss {loss:.4f} is {self.score(loss):.1f} standard deviations above the mean {fmean(self._losses):.4f} "
            f"of the last {len(self._losses)} steps"
        )

    def add(self, loss: float) -> None:
        """Count a loss; one that is not finite is left out."""
        if math.isfinite(loss):
            self._losses.append(loss)
