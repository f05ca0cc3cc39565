"""How fast the data side is: prints one line `ratio NAME R` for each question.

    python benchmarks/data.py [--rounds 5]

tokenising    what preparation reaches on one core, reading and writing included, over the rate of SentencePiece itself
              on the same text in memory (its fastest call, on one thread); at least 0.9
two_ranks     time of `prepare_data.py` on one process over that on two MPI ranks (two workers where there is no
              mpirun), start-up included; at least 1.8 on two free cores
reading       tokens a second that TrainingData hands out over those that the demo consumes; at least 100

Rounds of the two sides alternate (A B B A ...) and medians are compared: other work on the machine hits both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import sentencepiece

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(ROOT), *(path for path in sys.path if path != str(ROOT / "benchmarks"))]  # `data` is the package

from data.batches import TrainingData  # noqa: E402
from data.documents import Keys, find_files, plan_units, read_segment  # noqa: E402
from data.encoding import Job, encode_unit  # noqa: E402
from data.prepare import Preparation, prepare  # noqa: E402

WITHOUT = ("test", "tests", "idlelib", "lib2to3", "site-packages")
DEMO_TOKENS_PER_SECOND = 10_000
"""Of the demo on two cores, rounded up; a finished demo's own figure is taken where runs/tiny has one."""


def alternate(first: Callable[[], float], second: Callable[[], float], rounds: int) -> tuple[float, float]:
    """Medians of the seconds that each takes, over rounds A B B A A B ..."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            times[which].append((first, second)[which]())
    return statistics.median(times[0]), statistics.median(times[1])


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def core_seconds(work: Callable[[], object]) -> float:
    """Seconds of one core that `work`, on one thread of this process, takes."""
    began = time.process_time()
    work()
    return time.process_time() - began


def tokenising(corpus: Path, tokenizer: Path, rounds: int) -> float:
    """Rate of preparation over SentencePiece's own."""
    keys = Keys()
    units = plan_units(find_files([str(corpus)], ["*.py"], WITHOUT), keys)
    texts = [[part.fields[0] for segment in unit for part in read_segment(segment, keys)] for unit in units]
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))

    def ours() -> float:
        with tempfile.TemporaryDirectory() as folder:
            job = Job(folder, str(tokenizer), "digest", keys)
            return core_seconds(lambda: [encode_unit(job, unit, lambda _: None) for unit in units])

    def theirs() -> float:
        return core_seconds(lambda: [processor.encode(each, return_type="numpy", num_threads=1) for each in texts])

    our_seconds, their_seconds = alternate(ours, theirs, rounds)
    megabytes = sum(len(text.encode()) for each in texts for text in each) / 1e6
    print(f"prepare {megabytes / our_seconds:.2f} MB/s a core, SentencePiece {megabytes / their_seconds:.2f} MB/s")
    return their_seconds / our_seconds


def two_ranks(corpus: Path, tokenizer: Path, folder: Path, copies: int, rounds: int) -> float:
    """Speed-up of two ranks."""
    texts = folder / "texts"
    texts.mkdir()
    whole = b"".join(path.read_bytes() for path in find_files([str(corpus)], ["*.py"], WITHOUT))
    for number in range(copies):  # copies on disk: work on one file named twice would be done once
        (texts / f"{number}.txt").write_bytes(whole)
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

    def run(start: list[str], *more: str) -> float:
        output = folder / "output"
        shutil.rmtree(output, ignore_errors=True)
        command = [*start, sys.executable, str(ROOT / "launcher/prepare_data.py"), "--input", str(texts), *more]
        command += ["--tokenizer", str(tokenizer), "--output", str(output)]
        return timed(lambda: subprocess.run(command, env=environment, check=True, capture_output=True))

    two = (lambda: run([mpirun, "-n", "2"])) if mpirun else (lambda: run([], "--workers", "2"))
    one_second, two_seconds = alternate(lambda: run([]), two, rounds)
    print(f"one process {one_second:.1f} s, two {'ranks' if mpirun else 'workers'} {two_seconds:.1f} s")
    return one_second / two_seconds


def reading(prefix: Path, rounds: int) -> float:
    """Rate of TrainingData, in micro-batches of 8 samples of 256 tokens, over the demo's consumption."""
    metrics = ROOT / "runs/tiny/metrics.jsonl"
    consumed = float(DEMO_TOKENS_PER_SECOND)
    if metrics.is_file():
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        consumed = statistics.median(record["tokens_per_second"] for record in records if record["kind"] == "train")
    data = TrainingData(prefix, 256, seed=0, vocab_size=4096)
    seconds = [
        timed(
            lambda start=start: [
                data.micro_batch(np.arange(first, first + 8)) for first in range(start, start + 1600, 8)
            ]
        )
        for start in range(0, 1600 * rounds, 1600)
    ]
    rate = 1600 * 256 / statistics.median(seconds)
    print(f"reading {rate:,.0f} tokens/s, the demo consumes {consumed:,.0f}")
    return rate / consumed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--copies", type=int, default=8, help="how often two_ranks reads the text (11 MB; default: 8)")
    options = parser.parse_args()
    corpus = Path(sysconfig.get_paths()["stdlib"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(Preparation((str(corpus),), str(folder / "demo"), 4096, include=("*.py",), exclude=WITHOUT))
        tokenizer = folder / "demo/tokenizer.model"
        print(f"ratio reading {reading(folder / 'demo/train', options.rounds):.0f}", flush=True)
        print(f"ratio tokenising {tokenising(corpus, tokenizer, options.rounds):.3f}", flush=True)
        ranks = two_ranks(corpus, tokenizer, folder, options.copies, options.rounds)
        print(f"ratio two_ranks {ranks:.2f}", flush=True)


if __name__ == "__main__":
    main()
