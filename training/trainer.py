"""The training loop: one step after another until the last, with evaluation, metrics and checkpoints on the way."""

import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from model.costs import training_flops_per_token
from parallel.device import dense_peak, peak_memory_gib
from parallel.engine import StepResult, TrainingEngine
from parallel.exchange import maximum
from parallel.stages import StageSettings
from training.batch_size import global_batch_size
from training.configuration import Layout, RunConfiguration
from training.engine_state import dump_gradients
from training.evaluation import Evaluator
from training.evaluation_schedule import EvaluationSchedule
from training.failure import TrainingFailure
from training.feed import TrainingFeed
from training.learning_rate import learning_rate
from training.monitor import Monitor
from training.progress import Progress
from training.run_checkpoints import RunCheckpoints
from training.setup import RunData
from training.spike_response import SpikeResponse
from training.status import State
from training.stop_requests import Reason, StopRequests


@dataclass(frozen=True)
class Ending:
    """How a run ended that did not fail."""

    state: State
    reason: str | None = None
    """Why it stopped before its last step."""


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
        stops: StopRequests | None = None,
    ) -> None:
        self.configuration = configuration
        self.layout = layout
        self.engine = engine
        self.monitor = monitor
        self.progress = progress
        self.stops = stops
        training, batch = configuration.training, configuration.batch
        self.feed = TrainingFeed(data.train, stage, batch)
        evaluator = Evaluator(engine, stage, batch.micro_batch_size, data.token_bytes)
        self.evaluation = EvaluationSchedule(training, batch, evaluator, data.validation, monitor)
        self.checkpoints = RunCheckpoints(
            configuration, layout, data.tokenizer, engine, monitor, run_id, attempt, saved_step=progress.step
        )
        self.spikes = SpikeResponse(training, batch, engine, self.checkpoints, monitor, progress)
        self.flops_per_token = training_flops_per_token(configuration.model, batch.sequence_length)
        self.peak = dense_peak(configuration.precision.dtype.value)
        self.stop = Reason.NONE
        """Why all ranks have agreed to stop."""
        self.worst = {"memory_gib": 0.0, "data_wait_seconds": 0.0}
        """The largest of all ranks, as of the last step boundary."""

    def run(self) -> Ending:
        """Train to the last step, or to the first step boundary after a request to stop."""
        training = self.configuration.training
        last = min(training.steps, training.stop_after or training.steps)
        if (report := self.checkpoints.saver.space_report()) is not None:
            self.monitor.say(f"warning: {report}")
        self.meet()
        self.evaluate_if_due()  # where the last start was stopped before it
        while self.progress.step < last and not self.stop:
            self.train_step()
            self.evaluate_if_due()
            if self.checkpoints.is_due(self.progress.step):
                self.checkpoints.save(self.progress)
        if self.stops is not None and self.stop:
            self.stops.fulfilled()
        self.checkpoints.save_at_the_end(self.progress)
        self.feed.close()
        self.checkpoints.saver.close()
        if self.progress.step >= training.steps and not self.evaluation.is_due(self.progress):
            return Ending(State.FINISHED)
        return Ending(State.STOPPED, self.stop.sentence or f"training.stop_after is {training.stop_after}")

    def evaluate_if_due(self) -> None:
        """Evaluate after the steps that ask for it. Not before a stop: the next start makes up for it."""
        if self.evaluation.is_due(self.progress) and not self.stop:
            self.evaluation.evaluate(self.progress)
            self.meet()
            self.engine.phase.alive()

    def meet(self) -> None:
        """A step boundary: all ranks compare notes, in one message, and carry a save on that is being written."""
        asked = self.stops.reason if self.stops is not None else Reason.NONE
        notes = [float(asked), float(self.checkpoints.saver.is_busy), peak_memory_gib(), self.feed.wait_seconds]
        stop, busy, memory, wait = maximum(notes)
        self.stop = Reason(int(stop))
        self.worst = {"memory_gib": memory, "data_wait_seconds": wait}
        self.checkpoints.carry_on(bool(busy), self.progress.step)

    def train_step(self) -> None:
        """One attempt at an update, with its line of metrics."""
        started = time.perf_counter()
        configuration, progress = self.configuration, self.progress
        batch = configuration.batch
        step = progress.step + 1
        rate = learning_rate(configuration.optimizer, configuration.training.steps, step)
        self.engine.set_learning_rate(rate)
        sequences = global_batch_size(batch, progress.samples)
        self.engine.set_micro_batches(sequences // (batch.micro_batch_size * self.layout.data))
        if step in configuration.monitor.dump_gradients:
            folder = Path(configuration.run.output_dir) / "gradients"
            self.engine.before_update = partial(dump_gradients, self.engine, folder, step)

        self.engine.phase.enter("waiting for data")
        micro_batches = self.feed.step(step, progress.samples) if self.engine.reads_data else None
        result = self.engine.train_step(micro_batches)
        spike = self.spikes.look_at(result, progress)
        if spike and (rewound := self.spikes.rewind(spike, progress)) is not None:
            self.progress = rewound
            return

        progress.step = step
        progress.samples += sequences
        progress.tokens += sequences * batch.sequence_length
        self.engine.phase.enter("agreeing with all ranks")
        self.meet()
        self.engine.phase.finished(step)
        if configuration.training.is_due(configuration.training.log_every, step) or result.skipped:
            self._log(result, rate, sequences * batch.sequence_length, started)
        self._count_skips(result, spike)

    def _count_skips(self, result: StepResult, spike: str | None) -> None:
        """Say so where the step was skipped, and fail where too many were, one after another."""
        progress, limit = self.progress, self.configuration.training.skipped_in_a_row
        progress.skipped += result.skipped
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if result.skipped else 0
        if result.skipped:
            why = spike or "a loss or gradient is not finite"
            count = f"{progress.skipped} so far, {progress.skipped_in_a_row} in a row"
            self.monitor.say(f"step {progress.step} was skipped: {why} ({count})")
        if progress.skipped_in_a_row >= limit:
            what = "the loss was a spike" if spike else "a loss or gradient was not finite"
            raise TrainingFailure(
                f"{limit} steps in a row (to step {progress.step}) were skipped because {what}: "
                "the weights are those of the step before them"
            )

    def _log(self, result: StepResult, rate: float, tokens: int, started: float) -> None:
        """Write the step's metrics on rank 0."""
        losses = result.losses.tolist()  # waits for the device
        seconds = time.perf_counter() - started
        clip, norm = self.configuration.optimizer.grad_clip, float(result.grad_norm)
        coefficient = min(1.0, clip / (norm + 1e-6)) if clip > 0 and math.isfinite(norm) else 1.0
        record: dict[str, Any] = {
            "step": self.progress.step,
            "loss": losses[0],
            "grad_norm": norm,
            "clip_coefficient": coefficient,
            "learning_rate": rate,
            "tokens": self.progress.tokens,
            "tokens_per_second": tokens / seconds,
            "step_seconds": seconds,
            **self.worst,
            "checkpoint_stall_seconds": self.checkpoints.stall_seconds,
            "checkpoint_failures": self.checkpoints.saver.failures,
            "mfu": self._mfu(tokens, seconds),
            "skipped": result.skipped,
            "skipped_steps": self.progress.skipped + result.skipped,
        }
        if self.configuration.model.z_loss > 0:
            record["z_loss"] = losses[1]
        if self.configuration.training.on_spike is not None:
            record["spikes"] = self.progress.spikes
        self.monitor.train(record)
        self.checkpoints.stall_seconds = 0.0

    def _mfu(self, tokens: int, seconds: float) -> float | None:
        """Useful work as a part of what all devices could do; None where their peak is not known."""
        return tokens * self.flops_per_token / seconds / (self.peak * self.layout.world_size) if self.peak else None
