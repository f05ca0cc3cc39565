"""Models in and out: to and from Hugging Face's format, and what checkpoints a run has.

python launcher/convert.py to-hf RUN_OR_CHECKPOINT OUT     a folder for AutoModelForCausalLM, vLLM, lm-eval, ...
python launcher/convert.py from-hf HF_DIR OUT              a checkpoint to train on from: checkpoint.resume=OUT
python launcher/convert.py list RUN                        steps, losses, sizes, and whether each is sound
"""

import argparse
import json
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import yaml

from data.errors import DataError
from data.progress import Progress
from data.tokenizer import load_tokenizer
from launcher.mistakes import sentence
from model.costs import parameter_count
from training.checkpoint import Checkpoint, CheckpointError, Manifest, steps
from training.huggingface import ConversionError, from_huggingface, read_json, to_huggingface
from training.huggingface_tokenizer import export_tokenizer, import_tokenizer
from training.huggingface_weights import (
    EXPORT_DTYPES,
    SourceWeights,
    export_weights,
    import_weights,
)
from training.loading import (
    check_complete,
    model_configuration,
    open_checkpoint,
    sequence_length,
    tokenizer_identity,
    tokenizer_path,
)

FILE_BYTES = 5 * 10**9
LARGEST_SHARD_SIZE = 1e9  # in gigabytes: no file system holds a larger file
DEFAULT_POSITIONS = 2048


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="convert.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    to_hf = commands.add_parser(
        "to-hf",
        help="write a folder that AutoModelForCausalLM and AutoTokenizer load",
        description="Reads a checkpoint of any layout, on one process and a little memory, and writes config.json, "
        "generation_config.json, sharded safetensors and the tokenizer. SwiGLU and GeGLU models become llama, with "
        "QK-norm qwen3; GELU and squared-ReLU models become arcee. What has no exact counterpart is refused.",
    )
    to_hf.add_argument("source", type=Path, help="a run folder (its newest sound checkpoint) or a checkpoint")
    to_hf.add_argument("out", type=Path, help="the folder to write; it must not exist, or be empty")
    to_hf.add_argument(
        "--dtype", choices=EXPORT_DTYPES, default="float32", help="of the weights (default: float32, exact)"
    )
    to_hf.add_argument("--tokenizer", type=Path, help="tokenizer file (default: the one that the run was trained with)")
    to_hf.add_argument(
        "--max-positions", type=int, help="max_position_embeddings to write (default: the training sequence length)"
    )
    to_hf.add_argument("--shard-size", type=float, default=5.0, help="most gigabytes of one file (default: 5)")
    from_hf = commands.add_parser(
        "from-hf",
        help="make a checkpoint of a Hugging Face folder, to train on from",
        description="Reads config.json and the safetensors files of a local folder (llama, mistral without sliding "
        "window, qwen3, arcee) and writes a checkpoint that every layout starts from, with its tokenizer and a "
        "model.yaml to copy into a configuration. Pickled weights are not read and remote code is never run.",
    )
    from_hf.add_argument("source", type=Path, help="the folder that holds config.json")
    from_hf.add_argument("out", type=Path, help="the folder to write; give it as checkpoint.resume=OUT")
    listing = commands.add_parser("list", help="the checkpoints of a run", description="Reads and verifies every file.")
    listing.add_argument("source", type=Path, help="a run folder")
    return parser


@contextmanager
def complete_or_nothing(out: Path) -> Iterator[Path]:
    """A folder to write into that becomes `out` at the end, or goes.

    An error of the file system that names no file, as a full disk's, gets the name of `out`. So does one that names
    two: `sentence` would say the first, and that is the file copied from, which has nothing wrong with it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConversionError(f"{out} exists already: give a new folder")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno and (error.filename is None or error.filename2 is not None):
            raise OSError(error.errno, error.strerror, str(out)) from error
        raise


def _check_export_options(options: argparse.Namespace) -> None:
    """Before the checkpoint is read, because that can take long. NaN is in no range, so it is refused, too."""
    if not 0 < options.shard_size <= LARGEST_SHARD_SIZE:
        raise ConversionError(
            f"--shard-size is {options.shard_size:g} and must be above 0 and at most {LARGEST_SHARD_SIZE:g}"
        )
    if options.max_positions is not None and options.max_positions < 1:
        raise ConversionError(f"--max-positions is {options.max_positions} and must be at least 1")


def convert_to_huggingface(options: argparse.Namespace) -> None:
    """The command to-hf."""
    _check_export_options(options)
    checkpoint = open_checkpoint(options.source)
    model = model_configuration(checkpoint)
    check_complete(checkpoint, model)
    tokenizer = load_tokenizer(tokenizer_path(checkpoint, options.tokenizer))
    if tokenizer.vocab_size > model.vocabulary:
        raise ConversionError(
            f"{tokenizer.path} has {tokenizer.vocab_size} ids, more than the model's {model.vocabulary}"
        )
    length = options.max_positions or sequence_length(checkpoint) or DEFAULT_POSITIONS  # an option given is not 0
    config = to_huggingface(model, length, tokenizer.end_of_document, options.dtype)
    count = parameter_count(model)
    with complete_or_nothing(options.out) as folder:
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", {"eos_token_id": tokenizer.end_of_document})
        export_tokenizer(tokenizer.path, folder, config["max_position_embeddings"])
        before = _peak_memory()
        dtype, shard_bytes = EXPORT_DTYPES[options.dtype], int(options.shard_size * 1e9)
        with Progress("writing", count * dtype.itemsize) as progress:
            for part in export_weights(checkpoint, model, folder, dtype, shard_bytes):
                progress.add(part * dtype.itemsize)
    print(f"{options.out}: {config['architectures'][0]}, {count:,} parameters, {options.dtype}, from {checkpoint.path}")
    print(_memory(before))


def convert_from_huggingface(options: argparse.Namespace) -> None:
    """The command from-hf."""
    if not options.source.is_dir():
        raise ConversionError(f"{options.source} is no folder; only local folders are read")
    model, length = from_huggingface(read_json(options.source / "config.json"), options.source / "config.json")
    source = SourceWeights(options.source, model)
    count = parameter_count(model)
    with complete_or_nothing(options.out) as folder:
        tokenizer = import_tokenizer(options.source, folder, model.vocabulary)
        identity = tokenizer_identity(tokenizer) if tokenizer else None
        if identity and tokenizer:
            identity["path"] = str(options.out / tokenizer.name)  # where it will be
        manifest = Manifest(
            run_id=uuid.uuid4().hex,
            step=0,
            model=model.model_dump(mode="json"),
            tokenizer=identity,
            sequence_length=length,
        )
        _write_model_yaml(folder / "model.yaml", manifest, options)
        before = _peak_memory()
        with Progress("writing", count * torch.float32.itemsize) as progress:
            for part in import_weights(source, model, folder / "checkpoints", manifest, FILE_BYTES):
                progress.add(part * torch.float32.itemsize)
    print(f"{options.out}: {count:,} parameters from {options.source}; train on with checkpoint.resume={options.out}")
    print(f"model.yaml there is the model section for it{'' if tokenizer else '; no tokenizer was found'}")
    print(_memory(before))


def _write_model_yaml(path: Path, manifest: Manifest, options: argparse.Namespace) -> None:
    model = {key: value for key, value in manifest.model.items() if value is not None}
    if "rope_scaling" in model:
        model["rope_scaling"] = {key: value for key, value in model["rope_scaling"].items() if value is not None}
    sections: dict[str, dict] = {"model": model, "checkpoint": {"resume": str(options.out)}}
    if manifest.tokenizer:
        sections["data"] = {"tokenizer": manifest.tokenizer["path"]}
    head = f"# To train on from {options.source}: these keys, and those of your own data, batch and optimizer.\n"
    path.write_text(head + yaml.safe_dump(sections, sort_keys=False))


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _memory(before: int) -> str:
    return f"peak memory {_peak_memory() / 2**20:.0f} MiB ({before / 2**20:.0f} before the first weight)"


def _peak_memory() -> int:
    """The most bytes this process has held so far. (ru_maxrss would count a large parent's memory, too.)"""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def list_checkpoints(options: argparse.Namespace) -> None:
    """The command list: a line a checkpoint, oldest first."""
    folder = options.source / "checkpoints" if (options.source / "checkpoints").is_dir() else options.source
    found = steps(folder)
    if not found:
        raise ConversionError(f"{options.source} holds no checkpoints")
    rows: list[tuple[str, ...]] = [("step", "tokens", "validation loss", "layout", "size", "state")]
    sizes = {path: sum(file.stat().st_size for file in path.iterdir() if file.is_file()) for _, path in found}
    with Progress("verifying", sum(sizes.values())) as progress:
        for step, path in found:
            rows.append(_row(step, path, sizes[path], progress))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[5]]))


def _row(step: int, path: Path, size: int, progress: Progress) -> tuple[str, ...]:
    """What the list says of one checkpoint, after reading every file of it."""
    left = size
    try:
        checkpoint = Checkpoint.open(path, verify=False)
        damage = []
        for name, file in checkpoint.manifest.files.items():
            damage += checkpoint.damage([name])
            progress.add(file["size"])
            left -= file["size"]
    except CheckpointError as error:
        return str(step), "", "", "", _size(size), str(error)
    finally:
        progress.add(left)
    manifest = checkpoint.manifest
    state = damage[0] if damage else "sound" if "exp_avg" in checkpoint.kinds() else "sound, weights only"
    return str(step), f"{manifest.tokens:,}", _loss(manifest), _layout(manifest), _size(size), state


def _loss(manifest: Manifest) -> str:
    loss = manifest.validation
    if isinstance(loss, dict):
        return " ".join(f"{name} {value:.4f}" for name, value in loss.items() if value is not None)
    return "" if loss is None else f"{loss:.4f}"


def _layout(manifest: Manifest) -> str:
    sizes = [f"{axis} {manifest.layout[axis]}" for axis in ("pipeline", "tensor", "data") if axis in manifest.layout]
    return " x ".join(sizes) or "any"


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 0, or 2 with one line on standard error."""
    options = build_parser().parse_args(argv)
    commands = {"to-hf": convert_to_huggingface, "from-hf": convert_from_huggingface, "list": list_checkpoints}
    try:
        commands[options.command](options)
    except (CheckpointError, ConversionError, DataError, OSError) as error:
        print(f"error: {sentence(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
