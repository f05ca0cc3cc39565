"""A trained model for use on one device: weights, configuration and tokenizer out of any layout's checkpoint."""

import sys
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from model.configuration import ModelConfiguration
from model.initialization import parameter_shapes
from model.language_model import LanguageModel
from training.checkpoint import Checkpoint, CheckpointError, find
from training.configuration_file import ConfigurationError, read_file
from training.tensor_file import file_checksum

TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json")


def open_checkpoint(given: Path | str) -> Checkpoint:
    """The checkpoint meant by a run, a folder of checkpoints or a checkpoint, every file of it verified.

    Where a run's newest is damaged and an older one is taken, standard error says so.
    """
    path = find(given, say=lambda report: print(f"warning: {report}", file=sys.stderr))
    return Checkpoint.open(path, verify=path == Path(given))  # for a run, `find` has verified it already


def model_configuration(checkpoint: Checkpoint) -> ModelConfiguration:
    """The model that the manifest describes."""
    try:
        return ModelConfiguration(**checkpoint.manifest.model)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{checkpoint.path}: its manifest's model has {place}: {first['msg']}") from error


def check_complete(checkpoint: Checkpoint, model: ModelConfiguration) -> None:
    """CheckpointError unless the checkpoint holds exactly the model's parameters, in their shapes."""
    shapes, names = parameter_shapes(model), set(checkpoint.names())
    for name in sorted(names ^ set(shapes)):
        what = "holds" if name in names else "lacks"
        raise CheckpointError(
            f"{checkpoint.path} {what} {name}, which does not fit the model that its manifest describes"
        )
    for name, shape in shapes.items():
        if checkpoint.shape(name) != tuple(shape):
            raise CheckpointError(
                f"{checkpoint.path}: {name} has shape {checkpoint.shape(name)} and not {tuple(shape)}"
            )


def load_model(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """The plain model with the checkpoint's weights, ready for inference; one tensor at a time beside it in memory."""
    configuration = model_configuration(checkpoint)
    check_complete(checkpoint, configuration)
    with torch.device("meta"):
        model = LanguageModel(configuration)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False).eval()
    for name, parameter in model.named_parameters():
        parameter.copy_(checkpoint.read(name))
    checkpoint.close()
    return model


def tokenizer_identity(path: Path | str) -> dict[str, str]:
    """What a manifest says of a tokenizer file."""
    return {"path": str(path), "digest": file_checksum(Path(path))}


def tokenizer_path(checkpoint: Checkpoint, given: Path | str | None = None) -> Path:
    """The tokenizer that the checkpoint was trained with, or `given`.

    Looked for where the manifest says, where the run's configuration says, then in the run's folder and beside the
    weights. CheckpointError where there is none, or where the file's content is not what the manifest remembers.
    """
    if given is not None:
        return Path(given)
    run = _run_folder(checkpoint)
    known = checkpoint.manifest.tokenizer or {}
    named = [known.get("path"), _run_configuration(checkpoint).get("data", {}).get("tokenizer")]
    beside = [folder / name for folder in (run, checkpoint.path) for name in TOKENIZER_FILES]
    places = [Path(place) for place in named if place] + beside
    files = [place for place in places if place.is_file()]
    if not files:
        where = str(places[0]) if named[0] or named[1] else f"a tokenizer file in {run}"
        raise CheckpointError(f"{where} is missing: say where the tokenizer is with --tokenizer PATH")
    for file in files:
        if "digest" not in known or file_checksum(file) == known["digest"]:
            return file
    raise CheckpointError(
        f"{files[0]} is not the tokenizer that {checkpoint.path} was trained with: give that one with --tokenizer PATH"
    )


def sequence_length(checkpoint: Checkpoint) -> int | None:
    """Tokens of a training sequence, from the manifest or the run's configuration; None where neither says it."""
    if checkpoint.manifest.sequence_length is not None:
        return checkpoint.manifest.sequence_length
    length = _run_configuration(checkpoint).get("batch", {}).get("sequence_length")
    return int(length) if length is not None else None


def document_mask(checkpoint: Checkpoint) -> bool:
    """Whether the run kept attention within documents (`data.document_mask`); no where that is not known."""
    if checkpoint.manifest.document_mask is not None:
        return checkpoint.manifest.document_mask
    return bool(_run_configuration(checkpoint).get("data", {}).get("document_mask", False))


def _run_folder(checkpoint: Checkpoint) -> Path:
    return checkpoint.path.absolute().parent.parent


def _run_configuration(checkpoint: Checkpoint) -> dict[str, Any]:
    """config.yaml of the run that the checkpoint lies in; empty where there is none (a checkpoint that was moved)."""
    path = _run_folder(checkpoint) / "config.yaml"
    try:
        sections = read_file(path) if path.is_file() else {}
    except ConfigurationError as error:
        raise CheckpointError(str(error)) from error
    return {name: section for name, section in sections.items() if isinstance(section, dict)}
