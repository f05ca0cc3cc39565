"""What a run does about a spike of the loss: say so, leave the update out, or go back and pass over the samples."""

from parallel.engine import StepResult, TrainingEngine
from training.batch_size import global_batch_size
from training.checkpoint import Checkpoint
from training.engine_state import restore_engine
from training.failure import TrainingFailure
from training.monitor import Monitor
from training.progress import Progress
from training.run_checkpoints import RunCheckpoints
from training.sections import Batch, SpikeAction, Training
from training.spikes import SpikeDetector


class SpikeResponse:
    """Does what `training.on_spike` says; nothing where it is not given.

    All processes know the same losses and call the same methods in the same order. The losses that the next one is
    compared with are kept in `Progress`, and so in every checkpoint.
    """

    def __init__(
        self,
        training: Training,
        batch: Batch,
        engine: TrainingEngine,
        checkpoints: RunCheckpoints,
        monitor: Monitor,
        progress: Progress,
    ) -> None:
        self.training = training
        self.batch = batch
        self.engine = engine
        self.checkpoints = checkpoints
        self.monitor = monitor
        self._detector = self._detector_at(progress)
        self._rewound_to = 0
        """Step gone back to last."""
        self._rewinds_in_a_row = 0
        """How often in a row it was that step."""
        if training.on_spike in (SpikeAction.SKIP, SpikeAction.REWIND):
            engine.refuse_update = self._refuses

    def _detector_at(self, progress: Progress) -> SpikeDetector | None:
        training = self.training
        if training.on_spike is None:
            return None
        detector = SpikeDetector(training.spike_window, training.spike_threshold, progress.recent_losses)
        progress.recent_losses = detector.losses
        return detector

    def _refuses(self, loss: float) -> bool:
        """Asked before each update, with the same loss on every rank: whether it shall not be made."""
        return self._detector is not None and self._detector.is_spike(loss)

    def look_at(self, result: StepResult, progress: Progress) -> str | None:
        """Describe and count the spike that the loss of the step after `progress` is; None where it is none.

        One whose update was made all the same is warned of here.
        """
        if self._detector is None:
            return None
        loss, spike = float(result.losses[0]), None
        if self._detector.is_spike(loss):
            spike = self._detector.describe(loss)
            progress.spikes += 1
        if not result.skipped:
            if spike:
                self.monitor.say(f"warning: step {progress.step + 1}: {spike}")
            self._detector.add(loss)
            progress.recent_losses = self._detector.losses
        return spike

    def rewind(self, spike: str, progress: Progress) -> Progress | None:
        """Go back to the newest checkpoint, pass over all samples since it and return where the run stands then.

        None where that is not asked for, or there is no checkpoint: then the step counts as skipped. Collective.
        """
        if self.training.on_spike is not SpikeAction.REWIND:
            return None
        step = progress.step + 1
        newest = self.checkpoints.newest()
        if newest is None:
            self.monitor.say(f"warning: step {step}: {spike}, and there is no checkpoint to go back to")
            return None
        checkpoint = Checkpoint.open(newest, verify=False)
        restore_engine(self.engine, checkpoint)
        checkpoint.close()
        rewound = Progress.of(checkpoint.manifest)
        first, end = rewound.samples, progress.samples + global_batch_size(self.batch, progress.samples)
        rewound.spikes = progress.spikes
        rewound.pass_over(end)
        self._detector = self._detector_at(rewound)
        back = rewound.step
        self.monitor.rewind(back, rewound.evaluated_step)
        self.monitor.say(f"step {step}: {spike}: back to step {back}, passing over samples {first} to {end - 1}")
        self._fail_at_the_limit(back)
        self.engine.phase.finished(back)
        self.checkpoints.save(rewound, again=True)  # so that a later start, too, passes over these samples
        return rewound

    def _fail_at_the_limit(self, back: int) -> None:
        """Fail where the run has gone back to this one step too often in a row: it does not get past it."""
        self._rewinds_in_a_row = self._rewinds_in_a_row + 1 if back == self._rewound_to else 1
        self._rewound_to = back
        if self._rewinds_in_a_row >= self.training.skipped_in_a_row:
            raise TrainingFailure(
                f"went back to step {back} {self._rewinds_in_a_row} times in a row because the loss was a spike"
            )
