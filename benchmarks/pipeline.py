"""How close two pipeline stages come to what their schedule allows.

    python benchmarks/pipeline.py [--pairs 12]

Prints `ratio R`: the speed of two stages divided by (2 x the speed of one process x 8/9), median over pairs. 8/9 is
the 1F1B bound for 8 micro-batches on 2 stages, M / (M + P - 1) (arXiv 2104.04473, section 2.2).
"""

import argparse

from benchmarks.model_b import MICRO_BATCHES, through_the_engine
from benchmarks.rounds import Contestant, contest, report, time_in_turn

STAGES = 2
BOUND = MICRO_BATCHES / (MICRO_BATCHES + STAGES - 1)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12, help="pairs of steps that are counted (default 12)")
    arguments = parser.parse_args()
    one, two = Contestant(through_the_engine, 1), Contestant(through_the_engine, STAGES, processes=STAGES)
    with contest(one, two):
        measured = time_in_turn(one, two, arguments.pairs)
        report(measured, ("one process", "two stages"), lambda a, b: a / b / (STAGES * BOUND))
