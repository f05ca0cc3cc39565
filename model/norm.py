"""RMSNorm and LayerNorm, with a gain and no bias; computed in float32 at least, returned in the input's dtype."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.configuration import ModelConfiguration, NormKind


class _RMSNormFunction(torch.autograd.Function):
    """RMSNorm that keeps only its input for backward, as the fused GPU kernel does.

    On the CPU `F.rms_norm` is a chain of operations: three times slower, and it keeps the normalized tensor too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse = _inverse_rms(wide, eps)
        ctx.save_for_backward(x, gain, inverse)
        return (wide * inverse * gain).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain, inverse = ctx.saved_tensors
        normalized = x.to(inverse.dtype) * inverse
        gradient = gradient.to(inverse.dtype)
        of_gain = (gradient * normalized).flatten(0, -2).sum(0)
        of_normalized = gradient * gain
        # Only the part of the gradient across x passes: scaling x does not change its normalized self.
        along = torch.linalg.vecdot(of_normalized, normalized).unsqueeze(-1) / x.shape[-1]
        of_x = (of_normalized - normalized * along) * inverse
        return of_x.to(x.dtype), of_gain.to(gain.dtype), None


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(torch.linalg.vecdot(x, x).unsqueeze(-1) / x.shape[-1] + eps)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension (arXiv 1910.07467).

    Args:
        x: [..., size], any floating dtype; float64 is computed in float64, all else in float32.
        gain: [size].
    """
    if x.is_cuda:
        return F.rms_norm(x, gain.shape, gain.to(x.dtype), eps)
    return _RMSNormFunction.apply(x, gain, eps)


class RMSNorm(nn.Module):
    """Scales each vector to a root mean square of 1, then by `gain`; no re-centring."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same shape and dtype."""
        return rms_norm(x, self.gain, self.eps)

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"{self.gain.numel()}, eps={self.eps}"


class LayerNorm(nn.Module):
    """Takes the mean off each vector and scales it to unit variance, then by `gain`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same shape and dtype; the kernels take their sums in float32."""
        return F.layer_norm(x, self.gain.shape, self.gain, None, self.eps)

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"{self.gain.numel()}, eps={self.eps}"


def build_norm(configuration: ModelConfiguration) -> RMSNorm | LayerNorm:
    """The norm over the residual stream that the configuration names."""
    kind = RMSNorm if configuration.norm is NormKind.RMSNORM else LayerNorm
    return kind(configuration.hidden_size, configuration.norm_eps)
