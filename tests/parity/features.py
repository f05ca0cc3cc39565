"""Cases beside the matrix: features of the model, number formats, odd sizes."""

from tests.parity.cases import Case

LLAMA3 = "{rope_type: llama3, factor: 4, original_max_position_embeddings: 16, low_freq_factor: 1, high_freq_factor: 4}"
YARN = "{rope_type: yarn, factor: 4, original_max_position_embeddings: 16}"
DYNAMIC = "{rope_type: dynamic, factor: 4, original_max_position_embeddings: 16}"
FOUR = "model.num_layers=4"


def _with(*layout: int, features: tuple[str, ...], **keywords: object) -> Case:
    return Case(*layout, overrides=(FOUR, *features), **keywords)  # type: ignore[arg-type]


FEATURES = [
    _with(2, 2, 1, features=("model.num_kv_heads=2",)),
    _with(1, 4, 1, features=("model.num_kv_heads=4", "model.qk_norm=true"), sequence_parallel=True),
    _with(2, 2, 1, features=("model.qk_norm=true",)),
    _with(1, 2, 2, features=("model.norm=layernorm",), sequence_parallel=True),
    _with(1, 2, 1, features=("model.activation=geglu",)),
    _with(2, 1, 1, features=("model.activation=relu2",), tied=True),
    _with(2, 2, 1, features=("model.dropout=0.1",)),
    _with(1, 2, 2, features=("model.dropout=0.1",), sequence_parallel=True, recompute="block"),
    _with(2, 1, 1, features=("model.dropout=0.1",), schedule="dualpipev", micro_batches=4, recompute="sublayer"),
    _with(1, 1, 2, features=("model.dropout=0.1",), zero=3, recompute="sublayer"),
    _with(2, 2, 1, features=("model.z_loss=0.01",)),
    _with(1, 1, 2, features=("model.z_loss=0.01",), zero=2, tied=True),
    _with(2, 1, 1, features=("model.rope_scaling={rope_type: linear, factor: 4}",)),
    _with(1, 2, 1, features=(f"model.rope_scaling={DYNAMIC}",)),
    _with(2, 1, 1, features=(f"model.rope_scaling={YARN}",)),
    _with(1, 2, 1, features=(f"model.rope_scaling={LLAMA3}",), sequence_parallel=True),
    _with(2, 2, 1, features=("data.document_mask=true",), recompute="sublayer"),
    _with(2, 1, 2, features=("data.document_mask=true", "model.dropout=0.1")),
    _with(1, 2, 1, features=("optimizer.weight_decay=1.0",)),
    _with(1, 1, 2, features=("parallel.offload_optimizer=true",), zero=2),
    _with(1, 1, 2, features=("parallel.offload_optimizer=true",), zero=3),
    Case(3, 1, 1, overrides=("model.num_layers=7",)),
    Case(3, 1, 1, overrides=("model.num_layers=7",), tied=True),
    _with(2, 2, 1, features=("parallel.partition=[1,3]",)),
    _with(2, 2, 2, features=(), table=(509, True, False)),
    _with(1, 4, 1, features=(), table=(257, True, False), tied=True),
    _with(1, 2, 2, features=(), table=(257, True, False), sequence_parallel=True, zero=0),
    _with(2, 1, 2, features=(), table=(512, True, False), micro_batches=8),
    _with(2, 1, 1, features=(), table=(512, True, False), schedule="dualpipev", micro_batches=8),
    _with(1, 1, 2, features=(), table=(509, True, False), zero=3, micro_batches=8),
]
"""In fp32, held to the same bounds as every layout."""

BF16 = [
    Case(2, 1, 1, dtype="bf16"),
    Case(1, 2, 1, dtype="bf16"),
    Case(1, 1, 2, dtype="bf16"),
    Case(1, 1, 2, dtype="bf16", micro_batches=1),
    Case(1, 1, 2, dtype="bf16", micro_batches=8),
    Case(2, 2, 2, dtype="bf16", sequence_parallel=True),
    Case(1, 4, 1, dtype="bf16"),
    Case(2, 1, 2, dtype="bf16", tied=True, activation="swiglu"),
    Case(2, 1, 1, dtype="bf16", schedule="dualpipev", micro_batches=8, recompute="block"),
    Case(1, 1, 2, dtype="bf16", zero=2),
    Case(1, 1, 2, dtype="bf16", zero=3),
]
"""In bfloat16, held to what summation order alone does in one process."""

FP16 = [
    _with(1, 1, 1, features=(), dtype="fp16"),
    _with(2, 1, 1, features=(), dtype="fp16", tied=True),
    _with(1, 2, 1, features=(), dtype="fp16", sequence_parallel=True),
    _with(2, 1, 2, features=(), dtype="fp16"),
    _with(1, 1, 2, features=(), dtype="fp16", zero=2),
    _with(1, 1, 2, features=(), dtype="fp16", zero=3),
]
"""In float16 with a moving loss scale, compared with one process in fp32."""
