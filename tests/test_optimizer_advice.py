"""attach warns of combinations that the algorithms' pages advise against: one warning per rank, or none."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from caught import torchbagua_warnings
from ranks import run_ranks

MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


class FusedAdam(torch.optim.SGD):
    """An Adam as in another package, which does not derive from torch's Adam."""


def sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def sgd_with_momentum(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def signs(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, betas=(0.0, 0.0))


def adam_without_betas(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Its weight decay would move elements that were not sent."""
    return torch.optim.Adam(parameters, lr=0.1, betas=(0.0, 0.0), weight_decay=0.1)


def adamw_without_momentum(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, betas=(0.0, 0.9))


def muon(parameters: Iterable[torch.Tensor], momentum: float = 0.95) -> torch.optim.Optimizer:
    return torch.optim.Muon([parameter for parameter in parameters if parameter.ndim == 2], momentum=momentum)


def fused_adam(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return FusedAdam(parameters, lr=0.1, momentum=0.9)


def messages_of(algorithm: tb.Algorithm, make_optimizer: MakeOptimizer, *, is_attached: bool = True) -> list[str]:
    """Attach or reify, train two steps, and return the warnings."""

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(nn.Linear(4, 2), process_group=group)
        optimizer = make_optimizer(ddp.parameters())
        own_group = tb.BaguaProcessGroup(group)
        if is_attached:
            runner = tb.attach(ddp, optimizer, algorithm, process_group=own_group).runner
        else:
            runner = algorithm.reify(own_group, optimizer=optimizer)
            ddp.register_comm_hook(runner, tb.comm_hook)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        runner.close()

    with torchbagua_warnings() as messages:
        run_ranks(2, body)
    return messages


SPARSE: list[Any] = [
    tb.TopKAlgorithm(),
    tb.TopKAlgorithm(0.05, selection="block"),
    tb.CompressedAllReduceAlgorithm("topk", error_feedback=True),
]


@pytest.mark.parametrize("is_attached", [True, False], ids=["attach", "reify"])
@pytest.mark.parametrize("algorithm", SPARSE, ids=repr)
def test_a_sparse_mean_with_a_momentum(algorithm: tb.Algorithm, is_attached: bool) -> None:
    messages = messages_of(algorithm, sgd_with_momentum, is_attached=is_attached)
    assert len(messages) == 2
    assert f"{type(algorithm).__name__} with the momentum 0.9 of SGD may diverge" in messages[0]
    assert "Set that momentum to 0" in messages[0]
    assert "TopKAlgorithm(momentum=0.9, warmup_steps=...)" in messages[0]


def test_a_sparse_mean_with_muon() -> None:
    """TopK's own momentum is for SGD, so it is no advice here."""
    message, _ = messages_of(tb.TopKAlgorithm(), muon)
    assert "TopKAlgorithm with the momentum 0.95 of Muon may diverge" in message
    assert message.endswith("Set that momentum to 0, and increase the learning rate")


@pytest.mark.parametrize(
    "make_optimizer",
    [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, fused_adam, adam_without_betas, adamw_without_momentum],
)
@pytest.mark.parametrize("algorithm", [*SPARSE, tb.PowerSGDAlgorithm()], ids=repr)
def test_a_sparse_mean_and_factors_with_adam(algorithm: tb.Algorithm, make_optimizer: MakeOptimizer) -> None:
    messages = messages_of(algorithm, make_optimizer)
    assert len(messages) == 2
    names = {fused_adam: "FusedAdam", adam_without_betas: "Adam", adamw_without_momentum: "AdamW"}
    adam = names.get(make_optimizer, make_optimizer.__name__)
    assert f"{type(algorithm).__name__} with {adam} " in messages[0]
    assert "QAdamAlgorithm with one bit" in messages[0]
    assert "or train with SGD" in messages[0]


def test_a_scheduler_that_sets_the_first_beta_is_refused() -> None:
    """AdamW would divide means of gradients by about 1e-8 wherever the last gradient is 0."""

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(nn.Linear(4, 2), process_group=group)
        optimizer = signs(ddp.parameters())
        with tb.attach(ddp, optimizer, tb.TopKAlgorithm(), process_group=tb.BaguaProcessGroup(group)):
            ddp(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=True)
            ddp(torch.ones(2, 4)).sum().backward()

    with pytest.raises(ValueError, match=r"betas must be 0 if the second is, got \(0.95, 0.0\).*cycle_momentum=False"):
        run_ranks(2, body)


@pytest.mark.parametrize(
    ("algorithm", "make_optimizer"),
    [
        *((algorithm, sgd) for algorithm in [*SPARSE, tb.PowerSGDAlgorithm()]),
        (tb.PowerSGDAlgorithm(), sgd_with_momentum),
        (tb.TopKAlgorithm(momentum=0.9), sgd),
        (tb.TopKAlgorithm(1.0), sgd_with_momentum),
        (tb.TopKAlgorithm(), signs),
        (tb.TopKAlgorithm(), partial(muon, momentum=0.0)),
        (tb.CompressedAllReduceAlgorithm(), torch.optim.AdamW),
        (tb.ByteGradAlgorithm(error_feedback=True), sgd_with_momentum),
    ],
)
def test_no_warning(algorithm: tb.Algorithm, make_optimizer: MakeOptimizer) -> None:
    assert not messages_of(algorithm, make_optimizer)
