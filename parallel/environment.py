"""Rank, local rank, world size and rendezvous address, whatever started this process.

Read before torch is imported, so that a mistake is reported in a fraction of a second.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass


class LaunchError(Exception):
    """The launcher's variables contradict each other or are incomplete: one sentence."""


@dataclass(frozen=True)
class Environment:
    """Where this process stands among all processes of the run."""

    rank: int
    """Number of this process, 0 to world_size - 1."""
    local_rank: int
    """Number of this process among those of its node."""
    world_size: int
    """Number of processes of the run."""
    address: str
    """Host name or address of the process with rank 0."""
    port: int
    """TCP port at which rank 0 is met."""
    launcher: str
    """What started the process: `torch` (deepspeed, torchrun), `mpi`, `slurm` or `single`."""

    def export(self) -> None:
        """Write the variables that torch.distributed and DeepSpeed read."""
        os.environ.update(
            RANK=str(self.rank),
            LOCAL_RANK=str(self.local_rank),
            WORLD_SIZE=str(self.world_size),
            MASTER_ADDR=self.address,
            MASTER_PORT=str(self.port),
        )


# Each source: its name, then the variables of rank, local rank and world size.
SOURCES = (
    ("torch", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpi", "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    ("slurm", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
)


def _integer(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise LaunchError(f"{name} is {variables[name]!r}, expected a whole number") from None


def _default_port(variables: Mapping[str, str]) -> int:
    """A port that two jobs on one node do not share, above the well-known and below the ephemeral range."""
    job = "".join(character for character in variables.get("SLURM_JOB_ID", "") if character.isdigit())
    return 12000 + int(job or 0) % 16000


def _slurm_address(variables: Mapping[str, str], world_size: int) -> str:
    """Host of the first task: `srun` exports it as SLURM_LAUNCH_NODE_IPADDR only for itself, so the batch script sets
    MASTER_ADDR; on one node this node is the first."""
    if variables.get("SLURM_NNODES", "1") == "1" or world_size == 1:
        return "127.0.0.1"
    raise LaunchError(
        f"MASTER_ADDR is not set in a Slurm step over {variables['SLURM_NNODES']} nodes: use slurm/train.sbatch, "
        "or export MASTER_ADDR=$(scontrol show hostnames | head -n 1)"
    )


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Find this process's place from the variables of the `deepspeed` command, torchrun, mpirun or srun.

    `variables` is an environment (name to value). Without any launcher the result is one process.

    Raises `LaunchError` where variables of one source are incomplete or not numbers, or where two sources disagree
    about the number of processes (a launcher started once a task).
    """
    found = [source for source in SOURCES if source[1] in variables and source[3] in variables]
    # An interactive shell inside an allocation has SLURM_PROCID=0 of its own step: it is no task of ours.
    found = [s for s in found if s[0] != "slurm" or "SLURM_STEP_ID" in variables]
    if not found:
        return Environment(0, 0, 1, "127.0.0.1", int(variables.get("MASTER_PORT", _free_port())), "single")
    name, rank_name, local_name, size_name = found[0]
    rank, world_size = _integer(variables, rank_name), _integer(variables, size_name)
    local_rank = _integer(variables, local_name) if local_name in variables else rank
    if not 0 <= rank < world_size:
        raise LaunchError(f"{rank_name} is {rank}, expected 0 to {world_size - 1} ({size_name} is {world_size})")
    address = variables.get("MASTER_ADDR")
    if address is None:
        address = _slurm_address(variables, world_size) if name == "slurm" else "127.0.0.1"
    port = _integer(variables, "MASTER_PORT") if "MASTER_PORT" in variables else _default_port(variables)
    return Environment(rank, local_rank, world_size, address, port, name)


def _free_port() -> int:
    """A port that is free now on this machine."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
