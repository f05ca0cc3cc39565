"""Starts real runs of the trainer in processes of their own, waits for them and looks at what they leave."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
PLANTED = ROOT / "tests" / "faults" / "planted.py"
BIN = Path(sys.executable).parent

CONFIGURATION = """
model: {hidden_size: 32, num_layers: 2, num_heads: 4, dropout: 0.1}
batch: {sequence_length: 32, global_batch_size: 4}
optimizer: {learning_rate: 1e-3, warmup_steps: 5, schedule: cosine}
data:
  train: corpus/parity/train
  validation: corpus/parity/validation
  tokenizer: corpus/parity/tokenizer.model
training: {steps: 24, log_every: 1, eval_every: 6, eval_batches: 1}
checkpoint: {every: 4}
monitor: {tensorboard: false}
"""

EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens", "skipped")
"""What "bit for bit" speaks of."""


@dataclass
class Started:
    """A run in its own processes."""

    folder: Path
    log: Path
    processes: list[subprocess.Popen]
    """The ranks, or the launcher alone."""
    began: float = field(default_factory=time.monotonic)

    def wait(self, seconds: float = 300.0) -> list[int]:
        """The exit statuses; what still runs after so many seconds fails the test (and is ended)."""
        until = time.monotonic() + seconds
        try:
            return [process.wait(max(0.1, until - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"the run did not end within {seconds} s:\n{self.text()[-4000:]}") from None

    def ranks(self) -> list[psutil.Process]:
        """The processes of this run that train, wherever their parents went."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            trains = any(word.endswith(("planted.py", "launcher/train.py")) for word in command[:3])
            if trains and any(str(self.folder) in word for word in command):
                found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def end(self) -> None:
        """End everything that is left of it."""
        for process in [*self.processes, *self.ranks()]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for process in self.processes:
            process.wait()

    def wait_until_gone(self, seconds: float = 60.0) -> float:
        """Seconds until no process of the run was left; an orphan fails the test (and is ended)."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            if not self.ranks():
                return time.monotonic() - began
            time.sleep(0.2)
        left = self.ranks()
        self.end()
        raise AssertionError(f"{left} were left after {seconds} s:\n{self.text()[-4000:]}")

    def wait_for(self, text: str, seconds: float = 300.0) -> None:
        """Until the log says so."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if text in self.text():
                return
            if all(process.poll() is not None for process in self.processes) and text not in self.text():
                break
            time.sleep(0.05)
        self.end()
        raise AssertionError(f"the log does not say {text!r}:\n{self.text()[-4000:]}")

    def text(self) -> str:
        """Everything printed so far."""
        return self.log.read_text(errors="replace")


def free_port() -> int:
    """Below the ports that connections of others are given, which one might be before the run listens."""
    while True:
        port = random.randrange(12000, 30000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def configuration(folder: Path) -> Path:
    """The configuration of these tests, beside the run's folder."""
    path = folder.parent / "small.yaml"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CONFIGURATION)
    return path


def arguments(folder: Path, overrides: Sequence[str]) -> list[str]:
    """What launcher/train.py gets for a run in this folder."""
    return [str(configuration(folder)), f"run.output_dir={folder}", *overrides]


def start(
    folder: Path,
    *overrides: str,
    processes: int = 2,
    faults: Sequence[tuple[str, Any]] = (),
    deepspeed: bool = False,
    script: Path = PLANTED,
    argv: list[str] | None = None,
    log: Path | None = None,
) -> Started:
    """Start a run with these faults: its ranks alone, or by the `deepspeed` command."""
    environment = {
        **os.environ,
        "FAULTS": json.dumps(list(faults)),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    argv = argv or arguments(folder, overrides)
    log = log or folder.parent / f"{folder.name}.log"
    with log.open("w") as file:
        common: dict[str, Any] = {"cwd": ROOT, "stdout": file, "stderr": subprocess.STDOUT}
        if deepspeed:
            command = [str(BIN / "deepspeed"), "--num_gpus", str(processes), "--master_port", str(free_port())]
            # A session of its own, as a batch job has: no signal of the terminal or of the test reaches it.
            return Started(
                folder,
                log,
                [subprocess.Popen([*command, str(script), *argv], env=environment, start_new_session=True, **common)],
            )
        environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(processes))
        return Started(
            folder,
            log,
            [
                subprocess.Popen(
                    [sys.executable, str(script), *argv],
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    **common,
                )
                for rank in range(processes)
            ],
        )


def run(folder: Path, *overrides: str, seconds: float = 300.0, **options: Any) -> str:
    """Run to the end, which must be a good one, and return what was printed."""
    started = start(folder, *overrides, **options)
    statuses = started.wait(seconds)
    assert not any(statuses), started.text()[-4000:]
    return started.text()


def run_all(folder: Path, runs: Sequence[tuple[str, Sequence[str], Sequence[Any]]], processes: int = 2) -> str:
    """Several runs, (name, overrides, faults) each, one after another in the same processes; all must end well."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "runs.json"
    listed = [{"argv": arguments(folder / name, overrides), "faults": list(faults)} for name, overrides, faults in runs]
    program.write_text(json.dumps(listed))
    return run(folder / "all", processes=processes, argv=[str(program)], seconds=600.0)


def records(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of one kind."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def exact(folder: Path) -> list[tuple[Any, ...]]:
    """What must be the same bit for bit, step by step."""
    return [tuple(record[key] for key in EXACT) for record in records(folder)]


def validations(folder: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["validation_loss"]) for record in records(folder, "validation")]


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())


def steps_saved(folder: Path) -> list[int]:
    from training.checkpoint import steps

    return [step for step, _ in steps(folder / "checkpoints")]
