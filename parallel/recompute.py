"""Recomputation of activations in the backward pass (arXiv 1604.06174).

`sublayer` wraps each residual branch from its norm to its row-parallel matrix. The sum over tensor-parallel
processes and the dropout stand outside, so no all-reduce is repeated (under sequence parallelism the all-gather at the
branch's beginning is). `block` wraps the whole block and keeps one tensor a block; it repeats attention's sum.
Dropout is a function of the sample's number, so no random state is saved.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

from model.block import Block
from parallel.schedules import Recompute

recomputed: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
"""Call a function and keep only its inputs for the backward pass."""


def apply_recompute(block: Block, recompute: Recompute) -> Callable[..., Any]:
    """Set the block's own hook (`sublayer`) and return what to call in place of the block."""
    if recompute is Recompute.SUBLAYER:
        block.run_branch = recomputed
    if recompute is Recompute.BLOCK:
        return partial(recomputed, block)
    return block
