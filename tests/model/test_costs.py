"""Parameter and FLOP counts: by hand, against the module itself, and against published sizes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.configuration import ModelConfiguration
from model.costs import flops_per_sequence, layer_costs, parameter_count, training_flops_per_token
from model.language_model import LanguageModel

GROUPED_SWIGLU = ModelConfiguration(
    hidden_size=8, num_layers=2, num_heads=4, num_kv_heads=2, ffn_hidden_size=24, activation="swiglu", vocab_size=10
)


def test_counts_worked_out_by_hand() -> None:
    # head_dim 8 / 4 = 2, so queries are 8 wide and keys and values 4.
    # Attention: query 8 x 8 = 64, key 8 x 4 = 32, value 32, output 8 x 8 = 64: 192.
    # Feed-forward: three matrices of 8 x 24 = 192: 576.   Gains: 2 x 8 = 16.   A block: 192 + 576 + 16 = 784.
    # Embedding 10 x 8 = 80, head 80, final norm 8.        In all 2 x 784 + 80 + 80 + 8 = 1736.
    assert parameter_count(GROUPED_SWIGLU) == 1736
    costs = layer_costs(GROUPED_SWIGLU, 16)
    assert (costs.embedding.parameters, costs.block.parameters, costs.head.parameters) == (80, 784, 88)

    # Over a sequence of 16 tokens, 2 operations a parameter of a matrix and a token:
    # a block's matrices 2 x 16 x (192 + 576) = 24,576; the head 2 x 16 x 80 = 2,560; the embedding nothing.
    # Scores of all 4 heads: 4 x 2 x 16 x 16 x 2 (m = n = 16, k = head_dim) = 4,096; mixing the same; both 8,192.
    # Half of that square is computed: 4,096.             A block: 24,576 + 4,096 = 28,672.
    # Forward: 2 x 28,672 + 2,560 = 59,904.               Training: 3 x 59,904 / 16 = 11,232 a token.
    assert (costs.embedding.flops, costs.block.flops, costs.head.flops) == (0, 28_672, 2_560)
    assert flops_per_sequence(GROUPED_SWIGLU, 16) == 59_904
    assert training_flops_per_token(GROUPED_SWIGLU, 16) == 11_232


@pytest.mark.parametrize("activation", ["gelu", "swiglu", "geglu", "relu2"])
@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_parameters_are_those_of_the_module(
    configure: Callable[..., Any], activation: str, tie_embeddings: bool, qk_norm: bool
) -> None:
    configuration = configure(activation=activation, tie_embeddings=tie_embeddings, qk_norm=qk_norm, head_dim=16)
    with torch.device("meta"):
        model = LanguageModel(configuration)
    costs = layer_costs(configuration, 1)
    assert parameter_count(configuration) == sum(parameter.numel() for parameter in model.parameters())
    assert costs.embedding.parameters == model.embedding.weight.numel()
    for block in model.blocks:
        assert costs.block.parameters == sum(parameter.numel() for parameter in block.parameters())


@pytest.mark.parametrize("changes", [{}, {"activation": "swiglu"}, {"num_kv_heads": 1}, {"tie_embeddings": True}])
def test_flops_are_those_that_torch_counts_but_for_the_half_of_attention(
    configure: Callable[..., Any], changes: dict[str, Any]
) -> None:
    configuration = configure(head_dim=16, **changes)
    model, length, batch = LanguageModel(configuration), 32, 2
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens)
    square = configuration.num_layers * 4 * length**2 * configuration.query_size
    assert batch * (flops_per_sequence(configuration, length) + square // 2) == counter.get_total_flops()


@pytest.mark.parametrize(
    ("name", "published", "sizes"),
    [
        ("Llama-2 7B", 6_738_415_616, {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "vocab_size": 32000}
         | {"ffn_hidden_size": 11008}),
        ("Llama-2 70B", 68_976_648_192, {"hidden_size": 8192, "num_layers": 80, "num_heads": 64, "vocab_size": 32000}
         | {"ffn_hidden_size": 28672, "num_kv_heads": 8}),
        ("Llama-3 8B", 8_030_261_248, {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "vocab_size": 128256}
         | {"ffn_hidden_size": 14336, "num_kv_heads": 8}),
    ],
)  # fmt: skip
def test_published_sizes(name: str, published: int, sizes: dict[str, Any]) -> None:
    assert parameter_count(ModelConfiguration(activation="swiglu", **sizes)) == published


def test_no_setting_of_a_run_counts_as_work(configure: Callable[..., Any]) -> None:
    plain = flops_per_sequence(configure(), 64)
    assert flops_per_sequence(configure(dropout=0.1, z_loss=1e-4, tie_embeddings=True, norm="layernorm"), 64) == plain
