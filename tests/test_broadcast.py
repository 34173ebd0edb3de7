"""Rank 0's tensors and state on all ranks."""

import pickle

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from ranks import run_ranks
from torchbagua.collectives.broadcast import broadcast_state, broadcast_tensors
from torchbagua.transport.base import TransportMaker
from transports import CollectivesAlone


class Opaque:
    """An object that a user's optimizer might store."""


@pytest.mark.parametrize("transport", [None, CollectivesAlone])
def test_broadcast(transport: TransportMaker | None) -> None:
    """Rank 0's values, of any dtype, length and layout, in place; and its state, tensors and numbers."""

    def tensors_of(rank: int) -> list[torch.Tensor]:
        dtypes_by_length = {0: torch.float32, 1: torch.int64, 2: torch.bfloat16, 3: torch.bool, 1001: torch.float32}
        tensors = [torch.full((length,), rank + 0.5).to(dtype) for length, dtype in dtypes_by_length.items()]
        return [*tensors, torch.full((2, 3), 1.5 + rank).t(), torch.tensor(10 + rank)]

    def body(group: dist.ProcessGroup) -> None:
        own, rank = tb.BaguaProcessGroup(group, transport=transport), group.rank()
        tensors = tensors_of(rank)
        addresses = [tensor.data_ptr() for tensor in tensors]
        broadcast_tensors(own.world, tensors, "a test")
        assert all(map(torch.equal, tensors, tensors_of(0)))
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        state = {"state": {0: {"step": torch.tensor(rank), "rank": rank}}, "param_groups": [{"lr": 0.5 + rank}]}
        received = broadcast_state(own.world, state, "a test")
        assert received == {"state": {0: {"step": torch.tensor(0), "rank": 0}}, "param_groups": [{"lr": 0.5}]}
        # A state that is not plain raises the same error on all ranks, and no rank waits.
        with pytest.raises(pickle.UnpicklingError, match="Opaque"):
            broadcast_state(own.world, {"state": Opaque()}, "a test")
        own.close()

    run_ranks(3, body)
