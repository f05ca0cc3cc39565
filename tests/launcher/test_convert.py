"""To Hugging Face and back: the same numbers over hundreds of positions, the same bits in every tensor, or refused."""

import errno
import json
import pickle
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from launcher import convert
from launcher.mistakes import sentence
from model.configuration import ModelConfiguration
from tests.launcher.tiny_models import VOCABULARY, configuration, random_model, read_json, save_run
from training import checkpoint
from training.huggingface import ConversionError, from_huggingface
from training.loading import load_model, open_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 100}
MODELS = {
    "llama": {"activation": "swiglu"},
    "llama grouped tied": {"activation": "swiglu", "num_kv_heads": 2, "tie_embeddings": True, "norm_eps": 1e-6},
    "llama3 scaling": {"activation": "swiglu", "rope_theta": 500000.0, "rope_scaling": LLAMA3, "ffn_hidden_size": 96},
    "llama yarn": {"activation": "swiglu", "rope_scaling": YARN},
    "llama linear": {"activation": "swiglu", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama dynamic": {"activation": "swiglu", "rope_scaling": DYNAMIC},
    "llama geglu": {"activation": "geglu", "dropout": 0.1},
    "qwen3": {"activation": "swiglu", "qk_norm": True, "num_kv_heads": 2, "head_dim": 32, "tie_embeddings": True},
    "qwen3 geglu": {"activation": "geglu", "qk_norm": True, "num_heads": 3, "head_dim": 32},
    "arcee gelu": {"activation": "gelu"},
    "arcee gelu tied": {"activation": "gelu", "tie_embeddings": True, "num_kv_heads": 1},
    "arcee relu2": {"activation": "relu2", "head_dim": 24, "num_kv_heads": 2},
}


def to_hf(run: Path, out: Path, *options: str) -> None:
    assert convert.main(["to-hf", str(run), str(out), *options]) == 0


def documents(length: int = 300) -> torch.Tensor:
    """Two rows of random tokens with end-of-document tokens (id 1) within."""
    tokens = torch.randint(2, 512, (2, length), generator=torch.Generator().manual_seed(1))
    tokens[0, [40, 41, 200]] = 1
    tokens[1, 127] = 1
    return tokens


def load_exported(out: Path) -> torch.nn.Module:
    """The model as transformers loads it; every tensor must have found its place."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


@pytest.mark.parametrize("kind", MODELS)
def test_exported_logits_are_the_models(tmp_path: Path, kind: str) -> None:
    model = random_model(configuration(**MODELS[kind]))
    to_hf(save_run(tmp_path / "run", model), tmp_path / "out")
    exported = load_exported(tmp_path / "out")
    assert exported.config.model_type == kind.split()[0].removesuffix("3") + ("3" if "qwen" in kind else "")
    assert exported.config.vocab_size == VOCABULARY
    tokens = documents()
    with torch.no_grad():
        ours, theirs = model(tokens), exported(tokens).logits
    assert ours.std() > 0.5  # the comparison would be worth nothing on a flat model
    assert (ours - theirs).abs().max() < 1e-4


def test_a_wrong_rotary_layout_would_be_seen(tmp_path: Path) -> None:
    """The fault planted: interleaved pairs instead of halves. Position 0 alone would not show it."""
    model = random_model(configuration(activation="swiglu"))
    to_hf(save_run(tmp_path / "run", model), tmp_path / "out")
    exported = load_exported(tmp_path / "out")
    head_dim = model.configuration.head_dim
    order = torch.arange(head_dim).view(2, -1).t().reshape(-1)
    with torch.no_grad():
        for layer in exported.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                weight = projection.weight.view(-1, head_dim, projection.weight.shape[1])
                projection.weight.copy_(weight[:, order].reshape(projection.weight.shape))
        difference = (model(documents()) - exported(documents()).logits).abs()
    assert difference[:, 0].max() < 1e-4 < difference[:, 1:].max()


@pytest.mark.parametrize("tied", [False, True])
def test_every_layout_exports_the_same_files(tmp_path: Path, tied: bool) -> None:
    model = random_model(configuration(activation="swiglu", tie_embeddings=tied))
    to_hf(save_run(tmp_path / "one", model), tmp_path / "out" / "one", "--shard-size", "2e-4")
    to_hf(save_run(tmp_path / "many", model, tensor=2, data=4), tmp_path / "out" / "many", "--shard-size", "2e-4")
    names = sorted(path.name for path in (tmp_path / "out" / "one").iterdir())
    assert "model.safetensors.index.json" in names and len(names) > 6
    assert names == sorted(path.name for path in (tmp_path / "out" / "many").iterdir())
    for name in names:
        assert (tmp_path / "out" / "one" / name).read_bytes() == (tmp_path / "out" / "many" / name).read_bytes(), name
    load_exported(tmp_path / "out" / "many")
    for shard in (tmp_path / "out" / "one").glob("*.safetensors"):
        assert load_file(shard)  # the public library opens what the streaming writer wrote


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_types_are_the_weights_rounded_once(tmp_path: Path, dtype: str) -> None:
    model = random_model(configuration(activation="gelu"))
    to_hf(save_run(tmp_path / "run", model), tmp_path / "out", "--dtype", dtype)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], model.head.weight.to(getattr(torch, dtype)))
    assert read_json(tmp_path / "out" / "config.json")["torch_dtype"] == dtype
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype is getattr(torch, dtype)


def test_values_beyond_float16_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = random_model(configuration())
    with torch.no_grad():
        model.head.weight[3, 5] = 1e6
    run = save_run(tmp_path / "run", model)
    assert convert.main(["to-hf", str(run), str(tmp_path / "out"), "--dtype", "float16"]) == 2
    assert "head.weight has values beyond float16's range" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


# From Hugging Face

TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
SOURCES = {
    "llama 2": ("LlamaConfig", {"rms_norm_eps": 1e-5}),
    "llama 3": ("LlamaConfig", {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}, "tie_word_embeddings": True}),
    "llama gelu": ("LlamaConfig", {"hidden_act": "gelu"}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "arcee": ("ArceeConfig", {}),
    "arcee yarn": ("ArceeConfig", {"rope_parameters": {**YARN, "rope_theta": 10000.0}}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
}


def write_source(folder: Path, config_class: str, changes: dict, **saving: object) -> torch.nn.Module:
    torch.manual_seed(5)
    config = getattr(transformers, config_class)(**{**TINY, **changes}, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) / 4)
    model.save_pretrained(folder, **saving)
    return model


@pytest.mark.parametrize("kind", SOURCES)
def test_there_and_back(tmp_path: Path, kind: str) -> None:
    """from-hf: the same logits; then to-hf: bit-equal tensors under the same names."""
    config_class, changes = SOURCES[kind]
    source = write_source(tmp_path / "hf", config_class, changes, max_shard_size="100KB")
    save_run(tmp_path / "other", random_model(configuration()))
    to_hf(tmp_path / "other", tmp_path / "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "hf" / name).write_bytes((tmp_path / "tokenizer" / name).read_bytes())

    assert convert.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "in")]) == 0
    opened = open_checkpoint(tmp_path / "in")
    assert opened.kinds() == {"weight"} and opened.manifest.adam_step is None and opened.manifest.step == 0
    model = load_model(opened, torch.device("cpu"))
    tokens = documents()
    with torch.no_grad():
        ours, theirs = model(tokens), source(tokens).logits
    assert theirs.std() > 0.5 and (ours - theirs).abs().max() < 1e-4

    to_hf(tmp_path / "in", tmp_path / "out")
    again = load_exported(tmp_path / "out").state_dict()
    for name, value in source.state_dict().items():
        assert torch.equal(again[name], value), name
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "hf" / "tokenizer.json").read_bytes()
    for key in ("max_position_embeddings", "vocab_size", "head_dim", "rms_norm_eps"):
        if kind != "arcee yarn" or key != "max_position_embeddings":
            assert read_json(tmp_path / "out" / "config.json")[key] == getattr(source.config, key)


def test_older_spellings_of_a_configuration(tmp_path: Path) -> None:
    """rope_theta and rope_scaling, as transformers 4 wrote them, and bfloat16 weights."""
    source = write_source(tmp_path / "hf", "LlamaConfig", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}})
    source.bfloat16().save_pretrained(tmp_path / "hf")
    config = read_json(tmp_path / "hf" / "config.json")
    del config["rope_parameters"]
    config |= {"rope_theta": 5e5, "rope_scaling": LLAMA3, "torch_dtype": config.pop("dtype")}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert convert.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "in")]) == 0
    model = load_model(open_checkpoint(tmp_path / "in"), torch.device("cpu"))
    with torch.no_grad():
        source = load_exported(tmp_path / "hf")  # .bfloat16() above rounds transformers' own rotary tables, too
        assert (model(documents()) - source(documents()).logits).abs().max() < 1e-4


def test_model_yaml_is_the_model(tmp_path: Path) -> None:
    import yaml

    write_source(tmp_path / "hf", "LlamaConfig", SOURCES["llama 3"][1])
    assert convert.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "in")]) == 0
    sections = yaml.safe_load((tmp_path / "in" / "model.yaml").read_text())
    model = load_model(open_checkpoint(tmp_path / "in"), torch.device("cpu"))
    assert ModelConfiguration(**sections["model"]) == model.configuration
    assert sections["checkpoint"] == {"resume": str(tmp_path / "in")}


# What cannot be converted


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a refusal prints."""
    capsys.readouterr()
    assert convert.main([str(argument) for argument in arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    assert not Path(str(arguments[-1])).exists()
    return lines[0]


@pytest.mark.parametrize(
    "changes,named",
    [
        ({"norm": "layernorm"}, "layernorm"),
        ({"activation": "gelu", "qk_norm": True}, "qk_norm with model.activation gelu"),
        ({"activation": "relu2", "qk_norm": True}, "qk_norm with model.activation relu2"),
        (
            {"activation": "swiglu", "num_heads": 3, "head_dim": 32},
            "hidden_size 64 is no multiple of model.num_heads 3",
        ),
    ],
)
def test_a_model_without_an_exact_counterpart_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict, named: str
) -> None:
    run = save_run(tmp_path / "run", random_model(configuration(**changes)))
    assert named in refused(capsys, "to-hf", run, tmp_path / "out")


@pytest.mark.parametrize(
    "changes,named",
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"model_type": "gpt2"}, "model_type gpt2"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "a mixture of experts"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding-window"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "sliding-window"),
        ({"num_experts": 8}, "experts"),
        ({"hidden_act": "gelu_new"}, "hidden_act gelu_new"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type longrope"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "rope_type llama3 needs"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"vocab_size": None}, "no vocab_size"),
    ],
)
def test_features_that_mainline_lacks_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict, named: str
) -> None:
    config = {**TINY, "model_type": "llama", "rope_theta": 10000.0, **changes}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    line = refused(capsys, "from-hf", tmp_path / "hf", tmp_path / "in")
    assert named in line and "config.json" in line


WHOLE = "a whole number of at least 1"
FLAG = "true or false"


@pytest.mark.parametrize(
    "changes,named",
    [
        ({"rope_scaling": 5}, "has rope_scaling 5 and it must be an object or null"),
        ({"rope_scaling": False}, "has rope_scaling false and it must be an object or null"),
        ({"rope_parameters": [1]}, "has rope_parameters [1] and it must be an object or null"),
        ({"rope_theta": 0}, "has rope_theta 0 and it must be a number above 1"),
        ({"rope_theta": None}, "has rope_theta null and it must be a number above 1"),
        ({"rope_theta": "1e4"}, 'has rope_theta "1e4" and it must be a number above 1'),
        ({"rope_theta": 10**400}, "has rope_theta 1000"),
        ({"rope_parameters": {"rope_theta": 0}}, "has rope_theta 0 and it must be a number above 1"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "for each type of layer"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, 'has factor "2" and it must be a number'),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling.factor is 0.5: Input should be"),
        ({"rope_scaling": {"rope_type": 0, "factor": 2.0}}, "rope_type 0"),
        ({"rope_scaling": {**YARN, "truncate": 0}}, f"has truncate 0 and it must be {FLAG}"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64.5}}, "64.5 and it must be a whole number"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor"),
        ({"rms_norm_eps": 0}, "has rms_norm_eps 0 and it must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "has rms_norm_eps NaN and it must be a number above 0"),
        ({"initializer_range": None}, "has initializer_range null and it must be a number above 0"),
        ({"hidden_size": "64"}, f'has hidden_size "64" and it must be {WHOLE}'),
        ({"num_hidden_layers": 0}, f"has num_hidden_layers 0 and it must be {WHOLE}"),
        ({"num_key_value_heads": True}, f"has num_key_value_heads true and it must be {WHOLE}"),
        ({"head_dim": 0}, f"has head_dim 0 and it must be {WHOLE}"),
        ({"max_position_embeddings": -1}, f"has max_position_embeddings -1 and it must be {WHOLE}"),
        ({"max_position_embeddings": "many"}, f'has max_position_embeddings "many" and it must be {WHOLE}'),
        ({"tie_word_embeddings": "false"}, f'has tie_word_embeddings "false" and it must be {FLAG}'),
        ({"tie_word_embeddings": 0}, f"has tie_word_embeddings 0 and it must be {FLAG}"),
        ({"attention_bias": []}, f"has attention_bias [] and it must be {FLAG}"),
        ({"hidden_act": ["silu"]}, 'has hidden_act ["silu"] and it must be a name'),
        ({"hidden_act": None}, "has hidden_act null and it must be a name"),
        ({"layer_types": 5}, "has layer_types 5"),
        ({"layer_types": ["linear_attention"]}, 'has layer_types ["linear_attention"]'),
    ],
)
def test_values_of_another_kind_are_refused_by_name(tmp_path: Path, changes: dict, named: str) -> None:
    """None is taken for something else that it is not, and none ends in a traceback."""
    with pytest.raises(ConversionError) as caught:
        from_huggingface({**TINY, "model_type": "llama", **changes}, tmp_path / "config.json")
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'} ") and named in str(caught.value)
    assert len(str(caught.value)) < 300


def test_what_a_configuration_leaves_out_has_its_default(tmp_path: Path) -> None:
    """null is the same as left out; for the key heads it is as many as query heads, whatever the type's default."""
    config = {
        **TINY,
        "model_type": "mistral",
        "sliding_window": None,
        "rope_scaling": None,
        "tie_word_embeddings": None,
    }
    model, _ = from_huggingface({**config, "num_key_value_heads": None, "head_dim": None}, tmp_path)
    assert model.rope_theta == 10000.0 and model.norm_eps == 1e-6 and model.rope_scaling is None
    assert model.num_kv_heads == model.num_heads and not model.tie_embeddings


def test_json_without_an_end_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("[" * 100_000)
    assert "config.json is no readable JSON" in refused(capsys, "from-hf", tmp_path / "hf", tmp_path / "in")


class Bomb:
    """Would leave a trace if it were unpickled."""

    def __reduce__(self) -> tuple:
        return Path.write_text, (Path("unpickled"), "!")


def test_wrong_weight_files_are_refused_and_nothing_is_unpickled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_source(tmp_path / "hf", "LlamaConfig", {})
    path = tmp_path / "hf" / "model.safetensors"
    sound = path.read_bytes()
    weights = load_file(path)

    def attempt() -> str:
        return refused(capsys, "from-hf", tmp_path / "hf", tmp_path / "in")

    path.write_bytes(pickle.dumps(Bomb()).ljust(len(sound), b"\0"))
    assert "model.safetensors is not a sound safetensors file" in attempt()
    path.write_bytes(sound[:-100])
    assert "does not lie in the file" in attempt()
    save_file({**weights, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, path)
    assert "q_proj.bias, which Mainline's model has no place for" in attempt()
    save_file({name: value for name, value in weights.items() if "layers.2.mlp.up" not in name}, path)
    assert "has no model.layers.2.mlp.up_proj.weight" in attempt()
    save_file({**weights, "model.norm.weight": torch.zeros(65)}, path)
    assert "model.norm.weight with shape [65]" in attempt()
    path.unlink()
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    assert "pytorch_model.bin is a pickle" in attempt()
    assert not Path("unpickled").exists()


def test_a_tied_source_with_another_head_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_source(tmp_path / "hf", "LlamaConfig", {"tie_word_embeddings": True})
    path = tmp_path / "hf" / "model.safetensors"
    weights = load_file(path)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1}, path)
    assert "lm_head.weight of its own" in refused(capsys, "from-hf", tmp_path / "hf", tmp_path / "in")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path)
    assert convert.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "in")]) == 0


@pytest.mark.parametrize(
    "options,named",
    [
        (["--shard-size", "nan"], "--shard-size is nan and must be above 0 and at most 1e+09"),
        (["--shard-size", "inf"], "--shard-size is inf"),
        (["--shard-size", "1e300"], "--shard-size is 1e+300"),
        (["--shard-size", "0"], "--shard-size is 0"),
        (["--max-positions", "-7"], "--max-positions is -7 and must be at least 1"),
        (["--max-positions", "0"], "--max-positions is 0"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    run = save_run(tmp_path / "run", random_model(configuration()))
    assert named in refused(capsys, "to-hf", run, *options, tmp_path / "out")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_weights_that_are_not_finite_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float
) -> None:
    """The last element of one tensor, in the file's own type; 1e300 is finite there and not in float32."""
    write_source(tmp_path / "hf", "LlamaConfig", {})
    path, key = tmp_path / "hf" / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(path)
    weights[key] = weights[key].double()
    weights[key][-1, -1] = value
    save_file(weights, path)
    line = refused(capsys, "from-hf", tmp_path / "hf", tmp_path / "in")
    what = "beyond float32's range" if value == 1e300 else "that are NaN or infinite"
    assert f"{path} has {key} with values {what}" in line
    assert not list(tmp_path.glob(".in*"))


def test_an_index_that_promises_a_head_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tied model's head is compared with its embedding, and here it is nowhere."""
    write_source(tmp_path / "hf", "LlamaConfig", {"tie_word_embeddings": True})
    names = [*load_file(tmp_path / "hf" / "model.safetensors"), "lm_head.weight"]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    line = refused(capsys, "from-hf", tmp_path / "hf", tmp_path / "in")
    assert "model.safetensors has no lm_head.weight, which the index says it holds" in line


@pytest.mark.parametrize("limit", [100_000, 2_000])
def test_what_cannot_be_written_is_named(tmp_path: Path, limit: int) -> None:
    """The kernel refuses to let a file grow, as it does on a full disk: in the weights, or already in the tokenizer."""
    run = save_run(tmp_path / "run", random_model(configuration()))
    command = [sys.executable, "-B", convert.__file__, "to-hf", str(run), str(tmp_path / "out")]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert result.returncode == 2 and result.stderr == f"error: {tmp_path / 'out'}: file too large\n"
    assert not list(tmp_path.glob("*out*"))


def test_a_copy_that_finds_no_room_names_where_it_was_to_go(tmp_path: Path) -> None:
    """Python names the file that is copied first, and that one is not what is full."""
    with pytest.raises(OSError) as caught, convert.complete_or_nothing(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device", "tokenizer.json", None, ".out.partial/tokenizer.json")
    assert sentence(caught.value) == f"{tmp_path / 'out'}: no space left on device"


def test_other_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = save_run(tmp_path / "run", random_model(configuration()))
    out = tmp_path / "out"
    assert "is no folder, and so no run" in refused(capsys, "to-hf", tmp_path / "nothing", out)
    assert "neither a checkpoint nor a run" in refused(capsys, "to-hf", tmp_path, out)
    assert "only local folders are read" in refused(capsys, "from-hf", tmp_path / "nothing", out)
    assert "config.json is missing" in refused(capsys, "from-hf", tmp_path / "run", out)
    tokenizer = tmp_path / "corpus" / "tokenizer.model"
    tokenizer.write_bytes(tokenizer.read_bytes() + b"\0")
    assert "is not the tokenizer that" in refused(capsys, "to-hf", run, out)
    tokenizer.unlink()
    assert "corpus/tokenizer.model is missing: say where" in refused(capsys, "to-hf", run, out)
    file = run / "checkpoints" / "step_00000020" / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "rank_00000.safetensors has" in refused(capsys, "to-hf", run / "checkpoints" / "step_00000020", out)
    out.mkdir()
    (out / "mine").touch()
    assert convert.main(["to-hf", str(run), str(out)]) == 2


def test_list_says_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = save_run(tmp_path / "run", random_model(configuration()), tensor=2)
    assert convert.main(["list", str(run)]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert re.split(r"  +", head.strip()) == ["step", "tokens", "validation loss", "layout", "size", "state"]
    cells = re.split(r"  +", row.strip())
    assert cells[:4] == ["20", "40,960", "2.5000", "pipeline 1 x tensor 2 x data 1"]
    assert cells[4].endswith("MiB") and cells[5] == "sound, weights only"
    damaged = run / "checkpoints" / "step_00000020" / "rank_00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    assert convert.main(["list", str(run)]) == 0
    assert "rank_00001.safetensors is damaged" in capsys.readouterr().out


def test_conversion_streams(tmp_path: Path) -> None:
    """Memory grows by less than one layer and one shard, of a model that is more than four times as large."""
    model = random_model(configuration(hidden_size=512, num_layers=6, activation="swiglu", ffn_hidden_size=3413))
    run = save_run(tmp_path / "run", model, tensor=2)
    total = sum(parameter.numel() * 4 for parameter in model.parameters())
    layer = sum(parameter.numel() * 4 for parameter in model.blocks[0].parameters())
    shard = 8 * 10**6
    assert total > 4 * (layer + shard)
    for arguments in (
        ["to-hf", run, tmp_path / "out", "--shard-size", shard / 1e9],
        ["from-hf", tmp_path / "out", tmp_path / "in"],
    ):
        command = [sys.executable, convert.__file__, *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        found = re.search(r"peak memory (\d+) MiB \((\d+) before", result.stdout)
        assert found, result.stdout
        grown = (int(found[1]) - int(found[2])) * 2**20
        assert grown < layer + shard, (grown, layer, total)
    again = checkpoint.read(tmp_path / "in")
    for name, value in model.state_dict().items():
        assert torch.equal(again[name], value)
