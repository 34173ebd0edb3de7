"""Steps of optimizers: what counts as a step, which optimizers end a training step, and what algorithms then do."""

import copy
import gc
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchbagua as tb
from averaging import RARELY, Weights, assert_same_weights, batches, weights_of
from caught import torchbagua_warnings
from ranks import leave_by_exception, on_each_rank, run_ranks
from torchbagua.algorithms.weights.decentralized import DecentralizedAlgorithmImpl
from torchbagua.observe import Recorder
from training import build

MODEL = build(lambda: nn.Linear(10, 3))
HALVES = build(lambda: nn.Sequential(nn.Linear(10, 7), nn.Linear(7, 3)))
Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class LoggingAlgorithm(tb.Algorithm):
    """Plain averaging that logs the calls of its methods."""

    def make_impl(self, runner: tb.extend.Runner) -> "LoggingImpl":
        return LoggingImpl(runner)


class LoggingImpl(tb.AlgorithmImpl):
    """Has a log of the calls of its methods, and the parameters of each step that it is notified of."""

    def __init__(self, runner: tb.extend.Runner) -> None:
        super().__init__(runner)
        self.log: list[str] = []
        self.resets = 0
        self.steps: list[list[tuple[int, ...]]] = []
        runner.on_step_taken(self.note)

    def note(self, parameters: Sequence[torch.Tensor]) -> None:
        self.steps.append([tuple(parameter.shape) for parameter in parameters])

    def need_reset(self) -> bool:
        self.log.append("need_reset")
        self.resets += 1
        return self.resets == 4

    def init_operations(self, module: nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
        if module is not None:
            names = {tensor.name for tensor in bucket.tensors}
            assert names <= {name for name, _ in module.named_parameters()}
        self.log.append("init_operations")
        bucket.append_centralized_synchronous_op()

    def init_forward_pre_hook(self, module: nn.Module) -> Callable[[Any], None]:
        return lambda inputs: self.log.append("forward")

    def init_backward_hook(self, module: nn.Module) -> Callable[[str, torch.Tensor], None]:
        return lambda name, parameter: self.log.append(name)

    def init_post_backward_hook(self, module: nn.Module) -> Callable[[], None]:
        return lambda: self.log.append("backward end")

    def init_post_optimizer_step_hook(self, module: nn.Module) -> Callable[[Optimizer], None]:
        return lambda optimizer: self.log.append(type(optimizer).__name__)

    def state_dict(self) -> dict[str, Any]:
        return {"resets": self.resets}

    def load_state_dict(self, state: Any) -> None:
        self.resets = state["resets"]


class Checkpointed(nn.Module):
    """Runs its first layer again in backward, in a nested backward; DDP ignores the bias of its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["last.bias"])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = checkpoint(self.first, x, use_reentrant=True)
        return {"y": self.last(x), "z": x.sum()}


def test_every_method_of_an_impl_is_called_at_the_right_time() -> None:
    """The step of the later of two optimizers ends a training step; a parameter that DDP ignores gets no hook."""
    model = build(Checkpointed)

    def body(group: dist.ProcessGroup) -> list[str]:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizers = [
            torch.optim.SGD(ddp.module.first.parameters(), lr=0.1),
            torch.optim.Adam(ddp.module.last.parameters()),
        ]

        def step(number: int) -> None:
            out = ddp(torch.ones(2, 4, requires_grad=True))
            (out["y"].sum() + out["z"]).backward()
            for optimizer in optimizers if number % 2 == 0 else reversed(optimizers):
                optimizer.step()

        with tb.attach(ddp, optimizers, LoggingAlgorithm()) as attachment:
            for number in range(5):
                step(number)
            ddp.eval()(torch.ones(2, 4))
            ddp.train()
            with torch.no_grad():
                ddp(torch.ones(2, 4))
            assert attachment.state_dict()["impl"] == {"resets": 5}
        step(5)
        return attachment.impl.log

    for log in run_ranks(2, body):
        steps = [step.split() for step in " ".join(log).replace("forward", "|forward").split("|")[1:]]
        every_step = ["Adam", "SGD", "backward", "end", "first.bias", "first.weight", "forward", "last.weight"]
        for number, step in enumerate(steps):
            calls = [call for call in step if call not in ("init_operations", "need_reset")]
            assert sorted([*calls, "Adam", "SGD"]) == sorted([*every_step, calls[-1]])
            assert calls[0] == "forward"
            assert calls[-3:] == ["backward", "end", "SGD" if number % 2 else "Adam"]
            assert step.count("need_reset") == 1
        # The bucket is new; DDP rebuilds its buckets; no change; need_reset returned True; no change.
        assert ["init_operations" in step for step in steps] == [True, True, False, True, False]


# What counts as a step.


class Forwarding(Optimizer):
    """An optimizer that only forwards calls and has no hooks, as accelerate's."""

    def __init__(self, optimizer: Optimizer) -> None:
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

    def __init__(self, optimizer: Optimizer) -> None:
        self.__dict__.update(optimizer.__dict__)
        self.optimizer = optimizer

    step, zero_grad = Forwarding.step, Forwarding.zero_grad


class Nested(torch.optim.SGD):
    """Calls the step of its parent class, which torch hooks too if it has an instance. Its first step raises."""

    num_calls = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.num_calls += 1
        if self.num_calls == 1:
            raise ArithmeticError
        return loss


class OwnScaling(torch.optim.SGD):
    """As torch asked of custom fused optimizers, and still supports."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: torch.amp.GradScaler) -> None:
        if not any(grad_scaler._check_inf_per_device(self).values()):
            super().step()


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def backward(ddp: nn.Module, factor: float | torch.Tensor = 1.0) -> torch.Tensor:
    ddp.zero_grad()
    loss = ddp(torch.ones(2, 10)).sum()
    (loss * factor).backward()
    return loss.detach()


BOTH = [(3, 10), (3,)]


@pytest.mark.filterwarnings("ignore:torchbagua. LBFGS", "ignore::FutureWarning")
@pytest.mark.parametrize("is_attached", [True, False])
@pytest.mark.parametrize(
    ("make", "is_scaled", "num_steps"),
    [
        (sgd, False, 5),
        (lambda parameters: Forwarding(sgd(parameters)), False, 5),
        (lambda parameters: SharedHooks(sgd(parameters)), False, 5),
        (lambda parameters: Nested(parameters, lr=0.1), False, 4),
        (lambda parameters: torch.optim.LBFGS(parameters, lr=1e-3, max_iter=4), False, 5),
        (torch.optim.Adam, True, 3),
        (lambda parameters: torch.optim.Adam(parameters, fused=True), True, 3),  # called for skipped steps too
        (lambda parameters: OwnScaling(parameters, lr=0.1), True, 3),
    ],
)
@on_each_rank(2)
def test_algorithms_are_notified_once_of_each_step_that_is_taken(
    group: dist.ProcessGroup, make: Callable[[Any], Any], is_scaled: bool, num_steps: int, is_attached: bool
) -> None:
    """With attach or with the standalone hook. GradScaler skips steps 1 and 3; LBFGS calls its closure repeatedly."""
    ddp = DistributedDataParallel(copy.deepcopy(MODEL), process_group=group)
    optimizer, scaler = make(ddp.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0, enabled=is_scaled)
    runner: Any
    if is_attached:
        runner = tb.attach(ddp, optimizer, LoggingAlgorithm()).runner
    else:
        runner = LoggingAlgorithm().reify(group, optimizer=optimizer)
        ddp.register_comm_hook(runner, tb.comm_hook)
    for step in range(5):
        backward(ddp, scaler.scale(torch.tensor(torch.inf if is_scaled and step in (1, 3) else 1.0)))
        with suppress(ArithmeticError):
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(lambda: backward(ddp))
            else:
                scaler.step(optimizer)
        scaler.update()
    backward(ddp)  # no step follows
    assert runner.impl.steps == [BOTH] * num_steps
    runner.close()


@pytest.mark.parametrize("wrapper", [Forwarding, SharedHooks])
def test_a_qadam_optimizer_in_a_wrapper(wrapper: type[Any]) -> None:
    """With observers: the weights are the same as with the bare optimizer."""

    def body(group: dist.ProcessGroup, wrap: Callable[[Any], Any]) -> Weights:
        ddp = DistributedDataParallel(copy.deepcopy(MODEL), process_group=group)
        optimizer, recorder = wrap(tb.QAdamOptimizer(ddp.parameters(), warmup_steps=2)), tb.observe.Recorder()
        data = batches(group.rank())
        with tb.attach(ddp, optimizer, tb.QAdamAlgorithm(optimizer), observers=[recorder]):
            for _ in range(3):
                optimizer.zero_grad()
                ddp(data()).square().sum().backward()
                optimizer.step()
        assert sum(event.phase == "step" for event in recorder.events) == 3
        return weights_of(ddp.module)

    direct = run_ranks(2, lambda group: body(group, lambda optimizer: optimizer))
    assert_same_weights([*direct, *run_ranks(2, lambda group: body(group, wrapper))])


def test_each_of_several_optimizers_reports_its_parameters() -> None:
    def body(group: dist.ProcessGroup) -> list[list[tuple[int, ...]]]:
        ddp = DistributedDataParallel(copy.deepcopy(MODEL), process_group=group)
        optimizers = [sgd([ddp.module.weight]), sgd([ddp.module.bias])]
        with tb.attach(ddp, optimizers, LoggingAlgorithm()) as attachment:
            for order in ((0, 1), (1,), (0, 0)):
                backward(ddp)
                for index in order:
                    optimizers[index].step()
        optimizers[0].step()  # the algorithm is no longer notified
        return attachment.impl.steps

    weight, bias = [(3, 10)], [(3,)]
    assert run_ranks(2, body) == [[weight, bias, bias, weight, weight]] * 2


def test_a_weight_algorithm_may_keep_state_and_is_notified_of_steps_too() -> None:
    class Steps(tb.DecentralizedAlgorithm):
        def make_impl(self, runner: tb.extend.WeightRunner) -> tb.AlgorithmImpl:
            return StepsImpl(runner)

    class StepsImpl(DecentralizedAlgorithmImpl):
        def __init__(self, runner: tb.extend.WeightRunner) -> None:
            super().__init__(runner)
            self.residuals = runner.keep(tb.extend.residual_state("Steps"))
            self.steps: list[list[tuple[int, ...]]] = []
            runner.on_step_taken(lambda parameters: self.steps.append([tuple(each.shape) for each in parameters]))

    def body(group: dist.ProcessGroup) -> None:
        module = copy.deepcopy(MODEL)
        optimizer = sgd(module.parameters())
        with tb.attach(module, optimizer, Steps(), process_group=tb.BaguaProcessGroup(group)) as attachment:
            backward(module)
            optimizer.step()
            assert {"sent", "mean"} <= attachment.runner.state_dict().keys()
        assert attachment.impl.steps == [BOTH]

    run_ranks(1, body)


# The standalone hook, which is notified of steps, or watches an optimizer.


def standalone(
    group: dist.ProcessGroup, *, watches: bool
) -> tuple[DistributedDataParallel, tb.AlgorithmImpl, Optimizer]:
    ddp = DistributedDataParallel(copy.deepcopy(MODEL), process_group=group)
    optimizer = sgd(ddp.parameters())
    impl = tb.ByteGradAlgorithm(error_feedback=True).reify(group, **({"optimizer": optimizer} if watches else {}))
    ddp.register_comm_hook(impl, tb.comm_hook)
    return ddp, impl, optimizer


def test_both_notifications_of_the_standalone_hook_give_equal_weights() -> None:
    """Without any, the second backward raises."""

    def body(group: dist.ProcessGroup) -> tuple[Weights, Weights]:
        notified, watched = standalone(group, watches=False), standalone(group, watches=True)
        for step in range(4):
            for ddp, impl, optimizer in (notified, watched):
                backward(ddp, float(step + group.rank() + 1) / 3)
                optimizer.step()
                if impl is notified[1]:
                    impl.step_taken()
        with pytest.raises(RuntimeError, match=r"step_taken: the runner already watches the steps of SGD; do not call"):
            watched[1].step_taken()
        for use in (notified[1].state_dict, lambda: notified[1].load_state_dict(watched[1].state_dict())):
            with pytest.raises(
                RuntimeError, match=r"no names to save state by; .* reify\(group, optimizer=optimizer\)"
            ):
                use()
        watched[1].load_state_dict(watched[1].state_dict())
        both_ways = r"Call runner\.step_taken\(\) after each step .* reify\(group, optimizer=optimizer\)"
        silent = standalone(group, watches=False)
        backward(silent[0])
        silent[2].step()
        with pytest.raises(RuntimeError, match=f"ByteGradAlgorithm must be notified of the steps.*{both_ways}"):
            backward(silent[0])
        for _, impl, _ in (notified, watched, silent):
            impl.close()
        return weights_of(notified[0].module), weights_of(watched[0].module)

    for notified, watched in run_ranks(2, body):
        assert_same_weights([notified, watched])


def test_a_watched_optimizer_that_does_not_step_warns_once() -> None:
    """Another optimizer steps, so residuals would never be committed.

    Backward passes count from the last step on, and not within a step, where a closure may call any number of them.
    """

    def body(group: dist.ProcessGroup) -> None:
        ddp, impl, optimizer = standalone(group, watches=True)
        unwatched = sgd(ddp.parameters())

        def closure() -> float:
            for _ in range(210):
                backward(ddp)
            return 0.0

        for step in range(500):
            backward(ddp)
            if step == 150:
                optimizer.step(closure)
            else:
                unwatched.step()
            if step == 345:
                assert not caught
        impl.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        run_ranks(1, body)
    assert len(caught) == 1
    assert "ByteGradAlgorithm has seen no step of SGD in 200 synchronized" in str(caught[0].message)


def test_an_optimizer_keeps_no_hook_of_an_impl_that_is_closed_or_forgotten() -> None:
    def num_hooks(optimizer: Optimizer) -> int:
        return len(optimizer._optimizer_step_post_hooks) + len(optimizer._optimizer_step_pre_hooks)

    def body(group: dist.ProcessGroup) -> None:
        optimizer = sgd(nn.Linear(1, 1).parameters())
        for is_closed in (True, False):
            impl = LoggingAlgorithm().reify(group, optimizer=optimizer)
            assert num_hooks(optimizer) == 2
            if is_closed:
                impl.close()
            else:
                del impl
                gc.collect()
            assert num_hooks(optimizer) == 0

    run_ranks(1, body)


# Loops that do not step an attached optimizer.

# Calls of one line; the others are steps, and methods of `Loop`.
CALLS: dict[str, Callable[["Loop"], Any]] = {
    "clear": lambda loop: loop.ddp.zero_grad(),
    "zero": lambda loop: loop.ddp.zero_grad(set_to_none=False),
    "clip": lambda loop: nn.utils.clip_grad_norm_(loop.ddp.parameters(), 1.0),
    "backward": lambda loop: loop.ddp(torch.ones(2, 10)).sum().backward(),
    "evaluate": lambda loop: loop.ddp.eval(),
}


class Loop:
    """Calls by name. `attached` is attached, and `first` too if it is called; the loop created `other` after attach."""

    def __init__(self, group: dist.ProcessGroup, calls: str) -> None:
        self.ddp = DistributedDataParallel(copy.deepcopy(MODEL), process_group=group)
        parameters = list(self.ddp.parameters())
        self.optimizers = {"other": sgd(parameters), "attached": torch.optim.Adam(parameters)}
        if "first" in calls:
            self.optimizers |= {"first": sgd(parameters[:1]), "attached": torch.optim.Adam(parameters[1:])}
        if "search" in calls:
            self.optimizers["attached"] = torch.optim.LBFGS(parameters, lr=1e-3, max_iter=60, max_eval=60)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)

    def call(self, name: str) -> None:
        if name in self.optimizers:
            self.optimizers[name].step(None)
        elif name in CALLS:
            CALLS[name](self)
        else:
            getattr(self, name)()

    def update_by_hand(self) -> None:
        for parameter in self.ddp.parameters():
            parameter.data -= 0.1

    def skipped_step(self) -> None:
        backward(self.ddp, self.scaler.scale(torch.tensor(torch.inf)))
        self.scaler.step(self.optimizers["attached"])
        self.scaler.update()

    def search(self) -> None:
        """Call a closure that clears gradients, repeatedly."""
        losses: list[torch.Tensor] = []

        def closure() -> torch.Tensor:
            losses.append(self.ddp(torch.ones(2, 10)).square().sum())
            self.ddp.zero_grad()
            losses[-1].backward()
            return losses[-1]

        self.optimizers["attached"].step(closure)
        assert len(losses) > 50


UNUSED = "torchbagua: Adam took no step while attached, although weights were trained"


@pytest.mark.parametrize(
    ("name", "calls", "error", "warning"),
    [
        # Nothing would be averaged.
        *((name, "clear backward other " * 50, "without a step of Adam, which is attached", None) for name in RARELY),
        ("decentralized", "zero backward other " * 50, "gradients were cleared 4. times without a step of Adam", None),
        ("decentralized", "first " * 210, None, "SGD has stepped 200 times, but Adam never: nothing is averaged"),
        ("decentralized", "clear backward other " * 2, None, UNUSED),
        ("async", "clear backward other first " * 2, None, UNUSED),
        ("decentralized", "clear backward update_by_hand first " * 2, None, UNUSED),
        # Accumulation, gradients that no optimizer uses, several backward passes for each step, skipped steps.
        ("decentralized", "backward other clip " * 60 + "attached", None, None),
        ("decentralized", "clear backward " * 60, None, None),
        ("decentralized", "evaluate clear backward update_by_hand first", None, None),  # an attack, and a load
        ("decentralized", "clear backward clear backward attached " * 60, None, None),
        ("decentralized", "skipped_step " * 60, None, None),
        ("decentralized", "search", None, None),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_loops_that_do_not_step_an_attached_optimizer(
    name: str, calls: str, error: str | None, warning: str | None
) -> None:
    """They raise, or warn once on each rank."""

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, calls)
        attached = [optimizer for key, optimizer in loop.optimizers.items() if key != "other"]
        with tb.attach(loop.ddp, attached, RARELY[name], grad_scaler=loop.scaler) as attachment:
            with nullcontext() if error is None else pytest.raises(RuntimeError, match=error):
                for call in calls.split():
                    loop.call(call)
            if error is not None:
                leave_by_exception(attachment)

    with torchbagua_warnings() as messages:
        run_ranks(2, body)
    found = [message for message in messages if error is None and "LBFGS calls its closure" not in message]
    assert len(found) == (0 if warning is None else 2), messages
    assert all(re.search(warning or "", message) for message in found)


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
        ddp = DistributedDataParallel(copy.deepcopy(MODEL), process_group=group)
        optimizer = Slow(ddp.parameters(), float(group.rank() + 1))
        with tb.attach(ddp, optimizer, "decentralized"):
            backward(ddp)
            optimizer.step()
        return float(optimizer.slow)

    assert run_ranks(2, body) == [1.0, 1.0]


# Which optimizer ends a training step.


@pytest.mark.parametrize("order", [[1, 0], [0, 0, 1], [1, 0, 0, 1]], ids=str)
def test_a_step_ends_when_all_optimizers_have_stepped(order: list[int]) -> None:
    """In any order, and with repeats: each step ends with x += mean(x at its start) - x at its start, as in D-PSGD."""

    def body(group: dist.ProcessGroup) -> tuple[list[Weights], list[Weights]]:
        ddp = DistributedDataParallel(copy.deepcopy(HALVES), process_group=group)
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
    for starts, ends in ranks:
        assert len(ends) == (6 if order == [1, 0, 0, 1] else 3)
        for step, end in enumerate(ends):
            for name, tensor in end.items():
                mean = (ranks[0][0][step][name] + ranks[1][0][step][name]) / 2
                assert torch.equal(starts[step + 1][name], tensor + (mean - starts[step][name]))


def test_a_step_ends_when_a_grad_scaler_skips_one_optimizer() -> None:
    """On one rank the gradient of one half overflows: all ranks skip that half, and the step still ends."""

    def body(group: dist.ProcessGroup) -> tuple[list[int], Weights]:
        ddp = DistributedDataParallel(copy.deepcopy(HALVES), process_group=group)
        first, second = halves = list(ddp.module)
        optimizers = [sgd(first.parameters()), torch.optim.SGD(second.parameters(), lr=0.01, fused=True)]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        steps = []
        with tb.attach(ddp, optimizers, tb.DecentralizedAlgorithm(), grad_scaler=scaler) as attachment:
            for step in range(6):
                backward(ddp, scaler.scale(torch.ones(())))
                if group.rank() == 1 and step in (1, 2, 4):
                    halves[step % 2].weight.grad.fill_(torch.inf)
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

    def body(group: dist.ProcessGroup) -> list[tuple[list[int], Weights]]:
        ddp = DistributedDataParallel(copy.deepcopy(MODEL), process_group=group)
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

    with torchbagua_warnings() as messages:
        first, second = run_ranks(2, body)
    is_late = skipped == 0
    for step, ((numbers, weights), (_, other_weights)) in enumerate(zip(first, second, strict=True)):
        if step > 2:
            assert numbers == [step - 1, step]
        if step in (3, 6):  # after a round
            assert_same_weights([weights, other_weights])
    assert first[2][0] == ([2, 2] if is_late else [1, 2])
    assert len(messages) == (2 if is_late and not overflows else 0)
    assert all("Adam stepped after the training step had ended, because SGD, which ended it" in m for m in messages)


def test_an_optimizer_that_is_often_late_warns_once() -> None:
    @on_each_rank(2)
    def train(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(MODEL), process_group=group)
        optimizers = [torch.optim.SGD([ddp.module.weight], lr=0.01), torch.optim.Adam([ddp.module.bias])]
        with tb.attach(ddp, optimizers, tb.DiLoCoAlgorithm(3)):
            for step in range(9):
                backward(ddp)
                for index, optimizer in enumerate(optimizers):
                    if (step % 3, index) != (1, 0):
                        optimizer.step()

    with torchbagua_warnings() as messages:
        train()
    assert len(messages) == 2, "one on each rank"


def test_a_backward_that_raised_does_not_hide_the_next() -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    @on_each_rank(1)
    def train(group: dist.ProcessGroup) -> None:
        layers, recorder = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), Recorder()
        optimizer = torch.optim.SGD(layers.parameters())
        with tb.attach(layers, optimizer, "decentralized", process_group=group, observers=[recorder]):
            handle = layers[0].register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
            with pytest.raises(ArithmeticError):
                layers(torch.ones(1, 2)).sum().backward()
            handle.remove()
            layers(torch.ones(1, 2)).sum().backward()
        assert [event.phase for event in recorder.events].count("backward") == 1

    train()


@on_each_rank(2)
def test_a_state_that_is_saved_between_the_steps_of_two_optimizers(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(copy.deepcopy(MODEL), process_group=group)
    optimizers = [sgd([ddp.module.weight]), torch.optim.Adam([ddp.module.bias])]
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


@on_each_rank(2)
def test_a_state_that_is_saved_after_one_of_two_optimizers_was_skipped(group: dist.ProcessGroup) -> None:
    """The skip counts: the step of the other optimizer ends the training step of the resumed run."""
    ddp = DistributedDataParallel(copy.deepcopy(HALVES), process_group=group)
    optimizers = [sgd(half.parameters()) for half in ddp.module]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with tb.attach(ddp, optimizers, RARELY["diloco"], grad_scaler=scaler) as attachment:
        backward(ddp, scaler.scale(torch.ones(())))
        ddp.module[0].weight.grad.fill_(torch.inf)
        scaler.step(optimizers[0])
        state = attachment.state_dict()
    with tb.attach(ddp, optimizers, RARELY["diloco"]) as attachment:
        attachment.load_state_dict(state)
        optimizers[1].step()
        assert attachment.impl.rounds.step == 1
