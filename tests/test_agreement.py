"""Agreement of ranks over an open group: maxima of small numbers, and records."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

import torchbagua as tb
from ranks import run_ranks
from torchbagua.collectives.agreement import (
    Progress,
    agree,
    all_reduce_max,
    first_difference,
    require_same_progress,
)
from torchbagua.transport.communicator import Communicator


@dataclass(frozen=True)
class Fact:
    number: int
    text: str = ""
    flag: bool = False


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_maximum_over_any_number_of_ranks(size: int) -> None:
    values = [[random.Random(f"{rank}/{index}").randint(-(2**50), 2**50) for index in range(5)] for rank in range(size)]

    def body(group: dist.ProcessGroup) -> tuple[list[int], int]:
        recorder = tb.observe.Recorder()
        own = tb.BaguaProcessGroup(group, observers=[recorder])
        result = all_reduce_max(own.world, values[group.rank()], "a test")
        return result, sum(event.phase == "send" for event in recorder.events)

    for result, num_messages in run_ranks(size, body):
        assert result == [max(column) for column in zip(*values, strict=True)]
        assert num_messages == (size - 1).bit_length()


@pytest.mark.parametrize(("size", "kind"), [(1, "equal"), (2, "one"), (3, "all"), (4, "equal"), (5, "one"), (8, "all")])
def test_every_rank_has_the_records_of_all(size: int, kind: str) -> None:
    """Records that are equal are not sent, but only two digests and a length. Others differ in length."""
    records = {
        "equal": [Fact(7, "x", True)] * size,
        "one": [Fact(7, flag=rank == size - 1) for rank in range(size)],
        "all": [Fact(10**rank, rank * "é") for rank in range(size)],
    }[kind]

    def body(group: dist.ProcessGroup) -> tuple[list[Fact], list[int]]:
        recorder = tb.observe.Recorder()
        own = tb.BaguaProcessGroup(group, observers=[recorder])
        found = agree(own.world, records[group.rank()], "a test")
        return found, [event.wire_bytes for event in recorder.events if event.phase == "send"]

    num_turns = (size - 1).bit_length()
    for found, sent_bytes in run_ranks(size, body):
        assert found == records
        assert sent_bytes[:num_turns] == [24] * num_turns
        assert len(sent_bytes) == (num_turns if kind == "equal" else 2 * num_turns)


def test_ranks_in_different_agreements_all_raise() -> None:
    def body(group: dist.ProcessGroup) -> None:
        own = "a vote" if group.rank() == 1 else "a round"
        record: Any = Fact(1) if group.rank() == 1 else Progress("a round", {})
        expected = f"out of step in {own}. Ranks 0 and 2-3 are in a round, rank 1 in a vote. Every"
        with pytest.raises(tb.CommunicationError, match=expected):
            agree(tb.BaguaProcessGroup(group).world, record, own)

    run_ranks(4, body)


def compare(communicator: Communicator, numbers: dict[str, int], call: str) -> None:
    require_same_progress(communicator, agree(communicator, Progress(call, numbers), call))


def test_ranks_out_of_step_raise_the_same_error() -> None:
    """It has the number of every rank."""

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group)
        compare(own.world, {"steps": 2**62, "rounds": 0}, "a good round")
        expected = "out of step in a bad round: ranks disagree on steps: ranks 0-1 and 3-4 have 5, rank 2 has 6. Every"
        with pytest.raises(tb.CommunicationError, match=expected):
            compare(own.world, {"rounds": 7, "steps": 6 if group.rank() == 2 else 5}, "a bad round")

    run_ranks(5, body)


def test_ranks_in_different_calls() -> None:
    """All ranks name all calls, also if the numbers are equal; on a node, ranks have their numbers in the group."""

    def body(group: dist.ProcessGroup) -> None:
        own, is_first = tb.BaguaProcessGroup(group, nodes=[0, 0, 1, 1]), group.rank() % 2 == 0
        call = "the mean of é" if is_first else "a round"
        first, second = (0, 1) if group.rank() < 2 else (2, 3)
        calls = f"Rank {first} is in the mean of é, rank {second} in a round. Every"
        for communicator, steps, expected in (
            (
                own.world,
                5,
                f"out of step in {call}. Ranks 0 and 2 are in the mean of é, ranks 1 and 3 in a round. Every",
            ),
            (own.intra_node, 5 - is_first, f"disagree on steps: rank {first} has 4, rank {second} has 5. {calls}"),
        ):
            with pytest.raises(tb.CommunicationError, match=expected):
                compare(communicator, {"steps": steps}, call)

    run_ranks(4, body)


def test_the_first_difference_has_the_values_of_all_ranks() -> None:
    records: list[dict[str, object]] = [{"size": 1, "kind": [0, 1]}, {"size": 1.0}, {"size": 1, "kind": [0, 1]}]
    assert first_difference(records, [4, 5, 6]) == "ranks disagree on kind: ranks 4 and 6 have [0, 1], rank 5 has None"
    assert first_difference(records[::2], [4, 6]) is None
    # It lists a limited number of values.
    difference = str(first_difference([{"seed": rank} for rank in range(1000)], range(1000)))
    assert difference.endswith("rank 15 has 15, and 984 others differ too")
