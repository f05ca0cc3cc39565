"""The trainer with faults planted in it: `planted.py CONFIG [section.key=value ...]`, with the faults in $FAULTS.

Wraps `launcher.train.main`; the product knows nothing of it. $FAULTS is a JSON list of [name, arguments]; each name is
a function below. `planted.py RUNS.json` instead makes several runs one after another in the same processes (a start
costs ten seconds): a list of {"argv": [...], "faults": [...]}.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

RANK = int(os.environ.get("RANK", "0"))


@contextmanager
def replaced(holder: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`make` gets the attribute and gives another in its place."""
    original = getattr(holder, name)
    setattr(holder, name, make(original))
    try:
        yield
    finally:
        setattr(holder, name, original)


def before_step(act: Callable[[int], None]) -> Any:
    """Call `act` with the number of each step, on every rank, before its data is fetched."""
    from training.trainer import Trainer

    def make(original: Any) -> Any:
        def train_step(self: Any) -> None:
            act(self.progress.step + 1)
            original(self)

        return train_step

    return replaced(Trainer, "train_step", make)


def pace(seconds: float) -> Any:
    """Each step takes so much longer."""
    return before_step(lambda _: time.sleep(seconds))


def send(signals: dict[str, list[Any]]) -> Any:
    """At step N (text) this rank sends itself a signal: {"3": [rank, "SIGTERM"]}; rank -1 is every rank."""

    def act(step: int) -> None:
        rank, name = signals.get(str(step), (None, ""))
        if rank in (RANK, -1):
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(0.3)  # the thread takes it before the step's end

    return before_step(act)


def raise_at(rank: int, step: int) -> Any:
    """An exception in one rank."""

    def act(now: int) -> None:
        if RANK == rank and now == step:
            raise ValueError(f"planted at step {step}")

    return before_step(act)


def touch(path: str, step: int) -> Any:
    """Rank 0 creates a file before this step, and the step lasts long enough for it to be seen."""

    def act(now: int) -> None:
        if now == step:
            if RANK == 0:
                Path(path).touch()
            time.sleep(1.5)

    return before_step(act)


def sleep_in_loader(rank: int, step: int, seconds: float) -> Any:
    """One rank's data does not come."""
    from training.feed import TrainingFeed

    def make(original: Any) -> Any:
        def read(self: Any, first: int) -> Any:
            if RANK == rank and first == (step - 1) * self.batch.global_batch_size:
                time.sleep(seconds)
            return original(self, first)

        return read

    return replaced(TrainingFeed, "_read", make)


def sleep_in_forward(rank: int, step: int, seconds: float) -> Any:
    """One rank's forward pass hangs."""
    from parallel.phase import Phase

    def make(original: Any) -> Any:
        def pass_over(self: Any, kind: str) -> None:
            original(self, kind)
            if RANK == rank and self.step + 1 == step and kind == "forward" and self.micro_batch[kind] == 2:
                time.sleep(seconds)

        return pass_over

    return replaced(Phase, "pass_over", make)


def infinite_gradient(rank: int, steps: list[int]) -> Any:
    """One element of one rank's gradient is infinite, at these steps, as its backward pass computes it."""
    from training.trainer import Trainer

    def make(original: Any) -> Any:
        def run(self: Any) -> Any:
            def ruin(gradient: Any) -> Any:
                if self.engine.phase.step + 1 not in steps:
                    return gradient
                gradient = gradient.clone()
                gradient.view(-1)[:1].fill_(float("inf"))
                return gradient

            if RANK == rank:
                next(iter(self.engine.parameters)).register_hook(ruin)
            return original(self)

        return run

    return replaced(Trainer, "run", make)


def spike(first_samples: list[int], height: float = 50.0) -> Any:
    """The loss of the steps that begin with these sample numbers is higher."""
    from parallel.engine_steps import EngineSteps
    from training.trainer import Trainer

    samples = [0]

    def make_step(original: Any) -> Any:
        def train_step(self: Any) -> None:
            samples[0] = self.progress.samples
            original(self)

        return train_step

    def make_losses(original: Any) -> Any:
        def mean_losses(self: Any, micro_batches: Any = None) -> Any:
            losses = original(self, micro_batches)
            return losses + height if micro_batches is None and samples[0] in first_samples else losses

        return mean_losses

    stack = ExitStack()
    stack.enter_context(replaced(Trainer, "train_step", make_step))
    stack.enter_context(replaced(EngineSteps, "_mean_losses", make_losses))
    return stack


def slow_writer(seconds: float) -> Any:
    """Each tensor of a checkpoint takes so long to write."""
    from training.tensor_file import TensorFileWriter

    def make(original: Any) -> Any:
        def append(self: Any, tensor: Any) -> None:
            time.sleep(seconds)
            original(self, tensor)

        return append

    return replaced(TensorFileWriter, "append", make)


def failing_writer(files: int) -> Any:
    """The first so many files of this rank cannot be written."""
    from training import background_save

    left = [files]

    def make(original: Any) -> Any:
        def write_rank_file(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                raise OSError(5, "Input/output error", str(arguments[0]))
            return original(*arguments)

        return write_rank_file

    return replaced(background_save, "write_rank_file", make)


def announce(folder: str) -> Any:
    """Each rank says in `folder`/RANK what it is doing, and in `folder`/RANK.save whether it writes a checkpoint.

    Forward passes, collectives and evaluations last a little, so that a kill can hit each of them.
    """
    from parallel.phase import Phase
    from training import background_save

    def say(name: str, text: str) -> None:
        temporary = Path(folder) / f".{name}"
        temporary.write_text(text)
        temporary.rename(Path(folder) / name)

    def make_enter(original: Any) -> Any:
        def enter(self: Any, name: str) -> None:
            original(self, name)
            say(str(RANK), name)
            if name.startswith(("forward", "evaluating", "reducing", "agreeing")):
                time.sleep(0.01)

        return enter

    def make_write(original: Any) -> Any:
        def write_rank_file(*arguments: Any) -> Any:
            say(f"{RANK}.save", "saving")
            try:
                return original(*arguments)
            finally:
                say(f"{RANK}.save", "")

        return write_rank_file

    stack = ExitStack()
    stack.enter_context(replaced(Phase, "enter", make_enter))
    stack.enter_context(replaced(background_save, "write_rank_file", make_write))
    return stack


def record_rates(path: str) -> Any:
    """The learning rate in the optimizer's own groups, as each update finds it, one line a step."""
    from parallel.engine_steps import EngineSteps

    def make(original: Any) -> Any:
        def spread(self: Any) -> None:
            original(self)
            if RANK == 0:
                rates = [group["lr"] for group in self.engine.optimizer.param_groups]
                with Path(path).open("a") as file:
                    file.write(json.dumps([self.phase.step + 1, rates]) + "\n")

        return spread

    return replaced(EngineSteps, "_spread_nonfinite_loss", make)


def fp16_without_its_instructions() -> Any:
    """DeepSpeed refuses fp16 on processors that are slow at it."""
    from deepspeed.accelerator import get_accelerator

    return replaced(type(get_accelerator()), "is_fp16_supported", lambda _: lambda self: True)


def joined_once() -> Any:
    """Processes that have met for one run do not meet again for the next."""
    from training import start

    devices: list[Any] = []

    def make(original: Any) -> Any:
        def initialize(*arguments: Any) -> Any:
            if not devices:
                devices.append(original(*arguments))
            return devices[0]

        return initialize

    return replaced(start, "initialize_distributed", make)


def run(argv: list[str], faults: list[list[Any]]) -> int:
    """One run with its faults."""
    from launcher import train

    with ExitStack() as stack:
        for name, arguments in faults:
            planted = globals()[name]
            stack.enter_context(planted(**arguments) if isinstance(arguments, dict) else planted(*arguments))
        return train.main(argv)


def main() -> int:
    """The run that the command line asks for, or the list of runs."""
    argv = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    if len(argv) == 1 and argv[0].endswith(".json"):
        with joined_once():
            for each in json.loads(Path(argv[0]).read_text()):
                if RANK == 0:
                    print(f"== {each['argv'][1:]} {each['faults']}", flush=True)
                if status := run(each["argv"], each["faults"]):
                    return status
        return 0
    return run(argv, json.loads(os.environ.get("FAULTS", "[]")))


if __name__ == "__main__":
    sys.exit(main())
