"""The one place that chooses the device: accelerator, backend, process group, numeric switches."""

import logging
import os
import warnings
from datetime import timedelta

import torch

from parallel.environment import Environment

# DeepSpeed reports through this logger at INFO what its configuration says anyway; a user reads warnings only.
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
if not torch.accelerator.is_available():
    # It would find the CPU by itself, and say so once a process.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def initialize_distributed(environment: Environment, timeout: timedelta = timedelta(minutes=30)) -> torch.device:
    """Choose the device of this process, join the process group of all ranks and return the device.

    Exports the launcher's variables, so that DeepSpeed reads the same.
    """
    environment.export()
    warnings.filterwarnings("ignore", message=".*barrier.*using the device under current context.*")
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # Only inference uses this operator, and compiling it takes a minute and a compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        accelerator.set_device(environment.local_rank % max(1, accelerator.device_count()))
    deepspeed.init_distributed(
        dist_backend=accelerator.communication_backend_name(), auto_mpi_discovery=False, verbose=False, timeout=timeout
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device(accelerator.current_device_name())


def pins_memory() -> bool:
    """Whether batches go into page-locked host memory, from which a GPU copies without waiting."""
    return torch.cuda.is_available()


def synchronize() -> None:
    """Wait until the accelerator has done what was asked of it; nothing on a CPU."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().synchronize()


def peak_memory_gib() -> float:
    """Most memory this process has used: on the accelerator where there is one, else resident in the host."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return accelerator.max_memory_allocated() / 2**30


# Dense peaks in FLOP/s (never the figures with structured sparsity), by a part of the device's name.
DENSE_PEAKS: dict[str, dict[str, float]] = {
    "H200": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12},
    "H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "fp32": 51e12},
    "H100": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
    "B200": {"bf16": 2250e12, "fp16": 2250e12, "fp32": 80e12},
}


def dense_peak(dtype: str) -> float | None:
    """Peak of this process's device in FLOP/s for `fp32`, `bf16` or `fp16` without sparsity; None where not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peaks[dtype] for part, peaks in DENSE_PEAKS.items() if part in name), None)
