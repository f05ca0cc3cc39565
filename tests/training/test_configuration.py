"""Loading a configuration: defaults, overrides, what it resolves to, and that it stays light."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from model.configuration import Activation
from training.configuration import (
    ConfigurationError,
    Dtype,
    Recompute,
    RunConfiguration,
    Schedule,
    Source,
    load,
    to_yaml,
)

SMALLEST = """
model: {hidden_size: 64, num_layers: 8, num_heads: 8}
batch: {sequence_length: 64, global_batch_size: 16}
optimizer: {learning_rate: 1e-3}
data: {train: corpus/parity/train, tokenizer: corpus/parity/tokenizer.model}
training: {steps: 20}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A configuration with the keys that have no default, and no others."""
    file = tmp_path / "smallest.yaml"
    file.write_text(SMALLEST)
    return file


def test_defaults(path: Path) -> None:
    configuration = load(path)
    assert configuration.run.name == "smallest"
    assert configuration.run.output_dir == Path("runs/smallest")
    assert configuration.model.activation is Activation.GELU
    assert configuration.model.ffn_hidden_size == 256
    assert configuration.parallel.schedule is Schedule.ONE_F_ONE_B
    assert (configuration.parallel.pipeline, configuration.parallel.tensor, configuration.parallel.data) == (1, 1, None)
    assert configuration.parallel.zero_stage == 1
    assert configuration.precision.dtype is Dtype.FP32
    assert configuration.optimizer.betas == (0.9, 0.95)
    assert configuration.data.train == (Source(path="corpus/parity/train", weight=1.0),)
    assert configuration.data.validation_sets == {}
    assert configuration.checkpoint.resume == "auto"
    assert configuration.monitor.dump_gradients == ()


def test_overrides_win_and_have_the_types_of_yaml(path: Path) -> None:
    configuration = load(
        path,
        [
            "optimizer.learning_rate=2e-4",
            "parallel.recompute=sublayer",
            "model.head_dim=32",
            "model.rope_scaling={rope_type: linear, factor: 2}",
            "data.train=[{path: a, weight: 3}, b]",
            "data.validation={code: x, prose: y}",
            "monitor.dump_gradients=[1, 5]",
            "run.name=other",
        ],
    )
    assert configuration.optimizer.learning_rate == 2e-4
    assert configuration.parallel.recompute is Recompute.SUBLAYER
    assert configuration.model.head_dim == 32
    assert configuration.model.rope_scaling is not None and configuration.model.rope_scaling.factor == 2
    assert configuration.data.train == (Source(path="a", weight=3.0), Source(path="b"))
    assert configuration.data.validation_sets == {"code": "x", "prose": "y"}
    assert configuration.monitor.dump_gradients == (1, 5)
    assert configuration.run.output_dir == Path("runs/other")


def test_a_single_validation_set_has_the_empty_name(path: Path) -> None:
    assert load(path, ["data.validation=x"]).data.validation_sets == {"": "x"}


def test_a_section_with_nothing_under_it_is_one_with_defaults(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text(SMALLEST + "monitor:\ndeepspeed:\n")
    assert load(file).monitor.tensorboard is True


def test_what_is_written_reads_back_as_equal(path: Path) -> None:
    overrides = [
        "run.name='1e-3'",  # a name that looks like a number
        "model.num_kv_heads=4",
        "model.rope_scaling={rope_type: yarn, factor: 4, original_max_position_embeddings: 64}",
        "parallel.pipeline=2",
        "parallel.partition=[3, 5]",
        "data.validation={code: x, prose: y}",
        "data.train=[{path: a, weight: 3}, b]",
        "training.stop_after=7",
        "deepspeed={zero_optimization: {reduce_bucket_size: 1000}, wall_clock_breakdown: true}",
    ]
    configuration = load(path, overrides)
    resolved = path.with_name("resolved.yaml")
    resolved.write_text(to_yaml(configuration))
    assert load(resolved) == configuration
    assert to_yaml(load(resolved)) == to_yaml(configuration)


def test_a_resolved_configuration_under_a_new_name_has_a_new_folder(path: Path) -> None:
    resolved = path.with_name("config.yaml")
    resolved.write_text(to_yaml(load(path)))
    assert load(resolved, ["run.name=second"]).run.output_dir == Path("runs/second")
    resolved.write_text(to_yaml(load(path, ["run.output_dir=/elsewhere"])))
    assert load(resolved, ["run.name=second"]).run.output_dir == Path("/elsewhere")


def test_a_configuration_never_changes(path: Path) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load(path).training.steps = 5


def test_the_path_of_a_mistake_is_the_file_or_the_command_line(path: Path) -> None:
    with pytest.raises(ConfigurationError) as error:
        load(path, ["optimizer.learning_rate=abc"])
    assert str(error.value) == "command line: optimizer.learning_rate is 'abc', expected a number"
    path.write_text(SMALLEST.replace("1e-3", "abc"))
    with pytest.raises(ConfigurationError) as error:
        load(path, ["training.steps=3"])
    assert str(error.value) == f"{path}: optimizer.learning_rate is 'abc', expected a number"


def test_several_mistakes_are_one_line(path: Path) -> None:
    with pytest.raises(ConfigurationError) as error:
        load(path, ["optimizer.learning_rate=abc", "model.hidden_size=x"])
    assert str(error.value) == (
        "command line: model.hidden_size is 'x', expected a whole number; "
        "optimizer.learning_rate is 'abc', expected a number"
    )


def test_every_key_has_a_docstring() -> None:
    def undocumented(kind: type, prefix: str = "") -> list[str]:
        return [prefix + name for name, field in kind.model_fields.items() if not field.description]

    assert undocumented(RunConfiguration) == []
    for name, field in RunConfiguration.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            assert undocumented(field.annotation, f"{name}.") == []


def test_importing_it_is_light() -> None:
    program = (
        "import sys, training.configuration; print([m for m in ('torch', 'deepspeed', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
