"""Starting the commands as a person does, and reading what they leave."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
EXACT_KEYS = ("step", "loss", "grad_norm", "learning_rate", "tokens", "skipped")
"""What "bit for bit" speaks of in a line of metrics."""


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    status: int
    output: str
    error: str
    seconds: float

    @property
    def mistakes(self) -> list[str]:
        """The lines that begin with `error: `."""
        return [line for line in (self.output + self.error).splitlines() if line.startswith("error: ")]


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(*command: str | Path, timeout: float = 240, **environment: str) -> Result:
    """Run a command from the root of the checkout and wait for it."""
    started = time.monotonic()
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
    )
    return Result(done.returncode, done.stdout, done.stderr, time.monotonic() - started)


def train(processes: int, *arguments: str, launcher: str = "deepspeed", timeout: float = 240) -> Result:
    """Start launcher/train.py on so many processes: under the deepspeed command, torchrun, or as plain python."""
    script = ["launcher/train.py", *arguments]
    if launcher == "python":
        assert processes == 1
        return run(sys.executable, *script, timeout=timeout)
    if launcher == "torchrun":
        command = [BIN / "torchrun", "--nproc-per-node", str(processes), "--master-port", str(free_port())]
    else:
        command = [BIN / "deepspeed", "--num_gpus", str(processes), "--master_port", str(free_port())]
    return run(*command, *script, timeout=timeout)


def processes_of(marker: str) -> list[int]:
    """Ids of the processes, but this one, whose command line contains `marker`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it has ended meanwhile
            if marker in line:
                found.append(int(folder.name))
    return found


def metrics(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The lines of one kind in a run's metrics.jsonl."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def exact(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What of metrics must be equal bit for bit."""
    return [tuple(line[key] for key in EXACT_KEYS) for line in lines]


def largest_difference(ours: list[dict[str, Any]], reference: list[dict[str, Any]], key: str) -> float:
    """max |a - b| / max |b| over the steps."""
    assert [line["step"] for line in ours] == [line["step"] for line in reference]
    scale = max(abs(line[key]) for line in reference)
    return max(abs(a[key] - b[key]) for a, b in zip(ours, reference, strict=True)) / scale
