"""The ready configurations load, are what their comments say, and have the published sizes."""

import re
from pathlib import Path

import pytest

from model.costs import parameter_count
from training.configuration import Dtype, Recompute, check_world, load, to_yaml

CONFIGS = sorted(Path("configs").glob("*.yaml"))

TOKENIZER_SIZES = {"tiny": 4096, "parity": 512}
"""Ids of the tokenizers that `make` trains; the other configurations give model.vocab_size."""

PARAMETERS = {
    "tiny": 4_196_608,
    # GPT-2 small has 124,439,808: besides these it has 786,432 of learned positions and 102,144 of biases.
    "125m": 124_439_808 - 786_432 - 102_144,
    "1b": 1_100_048_384,  # TinyLlama 1.1B
    "7b": 6_738_415_616,  # Llama 2 7B
    "70b": 68_976_648_192,  # Llama 2 70B
    "gpt3_175b": 174_566_105_088,
}

MEANT_FOR = {"125m": 1, "1b": 8, "7b": 8, "70b": 64, "gpt3_175b": 1024}
"""Devices that each comment names."""


def test_the_configurations_are_those_that_are_documented() -> None:
    assert {path.stem for path in CONFIGS} == {"parity", *PARAMETERS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_loads_and_reads_back(path: Path, tmp_path: Path) -> None:
    configuration = load(path)
    assert configuration.run.name == path.stem
    resolved = tmp_path / "config.yaml"
    resolved.write_text(to_yaml(configuration))
    assert load(resolved) == configuration


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_totals(name: str) -> None:
    path = Path(f"configs/{name}.yaml")
    configuration = load(path)
    size = TOKENIZER_SIZES.get(name)
    model = configuration.model.model_copy(update={"vocab_size": size}) if size else configuration.model
    assert parameter_count(model) == PARAMETERS[name]
    assert f"{PARAMETERS[name]:,} parameters" in path.read_text()


def test_gpt3_has_the_size_of_the_paper() -> None:
    """Table 2.1 of arXiv 2005.14165 says 175.0 billion; learned positions (2048 x 12288) and biases are not in ours."""
    biases_and_norms = 96 * (4 + 4 + 1 + 2) * 12288
    assert PARAMETERS["gpt3_175b"] + 2048 * 12288 + biases_and_norms == pytest.approx(175.0e9, rel=0.003)


@pytest.mark.parametrize("name", MEANT_FOR)
def test_each_fits_the_devices_that_its_comment_names(name: str) -> None:
    path = Path(f"configs/{name}.yaml")
    configuration, devices = load(path), MEANT_FOR[name]
    comment = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    assert re.search(rf"Meant for {devices:,} devices? of \d+ GB", comment)
    layout = check_world(configuration, devices)
    assert configuration.precision.dtype is Dtype.BF16
    if layout.data > 1:
        assert f"{layout.data} copies of the model" in comment
    if layout.tensor > 1:
        assert f"tensor {layout.tensor}" in comment and configuration.parallel.sequence_parallel
        assert configuration.parallel.recompute is Recompute.SUBLAYER
    # bf16 weights and gradients, fp32 gradients; fp32 master weights and both moments over the copies (ZeRO 1).
    bytes_each = 2 + 2 + 4 + 12 / layout.data
    share = PARAMETERS[name] / (layout.pipeline * layout.tensor) / 1e9
    total = f"{bytes_each:g} x {share:.{3 if share < 1 else 2}f} = {bytes_each * share:.{1 if share < 2 else 0}f} GB"
    assert total in comment


def test_parity_is_as_the_parity_contract_says() -> None:
    configuration = load("configs/parity.yaml")
    model, batch, optimizer = configuration.model, configuration.batch, configuration.optimizer
    assert (model.num_layers, model.num_heads, model.hidden_size, model.ffn_hidden_size) == (8, 8, 64, 256)
    assert (batch.sequence_length, batch.global_batch_size, batch.micro_batch_size) == (64, 16, 1)
    assert (optimizer.learning_rate, optimizer.warmup_steps, optimizer.eps, optimizer.grad_clip) == (1e-3, 5, 1e-6, 1.0)
    assert (configuration.training.steps, configuration.training.log_every) == (20, 1)
    assert configuration.precision.dtype is Dtype.FP32
    assert configuration.data.train[0].path == "corpus/parity/train"


def test_the_demo_runs_over_two_stages() -> None:
    layout = check_world(load("configs/tiny.yaml", ["parallel.pipeline=2"]), 2)
    assert (layout.pipeline, layout.data) == (2, 1) and layout.micro_batches >= 2
