"""Training a SentencePiece tokenizer that loses nothing.

Byte pieces for every byte, no normalisation, no prefix added, no whitespace taken away. Byte-pair encoding, not
unigram: measured on 11 MB of Python source and 4096 pieces it gives 3.31 bytes a token against 3.26, and trains in 2 s
against more than 30. It runs on one thread, so the result depends on the text alone.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator

from data.errors import DataError

SMALLEST_VOCABULARY = 320  # 256 byte pieces, 2 control tokens and room for some text
SENTENCE_CHARACTERS = 1000
"""Documents are cut into pieces of this many characters for training: SentencePiece leaves out long "sentences"."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """A serialised SentencePiece model of exactly `vocab_size` pieces, id 0 unknown, id 1 end of document.

    Raises DataError where the text is too small for so many pieces; what reading `texts` raises comes through as it is.
    """
    import sentencepiece

    check_vocabulary_size(vocab_size)
    sentences = _Remembering(_sentences(texts))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            character_coverage=0.9995,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            max_sentence_length=8 * SENTENCE_CHARACTERS,
            num_threads=1,
            minloglevel=3,
        )
    except (RuntimeError, OSError, ValueError) as error:  # ValueError: more than a C++ int holds
        if sentences.problem is None:
            raise DataError(_refusal(str(error), vocab_size)) from error
    if sentences.problem is not None:
        raise sentences.problem
    return model.getvalue()


def check_vocabulary_size(vocab_size: int) -> None:
    """Raise DataError where no text could give a tokenizer of so few pieces."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"--vocab-size: expected at least {SMALLEST_VOCABULARY} (256 are single bytes), found {vocab_size}"
        )


def _refusal(said: str, vocab_size: int) -> str:
    """What SentencePiece `said` of so many pieces, as a sentence for who asked for them."""
    if "sentences_.empty()" in said:
        return "--input: expected at least one document with text in it, found none"
    if least := re.search(r"required_chars\. \d+ vs (\d+)", said):
        return f"--vocab-size is {vocab_size} and must be at least {least[1]}: the text has so many characters"
    if most := re.search(r"value <= (\d+)", said):
        if int(most[1]) < SMALLEST_VOCABULARY:
            return f"--vocab-size is {vocab_size}, but this text is too small to train any tokenizer: give --tokenizer"
        return f"--vocab-size is {vocab_size} and must be at most {most[1]}: this text can fill no more pieces"
    return f"--vocab-size is {vocab_size} and must be smaller: this text cannot fill so many pieces"


class _Remembering:
    """An iterator that keeps what it raised: SentencePiece makes a RuntimeError of it, as of a text too small."""

    def __init__(self, sentences: Iterator[str]) -> None:
        self._sentences = sentences
        self.problem: BaseException | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            return next(self._sentences)
        except StopIteration:
            raise
        except BaseException as error:  # Ctrl-C, too
            self.problem = error
            raise


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        clean = text.replace("\0", "\n")  # SentencePiece leaves out every sentence with a NUL in it
        for start in range(0, len(clean), SENTENCE_CHARACTERS):
            yield clean[start : start + SENTENCE_CHARACTERS]
