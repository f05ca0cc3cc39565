"""Checkpoints written while training goes on.

At a step boundary every rank copies what it owns to host memory; a thread writes the copy. Collectives belong to the
main thread, so it is the main threads that carry a save on, together, at later step boundaries: when all ranks have
written their files, rank 0's thread publishes the checkpoint; when that is done, the save is over.

    begin -> (all threads write) -> gather what was written -> (rank 0's thread publishes) -> over
"""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from parallel.device import synchronize
from parallel.engine import TrainingEngine
from parallel.exchange import gather_json, maximum
from training.checkpoint import (
    CheckpointError,
    Manifest,
    Piece,
    RankFile,
    partial_folder,
    prune,
    publish,
    write_rank_file,
)
from training.engine_state import owned_pieces, rank_file_from_json
from training.status import SupersededError

WAITING_SECONDS = 0.05
"""Between two words with the other ranks while this rank's thread writes."""
OTHERS_SECONDS = 0.005
"""The same while only others' threads write."""
STILL_WAITING_SECONDS = 60.0
LONGEST_PAUSE = 64
"""Steps between two tries at most."""


@dataclass
class _Save:
    """One save under way."""

    manifest: Manifest
    folder: Path
    began: float
    job: Future[Any]
    """What this rank's thread does: write its file, then, on rank 0, publish."""
    publishing: bool = False


class Saver:
    """Saves the engine's state. Every process calls every method, in the same order."""

    def __init__(
        self,
        engine: TrainingEngine,
        checkpoints: Path,
        run_id: str,
        keep: int | None,
        needed_bytes: int,
        still_current: Callable[[], bool],
        before_publishing: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self.engine = engine
        self.checkpoints = checkpoints
        self.run_id = run_id
        self.keep = keep
        self.needed_bytes = needed_bytes
        self.still_current = still_current
        self.before_publishing = before_publishing
        self.say = say
        self.saved_step: int | None = None
        """The newest step that was saved completely."""
        self.failures = 0
        """Saves that failed."""
        self.last_error: str | None = None
        self.seconds: float | None = None
        """From the beginning to the end of the last complete save."""
        self.retry_step: int | None = None
        """Step boundary at which to try again, after a save that failed."""
        self.at_the_end = False
        """Whether no further step will come."""
        self._pause = 1
        self._save: _Save | None = None
        self._copies: list[torch.Tensor] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")

    @property
    def under_way(self) -> int | None:
        """The step that is being saved."""
        return self._save.manifest.step if self._save else None

    @property
    def is_busy(self) -> bool:
        """Whether this rank's thread has not done its part yet."""
        return self._save is not None and not self._save.job.done()

    def space_report(self) -> str | None:
        """A sentence where one more checkpoint does not fit, and where that cannot be known."""
        try:
            existing = next(folder for folder in (self.checkpoints, *self.checkpoints.parents) if folder.exists())
            free = shutil.disk_usage(existing).free
        except OSError as error:
            return f"{self.checkpoints} cannot be reached: {error.strerror or error}"
        if free < self.needed_bytes:
            gib = 2**30
            return f"{existing} has {free / gib:.3f} GiB free, and a checkpoint takes {self.needed_bytes / gib:.3f} GiB"
        return None

    def begin(self, manifest: Manifest) -> None:
        """Copy the state and hand it to the threads. A save that is under way must be over. Collective."""
        assert self._save is None
        self.retry_step = None
        report = None
        if self.engine.mesh.rank == 0:
            if not self.still_current():
                raise SupersededError(f"a newer attempt has taken {self.checkpoints.parent} over")
            report = self.space_report()
        if report := gather_json(report)[0]:
            self._failed(manifest.step, report, manifest.step)
            return
        folder = partial_folder(self.checkpoints, manifest.step, manifest.attempt)
        pieces = self._copy()
        job = self._thread.submit(self._write, folder, pieces)
        self._save = _Save(manifest, folder, time.monotonic(), job)

    def _copy(self) -> list[Piece]:
        """What this rank owns, in host memory that is used again by the next save (page-locked beside a GPU)."""
        pieces = list(owned_pieces(self.engine.fragments()))
        sizes = [piece.tensor.numel() for piece in pieces]
        if [copy.numel() for copy in self._copies] != sizes:
            pinned = torch.cuda.is_available()
            self._copies = [torch.empty(size, dtype=torch.float32, pin_memory=pinned) for size in sizes]
        for piece, copy in zip(pieces, self._copies, strict=True):
            copy.copy_(piece.tensor, non_blocking=True)
        synchronize()
        return [Piece(**{**vars(piece), "tensor": copy}) for piece, copy in zip(pieces, self._copies, strict=True)]

    def _write(self, folder: Path, pieces: list[Piece]) -> RankFile | None:
        return write_rank_file(folder, self.engine.mesh.rank, pieces) if pieces else None

    def _publish(self, save: _Save, files: list[RankFile]) -> None:
        self.before_publishing()
        publish(self.checkpoints, save.folder, save.manifest, files, self.still_current)
        if self.keep is not None:
            try:
                prune(self.checkpoints, self.keep, self.run_id)
            except OSError as error:
                self.say(f"warning: an old checkpoint could not be deleted: {error}")

    def carry_on(self, some_are_busy: bool, step: int) -> None:
        """Take a save further that all ranks have done their part of; `step` is the step boundary that they are at.

        `some_are_busy` must be the same on all ranks. Collective.
        """
        save = self._save
        if save is None or some_are_busy:
            return
        if not save.publishing:
            rank_file, error = _outcome(save.job)
            replies = gather_json({"file": asdict(rank_file) if rank_file else None, "error": error})
            if errors := [reply["error"] for reply in replies if reply["error"]]:
                self._give_up(save, errors[0], step)
                return
            save.publishing = True
            if self.engine.mesh.rank == 0:
                files = [rank_file_from_json(reply["file"]) for reply in replies if reply["file"]]
                save.job = self._thread.submit(self._publish, save, files)
            return
        if error := gather_json(_outcome(save.job)[1])[0]:
            self._give_up(save, error, step)
            return
        self.saved_step, self.seconds, self._save = save.manifest.step, time.monotonic() - save.began, None
        self._pause = 1

    def _give_up(self, save: _Save, error: str, step: int) -> None:
        if self.engine.mesh.rank == 0:
            shutil.rmtree(save.folder, ignore_errors=True)
        self._save = None
        self._failed(save.manifest.step, error, step)

    def _failed(self, step: int, error: str, now: int) -> None:
        """Say so and plan the next try: at the next step boundary, then after twice as many each time."""
        self.failures += 1
        self.last_error = error
        self.retry_step = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        again = "" if self.at_the_end else f"; trying again at step {self.retry_step}"
        self.say(f"warning: step {step} could not be saved: {error}{again}")

    def finish(self, alive: Callable[[], None]) -> None:
        """Wait until no save is under way; `alive` is called now and then, for a slow disk is no hang. Collective."""
        began = said = time.monotonic()
        while self._save is not None:
            some_are_busy = bool(maximum([float(self.is_busy)])[0])
            self.carry_on(some_are_busy, self._save.manifest.step)
            alive()
            if self.is_busy:
                wait([self._save.job], WAITING_SECONDS)
            elif some_are_busy:
                time.sleep(OTHERS_SECONDS)
            if time.monotonic() - said > STILL_WAITING_SECONDS:
                said = time.monotonic()
                self.say(f"warning: still waiting for the save of step {self.under_way}, {said - began:.0f} s so far")

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _outcome(job: Future[Any]) -> tuple[Any, str | None]:
    """What a job that is done returned, or a sentence about the file system's error."""
    try:
        return job.result(), None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return None, f"{where}{error.strerror or error}"
    except CheckpointError as error:
        return None, str(error)
