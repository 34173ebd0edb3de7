"""Sparse gradients of a function, which attach cannot detect: refused by the name of the parameter."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import leave_by_exception, run_ranks
from training import build


class Words(nn.Module):
    """An embedding by a function; its table is the first parameter, or not."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        if not is_first:
            self.bias = nn.Parameter(torch.zeros(3))
        self.table = nn.Parameter(torch.randn(7, 3))
        self.last = nn.Linear(3, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        looked_up = nn.functional.embedding(words, self.table, sparse=True)
        return self.last(looked_up + getattr(self, "bias", 0.0))


@pytest.mark.parametrize(
    ("algorithm", "is_first"),
    [
        (tb.DecentralizedAlgorithm(), True),
        (tb.DecentralizedAlgorithm(), False),
        (tb.DiLoCoAlgorithm(100), False),
        (tb.AsyncModelAverageAlgorithm(sync_interval_ms=0), False),
        (tb.AsyncModelAverageAlgorithm(warmup_steps=5), True),
        (tb.GradientAllReduceAlgorithm(), True),
        (tb.ByteGradAlgorithm(error_feedback=True), False),
    ],
    ids=["decentralized", "decentralized, second", "diloco", "async", "async warm-up", "gradients", "error feedback"],
)
def test_refused_on_all_ranks(algorithm: tb.Algorithm, is_first: bool) -> None:
    model = build(lambda: Words(is_first=is_first))

    def body(group: dist.ProcessGroup) -> str:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with (
            pytest.raises(ValueError, match=r"parameter table has a sparse gradient.*leave out sparse=True"),
            tb.attach(ddp, optimizer, algorithm),
        ):
            ddp(torch.arange(3)).sum().backward()
        return "raised"

    assert run_ranks(2, body) == ["raised"] * 2


def test_refused_in_a_later_step() -> None:
    """The first gradient is checked in every backward: reading its address would raise torch's own error."""
    model = build(lambda: Words(is_first=True))

    def body(group: dist.ProcessGroup) -> None:
        module = copy.deepcopy(model)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        attachment = tb.attach(module, optimizer, "decentralized", process_group=tb.BaguaProcessGroup(group))
        module.table.requires_grad_(False)
        module(torch.arange(3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        module.table.requires_grad_(True)
        with pytest.raises(ValueError, match="parameter table has a sparse gradient"):
            module(torch.arange(3)).sum().backward()
        leave_by_exception(attachment)

    run_ranks(2, body)
