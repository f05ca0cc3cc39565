"""Small random models for the tests of what reads checkpoints: saved as any layout would, with a tokenizer beside."""

import functools
import json
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from data.tokenizer_training import train_tokenizer
from model.configuration import ModelConfiguration
from model.language_model import LanguageModel
from training.checkpoint import Manifest, Piece, partial_folder, publish, write_rank_file
from training.loading import tokenizer_identity

STDLIB = Path(sysconfig.get_paths()["stdlib"])
SPLIT = {"embedding": 0, "head": 0, "query": 0, "key": 0, "value": 0, "up": 0, "gate": 0, "output": 1, "down": 1}
VOCABULARY = 515
"""Three more ids than the tokenizer has, as published models do; divisible by no tensor size."""


def texts() -> list[str]:
    return [path.read_text() for path in sorted((STDLIB / "json").glob("*.py"))]


@functools.cache
def _tokenizer_model() -> bytes:
    return train_tokenizer(texts(), 512)


def write_tokenizer(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.model"
    path.write_bytes(_tokenizer_model())
    return path


def configuration(**changes: object) -> ModelConfiguration:
    values = {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "vocab_size": VOCABULARY, **changes}
    return ModelConfiguration(**values)


def random_model(model: ModelConfiguration, seed: int = 0) -> LanguageModel:
    """Weights large enough that attention is far from uniform, and gains that are not one."""
    language_model = LanguageModel(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in language_model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 * 1.5 if parameter.dim() == 2 else 1 + noise / 4)
    return language_model.eval()


def pieces(name: str, weight: Tensor, tensor: int, data: int) -> list[list[Piece]]:
    """The ranks' pieces of one weight: slices where it is split, then flat ranges of each slice."""
    axis = SPLIT.get(name.split(".")[-2]) if tensor > 1 else None
    ranks: list[list[Piece]] = [[] for _ in range(tensor * data)]
    for t in range(tensor if axis is not None else 1):
        box = [(0, size) for size in weight.shape]
        if axis is not None:
            each = -(-weight.shape[axis] // tensor)
            box[axis] = (min(t * each, weight.shape[axis]), min((t + 1) * each, weight.shape[axis]))
        flat = weight[tuple(slice(*pair) for pair in box)].reshape(-1)
        each = -(-flat.numel() // data)
        for d in range(data):
            part = flat[d * each : (d + 1) * each]
            ranks[d * tensor + t].append(Piece(name, "weight", tuple(weight.shape), tuple(box), d * each, part))
    return ranks


def save_run(run: Path, model: LanguageModel, tensor: int = 1, data: int = 1, sequence_length: int = 128) -> Path:
    """A run folder with one checkpoint, and corpus/tokenizer.model beside it. Returns the run folder."""
    tokenizer = write_tokenizer(run.parent / "corpus")
    manifest = Manifest(
        run_id="run",
        step=20,
        attempt=1,
        tokens=40960,
        validation=2.5,
        layout={"pipeline": 1, "tensor": tensor, "data": data},
        model=model.configuration.model_dump(mode="json"),
        tokenizer=tokenizer_identity(tokenizer),
        sequence_length=sequence_length,
    )
    ranks: list[list[Piece]] = [[] for _ in range(tensor * data)]
    for name, weight in model.state_dict().items():
        for rank, owned in enumerate(pieces(name, weight, tensor, data)):
            ranks[rank].extend(owned)
    checkpoints = run / "checkpoints"
    partial = partial_folder(checkpoints, 20, 1)
    publish(checkpoints, partial, manifest, [write_rank_file(partial, r, owned) for r, owned in enumerate(ranks)])
    return run


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())
