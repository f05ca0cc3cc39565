"""Every way to start launcher/train.py on a cluster but the batch script, and the ways that are refused.

Each is a job of two nodes, of which one process each becomes a stage (the first: of one node).
"""

import subprocess
import sys
from pathlib import Path

from tests.slurm.lab import ROOT, Lab, lab
from tests.slurm.scenarios import Outcome, outcome, small

BIN = Path(sys.executable).parent
# DeepSpeed's launchers read a host file; each job writes its own. They look for ssh first unless told not to.
HOST_FILE = 'hosts=$TMP-$SLURM_JOB_ID; scontrol show hostnames | sed "s/$/ slots=1/" > $hosts; first=$(hostname)'
DEEPSPEED = f"{BIN}/deepspeed --hostfile $hosts --master_addr $first --master_port $PORT"
SSH = """#!/bin/bash
# What pdsh calls in place of ssh: no node of the lab has an sshd.
while [[ $1 == -* ]]; do [[ $1 == -[lo] ]] && shift; shift; done
host=$1; shift
exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$host" bash -c "$*"
"""

WAYS = {
    "srun": ("srun --nodes=2 --ntasks=2 $PYTHON $TRAIN", 2),
    "srun --mpi=pmix": ("srun --mpi=pmix --nodes=2 --ntasks=2 $PYTHON $TRAIN", 2),
    "mpirun": ("mpirun -n 2 --map-by node $PYTHON $TRAIN", 2),
    "torchrun": (
        f"srun --ntasks-per-node=1 {BIN}/torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d "
        "--rdzv-id $SLURM_JOB_ID --rdzv-endpoint $(hostname):$PORT $TRAIN",
        2,
    ),
    "deepspeed on one node": (f"{BIN}/deepspeed --num_gpus 2 --master_port $PORT $TRAIN", 1),
    "deepspeed --launcher slurm": (f"{HOST_FILE}; {DEEPSPEED} --launcher slurm --no_ssh_check $TRAIN", 2),
    "deepspeed --launcher openmpi": (f"{HOST_FILE}; {DEEPSPEED} --launcher openmpi --no_ssh_check $TRAIN", 2),
    "deepspeed --launcher pdsh": (f"{HOST_FILE}; {DEEPSPEED} --launcher pdsh $TRAIN", 2),
}

REFUSED = {
    "deepspeed once a task": f"srun --ntasks=4 {BIN}/deepspeed --num_gpus 2 --master_port $PORT $TRAIN",
    "an MPI world of 1 in each of 4 tasks": "srun --ntasks=4 mpirun -n 1 --host localhost $PYTHON $TRAIN",
    "a host file that is missing": f"{BIN}/deepspeed --hostfile nowhere --num_gpus 2 --master_port $PORT $TRAIN",
    "srun forgotten": "$PYTHON $TRAIN",
}


def submit(cluster: Lab, number: int, command: str, nodes: int, tasks: int = 1) -> str:
    """A batch script of one command."""
    ssh = cluster.folder / "bin" / "ssh"
    if not ssh.exists():
        ssh.parent.mkdir()
        ssh.write_text(SSH)
        ssh.chmod(0o755)
    output = f"run.output_dir={cluster.run_dir(str(number))}"
    script = cluster.folder / f"way-{number}.sh"
    script.write_text(
        f"#!/bin/bash\nexport PATH={ssh.parent}:$PATH OMP_NUM_THREADS=1\nTMP={cluster.folder}/hosts\n"
        f"PYTHON={sys.executable}; PORT=$($PYTHON slurm/job.py port)\n"
        f'TRAIN="launcher/train.py configs/parity.yaml parallel.pipeline=2 {output} {" ".join(small())}"\n{command}\n'
    )
    return cluster.submit(f"--nodes={nodes}", f"--ntasks-per-node={tasks}", script)


def ways_in() -> Outcome:
    """Each way trains the same. All are in the queue at once, so that some share their nodes."""
    with lab(nodes=2) as two:
        jobs = [submit(two, number, command, nodes) for number, (command, nodes) in enumerate(WAYS.values())]
        found = outcome(two, *jobs)
        found.more = {way: two.metrics(str(number)) for number, way in enumerate(WAYS)}
        return found


def refused() -> Outcome:
    """Each is one sentence."""
    with lab(nodes=2) as two:
        jobs = [submit(two, number, command, 2, tasks=2) for number, command in enumerate(REFUSED.values())]
        found = outcome(two, *jobs)
        found.more = {"runs": [path.name for path in two.run_dir("x").parent.glob("*")]}
        return found


def devices() -> Outcome:
    """Four make-believe devices; another job holds the first two."""
    with lab(nodes=1, gpus=4) as one:
        first = one.submit("--gpus-per-node=2", "--ntasks=1", "--wrap=sleep 600")
        job = one.train(*small(), "parallel.tensor=2", options=("--gpus-per-node=2", "--cpus-per-gpu=1"))
        found = outcome(one, job)
        one.slurm("scancel", first)
        return found


def prepared() -> Outcome:
    """slurm/prepare_data.sbatch over two nodes, and the same in one process here."""
    with lab(nodes=2) as two:
        text = two.folder / "runs" / "text"
        text.mkdir(parents=True)
        for number in range(40):
            words = " ".join(str(number * word) for word in range(300))
            (text / f"{number:02}.txt").write_text(f"document {number}: {words}\n")
        common = ["--input", str(text), "--tokenizer", "corpus/parity/tokenizer.model", "--validation-fraction", "0.1"]
        alone = [sys.executable, "launcher/prepare_data.py", *common, "--output", str(two.folder / "runs" / "alone")]
        subprocess.run(alone, cwd=ROOT, check=True, capture_output=True)
        output = two.folder / "runs" / "ranks"
        job = two.submit("--nodes=2", "--ntasks=4", "slurm/prepare_data.sbatch", *common, "--output", output)
        found = outcome(two, job)
        found.more = {
            name: [(two.folder / "runs" / who / name).read_bytes() for who in ("alone", "ranks")]
            for name in ("train.bin", "train.idx", "validation.bin", "tokenizer.model")
            if (output / name).exists()
        }
        return found


def tensorboard() -> Outcome:
    """slurm/tensorboard.sbatch: what it listens on, as its node sees it and as another does."""
    with lab(nodes=2) as two:
        job = two.submit("slurm/tensorboard.sbatch", two.folder)
        two.wait_for_text("Press CTRL+C", job)
        port = two.log(job).split("127.0.0.1:")[1].split()[0]
        connect = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
        seen = []
        for node, address in (("node1", "127.0.0.1"), ("node2", "node1")):
            try:
                two.cluster("exec", "--node", node, "--", sys.executable, "-c", connect, address, port)
                seen.append(node)
            except AssertionError:
                continue
        two.slurm("scancel", job)
        found = outcome(two, job)
        found.more = {"seen": seen, "port": port}
        return found


SCENARIOS = {function.__name__: function for function in (ways_in, refused, devices, prepared, tensorboard)}
