"""Which samples each process computes, and the micro-batches made of them, one step ahead of the engine.

Sample numbers are global: step n takes the next `global_batch_size` numbers, micro-batch k of data-parallel process d
the slice k x data + d of them. So no layout changes what a step sees, and every process of one pipeline reads the same.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data.batches import MicroBatch, TrainingData
from parallel.engine import PipelineInput, StepBatch
from parallel.loss import IGNORED
from parallel.stages import StageSettings, make_side
from training.batch_size import global_batch_size
from training.sections import Batch


def sample_numbers(first: int, micro_batch: int, micro_batch_size: int, data: int, data_rank: int) -> np.ndarray:
    """Global numbers [micro_batch_size] of one micro-batch of a step that begins with sample `first`."""
    start = first + (micro_batch * data + data_rank) * micro_batch_size
    return np.arange(start, start + micro_batch_size, dtype=np.int64)


def engine_input(micro_batch: MicroBatch, stage: StageSettings, step: int) -> PipelineInput:
    """Tokens, with the side tensor where the model needs one."""
    if not stage.has_side:
        return micro_batch.tokens
    return micro_batch.tokens, make_side(micro_batch.sample_numbers, step, micro_batch.document_ids)


class TrainingFeed:
    """Hands out the micro-batches of each step; the next step's are read by a thread meanwhile."""

    def __init__(
        self,
        data: TrainingData,
        stage: StageSettings,
        batch: Batch,
    ) -> None:
        self.data = data
        self.stage = stage
        self.batch = batch
        self.wait_seconds = 0.0
        """Seconds that the last `step` waited for its data."""
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._ahead: tuple[int, Future[list[MicroBatch]]] | None = None

    def _read(self, first: int) -> list[MicroBatch]:
        mesh = self.stage.mesh
        return [
            self.data.micro_batch(sample_numbers(first, index, self.batch.micro_batch_size, mesh.data, mesh.data_rank))
            for index in range(global_batch_size(self.batch, first) // (self.batch.micro_batch_size * mesh.data))
        ]

    def step(self, step: int, first: int) -> StepBatch:
        """Micro-batches of the step that begins with sample number `first`."""
        started = time.perf_counter()
        if self._ahead is not None and self._ahead[0] == first:
            micro_batches = self._ahead[1].result()
        else:
            micro_batches = self._read(first)
        self.wait_seconds = time.perf_counter() - started
        following = first + global_batch_size(self.batch, first)
        self._ahead = (following, self._reader.submit(self._read, following))
        factor = self._factor(micro_batches)
        return [(engine_input(batch, self.stage, step), (batch.targets, factor)) for batch in micro_batches]

    def _factor(self, micro_batches: list[MicroBatch]) -> Tensor:
        """Micro-batches x data / targets of the global batch: 0 where there is no target at all."""
        mesh = self.stage.mesh
        if self.data.every_token_is_a_target:
            # On the device once a step: a copy for each micro-batch would wait for it.
            return torch.tensor(1 / micro_batches[0].targets.numel(), dtype=torch.float32, device=self.stage.device)
        counted = sum((batch.targets != IGNORED).sum() for batch in micro_batches)
        total = torch.as_tensor(counted, dtype=torch.float64, device=self.stage.device)
        if mesh.data > 1:
            dist.all_reduce(total, group=mesh.data_group)
        factor = torch.where(total > 0, len(micro_batches) * mesh.data / total, 0.0)
        return factor.float()

    def close(self) -> None:
        """End the reading thread."""
        self._reader.shutdown(wait=True, cancel_futures=True)
