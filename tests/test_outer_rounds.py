"""Rounds of DiLoCo: how weights, shadow weights and residuals follow them, and what drops them.

Outer gradients are dyadic, and the outer optimizer is SGD with a learning rate of 1/2 or 1, so results are exact.
test_diloco.py compares trainings with the oracle, and test_weight_loads.py loads weights between rounds.
"""

import copy
import time
import warnings
from functools import partial
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


class InFloat32(Cast):
    """bfloat16 for float32 alone."""

    def encodes(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32


class Shared(nn.Module):
    """The weights from which all ranks start: parameters of three dtypes, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(dyadic(5, 3, seed=1))
        self.second = nn.Parameter(dyadic(4, seed=2, num_bits=4, dtype=torch.bfloat16))
        self.wide = nn.Parameter(dyadic(6, seed=4, dtype=torch.float64))
        self.register_buffer("running", dyadic(3, seed=3))


class Rounds:
    """The rounds of an impl on one rank, which the test starts and applies."""

    def __init__(self, rank: int, module: nn.Module, impl: Any) -> None:
        self.rank, self.module, self.impl = rank, module, impl
        self.end_step = partial(impl.init_post_optimizer_step_hook(module), torch.optim.SGD(module.parameters()))

    def train(self, seed: int = 0) -> Weights:
        """Apply this rank's steps; return by how much they change each weight."""
        changes = {}
        for number, (name, weight) in enumerate(weights_of(self.module).items()):
            num_bits = 4 if weight.dtype == torch.bfloat16 else 10
            seeds = 1000 * self.rank + 10 * seed + number
            changes[name] = dyadic(*weight.shape, seed=seeds, num_bits=num_bits, dtype=weight.dtype)
        with torch.no_grad():
            for name, tensor in self.module.state_dict().items():
                tensor.add_(changes[name])
        return changes

    def start(self) -> None:
        """End the step after which the round is due. Without a delay, the round is applied too."""
        self.impl.rounds.step = self.impl.algorithm.inner_steps - 1
        self.end_step()

    def run(self, seed: int = 0) -> Weights:
        changes = self.train(seed)
        self.start()
        self.impl.finish_round()
        return changes

    def theta(self) -> Weights:
        theta: Weights = self.impl.shadow.state_dict()["theta"]
        return theta

    def sent(self) -> Weights:
        """Return the residuals of what this rank has sent."""
        sent: Weights = self.impl.state_dict()["residuals"]["sent"]
        return sent


def on_ranks(body: Any, *, delay: int = 0, outer_lr: float = 0.5, has_feedback: bool = True) -> list[Any]:
    algorithm = tb.DiLoCoAlgorithm(
        4, outer_lr, 0.0, False, compression=InFloat32() if has_feedback else None, bucket_cap_mb=0.0001, delay=delay
    )

    def run(group: dist.ProcessGroup) -> Any:
        module = Shared()
        with running(group, algorithm, module=module) as (_, impl):
            return body(Rounds(group.rank(), module, impl))

    return run_ranks(2, run)


def test_weights_become_the_shadow_weights() -> None:
    """Which are in float32, or in float64 for float64 weights."""

    def body(rounds: Rounds) -> tuple[Weights, Weights, Weights]:
        return rounds.run(), weights_of(rounds.module), rounds.theta()

    (first, *_), (second, *_) = ranks = on_ranks(body, has_feedback=False)
    expected = {}
    for name, weight in weights_of(Shared()).items():
        dtype = torch.promote_types(weight.dtype, torch.float32)
        mean = (first[name].to(dtype) + second[name].to(dtype)) / 2
        expected[name] = weight.to(dtype) + (1.0 if name == "running" else 0.5) * mean
    for _, weights, theta in ranks:
        assert_same_weights([weights, {name: value.to(weights[name].dtype) for name, value in expected.items()}])
        assert_same_weights([theta, expected])


@pytest.mark.filterwarnings("ignore:torchbagua:RuntimeWarning")
@pytest.mark.parametrize("resets", [False, True])
def test_means_and_residuals_sum_to_the_gradients(resets: bool) -> None:
    """Bitwise, also if buckets are rebuilt between rounds; weights that the codec does not encode have no residual."""

    def body(rounds: Rounds) -> tuple[Weights, Weights, Weights]:
        start, moved = rounds.theta(), {name: torch.zeros(theta.shape) for name, theta in rounds.theta().items()}
        for number in range(3):
            for name, change in rounds.run(number).items():
                if name in moved:
                    moved[name] += change
            if resets:
                before = copy.deepcopy(rounds.impl.state_dict())
                own = weights_of(rounds.module)
                rounds.impl.reset()
                assert_same_weights([weights_of(rounds.module), own])
                after = rounds.impl.state_dict()
                assert_same_weights([after["theta"], before["theta"]])
                assert_same_weights([after["residuals"]["sent"], before["residuals"]["sent"]])
        state = rounds.impl.state_dict()["residuals"]
        left = {name: residual + 2 * state["mean"][name] for name, residual in state["sent"].items()}
        received = {name: theta - start[name] for name, theta in rounds.theta().items()}
        if resets:  # parameters that have left have no residuals
            assert rounds.impl.rounds.weights.follow(["first"])
            rounds.impl.reset()
            assert rounds.sent().keys() == {"first"}
        return moved, received, left

    ranks = on_ranks(body, outer_lr=1.0)
    assert ranks[0][2].keys() == {"first", "second"}
    for name in ("first", "wide"):
        moved, left = (sum(rank[index].get(name, torch.zeros(())) for rank in ranks) for index in (0, 2))
        assert left.any() == (name == "first")
        # A residual of an outer gradient, theta - w, has the other sign than the moves of w.
        assert torch.equal(2 * ranks[0][1][name] - left, moved)


@pytest.mark.parametrize(
    ("name", "value", "is_dropped", "delay"),
    [
        ("first", torch.nan, True, 0),
        ("second", torch.inf, True, 1),
        ("running", torch.nan, True, 1),
        ("running", -torch.inf, False, 0),
    ],
)
def test_a_round_that_is_not_finite_is_dropped_on_all_ranks(
    name: str, value: float, is_dropped: bool, delay: int
) -> None:
    """It has no effect and commits no residuals, and each rank warns once. A buffer may contain -inf."""

    def body(rounds: Rounds) -> None:
        rounds.run(5)
        before, residuals = rounds.theta(), rounds.sent()
        assert residuals["first"].any()
        for number in range(1, 3):
            rounds.train(number)
            if rounds.rank == 1:
                with torch.no_grad():
                    rounds.module.state_dict()[name].view(-1)[0] = value
            own = weights_of(rounds.module)
            rounds.start()
            assert torch.equal(rounds.sent()["first"], residuals["first"]) == (is_dropped or delay > 0)
            rounds.impl.finish_round()
            assert rounds.impl.num_dropped == (number if is_dropped else 0)
            assert not rounds.impl.state_dict()["has_differences"]
            assert torch.equal(rounds.sent()["first"], residuals["first"]) == is_dropped
            if is_dropped:
                for key, weight in weights_of(rounds.module).items():
                    assert torch.equal(weight.nan_to_num(), own[key].nan_to_num())
                assert_same_weights([rounds.theta(), before])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(body, delay=delay)
    messages = [str(warning.message) for warning in caught if "is dropped on all ranks" in str(warning.message)]
    assert len(messages) == (2 if is_dropped else 0)


def test_a_failed_round_raises_at_the_end_of_the_step_in_which_it_fails() -> None:
    """Not only when its delay is over."""

    def body(rounds: Rounds) -> None:
        impl = rounds.impl
        if rounds.rank == 1:
            impl.runner.process_group.fail()
            return
        rounds.start()
        deadline = time.monotonic() + 20
        while not impl.runner.lane.has_failed and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(tb.CommunicationError):
            rounds.end_step()

    on_ranks(body, delay=3)
