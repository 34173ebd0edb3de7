"""What ranks agree on while they train: small numbers, steps, and the state they start from."""

import pickle
import random

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from ranks import run_ranks
from torchbagua.collectives.agreement import all_reduce_max, require_same_progress
from torchbagua.collectives.broadcast import broadcast_state, broadcast_tensors


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
    """One rank is behind: all ranks get the same words, with both ranks and both numbers."""

    def body(group: dist.ProcessGroup) -> str:
        own = tb.BaguaProcessGroup(group)
        require_same_progress(own.world, {"steps": 2**40 - 1, "rounds": 0}, "a good round")
        with pytest.raises(tb.CommunicationError) as caught:
            require_same_progress(own.world, {"rounds": 7, "steps": 6 if group.rank() == 2 else 5}, "a bad round")
        return str(caught.value)

    messages = run_ranks(5, body)
    assert len(set(messages)) == 1
    assert "out of step in a bad round: rank 2 has 6 steps, rank 4 has 5." in messages[0]


def test_broadcast() -> None:
    """Rank 0's values, of any dtype and layout, in place; and its state, tensors and numbers."""

    def body(group: dist.ProcessGroup) -> None:
        own, rank = tb.BaguaProcessGroup(group), group.rank()
        tensors = [
            torch.full((2, 3), 1.5 + rank).t(),
            torch.tensor([rank == 0, rank == 1]),
            torch.tensor(10 + rank),
            torch.full((3,), rank, dtype=torch.bfloat16),
            torch.empty(0),
        ]
        addresses = [tensor.data_ptr() for tensor in tensors]
        broadcast_tensors(own.world, tensors, "a test")
        assert torch.equal(tensors[0], torch.full((3, 2), 1.5))
        assert tensors[1].tolist() == [True, False]
        assert tensors[2].item() == 10
        assert torch.equal(tensors[3], torch.zeros(3, dtype=torch.bfloat16))
        assert [tensor.data_ptr() for tensor in tensors] == addresses

        state = {"state": {0: {"step": torch.tensor(rank), "rank": rank}}, "param_groups": [{"lr": 0.5 + rank}]}
        received = broadcast_state(own.world, state, "a test")
        assert received == {"state": {0: {"step": torch.tensor(0), "rank": 0}}, "param_groups": [{"lr": 0.5}]}

    run_ranks(3, body)


class Opaque:
    """What an optimizer of a user's own might keep."""


def test_broadcast_of_what_is_no_plain_state() -> None:
    """The same error on every rank, and nobody waits."""

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group)
        with pytest.raises(pickle.UnpicklingError, match="Opaque"):
            broadcast_state(own.world, {"state": Opaque()}, "a test")

    run_ranks(2, body)


def test_replicas_and_peer_weights_that_do_not_fit() -> None:
    def body(group: dist.ProcessGroup) -> None:
        parameter = torch.zeros(6)
        bucket = tb.BaguaBucket("b", [tb.BaguaTensor("w", parameter)], tb.BaguaProcessGroup(group), parameter.clone())
        with pytest.raises(
            ValueError, match=r"peer_weight must be contiguous, torch\.float32, \[6\], got torch\.float16"
        ):
            bucket.append_decentralized_synchronous_op(torch.zeros(6, dtype=torch.float16))
        with pytest.raises(
            ValueError, match=r"the replica left must be contiguous, torch\.float32, \[6\], got .*\[5\]"
        ):
            bucket.append_low_precision_decentralized_synchronous_op(parameter, torch.zeros(5), parameter)
        with pytest.raises(ValueError, match="peer_selection_mode must be 'all', got 'shift_one'"):
            bucket.append_asynchronous_model_average_op("shift_one")
        with pytest.raises(ValueError, match=r"peer_selection_mode must be one of \('all', 'shift_one'\), got 'ring'"):
            bucket.append_decentralized_synchronous_op(parameter, peer_selection_mode="ring")

    run_ranks(1, body)
