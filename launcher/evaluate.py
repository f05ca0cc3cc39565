"""How well a model predicts a text: loss, perplexity, bits per byte, over the whole text.

    python launcher/evaluate.py runs/tiny --data corpus/wiki/validation         a prepared data set
    python launcher/evaluate.py runs/tiny --text book.txt other.txt             raw text, a file a document
    python launcher/evaluate.py runs/tiny --data corpus/wiki/validation --json result.json

A model that one device cannot hold, or a long text, on many (also under torchrun, srun and mpirun):

    deepspeed --num_gpus 8 launcher/evaluate.py runs/7b --data corpus/wiki/validation --pipeline 2 --tensor 2

The text is read in windows of L + 1 tokens that begin every L tokens, the ragged end included, so that each token but
the first is predicted once. Bits per byte is comparable between tokenizers; loss and perplexity are not. No layout
changes the result. Exit status: 0, or 2 for a mistake in what was asked.
"""

import argparse
import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F

from data.batches import NO_TARGET, MicroBatch, ValidationData
from data.errors import DataError
from data.indexed import IndexedWriter, token_dtype
from data.progress import Progress
from data.tokenizer import Tokenizer, load_tokenizer
from launcher.generate import DTYPES, device_and_dtype
from launcher.mistakes import sentence
from launcher.train import report
from model.configuration import RopeType
from model.language_model import LanguageModel
from parallel.environment import Environment, LaunchError, guess_rank, read_environment
from training.checkpoint import Checkpoint, CheckpointError
from training.loading import (
    document_mask,
    load_model,
    model_configuration,
    open_checkpoint,
    sequence_length,
    tokenizer_path,
)
from training.processes import leave_now

ROWS_AT_ONCE = 1024
"""Rows of logits that are held in float32 at once."""

SumOfLosses = Callable[[MicroBatch], tuple[float, int]]
"""Summed negative log-likelihood, in nats, of a micro-batch's targets, and their number."""


@dataclass(frozen=True)
class Evaluation:
    """What a text cost. `tokens` are the targets, `bytes` the bytes of text that they stand for."""

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    bytes: int

    @classmethod
    def of(cls, loss: float, tokens: int, text_bytes: int) -> Self:
        """From the mean loss over the targets. DataError where there are none."""
        if not tokens:
            raise DataError("the data set has no targets")
        bits = loss * tokens / math.log(2) / text_bytes if text_bytes else None
        return cls(loss, math.exp(min(loss, 700.0)), bits, tokens, text_bytes)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="evaluate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a run folder (its newest sound checkpoint) or a checkpoint")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--data", metavar="PREFIX", help="a prepared data set: PREFIX.bin and PREFIX.idx")
    text.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="text files, each a document")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there, too")
    parser.add_argument("--sequence-length", type=int, help="tokens of a window (default: as in training)")
    parser.add_argument("--batch-size", type=int, default=8, help="windows at once, on each copy (default: 8)")
    parser.add_argument(
        "--tokenizer", type=Path, help="tokenizer file (default: the one that the run was trained with)"
    )
    # Few options: torchrun takes script options that abbreviate its own.
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... for one process (default: cuda where there is one)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: fp32 on the cpu, else bf16)")
    layout = parser.add_argument_group(
        "layout", "for several processes; those that are left over become copies that share the text"
    )
    layout.add_argument("--pipeline", type=int, default=1, help="stages that the blocks are cut into (default: 1)")
    layout.add_argument("--tensor", type=int, default=1, help="processes that share each weight matrix (default: 1)")
    # The deepspeed command passes it; the environment says the same.
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser


@contextlib.contextmanager
def progress_over(data: ValidationData, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """What to tell of windows that are done; progress is in bytes of the data set's tokens."""
    a_token = data.dataset.dtype.itemsize
    total = data.dataset.token_count * a_token
    with open(os.devnull, "w") as nowhere, Progress("evaluating", total, None if shown else nowhere) as progress:
        yield lambda windows: progress.add(min(windows * data.sequence_length * a_token, total - progress.done))


def evaluate(data: ValidationData, token_bytes: np.ndarray, sum_of_losses: SumOfLosses, batch_size: int) -> Evaluation:
    """Runs over all of `data`, `batch_size` windows at a time. What computes the losses is up to `sum_of_losses`.

    token_bytes: [vocabulary] bytes of text that each token id stands for. The last micro-batch is filled up with
    windows that have no targets.
    """
    calls = -(-len(data) // batch_size)
    total, targets, text_bytes = 0.0, 0, 0
    with progress_over(data) as done:
        for call in range(calls):
            batch = data.micro_batch(np.arange(call * batch_size, (call + 1) * batch_size))
            loss, count = sum_of_losses(batch)
            total, targets = total + loss, targets + count
            text_bytes += int(token_bytes[batch.targets[batch.targets != NO_TARGET].numpy()].sum())
            done(batch_size)
    return Evaluation.of(total / targets if targets else math.nan, targets, text_bytes)


def model_losses(model: LanguageModel) -> SumOfLosses:
    """`sum_of_losses` with the plain model on its device."""
    device = next(model.parameters()).device

    @torch.inference_mode()
    def sum_of_losses(batch: MicroBatch) -> tuple[float, int]:
        ids = None if batch.document_ids is None else batch.document_ids.to(device)
        logits = model(batch.tokens.to(device), document_ids=ids).flatten(0, 1)
        targets = batch.targets.to(device).flatten()
        total = 0.0
        for rows, wanted in zip(logits.split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE), strict=True):
            losses = F.cross_entropy(rows.float(), wanted, ignore_index=NO_TARGET, reduction="none")
            total += losses.sum(dtype=torch.float64).item()
        return total, int((targets != NO_TARGET).sum())

    return sum_of_losses


def prepare_text(files: Sequence[Path], tokenizer: Tokenizer, prefix: Path) -> None:
    """Writes text files as a data set, each a document with the end-of-document token behind it."""
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer:
        for file in files:
            try:
                text = file.read_bytes().decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{file}: expected UTF-8 text, found another byte at {error.start}") from error
            except OSError as error:
                raise DataError(sentence(error)) from error
            ids = tokenizer.encode(text)
            if not ids and len(files) == 1:  # the data set would be refused for it, under a temporary name
                raise DataError(f"{file}: expected text of at least 1 token, found none in {len(text)} characters")
            writer.add_document([*ids, tokenizer.end_of_document])


def open_text(options: argparse.Namespace, checkpoint: Checkpoint, folder: Path) -> tuple[ValidationData, np.ndarray]:
    """The data set that is asked for, and the bytes of text that each token id stands for.

    Raw text is prepared in `folder` first.
    """
    model = model_configuration(checkpoint)
    vocabulary = model.vocabulary
    length = options.sequence_length or sequence_length(checkpoint)
    if length is None or length < 1:
        raise CheckpointError(f"{checkpoint.path} does not say its sequence length: give --sequence-length")
    tokenizer = load_tokenizer(tokenizer_path(checkpoint, options.tokenizer))
    if tokenizer.vocab_size > vocabulary:
        raise CheckpointError(f"{tokenizer.path} has {tokenizer.vocab_size} ids, more than the model's {vocabulary}")
    prefix = options.data
    if options.text:
        prefix = folder / "text"
        prepare_text(options.text, tokenizer, prefix)
    mask = document_mask(checkpoint)
    data = ValidationData(prefix, length, tokenizer.end_of_document, mask, vocab_size=vocabulary)
    if model.rope_scaling is None or model.rope_scaling.rope_type is not RopeType.DYNAMIC:
        # Nothing is computed for what would fill up a text shorter than a window; no target's loss depends on it, but
        # with `dynamic` scaling, which goes by the window's length.
        data.sequence_length = min(length, data.dataset.token_count - 1)
    token_bytes = np.zeros(vocabulary, dtype=np.int64)
    token_bytes[: tokenizer.vocab_size] = tokenizer.token_bytes()
    return data, token_bytes


def evaluate_alone(options: argparse.Namespace, folder: Path) -> Evaluation:
    """On one process, with the plain model."""
    device, dtype = device_and_dtype(options)
    checkpoint = open_checkpoint(options.source)
    data, token_bytes = open_text(options, checkpoint, folder)
    model = load_model(checkpoint, device, dtype)
    return evaluate(data, token_bytes, model_losses(model), min(options.batch_size, len(data)))


def evaluate_together(options: argparse.Namespace, environment: Environment, folder: Path) -> Evaluation:
    """On many processes. Collective; the result stands on rank 0."""
    # Heavy imports only now, and only here.
    from training.evaluation_run import Question, evaluate_together
    from training.start import StartError

    dtype = DTYPES[options.dtype] if options.dtype else None
    question = Question(options.source, options.pipeline, options.tensor, options.batch_size, dtype)
    with contextlib.ExitStack() as stack:
        try:
            result = evaluate_together(
                question,
                environment,
                lambda checkpoint: open_text(options, checkpoint, folder),
                lambda data: stack.enter_context(progress_over(data, shown=environment.rank == 0)),
            )
        except StartError as error:
            raise LaunchError(str(error)) from error
        return Evaluation.of(result.loss, result.targets, result.bytes)


def check(options: argparse.Namespace, world_size: int) -> None:
    """Refuses what can be refused before anything is read; LaunchError."""
    for name in ("batch_size", "sequence_length", "pipeline", "tensor"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise LaunchError(f"--{name.replace('_', '-')} is {value} and must be at least 1")
    copy = options.pipeline * options.tensor
    if world_size % copy:
        raise LaunchError(
            f"--pipeline {options.pipeline} --tensor {options.tensor} needs {copy} processes or a multiple, found "
            f"{world_size}: start it with  deepspeed --num_gpus {copy} launcher/evaluate.py ..."
        )
    if options.json:
        check_result_file(options.json)
    if world_size > 1 and options.device:
        raise LaunchError("--device is for one process; of several, each takes the device of its local rank")


def check_result_file(path: Path) -> None:
    """Refuses a place that the result could not be written to, rather than after the evaluation; LaunchError."""
    if path.is_dir():
        raise LaunchError(f"--json {path} is a folder and must be a file")
    if not path.absolute().parent.is_dir():
        raise LaunchError(f"--json {path}: there is no folder {path.parent}")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise LaunchError(f"--json {path}: the file cannot be written to")
        return
    try:
        # A file without a name: several processes may try, and nothing is left where the evaluation fails.
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise LaunchError(f"--json {path}: no file can be made in this folder: {reason}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 0, or 2 with one line on standard error."""
    options = build_parser().parse_args(argv)
    rank = guess_rank()
    try:
        environment = read_environment()
        rank = environment.rank
        check(options, environment.world_size)
        with tempfile.TemporaryDirectory() as folder:
            if environment.world_size == 1:
                result = evaluate_alone(options, Path(folder))
            else:
                result = evaluate_together(options, environment, Path(folder))
        if rank == 0:
            show(result)
            if options.json:
                options.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    except LaunchError as error:
        return report(sentence(error), 0 if error.alone else rank)
    except (CheckpointError, DataError, OSError) as error:
        return report(sentence(error), rank)
    return 0


def show(result: Evaluation) -> None:
    """Prints the result for a person."""
    bits = "unknown" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}"
    print(f"loss {result.loss:.4f}  perplexity {result.perplexity:.4f}  bits per byte {bits}")
    print(f"{result.tokens:,} tokens, {result.bytes:,} bytes", flush=True)


if __name__ == "__main__":
    leave_now(main())
