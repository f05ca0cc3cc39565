"""Attention: causal, grouped, within documents, in slices of its heads, and step by step with a cache."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from model.attention import Attention, causal_attention
from model.context import BlockContext, KeyValueCache, document_mask, flex_document_mask

DOCUMENTS = torch.tensor([[0] * 13 + [1] * 17 + [2] * 10, [5] * 40])


# Compiled it needs a GPU, and on the CPU it has no backward: here its forward pass is checked, as it is.
not_compiled = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def by_hand(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None) -> Tensor:
    """The definition, one query at a time; [b, s, heads, head_dim]."""
    result = torch.empty_like(query)
    group = query.shape[2] // key.shape[2]
    for b in range(query.shape[0]):
        for head in range(query.shape[2]):
            for place in range(query.shape[1]):
                seen = torch.arange(place + 1)
                if documents is not None:
                    seen = seen[documents[b, : place + 1] == documents[b, place]]
                scores = key[b, seen, head // group] @ query[b, place, head] / query.shape[3] ** 0.5
                result[b, place, head] = scores.softmax(0) @ value[b, seen, head // group]
    return result


def random_heads(heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(2, 40, n, 8, dtype=torch.float64) for n in (heads, kv_heads, kv_heads))  # type: ignore


def context(documents: Tensor | None = None, cache: KeyValueCache | None = None) -> BlockContext:
    """A context for what needs no rotary tables."""
    return BlockContext((torch.empty(0), torch.empty(0)), documents, cache=cache)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
def test_attention_is_its_definition(kv_heads: int, documents: Tensor | None) -> None:
    query, key, value = random_heads(4, kv_heads)
    result = causal_attention(query, key, value, context(documents))
    torch.testing.assert_close(result, by_hand(query, key, value, documents), rtol=1e-12, atol=1e-12)


def test_the_last_of_many_positions_see_all_before_them() -> None:
    query, key, value = random_heads(4, 2)
    whole = causal_attention(query, key, value, context())
    for new in (1, 7):
        part = causal_attention(query[:, -new:], key, value, context())
        torch.testing.assert_close(part, whole[:, -new:], rtol=1e-12, atol=1e-12)


@not_compiled
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_document_mask_of_a_gpu_gives_what_the_mask_of_the_cpu_gives(kv_heads: int) -> None:
    query, key, value = (t.float() for t in random_heads(4, kv_heads))
    plain, flexible = context(DOCUMENTS), context(DOCUMENTS)
    flexible.mask = flex_document_mask(DOCUMENTS, compiled=False)
    results = [causal_attention(query, key, value, setting) for setting in (flexible, plain)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@not_compiled
def test_the_document_mask_of_a_gpu_isolates_too() -> None:
    query, key, value = (t.float() for t in random_heads(4, 2))
    flexible = context(DOCUMENTS)
    flexible.mask = flex_document_mask(DOCUMENTS, compiled=False)
    before = causal_attention(query, key, value, flexible)
    key[0, :13] += 1
    value[0, :13] -= 1
    after = causal_attention(query, key, value, flexible)
    assert torch.equal(before[0, 13:], after[0, 13:])
    assert not torch.equal(before[0, :13], after[0, :13])


def test_the_mask_is_made_once_for_all_blocks(lively: Callable[..., Any], tokens: Tensor) -> None:
    seen: list[Any] = []
    model = lively()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1].mask))
    model(tokens, document_ids=DOCUMENTS)
    assert len(seen) == 3
    assert seen[0] is seen[1] is seen[2]
    assert torch.equal(seen[0], document_mask(DOCUMENTS))


@pytest.mark.parametrize("part", [0, 1])
def test_changing_one_document_leaves_the_logits_of_the_other_bit_equal(
    lively: Callable[..., Any], tokens: Tensor, part: int
) -> None:
    model = lively(qk_norm=True)
    ids = torch.tensor([[0] * 18 + [1] * 22]).expand(2, -1)
    changed, other = (slice(0, 18), slice(18, 40)) if part == 0 else (slice(18, 40), slice(0, 18))
    altered = tokens.clone()
    altered[:, changed] = (altered[:, changed] + 1) % 97
    isolated = [model(t, document_ids=ids) for t in (tokens, altered)]
    assert torch.equal(isolated[0][:, other], isolated[1][:, other])
    assert not torch.equal(isolated[0][:, changed], isolated[1][:, changed])
    if part == 0:  # and without bounds the change does reach the tokens after it
        open_bounds = [model(t) for t in (tokens, altered)]
        assert ((open_bounds[0] - open_bounds[1])[:, other] != 0).any(-1).all()


def test_positions_of_a_packed_document_are_those_it_has_alone(configure: Callable[..., Any]) -> None:
    # Attention sees differences of positions only, so logits would hardly tell.
    device = torch.device("cpu")
    packed = BlockContext.build(configure(), 40, device, document_ids=DOCUMENTS).rotary
    for first, last in ((0, 13), (13, 30), (30, 40)):
        alone = BlockContext.build(configure(), last - first, device).rotary
        for table, expected in zip(packed, alone, strict=True):
            assert torch.equal(table[0, first:last], expected)


def test_a_packed_document_is_what_it_is_alone(lively: Callable[..., Any], tokens: Tensor) -> None:
    model = lively()
    packed = model(tokens, document_ids=DOCUMENTS)
    for b, first, last in ((0, 0, 13), (0, 13, 30), (0, 30, 40), (1, 0, 40)):
        alone = model(tokens[b : b + 1, first:last])
        torch.testing.assert_close(packed[b : b + 1, first:last], alone, rtol=0, atol=2e-6)


def test_gradients_do_not_cross_documents(lively: Callable[..., Any], tokens: Tensor) -> None:
    model = lively()
    embedded: list[Tensor] = []

    def keep(_module: Any, _arguments: Any, result: Tensor) -> None:
        result.retain_grad()
        embedded.append(result)

    model.embedding.register_forward_hook(keep)
    model(tokens, document_ids=DOCUMENTS)[0, 20:30].square().sum().backward()
    reached = embedded[0].grad.abs().sum(-1) > 0
    assert reached[0].tolist() == [13 <= place < 30 for place in range(40)]
    assert not reached[1].any()


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_results_of_slices_of_the_heads_sum_up_to_the_whole(
    configure: Callable[..., Any], processes: int, qk_norm: bool
) -> None:
    configuration = configure(num_heads=8, num_kv_heads=4, head_dim=8, qk_norm=qk_norm)
    whole = Attention(configuration).double()
    x = torch.randn(2, 40, 48, dtype=torch.float64, requires_grad=True)
    setting = BlockContext.build(configuration, 40, x.device)
    expected = whole(x, setting)
    parts = [slice_of_heads(whole, part, processes) for part in range(processes)]
    partial = [part(x, setting) for part in parts]
    torch.testing.assert_close(sum(partial), expected, rtol=1e-12, atol=1e-12)

    expected.square().sum().backward()
    sum(partial).square().sum().backward()
    for name, dimension in (("query", 0), ("key", 0), ("value", 0), ("output", 1)):
        joined = torch.cat([getattr(part, name).weight.grad for part in parts], dimension)
        torch.testing.assert_close(joined, getattr(whole, name).weight.grad, rtol=1e-11, atol=1e-11)


def slice_of_heads(whole: Attention, part: int, parts: int) -> Attention:
    """What one of several processes holds: the same code over the rows (the columns of output) of some heads."""
    attention = copy.deepcopy(whole)
    for name, dimension in (("query", 0), ("key", 0), ("value", 0), ("output", 1)):
        weight = getattr(whole, name).weight
        getattr(attention, name).weight = torch.nn.Parameter(weight.detach().chunk(parts, dimension)[part].clone())
    return attention


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("steps", [[1] * 40, [25] + [1] * 15, [10, 10, 20], [39, 1]], ids=str)
def test_decoding_step_by_step_is_the_whole_forward_pass(
    lively: Callable[..., Any], tokens: Tensor, kv_heads: int, steps: list[int]
) -> None:
    model = lively(num_kv_heads=kv_heads, qk_norm=True).eval()
    with torch.inference_mode():
        whole = model(tokens)
        cache = KeyValueCache(capacity=40)
        pieces = [model(piece, cache=cache) for piece in tokens.split(steps, 1)]
    assert cache.length == 40
    assert (torch.cat(pieces, 1) - whole).abs().max() < 1e-5


def test_a_dynamic_base_is_that_of_the_capacity(lively: Callable[..., Any], tokens: Tensor) -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 10}
    model = lively(rope_scaling=scaling).eval()
    cache = KeyValueCache(capacity=40)
    with torch.inference_mode():
        pieces = [model(piece, cache=cache) for piece in tokens.split([5, 35], 1)]
        assert (torch.cat(pieces, 1) - model(tokens)).abs().max() < 1e-5


def test_a_cache_that_is_full_says_so(lively: Callable[..., Any], tokens: Tensor) -> None:
    cache = KeyValueCache(capacity=39)
    with pytest.raises(ValueError, match="room for 39 tokens and 40 are needed"):
        lively().eval()(tokens, cache=cache)


def test_a_cache_and_documents_are_refused_together(lively: Callable[..., Any], tokens: Tensor) -> None:
    with pytest.raises(ValueError, match="cannot be used together"):
        lively()(tokens, document_ids=DOCUMENTS, cache=KeyValueCache(40))
