"""Small data for the tests of data/: a tokenizer trained in a moment, and sets written token by token."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from data.indexed import IndexedWriter
from data.tokenizer import SentencePieceTokenizer
from data.tokenizer_training import train_tokenizer

WORDS = "the quick brown fox jumps over a lazy dog while people watch and write def return import class self".split()


def make_text(seed: int, words: int = 200) -> str:
    """Text of made-up lines, another for each seed."""
    choices = np.random.default_rng(seed).integers(0, len(WORDS), words)
    return "".join(WORDS[word] + ("\n" if place % 9 == 8 else " ") for place, word in enumerate(choices))


@pytest.fixture(scope="session")
def text() -> Callable[..., str]:
    """`text(seed, words)`: text of made-up lines, another for each seed."""
    return make_text


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model of 400 pieces."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train_tokenizer([make_text(seed) for seed in range(40)], 400))
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: Path) -> SentencePieceTokenizer:
    """The tokenizer of `tokenizer_path`."""
    return SentencePieceTokenizer(tokenizer_path)


@pytest.fixture
def write_set(tmp_path: Path) -> Callable[..., Path]:
    """`write_set(name, documents, dtype)` writes a data set and gives its prefix."""

    def write(name: str, documents: Sequence[Sequence[int]], dtype: type = np.uint16) -> Path:
        prefix = tmp_path / name
        with IndexedWriter(prefix, dtype) as writer:
            for document in documents:
                writer.add_document(document)
        return prefix

    return write


@pytest.fixture
def numbered_set(write_set: Callable[..., Path]) -> Callable[..., Path]:
    """`numbered_set(name, lengths)`: token i of the whole file is i, so that a sample says where it comes from."""

    def write(name: str, lengths: Sequence[int]) -> Path:
        ends = np.cumsum(lengths)
        return write_set(
            name, [list(range(stop - size, stop)) for stop, size in zip(ends, lengths, strict=True)], np.int32
        )

    return write
