"""What the engine costs on one process: our step against a bare PyTorch loop over the same model.

    python benchmarks/overhead.py [--pairs 12]

Prints `ratio R`: the bare loop's seconds divided by ours, median over pairs (1.00: no overhead).
"""

import argparse

from benchmarks.model_b import bare_loop, through_the_engine
from benchmarks.rounds import Contestant, contest, report, time_in_turn

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12, help="pairs of steps that are counted (default 12)")
    arguments = parser.parse_args()
    with contest(Contestant(bare_loop), Contestant(through_the_engine, 1)) as (bare, ours):
        report(time_in_turn(bare, ours, arguments.pairs), ("bare loop", "engine"), lambda a, b: a / b)
