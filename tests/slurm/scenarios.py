"""What can happen to a job, each in a cluster of its own; tests ask afterwards what came of it.

Layout of the larger jobs: 2 nodes x 2 tasks, pipeline 2 across the nodes and tensor 2 inside.
"""

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.slurm.lab import ROOT, Lab, lab, wait_until

TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2")
LAYOUT = ("parallel.pipeline=2", "parallel.tensor=2")
OFTEN = ("checkpoint.every=2", "checkpoint.keep=3", "training.eval_batches=1", "monitor.tensorboard=false")


@dataclass
class Outcome:
    """What a scenario left."""

    metrics: list[dict[str, Any]]
    status: dict[str, Any] = field(default_factory=dict)
    jobs: dict[str, dict[str, str]] = field(default_factory=dict)
    """What Slurm knows of each job at the end."""
    logs: dict[str, str] = field(default_factory=dict)
    record: list[dict[str, Any]] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    """Processes that still ran a while after the end: of the training at all, of any kind once all nodes were back."""
    completed: str = ""
    """Slurm's own record of jobs (jobcomp)."""
    seconds: float = 0.0
    """From what happened to the next start of the job, or to its end."""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def job(self) -> dict[str, str]:
        """Slurm's knowledge of the first job."""
        return next(iter(self.jobs.values()))

    @property
    def log(self) -> str:
        """Log of the first job."""
        return next(iter(self.logs.values()))


def outcome(lab: Lab, *jobs: str, name: str = "run", mend: Callable[[], object] = lambda: None, **more: Any) -> Outcome:
    """Wait for the end of these jobs and collect what they left. `mend` puts a broken node right after that."""
    ended = {job: lab.wait_for_end(job) for job in jobs}
    training = lab.left_over(training=True)
    mend()
    jobcomp = lab.folder / "cluster" / "log" / "jobcomp.txt"
    return Outcome(
        metrics=lab.metrics(name),
        status=lab.status(name) if (lab.run_dir(name) / "status.json").exists() else {},
        jobs=ended,
        logs={job: lab.log(job) for job in jobs},
        record=lab.record(name),
        left_over=training + lab.left_over(),
        completed=jobcomp.read_text() if jobcomp.exists() else "",
        more=more,
    )


def alone() -> Outcome:
    """The same training on one process of this machine, without Slurm."""
    with lab(nodes=1) as one:
        command = [
            sys.executable,
            "launcher/train.py",
            "configs/parity.yaml",
            f"run.output_dir={one.run_dir()}",
            *OFTEN,
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stdout + done.stderr
        return Outcome(one.metrics(), one.status())


def whole() -> Outcome:
    """Nothing happens."""
    with lab() as three:
        return outcome(three, three.train(*LAYOUT, *OFTEN, options=TWO_BY_TWO))


def _hit(
    happens: Callable[[Lab, str, str], object],
    *arguments: str,
    options: tuple[str, ...] = TWO_BY_TWO,
    host: int = 0,
    mend: str = "",
    gpus: int = 0,
    layout: tuple[str, ...] = LAYOUT,
) -> Outcome:
    """After step 4 something happens, to the node with this number among the job's where it is one's; the job goes on
    until its end. Only then the node is put right, by this command of the cluster's."""
    with lab(gpus=gpus) as three:
        job = three.train(*layout, *OFTEN, *arguments, options=options)
        three.wait_for_step(4, job)
        node = ("node1", "node2")[host]
        assert three.job(job)["BatchHost"] == "node1"
        began = time.monotonic()
        happens(three, job, node)
        three.wait_for_text(f"job {job}: start 2 of this job", job)
        seconds = time.monotonic() - began
        found = outcome(three, job, mend=lambda: three.cluster(mend, node) if mend else None)
        return dataclasses.replace(found, seconds=seconds)


def stopped_by_signal() -> Outcome:
    """`scancel --signal=USR1`: to all tasks of the job's step."""
    return _hit(lambda lab, job, node: lab.slurm("scancel", "--signal=USR1", job))


def stopped_by_signal_to_script() -> Outcome:
    """`scancel --batch --signal=USR1`, and what --signal=B: does: to the batch script alone. One task, to save time."""
    one = ("--nodes=1", "--ntasks-per-node=1")
    return _hit(lambda lab, job, node: lab.slurm("scancel", "--batch", "--signal=USR1", job), options=one, layout=())


def requeued() -> Outcome:
    """`scontrol requeue` by somebody, as preemption does it."""
    return _hit(lambda lab, job, node: lab.slurm("scontrol", "requeue", job))


def power_of_batch_host() -> Outcome:
    """The node of rank 0 and of the batch script loses its power."""
    return _hit(lambda lab, job, node: lab.cluster("kill", node), host=0, mend="boot")


def power_of_other_node_elastic() -> Outcome:
    """The other node loses its power, and one node is all that is left: another layout."""

    def happens(lab: Lab, job: str, node: str) -> None:
        lab.slurm("scontrol", "update", "NodeName=node3", "State=DRAIN", "Reason=kept free")
        lab.cluster("kill", node)

    # Without --ntasks-per-node, of which Slurm makes a number of nodes at the first start.
    options = ("--nodes=1-2", "--gpus-per-node=2", "--cpus-per-gpu=1")
    return _hit(happens, "parallel.elastic=true", options=options, host=1, mend="boot", gpus=2)


def network_of_batch_host() -> Outcome:
    """The node of rank 0 and of the batch script loses its network; its processes go on running there."""
    return _hit(lambda lab, job, node: lab.cluster("cut", node), host=0, mend="restore")


def network_of_other_node() -> Outcome:
    """The other node loses its network."""
    return _hit(lambda lab, job, node: lab.cluster("cut", node), host=1, mend="restore")


def _chain(reason: str, *options: str, minutes: float | None = None) -> Outcome:
    """A training that ends only after its job has stopped itself three times for this reason.

    How long a start takes depends on the machine, so the configuration is a file, which each start reads anew: with a
    limit that leaves time for some steps, and with its last step once there were enough stops.
    """
    with lab(nodes=1) as one:
        path = one.folder / "chain.yaml"

        def write(steps: int, max_minutes: float | None) -> None:
            text = (ROOT / "configs" / "parity.yaml").read_text().replace("steps: 20", f"steps: {steps}")
            limit = "null" if max_minutes is None else f"{max_minutes:.3f}"
            path.with_suffix(".new").write_text(
                text.replace("  log_every: 1\n", f"  log_every: 1\n  max_minutes: {limit}\n")
            )
            path.with_suffix(".new").rename(path)

        write(100_000, minutes)
        job = one.submit("--ntasks-per-node=1", *options, "slurm/train.sbatch", path, f"run.output_dir={one.run_dir()}",
                         "batch.global_batch_size=4", "checkpoint.every=100000", "training.eval_batches=1",
                         "monitor.tensorboard=false")  # fmt: skip
        for stops in range(1, 100):
            wait_until(lambda seen=stops: len(one.record()) >= seen, lambda: f"no stop: {one.log(job)}")
            record = one.record()
            useful = {line["saved_step"] for line in record if reason in line["why"] and line["saved_step"] > 0}
            if len(useful) >= 3:
                break
            if minutes is not None and "before a step was made" in record[-1]["why"]:
                minutes *= 1.5
                write(100_000, minutes)
        last = one.record()[-1]["saved_step"] + 20
        write(last, None)
        return outcome(one, job, steps=last)


def chain_by_minutes() -> Outcome:
    """Each start stops itself by training.max_minutes."""
    return _chain("training.max_minutes are over", minutes=0.25)


def chain_by_time_limit() -> Outcome:
    """Each start is stopped by the signal before Slurm's own limit, the shortest there is."""
    return _chain("signal SIGUSR1", "--time=1", "--signal=USR1@30")


def small(steps: int = 2, batch: int = 4) -> tuple[str, ...]:
    """A training of seconds."""
    sizes = (f"training.steps={steps}", f"batch.global_batch_size={batch}")
    return (*sizes, "training.eval_batches=1", "monitor.tensorboard=false")


def array() -> Outcome:
    """An array of 3, a run each."""
    with lab(nodes=3) as three:
        options = ("--array=0-2", "--ntasks-per-node=1")
        job = three.submit(*options, "slurm/train.sbatch", "configs/parity.yaml",
                           f"run.output_dir={three.run_dir('a-%a')}", "run.seed=%a", *small())  # fmt: skip
        found = outcome(three, *(f"{job}_{task}" for task in range(3)), name="a-0")
        found.more = {
            "metrics": [three.metrics(f"a-{task}") for task in range(3)],
            "runs": sorted(p.name for p in three.run_dir("x").parent.iterdir()),
        }
        return found


def dependencies() -> Outcome:
    """A job that begins where the one before it has finished, from its weights."""
    with lab(nodes=3) as three:
        first = three.train(*small(), options=("--ntasks-per-node=1",), name="first")
        resume = f"checkpoint.resume={three.run_dir('first')}"
        second = three.train(*small(steps=4), resume, name="second",
                             options=("--ntasks-per-node=1", f"--dependency=afterok:{first}"))  # fmt: skip
        waited = three.job(second)["JobState"]
        return outcome(three, first, second, name="second", waited=waited)


def mistakes() -> Outcome:
    """Configurations that cannot be, and data that is not there."""
    with lab(nodes=2) as two:
        began = time.monotonic()
        wrong = two.train("model.hidden_sise=64", options=TWO_BY_TWO, name="wrong")
        ended = two.wait_for_end(wrong)
        seconds = time.monotonic() - began
        missing = two.train("data.train=corpus/nowhere/train", options=TWO_BY_TWO, name="missing")
        found = outcome(two, wrong, missing, name="wrong", job=ended)
        found.seconds = seconds
        found.more["runs"] = [p.name for p in two.run_dir("x").parent.glob("*")]
        return found


def failing_twice() -> Outcome:
    """Training cannot make a step (no checkpoint can be written): one more try, then no more."""
    with lab(nodes=1) as one:
        run_dir = one.run_dir()
        run_dir.mkdir(parents=True)
        (run_dir / "checkpoints").write_text("not a folder")
        return outcome(one, one.train(*small(), options=("--ntasks-per-node=1",)))


def broken_pair() -> Outcome:
    """Two nodes that rank 0 reaches, and that do not reach each other; they do at the second start."""
    with lab(nodes=3) as three:
        route = ("unreachable", "10.99.0.13/32")
        three.cluster("exec", "--node", "node2", "--", "ip", "route", "add", *route)
        job = three.train(*small(batch=3), options=("--nodes=3", "--ntasks-per-node=1"))
        three.wait_for_text("back into the queue", job)
        three.cluster("exec", "--node", "node2", "--", "ip", "route", "del", *route)
        return outcome(three, job)


def without_requeue() -> Outcome:
    """A cluster that forbids requeueing: the job is submitted again."""
    with lab(nodes=1) as one:
        options = ("--ntasks-per-node=1", "--no-requeue", "--job-name=other", "--time=77")
        job = one.train("training.steps=60", "batch.global_batch_size=4", "checkpoint.every=1000",
                        "training.eval_batches=1", "monitor.tensorboard=false", options=options)  # fmt: skip
        one.wait_for_step(2, job)
        one.slurm("scancel", "--signal=USR1", job)
        one.wait_for_end(job)
        following = str(int(job) + 1)
        name = one.job(following)["JobName"], one.job(following)["TimeLimit"]
        found = outcome(one, job, following, following=name)
        return found


SCENARIOS: dict[str, Callable[[], Outcome]] = {
    function.__name__: function
    for function in (
        # The longest waits first: they leave the cores to the others.
        network_of_batch_host, network_of_other_node, power_of_batch_host, power_of_other_node_elastic,
        whole, alone, stopped_by_signal, chain_by_minutes, chain_by_time_limit, requeued, stopped_by_signal_to_script,
        failing_twice, broken_pair, without_requeue, array, dependencies, mistakes,
    )
}  # fmt: skip
