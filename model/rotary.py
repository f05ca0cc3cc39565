"""Rotary position embedding (arXiv 2104.09864) in the half-split layout of Llama, with the usual ways to stretch it.

The tables are computed in float32 from positions in every forward pass and are never part of a module: a table kept as
a buffer is cast with the model, and bfloat16 cannot tell position 256 from 257. Computing them costs less than one
norm, once for all blocks. Frequencies are computed on the CPU, in the order of operations of Hugging Face
transformers, so that they are the same bits on every device and for a published model.
"""

import math

import torch
from torch import Tensor

from model.configuration import RopeScaling, RopeType


def rotary_tables(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all rotation angles, as `apply_rotary` wants them.

    Args:
        positions: [..., s] whole numbers, counted from 0 in each document.
        length: for `dynamic` scaling alone, the tokens of the sequence (default: s).

    Returns:
        (cos, sin), both float32 [..., s, head_dim]. The two halves of cos are equal; the first half of sin is negated.
    """
    frequencies, factor = _frequencies(head_dim, theta, scaling, positions.shape[-1] if length is None else length)
    angles = positions.unsqueeze(-1).float() * frequencies.to(positions.device)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + head_dim / 2]) by its position's angle.

    Args:
        x: [b, s, heads, head_dim].
        cos, sin: of `rotary_tables`, [s, head_dim] or [b, s, head_dim]; rounded once to the dtype of x.
    """
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    # With (a, b) the halves of x, the roll gives (b, a) and this (a cos - b sin, b cos + a sin), in three passes.
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, length: int) -> tuple[Tensor, float]:
    """Radians per position, float32 [head_dim / 2] on the CPU, and the factor on the tables."""
    if scaling is None:
        return _plain(head_dim, theta), 1.0
    original = scaling.original_max_position_embeddings or 0
    match scaling.rope_type:
        case RopeType.LINEAR:
            return _plain(head_dim, theta) / scaling.factor, 1.0
        case RopeType.DYNAMIC:
            # The base grows so that the slowest pair turns as far over `length` as it did over the original length.
            growth = scaling.factor * max(length, original) / original - (scaling.factor - 1)
            return _plain(head_dim, theta * growth ** (head_dim / (head_dim - 2))), 1.0
        case RopeType.YARN:
            return _yarn(head_dim, theta, scaling, original), _yarn_factor(scaling)
        case RopeType.LLAMA3:
            return _llama3(_plain(head_dim, theta), scaling, original), 1.0


def _plain(head_dim: int, theta: float) -> Tensor:
    return 1.0 / _powers(head_dim, theta)


def _powers(head_dim: int, theta: float) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return theta**exponents


def _llama3(plain: Tensor, scaling: RopeScaling, original: int) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, with a ramp between (Llama 3.1)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None and high is not None  # the configuration has seen to it
    wavelengths = 2 * math.pi / plain
    divided = plain / scaling.factor
    share = (original / wavelengths - low) / (high - low)
    ramp = (1 - share) * plain / scaling.factor + share * plain
    return torch.where(wavelengths > original / low, divided, torch.where(wavelengths < original / high, plain, ramp))


def _yarn(head_dim: int, theta: float, scaling: RopeScaling, original: int) -> Tensor:
    """Pairs that turn often within the original length are kept, rare ones divided (arXiv 2309.00071)."""

    def pair_turning(times: float) -> float:
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_turning(scaling.beta_fast or 32), pair_turning(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 0.001
    powers = _powers(head_dim, theta)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - first) / width).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (scaling.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return scale(scaling.mscale) / scale(scaling.mscale_all_dim)
    return scale(1.0)
