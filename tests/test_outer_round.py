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
from diloco_oracle import fragments_of
from ranks import run_ranks
from torchbagua.codecs.cast import Cast
from torchbagua.observe import Recorder

LR = 0.5

# A state that another version has saved has these keys too.
STATE_KEYS = {
    *("step", "num_rounds", "theta", "outer", "residuals"),
    *("snapshot_step", "fragment", "has_differences", "differences", "buffer_snapshots"),
}


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

    def __init__(self, impl: Any, module: nn.Module, recorder: Recorder) -> None:
        self.impl = impl
        self.shadow = impl.shadow
        self.rounds = impl.rounds
        self.recorder = recorder
        self._after_step = impl.init_post_optimizer_step_hook(module)
        self._optimizer = torch.optim.SGD(module.parameters())

    def start(self, fragment: int = 0) -> None:
        """End the step after which the round of this fragment is due. Without a delay, the round is applied too."""
        algorithm = self.impl.algorithm
        self.rounds.step = (fragment + 1) * algorithm.inner_steps // algorithm.fragments - 1
        self._after_step(self._optimizer)

    def apply(self) -> None:
        self.impl.finish_round()

    @property
    def has_differences(self) -> bool:
        """Whether a round has still to be applied. Waits until it is received."""
        has_differences = self.impl.state_dict()["has_differences"]
        assert isinstance(has_differences, bool)
        return has_differences


def on_ranks(
    body: Any, *, overlaps: bool, num_fragments: int = 1, has_feedback: bool = False, delay: int = 1
) -> list[Any]:
    algorithm = tb.DiLoCoAlgorithm(
        4,
        outer_optimizer=half_sgd,
        compression=Cast() if has_feedback else None,
        error_feedback=has_feedback,
        fragments=num_fragments,
        delay=delay if overlaps else 0,
    )

    def run(group: dist.ProcessGroup) -> Any:
        module, recorder = Shared(), Recorder()
        with running(group, algorithm, module=module, observers=[recorder]) as (_, impl):
            return body(group.rank(), module, Component(impl, module, recorder))

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


def mean_changes(seed: int = 0) -> Weights:
    first, second = (train(Shared(), rank, seed) for rank in range(2))
    return {name: (change.float() + second[name].float()) / 2 for name, change in first.items()}


def after_round(start: Weights) -> Weights:
    """Return the shadow weights and the mean of buffers after a round that ranks began with `start`."""
    changes = mean_changes()
    return {
        name: (weight.float() + (1.0 if name == "running" else LR) * changes[name]).to(weight.dtype)
        for name, weight in start.items()
    }


def test_weights_become_the_shadow_weights() -> None:
    def body(rank: int, module: Shared, component: Component) -> Weights:
        train(module, rank)
        component.start()
        assert not component.has_differences
        assert component.rounds.num_rounds == 1
        return weights_of(module)

    ranks = on_ranks(body, overlaps=False)
    assert_same_weights([*ranks, after_round(weights_of(Shared()))])


def test_steps_during_a_round_are_kept() -> None:
    """The change since the snapshot is added; a buffer, which decays, stays between its own value and the mean."""

    def body(rank: int, module: Shared, component: Component) -> tuple[Weights, ...]:
        train(module, rank)
        snapshot = weights_of(module)
        component.start()
        train(module, rank, seed=1)
        meanwhile = weights_of(module)
        assert component.has_differences
        assert_same_weights([weights_of(module), meanwhile])
        component.apply()
        assert not component.has_differences
        after = weights_of(module)
        component.apply()
        assert_same_weights([weights_of(module), after])
        return snapshot, meanwhile, after

    expected = after_round(weights_of(Shared()))
    for snapshot, meanwhile, after in on_ranks(body, overlaps=True):
        moved = meanwhile["first"] + (expected["first"] - snapshot["first"])
        assert torch.equal(after["first"], moved)
        mean, own = expected["running"], meanwhile["running"]
        moved = own + (mean - snapshot["running"])
        assert torch.equal(
            after["running"], torch.minimum(torch.maximum(moved, torch.minimum(own, mean)), torch.maximum(own, mean))
        )


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


def test_a_state_contains_the_differences_still_to_be_added() -> None:
    def save(rank: int, module: Shared, component: Component) -> tuple[Any, ...]:
        train(module, rank)
        component.start()
        before, state = weights_of(module), copy.deepcopy(component.impl.state_dict())
        assert state.keys() == STATE_KEYS
        component.apply()
        return state, before, weights_of(module)

    saved = on_ranks(save, overlaps=True)

    def load(rank: int, module: Shared, component: Component) -> None:
        state, before, after = saved[rank]
        for with_tensors in (True, False):
            with torch.no_grad():
                for name, tensor in module.state_dict().items():
                    tensor.copy_(before[name])
            component.impl.load_state_dict({**state, "has_differences": with_tensors})
            assert component.impl.state_dict()["snapshot_step"] == 4
            assert component.has_differences == with_tensors
            component.apply()
            assert_same_weights([weights_of(module), after if with_tensors else before])

    on_ranks(load, overlaps=True)


def test_the_state_of_a_fragment_changes_no_other_fragment() -> None:
    def save(rank: int, module: Shared, component: Component) -> tuple[Any, ...]:
        train(module, rank)
        component.start(1)
        before, state = weights_of(module), copy.deepcopy(component.impl.state_dict())
        assert state["fragment"] == 1
        component.apply()
        return state, before, weights_of(module), fragments_of(component.impl.runner)

    saved = on_ranks(save, overlaps=True, num_fragments=2)

    def load(rank: int, module: Shared, component: Component) -> None:
        state, before, after, by_name = saved[rank]
        with torch.no_grad():
            for name, tensor in module.state_dict().items():
                tensor.copy_(before[name])
        differences = {name: torch.ones_like(value) for name, value in state["differences"].items()}
        differences |= {name: value for name, value in state["differences"].items() if by_name.get(name, 1) == 1}
        component.impl.load_state_dict({**state, "differences": differences})
        component.apply()
        assert_same_weights([weights_of(module), after])

    on_ranks(load, overlaps=True, num_fragments=2)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_fragment_is_averaged_separately(overlaps: bool) -> None:
    """Observers are notified of the fragment when it is applied."""

    def body(rank: int, module: Shared, component: Component) -> None:
        fragment = fragments_of(component.impl.runner)["first"]
        train(module, rank)
        before = weights_of(module)
        component.start(fragment)
        component.rounds.step += 2
        component.apply()
        after = weights_of(module)
        assert not torch.equal(after["first"], before["first"])
        assert torch.equal(after["second"], before["second"])
        applied = [event.values for event in component.recorder.events if event.phase == "apply" and event.values]
        assert applied == [{"rounds": 1, "fragment": fragment, "staleness in steps": 2 if overlaps else 0}]
        theta = component.shadow.state_dict()["theta"]
        component.start(1 - fragment)
        component.apply()
        assert torch.equal(component.shadow.state_dict()["theta"]["first"], theta["first"])
        assert not torch.equal(component.shadow.state_dict()["theta"]["second"], theta["second"])

    on_ranks(body, overlaps=overlaps, num_fragments=2)


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
