"""Initial values as a function of (seed, parameter name, place), whoever holds the parameter.

Values are drawn for the true tensor, as one process would hold it, in blocks of 256 rows with a generator each, seeded
by a hash of (seed, name, block). So every layout starts from the same bits, a process draws only the blocks that it
holds rows of, and no two blocks of a model start alike.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

from model.configuration import ModelConfiguration

ROWS = 256
"""Rows that share a generator. Part of what a seed means: another number gives other initial values."""

_RESIDUAL_OUTPUTS = (".attention.output.weight", ".feed_forward.down.weight")


def parameter_shapes(configuration: ModelConfiguration) -> dict[str, tuple[int, ...]]:
    """Every parameter's global name and true shape, in the order of the model."""
    hidden, inner = configuration.hidden_size, configuration.ffn_hidden_size
    block: dict[str, tuple[int, ...]] = {
        "attention_norm.gain": (hidden,),
        "attention.query.weight": (configuration.query_size, hidden),
        "attention.key.weight": (configuration.kv_size, hidden),
        "attention.value.weight": (configuration.kv_size, hidden),
        "attention.output.weight": (hidden, configuration.query_size),
        "feed_forward_norm.gain": (hidden,),
        "feed_forward.up.weight": (inner, hidden),
        "feed_forward.down.weight": (hidden, inner),
    }
    if configuration.qk_norm:
        block |= {f"attention.{which}_norm.gain": (configuration.head_dim,) for which in ("query", "key")}
    if configuration.activation.gated:
        block["feed_forward.gate.weight"] = (inner, hidden)
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (configuration.vocabulary, hidden)}
    for index in range(configuration.num_layers):
        shapes |= {f"blocks.{index}.{name}": shape for name, shape in block.items()}
    shapes["final_norm.gain"] = (hidden,)
    if not configuration.tie_embeddings:
        shapes["head.weight"] = (configuration.vocabulary, hidden)
    return shapes


def initial_slice(
    configuration: ModelConfiguration,
    seed: int,
    name: str,
    shape: tuple[int, ...],
    rows: slice = slice(None),
    columns: slice | None = None,
) -> Tensor:
    """Initial values of a part of one parameter: gains are 1, matrices normal(0, init_std).

    The matrices that write to the residual stream have the deviation divided by sqrt(2 x num_layers), so that the sum
    of all branches starts with the same variance at any depth.

    Args:
        name: global name of the parameter, say `blocks.3.attention.query.weight`.
        shape: true shape of the whole parameter, as `parameter_shapes` gives it.
        rows: of the first dimension, step 1. Rows past the true shape (the padding of a vocabulary) are zero.
        columns: of the second, within the shape (default: all).

    Returns:
        float32 on the CPU, [rows, columns] or [rows]. More than the result only one block is ever in memory.
    """
    start, stop = rows.start or 0, shape[0] if rows.stop is None else rows.stop
    if name.endswith(".gain"):
        return torch.ones(stop - start, dtype=torch.float32, device="cpu")
    deviation = configuration.init_std
    if name.endswith(_RESIDUAL_OUTPUTS):
        deviation /= math.sqrt(2 * configuration.num_layers)
    columns = slice(None) if columns is None else columns
    width = len(range(*columns.indices(shape[1])))
    result = torch.zeros(stop - start, width, dtype=torch.float32, device="cpu")
    true_stop = min(stop, shape[0])
    for block in range(start // ROWS, math.ceil(true_stop / ROWS)) if start < true_stop else ():
        first, last = block * ROWS, min(block * ROWS + ROWS, shape[0])
        # The whole block, whatever part of it is wanted: how many values are drawn decides what they are.
        values = torch.empty(last - first, shape[1], dtype=torch.float32, device="cpu")
        values.normal_(0.0, deviation, generator=_generator(seed, name, block))
        low, high = max(start, first), min(stop, last)
        result[low - start : high - start] = values[low - first : high - first, columns]
    return result


def initialize(model: nn.Module, configuration: ModelConfiguration, seed: int) -> None:
    """Gives a whole model, whose parameters have their global names and true shapes, its initial values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            for first in range(0, shape[0], ROWS):
                rows = slice(first, min(first + ROWS, shape[0]))
                parameter[rows] = initial_slice(configuration, seed, name, shape, rows).to(parameter)


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed} {name} {block}".encode(), digest_size=8).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
