"""Text files to a tokenizer and token files: what launcher/prepare_data.py does, for one process."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import resource
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.errors import DataError
from data.indexed import IndexedWriter, token_dtype
from data.tokenizer import load_tokenizer
from data.tokenizer_training import train_tokenizer


@dataclass(frozen=True)
class Preparation:
    """What to prepare; the fields are the options of prepare_data.py."""

    inputs: tuple[str, ...]
    output: str
    vocab_size: int = 32000
    validation_fraction: float = 0.01
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    tokenizer: str | None = None
    text_key: str = "text"
    seed: int = 0


def find_files(inputs: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            for inside in sorted(path.rglob("*")):
                relative = inside.relative_to(path)
                if inside.is_file() and _wanted(relative, include) and not _wanted(relative, exclude):
                    files.append(inside)
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"--input {name}: expected a file or a folder, found nothing of this name")
    if not files:
        raise DataError(f"--input {' '.join(inputs)}: expected at least one file, found none that --include takes")
    return files


def _wanted(relative: Path, patterns: Sequence[str]) -> bool:
    return any(
        fnmatch.fnmatch(str(relative), pattern)
        or fnmatch.fnmatch(relative.name, pattern)
        or any(fnmatch.fnmatch(part, pattern) for part in relative.parts[:-1])
        for pattern in patterns
    )


def is_held_out(seed: int, document: int, fraction: float) -> bool:
    return _held_out_hash(seed, document) < fraction * 2**64


def _held_out_hash(seed: int, document: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{document}".encode(), digest_size=8).digest(), "little")


def prepare(wanted: Preparation) -> dict[str, object]:
    started = time.monotonic()
    output = Path(wanted.output)
    if output.exists():
        raise DataError(f"--output {output}: expected a folder that does not exist yet, found one")
    files = find_files(wanted.inputs, wanted.include, wanted.exclude)
    texts = [text for text in (file.read_bytes().decode("utf-8", "replace") for file in files) if text]
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        if wanted.tokenizer:
            name = "tokenizer.json" if wanted.tokenizer.endswith(".json") else "tokenizer.model"
            model = Path(wanted.tokenizer).read_bytes()
        else:
            name, model = "tokenizer.model", train_tokenizer(texts, wanted.vocab_size)
        (partial / name).write_bytes(model)
        tokenizer = load_tokenizer(partial / name)
        held_out = [is_held_out(wanted.seed, number, wanted.validation_fraction) for number in range(len(texts))]
        if wanted.validation_fraction > 0 and not any(held_out):
            held_out[min(range(len(texts)), key=lambda number: _held_out_hash(wanted.seed, number))] = True
        counts = {}
        for part, is_validation in (("train", False), ("validation", True)):
            documents = [text for text, held in zip(texts, held_out, strict=True) if held == is_validation]
            if not documents:
                continue
            tokens = 0
            with IndexedWriter(partial / part, token_dtype(tokenizer.vocab_size)) as writer:
                for text in documents:
                    ids = [*tokenizer.encode(text), tokenizer.end_of_document]
                    writer.add_document(ids)
                    tokens += len(ids)
            size = sum(len(text.encode()) for text in documents)
            counts[part] = {"documents": len(documents), "tokens": tokens, "bytes": size}
        report = {
            **counts,
            "input_digest": digest.hexdigest(),
            "seconds": round(time.monotonic() - started, 2),
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }
        (partial / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        os.replace(partial, output)
        return report
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
