"""Cross-entropy: the sum over targets, in float64 by hand, for large logits and ignored targets (cases B5, B6)."""

import pytest
import torch

from parallel.loss import IGNORED, _DividedCrossEntropy, cross_entropy_sum

TARGETS = torch.tensor([[3, IGNORED, IGNORED, 5, 0, 7]])


def dense(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and squared log denominators of the counted targets, in float64."""
    wide = logits.double()[0]
    counted = TARGETS[0] != IGNORED
    log_z = torch.logsumexp(wide, dim=-1)[counted]
    at_target = wide[counted].gather(1, TARGETS[0][counted].unsqueeze(1)).squeeze(1)
    return (log_z - at_target).sum(), log_z.square().sum()


@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("with_z", [False, True])
def test_sums_and_gradients(scale: float, with_z: bool) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(1, 6, 8) * scale).requires_grad_()
    reference = logits.detach().double().requires_grad_()
    nll, z = cross_entropy_sum(logits, TARGETS, None, 0, with_z)
    right_nll, right_z = dense(reference)
    total, right = (nll, right_nll) if z is None else (nll + 1e-3 * z, right_nll + 1e-3 * right_z)
    total.backward()
    right.backward()
    assert (z is None) is not with_z
    assert total.item() == pytest.approx(right.item(), rel=1e-6)
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad - reference.grad).abs().max() <= 1e-5 * reference.grad.abs().max()


def test_padding_columns_get_no_probability_and_no_gradient() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 8)
    padded = torch.cat([logits, torch.full((6, 4), float("-inf"))], dim=1).requires_grad_()
    plain = logits.clone().requires_grad_()
    _DividedCrossEntropy.apply(padded, TARGETS[0], 0, None)[0].backward()
    _DividedCrossEntropy.apply(plain, TARGETS[0], 0, None)[0].backward()
    assert torch.equal(padded.grad[:, :8], plain.grad)
    assert torch.equal(padded.grad[:, 8:], torch.zeros(6, 4))


@pytest.mark.parametrize("with_z", [False, True])
def test_all_targets_ignored_is_no_loss_and_no_gradient(with_z: bool) -> None:
    logits = torch.randn(1, 3, 8, requires_grad=True)
    nll, _ = cross_entropy_sum(logits, torch.full((1, 3), IGNORED), None, 0, with_z)
    nll.backward()
    assert nll.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))
