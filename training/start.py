"""From a checked configuration to a run under way, and from any end of it to an exit status."""

import os
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from data.errors import DataError
from parallel.device import initialize_distributed, pins_memory
from parallel.environment import Environment
from parallel.exchange import barrier, gather_json
from parallel.meeting import MEETING_SECONDS, PreflightError
from parallel.phase import Phase
from parallel.preflight import preflight
from parallel.zero import refusal
from training.checkpoint import Checkpoint, CheckpointError, newest_sound, remove_leftovers
from training.company import Company
from training.configuration import ConfigurationError, Layout, RunConfiguration, to_yaml
from training.engine_state import restore_engine
from training.loading import open_checkpoint
from training.monitor import Monitor
from training.progress import Progress
from training.setup import RunData, build, check_compiler, checkpoints_folder, engine_settings, open_data
from training.status import claim
from training.stop_requests import StopRequests
from training.trainer import Trainer
from training.watchdog import START_SECONDS, Watchdog

RUN_ID = ".run_id"
FINISHED = 0
"""Exit status of a run that finished or stopped as asked. One that fails leaves with 1 (`training.failure`)."""
MISTAKE_SECONDS = 15.0
"""A process that has found a mistake waits so long for rank 0, which has to say it."""


class StartError(Exception):
    """The run cannot start as it was asked to: one sentence."""


@dataclass(frozen=True)
class StartingPoint:
    """What a run goes on from; the same on every process."""

    run_id: str
    attempt: int
    checkpoint: Path | None
    own: bool
    """Whether the checkpoint is of this run, so that steps and samples count on."""
    reports: list[str]
    """A sentence for each damaged or incomplete checkpoint that was passed over."""


def train(configuration: RunConfiguration, layout: Layout, environment: Environment, stops: StopRequests) -> int:
    """Run to the end or to a stop and return the exit status. Collective: every process of the world calls it.

    Raises `StartError` on every process where the data of one cannot be opened, or the run cannot start as asked.
    """
    opened, mistake = _open_here(configuration)
    stops.said_elsewhere = mistake is not None and environment.rank != 0
    if mistake is not None and environment.rank == 0:
        raise StartError(mistake)  # without waiting for the others, who have most likely found the same
    try:
        device = join(environment, _patience(configuration), MEETING_SECONDS if mistake is None else MISTAKE_SECONDS)
    except PreflightError as error:
        if mistake is None:
            raise
        raise StartError(mistake) from error  # rank 0 did not come: it has found the same, and said so
    stops.joined()
    if opened is not None:
        mistake = refusal(engine_settings(opened[0], layout))
    # A file may be missing on one node only: then that process's sentence is everybody's.
    if mistakes := [found for found in gather_json(mistake) if found]:
        raise StartError(mistakes[0])
    assert opened is not None
    configuration, data = opened
    lines = preflight(environment, device, Path(configuration.run.output_dir))
    if environment.rank == 0:
        print("\n".join(lines), flush=True)
    torch.manual_seed(configuration.run.seed)
    start = _agree_on_start(configuration, environment)
    checkpoint = Checkpoint.open(start.checkpoint, verify=False) if start.checkpoint else None
    progress = _progress(checkpoint)
    company = Company(
        environment.rank,
        environment.world_size,
        environment.address,
        environment.port,
        name=f"{start.run_id}/{start.attempt}",
    )
    company.start()
    phase = Phase()
    phase.step = progress.step
    run_dir, training = Path(configuration.run.output_dir), configuration.training
    limits = (training.hang_seconds, training.grace_seconds)
    watchdog = Watchdog(phase, company, stops, run_dir, start.run_id, start.attempt, *limits)
    watchdog.start()
    if environment.rank == 0:
        stops.watch_run(run_dir, training.max_minutes)
    try:
        phase.enter("building the model")
        stage, engine = build(configuration, layout, device)
        engine.phase = phase
        if checkpoint is not None:
            phase.enter("restoring the checkpoint")
            restore_engine(engine, checkpoint)
            checkpoint.close()
        monitor = Monitor(
            run_dir,
            rank=environment.rank,
            resume_step=progress.step,
            evaluated_step=progress.evaluated_step,
            total_steps=training.steps,
            run_id=start.run_id,
            attempt=start.attempt,
            tensorboard=configuration.monitor.tensorboard,
        )
        for report in start.reports:
            monitor.say(f"warning: {report}")
        monitor.say(_banner(configuration, layout, start, progress))
        trainer = Trainer(
            configuration, layout, data, stage, engine, monitor, start.run_id, start.attempt, progress, stops
        )
        ending = trainer.run()
        step = trainer.progress.step
        monitor.status(ending.state, step, ending.reason)
        why = f" ({ending.reason})" if ending.reason else ""
        monitor.say(f"{ending.state} after step {step} of {training.steps}{why}: {run_dir}")
        monitor.close()
        phase.enter("leaving")
        company.part()  # who leaves after this is not missed
        barrier()
    except BaseException as error:
        watchdog.fail(error)
    watchdog.close()
    company.close()
    return FINISHED


def join(environment: Environment, patience: timedelta, meeting_seconds: float = MEETING_SECONDS) -> torch.device:
    """Meet the other processes and return this one's device; a collective may take as long as `patience` says."""
    try:
        return initialize_distributed(environment, patience, meeting_seconds)
    except torch.distributed.DistNetworkError as error:
        raise StartError(
            f"the processes cannot meet at {environment.address}:{environment.port} (is the port taken? "
            f"deepspeed and torchrun take another with --master_port): {str(error).splitlines()[0][:200]}"
        ) from error


def _patience(configuration: RunConfiguration) -> timedelta:
    """How long a collective may take: longer than the watchdog waits, which has more to say."""
    hang_seconds = configuration.training.hang_seconds or 0.0
    return timedelta(seconds=max(1800.0, hang_seconds + START_SECONDS + 300.0))


def _agree_on_start(configuration: RunConfiguration, environment: Environment) -> StartingPoint:
    """Rank 0 looks at the run folder, claims it and writes the configuration; all take its word.

    Raises `StartError` on every process alike.
    """
    answer: dict[str, object] = {}
    if environment.rank == 0:
        try:
            answer = _look_and_claim(configuration)
        except (StartError, CheckpointError) as error:
            answer = {"error": str(error)}
        except OSError as error:
            where = error.filename or configuration.run.output_dir
            key = f"run.output_dir is {configuration.run.output_dir}, in which this run cannot write"
            answer = {"error": f"{key}: {where}: {(error.strerror or str(error)).lower()}"}
    answer = gather_json(answer)[0]
    if "error" in answer:
        raise StartError(str(answer["error"]))
    path = answer.pop("checkpoint")
    return StartingPoint(checkpoint=Path(str(path)) if path else None, **answer)  # type: ignore[arg-type]


def _look_and_claim(configuration: RunConfiguration) -> dict[str, object]:
    run_dir, resume = Path(configuration.run.output_dir), configuration.checkpoint.resume
    checkpoints = checkpoints_folder(configuration)
    has_run = run_dir.exists() and (run_dir / "config.yaml").exists()
    if resume == "never" and has_run:
        raise StartError(
            f"checkpoint.resume is never and {run_dir} holds a run already: choose another run.name or remove it"
        )
    newest, reports = newest_sound(checkpoints, _known_run_id(run_dir))
    own = newest is not None
    if newest is None and resume not in ("auto", "never"):
        newest = open_checkpoint(resume).path
    manifest = Checkpoint.open(newest, verify=False).manifest if newest else None
    if manifest is not None:
        check_same_model(configuration, manifest.model, newest)  # type: ignore[arg-type]
    run_id = manifest.run_id if manifest is not None and own else _run_id(run_dir)
    attempt = claim(run_dir)
    remove_leftovers(checkpoints, attempt)
    temporary = run_dir / ".config.yaml"
    temporary.write_text(to_yaml(configuration))
    os.replace(temporary, run_dir / "config.yaml")
    return {
        "run_id": run_id,
        "attempt": attempt,
        "checkpoint": str(newest) if newest else None,
        "own": own,
        "reports": reports,
    }


def _run_id(run_dir: Path) -> str:
    """The id of the run in this folder, made at its first start: a run killed before its first save keeps it."""
    if (known := _known_run_id(run_dir)) is not None:
        return known
    run_dir.mkdir(parents=True, exist_ok=True)
    new, temporary = uuid.uuid4().hex, run_dir / f"{RUN_ID}.new"
    with temporary.open("w") as file:
        file.write(new)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(run_dir / RUN_ID)
    return new


def _known_run_id(run_dir: Path) -> str | None:
    """The id that stands in the folder; None where there is none, or nothing that can be read."""
    try:
        return (run_dir / RUN_ID).read_text().strip() or None
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None


# Keys of the model section that say what the weights are; the rest (dropout, z_loss, init_std) may change on resume.
WEIGHT_KEYS = (
    "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size", "activation", "norm",
    "norm_eps", "rope_theta", "rope_scaling", "tie_embeddings", "qk_norm", "vocab_size",
)  # fmt: skip


def check_same_model(configuration: RunConfiguration, saved: dict[str, object], path: Path) -> None:
    """Refuse to load weights of another model: `StartError` names the first key that differs."""
    mine = configuration.model.model_dump(mode="json")
    for key in WEIGHT_KEYS:
        if key in saved and saved[key] != mine[key]:
            raise StartError(f"model.{key} is {mine[key]}, but the checkpoint {path} was written with {saved[key]}")


def _progress(checkpoint: Checkpoint | None) -> Progress:
    """Where the run stands: what the checkpoint says, or the beginning where it has weights alone."""
    if checkpoint is None or "exp_avg" not in checkpoint.kinds():
        return Progress()
    return Progress.of(checkpoint.manifest)


def _banner(configuration: RunConfiguration, layout: Layout, start: StartingPoint, progress: Progress) -> str:
    model = configuration.model
    origin = f"resuming {start.checkpoint} at step {progress.step}" if start.checkpoint else "from the beginning"
    return (
        f"{configuration.run.name}: {model.num_layers} blocks of {model.hidden_size}, pipeline {layout.pipeline} "
        f"x tensor {layout.tensor} x data {layout.data}, {layout.micro_batches} micro-batches, "
        f"{configuration.precision.dtype.value}, {origin}"
    )


def _open_here(configuration: RunConfiguration) -> tuple[tuple[RunConfiguration, RunData] | None, str | None]:
    """Open the data on this process: (configuration with its vocabulary, data), or one sentence on what is wrong."""
    try:
        check_compiler(configuration)
        return open_data(configuration, pin_memory=pins_memory()), None
    except (ConfigurationError, DataError) as error:
        return None, str(error)
