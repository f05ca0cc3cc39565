"""Tokenizers to and from a Hugging Face folder. A SentencePiece model is written anew as tokenizer.json, and checked.

The checks are the point: a converted tokenizer that differs in a rare character makes a model worse without a sign. So
the new file is made to encode difficult texts, and every piece of its own vocabulary, and is refused if one id differs.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.tokenizer import WHITESPACE_MARK, HuggingFaceTokenizer, SentencePieceTokenizer, load_tokenizer
from training.huggingface import ConversionError

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
COMPANIONS = (CONFIG, "special_tokens_map.json", "chat_template.jinja", "added_tokens.json")

# SentencePiece's own numbers, from sentencepiece_model.proto.
UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

NEVER = -1e6
"""A unigram score so low that a piece is never chosen."""

DIFFICULT_TEXTS = (
    "",
    " ",
    "  two before, two after  ",
    "a",
    " a b  c   d    e     f      g       h",
    "\n",
    "\n\n\n  indented\n\ttab\t\ttabs\r\nend\n",
    "def f(x):\n    return x**2  # \u00b2\n",
    "caf\u00e9 cafe\u0301 na\u00efve \u00df \ufb01 \u2026",  # composed and decomposed: nothing may be normalised
    "\u4e2d\u6587\u5b57\u7b26 \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\U0001f600\U0001f469\u200d\U0001f52c \U0001d4d0 \u2581 \u2581\u2581x\u2581",
    "\x00\x01\x7f\x80\ufeff\u200b\xa0\u3000",
    "aaaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbbbbb ==================== ----------------",
    "0123456789 3.14159 1,000,000 0x7fff",
    "<s></s><unk><pad><|endoftext|><0x41>",
)


def export_tokenizer(path: Path, folder: Path, max_positions: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json for the tokenizer at `path`, with the same ids for every text.

    A tokenizer.json is copied, with the files that belong to it; a SentencePiece model becomes one. ConversionError
    where that cannot be done exactly, DataError where `path` is no tokenizer.
    """
    tokenizer = load_tokenizer(path)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        source = tokenizer.path.parent
        shutil.copyfile(tokenizer.path, folder / FILE)
        for name in COMPANIONS:
            if (source / name).exists():
                shutil.copyfile(source / name, folder / name)
        if not (folder / CONFIG).exists():
            import tokenizers

            end = tokenizers.Tokenizer.from_file(str(tokenizer.path)).id_to_token(tokenizer.end_of_document)
            _write_config(folder, max_positions, end, None)
        return
    written = _from_sentencepiece(tokenizer)
    (folder / FILE).write_text(json.dumps(written, ensure_ascii=False, indent=1), encoding="utf-8")
    named = {token["id"]: token["content"] for token in written["added_tokens"]}
    unknown = written["model"].get("unk_token")
    _write_config(folder, max_positions, named[tokenizer.end_of_document], unknown)
    _check_same_ids(tokenizer, folder / FILE)


def _write_config(folder: Path, max_positions: int, end_of_document: str | None, unknown: str | None) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end_of_document,
        "unk_token": unknown,
        "bos_token": None,
        "pad_token": None,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # the *text* "</s>" is text, as it was in training
    }
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / CONFIG).write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _from_sentencepiece(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    """The content of tokenizer.json.

    Pieces stand in it with spaces as spaces. So no text needs to be rewritten before it is cut, and the character that
    SentencePiece writes for a space is an ordinary rare one, of three bytes, as it is in training.
    """
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(tokenizer.path.read_bytes())
    path, trainer, normalizer = tokenizer.path, proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type not in (BPE, UNIGRAM):
        raise ConversionError(f"{path} is neither a BPE nor a unigram model; no other SentencePiece model is exported")
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces or trainer.treat_whitespace_as_suffix:
        raise ConversionError(f"{path} rewrites text before it cuts it ({normalizer.name}), which is not exported")
    if any(piece.type in (USER_DEFINED, UNUSED) for piece in proto.pieces):
        raise ConversionError(f"{path} has user-defined or unused pieces, which are not exported")
    texts = [piece.piece.replace(WHITESPACE_MARK, " ") for piece in proto.pieces]
    byte_fallback = sum(piece.type == BYTE for piece in proto.pieces) == 256
    special = [index for index, piece in enumerate(proto.pieces) if piece.type in (UNKNOWN, CONTROL)]
    unknown = next((index for index, piece in enumerate(proto.pieces) if piece.type == UNKNOWN), None)
    model: dict[str, Any]
    if trainer.model_type == BPE:
        merges = _merges({texts[i]: (i, piece.score) for i, piece in enumerate(proto.pieces) if piece.type == NORMAL})
        model = {
            "type": "BPE",
            "unk_token": None if unknown is None else texts[unknown],
            "fuse_unk": True,
            "byte_fallback": byte_fallback,
            "ignore_merges": False,
            "vocab": {text: index for index, text in enumerate(texts)},
            "merges": merges,
        }
    else:
        # No text is cut into control or byte pieces; there, only their scores can say so.
        scores = [piece.score if piece.type == NORMAL else NEVER for piece in proto.pieces]
        vocabulary = [[text, score] for text, score in zip(texts, scores, strict=True)]
        model = {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": byte_fallback}
    rewriting: list[dict[str, Any]] = []
    decoders: list[dict[str, Any]] = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if normalizer.add_dummy_prefix:  # such a model takes the mark itself for a space, in training too
        rewriting.append({"type": "Replace", "pattern": {"String": WHITESPACE_MARK}, "content": " "})
        rewriting.append({"type": "Prepend", "prepend": " "})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": texts[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index in special
        ],
        "normalizer": {"type": "Sequence", "normalizers": rewriting} if rewriting else None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _merges(pieces: dict[str, tuple[int, float]]) -> list[list[str]]:
    """Every way to make a piece of two others, best piece first: SentencePiece merges whatever pair makes the best."""
    found: list[tuple[float, int, int, str, str]] = []
    for text, (_, score) in pieces.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in pieces and right in pieces:
                found.append((-score, pieces[left][0], pieces[right][0], left, right))
    found.sort(key=lambda merge: merge[:3])
    return [[left, right] for *_, left, right in found]


def _check_same_ids(tokenizer: SentencePieceTokenizer, written: Path) -> None:
    import tokenizers

    other = tokenizers.Tokenizer.from_file(str(written))
    other.encode_special_tokens = True
    texts = [*DIFFICULT_TEXTS, *_texts_of_pieces(tokenizer)]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        if other.encode(text, add_special_tokens=False).ids != ids.tolist():
            raise ConversionError(f"{tokenizer.path} has no exact tokenizer.json: {text[:40]!r} would get other ids")


def _texts_of_pieces(tokenizer: SentencePieceTokenizer) -> Iterator[str]:
    """Each piece by itself and within others, so that every merge is tried."""
    pieces = [tokenizer.decode([index]) for index in range(tokenizer.vocab_size)]
    yield from pieces
    for start in range(0, len(pieces), 64):
        yield "".join(pieces[start : start + 64])
        yield " ".join(reversed(pieces[start : start + 64]))


def import_tokenizer(folder: Path, target: Path, vocab_size: int) -> Path | None:
    """Copies a folder's tokenizer (tokenizer.json, else tokenizer.model) to `target`; None where it has none."""
    for name in (FILE, "tokenizer.model"):
        if (folder / name).is_file():
            break
    else:
        return None
    found = load_tokenizer(folder / name)
    if found.vocab_size > vocab_size:
        raise ConversionError(f"{folder / name} has {found.vocab_size} ids, more than the model's {vocab_size}")
    for each in (name, *COMPANIONS):
        if (folder / each).is_file():
            shutil.copyfile(folder / each, target / each)
    return target / name
