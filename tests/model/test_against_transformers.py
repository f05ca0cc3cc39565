"""The same weights in Hugging Face transformers' models: the same logits, and the same gradient of every parameter.

256 positions, because at position 0 alone no mistake of the rotary embedding shows.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from model.configuration import Activation, ModelConfiguration
from model.language_model import LanguageModel

LENGTH = 256
THEIR_NAMES = {
    "embedding.": "model.embed_tokens.",
    "final_norm.gain": "model.norm.weight",
    "head.": "lm_head.",
    "blocks.": "model.layers.",
    "attention_norm.gain": "input_layernorm.weight",
    "feed_forward_norm.gain": "post_attention_layernorm.weight",
    "attention.query_norm.gain": "self_attn.q_norm.weight",
    "attention.key_norm.gain": "self_attn.k_norm.weight",
    "attention.query.": "self_attn.q_proj.",
    "attention.key.": "self_attn.k_proj.",
    "attention.value.": "self_attn.v_proj.",
    "attention.output.": "self_attn.o_proj.",
    "feed_forward.gate.": "mlp.gate_proj.",
    "feed_forward.up.": "mlp.up_proj.",
    "feed_forward.down.": "mlp.down_proj.",
}


def their_name(name: str) -> str:
    for ours, theirs in THEIR_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def their_model(configuration: ModelConfiguration) -> PreTrainedModel:
    """The transformers model that this configuration describes, with weights of its own."""
    scaling = configuration.rope_scaling
    rope = {} if scaling is None else scaling.model_dump(mode="json", exclude_none=True)
    sizes: dict[str, Any] = {
        "vocab_size": configuration.vocab_size,
        "hidden_size": configuration.hidden_size,
        "intermediate_size": configuration.ffn_hidden_size,
        "num_hidden_layers": configuration.num_layers,
        "num_attention_heads": configuration.num_heads,
        "num_key_value_heads": configuration.num_kv_heads,
        "head_dim": configuration.head_dim,
        "rms_norm_eps": configuration.norm_eps,
        "tie_word_embeddings": configuration.tie_embeddings,
        "max_position_embeddings": rope.get("original_max_position_embeddings", LENGTH),
        "rope_parameters": {"rope_theta": configuration.rope_theta, "rope_type": "default", **rope},
    }
    if configuration.qk_norm:
        return Qwen3ForCausalLM(Qwen3Config(**sizes, hidden_act="silu"))
    if configuration.activation is Activation.SWIGLU:
        return LlamaForCausalLM(LlamaConfig(**sizes, hidden_act="silu"))
    if configuration.activation is Activation.GEGLU:
        return LlamaForCausalLM(LlamaConfig(**sizes, hidden_act="gelu"))
    return ArceeForCausalLM(ArceeConfig(**sizes, hidden_act=configuration.activation.value))


def assert_equal_models(model: LanguageModel) -> None:
    """Logits to 1e-5, and every parameter's gradient to 1e-4 of its largest element, on the same weights."""
    reference = their_model(model.configuration).float()
    mine = dict(model.named_parameters())
    theirs = dict(reference.named_parameters())
    assert {their_name(name) for name in mine} == set(theirs)
    with torch.no_grad():
        for name, parameter in mine.items():
            theirs[their_name(name)].copy_(parameter)
    tokens = torch.randint(0, model.configuration.vocabulary, (2, LENGTH + 1))
    logits, expected = model(tokens[:, :-1]), reference(tokens[:, :-1]).logits
    assert expected.std() > 0.3  # weights so small that everything is nearly 0 would prove nothing
    assert (logits - expected).abs().max() <= 1e-5
    for result in (logits, expected):
        F.cross_entropy(result.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for name, parameter in mine.items():
        gradient, right = parameter.grad, theirs[their_name(name)].grad
        assert right.abs().max() > 0, name
        assert (gradient - right).abs().max() <= 1e-4 * right.abs().max(), name


VARIANTS = {"llama": {"activation": "swiglu"}, "geglu": {"activation": "geglu"}, "gelu": {"activation": "gelu"}} | {
    "relu2": {"activation": "relu2"},
    "qwen3": {"activation": "swiglu", "qk_norm": True},
}


@pytest.mark.parametrize("tie_embeddings", [False, True], ids=["separate", "tied"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_equals_its_counterpart(
    lively: Callable[..., Any], variant: str, num_kv_heads: int, tie_embeddings: bool
) -> None:
    assert_equal_models(lively(**VARIANTS[variant], num_kv_heads=num_kv_heads, tie_embeddings=tie_embeddings))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
        | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_each_scaling_of_the_rotary_embedding_equals_its_counterpart(
    lively: Callable[..., Any], scaling: dict[str, Any]
) -> None:
    assert_equal_models(lively(activation="swiglu", head_dim=32, rope_theta=500.0, rope_scaling=scaling))


def test_heads_need_not_fill_the_hidden_width(lively: Callable[..., Any]) -> None:
    assert_equal_models(lively(activation="swiglu", head_dim=20))
