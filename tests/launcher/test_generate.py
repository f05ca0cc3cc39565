"""Generation: the tokens that transformers gives on the exported model, with a cache, streamed as whole characters."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from data.tokenizer import load_tokenizer
from launcher import convert, generate
from model.language_model import LanguageModel
from tests.launcher.tiny_models import configuration, random_model, save_run, write_tokenizer

PROMPT = "def read(self, size):\n\t\u4e2d"
MODELS = {
    "gelu": {"activation": "gelu"},
    "swiglu grouped": {"activation": "swiglu", "num_kv_heads": 2, "tie_embeddings": True},
    "qwen3": {"activation": "swiglu", "qk_norm": True, "num_kv_heads": 1, "head_dim": 32},
}


def generated(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command prints after the prompt."""
    capsys.readouterr()
    assert generate.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", MODELS)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    run = save_run(tmp_path / "run", random_model(configuration(**MODELS[kind], vocab_size=512)), tensor=2, data=2)
    text = generated(capsys, run, "--prompt", PROMPT, "--tokens", 60)
    assert text.startswith(PROMPT) and text.endswith("\n")
    assert convert.main(["to-hf", str(run), str(tmp_path / "out")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer(PROMPT, return_tensors="pt")
    theirs = model.generate(**ids, max_new_tokens=60, do_sample=False, pad_token_id=0)[0].tolist()
    if theirs[-1] == tokenizer.eos_token_id:
        theirs.pop()
    assert len(theirs) > ids["input_ids"].shape[1] + 20
    # A random model gives bytes that are no text, and the two libraries show those differently: so ours decodes both.
    ours = load_tokenizer(tmp_path / "corpus" / "tokenizer.model")
    assert text == ours.decode(theirs) + "\n"


def sampler(temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None, seed: int = 0):
    return generate.Sampler(temperature, top_k, top_p, seed)


def test_the_cache_changes_nothing() -> None:
    """Token by token with the cache, and the whole text each time without it."""
    model = random_model(configuration(num_kv_heads=2, activation="swiglu"))
    prompt = list(range(5, 25))
    fast = list(generate.generate(model, prompt, 50, sampler(), stop=-1))
    seen = list(prompt)
    with torch.no_grad():
        for _ in range(50):
            seen.append(int(model(torch.tensor([seen]))[0, -1].argmax()))
    assert fast == seen[len(prompt) :]


def test_ids_without_text_are_never_chosen() -> None:
    """Published models have more ids than their tokenizers; a decoder stumbles over those."""
    model = random_model(configuration())
    with torch.no_grad():
        model.head.weight[:512] *= 1e-3  # now most of the largest logits are beyond
    assert max(generate.generate(model, [5], 20, sampler(), stop=-1)) >= 512
    assert max(generate.generate(model, [5], 20, sampler(), stop=-1, known=512)) < 512


def test_generation_ends_at_the_end_of_document() -> None:
    model = random_model(configuration())
    ids = list(generate.generate(model, [5], 30, sampler(), stop=-1))
    assert list(generate.generate(model, [5], 30, sampler(), stop=ids[10])) == ids[: ids.index(ids[10])]


def test_draws_follow_the_distribution_and_its_bounds() -> None:
    logits = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()

    def drawn(**options: float) -> list[float]:
        sample = sampler(**{"temperature": 1.0, "seed": 3, **options})
        counts = torch.bincount(torch.tensor([sample(logits) for _ in range(4000)]), minlength=5)
        return [count / 4000 for count in counts.tolist()]

    assert drawn() == pytest.approx([0.5, 0.2, 0.15, 0.1, 0.05], abs=0.03)
    assert drawn(temperature=0.5) == pytest.approx([0.25 / 0.325, 0.04 / 0.325, 0.0225 / 0.325, 0.031, 0.008], abs=0.03)
    assert drawn(top_k=2) == pytest.approx([5 / 7, 2 / 7, 0, 0, 0], abs=0.03)
    assert drawn(top_p=0.6) == pytest.approx([5 / 7, 2 / 7, 0, 0, 0], abs=0.03)
    assert drawn(top_p=0.05) == [1, 0, 0, 0, 0]
    assert drawn(top_k=1) == [1, 0, 0, 0, 0]
    assert {sampler()(logits) for _ in range(10)} == {0}


@pytest.mark.parametrize("temperature", [1e-30, 1e-320, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """The quotients are beyond the largest number there is; the likeliest token is drawn all the same."""
    logits = torch.tensor([-700.0, 3.0, 700.0, 699.0])
    for largest in (logits, -logits):
        sample = sampler(temperature)
        assert {sample(largest) for _ in range(20)} == {int(largest.argmax())}


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_logits_that_are_not_finite_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], temperature: str
) -> None:
    model = random_model(configuration())
    with torch.no_grad():
        model.head.weight[7, 3] = float("nan")
    run = save_run(tmp_path / "run", model)
    assert generate.main([str(run), "--prompt", "x", "--temperature", temperature]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the model's logits are NaN or infinite")


def test_a_seed_gives_the_same_text_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = save_run(tmp_path / "run", random_model(configuration()))
    arguments = (run, "--prompt", "def", "--tokens", 20, "--temperature", 1, "--top-k", 50)
    first = generated(capsys, *arguments, "--seed", 1)
    assert generated(capsys, *arguments, "--seed", 1) == first
    assert generated(capsys, *arguments, "--seed", 2) != first
    assert generated(capsys, *arguments, "--seed", 1, "--top-k", 1) == generated(
        capsys, run, "--prompt", "def", "--tokens", 20
    )


@pytest.mark.parametrize(
    "text", [" two  words\n\tand tabs", "\u4e2d\u6587 \U0001f600\U0001f469\u200d\U0001f52c!", "x\u2581y"]
)
def test_streamed_pieces_are_the_text_in_whole_characters(tmp_path: Path, text: str) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    for prompt in ("def", "a \u4e2d", ""):
        before, ids = tokenizer.encode(prompt), tokenizer.encode(text)
        pieces = list(generate.stream_text(tokenizer, before, iter(ids)))
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
    cut = tokenizer.encode("\u4e2d")[:-1]  # generation ended within a character
    assert "".join(generate.stream_text(tokenizer, [], iter(cut))).startswith("\ufffd")


def test_text_comes_as_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = save_run(tmp_path / "run", random_model(configuration()))
    flushes = []

    class Stream(io.StringIO):
        def flush(self) -> None:
            flushes.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Stream())
    assert generate.main([str(run), "--prompt", "def", "--tokens", "12"]) == 0
    assert len(set(flushes)) > 5


def test_prompts_from_a_file_and_from_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_run(tmp_path / "run", random_model(configuration()))
    (tmp_path / "start.txt").write_text("import os\n")
    from_file = generated(capsys, run, "--file", tmp_path / "start.txt", "--tokens", 5)
    assert from_file == generated(capsys, run, "--prompt", "import os\n", "--tokens", 5)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    out = generated(capsys, run, "--tokens", 3)
    assert out.startswith("one") and "\ntwo" in out


@pytest.mark.parametrize(
    "options,named",
    [
        (["--temperature", "-1"], "--temperature is -1.0 and must be at least 0"),
        (["--top-p", "1.5"], "--top-p is 1.5"),
        (["--top-k", "0"], "--top-k is 0"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--seed", str(10**23), "--temperature", "1"], f"--seed is {10**23} and must be from 0 to {2**63 - 1}"),
        (["--seed", "-1"], "--seed is -1 and must be from 0"),
        (["--device", "nonsense"], "--device nonsense cannot be used"),
        (["--tokenizer", "missing.model"], "missing.model"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    run = save_run(tmp_path / "run", random_model(configuration()))
    assert generate.main([str(run), "--prompt", "x", *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and named in lines[0], lines


def test_text_that_is_not_utf8_is_one_sentence(tmp_path: Path) -> None:
    """Its place is named: the option, the file or standard input."""
    run = save_run(tmp_path / "run", random_model(configuration()))
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    command = [sys.executable, generate.__file__, str(run), "--tokens", "2"]
    for options, given, named in (
        (["--prompt", b"a\xff\xfe"], b"", "--prompt has the byte 0xff, and must be text in UTF-8"),
        (["--file", "latin.txt"], b"", "latin.txt (--file) has the byte 0xe9"),
        ([], b"\xe9\n", "standard input has the byte 0xe9"),
    ):
        result = subprocess.run([*command, *options], input=given, capture_output=True, cwd=tmp_path)
        lines = result.stderr.decode().splitlines()
        assert result.returncode == 2 and len(lines) == 1 and lines[0].startswith(f"error: {named}"), lines


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_run(tmp_path / "run", random_model(configuration(vocab_size=400)))
    assert generate.main([str(run), "--prompt", "x"]) == 2
    assert "512 ids, more than the model's 400" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = save_run(tmp_path / "run", random_model(configuration()))
    file = run / "checkpoints" / "step_00000020" / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert generate.main([str(run), "--prompt", "x"]) == 2
    assert "rank_00000.safetensors is damaged" in capsys.readouterr().err


def test_a_damaged_newest_checkpoint_is_named_and_an_older_one_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_run(tmp_path / "run", random_model(configuration()))
    (run / "checkpoints" / "step_00000030").mkdir()
    (run / "checkpoints" / ".step_00000040.partial-1").mkdir()  # a save may be under way: nothing is said of it
    assert generate.main([str(run), "--prompt", "x", "--tokens", "2"]) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: ") and "step_00000030/manifest.json is missing" in warning


def test_help_says_how_to_serve() -> None:
    result = subprocess.run([sys.executable, generate.__file__, "--help"], capture_output=True, text=True, check=True)
    assert "vllm serve exported" in result.stdout and "--top-p" in result.stdout


def test_a_model_in_bfloat16_has_its_rotary_tables_in_float32(tmp_path: Path) -> None:
    """B8: positions beyond 256 must not fall together."""
    from training.loading import load_model, open_checkpoint

    run = save_run(tmp_path / "run", random_model(configuration()))
    model = load_model(open_checkpoint(run), torch.device("cpu"), torch.bfloat16)
    assert isinstance(model, LanguageModel) and model.embedding.weight.dtype is torch.bfloat16
    assert len(list(generate.generate(model, list(range(300)), 4, sampler(), stop=-1))) == 4
