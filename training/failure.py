"""What is said of a failure: which rank failed first and why, once, as the last thing a run says."""

import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from training.status import ATTEMPTS, State, Status, SupersededError, is_current, write_status

# What torch raises in the ranks that were talking to one that is gone. Gloo's errors are plain RuntimeErrors.
COMMUNICATION = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "timed out waiting",
    "gloo",
    "nccl",
    "remote process exited",
    "socket",
)


class TrainingFailure(Exception):
    """The run cannot go on, and every rank knows it: one sentence that says why."""


@dataclass(frozen=True)
class Failure:
    """The first failure of a run."""

    rank: int | None
    """Which rank failed; None where all found the same at once."""
    reason: str
    found_by: int
    """The rank that says so: another one, where the failing rank cannot."""
    superseded: bool = False
    """Whether nothing failed but a newer attempt owns the run folder, which then stays as it is."""

    @property
    def sentence(self) -> str:
        """What is printed last."""
        return self.reason if self.rank is None else f"rank {self.rank} failed first: {self.reason}"


def of_exception(error: BaseException, rank: int, doing: str) -> Failure:
    """The failure that an exception in this rank's main thread is."""
    if isinstance(error, SupersededError):
        return Failure(None, str(error), rank, superseded=True)
    if isinstance(error, TrainingFailure):
        return Failure(None, str(error), rank)
    lines = str(error).strip().splitlines() or [""]
    return Failure(rank, f"{type(error).__name__}: {lines[0]} ({doing})", rank)


def is_of_communication(error: BaseException) -> bool:
    """Whether an exception most likely says only that another rank is gone."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | ConnectionError):
        return True
    text = str(error).lower()
    return type(error) is RuntimeError and any(sign in text for sign in COMMUNICATION)


def say_traceback(error: BaseException, rank: int) -> None:
    """Print where an exception came from, each line marked with the rank, in one piece."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in lines))
    sys.stderr.flush()


def claim_report(run_dir: Path, attempt: int) -> bool:
    """Whether this process is the one that reports: the first that asks (a file that cannot be created twice)."""
    try:
        (run_dir / ATTEMPTS / f"{attempt}.failed").open("x").close()
    except FileExistsError:
        return False
    except OSError:  # no folder to write to: better said twice than never
        return True
    return True


def report(failure: Failure, run_dir: Path, run_id: str, attempt: int, step: int) -> None:
    """Write status.json and print the reason. What an older attempt has to say is only printed."""
    try:
        if not failure.superseded and is_current(run_dir, attempt):
            rank = failure.rank
            write_status(
                run_dir, Status(State.FAILED, step, run_id, attempt, reason=failure.sentence, first_failing_rank=rank)
            )
    except (OSError, SupersededError) as error:
        print(f"warning: status.json could not be written: {error}", file=sys.stderr)
    print(f"error: {failure.sentence}", file=sys.stderr, flush=True)
