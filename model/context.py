"""What all blocks of one forward pass share: rotary tables, document mask, dropout key, key-value cache."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from model.configuration import ModelConfiguration
from model.dropout import DropoutKey
from model.rotary import rotary_tables


class KeyValueCache:
    """Keys and values of the tokens so far, for generation: each block appends the new tokens' and gets all."""

    def __init__(self, capacity: int) -> None:
        """capacity: tokens that there is room for; memory is taken at each block's first append."""
        self.capacity = capacity
        self.length = 0
        """Tokens that every block has seen; `advance` moves it once a forward pass is through."""
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, block: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Takes the new tokens' [b, s, kv_heads, head_dim] pair; returns the pair over all tokens (views, not copies).

        Raises:
            ValueError: where the tokens do not fit.
        """
        end = self.length + key.shape[1]
        if end > self.capacity:
            raise ValueError(f"the key-value cache has room for {self.capacity} tokens and {end} are needed")
        if block not in self._kept:
            shape = (key.shape[0], self.capacity, *key.shape[2:])
            self._kept[block] = key.new_empty(shape), value.new_empty(shape)
        keys, values = self._kept[block]
        keys[:, self.length : end] = key
        values[:, self.length : end] = value
        return keys[:, :end], values[:, :end]

    def advance(self, tokens: int) -> None:
        """Says that every block has appended this many tokens."""
        self.length += tokens


@dataclass
class BlockContext:
    """Handed to every block of a forward pass. `BlockContext.build` makes one from what a caller has."""

    rotary: tuple[Tensor, Tensor]
    """(cos, sin) of `rotary_tables`, over the whole sequence also where the residual stream is cut along it."""
    document_ids: Tensor | None = None
    """[b, s]: attention stays within equal numbers (default: no bounds)."""
    dropout: DropoutKey | None = None
    """Needed in training with a dropout probability above 0."""
    cache: KeyValueCache | None = None
    mask: Tensor | BlockMask | None = field(init=False, default=None)
    """What attention needs of document_ids, prepared once for all blocks and outside what may be compiled."""

    def __post_init__(self) -> None:
        if self.document_ids is not None:
            if self.cache is not None:
                raise ValueError("a key-value cache and document_ids cannot be used together")
            self.mask = document_mask(self.document_ids)

    @classmethod
    def build(
        cls,
        configuration: ModelConfiguration,
        length: int,
        device: torch.device,
        *,
        document_ids: Tensor | None = None,
        dropout: DropoutKey | None = None,
        cache: KeyValueCache | None = None,
    ) -> "BlockContext":
        """The context of `length` tokens, counted over the whole sequence; positions restart with each document."""
        if document_ids is not None:
            positions = positions_in_documents(document_ids)
        else:
            start = 0 if cache is None else cache.length
            positions = torch.arange(start, start + length, device=device)
        # With a cache the length is its capacity: keys that were turned for another length could not be mended later.
        whole = length if cache is None else cache.capacity
        rotary = rotary_tables(
            positions, configuration.head_dim, configuration.rope_theta, configuration.rope_scaling, whole
        )
        return cls(rotary, document_ids, dropout, cache)


def positions_in_documents(document_ids: Tensor) -> Tensor:
    """Counts from 0 again wherever the number changes along a row. [b, s] -> int64 [b, s]."""
    places = torch.arange(document_ids.shape[-1], device=document_ids.device).expand_as(document_ids)
    begins = document_ids != document_ids.roll(1, -1)
    return places - torch.where(begins, places, 0).cummax(-1).values


def document_mask(document_ids: Tensor) -> Tensor | BlockMask:
    """Which keys a query sees: not later ones, and none of another document.

    A boolean [b, 1, s, s] on the CPU; on a GPU the tiles that flex_attention computes at all, in O(s^2 / 128^2) memory.
    """
    if document_ids.is_cuda:
        return flex_document_mask(document_ids, compiled=True)
    same = document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)
    return same.tril_().unsqueeze(1)


def flex_document_mask(document_ids: Tensor, compiled: bool) -> BlockMask:
    """The document mask for flex_attention. Without compilation it is slow, and only good for tests on the CPU."""

    def visible(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_ids[b, query] == document_ids[b, key])

    batch, length = document_ids.shape
    create = torch.compile(create_block_mask) if compiled else create_block_mask
    return create(visible, batch, None, length, length, device=document_ids.device)
