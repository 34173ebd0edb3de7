"""The state of asynchronous averaging: differences that are not yet applied, which only the same rank loads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchbagua as tb
from ranks import run_ranks
from torchbagua.algorithms.weights.asynchronous import AsyncModelAverageAlgorithmImpl

Body = Callable[[int, nn.Module, AsyncModelAverageAlgorithmImpl], Any]


def on_ranks(size: int, body: Body, num_features: int = 3) -> list[Any]:
    """Run `body` on ranks that have stopped averaging."""

    def run(group: dist.ProcessGroup) -> Any:
        module = nn.BatchNorm1d(num_features)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        own = tb.BaguaProcessGroup(group)
        with tb.attach(module, optimizer, tb.AsyncModelAverageAlgorithm(), process_group=own) as attachment:
            attachment.impl.abort(module, final_average=False)
            return body(group.rank(), module, attachment.impl)

    return run_ranks(size, run)


def save(rank: int, module: nn.Module, impl: AsyncModelAverageAlgorithmImpl) -> dict[str, Any]:
    """Return a state with pending differences of 10 for rank 0, 11 for rank 1, and so on."""
    state = impl.state_dict()
    assert state["has_differences"] is False
    differences = {name: torch.full_like(part, 10.0 + rank) for name, part in state["differences"].items()}
    snapshots = {name: module.get_buffer(name).clone() for name in state["buffer_snapshots"]}
    return {**state, "step": 7, "has_differences": True, "differences": differences, "buffer_snapshots": snapshots}


def test_pending_differences_of_a_loaded_state_are_applied() -> None:
    states = on_ranks(2, save)
    for rank, state in enumerate(states):
        owner = {key: state[key] for key in ("rank", "num_ranks", "is_enabled")}
        assert owner == {"rank": rank, "num_ranks": 2, "is_enabled": False}
        assert state["differences"].keys() == {"weight", "bias", "running_mean", "running_var"}
        assert state["buffer_snapshots"].keys() == {"running_mean", "running_var"}

    def load(rank: int, module: nn.Module, impl: AsyncModelAverageAlgorithmImpl) -> None:
        for has_differences, difference in ((False, 0.0), (True, 10.0 + rank)):
            before = {name: module.state_dict()[name].clone() for name in states[rank]["differences"]}
            impl.load_state_dict({**states[rank], "has_differences": has_differences})
            for name, value in before.items():
                assert torch.equal(module.state_dict()[name], value + difference)
        assert (impl.step, impl.mode) == (7, "stopped")

    on_ranks(2, load)


def test_a_state_of_another_rank_or_of_other_weights_is_refused() -> None:
    states = on_ranks(2, save)

    def load(rank: int, module: nn.Module, impl: AsyncModelAverageAlgorithmImpl) -> None:
        own = states[rank]
        without = {key: value for key, value in own.items() if key != "buffer_snapshots"}
        fewer = {**own, "differences": {"weight": own["differences"]["weight"]}}
        for state, message in (
            (states[1 - rank], rf"be from rank {rank} of 2, got a state from rank {1 - rank} of 2"),
            ({**own, "num_ranks": 3}, rf"be from rank {rank} of 2, got a state from rank {rank} of 3"),
            (without, r"must have the keys \[.*'buffer_snapshots'.*\], got \['differences'"),
            (fewer, r"weights of this module, 4 tensors, got 1; they differ in \['bias'"),
        ):
            with pytest.raises(ValueError, match=rf"^AsyncModelAverageAlgorithm\.load_state_dict: .*{message}"):
                impl.load_state_dict(state)

    on_ranks(2, load)

    def load_other_shapes(rank: int, module: nn.Module, impl: AsyncModelAverageAlgorithmImpl) -> None:
        with pytest.raises(ValueError, match="weights of this module, 4 tensors, got 4; they differ in shapes"):
            impl.load_state_dict(states[rank])

    on_ranks(2, load_other_shapes, num_features=4)
