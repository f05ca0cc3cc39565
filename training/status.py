"""Who owns a run folder, and how the run is: attempt numbers and status.json.

A start claims the folder with an attempt number, by creating a file that cannot be created twice, on a shared file
system too. A process of an earlier attempt (a node that was cut off and came back) sees a newer file, writes nothing
more and leaves. status.json is what the batch scripts read after a run.
"""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

ATTEMPTS = ".attempts"
STATUS = "status.json"
STALE_SECONDS = 600.0
"""A `running` that was not renewed for so long is no longer believed."""


class SupersededError(Exception):
    """A newer attempt has claimed the run folder; this process must write nothing more and leave."""


class State(StrEnum):
    """How a run is, or how its last attempt ended."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class Status:
    """What status.json says. `updated` is in seconds since the epoch; host and pid are of the process that wrote it."""

    state: State
    step: int
    run_id: str
    attempt: int
    reason: str | None = None
    first_failing_rank: int | None = None
    updated: float = field(default_factory=time.time)
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


def claim(run_dir: Path) -> int:
    """Takes the run folder (created if need be) for a new attempt and returns its number, 1 for the first."""
    folder = run_dir / ATTEMPTS
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        attempt = newest_attempt(run_dir) + 1
        try:
            with (folder / str(attempt)).open("x") as file:
                file.write(f"{socket.gethostname()} {os.getpid()}\n")
            return attempt
        except FileExistsError:  # another start was quicker
            continue


def newest_attempt(run_dir: Path) -> int:
    """The number of the newest attempt, 0 where none was made."""
    folder = run_dir / ATTEMPTS
    return max((int(path.name) for path in folder.glob("*") if path.name.isdigit()), default=0)


def is_current(run_dir: Path, attempt: int) -> bool:
    """Whether no newer attempt has claimed the folder. One look-up of a file: cheap enough before each write."""
    return not (run_dir / ATTEMPTS / str(attempt + 1)).exists()


def write_status(run_dir: Path, status: Status) -> None:
    """Replaces status.json at once; SupersededError where a newer attempt owns the folder."""
    if not is_current(run_dir, status.attempt):
        raise SupersededError(f"attempt {status.attempt} of {run_dir} was superseded by a newer one")
    temporary = run_dir / f".{STATUS}-{status.attempt}"
    temporary.write_text(json.dumps(asdict(status), indent=1) + "\n")
    temporary.replace(run_dir / STATUS)


def read_status(run_dir: Path, stale_seconds: float = STALE_SECONDS) -> Status | None:
    """How the run is; None where there is no status.json. A `running` that nobody keeps alive reads as failed."""
    try:
        values = json.loads((run_dir / STATUS).read_text())
        status = Status(**{**values, "state": State(values["state"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        return Status(State.FAILED, 0, "", newest_attempt(run_dir), f"{run_dir / STATUS} is damaged")
    if status.state is State.RUNNING and _is_stale(status, stale_seconds):
        reason = f"it was running at step {status.step} and ended without a word"
        return replace(status, state=State.FAILED, reason=reason)
    return status


def _is_stale(status: Status, stale_seconds: float) -> bool:
    if time.time() - status.updated > stale_seconds:
        return True
    if status.host != socket.gethostname():
        return False
    try:
        os.kill(status.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
