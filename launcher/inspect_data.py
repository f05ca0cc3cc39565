"""What is in a data set: documents, tokens, lengths, and samples decoded as the trainer will see them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.errors import DataError
from data.indexed import CHUNK, IndexedDataset, bin_path
from data.progress import size
from data.samples import Sample, TokenSamples, samples_in, target_mask
from data.tokenizer import Tokenizer, load_tokenizer

EXAMPLES = """
examples:
  python launcher/inspect_data.py corpus/books/train
  python launcher/inspect_data.py corpus/books/train --sequence-length 1024 --samples 5 --seed 7
  python launcher/inspect_data.py theirs/text_document --tokenizer theirs/tokenizer.json

A sample is shown with the marks [document N] where a document of that number begins or goes on, and [end] for the
end-of-document token. Of fine-tuning data, what is a target stands between the marks >> and <<.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status: 0, or 2 for a data set that is not sound."""
    parser = argparse.ArgumentParser(
        prog="inspect_data.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prefix", metavar="PREFIX", help="the data set is PREFIX.bin and PREFIX.idx")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="default: the one in the data set's folder, if there is one"
    )
    parser.add_argument("--samples", type=int, default=3, help="samples to show (default: 3)")
    parser.add_argument("--sequence-length", type=int, default=256, help="as in the run's batch section (default: 256)")
    parser.add_argument("--seed", type=int, default=0, help="as in the run (default: 0)")
    options = parser.parse_args(argv)
    try:
        if options.sequence_length < 1:
            raise DataError(f"--sequence-length: expected 1 or more, found {options.sequence_length}")
        if options.samples < 0:
            raise DataError(f"--samples: expected 0 or more, found {options.samples}")
        dataset = IndexedDataset(options.prefix)
        dataset.check()
        tokenizer = _find_tokenizer(options.prefix, options.tokenizer)
        if tokenizer is not None:
            dataset.check_vocabulary(tokenizer.vocab_size)
        _describe(dataset, tokenizer)
        _histogram(dataset)
        _show_samples(dataset, tokenizer, options.sequence_length, options.seed, options.samples)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _find_tokenizer(prefix: str, given: str | None) -> Tokenizer | None:
    if given is not None:
        return load_tokenizer(given)
    folder = Path(prefix).parent
    beside = [folder / name for name in ("tokenizer.model", "tokenizer.json") if (folder / name).is_file()]
    return load_tokenizer(beside[0]) if beside else None


def _describe(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> None:
    print(f"{bin_path(dataset.prefix)}: {size(bin_path(dataset.prefix).stat().st_size)}, tokens as {dataset.dtype}")
    print(f"documents   {dataset.document_count:,}")
    if dataset.sequence_count != dataset.document_count:
        print(f"sequences   {dataset.sequence_count:,} (a very long document is several)")
    print(f"tokens      {dataset.token_count:,}")
    mask = target_mask(dataset)
    if mask is not None:
        blocks = range(0, dataset.token_count, CHUNK)
        targets = sum(int(mask.read(first, min(first + CHUNK, dataset.token_count)).sum()) for first in blocks)
        print(f"targets     {targets:,} ({targets / dataset.token_count:.1%}; the rest are prompts)")
    if tokenizer is None:
        print("tokenizer   none beside the data: give --tokenizer to see text")
        return
    print(f"vocabulary  {tokenizer.vocab_size:,}, end of document {tokenizer.end_of_document}")
    starts = dataset.document_starts(np.arange(1, min(dataset.document_count, CHUNK) + 1))
    lasts = np.array([dataset.read(stop - 1, stop)[0] for stop in starts[:100_000]])
    open_ended = int((lasts != tokenizer.end_of_document).sum())
    if open_ended:
        print(f"note        {open_ended:,} of {len(lasts):,} documents do not end in the end-of-document token")


def _histogram(dataset: IndexedDataset) -> None:
    """Documents by length, in powers of two."""
    counts = np.zeros(64, dtype=np.int64)
    shortest, longest = np.iinfo(np.int64).max, 0
    for first in range(0, dataset.document_count, CHUNK):
        sizes = dataset.document_sizes(first, min(first + CHUNK, dataset.document_count))
        counts += np.bincount(np.frexp(sizes)[1] - 1, minlength=64)
        shortest, longest = min(shortest, int(sizes.min())), max(longest, int(sizes.max()))
    mean = dataset.token_count / dataset.document_count
    print(f"\ntokens a document: {shortest:,} to {longest:,}, mean {mean:,.0f}")
    used = np.flatnonzero(counts)
    for power in range(int(used[0]), int(used[-1]) + 1):
        bar = "#" * int(np.ceil(40 * counts[power] / counts.max()))
        print(f"{2**power:>12,} to {2 ** (power + 1) - 1:>12,}  {counts[power]:>12,}  {bar}")


def _show_samples(dataset: IndexedDataset, tokenizer: Tokenizer | None, length: int, seed: int, count: int) -> None:
    in_epoch = samples_in(dataset.token_count, length)
    print(f"\nsamples of sequence_length {length}: {in_epoch:,} in an epoch")
    if in_epoch < 1 or count < 1:
        return
    samples = TokenSamples(dataset.prefix, length, seed)
    for number in range(min(count, in_epoch)):
        print(f"\n--- sample {number} (seed {seed}) " + "-" * 40)
        sample = samples.read(number)
        print(_text(sample, samples.documents(number), tokenizer))


def _text(sample: Sample, documents: np.ndarray, tokenizer: Tokenizer | None) -> str:
    """The sample with its documents' bounds marked; ids where there is no tokenizer."""
    result = []
    for place, number in enumerate(documents.tolist()):
        chosen = sample.documents == place
        result.append(f"[document {number}] ")
        ids = sample.tokens[chosen]
        is_target = sample.is_target[chosen] if sample.is_target is not None else np.ones(len(ids), dtype=bool)
        edges = np.flatnonzero(np.diff(is_target)) + 1
        for run, targets in zip(np.split(ids, edges), np.split(is_target, edges), strict=True):
            text = _decode(run, tokenizer)
            result.append(f">>{text}<<" if sample.is_target is not None and targets[0] else text)
        result.append("\n")
    return "".join(result).rstrip("\n")


def _decode(ids: np.ndarray, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids.tolist()))
    ends = np.flatnonzero(ids == tokenizer.end_of_document)
    pieces = [tokenizer.decode(piece.tolist()) for piece in np.split(ids, ends)]
    return "[end]".join(pieces)


if __name__ == "__main__":
    sys.exit(main())
