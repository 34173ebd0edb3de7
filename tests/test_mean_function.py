"""A gradient algorithm from one function: results, error feedback and its state, errors, simulation."""

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import run_ranks
from torchbagua.algorithms import base
from torchbagua.testing import check_algorithm
from torchbagua.testing.simulation import Subject, check
from training import Tower, build

NUM_STEPS = 4


def in_full_precision(flat: torch.Tensor, group: tb.BaguaProcessGroup) -> None:
    group.all_reduce(flat, average=True)


def in_halves(flat: torch.Tensor) -> torch.Tensor:
    """Return multiples of 1/2. An element at a time, since a resumed run has other buckets in its first step."""
    return flat.mul(2).round().div(2)


def failing(flat: torch.Tensor, group: tb.BaguaProcessGroup) -> None:
    raise ArithmeticError("it does not add up")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    tb.extend.mean("exact")(in_full_precision)
    tb.extend.mean("half", error_feedback=in_halves, description="in halves")(in_full_precision)
    tb.extend.mean("failing")(failing)


def keep(found: dict[str, torch.Tensor], name: str, gradient: torch.Tensor) -> None:
    found[name] = gradient.clone()  # DDP writes the mean into the same memory


TOWER = build(Tower)  # once, since ranks are threads and share torch's global generator


class Loop:
    def __init__(self, group: dist.ProcessGroup, algorithm: Any) -> None:
        self.ddp = DistributedDataParallel(copy.deepcopy(TOWER), process_group=group, bucket_cap_mb=0.01)
        self.named = {name: each for name, each in self.ddp.module.named_parameters() if each.requires_grad}
        self.optimizer = torch.optim.SGD(self.named.values(), lr=1e-4)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.data = torch.Generator().manual_seed(1000 + group.rank())
        self.attachment = tb.attach(self.ddp, self.optimizer, algorithm, grad_scaler=self.scaler)

    def step(self, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        loss = self.ddp(torch.randn(6, 10, generator=self.data), 0).square().sum()
        self.scaler.scale(loss * factor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.named.values()]


def test_a_function_is_an_algorithm() -> None:
    """Bitwise the package's own mean in rank order."""

    def body(group: dist.ProcessGroup, algorithm: Any) -> list[torch.Tensor]:
        loop = Loop(group, algorithm)
        with loop.attachment:
            for _ in range(NUM_STEPS):
                loop.step()
        return loop.weights()

    own = run_ranks(2, partial(body, algorithm="exact"))
    expected = run_ranks(2, partial(body, algorithm=tb.GradientAllReduceAlgorithm(in_rank_order=True)))
    assert all(torch.equal(x, y) for ranks in zip(own, expected, strict=True) for x, y in zip(*ranks, strict=True))
    assert tb.available_algorithms()["half"] == "in halves"


def test_nothing_is_lost_with_error_feedback() -> None:
    """The mean of all gradients is what the optimizers got, plus the residuals. Skipped steps leave no trace."""

    def body(group: dist.ProcessGroup) -> tuple[Any, ...]:
        loop = Loop(group, "half")
        totals = {name: torch.zeros_like(parameter) for name, parameter in loop.named.items()}
        applied = copy.deepcopy(totals)
        with loop.attachment:
            for step in range(NUM_STEPS):
                gradients: dict[str, torch.Tensor] = {}
                hooks = [each.register_hook(partial(keep, gradients, name)) for name, each in loop.named.items()]
                scale, is_skipped = loop.scaler.get_scale(), step == 2
                loop.step(float("inf") if is_skipped else 1.0)
                for hook in hooks:
                    hook.remove()
                for name, parameter in ({} if is_skipped else loop.named).items():
                    totals[name] += gradients[name] / scale
                    applied[name] += parameter.grad  # GradScaler has unscaled it
            return totals, applied, loop.attachment.runner.state_dict()["residual"], loop.weights()

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first[3], second[3]))
    for name, applied in first[1].items():
        total = (first[0][name] + second[0][name]) / 2
        residual = (first[2][name] + second[2][name]) / 2
        assert residual.any()
        # The tolerance of sums over the steps in float32.
        assert (applied + residual - total).norm() <= 1e-5 * total.norm()


def test_a_function_keeps_the_contract_of_algorithms() -> None:
    """Residuals are resumed too, into the buckets of a new DDP."""
    check_algorithm(Subject(lambda optimizer: base.get("half")()))


def test_an_error_names_the_function() -> None:
    def train(group: dist.ProcessGroup) -> str:
        loop = Loop(group, "failing")
        with pytest.raises(RuntimeError) as raised, loop.attachment:
            loop.step()
        return str(raised.value)

    # If the other rank fails first, a rank may see only that its connection is closed.
    pattern = r"failing.*gradient bucket 0.*it does not add up"
    assert any(re.search(pattern, message, re.DOTALL) for message in run_ranks(2, train))


def test_ranks_cannot_compare_a_lambda() -> None:
    tb.extend.mean("anonymous")(lambda flat, group: None)
    with pytest.raises(TypeError, match="a function that can be imported by its name"):
        run_ranks(1, lambda group: Loop(group, "anonymous"))


@pytest.mark.usefixtures("on_one_core")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["exact", "half"])
def test_simulation(name: str) -> None:
    check(Subject(lambda optimizer: base.get(name)()), seeds=range(8))
