"""What a configuration becomes on a given number of processes, and with a given tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.configuration_checks import too_few_for_dualpipev
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
    for problem in too_few_for_dualpipev(configuration, data):
        raise ConfigurationError(problem)
    micro_batches = batch.global_batch_size // (batch.micro_batch_size * data)
    return Layout(parallel.pipeline, parallel.tensor, data, micro_batches)


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
