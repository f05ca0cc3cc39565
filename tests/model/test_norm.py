"""The norms against their formulas: values, gradients, and the precision that they are computed in."""

import pytest
import torch
import torch.nn.functional as F

from model.norm import LayerNorm, RMSNorm, rms_norm


def test_rms_norm_is_its_formula_with_exact_gradients() -> None:
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    gain = torch.rand(16, dtype=torch.float64, requires_grad=True)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * gain
    torch.testing.assert_close(rms_norm(x, gain, 1e-3), expected, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(lambda x, gain: rms_norm(x, gain, 1e-3), (x, gain))


def test_rms_norm_agrees_with_the_kernel_that_a_gpu_uses() -> None:
    x, gain = torch.randn(3, 5, 64), torch.rand(64)
    torch.testing.assert_close(rms_norm(x, gain, 1e-5), F.rms_norm(x, (64,), gain, 1e-5), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("norm", [RMSNorm(256, 1e-5), LayerNorm(256, 1e-5)])
def test_bfloat16_is_computed_in_float32_and_rounded_once(norm: torch.nn.Module) -> None:
    norm = norm.bfloat16()
    x = (torch.randn(64, 256) * 3 + 1).bfloat16()
    result = norm(x)
    assert result.dtype == torch.bfloat16
    exact = norm.double()(x.double())
    # Half a unit in the last of bfloat16's 8 digits, and nothing for the sums of 256 squares.
    assert ((result.double() - exact).abs() / exact.abs()).max() <= 2**-8 * 1.001


def test_bfloat16_gradients_are_rounded_once() -> None:
    x = torch.randn(512, 64).bfloat16().requires_grad_()
    gain = torch.rand(64).bfloat16().requires_grad_()
    upstream = torch.randn(512, 64).bfloat16()
    rms_norm(x, gain, 1e-5).backward(upstream)
    wide_x, wide_gain = (t.detach().double().requires_grad_() for t in (x, gain))
    rms_norm(wide_x, wide_gain, 1e-5).backward(upstream.double())
    assert (gain.grad.double() - wide_gain.grad).abs().max() <= 2**-8 * wide_gain.grad.abs().max()
    assert (x.grad.double() - wide_x.grad).abs().max() <= 2**-8 * wide_x.grad.abs().max()


def test_layer_norm_has_a_gain_and_no_bias() -> None:
    norm = LayerNorm(8, 1e-5)
    assert [name for name, _ in norm.named_parameters()] == ["gain"]
    result = norm(torch.randn(4, 8) + 5)
    torch.testing.assert_close(result.mean(-1), torch.zeros(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(result.var(-1, unbiased=False), torch.ones(4), atol=1e-3, rtol=0)


def test_only_the_input_is_kept_for_backward() -> None:
    x, gain = torch.randn(2, 7, 32, requires_grad=True), torch.ones(32, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        rms_norm(x, gain, 1e-5)
    assert sorted(t.numel() for t in kept) == [2 * 7, 32, 2 * 7 * 32]
    assert any(t.data_ptr() == x.data_ptr() for t in kept)
