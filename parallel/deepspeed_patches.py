"""What must be changed inside DeepSpeed, each for a stated reason, for the version that we pin and no other."""

import contextlib
import importlib
import io
from collections.abc import Iterator
from typing import Any

import deepspeed
from deepspeed.runtime import compiler
from deepspeed.runtime.pipe import module as pipe_module

from parallel.environment import DEEPSPEED_VERSION

assert deepspeed.__version__ == DEEPSPEED_VERSION, "the launcher checks it first, with a sentence"


@contextlib.contextmanager
def grid_reused(grid: Any) -> Iterator[None]:
    """Let pipeline modules made inside use `grid` instead of making process groups of their own, and print nothing.

    A `PipelineModule` builds a new grid each time: its groups (28 file descriptors and 15 threads a rank with gloo)
    are never freed, and they are not ours.
    """
    original = pipe_module.PipelineParallelGrid
    pipe_module.PipelineParallelGrid = lambda **_: grid
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        pipe_module.PipelineParallelGrid = original


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon optimizer as it would itself, whatever the optimizer, when it makes an engine.

    A function of it is compiled as it is imported, which loads torch's compiler: a second of every start, for an
    optimizer that is not used here.
    """
    original = compiler.compile
    compiler.compile = lambda *_, **__: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = original
