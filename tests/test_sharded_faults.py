"""Faulty ranks of a sharded module, in real processes: the others raise within attach's timeout, and can exit.

The simulation, which has sharded modules too, tries random faults at random times.
"""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import warm_python
from sharded_faults import Trial

# For a busy machine, and for the compute between the fault and the wait for the faulty rank.
SLACK_S = 3.0

_RANK = r"rank \d+( \(global rank \d+\))?"
NAMED = re.compile(
    rf"CommunicationError: torchbagua: \w+ of .+ over the [\w ]+ group failed on {_RANK} (receiving from|sending to) "
    rf"{_RANK}|CommunicationError: torchbagua: ranks are out of step in .+: ranks disagree on .+: rank.+, rank"
)


def run_trials(trials: list[Trial], timeout_s: float, **options: Any) -> list[list[dict[str, Any]]]:
    """Check that each rank but the victim has raised in time, named operation, rank and peer, and exited."""
    program = Path(__file__).with_name("sharded_faults.py")
    arguments = [json.dumps(asdict(trial)) for trial in trials]
    printed = warm_python.run([str(program), *arguments], timeout_s=timeout_s, **options).stdout
    results = [json.loads(line) for line in printed.splitlines()]
    assert None not in results, "the ranks did not get to a second step"
    for trial, result in zip(trials, results, strict=True):
        victim, *survivors = sorted(result["ranks"], key=lambda facts: facts is not result["ranks"][trial.victim])
        if trial.fault == "sleep":  # the others have continued without it
            assert NAMED.match(victim["error"]), result
        if trial.fault == "raise":
            assert victim["error"].startswith("Misbehaviour: "), result
        # The closed connections of a killed process are noticed at once.
        limit_s = trial.timeout_s / 2 if trial.fault == "die" else trial.timeout_s + SLACK_S
        for facts in survivors:
            assert facts["status"] == 0, result
            # Without attach, FSDP's own all-gather may fail first.
            assert NAMED.match(facts["error"]) or trial.way == "backend", result
            assert facts["seconds"] < limit_s, result
            assert facts["lanes"] == [], result
    return [result["ranks"] for result in results]


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
    (ranks,) = run_trials([trial], timeout_s=120)
    for rank in beside:
        peer = rf"(receiving from|sending to) rank (\d \(global rank )?{trial.victim}"
        pattern = rf"{operation} of \d over the world( of shards)? group failed on .* {peer}"
        assert re.search(pattern, ranks[rank]["error"]), ranks[rank]["error"]


@pytest.mark.slow
def test_survivors_raise_and_exit() -> None:
    trials = [
        *(
            Trial(way, size, "die", victim=size - 1, place=("backward", 2, 2), timeout_s=20, ends_whole=True)
            for way, size in (("bytegrad", 3), ("weights in 8 bits", 3), ("replicas", 4), ("backend", 4))
        ),
        Trial("gathered ahead", 4, "stop", victim=0),
        Trial("decentralized", 4, "sleep", victim=2, place=("forward", 3, 1)),  # the others wait for weights
        Trial("replicas, flat", 4, "raise", victim=0, place=("step", 2, 0)),
    ]
    for trial, ranks in zip(trials, run_trials(trials, timeout_s=300, ends_whole=True), strict=True):
        if trial.way in ("replicas", "backend"):  # rank 1 waits for the other replica of its shard
            failed = "CommunicationError: torchbagua: (all_to_all|agreement) of gradients of 2 over the world"
            assert re.match(failed, ranks[1]["error"]), ranks
