"""What the keys of a configuration mean together: one sentence for each combination that cannot be.

Each check is a generator of sentences that begin with the key at fault; none of them needs torch or a device.
What depends on the number of processes is in `training.layout`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from parallel.schedules import Schedule
from training.configuration_file import describe
from training.sections import Dtype, LearningRateSchedule

if TYPE_CHECKING:
    from training.configuration import RunConfiguration

NOT_YET: dict[str, tuple[Any, ...] | None] = {
    "parallel.schedule": ("zero_bubble",),
    "monitor.profile": None,
    "monitor.timeline": None,
}
"""Keys whose part is not built yet, with the values that are refused (None: all but the default)."""

CONTEXT_PARALLELISM, EXPERTS, FP8 = "context parallelism", "mixture of experts", "FP8"

OUT_OF_SCOPE = {
    "parallel.context": CONTEXT_PARALLELISM,
    "parallel.context_parallel": CONTEXT_PARALLELISM,
    "parallel.context_parallel_size": CONTEXT_PARALLELISM,
    "parallel.cp": CONTEXT_PARALLELISM,
    "parallel.ring_attention": CONTEXT_PARALLELISM,
    "parallel.ulysses": CONTEXT_PARALLELISM,
    "parallel.expert": EXPERTS,
    "parallel.experts": EXPERTS,
    "parallel.expert_parallel": EXPERTS,
    "parallel.expert_parallel_size": EXPERTS,
    "parallel.ep": EXPERTS,
    "model.moe": EXPERTS,
    "model.num_experts": EXPERTS,
    "model.num_local_experts": EXPERTS,
    "model.num_experts_per_token": EXPERTS,
    "model.num_experts_per_tok": EXPERTS,
    "model.experts": EXPERTS,
    "model.top_k": EXPERTS,
    "model.router": EXPERTS,
    "precision.fp8": FP8,
    "precision.fp8_recipe": FP8,
    "deepspeed.moe": EXPERTS,
    "deepspeed.sequence_parallel_size": CONTEXT_PARALLELISM,
}
"""Keys that people know from other trainers, with what they stand for."""

DEEPSPEED_ALLOWED: dict[str, frozenset[str] | None] = {
    "zero_optimization": frozenset(
        {
            "reduce_bucket_size",
            "allgather_bucket_size",
            "overlap_comm",
            "sub_group_size",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
        }
    ),
    "fp16": frozenset(
        {
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        }
    ),
    "comms_logger": None,
    "flops_profiler": None,
    "wall_clock_breakdown": None,
    "memory_breakdown": None,
    "dump_state": None,
}
"""Keys of DeepSpeed's configuration that are passed on, each with its allowed inner keys (None: any value)."""

DEEPSPEED_DERIVED = {
    "train_batch_size": "batch.global_batch_size",
    "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "gradient_accumulation_steps": "batch.global_batch_size and batch.micro_batch_size",
    "optimizer": "the section optimizer",
    "scheduler": "optimizer.schedule",
    "gradient_clipping": "optimizer.grad_clip",
    "bf16": "precision.dtype",
    "bfloat16": "precision.dtype",
    "amp": "precision.dtype",
    "torch_autocast": "precision.dtype",
    "data_types": "precision.dtype",
    "communication_data_type": "precision.dtype",
    "fp16.enabled": "precision.dtype",
    "fp16.auto_cast": "precision.dtype",
    "zero_optimization.stage": "parallel.zero_stage",
    "zero_optimization.offload_optimizer": "parallel.offload_optimizer",
    "zero_optimization.cpu_offload": "parallel.offload_optimizer",
    "activation_checkpointing": "parallel.recompute",
    "pipeline": "parallel.pipeline",
    "tensor_parallel": "parallel.tensor",
    "elasticity": "parallel.elastic",
    "compile": "precision.compile",
    "checkpoint": "the section checkpoint",
    "tensorboard": "monitor.tensorboard",
    "steps_per_print": "training.log_every",
    "curriculum_learning": "batch.ramp_up",
    "seed": "run.seed",
}
"""Keys of DeepSpeed's configuration that follow from ours, with the one to set instead."""


def problems(configuration: RunConfiguration) -> Iterator[str]:
    """Yield a sentence for each combination of keys that cannot be, the most basic first."""
    yield from _not_built_yet(configuration)
    yield from _division_of_the_model(configuration)
    yield from _pipeline(configuration)
    yield from _zero(configuration)
    yield from _batch(configuration)
    yield from _optimizer(configuration)
    yield from _data(configuration)
    yield from _deepspeed(configuration)


def _not_built_yet(configuration: RunConfiguration) -> Iterator[str]:
    for key, refused in NOT_YET.items():
        section, name = key.split(".")
        holder = getattr(configuration, section)
        value, default = getattr(holder, name), type(holder).model_fields[name].get_default()
        if value != default if refused is None else value in refused:
            yield f"{key} is {describe(value)}, which is not built yet, expected {describe(default)}"


def _division_of_the_model(configuration: RunConfiguration) -> Iterator[str]:
    model, parallel = configuration.model, configuration.parallel
    tensor = parallel.tensor
    for key in ("num_heads", "num_kv_heads", "ffn_hidden_size"):
        if (value := getattr(model, key)) % tensor:
            yield f"model.{key} is {value} and must be divisible by parallel.tensor, which is {tensor}"
    if parallel.sequence_parallel:
        length = configuration.batch.sequence_length
        if tensor == 1:
            yield "parallel.sequence_parallel is true and needs parallel.tensor above 1, which is 1"
        elif length % tensor:
            yield (
                f"batch.sequence_length is {length} and must be divisible by parallel.tensor, which is {tensor}, "
                "with parallel.sequence_parallel"
            )


def _pipeline(configuration: RunConfiguration) -> Iterator[str]:
    blocks, parallel = configuration.model.num_layers, configuration.parallel
    stages, dualpipev = parallel.pipeline, parallel.schedule is Schedule.DUALPIPEV
    if stages > blocks:
        yield (
            f"parallel.pipeline is {stages} and must be at most model.num_layers, which is {blocks}: "
            "each stage needs a block"
        )
    elif dualpipev and stages == 1:
        yield "parallel.schedule is dualpipev and needs parallel.pipeline of at least 2, which is 1"
    elif dualpipev and 2 * stages > blocks:
        yield (
            f"parallel.pipeline is {stages} and must be at most {blocks // 2} with dualpipev, half of "
            f"model.num_layers, which is {blocks}: each stage has two chunks and each chunk needs a block"
        )
    if parallel.partition != "balanced":
        counts, shown = parallel.partition, describe(parallel.partition)
        entries, one_each = parallel.schedule.chunks(stages), "chunk (two a stage)" if dualpipev else "stage"
        if len(counts) != entries:
            yield f"parallel.partition is {shown}, expected {entries} block counts, one for each {one_each}"
        elif sum(counts) != blocks:
            yield f"parallel.partition is {shown}, {sum(counts)} blocks in all, expected model.num_layers, {blocks}"


def _zero(configuration: RunConfiguration) -> Iterator[str]:
    parallel = configuration.parallel
    if parallel.pipeline > 1 and parallel.zero_stage != 1:
        yield (
            f"parallel.zero_stage is {parallel.zero_stage} and must be 1 with a pipeline: "
            f"parallel.pipeline is {parallel.pipeline}"
        )
    elif parallel.zero_stage == 0 and configuration.precision.dtype is not Dtype.FP32:
        yield (
            f"parallel.zero_stage is 0 and must be 1, 2 or 3 with precision.dtype {configuration.precision.dtype}: "
            "without ZeRO DeepSpeed accumulates gradients in that format and not in fp32"
        )
    elif parallel.offload_optimizer and parallel.zero_stage < 2:
        yield (
            f"parallel.offload_optimizer is true and needs parallel.zero_stage 2 or 3, which is {parallel.zero_stage}"
        )


def _batch(configuration: RunConfiguration) -> Iterator[str]:
    batch, parallel = configuration.batch, configuration.parallel
    copies = parallel.data or 1
    if batch.global_batch_size % (batch.micro_batch_size * copies):
        divisor = f"batch.micro_batch_size, {batch.micro_batch_size}"
        if parallel.data:
            divisor = f"batch.micro_batch_size x parallel.data, {batch.micro_batch_size} x {copies}"
        yield f"batch.global_batch_size is {batch.global_batch_size} and must be divisible by {divisor}"
    else:
        yield from too_few_for_dualpipev(configuration, copies)
        yield from unfit_ramp_up(configuration, copies)


def unfit_ramp_up(configuration: RunConfiguration, copies: int) -> Iterator[str]:
    """Yield a sentence for each way in which a growing batch does not fit: every size must be whole micro-batches."""
    batch, ramp = configuration.batch, configuration.batch.ramp_up
    if ramp is None:
        return
    growth, unit = batch.global_batch_size - ramp.start, batch.micro_batch_size * copies
    if growth < 0:
        yield (
            f"batch.ramp_up.start is {ramp.start} and must be at most batch.global_batch_size, "
            f"which is {batch.global_batch_size}"
        )
    elif growth % ramp.increment:
        yield (
            f"batch.ramp_up.increment is {ramp.increment} and must divide batch.global_batch_size - "
            f"batch.ramp_up.start, which is {growth}"
        )
    for key, value in (("start", ramp.start), ("increment", ramp.increment)):
        if value % unit:
            yield (
                f"batch.ramp_up.{key} is {value} and must be divisible by batch.micro_batch_size x data, "
                f"{batch.micro_batch_size} x {copies}"
            )
    least = 2 * configuration.parallel.pipeline
    if configuration.parallel.schedule is Schedule.DUALPIPEV and ramp.start // unit < least:
        yield (
            f"batch.ramp_up.start is {ramp.start}, {ramp.start // unit} micro-batches, but parallel.schedule dualpipev "
            f"needs at least {least}"
        )


def too_few_for_dualpipev(configuration: RunConfiguration, copies: int) -> Iterator[str]:
    """Yield a sentence if a copy of the model gets fewer micro-batches a step than the schedule needs."""
    batch, stages = configuration.batch, configuration.parallel.pipeline
    micro_batches = batch.global_batch_size // (batch.micro_batch_size * copies)
    if configuration.parallel.schedule is Schedule.DUALPIPEV and micro_batches < 2 * stages:
        yield (
            f"parallel.schedule is dualpipev and needs at least {2 * stages} micro-batches, two for each stage, but "
            f"batch.global_batch_size {batch.global_batch_size} / (batch.micro_batch_size {batch.micro_batch_size} "
            f"x data {copies}) is {micro_batches}"
        )


def _optimizer(configuration: RunConfiguration) -> Iterator[str]:
    optimizer, schedule = configuration.optimizer, configuration.optimizer.schedule
    if schedule is LearningRateSchedule.CONSTANT and optimizer.decay_steps is not None:
        yield f"optimizer.decay_steps is {optimizer.decay_steps}, but optimizer.schedule constant has no decay"
    elif optimizer.decay_steps is not None and optimizer.decay_steps <= optimizer.warmup_steps:
        yield (
            f"optimizer.decay_steps is {optimizer.decay_steps} and must be above optimizer.warmup_steps, "
            f"which is {optimizer.warmup_steps}"
        )
    if optimizer.wsd_decay_steps is not None:
        end = optimizer.decay_steps or configuration.training.steps
        if schedule is not LearningRateSchedule.WSD:
            yield f"optimizer.wsd_decay_steps is {optimizer.wsd_decay_steps}, but optimizer.schedule is {schedule}"
        elif optimizer.wsd_decay_steps > end:
            yield (
                f"optimizer.wsd_decay_steps is {optimizer.wsd_decay_steps} and must be at most "
                f"{end}, the step on which the decay ends"
            )


def _data(configuration: RunConfiguration) -> Iterator[str]:
    data, training = configuration.data, configuration.training
    if data.tokenizer is None and configuration.model.vocab_size is None:
        yield "data.tokenizer is null and must be a tokenizer's file where model.vocab_size is not given"
    if data.tokenizer is None and data.document_mask:
        yield "data.document_mask is true and needs data.tokenizer, which knows the end of a document"
    if data.validation is None:
        for key in ("eval_every", "eval_batches"):
            if (value := getattr(training, key)) is not None:
                yield f"training.{key} is {value} and needs data.validation, which is null"


def _deepspeed(configuration: RunConfiguration) -> Iterator[str]:
    for key, value in configuration.deepspeed.items():
        if key not in DEEPSPEED_ALLOWED:
            yield _refused_for_deepspeed(key, value)
        elif (allowed := DEEPSPEED_ALLOWED[key]) is not None:
            if not isinstance(value, dict):
                yield f"deepspeed.{key} is {describe(value)}, expected keys with values"
                continue
            for inner, inner_value in value.items():
                if inner not in allowed:
                    yield _refused_for_deepspeed(f"{key}.{inner}", inner_value)
                elif inner.startswith(("stage3_", "sub_group")) and configuration.parallel.zero_stage != 3:
                    stage = configuration.parallel.zero_stage
                    yield f"deepspeed.{key}.{inner} is for parallel.zero_stage 3 only, which is {stage}"
    if "fp16" in configuration.deepspeed and configuration.precision.dtype is not Dtype.FP16:
        yield f"deepspeed.fp16 is for precision.dtype fp16 only, which is {configuration.precision.dtype}"


def _refused_for_deepspeed(key: str, value: Any) -> str:
    if ours := DEEPSPEED_DERIVED.get(key):
        return f"deepspeed.{key} is {describe(value)}, but it follows from {ours}: set that instead"
    allowed = [
        f"{outer}.{inner}" if inner else outer
        for outer, inner_keys in DEEPSPEED_ALLOWED.items()
        for inner in sorted(inner_keys or {""})
    ]
    return f"deepspeed.{key} is {describe(value)}, but only these keys are passed on: {', '.join(allowed)}"
