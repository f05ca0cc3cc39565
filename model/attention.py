"""Causal multi-head and grouped-query attention with rotary positions, through PyTorch's fused kernels."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from model.configuration import ModelConfiguration
from model.context import BlockContext
from model.norm import RMSNorm
from model.rotary import apply_rotary


class Attention(nn.Module):
    """output(softmax(query key^T / sqrt(head_dim), causal) value).

    How many heads there are is read off the projections, so that a process that holds the rows of query, key and value
    (the columns of output) of some heads runs this same code; the results of all processes then sum up to the whole.
    """

    def __init__(self, configuration: ModelConfiguration, index: int = 0) -> None:
        """index: the number of the block, by which a key-value cache tells the blocks apart."""
        super().__init__()
        self.index = index
        self.head_dim = configuration.head_dim
        hidden = configuration.hidden_size
        self.query = nn.Linear(hidden, configuration.query_size, bias=False)
        self.key = nn.Linear(hidden, configuration.kv_size, bias=False)
        self.value = nn.Linear(hidden, configuration.kv_size, bias=False)
        self.output = nn.Linear(configuration.query_size, hidden, bias=False)
        self.query_norm = RMSNorm(self.head_dim, configuration.norm_eps) if configuration.qk_norm else None
        self.key_norm = RMSNorm(self.head_dim, configuration.norm_eps) if configuration.qk_norm else None

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        """[b, s, hidden_size] -> the same shape: the sum over the heads held here."""
        batch, length, _ = x.shape
        query, key, value = (
            projection(x).view(batch, length, -1, self.head_dim) for projection in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        cos, sin = (table.to(query.dtype) for table in context.rotary)  # rounded once, and once for both
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        if context.cache is not None:
            key, value = context.cache.append(self.index, key, value)
        mixed = causal_attention(query, key, value, context)
        return self.output(mixed.reshape(batch, length, -1))


def causal_attention(query: Tensor, key: Tensor, value: Tensor, context: BlockContext) -> Tensor:
    """Each query over the keys up to its own position, within its document.

    Args:
        query: [b, s, heads, head_dim].
        key, value: [b, t, kv_heads, head_dim], where the s queries are the last of t positions; query head i goes with
            key head i / (heads / kv_heads).

    Returns:
        [b, s, heads, head_dim].
    """
    grouped = query.shape[2] != key.shape[2]
    if grouped and query.is_cuda and query.dtype == torch.float32:
        # The kernel that takes float32 knows no groups; without it all s^2 scores would be kept.
        key, value = (t.repeat_interleave(query.shape[2] // t.shape[2], dim=2) for t in (key, value))
        grouped = False
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    mask, new, all_keys = context.mask, query.shape[2], key.shape[2]
    if isinstance(mask, BlockMask):
        attend: Callable[..., Tensor] = flex_attention
        if query.is_cuda and not torch.compiler.is_compiling():  # a block that is compiled makes a kernel of it itself
            attend = _compiled_flex_attention()
        return attend(query, key, value, block_mask=mask, enable_gqa=grouped).transpose(1, 2)
    if mask is None and 1 < new < all_keys:
        mask = torch.ones(new, all_keys, dtype=torch.bool, device=query.device).tril_(all_keys - new)
    causal = mask is None and new == all_keys
    mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, enable_gqa=grouped)
    return mixed.transpose(1, 2)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)  # made at the first use: torch.compile takes seconds to import
