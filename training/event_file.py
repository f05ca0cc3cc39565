"""TensorBoard's event files: written a step at a time, and cut back after a resume.

A file is a sequence of records (length, checksum, an Event message, checksum). TensorBoard's own writer queues events
in a thread, so a kill loses steps that metrics.jsonl has; here one record with all scalars of a step goes out at once.
A reader shows each step once because what lies beyond the step that a run resumes from is taken out of the old files,
and because the new file begins with a session start, at which a TensorBoard that is already open forgets the rest too.
"""

import io
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from training.appender import Appender

PREFIX = "events.out.tfevents."


class EventFile:
    """A new event file in `folder`, for steps after `resume_step`."""

    def __init__(self, folder: Path, resume_step: int, attempt: int, warn: Callable[[str], None] = print) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names, so a start within the same second must come later.
        last = max((int(path.name[len(PREFIX) :].split(".")[0]) for path in event_files(folder)), default=0)
        now = max(int(time.time()), last + 1)
        self.path = folder / f"{PREFIX}{now:010d}.{socket.gethostname()}.{os.getpid()}.{attempt}"
        self._file = Appender(self.path, warn)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of one step by tag."""
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def _write(self, event: Event) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.append(record.getvalue())

    def sync(self) -> None:
        """Makes what was written survive a power cut."""
        self._file.sync()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


def event_files(folder: Path) -> list[Path]:
    """TensorBoard's files in a folder, in the order in which it reads them."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if path.name[len(PREFIX) :].split(".")[0].isdigit())


def records(path: Path) -> Iterator[tuple[bytes, Event]]:
    """Each whole record and the event in it, up to where a kill may have torn the file."""
    with path.open("rb") as file:
        while len(header := file.read(12)) == 12:
            length, checksum = struct.unpack("<QI", header)
            if masked_crc32c(header[:8]) != checksum:
                return
            body = file.read(length + 4)
            if len(body) < length + 4:
                return
            yield header + body, Event.FromString(body[:-4])


def cut_event_files(folder: Path, step: int, evaluated_step: int) -> None:
    """Takes everything beyond `step`, evaluations beyond `evaluated_step`, and torn ends, out of the event files.

    A file with nothing left goes.

    Every file is written anew: what a process of an earlier attempt still holds open is then another file.
    """
    for path in event_files(folder):
        temporary = path.with_name(f".{path.name}")
        left = False
        with temporary.open("wb") as file:
            for record, event in records(path):
                tags = [value.tag for value in event.summary.value]
                of_evaluation = bool(tags) and tags[0].startswith("validation/")
                if event.step <= (evaluated_step if of_evaluation else step):
                    file.write(record)
                    left |= event.HasField("summary")
            file.flush()
            os.fsync(file.fileno())
        if left:
            temporary.replace(path)
        else:
            temporary.unlink()
            path.unlink()
