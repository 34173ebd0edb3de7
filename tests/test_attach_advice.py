"""attach warns of combinations that the algorithms' pages advise against: once per rank, or not at all."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from averaging import RARELY
from caught import torchbagua_warnings
from ranks import run_ranks

MakeOptimizer = Callable[[Any], Any]
optim = torch.optim


class FusedAdam(optim.SGD):
    """An Adam as in another package, which does not derive from torch's Adam."""


sgd = partial(optim.SGD, lr=0.1)
momentum = partial(optim.SGD, lr=0.1, momentum=0.9)
signs = partial(optim.AdamW, lr=0.1, betas=(0.0, 0.0))
# Its weight decay would move elements that were not sent.
adam_without_betas = partial(optim.Adam, lr=0.1, betas=(0.0, 0.0), weight_decay=0.1)
adamw_without_momentum = partial(optim.AdamW, lr=0.1, betas=(0.0, 0.9))
fused_adam = partial(FusedAdam, lr=0.1, momentum=0.9)


def muon(parameters: Any, momentum: float = 0.95) -> optim.Optimizer:
    return optim.Muon([parameter for parameter in parameters if parameter.ndim == 2], momentum=momentum)


def messages_of(
    algorithm: Any,
    make_optimizer: MakeOptimizer = sgd,
    *,
    model: nn.Module | None = None,
    trains: bool = True,
    is_attached: bool = True,
    **ddp_options: Any,
) -> list[str]:
    """Attach or reify on one rank, train two steps, and return the warnings."""

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(model or nn.Linear(4, 2), process_group=group, **ddp_options)
        optimizer = make_optimizer(ddp.parameters())
        own = tb.BaguaProcessGroup(group)
        if is_attached:
            end = tb.attach(ddp, optimizer, algorithm, process_group=own).detach
        else:
            runner = algorithm.reify(own, optimizer=optimizer)
            ddp.register_comm_hook(runner, tb.comm_hook)
            end = runner.close
        for _ in range(2 if trains else 0):
            ddp.zero_grad()
            ddp(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        end()

    with torchbagua_warnings() as messages:
        run_ranks(2 if trains else 1, body)
    return messages


TOPK, BLOCKS = tb.TopKAlgorithm(), tb.TopKAlgorithm(0.05, selection="block")
SPARSE, POWERSGD = tb.CompressedAllReduceAlgorithm("topk", error_feedback=True), tb.PowerSGDAlgorithm()
DIVERGES = "Algorithm with the momentum 0.9 of SGD may diverge.*Set that momentum to 0.*TopKAlgorithm.momentum=0.9"
OWN_MOMENTS = "with {} .*QAdamAlgorithm with one bit.*or train with SGD"


@pytest.mark.parametrize(
    ("algorithm", "make_optimizer", "message"),
    [
        (TOPK, momentum, f"TopK{DIVERGES}"),
        (BLOCKS, momentum, f"TopK{DIVERGES}"),
        (SPARSE, momentum, f"CompressedAllReduce{DIVERGES}"),
        # TopK's own momentum is for SGD, so it is no advice here.
        (TOPK, muon, "momentum 0.95 of Muon may diverge.*Set that momentum to 0, and increase the learning rate$"),
        (TOPK, optim.Adam, "TopKAlgorithm " + OWN_MOMENTS.format("Adam")),
        (SPARSE, optim.AdamW, "CompressedAllReduceAlgorithm " + OWN_MOMENTS.format("AdamW")),
        (POWERSGD, optim.NAdam, "PowerSGDAlgorithm " + OWN_MOMENTS.format("NAdam")),
        (BLOCKS, fused_adam, OWN_MOMENTS.format("FusedAdam")),
        (TOPK, adam_without_betas, OWN_MOMENTS.format("Adam")),
        (TOPK, adamw_without_momentum, OWN_MOMENTS.format("AdamW")),
        *((algorithm, sgd, None) for algorithm in (TOPK, SPARSE, POWERSGD)),
        (POWERSGD, momentum, None),
        (tb.TopKAlgorithm(momentum=0.9), sgd, None),
        (tb.TopKAlgorithm(1.0), momentum, None),
        (TOPK, signs, None),
        (TOPK, partial(muon, momentum=0.0), None),
        (tb.CompressedAllReduceAlgorithm(), optim.AdamW, None),
        (tb.ByteGradAlgorithm(error_feedback=True), momentum, None),
    ],
)
def test_sparse_means_and_factors_by_optimizer(
    algorithm: tb.Algorithm, make_optimizer: MakeOptimizer, message: str | None
) -> None:
    messages = messages_of(algorithm, make_optimizer)
    assert len(messages) == (0 if message is None else 2)
    assert all(re.search(message or "", each) for each in messages), messages


def test_the_standalone_hook_warns_too() -> None:
    message, _ = messages_of(TOPK, momentum, is_attached=False)
    assert re.search(DIVERGES, message)


def test_a_scheduler_that_sets_the_first_beta_is_refused() -> None:
    """AdamW would divide means of gradients by about 1e-8 wherever the last gradient is 0."""

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(nn.Linear(4, 2), process_group=group)
        optimizer = signs(ddp.parameters())
        with tb.attach(ddp, optimizer, TOPK, process_group=tb.BaguaProcessGroup(group)):
            ddp(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=True)
            ddp(torch.ones(2, 4)).sum().backward()

    with pytest.raises(ValueError, match=r"betas must be 0 if the second is, got \(0.95, 0.0\).*cycle_momentum=False"):
        run_ranks(2, body)


LARGE = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(5)))  # 20 MiB of gradients
HALF = (
    "bucket_cap_mb=10 of DistributedDataParallel puts 50% of 20 MiB of gradients into one bucket"
    ".* about 14% longer.*or pass at most 2$"
)


@pytest.mark.parametrize(
    ("model", "algorithm", "bucket_cap_mb", "message"),
    [
        (LARGE, "bytegrad", 10, HALF),
        (LARGE, tb.CompressedAllReduceAlgorithm(), 1000, "puts 100% of 20 MiB"),
        (LARGE, "bytegrad", None, None),  # DDP's default has a small first bucket
        (LARGE, "bytegrad", 5, None),
        (LARGE, "gradient_allreduce", 10, None),
        (LARGE, "decentralized", 10, None),
        (nn.Linear(100, 100), "bytegrad", 10, None),
    ],
)
def test_buckets_with_a_large_part_of_the_gradients(
    model: nn.Module, algorithm: Any, bucket_cap_mb: int | None, message: str | None
) -> None:
    messages = messages_of(algorithm, model=model, trains=False, bucket_cap_mb=bucket_cap_mb)
    assert len(messages) == (message is not None)
    assert all(re.search(message or "", each) for each in messages), messages


def two(parameters: Any) -> list[optim.Optimizer]:
    parameters = list(parameters)
    return [sgd(parameters), optim.Adam(parameters[-1:])]


def of_first(number: int) -> MakeOptimizer:
    return lambda parameters: sgd(list(parameters)[:number])


TWO_LAYERS = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
FROZEN_BIAS = nn.Linear(4, 2)
FROZEN_BIAS.bias.requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "algorithm", "make_optimizer", "message"),
    [
        (None, "decentralized", two, "bias is a parameter of both SGD and Adam"),
        (None, "bytegrad", two, "bias is a parameter of both SGD and Adam"),
        # Weights would be averaged between the steps of two optimizers; gradients are averaged before both.
        (None, RARELY["decentralized"], of_first(1), "no attached optimizer steps bias, although it requires grad.*. "
         "If another optimizer steps it, "),
        (TWO_LAYERS, "diloco", of_first(2), r"steps 1.weight \(and 1 more\), although they require gradients"),
        (TWO_LAYERS, "diloco", of_first(1), r"steps 0.bias \(and 2 more\), although they require gradients"),
        (None, "bytegrad", of_first(1), None),
        (FROZEN_BIAS, "decentralized", of_first(1), None),
        (None, "bytegrad", optim.LBFGS, "LBFGS calls its closure as often .* mean of the loss over the ranks"),
    ],
)  # fmt: skip
def test_optimizers_that_do_not_fit(
    model: nn.Module | None, algorithm: Any, make_optimizer: MakeOptimizer, message: str | None
) -> None:
    messages = messages_of(algorithm, make_optimizer, model=model, trains=False)
    assert len(messages) == (message is not None)
    assert all(re.search(message or "", each) for each in messages), messages
