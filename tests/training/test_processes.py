"""Which ancestors are launchers, and whether a process still lives."""

import subprocess
import sys
import time

import pytest

from training.processes import identify, is_alive, is_launcher, launcher_is_missing

PYTHON = "/usr/bin/python3.11"


@pytest.mark.parametrize(
    "command",
    [
        [PYTHON, "/x/.venv/bin/deepspeed", "--num_gpus", "2", "launcher/train.py"],
        [PYTHON, "-u", "-m", "deepspeed.launcher.launch", "--world_info=e30="],
        [PYTHON, "/x/site-packages/deepspeed/launcher/runner.py"],
        [PYTHON, "/x/.venv/bin/torchrun", "--nproc-per-node", "2"],
        [PYTHON, "-m", "torch.distributed.run"],
        ["/usr/bin/mpirun", "-n", "2"],
        ["mpiexec.hydra"],
        ["orted"],
        ["/usr/bin/srun", "x"],
        ["slurmstepd: [123.0]"],
    ],
)
def test_launchers(command: list[str]) -> None:
    assert is_launcher(command)


@pytest.mark.parametrize(
    "command",
    [
        ["bash", "-c", "deepspeed --num_gpus 2 launcher/train.py"],
        ["-bash"],
        ["sh", "train.sh"],
        ["nohup", "deepspeed"],
        ["make", "demo"],
        ["sshd: user@pts/0"],
        [PYTHON, "launcher/train.py", "configs/tiny.yaml"],
        [PYTHON, "-m", "pytest"],
        [PYTHON, "launch.py"],
        ["/sbin/init"],
        [],
    ],
)
def test_no_launchers(command: list[str]) -> None:
    assert not is_launcher(command)


def test_a_process_that_ended_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = identify(child.pid)
    assert is_alive(process)
    child.kill()
    until = time.monotonic() + 30
    while is_alive(process) and time.monotonic() < until:  # then it is a zombie: nobody has waited for it
        time.sleep(0.01)
    assert not is_alive(process)
    child.wait()
    assert not is_alive(process) and is_alive(identify())


def test_a_launcher_that_ended_first() -> None:
    assert launcher_is_missing({"CROSS_RANK": "0"}, [])
    assert not launcher_is_missing({"CROSS_RANK": "0"}, [identify()])
    assert not launcher_is_missing({"RANK": "0"}, [])
