"""Where a process stands, from the variables of every launcher, as they were read off real starts of each."""

import os
from pathlib import Path

import pytest

from parallel.environment import (
    DEEPSPEED_VERSION,
    PORTS,
    LaunchError,
    check_deepspeed_version,
    default_port,
    first_host,
    guess_rank,
    read_environment,
)

# Slurm's variables in a batch script of 2 nodes x 2 tasks, and in task 3 of its first step.
BATCH = {
    "SLURM_JOB_ID": "71",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
TASK = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
ONE_A_NODE = TASK | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1261895681",
}
TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "71",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
DEEPSPEED = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_SIZE": "2",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `scontrol` that answers as Slurm does for node[1-2] and refuses the rest."""
    path = tmp_path / "scontrol"
    path.write_text(
        '#!/bin/sh\n[ "$1 $2 $3" = "show hostnames node[1-2]" ] || { echo "Invalid hostlist" >&2; exit 1; }\n'
        "echo node1; echo node2\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return path


def test_without_a_launcher_it_is_one_process() -> None:
    environment = read_environment({})
    assert (environment.rank, environment.local_rank, environment.world_size) == (0, 0, 1)
    assert (environment.address, environment.launcher) == ("127.0.0.1", "single")
    assert environment.port > 1023


@pytest.mark.parametrize(
    ("variables", "launcher", "address"),
    [
        pytest.param(TORCHRUN, "torch", "node1", id="torchrun"),
        pytest.param(DEEPSPEED, "torch", "node1", id="deepspeed"),
        pytest.param(MPIRUN | {"MASTER_ADDR": "node1"}, "mpi", "node1", id="mpirun with a host"),
        pytest.param(TASK, "slurm", "node1", id="srun"),
        pytest.param(TASK | {"MASTER_ADDR": "10.0.0.1"}, "slurm", "10.0.0.1", id="srun, interface chosen"),
        pytest.param(TASK | {"PMI_RANK": "3", "PMI_SIZE": "4"}, "mpi", "node1", id="srun --mpi=pmi2"),
        pytest.param(TASK | {"PMIX_RANK": "3"}, "slurm", "node1", id="srun --mpi=pmix"),
        pytest.param(TASK | {"RANK": "3", "WORLD_SIZE": "4"}, "torch", "node1", id="srun and a script that maps"),
        pytest.param(ONE_A_NODE | TORCHRUN, "torch", "node1", id="srun of a torchrun a node"),
        pytest.param(ONE_A_NODE | DEEPSPEED, "torch", "node1", id="srun of a deepspeed a node"),
        pytest.param(BATCH | MPIRUN, "mpi", "node1", id="mpirun in a batch script, first node"),
        pytest.param(
            TASK
            | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0"}
            | {"SLURM_STEP_NODELIST": "node2"}
            | MPIRUN,
            "mpi",
            "node1",
            id="mpirun in a batch script, another node",
        ),
        pytest.param(
            TASK | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0"} | DEEPSPEED,
            "torch",
            "node1",
            id="deepspeed --launcher pdsh, a node each",
        ),
    ],
)
def test_every_launcher_gives_the_same_place(
    scontrol: Path, variables: dict[str, str], launcher: str, address: str
) -> None:
    environment = read_environment(variables)
    assert (environment.rank, environment.local_rank, environment.world_size) == (3, 1, 4)
    assert (environment.launcher, environment.address) == (launcher, address)


def test_mpich_has_names_of_its_own() -> None:
    names = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
    environment = read_environment(names)
    assert (environment.rank, environment.local_rank, environment.world_size) == (3, 3, 4)
    assert environment.address == "127.0.0.1"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        pytest.param(
            TASK | {"RANK": "1", "WORLD_SIZE": "2", "CROSS_SIZE": "1"},
            ("srun started 4 tasks", "deepspeed", "leave deepspeed out"),
            id="deepspeed once a task",
        ),
        pytest.param(
            TASK | {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x", "GROUP_WORLD_SIZE": "1"},
            ("srun started 4 tasks", "torchrun"),
            id="torchrun once a task, its world as large as the step",
        ),
        pytest.param(
            TASK | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            ("srun started 4 tasks", "mpirun", "world of 1"),
            id="an MPI world of 1 inside 4 tasks",
        ),
        pytest.param(
            ONE_A_NODE | {"RANK": "1", "WORLD_SIZE": "2", "CROSS_SIZE": "1"},
            ("srun started 2 tasks", "deepspeed", "world of 2"),
            id="a deepspeed a node that knows of one node",
        ),
        pytest.param(
            MPIRUN | {"RANK": "0", "WORLD_SIZE": "2", "CROSS_SIZE": "1"},
            ("mpirun started 4 tasks", "deepspeed"),
            id="deepspeed in each process of mpirun",
        ),
        pytest.param(TASK | {"RANK": "2", "WORLD_SIZE": "4"}, ("RANK is 2", "SLURM_PROCID is 3"), id="other numbers"),
        pytest.param(MPIRUN | {"RANK": "3", "WORLD_SIZE": "8"}, ("WORLD_SIZE 8", "OMPI_COMM_WORLD_SIZE 4"), id="sizes"),
        pytest.param(
            BATCH | {"RANK": "0", "WORLD_SIZE": "2", "CROSS_SIZE": "1"},
            ("2 nodes", "deepspeed", "host file", "one of them"),
            id="a host file that is missing",
        ),
        pytest.param(
            BATCH | MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, ("2 nodes", "mpirun"), id="mpirun on one of two nodes"
        ),
        pytest.param(BATCH, ("4 tasks", "SLURM_NTASKS", "put srun before it"), id="srun forgotten"),
        pytest.param(MPIRUN, ("MASTER_ADDR is not set", "-x MASTER_ADDR"), id="mpirun over nodes that nobody can name"),
        pytest.param({"RANK": "0"}, ("RANK is set and WORLD_SIZE is not",), id="no size"),
        pytest.param({"RANK": "4", "WORLD_SIZE": "4"}, ("RANK is 4, expected 0 to 3",), id="a rank too many"),
        pytest.param({"RANK": "first", "WORLD_SIZE": "4"}, ("RANK is 'first'",), id="no number"),
        pytest.param(TORCHRUN | {"MASTER_PORT": "auto"}, ("MASTER_PORT is 'auto'",), id="no port"),
        pytest.param(
            {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node1"}, ("LOCAL_RANK is not",), id="no local rank"
        ),
        pytest.param(TASK | {"SLURM_STEP_NODELIST": "node[1-"}, ("node[1-", "Invalid hostlist"), id="no such list"),
    ],
)
def test_contradictions_are_one_sentence(scontrol: Path, variables: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(LaunchError) as caught:
        read_environment(variables)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_step_of_one_node_in_a_larger_job_is_meant() -> None:
    step = BATCH | {"SLURM_STEP_ID": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0"}
    assert read_environment(step | {"SLURM_NTASKS": "1"}).world_size == 1
    inner = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "CROSS_SIZE": "1"}
    assert read_environment(step | inner).world_size == 2


@pytest.mark.parametrize("step", ["4294967290", "4294967291"])
def test_an_interactive_shell_and_a_batch_script_are_no_tasks(step: str) -> None:
    shell = {"SLURM_JOB_ID": "71", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": step}
    assert read_environment(shell).launcher == "single"


@pytest.mark.parametrize("job", ["1", "65536", "4294967294", "71_3", "", "12.batch"])
def test_the_port_is_legal_for_any_job(job: str) -> None:
    port = default_port({"SLURM_JOB_ID": job})
    assert port in PORTS
    assert 1024 < port < 32768


def test_jobs_and_steps_side_by_side_have_ports_of_their_own() -> None:
    jobs = [default_port({"SLURM_JOB_ID": str(number)}) for number in range(70, 90)]
    steps = [default_port(TASK | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
             for job in range(70, 74) for step in range(4)]  # fmt: skip
    mpi = [default_port(MPIRUN | {"PMIX_NAMESPACE": str(number)}) for number in (1261895681, 1261895682)]
    assert len(set(jobs)) == len(jobs)
    assert len(set(steps)) == len(steps)
    assert len(set(mpi)) == len(mpi)


def test_mpirun_has_one_port_on_all_nodes() -> None:
    assert default_port(BATCH | MPIRUN) == default_port(TASK | MPIRUN | {"SLURM_STEP_ID": "2"})


def test_without_scontrol_the_sentence_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="export MASTER_ADDR"):
        first_host("node[1-2]")


def test_one_process_speaks_for_all() -> None:
    tasks = [TASK | {"SLURM_PROCID": str(n), "RANK": str(r), "WORLD_SIZE": "2"} for n in range(4) for r in range(2)]
    assert [guess_rank(task) for task in tasks].count(0) == 1
    assert guess_rank(BATCH | MPIRUN | {"OMPI_COMM_WORLD_RANK": "0"}) == 0


def test_another_deepspeed_is_refused() -> None:
    check_deepspeed_version(DEEPSPEED_VERSION)
    with pytest.raises(LaunchError, match=r"DeepSpeed is 0\.19\.1, expected 0\.19\.8"):
        check_deepspeed_version("0.19.1")
