"""slurm/job.py decides from what a run left; no Slurm needed."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from training.status import State, Status, claim, write_status

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """slurm/job.py as a module, in job 71."""
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    spec = importlib.util.spec_from_file_location("job", ROOT / "slurm" / "job.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "job", module)
    spec.loader.exec_module(module)
    return module


def save(run_dir: Path, step: int) -> None:
    folder = run_dir / "checkpoints" / f"step_{step:08}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()


def attempt(run_dir: Path, state: State, step: int, reason: str | None = None) -> None:
    write_status(run_dir, Status(state, step, "id", claim(run_dir), reason))


@pytest.mark.parametrize(
    ("state", "reason", "saved", "again", "failed", "failures"),
    [
        pytest.param(State.FINISHED, None, 20, False, False, 0, id="finished"),
        pytest.param(State.STOPPED, "training.max_minutes are over", 9, True, False, 0, id="minutes over"),
        pytest.param(State.STOPPED, "signal SIGUSR1", 9, True, False, 0, id="Slurm's signal"),
        pytest.param(State.STOPPED, "signal SIGTERM", 9, True, False, 0, id="preemption"),
        pytest.param(State.STOPPED, "signal SIGUSR1", 4, True, False, 1, id="no step for want of time: as before"),
        pytest.param(State.STOPPED, "the file STOP in the run's folder", 9, False, False, 1, id="a person"),
        pytest.param(State.STOPPED, "signal SIGINT", 9, False, False, 1, id="Ctrl-C"),
        pytest.param(State.STOPPED, "training.stop_after is 9", 9, False, False, 1, id="stop_after"),
        pytest.param(State.FAILED, "rank 3 failed first", 9, True, True, 0, id="failed further on"),
        pytest.param(State.FAILED, "rank 3 failed first", 4, False, True, 2, id="failed again"),
        pytest.param(State.RUNNING, None, 4, False, True, 2, id="ended without a word, again"),
        pytest.param(State.RUNNING, None, 9, True, True, 0, id="ended without a word, further on"),
    ],
)
def test_decisions(
    job: ModuleType,
    tmp_path: Path,
    state: State,
    reason: str | None,
    saved: int,
    again: bool,
    failed: bool,
    failures: int,
) -> None:
    save(tmp_path, 4)
    (tmp_path / job.RECORD).write_text(json.dumps({"failures": 1}) + "\n")
    before = job.standing(tmp_path)
    if saved > 4:
        save(tmp_path, saved)
    attempt(tmp_path, state, saved, reason)
    decision = job.decide(tmp_path, 20, before, 1 if failed else 0)
    assert (decision.again, decision.failed, decision.failures) == (again, failed, failures)
    assert "\n" not in decision.why


def test_the_first_failure_without_progress_is_tried_again(job: ModuleType, tmp_path: Path) -> None:
    before = job.standing(tmp_path)
    attempt(tmp_path, State.FAILED, 3, "rank 1 failed first")
    assert job.decide(tmp_path, 20, before, 1).again
    job.record(tmp_path, job.decide(tmp_path, 20, before, 1), "requeue")
    before = job.standing(tmp_path)
    attempt(tmp_path, State.FAILED, 3, "rank 1 failed first")
    assert not job.decide(tmp_path, 20, before, 1).again


def test_a_start_that_never_got_as_far_as_the_run_is_a_failure(job: ModuleType, tmp_path: Path) -> None:
    attempt(tmp_path, State.STOPPED, 4, "signal SIGUSR1")  # of an earlier start
    decision = job.decide(tmp_path, 20, job.standing(tmp_path), 1)
    assert (decision.again, decision.failures) == (True, 1)
    assert "no process got as far" in decision.why


def test_a_mistake_is_not_tried_again(job: ModuleType, tmp_path: Path) -> None:
    decision = job.decide(tmp_path, 20, job.standing(tmp_path), job.MISTAKE)
    assert (decision.again, decision.failed) == (False, True)


def test_a_host_that_was_cut_off_decides_nothing(job: ModuleType, tmp_path: Path) -> None:
    before = job.standing(tmp_path)
    claim(tmp_path)  # this start
    attempt(tmp_path, State.RUNNING, 4)  # the one that Slurm made elsewhere
    decision = job.decide(tmp_path, 20, before, 1)
    assert (decision.again, decision.superseded) == (False, True)


def test_the_same_job_again_keeps_its_options(job: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_NUM_NODES": "2", "SLURM_ARRAY_TASK_ID": "7", "SLURM_JOB_ACCOUNT": "physics"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(job, "run", lambda *command: (True, "1-00:00:00"))
    options = job.same_options()
    assert {"--nodes=2", "--array=7", "--account=physics", "--time=1-00:00:00"} <= set(options)


@pytest.mark.parametrize("script", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda path: path.name)
def test_arguments_pass_through_no_second_shell(script: Path) -> None:
    text = script.read_text()
    assert not re.search(r"\$\*|\beval\b|\bbash -c\b|\bsh -c\b", text)
    commands = [line for line in text.splitlines() if not line.startswith("#")]
    assert all('"$@"' in line or '"${@//' in line for line in commands if re.search(r"\$\{?@", line))
