"""The block that a transformer stacks: two branches that read from the residual stream and add back to it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model.attention import Attention
from model.configuration import ModelConfiguration
from model.context import BlockContext, KeyValueCache
from model.dropout import DropoutKey, Site, dropout
from model.feed_forward import FeedForward
from model.norm import build_norm

__all__ = ["Block", "BlockContext", "DropoutKey", "KeyValueCache"]


def _unchanged(x: Tensor) -> Tensor:
    return x


def _call(branch: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return branch(*arguments)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)).

    A block runs alone. To spread it over processes, three attributes are replaced and nothing else:
    `enter_branch` is called between a norm and the matrices that read it; `leave_branch` on what the branch's last
    matrix gives (a partial sum, where each process holds some of the heads or hidden units); `run_branch` calls all
    from the norm to that matrix, so that recomputing it repeats neither the sum over processes nor the dropout.
    """

    enter_branch: Callable[[Tensor], Tensor]
    leave_branch: Callable[[Tensor], Tensor]
    run_branch: Callable[..., Tensor]

    def __init__(self, configuration: ModelConfiguration, index: int) -> None:
        """index: the number of the block in the whole model, from 0."""
        super().__init__()
        self.index = index
        # A tensor, because a compiled block is compiled once for each number but once for all tensors. Not a buffer:
        # it belongs on the CPU wherever the weights are, with a value also while they have none (the meta device).
        self._index = torch.tensor(index, device="cpu")
        self.dropout = configuration.dropout
        self.attention_norm = build_norm(configuration)
        self.attention = Attention(configuration, index)
        self.feed_forward_norm = build_norm(configuration)
        self.feed_forward = FeedForward(configuration)
        self.enter_branch = _unchanged
        self.leave_branch = _unchanged
        self.run_branch = _call

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        """[b, s, hidden_size] -> the same shape. s is this process's part where the residual stream is cut along it."""
        attended = self.leave_branch(self.run_branch(self.attention_branch, x, context))
        x = x + self._drop(attended, context, Site.ATTENTION)
        fed = self.leave_branch(self.run_branch(self.feed_forward_branch, x))
        return x + self._drop(fed, context, Site.FEED_FORWARD)

    def attention_branch(self, x: Tensor, context: BlockContext) -> Tensor:
        """What attention reads of the residual stream, and what it has to say of it."""
        return self.attention(self.enter_branch(self.attention_norm(x)), context)

    def feed_forward_branch(self, x: Tensor) -> Tensor:
        """The same for the feed-forward network."""
        return self.feed_forward(self.enter_branch(self.feed_forward_norm(x)))

    def _drop(self, x: Tensor, context: BlockContext, site: Site) -> Tensor:
        if not self.training or self.dropout == 0:
            return x
        block = self._index if torch.compiler.is_compiling() else self.index
        return dropout(x, self.dropout, context.dropout, site, block)
