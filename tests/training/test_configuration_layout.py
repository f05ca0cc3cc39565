"""A configuration on a number of processes, and with a tokenizer."""

from pathlib import Path

import pytest

from training.configuration import ConfigurationError, Layout, check_world, load, with_vocabulary

PARITY = Path("configs/parity.yaml")


@pytest.mark.parametrize(
    ("overrides", "world_size", "layout"),
    [
        ("", 1, Layout(1, 1, 1, 16)),
        ("", 4, Layout(1, 1, 4, 4)),
        ("parallel.pipeline=2 parallel.tensor=2", 8, Layout(2, 2, 2, 8)),
        ("parallel.pipeline=2 parallel.tensor=2 parallel.data=2", 8, Layout(2, 2, 2, 8)),
        ("parallel.pipeline=4 batch.micro_batch_size=4", 4, Layout(4, 1, 1, 4)),
    ],
)
def test_layouts(overrides: str, world_size: int, layout: Layout) -> None:
    found = check_world(load(PARITY, overrides.split()), world_size)
    assert found == layout and found.world_size == world_size


@pytest.mark.parametrize(
    ("overrides", "world_size", "sentence"),
    [
        (
            "parallel.pipeline=2",
            1,
            "this configuration wants 2 processes (pipeline 2 x tensor 1), found 1: "
            "start it with  deepspeed --num_gpus 2 launcher/train.py ...",
        ),
        (
            "parallel.pipeline=2 parallel.tensor=2",
            6,
            "this configuration wants a multiple of 4 processes (pipeline 2 x tensor 2), found 6: "
            "start it with  deepspeed --num_gpus 4 launcher/train.py ...",
        ),
        (
            "parallel.data=2",
            3,
            "this configuration wants 2 processes (pipeline 1 x tensor 1 x data 2), found 3: "
            "start it with  deepspeed --num_gpus 2 launcher/train.py ...",
        ),
        (
            "",
            3,
            "batch.global_batch_size is 16 and must be divisible by batch.micro_batch_size x data, 1 x 3, "
            "where data is 3 processes / (pipeline 1 x tensor 1)",
        ),
        (
            "parallel.pipeline=2 parallel.schedule=dualpipev",
            16,
            "parallel.schedule is dualpipev and needs at least 4 micro-batches, two for each stage, but "
            "batch.global_batch_size 16 / (batch.micro_batch_size 1 x data 8) is 2",
        ),
    ],
)
def test_a_world_that_does_not_fit(overrides: str, world_size: int, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        check_world(load(PARITY, overrides.split()), world_size)
    assert str(error.value) == sentence


def test_the_vocabulary_is_the_tokenizers_unless_given() -> None:
    assert with_vocabulary(load(PARITY), 512).model.vocab_size == 512
    # Published models have more ids than their tokenizers; the other way round an id would have no row.
    assert with_vocabulary(load(PARITY, ["model.vocab_size=600"]), 512).model.vocab_size == 600
    with pytest.raises(ConfigurationError) as error:
        with_vocabulary(load(PARITY, ["model.vocab_size=500"]), 512)
    assert str(error.value) == (
        "model.vocab_size is 500 and must be at least 512, the number of ids of corpus/parity/tokenizer.model"
    )
