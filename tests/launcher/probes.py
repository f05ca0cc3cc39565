"""What the processes of a pool are asked to do: what the commands do once their processes have met."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher import evaluate as command
from parallel.environment import Environment
from tests.parity.probes import mesh_of, trainer_of
from training import evaluation_run
from training.checkpoint import Checkpoint
from training.engine_state import restore_engine
from training.progress import Progress


def evaluate(device: torch.device, arguments: list[str], folder: str) -> dict[str, Any]:
    """launcher/evaluate.py with these arguments; what it would write as JSON."""
    evaluation_run.build_mesh = mesh_of  # its process groups are never freed
    evaluation_run.join = lambda *_: device  # the processes have met
    options = command.build_parser().parse_args(arguments)
    rank, size = dist.get_rank(), dist.get_world_size()
    command.check(options, size)
    own = Path(folder) / f"rank-{rank}"
    own.mkdir(parents=True, exist_ok=True)
    environment = Environment(rank, rank, size, "127.0.0.1", 1, "torch")
    return asdict(command.evaluate_together(options, environment, own))


def train(device: torch.device, overrides: list[str], start: str | None = None) -> list[dict[str, Any]]:
    """Train configs/parity.yaml with these overrides, from another's weights if a checkpoint is named."""
    with trainer_of(device, overrides) as (trainer, monitor):
        if start is not None:
            restore_engine(trainer.engine, Checkpoint.open(start))
        trainer.run()
    return monitor.records


def save_again(device: torch.device, overrides: list[str], checkpoint: str) -> None:
    """Load all of a checkpoint on the layout of `overrides` and save it in run.output_dir, without a step."""
    opened = Checkpoint.open(checkpoint)
    with trainer_of(device, overrides, progress=Progress.of(opened.manifest)) as (trainer, _):
        restore_engine(trainer.engine, opened)
        trainer.checkpoints.save(trainer.progress, again=True)
        trainer.checkpoints.saver.finish(trainer.engine.phase.alive)
        trainer.checkpoints.saver.close()
        trainer.feed.close()
