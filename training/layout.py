"""What a configuration becomes on a given number of processes, and with a given tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parallel.schedules import Schedule
from training.configuration_checks import problems, too_few_for_dualpipev, unfit_ramp_up
from training.configuration_file import ConfigurationError

if TYPE_CHECKING:
    from training.configuration import RunConfiguration


@dataclass(frozen=True)
class Layout:
    """How many ways the model and the batch are divided; pipeline x tensor x data processes in all."""

    pipeline: int
    """Stages."""
    tensor: int
    """Processes that share each weight matrix."""
    data: int
    """Copies of the model."""
    micro_batches: int
    """Micro-batches that each copy runs in a step."""

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pipeline * self.tensor * self.data


def check_world(configuration: RunConfiguration, world_size: int) -> Layout:
    """The layout of `world_size` processes. Raises ConfigurationError, one sentence, where they do not fit."""
    parallel, batch = configuration.parallel, configuration.batch
    one_copy = parallel.pipeline * parallel.tensor
    wanted = one_copy * (parallel.data or 1)
    if world_size % one_copy or (parallel.data and world_size != wanted):
        sizes = f"pipeline {parallel.pipeline} x tensor {parallel.tensor}"
        if parallel.data:
            number, sizes = str(wanted), f"{sizes} x data {parallel.data}"
        else:
            # More processes than one copy needs were meant to be several copies: a multiple is what is missing.
            number = str(wanted) if world_size < wanted or one_copy == 1 else f"a multiple of {wanted}"
        raise ConfigurationError(
            f"this configuration wants {number} processes ({sizes}), found {world_size}: "
            f"start it with  deepspeed --num_gpus {wanted} launcher/train.py ..."
        )
    data = world_size // one_copy
    if batch.global_batch_size % (batch.micro_batch_size * data):
        raise ConfigurationError(
            f"batch.global_batch_size is {batch.global_batch_size} and must be divisible by batch.micro_batch_size x "
            f"data, {batch.micro_batch_size} x {data}, where data is {world_size} processes / (pipeline "
            f"{parallel.pipeline} x tensor {parallel.tensor})"
        )
    for problem in (*too_few_for_dualpipev(configuration, data), *unfit_ramp_up(configuration, data)):
        raise ConfigurationError(problem)
    micro_batches = batch.global_batch_size // (batch.micro_batch_size * data)
    return Layout(parallel.pipeline, parallel.tensor, data, micro_batches)


def choose_layout(configuration: RunConfiguration, world_size: int) -> tuple[RunConfiguration, str]:
    """The configuration with pipeline, tensor and data chosen for `world_size` processes, and a sentence that says why.

    Of all layouts that the rules allow, the one nearest to the configured one: first those on which a process holds no
    more of the model than it was configured to, then those with the same tensor size, the same pipeline, and the
    smallest change of either; what is left goes to data. global_batch_size stays, and so does micro_batch_size where it
    divides what each copy gets. Raises ConfigurationError where no layout fits.
    """
    wanted = configuration.parallel
    candidates = [
        candidate
        for pipeline in _divisors(world_size)
        for tensor in _divisors(world_size // pipeline)
        for candidate in _adapted(configuration, pipeline, tensor, world_size // (pipeline * tensor))
    ]
    if not candidates:
        raise ConfigurationError(
            f"parallel.elastic found no pipeline x tensor x data for {world_size} processes with "
            f"{configuration.model.num_layers} blocks, {configuration.model.num_heads} heads and "
            f"batch.global_batch_size {configuration.batch.global_batch_size}: start another number of processes"
        )

    def distance(candidate: RunConfiguration) -> tuple[float, ...]:
        parallel = candidate.parallel
        held = parallel.pipeline * parallel.tensor
        return (
            held < wanted.pipeline * wanted.tensor,
            abs(math.log2(parallel.tensor / wanted.tensor)),
            abs(math.log2(parallel.pipeline / wanted.pipeline)),
            -candidate.batch.micro_batch_size,
        )

    best = min(candidates, key=distance)
    return best, _say_choice(configuration, best, world_size, len(candidates))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _adapted(configuration: RunConfiguration, pipeline: int, tensor: int, data: int) -> Iterator[RunConfiguration]:
    """The configuration on this layout with the largest micro-batch that fits, if the rules allow any.

    What makes sense on the configured layout only gives way: a partition by hand, the two chunks of dualpipev, the
    division of the sequence.
    """
    wanted, batch = configuration.parallel, configuration.batch
    changes: dict[str, Any] = {"pipeline": pipeline, "tensor": tensor, "data": data}
    if pipeline != wanted.pipeline:
        changes["partition"] = "balanced"
    if tensor == 1:
        changes["sequence_parallel"] = False
    schedules = [wanted.schedule] + ([Schedule.ONE_F_ONE_B] if wanted.schedule is Schedule.DUALPIPEV else [])
    for schedule in schedules:
        parallel = wanted.model_copy(update={**changes, "schedule": schedule})
        for micro_batch_size in reversed(_divisors(batch.micro_batch_size)):
            smaller = batch.model_copy(update={"micro_batch_size": micro_batch_size})
            candidate = configuration.model_copy(update={"parallel": parallel, "batch": smaller})
            if not any(problems(candidate)):
                yield candidate
                return


def _say_choice(configuration: RunConfiguration, chosen: RunConfiguration, world_size: int, possible: int) -> str:
    wanted, parallel = configuration.parallel, chosen.parallel
    same = (parallel.pipeline, parallel.tensor) == (wanted.pipeline, wanted.tensor)
    given = f"pipeline {wanted.pipeline} x tensor {wanted.tensor}"
    why = f"as configured ({given}), the rest is data" if same else f"the nearest of {possible} to {given}"
    if parallel.pipeline * parallel.tensor < wanted.pipeline * wanted.tensor:
        why += "; each process holds more of the model than there"
    micro_batches = chosen.batch.global_batch_size // (chosen.batch.micro_batch_size * (parallel.data or 1))
    changed = [
        f"{key} {old} -> {new}"
        for key, old, new in (
            ("schedule", wanted.schedule.value, parallel.schedule.value),
            ("partition", wanted.partition, parallel.partition),
            ("sequence_parallel", wanted.sequence_parallel, parallel.sequence_parallel),
            ("micro_batch_size", configuration.batch.micro_batch_size, chosen.batch.micro_batch_size),
        )
        if old != new
    ]
    return (
        f"elastic: {world_size} processes are pipeline {parallel.pipeline} x tensor {parallel.tensor} x data "
        f"{parallel.data}: {why}; {micro_batches} micro-batches of {chosen.batch.micro_batch_size}"
        + (f" ({', '.join(changed)})" if changed else "")
    )


def with_vocabulary(configuration: RunConfiguration, tokenizer_size: int) -> RunConfiguration:
    """The configuration with model.vocab_size known: as given, else the tokenizer's number of ids.

    Published models may have more ids than their tokenizer, so that is allowed; fewer is not, and raises
    ConfigurationError.
    """
    vocab_size = configuration.model.vocab_size
    if vocab_size is None:
        model = configuration.model.model_copy(update={"vocab_size": tokenizer_size})
        return configuration.model_copy(update={"model": model})
    if tokenizer_size > vocab_size:
        raise ConfigurationError(
            f"model.vocab_size is {vocab_size} and must be at least {tokenizer_size}, "
            f"the number of ids of {configuration.data.tokenizer}"
        )
    return configuration
