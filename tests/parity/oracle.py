"""The oracle: the plain model of `model/` on one process, in plain PyTorch.

It shares no code with what it checks: nothing of `parallel/`, `training/` or DeepSpeed is imported here. It takes the
global batch sample by sample (a few at a time), sums the losses over the targets, divides by their number, clips,
computes the learning rate and steps by itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.batches import MicroBatch
from model.configuration import ModelConfiguration
from model.dropout import DropoutKey
from model.initialization import initialize
from model.language_model import LanguageModel


@dataclass(frozen=True)
class Setting:
    """What is trained, on what, for how long; says nothing of processes."""

    model: ModelConfiguration
    samples: Callable[[list[int]], MicroBatch]
    """Samples by their global numbers."""
    batch: int
    """Samples of a step; step n takes the numbers from (n - 1) x batch."""
    steps: int
    seed: int
    learning_rate: float
    warmup_steps: int
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float


@dataclass
class Trace:
    """What a run leaves to be compared."""

    losses: list[float] = field(default_factory=list)
    """Of each step, before its update: mean over all targets of the batch, nats."""
    norms: list[float] = field(default_factory=list)
    """Of each step's gradient, before clipping."""
    coefficients: list[float] = field(default_factory=list)
    """By which clipping multiplied it."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of step 1 before clipping, by global name."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """After the last step, by global name; the fp32 ones where the model computes with fewer bits."""


def run(setting: Setting, dtype: torch.dtype = torch.float32, samples_at_once: int = 4, parts: int = 1) -> Trace:
    """Train. The whole computation uses `dtype`; beside bfloat16 stand fp32 weights, gradients and moments.

    A run in bfloat16 begins with rounded weights, the fp32 ones too. `samples_at_once` and `parts` (into which the
    products of each branch are cut as tensor parallelism cuts them) change the order of summation and nothing else.
    """
    model = LanguageModel(setting.model)
    if parts > 1:
        for block in model.blocks:
            attention, feed_forward = block.attention, block.feed_forward
            for linear in (attention.output, feed_forward.down):
                linear.forward = partial(_sum_of_products, linear, parts)
            for linear in (attention.query, attention.key, attention.value, feed_forward.up, feed_forward.gate):
                if linear is not None:
                    linear.forward = partial(_side_by_side, linear, parts)
    initialize(model, setting.model, setting.seed)
    low = dtype in (torch.bfloat16, torch.float16)
    names = [name for name, _ in model.named_parameters()]
    model.to(dtype).train()
    masters = [p.detach().clone().to(torch.float32 if low else dtype) for p in model.parameters()]
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [m for m in masters if m.ndim >= 2], "weight_decay": setting.weight_decay},
            {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
        ],
        betas=setting.betas,
        eps=setting.eps,
        foreach=False,
        fused=False,
    )
    trace = Trace()
    for step in range(1, setting.steps + 1):
        loss, gradients = mean_gradient(model, setting, step, samples_at_once)
        if step == 1:
            trace.gradients = dict(zip(names, [g.clone() for g in gradients], strict=True))
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        coefficient = min(1.0, setting.clip / norm) if setting.clip > 0 and norm > 0 else 1.0
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient * coefficient
        for group in optimizer.param_groups:
            group["lr"] = setting.learning_rate * min(1.0, step / max(1, setting.warmup_steps))
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
        trace.losses.append(loss)
        trace.norms.append(norm)
        trace.coefficients.append(coefficient)
    trace.parameters = dict(zip(names, masters, strict=True))
    return trace


def _sum_of_products(linear: nn.Linear, parts: int, x: Tensor) -> Tensor:
    """The product as a sum over `parts` of the inner dimension, each rounded to the dtype."""
    pieces = zip(x.chunk(parts, -1), linear.weight.chunk(parts, -1), strict=True)
    return sum((F.linear(a, b) for a, b in pieces), start=torch.zeros((), dtype=x.dtype))


def _side_by_side(linear: nn.Linear, parts: int, x: Tensor) -> Tensor:
    """The product in `parts` of the output; its gradient is a sum over them, each rounded to the dtype."""
    return torch.cat([F.linear(x, weight) for weight in linear.weight.chunk(parts, 0)], -1)


def mean_gradient(
    model: LanguageModel, setting: Setting, step: int, samples_at_once: int
) -> tuple[float, list[Tensor]]:
    """Mean loss over the targets of step `step`'s batch and its gradients, in fp32 at least."""
    first = (step - 1) * setting.batch
    numbers = list(range(first, first + setting.batch))
    parameters = list(model.parameters())
    wide = torch.promote_types(parameters[0].dtype, torch.float32)
    sums = [torch.zeros(p.shape, dtype=wide) for p in parameters]
    targets, summed_loss = 0, 0.0
    for begin in range(0, setting.batch, samples_at_once):
        batch = setting.samples(numbers[begin : begin + samples_at_once])
        key = None
        if setting.model.dropout > 0:
            key = DropoutKey(setting.seed, step, batch.sample_numbers)
        logits = model(batch.tokens, document_ids=batch.document_ids, dropout_key=key).to(wide)
        counted = batch.targets != -100
        if not counted.any():
            continue
        chosen, ids = logits[counted], batch.targets[counted]
        nll = F.cross_entropy(chosen, ids, reduction="sum")
        loss = nll
        if setting.model.z_loss > 0:
            loss = nll + setting.model.z_loss * chosen.logsumexp(-1).square().sum()
        for total, gradient in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
            total += gradient
        targets += int(counted.sum())
        summed_loss += float(nll.detach())
    divisor = max(targets, 1)
    return summed_loss / divisor, [total / divisor for total in sums]
