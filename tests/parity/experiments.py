"""Probes for single faults of the field; those for whole runs are in `tests.parity.probes`."""

import contextlib
import hashlib
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from model.attention import Attention
from model.block import Block
from parallel.engine import TrainingEngine, build_engine
from parallel.fragments import adam_step, flat_parameters
from parallel.loss import IGNORED, TokenLoss
from parallel.stages import make_side
from tests.parity import faults
from tests.parity.probes import configured, data_of, engine_of, mesh_of, no_group_left, trainer_of
from tests.parity.tables import TableData
from training.checkpoint import Checkpoint
from training.engine_state import restore_engine
from training.feed import TrainingFeed, sample_numbers
from training.progress import Progress
from training.setup import block_counts, engine_settings, stage_settings
from training.trainer import Trainer

MICRO_BATCH, LENGTH, MICRO_BATCHES = 8, 64, 5
"""Of the evaluation between steps: another number of samples, of tokens and of micro-batches than in training."""


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def nothing(device: torch.device) -> None:
    """Answer."""


def _save(trainer: Trainer) -> None:
    trainer.checkpoints.saver.saved_step = None
    trainer.checkpoints.save_at_the_end(trainer.progress)


def resume(
    device: torch.device, overrides: list[str], table: list[Any] | None, checkpoint: str, steps: int
) -> list[dict[str, Any]]:
    """Restore a checkpoint of any layout, write it once more to this run's folder, train on and return the metrics."""
    opened = Checkpoint.open(Path(checkpoint))
    manifest = opened.manifest
    progress = Progress(step=manifest.step, samples=manifest.samples, tokens=manifest.tokens)
    with trainer_of(device, overrides, table, progress) as (trainer, monitor):
        restore_engine(trainer.engine, opened)
        opened.close()
        _save(trainer)
        for _ in range(steps):
            trainer.train_step()
        trainer.feed.close()
    return monitor.records


def initial_values(device: torch.device, overrides: list[str], table: list[Any] | None) -> None:
    """Write a checkpoint of a model that was only just built."""
    with trainer_of(device, overrides, table) as (trainer, _):
        _save(trainer)
        trainer.feed.close()


def evaluate_between(
    device: torch.device, overrides: list[str], table: list[Any], evaluate: bool, fault: str | None = None
) -> dict[str, Any]:
    """Two steps, an evaluation of another shape or none, two steps; an evaluation before the first step, too."""
    losses = []
    with faults.planted(fault), trainer_of(device, overrides, table) as (trainer, monitor):
        for _ in range(2):
            if evaluate:
                losses.append(_evaluate(trainer, table))
            trainer.train_step()
            trainer.train_step()
        trainer.feed.close()
    return {"losses": losses, "records": monitor.records}


def evaluation_samples(table: list[Any]) -> TableData:
    """What `evaluate_between` evaluates: the first MICRO_BATCHES x MICRO_BATCH x data samples of these."""
    return TableData(table[0], LENGTH, ragged=table[1])


def _evaluate(trainer: Trainer, table: list[Any]) -> float:
    mesh, samples = trainer.engine.mesh, evaluation_samples(table)
    numbers = [sample_numbers(0, index, MICRO_BATCH, mesh.data, mesh.data_rank) for index in range(MICRO_BATCHES)]
    micro_batches = [samples.micro_batch(part) for part in numbers]
    given = [(batch.tokens, (batch.targets, torch.ones(()))) for batch in micro_batches]
    mean = trainer.engine.evaluate(given if trainer.engine.reads_data else None, MICRO_BATCHES)
    return float(mean[0]) * MICRO_BATCHES * mesh.data


def what_is_read(
    device: torch.device, overrides: list[str], table: list[Any] | None, steps: int, first_step: int = 1
) -> dict[str, Any]:
    """Digests of (inputs, targets) of every micro-batch that this process reads, and where it stands; no engine."""
    configuration, layout = configured(overrides)
    mesh = mesh_of(layout.pipeline, layout.tensor, layout.data)
    stage = stage_settings(configuration, mesh, device)
    feed = TrainingFeed(data_of(configuration, table).train, stage, configuration.batch)
    digests = []
    for step in range(first_step, first_step + steps):
        for inputs, (targets, _) in feed.step(step, (step - 1) * configuration.batch.global_batch_size):
            digests.append(_digest(inputs[0] if isinstance(inputs, tuple) else inputs, targets))
    feed.close()
    return {"pipeline": mesh.pipeline_rank, "tensor": mesh.tensor_rank, "data": mesh.data_rank, "digests": digests}


def update_lengths(
    device: torch.device, overrides: list[str], table: list[Any] | None, clip: float, fault: str | None = None
) -> dict[str, Any]:
    """One step of SGD at rate 1: the norm that the engine reports, and the length of the update of what is held."""
    configuration, layout = configured([*overrides, f"optimizer.grad_clip={clip}"])
    mesh = mesh_of(layout.pipeline, layout.tensor, layout.data)
    stage = stage_settings(configuration, mesh, device)
    with faults.planted(fault), no_group_left():
        engine = build_engine(
            stage,
            engine_settings(configuration, layout),
            configuration.parallel.schedule,
            block_counts(configuration),
            partial(torch.optim.SGD, lr=1.0),  # type: ignore[arg-type]
        )
        feed = TrainingFeed(data_of(configuration, table).train, stage, configuration.batch)
        before = [flat.detach().clone() for flat in flat_parameters(engine.engine)]
        result = engine.train_step(feed.step(1, 0) if engine.reads_data else None)
        feed.close()
        flats = zip(flat_parameters(engine.engine), before, strict=True)
        square = sum(float((flat.detach() - old).double().square().sum()) for flat, old in flats)
        engine.engine.destroy()
    return {"norm": float(result.grad_norm), "update": math.sqrt(square)}


def _state(engine: TrainingEngine) -> str:
    parts = [t for f in engine.fragments() for t in (f.weight, f.exp_avg, f.exp_avg_sq)]
    # Under ZeRO 3 what the model computes with is its partition; the whole comes and goes.
    low = [(p.ds_tensor if hasattr(p, "ds_id") else p).detach().float() for p in engine.parameters]
    return _digest(*parts, *low)


@contextlib.contextmanager
def _spoiled(trainer: Trainer, kind: str, rank: int) -> Iterator[None]:
    """On this rank alone make a gradient, or only the recorded loss, not a number."""
    if dist.get_rank() != rank:
        yield
        return
    if kind == "gradient":
        matrices = [p for p in trainer.engine.parameters if p.ndim == 2 or hasattr(p, "ds_id")]
        handle = matrices[-1].register_hook(lambda gradient: gradient * math.nan)
        yield
        handle.remove()
        return
    original = TokenLoss.total
    with mock.patch.object(TokenLoss, "total", lambda self: original(self) + math.inf):
        yield


def skipped_step(
    device: torch.device, overrides: list[str], table: list[Any] | None, kind: str, rank: int
) -> dict[str, Any]:
    """Two sound steps, one spoiled on one rank, one sound step; digests of all that an update changes, between them."""
    with trainer_of(device, overrides, table) as (trainer, monitor):
        trainer.train_step()
        trainer.train_step()
        before = _state(trainer.engine)
        with _spoiled(trainer, kind, rank):
            trainer.train_step()
        after = _state(trainer.engine)
        adam = adam_step(trainer.engine.engine)
        trainer.train_step()
        last = _state(trainer.engine)
        trainer.feed.close()
    records = [
        {key: repr(record[key]) for key in ("step", "loss", "grad_norm", "skipped")} for record in monitor.records
    ]
    return {"before": before, "after": after, "last": last, "adam": adam, "records": records}


def step_without_targets(device: torch.device, overrides: list[str], table: list[Any] | None) -> dict[str, Any]:
    """One step in which no token is a target; how each parameter changed, and what was reported."""
    changes: dict[str, float] = {}
    with trainer_of(device, overrides, table) as (trainer, monitor):
        original = trainer.feed.step

        def without_targets(step: int, first: int) -> Any:
            return [
                (inputs, (torch.full_like(targets, IGNORED), torch.zeros(())))
                for inputs, (targets, _) in original(step, first)
            ]

        trainer.feed.step = without_targets  # type: ignore[method-assign]
        before = [(f.slice.name, f.weight.clone()) for f in trainer.engine.fragments()]
        trainer.train_step()
        for (name, old), fragment in zip(before, trainer.engine.fragments(), strict=True):
            there = old != 0
            ratios = fragment.weight[there] / old[there]
            changes[name] = float((ratios - ratios.mean()).abs().max()) + abs(float(ratios.mean()))
        adam = adam_step(trainer.engine.engine)
        trainer.feed.close()
    record = monitor.records[0]
    kept = {key: record[key] for key in ("loss", "grad_norm", "skipped", "learning_rate")}
    return {**kept, "adam": adam, "changes": changes}


def what_is_repeated(device: torch.device, overrides: list[str], table: list[Any] | None) -> dict[str, int]:
    """How often, in one step, branches of blocks are computed and each kind of collective is called by the model."""
    counts = dict.fromkeys(("branches", "attention", "all_reduce", "all_gather_single", "reduce_scatter_single"), 0)

    def counting(name: str, original: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            counts[name] += 1
            return original(*arguments, **keywords)

        return call

    with trainer_of(device, overrides, table) as (trainer, _), contextlib.ExitStack() as stack:
        batch = trainer.feed.step(1, 0)
        for name in ("all_reduce", "all_gather_single", "reduce_scatter_single"):
            wrapped = counting(name, getattr(dist, name))
            stack.enter_context(mock.patch(f"parallel.collectives.dist.{name}", wrapped))
        for kind in (Block.attention_branch, Block.feed_forward_branch):
            stack.enter_context(mock.patch.object(Block, kind.__name__, counting("branches", kind)))
        stack.enter_context(mock.patch.object(Attention, "forward", counting("attention", Attention.forward)))
        trainer.engine.train_step(batch)
        trainer.feed.close()
    return counts


def replicas(device: torch.device, overrides: list[str], table: list[Any] | None) -> dict[str, Any]:
    """Train to the end; digests of the parameters held here, by name, with the part of each that it is."""
    with trainer_of(device, overrides, table) as (trainer, _):
        trainer.run()
        mesh = trainer.engine.mesh
        found = {p.slice.name: [list(map(list, p.slice.box)), _digest(p.data)] for p in trainer.engine.parameters}  # type: ignore[attr-defined]
    return {"tensor": mesh.tensor_rank, "pipeline": mesh.pipeline_rank, "parameters": found}


def same_batch_twice(device: torch.device, overrides: list[str], table: list[Any] | None) -> list[float]:
    """Gradient norms of two steps over the same samples at a learning rate of 0."""
    with trainer_of(device, [*overrides, "optimizer.learning_rate=0.0"], table) as (trainer, monitor):
        trainer.train_step()
        trainer.progress.samples = 0
        trainer.train_step()
        trainer.feed.close()
    return [record["grad_norm"] for record in monitor.records]


def rotary_in_use(
    device: torch.device, overrides: list[str], table: list[Any] | None, fault: str | None = None
) -> list[list[list[float]]]:
    """Cosines and sines that the first block turns by, in an engine that was initialized, as float32."""
    seen: list[tuple[Tensor, Tensor]] = []
    original = Attention.forward

    def forward(self: Any, x: Tensor, context: Any) -> Tensor:
        seen.append(context.rotary)
        return original(self, x, context)

    configuration, layout = configured(overrides)
    with faults.planted(fault), engine_of(configuration, layout, device) as (stage, engine):
        with mock.patch.object(Attention, "forward", forward):
            tokens = torch.zeros(1, configuration.batch.sequence_length, dtype=torch.int64)
            inputs = (tokens, make_side(torch.zeros(1, dtype=torch.int64), 0, None)) if stage.has_side else tokens
            engine.evaluate([(inputs, (tokens, torch.ones(())))], 1)
    return [table.float().tolist() for table in seen[0]]
