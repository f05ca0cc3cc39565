"""Section A of the reported faults: gradients, loss, schedule and partition of pipelines, each with its check."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data.indexed import IndexedWriter
from model.configuration import ModelConfiguration
from model.initialization import initialize
from model.language_model import LanguageModel
from tests.parity.cases import Case, small
from tests.parity.compare import FIRST_STEP
from tests.parity.experiments import LENGTH, MICRO_BATCH, MICRO_BATCHES, evaluation_samples
from tests.parity.harness import Harness
from tests.parity.pool import CaseFailed
from training import checkpoint
from training.configuration import ConfigurationError

TABLE = (512, False, False)
RAGGED = (512, True, False)
EXPERIMENTS = "tests.parity.experiments:"


def experiment(harness: Harness, name: str, case: Case, timeout: float = 120.0, **arguments: object) -> list:
    """What each rank's probe returned."""
    given = {**case.arguments(harness.new_folder()), **arguments}
    return harness.pool.run(case.world, EXPERIMENTS + name, given, timeout)


def test_a1_a2_a4_a5_the_split_into_micro_batches_changes_nothing(harness: Harness) -> None:
    # One batch of 16 as 2 x 8, 4 x 4 and 8 x 2 samples, over two stages; norms and gradients, not only losses.
    for micro_batches in (2, 4, 8):
        verdict = harness.judge(small(2, 1, 1, micro_batches=micro_batches, overrides=("training.steps=3",)))
        assert verdict.sound, f"{micro_batches}: {verdict}"


@pytest.mark.parametrize("steps", [20, 8])
def test_a9_101_sequences_over_two_replicas_never_hang(harness: Harness, tmp_path: Path, steps: int) -> None:
    with IndexedWriter(tmp_path / "few", np.uint16) as writer:
        tokens = np.random.default_rng(0).integers(0, 512, 101 * 16 + 1)
        writer.add_document(tokens)
    overrides = (
        f"data.train={tmp_path / 'few'}", "data.tokenizer=null", "batch.sequence_length=16", f"training.steps={steps}",
        "batch.global_batch_size=14", "batch.micro_batch_size=1",
    )  # fmt: skip
    # 140 or 280 samples of 101, so the data ends inside a step; 7 micro-batches a replica.
    case = Case(2, 1, 2, overrides=(*overrides, "model.num_layers=2"))
    given = {**case.arguments(harness.new_folder())}
    ranks = harness.pool.run(case.world, "tests.parity.probes:train", given, timeout=60.0)
    assert [record["step"] for record in ranks[0]] == list(range(1, steps + 1))
    assert all(record["loss"] == ranks[0][n]["loss"] for rank in ranks for n, record in enumerate(rank))


@pytest.mark.parametrize(
    "case", [Case(2, 2, 2), Case(4, 1, 2), Case(1, 2, 4), Case(2, 1, 2, "dualpipev", micro_batches=4)], ids=str
)
def test_a10_processes_of_one_pipeline_read_the_same_and_replicas_do_not(harness: Harness, case: Case) -> None:
    straight = experiment(harness, "what_is_read", case, steps=50)
    resumed = experiment(harness, "what_is_read", case, steps=20, first_step=31)
    seen: dict[int, list[str]] = {}
    for rank, later in zip(straight, resumed, strict=True):
        assert seen.setdefault(rank["data"], rank["digests"]) == rank["digests"]
        assert rank["digests"][-len(later["digests"]) :] == later["digests"]
    everything = [digest for digests in seen.values() for digest in digests]
    assert len(seen) == case.data and len(set(everything)) == len(everything)


EVALUATED = [
    small(2, 1, 2, table=RAGGED),
    small(4, 1, 1, table=TABLE),
    small(2, 1, 1, "dualpipev", micro_batches=4, table=TABLE),
    small(1, 2, 1, table=TABLE, sequence_parallel=True),
    small(1, 1, 2, zero=3, table=RAGGED),
]


@pytest.mark.parametrize("case", EVALUATED, ids=lambda case: case.name)
def test_a11_a12_b7_evaluation_of_another_shape_is_right_and_leaves_no_trace(harness: Harness, case: Case) -> None:
    case = replace(case, overrides=(*case.overrides, "training.steps=4"))
    with_it = experiment(harness, "evaluate_between", case, evaluate=True)
    without = experiment(harness, "evaluate_between", case, evaluate=False)
    for rank, other in zip(with_it, without, strict=True):
        for mine, theirs in zip(rank["records"], other["records"], strict=True):
            assert (mine["loss"], mine["grad_norm"]) == (theirs["loss"], theirs["grad_norm"])
    configuration = case.configuration()
    model = LanguageModel(configuration.model)
    initialize(model, configuration.model, configuration.run.seed)
    samples = evaluation_samples(list(case.table or TABLE))
    batch = samples.micro_batch(np.arange(MICRO_BATCHES * MICRO_BATCH * case.data))
    assert batch.tokens.shape[1] == LENGTH != configuration.batch.sequence_length
    with torch.no_grad():
        logits = model(batch.tokens)
    expected = float(F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum"))
    for rank in with_it:
        assert rank["losses"][0] == pytest.approx(expected, rel=FIRST_STEP)


def test_a11_with_buffers_that_keep_their_shape_it_is_seen(harness: Harness) -> None:
    case = small(2, 1, 1, table=TABLE, overrides=("training.steps=4",))
    with pytest.raises(CaseFailed):
        experiment(harness, "evaluate_between", case, evaluate=True, fault="shapes_kept", timeout=30.0)


def test_a15_a16_a22_initial_values_are_one_process_s_bit_for_bit(harness: Harness) -> None:
    cases = [
        Case(3, 1, 1, overrides=("model.num_layers=7",)),
        Case(1, 4, 1, overrides=("model.num_layers=7",)),
        Case(2, 1, 2, "dualpipev", micro_batches=4, overrides=("model.num_layers=7",)),
        Case(3, 1, 1, tied=True, overrides=("model.num_layers=7",)),
        Case(2, 2, 1, tied=True, overrides=("model.num_layers=7",)),
        Case(1, 1, 4, zero=3, tied=True, overrides=("model.num_layers=7",)),
        Case(1, 8, 1, tied=True, table=(509, False, False), activation="swiglu"),
        Case(1, 4, 2, zero=2, table=(257, False, False)),
    ]
    for case in cases:
        folder = harness.new_folder()
        harness.pool.run(case.world, EXPERIMENTS + "initial_values", case.arguments(folder))
        found = checkpoint.read(folder)
        expected = _plain_model(case.configuration().model)
        # Every block is there, once, and no stage holds one that another holds.
        assert set(found) == set(expected), case.name
        for name, values in expected.items():
            assert torch.equal(found[name], values), f"{case.name}: {name}"
        matrices = [values for name, values in expected.items() if name.endswith("attention.query.weight")]
        assert len({values.numpy().tobytes() for values in matrices}) == len(matrices)


def _plain_model(configuration: ModelConfiguration) -> dict[str, torch.Tensor]:
    model = LanguageModel(configuration)
    initialize(model, configuration, 0)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a21_recomputation_repeats_what_it_should_and_no_all_reduce(harness: Harness, sequence_parallel: bool) -> None:
    blocks, micro_batches = 4, 2
    counted = {}
    for recompute in ("none", "sublayer", "block"):
        case = Case(
            1, 2, 1, recompute=recompute, sequence_parallel=sequence_parallel, micro_batches=micro_batches,
            overrides=(f"model.num_layers={blocks}",),
        )  # fmt: skip
        counted[recompute] = experiment(harness, "what_is_repeated", case)[0]
    plain, sublayer, block = (counted[key] for key in ("none", "sublayer", "block"))
    runs = blocks * micro_batches
    assert (plain["branches"], sublayer["branches"], block["branches"]) == (2 * runs, 4 * runs, 4 * runs)
    assert (plain["attention"], sublayer["attention"], block["attention"]) == (runs, 2 * runs, 2 * runs)
    if sequence_parallel:
        assert sublayer["reduce_scatter_single"] == plain["reduce_scatter_single"]
        # Only the gather at the beginning of each branch is repeated.
        assert sublayer["all_gather_single"] == plain["all_gather_single"] + 2 * runs
    else:
        assert sublayer["all_reduce"] == plain["all_reduce"]
        assert block["all_reduce"] > plain["all_reduce"]


def test_a19_copies_of_a_tied_matrix_stay_equal(harness: Harness) -> None:
    for case in (small(2, 1, 2, tied=True), small(3, 1, 1, tied=True), small(2, 2, 1, tied=True, dtype="bf16")):
        held: dict[str, set[str]] = {}
        count = 0
        for rank in experiment(harness, "replicas", case):
            if "embedding.weight" in rank["parameters"]:
                box, digest = rank["parameters"]["embedding.weight"]
                held.setdefault(str(box), set()).add(digest)
                count += 1
        assert count == 2 * case.tensor * case.data
        assert all(len(digests) == 1 for digests in held.values()), case.name


REFUSED = {
    "a8, ZeRO 2 with a pipeline": (Case(2, 1, 1, zero=2), "parallel.zero_stage is 2 and must be 1 with a pipeline"),
    "a8, ZeRO 3 with a pipeline": (Case(2, 1, 1, zero=3), "parallel.zero_stage is 3 and must be 1 with a pipeline"),
    "a15, a17, a stage without a block": (
        Case(4, 1, 1, overrides=("model.num_layers=3",)),
        "parallel.pipeline is 4 and must be at most model.num_layers, which is 3",
    ),
    "a17, a chunk without a block": (
        Case(2, 1, 1, "dualpipev", micro_batches=8, overrides=("model.num_layers=3",)),
        "parallel.pipeline is 2 and must be at most 1 with dualpipev",
    ),
    "a27, offload with a pipeline": (
        Case(2, 1, 1, dtype="bf16", overrides=("parallel.offload_optimizer=true",)),
        "parallel.offload_optimizer is true and needs parallel.zero_stage 2 or 3",
    ),
    "a6, bf16 without ZeRO": (Case(1, 1, 2, zero=0, dtype="bf16"), "parallel.zero_stage is 0 and must be 1, 2 or 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_one_sentence_before_anything_is_built(name: str) -> None:
    case, sentence = REFUSED[name]
    with pytest.raises(ConfigurationError, match=sentence):
        case.configuration()
