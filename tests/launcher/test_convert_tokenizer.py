"""Exported tokenizers: the ids of training for every text, or a refusal."""

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers

from data.tokenizer import load_tokenizer
from launcher import convert
from tests.launcher.tiny_models import STDLIB, configuration, random_model, read_json, save_run, texts
from training import huggingface_tokenizer
from training.huggingface import ConversionError
from training.huggingface_tokenizer import DIFFICULT_TEXTS, export_tokenizer

OTHER_TEXTS = [path.read_text() for path in sorted((STDLIB / "email").glob("*.py"))]
PLAIN = {
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "byte_fallback": True,
    "model_type": "bpe",
}


def test_the_exported_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", random_model(configuration()))
    assert convert.main(["to-hf", str(run), str(tmp_path / "out")]) == 0
    ours = load_tokenizer(tmp_path / "corpus" / "tokenizer.model")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.eos_token_id == ours.end_of_document == read_json(tmp_path / "out" / "config.json")["eos_token_id"]
    for text in [*DIFFICULT_TEXTS, *OTHER_TEXTS]:
        assert theirs(text)["input_ids"] == ours.encode(text), text[:50]
        assert theirs.decode(ours.encode(text)) == text
    exported = load_tokenizer(tmp_path / "out" / "tokenizer.json")  # and so do bits per byte after a way there and back
    assert exported.token_bytes().tolist() == ours.token_bytes().tolist()
    assert exported.end_of_document == ours.end_of_document


def train(folder: Path, options: dict[str, Any]) -> Path:
    """Somebody else's SentencePiece model."""
    model = io.BytesIO()
    lines = iter("\n".join(texts()).splitlines())
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, vocab_size=600, minloglevel=3, **options
    )
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder / "tokenizer.model"


@pytest.mark.parametrize(
    "changes",
    [
        {"add_dummy_prefix": True, "bos_id": 1, "eos_id": 2},  # as Llama 2's
        {"model_type": "unigram"},
        {"split_digits": True, "split_by_unicode_script": False},
    ],
)
def test_models_of_others_are_exported_with_the_same_ids(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = train(tmp_path / "in", {**PLAIN, **changes})
    (tmp_path / "out").mkdir()
    export_tokenizer(path, tmp_path / "out", 128)
    (tmp_path / "out" / "config.json").write_text('{"model_type": "llama"}')
    ours, theirs = load_tokenizer(path), transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in [*DIFFICULT_TEXTS, *OTHER_TEXTS]:
        assert theirs(text)["input_ids"] == ours.encode(text), text[:50]


@pytest.mark.parametrize(
    "changes,named",
    [
        ({"normalization_rule_name": "nmt_nfkc"}, r"rewrites text before it cuts it \(nmt_nfkc\)"),
        ({"remove_extra_whitespaces": True}, "rewrites text"),
        ({"model_type": "word", "hard_vocab_limit": False}, "neither a BPE nor a unigram model"),
        ({"user_defined_symbols": ["<tool>"]}, "user-defined"),
        ({"byte_fallback": False}, "has no exact tokenizer.json"),
    ],
)
def test_models_without_an_exact_counterpart_are_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    path = train(tmp_path / "in", {**PLAIN, **changes})
    (tmp_path / "out").mkdir()
    with pytest.raises(ConversionError, match=named):
        export_tokenizer(path, tmp_path / "out", 128)


def test_a_tokenizer_that_differs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault planted: merges in another order."""
    real = huggingface_tokenizer._merges
    monkeypatch.setattr(huggingface_tokenizer, "_merges", lambda pieces: real(pieces)[::-1])
    run = save_run(tmp_path / "run", random_model(configuration()))
    assert convert.main(["to-hf", str(run), str(tmp_path / "out")]) == 2
