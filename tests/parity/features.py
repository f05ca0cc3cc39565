"""Cases beside the matrix: plain layouts, pipelines, features of the model, odd sizes, number formats."""

from tests.parity.cases import Case, small

LLAMA3 = "{rope_type: llama3, factor: 4, original_max_position_embeddings: 16, low_freq_factor: 1, high_freq_factor: 4}"
YARN = "{rope_type: yarn, factor: 4, original_max_position_embeddings: 16}"
DYNAMIC = "{rope_type: dynamic, factor: 4, original_max_position_embeddings: 16}"

LAYOUTS = [
    Case(*layout, overrides=("model.num_layers=4",))
    for layout in (
        (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 4, 1), (2, 2, 2),
    )
]  # fmt: skip
"""Layouts and nothing else."""

PIPELINES = [
    small(2, 1, 1),
    small(4, 1, 1, micro_batches=8),
    small(2, 1, 1, schedule="dualpipev", micro_batches=8),
    small(4, 1, 1, schedule="dualpipev", micro_batches=8),
    small(2, 1, 1, tied=True),
    small(2, 1, 2, schedule="dualpipev", micro_batches=8, tied=True),
    small(2, 2, 1),
]
"""Each is compared with the same one without its pipeline."""

FEATURES = [
    small(2, 2, 1, overrides=("model.num_kv_heads=2",)),
    small(1, 4, 1, overrides=("model.num_kv_heads=4", "model.qk_norm=true"), sequence_parallel=True),
    small(2, 2, 1, overrides=("model.qk_norm=true",)),
    small(1, 2, 2, overrides=("model.norm=layernorm",), sequence_parallel=True),
    small(1, 2, 1, overrides=("model.activation=geglu",)),
    small(2, 1, 1, overrides=("model.activation=relu2",), tied=True),
    small(2, 2, 1, overrides=("model.dropout=0.1",)),
    small(1, 2, 2, overrides=("model.dropout=0.1",), sequence_parallel=True, recompute="block"),
    small(2, 1, 1, overrides=("model.dropout=0.1",), schedule="dualpipev", micro_batches=4, recompute="sublayer"),
    small(1, 1, 2, overrides=("model.dropout=0.1",), zero=3, recompute="sublayer"),
    small(2, 2, 1, overrides=("model.z_loss=0.01",)),
    small(1, 1, 2, overrides=("model.z_loss=0.01",), zero=2, tied=True),
    small(2, 1, 1, overrides=("model.rope_scaling={rope_type: linear, factor: 4}",)),
    small(1, 2, 1, overrides=(f"model.rope_scaling={DYNAMIC}",)),
    small(2, 1, 1, overrides=(f"model.rope_scaling={YARN}",)),
    small(1, 2, 1, overrides=(f"model.rope_scaling={LLAMA3}",), sequence_parallel=True),
    small(2, 2, 1, overrides=("data.document_mask=true",), recompute="sublayer"),
    small(2, 1, 2, overrides=("data.document_mask=true", "model.dropout=0.1")),
    small(1, 2, 1, overrides=("optimizer.weight_decay=1.0",)),
    small(1, 1, 2, overrides=("parallel.offload_optimizer=true",), zero=2),
    small(1, 1, 2, overrides=("parallel.offload_optimizer=true",), zero=3),
    Case(3, 1, 1, overrides=("model.num_layers=7",)),
    Case(3, 1, 1, overrides=("model.num_layers=7",), tied=True),
    small(2, 2, 1, overrides=("model.num_layers=4", "parallel.partition=[1,3]")),
    small(2, 2, 2, table=(509, True, False)),
    small(1, 4, 1, table=(257, True, False), tied=True),
    small(1, 2, 2, table=(257, True, False), sequence_parallel=True, zero=0),
    small(2, 1, 2, table=(512, True, False), micro_batches=8),
    small(2, 1, 1, table=(512, True, False), schedule="dualpipev", micro_batches=8),
    small(1, 1, 2, table=(509, True, False), zero=3, micro_batches=8),
]
"""In fp32, held to the same bounds as every layout."""

BF16 = [
    small(2, 1, 1, dtype="bf16"),
    small(1, 2, 1, dtype="bf16"),
    small(1, 1, 2, dtype="bf16"),
    small(1, 1, 2, dtype="bf16", micro_batches=1),
    small(1, 1, 2, dtype="bf16", micro_batches=8),
    small(2, 2, 2, dtype="bf16", sequence_parallel=True),
    small(1, 4, 1, dtype="bf16"),
    small(2, 1, 2, dtype="bf16", tied=True, activation="swiglu"),
    small(2, 1, 1, dtype="bf16", schedule="dualpipev", micro_batches=8, recompute="block"),
    small(1, 1, 2, dtype="bf16", zero=2),
    small(1, 1, 2, dtype="bf16", zero=3),
]
"""In bfloat16, held to what summation order alone does in one process."""

FP16 = [
    small(1, 1, 1, dtype="fp16"),
    small(2, 1, 1, dtype="fp16", tied=True),
    small(1, 2, 1, dtype="fp16", sequence_parallel=True),
    small(2, 1, 2, dtype="fp16"),
    small(1, 1, 2, dtype="fp16", zero=2),
    small(1, 1, 2, dtype="fp16", zero=3),
]
"""In float16 with a moving loss scale, compared with one process in fp32."""
