"""Every command in the README is run: here as it stands, with the run cut short, or by what is named beside it."""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import time
import urllib.request
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launcher.commands import BIN, free_port

ELSEWHERE = {
    "make demo": ".ci/run",
    "make test": ".ci/run",
    "deepspeed --num_gpus 8 launcher/train.py configs/parity.yaml parallel.pipeline=2 parallel.tensor=2": (
        "tests/launcher/test_train.py"  # with fewer steps: test_eight_processes_under_the_deepspeed_command_...
    ),
    "sbatch --nodes 2 --gpus-per-node 8 slurm/train.sbatch configs/7b.yaml": "tests/slurm/",  # with the parity model
    "source .venv/bin/activate": "the shell: it only puts .venv/bin on the path",
}
"""Commands that something else runs."""

SHORTER = {"launcher/train.py": ["training.steps=2", "training.eval_every=null", "checkpoint.every=null"]}
"""What is added to a command, so that the test takes seconds."""


def commands() -> list[str]:
    """The README's indented lines that are commands, continuation lines joined."""
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines() if line.startswith("    ")]
    return [
        line for line in lines if line.split()[0] in ("make", "python", "deepspeed", "tensorboard", "sbatch", "source")
    ]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which relative paths work as in a checkout, and what is written does no harm."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("launcher", "configs", "model", "data", "parallel", "training"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_the_readme_has_commands() -> None:
    assert len(commands()) >= 10
    assert set(ELSEWHERE) - set(commands()) <= {"source .venv/bin/activate"}
    for place in ELSEWHERE.values():
        assert " " in place or (ROOT / place).exists()


def test_commands_as_they_stand(checkout: Path) -> None:
    """In the README's order, because one uses what the one before it left."""
    stdlib = sysconfig.get_paths()["stdlib"]
    for command in commands():
        if command in ELSEWHERE or command.startswith("tensorboard"):
            continue
        words = shlex.split(command.replace("DIR_OR_FILES...", f"{stdlib}/json {stdlib}/email {stdlib}/http"))
        words[0] = sys.executable if words[0] == "python" else str(BIN / words[0])
        if "--show" not in words:
            words += SHORTER.get(words[1], [])
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip(), command
    assert (checkout / "runs/mine/metrics.jsonl").exists()


def test_tensorboard_shows_the_runs(checkout: Path) -> None:
    """After the commands above: the server starts on what they left and answers."""
    (command,) = [line for line in commands() if line.startswith("tensorboard")]
    port = free_port()
    words = [str(BIN / "tensorboard"), *shlex.split(command)[1:], "--port", str(port)]
    server = subprocess.Popen(words, cwd=checkout, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                page = urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs", timeout=10).read().decode()
                break
            except OSError:
                assert time.monotonic() < deadline and server.poll() is None
                time.sleep(0.5)
        assert "mine" in page
    finally:
        server.terminate()
        server.wait(timeout=30)
