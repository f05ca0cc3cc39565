"""Everything a run is made of, built in order: tokenizer and data, mesh, engine."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.batches import Source, TrainingData, ValidationData
from data.tokenizer import Tokenizer, load_tokenizer
from model.configuration import ModelConfiguration
from model.costs import layer_costs
from parallel.engine import TrainingEngine, build_engine
from parallel.mesh import Mesh, build_mesh
from parallel.partition import partition_blocks
from parallel.stages import StageSettings
from parallel.zero import EngineSettings
from training.configuration import ConfigurationError, Dtype, Layout, RunConfiguration, with_vocabulary
from training.optimizer import optimizer_factory

TORCH_DTYPES = {Dtype.FP32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}


@dataclass(frozen=True)
class RunData:
    """Tokenizer and data sets of a run, opened and checked."""

    tokenizer: Tokenizer | None
    train: TrainingData
    validation: dict[str, ValidationData]
    """Name to data set; a single one has the empty name."""
    token_bytes: np.ndarray | None
    """[vocabulary] bytes of text that each token id stands for; None without a tokenizer."""


def open_data(configuration: RunConfiguration, pin_memory: bool = False) -> tuple[RunConfiguration, RunData]:
    """Open tokenizer and data files and return the configuration with its vocabulary known.

    Raises `data.errors.DataError` or `ConfigurationError`, one sentence, where a file is missing or damaged, where a
    tokenizer has more ids than the model, or where the text has ids that the model lacks.
    """
    section, batch = configuration.data, configuration.batch
    tokenizer = load_tokenizer(section.tokenizer) if section.tokenizer else None
    if tokenizer is not None:
        configuration = with_vocabulary(configuration, tokenizer.vocab_size)
    elif configuration.model.vocab_size is None:
        raise ConfigurationError("model.vocab_size is not given, and neither is data.tokenizer, which would tell it")
    common: dict[str, Any] = {
        "sequence_length": batch.sequence_length,
        "end_of_document": tokenizer.end_of_document if tokenizer is not None else None,
        "document_mask": section.document_mask,
        "vocab_size": configuration.model.vocab_size,
        "pin_memory": pin_memory,
    }
    sources = [Source(source.path, source.weight) for source in section.train]
    train = TrainingData(sources, seed=configuration.run.seed, **common)
    validation = {name: ValidationData(prefix, **common) for name, prefix in section.validation_sets.items()}
    token_bytes = None
    if tokenizer is not None:
        token_bytes = np.zeros(configuration.model.vocabulary, dtype=np.int64)
        token_bytes[: tokenizer.vocab_size] = tokenizer.token_bytes()
    return configuration, RunData(tokenizer, train, validation, token_bytes)


def check_compiler(configuration: RunConfiguration) -> None:
    """Raise `ConfigurationError` where blocks are to be compiled and this machine has no compiler."""
    compiler = os.environ.get("CXX", "g++")
    if configuration.precision.compile and shutil.which(compiler) is None:
        raise ConfigurationError(
            f"precision.compile is true and needs a C++ compiler, but {compiler} is not found: install one, name it in "
            "CXX, or set precision.compile to false"
        )


def block_counts(configuration: RunConfiguration) -> list[int]:
    """Blocks of each stage (of each chunk, under dualpipev), as given or balanced by the cost of each layer."""
    parallel = configuration.parallel
    if parallel.partition != "balanced":
        return list(parallel.partition)
    chunks = parallel.schedule.chunks(parallel.pipeline)
    return balanced_blocks(configuration.model, configuration.batch.sequence_length, chunks)


def balanced_blocks(model: ModelConfiguration, sequence_length: int, chunks: int) -> list[int]:
    """Blocks of each chunk, so that the most costly one costs least."""
    costs = layer_costs(model, sequence_length)
    return partition_blocks(model.num_layers, chunks, costs.block.flops, costs.embedding.flops, costs.head.flops)


def stage_settings(configuration: RunConfiguration, mesh: Mesh, device: torch.device) -> StageSettings:
    """What the layers of a stage need to know, out of the configuration."""
    parallel = configuration.parallel
    return StageSettings(
        model=configuration.model,
        mesh=mesh,
        device=device,
        dtype=TORCH_DTYPES[configuration.precision.dtype],
        seed=configuration.run.seed,
        sequence_parallel=parallel.sequence_parallel,
        recompute=parallel.recompute,
        document_mask=configuration.data.document_mask,
        compile=configuration.precision.compile,
    )


def engine_settings(configuration: RunConfiguration, layout: Layout) -> EngineSettings:
    """What DeepSpeed needs to know, out of the configuration."""
    return EngineSettings(
        micro_batch_size=configuration.batch.micro_batch_size,
        micro_batches=layout.micro_batches,
        data=layout.data,
        zero_stage=configuration.parallel.zero_stage,
        offload_optimizer=configuration.parallel.offload_optimizer,
        grad_clip=configuration.optimizer.grad_clip,
        dtype=configuration.precision.dtype.value,
        passed_through=dict(configuration.deepspeed),
    )


def build(
    configuration: RunConfiguration, layout: Layout, device: torch.device, mesh: Mesh | None = None
) -> tuple[StageSettings, TrainingEngine]:
    """Build mesh (unless one of this layout is given), this process's part of the model and its engine. Collective."""
    mesh = mesh or build_mesh(layout.pipeline, layout.tensor, layout.data)
    stage = stage_settings(configuration, mesh, device)
    engine = build_engine(
        stage,
        engine_settings(configuration, layout),
        configuration.parallel.schedule,
        block_counts(configuration),
        optimizer_factory(configuration.optimizer),
    )
    return stage, engine


def checkpoints_folder(configuration: RunConfiguration) -> Path:
    """Where the run's checkpoints stand."""
    return Path(configuration.run.output_dir) / "checkpoints"
