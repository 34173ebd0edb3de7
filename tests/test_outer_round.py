"""OuterRound: the outer optimizer steps with the mean of outer gradients, and weights follow, at once or later.

Outer gradients are dyadic and in full precision, and the outer optimizer is SGD with a learning rate of 1/2, so all
results are exact.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchbagua as tb
from averaging import Weights, assert_same_weights, weights_of
from components import WeightComponent, dyadic, running
from ranks import run_ranks
from torchbagua.algorithms.weights.diloco import IN_FLIGHT, OuterRound
from torchbagua.algorithms.weights.fragments import Fragments
from torchbagua.algorithms.weights.outer_residuals import OuterResiduals
from torchbagua.algorithms.weights.rounds import SynchronousRounds
from torchbagua.algorithms.weights.shadow_weights import ShadowWeights
from torchbagua.codecs.cast import Cast, Identity
from torchbagua.observe import Recorder
from torchbagua.runtime.weight_buckets import WeightBucket

LR = 0.5


class Shared(nn.Module):
    """The weights from which all ranks start: parameters, one of them in another dtype, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(dyadic(5, 3, seed=1))
        self.second = nn.Parameter(dyadic(4, seed=2, num_bits=4, dtype=torch.bfloat16))
        self.register_buffer("running", dyadic(3, seed=3))


class Component:
    """A round, and the objects it works with."""

    def __init__(self, runner: tb.extend.Runner, *, overlaps: bool, num_fragments: int, has_feedback: bool) -> None:
        self.tracer = runner.tracer
        self.recorder = Recorder()
        self.rounds = SynchronousRounds(runner, runner.algorithm)
        self.weights = self.rounds.weights
        self.fragments = Fragments(num_fragments, interval=num_fragments)
        self.codec = runner.codec
        self.residuals = OuterResiduals(runner, None, has_feedback=has_feedback)
        self.shadow = ShadowWeights("a test", lambda shadows: torch.optim.SGD(shadows, lr=LR))
        self.round = OuterRound(
            self.rounds, self.shadow, self.residuals, self.fragments, runner.tracer, overlaps=overlaps
        )

    def append(self, bucket: tb.extend.BaguaBucket) -> None:
        assert isinstance(bucket, WeightBucket)
        if not self.shadow.tensors:  # this is the first bucket
            self.fragments.assign([tensor for each in self.weights if not each.are_buffers for tensor in each.tensors])
            self.shadow.rebuild(self.weights)
        if bucket.are_buffers:
            bucket.append_centralized_synchronous_op()
            return
        gradient = self.shadow[bucket].gradient
        residuals = self.residuals.of_bucket(bucket, gradient)
        gradient.append_centralized_synchronous_op(compression=self.codec, error_feedback=residuals)

    def start(self, fragment: int | None = None) -> None:
        self.round.start([each for each in self.weights if fragment in (None, self.fragments.of_bucket(each))])


def on_ranks(body: Any, *, overlaps: bool, num_fragments: int = 1, has_feedback: bool = False) -> list[Any]:
    def make(runner: tb.extend.Runner) -> Component:
        return Component(runner, overlaps=overlaps, num_fragments=num_fragments, has_feedback=has_feedback)

    codec = Cast() if has_feedback else Identity()
    algorithm = WeightComponent(make=make, append=Component.append, codec=codec)

    def run(group: dist.ProcessGroup) -> Any:
        module, recorder = Shared(), Recorder()
        with running(group, algorithm, module=module, observers=[recorder]) as (_, component):
            component.recorder = recorder
            return body(group.rank(), module, component)

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
        assert component.round.is_in_flight
        component.round.receive()
        assert not component.round.is_in_flight
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
        component.round.receive()
        assert_same_weights([weights_of(module), meanwhile])
        assert component.round.is_in_flight
        component.round.apply()
        assert not component.round.is_in_flight
        after = weights_of(module)
        component.round.apply()
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
    """Loaded weights, or all weights after `abandon`, do not change. The shadow weights step regardless."""

    def body(rank: int, module: Shared, component: Component) -> None:
        for drops in (True, False):
            train(module, rank)
            component.start()
            loaded = weights_of(module)
            theta = copy.deepcopy(component.shadow.state_dict()["theta"])
            if drops:
                component.round.drop(["first", "running"])
            else:
                component.round.abandon()
            component.round.apply()
            after = weights_of(module)
            for name in loaded:
                assert torch.equal(after[name], loaded[name]) == (not drops or name in {"first", "running"}), name
            assert not torch.equal(component.shadow.state_dict()["theta"]["first"], theta["first"])

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
            component.round.apply()
            assert component.round.num_dropped == (number if is_dropped else 0)
            assert not component.round.is_in_flight
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
@pytest.mark.filterwarnings("ignore:torchbagua. the round after")
def test_a_round_that_is_applied_commits_its_residuals(overlaps: bool) -> None:
    def body(rank: int, module: Shared, component: Component) -> list[torch.Tensor]:
        sent = []
        for number in range(3):
            with torch.no_grad():
                module.first.copy_(dyadic(5, 3, seed=50 + 10 * number + rank))
                if number == 1 and rank == 0:
                    module.first[0, 0] = torch.nan
            component.start()
            component.round.receive()
            sent.append(component.residuals.state_dict()["sent"]["first"])
            component.round.apply()
        return sent

    for first, dropped, third in on_ranks(body, overlaps=overlaps, has_feedback=True):
        assert first.any()
        assert torch.equal(first, dropped)
        assert not torch.equal(first, third)


def test_a_state_contains_the_differences_still_to_be_added() -> None:
    def save(rank: int, module: Shared, component: Component) -> tuple[Any, ...]:
        train(module, rank)
        component.rounds.step = 7
        component.start()
        before, state = weights_of(module), component.round.state_dict()
        assert tuple(state) == IN_FLIGHT
        component.round.apply()
        return state, before, weights_of(module)

    saved = on_ranks(save, overlaps=True)

    def load(rank: int, module: Shared, component: Component) -> None:
        state, before, after = saved[rank]
        for with_tensors in (True, False):
            with torch.no_grad():
                for name, tensor in module.state_dict().items():
                    tensor.copy_(before[name])
            component.round.load_state_dict({**state, "has_differences": with_tensors})
            assert component.round.snapshot_step == 7
            assert component.round.is_in_flight == with_tensors
            component.round.apply()
            assert_same_weights([weights_of(module), after if with_tensors else before])

    on_ranks(load, overlaps=True)


def test_the_state_of_a_fragment_changes_no_other_fragment() -> None:
    def save(rank: int, module: Shared, component: Component) -> tuple[Any, ...]:
        train(module, rank)
        component.start(1)
        before, state = weights_of(module), component.round.state_dict()
        assert state["fragment"] == 1
        component.round.apply()
        return state, before, weights_of(module), component.fragments.by_name

    saved = on_ranks(save, overlaps=True, num_fragments=2)

    def load(rank: int, module: Shared, component: Component) -> None:
        state, before, after, by_name = saved[rank]
        with torch.no_grad():
            for name, tensor in module.state_dict().items():
                tensor.copy_(before[name])
        differences = {name: torch.ones_like(value) for name, value in state["differences"].items()}
        differences |= {name: value for name, value in state["differences"].items() if by_name.get(name, 1) == 1}
        component.round.load_state_dict({**state, "differences": differences})
        component.round.apply()
        assert_same_weights([weights_of(module), after])

    on_ranks(load, overlaps=True, num_fragments=2)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_fragment_is_averaged_separately(overlaps: bool) -> None:
    """Observers are notified of the fragment when it is applied."""

    def body(rank: int, module: Shared, component: Component) -> None:
        fragment = component.fragments.by_name["first"]
        train(module, rank)
        component.rounds.step = 3
        component.start(fragment)
        before = weights_of(module)
        component.rounds.step = 5
        component.round.apply()
        after = weights_of(module)
        assert not torch.equal(after["first"], before["first"])
        assert torch.equal(after["second"], before["second"])
        component.tracer.deliver()
        applied = [event.values for event in component.recorder.events if event.phase == "apply" and event.values]
        assert applied == [{"rounds": 1, "fragment": fragment, "staleness in steps": 2}]
        theta = component.shadow.state_dict()["theta"]
        component.start(1 - fragment)
        component.round.apply()
        assert torch.equal(component.shadow.state_dict()["theta"]["first"], theta["first"])
        assert not torch.equal(component.shadow.state_dict()["theta"]["second"], theta["second"])

    on_ranks(body, overlaps=overlaps, num_fragments=2)
