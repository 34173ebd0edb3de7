"""mlbench's optimizers compared with torch's, in loops with schedulers, closures and a scaler; ranks are threads."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks
from torchbagua.compat.mlbench import (
    AllReduceAggregation,
    CentralizedAdam,
    CentralizedSGD,
    DecentralizedSGD,
    PowerSGD,
    SignSGD,
    SparsifiedSGD,
)
from training import build

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


class Compared(NamedTuple):
    """An optimizer of mlbench, the optimizer of torch that it equals with a mean over two ranks, and how to step it."""

    make: Callable[[nn.Module, dist.ProcessGroup], Any]
    make_plain: Callable[[Any], torch.optim.Optimizer]
    averages_weights: bool = False
    by_closure: bool = True


COMPARED = {
    "centralized SGD": Compared(
        lambda model, group: CentralizedSGD(2, model, process_group=group, **SGD), partial(torch.optim.SGD, **SGD)
    ),
    "averaged SGD": Compared(
        lambda model, group: CentralizedSGD(2, model, process_group=group, by_layer=True, agg_grad=False, **SGD),
        partial(torch.optim.SGD, **SGD),
        averages_weights=True,
        by_closure=False,
    ),
    "centralized Adam": Compared(
        lambda model, group: CentralizedAdam(2, model, lr=0.01, amsgrad=True, process_group=group),
        partial(torch.optim.Adam, lr=0.01, amsgrad=True),
        by_closure=False,
    ),
    "PowerSGD": Compared(
        lambda model, group: PowerSGD(model, 0.1, 0.9, world_size=2, rank=99, process_group=group),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    ),
    "decentralized SGD": Compared(
        lambda model, group: DecentralizedSGD(group.rank(), [1 - group.rank()], model, lr=0.1, process_group=group),
        partial(torch.optim.SGD, lr=0.1),
        averages_weights=True,
    ),
}


class Tracker:
    """Records the names of the methods that are called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.calls.append(name)


def network() -> nn.Module:
    return build(lambda: nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3)))


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("name", COMPARED)
def test_it_equals_torchs_optimizer_with_an_aggregation(name: str) -> None:
    """With a scheduler, a closure and a tracker: bitwise equal to torch's with an aggregation called by hand."""
    template, compared = network(), COMPARED[name]
    of_weights = compared.averages_weights

    def body(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for is_plain in (False, True):
            model, tracker = copy.deepcopy(template), Tracker()
            if name == "averaged SGD":  # its constructor averages the weights
                nn.init.constant_(model[0].bias, group.rank())
            optimizer = compared.make_plain(model.parameters())  # torch then calls hooks in its class's step too
            lr = optimizer.param_groups[0]["lr"]
            if not is_plain:
                optimizer = compared.make(model, group)
            assert isinstance(optimizer, torch.optim.Optimizer)
            hooked: list[Any] = []
            optimizer.register_step_post_hook(lambda stepped, *_: hooked.append(stepped))  # noqa: B023
            aggregation = AllReduceAggregation(2, process_group=group)
            if name == "averaged SGD" and is_plain:
                aggregation.agg_model()(model, "avg_world")
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            data = torch.Generator().manual_seed(group.rank())

            def compute(
                optimizer: Any = optimizer, model: nn.Module = model, data: torch.Generator = data
            ) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(torch.randn(8, 10, generator=data)).square().mean()
                loss.backward()
                return loss

            for _ in range(5):
                if compared.by_closure and not is_plain:
                    assert optimizer.step(compute, tracker=tracker) > 0
                else:
                    compute()
                    if is_plain and not of_weights:
                        aggregation.agg_grad()(model, "avg_world")
                    optimizer.step()
                if is_plain and of_weights:
                    aggregation.agg_model()(model, "avg_world")
                scheduler.step()
            assert hooked == [optimizer] * 5
            assert optimizer.param_groups[0]["lr"] == lr / 4
            if compared.by_closure and not is_plain:
                calls = ["record_batch_opt_step", "record_batch_agg"]
                assert tracker.calls == (calls if of_weights else calls[::-1]) * 5
            found.append(weights(model))
        return found[0], found[1]

    (own, expected), (of_rank_1, _) = run_ranks(2, body)
    assert torch.equal(own, of_rank_1)
    if name == "PowerSGD":  # of full rank, computed in another order
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(own, expected)


@pytest.mark.parametrize(
    ("name", "unscales"), [("centralized SGD", False), ("centralized SGD", True), ("decentralized SGD", False)]
)
def test_a_grad_scaler_that_overflows_on_one_rank(name: str, unscales: bool) -> None:
    """No rank waits for another. If gradients are averaged all ranks skip the step, otherwise only that rank."""
    template, averages_weights = network(), COMPARED[name].averages_weights

    def body(group: dist.ProcessGroup) -> None:
        found = []
        for has_scaler in (False, True):
            model = copy.deepcopy(template)
            optimizer = COMPARED[name].make(model, group)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100, enabled=has_scaler)
            data = torch.Generator().manual_seed(group.rank())
            for step in range(4):
                optimizer.zero_grad()
                x = torch.randn(8, 10, generator=data)
                overflows = step == 2 and group.rank() == 0
                if step == 2 and not averages_weights and not has_scaler:
                    continue  # the equivalent of a skipped step
                if overflows and has_scaler:
                    x[0, 0] = torch.inf
                if has_scaler or not overflows:
                    scaler.scale(model(x).square().mean()).backward()
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            if has_scaler:
                assert scaler.get_scale() == 2.0 ** (9 if group.rank() == 0 else 10)
            found.append(weights(model))
        assert torch.equal(*found)

    run_ranks(2, body)


def test_only_means() -> None:
    model = nn.Linear(2, 2)
    for make in (partial(PowerSGD, model), partial(DecentralizedSGD, 0, [], model)):
        with pytest.raises(NotImplementedError, match="Only average model"):
            make(0.1, average_world=False)


def test_sign_sgd() -> None:
    """Steps have a fixed size, as Lion's; the momentum is torch's."""
    own, of_torch = nn.Linear(4, 3), nn.Linear(4, 3)
    of_torch.load_state_dict(own.state_dict())
    options: dict[str, Any] = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    sign, plain_sgd = SignSGD(own.parameters(), **options), torch.optim.SGD(of_torch.parameters(), **options)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        for mine, theirs in zip(own.parameters(), of_torch.parameters(), strict=True):
            theirs.data.copy_(mine.data)
            mine.grad = torch.randn(mine.shape, generator=draw)
            theirs.grad = mine.grad.clone()
        before = weights(own)
        assert sign.step(lambda: 1.5) == 1.5
        plain_sgd.step()
        assert torch.equal(weights(own), before + 0.5 * (weights(of_torch) - before).sign())


def test_sparsified_sgd_keeps_its_residual() -> None:
    model = nn.Conv2d(5, 4, 2).to(memory_format=torch.channels_last)
    start = weights(model)
    optimizer = SparsifiedSGD(model.parameters(), lr=0.5, sparse_grad_size=3)
    assert torch.equal(weights(model), start), "mlbench's optimizer draws new weights"
    total = torch.zeros_like(start)
    draw = torch.Generator().manual_seed(0)
    for _ in range(6):
        before = weights(model)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        total += torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        optimizer.step()
        assert int((weights(model) != before).sum()) == 3 + 3
    memory = torch.cat([optimizer.state[parameter]["memory"].flatten() for parameter in model.parameters()])
    torch.testing.assert_close(start - weights(model) + memory, 0.5 * total, rtol=0, atol=1e-6)  # sums, rounded
    for arguments in ({"lr": -1}, {"lr": 1, "sparse_grad_size": 0}):
        with pytest.raises(ValueError, match="SparsifiedSGD"):
            SparsifiedSGD(model.parameters(), **arguments)
