"""The learning rate of each step: a pure function of the step, so that nothing has to be saved or restored."""

import math

from training.sections import LearningRateSchedule, Optimizer


def learning_rate(optimizer: Optimizer, total_steps: int, step: int) -> float:
    """The learning rate of `step`, which counts from 1.

    During warm-up it is peak x step / warmup_steps. Then it decays and reaches min_ratio x peak on step decay_steps,
    counted from 0 (default: `total_steps`), and stays there. Constant does not decay; wsd decays in a straight line
    over its last part only, a fifth of decay_steps unless wsd_decay_steps is given.
    """
    if step < 1:
        raise ValueError(f"step is {step}, expected at least 1")
    peak, warmup, schedule = optimizer.learning_rate, optimizer.warmup_steps, optimizer.schedule
    if step <= warmup:
        return peak * step / warmup
    if schedule is LearningRateSchedule.CONSTANT:
        return peak
    end = optimizer.decay_steps or total_steps
    start: float = warmup
    if schedule is LearningRateSchedule.WSD:
        # Where warm-up reaches into the last part, the decay begins after it, from the peak.
        start = max(warmup, end - (optimizer.wsd_decay_steps or end / 5))
    if step >= end:
        return peak * optimizer.min_ratio
    if step <= start:
        return peak
    progress = (step - start) / (end - start)
    remaining = (1 + math.cos(math.pi * progress)) / 2 if schedule is LearningRateSchedule.COSINE else 1 - progress
    return peak * (optimizer.min_ratio + (1 - optimizer.min_ratio) * remaining)
