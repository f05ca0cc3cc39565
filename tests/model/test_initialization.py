"""Initial values: the same bits in every layout, different everywhere else, with the deviations that are promised."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from model.configuration import ModelConfiguration
from model.initialization import ROWS, initial_slice, initialize, parameter_shapes
from model.language_model import LanguageModel

NAME = "blocks.1.feed_forward.down.weight"
SHAPE = (700, 33)  # three blocks, the last of them short


@pytest.fixture
def configuration(configure: Callable[..., ModelConfiguration]) -> ModelConfiguration:
    return configure()


@pytest.mark.parametrize("variant", [{}, {"tie_embeddings": True, "activation": "swiglu", "qk_norm": True}])
def test_shapes_and_names_are_those_of_the_module(configure: Callable[..., Any], variant: dict[str, Any]) -> None:
    configuration = configure(**variant)
    with torch.device("meta"):
        model = LanguageModel(configuration)
    assert parameter_shapes(configuration) == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_names_are_the_published_ones(configure: Callable[..., Any]) -> None:
    configuration = configure(num_layers=1, activation="swiglu", qk_norm=True)
    assert set(parameter_shapes(configuration)) == {
        "embedding.weight",
        "blocks.0.attention_norm.gain",
        "blocks.0.attention.query.weight",
        "blocks.0.attention.key.weight",
        "blocks.0.attention.value.weight",
        "blocks.0.attention.output.weight",
        "blocks.0.attention.query_norm.gain",
        "blocks.0.attention.key_norm.gain",
        "blocks.0.feed_forward_norm.gain",
        "blocks.0.feed_forward.up.weight",
        "blocks.0.feed_forward.gate.weight",
        "blocks.0.feed_forward.down.weight",
        "final_norm.gain",
        "head.weight",
    }


@pytest.mark.parametrize("rows", [(0, 700), (0, 1), (255, 257), (256, 512), (300, 301), (511, 700), (699, 700)])
@pytest.mark.parametrize("columns", [None, slice(0, 11), slice(11, 33)])
def test_a_slice_is_the_slice_of_the_whole(
    configuration: ModelConfiguration, rows: tuple[int, int], columns: slice | None
) -> None:
    whole = initial_slice(configuration, 7, NAME, SHAPE)
    part = initial_slice(configuration, 7, NAME, SHAPE, slice(*rows), columns)
    assert torch.equal(part, whole[slice(*rows), columns or slice(None)])


@pytest.mark.parametrize("parts", [2, 3, 4, 7])
def test_any_cut_into_rows_or_columns_joins_to_the_same_bits(configuration: ModelConfiguration, parts: int) -> None:
    whole = initial_slice(configuration, 7, NAME, SHAPE)
    for dimension in (0, 1):
        cuts = [SHAPE[dimension] * part // parts for part in range(parts + 1)]
        slices = [slice(*pair) for pair in zip(cuts, cuts[1:], strict=False)]
        where = [(s, None) if dimension == 0 else (slice(None), s) for s in slices]
        pieces = [initial_slice(configuration, 7, NAME, SHAPE, *place) for place in where]
        assert torch.equal(torch.cat(pieces, dimension), whole)
        assert not any(torch.equal(pieces[0], piece) for piece in pieces[1:])


def test_padding_of_the_vocabulary_is_zero_and_moves_nothing(configuration: ModelConfiguration) -> None:
    shape = (300, 48)
    whole = initial_slice(configuration, 7, "embedding.weight", shape)
    padded = initial_slice(configuration, 7, "embedding.weight", shape, slice(256, 512))
    assert torch.equal(padded[:44], whole[256:])
    assert padded.shape == (256, 48)
    assert not padded[44:].any()
    assert not initial_slice(configuration, 7, "head.weight", shape, slice(384, 512)).any()


def test_no_two_blocks_of_a_model_start_alike(configure: Callable[..., Any]) -> None:
    configuration = configure(num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=4, activation="swiglu")
    seen: set[bytes] = set()
    count = 0
    for name, shape in parameter_shapes(configuration).items():
        if name.endswith(".gain"):
            continue
        values = initial_slice(configuration, 7, name, (600, *shape[1:]))
        for first in range(0, 600, ROWS):
            seen.add(values[first : first + 40].contiguous().numpy().tobytes())
            count += 1
    assert len(seen) == count == 3 * (4 * 7 + 2)


def test_a_name_keeps_its_values_in_a_deeper_model_and_another_seed_has_others(configure: Callable[..., Any]) -> None:
    name, shape = "blocks.0.attention.query.weight", (48, 48)
    shallow, deep = (initial_slice(configure(num_layers=layers), 7, name, shape) for layers in (1, 9))
    assert torch.equal(shallow, deep)
    assert not torch.equal(shallow, initial_slice(configure(), 8, name, shape))


def test_deviations_are_the_promised_ones(configure: Callable[..., Any]) -> None:
    configuration = configure(init_std=0.05, num_layers=8)
    for name in parameter_shapes(configuration):
        if name.endswith(".gain"):
            assert torch.equal(initial_slice(configuration, 7, name, (48,)), torch.ones(48))
            continue
        scaled = name.endswith((".attention.output.weight", ".feed_forward.down.weight"))
        deviation = 0.05 / math.sqrt(2 * 8) if scaled else 0.05
        values = initial_slice(configuration, 7, name, (600, 100))
        # 60,000 values: the mean is off by 0.4 % of a deviation, the deviation itself by 0.3 %.
        assert values.mean().abs() < 0.02 * deviation
        assert values.std().item() == pytest.approx(deviation, rel=0.015)
        assert 3.5 * deviation < values.abs().max() < 6 * deviation


def test_the_number_of_threads_changes_nothing(configuration: ModelConfiguration) -> None:
    threads = torch.get_num_threads()
    drawn = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            drawn.append(initial_slice(configuration, 7, NAME, (256, 2000)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


def test_neither_the_global_generator_nor_the_defaults_matter(configuration: ModelConfiguration) -> None:
    torch.manual_seed(1)
    before = initial_slice(configuration, 7, NAME, SHAPE)
    untouched = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), untouched)
    with torch.device("meta"):
        assert torch.equal(initial_slice(configuration, 7, NAME, SHAPE), before)
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        again = initial_slice(configuration, 7, NAME, SHAPE)
    finally:
        torch.set_default_dtype(default)
    assert again.dtype == torch.float32
    assert torch.equal(again, before)


def test_the_values_of_a_seed_never_change(configuration: ModelConfiguration) -> None:
    # What a seed means is a promise to every run that is started again from its configuration.
    values = initial_slice(configuration, 1234, "blocks.2.attention.query.weight", (300, 20), slice(257, 259))
    expected = [0.02639885, -0.007466445, 0.001319765, -0.008845237, 0.02368686, -0.0171374, 0.01766789, 0.006591725]
    torch.testing.assert_close(values[:, :4].flatten(), torch.tensor(expected), rtol=1e-5, atol=0)


def test_a_model_starts_with_the_values_of_its_names(configure: Callable[..., Any]) -> None:
    configuration = configure(vocab_size=600)
    model = LanguageModel(configuration)
    for seed in (0, 5):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, initial_slice(configuration, seed, name, tuple(parameter.shape))), name
        initialize(model, configuration, 5)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_on_the_meta_device_has_no_values_and_can_be_given_them(configure: Callable[..., Any]) -> None:
    with torch.device("meta"):
        model = LanguageModel(configure())
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    initialize(model, configure(), 0)
    plain = LanguageModel(configure())
    tokens = torch.arange(20)[None]
    assert torch.equal(model(tokens), plain(tokens))
