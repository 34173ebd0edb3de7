"""Lockstep: ranks compare their progress before they send tensors; all ranks name a rank that differs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from ranks import on_each_rank, run_ranks
from torchbagua.collectives.agreement import agree
from torchbagua.observe import Recorder
from torchbagua.runtime.lane import Lane
from torchbagua.runtime.lockstep import LoadMark, Lockstep, require_same_loads


class Rank:
    """This rank's lockstep, after `num_steps` steps.

    Attributes:
        ran: the operations that have run on the lane.
        recorder: observes the group.
    """

    def __init__(self, group: tb.BaguaProcessGroup, lane: Lane, recorder: Recorder) -> None:
        self.number = group.rank
        self.num_steps = 5
        self.lockstep = Lockstep(lane, group.world, lambda: {"steps": self.num_steps})
        self.ran: list[str] = []
        self.recorder = recorder

    def submit(self, **options: Any) -> str:
        def run() -> str:
            self.ran.append("a round")
            return f"rank {self.number}"

        return self.lockstep.submit(run, "a round", **options).result()


def on_ranks(size: int, body: Callable[[Rank], Any]) -> list[Any]:
    def run(group: dist.ProcessGroup) -> Any:
        recorder = Recorder()
        own = tb.BaguaProcessGroup(group, observers=[recorder])
        own.open()
        lane = Lane("a test", on_failure=own.close)
        try:
            return body(Rank(own, lane, recorder))
        finally:
            lane.close()
            own.close()

    return run_ranks(size, run)


def test_ranks_in_step_run_the_round() -> None:
    def body(rank: Rank) -> str:
        for flags in (set(), {2}):  # all ranks receive a flag of any rank
            assert rank.lockstep.comparison("a search", flag=rank.number in flags)() == bool(flags)
        result = rank.submit(also=("fragments", 3), is_last=True)
        assert rank.ran == ["a round"]
        return result

    assert on_ranks(3, body) == ["rank 0", "rank 1", "rank 2"]


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ("progress", "steps: rank 0 has 5, rank 1 has 6"),
        ("also", "fragments: rank 0 has 2, rank 1 has 3"),
        ("is_last", "ended attachments: rank 0 has 0, rank 1 has 1"),
        ("fingerprint", "the fingerprint of the tensors to average: rank 0 has 0, rank 1 has 7"),
    ],
)
def test_all_ranks_raise_before_anything_runs(difference: str, message: str) -> None:
    def body(rank: Rank) -> str:
        is_ahead = rank.number == 1
        if difference == "progress":
            rank.num_steps += is_ahead
        elif difference == "fingerprint":
            rank.lockstep.fingerprint = 7 * is_ahead
        also = ("fragments", 2 + is_ahead) if difference == "also" else None
        with pytest.raises(tb.CommunicationError) as caught:
            rank.submit(also=also, is_last=difference == "is_last" and is_ahead)
        assert rank.ran == []
        return str(caught.value)

    (error,) = set(on_ranks(2, body))
    assert f"out of step in a round: ranks disagree on {message}." in error


def test_progress_is_read_at_the_call_and_not_on_the_lane() -> None:
    """The lane may be behind, while the training thread continues."""

    def body(rank: Rank) -> None:
        compare = rank.lockstep.comparison("a round")
        rank.num_steps += rank.number
        compare()

    on_ranks(2, body)


def test_loads_are_compared_once() -> None:
    """A second message compares loads if any rank has a new load."""

    def body(rank: Rank) -> list[int]:
        num_messages = []
        for number in range(4):
            if number % 2:
                rank.lockstep.loads.add({"weight": torch.full((3,), float(number))})
            rank.recorder.clear()
            rank.submit()
            num_messages.append(sum(event.phase == "send" for event in rank.recorder.events))
            rank.ran.clear()
        return num_messages

    assert on_ranks(2, body) == [[1, 2, 1, 2]] * 2


@on_each_rank(2)
def test_a_pending_load_is_counted_and_not_compared(group: dist.ProcessGroup) -> None:
    """Other ranks may have begun the step with which it takes effect."""
    world, is_pending = tb.BaguaProcessGroup(group).world, group.rank() == 1
    mark = LoadMark(2, digest=5).with_pending() if is_pending else LoadMark(3, digest=6)
    require_same_loads(world, agree(world, mark, "a round"))
    marks = agree(world, LoadMark(2).with_pending() if is_pending else LoadMark(2), "a round")
    with pytest.raises(tb.CommunicationError, match="number of loads: rank 0 has 2, rank 1 has 3"):
        require_same_loads(world, marks)
