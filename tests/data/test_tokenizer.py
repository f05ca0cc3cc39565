"""A tokenizer loses nothing, has exactly one end of documents, and says how many bytes each id stands for."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from data.errors import DataError
from data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, load_tokenizer
from data.tokenizer_training import train_tokenizer

DIFFICULT = {
    "empty": "",
    "spaces": "   a  b    c   ",
    "leading newline": "\n\n\tx\n \t\t  \n",
    "carriage returns": "a\r\nb\r\rc\n\r",
    "nul": "a\0b\0\0",
    "controls": "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "chinese": "漢字とかな 한국어",
    "emoji": "😀👩‍👩‍👧 🏳️‍🌈",
    "combining": "e\u0301 é ﬁ Ⅷ ｆ \u00a0x\u2003y\u2028z\u200b\ufeff\ufffd",
    "whitespace mark": "\u2581",
    "whitespace marks among text": "a\u2581b \u2581\u2581 c\u2581",
    "names of control pieces": "<s></s><unk><0x0A><pad>",
    "last code point": "\U0010ffff",
}


@pytest.mark.parametrize("text", DIFFICULT.values(), ids=DIFFICULT.keys())
def test_text_comes_back_exactly(tokenizer: SentencePieceTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert 0 not in ids, "an unknown id"
    assert tokenizer.end_of_document not in ids


def test_every_code_point_comes_back(tokenizer: SentencePieceTokenizer) -> None:
    points = [*range(0xD800), *range(0xE000, 0x110000, 37)]  # surrogates are no characters
    text = "".join(map(chr, points))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_of_ids_add_up_to_the_text(tokenizer: SentencePieceTokenizer) -> None:
    counts = tokenizer.token_bytes()
    for text in DIFFICULT.values():
        assert counts[tokenizer.encode(text)].sum() == len(text.encode())
    assert counts[tokenizer.end_of_document] == 0


def test_a_batch_is_its_texts(tokenizer: SentencePieceTokenizer) -> None:
    texts = list(DIFFICULT.values())
    for ids, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
        assert ids.tolist() == tokenizer.encode(text)


def test_training_depends_on_the_text_alone() -> None:
    texts = ["one two three four five six seven " * 30, "eight\tnine\n\nten " * 30]
    assert train_tokenizer(texts, 320) == train_tokenizer(iter(texts), 320)


def test_training_takes_text_with_nul_and_long_lines(text: Callable[..., str]) -> None:
    assert train_tokenizer([text(0, 3000).replace("\n", "\0"), text(1, 3000).replace("\n", " ")], 340)


def test_a_vocabulary_that_the_text_does_not_allow_is_refused_with_the_way_out(text: Callable[..., str]) -> None:
    many_characters = "".join(chr(0x4E00 + number) for number in range(1000))
    for texts, vocab_size, message in (
        ([text(0)], 5000, r"--vocab-size is 5000 and must be at most \d+: this text"),
        ([text(0)], 2**40, r"--vocab-size is \d+ and must be smaller: this text cannot fill so many pieces"),
        ([many_characters], 400, r"--vocab-size is 400 and must be at least 1\d{3}: the text has so many"),
        (["a few words only"], 5000, r"--vocab-size is 5000, but this text is too small .*: give --tokenizer"),
        ([""], 400, "--input: expected at least one document with text in it, found none"),
        ([text(0)], 100, "--vocab-size: expected at least 320"),
    ):
        with pytest.raises(DataError, match=message):
            train_tokenizer(texts, vocab_size)


@pytest.mark.parametrize("problem", [DataError("rows.jsonl line 2: expected a JSON object"), KeyboardInterrupt()])
def test_what_reading_the_text_raises_comes_through(text: Callable[..., str], problem: BaseException) -> None:
    def texts() -> Iterator[str]:
        yield text(0)
        raise problem

    with pytest.raises(type(problem)) as caught:
        train_tokenizer(texts(), 400)
    assert caught.value is problem


def test_a_model_without_end_of_document_is_refused_by_name(tmp_path: Path) -> None:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some words to learn from"] * 20),
        model_writer=model,
        vocab_size=30,
        model_type="bpe",
        eos_id=-1,
        hard_vocab_limit=False,
        minloglevel=3,
    )
    path = tmp_path / "headless.model"
    path.write_bytes(model.getvalue())
    with pytest.raises(DataError, match=r"headless\.model.*end-of-document token.*-1"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.model", None, "found no file"),
        ("empty.model", b"", "0 bytes"),
        ("wrong.model", b"not a model at all", "SentencePiece model"),
        ("wrong.json", b"{}", "tokenizer.json"),
    ],
)
def test_what_is_no_tokenizer_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(path)
    assert name in str(caught.value)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer.json in the manner of GPT-2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["words and more words to learn from"], trainer)
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("text", [*DIFFICULT.values(), "<|endoftext|>"])
def test_a_hugging_face_tokenizer_loses_nothing_either(byte_level: Path, text: str) -> None:
    tokenizer = load_tokenizer(byte_level)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_of_document not in ids, "the text of the token's name is text"
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert np.array_equal(tokenizer.encode_batch([text])[0], ids)


def test_a_hugging_face_tokenizer_without_end_of_document_is_refused(byte_level: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_level.read_text().replace("<|endoftext|>", "<|start|>"))
    with pytest.raises(DataError, match=r"tokenizer\.json.*end-of-document token"):
        HuggingFaceTokenizer(path)


def test_a_folder_stands_for_the_tokenizer_in_it(tokenizer_path: Path, tmp_path: Path) -> None:
    assert load_tokenizer(tokenizer_path.parent).vocab_size == 400
    with pytest.raises(DataError, match="found neither"):
        load_tokenizer(tmp_path)
