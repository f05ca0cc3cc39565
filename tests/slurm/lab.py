"""A cluster of its own for each scenario: jobs submitted as a person does, machines cut off and switched off."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.launcher.commands import processes_of

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "tests" / "slurm" / "cluster.py"
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "ip", "nsenter")
PATIENCE = 600.0
"""Seconds: other tests may share the cores."""


def missing() -> str | None:
    """Why no cluster can be started on this machine; None where one can."""
    if os.geteuid() != 0:
        return "a Slurm cluster on one machine needs root, for namespaces of its own"
    path = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if absent:
        return f"{', '.join(absent)} not installed (.ci/run installs what these tests need)"
    if subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True).returncode:
        return "this machine permits no new namespaces"
    return None


class Lab:
    """One cluster. `folder` also holds the runs and logs of its jobs."""

    def __init__(self, folder: Path, nodes: int, gpus: int = 0) -> None:
        self.folder = folder
        self.variables = {
            **os.environ,
            "SLURM_CONF": str(folder / "cluster" / "slurm.conf"),
            "PATH": f"{folder / 'cluster' / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "MAINLINE_PYTHON": sys.executable,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        size = ["--nodes", str(nodes), "--cpus", "4", "--memory", "8000", "--gpus", str(gpus)]
        self.cluster("up", *size)

    def cluster(self, command: str, *arguments: str) -> str:
        """One of cluster.py's commands."""
        command_line = [sys.executable, str(CLUSTER), command, str(self.folder / "cluster"), *arguments]
        done = subprocess.run(command_line, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def slurm(self, *command: str, check: bool = True) -> str:
        """One of Slurm's commands, at the root of the checkout."""
        done = subprocess.run(
            command, cwd=ROOT, env=self.variables, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *arguments: str | Path) -> str:
        """sbatch; the number of the job. Its output goes to log-NUMBER."""
        log = self.folder / ("log-%A_%a" if any(str(word).startswith("--array") for word in arguments) else "log-%j")
        return self.slurm("sbatch", "--parsable", f"--output={log}", *map(str, arguments))

    def run_dir(self, name: str = "run") -> Path:
        """The folder of a run."""
        return self.folder / "runs" / name

    def train(self, *arguments: str | Path, options: tuple[str, ...] = (), name: str = "run") -> str:
        """Submit slurm/train.sbatch with the parity configuration."""
        output = f"run.output_dir={self.run_dir(name)}"
        return self.submit(*options, "slurm/train.sbatch", "configs/parity.yaml", output, *arguments)

    # what has become of it

    def log(self, job: str) -> str:
        """The job's log so far."""
        path = self.folder / f"log-{job}"
        return path.read_text(errors="replace") if path.exists() else ""

    def job(self, job: str) -> dict[str, str]:
        """What Slurm knows of the job."""
        said = self.slurm("scontrol", "show", "job", "-o", job, check=False)
        return dict(re.findall(r"(\w+)=(\S*)", said.splitlines()[0] if said else ""))

    def metrics(self, name: str = "run", kind: str = "train") -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of one kind."""
        path = self.run_dir(name) / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [line for line in found if line["kind"] == kind]

    def status(self, name: str = "run") -> dict[str, Any]:
        """status.json."""
        return json.loads((self.run_dir(name) / "status.json").read_text())

    def record(self, name: str = "run") -> list[dict[str, Any]]:
        """The decisions of slurm/job.py."""
        path = self.run_dir(name) / "slurm.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_step(self, step: int, job: str, name: str = "run") -> None:
        """Wait until this step stands in the metrics."""
        wait_until(
            lambda: any(m["step"] >= step for m in self.metrics(name)), lambda: f"no step {step}: {self.log(job)}"
        )

    def wait_for_text(self, text: str, job: str) -> None:
        """Wait until the job's log says this."""
        wait_until(lambda: text in self.log(job), lambda: f"{text!r} is not in the log: {self.log(job)}")

    def wait_for_end(self, job: str) -> dict[str, str]:
        """Wait until the job has ended for good; what Slurm knows of it then."""
        going = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING", "NODE_FAIL", "PREEMPTED")

        def ended() -> bool:
            state = self.job(job).get("JobState", "")
            return state != "" and state not in going

        wait_until(ended, lambda: f"job {job} did not end: {self.job(job)}\n{self.log(job)}")
        return self.job(job)

    def left_over(self, training: bool = False, seconds: float = 90.0) -> list[str]:
        """Processes of these runs (or those that train alone) that are still there after a while, on any node."""
        until = time.monotonic() + seconds
        while (found := self._processes(training)) and time.monotonic() < until:
            time.sleep(0.5)
        return [_described(pid) for pid in found]

    def _processes(self, training: bool) -> list[int]:
        found = processes_of(str(self.folder / "runs"))
        return [pid for pid in found if not training or _name(pid).startswith("python")]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:  # it has ended meanwhile
        return ""


def _described(pid: int) -> str:
    try:
        state = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("State"))
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{pid} {_name(pid).strip()} {state.split(maxsplit=1)[1]}: {command[:200]}"
    except OSError:
        return f"{pid}, which has ended since"


def wait_until(condition: Callable[[], bool], complaint: Callable[[], str], seconds: float = PATIENCE) -> None:
    """Poll until the condition holds."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"not after {seconds:.0f} s: {complaint()}")
        time.sleep(0.3)


@contextmanager
def lab(nodes: int = 3, gpus: int = 0) -> Iterator[Lab]:
    """A cluster that is gone after the block, whatever happens in it."""
    folder = Path(tempfile.mkdtemp(prefix="mainline-lab-"))  # a short path: sockets have their limit
    folder.chmod(0o755)  # munged wants to be reachable
    try:
        yield Lab(folder, nodes, gpus)
    finally:
        subprocess.run([sys.executable, str(CLUSTER), "down", str(folder / "cluster"), "--purge"], capture_output=True)
        if os.environ.get("MAINLINE_KEEP_LABS") is None:
            shutil.rmtree(folder, ignore_errors=True)
