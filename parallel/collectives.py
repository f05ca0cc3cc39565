"""The collectives of tensor parallelism as differentiable functions.

Named after Megatron-LM (arXiv 1909.08053, section 3): `f` is the identity forward and a sum backward, `g` the converse.
Sequence parallelism (arXiv 2205.05198, section 4.2.2) puts an all-gather and a reduce-scatter in their places.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


class _SumBackward(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # In place: this is the sum of what matrix multiplications sent back, and nothing else reads it.
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _SumForward(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        # A row-parallel matrix multiplication has just made this tensor and nothing else reads it: sum in place.
        ctx.mark_dirty(tensor)
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def gather_dim1(tensor: Tensor, group: Any) -> Tensor:
    """Join the slices [b, s, ...] of all processes of `group` along the second dimension: [b, s * size, ...]."""
    size = dist.get_world_size(group)
    joined = tensor.new_empty((size, *tensor.shape))
    dist.all_gather_single(joined.view(-1), tensor.contiguous().view(-1), group=group)
    return joined.transpose(0, 1).reshape(tensor.shape[0], size * tensor.shape[1], *tensor.shape[2:])


def reduce_scatter_dim1(tensor: Tensor, group: Any) -> Tensor:
    """Sum [b, s, ...] over `group` and keep this process's slice of the second dimension: [b, s / size, ...]."""
    size = dist.get_world_size(group)
    batch, length = tensor.shape[:2]
    parts = tensor.reshape(batch, size, length // size, *tensor.shape[2:]).transpose(0, 1).contiguous()
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter_single(mine.view(-1), parts.view(-1), group=group)
    return mine


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gather_dim1(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_dim1(gradient, ctx.group), None


class _ScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return reduce_scatter_dim1(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gather_dim1(gradient, ctx.group), None


def sum_backward(tensor: Tensor, group: Any) -> Tensor:
    """`f`: hand on `tensor`; sum its gradient over `group` (each process holds a part of what follows)."""
    return _SumBackward.apply(tensor, group)


def sum_forward(tensor: Tensor, group: Any) -> Tensor:
    """`g`: sum the partial results `tensor` over `group`, in place; hand on the gradient."""
    return _SumForward.apply(tensor, group)


def gather_sequence(tensor: Tensor, group: Any) -> Tensor:
    """Join the slices [b, s / size, h] of a sequence; backward sums the gradients and scatters them."""
    return _GatherSequence.apply(tensor, group)


def scatter_sequence(tensor: Tensor, group: Any) -> Tensor:
    """Sum partial results [b, s, h] and keep one slice [b, s / size, h]; backward joins the gradients."""
    return _ScatterSequence.apply(tensor, group)
