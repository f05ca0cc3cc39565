"""Text files to a tokenizer and two token data sets: what launcher/prepare_data.py does, from plan to last rename.

OUTPUT.partial/work/      tokenizer and shards, kept until the end: a second start after a kill goes on from them
OUTPUT.partial/result/    the finished files, renamed to OUTPUT when all are there
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.documents import Keys, Unit, find_files, plan_units, read_segment
from data.encoding import Job, ShardSummary, encode_unit
from data.errors import DataError, reading, writing
from data.indexed import token_dtype
from data.placing import PARTS, Layout, check_divisible, place_shard, plan_layout, write_indexes
from data.progress import Progress, size
from data.sharing import Team, assemble
from data.tokenizer import load_tokenizer
from data.tokenizer_training import check_vocabulary_size, train_tokenizer

TRAINING_TEXT = 32 << 20
"""Bytes of text that a tokenizer is trained on at most, taken evenly from all of the input."""


@dataclass(frozen=True)
class Preparation:
    """What to prepare; the fields are the options of prepare_data.py."""

    inputs: tuple[str, ...]
    output: str
    vocab_size: int = 32000
    tokenizer: str | None = None
    validation_fraction: float = 0.01
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    keys: Keys = Keys()
    seed: int = 0
    workers: int = 1


@dataclass(frozen=True)
class _Plan:
    units: list[Unit]
    job: Job


def prepare(wanted: Preparation) -> dict[str, Any] | None:
    """Do it; the contents of report.json (None in the MPI ranks that only help).

    Raises DataError for what the user can mend. Then, unless some of the work was done already, nothing is left behind;
    what was done is kept in OUTPUT.partial, and the same call goes on from there.
    """
    started = time.monotonic()
    with assemble(wanted.workers) as team:
        partial = Path(f"{wanted.output}.partial")
        try:
            plan: _Plan = _agree(team, partial, lambda: _plan(wanted, partial))
            costs = [sum(segment.size for segment in unit) for unit in plan.units]
            with _progress(team, "tokenising", sum(costs)) as progress:
                encode = functools.partial(encode_unit, plan.job)
                summaries = team.run(encode, plan.units, costs, progress.add)
            layout: Layout = _agree(team, partial, lambda: _layout(wanted, plan, summaries, partial))
            has_mask = len(wanted.keys.names) > 1
            place = functools.partial(place_shard, str(partial / "result"), layout.split, has_mask)
            tokens = sum(totals.tokens for totals in layout.totals)
            sizes = [os.path.getsize(f"{placement.shard}.tokens") for placement in layout.placements]
            with _progress(team, "writing", tokens, quiet=True) as progress:
                team.run(place, layout.placements, sizes, progress.add)
            return _agree(team, partial, lambda: _finish(wanted, plan, summaries, layout, partial, team, started))
        except DataError as error:
            # A name that is too long or lies below a file is no folder, and an error to glob.
            if not (os.path.isdir(partial / "work") and any((partial / "work").glob("*.npz"))):
                if team.leads:
                    shutil.rmtree(partial, ignore_errors=True)
                raise
            raise DataError(
                f"{error}; what is done is kept in {partial}: the same command goes on from there"
            ) from error


def _agree(team: Team, partial: Path, plan: Callable[[], Any]) -> Any:
    """`team.agree`, which passes on nothing but a DataError: of what cannot be written `plan` raises one."""

    def named() -> Any:
        with writing(partial):
            return plan()

    return team.agree(named)


def _progress(team: Team, label: str, total: int, quiet: bool = False) -> Progress:
    stream = sys.stderr if team.leads and not quiet else open(os.devnull, "w")  # noqa: SIM115
    return Progress(label, total, stream)


def _plan(wanted: Preparation, partial: Path) -> _Plan:
    if not wanted.tokenizer:
        check_vocabulary_size(wanted.vocab_size)  # before anything is read
    output = Path(wanted.output)
    if output.exists():
        raise DataError(f"--output {output}: expected a folder that does not exist yet, found one")
    if not 0 <= wanted.validation_fraction < 1:
        raise DataError(f"--validation-fraction: expected 0 to below 1, found {wanted.validation_fraction}")
    with reading(" ".join(wanted.inputs)):
        files = find_files(wanted.inputs, wanted.include, wanted.exclude, without=partial)
        units = plan_units(files, wanted.keys)
    if not units:
        raise DataError(f"--input {' '.join(wanted.inputs)}: expected text, found {len(files)} empty files (0 bytes)")
    if wanted.validation_fraction > 0 and {segment.kind for unit in units for segment in unit} == {"text"}:
        check_divisible(len({segment.path for unit in units for segment in unit}))
    total = sum(segment.size for unit in units for segment in unit)
    print(f"{len(files)} files, {size(total)}, {len(units)} units of work", file=sys.stderr)
    work = partial / "work"
    if wanted.tokenizer:
        load_tokenizer(wanted.tokenizer)  # refused before a folder is made
    work.mkdir(parents=True, exist_ok=True)
    path = _take_tokenizer(wanted, work) if wanted.tokenizer else _train_tokenizer(wanted, units, work)
    digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    job = Job(str(work), str(path), digest, wanted.keys)
    done = sum(Path(f"{job.shard(unit)}.npz").exists() for unit in units)
    if done:
        print(f"going on: {done} of {len(units)} units were done by an earlier start", file=sys.stderr)
    return _Plan(units, job)


def _take_tokenizer(wanted: Preparation, work: Path) -> Path:
    tokenizer = load_tokenizer(wanted.tokenizer or "")
    target = work / f"tokenizer{tokenizer.path.suffix if tokenizer.path.suffix == '.json' else '.model'}"
    shutil.copyfile(tokenizer.path, target)
    return target


def _train_tokenizer(wanted: Preparation, units: Sequence[Unit], work: Path) -> Path:
    described = repr((units, wanted.vocab_size, wanted.keys, TRAINING_TEXT))
    path = work / f"tokenizer-{hashlib.blake2b(described.encode(), digest_size=8).hexdigest()}.model"
    if not path.exists():
        print(f"training a tokenizer of {wanted.vocab_size} pieces", file=sys.stderr)
        model = train_tokenizer(_sample(units, wanted.keys), wanted.vocab_size)
        fresh = path.with_suffix(".partial")
        fresh.write_bytes(model)
        os.replace(fresh, path)
    return path


def _sample(units: Sequence[Unit], keys: Keys) -> Iterator[str]:
    """Text from all of the input, the same share of each unit, TRAINING_TEXT bytes or a little more."""
    total = sum(segment.size for unit in units for segment in unit)
    chosen = units if total <= TRAINING_TEXT else units[:: max(1, len(units) // 512)]
    share = TRAINING_TEXT // len(chosen)
    for unit in chosen:
        left = share if total > TRAINING_TEXT else sys.maxsize
        for part in (part for segment in unit for part in read_segment(segment, keys)):
            for text in part.fields:
                yield text[: max(left, 0)]
                left -= len(text)
            if left <= 0:
                break


def _layout(wanted: Preparation, plan: _Plan, summaries: list[ShardSummary], partial: Path) -> Layout:
    documents = sum(summary.documents for summary in summaries)
    shards = [str(plan.job.shard(unit)) for unit in plan.units]
    try:
        layout = plan_layout(shards, documents, wanted.seed, wanted.validation_fraction)
    except DataError:  # too few documents to be worth keeping
        shutil.rmtree(partial, ignore_errors=True)
        raise
    result = partial / "result"
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    item = _dtype(plan).itemsize
    for name, totals in zip(PARTS, layout.totals, strict=True):
        if totals.tokens:
            _allocate(result / f"{name}.bin", totals.tokens * item)
            if len(wanted.keys.names) > 1:
                _allocate(result / f"{name}.mask.bin", totals.tokens)
    return layout


def _dtype(plan: _Plan) -> Any:
    return token_dtype(load_tokenizer(plan.job.tokenizer).vocab_size)


def _allocate(path: Path, length: int) -> None:
    with path.open("wb") as file:
        file.truncate(length)


def _finish(
    wanted: Preparation,
    plan: _Plan,
    summaries: list[ShardSummary],
    layout: Layout,
    partial: Path,
    team: Team,
    started: float,
) -> dict[str, Any]:
    result = partial / "result"
    write_indexes(result, layout, _dtype(plan))
    tokenizer = load_tokenizer(plan.job.tokenizer)
    shutil.copyfile(plan.job.tokenizer, result / f"tokenizer{tokenizer.path.suffix}")
    digest = hashlib.blake2b(digest_size=16)
    for summary in summaries:
        digest.update(bytes.fromhex(summary.digest))
    report = {name: asdict(totals) for name, totals in zip(PARTS, layout.totals, strict=True) if totals.documents} | {
        "vocab_size": tokenizer.vocab_size,
        "empty_documents_left_out": sum(summary.empty for summary in summaries),
        "documents_with_bytes_replaced": sum(summary.replaced for summary in summaries),
        "input_digest": digest.hexdigest(),
        "processes": team.size,
        "seconds": round(time.monotonic() - started, 2),
        "peak_memory_mib": max(_own_peak(), *(summary.peak_memory for summary in summaries)) >> 20,
    }
    (result / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for path in result.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    Path(wanted.output).parent.mkdir(parents=True, exist_ok=True)
    os.rename(result, wanted.output)
    shutil.rmtree(partial, ignore_errors=True)
    return report


def _own_peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
