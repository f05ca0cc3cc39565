"""Dropout masks: the right rate, no relation between any two, and the same whoever draws them."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from model.dropout import DropoutKey, Site, dropout

LENGTH, CHANNELS = 192, 256


def kept(
    probability: float = 0.5,
    seed: int = 1,
    step: int | torch.Tensor = 1,
    samples: tuple[int, ...] = (0,),
    site: Site = Site.ATTENTION,
    block: int | torch.Tensor = 0,
    offset: int = 0,
    length: int = LENGTH,
    channels: int = CHANNELS,
) -> torch.Tensor:
    """True where an element is kept, [samples, length, channels]."""
    key = DropoutKey(seed, step, torch.tensor(samples), offset)
    return dropout(torch.ones(len(samples), length, channels), probability, key, site, block) != 0


def deviations(agreements: torch.Tensor, expected: float) -> float:
    """How many standard deviations the mean of independent yes-or-no answers is off."""
    return abs(agreements.double().mean().item() - expected) / math.sqrt(expected * (1 - expected) / agreements.numel())


@pytest.mark.parametrize("probability", [0.05, 0.1, 0.5, 0.9])
def test_the_rate_is_right_over_all_and_in_every_row_and_channel(probability: float) -> None:
    mask = kept(probability, samples=tuple(range(32)))
    assert deviations(mask, 1 - probability) < 4
    for dimensions in ((0, 1), (0, 2), (1, 2), (2,)):
        rates = mask.double().mean(dimensions).flatten()
        expected = math.sqrt(probability * (1 - probability) * rates.numel() / mask.numel())
        # As wide as chance spreads them, neither wider (a row all kept) nor narrower (a pattern that repeats).
        assert (rates - (1 - probability)).abs().max() < 7 * expected
        assert rates.std().item() == pytest.approx(expected, rel=6 / math.sqrt(rates.numel()))


def test_masks_of_different_seeds_steps_samples_blocks_and_sites_are_unrelated() -> None:
    masks = {
        (seed, step, sample, block, site): kept(seed=seed, step=step, samples=(sample,), block=block, site=site)
        for seed, step, sample, block, site in itertools.product((1, 2), (1, 2), (0, 1, 2**32), (0, 1), Site)
    }
    assert len(masks) == 72
    pairs = list(itertools.combinations(masks.values(), 2))
    worst = max(deviations(a == b, 0.5) for a, b in pairs)
    assert worst < 5  # the largest of 2,556 pairs; chance gives about 3.6
    spread = [((a == b).double().mean().item() - 0.5) * 2 * math.sqrt(LENGTH * CHANNELS) for a, b in pairs]
    assert torch.tensor(spread).std().item() == pytest.approx(1, abs=0.1)


def test_rows_and_channels_are_unrelated_alone_and_in_fours() -> None:
    mask = kept(samples=tuple(range(8)))
    for shift in (1, 2, 3, 4, 8, 16, 64, 128):
        assert deviations(mask == mask.roll(shift, 1), 0.5) < 5
        assert deviations(mask == mask.roll(shift, 2), 0.5) < 5
        # The corners of a rectangle: where row and channel were only added up, they would predict each other.
        corners = mask ^ mask.roll(shift, 1) ^ mask.roll(shift, 2) ^ mask.roll((shift, shift), (1, 2))
        assert deviations(corners, 0.5) < 5


def test_every_pair_of_channels_and_of_rows_is_unrelated() -> None:
    mask = kept(samples=tuple(range(8)))[..., :128]
    for matrix in (mask.flatten(0, 1), mask.flatten(0, 1).T):
        signs = matrix.double() * 2 - 1
        correlations = signs.T @ signs / math.sqrt(signs.shape[0])
        correlations.fill_diagonal_(0)
        assert correlations.abs().max() < 6
        assert correlations.std().item() == pytest.approx(1, abs=0.02)


def test_a_slice_of_the_sequence_draws_the_slice_of_the_mask() -> None:
    whole = kept(0.1, samples=(3, 8), length=64)
    parts = [kept(0.1, samples=(3, 8), length=16, offset=offset) for offset in (0, 16, 32, 48)]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_samples_draw_the_same_mask_in_any_micro_batch() -> None:
    together = kept(samples=(5, 6, 7))
    assert torch.equal(kept(samples=(6,))[0], together[1])
    assert torch.equal(kept(samples=(7, 5)), together[[2, 0]])


def test_the_step_and_the_block_may_be_tensors() -> None:
    plain = kept(step=12, block=3)
    assert torch.equal(kept(step=torch.tensor(12), block=torch.tensor(3)), plain)
    assert torch.equal(kept(step=torch.tensor([12], dtype=torch.int32), block=3), plain)


def test_the_mask_of_a_key_never_changes() -> None:
    # A run that is resumed by a later version must go on with the masks that it began with.
    assert kept(0.5, 1234, 77, (10**10,), Site.FEED_FORWARD, 5, 100, 2, 16)[0].int().tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 0, 1, 1, 1, 1, 1],
        [0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0],
    ]


def test_values_and_gradients_are_scaled_by_what_is_kept() -> None:
    x = torch.randn(2, 8, 64, requires_grad=True)
    key = DropoutKey(1, 1, torch.tensor([0, 1]))
    result = dropout(x, 0.25, key, Site.EMBEDDING)
    mask = kept(0.25, samples=(0, 1), site=Site.EMBEDDING, length=8, channels=64)
    torch.testing.assert_close(result, x * mask / 0.75)
    upstream = torch.randn_like(x)
    result.backward(upstream)
    torch.testing.assert_close(x.grad, upstream * mask / 0.75)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_mask_does_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    key = DropoutKey(1, 1, torch.tensor([0]))
    result = dropout(torch.ones(1, LENGTH, CHANNELS, dtype=dtype), 0.5, key, Site.ATTENTION)
    assert result.dtype == dtype
    assert torch.equal(result != 0, kept())


def test_no_dropout_is_the_same_tensor_and_needs_no_key() -> None:
    x = torch.randn(1, 2, 3)
    assert dropout(x, 0.0, None, Site.EMBEDDING) is x


def test_training_without_a_key_is_an_error_and_evaluation_needs_none(
    lively: Callable[..., Any], tokens: torch.Tensor
) -> None:
    model, plain = lively(dropout=0.1), lively()
    with pytest.raises(ValueError, match="dropout is 0.1, so a forward pass in training needs a dropout key"):
        model(tokens)
    assert torch.equal(model.eval()(tokens), plain(tokens))


def test_a_key_of_other_samples_is_an_error() -> None:
    key = DropoutKey(1, 1, torch.tensor([0]))
    with pytest.raises(ValueError, match="of 1 samples and the batch has 2"):
        dropout(torch.ones(2, 3, 4), 0.5, key, Site.EMBEDDING)


def test_the_model_drops_at_three_sites(lively: Callable[..., Any], tokens: torch.Tensor) -> None:
    model = lively(dropout=0.5, num_layers=1)
    key = DropoutKey(1, 1, torch.tensor([4, 9]))
    inputs: list[torch.Tensor] = []
    block = model.blocks[0]
    for module in (block, block.feed_forward_norm, model.final_norm):
        module.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    branches: list[torch.Tensor] = []
    block.leave_branch = lambda x: branches.append(x) or x
    model(tokens, dropout_key=key)
    embedded, middle, end = inputs
    assert torch.equal(embedded, dropout(model.embedding(tokens), 0.5, key, Site.EMBEDDING))
    assert torch.equal(middle, embedded + dropout(branches[0], 0.5, key, Site.ATTENTION, 0))
    assert torch.equal(end, middle + dropout(branches[1], 0.5, key, Site.FEED_FORWARD, 0))


def test_recomputation_draws_the_same_masks(lively: Callable[..., Any], tokens: torch.Tensor) -> None:
    key = DropoutKey(1, 1, torch.tensor([4, 9]))
    plain, again = lively(dropout=0.3), lively(dropout=0.3)
    for block in again.blocks:
        forward = block.forward
        block.forward = lambda x, context, forward=forward: torch.utils.checkpoint.checkpoint(
            forward, x, context, use_reentrant=False, preserve_rng_state=False
        )
    for model in (plain, again):
        model(tokens, dropout_key=key).square().mean().backward()
    for (name, a), b in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
