"""How a model is called elsewhere: Hugging Face's config.json and tensor names, in both directions.

Mainline's rotary layout is Llama's, so no weight is permuted or split: a tensor changes its name and nothing else.
What has no exact counterpart is refused by name, never approximated. Nothing here imports transformers.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from model.configuration import Activation, ModelConfiguration, NormKind, RopeType

SOURCE_TYPES = ("llama", "mistral", "qwen3", "arcee")
"""The `model_type`s that are read; mistral is computed as llama is, so it is written back as llama."""

BLOCK_NAMES = {
    "attention_norm.gain": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "attention.query_norm.gain": "self_attn.q_norm.weight",
    "attention.key_norm.gain": "self_attn.k_norm.weight",
    "feed_forward_norm.gain": "post_attention_layernorm.weight",
    "feed_forward.up.weight": "mlp.up_proj.weight",
    "feed_forward.gate.weight": "mlp.gate_proj.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}
OTHER_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.gain": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
# Published configurations leave out what is their type's default.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "rms_norm_eps": 1e-6},
    "mistral": {"hidden_act": "silu", "rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen3": {"hidden_act": "silu", "rms_norm_eps": 1e-6, "num_key_value_heads": 32, "head_dim": 128},
    "arcee": {"hidden_act": "relu2", "rms_norm_eps": 1e-5},
}
SIZE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "original_max_position_embeddings",
)
NUMBER_KEYS = {"rms_norm_eps": 0, "rope_theta": 1, "initializer_range": 0}  # to what each must be above
FLAG_KEYS = ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window")
OBJECT_KEYS = ("rope_scaling", "rope_parameters", "quantization_config")
ACTIVATIONS = {  # (ungated?, hidden_act) to ours
    (False, "silu"): Activation.SWIGLU,
    (False, "swish"): Activation.SWIGLU,
    (False, "gelu"): Activation.GEGLU,
    (True, "gelu"): Activation.GELU,
    (True, "relu2"): Activation.RELU2,
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "arcee": "ArceeForCausalLM"}


class ConversionError(Exception):
    """A model or tokenizer that has no exact counterpart on the other side, or files that are not as they should be."""


def huggingface_name(name: str) -> str:
    """What a parameter of ours is called in a Hugging Face folder."""
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    _, block, rest = name.split(".", 2)
    return f"model.layers.{block}.{BLOCK_NAMES[rest]}"


def to_huggingface(model: ModelConfiguration, max_positions: int, end_of_document: int, dtype: str) -> dict[str, Any]:
    """config.json for a model. ConversionError where transformers has no model that computes the same."""
    if model.norm is NormKind.LAYERNORM:
        raise ConversionError(
            "model.norm is layernorm (with a gain and no bias), and no Hugging Face model here has it"
        )
    ungated = not model.activation.gated
    if ungated and model.qk_norm:
        raise ConversionError(
            f"model.qk_norm with model.activation {model.activation} has no counterpart: Hugging Face's arcee has no "
            "QK-norm, and its qwen3 is gated"
        )
    kind = "arcee" if ungated else "qwen3" if model.qk_norm else "llama"
    if kind != "qwen3" and model.hidden_size % model.num_heads:
        raise ConversionError(
            f"model.hidden_size {model.hidden_size} is no multiple of model.num_heads {model.num_heads}, which Hugging "
            f"Face's {kind} demands"
        )
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": next(
            act for (plain, act), ours in ACTIVATIONS.items() if (plain, ours) == (ungated, model.activation)
        ),
        "max_position_embeddings": max_positions,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": model.init_std,
        "bos_token_id": None,
        "eos_token_id": end_of_document,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if kind != "qwen3":
        config["mlp_bias"] = False
    else:
        config.update(use_sliding_window=False, sliding_window=None)
    if model.rope_scaling is not None:
        scaling = {key: value for key, value in model.rope_scaling.model_dump(mode="json").items() if value is not None}
        original = scaling.get("original_max_position_embeddings")
        if model.rope_scaling.rope_type is RopeType.DYNAMIC:
            # There the original length is the model's max_position_embeddings, and the key itself is unknown.
            config["max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
        elif original is not None:
            config["max_position_embeddings"] = max(max_positions, int(original * model.rope_scaling.factor))
        config["rope_scaling"] = scaling
    return config


def from_huggingface(config: Mapping[str, Any], where: Path) -> tuple[ModelConfiguration, int]:
    """Our configuration for a config.json, and its max_position_embeddings.

    ConversionError, naming the file `where` and the feature, for whatever Mainline does not compute.
    """
    kind = config.get("model_type")
    if kind not in SOURCE_TYPES:
        experts = " (a mixture of experts)" if any("expert" in key for key in config) else ""
        raise ConversionError(f"{where} has model_type {kind}{experts}; {', '.join(SOURCE_TYPES)} can be read")
    _check_values(config, where)
    values = {**DEFAULTS[kind], **{key: value for key, value in config.items() if value is not None}}
    if "num_key_value_heads" in config and config["num_key_value_heads"] is None:
        values.pop("num_key_value_heads", None)  # null is no default of the type, but as many as there are query heads
    if kind == "mistral" and "sliding_window" in config and config["sliding_window"] is None:
        del values["sliding_window"]
    _refuse_foreign_features(kind, values, where)
    activation = ACTIVATIONS.get((kind == "arcee", values["hidden_act"]))
    if activation is None:
        allowed = ", ".join(act for ungated, act in ACTIVATIONS if ungated == (kind == "arcee"))
        raise ConversionError(f"{where} has hidden_act {values['hidden_act']}; for {kind} {allowed} can be read")
    try:
        length = values["max_position_embeddings"]
        theta, scaling = _rope(values, length, where)
        model = ModelConfiguration(
            hidden_size=values["hidden_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=values["num_attention_heads"],
            num_kv_heads=values.get("num_key_value_heads"),
            head_dim=values.get("head_dim"),
            ffn_hidden_size=values["intermediate_size"],
            activation=activation,
            norm=NormKind.RMSNORM,
            norm_eps=values["rms_norm_eps"],
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=values.get("tie_word_embeddings", False),
            qk_norm=kind == "qwen3",
            vocab_size=values["vocab_size"],
            init_std=values.get("initializer_range", 0.02),
        )
    except KeyError as error:
        raise ConversionError(f"{where} has no {error.args[0]}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        if place and isinstance(first["input"], str | int | float):
            place = f"{place} is {first['input']}:"
        message = " ".join(part for part in (place, first["msg"]) if part)
        raise ConversionError(f"{where} does not describe a model of ours: {message}") from error
    return model, length


def _wrong_value(where: Path, key: str, value: Any, allowed: str) -> ConversionError:
    shown = json.dumps(value)
    if len(shown) > 80:  # an object can be of any length, and this is one sentence
        shown = f"{shown[:80]}..."
    return ConversionError(f"{where} has {key} {shown} and it must be {allowed}")


def _check_size(where: Path, key: str, value: Any) -> None:
    if type(value) is not int or value < 1:  # true is an int, too, but no size
        raise _wrong_value(where, key, value, "a whole number of at least 1")


def _check_number(where: Path, key: str, value: Any, above: float) -> None:
    if type(value) not in (int, float) or not above < value <= sys.float_info.max:  # NaN is in no range
        allowed = "a number" if above == -sys.float_info.max else f"a number above {above}"
        raise _wrong_value(where, key, value, allowed)


def _check_values(config: Mapping[str, Any], where: Path) -> None:
    """ConversionError for a key whose value is of another kind than it can have.

    Python takes much for something else (a "false" for true, a 0 for not given), and the model would be another one.
    null means not given, but where a number or a name would have to be guessed instead, it is refused.
    """
    for key in SIZE_KEYS:
        if config.get(key) is not None:
            _check_size(where, key, config[key])
    for key, above in NUMBER_KEYS.items():
        if key in config:
            _check_number(where, key, config[key], above)
    for key in FLAG_KEYS:
        if config.get(key) not in (None, True, False) or type(config.get(key)) in (int, float):
            raise _wrong_value(where, key, config[key], "true or false")
    for key in OBJECT_KEYS:
        if not isinstance(config.get(key), dict | None):
            raise _wrong_value(where, key, config[key], "an object or null")
    if not isinstance(config.get("hidden_act", ""), str):
        raise _wrong_value(where, "hidden_act", config["hidden_act"], "a name")
    layer_types = config.get("layer_types")
    if layer_types is not None and not (
        isinstance(layer_types, list) and all(each in ("full_attention", "sliding_attention") for each in layer_types)
    ):
        raise _wrong_value(where, "layer_types", layer_types, 'a list of "full_attention"')


def _refuse_foreign_features(kind: str, values: Mapping[str, Any], where: Path) -> None:
    for key in ("attention_bias", "mlp_bias"):
        if values.get(key):
            raise ConversionError(f"{where} has {key}, and Mainline's matrices have no biases")
    window = values.get("use_sliding_window") if kind == "qwen3" else values.get("sliding_window")
    if window or "sliding_attention" in values.get("layer_types", ()):
        raise ConversionError(f"{where} has sliding-window attention, which Mainline has not")
    if any("expert" in key and value for key, value in values.items()):
        raise ConversionError(f"{where} has experts, and Mainline has no mixture of experts")
    if values.get("quantization_config"):
        raise ConversionError(f"{where} is of a quantized model; give the folder of the full weights")
    rope = values.get("rope_parameters") or {}
    if any(place.get("partial_rotary_factor") not in (None, 1) for place in (rope, values)):
        raise ConversionError(f"{where} has a partial_rotary_factor, and Mainline rotates whole heads")


def _rope(values: Mapping[str, Any], length: int, where: Path) -> tuple[float, dict[str, Any] | None]:
    """(rope_theta, rope_scaling): the older keys of that name, or both within the newer `rope_parameters`."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if "rope_theta" in given:
        _check_number(where, "rope_theta", given["rope_theta"], NUMBER_KEYS["rope_theta"])
    rope = {key: value for key, value in given.items() if value is not None}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ConversionError(f"{where} has rotary parameters for each type of layer, and Mainline has them for all")
    theta = rope.pop("rope_theta", values.get("rope_theta", 10000.0))
    kind = rope.pop("rope_type", "default")
    kind = rope.pop("type", kind)  # an older spelling, sometimes beside the newer
    rope.pop("partial_rotary_factor", None)
    if kind == "default":
        return float(theta), None
    if kind not in list(RopeType):
        raise ConversionError(f"{where} has rope_type {kind}; default, {', '.join(RopeType)} can be read")
    if kind == RopeType.DYNAMIC:
        rope["original_max_position_embeddings"] = length
    elif kind == RopeType.YARN:
        rope.setdefault("original_max_position_embeddings", values.get("original_max_position_embeddings", length))
    elif kind == RopeType.LINEAR:
        rope.pop("original_max_position_embeddings", None)  # it plays no part there
    for key, value in rope.items():
        if key == "original_max_position_embeddings":
            _check_size(where, key, value)
        elif key != "truncate":
            _check_number(where, key, value, above=-sys.float_info.max)
        elif not isinstance(value, bool):
            raise _wrong_value(where, key, value, "true or false")
    return float(theta), {"rope_type": kind, **rope}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ConversionError naming it otherwise."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConversionError(f"{path} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConversionError(f"{path} is no readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConversionError(f"{path} is no JSON object")
    return value
