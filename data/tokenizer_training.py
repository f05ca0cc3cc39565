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

    Raises DataError where the text is too small for so many pieces.
    """
    import sentencepiece

    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"--vocab-size: expected at least {SMALLEST_VOCABULARY} (256 are single bytes), found {vocab_size}"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts),
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
    except (RuntimeError, OSError) as error:
        most = re.search(r"value <= (\d+)", str(error))
        limit = f"at most {most[1]}, which" if most else "fewer pieces, so that"
        raise DataError(f"--vocab-size: expected {limit} this text can fill, found {vocab_size}") from error
    return model.getvalue()


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        clean = text.replace("\0", "\n")  # SentencePiece leaves out every sentence with a NUL in it
        for start in range(0, len(clean), SENTENCE_CHARACTERS):
            yield clean[start : start + SENTENCE_CHARACTERS]
