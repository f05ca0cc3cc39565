"""Text to token files: trains a tokenizer (or takes one) and writes what `data.train` and `data.validation` name."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from data.errors import DataError
from data.prepare import Preparation, prepare


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(prog="prepare_data.py", description=__doc__)
    parser.add_argument("--input", nargs="+", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--validation-fraction", type=float, default=0.01)
    parser.add_argument("--include", nargs="+", default=["*"])
    parser.add_argument("--exclude", nargs="+", default=[])
    parser.add_argument("--tokenizer")
    parser.add_argument("--text-key", default="text")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        report = prepare(
            Preparation(
                tuple(options.input),
                options.output,
                options.vocab_size,
                options.validation_fraction,
                tuple(options.include),
                tuple(options.exclude),
                options.tokenizer,
                options.text_key,
                options.seed,
            )
        )
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
