"""Copies and pickles of an attached module: they have no algorithm, and loading them does not need this package."""

import copy
import io
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import run_ranks
from training import build

ALGORITHMS = {
    "error feedback": tb.CompressedAllReduceAlgorithm(error_feedback=True),
    "decentralized": tb.DecentralizedAlgorithm(),
    "low precision": tb.LowPrecisionDecentralizedAlgorithm(),
    "diloco": tb.DiLoCoAlgorithm(2, delay=1),
    "diloco within nodes": tb.DiLoCoAlgorithm(2, hierarchical=True),
    "async": tb.AsyncModelAverageAlgorithm(sync_interval_ms=1, warmup_steps=1),
}


class WithoutThisPackage(pickle.Unpickler):
    """Loads a pickle in a program that cannot import torchbagua."""

    def find_class(self, module: str, name: str) -> Any:
        assert not module.startswith("torchbagua"), f"the pickle needs {module}.{name}"
        return super().find_class(module, name)


@pytest.fixture
def default_groups(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Give each rank its group as the default group: DDP can be pickled over the default group only."""
    of_rank = threading.local()
    monkeypatch.setattr("torch.nn.parallel.distributed._get_default_group", lambda: of_rank.group)
    return of_rank


def take_step(module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    optimizer.zero_grad()
    scaler.scale(module(torch.rand(4, 10)).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(
    ("name", "is_ddp"),
    [
        *((name, True) for name in ("error feedback", "diloco within nodes", "async")),
        ("decentralized", False),
        *(pytest.param(name, False, marks=pytest.mark.release) for name in ("low precision", "diloco", "async")),
        *(pytest.param(name, True, marks=pytest.mark.release) for name in ("decentralized", "low precision", "diloco")),
    ],
)
def test_a_copy_trains_without_an_algorithm(default_groups: threading.local, name: str, is_ddp: bool) -> None:
    """A copied DDP averages gradients again, and a copied module does not."""
    algorithm = ALGORITHMS[name]

    def model() -> nn.Module:
        return build(lambda: nn.Sequential(nn.Linear(10, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))

    def gradient_of(module: nn.Module, rank: int) -> torch.Tensor:
        module.zero_grad()
        module(torch.rand(4, 10, generator=torch.Generator().manual_seed(rank))).sum().backward()
        return next(module.parameters()).grad.clone()

    def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
        default_groups.group = group
        module: nn.Module = DistributedDataParallel(model(), process_group=group) if is_ddp else model()
        names = ("require_backward_grad_sync", "require_forward_param_sync", "forward_sync_buffers")
        flags = {name: vars(module)[name] for name in names} if is_ddp else {}
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        nodes = tb.BaguaProcessGroup(group, nodes=[0, 0, 1, 1] if "nodes" in name else None)
        options: Any = {"observers": [tb.observe.Summary()], "grad_scaler": scaler, "process_group": nodes}
        with tb.attach(module, optimizer, algorithm, **options):
            take_step(module, optimizer, scaler)
            torch.save(module, file := io.BytesIO())
            copies = [
                copy.deepcopy(module),
                WithoutThisPackage(io.BytesIO(pickle.dumps(module))).load(),
                torch.load(io.BytesIO(file.getvalue()), weights_only=False),
            ]
            gradients = [gradient_of(copied, group.rank()) for copied in copies]
            for copied in copies:
                assert all(vars(copied)[name] is flag for name, flag in flags.items())
                with tb.attach(copied, torch.optim.SGD(copied.parameters(), lr=1e-3), algorithm, process_group=group):
                    pass
            take_step(module, optimizer, scaler)
        assert all(vars(module)[name] is flag for name, flag in flags.items())
        return gradients

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        results = run_ranks(4 if "nodes" in name else 2, body)
    for gradients in zip(*results, strict=True):
        assert all(torch.equal(gradients[0], other) for other in gradients[1:]) == is_ddp
