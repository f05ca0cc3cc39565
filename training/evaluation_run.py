"""Evaluation of a checkpoint by many processes: each holds its part of the weights, and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from data.batches import ValidationData
from data.errors import DataError
from model.configuration import ModelConfiguration
from parallel.environment import Environment
from parallel.exchange import gather_json
from parallel.mesh import build_mesh
from parallel.pipeline_engine import EvaluationSteps
from parallel.stages import StageSettings
from training.checkpoint import Checkpoint, CheckpointError
from training.engine_state import load_weights
from training.evaluation import Evaluator, ValidationResult
from training.loading import check_complete, document_mask, model_configuration, open_checkpoint
from training.setup import balanced_blocks
from training.start import StartError, join

VERIFYING = timedelta(hours=2)
"""How long a collective may take: the others wait while one process reads a whole checkpoint to verify it."""

Text = tuple[ValidationData, np.ndarray]
"""What is predicted, and how many bytes of text each token id stands for."""

T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """Which model is evaluated, and on what layout; data-parallel processes are what is left of the world."""

    source: Path
    """A run or a checkpoint."""
    pipeline: int
    tensor: int
    batch_size: int
    """Windows that a data-parallel process takes at once."""
    dtype: torch.dtype | None
    """Of weights and activations; None: float32 on a CPU, else bfloat16."""


def evaluate_together(
    question: Question,
    environment: Environment,
    open_text: Callable[[Checkpoint], Text],
    progress: Callable[[ValidationData], Callable[[int], None]],
) -> ValidationResult:
    """Loss of the checkpoint's model over all of a text. Collective; the result stands on rank 0.

    `open_text` is called on every process, `progress` on those that read the text; what it returns is told the windows
    that are done. Raises `StartError`, one sentence and on every process alike, for what the user can mend.
    """
    device = join(environment, VERIFYING)
    found = _on_all(lambda: str(open_checkpoint(question.source).path) if environment.rank == 0 else "")
    checkpoint = Checkpoint.open(gather_json(found)[0], verify=False)

    def prepare() -> tuple[ModelConfiguration, Text]:
        model = model_configuration(checkpoint)
        check_complete(checkpoint, model)
        _check_layout(question, model)
        # What plays a part in training alone is left out.
        return model.model_copy(update={"dropout": 0.0, "z_loss": 0.0}), open_text(checkpoint)

    model, (data, token_bytes) = _on_all(prepare)
    data_size = environment.world_size // (question.pipeline * question.tensor)
    stage = StageSettings(
        model=model,
        mesh=build_mesh(question.pipeline, question.tensor, data_size),
        device=device,
        dtype=question.dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16),
        document_mask=document_mask(checkpoint),
    )
    blocks = balanced_blocks(model, data.sequence_length, question.pipeline)
    engine = EvaluationSteps(stage, blocks, question.batch_size)
    load_weights(engine, checkpoint)
    checkpoint.close()
    evaluator = Evaluator(engine, stage, question.batch_size, token_bytes)
    if engine.reads_data:
        evaluator.progress = progress(data)
    return evaluator(data)


def _on_all(action: Callable[[], T]) -> T:
    """What `action` returns here; where it is a mistake on any process, all raise its sentence. Collective."""
    result, mistake = None, None
    try:
        result = action()
    except (CheckpointError, DataError, OSError) as error:
        mistake = str(error)
    if mistakes := [found for found in gather_json(mistake) if found]:
        raise StartError(mistakes[0])
    return result  # type: ignore[return-value]


def _check_layout(question: Question, model: ModelConfiguration) -> None:
    if question.pipeline > model.num_layers:
        raise CheckpointError(
            f"--pipeline is {question.pipeline} and must be at most {model.num_layers}: the model has so many blocks"
        )
    for key in ("num_heads", "num_kv_heads", "ffn_hidden_size"):
        if (value := getattr(model, key)) % question.tensor:
            raise CheckpointError(f"--tensor is {question.tensor} and must divide the model's {key}, which is {value}")
