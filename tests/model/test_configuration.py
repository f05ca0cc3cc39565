"""The model section: defaults that follow from others, and what is refused, in words that help."""

from typing import Any

import pytest
from pydantic import ValidationError

from model.configuration import Activation, ModelConfiguration, RopeScaling

SIZES: dict[str, Any] = {"hidden_size": 64, "num_layers": 2, "num_heads": 8}


def test_defaults_follow_from_the_sizes() -> None:
    configuration = ModelConfiguration(**SIZES)
    assert (configuration.num_kv_heads, configuration.head_dim, configuration.ffn_hidden_size) == (8, 8, 256)
    assert (configuration.activation, configuration.norm) == ("gelu", "rmsnorm")


def test_null_is_the_default_and_a_dump_reads_back_equal() -> None:
    configuration = ModelConfiguration(**SIZES, num_kv_heads=None, head_dim=None, ffn_hidden_size=None)
    assert configuration == ModelConfiguration(**SIZES)
    assert ModelConfiguration(**configuration.model_dump(mode="json")) == configuration


def test_head_dim_may_be_given_apart_from_the_width() -> None:
    configuration = ModelConfiguration(hidden_size=50, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16)
    assert (configuration.query_size, configuration.kv_size) == (64, 32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 7}, ["hidden_size is 64", "divisible by num_heads", "7"]),
        ({"num_kv_heads": 3}, ["num_heads is 8", "divisible by num_kv_heads", "3"]),
        ({"head_dim": 3}, ["head_dim is 3", "even"]),
        ({"num_layers": 0}, ["num_layers", "greater than 0"]),
        ({"num_layers": True}, ["num_layers", "valid integer"]),
        ({"num_layers": 2.0}, ["num_layers", "valid integer"]),
        ({"dropout": 1.0}, ["dropout", "less than 1"]),
        ({"dropout": float("nan")}, ["dropout", "finite"]),
        ({"activation": "silu"}, ["activation", "'gelu', 'swiglu', 'geglu' or 'relu2'"]),
        ({"norm": "batchnorm"}, ["norm", "'rmsnorm' or 'layernorm'"]),
        ({"hidden": 64}, ["hidden", "Extra inputs"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, ["rope_type", "'linear', 'dynamic'"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, ["factor", "greater than or equal to 1"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 1}}, ["linear has no use for beta_fast"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, ["yarn needs original_max_position_embeddings"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, ["llama3 needs high_freq_factor, low_freq_factor"]),
    ],
)
def test_what_cannot_be_built_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        ModelConfiguration(**{**SIZES, **changes})
    assert caught.value.error_count() == 1
    for word in words:
        assert word in str(caught.value)


def test_it_never_changes() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        ModelConfiguration(**SIZES).hidden_size = 3  # type: ignore[misc]


def test_the_vocabulary_must_be_known_by_the_time_it_is_needed() -> None:
    with pytest.raises(ValueError, match=r"model\.vocab_size"):
        _ = ModelConfiguration(**SIZES).vocabulary


def test_gated_activations_are_those_with_three_matrices() -> None:
    assert {activation for activation in Activation if activation.gated} == {"swiglu", "geglu"}


def test_llama3_bounds_must_leave_room_for_the_ramp() -> None:
    with pytest.raises(ValidationError, match="low_freq_factor is 4.0 and must be below"):
        RopeScaling(
            rope_type="llama3", factor=8, original_max_position_embeddings=64, low_freq_factor=4, high_freq_factor=4
        )
