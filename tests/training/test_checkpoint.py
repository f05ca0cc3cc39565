"""The checkpoint format: any layout reads what any layout wrote, and damage is named, never loaded."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from training import checkpoint
from training.checkpoint import Checkpoint, CheckpointError, Manifest, Piece
from training.checkpoint_manifest import KINDS, box_size

SHAPES = {
    "embedding.weight": (13, 6),
    "blocks.0.attention.query.weight": (8, 6),
    "blocks.0.attention.output.weight": (6, 8),
    "blocks.0.attention_norm.gain": (6,),
    "blocks.10.attention_norm.gain": (6,),
    "blocks.9.attention_norm.gain": (6,),
}
COLUMN = {"embedding.weight": 0, "blocks.0.attention.query.weight": 0, "blocks.0.attention.output.weight": 1}


def tensors(seed: int = 0) -> dict[tuple[str, str], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {(n, k): torch.randn(s, generator=generator) for n, s in SHAPES.items() for k in KINDS}


def pieces_for(values: dict[tuple[str, str], Tensor], tensor: int, data: int) -> list[list[Piece]]:
    """What each of tensor x data ranks owns: slices along the split axis, then flat ranges of each slice.

    The embedding's 13 rows fall on padded slices, so that the last tensor rank may hold few rows or none.
    """
    ranks: list[list[Piece]] = [[] for _ in range(tensor * data)]
    for (name, kind), value in values.items():
        axis = COLUMN.get(name)
        for t in range(tensor if axis is not None else 1):
            box = [(0, n) for n in value.shape]
            if axis is not None:
                each = -(-value.shape[axis] // tensor)
                box[axis] = (min(t * each, value.shape[axis]), min((t + 1) * each, value.shape[axis]))
            flat = value[tuple(slice(*pair) for pair in box)].reshape(-1)
            each = -(-flat.numel() // data)
            for d in range(data):
                part = flat[d * each : (d + 1) * each]
                ranks[d * tensor + t].append(Piece(name, kind, tuple(value.shape), tuple(box), d * each, part))
    return ranks


def save(
    folder: Path, values: dict, tensor: int = 1, data: int = 1, step: int = 100, run_id: str = "run", attempt: int = 1
) -> Path:
    partial = checkpoint.partial_folder(folder, step, attempt)
    files = [checkpoint.write_rank_file(partial, r, p) for r, p in enumerate(pieces_for(values, tensor, data))]
    manifest = Manifest(run_id=run_id, step=step, attempt=attempt, samples=step * 16, adam_step=step)
    return checkpoint.publish(folder, partial, manifest, files)


@pytest.mark.parametrize("tensor,data", [(1, 1), (2, 1), (1, 3), (4, 2), (7, 1)])
def test_any_layout_reads_what_any_layout_wrote(tmp_path: Path, tensor: int, data: int) -> None:
    values = tensors()
    opened = Checkpoint.open(save(tmp_path, values, tensor, data))
    assert opened.manifest.samples == 1600
    for (name, kind), value in values.items():
        assert torch.equal(opened.read(name, kind), value), name
    for other_tensor, other_data in [(1, 1), (2, 2), (3, 1), (4, 3)]:
        for piece in sum(pieces_for(values, other_tensor, other_data), []):
            got = opened.read_range(piece.name, piece.kind, piece.box, piece.offset, piece.tensor.numel())
            assert torch.equal(got, piece.tensor), (piece.name, piece.box, piece.offset)


def test_every_small_range_of_every_box(tmp_path: Path) -> None:
    """Exhaustive over one matrix: the ranges that begin or end within a row are where an index goes wrong."""
    value = torch.arange(30.0).view(5, 6)
    opened = Checkpoint.open(save(tmp_path, {("m", "weight"): value}, 1, 4))
    for top, bottom in [(0, 5), (1, 4), (2, 3)]:
        for left, right in [(0, 6), (1, 5), (4, 6)]:
            box = ((top, bottom), (left, right))
            flat = value[top:bottom, left:right].reshape(-1)
            for start in range(box_size(box)):
                for stop in range(start, box_size(box) + 1):
                    got = opened.read_range("m", "weight", box, start, stop - start)
                    assert torch.equal(got, flat[start:stop])


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    values = tensors()
    path = save(tmp_path, values, 1, 2)
    parts = [load_file(path / name) for name in ("rank_00000.safetensors", "rank_00001.safetensors")]
    key = "embedding.weight/exp_avg"
    assert torch.equal(torch.cat([part[key] for part in parts]).view(13, 6), values["embedding.weight", "exp_avg"])


def test_names_are_in_numeric_order_and_read_is_lazy(tmp_path: Path) -> None:
    values = tensors()
    save(tmp_path / "checkpoints", values)
    weights = checkpoint.read(tmp_path)
    assert list(weights) == [
        "blocks.0.attention.output.weight",
        "blocks.0.attention.query.weight",
        "blocks.0.attention_norm.gain",
        "blocks.9.attention_norm.gain",
        "blocks.10.attention_norm.gain",
        "embedding.weight",
    ]
    assert len(weights) == 6 and "head.weight" not in weights
    assert torch.equal(weights["embedding.weight"], values["embedding.weight", "weight"])
    with pytest.raises(KeyError):
        weights["head.weight"]


def test_two_ranges_of_one_tensor_in_one_file(tmp_path: Path) -> None:
    value = torch.arange(12.0)
    box = ((0, 12),)
    parts = [Piece("gain", "weight", (12,), box, 0, value[:5]), Piece("gain", "weight", (12,), box, 5, value[5:])]
    file = checkpoint.write_rank_file(tmp_path / "partial", 0, parts)
    assert [entry.tensor for entry in file.entries] == ["gain/weight", "gain/weight#2"]
    path = checkpoint.publish(tmp_path, tmp_path / "partial", Manifest(run_id="run", step=1), [file])
    opened = Checkpoint.open(path)
    assert torch.equal(opened.read("gain"), value) and opened.kinds() == {"weight"}


@pytest.mark.parametrize("fault", ["gap", "overlap", "short", "box", "kind"])
def test_pieces_must_make_up_every_tensor_exactly_once(tmp_path: Path, fault: str) -> None:
    ranks = pieces_for(tensors(), 2, 2)
    piece = ranks[2][0]  # the second half of the embedding's first slice
    match fault:
        case "gap":
            ranks[2].pop(0)
        case "overlap":
            ranks[3].append(
                Piece(piece.name, piece.kind, piece.global_shape, piece.box, piece.offset - 1, piece.tensor)
            )
        case "short":
            ranks[2][0] = Piece(*list(vars(piece).values())[:5], piece.tensor[:-1])
        case "box":
            whole = tuple((0, n) for n in piece.global_shape)
            extra = torch.zeros(box_size(whole))
            ranks[1].append(Piece(piece.name, piece.kind, piece.global_shape, whole, 0, extra))
        case "kind":
            ranks = [[p for p in rank if (p.name, p.kind) != ("embedding.weight", "exp_avg")] for rank in ranks]
    partial = tmp_path / ".step_00000100.partial-1"
    files = [checkpoint.write_rank_file(partial, rank, pieces) for rank, pieces in enumerate(ranks)]
    with pytest.raises(CheckpointError, match="embedding.weight"):
        checkpoint.publish(tmp_path, partial, Manifest(run_id="run", step=100), files)
    assert checkpoint.newest_sound(tmp_path)[0] is None


WHOLE = ((0, 4), (0, 2))


@pytest.mark.parametrize(
    "parts",
    [
        [(WHOLE, 0, 4), (WHOLE, 2, 4)],  # as many elements as there are, two twice and two never
        [(((0, 2), (0, 2)), 0, 4)],  # a slice is missing
        [(((0, 2), (0, 2)), 0, 4), (((1, 3), (0, 2)), 0, 4)],  # two slices of the right size overlap
        [(((0, 2), (0, 2)), 0, 4), (((3, 5), (0, 2)), 0, 4)],  # a slice leaves the tensor
    ],
)
def test_gaps_and_overlaps_that_cancel_are_seen(tmp_path: Path, parts: list) -> None:
    pieces = [Piece("m", "weight", (4, 2), box, offset, torch.zeros(length)) for box, offset, length in parts]
    file = checkpoint.write_rank_file(tmp_path / "partial", 0, pieces)
    with pytest.raises(CheckpointError, match="m/weight has a|m do not|m/weight do not"):
        checkpoint.publish(tmp_path, tmp_path / "partial", Manifest(run_id="run", step=1), [file])


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


class Bomb:
    """Would leave a trace if it were unpickled."""

    def __reduce__(self) -> tuple:
        return Path.write_text, (Path("unpickled"), "!")


@pytest.mark.parametrize("file", ["rank_00000.safetensors", "rank_00001.safetensors", "manifest.json"])
@pytest.mark.parametrize("fault", ["flip first", "flip middle", "flip last", "truncate", "empty", "missing", "pickle"])
def test_damage_is_named_and_the_one_before_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, fault: str
) -> None:
    monkeypatch.chdir(tmp_path)
    older = save(tmp_path, tensors(1), 2, 1, step=90)
    path = save(tmp_path, tensors(2), 2, 1, step=100)
    target = path / file
    size = target.stat().st_size
    match fault:
        case "flip first":
            flip(target, 0)
        case "flip middle":
            flip(target, size // 2)
        case "flip last":
            flip(target, size - 1)
        case "truncate":
            target.write_bytes(target.read_bytes()[: size // 2])
        case "empty":
            target.write_bytes(b"")
        case "missing":
            target.unlink()
        case "pickle":
            target.write_bytes(pickle.dumps(Bomb()).ljust(size, b"\0"))
    with pytest.raises(CheckpointError, match=file):
        Checkpoint.open(path)
    found, reports = checkpoint.newest_sound(tmp_path)
    assert found == older
    assert len(reports) == 1 and str(target) in reports[0] and "\n" not in reports[0]
    assert checkpoint.find(tmp_path) == older
    assert not Path("unpickled").exists()


def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    value = {("g", "weight"): torch.ones(2)}
    path = save(tmp_path, value) / "manifest.json"
    sound = path.read_bytes()
    for position in range(len(sound)):
        path.write_bytes(sound[:position] + bytes([sound[position] ^ 1]) + sound[position + 1 :])
        with pytest.raises(CheckpointError, match="manifest.json"):
            Manifest.load(path)


def test_a_wrong_tensor_of_the_right_size_is_refused_without_checksums(tmp_path: Path) -> None:
    path = save(tmp_path, tensors())
    target = path / "rank_00000.safetensors"
    target.write_bytes(pickle.dumps(Bomb()).ljust(target.stat().st_size, b"\0"))
    opened = Checkpoint.open(path, verify=False)
    with pytest.raises(CheckpointError, match="rank_00000.safetensors is not a sound safetensors file"):
        opened.read("embedding.weight")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    opened = Checkpoint.open(save(tmp_path, tensors()))
    with pytest.raises(CheckpointError, match=r"manifest.json has no head.weight/weight"):
        opened.read("head.weight")


def test_a_format_of_the_future_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, tensors()) / "manifest.json"
    manifest = Manifest.load(path)
    path.write_bytes(Manifest(**{**vars(manifest), "format": 2}).dumps())
    with pytest.raises(CheckpointError, match="format 2, this Mainline reads format 1"):
        Manifest.load(path)
