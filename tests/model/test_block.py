"""The block: two residual branches, three hooks, and one compilation for all blocks and steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.block import Block
from model.context import BlockContext
from model.dropout import DropoutKey
from model.feed_forward import FeedForward


@pytest.fixture
def block_and_input(configure: Callable[..., Any]) -> tuple[Block, Tensor, BlockContext]:
    configuration = configure(activation="swiglu")
    x = torch.randn(2, 12, 48)
    return Block(configuration, 1), x, BlockContext.build(configuration, 12, x.device)


def test_a_block_adds_what_its_branches_say(block_and_input: tuple[Block, Tensor, BlockContext]) -> None:
    block, x, context = block_and_input
    middle = x + block.attention(block.attention_norm(x), context)
    expected = middle + block.feed_forward(block.feed_forward_norm(middle))
    assert torch.equal(block(x, context), expected)


def test_hooks_are_called_where_processes_must_meet(block_and_input: tuple[Block, Tensor, BlockContext]) -> None:
    block, x, context = block_and_input
    calls: list[str] = []

    def noted(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Any) -> Tensor:
            calls.append(name)
            result = function(*arguments)
            calls.append(f"{name} done")
            return result

        return call

    for name in ("enter_branch", "leave_branch", "run_branch"):
        setattr(block, name, noted(name, getattr(block, name)))
    for name in ("attention_norm", "attention", "feed_forward_norm", "feed_forward"):
        module = getattr(block, name)
        module.forward = noted(name, module.forward)
    block(x, context)
    in_branch = [
        step
        for which in ("attention", "feed_forward")
        for name in ("run_branch", f"{which}_norm", "enter_branch", which, "leave_branch")
        for step in ([name] if name == "run_branch" else [name, f"{name} done"])
    ]
    for which in ("attention", "feed_forward"):
        in_branch.insert(in_branch.index(f"{which} done") + 1, "run_branch done")
    assert calls == in_branch


def test_partial_sums_meet_in_leave_branch(block_and_input: tuple[Block, Tensor, BlockContext]) -> None:
    block, x, context = block_and_input
    expected = block(x, context)
    with torch.no_grad():
        for weight in (block.attention.output.weight, block.feed_forward.down.weight):
            weight /= 4
    block.leave_branch = lambda partial: 4 * partial  # as if three other processes had given the same
    torch.testing.assert_close(block(x, context), expected)


def test_hooks_are_neither_parameters_nor_state(block_and_input: tuple[Block, Tensor, BlockContext]) -> None:
    block = block_and_input[0]
    assert not list(block.buffers())
    assert all(name.endswith((".weight", ".gain")) for name in block.state_dict())


@pytest.mark.parametrize("activation", ["gelu", "swiglu", "geglu", "relu2"])
def test_the_results_of_slices_of_the_hidden_units_sum_up_to_the_whole(
    configure: Callable[..., Any], activation: str
) -> None:
    whole = FeedForward(configure(activation=activation)).double()
    x = torch.randn(2, 5, 48, dtype=torch.float64)
    gate = {"swiglu": F.silu, "geglu": F.gelu}.get(activation)
    inner = whole.up(x)
    inner = gate(whole.gate(x)) * inner if gate else F.gelu(inner) if activation == "gelu" else inner.clamp(min=0) ** 2
    torch.testing.assert_close(whole(x), whole.down(inner))

    total = torch.zeros_like(x)
    for part in range(4):
        piece = FeedForward(configure(activation=activation))
        for name, dimension in (("up", 0), ("gate", 0), ("down", 1)):
            if (layer := getattr(whole, name)) is not None:
                getattr(piece, name).weight = torch.nn.Parameter(layer.weight.detach().chunk(4, dimension)[part])
        total += piece(x)
    torch.testing.assert_close(total, whole(x), rtol=1e-12, atol=1e-12)


def test_blocks_compile_once_for_all_of_them_and_all_steps(lively: Callable[..., Any], tokens: Tensor) -> None:
    # "fullgraph" makes every break of the graph an error. The backend runs the graph as it was traced: no compiler.
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    changes: dict[str, Any] = {"num_layers": 12, "activation": "swiglu", "qk_norm": True, "dropout": 0.2}
    plain, compiled = lively(**changes), lively(**changes)
    for block in compiled.blocks:
        block.compile(backend=backend, fullgraph=True)
    for step in range(1, 5):
        key = DropoutKey(3, step, torch.tensor([2 * step, 2 * step + 1]))
        expected, result = (model(tokens, dropout_key=key) for model in (plain, compiled))
        assert torch.equal(result, expected)
        expected.square().mean().backward()
        result.square().mean().backward()
    assert len(graphs) == 1
    for (name, a), b in zip(plain.named_parameters(), compiled.named_parameters(), strict=True):
        assert torch.equal(a.grad, b[1].grad), name
