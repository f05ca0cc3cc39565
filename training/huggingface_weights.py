"""Weights to and from a Hugging Face folder, as a stream: a few million elements of one tensor at a time.

Neither side is ever whole in memory, whatever the model's size and whatever layout wrote the checkpoint.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model.configuration import ModelConfiguration
from model.initialization import parameter_shapes
from training.checkpoint import Checkpoint, Manifest, RankFile, partial_folder, publish
from training.checkpoint_manifest import Entry, whole
from training.huggingface import ConversionError, huggingface_name, read_json
from training.tensor_file import TensorFile, TensorFileWriter, TensorSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CHUNK_ELEMENTS = 2**20
EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def ordered_names(model: ModelConfiguration) -> list[str]:
    """All parameters of a model as a reader meets them: embedding, blocks, final norm, head."""
    return list(parameter_shapes(model))


def _chunks(elements: int) -> Iterator[tuple[int, int]]:
    for start in range(0, elements, CHUNK_ELEMENTS):
        yield start, min(start + CHUNK_ELEMENTS, elements)


@dataclass(frozen=True)
class Shard:
    """One file of an exported folder and the parameters in it."""

    file: str
    names: tuple[str, ...]


def plan_shards(model: ModelConfiguration, dtype: torch.dtype, shard_bytes: int) -> list[Shard]:
    """Fills files in model order up to `shard_bytes`; a larger tensor has a file of its own."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, shape in parameter_shapes(model).items():
        size = math.prod(shape) * dtype.itemsize
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return [Shard(SINGLE, tuple(groups[0]))]
    count = len(groups)
    return [Shard(f"model-{i:05d}-of-{count:05d}.safetensors", tuple(g)) for i, g in enumerate(groups, 1)]


def export_weights(
    checkpoint: Checkpoint, model: ModelConfiguration, folder: Path, dtype: torch.dtype, shard_bytes: int
) -> Iterator[int]:
    """Writes the shards and, where there are several, their index. Yields the number of elements after each part."""
    shapes = parameter_shapes(model)
    shards = plan_shards(model, dtype, shard_bytes)
    for shard in shards:
        specs = [TensorSpec(huggingface_name(name), dtype, tuple(shapes[name])) for name in shard.names]
        with TensorFileWriter(folder / shard.file, specs, {"format": "pt"}) as writer:
            for name in shard.names:
                for part in _read_parts(checkpoint, name):
                    writer.append(_cast(part, dtype, name))
                    yield part.numel()
    if len(shards) > 1:
        total = sum(math.prod(shape) for shape in shapes.values())
        weight_map = {huggingface_name(name): shard.file for shard in shards for name in shard.names}
        metadata = {"total_parameters": total, "total_size": total * dtype.itemsize}
        text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
        (folder / INDEX).write_text(text + "\n")


def _read_parts(checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
    shape = checkpoint.shape(name)
    for start, stop in _chunks(math.prod(shape)):
        yield checkpoint.read_range(name, "weight", whole(shape), start, stop - start)


def _cast(part: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    result = part.to(dtype)
    if dtype is torch.float16 and not torch.isfinite(result).all() and torch.isfinite(part).all():
        raise ConversionError(f"{name} has values beyond float16's range; export with --dtype bfloat16 or float32")
    return result


def _finite_float32(part: Tensor, found: str) -> Tensor:
    """What a model can be trained on from: one NaN would be found only when the loss is NaN, and then be searched."""
    result = part.float()
    if not torch.isfinite(result).all():
        what = "values beyond float32's range" if torch.isfinite(part).all() else "values that are NaN or infinite"
        raise ConversionError(f"{found} {what}; weights must be finite float32 numbers")
    return result


class SourceWeights:
    """The safetensors files of a Hugging Face folder, checked against a model; anything else there is not read."""

    def __init__(self, folder: Path, model: ModelConfiguration) -> None:
        self.folder = folder
        self._places = _weight_files(folder)
        self._files: dict[str, TensorFile] = {}
        shapes = {name: tuple(shape) for name, shape in parameter_shapes(model).items()}
        self._names = {huggingface_name(name): name for name in shapes}
        for key in self._places:
            if key in self._names or key.endswith("rotary_emb.inv_freq"):  # a table that old exports hold
                continue
            if key == "lm_head.weight" and model.tie_embeddings:
                self._refuse_another_head()
                continue
            raise ConversionError(f"{folder / self._places[key]} holds {key}, which Mainline's model has no place for")
        for key, name in self._names.items():
            if key not in self._places:
                raise ConversionError(f"{folder} has no {key} in its safetensors files")
            spec = self._file(key).specs.get(key)
            if spec is None:
                raise ConversionError(f"{folder / self._places[key]} has no {key}, which the index says it holds")
            if spec.shape != shapes[name]:
                raise ConversionError(
                    f"{folder / self._places[key]} has {key} with shape {list(spec.shape)} where config.json makes it "
                    f"{list(shapes[name])}"
                )
            if not spec.dtype.is_floating_point:
                raise ConversionError(
                    f"{folder / self._places[key]} has {key} as {spec.dtype}, which is no plain weight"
                )

    def _file(self, key: str) -> TensorFile:
        name = self._places[key]
        if name not in self._files:
            self._files[name] = TensorFile(self.folder / name)
        return self._files[name]

    def _refuse_another_head(self) -> None:
        """A tied model's folder may repeat the embedding as lm_head; a head that differs would be lost."""
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        if embedding not in self._places:
            return
        one, other = self._file(embedding), self._file(head)
        for key, file in ((embedding, one), (head, other)):
            if key not in file.specs:
                raise ConversionError(f"{file.path} has no {key}, which the index says it holds")
        same = one.specs[embedding].shape == other.specs[head].shape
        size = math.prod(one.specs[embedding].shape)
        if not same or not all(
            torch.equal(one.read(embedding, a, b), other.read(head, a, b)) for a, b in _chunks(size)
        ):
            raise ConversionError(f"{self.folder} says tie_word_embeddings and holds an lm_head.weight of its own")

    def parts(self, name: str) -> Iterator[Tensor]:
        """A parameter of ours, as consecutive flat float32 parts."""
        key = huggingface_name(name)
        file = self._file(key)
        for start, stop in _chunks(math.prod(file.specs[key].shape)):
            part = file.read(key, start, stop)
            yield _finite_float32(part, f"{file.path} has {key} with")


def _weight_files(folder: Path) -> dict[str, str]:
    """Key to file name, from the index or from the only file."""
    if (folder / INDEX).exists():
        places = read_json(folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(Path(str(file)).name == file for file in places.values()):
            raise ConversionError(f"{folder / INDEX} has no weight_map of file names")
        return places
    if (folder / SINGLE).exists():
        with TensorFile(folder / SINGLE) as file:
            return dict.fromkeys(file.specs, SINGLE)
    pickled = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
    if pickled:
        raise ConversionError(f"{pickled[0]} is a pickle, which is not read; only safetensors are")
    raise ConversionError(f"{folder} holds neither {SINGLE} nor {INDEX}")


def import_weights(
    source: SourceWeights, model: ModelConfiguration, checkpoints: Path, manifest: Manifest, file_bytes: int
) -> Iterator[int]:
    """Writes a checkpoint that holds weights alone, fp32. Yields the number of elements after each part."""
    shapes = parameter_shapes(model)
    partial = partial_folder(checkpoints, manifest.step, manifest.attempt)
    partial.mkdir(parents=True)
    files: list[RankFile] = []
    for number, shard in enumerate(plan_shards(model, torch.float32, file_bytes)):
        file = f"rank_{number:05d}.safetensors"
        entries = []
        for name in shard.names:
            shape = tuple(shapes[name])
            entries.append(Entry(name, "weight", shape, whole(shape), 0, math.prod(shape), file, f"{name}/weight"))
        specs = [TensorSpec(entry.tensor, torch.float32, (entry.length,)) for entry in entries]
        with TensorFileWriter(partial / file, specs, {"format": "pt"}) as writer:
            for name in shard.names:
                for part in source.parts(name):
                    writer.append(part)
                    yield part.numel()
        files.append(RankFile(file, writer.size, writer.checksum, tuple(entries)))
    publish(checkpoints, partial, manifest, files)
