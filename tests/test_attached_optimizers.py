"""Optimizers in users' loops: wrapped, several at once, or attached but never stepped."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from averaging import RARELY, Weights, assert_same_weights, batches, weights_of
from ranks import run_ranks
from training import build


def clear(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def zero(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def keep(optimizer: torch.optim.Optimizer) -> None:
    """Accumulate gradients, and clip them."""
    nn.utils.clip_grad_norm_([parameter for group in optimizer.param_groups for parameter in group["params"]], 1.0)


@pytest.mark.parametrize(
    ("name", "between", "trains", "is_error"),
    [
        *((name, clear, True, True) for name in RARELY),
        ("decentralized", zero, True, True),
        ("decentralized", keep, True, False),
        ("decentralized", clear, False, False),
    ],
)
def test_an_attached_optimizer_that_is_never_stepped(
    name: str, between: Callable[[torch.optim.Optimizer], None], trains: bool, is_error: bool
) -> None:
    """The loop steps a new optimizer after attach, so nothing would be averaged. Accumulation is no error, and neither
    are gradients that no optimizer uses, such as an adversarial attack's."""

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(nn.Linear(3, 3), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        new_optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

        def train() -> int:
            for step in range(60):
                try:
                    ddp(torch.ones(1, 3)).sum().backward()
                except RuntimeError as error:
                    assert "without a step of SGD, which is attached" in str(error)  # noqa: PT017
                    return step
                if trains:
                    new_optimizer.step()
                between(optimizer)
            return 60

        with tb.attach(ddp, optimizer, RARELY[name]):
            num_steps = train()
            assert (num_steps < 50) == is_error
            optimizer.step()  # the end of the accumulation

    run_ranks(2, body)


def test_steps_that_a_grad_scaler_skips_and_closures_that_clear_gradients_are_steps() -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(nn.Linear(3, 3), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, backoff_factor=0.5)
        with tb.attach(ddp, optimizer, RARELY["decentralized"], grad_scaler=scaler):
            for _ in range(60):
                optimizer.zero_grad()
                scaler.scale(ddp(torch.ones(1, 3)).sum() * float("inf")).backward()
                scaler.step(optimizer)
                scaler.update()
        searching = torch.optim.LBFGS(ddp.parameters(), lr=1e-3, max_iter=60, max_eval=60)

        def closure() -> torch.Tensor:
            searching.zero_grad()
            loss = ddp(torch.ones(1, 3)).square().sum()
            loss.backward()
            closure_calls.append(loss)
            return loss

        closure_calls: list[torch.Tensor] = []
        with tb.attach(ddp, searching, RARELY["decentralized"]):
            searching.step(closure)
        assert len(closure_calls) > 50

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torchbagua: LBFGS")
        run_ranks(2, body)


class Forwarding(torch.optim.Optimizer):
    """An optimizer that only forwards calls and has no hooks, as accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class SharedHooks:
    """A wrapper that shares all attributes of the optimizer, as Lightning's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__.update(optimizer.__dict__)
        self.optimizer = optimizer

    step, zero_grad = Forwarding.step, Forwarding.zero_grad


@pytest.mark.parametrize("wrapper", [Forwarding, SharedHooks])
@pytest.mark.parametrize("name", ["qadam", "decentralized"])
def test_optimizers_in_a_wrapper(wrapper: type[Any], name: str) -> None:
    """With observers: the weights are the same as with the bare optimizer."""
    model = build(lambda: nn.Linear(10, 3))

    def body(group: dist.ProcessGroup, wrap: Callable[[Any], Any]) -> Weights:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = wrap(tb.QAdamOptimizer(ddp.parameters(), warmup_steps=2))
        recorder = tb.observe.Recorder()
        algorithm = tb.QAdamAlgorithm(optimizer) if name == "qadam" else tb.Algorithm.init(name)
        data = batches(group.rank())
        with tb.attach(ddp, optimizer, algorithm, observers=[recorder]):
            for _ in range(2):
                optimizer.zero_grad()
                ddp(data()).square().sum().backward()
                optimizer.step()
        assert sum(event.phase == "step" for event in recorder.events) == 2
        return weights_of(ddp.module)

    direct = run_ranks(2, lambda group: body(group, lambda optimizer: optimizer))
    wrapped = run_ranks(2, lambda group: body(group, wrapper))
    assert_same_weights([*direct, *wrapped])


def test_an_optimizer_whose_step_calls_its_parents_step() -> None:
    """torch hooks the parent's step too once the parent has an instance. Both are one step; the outer call ends it."""

    class Decayed(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            if self.fails:
                raise ArithmeticError("no step")
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(0.5)
            return loss

    def body(group: dist.ProcessGroup) -> int:
        ddp = DistributedDataParallel(nn.Linear(3, 3), process_group=group)
        optimizer = Decayed(ddp.parameters(), lr=0.1)
        torch.optim.SGD(ddp.parameters(), lr=0.1)
        with tb.attach(ddp, optimizer, "decentralized") as attachment:
            ddp(torch.full((1, 3), float(group.rank()))).sum().backward()
            optimizer.fails = True
            with pytest.raises(ArithmeticError):
                optimizer.step()
            optimizer.fails = False
            for _ in range(2):
                optimizer.step()
            step = attachment.impl.rounds.step
        return step

    assert run_ranks(2, body) == [2, 2]


def test_an_optimizer_with_a_state_of_another_form() -> None:
    """As a Lookahead's, with weights alongside the inner state; in the end, all ranks have rank 0's."""

    class Slow(torch.optim.SGD):
        def __init__(self, parameters: Any, slow: float) -> None:
            super().__init__(parameters, lr=0.1)
            self.slow = torch.tensor(slow)

        def state_dict(self) -> dict[str, Any]:
            return {"slow": self.slow, "fast": super().state_dict()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.slow = state_dict["slow"]
            super().load_state_dict(state_dict["fast"])

    def body(group: dist.ProcessGroup) -> float:
        ddp = DistributedDataParallel(nn.Linear(3, 3), process_group=group)
        optimizer = Slow(ddp.parameters(), float(group.rank() + 1))
        with tb.attach(ddp, optimizer, "decentralized"):
            ddp(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return float(optimizer.slow)

    assert run_ranks(2, body) == [1.0, 1.0]


@pytest.mark.parametrize("order", [[1, 0], [0, 0, 1], [1, 0, 0, 1]], ids=str)
def test_a_step_ends_when_all_optimizers_have_stepped(order: list[int]) -> None:
    """In any order, and with repeats: each step ends with x += mean(x at its start) - x at its start, as in D-PSGD."""
    model = build(lambda: nn.Sequential(nn.Linear(10, 7), nn.Linear(7, 3)))

    def body(group: dist.ProcessGroup) -> tuple[list[Weights], list[Weights]]:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizers = [torch.optim.SGD(half.parameters(), lr=0.01) for half in ddp.module]
        updated: list[Weights] = []
        for optimizer in optimizers:  # before attach's hooks, so before averaging
            optimizer.register_step_post_hook(lambda *_: updated.append(weights_of(ddp.module)))
        data, starts, ends = batches(group.rank()), [weights_of(ddp.module)], []
        stepped: set[int] = set()
        with tb.attach(ddp, optimizers, tb.DecentralizedAlgorithm()) as attachment:
            for _ in range(3):
                ddp.zero_grad()
                ddp(data()).square().sum().backward()
                for index in order:
                    optimizers[index].step()
                    stepped.add(index)
                    assert (attachment.impl.rounds.step == len(starts)) == (stepped == {0, 1})
                    if stepped == {0, 1}:
                        stepped.clear()
                        ends.append(updated[-1])
                        starts.append(weights_of(ddp.module))
                    else:
                        assert_same_weights([updated[-1], weights_of(ddp.module)])
        return starts, ends

    ranks = run_ranks(2, body)
    num_steps = 6 if order == [1, 0, 0, 1] else 3
    for starts, ends in ranks:
        assert len(ends) == num_steps
        for step, end in enumerate(ends):
            for name, tensor in end.items():
                mean = (ranks[0][0][step][name] + ranks[1][0][step][name]) / 2
                assert torch.equal(starts[step + 1][name], tensor + (mean - starts[step][name]))


@pytest.mark.parametrize("options", [[{}, {"fused": True}]], ids=str)
def test_a_step_ends_when_a_grad_scaler_skips_one_optimizer(options: list[dict[str, Any]]) -> None:
    """On one rank the gradient of one half overflows: all ranks skip that half, and the step still ends."""
    model = build(lambda: nn.Sequential(nn.Linear(10, 7), nn.Linear(7, 3)))

    def body(group: dist.ProcessGroup) -> tuple[list[int], Weights]:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        halves = list(ddp.module)
        optimizers = [
            torch.optim.SGD(half.parameters(), lr=0.01, **keywords)
            for half, keywords in zip(halves, options, strict=True)
        ]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        steps = []
        with tb.attach(ddp, optimizers, tb.DecentralizedAlgorithm(), grad_scaler=scaler) as attachment:
            for step in range(6):
                ddp.zero_grad()
                scaler.scale(ddp(torch.ones(1, 10)).sum()).backward()
                if group.rank() == 1 and step in (1, 2, 4):
                    halves[step % 2].weight.grad.fill_(float("inf"))
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
                steps.append(attachment.impl.rounds.step)
        return steps, weights_of(ddp.module)

    (first, weights), (second, other_weights) = run_ranks(2, body)
    assert first == second == [1, 2, 3, 4, 5, 6]
    assert_same_weights([weights, other_weights])


@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize("overflows", [False, True])
def test_a_skipped_step_of_one_optimizer_does_not_shift_later_rounds(skipped: int, overflows: bool) -> None:
    """The loop skips one optimizer in its second step. Each later training step ends with the second optimizer, even if
    a GradScaler skips the second optimizer in the loop's third step."""
    model = build(lambda: nn.Linear(10, 3))

    def body(group: dist.ProcessGroup) -> list[tuple[list[int], Weights]]:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizers = [torch.optim.SGD([ddp.module.weight], lr=0.01), torch.optim.Adam([ddp.module.bias])]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        data, seen = batches(group.rank()), []
        with tb.attach(ddp, optimizers, tb.DiLoCoAlgorithm(3), grad_scaler=scaler) as attachment:
            for step in range(7):
                ddp.zero_grad()
                scaler.scale(ddp(data()).square().sum()).backward()
                if overflows and step == 2:
                    ddp.module.bias.grad.fill_(torch.inf)
                numbers = []
                for index, optimizer in enumerate(optimizers):
                    if (step, index) != (1, skipped):
                        scaler.step(optimizer)
                    numbers.append(attachment.impl.rounds.step)
                scaler.update()
                seen.append((numbers, weights_of(ddp.module)))
        return seen

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = run_ranks(2, body)
    is_late = skipped == 0
    for step, ((numbers, weights), (_, other_weights)) in enumerate(zip(first, second, strict=True)):
        if step > 2:
            assert numbers == [step - 1, step]
        if step in (3, 6):  # after a round
            assert_same_weights([weights, other_weights])
    assert first[2][0] == ([2, 2] if is_late else [1, 2])
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (2 if is_late and not overflows else 0)
    assert all(
        "Adam stepped after the training step had ended, because SGD, which ended it" in text for text in messages
    )


def test_a_state_that_is_saved_between_the_steps_of_two_optimizers() -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(nn.Linear(3, 3), process_group=group)
        optimizers = [torch.optim.SGD([ddp.module.weight], lr=0.01), torch.optim.Adam([ddp.module.bias])]
        states = []
        with tb.attach(ddp, optimizers, RARELY["diloco"]) as attachment:
            for optimizer in optimizers:
                optimizer.step()
                states.append(attachment.state_dict())
        for state, order, ends in ((states[0], [1], [1]), (states[1], [0, 1], [1, 2]), (states[0], [0, 1], [0, 1])):
            with tb.attach(ddp, optimizers, RARELY["diloco"]) as attachment:
                optimizers[1].step()  # loading must undo this
                attachment.load_state_dict(state)
                for index, end in zip(order, ends, strict=True):
                    optimizers[index].step()
                    assert attachment.impl.rounds.step == end

    run_ranks(2, body)


def test_one_of_two_optimizers_never_steps() -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(nn.Linear(3, 3), process_group=group)
        optimizers = [torch.optim.SGD([ddp.module.weight], lr=0.01), torch.optim.Adam([ddp.module.bias])]
        with tb.attach(ddp, optimizers, RARELY["decentralized"]):
            for _ in range(210):
                optimizers[0].step()

    with pytest.warns(RuntimeWarning, match="SGD has stepped 200 times, but Adam never: nothing is averaged"):
        run_ranks(2, body)
