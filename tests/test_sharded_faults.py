"""Faulty ranks of a sharded module, in real processes: the others raise within attach's timeout, and can exit."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import warm_python
from sharded_faults import Trial

TRIALS = Path(__file__).with_name("sharded_faults.py")

# For a busy machine, and for the compute between the fault and the wait for the faulty rank.
SLACK_S = 3.0

_RANK = r"rank \d+( \(global rank \d+\))?"
NAMED = re.compile(
    rf"CommunicationError: torchbagua: \w+ of .+ over the [\w ]+ group failed on {_RANK} (receiving from|sending to) "
    rf"{_RANK}|CommunicationError: torchbagua: ranks are out of step in .+: ranks disagree on .+: rank.+, rank"
)


def run_trials(trials: list[str], timeout_s: float, **options: Any) -> list[dict[str, Any]]:
    printed = warm_python.run([str(TRIALS), *trials], timeout_s=timeout_s, **options).stdout
    results = [json.loads(line) for line in printed.splitlines()]
    assert len(results) == len(trials)
    assert None not in results, "the ranks did not get to a second step"
    return results


def check(result: dict[str, Any]) -> None:
    """Check that each rank but the victim has raised in time, named operation, rank and peer, and exited."""
    trial, ranks = result["trial"], result["ranks"]
    survivors = [facts for rank, facts in enumerate(ranks) if rank != trial["victim"]]
    if trial["fault"] == "sleep":  # the others have continued without it
        assert NAMED.match(ranks[trial["victim"]]["error"]), result
    if trial["fault"] == "raise":
        assert ranks[trial["victim"]]["error"].startswith("Misbehaviour: "), result
    for facts in survivors:
        assert facts["status"] == 0, result
        # Without attach, FSDP's own all-gather may fail first.
        assert NAMED.match(facts["error"]) or trial["way"] == "backend", result
        # The closed connections of a killed process are noticed at once.
        assert facts["seconds"] < (
            trial["timeout_s"] / 2 if trial["fault"] == "die" else trial["timeout_s"] + SLACK_S
        ), result
        assert facts["lanes"] == [], result


@pytest.mark.parametrize(
    ("trial", "beside", "operation"),
    [
        (Trial("bytegrad", 3, "sleep", victim=2, place=("forward", 3, 1)), [0, 1], "all_gather of weights"),
        pytest.param(
            Trial("decentralized", 4, "sleep", victim=2, place=("backward", 3, 3)),
            [3],
            "reduce_scatter of gradients",
            marks=pytest.mark.release,
        ),
    ],
    ids=lambda value: value.way if isinstance(value, Trial) else "",
)
def test_a_sleeping_rank_is_waited_for_as_long_as_the_timeout_of_attach(
    trial: Trial, beside: list[int], operation: str
) -> None:
    """Not for init_process_group's timeout of a minute: FSDP itself gathers weights, and reduces gradients."""
    (result,) = run_trials([json.dumps(asdict(trial))], timeout_s=120)
    check(result)
    for rank in beside:
        error = result["ranks"][rank]["error"]
        peer = rf"(receiving from|sending to) rank (\d \(global rank )?{trial.victim}"
        assert re.search(rf"{operation} of \d over the world( of shards)? group failed on .* {peer}", error), error


KILLED = [
    Trial(way, size, "die", victim=size - 1, place=("backward", 2, 2), timeout_s=20, ends_whole=True)
    for way, size in (("bytegrad", 3), ("weights in 8 bits", 3), ("replicas", 4), ("backend", 4))
]
STOPPED = Trial("gathered ahead", 4, "stop", victim=0, delay_s=0.3)
ASLEEP = Trial("decentralized", 4, "sleep", victim=2, place=("forward", 3, 1))  # the others wait for weights
RAISED = Trial("replicas, flat", 4, "raise", victim=0, place=("step", 2, 0))


@pytest.mark.slow
def test_survivors_raise_and_exit() -> None:
    trials = [*KILLED, STOPPED, ASLEEP, RAISED]
    results = run_trials([json.dumps(asdict(trial)) for trial in trials], timeout_s=300, ends_whole=True)
    for trial, result in zip(trials, results, strict=True):
        check(result)
        if trial.way in ("replicas", "backend"):  # rank 1 waits for the other replica of its shard
            failed = "CommunicationError: torchbagua: (all_to_all|agreement) of gradients of 2 over the world"
            assert re.match(failed, result["ranks"][1]["error"]), result


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_random_faults(first: int) -> None:
    for result in run_trials([str(seed) for seed in range(first, first + 10)], timeout_s=600):
        check(result)
        raised_after = [facts["seconds"] for facts in result["ranks"] if facts["seconds"] is not None]
        print(f"{result['trial']}: all raised after {max(raised_after):.1f} s")
