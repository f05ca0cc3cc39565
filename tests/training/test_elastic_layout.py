"""The layout that `parallel.elastic` chooses for whatever number of processes there is."""

from pathlib import Path

import pytest

from training.configuration import ConfigurationError, RunConfiguration, check_world, load
from training.configuration_checks import problems
from training.layout import choose_layout

CONFIGURATION = """
model: {hidden_size: 64, num_layers: 8, num_heads: 8}
batch: {sequence_length: 64, global_batch_size: 16, micro_batch_size: 2}
optimizer: {learning_rate: 1e-3}
data: {train: corpus/parity/train, tokenizer: corpus/parity/tokenizer.model}
training: {steps: 20}
parallel: {elastic: true}
"""


def configured(tmp_path: Path, *overrides: str) -> RunConfiguration:
    file = tmp_path / "x.yaml"
    file.write_text(CONFIGURATION)
    return load(file, overrides)


@pytest.mark.parametrize(
    ("overrides", "processes", "layout"),
    [
        # The configured pipeline and tensor wherever they divide the number, the rest is data.
        (["parallel.pipeline=2", "parallel.tensor=2"], 8, (2, 2, 2)),
        (["parallel.pipeline=2", "parallel.tensor=2"], 4, (2, 2, 1)),
        ([], 8, (1, 1, 8)),
        (["parallel.pipeline=2"], 4, (2, 1, 2)),
        # Else no more of the model a process than configured, and the tensor size first.
        (["parallel.pipeline=2", "parallel.tensor=2"], 6, (3, 2, 1)),
        (["parallel.pipeline=4"], 6, (6, 1, 1)),
        # Else what there is.
        (["parallel.pipeline=2", "parallel.tensor=2"], 2, (1, 2, 1)),
        (["parallel.pipeline=2", "parallel.tensor=2"], 3, (3, 1, 1)),
        (["parallel.pipeline=2", "parallel.tensor=2"], 1, (1, 1, 1)),
        # Heads allow no tensor size of 3, and 16 samples no data size of 3.
        ([], 3, (3, 1, 1)),
        ([], 7, (7, 1, 1)),
        # Only 1 is possible with ZeRO 2.
        (["parallel.zero_stage=2"], 4, (1, 1, 4)),
        # A data size in the file is a wish like the others.
        (["parallel.data=8"], 4, (1, 1, 4)),
    ],
)
def test_the_nearest_layout(tmp_path: Path, overrides: list[str], processes: int, layout: tuple[int, int, int]) -> None:
    chosen, sentence = choose_layout(configured(tmp_path, *overrides), processes)
    parallel = chosen.parallel
    assert (parallel.pipeline, parallel.tensor, parallel.data) == layout
    assert f"pipeline {layout[0]} x tensor {layout[1]} x data {layout[2]}" in sentence and "\n" not in sentence


def test_every_choice_is_one_that_the_rules_allow(tmp_path: Path) -> None:
    for overrides in (
        [],
        ["parallel.pipeline=2", "parallel.tensor=2", "parallel.sequence_parallel=true"],
        ["parallel.pipeline=2", "parallel.schedule=dualpipev"],
        ["parallel.pipeline=3", "parallel.partition=[2,3,3]"],
        ["parallel.zero_stage=3"],
    ):
        configuration = configured(tmp_path, *overrides)
        for processes in range(1, 33):
            try:
                chosen, _ = choose_layout(configuration, processes)
            except ConfigurationError as error:
                assert f"for {processes} processes" in str(error)
                continue
            assert not list(problems(chosen))
            layout = check_world(chosen, processes)
            assert layout.world_size == processes
            assert chosen.batch.global_batch_size == 16
            assert layout.micro_batches * layout.data * chosen.batch.micro_batch_size == 16
            assert chosen.model == configuration.model and chosen.optimizer == configuration.optimizer


def test_what_only_the_configured_layout_allows_gives_way(tmp_path: Path) -> None:
    chosen, sentence = choose_layout(
        configured(tmp_path, "parallel.pipeline=2", "parallel.tensor=2", "parallel.sequence_parallel=true"), 3
    )
    assert not chosen.parallel.sequence_parallel and "sequence_parallel True -> False" in sentence
    assert "each process holds more of the model" in sentence

    chosen, sentence = choose_layout(configured(tmp_path, "parallel.pipeline=3", "parallel.partition=[2,3,3]"), 4)
    assert chosen.parallel.partition == "balanced" and "partition (2, 3, 3) -> balanced" in sentence

    chosen, sentence = choose_layout(configured(tmp_path, "parallel.pipeline=2", "parallel.schedule=dualpipev"), 1)
    assert chosen.parallel.schedule == "1f1b" and "schedule dualpipev -> 1f1b" in sentence

    # 16 samples on 16 copies: one each.
    chosen, sentence = choose_layout(configured(tmp_path), 16)
    assert chosen.batch.micro_batch_size == 1 and "micro_batch_size 2 -> 1" in sentence


def test_where_nothing_fits_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no pipeline x tensor x data for 11 processes with 8 blocks, 8 heads"):
        choose_layout(configured(tmp_path), 11)
