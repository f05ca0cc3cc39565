"""Evaluation on many processes: the numbers of one process, every target once; mistakes are said once."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.indexed import IndexedWriter, token_dtype
from data.samples import mask_path
from data.tokenizer import load_tokenizer
from launcher import evaluate
from tests.launcher.commands import BIN, free_port, run
from tests.launcher.tiny_models import STDLIB, configuration, random_model, read_json, save_run, write_tokenizer
from tests.parity.pool import Pool

LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)]
FILES = [STDLIB / "json" / name for name in ("__init__.py", "scanner.py", "tool.py")]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set whose last window is ragged, and whose windows no batch divides."""
    folder = tmp_path_factory.mktemp("evaluation")
    tokenizer = load_tokenizer(write_tokenizer(folder / "corpus"))
    with IndexedWriter(folder / "set", token_dtype(512)) as writer:
        for file in FILES:
            writer.add_document([*tokenizer.encode(file.read_text()), tokenizer.end_of_document])
    return folder / "set"


def alone(folder: Path, *arguments: object) -> dict[str, Any]:
    """What one process writes."""
    assert evaluate.main([*map(str, arguments), "--json", str(folder / "alone.json")]) == 0
    return read_json(folder / "alone.json")


def on_layout(pool: Pool, folder: Path, layout: tuple[int, int, int], *arguments: object) -> dict[str, Any]:
    """What rank 0 of this layout would write."""
    pipeline, tensor, data = layout
    words = [*map(str, arguments), "--pipeline", str(pipeline), "--tensor", str(tensor)]
    probe = {"arguments": words, "folder": str(folder / "text")}
    return pool.run(pipeline * tensor * data, "tests.launcher.probes:evaluate", probe)[0]


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    assert (found["tokens"], found["bytes"]) == (wanted["tokens"], wanted["bytes"])
    for key in ("loss", "perplexity", "bits_per_byte"):
        assert found[key] == pytest.approx(wanted[key], rel=1e-6), key


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_gives_the_numbers_of_one_process(
    pool: Pool, prefix: Path, tmp_path: Path, layout: tuple[int, int, int]
) -> None:
    """Dropout and z-loss play no part; 515 ids are divided unevenly; the batch divides nothing."""
    model = random_model(configuration(activation="swiglu", num_kv_heads=2, dropout=0.1, z_loss=1e-3))
    checkpoint = save_run(tmp_path / "run", model, tensor=2, data=2)
    arguments = (checkpoint, "--data", prefix, "--sequence-length", 50)
    wanted = alone(tmp_path, *arguments)
    assert_same(on_layout(pool, tmp_path, layout, *arguments, "--batch-size", 3), wanted)


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1)], ids=str)
def test_tied_models_document_masks_and_raw_text(
    pool: Pool, prefix: Path, tmp_path: Path, layout: tuple[int, int, int]
) -> None:
    checkpoint = save_run(tmp_path / "run", random_model(configuration(tie_embeddings=True, qk_norm=True)))
    without = alone(tmp_path, checkpoint, "--data", prefix)
    (checkpoint / "config.yaml").write_text("data:\n  document_mask: true\n")
    wanted = alone(tmp_path, checkpoint, "--data", prefix)
    assert wanted["loss"] != without["loss"]
    assert_same(on_layout(pool, tmp_path, layout, checkpoint, "--data", prefix), wanted)
    assert_same(on_layout(pool, tmp_path, layout, checkpoint, "--text", *FILES), wanted)


def test_targets_of_fine_tuning_data_alone_are_counted(pool: Pool, prefix: Path, tmp_path: Path) -> None:
    """The two copies have different numbers of targets: a mean of their means would be another number."""
    tokens = np.fromfile(f"{prefix}.bin", dtype=np.uint16)
    for kind in ("bin", "idx"):
        (tmp_path / f"chat.{kind}").write_bytes(Path(f"{prefix}.{kind}").read_bytes())
    mask = np.zeros(len(tokens), dtype=np.uint8)
    mask[:300] = mask[1000:1007] = mask[-5:] = 1
    mask.tofile(mask_path(tmp_path / "chat"))
    checkpoint = save_run(tmp_path / "run", random_model(configuration()))
    wanted = alone(tmp_path, checkpoint, "--data", tmp_path / "chat")
    assert wanted["tokens"] == mask[1:].sum()
    assert_same(on_layout(pool, tmp_path, (1, 1, 2), checkpoint, "--data", tmp_path / "chat"), wanted)


def test_bfloat16_on_a_layout_is_near(pool: Pool, prefix: Path, tmp_path: Path) -> None:
    checkpoint = save_run(tmp_path / "run", random_model(configuration()))
    arguments = (checkpoint, "--data", prefix, "--dtype", "bf16")
    found, wanted = on_layout(pool, tmp_path, (2, 1, 1), *arguments), alone(tmp_path, *arguments)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-3) and found["tokens"] == wanted["tokens"]


def test_the_command_on_two_processes_writes_the_same_json(prefix: Path, tmp_path: Path) -> None:
    """As a person starts it."""
    checkpoint = save_run(tmp_path / "run", random_model(configuration()))
    wanted = alone(tmp_path, checkpoint, "--data", prefix)
    options = ["--data", prefix, "--tensor", "2", "--json", tmp_path / "two.json"]
    result = run(*deepspeed(2), "launcher/evaluate.py", checkpoint, *options)
    assert result.status == 0, result.error
    assert_same(json.loads((tmp_path / "two.json").read_text()), wanted)
    said = [line for line in result.output.splitlines() if line.startswith("loss ")]
    assert said == [
        f"loss {wanted['loss']:.4f}  perplexity {wanted['perplexity']:.4f}  bits per byte {wanted['bits_per_byte']:.4f}"
    ]


def deepspeed(processes: int) -> list[str | Path]:
    return [BIN / "deepspeed", "--num_gpus", str(processes), "--master_port", str(free_port())]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--tensor", "2"], ["--pipeline 1 --tensor 2", "2 processes", "found 1", "deepspeed --num_gpus 2"]),
        (["--pipeline", "0"], ["--pipeline is 0", "at least 1"]),
        (["--sequence-length", "-1"], ["--sequence-length is -1"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--p") else "",
)
def test_one_process_refuses_at_once(
    options: list[str], parts: list[str], prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main([str(tmp_path), "--data", str(prefix), *options]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("error: ") and all(part in sentence for part in parts), sentence


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--pipeline", "4"], ["--pipeline is 4", "at most 3"]),
        (["--tensor", "3"], ["--tensor is 3", "num_heads, which is 4"]),
        (["--tokenizer", "missing.model"], ["missing.model"]),
        (["--data", "missing"], ["missing.idx"]),
    ],
    ids=["pipeline", "tensor", "tokenizer", "data"],
)
def test_every_process_learns_of_a_mistake(
    pool: Pool, options: list[str], parts: list[str], prefix: Path, tmp_path: Path
) -> None:
    """In a world of the size that the options ask for. All raise alike, so that none waits for another."""
    from tests.parity.pool import CaseFailed

    size = 4 if "--pipeline" in options else 3 if "--tensor" in options else 2
    checkpoint = save_run(tmp_path / "run", random_model(configuration()))
    words = [str(checkpoint), *(["--data", str(prefix)] if "--data" not in options else []), *options]
    probe = {"arguments": words, "folder": str(tmp_path / "text")}
    with pytest.raises(CaseFailed) as failure:
        pool.run(size, "tests.launcher.probes:evaluate", probe)
    assert "LaunchError" in str(failure.value) and all(part in str(failure.value) for part in parts)
    assert "did not answer" not in str(failure.value)


def test_a_mistake_on_two_processes_is_said_once(prefix: Path, tmp_path: Path) -> None:
    """Here a damaged checkpoint, which one process finds and all learn of."""
    checkpoint = save_run(tmp_path / "run", random_model(configuration())) / "checkpoints" / "step_00000020"
    file = checkpoint / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    result = run(*deepspeed(2), "launcher/evaluate.py", checkpoint, "--data", prefix, "--pipeline", "2")
    assert result.status != 0
    (sentence,) = result.mistakes
    assert "rank_00000.safetensors is damaged" in sentence
    assert "Traceback" not in result.output + result.error


def test_help_says_how_to_use_many_processes() -> None:
    helped = run(sys.executable, "launcher/evaluate.py", "--help")
    assert helped.status == 0 and "deepspeed --num_gpus 8" in helped.output and "--local_rank" not in helped.output
