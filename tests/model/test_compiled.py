"""What a compiler makes of the model is the model: `precision.compile`, and the document mask of a GPU."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

import model.attention
from model.attention import causal_attention
from model.context import BlockContext, flex_document_mask
from model.dropout import DropoutKey

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU"),
]


def test_compiled_blocks_give_the_same_loss_and_gradients(lively: Callable[..., Any], tokens: Tensor) -> None:
    torch._dynamo.reset()
    changes: dict[str, Any] = {"activation": "swiglu", "qk_norm": True, "dropout": 0.2}
    plain, compiled = lively(**changes), lively(**changes)
    for block in compiled.blocks:
        block.compile(fullgraph=True)
    for step in (1, 2):
        key = DropoutKey(3, step, torch.tensor([2 * step, 2 * step + 1]))
        expected, result = (model(tokens, dropout_key=key) for model in (plain, compiled))
        # A single element dropped otherwise would be off by far more.
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
        expected.square().mean().backward()
        result.square().mean().backward()
    for (name, a), b in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() <= 1e-5 * a.grad.abs().max(), name


def test_document_masks_compile_once_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(model.attention, "flex_attention", torch.compile(flex_attention))
    query, key, value = (torch.randn(2, 256, heads, 32) for heads in (4, 2, 2))
    graphs = []
    for size in (40, 50, 77):
        ids = torch.arange(256).expand(2, 256) // size
        plain = BlockContext((query, query), ids)
        flexible = BlockContext((query, query), ids)
        flexible.mask = flex_document_mask(ids, compiled=True)
        results = [causal_attention(query, key, value, context) for context in (flexible, plain)]
        torch.testing.assert_close(*results, rtol=1e-5, atol=2e-6)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1]
