"""Dropout without state: whether an element is dropped is a function of where it stands, never of who computes it.

The mask is a hash of (seed, step, sample number, block, site, position, channel). So there is no random state to save,
recomputation draws the same mask again, and a process that holds a slice of the sequence draws the slice of the same
mask. It is whole-number arithmetic in ordinary tensor operations: the same bits on CPU and GPU, compiled or not.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF  # numbers of 32 bits, kept in int64 where they are few: no overflow, no sign


class Site(IntEnum):
    """Where in the model a mask is applied."""

    EMBEDDING = 0
    ATTENTION = 1
    FEED_FORWARD = 2


@dataclass
class DropoutKey:
    """What the masks of one micro-batch are drawn from."""

    seed: int
    step: int | Tensor
    """Number of the optimizer step, a whole number or an integer tensor of one element."""
    sample_numbers: Tensor
    """[b] int64: the global number of each sample, the same in every layout."""
    position_offset: int = 0
    """Position of the first row held here, where a process holds a slice of the sequence."""

    def __post_init__(self) -> None:
        # Hashed here and not in the blocks: a compiled block must not depend on the step, or it compiles again.
        numbers = self.sample_numbers.long()
        step = self.step.to(numbers) if isinstance(self.step, Tensor) else self.step
        words = [half for number in (self.seed, step, numbers) for half in (number & _WORD, number >> 32 & _WORD)]
        self.samples: Tensor = _absorb(torch.tensor([[1], [2]], device=numbers.device), *words)
        """[2, b] int64: two words of 32 bits for each sample, a hash of seed, step and sample number."""


def dropout(x: Tensor, probability: float, key: DropoutKey | None, site: Site, block: int | Tensor = 0) -> Tensor:
    """Zeroes elements of x with `probability` and multiplies the rest by 1 / (1 - probability).

    Args:
        x: [b, s, h], where the rows are positions `key.position_offset` and on.
        key: may be None where the probability is 0.
        block: number of the block in the whole model; a tensor of one element where the block is compiled.

    Raises:
        ValueError: without a key where one is needed, or with one of other samples than x has; neither mistake would be
            noticed otherwise.
    """
    if probability == 0:
        return x
    if key is None:
        raise ValueError(f"dropout is {probability}, so a forward pass in training needs a dropout key")
    if key.samples.shape[1] != x.shape[0]:
        raise ValueError(f"the dropout key is of {key.samples.shape[1]} samples and the batch has {x.shape[0]}")
    return (x * (1 / (1 - probability))).masked_fill_(_dropped(x, probability, key, site, block), 0.0)


def _dropped(x: Tensor, probability: float, key: DropoutKey, site: Site, block: int | Tensor) -> Tensor:
    """Boolean mask [b, s, h], true with `probability` (to 2^-32)."""
    _, length, channels = x.shape
    salt = _absorb(1, int(site), block)  # a plain number costs the device nothing
    samples = _absorb(key.samples.to(x.device), salt).unsqueeze(-1)
    positions = torch.arange(key.position_offset, key.position_offset + length, device=x.device)
    # Two words for each row, so that no two rows of billions share a mask; one for each channel.
    first, second = _signed(_absorb(samples, positions)).unsqueeze(-1)
    channel = _signed(_absorb(torch.arange(channels, device=x.device), 1))
    # Only this runs over every element, hence in 32 bits, where products wrap. Its inputs are hashes already; the
    # rounds tie them so that no row or channel predicts another. The highest bits are the best mixed: they decide.
    # In place, because memory is what it costs.
    bits = first ^ channel
    bits *= 0x2C1B3C6D
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits += second
    bits *= 0x297A2D39
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= 0x3D4D51CB
    return bits < min(round(probability * 2**32), _WORD) - 2**31


def _absorb(state: Any, *words: Any) -> Any:
    """Hashes 32-bit words into a 32-bit state, one after another (multiply and shift, after C. Wellons' lowbias32).

    Python numbers or int64 tensors, of any shapes that broadcast. The factors are below 2^31, so that no product
    reaches 2^63.
    """
    for word in words:
        state = (state + word + 0x1E3779B9) & _WORD
        state = state ^ (state >> 16)
        state = (state * 0x7FEB352D) & _WORD
        state = state ^ (state >> 15)
        state = (state * 0x6C68CB8B) & _WORD
        state = state ^ (state >> 16)
    return state


def _signed(state: Tensor) -> Tensor:
    """A 32-bit state as int32."""
    return (state - 2**31).to(torch.int32)
