"""The size of each step's batch: constant, or growing at the start of the run."""

from training.sections import Batch


def global_batch_size(batch: Batch, samples: int) -> int:
    """Sequences of the step that begins when `samples` sequences have been consumed.

    With `ramp_up` it starts at `start` and grows by `increment` at equal distances, so that it is `global_batch_size`
    once `ramp_up.samples` sequences have been consumed. A function of the samples alone, so a resumed run goes on
    with the size that it had.
    """
    ramp = batch.ramp_up
    if ramp is None or samples >= ramp.samples:
        return batch.global_batch_size
    increases = (batch.global_batch_size - ramp.start) // ramp.increment
    return ramp.start + ramp.increment * (samples * increases // ramp.samples)
