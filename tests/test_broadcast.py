"""Rank 0's tensors and state on all ranks."""

import pickle

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from ranks import run_ranks
from torchbagua.collectives.broadcast import broadcast_state, broadcast_tensors


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
    """An object that a user's optimizer might store."""


def test_broadcast_of_a_state_that_is_not_plain() -> None:
    """Every rank raises the same error, and no rank waits."""

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group)
        with pytest.raises(pickle.UnpicklingError, match="Opaque"):
            broadcast_state(own.world, {"state": Opaque()}, "a test")

    run_ranks(2, body)
