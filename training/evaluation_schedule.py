"""When a run evaluates its held-out sets, and what it remembers of the outcome."""

import math
from collections.abc import Mapping

from data.batches import ValidationData
from training.evaluation import Evaluator
from training.monitor import Monitor, finite
from training.progress import Progress
from training.sections import Batch, Training


class EvaluationSchedule:
    """Evaluates every held-out set of a run. All processes call the same methods in the same order."""

    def __init__(
        self,
        training: Training,
        batch: Batch,
        evaluator: Evaluator,
        held_out: Mapping[str, ValidationData],
        monitor: Monitor,
    ) -> None:
        self.training = training
        self.windows = training.eval_batches * batch.global_batch_size if training.eval_batches else None
        """Windows of each set that one evaluation takes; None: all."""
        self.evaluator = evaluator
        self.held_out = held_out
        """Name to data set; a single one has the empty name."""
        self.monitor = monitor

    def is_due(self, progress: Progress) -> bool:
        """Whether the newest step asks for an evaluation that it has not had."""
        asked = self.training.is_due(self.training.eval_every, progress.step)
        return asked and progress.step > progress.evaluated_step and bool(self.held_out)

    def evaluate(self, progress: Progress) -> None:
        """Loss on every held-out set, reported and noted in `progress` with the best mean so far. Collective."""
        results = {name: self.evaluator(data, self.windows) for name, data in self.held_out.items()}
        losses = {name: result.loss for name, result in results.items()}
        bits = {name: result.bits_per_byte for name, result in results.items()}
        mean, best = sum(losses.values()) / len(losses), progress.best_validation
        if math.isfinite(mean) and (best is None or mean < best):
            progress.best_validation = mean
        alone = set(losses) == {""}
        # A checkpoint's manifest is JSON, which has no NaN: null stands for it there, as in metrics.jsonl.
        progress.validation = finite(losses[""] if alone else losses)
        progress.evaluated_step = progress.step
        self.monitor.validation(
            {
                "step": progress.step,
                "validation_loss": losses[""] if alone else losses,
                "validation_bits_per_byte": bits[""] if alone else bits,
            }
        )
