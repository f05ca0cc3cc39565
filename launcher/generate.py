"""Continue a text with a trained model, on one device, from a checkpoint of any layout.

python launcher/generate.py runs/tiny --prompt "def read("              greedy: the likeliest token each time
python launcher/generate.py runs/tiny --file start.txt --temperature 0.8 --top-p 0.95 --seed 7
python launcher/generate.py runs/tiny                                   asks for one prompt after another
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from data.errors import DataError
from data.tokenizer import Tokenizer, load_tokenizer
from launcher.mistakes import sentence
from model.context import KeyValueCache
from model.language_model import LanguageModel
from training.checkpoint import CheckpointError
from training.loading import load_model, open_checkpoint, tokenizer_path

SERVING = """
To serve a model to many users, export it and give the folder to vLLM:

    python launcher/convert.py to-hf runs/tiny exported --dtype bfloat16
    vllm serve exported                                 swiglu and relu2 models
    vllm serve exported --model-impl transformers       gelu and geglu models, which vLLM has no kernels of its own for

The text goes to standard output as it comes, after the prompt; everything else goes to standard error.
"""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LARGEST_SEED = 2**63 - 1
UNFINISHED = "\ufffd"  # what a decoder gives for a character of which not all bytes have come


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="generate.py", description=__doc__, epilog=SERVING, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a run folder (its newest sound checkpoint) or a checkpoint")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", help="the text to continue")
    what.add_argument("--file", type=Path, help="a file with the text to continue, taken as it is")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens to add (default: 128)")
    parser.add_argument(
        "--temperature", type=float, help="0 (the default) is greedy; 1 is the model's own distribution"
    )
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest tokens only")
    parser.add_argument(
        "--top-p", type=float, help="draw from the likeliest tokens that together have this probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws, 0 to 2**63 - 1 (default: 0)")
    parser.add_argument(
        "--tokenizer", type=Path, help="tokenizer file (default: the one that the run was trained with)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: fp32 on the cpu, else bf16)")
    return parser


class Sampler:
    """Chooses the next token from logits. Greedy at temperature 0; otherwise drawn, on the CPU, from a seed."""

    def __init__(self, temperature: float, top_k: int | None, top_p: float | None, seed: int) -> None:
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        """logits: [vocab_size]. CheckpointError where they are NaN or infinite: greedy text of those means nothing."""
        if not torch.isfinite(logits.max()):  # a NaN anywhere is the largest, too
            raise CheckpointError(
                "the model's logits are NaN or infinite: its weights are, or --dtype is too narrow for it"
            )
        if self._temperature == 0:
            return int(logits.argmax())
        logits = logits.cpu().double()
        # Without the largest taken off first, a tiny temperature makes infinities of the quotients, and NaN of those.
        probabilities = ((logits - logits.max()) / self._temperature).softmax(-1)
        ordered, ids = probabilities.sort(descending=True, stable=True)
        if self._top_k is not None:
            ordered = ordered[: self._top_k]
        if self._top_p is not None:
            before = ordered.cumsum(0) - ordered  # the token that crosses the bound still counts
            ordered = ordered[before < self._top_p]
        return int(ids[torch.multinomial(ordered, 1, generator=self._generator)])


def generate(
    model: LanguageModel, prompt: Sequence[int], tokens: int, sample: Sampler, stop: int, known: int | None = None
) -> Iterator[int]:
    """Yields up to `tokens` ids that continue the prompt (at least one id), without the id `stop` that ends them.

    Where the tokenizer has fewer ids than the model, `known` of them, the others stand for no text and are not chosen.
    """
    device = next(model.parameters()).device
    cache = KeyValueCache(len(prompt) + tokens)
    new = torch.tensor([list(prompt)], device=device)
    with torch.inference_mode():
        for _ in range(tokens):
            index = sample(model(new, cache=cache)[0, -1, :known].float())
            if index == stop:
                return
            yield index
            new = torch.tensor([[index]], device=device)


def stream_text(tokenizer: Tokenizer, prompt: Sequence[int], ids: Iterator[int]) -> Iterator[str]:
    """The text of new ids as soon as it is certain: never a part of a character.

    A token's text can depend on its neighbours (a leading space, the bytes of one character), so each piece is the
    difference of two decodings that begin at the same earlier token.
    """
    seen = list(prompt)
    start, end = max(len(seen) - 8, 0), len(seen)
    for index in ids:
        seen.append(index)
        before, after = tokenizer.decode(seen[start:end]), tokenizer.decode(seen[start:])
        if len(after) > len(before) and not after.endswith(UNFINISHED):
            yield after[len(before) :]
            start, end = end, len(seen)
    if end < len(seen):
        yield tokenizer.decode(seen[start:])[len(tokenizer.decode(seen[start:end])) :]


def device_and_dtype(options: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """What the model runs on, and in."""
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, UnicodeError) as error:
        raise CheckpointError(f"--device {options.device} cannot be used: {str(error).splitlines()[0]}") from error
    return device, DTYPES[options.dtype or ("fp32" if device.type == "cpu" else "bf16")]


def _prompts(options: argparse.Namespace) -> Iterator[str]:
    if options.prompt is not None:
        yield options.prompt
    elif options.file is not None:
        try:
            yield options.file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise _not_utf8(f"{options.file} (--file)", error) from error
    else:
        if sys.stdin.isatty():
            print("Type a text to continue; Ctrl-D ends.", file=sys.stderr)
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except (EOFError, KeyboardInterrupt):
                return
            except UnicodeDecodeError as error:
                raise _not_utf8("standard input", error) from error
            yield _as_utf8("standard input", line)


def _as_utf8(name: str, text: str) -> str:
    """The text; refused where it has lone surrogates, as which Python keeps bytes of arguments that are no UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(name, error) from error


def _not_utf8(name: str, error: UnicodeDecodeError) -> CheckpointError:
    return CheckpointError(f"{name} has the byte 0x{error.object[error.start]:02x}, and must be text in UTF-8")


def _check(options: argparse.Namespace) -> None:
    if options.temperature is None:
        options.temperature = 0.0 if options.top_k is None and options.top_p is None else 1.0
    if options.prompt is not None:
        options.prompt = _as_utf8("--prompt", options.prompt)
    for name, sound, allowed in (
        ("tokens", options.tokens > 0, "at least 1"),
        ("temperature", options.temperature >= 0, "at least 0"),
        ("seed", 0 <= options.seed <= LARGEST_SEED, f"from 0 to {LARGEST_SEED}"),
        ("top-k", options.top_k is None or options.top_k > 0, "at least 1"),
        ("top-p", options.top_p is None or 0 < options.top_p <= 1, "above 0 and at most 1"),
    ):
        if not sound:
            value = getattr(options, name.replace("-", "_"))
            raise CheckpointError(f"--{name} is {value} and must be {allowed}")


def run(options: argparse.Namespace) -> None:
    """Loads the model and continues each prompt. Raises what `main` turns into one sentence."""
    _check(options)
    device, dtype = device_and_dtype(options)
    checkpoint = open_checkpoint(options.source)
    tokenizer = load_tokenizer(tokenizer_path(checkpoint, options.tokenizer))
    model = load_model(checkpoint, device, dtype)
    vocabulary = model.configuration.vocabulary
    if tokenizer.vocab_size > vocabulary:
        raise CheckpointError(f"{tokenizer.path} has {tokenizer.vocab_size} ids, more than the model's {vocabulary}")
    for text in _prompts(options):
        sample = Sampler(options.temperature, options.top_k, options.top_p, options.seed)
        ids = tokenizer.encode(text) or [tokenizer.end_of_document]  # an empty prompt begins a document
        print(text, end="", flush=True)
        new = generate(model, ids, options.tokens, sample, tokenizer.end_of_document, tokenizer.vocab_size)
        for piece in stream_text(tokenizer, ids, new):
            print(piece, end="", flush=True)
        print(flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 0, or 2 with one line on standard error."""
    options = build_parser().parse_args(argv)
    try:
        run(options)
    except (CheckpointError, DataError, OSError, UnicodeDecodeError) as error:
        print(f"error: {sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # enough of this text
        print()
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
