"""How well a model predicts a text: loss, perplexity, bits per byte, over the whole text.

    python launcher/evaluate.py runs/tiny --data corpus/wiki/validation         a prepared data set
    python launcher/evaluate.py runs/tiny --text book.txt other.txt             raw text, a file a document
    python launcher/evaluate.py runs/tiny --data corpus/wiki/validation --json result.json

The text is read in windows of L + 1 tokens that begin every L tokens, the ragged end included, so that each token but
the first is predicted once. Bits per byte is comparable between tokenizers; loss and perplexity are not.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from data.batches import NO_TARGET, MicroBatch, ValidationData
from data.errors import DataError
from data.indexed import IndexedWriter, token_dtype
from data.tokenizer import Tokenizer, load_tokenizer
from launcher.generate import DTYPES, device_and_dtype
from launcher.progress import Bar
from model.language_model import LanguageModel
from training.checkpoint import CheckpointError
from training.loading import document_mask, load_model, open_checkpoint, sequence_length, tokenizer_path

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
    parser.add_argument("--batch-size", type=int, default=8, help="windows at once (default: 8)")
    parser.add_argument(
        "--tokenizer", type=Path, help="tokenizer file (default: the one that the run was trained with)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: fp32 on the cpu, else bf16)")
    return parser


def evaluate(data: ValidationData, token_bytes: np.ndarray, sum_of_losses: SumOfLosses, batch_size: int) -> Evaluation:
    """Runs over all of `data`, `batch_size` windows at a time. What computes the losses is up to `sum_of_losses`.

    token_bytes: [vocabulary] bytes of text that each token id stands for. The last micro-batch is filled up with
    windows that have no targets.
    """
    calls = -(-len(data) // batch_size)
    total, targets, text_bytes = 0.0, 0, 0
    with Bar("evaluating", len(data), "windows") as bar:
        for call in range(calls):
            batch = data.micro_batch(np.arange(call * batch_size, (call + 1) * batch_size))
            loss, count = sum_of_losses(batch)
            total, targets = total + loss, targets + count
            text_bytes += int(token_bytes[batch.targets[batch.targets != NO_TARGET].numpy()].sum())
            bar.advance(batch_size)
    if not targets:
        raise DataError("the data set has no targets")
    loss = total / targets
    bits = total / math.log(2) / text_bytes if text_bytes else None
    return Evaluation(loss, math.exp(min(loss, 700.0)), bits, targets, text_bytes)


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
            writer.add_document([*tokenizer.encode(text), tokenizer.end_of_document])


def run(options: argparse.Namespace) -> Evaluation:
    """Loads model and text and evaluates. Raises what `main` turns into one sentence."""
    if options.batch_size < 1:
        raise CheckpointError(f"--batch-size is {options.batch_size} and must be at least 1")
    device, dtype = device_and_dtype(options)
    checkpoint = open_checkpoint(options.source)
    length = options.sequence_length or sequence_length(checkpoint)
    if length is None or length < 1:
        raise CheckpointError(f"{checkpoint.path} does not say its sequence length: give --sequence-length")
    tokenizer = load_tokenizer(tokenizer_path(checkpoint, options.tokenizer))
    with tempfile.TemporaryDirectory() as folder:
        prefix = options.data
        if options.text:
            prefix = Path(folder) / "text"
            prepare_text(options.text, tokenizer, prefix)
        model = load_model(checkpoint, device, dtype)
        vocabulary = model.configuration.vocabulary
        mask = document_mask(checkpoint)
        data = ValidationData(prefix, length, tokenizer.end_of_document, mask, vocab_size=vocabulary)
        token_bytes = np.zeros(max(vocabulary, tokenizer.vocab_size), dtype=np.int64)
        token_bytes[: tokenizer.vocab_size] = tokenizer.token_bytes()
        return evaluate(data, token_bytes, model_losses(model), options.batch_size)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 0, or 2 with one line on standard error."""
    options = build_parser().parse_args(argv)
    try:
        result = run(options)
        if options.json:
            options.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    except (CheckpointError, DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bits = "unknown" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}"
    print(f"loss {result.loss:.4f}  perplexity {result.perplexity:.4f}  bits per byte {bits}")
    print(f"{result.tokens:,} tokens, {result.bytes:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
