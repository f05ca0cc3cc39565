"""AdamW for the parameters of one process: decay on matrices only."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from training.sections import Optimizer


def parameter_groups(parameters: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    """Divide parameters by their shape, not by their names: matrices decay, gains do not."""
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    gains = [parameter for parameter in parameters if parameter.ndim < 2]
    groups: list[dict[str, object]] = [{"params": matrices, "weight_decay": weight_decay}]
    if gains:
        groups.append({"params": gains, "weight_decay": 0.0})
    return groups


def make_adamw(section: Optimizer, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Build torch's fused AdamW (arXiv 1711.05101), which compiles nothing. The loop sets the learning rate."""
    return torch.optim.AdamW(
        parameter_groups(parameters, section.weight_decay),
        lr=section.learning_rate,
        betas=section.betas,
        eps=section.eps,
        fused=True,
    )


def optimizer_factory(section: Optimizer) -> "partial[torch.optim.Optimizer]":
    """What an engine calls with its parameters."""
    return partial(make_adamw, section)
