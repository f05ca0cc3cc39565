"""Every mistake in a configuration is one sentence: the key, the value found, what is allowed."""

from pathlib import Path

import pytest

from training.configuration import ConfigurationError, load
from training.configuration_checks import DEEPSPEED_DERIVED, NOT_YET

CONFIGURATION = """
model: {hidden_size: 64, num_layers: 8, num_heads: 8}
batch: {sequence_length: 64, global_batch_size: 16}
optimizer: {learning_rate: 1e-3, warmup_steps: 5}
data: {train: corpus/parity/train, tokenizer: corpus/parity/tokenizer.model}
training: {steps: 20}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "x.yaml"
    file.write_text(CONFIGURATION)
    return file


def mistake(path: Path, *overrides: str) -> str:
    """The sentence that these overrides cause, without the place that it begins with."""
    with pytest.raises(ConfigurationError) as error:
        load(path, overrides)
    place, _, sentence = str(error.value).partition(": ")
    assert place in (str(path), "command line")
    assert "\n" not in sentence and "pydantic" not in sentence and "type=" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("optimizer.lerning_rate=1", "optimizer.learning_rate"),
        ("training.learning_rate=1", "optimizer.learning_rate"),
        ("learning_rate=1", "optimizer.learning_rate"),
        ("optimiser.learning_rate=1", "optimizer.learning_rate"),
        ("model.n_layers=1", "model.num_layers"),
        ("parallel.pp=1", "parallel.pipeline"),
        ("parallel.zero=1", "parallel.zero_stage"),
        ("batch.batch_size=1", "batch.global_batch_size"),
        ("data.train=[{path: a, wieght: 1}]", "data.train.weight"),
        ("model.rope_scaling={rope_type: linear, facter: 2, factor: 2}", "model.rope_scaling.factor"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(path: Path, override: str, nearest: str) -> None:
    sentence = mistake(path, override)
    assert sentence.startswith("unknown key ") and sentence.endswith(f", the nearest known one is {nearest}")


def test_an_unknown_section_of_the_file(path: Path) -> None:
    path.write_text(CONFIGURATION.replace("optimizer:", "optimiser:"))
    assert "unknown key optimiser, the nearest known one is optimizer" in mistake(path)


@pytest.mark.parametrize("removed", ["hidden_size: 64, ", "global_batch_size: 16", "train: corpus/parity/train, "])
def test_a_missing_key(path: Path, removed: str) -> None:
    path.write_text(CONFIGURATION.replace(removed, ""))
    assert mistake(path).endswith(f"{removed.partition(':')[0]} is missing and must be given")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optimizer.learning_rate=abc", "optimizer.learning_rate is 'abc', expected a number"),
        ("optimizer.learning_rate='1e-3'", "optimizer.learning_rate is '1e-3', expected a number"),
        ("optimizer.learning_rate=true", "optimizer.learning_rate is true, expected a number"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate is nan, expected a finite number"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate is inf, expected a finite number"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate is -1, expected at least 0"),
        ("optimizer.min_ratio=2", "optimizer.min_ratio is 2, expected at most 1"),
        ("optimizer.betas=0.9", "optimizer.betas is 0.9, expected a list"),
        ("optimizer.betas=[0.9, 1.5]", "optimizer.betas[1] is 1.5, expected a number below 1"),
        ("optimizer.betas=[0.9, 0.9, 0.9]", "optimizer.betas is [0.9, 0.9, 0.9], expected 2 values"),
        ("optimizer.eps=0", "optimizer.eps is 0, expected a number above 0"),
        ("optimizer.schedule=step", "optimizer.schedule is 'step', expected one of constant, cosine, linear, wsd"),
        ("training.steps=1e2", "training.steps is 100.0, expected a whole number"),
        ("training.steps=0", "training.steps is 0, expected a number above 0"),
        ("training.steps=null", "training.steps is null, expected a whole number"),
        ("model.hidden_size=true", "model.hidden_size is true, expected a whole number"),
        ("model.dropout=1", "model.dropout is 1, expected a number below 1"),
        ("model.dropout=-0.1", "model.dropout is -0.1, expected at least 0"),
        ("model.activation=tanh", "model.activation is 'tanh', expected one of gelu, swiglu, geglu, relu2"),
        ("model.tie_embeddings=1", "model.tie_embeddings is 1, expected true or false"),
        ("model=3", "model is 3, expected keys with values"),
        ("model.rope_scaling=3", "model.rope_scaling is 3, expected keys with values"),
        ("run.name=12", "run.name is 12, expected text (in quotes, if it looks like a number)"),
        ("run.name=a b", "run.name is 'a b', expected letters, digits, '.', '_' and '-' only"),
        ("run.name=../x", "run.name is '../x', expected letters, digits, '.', '_' and '-' only"),
        ("run.name=..", "run.name is '..', expected a name, not a folder that is there already"),
        ("training.hang_seconds=1e15", "training.hang_seconds is 1000000000000000.0, expected at most 1e+09"),
        (
            f"batch.global_batch_size={10**30}",
            f"batch.global_batch_size is {10**30}, expected a number below 2.14748e+09",
        ),
        (f"model.num_layers={10**26}", f"model.num_layers is {10**26}, expected a number below 2.14748e+09"),
        ("parallel.zero_stage=4", "parallel.zero_stage is 4, expected at most 3"),
        ("parallel.schedule=gpipe", "parallel.schedule is 'gpipe', expected one of 1f1b, dualpipev"),
        ("parallel.recompute=all", "parallel.recompute is 'all', expected one of none, sublayer, block"),
        (
            "parallel.partition=even",
            "parallel.partition is 'even', expected balanced or a list of block counts, each at least 1",
        ),
        (
            "parallel.partition=[8, 0]",
            "parallel.partition is [8, 0], expected balanced or a list of block counts, each at least 1",
        ),
        ("precision.dtype=int8", "precision.dtype is 'int8', expected one of fp32, bf16, fp16"),
        ("data.train=", "data.train is null, expected a prefix or a list of {path, weight}"),
        ("data.train=[{path: a, weight: -1}]", "data.train[0].weight is -1, expected a number above 0"),
        ("deepspeed=3", "deepspeed is 3, expected keys with values"),
        ("monitor.dump_gradients=1", "monitor.dump_gradients is 1, expected a list"),
    ],
)
def test_a_value_that_the_key_cannot_have(path: Path, override: str, sentence: str) -> None:
    assert mistake(path, override) == sentence


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("model.num_heads=3", "model.hidden_size is 64 and must be divisible by num_heads, which is 3"),
        ("model.num_kv_heads=3", "model.num_heads is 8 and must be divisible by num_kv_heads, 3"),
        ("parallel.tensor=3", "model.num_heads is 8 and must be divisible by parallel.tensor, which is 3"),
        (
            "parallel.tensor=4 model.num_kv_heads=2",
            "model.num_kv_heads is 2 and must be divisible by parallel.tensor, which is 4",
        ),
        (
            "parallel.tensor=4 model.ffn_hidden_size=102",
            "model.ffn_hidden_size is 102 and must be divisible by parallel.tensor, which is 4",
        ),
        (
            "parallel.sequence_parallel=true",
            "parallel.sequence_parallel is true and needs parallel.tensor above 1, which is 1",
        ),
        (
            "parallel.sequence_parallel=true parallel.tensor=4 batch.sequence_length=62",
            "batch.sequence_length is 62 and must be divisible by parallel.tensor, which is 4",
        ),
        (
            "parallel.pipeline=9",
            "parallel.pipeline is 9 and must be at most model.num_layers, which is 8: each stage needs a block",
        ),
        ("parallel.schedule=dualpipev", "parallel.schedule is dualpipev and needs parallel.pipeline of at least 2"),
        (
            "parallel.schedule=dualpipev parallel.pipeline=5",
            "parallel.pipeline is 5 and must be at most 4 with dualpipev, half of model.num_layers, which is 8",
        ),
        (
            "parallel.schedule=dualpipev parallel.pipeline=2 batch.global_batch_size=3",
            "parallel.schedule is dualpipev and needs at least 4 micro-batches",
        ),
        (
            "parallel.pipeline=2 parallel.partition=[8]",
            "parallel.partition is [8], expected 2 block counts, one for each stage",
        ),
        (
            "parallel.pipeline=2 parallel.partition=[4,3]",
            "parallel.partition is [4, 3], 7 blocks in all, expected model.num_layers, 8",
        ),
        (
            "parallel.pipeline=2 parallel.schedule=dualpipev parallel.partition=[4,4]",
            "parallel.partition is [4, 4], expected 4 block counts, one for each chunk (two a stage)",
        ),
        ("parallel.pipeline=2 parallel.zero_stage=0", "parallel.zero_stage is 0 and must be 1 with a pipeline"),
        ("parallel.pipeline=2 parallel.zero_stage=2", "parallel.zero_stage is 2 and must be 1 with a pipeline"),
        ("parallel.pipeline=2 parallel.zero_stage=3", "parallel.zero_stage is 3 and must be 1 with a pipeline"),
        (
            "parallel.offload_optimizer=true",
            "parallel.offload_optimizer is true and needs parallel.zero_stage 2 or 3, which is 1",
        ),
        (
            "batch.micro_batch_size=3",
            "batch.global_batch_size is 16 and must be divisible by batch.micro_batch_size, 3",
        ),
        (
            "parallel.data=3",
            "batch.global_batch_size is 16 and must be divisible by batch.micro_batch_size x parallel.data, 1 x 3",
        ),
        (
            "optimizer.decay_steps=5",
            "optimizer.decay_steps is 5 and must be above optimizer.warmup_steps, which is 5",
        ),
        (
            "optimizer.decay_steps=9 optimizer.schedule=constant",
            "optimizer.decay_steps is 9, but optimizer.schedule constant has no decay",
        ),
        ("optimizer.wsd_decay_steps=4", "optimizer.wsd_decay_steps is 4, but optimizer.schedule is cosine"),
        (
            "optimizer.wsd_decay_steps=21 optimizer.schedule=wsd",
            "optimizer.wsd_decay_steps is 21 and must be at most 20",
        ),
        (
            "data.tokenizer=null",
            "data.tokenizer is null and must be a tokenizer's file where model.vocab_size is not given",
        ),
        (
            "data.tokenizer=null model.vocab_size=9 data.document_mask=true",
            "data.document_mask is true and needs data.tokenizer",
        ),
        ("training.eval_every=5", "training.eval_every is 5 and needs data.validation, which is null"),
        ("training.eval_batches=5", "training.eval_batches is 5 and needs data.validation, which is null"),
        ("deepspeed.fp16.loss_scale=0", "deepspeed.fp16 is for precision.dtype fp16 only, which is fp32"),
        (
            "deepspeed.zero_optimization.sub_group_size=5",
            "deepspeed.zero_optimization.sub_group_size is for parallel.zero_stage 3 only, which is 1",
        ),
        ("deepspeed.zero_optimization=3", "deepspeed.zero_optimization is 3, expected keys with values"),
        ("deepspeed.nebula=3", "deepspeed.nebula is 3, but only these keys are passed on: zero_optimization."),
    ],
)
def test_keys_that_do_not_fit_together(path: Path, overrides: str, sentence: str) -> None:
    assert mistake(path, *overrides.split()).startswith(sentence)


@pytest.mark.parametrize(
    "overrides",
    [
        "parallel.tensor=8",
        "parallel.tensor=2 model.num_kv_heads=2",
        "parallel.sequence_parallel=true parallel.tensor=4",
        "parallel.pipeline=8",
        "parallel.pipeline=3 parallel.partition=[3,3,2]",
        "parallel.schedule=dualpipev parallel.pipeline=4",
        "parallel.schedule=dualpipev parallel.pipeline=2 parallel.partition=[3,1,2,2]",
        "parallel.zero_stage=0",
        "parallel.zero_stage=2 parallel.offload_optimizer=true parallel.tensor=2",
        "parallel.zero_stage=3 deepspeed.zero_optimization.sub_group_size=5",
        "precision.dtype=fp16 deepspeed.fp16.initial_scale_power=8",
        "optimizer.schedule=wsd optimizer.wsd_decay_steps=4",
        "training.steps=3",  # shorter than its warm-up: what a first try often is
        "training.stop_after=7",
        "optimizer.learning_rate=0 optimizer.grad_clip=0 optimizer.weight_decay=0",
    ],
)
def test_sound_combinations_are_let_through(path: Path, overrides: str) -> None:
    load(path, overrides.split())


@pytest.mark.parametrize(
    ("override", "feature"),
    [
        ("parallel.context=2", "context parallelism"),
        ("parallel.context_parallel_size=2", "context parallelism"),
        ("model.num_experts=8", "mixture of experts"),
        ("parallel.expert=8", "mixture of experts"),
        ("precision.fp8=true", "FP8"),
        ("precision.dtype=fp8", "FP8"),
    ],
)
def test_what_is_out_of_scope_is_refused_by_name(path: Path, override: str, feature: str) -> None:
    assert f"but {feature} is out of scope and not supported" in mistake(path, override)


NOT_DEFAULT = {
    "parallel.schedule": "zero_bubble",
    "batch.ramp_up": "{start: 2, increment: 2, samples: 100}",
    "precision.compile": "true",
    "monitor.profile": "[3]",
    "monitor.timeline": "[3]",
}


@pytest.mark.parametrize("key", NOT_YET)
def test_what_is_not_built_yet_is_refused_by_name(path: Path, key: str) -> None:
    sentence = mistake(path, f"{key}={NOT_DEFAULT[key]}")
    assert sentence.startswith(f"{key} is ") and ", which is not built yet, expected " in sentence


@pytest.mark.parametrize("key", DEEPSPEED_DERIVED)
def test_what_follows_from_our_keys_is_not_set_in_deepspeeds(path: Path, key: str) -> None:
    assert "but it follows from" in mistake(path, f"deepspeed.{key}=1")
