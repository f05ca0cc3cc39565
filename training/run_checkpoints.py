"""The checkpoints of a run: when one is due, what it says of the run, and how long training stood still for it.

How the files are written while training goes on is the matter of `training.background_save`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from data.tokenizer import Tokenizer
from model.costs import parameter_count
from parallel.engine import TrainingEngine
from parallel.exchange import gather_json
from training.background_save import Saver
from training.checkpoint import Manifest, newest_sound
from training.configuration import Layout, RunConfiguration
from training.engine_state import engine_adam_step, loss_scale
from training.failure import TrainingFailure
from training.loading import tokenizer_identity
from training.monitor import Monitor
from training.progress import Progress
from training.setup import checkpoints_folder
from training.status import is_current

BYTES_A_PARAMETER = 12
"""Of a checkpoint: weight and two moments, fp32."""
LAST_SAVE_PAUSES = (1.0, 2.0, 4.0)
"""Seconds between attempts at the last save, which no later step can make up for."""


class RunCheckpoints:
    """Saves a run that trains. All processes call the same methods in the same order."""

    def __init__(
        self,
        configuration: RunConfiguration,
        layout: Layout,
        tokenizer: Tokenizer | None,
        engine: TrainingEngine,
        monitor: Monitor,
        run_id: str,
        attempt: int,
        saved_step: int,
    ) -> None:
        self.configuration = configuration
        self.layout = layout
        self.tokenizer = tokenizer_identity(tokenizer.path.absolute()) if tokenizer is not None else None
        self.engine = engine
        self.monitor = monitor
        self.run_id = run_id
        self.attempt = attempt
        self.stall_seconds = 0.0
        """How long training stood still for checkpoints since its last line of metrics, which sets this to 0."""
        run_dir = Path(configuration.run.output_dir)
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
        self.saver.saved_step = saved_step

    def is_due(self, step: int) -> bool:
        """Whether to save at this step boundary, by the configuration or because a save failed."""
        planned = self.configuration.training.is_due(self.configuration.checkpoint.every, step)
        return planned or (self.saver.retry_step is not None and step >= self.saver.retry_step)

    def save(self, progress: Progress, again: bool = False) -> None:
        """Begin to write a checkpoint of this step; a file system that fails costs a warning, not the run."""
        step = progress.step
        if self.saver.saved_step == step and not again:
            return
        with self._stalling(f"saving step {step}"):
            if (slow := self.saver.under_way) is not None:
                self.monitor.say(f"warning: step {slow} is still being saved when step {step} is due; waiting for it")
                self.saver.finish(self.engine.phase.alive)
            self.saver.begin(self._manifest(progress))
            if not self.configuration.checkpoint.asynchronous:
                self.saver.finish(self.engine.phase.alive)

    def carry_on(self, some_are_busy: bool, step: int) -> None:
        """Take a save that is under way further, at the boundary of `step`; see `Saver.carry_on`. Collective."""
        if self.saver.under_way is not None:
            with self._stalling("carrying a save on"):
                self.saver.carry_on(some_are_busy, step)

    def save_at_the_end(self, progress: Progress) -> None:
        """Wait for the save that is under way, and save the last step if it is not saved. Fails where that fails."""
        step = progress.step
        self.saver.at_the_end = True
        with self._stalling(f"saving step {step}, the last"):
            self.saver.finish(self.engine.phase.alive)
            for pause in (*LAST_SAVE_PAUSES, None):
                if self.saver.saved_step != step:
                    self.saver.begin(self._manifest(progress))
                    self.saver.finish(self.engine.phase.alive)
                if self.saver.saved_step == step:
                    return
                if pause is not None:
                    time.sleep(pause)
        raise TrainingFailure(f"step {step} is trained but could not be saved: {self.saver.last_error}")

    def newest(self) -> Path | None:
        """The newest sound one, after the save that is under way; None where there is none. Collective."""
        self.saver.finish(self.engine.phase.alive)
        found = newest_sound(self.saver.checkpoints, self.run_id)[0] if self.engine.mesh.rank == 0 else None
        path = gather_json(str(found) if found else None)[0]
        return Path(path) if path else None

    @contextmanager
    def _stalling(self, doing: str) -> Iterator[None]:
        """Count the seconds of a block as time that training stood still."""
        self.engine.phase.enter(doing)
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stall_seconds += time.perf_counter() - began

    def _manifest(self, progress: Progress) -> Manifest:
        configuration = self.configuration
        return Manifest(
            run_id=self.run_id,
            attempt=self.attempt,
            step=progress.step,
            samples=progress.samples,
            tokens=progress.tokens,
            adam_step=engine_adam_step(self.engine),
            best_validation=progress.best_validation,
            validation=progress.validation,
            layout={**asdict(self.layout), "schedule": configuration.parallel.schedule.value},
            model=configuration.model.model_dump(mode="json"),
            tokenizer=self.tokenizer,
            sequence_length=configuration.batch.sequence_length,
            document_mask=configuration.data.document_mask,
            passed_over=progress.passed_over,
            counters={**progress.counters(), "loss_scale": loss_scale(self.engine)},
        )
