"""Cross-entropy over a vocabulary that is divided among tensor-parallel processes."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from model.configuration import ModelConfiguration
from parallel.mesh import Mesh
from parallel.plan import padded_vocabulary

IGNORED = -100
"""A target with this value is no target: it adds nothing to the loss or to the number of targets."""


class _DividedCrossEntropy(Function):
    """Sums of the negative log likelihood and of the squared log of the softmax's denominator."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first_id: int, group: Any) -> tuple[Tensor, Tensor]:
        # logits [n, local vocabulary] float32, targets [n]
        maximum = logits.amax(dim=-1)
        if group is not None:
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        exponentials = (logits - maximum.unsqueeze(-1)).exp_()
        local = targets - first_id
        elsewhere = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(elsewhere, 0)
        at_target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1) - maximum
        sums = torch.stack([exponentials.sum(dim=-1), at_target.masked_fill(elsewhere, 0.0)])
        if group is not None:
            dist.all_reduce(sums, group=group)
        denominator, at_target = sums[0], sums[1]
        counted = targets != IGNORED
        log_denominator = denominator.log()
        nll = torch.where(counted, log_denominator - at_target, 0.0)
        log_z = torch.where(counted, log_denominator + maximum, 0.0)
        softmax = exponentials.div_(denominator.unsqueeze(-1))
        ctx.save_for_backward(softmax, local, elsewhere, counted, log_z)
        return nll.sum(), log_z.square().sum()

    @staticmethod
    def backward(ctx: Any, nll_gradient: Tensor, z_gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, local, elsewhere, counted, log_z = ctx.saved_tensors
        of_softmax = torch.where(counted, nll_gradient + 2.0 * z_gradient * log_z, 0.0)
        of_target = torch.where(counted & ~elsewhere, -nll_gradient, 0.0)
        gradient = softmax.mul_(of_softmax.unsqueeze(-1))
        gradient.scatter_add_(-1, local.unsqueeze(-1), of_target.unsqueeze(-1))
        return gradient, None, None, None


def cross_entropy_sum(
    logits: Tensor, targets: Tensor, mesh: Mesh | None, first_id: int, with_z: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Sum the losses of all targets and, if asked, the squared log denominators (z-loss, arXiv 2204.02311 section 5).

    `logits` [b, s, local vocabulary] are the scores of the token ids from `first_id` on (minus infinity for padding),
    `targets` [b, s] are global ids or -100. Both results are float32 scalars in nats, the same on every tensor-parallel
    process; the second is None unless `with_z`. Where all targets are -100 both are 0 and so is the gradient.
    """
    flat = logits.float().view(-1, logits.shape[-1])
    if mesh is None or mesh.tensor == 1:
        if not with_z:
            return F.cross_entropy(flat, targets.reshape(-1), ignore_index=IGNORED, reduction="sum"), None
        return _DividedCrossEntropy.apply(flat, targets.reshape(-1), first_id, None)
    nll, z = _DividedCrossEntropy.apply(flat, targets.reshape(-1), first_id, mesh.tensor_group)
    return nll, z if with_z else None


class TokenLoss:
    """The loss of one micro-batch, weighted so that a step's mean is over all targets of the global batch.

    Each micro-batch comes with a factor: micro-batches x data-parallel size / targets of the global batch. An engine
    divides by micro-batches and averages over data-parallel processes; what remains is the sum of losses over targets.
    Keeps the step's sums on the device, so that nothing waits for them before the step's end.
    """

    def __init__(self, model: ModelConfiguration, mesh: Mesh) -> None:
        self.mesh = mesh
        self.z_weight = model.z_loss
        self.first_id = mesh.tensor_rank * (padded_vocabulary(model.vocabulary, mesh.tensor) // mesh.tensor)
        self._sums: list[Tensor] = []

    def reset(self) -> None:
        """Forget the recorded losses: a step begins."""
        self._sums = []

    def total(self) -> Tensor:
        """Sums of this process since the reset: [2], of factor x loss and of factor x squared log denominators."""
        return torch.stack(self._sums).sum(dim=0)

    def __call__(self, logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        """Return what to minimise for logits [b, s, local vocabulary] and labels (targets [b, s], factor)."""
        targets, factor = labels
        nll, z = cross_entropy_sum(logits, targets, self.mesh, self.first_id, with_z=self.z_weight > 0.0)
        weighted = nll * factor
        recorded = weighted.detach()
        if z is None:
            self._sums.append(torch.stack([recorded, torch.zeros_like(recorded)]))
            return weighted
        self._sums.append(torch.stack([recorded, (z * factor).detach()]))
        return weighted + self.z_weight * z * factor
