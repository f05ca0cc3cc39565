"""Rank, local rank, world size and rendezvous address, whatever started this process.

Read before torch is imported, so that a mistake is reported in a fraction of a second. Three kinds of programs start
processes, and each says so in variables: `deepspeed` and torchrun (RANK), mpirun (OMPI_COMM_WORLD_RANK, PMI_RANK), and
srun (SLURM_PROCID). Where two of them speak, they must mean the same world, or one of them started the other once a
node; anything else is a mistake, and refused. docs/launching.md has the table.
"""

import os
import socket
import subprocess
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

DEEPSPEED_VERSION = "0.19.8"
"""The version that `parallel.deepspeed_patches` was written for; 0.18.3 to 0.19.2 mis-scale gradients of pipelines."""


class LaunchError(Exception):
    """The launchers' variables contradict each other or are incomplete: one sentence, the same on every process, or of
    one process that has to speak for itself (`alone`)."""

    def __init__(self, sentence: str, alone: bool = False) -> None:
        super().__init__(sentence)
        self.alone = alone


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


@dataclass(frozen=True)
class _Claim:
    """What one launcher's variables say of this process."""

    launcher: str
    program: str
    """What to call it in a sentence."""
    rank_name: str
    size_name: str
    rank: int
    size: int
    local_rank: int | None = None
    nodes: int | None = None
    """On how many nodes it started processes, where it says so."""
    own_world: bool = False
    """Whether it counts only processes that it started itself (and not those that srun or mpirun started)."""
    one_a_node: bool = False
    """Whether it started one process on each node."""


LOCAL = "127.0.0.1"
PORTS = range(12000, 28000)
"""Above the well-known ports and below those that systems give to outgoing connections."""
SPECIAL_STEPS = 0xFFFFFFF0
"""Slurm's numbers of steps from here on are of a batch script or an interactive shell, which are no tasks."""

# Each MPI: rank, size, local rank, local size.
MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
MPI_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Find this process's place from the variables of the `deepspeed` command, torchrun, mpirun or srun.

    `variables` is an environment (name to value). Without any launcher the result is one process.

    Raises `LaunchError` where variables are incomplete or not numbers, where two launchers disagree (one was started
    once a task of the other), or where the processes do not cover the nodes or tasks of a Slurm job.
    """
    claims = [claim for claim in (_torch(variables), _mpi(variables), _slurm_task(variables)) if claim]
    for claim in claims:
        if not 0 <= claim.rank < claim.size:
            raise LaunchError(
                f"{claim.rank_name} is {claim.rank}, expected 0 to {claim.size - 1} ({claim.size_name} is {claim.size})"
            )
    _check_allocation(variables, claims)
    if not claims:
        port = _integer(variables, "MASTER_PORT") if "MASTER_PORT" in variables else _free_port()
        return Environment(0, 0, 1, LOCAL, port, "single")
    chosen = claims[0]
    for outer in claims[1:]:
        _check_pair(chosen, outer)
    address = variables.get("MASTER_ADDR") or _address(variables, chosen)
    port = _integer(variables, "MASTER_PORT") if "MASTER_PORT" in variables else default_port(variables)
    return Environment(chosen.rank, _local_rank(claims, address), chosen.size, address, port, chosen.launcher)


def guess_rank(variables: Mapping[str, str] = os.environ) -> int:
    """0 for the one process that shall speak even where `read_environment` refuses, other numbers for the others."""
    names = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"] + ["SLURM_PROCID"] * _is_task(variables)
    found = [variables[name] for name in names if name in variables]
    return max((int(text) for text in found if text.isdigit()), default=0)


def _integer(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise LaunchError(f"{name} is {variables[name]!r}, expected a whole number") from None


def _first(variables: Mapping[str, str], *names: str) -> int | None:
    """The value of the first of these variables that is set."""
    return next((_integer(variables, name) for name in names if name in variables), None)


# ---- what each launcher says


def _torch(variables: Mapping[str, str]) -> _Claim | None:
    """What the deepspeed command and torchrun export; or a script of the user's, that maps other variables."""
    if "RANK" not in variables:
        return None
    if "WORLD_SIZE" not in variables:
        raise LaunchError("RANK is set and WORLD_SIZE is not: set both, or neither")
    program = "a launcher"
    if "CROSS_SIZE" in variables:
        program = "deepspeed"
    elif "TORCHELASTIC_RUN_ID" in variables:
        program = "torchrun"
    return _Claim(
        "torch",
        program,
        "RANK",
        "WORLD_SIZE",
        _integer(variables, "RANK"),
        _integer(variables, "WORLD_SIZE"),
        _first(variables, "LOCAL_RANK"),
        _first(variables, "GROUP_WORLD_SIZE", "CROSS_SIZE"),
        own_world=program != "a launcher",
    )


def _mpi(variables: Mapping[str, str]) -> _Claim | None:
    """What mpirun exports, or srun with a PMI."""
    for rank_name, size_name, local_name, local_size_name in MPI_NAMES:
        if rank_name not in variables or size_name not in variables:
            continue
        rank, size = _integer(variables, rank_name), _integer(variables, size_name)
        local_size = _first(variables, local_size_name)
        return _Claim(
            "mpi",
            "mpirun",
            rank_name,
            size_name,
            rank,
            size,
            _first(variables, local_name),
            nodes=1 if local_size == size else None,
            own_world=local_size is not None,
            one_a_node=local_size == 1,
        )
    return None


def _is_task(variables: Mapping[str, str]) -> bool:
    """Whether srun started this process, or what started it, as a task; a batch script has a SLURM_PROCID too."""
    step = variables.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < SPECIAL_STEPS and "SLURM_PROCID" in variables


def _slurm_task(variables: Mapping[str, str]) -> _Claim | None:
    if not _is_task(variables):
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    if size_name not in variables:
        raise LaunchError("SLURM_PROCID is set and SLURM_NTASKS is not: start this with srun")
    size = _integer(variables, size_name)
    nodes = _first(variables, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    return _Claim(
        "slurm",
        "srun",
        "SLURM_PROCID",
        size_name,
        _integer(variables, "SLURM_PROCID"),
        size,
        _first(variables, "SLURM_LOCALID"),
        nodes,
        one_a_node=size == nodes,
    )


# ---- what they must agree on


def _check_pair(inner: _Claim, outer: _Claim) -> None:
    """Refuse a launcher that was started by each of several processes, and two that number processes differently."""
    if outer.size == 1:
        return
    if not inner.own_world:
        if (inner.rank, inner.size) == (outer.rank, outer.size):
            return
        raise LaunchError(
            f"{inner.rank_name} is {inner.rank} of {inner.size_name} {inner.size}, but {outer.rank_name} is "
            f"{outer.rank} of {outer.size_name} {outer.size}: unset the ones that are not meant"
        )
    one_launcher_a_node = outer.one_a_node and inner.size >= outer.size and inner.nodes in (None, outer.size)
    if not one_launcher_a_node:
        raise LaunchError(
            f"{outer.program} started {outer.size} tasks ({outer.size_name}) and each of them {inner.program}, with a "
            f"world of {inner.size} ({inner.size_name}) of its own: leave {inner.program} out "
            "(srun python launcher/train.py ..., one task a device), or start it once a node and tell it of all nodes "
            "(docs/launching.md)"
        )


def _check_allocation(variables: Mapping[str, str], claims: list[_Claim]) -> None:
    """Refuse a launcher that covers one node of several in a Slurm job, and one process where tasks were asked for."""
    if "SLURM_JOB_ID" not in variables or _is_task(variables):
        return
    nodes = _first(variables, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    tasks = _first(variables, "SLURM_NTASKS") or 1
    if not claims and max(tasks, nodes) > 1:
        size = f"{tasks} tasks (SLURM_NTASKS)" if tasks > 1 else f"{nodes} nodes"
        raise LaunchError(
            f"this Slurm job has {size}, and this is one process that srun did not start: "
            "put srun before it, or  srun -n 1  for one process"
        )
    if claims and nodes > 1 and claims[0].own_world and claims[0].nodes == 1:
        claim = claims[0]
        raise LaunchError(
            f"this Slurm job has {nodes} nodes, but {claim.program} started all {claim.size} processes "
            f"({claim.size_name}) on one of them, as where a host file is missing: use slurm/train.sbatch, or name all "
            "nodes (docs/launching.md)"
        )


def _local_rank(claims: list[_Claim], address: str) -> int:
    chosen = claims[0]
    for claim in claims:
        if claim.local_rank is not None and (claim.rank, claim.size) == (chosen.rank, chosen.size):
            return claim.local_rank
    if address not in (LOCAL, "localhost", socket.gethostname()):
        raise LaunchError(
            f"{chosen.rank_name} is set and LOCAL_RANK is not: set it to the number of the process on its node"
        )
    return chosen.rank


# ---- where they meet


def default_port(variables: Mapping[str, str]) -> int:
    """A port that two jobs on one node, and two steps of one job, do not share: legal for any job number."""
    name = next((variables[name] for name in MPI_JOB_NAMES if _mpi(variables) and name in variables), None)
    if name is not None:
        return PORTS[zlib.crc32(name.encode()) % len(PORTS)]
    job = "".join(character for character in variables.get("SLURM_JOB_ID", "") if character.isdigit())
    step = int(variables["SLURM_STEP_ID"]) if _is_task(variables) else 0
    return PORTS[(int(job or 0) + 4099 * step) % len(PORTS)]


def _address(variables: Mapping[str, str], claim: _Claim) -> str:
    """Host of rank 0, where MASTER_ADDR does not say it."""
    if claim.size == 1 or claim.nodes == 1:
        return LOCAL
    # Under mpirun only the nodes after the first stand in a step of its own, so the job's list is the right one.
    names = ("SLURM_JOB_NODELIST",) if claim.launcher == "mpi" else ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    nodes = next((variables[name] for name in names if name in variables), None)
    if nodes is not None and (claim.launcher != "torch" or _is_task(variables)):
        return first_host(nodes)
    if claim.launcher == "mpi" and claim.nodes is None and claim.own_world:
        raise LaunchError(
            "MASTER_ADDR is not set and mpirun uses several nodes: add  -x MASTER_ADDR=HOST  with the host of rank 0"
        )
    return LOCAL


def first_host(node_list: str) -> str:
    """First host of a Slurm node list such as node[1-4,7], as Slurm itself reads it."""
    try:
        found = subprocess.run(
            ["scontrol", "show", "hostnames", node_list], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1:]
        raise LaunchError(
            f"MASTER_ADDR is not set, and scontrol does not say which host is the first of {node_list} "
            f"({''.join(said)}): export MASTER_ADDR in the batch script, as slurm/train.sbatch does"
        ) from error
    hosts = found.stdout.split()
    if not hosts:
        raise LaunchError(f"scontrol finds no host in the node list {node_list!r}: export MASTER_ADDR")
    return hosts[0]


def _free_port() -> int:
    """A port that is free now on this machine."""
    with socket.socket() as listener:
        listener.bind((LOCAL, 0))
        return int(listener.getsockname()[1])


def check_deepspeed_version(found: str | None = None) -> None:
    """Raise `LaunchError` where the installed DeepSpeed is not the one that we pin; it is not imported for that."""
    found = found or version("deepspeed")
    if found != DEEPSPEED_VERSION:
        raise LaunchError(
            f"DeepSpeed is {found}, expected {DEEPSPEED_VERSION}: versions 0.18.3 to 0.19.2 scale the gradients of "
            "pipelines wrongly, and no other was tested: install requirements.txt"
        )
