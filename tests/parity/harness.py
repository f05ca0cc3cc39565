"""Runs cases on the pool and holds them against the oracle; what the tests and the report share."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.parity import oracle
from tests.parity.cases import Case, CaseKey
from tests.parity.compare import Difference, Verdict, difference, judge, trace_of
from tests.parity.oracle import Trace
from tests.parity.pool import Pool, open_pool

SAMPLES_AT_ONCE = 8
TORCH = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Outcome:
    """What a case left."""

    trace: Trace
    records: list[list[dict[str, Any]]]
    """The metrics of each step, by rank."""
    seconds: float
    cpu_seconds: float
    """Of all its processes."""


class Harness:
    """One pool, one folder, each oracle computed once."""

    def __init__(self, pool: Pool, folder: Path, timeout: float) -> None:
        self.pool = pool
        self.timeout = timeout
        self.folder = folder
        self._oracles: dict[tuple[CaseKey, int], Trace] = {}
        self._count = 0

    def new_folder(self) -> Path:
        """An empty one for a run."""
        self._count += 1
        folder = self.folder / f"run-{self._count}"
        folder.mkdir()
        return folder

    def oracle(self, case: Case, dtype: str = "fp32", samples_at_once: int = SAMPLES_AT_ONCE) -> Trace:
        """The oracle's run of this case, whose layout says nothing to it."""
        key = (CaseKey.of(case, dtype), samples_at_once)
        if key not in self._oracles:
            self._oracles[key] = oracle.run(case.setting(), TORCH[dtype], samples_at_once)
        return self._oracles[key]

    def run(self, case: Case, fault: str | None = None, keep: bool = False) -> Outcome:
        """Train the case on its processes, with a fault planted if one is named."""
        folder = self.new_folder()
        before = self.pool.cpu_seconds
        started = time.perf_counter()
        arguments = {**case.arguments(folder), "fault": fault}
        records = self.pool.run(case.world, "tests.parity.probes:train", arguments, self.timeout)
        seconds = time.perf_counter() - started
        cpu_seconds = self.pool.cpu_seconds - before
        outcome = Outcome(trace_of(records[0], folder), records, seconds, cpu_seconds)
        if not keep:
            shutil.rmtree(folder)
        return outcome

    def judge(self, case: Case, fault: str | None = None) -> Verdict:
        """Run the case in fp32 and hold it to the bounds."""
        return self.judge_trace(case, self.run(case, fault).trace)

    def apart(self, case: Case, found: Trace) -> Difference:
        """How far what a run left is from the oracle of the same dtype (of fp32, for fp16)."""
        rate = case.configuration().optimizer.learning_rate
        return difference(found, self.oracle(case, "bf16" if case.dtype == "bf16" else "fp32"), rate)

    def judge_trace(self, case: Case, found: Trace) -> Verdict:
        """Hold what a run left to the bounds."""
        rate = case.configuration().optimizer.learning_rate
        return judge(found, self.oracle(case), lambda: self.oracle(case, "fp64"), rate)


def with_one_stage(case: Case) -> Case:
    """The same case without its pipeline: what a change of schedule or pipeline alone is measured from."""
    return replace(case, pipeline=1, schedule="1f1b")


@contextlib.contextmanager
def open_harness(timeout: float = 240.0) -> Iterator[Harness]:
    """A harness that leaves neither processes nor files behind; a case may take `timeout` seconds."""
    with open_pool() as pool, tempfile.TemporaryDirectory(prefix="parity-") as folder:
        yield Harness(pool, Path(folder), timeout)
