"""The pool leaves no process behind, however it ends."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.parity.pool import ROOT

PROGRAM = """
import json, time
from tests.parity.pool import open_pool
with open_pool() as pool:
    pool.run(2, "tests.parity.experiments:nothing", {})
    print(json.dumps(pool.worlds[2].pids), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_processes_that_are_stopped_end_with_their_parent(number: signal.Signals) -> None:
    # A world that has answered is stopped.
    command = [sys.executable, "-c", PROGRAM]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert parent.stdout is not None
    pids = json.loads(parent.stdout.readline())
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    parent.send_signal(number)
    parent.wait(timeout=30)
    until = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in pids)
