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
    name_ranks,
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
    def body(group: dist.ProcessGroup) -> str:
        own = tb.BaguaProcessGroup(group)
        record: Any = Fact(1) if group.rank() == 1 else Progress("a round", {})
        with pytest.raises(tb.CommunicationError) as caught:
            agree(own.world, record, "a vote" if group.rank() == 1 else "a round")
        return str(caught.value)

    for rank, error in enumerate(run_ranks(4, body)):
        own = "a vote" if rank == 1 else "a round"
        assert f"out of step in {own}. Ranks 0 and 2-3 are in a round, rank 1 in a vote. Every" in error


def compare(communicator: Communicator, numbers: dict[str, int], call: str) -> None:
    require_same_progress(communicator, agree(communicator, Progress(call, numbers), call))


def test_ranks_out_of_step_raise_the_same_error() -> None:
    """It has the number of every rank."""

    def body(group: dist.ProcessGroup) -> str:
        own = tb.BaguaProcessGroup(group)
        compare(own.world, {"steps": 2**62, "rounds": 0}, "a good round")
        with pytest.raises(tb.CommunicationError) as caught:
            compare(own.world, {"rounds": 7, "steps": 6 if group.rank() == 2 else 5}, "a bad round")
        return str(caught.value)

    (message,) = set(run_ranks(5, body))
    expected = "out of step in a bad round: ranks disagree on steps: ranks 0-1 and 3-4 have 5, rank 2 has 6. Every rank"
    assert expected in message


def test_ranks_in_different_calls() -> None:
    """All ranks name all calls, also if the numbers are equal; on a node, ranks have their numbers in the group."""

    def body(group: dist.ProcessGroup) -> list[str]:
        own = tb.BaguaProcessGroup(group, nodes=[0, 0, 1, 1])
        is_first = group.rank() % 2 == 0
        errors = []
        for communicator, steps in (own.world, 5), (own.intra_node, 4 if is_first else 5):
            assert communicator is not None
            with pytest.raises(tb.CommunicationError) as caught:
                compare(communicator, {"steps": steps}, "the mean of é" if is_first else "a round")
            errors.append(str(caught.value))
        return errors

    for rank, (equal, on_node) in enumerate(run_ranks(4, body)):
        own_call = "a round" if rank % 2 else "the mean of é"
        assert (
            f"out of step in {own_call}. Ranks 0 and 2 are in the mean of é, ranks 1 and 3 in a round. Every" in equal
        )
        first, second = (0, 1) if rank < 2 else (2, 3)
        assert f"disagree on steps: rank {first} has 4, rank {second} has 5. " in on_node
        assert f"Rank {first} is in the mean of é, rank {second} in a round. Every" in on_node


@pytest.mark.parametrize(
    ("ranks", "named"),
    [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([0, 2], "ranks 0 and 2"), ([0, 1, 2, 5, 8, 9], "ranks 0-2, 5 and 8-9")],
)
def test_ranks_are_named(ranks: list[int], named: str) -> None:
    assert name_ranks(ranks) == named


def test_the_first_difference_has_the_values_of_all_ranks() -> None:
    records: list[dict[str, object]] = [{"size": 1, "kind": [0, 1]}, {"size": 1.0}, {"size": 1, "kind": [0, 1]}]
    assert first_difference(records, [4, 5, 6]) == "ranks disagree on kind: ranks 4 and 6 have [0, 1], rank 5 has None"
    assert first_difference(records[::2], [4, 6]) is None
    assert first_difference([{"size": 1}, {"size": 1, "more": True}], [0, 1]) == (
        "ranks disagree on more: rank 0 has None, rank 1 has True"
    )
    # It lists a limited number of values.
    difference = first_difference([{"seed": rank} for rank in range(1000)], range(1000))
    assert difference is not None
    assert difference.endswith("rank 15 has 15, and 984 others differ too")
