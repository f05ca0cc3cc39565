"""Other processes on this machine: who they are, whether they still live, and which of them started this one."""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

# Programs that start the processes of a run and stay with them, by the name of the executable or of its script. A shell
# is none of them: a run under nohup outlives its terminal, and its batch script is slurmstepd's child.
LAUNCHERS = re.compile(
    r"deepspeed|deepspeed\.launcher\.(runner|launch)|(runner|launch)\.py|torchrun|torch\.distributed\.(run|launch)"
    r"|mpirun|mpiexec(\.hydra)?|orterun|prterun|orted|prted|hydra_pmi_proxy|hydra_bstrap_proxy|slurmstepd|srun"
)


@dataclass(frozen=True)
class ProcessId:
    """A process that cannot be confused with a later one of the same number."""

    pid: int
    started: float
    """When it started, as its machine counts."""
    place: str = ""
    """Host and process table that `pid` counts in."""


def place() -> str:
    """What the processes of one process table have in common."""
    host = os.uname().nodename
    try:
        return f"{host} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # no /proc on this system: then there is one table
        return host


def _started(pid: int) -> float | None:
    """When the process started; None where there is none, or one that ended and whose parent has not noticed yet.

    In clock ticks since the machine's start: psutil adds the time of that, which two processes may see a second apart
    (the clock is being adjusted), so they would not agree whether a process is the same.
    """
    if not Path("/proc/self/stat").exists():  # no Linux
        try:
            found = psutil.Process(pid)
            return None if found.status() == psutil.STATUS_ZOMBIE else found.create_time()
        except psutil.NoSuchProcess:
            return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else float(fields[19])


def identify(pid: int | None = None) -> ProcessId:
    """The process with this number (default: this one); psutil.NoSuchProcess where there is none."""
    pid = os.getpid() if pid is None else pid
    started = _started(pid)
    if started is None:
        raise psutil.NoSuchProcess(pid)
    return ProcessId(pid, started, place())


def is_alive(process: ProcessId) -> bool:
    """Whether it still runs. Only for this machine."""
    return _started(process.pid) == process.started


def is_launcher(command: list[str]) -> bool:
    """Whether a command line is one of a launcher, started as a program, as a script or by `python -m`."""
    words = [os.path.basename(command[0].split(":")[0])] if command else []
    if words and words[0].startswith("python"):
        # What Python runs is its first argument that is no option; after -m it is a module's name.
        words = [os.path.basename(word) for word in command[1:] if not word.startswith("-")][:1]
    if not words or not LAUNCHERS.fullmatch(words[0]):
        return False
    if words[0] in ("runner.py", "launch.py"):  # common names, so the folder decides
        return any("deepspeed" in word or "torch" in word for word in command[:4])
    return True


def launchers_above() -> list[ProcessId]:
    """This process's ancestors up to the topmost launcher, launchers only; empty where none started it."""
    found = []
    for ancestor in psutil.Process().parents():
        try:
            if is_launcher(ancestor.cmdline() or [ancestor.name()]):
                found.append(identify(ancestor.pid))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # gone meanwhile, or another user's: not a launcher of ours that can be watched
    return found


def launcher_is_missing(variables: Mapping[str, str], found: list[ProcessId]) -> bool:
    """Whether the launcher that set these variables ended before it could be found.

    Only variables that nothing but DeepSpeed's launch.py or torchrun sets are believed.
    """
    return not found and ("CROSS_RANK" in variables or "TORCHELASTIC_RUN_ID" in variables)


def leave_now(status: int) -> NoReturn:
    """End this process with this exit status, whatever its other threads do.

    An interpreter that ends by itself takes its modules apart while threads of a process group still run, which now and
    then aborts it: exit status 134 for what went well.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also where the log is on a full disk
        os._exit(status)
