"""The whole model on one device."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_logits_have_the_shape_and_dtype_of_the_vocabulary_and_the_parameters(
    lively: Callable[..., Any], tokens: Tensor, tie_embeddings: bool
) -> None:
    model = lively(tie_embeddings=tie_embeddings)
    assert ("head.weight" in dict(model.named_parameters())) is not tie_embeddings
    assert model(tokens).shape == (2, 40, 97)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert model.to(dtype)(tokens).dtype == dtype


def test_it_begins_by_knowing_nothing(configure: Callable[..., Any], tokens: Tensor) -> None:
    from model.language_model import LanguageModel

    logits = LanguageModel(configure(num_layers=8))(tokens)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(97), abs=0.05)


@pytest.mark.parametrize("changes", [{}, {"norm": "layernorm"}, {"qk_norm": True}, {"activation": "relu2"}], ids=str)
def test_no_token_sees_a_later_one(lively: Callable[..., Any], tokens: Tensor, changes: dict[str, Any]) -> None:
    model = lively(**changes)
    altered = tokens.clone()
    altered[:, 25:] = (altered[:, 25:] + 1) % 97
    before, after = model(tokens), model(altered)
    assert torch.equal(before[:, :25], after[:, :25])
    assert ((before - after)[:, 25:] != 0).any(-1).all()


def test_tied_weights_gather_the_gradient_of_both_uses(lively: Callable[..., Any], tokens: Tensor) -> None:
    tied, separate = lively(tie_embeddings=True).double(), lively().double()
    separate.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight.detach()})
    for model in (tied, separate):
        model(tokens).square().mean().backward()
    both = separate.embedding.weight.grad + separate.head.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, both, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("document_ids", [False, True])
def test_bfloat16_is_close_to_float32(lively: Callable[..., Any], tokens: Tensor, document_ids: bool) -> None:
    model = lively(activation="swiglu", qk_norm=True)
    ids = torch.arange(40).expand(2, -1) // 15 if document_ids else None
    exact = model(tokens, document_ids=ids)
    rounded = model.bfloat16()(tokens, document_ids=ids)
    assert (rounded.float() - exact).abs().max() < 0.05 * exact.abs().max()


def test_the_forward_pass_never_asks_the_device_for_a_value(lively: Callable[..., Any], tokens: Tensor) -> None:
    # On the meta device there are no values: whatever would wait for one (item, a comparison, nonzero) raises.
    from model.dropout import DropoutKey

    model = lively(dropout=0.1, qk_norm=True, activation="geglu").to("meta")
    key = DropoutKey(1, torch.empty((), dtype=torch.int64, device="meta"), torch.empty(2, dtype=torch.int64).to("meta"))
    ids = torch.empty(2, 40, dtype=torch.int64, device="meta")
    assert model(tokens.to("meta"), document_ids=ids, dropout_key=key).shape == (2, 40, 97)
    assert model(tokens.to("meta"), dropout_key=key).shape == (2, 40, 97)
