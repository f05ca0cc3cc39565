"""Bytes that one block keeps for its backward pass, counted, against the formula.

    python benchmarks/activation_memory.py

Every tensor that autograd saves is seen by `saved_tensors_hooks`; storages are counted once, weights not at all. What
all blocks share (rotary tables) drops out, because a block is the difference between a model of three and one of two.
Tensor parallelism is that of the product on a process group that moves nothing: the sizes are those of one process of
`tensor`, and it runs on one CPU.
"""

import argparse
import sys
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from model.configuration import ModelConfiguration
from model.context import BlockContext
from parallel.mesh import Mesh
from parallel.schedules import Recompute
from parallel.stages import BlockLayer, StageSettings, layer_list

BATCH, LENGTH = 2, 256
MODELS = {
    "GELU, multi-head": {"activation": "gelu"},
    "SwiGLU, grouped-query": {"activation": "swiglu", "ffn_hidden_size": 704, "num_kv_heads": 2},
}


def configuration(**changes: Any) -> ModelConfiguration:
    """A block wide enough that what is small beside the formula stays small."""
    return ModelConfiguration(**{"hidden_size": 256, "num_layers": 3, "num_heads": 4, "vocab_size": 512, **changes})


@dataclass(frozen=True)
class Setup:
    """How a block is divided and recomputed."""

    tensor: int
    sequence_parallel: bool
    recompute: Recompute
    element: int = 4
    """Bytes of an activation."""


def formula(model: ModelConfiguration, setup: Setup) -> int:
    """Bytes a block keeps for a micro-batch of s x b tokens, after arXiv 2205.05198, section 4, adapted to this block.

    There a block of GPT keeps sbh (34 + 5as/h) bytes in 16 bits. Here there are no dropout masks (they are recomputed
    from a hash) and no scores (the attention kernel keeps one number a row), and what is kept is, in elements:

    - each of the two branches: its input x (kept by the norm) and the normed x (kept by the matrices that read it);
    - attention: query, key, value and what it gives, together 2 query_size + 2 kv_size, divided by tensor;
    - feed-forward: before and after the non-linearity, 2 ffn; gated: gate, its activation, up and their product, 4 ffn;
      divided by tensor.

    Under sequence parallelism x is a slice of the sequence. The normed x is gathered for the matrices and kept whole
    (Megatron-LM keeps the slice and gathers it a second time). Recomputation by sublayer keeps the two x, by block one.
    Beside these: a float32 a token for each norm, and one for each token and head of attention.
    """
    tokens, tensor = BATCH * LENGTH, setup.tensor
    x = tokens * model.hidden_size // (tensor if setup.sequence_parallel else 1)
    if setup.recompute is Recompute.BLOCK:
        return x * setup.element
    if setup.recompute is Recompute.SUBLAYER:
        return 2 * x * setup.element
    # Without sequence parallelism the gather is no copy: normed x is one tensor.
    normed = tokens * model.hidden_size
    attention = tokens * (2 * model.query_size + 2 * model.kv_size) // tensor
    feed_forward = tokens * (4 if model.activation.gated else 2) * model.ffn_hidden_size // tensor
    rows = 4 * (2 * tokens // (tensor if setup.sequence_parallel else 1) + tokens * model.num_heads // tensor)
    return (2 * x + 2 * normed + attention + feed_forward) * setup.element + rows


def _mesh(tensor: int) -> Mesh:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tensor)
    world: Any = dist.group.WORLD
    return Mesh(1, tensor, 1, 0, 0, 0, world, world, world, world, grid=None)  # type: ignore[arg-type]


def counted(model: ModelConfiguration, setup: Setup) -> int:
    """Bytes that one block really keeps."""
    mesh = _mesh(setup.tensor)
    dtype = {2: torch.bfloat16, 4: torch.float32}[setup.element]
    stage = StageSettings(
        model, mesh, torch.device("cpu"), dtype, sequence_parallel=setup.sequence_parallel, recompute=setup.recompute
    )
    blocks = [spec.build() for spec in layer_list(stage)[1:4]]
    return _kept(blocks, model, setup, dtype) - _kept(blocks[:2], model, setup, dtype)


def _kept(blocks: list[BlockLayer], model: ModelConfiguration, setup: Setup, dtype: torch.dtype) -> int:
    weights = {p.untyped_storage().data_ptr() for block in blocks for p in block.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    length = LENGTH // (setup.tensor if setup.sequence_parallel else 1)
    hidden = torch.randn(BATCH, length, model.hidden_size, dtype=dtype, requires_grad=True)
    context = BlockContext.build(model, LENGTH, hidden.device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for block in blocks:
            block.contexts = lambda *_: context
            hidden = block(hidden)
    return sum(size for size, _ in kept.values())


def measure() -> list[tuple[str, Setup, int, int]]:
    """(model, setup, counted, formula) for every combination that can be."""
    rows = []
    for (name, changes), tensor, sequence_parallel, recompute in product(
        MODELS.items(), (1, 2), (False, True), Recompute
    ):
        if sequence_parallel and tensor == 1:
            continue
        model, setup = configuration(**changes), Setup(tensor, sequence_parallel, recompute)
        rows.append((name, setup, counted(model, setup), formula(model, setup)))
    return rows


def main() -> int:
    """Print the table; status 1 where a count is more than 5 % from the formula."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(f"One block of width 256, {BATCH} x {LENGTH} tokens, fp32, in KiB for one process:\n")
    print(
        "| block | tensor | sequence parallel | recompute | counted | formula | ratio |\n|---|---|---|---|---|---|---|"
    )
    worst = 0.0
    for name, setup, found, expected in measure():
        worst = max(worst, abs(found / expected - 1))
        parallel = "on" if setup.sequence_parallel else "off"
        numbers = f"{found / 1024:.0f} | {expected / 1024:.0f} | {found / expected:.3f}"
        print(f"| {name} | {setup.tensor} | {parallel} | {setup.recompute.value} | {numbers} |")
    print(f"\nlargest difference {worst:.1%}")
    return 1 if worst > 0.05 else 0


if __name__ == "__main__":
    sys.exit(main())
