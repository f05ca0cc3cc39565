"""A damaged checkpoint is reported by the name of its file, and the one before is used; no pickle is ever opened."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.runs import arguments, exact, records, run, steps_saved
from training.status import read_status

OVERRIDES = ["training.steps=6", "training.eval_every=6", "checkpoint.every=2"]


class Bomb:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (open, (str(self.path), "w"))


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 0x10
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb(path.parent.parent.parent / "unpickled")))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped-head": lambda path: flip(path, 0.0),
    "flipped-middle": lambda path: flip(path, 0.5),
    "flipped-end": lambda path: flip(path, 1.0),
    "cut": cut,
    "empty": empty,
    "pickled": pickled,
    "missing": Path.unlink,
}
FILES = ("manifest.json", "rank_00000.safetensors", "rank_00001.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with checkpoints 2, 4 and 6; copies of it whose newest one is damaged, each started again."""
    folder = tmp_path_factory.mktemp("damage")
    run(folder / "whole", *OVERRIDES)
    listed = []
    for name, damage in DAMAGES.items():
        for file in FILES:
            copy = folder / f"{name}-{file}"
            shutil.copytree(folder / "whole", copy)
            damage(copy / "checkpoints" / "step_00000006" / file)
            listed.append({"argv": arguments(copy, OVERRIDES), "faults": []})
    program = folder / "runs.json"
    program.write_text(json.dumps(listed))
    folder.joinpath("log").write_text(run(folder / "all", argv=[str(program)], processes=1, seconds=600.0))
    return folder


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_one_before_is_used_and_the_file_named(folder: Path, damage: str, file: str) -> None:
    """On one process, too, where two had written it."""
    copy = folder / f"{damage}-{file}"
    text = (folder / "log").read_text()
    damaged = copy / "checkpoints" / "step_00000006" / file
    warnings = [line for line in text.splitlines() if line.startswith("warning: ") and str(damaged) in line]
    assert len(warnings) == 1, warnings
    assert f"resuming {copy / 'checkpoints' / 'step_00000004'} at step 4" in text
    # Steps 5 and 6 came again and were saved again, sound.
    assert [record["step"] for record in records(copy)] == [1, 2, 3, 4, 5, 6]
    assert exact(copy)[:4] == exact(folder / "whole")[:4] and steps_saved(copy) == [2, 4, 6]
    found = read_status(copy)
    assert found is not None and (found.state, found.attempt) == ("finished", 2)
    assert not (copy / "unpickled").exists()


def test_the_bomb_works(tmp_path: Path) -> None:
    """Else its absence would prove nothing."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "unpickled")))
    assert (tmp_path / "unpickled").exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe"])
def test_a_run_id_that_cannot_be_read_is_as_none(tmp_path: Path, content: bytes) -> None:
    run(tmp_path / "run", *OVERRIDES, "training.stop_after=4", processes=1)
    (tmp_path / "run/.run_id").write_bytes(content)
    text = run(tmp_path / "run", *OVERRIDES, processes=1)
    assert "at step 4" in text and "is of another run" not in text
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
