"""Which part of which weight a process holds, for every configuration that we ship, without memory for any of it."""

import math
from pathlib import Path

import pytest
import torch

from model.costs import parameter_count
from model.initialization import parameter_shapes
from parallel.mesh import Mesh
from parallel.plan import Style, local_box, padded_vocabulary, style_of
from parallel.stages import StageSettings, layer_list
from training.configuration import RunConfiguration, load

PUBLISHED = {"7b": 6_738_415_616, "70b": 68_976_648_192}
"""Parameters of Llama 2 as Meta published them."""
LARGE = ("125m", "1b", "7b", "70b", "gpt3_175b")


def mesh(tensor: int, tensor_rank: int) -> Mesh:
    """A mesh of one stage without process groups: enough to build layers."""
    groups = dict.fromkeys(("tensor_group", "data_group", "pipeline_group", "model_group", "grid"))
    return Mesh(1, tensor, 1, 0, tensor_rank, 0, **groups)


def test_the_padded_vocabulary() -> None:
    """The smallest multiple of 128 x tensor: worked out by hand."""
    assert padded_vocabulary(151_669, 4) == 152_064
    assert padded_vocabulary(32_001, 1) == 32_128
    assert padded_vocabulary(32_000, 2) == 32_000


def test_styles() -> None:
    assert style_of("blocks.3.attention.key.weight") is Style.COLUMN
    assert style_of("blocks.11.feed_forward.down.weight") is Style.ROW
    assert style_of("head.weight") is style_of("embedding.weight") is Style.VOCABULARY
    assert style_of("blocks.0.attention.query_norm.gain") is style_of("final_norm.gain") is Style.REPLICATED


def test_boxes() -> None:
    """A vocabulary of 300 on 4 is padded to 512, 128 rows each: the third holds 44 true rows, the fourth none."""
    assert local_box("blocks.0.attention.query.weight", (64, 32), 4, 1) == ((16, 32), (0, 32))
    assert local_box("blocks.0.attention.output.weight", (32, 64), 4, 3) == ((0, 32), (48, 64))
    boxes = [local_box("head.weight", (300, 8), 4, rank)[0] for rank in range(4)]
    assert boxes == [(0, 128), (128, 256), (256, 300), (300, 300)]


def numbers(configuration: RunConfiguration) -> dict[str, int]:
    """Elements of each parameter over all tensor-parallel processes, replicated ones once, from layers on meta."""
    tensor = configuration.parallel.tensor
    model = configuration.model
    if model.vocab_size is None:
        model = model.model_copy(update={"vocab_size": 4096})
    found: dict[str, int] = {}
    for rank in range(tensor):
        settings = StageSettings(
            model=model, mesh=mesh(tensor, rank), device=torch.device("meta"), dtype=torch.bfloat16
        )
        for spec in layer_list(settings):
            for parameter in spec.build().parameters():
                part = parameter.slice
                if part.replicated and rank > 0:
                    continue
                size = math.prod(stop - start for start, stop in part.box)
                assert size <= parameter.numel()
                if (part.name, rank) not in found:  # a tied matrix is built for both of its uses
                    found[part.name, rank] = size
    totals: dict[str, int] = {}
    for (name, _), size in found.items():
        totals[name] = totals.get(name, 0) + size
    return totals


@pytest.mark.parametrize("name", LARGE)
def test_the_stages_hold_every_parameter_of_a_shipped_configuration_once(name: str) -> None:
    configuration = load(Path("configs") / f"{name}.yaml")
    totals = numbers(configuration)
    shapes = parameter_shapes(configuration.model)
    assert totals == {key: math.prod(shape) for key, shape in shapes.items()}
    assert sum(totals.values()) == parameter_count(configuration.model)
    if name in PUBLISHED:
        assert sum(totals.values()) == PUBLISHED[name]
