"""Train a model: `deepspeed [--num_gpus N] launcher/train.py CONFIG [section.key=value ...]`.

Also under torchrun, srun (one task a device), mpirun, and as plain `python` for one process.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from parallel.environment import LaunchError, check_deepspeed_version, guess_rank, read_environment
from training.configuration import ConfigurationError, check_world, load, to_yaml
from training.layout import choose_layout
from training.processes import leave_now
from training.stop_requests import StopRequests

FAILED = 1
MISTAKE = 2

EXAMPLES = """\
examples:
  python launcher/train.py configs/tiny.yaml                                    one process
  deepspeed --num_gpus 2 launcher/train.py configs/tiny.yaml parallel.pipeline=2
  deepspeed --num_gpus 8 launcher/train.py configs/7b.yaml batch.micro_batch_size=2 run.name=try
  torchrun --nproc-per-node 4 launcher/train.py configs/tiny.yaml parallel.tensor=2
  python launcher/train.py configs/7b.yaml --show                               the resolved configuration

A second call with the same run.name goes on from the newest checkpoint of that run.
What a run leaves: runs/NAME/{config.yaml,metrics.jsonl,status.json,tensorboard/,checkpoints/}.
Exit status: 0 finished or stopped as asked, 1 failed, 2 a mistake in what was asked.
"""


def parser() -> argparse.ArgumentParser:
    """The command's options; few, because torchrun takes script options that abbreviate its own."""
    result = argparse.ArgumentParser(
        prog="launcher/train.py",
        description="Train a decoder-only transformer on one or many devices.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("configuration", metavar="CONFIG", help="YAML file, such as configs/tiny.yaml")
    result.add_argument("overrides", nargs="*", metavar="section.key=value", help="values on top of the file's")
    result.add_argument("--show", action="store_true", help="print the resolved configuration and leave")
    # The deepspeed command passes it; the environment says the same.
    result.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return result


def report(message: str, rank: int, status: int = MISTAKE) -> int:
    """Print the sentence once, from rank 0, and return the exit status.

    Launchers end all processes when one leaves: the others wait, so that rank 0 gets to speak.
    """
    if rank == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(5)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Check everything that can be checked, then train. Returns the exit status."""
    arguments = parser().parse_intermixed_args(argv)
    rank = guess_rank()
    try:
        if arguments.show:
            print(to_yaml(load(arguments.configuration, arguments.overrides)), end="")
            return 0
        environment = read_environment()
        rank = environment.rank
        check_deepspeed_version()
        configuration = load(arguments.configuration, arguments.overrides)
        if configuration.parallel.elastic:
            configuration, choice = choose_layout(configuration, environment.world_size)
            if rank == 0:
                print(choice, flush=True)
        layout = check_world(configuration, environment.world_size)
    except (LaunchError, ConfigurationError) as error:
        return report(str(error), rank)

    stops = StopRequests()
    # Heavy imports only now: a mistake above is reported in a fraction of a second.
    from parallel.meeting import PreflightError
    from training.start import StartError, train

    try:
        return train(configuration, layout, environment, stops)
    except PreflightError as error:
        return report(str(error), 0 if error.alone else rank, FAILED)
    except LaunchError as error:
        return report(str(error), 0 if error.alone else rank)
    except StartError as error:
        return report(str(error), rank)
    finally:
        stops.close()


if __name__ == "__main__":
    leave_now(main())
