"""The training loop: one step after another until the last, with evaluation, metrics and checkpoints on the way."""

import math
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from model.costs import parameter_count, training_flops_per_token
from parallel.device import dense_peak, peak_memory_gib
from parallel.engine import StepResult, TrainingEngine
from parallel.exchange import gather_json, maximum
from parallel.stages import StageSettings
from training.background_save import Saver
from training.batch_size import global_batch_size
from training.checkpoint import Checkpoint, Manifest, newest_sound
from training.configuration import Layout, RunConfiguration, SpikeAction
from training.engine_state import dump_gradients, engine_adam_step, loss_scale, restore_engine
from training.evaluation import Evaluator
from training.failure import TrainingFailure
from training.feed import TrainingFeed
from training.learning_rate import learning_rate
from training.loading import tokenizer_identity
from training.monitor import Monitor
from training.progress import Progress
from training.setup import RunData, checkpoints_folder
from training.spikes import SpikeDetector
from training.status import State, is_current
from training.stop_requests import Reason, StopRequests

__all__ = ["Ending", "Progress", "Trainer", "TrainingFailure"]

BYTES_A_PARAMETER = 12
"""Of a checkpoint: weight and two moments, fp32."""
LAST_SAVE_PAUSES = (1.0, 2.0, 4.0)
"""Seconds between attempts at the last save, which no later step can make up for."""


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
        self.data = data
        self.stage = stage
        self.engine = engine
        self.monitor = monitor
        self.run_id = run_id
        self.attempt = attempt
        self.progress = progress
        self.stops = stops
        batch, run_dir = configuration.batch, Path(configuration.run.output_dir)
        self.feed = TrainingFeed(data.train, stage, batch)
        self.evaluator = Evaluator(engine, stage, batch.micro_batch_size, data.token_bytes)
        self.flops_per_token = training_flops_per_token(configuration.model, batch.sequence_length)
        self.peak = dense_peak(configuration.precision.dtype.value)
        self.saver = Saver(
            engine,
            checkpoints_folder(configuration),
            run_id=run_id,
            keep=configuration.checkpoint.keep,
            needed_bytes=BYTES_A_PARAMETER * parameter_count(configuration.model),
            still_current=lambda: is_current(run_dir, attempt),
            before_publishing=monitor.sync,
            say=monitor.say,
        )
        self.saver.saved_step = progress.step
        self.tokenizer = tokenizer_identity(data.tokenizer.path.absolute()) if data.tokenizer is not None else None
        self.checkpoint_stall_seconds = 0.0
        self.stop = Reason.NONE
        """Why all ranks have agreed to stop."""
        self.worst = {"memory_gib": 0.0, "data_wait_seconds": 0.0}
        """The largest of all ranks, as of the last step boundary."""
        self.spikes = self._spike_detector()
        self.spike: str | None = None
        """What is said of this step's loss, where it is a spike."""
        self._rewinds = (0, 0)
        """Step gone back to last, and how often in a row."""

    def run(self) -> Ending:
        """Train to the last step, or to the first step boundary after a request to stop."""
        training = self.configuration.training
        last = min(training.steps, training.stop_after or training.steps)
        if (report := self.saver.space_report()) is not None:
            self.monitor.say(f"warning: {report}")
        self.meet()
        self.evaluate_if_due()  # where the last start was stopped before it
        while self.progress.step < last and not self.stop:
            self.train_step()
            self.evaluate_if_due()
            if self._is_due(self.configuration.checkpoint.every) or self._retry_is_due():
                self.save()
        if self.stops is not None and self.stop:
            self.stops.fulfilled()
        self.save_at_the_end()
        self.feed.close()
        self.saver.close()
        if self.progress.step >= training.steps and not self._evaluation_is_due():
            return Ending(State.FINISHED)
        return Ending(State.STOPPED, self.stop.sentence or f"training.stop_after is {training.stop_after}")

    def _is_due(self, every: int | None) -> bool:
        step = self.progress.step
        return step == self.configuration.training.steps or (every is not None and step % every == 0)

    def _retry_is_due(self) -> bool:
        return self.saver.retry_step is not None and self.progress.step >= self.saver.retry_step

    def meet(self) -> None:
        """A step boundary: all ranks compare notes, in one message, and carry a save on that is being written."""
        asked = self.stops.reason if self.stops is not None else Reason.NONE
        notes = [float(asked), float(self.saver.is_busy), peak_memory_gib(), self.feed.wait_seconds]
        stop, busy, memory, wait = maximum(notes)
        self.stop = Reason(int(stop))
        self.worst = {"memory_gib": memory, "data_wait_seconds": wait}
        if self.saver.under_way is not None:
            with self._stalling("carrying a save on"):
                self.saver.carry_on(bool(busy), self.progress.step)

    # ---- a step

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
        self._look_for_a_spike(result)
        if self.spike and configuration.training.on_spike is SpikeAction.REWIND and self._rewind(step):
            return

        progress.step = step
        progress.samples += sequences
        progress.tokens += sequences * batch.sequence_length
        self.engine.phase.enter("agreeing with all ranks")
        self.meet()
        self.engine.phase.finished(step)
        if step % configuration.training.log_every == 0 or step == configuration.training.steps or result.skipped:
            self._log(result, rate, sequences * batch.sequence_length, started)
        self._count_skips(result)

    def _count_skips(self, result: StepResult) -> None:
        progress, limit = self.progress, self.configuration.training.skipped_in_a_row
        progress.skipped += result.skipped
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if result.skipped else 0
        if result.skipped:
            why = self.spike or "a loss or gradient is not finite"
            count = f"{progress.skipped} so far, {progress.skipped_in_a_row} in a row"
            self.monitor.say(f"step {progress.step} was skipped: {why} ({count})")
        if progress.skipped_in_a_row >= limit:
            what = "the loss was a spike" if self.spike else "a loss or gradient was not finite"
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
            "checkpoint_stall_seconds": self.checkpoint_stall_seconds,
            "checkpoint_failures": self.saver.failures,
            "mfu": self._mfu(tokens, seconds),
            "skipped": result.skipped,
            "skipped_steps": self.progress.skipped + result.skipped,
        }
        if self.configuration.model.z_loss > 0:
            record["z_loss"] = losses[1]
        if self.spikes is not None:
            record["spikes"] = self.progress.spikes
        self.monitor.train(record)
        self.checkpoint_stall_seconds = 0.0

    def _mfu(self, tokens: int, seconds: float) -> float | None:
        """Useful work as a part of what all devices could do; None where their peak is not known."""
        return tokens * self.flops_per_token / seconds / (self.peak * self.layout.world_size) if self.peak else None

    # ---- spikes of the loss

    def _spike_detector(self) -> SpikeDetector | None:
        training = self.configuration.training
        if training.on_spike is None:
            return None
        if training.on_spike is not SpikeAction.WARN:
            self.engine.refuse_update = self._refuses
        return SpikeDetector(training.spike_window, training.spike_threshold, self.progress.recent_losses)

    def _refuses(self, loss: float) -> bool:
        """Asked before each update, with the same loss on every rank: whether it shall not be made."""
        return self.spikes is not None and self.spikes.is_spike(loss)

    def _look_for_a_spike(self, result: StepResult) -> None:
        self.spike = None
        if self.spikes is None:
            return
        loss = float(result.losses[0])
        if self.spikes.is_spike(loss):
            self.spike = self.spikes.describe(loss)
            self.progress.spikes += 1
        if not result.skipped:
            if self.spike:
                self.monitor.say(f"warning: step {self.progress.step + 1}: {self.spike}")
            self.spikes.add(loss)

    def _rewind(self, step: int) -> bool:
        """Go back to the newest checkpoint and pass over all samples since it; False where there is none."""
        self.saver.finish(self.engine.phase.alive)
        folder, spikes = checkpoints_folder(self.configuration), self.progress.spikes
        newest = newest_sound(folder, self.run_id)[0] if self.engine.mesh.rank == 0 else None
        newest = gather_json(str(newest) if newest else None)[0]
        if newest is None:
            self.monitor.say(f"warning: step {step}: {self.spike}, and there is no checkpoint to go back to")
            return False
        checkpoint = Checkpoint.open(newest, verify=False)
        restore_engine(self.engine, checkpoint)
        checkpoint.close()
        end = self.progress.samples + global_batch_size(self.configuration.batch, self.progress.samples)
        self.progress = Progress.of(checkpoint.manifest)
        first, back = self.progress.samples, self.progress.step
        self.progress.spikes = spikes
        self.progress.pass_over(end)
        self.spikes = self._spike_detector()
        self.monitor.rewind(back, self.progress.evaluated_step)
        self.monitor.say(f"step {step}: {self.spike}: back to step {back}, passing over samples {first} to {end - 1}")
        self._rewinds = (back, self._rewinds[1] + 1 if self._rewinds[0] == back else 1)
        if self._rewinds[1] >= self.configuration.training.skipped_in_a_row:
            raise TrainingFailure(
                f"went back to step {back} {self._rewinds[1]} times in a row because the loss was a spike"
            )
        self.engine.phase.finished(back)
        self.save(again=True)  # with the samples that are passed over, so that a later start knows of them
        return True

    # ---- evaluation

    def _evaluation_is_due(self) -> bool:
        due = self.progress.step > self.progress.evaluated_step and self._is_due(self.configuration.training.eval_every)
        return due and bool(self.data.validation)

    def evaluate_if_due(self) -> None:
        """Evaluate after the steps that ask for it. Not before a stop: the next start makes up for it."""
        if self._evaluation_is_due() and not self.stop:
            self.evaluate()
            self.meet()
            self.engine.phase.alive()

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
        self.progress.evaluated_step = self.progress.step
        self.monitor.validation(
            {
                "step": self.progress.step,
                "validation_loss": losses[""] if alone else losses,
                "validation_bits_per_byte": bits[""] if alone else bits,
            }
        )

    # ---- checkpoints

    def _stalling(self, doing: str) -> "_Stall":
        self.engine.phase.enter(doing)
        return _Stall(self)

    def save(self, again: bool = False) -> None:
        """Begin to write a checkpoint of this step; a file system that fails costs a warning, not the run."""
        step = self.progress.step
        if self.saver.saved_step == step and not again:
            return
        with self._stalling(f"saving step {step}"):
            if (slow := self.saver.under_way) is not None:
                self.monitor.say(f"warning: step {slow} is still being saved when step {step} is due; waiting for it")
                self.saver.finish(self.engine.phase.alive)
            self.saver.begin(self._manifest())
            if not self.configuration.checkpoint.asynchronous:
                self.saver.finish(self.engine.phase.alive)

    def save_at_the_end(self) -> None:
        """Wait for the save that is under way, and save the last step if it is not saved. Fails where that fails."""
        step = self.progress.step
        self.saver.at_the_end = True
        with self._stalling(f"saving step {step}, the last"):
            self.saver.finish(self.engine.phase.alive)
            for pause in (*LAST_SAVE_PAUSES, None):
                if self.saver.saved_step != step:
                    self.saver.begin(self._manifest())
                    self.saver.finish(self.engine.phase.alive)
                if self.saver.saved_step == step:
                    return
                if pause is not None:
                    time.sleep(pause)
        raise TrainingFailure(f"step {step} is trained but could not be saved: {self.saver.last_error}")

    def _manifest(self) -> Manifest:
        progress = self.progress
        if self.spikes is not None:
            progress.recent_losses = self.spikes.losses
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
            tokenizer=self.tokenizer,
            sequence_length=self.configuration.batch.sequence_length,
            document_mask=self.configuration.data.document_mask,
            passed_over=progress.passed_over,
            counters={**progress.counters(), "loss_scale": loss_scale(self.engine)},
        )


class _Stall:
    """Counts the seconds of a block as time that training stood still for a checkpoint."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.trainer.checkpoint_stall_seconds += time.perf_counter() - self.began
