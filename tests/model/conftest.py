"""Small models for the tests of model/."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from model.configuration import ModelConfiguration
from model.language_model import LanguageModel

SMALL = {"hidden_size": 48, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 80, "vocab_size": 97}


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """What a test draws is the same each time and whichever tests ran before."""
    torch.manual_seed(0)


@pytest.fixture
def configure() -> Callable[..., ModelConfiguration]:
    """A small grouped-query configuration with the given keys changed."""
    return lambda **changes: ModelConfiguration(**{**SMALL, **changes})


@pytest.fixture
def lively(configure: Callable[..., ModelConfiguration]) -> Callable[..., LanguageModel]:
    """A small model whose weights are large enough, and gains uneven enough, that every part of it matters."""

    def build(**changes: Any) -> LanguageModel:
        model = LanguageModel(configure(**changes))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.uniform_(0.5, 1.5, generator=generator)
                else:
                    parameter.normal_(0, 0.1, generator=generator)
        return model

    return build


@pytest.fixture
def tokens() -> torch.Tensor:
    """[2, 40] token ids of the small vocabulary."""
    return torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(2))
