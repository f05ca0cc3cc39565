"""The loss scale of fp16: a number that follows the overflows of the past, so a checkpoint must hold it."""

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def _scaler(engine: DeepSpeedEngine) -> Any | None:
    """The object that holds it, under ZeRO one kind and without another; None where the scale does not move."""
    for name, moves in (("loss_scaler", "dynamic"), ("loss_scale_config", "dynamic_loss_scale")):
        holder = getattr(engine.optimizer, name, None)
        if holder is not None and getattr(holder, moves, False):
            return holder
    return None


def loss_scale_state(engine: DeepSpeedEngine) -> dict[str, float] | None:
    """All of it as plain numbers; None where the loss is not scaled or its scale is fixed."""
    scaler = _scaler(engine)
    if scaler is None:
        return None
    return {key: getattr(scaler, key) for key in KEYS if getattr(scaler, key, None) is not None}


def set_loss_scale_state(engine: DeepSpeedEngine, state: dict[str, float]) -> None:
    """Put back what `loss_scale_state` gave; nothing where this engine's loss scale does not move."""
    scaler = _scaler(engine)
    if scaler is not None:
        for key, value in state.items():
            if hasattr(scaler, key):
                setattr(scaler, key, value)
