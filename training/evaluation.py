"""Loss on held-out text during training, the same number in every layout."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from data.batches import ValidationData
from parallel.engine import Labels, PipelineInput, TrainingEngine
from parallel.loss import IGNORED
from parallel.stages import StageSettings
from training.feed import engine_input, sample_numbers


@dataclass(frozen=True)
class ValidationResult:
    """Loss over the targets of a held-out set."""

    loss: float
    """Nats a target."""
    targets: int
    bytes: int
    """Bytes of text that the targets stand for."""

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers; not a number where the targets stand for no text."""
        return self.loss * self.targets / math.log(2) / self.bytes if self.bytes else math.nan


class Evaluator:
    """Runs the engine over windows of a held-out set."""

    def __init__(
        self,
        engine: TrainingEngine,
        stage: StageSettings,
        micro_batch_size: int,
        token_bytes: np.ndarray | None,
    ) -> None:
        self.engine = engine
        self.stage = stage
        self.micro_batch_size = micro_batch_size
        self.token_bytes = token_bytes
        self.progress: Callable[[int], None] = lambda windows: None
        """Told of each micro-batch that this process hands to the engine, as windows of all processes."""

    def __call__(self, data: ValidationData, windows: int | None = None) -> ValidationResult:
        """Evaluate `windows` windows spread over `data` (None: all). Collective.

        Training goes on as if it had not been. The result stands on rank 0 and wherever data is read.
        """
        mesh = self.stage.mesh
        numbers = data.windows(None if windows is None else min(windows, len(data)))
        per_round = self.micro_batch_size * mesh.data
        micro_batches = max(self.engine.minimum_micro_batches, -(-len(numbers) // per_round))
        # Numbers beyond the last window give rows without targets: the ragged end, and dualpipev's minimum.
        numbers = np.concatenate([numbers, np.full(micro_batches * per_round - len(numbers), len(data))])
        totals = torch.zeros(2, dtype=torch.float64, device=self.stage.device)
        batches = self._batches(data, numbers, micro_batches, totals) if self.engine.reads_data else None
        mean = self.engine.evaluate(batches, micro_batches)
        dist.all_reduce(totals, group=mesh.data_group)
        targets, text_bytes = (int(total) for total in totals.tolist())
        summed = float(mean[0].item()) * micro_batches * mesh.data
        return ValidationResult(summed / targets if targets else math.nan, targets, text_bytes)

    def _batches(
        self, data: ValidationData, windows: np.ndarray, micro_batches: int, totals: torch.Tensor
    ) -> Iterator[tuple[PipelineInput, Labels]]:
        mesh = self.stage.mesh
        # The engine sums; the division by the targets comes last.
        one = torch.ones((), dtype=torch.float32, device=self.stage.device)
        for index in range(micro_batches):
            places = sample_numbers(0, index, self.micro_batch_size, mesh.data, mesh.data_rank)
            batch = data.micro_batch(windows[places])
            self.progress(self.micro_batch_size * mesh.data)
            counted = batch.targets[batch.targets != IGNORED]
            totals[0] += counted.numel()
            if self.token_bytes is not None:
                totals[1] += int(self.token_bytes[counted.numpy()].sum())
            yield engine_input(batch, self.stage, 0), (batch.targets, one)
