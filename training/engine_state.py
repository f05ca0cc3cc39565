"""Between an engine and a checkpoint: weights, moments and Adam's step out of the one and into the other.

A process writes the fragments it owns and reads the ranges it needs, so the layout that reads need not be the one that
wrote.
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from parallel.engine import TrainingEngine
from parallel.exchange import barrier, gather_json
from parallel.fragments import Fragment, adam_step, set_adam_step
from parallel.loss_scale import loss_scale_state, set_loss_scale_state
from parallel.plan import ParameterSlice
from training.checkpoint import (
    Checkpoint,
    CheckpointError,
    Manifest,
    Piece,
    RankFile,
    write_rank_file,
)
from training.checkpoint_manifest import Entry, box_size

KINDS = ("weight", "exp_avg", "exp_avg_sq")


def _true_length(part: ParameterSlice, offset: int, length: int) -> int:
    """Elements of a fragment that are no padding rows; padding stands at the end of a slice."""
    return max(0, min(length, box_size(part.box) - offset))


def owned_pieces(fragments: Iterator[Fragment]) -> Iterator[Piece]:
    """What this process writes to a checkpoint, as views."""
    for fragment in fragments:
        part = fragment.slice
        length = _true_length(part, fragment.offset, fragment.weight.numel())
        if not fragment.saved_here or not length:
            continue
        for kind in KINDS:
            tensor = getattr(fragment, kind).detach()[:length]
            yield Piece(part.name, kind, part.global_shape, part.box, fragment.offset, tensor)


def rank_file_from_json(value: dict) -> RankFile:
    """A rank file that another process described."""
    return RankFile(value["name"], value["size"], value["checksum"], tuple(map(Entry.from_json, value["entries"])))


def _write_together(folder: Path, rank: int, pieces: list[Piece]) -> tuple[list[RankFile] | None, str | None]:
    """Every process writes its file; rank 0 gets all of them, every process the first error (or None)."""
    rank_file, error = None, None
    try:
        rank_file = write_rank_file(folder, rank, pieces) if pieces else None
    except OSError as failure:
        error = f"{folder}: {failure.strerror or failure}"
    gathered = gather_json({"file": asdict(rank_file) if rank_file else None, "error": error})
    errors = [reply["error"] for reply in gathered if reply["error"]]
    files = [rank_file_from_json(reply["file"]) for reply in gathered if reply["file"]]
    return files, errors[0] if errors else None


def restore_engine(engine: TrainingEngine, checkpoint: Checkpoint) -> None:
    """Overwrite weights, and moments, Adam's step and the loss scale where the checkpoint has them. Collective.

    Raises `CheckpointError` where a parameter is missing or has another shape.
    """
    kinds = KINDS if "exp_avg" in checkpoint.kinds() else KINDS[:1]
    for fragment in engine.fragments():
        part = fragment.slice
        length = _true_length(part, fragment.offset, fragment.weight.numel())
        if checkpoint.shape(part.name) != part.global_shape:
            raise CheckpointError(
                f"{checkpoint.path}: {part.name} has shape {list(checkpoint.shape(part.name))}, "
                f"the model's has {list(part.global_shape)}"
            )
        with torch.no_grad():
            for kind in kinds:
                target = getattr(fragment, kind)
                target[length:].zero_()
                target[:length].copy_(checkpoint.read_range(part.name, kind, part.box, fragment.offset, length))
    set_adam_step(engine.engine, checkpoint.manifest.adam_step or 0)
    if (scale := checkpoint.manifest.counters.get("loss_scale")) is not None:
        set_loss_scale_state(engine.engine, scale)
    engine.weights_were_overwritten()


def load_weights(engine: TrainingEngine, checkpoint: Checkpoint) -> None:
    """Overwrite the weights that the model computes with, for an engine that has no optimizer."""
    for parameter in engine.parameters:
        part: ParameterSlice = parameter.slice  # type: ignore[attr-defined]
        length, flat = box_size(part.box), parameter.data.view(-1)
        flat[:length].copy_(checkpoint.read_range(part.name, "weight", part.box, 0, length))
        flat[length:].zero_()


def engine_adam_step(engine: TrainingEngine) -> int:
    """Updates that AdamW has made so far."""
    return adam_step(engine.engine)


def loss_scale(engine: TrainingEngine) -> dict[str, float] | None:
    """The state of fp16's moving loss scale; None where there is none."""
    return loss_scale_state(engine.engine)


def dump_gradients(engine: TrainingEngine, folder: Path, step: int) -> None:
    """Write the whole gradient of this step, by global name, to `folder`/step_00000001.safetensors. Collective.

    To be called before the update (`before_update`): gradients are reduced and not yet clipped. A loss scale that they
    still carry is taken off.
    """
    scale = float(getattr(engine.engine.optimizer, "loss_scale", 1.0))
    rank = engine.mesh.rank
    saved = {fragment.slice.name for fragment in engine.fragments() if fragment.saved_here}
    pieces = []
    for parameter, offset, gradient in engine.gradients():
        part: ParameterSlice = parameter.slice  # type: ignore[attr-defined]
        length = _true_length(part, offset, gradient.numel())
        if not length or part.name not in saved:
            continue
        value = gradient.detach()[:length].float() / scale
        pieces.append(Piece(part.name, "weight", part.global_shape, part.box, offset, value))
    partial = folder / f".step_{step:08d}.partial"
    files, error = _write_together(partial, rank, pieces)
    if error is not None:
        raise CheckpointError(error)
    if rank == 0:
        manifest = Manifest(run_id="gradients", step=step).with_files(files or [])
        whole = Checkpoint(partial, manifest)
        save_file({name: whole.read(name) for name in whole.names()}, folder / f"step_{step:08d}.safetensors")
        whole.close()
        shutil.rmtree(partial)
    barrier()
