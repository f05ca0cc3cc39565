"""The plan: how each weight of the model is divided among tensor-parallel processes, and its application.

`apply_plan` takes a plain `model.block.Block`, puts the tensor-parallel twins in the places of its linear layers and
sets the block's hooks. There is no second model: what is not named here is what `model/` says.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.block import Block
from model.configuration import ModelConfiguration
from model.initialization import initial_slice, parameter_shapes
from parallel.collectives import gather_sequence, scatter_sequence, sum_backward, sum_forward
from parallel.layers import ColumnParallelLinear, RowParallelLinear
from parallel.mesh import Mesh

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: (start, stop) in each dimension."""

VOCABULARY_MULTIPLE = 128
"""Rows of each process's part of the vocabulary are a multiple of this, which matrix units like."""


class Style(StrEnum):
    """How a weight is divided."""

    COLUMN = "column"
    ROW = "row"
    VOCABULARY = "vocabulary"
    REPLICATED = "replicated"


STYLES: dict[str, Style] = {
    "embedding": Style.VOCABULARY,
    "head": Style.VOCABULARY,
    "attention.query": Style.COLUMN,
    "attention.key": Style.COLUMN,
    "attention.value": Style.COLUMN,
    "attention.output": Style.ROW,
    "feed_forward.gate": Style.COLUMN,
    "feed_forward.up": Style.COLUMN,
    "feed_forward.down": Style.ROW,
}
"""Layer (without the block's number) to style; whatever is not listed is replicated."""


def style_of(name: str) -> Style:
    """Style of the parameter with this global name, such as `blocks.3.attention.query.weight`."""
    layer = name.removesuffix(".weight")
    if layer.startswith("blocks."):
        layer = layer.split(".", 2)[2]
    return STYLES.get(layer, Style.REPLICATED)


@dataclass(frozen=True)
class ParameterSlice:
    """What a parameter of this process is of the whole model's parameter; stands on it as `.slice`."""

    name: str
    """Global name, the same in every layout."""
    global_shape: tuple[int, ...]
    """Shape of the whole parameter, with the true vocabulary."""
    box: Box
    """The part that this process holds, without padding rows."""
    replicated: bool
    """Whether every tensor-parallel process holds the same values."""


def padded_vocabulary(vocab_size: int, tensor: int) -> int:
    """Smallest multiple of 128 x tensor that holds `vocab_size` rows: 151 669 on 4 is 152 064."""
    multiple = VOCABULARY_MULTIPLE * tensor
    return -(-vocab_size // multiple) * multiple


def local_box(name: str, shape: tuple[int, ...], tensor: int, tensor_rank: int) -> Box:
    """The part of the parameter `name` of global `shape` that process `tensor_rank` of `tensor` holds."""
    box = [(0, size) for size in shape]
    style = style_of(name)
    if style is Style.REPLICATED:
        return tuple(box)
    dimension = 1 if style is Style.ROW else 0
    size = shape[dimension]
    width = (padded_vocabulary(size, tensor) if style is Style.VOCABULARY else size) // tensor
    box[dimension] = (min(tensor_rank * width, size), min((tensor_rank + 1) * width, size))
    return tuple(box)


def apply_plan(block: Block, mesh: Mesh, sequence_parallel: bool) -> Block:
    """Divide a plain block (on the meta device) among the tensor-parallel processes, in place, and return it."""
    if mesh.tensor == 1:
        return block
    twins = {Style.COLUMN: ColumnParallelLinear, Style.ROW: RowParallelLinear}
    for name, linear in list(block.named_modules()):
        twin = twins.get(STYLES.get(name, Style.REPLICATED))
        if twin is None:
            continue
        linear = cast(nn.Linear, linear)
        divide_out, divide_in = (mesh.tensor, 1) if twin is ColumnParallelLinear else (1, mesh.tensor)
        parent, _, child = name.rpartition(".")
        replacement = twin(
            linear.in_features // divide_in, linear.out_features // divide_out, bias=False, device="meta"
        )
        setattr(block.get_submodule(parent), child, replacement)
    enter, leave = (gather_sequence, scatter_sequence) if sequence_parallel else (sum_backward, sum_forward)
    block.enter_branch = partial(enter, group=mesh.tensor_group)
    block.leave_branch = partial(leave, group=mesh.tensor_group)
    return block


def materialize(
    module: nn.Module,
    global_name: Callable[[str], str],
    configuration: ModelConfiguration,
    mesh: Mesh,
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    sequence_parallel: bool,
) -> nn.Module:
    """Give the meta-device `module` real memory for its own slices only, draw their initial values, and return it.

    `global_name` maps the module's parameter names to global ones. Every parameter then carries `.slice`
    (`ParameterSlice`) and the marks by which DeepSpeed counts a divided parameter's norm once.
    """
    shapes = parameter_shapes(configuration)
    module.to(dtype).to_empty(device=device)
    for local_name, parameter in module.named_parameters():
        name = global_name(local_name)
        shape = tuple(shapes[name])
        style = style_of(name)
        box = local_box(name, shape, mesh.tensor, mesh.tensor_rank)
        replicated = style is Style.REPLICATED
        parameter.slice = ParameterSlice(name, shape, box, replicated)  # type: ignore[attr-defined]
        rows, columns = slice(*_with_padding(box[0], parameter)), slice(*box[1]) if len(box) > 1 else None
        if device.type != "meta":  # where there is no memory there is nothing to draw
            parameter.data.copy_(initial_slice(configuration, seed, name, shape, rows, columns))
        if not replicated and mesh.tensor > 1:
            parameter.model_parallel = parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        if replicated and mesh.tensor > 1 and (sequence_parallel or ".attention." in name):
            # Each process sees a part of the sequence (or, for the gains of query and key norms, of the heads): the
            # gradient is the sum of the parts. A hook on the tensor runs before any engine's own accumulation.
            parameter.register_hook(partial(_sum_over, mesh.tensor_group))
    return module


def _sum_over(group: dist.ProcessGroup, gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    dist.all_reduce(gradient, group=group)
    return gradient


def _with_padding(rows: tuple[int, int], parameter: nn.Parameter) -> tuple[int, int]:
    """Rows of the slice in memory, which for a vocabulary may go beyond the true shape."""
    return rows[0], rows[0] + parameter.shape[0]
