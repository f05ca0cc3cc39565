"""Rotary tables: against transformers for every scaling, in float32 whatever the model's dtype is."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model.configuration import RopeScaling
from model.context import BlockContext, positions_in_documents
from model.rotary import apply_rotary, rotary_tables

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.7,
        "truncate": False,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.1},
    dict(rope_type="llama3", **LLAMA3),
    dict(rope_type="llama3", **{**LLAMA3, "original_max_position_embeddings": 8192}),
]


def transformers_tables(scaling: dict[str, Any], head_dim: int, theta: float, length: int) -> tuple[Any, Any]:
    """The tables that transformers' Llama computes, [length, head_dim]."""
    configuration = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        # What transformers compares the sequence with under "dynamic" is the model's own length.
        max_position_embeddings=scaling.get("original_max_position_embeddings", 64),
        rope_parameters={"rope_theta": theta, **scaling},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](configuration, torch.device("cpu"), seq_len=length)
    angles = torch.arange(length)[:, None].float() * frequencies
    angles = torch.cat((angles, angles), -1)
    return angles.cos() * factor, angles.sin() * factor


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_tables_are_those_of_transformers(scaling: dict[str, Any], head_dim: int, theta: float) -> None:
    length = 300
    cos, sin = rotary_tables(torch.arange(length), head_dim, theta, RopeScaling(**scaling))
    expected_cos, expected_sin = transformers_tables(scaling, head_dim, theta, length)
    assert torch.equal(cos, expected_cos)
    assert torch.equal(sin[:, head_dim // 2 :], expected_sin[:, head_dim // 2 :])
    assert torch.equal(sin[:, : head_dim // 2], -expected_sin[:, : head_dim // 2])


def test_every_scaling_changes_the_tables() -> None:
    plain = rotary_tables(torch.arange(300), 32, 10000.0)[0]
    changed = [rotary_tables(torch.arange(300), 32, 10000.0, RopeScaling(**scaling))[0] for scaling in SCALINGS]
    same = [scaling for scaling, cos in zip(SCALINGS, changed, strict=True) if torch.allclose(cos, plain, atol=1e-4)]
    # A dynamic base starts to grow at the original length, and yarn with factor 1 stretches nothing.
    assert same == [SCALINGS[2], SCALINGS[5]]


def test_dynamic_scaling_goes_by_the_length_of_the_sequence_and_not_by_the_rows_asked_for() -> None:
    scaling = RopeScaling(rope_type="dynamic", factor=2.0, original_max_position_embeddings=64)
    whole = rotary_tables(torch.arange(256), 32, 10000.0, scaling)
    part = rotary_tables(torch.arange(100, 110), 32, 10000.0, scaling, length=256)
    assert torch.equal(part[0], whole[0][100:110])


def test_float32_angles_are_right_at_long_range() -> None:
    cos, _ = rotary_tables(torch.arange(8192), 32, 10000.0)
    exponents = torch.arange(0, 32, 2, dtype=torch.float64) / 32
    exact = (torch.arange(8192, dtype=torch.float64)[:, None] * 10000.0**-exponents).cos()
    assert (cos[:, :16] - exact).abs().max() < 1e-3
    # Reported elsewhere: in half precision this angle was 1045 where it is 1044.27.
    assert cos[1857, 1].item() == pytest.approx(math.cos(1857 * 10000 ** (-2 / 32)), abs=1e-4)


def test_casting_the_model_leaves_the_tables_alone(lively: Callable[..., Any]) -> None:
    seen: list[BlockContext] = []
    model = lively(num_layers=1, hidden_size=128, num_heads=4)
    model.blocks[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1]))
    tokens = torch.zeros(1, 8192, dtype=torch.int64)[:, :600]
    model(tokens)
    model.bfloat16()(tokens)
    assert not list(model.buffers())
    for before, after in zip(seen[0].rotary, seen[1].rotary, strict=True):
        assert after.dtype == torch.float32
        assert torch.equal(before, after)
        assert not torch.equal(after[256], after[257])


def test_rounding_the_tables_once_is_all_that_bfloat16_costs() -> None:
    cos, sin = rotary_tables(torch.arange(8192), 32, 10000.0)
    for table in (cos, sin):
        assert (table.bfloat16().float() - table).abs().max() < 4e-3
        assert not torch.equal(table[256].bfloat16(), table[257].bfloat16())
    # And apply_rotary does round them once: a unit vector turns into a row of the tables.
    x = torch.zeros(1, 8192, 1, 32, dtype=torch.bfloat16)
    x[..., :16] = 1
    turned = apply_rotary(x, cos, sin)[0, :, 0]
    assert torch.equal(turned, torch.cat((cos[:, :16], sin[:, 16:]), -1).bfloat16())


def test_pairs_are_half_a_head_apart() -> None:
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    cos, sin = rotary_tables(torch.arange(5), 8, 100.0)
    turned = apply_rotary(x, cos, sin)
    for position in range(5):
        for pair in range(4):
            angle = position * 100.0 ** (-pair / 4)
            a, b = x[:, position, :, pair], x[:, position, :, pair + 4]
            torch.testing.assert_close(
                turned[:, position, :, pair], a * math.cos(angle) - b * math.sin(angle), atol=1e-6, rtol=0
            )
            torch.testing.assert_close(
                turned[:, position, :, pair + 4], b * math.cos(angle) + a * math.sin(angle), atol=1e-6, rtol=0
            )


def test_positions_restart_with_each_document() -> None:
    ids = torch.tensor([[4, 4, 4, 9, 9, 2, 4, 4], [1, 1, 1, 1, 1, 1, 1, 1], [1, 2, 3, 4, 5, 6, 7, 1]])
    expected = [[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7], [0] * 8]
    assert positions_in_documents(ids).tolist() == expected


def test_tables_of_evaluation_do_not_poison_training(lively: Callable[..., Any], tokens: torch.Tensor) -> None:
    model = lively()
    with torch.inference_mode():
        model(tokens)
    model(tokens).sum().backward()
