"""DeepSpeed's own configuration, derived from ours; nobody writes it by hand."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class EngineSettings:
    """What an engine needs to know besides the model."""

    micro_batch_size: int
    """Samples of one micro-batch on one data-parallel process."""
    micro_batches: int
    """Micro-batches of one step on one data-parallel process."""
    data: int
    """Data-parallel size."""
    zero_stage: int = 1
    offload_optimizer: bool = False
    grad_clip: float = 0.0
    """Largest norm of the gradient (0: no clipping)."""
    dtype: str = "fp32"
    """fp32, bf16 or fp16."""
    passed_through: dict[str, Any] = field(default_factory=dict)
    """The `deepspeed` section of the configuration."""


def deepspeed_configuration(settings: EngineSettings, on_cpu: bool) -> dict[str, Any]:
    """Return the dictionary that `deepspeed.initialize` would read from a JSON file."""
    zero: dict[str, Any] = {
        "stage": settings.zero_stage,
        # Gradients are reduced once a step by the pipeline engine, so there is nothing to overlap or to stage there.
        "contiguous_gradients": settings.zero_stage >= 2,
        "overlap_comm": settings.zero_stage >= 2 and not on_cpu,
        # Bucket sizes are memory that is really allocated; a CPU run has small models.
        "reduce_bucket_size": 5_000_000 if on_cpu else 100_000_000,
        "allgather_bucket_size": 50_000_000 if on_cpu else 200_000_000,
    }
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": not on_cpu}
    configuration: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": settings.micro_batch_size,
        "gradient_accumulation_steps": settings.micro_batches,
        "train_batch_size": settings.micro_batch_size * settings.micro_batches * settings.data,
        "zero_optimization": zero,
        # ZeRO 0 hands the update to torch's optimizer, so we clip ourselves (see `parallel.engine.PlainSteps`).
        "gradient_clipping": settings.grad_clip if settings.zero_stage else 0.0,
        # Ours is torch's own fused AdamW: nothing is compiled at first use.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # By default stages send each other slices of the activations and join them again over the tensor group: wrong
        # where the tensor-parallel processes hold different parts of the sequence, and impossible for dualpipev.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    if settings.dtype != "fp32":
        # By default gradients would be rounded to 16 bits before they are averaged, whatever they were accumulated in.
        configuration["communication_data_type"] = "fp32"
    if settings.dtype == "bf16":
        configuration["bf16"] = {"enabled": True, "check_grad_overflow": True}
        configuration["data_types"] = {"grad_accum_dtype": "fp32"}
    if settings.dtype == "fp16":
        configuration["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
    for key, value in settings.passed_through.items():
        if isinstance(value, dict) and isinstance(configuration.get(key), dict):
            configuration[key] = {**configuration[key], **value}
        else:
            configuration[key] = value
    return configuration


def refusal(settings: EngineSettings) -> str | None:
    """What the device or DeepSpeed will refuse when the engine is made, in one sentence; None where nothing."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.config import DeepSpeedConfig

    accelerator = get_accelerator()
    device = accelerator.device_name()
    if settings.dtype == "fp16" and not accelerator.is_fp16_supported():
        return f"precision.dtype is fp16, in which this device ({device}) does not compute, expected bf16 or fp32"
    if not settings.passed_through:
        return None
    # All that it asks of a model-parallel unit.
    unit = SimpleNamespace(get_data_parallel_world_size=lambda: settings.data)
    try:
        DeepSpeedConfig(deepspeed_configuration(settings, device == "cpu"), unit)
    except Exception as error:  # each of its parts has its own
        what = " ".join(str(error).split())
        return f"the section deepspeed is refused by DeepSpeed ({type(error).__name__}): {what[:300]}"
    return None
