"""The training loop: one step after another until the last, with evaluation, metrics and checkpoints on the way."""

import math
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model.costs import training_flops_per_token
from parallel.device import dense_peak, peak_memory_gib
from parallel.engine import StepResult, TrainingEngine
from parallel.stages import StageSettings
from training.checkpoint import Manifest, prune
from training.configuration import Layout, RunConfiguration
from training.engine_state import dump_gradients, engine_adam_step, save_engine
from training.evaluation import Evaluator
from training.feed import TrainingFeed
from training.learning_rate import learning_rate
from training.monitor import Monitor
from training.setup import RunData, checkpoints_folder


class TrainingFailure(Exception):
    """The run cannot go on: one sentence that says why."""


@dataclass
class Progress:
    """How far the run has come; stands in every checkpoint."""

    step: int = 0
    """Steps attempted, skipped ones included."""
    samples: int = 0
    """Samples consumed; the number of the next one."""
    tokens: int = 0
    skipped: int = 0
    """Steps skipped because a loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    best_validation: float | None = None
    """Lowest mean validation loss so far, nats a target."""
    validation: float | dict[str, float] | None = None
    """The newest validation loss, one for each set."""


class Trainer:
    """One process's part in a run. All processes call the same methods in the same order."""

    def __init__(
        self,
        configuration: RunConfiguration,
        layout: Layout,
        data: RunData,
        stage: StageSettings,
        engine: TrainingEngine,
        monitor: Monitor,
        run_id: str,
        attempt: int,
        progress: Progress,
    ) -> None:
        self.configuration = configuration
        self.layout = layout
        self.data = data
        self.stage = stage
        self.engine = engine
        self.monitor = monitor
        self.run_id = run_id
        self.attempt = attempt
        self.progress = progress
        batch = configuration.batch
        self.feed = TrainingFeed(data.train, stage, batch.micro_batch_size, layout.micro_batches)
        self.evaluator = Evaluator(engine, stage, batch.micro_batch_size, data.token_bytes)
        tokens_per_step = batch.global_batch_size * batch.sequence_length
        self.flops_per_step = tokens_per_step * training_flops_per_token(configuration.model, batch.sequence_length)
        self.peak = dense_peak(configuration.precision.dtype.value)
        self.checkpoint_stall_seconds = 0.0
        self.saved_step = progress.step

    def run(self) -> str:
        """Train and return the state the run ends in: `finished`, or `stopped` before the last step."""
        training = self.configuration.training
        last = min(training.steps, training.stop_after or training.steps)
        while self.progress.step < last:
            self.train_step()
            step = self.progress.step
            if self.data.validation and self._is_due(step, training.eval_every):
                self.evaluate()
            if self._is_due(step, self.configuration.checkpoint.every) or step == last:
                self.save()
        self.feed.close()
        return "finished" if self.progress.step >= training.steps else "stopped"

    def _is_due(self, step: int, every: int | None) -> bool:
        return step == self.configuration.training.steps or (every is not None and step % every == 0)

    def train_step(self) -> None:
        """One attempt at an update, with its line of metrics."""
        started = time.perf_counter()
        configuration, progress = self.configuration, self.progress
        batch = configuration.batch
        step = progress.step + 1
        rate = learning_rate(configuration.optimizer, configuration.training.steps, step)
        self.engine.set_learning_rate(rate)
        if step in configuration.monitor.dump_gradients:
            folder = Path(configuration.run.output_dir) / "gradients"
            self.engine.before_update = partial(dump_gradients, self.engine, folder, step)

        micro_batches = self.feed.step(step, progress.samples) if self.engine.reads_data else None
        result = self.engine.train_step(micro_batches)

        progress.step = step
        progress.samples += batch.global_batch_size
        progress.tokens += batch.global_batch_size * batch.sequence_length
        self._count_skips(result)
        if step % configuration.training.log_every == 0 or step == configuration.training.steps or result.skipped:
            self._log(result, rate, started)

    def _count_skips(self, result: StepResult) -> None:
        progress, limit = self.progress, self.configuration.training.skipped_in_a_row
        progress.skipped += result.skipped
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if result.skipped else 0
        if progress.skipped_in_a_row >= limit:
            raise TrainingFailure(
                f"{limit} steps in a row (to step {progress.step}) were skipped because a loss or gradient was not "
                "finite: the weights are those of the step before them"
            )

    def _log(self, result: StepResult, rate: float, started: float) -> None:
        """Gather what only single processes know, and write the step's metrics on rank 0."""
        losses = result.losses.tolist()  # waits for the device
        seconds = time.perf_counter() - started
        worst = torch.tensor([peak_memory_gib(), self.feed.wait_seconds], dtype=torch.float64, device=self.stage.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        clip, norm = self.configuration.optimizer.grad_clip, float(result.grad_norm)
        coefficient = min(1.0, clip / (norm + 1e-6)) if clip > 0 and math.isfinite(norm) else 1.0
        batch = self.configuration.batch
        memory, wait = worst.tolist()
        record: dict[str, Any] = {
            "step": self.progress.step,
            "loss": losses[0],
            "grad_norm": norm,
            "clip_coefficient": coefficient,
            "learning_rate": rate,
            "tokens": self.progress.tokens,
            "tokens_per_second": batch.global_batch_size * batch.sequence_length / seconds,
            "step_seconds": seconds,
            "data_wait_seconds": wait,
            "checkpoint_stall_seconds": self.checkpoint_stall_seconds,
            "mfu": self.flops_per_step / seconds / (self.peak * self.layout.world_size) if self.peak else None,
            "memory_gib": memory,
            "skipped": result.skipped,
        }
        if self.configuration.model.z_loss > 0:
            record["z_loss"] = losses[1]
        self.monitor.train(record)
        self.checkpoint_stall_seconds = 0.0

    def evaluate(self) -> None:
        """Loss on every held-out set; remembers the best mean."""
        training, batch = self.configuration.training, self.configuration.batch
        windows = training.eval_batches * batch.global_batch_size if training.eval_batches else None
        results = {name: self.evaluator(data, windows) for name, data in self.data.validation.items()}
        losses = {name: result.loss for name, result in results.items()}
        bits = {name: result.bits_per_byte for name, result in results.items()}
        mean = sum(losses.values()) / len(losses)
        best = self.progress.best_validation
        if math.isfinite(mean) and (best is None or mean < best):
            self.progress.best_validation = mean
        alone = set(losses) == {""}
        self.progress.validation = losses[""] if alone else losses
        self.monitor.validation(
            {
                "step": self.progress.step,
                "validation_loss": losses[""] if alone else losses,
                "validation_bits_per_byte": bits[""] if alone else bits,
            }
        )

    def save(self) -> None:
        """Write a checkpoint of this step; a file system that fails costs a warning, not the run."""
        if self.saved_step == self.progress.step:
            return
        started = time.perf_counter()
        folder = checkpoints_folder(self.configuration)
        self.monitor.sync()
        error = save_engine(self.engine, folder, self._manifest())
        if error is None:
            self.saved_step = self.progress.step
            keep = self.configuration.checkpoint.keep
            if keep is not None and self.engine.mesh.rank == 0:
                prune(folder, keep, self.run_id)
        else:
            self.monitor.say(f"warning: step {self.progress.step} could not be saved: {error}")
        self.checkpoint_stall_seconds += time.perf_counter() - started

    def _manifest(self) -> Manifest:
        progress = self.progress
        return Manifest(
            run_id=self.run_id,
            attempt=self.attempt,
            step=progress.step,
            samples=progress.samples,
            tokens=progress.tokens,
            adam_step=engine_adam_step(self.engine),
            best_validation=progress.best_validation,
            validation=progress.validation,
            layout={**asdict(self.layout), "schedule": self.configuration.parallel.schedule.value},
            model=self.configuration.model.model_dump(mode="json"),
            counters={"skipped": progress.skipped, "skipped_in_a_row": progress.skipped_in_a_row},
        )
