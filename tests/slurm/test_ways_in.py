"""Every launcher on a real Slurm trains the same; those that contradict the job are refused with one sentence."""

from collections.abc import Callable

import pytest

from tests.slurm.scenarios import Outcome
from tests.slurm.ways_in import REFUSED, WAYS

Scenario = Callable[[str], Outcome]
pytestmark = pytest.mark.timeout(1200)


@pytest.mark.scenario("ways_in")
@pytest.mark.parametrize("way", WAYS)
def test_every_launcher_trains_the_same(scenario: Scenario, way: str) -> None:
    found = scenario("ways_in")
    number = list(WAYS).index(way)
    log = list(found.logs.values())[number]
    expected = [(line["step"], line["loss"]) for line in found.more["srun"]]
    assert len(expected) == 2
    assert [(line["step"], line["loss"]) for line in found.more[way]] == expected, log
    nodes = [line.split(":")[0] for line in log.splitlines() if " x cpu, " in line]
    assert len(nodes) == WAYS[way][1]
    assert found.left_over == []


@pytest.mark.scenario("refused")
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("deepspeed once a task", "error: srun started 4 tasks (SLURM_STEP_NUM_TASKS) and each"),
        ("an MPI world of 1 in each of 4 tasks", "error: srun started 4 tasks (SLURM_STEP_NUM_TASKS) and each"),
        ("a host file that is missing", "error: this Slurm job has 2 nodes, but deepspeed started all 2 processes"),
        ("srun forgotten", "error: this Slurm job has 4 tasks (SLURM_NTASKS), and this is one process"),
    ],
)
def test_contradictions_are_refused(scenario: Scenario, way: str, words: str) -> None:
    found = scenario("refused")
    number = list(REFUSED).index(way)
    log = list(found.logs.values())[number]
    errors = [line for line in log.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, log
    assert errors[0].startswith(words)
    assert list(found.jobs.values())[number]["JobState"] == "FAILED"
    assert found.more["runs"] == []
    assert found.left_over == []


@pytest.mark.scenario("devices")
def test_devices_are_those_that_slurm_gave(scenario: Scenario) -> None:
    found = scenario("devices")
    assert found.job["JobState"] == "COMPLETED"
    assert "on 2 x cpu, visible 2,3, " in found.log


@pytest.mark.scenario("prepared")
def test_data_is_prepared_over_nodes(scenario: Scenario) -> None:
    found = scenario("prepared")
    assert found.job["JobState"] == "COMPLETED", found.log
    assert "4 process(es)" in found.log
    assert set(found.more) == {"train.bin", "train.idx", "validation.bin", "tokenizer.model"}
    for alone, ranks in found.more.values():
        assert alone == ranks


@pytest.mark.scenario("tensorboard")
def test_tensorboard_is_seen_on_its_own_node_only(scenario: Scenario) -> None:
    found = scenario("tensorboard")
    assert found.more["seen"] == ["node1"]
    assert f"ssh -N -L 6006:127.0.0.1:{found.more['port']}" in found.log
