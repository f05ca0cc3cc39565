"""Writes docs/parity.md: `make parity` runs the pairwise selection, `make parity-full` every cell."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from tests.parity import compare, features, matrix
from tests.parity.cases import Case
from tests.parity.compare import Difference, Verdict, difference
from tests.parity.elastic import GO_ON, PAIRS, SAVED_AFTER, Elastic
from tests.parity.harness import Harness, open_harness, with_one_stage
from tests.parity.pool import CaseFailed

PAGE = Path("docs/parity.md")

HEAD = """\
# Parity: the layout never changes the result

This page is made by `make parity`{full}. Every row is a model that the product's own loop trained for 20 optimizer
steps in the layout named, and what it left is compared with the oracle: the plain model of `model/` on one process, in
plain PyTorch, without DeepSpeed and without a line of `parallel/` or `training/`
([tests/parity/oracle.py](../tests/parity/oracle.py)).

## What parity means here

The configuration is [configs/parity.yaml](../configs/parity.yaml): real text, blocks of width 64 (no more than
give every stage one, and 2 in any case), 8 heads, AdamW at a rate of 1e-3 with 5 steps of warm-up, eps 1e-6,
gradients clipped at a norm of 1. Clipping is at work in half of the steps. Sequences have 32 tokens, a step has 16 of
them, or as many as there are micro-batches on all replicas.

- **Step 1**: loss, gradient norm, and the gradient of every parameter, joined by global name. Adam hides a gradient
  that is wrong by a factor, so gradients themselves are compared.
- **20 steps**: the loss and the gradient norm of every step, the factor by which clipping multiplied the gradient, and
  the parameters after the last step, in units of the learning rate (published, not bounded).

A difference is max |a - b| / max |b|, over a tensor or over the steps. Bounds in fp32, a layout against one process:

| step 1: loss, norm, every gradient | 20 steps: loss | norm, clip factor | change of schedule or pipeline alone |
|---|---|---|---|
| {first:.0e} | {loss:.0e} | {norm:.0e} | {alone:.0e}, each of them |

Where a layout exceeds one of the first three, float64 decides: it may be at most {times:.0f} times as far from the
oracle in float64 as the oracle in fp32, one process, is. The last column of the tables says so where that was needed.
"""

COLUMNS = (
    "| case | loss, step 1 | norm, step 1 | gradients, step 1 | loss | norm | clip factor | parameters | held to |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)

BF16_HEAD = """
## bfloat16

Weights and activations are bfloat16; master weights, accumulated gradients and moments are fp32, in the product and in
the oracle. With the same micro-batches in one stage and one tensor slice, gradients are equal bit for bit. Where
products are cut or micro-batches fall otherwise, sums are rounded in another order, and how much that does is measured
on one process: the oracle is run with 2, 4, 8 and 16 samples at a time, and with the products of each branch cut in
1, 2 and 4 as tensor parallelism cuts them. A layout may be {times:.0f} times as far from one process as the two of
those runs that are farthest apart. That depends on the processor, the model and the text, so it is measured where this
page is made, and where a test runs.

| bounds, for the model of | gradients, step 1 | 20 steps: loss | norm | clip factor |
|---|---|---|---|---|
{bounds}
"""

RESUMED_HEAD = """
## Saved by one layout, loaded by another

The first layout trains {saved} steps and saves; the second loads, saves at once, and trains {more} steps more. Weights
and both moments of every parameter are compared bit for bit, the losses and norms of the steps after with one process
that was never interrupted.

| saved by | loaded by | weights and moments | loss | norm |
|---|---|---|---|---|
"""

CHOICE = """
## How the cells were chosen

The matrix is every layout of 1, 2, 4 and 8 processes ({layouts}) x {{1f1b, dualpipev}} x recomputation {{none,
sublayer, block}} x {{tied, untied}} x {{GELU, SwiGLU}} x sequence parallelism {{off, on}} x {{1, 2, 8}} micro-batches x
{{pipeline engine with ZeRO 1, plain engine with ZeRO 0, 2, 3}}: {all} combinations, of which the configuration refuses
{refused} and {cells} run. Of these, {picked} were picked so that any two choices that occur together in some cell
({pairs} pairs) occur together in a picked one: greedily, each time the cell with most pairs not yet seen, among equals
the one with fewest processes ([tests/parity/matrix.py](../tests/parity/matrix.py)). They run in CI, those of 8
processes with 8 micro-batches there for 5 steps only; this page has 20 steps of each. `make parity-full` runs all
{cells}.

## Cells that a rule excludes

In the words of the validator, with the number of cells (each stands for the {free} that differ in recomputation, tying
and activation, which no rule looks at):

| cells | refusal |
|---|---|
"""


def _row(name: str, apart: Difference, held_to: str) -> str:
    quantities = ("first_loss", "first_norm", "gradients", "loss", "norm", "coefficient", "parameters")
    numbers = [getattr(apart, quantity) for quantity in quantities]
    return f"| {name} | " + " | ".join(f"{number:.1e}" for number in numbers) + f" | {held_to} |\n"


class Report:
    """Runs cases, one after another, and collects the page."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.unsound: list[str] = []
        self.elastic = Elastic(harness)
        self.done = 0

    def _progress(self, name: str, result: object) -> None:
        self.done += 1
        print(f"{self.done:4d}  {name}: {result}", flush=True)

    def _failed(self, name: str, failure: CaseFailed) -> str:
        self.unsound.append(f"{name}: {failure}")
        self._progress(name, failure)
        return f"| {name} | failed |\n"

    def fp32(self, case: Case) -> str:
        """A row against one process."""
        try:
            verdict = self.harness.judge(case)
        except CaseFailed as failure:
            return self._failed(case.name, failure)
        self._progress(case.name, verdict)
        if not verdict.sound:
            self.unsound.append(f"{case.name}: {verdict}")
        return _row(case.name, verdict.difference, _held_to(verdict))

    def alone(self, case: Case) -> str:
        """A row against the same case without its pipeline."""
        try:
            cut, whole = self.harness.run(case).trace, self.harness.run(with_one_stage(case)).trace
        except CaseFailed as failure:
            return self._failed(case.name, failure)
        apart = difference(cut, whole, 1e-3)
        self._hold(f"{case.name}, against one stage", apart.over(dict.fromkeys(compare.FP32, compare.PIPELINE_ALONE)))
        return _row(case.name, apart, "pipeline alone")

    def bf16(self, case: Case) -> str:
        """A row against one process in bfloat16."""
        try:
            apart = self.harness.apart(case, self.harness.run(case).trace)
        except CaseFailed as failure:
            return self._failed(case.name, failure)
        self._hold(case.name, apart.over(self.harness.bounds(case)))
        return _row(case.name, apart, "bf16")

    def resumed(self, pair: tuple[Case, Case]) -> str:
        """A row of what one layout saved and another loaded."""
        source, target = pair
        try:
            resumed = self.elastic.resume(source, target)
        except CaseFailed as failure:
            return self._failed(f"{source.name} to {target.name}", failure)
        over = {**resumed.over(self.harness.bounds(target)), **dict.fromkeys(resumed.unequal, "not equal")}
        self._hold(f"{source.name} to {target.name}", over)
        equal = f"{len(resumed.unequal)} differ" if resumed.unequal else "equal, bit for bit"
        return f"| {source.name} | {target.name} | {equal} | {resumed.loss:.1e} | {resumed.norm:.1e} |\n"

    def _hold(self, name: str, over: dict[str, Any]) -> None:
        self._progress(name, over or "within the bounds")
        if over:
            self.unsound.append(f"{name}: {over}")

    def bounds(self, cases: list[Case]) -> str:
        """A row for each model of these cases: what it is held to."""
        rows: dict[str, str] = {}
        for case in cases:
            model = ", ".join([case.overrides[0], *(["tied"] if case.tied else []), case.activation])
            values = self.harness.bounds(case).values()
            rows[model] = f"| {model.replace('model.num_layers=', 'blocks ')} | " + " | ".join(
                f"{v:.1e}" for v in values
            )
        return " |\n".join(rows.values()) + " |\n"


def _held_to(verdict: Verdict) -> str:
    if not verdict.over:
        return "bounds"
    parts = [f"{name}: {verdict.times[name]:.1f} x one process" for name in verdict.over]
    return "float64 (" + ", ".join(parts) + ")"


def excluded_table() -> str:
    """The refusals, with how many cells each excludes."""
    return "".join(f"| {len(cases)} | {sentence} |\n" for sentence, cases in matrix.excluded().items())


def page(report: Report, full: bool) -> str:
    """Run everything and return the page."""
    free = 1
    for name in matrix.FREE:
        free *= len(matrix.FACTORS[name])
    cells, selection = len(matrix.cells()), matrix.pairwise()
    everything = 1
    for values in matrix.FACTORS.values():
        everything *= len(values)
    head = HEAD.format(
        full=" (here `make parity-full`)" if full else "",
        first=compare.FIRST_STEP,
        loss=compare.LOSS,
        norm=compare.NORM,
        alone=compare.PIPELINE_ALONE,
        times=compare.TIMES_AS_FAR,
    )
    choice = CHOICE.format(
        layouts=len(matrix.LAYOUTS),
        all=everything,
        refused=everything - cells,
        cells=cells,
        picked=len(selection.cases),
        pairs=selection.pairs,
        free=free,
    )
    parts = [head, "\n## Layouts\n\n", COLUMNS, *map(report.fp32, features.LAYOUTS)]
    parts += ["\n## A pipeline or a schedule alone\n\nAgainst the same case with one stage.\n\n", COLUMNS]
    parts += map(report.alone, features.PIPELINES)
    parts += [f"\n## {'Every cell' if full else 'The pairwise selection'} of the matrix\n\n", COLUMNS]
    parts += map(report.fp32, matrix.everything() if full else selection.cases)
    parts += ["\n## Features of the model, odd sizes, targets that are none\n\n", COLUMNS]
    parts += map(report.fp32, features.FEATURES)
    bounds = report.bounds(features.BF16)
    parts += [BF16_HEAD.format(times=compare.TIMES_ITSELF, bounds=bounds), COLUMNS, *map(report.bf16, features.BF16)]
    parts += [RESUMED_HEAD.format(saved=SAVED_AFTER, more=GO_ON), *map(report.resumed, PAIRS)]
    return "".join([*parts, choice, excluded_table()])


def main() -> int:
    """Write the page; status 1 where a case is out of bounds."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.report", description=__doc__)
    parser.add_argument("--full", action="store_true", help="run every cell, which takes hours")
    arguments = parser.parse_args()
    started = time.perf_counter()
    with open_harness(timeout=900.0) as harness:
        report = Report(harness)
        PAGE.write_text(page(report, arguments.full))
        minutes = (time.perf_counter() - started) / 60
        print(
            f"{PAGE}: {report.done} cases in {minutes:.0f} minutes, {harness.pool.cpu_seconds / 60:.1f} minutes of CPU"
        )
    for line in report.unsound:
        print(f"out of bounds: {line}", file=sys.stderr)
    return 1 if report.unsound else 0


if __name__ == "__main__":
    sys.exit(main())
