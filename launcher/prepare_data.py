"""Text to token files: trains a tokenizer (or takes one) and writes what `data.train` and `data.validation` name."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from data.documents import Keys
from data.errors import DataError
from data.prepare import Preparation, prepare
from data.progress import duration, size
from data.sharing import own_rank

EXAMPLES = """
examples:
  a folder of text, a tokenizer of 4096 pieces trained on it
      python launcher/prepare_data.py --input books/ --include '*.txt' --output corpus/books --vocab-size 4096

  the same with every core of this machine, or of many (the output is the same byte for byte)
      python launcher/prepare_data.py --input books/ --output corpus/books --workers 16
      mpirun -n 64 python launcher/prepare_data.py --input books/ --output corpus/books
      srun --mpi=pmix -n 64 python launcher/prepare_data.py --input books/ --output corpus/books

  JSON lines with the text under "content", and the tokenizer of a published model
      python launcher/prepare_data.py --input web/*.jsonl.zst --text-key content \\
          --tokenizer llama/tokenizer.json --output corpus/web

  fine-tuning data: only the completion is a target
      python launcher/prepare_data.py --input chat.jsonl --prompt-key question --completion-key answer \\
          --tokenizer corpus/books/tokenizer.model --output corpus/chat

what you get:
  OUTPUT/train.bin, train.idx             tokens and index, in Megatron's format (for data.train=OUTPUT/train)
  OUTPUT/validation.bin, validation.idx   documents held out (for data.validation=OUTPUT/validation)
  OUTPUT/train.mask.bin                   fine-tuning data only: 1 where a token is a target
  OUTPUT/tokenizer.model (or .json)       for data.tokenizer
  OUTPUT/report.json                      documents, tokens, bytes, digest of the input, seconds, peak memory

files: .jsonl and .ndjson hold a document a line, .parquet one a row, any other file is one document of UTF-8 text;
.gz and .zst of text and JSON lines are read as they are. OUTPUT appears when it is complete. Killed, the same command
goes on from what OUTPUT.partial holds.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_argument_group("what to read, where to write")
    where.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="files and folders, read in this order"
    )
    where.add_argument("--output", required=True, metavar="DIR", help="folder to make; it must not exist")
    where.add_argument(
        "--include",
        nargs="+",
        default=["*"],
        metavar="GLOB",
        help="take only files of a folder that match (default: all)",
    )
    where.add_argument(
        "--exclude", nargs="+", default=[], metavar="GLOB", help="leave out files, or whole folders, that match"
    )
    where.add_argument("--text-key", default="text", metavar="KEY", help="JSON key or Parquet column (default: text)")
    where.add_argument("--prompt-key", metavar="KEY", help="fine-tuning: key of the part that is no target")
    where.add_argument("--completion-key", metavar="KEY", help="fine-tuning: key of the part that is the target")
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument("--vocab-size", type=int, default=32000, help="pieces to train (default: 32000)")
    tokenizer.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="take this one instead: a SentencePiece model or a Hugging Face tokenizer.json",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--validation-fraction",
        type=float,
        default=0.01,
        help="share of documents held out (default: 0.01); 0 for none",
    )
    how.add_argument("--seed", type=int, default=0, help="which documents are held out (default: 0)")
    how.add_argument("--workers", type=int, default=1, help="processes on this machine (default: 1); not under MPI")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status: 0, or 2 for a mistake in what was asked."""
    options = build_parser().parse_args(argv)
    try:
        if bool(options.prompt_key) != bool(options.completion_key):
            raise DataError("--prompt-key, --completion-key: expected both or neither, found one")
        if options.workers < 1:
            raise DataError(f"--workers: expected 1 or more, found {options.workers}")
        report = prepare(
            Preparation(
                inputs=tuple(options.input),
                output=options.output.rstrip("/"),
                vocab_size=options.vocab_size,
                tokenizer=options.tokenizer,
                validation_fraction=options.validation_fraction,
                include=tuple(options.include),
                exclude=tuple(options.exclude),
                keys=Keys(options.text_key, options.prompt_key, options.completion_key),
                seed=options.seed,
                workers=options.workers,
            )
        )
    except DataError as error:
        if own_rank() == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped: the same command goes on from {options.output.rstrip('/')}.partial", file=sys.stderr)
        return 130
    if report is not None and own_rank() == 0:
        _print_summary(options.output.rstrip("/"), report)
    return 0


def _print_summary(output: str, report: dict) -> None:
    for name in ("train", "validation"):
        if name in report:
            part = report[name]
            print(
                f"{output}/{name}: {part['documents']:,} documents, {part['tokens']:,} tokens, "
                f"{size(part['bytes'])} of text ({part['bytes'] / part['tokens']:.2f} bytes a token)"
            )
    if report["documents_with_bytes_replaced"]:
        count = report["documents_with_bytes_replaced"]
        print(f"note: {count} documents held bytes that are not UTF-8; each stands as U+FFFD now")
    if report["empty_documents_left_out"]:
        print(f"note: {report['empty_documents_left_out']} empty documents were left out")
    print(
        f"vocabulary {report['vocab_size']}, {report['processes']} process(es), {duration(report['seconds'])}, "
        f"peak memory {report['peak_memory_mib']} MiB in the largest process"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit, so that workers are ended too
    sys.exit(main())
