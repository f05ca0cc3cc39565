"""The mesh: which process is which stage, which slice of the tensors, which replica.

Ranks are ordered pipeline, data, tensor (tensor fastest): tensor-parallel processes, which talk most, are neighbours.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology


@dataclass(frozen=True)
class Mesh:
    """Sizes, this process's coordinates and process groups; passed to whatever needs them, never global."""

    pipeline: int
    tensor: int
    data: int
    pipeline_rank: int
    tensor_rank: int
    data_rank: int
    tensor_group: Any
    """The processes that hold the slices of the same tensors."""
    data_group: Any
    """The processes that hold the same slices for other samples."""
    pipeline_group: Any
    """The processes of one pipeline, first stage to last."""
    model_group: Any
    """All processes that together hold one copy of the model (pipeline x tensor)."""
    grid: PipelineParallelGrid
    """The same for DeepSpeed: its engines ask it for groups."""

    @property
    def rank(self) -> int:
        """Number of this process among all."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of all processes."""
        return self.pipeline * self.tensor * self.data

    @property
    def is_first_stage(self) -> bool:
        """Whether this process holds the embedding."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this process holds the end of the stage list (under 1f1b: the head)."""
        return self.pipeline_rank == self.pipeline - 1


def build_mesh(pipeline: int, tensor: int, data: int) -> Mesh:
    """Make the mesh of a process group that has pipeline x tensor x data processes.

    Collective: every process calls it, with the same sizes. Groups are never freed, so a program that runs
    many models on one layout makes one mesh.
    """
    assert pipeline * tensor * data == dist.get_world_size(), "the layout must fill the world"
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()):  # it prints its topology, which the run's own banner states
        grid = PipelineParallelGrid(topology=PipeModelDataParallelTopology(pipeline, tensor, data))
    return Mesh(
        pipeline=pipeline,
        tensor=tensor,
        data=data,
        pipeline_rank=grid.get_stage_id(),
        tensor_rank=grid.get_slice_parallel_rank(),
        data_rank=grid.get_data_parallel_id(),
        tensor_group=grid.get_slice_parallel_group(),
        data_group=grid.get_data_parallel_group(),
        pipeline_group=grid.get_pipe_parallel_group(),
        model_group=grid.get_model_parallel_group(),
        grid=grid,
    )
