"""QAdamOptimizer on one rank: bitwise equal to Adam in its warm-up, and to the oracle after it."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oracle
import torchbagua as tb
from training import build

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight decay": {"weight_decay": 0.1},
    "AdamW": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "foreach": {"foreach": True, "weight_decay": 0.1},
    "fused": {"fused": True},
    "maximize": {"maximize": True, "weight_decay": 0.1},
}


class Server:
    """A stand-in for the algorithm that averages momenta."""


def small_model() -> nn.Module:
    return build(lambda: nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 2)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, seed: int = 1) -> None:
    data = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.randn(5, 7, generator=data)).square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0


def assert_equal_models(first: nn.Module, second: nn.Module) -> None:
    for (name, parameter), (_, expected) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(parameter, expected), name


@pytest.mark.parametrize("name", OPTIONS)
def test_is_adam_in_its_warm_up(name: str) -> None:
    options = OPTIONS[name]
    mine, theirs = small_model(), small_model()
    adam = torch.optim.Adam(theirs.parameters(), lr=0.01, **options)
    train(mine, tb.QAdamOptimizer(mine.parameters(), lr=0.01, warmup_steps=50, **options), 20)
    train(theirs, adam, 20)
    assert_equal_models(mine, theirs)


def test_hooks_are_called_once_though_adam_has_been_patched() -> None:
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # wraps Adam.step
    model = small_model()
    optimizer = tb.QAdamOptimizer(model.parameters(), warmup_steps=10)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(model, optimizer, 2)
    assert calls == ["pre", "post"] * 2


@pytest.mark.parametrize(
    ("decoupled", "channels_last", "maximize"), [(False, True, False), (True, False, False), (False, False, True)]
)
def test_steps_after_the_warm_up_equal_the_oracle(decoupled: bool, channels_last: bool, maximize: bool) -> None:
    model = build(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.LazyLinear(1)))
    model(torch.ones(1, 2, 5, 5))
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    num_warm = 3
    optimizer = tb.QAdamOptimizer(
        model.parameters(),
        warmup_steps=num_warm,
        decoupled_weight_decay=decoupled,
        maximize=maximize,
        **settings,
    )
    server = Server()
    optimizer.attach_averager(server)
    data = torch.Generator().manual_seed(3)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 2, 5, 5, generator=data)).square().sum().backward()
        before = {name: p.detach().clone().numpy() for name, p in model.named_parameters()}
        state = {name: copy.deepcopy(optimizer.state[p]) for name, p in model.named_parameters()}
        optimizer.step()
        if step < num_warm:
            continue
        for name, parameter in model.named_parameters():
            moments = [state[name][key].numpy() for key in ("exp_avg", "exp_avg_sq")]
            weight, momentum = oracle.qadam_step(
                before[name],
                parameter.grad.numpy() * np.float32(-1 if maximize else 1),
                *moments,
                num_warm=num_warm,
                num_since=step - num_warm + 1,
                decoupled=decoupled,
                **settings,
            )
            np.testing.assert_array_equal(parameter.detach().numpy(), weight)
            np.testing.assert_array_equal(optimizer.state[parameter]["exp_avg"].numpy(), momentum)
            np.testing.assert_array_equal(optimizer.state[parameter]["exp_avg_sq"].numpy(), moments[1])


def test_float64_steps_after_the_warm_up_are_computed_in_float64() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = tb.QAdamOptimizer([weight], lr=1e-12, warmup_steps=1)
    server = Server()
    optimizer.attach_averager(server)
    for _ in range(4):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert bool((weight < 1).all())  # float32 would round to 1


def test_steps_past_the_warm_up_require_an_algorithm() -> None:
    model = small_model()
    optimizer = tb.QAdamOptimizer(model.parameters(), warmup_steps=2)
    train(model, optimizer, 2)
    with pytest.raises(
        RuntimeError, match=r"after the warm-up of 2 steps, momenta must be averaged; call torchbagua\.att"
    ):
        train(model, optimizer, 1)
    server = Server()
    optimizer.attach_averager(server)
    train(model, optimizer, 1)
    del server
    with pytest.raises(RuntimeError, match="after the warm-up of 2 steps"):
        train(model, optimizer, 1)


def test_state_is_loaded_from_adam_and_into_adam() -> None:
    first, second = small_model(), small_model()
    adam = torch.optim.AdamW(first.parameters(), lr=0.01)
    train(first, adam, 5)
    mine = tb.QAdamOptimizer(second.parameters(), lr=0.5, warmup_steps=8, decoupled_weight_decay=True)
    second.load_state_dict(first.state_dict())
    mine.load_state_dict(copy.deepcopy(adam.state_dict()))
    assert mine.param_groups[0]["lr"] == 0.01
    assert mine.param_groups[0]["warmup_steps"] == 8
    train(first, adam, 3, seed=2)
    train(second, mine, 3, seed=2)
    assert_equal_models(first, second)
    server = Server()
    mine.attach_averager(server)
    train(second, mine, 4, seed=3)
    # The second moment is from 8 steps, so Adam must correct the bias of 8 steps.
    assert {float(state["step"]) for state in mine.state.values()} == {8.0}
    third = copy.deepcopy(second)
    back = torch.optim.AdamW(third.parameters(), lr=0.01)
    back.load_state_dict(copy.deepcopy(mine.state_dict()))
    train(third, back, 2, seed=4)
    fourth = copy.deepcopy(second)
    resumed = tb.QAdamOptimizer(fourth.parameters(), warmup_steps=8, decoupled_weight_decay=True)
    resumed.load_state_dict(copy.deepcopy(mine.state_dict()))
    resumed.attach_averager(server)
    train(second, mine, 3, seed=5)
    train(fourth, resumed, 3, seed=5)
    assert_equal_models(second, fourth)


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_updates_are_counted_as_in_adam_whoever_wrote_the_state(options: dict[str, Any]) -> None:
    model, adam_model = small_model(), small_model()
    adam = torch.optim.Adam(adam_model.parameters(), **options)
    train(adam_model, adam, 5)
    optimizer = tb.QAdamOptimizer(model.parameters(), **options)

    def check(optimizer: tb.QAdamOptimizer, expected: int) -> None:
        assert set(optimizer.num_updates) == {expected}
        steps = [optimizer.state[p]["step"] if p in optimizer.state else 0 for p in optimizer.parameters]
        assert set(map(float, steps)) == {expected}

    check(optimizer, 0)
    train(model, optimizer, 3)
    check(optimizer, 3)
    check(copy.deepcopy(optimizer), 3)
    optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))
    check(optimizer, 5)
    train(model, optimizer, 1)
    check(optimizer, 6)
    for parameter in model.parameters():
        optimizer.state[parameter]["step"].fill_(9.0)
    check(optimizer, 9)
    optimizer.state.clear()
    train(model, optimizer, 2)
    check(optimizer, 2)
    wrapped = tb.QAdamOptimizer.wrap(adam)
    check(wrapped, 5)
    train(adam_model, adam, 1)  # which a user must not do
    check(wrapped, 6)


@pytest.mark.filterwarnings("error")
def test_wrap_takes_over_an_adam_and_its_scheduler() -> None:
    """Also after the state was loaded."""
    first, second = small_model(), small_model()
    options = {"lr": 0.01, "weight_decay": 0.1}
    adams = [
        torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters()}], **options)
        for model in (first, second)
    ]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(adam, 0.5) for adam in adams]
    for model, adam in zip((first, second), adams, strict=True):
        train(model, adam, 3)
    wrapped = tb.QAdamOptimizer.wrap(adams[1], warmup_steps=10)
    for scheduler in schedulers:
        scheduler.step()
    assert [group["lr"] for group in wrapped.param_groups] == [0.01, 0.005]
    wrapped.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    train(first, adams[0], 2, seed=2)
    train(second, wrapped, 2, seed=2)
    for scheduler in schedulers:
        scheduler.step()
    train(first, adams[0], 2, seed=3)
    train(second, wrapped, 2, seed=3)
    assert_equal_models(first, second)
    with pytest.raises(TypeError, match="optimizer must be an Adam or AdamW, got SGD"):
        tb.QAdamOptimizer.wrap(torch.optim.SGD(first.parameters()))
    with pytest.raises(ValueError, match="must not use amsgrad, got amsgrad=True"):
        tb.QAdamOptimizer.wrap(torch.optim.Adam(first.parameters(), amsgrad=True))


@pytest.mark.parametrize("wraps", [False, True])
def test_a_group_added_later_has_a_separate_warm_up(wraps: bool) -> None:
    """Added to the optimizer, or to the Adam that it wraps. The state of an Adam leaves the warm-ups of groups."""
    model, server = small_model(), Server()
    adam = torch.optim.Adam(model[0].parameters())
    optimizer = (
        tb.QAdamOptimizer.wrap(adam, warmup_steps=2)
        if wraps
        else tb.QAdamOptimizer(model[0].parameters(), warmup_steps=2)
    )
    optimizer.attach_averager(server)
    train(model, optimizer, 3)
    added = {"params": model[2].parameters()}
    adam.add_param_group(added) if wraps else optimizer.add_param_group({**added, "warmup_steps": 3})
    assert [optimizer.is_past_warmup(parameter) for parameter in model.parameters()] == [True, True, False, False]
    train(model, optimizer, 3)
    assert all(map(optimizer.is_past_warmup, model.parameters()))
    assert float(optimizer.state[model[2].weight]["step"]) == 2 + (not wraps)
    with pytest.raises(ValueError, match="warmup_steps must be at least 1, got 0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "warmup_steps": 0})
    assert len(optimizer.param_groups) == 2
    if not wraps:
        groups = [{"params": layer.parameters()} for layer in (model[0], model[2])]
        optimizer.load_state_dict(torch.optim.Adam(groups).state_dict())
        assert [group["warmup_steps"] for group in optimizer.param_groups] == [2, 3]


def test_betas_are_frozen_with_the_second_moment() -> None:
    model = small_model()
    optimizer = tb.QAdamOptimizer(model.parameters(), warmup_steps=2)
    server = Server()
    optimizer.attach_averager(server)
    optimizer.detach_averager(Server())  # of another optimizer
    optimizer.param_groups[0]["betas"] = (0.8, 0.999)  # in the warm-up, as Adam
    train(model, optimizer, 3)
    optimizer.param_groups[0]["betas"] = (0.7, 0.999)
    with pytest.raises(
        ValueError, match=r"betas must stay \(0\.8, 0\.999\) after the warm-up, .* cycle_momentum=False"
    ):
        train(model, optimizer, 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, r"lr must be at least 0, got -1\.0"),
        ({"lr": torch.ones(2)}, TypeError, "lr must be a number, got tensor"),
        ({"eps": -1e-8}, ValueError, "eps must be at least 0, got -1e-08"),
        ({"weight_decay": -0.1}, ValueError, r"weight_decay must be at least 0, got -0\.1"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas must be two numbers in \[0, 1\), got \(0\.9, 1\.0\)"),
        ({"betas": 0.9}, TypeError, "betas must be two numbers, got 0.9"),
        ({"betas": (0.9, None)}, TypeError, r"betas must be two numbers, got \(0.9, None\)"),
        ({"warmup_steps": 0}, ValueError, "warmup_steps must be at least 1, got 0"),
        ({"warmup_steps": 1.5}, TypeError, r"warmup_steps must be an integer, got 1\.5"),
        ({"maximize": "no"}, TypeError, "maximize must be True or False, got 'no'"),
        ({"decoupled_weight_decay": None}, TypeError, "decoupled_weight_decay must be True or False, got None"),
    ],
)
def test_refused_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"QAdamOptimizer: {message}"):
        tb.QAdamOptimizer([nn.Parameter(torch.ones(2))], **options)


def test_refused_tensors() -> None:
    with pytest.raises(ValueError, match=r"params must be real, got a parameter of dtype torch\.complex64"):
        tb.QAdamOptimizer([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = tb.QAdamOptimizer(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"gradients must be dense, got a sparse gradient of shape \[5, 2\]"):
        optimizer.step()


@pytest.mark.parametrize(("beta2", "bound"), [(0.999, 0.1 / 0.001**0.5), (0.9, 1.0)])
def test_an_element_with_a_tiny_second_moment_moves_no_farther_than_with_adam(beta2: float, bound: float) -> None:
    """One-bit momenta have the magnitude of their block in every element, and a tiny second moment divides it."""
    weight = nn.Parameter(torch.zeros(4))
    optimizer = tb.QAdamOptimizer([weight], lr=0.01, warmup_steps=1, betas=(0.9, beta2))
    server = Server()
    optimizer.attach_averager(server)
    weight.grad = torch.tensor([1.0, 1e-6, 0.0, torch.nan])
    optimizer.step()
    before = weight.detach().clone()
    weight.grad = torch.tensor([1.0, 1.0, 1.0, 1.0])
    optimizer.step()
    moved = (before - weight.detach()).abs() / 0.01
    assert moved[0] == pytest.approx(1, rel=1e-3)
    assert moved[1] == pytest.approx(bound, rel=1e-3)
    assert moved[2] == 0
    assert moved[3].isnan()


def test_a_parameter_whose_memory_order_changes_keeps_its_momentum() -> None:
    """The momentum, in another order than the parameter, is updated in a copy."""
    weights = [nn.Parameter(torch.zeros(2, 3, 4, 5)) for _ in range(2)]
    server, gradients = Server(), torch.randn(4, 2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    for weight in weights:
        optimizer = tb.QAdamOptimizer([weight], warmup_steps=1)
        optimizer.attach_averager(server)
        for number, gradient in enumerate(gradients):
            if weight is weights[1] and number == 2:
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
            weight.grad = torch.empty_like(weight).copy_(gradient)
            optimizer.step()
    assert weights[0].all()
    assert torch.equal(*weights)
