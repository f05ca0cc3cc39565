"""Checkpoints: Mainline's one format, written by the ranks that own the pieces and read from any layout.

    checkpoints/step_00000100/manifest.json            what is where, and the state of the run
    checkpoints/step_00000100/rank_00000.safetensors   the pieces that rank 0 owned, fp32
    checkpoints/latest                                 the newest folder's name, for people and scripts

Each rank calls `write_rank_file` into the folder that `partial_folder` names; when all have, one of them calls
`publish`. A checkpoint appears by a rename, complete and synced, or not at all. This module knows no engine and no
process group. The manifest is training/checkpoint_manifest.py, reading is training/checkpoint_reader.py, the files
themselves are training/tensor_file.py; their names are re-exported here.
"""

import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from training.checkpoint_manifest import MANIFEST, Box, Entry, Manifest, Piece, RankFile
from training.checkpoint_reader import Checkpoint
from training.tensor_file import CheckpointError, TensorFileWriter, TensorSpec, sync_folder

__all__ = [
    "Box",
    "Checkpoint",
    "CheckpointError",
    "Manifest",
    "Piece",
    "RankFile",
    "find",
    "newest_sound",
    "partial_folder",
    "prune",
    "publish",
    "read",
    "remove_leftovers",
    "step_folder",
    "steps",
    "write_rank_file",
]

LATEST = "latest"
COMPLETE = re.compile(r"step_(\d+)")
REPLACED = re.compile(r"\.step_(\d+)\.replaced-\d+")
PARTIAL = re.compile(r"\.step_(\d+)\.partial-(\d+)")
CUT_OFF = "is incomplete: a save was cut off there"
DELETED = re.compile(r"\.step_(\d+)\.deleted")


def step_folder(checkpoints: Path, step: int) -> Path:
    """Where the complete checkpoint of a step stands."""
    return checkpoints / f"step_{step:08d}"


def partial_folder(checkpoints: Path, step: int, attempt: int) -> Path:
    """Where the ranks of this attempt write before it is complete (the first of them creates it)."""
    return checkpoints / f".step_{step:08d}.partial-{attempt}"


def write_rank_file(folder: Path, rank: int, pieces: Sequence[Piece]) -> RankFile:
    """Writes the pieces that one rank owns to `folder`, synced, and says what it wrote.

    A piece on another device is copied to the host when its turn comes, so no second copy of all the data exists.
    Empty pieces (a rank that holds only padding rows) are left out. OSError where the file system fails.
    """
    name = f"rank_{rank:05d}.safetensors"
    pieces = [piece for piece in pieces if piece.tensor.numel()]
    entries: list[Entry] = []
    seen: dict[str, int] = defaultdict(int)
    for piece in pieces:
        if piece.tensor.dtype != torch.float32 or piece.tensor.dim() != 1:
            raise ValueError(f"{piece.name}/{piece.kind} is no 1-D float32 tensor")
        key = f"{piece.name}/{piece.kind}"
        seen[key] += 1
        if seen[key] > 1:  # another range of the same tensor; the manifest names the key
            key = f"{key}#{seen[key]}"
        where = (piece.offset, piece.tensor.numel(), name, key)
        entries.append(Entry(piece.name, piece.kind, tuple(piece.global_shape), tuple(piece.box), *where))
    specs = [TensorSpec(entry.tensor, torch.float32, (entry.length,)) for entry in entries]
    folder.mkdir(parents=True, exist_ok=True)
    with TensorFileWriter(folder / name, specs, {"format": "pt"}) as writer:
        for piece in pieces:
            writer.append(piece.tensor)
    return RankFile(name, writer.size, writer.checksum, tuple(entries))


def publish(
    checkpoints: Path,
    partial: Path,
    manifest: Manifest,
    rank_files: Sequence[RankFile],
    still_current: Callable[[], bool] = lambda: True,
) -> Path:
    """Makes a written folder the checkpoint of `manifest.step`, on one process, after every rank has written its file.

    Writes and syncs the manifest, renames, then renames `latest`. A kill at any moment leaves a sound checkpoint: where
    this step had one already, it steps aside under another name that `newest_sound` knows, and goes when the new one
    stands. `still_current` is asked last before anything appears; where it says no, CheckpointError.
    """
    manifest = replace(manifest.with_files(rank_files), saved_at=time.time())
    try:
        manifest.check_coverage()
    except ValueError as error:
        raise CheckpointError(f"{partial} would be no sound checkpoint: {error}") from error
    for name, expected in manifest.files.items():
        size = (partial / name).stat().st_size
        if size != expected["size"]:
            raise CheckpointError(f"{partial / name} has {size} bytes where {expected['size']} were written")
    _write_synced(partial / MANIFEST, manifest.dumps())
    sync_folder(partial)
    if not still_current():
        raise CheckpointError(f"{partial} is not published: a newer attempt owns this run")
    final = step_folder(checkpoints, manifest.step)
    aside = checkpoints / f".{final.name}.replaced-{manifest.attempt}"
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    partial.rename(final)
    sync_folder(checkpoints)
    temporary = checkpoints / f".{LATEST}-{manifest.attempt}"
    _write_synced(temporary, f"{final.name}\n".encode())
    temporary.replace(checkpoints / LATEST)
    sync_folder(checkpoints)
    shutil.rmtree(aside, ignore_errors=True)
    return final


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def steps(checkpoints: Path) -> list[tuple[int, Path]]:
    """Complete folders with their step, in numeric order; one that stepped aside counts where its step has no other."""
    found: dict[int, Path] = {}
    for pattern in (REPLACED, COMPLETE):
        for path in sorted(checkpoints.iterdir()) if checkpoints.is_dir() else ():
            if match := pattern.fullmatch(path.name):
                found[int(match[1])] = path
    return sorted(found.items())


def newest_sound(checkpoints: Path, run_id: str | None = None, verify: bool = True) -> tuple[Path | None, list[str]]:
    """The newest sound checkpoint (of one run, if `run_id` is given), and a sentence for each damaged thing passed.

    Newest is what was published last (`Manifest.age`). `verify` compares checksums, not only sizes.
    """
    reports = [
        f"{path} {CUT_OFF}"
        for path in (sorted(checkpoints.iterdir()) if checkpoints.is_dir() else ())
        if PARTIAL.fullmatch(path.name)
    ]
    candidates: list[tuple[tuple[int, float, int], Path]] = []
    for step, path in steps(checkpoints):
        try:
            manifest = Manifest.load(path / MANIFEST)
        except CheckpointError as error:
            reports.append(str(error))
            continue
        if manifest.step != step:
            reports.append(f"{path / MANIFEST} is of step {manifest.step}, not of the step its folder names")
        elif run_id is not None and manifest.run_id != run_id:
            reports.append(f"{path} is of another run")
        else:
            candidates.append((manifest.age, path))
    for _, path in sorted(candidates, reverse=True):
        try:
            Checkpoint.open(path, verify)
        except CheckpointError as error:
            reports.append(str(error))
        else:
            return path, reports
    return None, reports


def find(path: Path | str, verify: bool = True, say: Callable[[str], None] = lambda sentence: None) -> Path:
    """The checkpoint meant by a checkpoint folder, a run folder or its `checkpoints` folder (then the newest sound).

    `say` is told of each damaged one that was passed over.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder, and so no run and no checkpoint")
    if (path / MANIFEST).exists() or COMPLETE.fullmatch(path.name):
        return path
    checkpoints = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    newest, reports = newest_sound(checkpoints, verify=verify)
    if newest is None:
        reason = f" ({reports[0]})" if reports else ""
        raise CheckpointError(f"{path} is neither a checkpoint nor a run that holds a sound one{reason}")
    for report in reports:
        if not report.endswith(CUT_OFF):  # a save may be under way
            say(report)
    return newest


class _Weights(Mapping[str, Tensor]):
    """Weights by global name, read when asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._names = checkpoint.names()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._checkpoint.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read(path: Path | str) -> Mapping[str, Tensor]:
    """The fp32 weights of a run's newest sound checkpoint, or of a checkpoint, by global name; each read when asked."""
    return _Weights(Checkpoint.open(find(path)))


def prune(checkpoints: Path, keep: int, run_id: str) -> list[Path]:
    """Deletes all but the `keep` newest checkpoints that this run wrote; called on one process, after `publish`.

    Newest as in `newest_sound`, so what was published last always stays. Those of other runs, and those whose manifest
    cannot be read, are not touched. A folder is renamed before it is emptied: what is half deleted looks like nothing.
    """
    if keep < 1:
        raise ValueError("at least one checkpoint is kept")
    own: list[tuple[tuple[int, float, int], Path]] = []
    for _, path in steps(checkpoints):
        try:
            checkpoint = Checkpoint.open(path, verify=False)
        except CheckpointError:
            continue
        if checkpoint.manifest.run_id == run_id:
            own.append((checkpoint.manifest.age, path))
    old = [path for _, path in sorted(own, reverse=True)[keep:]]
    for path in old:
        doomed = checkpoints / f".{path.name.removeprefix('.').split('.')[0]}.deleted"
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return old


def remove_leftovers(checkpoints: Path, attempt: int) -> list[Path]:
    """Deletes what earlier attempts left half written or half deleted; on one process, at the start of an attempt."""
    kept = {path for _, path in steps(checkpoints)}
    doomed = []
    for path in sorted(checkpoints.iterdir()) if checkpoints.is_dir() else ():
        partial = PARTIAL.fullmatch(path.name)
        other = DELETED.fullmatch(path.name) or REPLACED.fullmatch(path.name)
        if (partial and int(partial[2]) < attempt) or (other and path not in kept):
            doomed.append(path)
            shutil.rmtree(path, ignore_errors=True)
    return doomed
