"""What the processes of a pool are asked to do: the product's own code, on a mesh that is made once for each layout."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import distributed_c10d

from parallel.engine import TrainingEngine
from parallel.mesh import Mesh, build_mesh
from parallel.stages import StageSettings
from tests.parity import faults
from tests.parity.pool import calm_network_threads
from tests.parity.tables import TableData
from training.configuration import Layout, RunConfiguration, check_world, load
from training.progress import Progress
from training.setup import RunData, build, open_data
from training.trainer import Trainer

CONFIGURATION = "configs/parity.yaml"
_meshes: dict[tuple[int, int, int], Mesh] = {}
_corpora: dict[str, RunData] = {}


def mesh_of(pipeline: int, tensor: int, data: int) -> Mesh:
    """The mesh of this layout; its process groups are made once."""
    key = (pipeline, tensor, data)
    if key not in _meshes:
        _meshes[key] = build_mesh(*key)
    return _meshes[key]


class RecordingMonitor:
    """Keeps what the loop reports, in the place of files and console."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []

    def train(self, record: dict[str, Any]) -> None:
        """A step's metrics."""
        self.records.append(record)

    def validation(self, record: dict[str, Any]) -> None:
        """An evaluation."""
        self.validations.append(record)

    def say(self, text: str) -> None:
        """A failed save must not go unnoticed."""
        assert "could not" not in text, text

    def sync(self) -> None:
        """Nothing."""


def data_of(configuration: RunConfiguration, table: list[Any] | None) -> RunData:
    """The corpus, opened once, or a token table in its place."""
    if table is not None:
        vocabulary, ragged, documents = table
        length = configuration.batch.sequence_length
        return RunData(None, TableData(vocabulary, length, ragged=ragged, documents=documents), {}, None)  # type: ignore[arg-type]
    key = f"{configuration.data} {configuration.batch.sequence_length} {configuration.run.seed}"
    if key not in _corpora:
        _corpora[key] = open_data(configuration)[1]
    return _corpora[key]


def configured(overrides: list[str]) -> tuple[RunConfiguration, Layout]:
    """Configuration and layout of a case on this world."""
    configuration = load(CONFIGURATION, overrides)
    return configuration, check_world(configuration, torch.distributed.get_world_size())


@contextlib.contextmanager
def no_group_left() -> Iterator[None]:
    """End the process groups made meanwhile.

    DeepSpeed makes one for each pipeline and keeps it: a training has one, but these processes would have dozens, each
    with threads.
    """
    before = set(distributed_c10d._world.pg_map)
    yield
    for group in [group for group in distributed_c10d._world.pg_map if group not in before]:
        torch.distributed.destroy_process_group(group)


@contextlib.contextmanager
def engine_of(
    configuration: RunConfiguration, layout: Layout, device: torch.device
) -> Iterator[tuple[StageSettings, TrainingEngine]]:
    """Stage and engine on the layout's mesh, let go of afterwards."""
    mesh = mesh_of(layout.pipeline, layout.tensor, layout.data)
    with no_group_left():
        stage, engine = build(configuration, layout, device, mesh)
        calm_network_threads()
        try:
            yield stage, engine
        finally:
            engine.engine.destroy()
    del stage, engine
    gc.collect()


@contextlib.contextmanager
def trainer_of(
    device: torch.device, overrides: list[str], table: list[Any] | None = None, progress: Progress | None = None
) -> Iterator[tuple[Trainer, RecordingMonitor]]:
    """The product's trainer for these overrides of configs/parity.yaml."""
    configuration, layout = configured(overrides)
    data = data_of(configuration, table)
    with engine_of(configuration, layout, device) as (stage, engine):
        monitor = RecordingMonitor()
        yield (
            Trainer(
                configuration,
                layout,
                data,
                stage,
                engine,
                monitor,
                "run",
                1,
                progress or Progress(),  # type: ignore[arg-type]
            ),
            monitor,
        )


def train(
    device: torch.device, overrides: list[str], table: list[Any] | None = None, fault: str | None = None
) -> list[dict[str, Any]]:
    """Train to the end and return each step's metrics; gradients of step 1 and a checkpoint lie in run.output_dir.

    `fault` names a fault of `tests.parity.faults` to be planted first.
    """
    overrides = [*overrides, "monitor.dump_gradients=[1]"]
    with faults.planted(fault), trainer_of(device, overrides, table) as (trainer, monitor):
        trainer.run()
    return monitor.records
