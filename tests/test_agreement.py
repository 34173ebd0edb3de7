"""Agreement of ranks over an open group: maxima of small numbers, and progress."""

import random
import re

import pytest
import torch.distributed as dist

import torchbagua as tb
from ranks import run_ranks
from torchbagua.collectives.agreement import all_reduce_max, require_same_progress


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8])
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


def test_ranks_in_step_and_out_of_step() -> None:
    """If one rank is out of step, all ranks raise the same error, with two ranks and their numbers."""

    def body(group: dist.ProcessGroup) -> str:
        own = tb.BaguaProcessGroup(group)
        require_same_progress(own.world, {"steps": 2**40 - 1, "rounds": 0}, "a good round")
        with pytest.raises(tb.CommunicationError) as caught:
            require_same_progress(own.world, {"rounds": 7, "steps": 6 if group.rank() == 2 else 5}, "a bad round")
        return str(caught.value)

    messages = run_ranks(5, body)
    assert len(set(messages)) == 1
    assert "out of step in a bad round: rank 2 has 6 steps, rank 4 has 5. Every rank" in messages[0]


def test_ranks_in_different_calls() -> None:
    """All ranks name the calls of both ranks, also a call that a rank has made alone."""

    def body(group: dist.ProcessGroup) -> str:
        own = tb.BaguaProcessGroup(group)
        is_alone = group.rank() == 1
        purpose = "the mean of é" + 60 * "x" if is_alone else "the round after 5 steps"
        with pytest.raises(tb.CommunicationError) as caught:
            require_same_progress(own.world, {"steps": 4 if is_alone else 5}, purpose)
        return str(caught.value)

    for message in run_ranks(3, body):
        named = re.search(r"rank 1 has 4 steps, rank 2 has 5\. Rank 1 is in (\S.+), rank 2 in (.+)\. Every", message)
        assert named
        assert named[1].startswith("the mean of é" + 40 * "x")
        assert named[2] == "the round after 5 steps"


def test_ranks_of_a_node_in_different_calls() -> None:
    """Their numbers in the messages are those of the whole group."""

    def body(group: dist.ProcessGroup) -> str:
        own = tb.BaguaProcessGroup(group, nodes=[0, 0, 1, 1])
        assert own.intra_node is not None
        is_first = group.rank() % 2 == 0
        with pytest.raises(tb.CommunicationError) as caught:
            require_same_progress(own.intra_node, {"steps": 4 if is_first else 5}, "a mean" if is_first else "a round")
        return str(caught.value)

    for rank, message in enumerate(run_ranks(4, body)):
        first, second = (0, 1) if rank < 2 else (2, 3)
        assert f"rank {first} has 4 steps, rank {second} has 5. " in message
        assert f"Rank {first} is in a mean, rank {second} in a round. Every" in message
