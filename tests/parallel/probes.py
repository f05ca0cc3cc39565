"""What the tests of this folder run on every rank. All ranks draw the same numbers, and each takes its part."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model.configuration import ModelConfiguration
from model.language_model import LanguageModel
from parallel.collectives import gather_sequence, scatter_sequence, sum_backward, sum_forward
from parallel.loss import cross_entropy_sum
from parallel.plan import padded_vocabulary
from parallel.stages import ContextBuilder, StageSettings, layer_list
from tests.parity.probes import mesh_of

FUNCTIONS = {
    "sum_backward": sum_backward,
    "sum_forward": sum_forward,
    "gather_sequence": gather_sequence,
    "scatter_sequence": scatter_sequence,
}


def collective(device: torch.device, name: str) -> dict[str, Any]:
    """Result and gradient of a collective on a tensor that is another on each rank, with another gradient on each."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = mesh_of(1, size, 1)
    generator = torch.Generator().manual_seed(rank)
    tensor = torch.randn(2, 8, 3, generator=generator).requires_grad_()
    result = FUNCTIONS[name](tensor * 1.0, mesh.tensor_group)
    weight = torch.randn(result.shape, generator=generator)
    (result * weight).sum().backward()
    return {
        "tensor": tensor.tolist(),
        "result": result.tolist(),
        "weight": weight.tolist(),
        "grad": tensor.grad.tolist(),
    }  # type: ignore[union-attr]


def divided_loss(device: torch.device, vocabulary: int, scale: float, targets: list[list[int]], with_z: bool) -> Any:
    """Loss, z-loss and the gradient of this rank's part of the logits, for a vocabulary with padding."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = mesh_of(1, size, 1)
    width = padded_vocabulary(vocabulary, size) // size
    logits = torch.full((*torch.tensor(targets).shape, width * size), float("-inf"))
    logits[..., :vocabulary] = all_logits(vocabulary, scale, targets)
    mine = logits[..., rank * width : (rank + 1) * width].clone().requires_grad_()
    nll, z = cross_entropy_sum(mine, torch.tensor(targets), mesh, rank * width, with_z)
    total = nll if z is None else nll + 0.01 * z
    total.backward()
    kept = max(0, min(width, vocabulary - rank * width))
    assert torch.isfinite(mine.grad).all() and not mine.grad[..., kept:].any()  # type: ignore[union-attr]
    return {"nll": nll.item(), "z": None if z is None else z.item(), "grad": mine.grad[..., :kept].tolist()}  # type: ignore[index]


def all_logits(vocabulary: int, scale: float, targets: list[list[int]]) -> Tensor:
    """The logits that all ranks of `divided_loss` share."""
    generator = torch.Generator().manual_seed(vocabulary)
    return torch.randn(*torch.tensor(targets).shape, vocabulary, generator=generator) * scale


def divided_model(device: torch.device, model: dict[str, Any], sequence_parallel: bool) -> dict[str, float]:
    """Largest relative difference of output and of each gradient between the layers here and the plain model."""
    configuration = ModelConfiguration(**model)
    mesh = mesh_of(1, dist.get_world_size(), 1)
    stage = StageSettings(configuration, mesh, device, torch.float32, sequence_parallel=sequence_parallel)
    specs = layer_list(stage)
    layers = [spec.build() for spec in (specs[:-1] if configuration.tie_embeddings else specs)]
    tokens = torch.arange(2 * 16).view(2, 16) * 7 % configuration.vocabulary
    weight = torch.randn(2, 16, configuration.vocabulary, generator=torch.Generator().manual_seed(5))
    hidden: Any = tokens
    for layer in layers:
        hidden = layer(hidden)
    if configuration.tie_embeddings:
        hidden = specs[-1].forward_fn(layers[0], hidden)
    first = mesh.tensor_rank * layers[0].weight.shape[0]
    true = layers[0].true_rows
    (hidden[..., :true] * weight[..., first : first + true]).sum().backward()
    plain = LanguageModel(configuration)
    logits = plain(tokens)
    (logits * weight).sum().backward()
    found = {"logits": _apart(hidden[..., :true], logits[..., first : first + true])}
    whole = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for parameter in (p for layer in layers for p in layer.parameters()):
        part = parameter.slice
        box = tuple(slice(*bounds) for bounds in part.box)
        rows = part.box[0][1] - part.box[0][0]
        found[part.name] = _apart(parameter.grad[:rows], whole[part.name][box])
        assert not parameter.grad[rows:].any(), "padding rows have no gradient"
    return found


def _apart(found: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max())


def contexts_are_shared(device: torch.device) -> bool:
    """Whether blocks of one micro-batch share a context, and those of two micro-batches do not."""
    configuration = ModelConfiguration(hidden_size=16, num_layers=2, num_heads=2, vocab_size=32, dropout=0.5)
    stage = StageSettings(configuration, mesh_of(1, dist.get_world_size(), 1), device, torch.float32)
    builder = ContextBuilder(stage)
    hidden, side, other = torch.zeros(1, 4, 16), torch.tensor([[3, 1]]), torch.tensor([[3, 1]])
    first = builder(hidden, side, True)
    return builder(hidden, side, True) is first and builder(hidden, other, True) is not first


def sleep(device: torch.device, seconds: float) -> None:
    """Take this long."""
    time.sleep(seconds)
