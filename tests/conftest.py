"""What every test starts from: the CPU, one thread a process, the root of the checkout as current folder."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Before torch is imported, here and in the processes that tests start. Many processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths in configurations start at the current folder; it must not depend on where pytest was called."""
    monkeypatch.chdir(ROOT)
