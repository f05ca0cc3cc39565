"""Text to token ids and back, without losing a byte.

Two kinds of tokenizer file are read: a SentencePiece model (`tokenizer.model`, written by prepare_data.py or by others)
and a Hugging Face `tokenizer.json`. Both must have an end-of-document token: exactly one stands after every document.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data.errors import DataError

WHITESPACE_MARK = "\u2581"  # SentencePiece writes a space as this character, so a text that holds it needs care
END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|endofdoc|>", "[EOS]", "<|eot_id|>")


class Tokenizer(Protocol):
    """What the rest of Mainline knows of a tokenizer."""

    path: Path
    """The file that it was read from."""
    vocab_size: int
    """Number of ids: every id that `encode` gives is below it."""
    end_of_document: int
    """The id that ends every document. `encode` never gives it for ordinary text."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without the end-of-document token."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` for many texts in one call of the library's own C++ (int32 arrays)."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; end-of-document tokens stand for no text."""
        ...

    def token_bytes(self) -> np.ndarray:
        """[vocab_size] int64: how many bytes of UTF-8 text each id stands for, 0 for control tokens."""
        ...


class SentencePieceTokenizer:
    """A SentencePiece model. The literal character U+2581 goes through byte pieces, so that it comes back as itself."""

    def __init__(self, path: str | Path) -> None:
        import sentencepiece

        self.path = Path(path)
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(self.path.read_bytes())
        except RuntimeError as error:
            raise DataError(f"{path}: expected a SentencePiece model, found something that it cannot parse") from error
        self.vocab_size = int(self._processor.vocab_size())
        self.end_of_document = int(self._processor.eos_id())
        if self.end_of_document < 0:
            raise DataError(
                f"{path}: expected a tokenizer with an end-of-document token (eos_id), found eos_id -1: "
                "train it with one (prepare_data.py does)"
            )
        pieces = [self._processor.id_to_piece(index) for index in range(self.vocab_size)]
        self._byte_ids = {
            int(piece[3:5], 16): index for index, piece in enumerate(pieces) if self._processor.is_byte(index)
        }
        # Models by others may lack byte pieces, or put a space before every text: they make of a mark what they do.
        adds_prefix = self._processor.id_to_piece(self._processor.encode("a"))[0].startswith(WHITESPACE_MARK)
        self._mark_ids = (
            [self._byte_ids[byte] for byte in WHITESPACE_MARK.encode()]
            if len(self._byte_ids) == 256 and not adds_prefix
            else []
        )

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without the end-of-document token."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 ids of each text, encoded by one call into C++ and on one core."""
        if not self._mark_ids or not any(WHITESPACE_MARK in text for text in texts):
            return self._encode_plain(list(texts))
        # Between two marks the text is encoded as usual; a mark itself becomes its three byte pieces.
        parts = [text.split(WHITESPACE_MARK) for text in texts]
        encoded = iter(self._encode_plain([part for pieces in parts for part in pieces]))
        mark = np.array(self._mark_ids, dtype=np.int32)
        result = []
        for pieces in parts:
            arrays = [next(encoded)]
            for _ in pieces[1:]:
                arrays += [mark, next(encoded)]
            result.append(np.concatenate(arrays))
        return result

    def _encode_plain(self, texts: list[str]) -> list[np.ndarray]:
        return [
            np.asarray(ids, dtype=np.int32) for ids in self._processor.encode(texts, return_type="numpy", num_threads=1)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`. Exact for what `encode` gave; a sequence cut inside a character shows U+FFFD there."""
        return self._processor.decode([int(index) for index in ids if index != self.end_of_document])

    def token_bytes(self) -> np.ndarray:
        """[vocab_size] int64 bytes of text per id; 1 for a byte piece, 0 for control and unknown."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for index in range(self.vocab_size):
            if self._processor.is_byte(index):
                counts[index] = 1
            elif not (self._processor.is_control(index) or self._processor.is_unknown(index)):
                counts[index] = len(self._processor.id_to_piece(index).replace(WHITESPACE_MARK, " ").encode())
        return counts


class HuggingFaceTokenizer:
    """A `tokenizer.json` of Hugging Face's `tokenizers` library, read without `transformers` or any remote code."""

    def __init__(self, path: str | Path, end_of_document: str | None = None) -> None:
        """`end_of_document` is the token's text; without it the usual names are looked for in turn."""
        import tokenizers

        self.path = Path(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path}: expected a Hugging Face tokenizer.json, found: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # the *text* "<|endoftext|>" is text, never the token
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        names = (end_of_document,) if end_of_document else END_OF_DOCUMENT_NAMES
        found = [name for name in names if name in vocabulary]
        if not found:
            raise DataError(
                f"{path}: expected a tokenizer with an end-of-document token (one of {', '.join(names)}), found none"
            )
        self.end_of_document = int(vocabulary[found[0]])

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no special token added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 ids of each text in one call into Rust."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, end-of-document tokens left out."""
        wanted = [int(index) for index in ids if index != self.end_of_document]
        return self._tokenizer.decode(wanted, skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray:
        """[vocab_size] int64 bytes of text per id, for byte-level and for byte-fallback vocabularies."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        added = self._tokenizer.get_added_tokens_decoder()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        byte_level = "ByteLevel" in str(self._tokenizer.decoder)
        for piece, index in vocabulary.items():
            if index in added:
                counts[index] = 0 if added[index].special else len(piece.encode())
            elif byte_level:
                counts[index] = len(piece)  # the byte-level alphabet has one character a byte
            elif len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                counts[index] = 1
            else:
                counts[index] = len(piece.replace(WHITESPACE_MARK, " ").encode())
        return counts


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer in `path` (a SentencePiece .model, a tokenizer.json, or a folder that holds one).

    Raises DataError, naming the file, where it is missing, unreadable, or has no end-of-document token.
    """
    path = Path(path)
    if path.is_dir():
        inside = [path / name for name in ("tokenizer.model", "tokenizer.json") if (path / name).is_file()]
        if not inside:
            raise DataError(f"{path}: expected tokenizer.model or tokenizer.json in this folder, found neither")
        path = inside[0]
    if not path.is_file():
        raise DataError(f"{path}: expected a tokenizer file, found no file of this name")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: expected a tokenizer file, found an empty file (0 bytes)")
    return HuggingFaceTokenizer(path) if path.suffix == ".json" else SentencePieceTokenizer(path)
