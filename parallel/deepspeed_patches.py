"""What must be changed inside DeepSpeed, each for a stated reason, for the version that we pin and no other."""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import deepspeed
from deepspeed.runtime.pipe import module as pipe_module

PINNED_VERSION = "0.19.8"

if deepspeed.__version__ != PINNED_VERSION:
    raise ImportError(
        f"DeepSpeed is {deepspeed.__version__}, expected {PINNED_VERSION}: 0.18.3 to 0.19.2 mis-scale gradients of "
        "pipelines, and the patches here were tested with this version only"
    )


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
