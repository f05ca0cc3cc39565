"""What slurm/train.sbatch asks before and after the training: is it sound, which port, and shall the job run again.

    job.py before CONFIG [section.key=value ...]               where the run stands; status 2 for a mistake
    job.py port                                                a port that is free on this host, derived from the job
    job.py after BEFORE CODE CONFIG [section.key=value ...]    decide, say why, queue the job again or not

The rules, from status.json and the newest checkpoint (never from the launcher's exit status alone):

    finished                                             the end
    stopped by Slurm's signal or training.max_minutes    again; with no step made it is neither progress nor failure
    stopped by the file STOP, Ctrl-C or stop_after       the end: a person wanted that
    failed, with a newer checkpoint than at the start    again
    failed without one, the first time                   again
    failed without one, twice in a row                   the end, and the job has failed
    a mistake in the configuration or the data           the end, and the job has failed
    another start has taken the run over                 nothing: this host was cut off, and the job goes on elsewhere

Each decision is a line of runs/NAME/slurm.jsonl. Jobs that Slurm itself ends (scancel, a node that failed, preemption
with requeue) do not come here: Slurm queues those again or not, as --requeue says.
"""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from parallel.environment import PORTS, default_port
from training.configuration import ConfigurationError, RunConfiguration, check_world, load
from training.layout import choose_layout
from training.status import State, newest_attempt, read_status
from training.stop_requests import Reason

MISTAKE = 2
FAILURES = 2
"""Failures in a row without a newer checkpoint, after which a job is not queued again."""
GO_ON = {reason.sentence for reason in (Reason.TIME, Reason.SIGUSR1, Reason.SIGTERM)}
"""Why a run stopped that is to go on in another job."""
RECORD = "slurm.jsonl"


@dataclass(frozen=True)
class Standing:
    """Where a run stands: the number of its newest attempt and the step of its newest checkpoint."""

    attempt: int
    saved_step: int


@dataclass(frozen=True)
class Decision:
    """What becomes of the job."""

    again: bool
    failures: int
    """In a row, without progress, this one included."""
    why: str
    failed: bool = False
    """Whether this start failed, and so the job where it does not run again."""
    superseded: bool = False
    """Whether the run is another start's by now, and this decision nobody's business."""


def standing(run_dir: Path) -> Standing:
    """Where the run in this folder stands; zeros where there is none."""
    found = [re.fullmatch(r"step_(\d+)", path.parent.name) for path in run_dir.glob("checkpoints/step_*/manifest.json")]
    return Standing(newest_attempt(run_dir), max((int(match[1]) for match in found if match), default=0))


def decide(run_dir: Path, steps: int, before: Standing, code: int) -> Decision:
    """Whether a job whose start left `code` shall run again. Reads the run's folder and changes nothing."""
    now = standing(run_dir)
    if now.attempt > before.attempt + 1:
        why = f"attempt {now.attempt} has taken {run_dir} over"
        return Decision(False, 0, why, failed=True, superseded=True)
    status = read_status(run_dir, stale_seconds=0.0) if now.attempt > before.attempt else None
    steps_made = now.saved_step - before.saved_step
    past = earlier_failures(run_dir)
    if status is None and code == MISTAKE:
        return Decision(False, past, "a mistake in what was asked, see above", failed=True)
    if status is not None and status.state is State.FINISHED:
        return Decision(False, 0, f"the run has finished, at step {status.step}")
    if status is not None and status.state is State.STOPPED:
        why = f"stopped at step {status.step} of {steps} ({status.reason})"
        if status.reason not in GO_ON:
            return Decision(False, past, why + ", as a person asked")
        if steps_made > 0:
            return Decision(True, 0, why)
        return Decision(True, past, f"{why} before a step was made: is the time limit too short?")
    reason = status.reason if status is not None else f"no process got as far as the run (exit status {code})"
    if steps_made > 0:
        return Decision(True, 0, f"failed, but {steps_made} steps further than before: {reason}", failed=True)
    failures = past + 1
    where = f"no further than step {now.saved_step}, {failures} time(s) in a row"
    return Decision(failures < FAILURES, failures, f"failed {where}: {reason}", failed=True)


def earlier_failures(run_dir: Path) -> int:
    """Failures in a row without progress, as the last decision counted them."""
    return int(last_record(run_dir).get("failures", 0))


def last_record(run_dir: Path) -> dict[str, int]:
    """The last decision about this run; empty where there is none."""
    try:
        return dict(json.loads((run_dir / RECORD).read_text().splitlines()[-1]))
    except (OSError, ValueError, IndexError):
        return {}


def record(run_dir: Path, decision: Decision, what: str) -> None:
    """Append the decision to the run's record."""
    run_dir.mkdir(parents=True, exist_ok=True)
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    decided = {name: value for name, value in asdict(decision).items() if name != "superseded"}
    line = {"job": job_id(), "restart": restart, **decided, "what": what, **asdict(standing(run_dir))}
    with (run_dir / RECORD).open("a") as file:
        file.write(json.dumps(line) + "\n")


def job_id() -> str:
    """This job's number; each task of an array has one of its own."""
    return os.environ["SLURM_JOB_ID"]


def say(text: str) -> None:
    """Into the job's log (standard output of `before` is its answer)."""
    print(f"job {job_id()}: {text}", file=sys.stderr, flush=True)


def run(*command: str) -> tuple[bool, str]:
    """Run a command of Slurm's: whether it succeeded, and what it said."""
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode == 0, (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip()


def queue_again(run_dir: Path, decision: Decision, arguments: Sequence[str]) -> int:
    """Put this job back into the queue, or where that is forbidden submit it anew; the exit status of the job."""
    if (restarts := restarts_of_job()) not in (None, int(os.environ.get("SLURM_RESTART_COUNT", "0"))):
        say(f"{decision.why}; Slurm has started this job elsewhere meanwhile (restart {restarts}): nothing to do here")
        return 1
    record(run_dir, decision, "requeue")
    say(f"{decision.why}: back into the queue")
    done, said = run("scontrol", "requeue", job_id())
    if done:
        return 0  # Slurm ends this script before it gets here, or soon after
    say(f"it may not be requeued ({said.splitlines()[-1]}): submitted again instead")
    done, said = run("sbatch", "--parsable", f"--dependency=afterany:{job_id()}", *same_options(), script(), *arguments)
    say(f"goes on as job {said}" if done else f"could not be submitted again: {said}")
    return 0 if done else 1


def restarts_of_job() -> int | None:
    """How often Slurm has started this job again by now; None where it does not say."""
    found = re.search(r"\bRestarts=(\d+)", run("scontrol", "show", "job", "--oneliner", job_id())[1])
    return int(found[1]) if found else None


def script() -> str:
    """The batch script as it was submitted: Slurm's own copy."""
    return os.environ["MAINLINE_SCRIPT"]


def same_options() -> list[str]:
    """sbatch's options for the same job again; those that stand in the script need none."""
    names = {
        "--job-name": "SLURM_JOB_NAME",
        "--partition": "SLURM_JOB_PARTITION",
        "--account": "SLURM_JOB_ACCOUNT",
        "--qos": "SLURM_JOB_QOS",
        "--nodes": "SLURM_JOB_NUM_NODES",
        "--ntasks-per-node": "SLURM_NTASKS_PER_NODE",
        "--cpus-per-task": "SLURM_CPUS_PER_TASK",
        "--cpus-per-gpu": "SLURM_CPUS_PER_GPU",
        "--gpus-per-node": "SLURM_GPUS_PER_NODE",
        "--gpus-per-task": "SLURM_GPUS_PER_TASK",
        "--array": "SLURM_ARRAY_TASK_ID",
    }
    options = [f"{option}={os.environ[name]}" for option, name in names.items() if os.environ.get(name)]
    done, limit = run("squeue", "--noheader", f"--job={job_id()}", "--format=%l")
    return [*options, f"--time={limit}"] if done and limit else options


def before(arguments: Sequence[str]) -> int:
    """Check what was asked, say where the run stands, and print it for `after`."""
    try:
        configuration = load(arguments[0], arguments[1:])
        tasks = int(os.environ["MAINLINE_TASKS"])
        if configuration.parallel.elastic:
            configuration, _ = choose_layout(configuration, tasks)
        check_world(configuration, tasks)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    run_dir = folder(configuration)
    now = standing(run_dir)
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    say(
        f"start {int(restart) + 1} of this job on {os.environ['SLURM_JOB_NODELIST']}, {tasks} tasks; "
        f"{run_dir} has {now.saved_step} of {configuration.training.steps} steps saved"
    )
    if restart != "0" and now.attempt > last_record(run_dir).get("attempt", 0):
        say("the start before ended without a decision: its node failed, or Slurm took the job off it")
    print(f"{now.attempt}:{now.saved_step}")
    return 0


def folder(configuration: RunConfiguration) -> Path:
    """The run's folder."""
    return Path(configuration.run.output_dir)


def after(arguments: Sequence[str]) -> int:
    """Decide, say so, and do it; the exit status of the job."""
    attempt, saved_step = map(int, arguments[0].split(":"))
    code = int(arguments[1])
    configuration = load(arguments[2], arguments[3:])
    run_dir = folder(configuration)
    decision = decide(run_dir, configuration.training.steps, Standing(attempt, saved_step), code)
    if decision.again:
        return queue_again(run_dir, decision, arguments[2:])
    if not decision.superseded and (code != MISTAKE or run_dir.exists()):
        record(run_dir, decision, "end")
    say(f"{decision.why}: not queued again")
    return code or 1 if decision.failed else 0


def port() -> int:
    """The first free port from the one that belongs to this job."""
    first = PORTS.index(default_port(os.environ))
    for offset in range(len(PORTS)):
        number = PORTS[(first + offset) % len(PORTS)]
        with socket.socket() as listener:
            try:
                listener.bind(("", number))
            except OSError:
                continue
        print(number)
        return 0
    return 1


def main(argv: Sequence[str]) -> int:
    """The command; see the top of this file."""
    commands = {"before": before, "after": after}
    if argv[:1] == ["port"]:
        return port()
    if argv and argv[0] in commands and len(argv) > 1:
        return commands[argv[0]](argv[1:])
    print(__doc__, file=sys.stderr)
    return MISTAKE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
