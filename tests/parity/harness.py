"""Runs cases on the pool and holds them against the oracle; what the tests and the report share."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.parity import oracle
from tests.parity.cases import Case, CaseKey
from tests.parity.compare import (
    FP32,
    TIMES_AS_FAR,
    TIMES_ITSELF,
    Difference,
    Verdict,
    difference,
    judge,
    spread,
    trace_of,
)
from tests.parity.oracle import Trace
from tests.parity.pool import Pool, open_pool

SAMPLES_AT_ONCE = 8
ORDERS = ((8, 1), (2, 1), (16, 2), (4, 4))
"""(samples at once, parts of a product) of runs of one process that differ in nothing but the order of summation."""
TORCH = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Outcome:
    """What a case left."""

    trace: Trace
    records: list[list[dict[str, Any]]]
    """The metrics of each step, by rank."""
    cpu_seconds: float
    """Of all its processes."""


class Harness:
    """One pool, one folder, each oracle computed once."""

    def __init__(self, pool: Pool, folder: Path, timeout: float) -> None:
        self.pool = pool
        self.timeout = timeout
        self.folder = folder
        self._oracles: dict[tuple[CaseKey, int, int], Trace] = {}
        self._outcomes: dict[Case, Outcome] = {}
        self._count = 0

    def new_folder(self) -> Path:
        """An empty one for a run."""
        self._count += 1
        folder = self.folder / f"run-{self._count}"
        folder.mkdir()
        return folder

    def oracle(self, case: Case, dtype: str = "fp32", samples_at_once: int = SAMPLES_AT_ONCE, parts: int = 1) -> Trace:
        """The oracle's run of this case, whose layout says nothing to it."""
        key = (CaseKey.of(case, dtype), samples_at_once, parts)
        if key not in self._oracles:
            self._oracles[key] = oracle.run(case.setting(), TORCH[dtype], samples_at_once, parts)
        return self._oracles[key]

    def bounds(self, case: Case) -> dict[str, float]:
        """What a case is held to.

        In 16 bits that is several times what one process does, measured here on the same model: in bfloat16, to
        itself, with other orders of summation; in float16, away from fp32.
        """
        if case.dtype == "fp32":
            return FP32
        rate = case.configuration().optimizer.learning_rate
        if case.dtype == "fp16":
            one = spread([self.oracle(case, "fp16"), self.oracle(case, "fp32")], rate)
            return {quantity: TIMES_AS_FAR * value for quantity, value in one.items()}
        runs = [self.oracle(case, "bf16", at_once, parts) for at_once, parts in ORDERS]
        return {quantity: TIMES_ITSELF * value for quantity, value in spread(runs, rate).items()}

    def run(self, case: Case, fault: str | None = None) -> Outcome:
        """Train the case on its processes, with a fault planted if one is named; without one, once for all who ask."""
        if fault is None and case in self._outcomes:
            return self._outcomes[case]
        folder = self.new_folder()
        before = self.pool.cpu_seconds
        arguments = {**case.arguments(folder), "fault": fault}
        records = self.pool.run(case.world, "tests.parity.probes:train", arguments, self.timeout)
        outcome = Outcome(trace_of(records[0], folder), records, self.pool.cpu_seconds - before)
        shutil.rmtree(folder)
        if fault is None:
            self._outcomes[case] = outcome
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
