"""What real runs leave, exported: the same files from every layout, and a model used elsewhere as it is here."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from data.indexed import IndexedDataset
from data.tokenizer import load_tokenizer
from launcher import convert, evaluate, generate
from tests.launcher.commands import train
from tests.launcher.tiny_models import read_json
from tests.parity.pool import Pool
from training import checkpoint

SMALL = (
    "model.num_layers=4",
    "model.vocab_size=515",
    "batch.sequence_length=32",
    "data.validation=null",
    "training.eval_batches=null",
)
ONE, MANY = (1, 1, 1), (2, 2, 2)


def overrides(out: Path, layout: tuple[int, int, int], *changes: str) -> list[str]:
    """Of configs/parity.yaml."""
    sizes = [f"parallel.{axis}={size}" for axis, size in zip(("pipeline", "tensor", "data"), layout, strict=True)]
    return [*SMALL, *sizes, f"run.output_dir={out}", "training.steps=2", *changes]


def exported(source: Path, out: Path) -> dict[str, bytes]:
    """Every file of the exported folder."""
    assert convert.main(["to-hf", str(source), str(out), "--shard-size", "3e-4"]) == 0
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.parametrize("trained_on,saved_on", [(MANY, ONE), (ONE, MANY)], ids=["from many", "from one"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_pipeline_tensor_and_data_export_the_files_of_one_process(
    pool: Pool, tmp_path: Path, trained_on: tuple[int, int, int], saved_on: tuple[int, int, int], tied: bool
) -> None:
    """The same weights, saved by 2 x 2 x 2 processes and by one (I4)."""
    changes = (f"model.tie_embeddings={json.dumps(tied)}", "model.activation=swiglu", "batch.micro_batch_size=4")
    first, second = tmp_path / "trained", tmp_path / "saved"
    train_it = {"overrides": overrides(first, trained_on, *changes)}
    pool.run(math.prod(trained_on), "tests.launcher.probes:train", train_it)
    source = checkpoint.find(first)
    save_it = {"overrides": overrides(second, saved_on, *changes), "checkpoint": str(source)}
    pool.run(math.prod(saved_on), "tests.launcher.probes:save_again", save_it)

    layouts = [read_json(checkpoint.find(run) / "manifest.json")["layout"] for run in (first, second)]
    for layout, sizes in zip(layouts, (trained_on, saved_on), strict=True):
        assert (layout["pipeline"], layout["tensor"], layout["data"]) == sizes
    ours, others = exported(first, tmp_path / "out-1"), exported(second, tmp_path / "out-2")
    assert ours.keys() == others.keys() and "model.safetensors.index.json" in ours
    for name in ours:
        assert ours[name] == others[name], name
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out-1", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.vocab_size == 515 and model.config.tie_word_embeddings == tied


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of a small model, as a person starts it."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    options = ("model.num_layers=4", "batch.micro_batch_size=4", "optimizer.learning_rate=5e-3", "training.steps=30")
    result = train(1, "configs/parity.yaml", f"run.output_dir={folder}", *options, launcher="python")
    assert result.status == 0, result.error
    return folder


@pytest.fixture(scope="module")
def hugging_face(run: Path) -> Path:
    """The run's model, exported."""
    assert convert.main(["to-hf", str(run), str(run.parent / "exported")]) == 0
    return run.parent / "exported"


def test_transformers_continues_a_prompt_as_generate_does(
    run: Path, hugging_face: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "def read(self, size):\n"
    capsys.readouterr()
    assert generate.main([str(run), "--prompt", prompt, "--tokens", "40"]) == 0
    text = capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(hugging_face, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(hugging_face)
    ids = tokenizer(prompt, return_tensors="pt")
    theirs = model.generate(**ids, max_new_tokens=40, do_sample=False, pad_token_id=0)[0].tolist()
    if theirs[-1] == tokenizer.eos_token_id:
        theirs.pop()
    assert len(theirs) > ids["input_ids"].shape[1]
    assert text == load_tokenizer("corpus/parity/tokenizer.model").decode(theirs) + "\n"


def test_transformers_finds_the_perplexity_that_evaluate_finds(run: Path, hugging_face: Path, tmp_path: Path) -> None:
    arguments = [str(run), "--data", "corpus/parity/validation", "--json", str(tmp_path / "ours.json")]
    assert evaluate.main(arguments) == 0
    ours = read_json(tmp_path / "ours.json")
    model = transformers.AutoModelForCausalLM.from_pretrained(hugging_face, dtype=torch.float32)
    assert model.config.max_position_embeddings == 64
    tokens = IndexedDataset("corpus/parity/validation")
    ids = torch.from_numpy(tokens.read(0, tokens.token_count).astype(np.int64))
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 64):  # by hand, so that no reader of ours is trusted
            window = ids[start : start + 65]
            logits = model(window[None, :-1]).logits[0].double()
            total += F.cross_entropy(logits, window[1:], reduction="sum").item()
            count += len(window) - 1
    assert ours["tokens"] == count == len(ids) - 1
    assert ours["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert ours["loss"] == pytest.approx(total / count, rel=1e-6)  # a young model hardly feels a wrong rotary base
    assert ours["perplexity"] < 300  # it has learned: uniform would be 512
    report = read_json(Path("corpus/parity/report.json"))["validation"]
    first = load_tokenizer("corpus/parity/tokenizer.model").token_bytes()[int(ids[0])]
    assert ours["bytes"] == report["bytes"] - first


def test_a_checkpoint_that_was_moved_is_all_that_is_needed(
    run: Path, hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the run's folder, from another current folder: its manifest says what it was trained with."""
    root = Path.cwd()
    moved = tmp_path / "moved"
    shutil.copytree(checkpoint.find(run), moved)
    monkeypatch.chdir(tmp_path)
    data = str(root / "corpus/parity/validation")
    assert evaluate.main([str(moved), "--data", data, "--json", "moved.json"]) == 0
    assert evaluate.main([str(run), "--data", data, "--json", "run.json"]) == 0
    assert read_json(Path("moved.json")) == read_json(Path("run.json"))
    capsys.readouterr()
    assert generate.main([str(moved), "--prompt", "def", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("def")
    assert convert.main(["to-hf", str(moved), "out"]) == 0
    for path in hugging_face.iterdir():
        assert path.read_bytes() == Path("out", path.name).read_bytes()


def test_the_tokenizer_may_lie_beside_the_weights(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a copy to another machine. Without it, one sentence says what to do."""
    moved = tmp_path / "moved"
    shutil.copytree(checkpoint.find(run), moved)
    manifest = checkpoint.Manifest.load(moved / "manifest.json")
    elsewhere = {**(manifest.tokenizer or {}), "path": "/nowhere/tokenizer.model"}
    object.__setattr__(manifest, "tokenizer", elsewhere)
    (moved / "manifest.json").write_bytes(manifest.dumps())
    capsys.readouterr()
    assert generate.main([str(moved), "--prompt", "def", "--tokens", "1"]) == 2
    assert "/nowhere/tokenizer.model is missing" in capsys.readouterr().err
    shutil.copy("corpus/parity/tokenizer.model", moved)
    assert generate.main([str(moved), "--prompt", "def", "--tokens", "1"]) == 0


def test_a_damaged_checkpoint_is_not_resumed(run: Path, tmp_path: Path) -> None:
    """`checkpoint.resume=PATH` reads it all before it starts."""
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint.find(run), damaged)
    file = damaged / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    options = ("model.num_layers=4", f"run.output_dir={tmp_path / 'run'}", f"checkpoint.resume={damaged}")
    result = train(1, "configs/parity.yaml", *options, launcher="python")
    (sentence,) = result.mistakes
    assert result.status == 2 and "rank_00000.safetensors is damaged" in sentence
    assert not (tmp_path / "run").exists()
