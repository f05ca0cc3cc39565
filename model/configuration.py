"""The `model` section of a configuration: sizes and choices, checked when they are read.

`Section` is the base of every section. A `ModelConfiguration` that exists is one that can be built:
what cannot be is refused here, in one sentence that names the key, the value found and what is allowed.
"""

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Size = Annotated[int, Field(gt=0, lt=2**31, strict=True)]
"""A whole number of at least 1. Strict, because `true`, `2.0` and `"8"` are mistakes and not sizes."""

DERIVED: Any = None
"""Default of a field that follows from others; the section's last validator puts the value in its place."""


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values never change, NaN and infinity are no values."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Activation(StrEnum):
    """What stands between the feed-forward matrices; `swiglu` and `geglu` have a third matrix, the gate."""

    GELU = "gelu"
    SWIGLU = "swiglu"
    GEGLU = "geglu"
    RELU2 = "relu2"

    @property
    def gated(self) -> bool:
        """Whether a third matrix, `gate`, multiplies the hidden layer."""
        return self in (Activation.SWIGLU, Activation.GEGLU)


class NormKind(StrEnum):
    """The normalization before each branch and before the head."""

    RMSNORM = "rmsnorm"
    LAYERNORM = "layernorm"


class RopeType(StrEnum):
    """How rotary frequencies are stretched beyond the length that the model was pretrained on."""

    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LLAMA3 = "llama3"


_ROPE_KEYS: dict[RopeType, tuple[set[str], set[str]]] = {  # (needed, possible) besides rope_type and factor
    RopeType.LINEAR: (set(), set()),
    RopeType.DYNAMIC: ({"original_max_position_embeddings"}, set()),
    RopeType.YARN: (
        {"original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    RopeType.LLAMA3: ({"original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}, set()),
}


class RopeScaling(Section):
    """Scaling of the rotary frequencies; the keys are those of the `rope_scaling` dictionary of Hugging Face models."""

    rope_type: RopeType
    """`linear` (positions divided), `dynamic` (NTK-aware: the base grows with the sequence), `yarn` or `llama3`."""

    factor: float = Field(ge=1)
    """How many times longer the sequences may become than the original length."""

    original_max_position_embeddings: Size | None = None
    """Sequence length of the pretraining, in tokens (dynamic, yarn, llama3). For `dynamic` it is what Hugging Face
    calls the model's `max_position_embeddings`: the base grows for sequences longer than this."""

    attention_factor: float | None = Field(default=None, gt=0)
    """Factor on the tables, so its square is on the attention scores (yarn; default 0.1 ln(factor) + 1)."""

    beta_fast: float | None = Field(default=None, gt=0)
    """Dimensions that turn more often than this within the original length are kept as they are (yarn; default 32)."""

    beta_slow: float | None = Field(default=None, gt=0)
    """Dimensions that turn less often than this are divided by `factor` (yarn; default 1)."""

    mscale: float | None = None
    """Numerator's weight in the default `attention_factor`, used with `mscale_all_dim` (yarn, DeepSeek models)."""

    mscale_all_dim: float | None = None
    """Denominator's weight in the default `attention_factor` (yarn, DeepSeek models)."""

    truncate: bool | None = None
    """Whether the bounds of the ramp are rounded outwards to whole dimensions (yarn; default true)."""

    low_freq_factor: float | None = Field(default=None, gt=0)
    """Wavelengths above original length / this are divided by `factor` (llama3)."""

    high_freq_factor: float | None = Field(default=None, gt=0)
    """Wavelengths below original length / this are kept (llama3); between the two there is a ramp."""

    @model_validator(mode="after")
    def _keys_belong_to_the_type(self) -> Self:
        needed, possible = _ROPE_KEYS[self.rope_type]
        given = {key for key, value in self if value is not None} - {"rope_type", "factor"}
        if missing := sorted(needed - given):
            raise ValueError(f"rope_type {self.rope_type} needs {', '.join(missing)}")
        if foreign := sorted(given - needed - possible):
            allowed = ", ".join(sorted(needed | possible | {"factor"}))
            raise ValueError(f"rope_type {self.rope_type} has no use for {', '.join(foreign)}, only for {allowed}")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            raise ValueError(f"low_freq_factor is {low} and must be below high_freq_factor, which is {high}")
        return self


class ModelConfiguration(Section):
    """Sizes and choices of one decoder-only transformer."""

    hidden_size: Size
    """Width of the residual stream."""

    num_layers: Size
    """Number of blocks."""

    num_heads: Size
    """Query heads of each block's attention."""

    num_kv_heads: Size = DERIVED
    """Key and value heads (default: num_heads); fewer make the attention grouped-query, and must divide num_heads."""

    head_dim: Size = DERIVED
    """Width of one head, even (default: hidden_size / num_heads)."""

    ffn_hidden_size: Size = DERIVED
    """Width between the feed-forward matrices (default: 4 x hidden_size)."""

    activation: Activation = Activation.GELU
    """gelu (the exact one), swiglu, geglu or relu2 (the square of ReLU)."""

    norm: NormKind = NormKind.RMSNORM
    """rmsnorm or layernorm; both have a gain and no bias."""

    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square (to the variance, for layernorm) before the root is taken."""

    rope_theta: float = Field(default=10000.0, gt=1)
    """Base of the rotary frequencies."""

    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary frequencies to longer sequences (default: none)."""

    tie_embeddings: bool = False
    """Whether the head uses the embedding's matrix instead of one of its own."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability with which an element of the embedding or of a branch's result is dropped in training."""

    qk_norm: bool = False
    """Whether queries and keys go through an RMSNorm over head_dim before they are rotated."""

    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared log of the softmax's denominator in what is minimised (0: left out)."""

    vocab_size: Size | None = None
    """Number of token ids (default: the tokenizer's); padding for tensor parallelism is not part of it."""

    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of initial weights; residual output matrices have it divided by sqrt(2 x num_layers)."""

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        derived = ("num_kv_heads", "head_dim", "ffn_hidden_size")
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if not (key in derived and value is None)}
        return data

    @model_validator(mode="after")
    def _derive_and_check(self) -> Self:
        derive = object.__setattr__  # frozen for everybody else; this is still the construction
        if self.num_kv_heads is DERIVED:
            derive(self, "num_kv_heads", self.num_heads)
        if self.ffn_hidden_size is DERIVED:
            derive(self, "ffn_hidden_size", 4 * self.hidden_size)
        if self.head_dim is DERIVED:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size is {self.hidden_size} and must be divisible by num_heads, "
                    f"which is {self.num_heads}, where head_dim is not given"
                )
            derive(self, "head_dim", self.hidden_size // self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads} and must be divisible by num_kv_heads, {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim} and must be even, because rotary embedding turns pairs")
        if self.rope_scaling and self.rope_scaling.rope_type is RopeType.DYNAMIC and self.head_dim < 4:
            raise ValueError(f"head_dim is {self.head_dim} and must be at least 4 with rope_type dynamic")
        return self

    @property
    def query_size(self) -> int:
        """Width of all query heads together; num_heads x head_dim need not equal hidden_size."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (and of all value heads)."""
        return self.num_kv_heads * self.head_dim

    @property
    def vocabulary(self) -> int:
        """vocab_size, known. Raises ValueError where neither configuration nor tokenizer has given it yet."""
        if self.vocab_size is None:
            raise ValueError("vocab_size is not known yet: set model.vocab_size or give a tokenizer")
        return self.vocab_size
