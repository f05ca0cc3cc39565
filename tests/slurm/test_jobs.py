"""Jobs on a real Slurm: what is trained, whatever happens to them."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.slurm.scenarios import Outcome

Scenario = Callable[[str], Outcome]
pytestmark = pytest.mark.timeout(1200)  # the first of them waits for several

EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens", "skipped")
INTERRUPTED = (
    "stopped_by_signal",
    "requeued",
    "power_of_batch_host",
    "network_of_batch_host",
    "network_of_other_node",
)


def marked(*names: str) -> list[Any]:
    """Parameters of these names, each marked as the scenario that it asks for."""
    return [pytest.param(name, marks=pytest.mark.scenario(name)) for name in names]


def steps(outcome: Outcome) -> list[int]:
    return [line["step"] for line in outcome.metrics]


def exactly(outcome: Outcome) -> list[tuple[Any, ...]]:
    return [tuple(line[key] for key in EXACT) for line in outcome.metrics]


def assert_close(outcome: Outcome, reference: Outcome) -> None:
    """Within the bounds of parity over 20 steps: 1e-5 of the largest loss, 2e-5 of the largest norm."""
    assert steps(outcome) == steps(reference) == list(range(1, 21))
    for key, bound in (("loss", 1e-5), ("grad_norm", 2e-5)):
        largest = max(abs(line[key]) for line in reference.metrics)
        pairs = zip(outcome.metrics, reference.metrics, strict=True)
        assert max(abs(one[key] - other[key]) for one, other in pairs) <= bound * largest


@pytest.mark.scenario("whole", "alone")
def test_two_nodes_train_what_one_process_trains(scenario: Scenario) -> None:
    whole = scenario("whole")
    assert_close(whole, scenario("alone"))
    assert whole.status["state"] == "finished"
    assert (whole.job["JobState"], whole.job["ExitCode"]) == ("COMPLETED", "0:0")
    assert whole.left_over == []
    lines = [line for line in whole.log.splitlines() if line.startswith(("node1: ", "node2: "))]
    assert len(lines) == 2
    assert "ranks 0-1 on 2 x cpu" in lines[0] and "GB/s to node2" in lines[0]


@pytest.mark.scenario("whole")
@pytest.mark.parametrize("name", marked(*INTERRUPTED))
def test_an_interrupted_job_goes_on_to_the_same_end(scenario: Scenario, name: str) -> None:
    outcome = scenario(name)
    assert exactly(outcome) == exactly(scenario("whole"))
    assert outcome.status["state"] == "finished"
    assert (outcome.job["JobState"], outcome.job["Restarts"]) == ("COMPLETED", "1")
    assert outcome.left_over == []
    # SlurmdTimeout 10 s and 8 s of waiting in the queue here, and what loaded cores add.
    assert outcome.seconds < 150


@pytest.mark.scenario("alone", "stopped_by_signal_to_script")
def test_a_signal_to_the_script_alone_reaches_the_training(scenario: Scenario) -> None:
    outcome = scenario("stopped_by_signal_to_script")
    assert exactly(outcome) == exactly(scenario("alone"))
    assert (outcome.job["JobState"], outcome.job["Restarts"]) == ("COMPLETED", "1")
    assert outcome.left_over == []


@pytest.mark.scenario("whole", "power_of_other_node_elastic")
def test_on_fewer_nodes_it_goes_on_in_another_layout(scenario: Scenario) -> None:
    outcome = scenario("power_of_other_node_elastic")
    assert_close(outcome, scenario("whole"))
    assert "elastic: 2 processes are" in outcome.log
    assert (outcome.job["JobState"], outcome.job["NumNodes"]) == ("COMPLETED", "1")
    assert outcome.left_over == []


@pytest.mark.scenario("stopped_by_signal", "stopped_by_signal_to_script", "requeued")
def test_the_log_says_what_was_done_and_why(scenario: Scenario) -> None:
    for name in ("stopped_by_signal", "stopped_by_signal_to_script"):
        log = scenario(name).log
        assert "(signal SIGUSR1): back into the queue" in log
        assert "the run has finished, at step 20: not queued again" in log
        assert [(line["what"], line["failures"]) for line in scenario(name).record] == [("requeue", 0), ("end", 0)]
    assert "start 2 of this job" in scenario("requeued").log


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        pytest.param(
            "chain_by_minutes", "training.max_minutes are over", marks=pytest.mark.scenario("chain_by_minutes")
        ),
        pytest.param(
            "chain_by_time_limit",
            "signal SIGUSR1",
            marks=[pytest.mark.scenario("chain_by_time_limit"), pytest.mark.slow],
        ),
    ],
)
def test_a_chain_of_starts_makes_each_step_once(scenario: Scenario, name: str, reason: str) -> None:
    chain = scenario(name)
    assert steps(chain) == list(range(1, chain.more["steps"] + 1))
    assert int(chain.job["Restarts"]) >= 3
    assert chain.job["JobState"] == "COMPLETED"
    stops = [line for line in chain.record if line["what"] == "requeue"]
    assert all(reason in line["why"] for line in stops)
    assert chain.left_over == []


@pytest.mark.scenario("array")
def test_an_array_is_a_run_for_each_task(scenario: Scenario) -> None:
    array = scenario("array")
    assert [job["JobState"] for job in array.jobs.values()] == ["COMPLETED"] * 3
    assert array.more["runs"] == ["a-0", "a-1", "a-2"]
    losses = [metrics[-1]["loss"] for metrics in array.more["metrics"]]
    assert len(set(losses)) == 3 and all(map(math.isfinite, losses))
    assert array.left_over == []


@pytest.mark.scenario("dependencies")
def test_a_job_waits_for_the_one_it_depends_on(scenario: Scenario) -> None:
    chain = scenario("dependencies")
    assert chain.more["waited"] == "PENDING"
    assert [job["JobState"] for job in chain.jobs.values()] == ["COMPLETED"] * 2
    assert steps(chain)[-1] == 4
    assert "resuming" in list(chain.logs.values())[1]
    assert chain.left_over == []


@pytest.mark.scenario("mistakes")
def test_a_mistake_is_one_sentence_in_seconds(scenario: Scenario) -> None:
    found = scenario("mistakes")
    wrong, missing = found.logs.values()
    assert wrong.strip().splitlines() == [
        "error: command line: unknown key model.hidden_sise, the nearest known one is model.hidden_size"
    ]
    assert [line for line in missing.splitlines() if line.startswith("error: ")] == [
        "error: corpus/nowhere/train.idx: expected the index of a data set (PREFIX.idx beside PREFIX.bin), "
        "found no such file"
    ]
    assert "a mistake in what was asked, see above: not queued again" in missing
    assert [(job["JobState"], job["ExitCode"], job["Restarts"]) for job in found.jobs.values()] == [
        ("FAILED", "2:0", "0")
    ] * 2
    assert found.completed.count(" ExitCode=2:0") == 2  # the record that stays
    assert found.seconds < 30
    assert found.more["runs"] == []
    assert found.left_over == []


@pytest.mark.scenario("failing_twice")
def test_two_failures_without_progress_are_enough(scenario: Scenario) -> None:
    found = scenario("failing_twice")
    assert [(line["what"], line["failures"]) for line in found.record] == [("requeue", 1), ("end", 2)]
    assert (found.job["JobState"], found.job["ExitCode"], found.job["Restarts"]) == ("FAILED", "1:0", "1")
    assert "2 time(s) in a row" in found.log and "not queued again" in found.log
    assert found.left_over == []


@pytest.mark.scenario("without_requeue")
def test_where_requeueing_is_forbidden_the_job_is_submitted_again(scenario: Scenario) -> None:
    found = scenario("without_requeue")
    assert "it may not be requeued" in found.log and "goes on as job" in found.log
    assert found.more["following"] == ("other", "01:17:00")
    assert steps(found) == list(range(1, 61))
    assert found.left_over == []


@pytest.mark.scenario("broken_pair")
def test_a_broken_network_is_found_before_the_run_begins(scenario: Scenario) -> None:
    found = scenario("broken_pair")
    (error,) = [line for line in found.log.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: the network is broken: ")
    assert "node2 cannot reach node3 at 10.99.0.13:" in error
    assert [(line["what"], line["failures"]) for line in found.record] == [("requeue", 1), ("end", 0)]
    assert steps(found) == [1, 2]
    assert found.left_over == []
