"""The one place that chooses the device: accelerator, backend, process group, numeric switches."""

import logging
import os
import warnings
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel.environment import Environment, LaunchError
from parallel.meeting import MEETING_SECONDS, meet

# DeepSpeed reports through this logger at INFO what its configuration says anyway; a user reads warnings only.
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
if not torch.accelerator.is_available():
    # It would find the CPU by itself, and say so once a process.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def initialize_distributed(
    environment: Environment, timeout: timedelta = timedelta(minutes=30), meeting_seconds: float = MEETING_SECONDS
) -> torch.device:
    """Choose the device of this process, join the process group of all ranks and return the device.

    `timeout` is of each collective, `meeting_seconds` how long this process waits for rank 0 to come.

    Exports the launcher's variables, so that DeepSpeed reads the same. Raises LaunchError where the devices that this
    process sees are not its own, and PreflightError where the processes cannot meet.
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
        check_visible_devices(os.environ, _devices_of_machine())
        accelerator.set_device(device_number(environment.local_rank, accelerator.device_count()))
    backend = accelerator.communication_backend_name()
    dist.init_process_group(
        backend,
        store=meet(environment, meeting_seconds),
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout,
    )
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device(accelerator.current_device_name())


def device_number(local_rank: int, visible: int) -> int:
    """Which of the visible devices this process takes: the only one, as where each Slurm task sees its own, or the one
    with its local rank. LaunchError where there are too few."""
    if visible == 1:
        return 0
    if local_rank < visible:
        return local_rank
    raise LaunchError(
        f"local rank {local_rank} has no device: {visible} are visible (CUDA_VISIBLE_DEVICES "
        f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); start as many processes a node as there are devices",
        alone=local_rank == visible,
    )


def check_visible_devices(variables: Mapping[str, str], of_machine: int) -> None:
    """Refuse devices that Slurm gave to another job: a launcher may count from 0 whatever it was given.

    `of_machine` is the number of devices that a process of this job could use at all. Where Slurm hides those of others
    (ConstrainDevices) that is the job's own number, and they count from 0 indeed.
    """
    given = variables.get("SLURM_STEP_GPUS") or variables.get("SLURM_JOB_GPUS")
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if not given or not visible or of_machine <= len(given.split(",")):
        return
    if all(name.isdigit() for name in (given + "," + visible).split(",")):
        others = [name for name in visible.split(",") if name not in given.split(",")]
        if others:
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES is {visible}, but Slurm gave this job the devices {given}: start deepspeed "
                "without --num_gpus and --include, which number devices anew, or use srun"
            )


def _devices_of_machine() -> int:
    """How many devices there are whatever CUDA_VISIBLE_DEVICES hides; 0 where that is not known."""
    return max(0, torch.cuda._raw_device_count_nvml()) if torch.cuda.is_available() else 0


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
