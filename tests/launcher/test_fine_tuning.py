"""docs/fine_tuning.md, step by step: weights from elsewhere, a loss over the answers alone, on every layout."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from safetensors.torch import load_file

from data.batches import NO_TARGET, MicroBatch, TrainingData
from data.tokenizer import load_tokenizer
from launcher import convert, evaluate, generate, prepare_data
from tests.launcher.commands import metrics, train
from tests.launcher.tiny_models import STDLIB, configuration, random_model, read_json, save_run
from tests.parity import oracle
from tests.parity.compare import judge, trace_of
from tests.parity.pool import Pool
from training.checkpoint import find, read
from training.huggingface import huggingface_name

LENGTH, BATCH = 48, 16
PAGE = Path("docs/fine_tuning.md")


@dataclass(frozen=True)
class Material:
    """What a person has before the training begins."""

    folder: Path
    published: torch.nn.Module
    """The model as transformers knows it."""

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def data(self) -> Path:
        return self.folder / "corpus" / "chat"

    def samples(self) -> Callable[[list[int]], MicroBatch]:
        return TrainingData(str(self.data / "train"), LENGTH, seed=0).micro_batch


def rows() -> list[dict[str, str]]:
    """Questions and answers of very different lengths."""
    lines = [
        line for name in ("decoder.py", "encoder.py") for line in (STDLIB / "json" / name).read_text().splitlines()
    ]
    lines = [line for line in lines if line.strip()]
    return [
        {"question": f"Q: {lines[i]}\nA:", "answer": "\n".join(lines[i + 1 : i + 2 + i % 7])}
        for i in range(0, len(lines) - 10, 3)
    ]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    folder = tmp_path_factory.mktemp("fine-tuning")
    torch.manual_seed(3)
    sizes = {"vocab_size": 515, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = transformers.LlamaConfig(**sizes, **heads, initializer_range=0.1, attn_implementation="eager")
    published = transformers.AutoModelForCausalLM.from_config(config)
    published.save_pretrained(folder / "published", max_shard_size="200KB")
    # Its tokenizer.json, from a model that has one.
    assert convert.main(["to-hf", str(save_run(folder / "any", random_model(configuration()))), str(folder / "t")]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "published" / name).write_bytes((folder / "t" / name).read_bytes())
    assert convert.main(["from-hf", str(folder / "published"), str(folder / "base")]) == 0
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    keys = ["--prompt-key", "question", "--completion-key", "answer", "--validation-fraction", "0.05"]
    tokenizer = ["--tokenizer", str(folder / "base" / "tokenizer.json")]
    output = ["--output", str(folder / "corpus" / "chat")]
    assert prepare_data.main(["--input", str(folder / "chat.jsonl"), *keys, *tokenizer, *output]) == 0
    return Material(folder, published)


def test_the_targets_are_the_answers_and_their_ends(material: Material) -> None:
    tokenizer = load_tokenizer(material.base / "tokenizer.json")
    held_out = read_json(material.data / "report.json")["validation"]["documents"]
    assert held_out > 2
    batch = TrainingData(str(material.data / "train"), 512, seed=0).micro_batch([0])
    ids = batch.targets[0]
    answers = tokenizer.decode(ids[(ids != NO_TARGET) & (ids != tokenizer.end_of_document)].tolist())
    assert answers and "Q:" not in answers and "A:" not in answers
    whole = [row["answer"] for row in rows() if row["answer"] in answers]
    assert len(whole) > 5
    masked = tokenizer.decode(batch.tokens[0, 1:][ids[:-1] == NO_TARGET].tolist())
    assert "Q:" in masked and "A:" in masked


@pytest.fixture(scope="module")
def tuned(material: Material) -> Path:
    """The run that the page describes, on one process, of a few steps."""
    page = PAGE.read_text()
    (mine,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    chat = material.folder / "chat.yaml"
    chat.write_text((material.base / "model.yaml").read_text() + mine)
    assert yaml.safe_load(chat.read_text())["checkpoint"]["resume"] == str(material.base)
    sets = [f"data.{name}={material.data / name}" for name in ("train", "validation")]
    size = [f"batch.sequence_length={LENGTH}", f"batch.global_batch_size={BATCH}", "batch.micro_batch_size=4"]
    steps = ["training.steps=8", "optimizer.warmup_steps=1", "optimizer.learning_rate=3e-3"]
    more = ["training.log_every=1", "monitor.dump_gradients=[1]", f"run.output_dir={material.folder / 'run'}"]
    result = train(1, str(chat), *sets, *size, *steps, *more, launcher="python")
    assert result.status == 0, result.error
    return material.folder / "run"


def test_loss_and_gradients_of_the_first_step_are_those_of_transformers(material: Material, tuned: Path) -> None:
    batch = material.samples()(list(range(BATCH)))
    assert 0.1 < (batch.targets == NO_TARGET).float().mean() < 0.9
    model = material.published.double()
    logits = model(batch.tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
    loss.backward()
    lines = metrics(tuned)
    assert lines[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert lines[-1]["loss"] < 0.95 * lines[0]["loss"]
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    ours = load_file(tuned / "gradients" / "step_00000001.safetensors")
    assert {huggingface_name(name) for name in ours} == set(theirs)
    for name, gradient in ours.items():
        wanted = theirs[huggingface_name(name)]
        assert (gradient - wanted).abs().max() < 1e-5 * wanted.abs().max(), name


def test_the_tuned_model_is_used_here_and_elsewhere(
    material: Material, tuned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = material.folder / "tuned.json"
    assert evaluate.main([str(tuned), "--data", str(material.data / "validation"), "--json", str(out)]) == 0
    (validation,) = metrics(tuned, "validation")
    assert read_json(out)["loss"] == pytest.approx(validation["validation_loss"], rel=1e-6)
    assert convert.main(["to-hf", str(tuned), str(material.folder / "chat-hf")]) == 0
    capsys.readouterr()
    assert generate.main([str(tuned), "--prompt", "Q: import re\nA:", "--tokens", "12"]) == 0
    text = capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(material.folder / "chat-hf", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(material.folder / "chat-hf")
    ids = tokenizer("Q: import re\nA:", return_tensors="pt")
    continued = model.generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()
    continued = continued[:-1] if continued[-1] == tokenizer.eos_token_id else continued
    assert text == load_tokenizer(material.base).decode(continued) + "\n"


@pytest.fixture(scope="module")
def on_one(material: Material) -> Callable[[torch.dtype], oracle.Trace]:
    """What the plain model does in plain PyTorch with the same weights and samples."""
    weights = read(material.base)
    known: dict[torch.dtype, oracle.Trace] = {}
    model = convert.model_configuration(convert.open_checkpoint(material.base))

    def trace(dtype: torch.dtype) -> oracle.Trace:
        if dtype not in known:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(oracle, "initialize", lambda model, *_: model.load_state_dict(dict(weights)))
                known[dtype] = oracle.run(
                    oracle.Setting(
                        model=model,
                        samples=material.samples(),
                        batch=BATCH,
                        steps=20,
                        seed=0,
                        learning_rate=1e-3,
                        warmup_steps=5,
                        betas=(0.9, 0.95),
                        eps=1e-6,
                        weight_decay=0.1,
                        clip=1.0,
                    ),
                    dtype,
                )
        return known[dtype]

    return trace


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_every_layout_tunes_as_one_process_does(
    pool: Pool,
    material: Material,
    on_one: Callable[[torch.dtype], oracle.Trace],
    tmp_path: Path,
    layout: tuple[int, int, int],
) -> None:
    """The bounds of docs/parity.md, and its rule against float64, over 20 steps of 4 micro-batches."""
    micro_batches, data = 4, layout[2]
    size = BATCH // (micro_batches * data)
    targets = (material.samples()(list(range(BATCH))).targets != NO_TARGET).sum(dim=1).view(micro_batches, data, size)
    if data > 1:  # so that a mean of the processes' means, or of the micro-batches', is another number
        assert len(set(targets.sum(dim=(0, 2)).tolist())) > 1 and len(set(targets.sum(dim=(1, 2)).tolist())) > 1
    values: dict[str, Any] = yaml.safe_load((material.base / "model.yaml").read_text())
    words = [f"model.{key}={json.dumps(value)}" for key, value in values["model"].items()]
    words += [f"parallel.{axis}={n}" for axis, n in zip(("pipeline", "tensor", "data"), layout, strict=True)]
    words += [f"batch.sequence_length={LENGTH}", f"batch.global_batch_size={BATCH}", f"batch.micro_batch_size={size}"]
    words += [f"data.train={material.data / 'train'}", f"data.tokenizer={material.base / 'tokenizer.json'}"]
    words += ["data.validation=null", "training.eval_batches=null", "monitor.dump_gradients=[1]"]
    words += ["optimizer.betas=[0.9, 0.95]", "optimizer.weight_decay=0.1", f"run.output_dir={tmp_path / 'run'}"]
    start = str(find(material.base))
    records = pool.run(2, "tests.launcher.probes:train", {"overrides": words, "start": start})[0]
    found = trace_of(records, tmp_path / "run")
    verdict = judge(found, on_one(torch.float32), lambda: on_one(torch.float64), 1e-3)
    assert verdict.sound, verdict
    assert min(found.coefficients) < 0.99
