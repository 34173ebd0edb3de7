"""Rounds of DiLoCo: the outer optimizer steps with the mean of outer gradients, and weights follow, at once or later.

Outer gradients are dyadic and in full precision, and the outer optimizer is SGD with a learning rate of 1/2, so all
results are exact.
"""

import copy
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchbagua as tb
from averaging import Weights, assert_same_weights, weights_of
from components import dyadic, running
from ranks import run_ranks
from torchbagua.codecs.cast import Cast

LR = 0.5


class Shared(nn.Module):
    """The weights from which all ranks start: parameters, one of them in another dtype, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(dyadic(5, 3, seed=1))
        self.second = nn.Parameter(dyadic(4, seed=2, num_bits=4, dtype=torch.bfloat16))
        self.register_buffer("running", dyadic(3, seed=3))


def half_sgd(shadows: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(shadows, lr=LR)


class Component:
    """The rounds of an impl, which the test starts by steps and applies."""

    def __init__(self, impl: Any, module: nn.Module) -> None:
        self.impl = impl
        self.shadow = impl.shadow
        self.rounds = impl.rounds
        self._after_step = impl.init_post_optimizer_step_hook(module)
        self._optimizer = torch.optim.SGD(module.parameters())

    def start(self) -> None:
        """End the step after which the round is due. Without a delay, the round is applied too."""
        self.rounds.step = self.impl.algorithm.inner_steps - 1
        self._after_step(self._optimizer)

    def apply(self) -> None:
        self.impl.finish_round()

    @property
    def has_differences(self) -> bool:
        """Whether a round has still to be applied. Waits until it is received."""
        has_differences = self.impl.state_dict()["has_differences"]
        assert isinstance(has_differences, bool)
        return has_differences


def on_ranks(body: Any, *, overlaps: bool, has_feedback: bool = False, delay: int = 1) -> list[Any]:
    algorithm = tb.DiLoCoAlgorithm(
        4,
        outer_optimizer=half_sgd,
        compression=Cast() if has_feedback else None,
        error_feedback=has_feedback,
        delay=delay if overlaps else 0,
    )

    def run(group: dist.ProcessGroup) -> Any:
        module = Shared()
        with running(group, algorithm, module=module) as (_, impl):
            return body(group.rank(), module, Component(impl, module))

    return run_ranks(2, run)


def train(module: nn.Module, rank: int, seed: int = 0) -> Weights:
    """Apply this rank's steps; return by how much they change each weight."""
    changes = {
        name: dyadic(*weight.shape, seed=1000 * rank + 10 * seed + number, num_bits=4, dtype=weight.dtype)
        for number, (name, weight) in enumerate(weights_of(module).items())
    }
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.add_(changes[name])
    return changes


def test_weights_become_the_shadow_weights() -> None:
    """Which are in float32, whatever the dtype of the weights."""

    def body(rank: int, module: Shared, component: Component) -> tuple[Weights, Weights]:
        train(module, rank)
        component.start()
        assert not component.has_differences
        return weights_of(module), component.shadow.state_dict()["theta"]

    first, second = (train(Shared(), rank) for rank in range(2))
    expected = {
        name: weight.float() + (1.0 if name == "running" else LR) * (first[name].float() + second[name].float()) / 2
        for name, weight in weights_of(Shared()).items()
    }
    for weights, theta in on_ranks(body, overlaps=False):
        assert_same_weights([weights, {name: value.to(weights[name].dtype) for name, value in expected.items()}])
        assert_same_weights([theta, expected])


def test_loaded_weights_stay_unchanged() -> None:
    """A round in flight changes neither loaded weights nor, after a state was loaded, any weights."""

    def body(rank: int, module: Shared, component: Component) -> None:
        state = copy.deepcopy(component.impl.state_dict())
        for loads_state in (False, True):
            train(module, rank)
            component.start()
            if loads_state:
                component.impl.load_state_dict(state)
            else:
                values = {name: weights_of(Shared())[name] for name in ("first", "running")}
                module.load_state_dict(values, strict=False)
                component.impl.weights_loaded(values)
            loaded = weights_of(module)
            assert component.has_differences != loads_state
            component.apply()
            after = weights_of(module)
            for name in loaded:
                assert torch.equal(after[name], loaded[name]) == (loads_state or name in {"first", "running"}), name
            theta = component.shadow.state_dict()["theta"]
            assert torch.equal(theta["first"], (state["theta"] if loads_state else loaded)["first"])
            assert torch.equal(theta["second"], state["theta"]["second"]) == loads_state

    on_ranks(body, overlaps=True)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "is_dropped"),
    [
        ("first", torch.nan, True),
        ("second", torch.inf, True),
        ("running", torch.nan, True),
        ("running", -torch.inf, False),
    ],
)
def test_a_round_that_is_not_finite_is_dropped_on_all_ranks(
    name: str, value: float, is_dropped: bool, overlaps: bool
) -> None:
    """The round has no effect, and each rank warns once. A buffer may contain -inf."""

    def body(rank: int, module: Shared, component: Component) -> None:
        before = copy.deepcopy(component.shadow.state_dict())
        for number in range(1, 3):
            train(module, rank)
            if rank == 1:
                with torch.no_grad():
                    module.state_dict()[name].view(-1)[0] = value
            own = weights_of(module)
            component.start()
            component.apply()
            assert component.impl.num_dropped == (number if is_dropped else 0)
            assert not component.has_differences
            if is_dropped:
                for key, weight in weights_of(module).items():
                    assert torch.equal(weight.nan_to_num(), own[key].nan_to_num())
                assert_same_weights([component.shadow.state_dict()["theta"], before["theta"]])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(body, overlaps=overlaps)
    messages = [str(warning.message) for warning in caught if "is dropped on all ranks" in str(warning.message)]
    assert len(messages) == (2 if is_dropped else 0)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.filterwarnings("ignore:torchbagua. .*dropped")
def test_a_round_that_is_applied_commits_its_residuals(overlaps: bool) -> None:
    def body(rank: int, module: Shared, component: Component) -> list[torch.Tensor]:
        sent = []
        for number in range(3):
            with torch.no_grad():
                module.first.copy_(dyadic(5, 3, seed=50 + 10 * number + rank))
                if number == 1 and rank == 0:
                    module.first[0, 0] = torch.nan
            component.start()
            sent.append(component.impl.state_dict()["residuals"]["sent"]["first"])
            component.apply()
        return sent

    for first, dropped, third in on_ranks(body, overlaps=overlaps, has_feedback=True):
        assert first.any()
        assert torch.equal(first, dropped)
        assert not torch.equal(first, third)


def test_new_buckets_keep_the_shadow_weights_and_residuals() -> None:
    """Whatever steps the weights have taken since the last round. Parameters that have left have no residuals."""

    def body(rank: int, module: Shared, component: Component) -> None:
        impl = component.impl
        for number in range(2):
            train(module, rank, seed=number)
            component.start()
            component.apply()
        train(module, rank, seed=2)
        before, own = copy.deepcopy(impl.state_dict()), weights_of(module)
        impl.reset()
        assert_same_weights([weights_of(module), own])
        after = impl.state_dict()
        assert_same_weights([after["theta"], before["theta"]])
        assert_same_weights([after["residuals"]["sent"], before["residuals"]["sent"]])
        assert impl.rounds.weights.follow(["first"])
        impl.reset()
        assert impl.state_dict()["residuals"]["sent"].keys() == {"first"}

    on_ranks(body, overlaps=True, has_feedback=True)


def test_a_failed_round_raises_at_the_end_of_the_step_in_which_it_fails() -> None:
    """Not only when its delay is over."""

    def body(rank: int, module: Shared, component: Component) -> None:
        impl, inner = component.impl, torch.optim.SGD(module.parameters(), lr=0.1)
        if rank == 1:
            impl.runner.process_group.fail()
            return
        component.start()
        deadline = time.monotonic() + 20
        while not impl.runner.lane.has_failed and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(tb.CommunicationError):
            impl.init_post_optimizer_step_hook(module)(inner)

    on_ranks(body, overlaps=True, delay=3)
