"""Algorithms are notified once of each step that an optimizer takes, with attach and with the standalone hook."""

import copy
import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from averaging import RARELY
from ranks import run_ranks
from torchbagua.runtime.optimizer_steps import _MANY_BACKWARDS, StepsTaken, StepWatch
from training import build

X = torch.ones(2, 10)


@dataclass(frozen=True)
class CountingAlgorithm(tb.Algorithm):
    """Plain averaging that records the parameters of each step."""

    def make_impl(self, runner: tb.extend.Runner) -> "CountingImpl":
        return CountingImpl(runner)


class CountingImpl(tb.AlgorithmImpl):
    def __init__(self, runner: tb.extend.Runner) -> None:
        super().__init__(runner)
        self.steps: list[list[tuple[int, ...]]] = []
        runner.on_step_taken(self.note)

    def init_operations(self, module: nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
        bucket.append_centralized_synchronous_op()

    def note(self, parameters: Sequence[torch.Tensor]) -> None:
        self.steps.append([tuple(parameter.shape) for parameter in parameters])


class OptimizerWrapper:
    """A wrapper like accelerate's: it shares the optimizer's state, and calls a scaler that may skip the step."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        self.state, self.param_groups = optimizer.state, optimizer.param_groups

    def step(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


class Decayed(torch.optim.SGD):
    """A user's subclass that calls the step of its parent class."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            self.param_groups[0]["params"][0].mul_(0.5)
        return loss


MODEL = build(lambda: nn.Linear(10, 3))
BOTH = [(3, 10), (3,)]


def backward(ddp: nn.Module, factor: float | torch.Tensor = 1.0) -> None:
    ddp.zero_grad()
    (ddp(X).sum() * factor).backward()


def plain(ddp: DistributedDataParallel, attach: Callable[[Any], tb.Attachment]) -> int:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    attach(optimizer)
    for _ in range(3):
        backward(ddp)
        optimizer.step()
    backward(ddp)  # no step follows
    return 3


def in_a_wrapper(ddp: DistributedDataParallel, attach: Callable[[Any], tb.Attachment]) -> int:
    optimizer = OptimizerWrapper(torch.optim.SGD(ddp.parameters(), lr=0.1))
    attach(optimizer)
    for _ in range(3):
        backward(ddp)
        optimizer.step()
    return 3


def in_a_subclass(ddp: DistributedDataParallel, attach: Callable[[Any], tb.Attachment]) -> int:
    optimizer = Decayed(ddp.parameters(), lr=0.1)
    torch.optim.SGD(ddp.parameters(), lr=0.1)  # for an instance of the parent class, torch hooks that class too
    attach(optimizer)
    for _ in range(3):
        backward(ddp)
        optimizer.step()
    return 3


def with_a_closure(ddp: DistributedDataParallel, attach: Callable[[Any], tb.Attachment]) -> int:
    optimizer = torch.optim.LBFGS(ddp.parameters(), lr=1e-3, max_iter=4)
    attach(optimizer)

    def closure() -> torch.Tensor:
        backward(ddp)
        calls.append(0)
        return ddp(X).sum().detach()

    calls: list[int] = []
    for _ in range(2):
        optimizer.step(closure)
    assert len(calls) > 2
    return 2


def with_a_scaler(ddp: DistributedDataParallel, attach: Callable[[Any], tb.Attachment], **options: Any) -> int:
    """Steps 1 and 3 of five are skipped."""
    optimizer = torch.optim.Adam(ddp.parameters(), **options)
    wrapper = OptimizerWrapper(optimizer, torch.amp.GradScaler("cpu", init_scale=8.0))
    attach(optimizer)
    for step in range(5):
        backward(ddp, wrapper.scaler.scale(torch.tensor(float("inf") if step in (1, 3) else 1.0)))
        wrapper.step()
    return 3


def with_a_fused_optimizer_and_a_scaler(ddp: DistributedDataParallel, attach: Callable[[Any], tb.Attachment]) -> int:
    """GradScaler also calls it for the steps that it skips."""
    return with_a_scaler(ddp, attach, fused=True)


def with_an_optimizer_that_takes_the_scaler(
    ddp: DistributedDataParallel, attach: Callable[[Any], tb.Attachment]
) -> int:
    """As torch asked of custom fused optimizers, and still supports."""

    class OwnScaling(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: torch.amp.GradScaler) -> None:
            if not any(grad_scaler._check_inf_per_device(self).values()):
                super().step()

    optimizer = OwnScaling(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    attach(optimizer)
    for step in range(3):
        backward(ddp, scaler.scale(torch.tensor(float("inf") if step == 1 else 1.0)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            scaler.step(optimizer)
        scaler.update()
    return 2


LOOPS = [
    plain,
    in_a_wrapper,
    in_a_subclass,
    with_a_closure,
    with_a_scaler,
    with_a_fused_optimizer_and_a_scaler,
    with_an_optimizer_that_takes_the_scaler,
]


@pytest.mark.filterwarnings("ignore:torchbagua. LBFGS")
@pytest.mark.parametrize("is_attached", [True, False])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_once_for_each_step_that_is_taken(loop: Callable[..., int], is_attached: bool) -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(MODEL), process_group=group)
        runners: list[tb.extend.Runner] = []

        def attach(optimizer: Any) -> None:
            if is_attached:
                runners.append(tb.attach(ddp, optimizer, CountingAlgorithm()).runner)
            else:
                runners.append(CountingAlgorithm().reify(group, optimizer=optimizer))
                ddp.register_comm_hook(runners[0], tb.comm_hook)

        num_steps = loop(ddp, attach)
        assert runners[0].impl.steps == [BOTH] * num_steps
        runners[0].close()

    run_ranks(1, body)


def test_each_of_several_optimizers_reports_its_parameters() -> None:
    def body(group: dist.ProcessGroup) -> list[list[tuple[int, ...]]]:
        ddp = DistributedDataParallel(copy.deepcopy(MODEL), process_group=group)
        optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in (ddp.module.weight, ddp.module.bias)]
        with tb.attach(ddp, optimizers, CountingAlgorithm()) as attachment:
            for order in ((0, 1), (1,), (0, 0)):
                backward(ddp)
                for index in order:
                    optimizers[index].step()
        optimizers[0].step()  # the algorithm is no longer notified
        return attachment.impl.steps

    weight, bias = [(3, 10)], [(3,)]
    assert run_ranks(2, body) == [[weight, bias, bias, weight, weight]] * 2


def test_a_weight_algorithm_may_keep_state_and_is_notified_of_steps_too() -> None:
    class Steps(tb.Algorithm):
        averages_weights = True

        def make_impl(self, runner: tb.extend.WeightRunner) -> tb.AlgorithmImpl:
            return StepsImpl(runner)

    class StepsImpl(CountingImpl, tb.extend.WeightImpl):
        def __init__(self, runner: tb.extend.WeightRunner) -> None:
            super().__init__(runner)
            self.residuals = runner.keep(tb.extend.residual_state("Steps"))

        def init_tensors(self, module: nn.Module) -> list[tb.extend.BaguaTensor]:
            return []

        def tensors_to_buckets(
            self, tensors: list[tb.extend.BaguaTensor], do_flatten: bool
        ) -> list[tb.extend.BaguaBucket]:
            return []

    def body(group: dist.ProcessGroup) -> None:
        module = copy.deepcopy(MODEL)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with tb.attach(module, optimizer, Steps(), process_group=tb.BaguaProcessGroup(group)) as attachment:
            backward(module)
            optimizer.step()
            assert set(attachment.runner.state_dict()) == {"rank", "num_ranks", "sent", "mean"}
        assert attachment.impl.steps == [BOTH]

    run_ranks(1, body)


def test_an_optimizer_is_asked_once_whether_it_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a fused optimizer on a GPU, each query waits for the GPU."""
    asked: list[str] = []
    monkeypatch.setattr(
        "torchbagua.runtime.optimizer_steps.is_told_to_skip",
        lambda optimizer: bool(asked.append(type(optimizer).__name__)),
    )

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(MODEL), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        # Two listeners: the algorithm commits state, and an observer is notified of the end of a step.
        with tb.attach(ddp, optimizer, CountingAlgorithm(), observers=[tb.observe.Summary()]) as attachment:
            for _ in range(3):
                backward(ddp)
                optimizer.step()
        optimizer.step()
        assert attachment.impl.steps == [BOTH] * 3
        assert attachment.summary().figures.num_steps == 3

    run_ranks(1, body)
    assert asked == ["SGD"] * 3


def register_standalone_hook(
    group: dist.ProcessGroup, **arguments: Any
) -> tuple[DistributedDataParallel, tb.AlgorithmImpl, Any]:
    ddp = DistributedDataParallel(copy.deepcopy(MODEL), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    given = dict.fromkeys(arguments, optimizer)
    impl = tb.ByteGradAlgorithm(error_feedback=True).reify(group, **given)
    ddp.register_comm_hook(impl, tb.comm_hook)
    return ddp, impl, optimizer


def test_with_the_standalone_hook_the_second_backward_without_a_notification_raises() -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp, impl, optimizer = register_standalone_hook(group)
        backward(ddp)
        optimizer.step()
        both_ways = r"Call runner\.step_taken\(\) after each step .* reify\(group, optimizer=optimizer\)"
        with pytest.raises(RuntimeError, match=f"ByteGradAlgorithm must be notified of the steps.*{both_ways}"):
            backward(ddp)
        impl.close()

    run_ranks(2, body)


def test_both_notifications_of_the_standalone_hook_give_equal_weights() -> None:
    def body(group: dist.ProcessGroup) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        notified, watched = register_standalone_hook(group), register_standalone_hook(group, optimizer=True)
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
        for _, impl, _ in (notified, watched):
            impl.close()
        return [p.detach() for p in notified[0].parameters()], [p.detach() for p in watched[0].parameters()]

    for notified, watched in run_ranks(2, body):
        assert all(map(torch.equal, notified, watched))


def test_an_optimizer_that_is_never_stepped_warns() -> None:
    """Another optimizer steps, so residuals would never be committed."""

    def body(group: dist.ProcessGroup) -> None:
        ddp, impl, optimizer = register_standalone_hook(group, optimizer=True)
        unwatched = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(400):
            backward(ddp)
            (optimizer if step == 200 else unwatched).step()
            if step == 198:
                assert not caught
        impl.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        run_ranks(1, body)
    assert len(caught) == 1
    assert "ByteGradAlgorithm has seen no step of SGD in 200 synchronized" in str(caught[0].message)


def test_an_optimizer_keeps_no_hook_of_an_impl_that_is_closed_or_forgotten() -> None:
    def num_hooks(optimizer: torch.optim.Optimizer) -> int:
        return len(optimizer._optimizer_step_post_hooks) + len(optimizer._optimizer_step_pre_hooks)

    def body(group: dist.ProcessGroup) -> None:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
        impl = CountingAlgorithm().reify(group, optimizer=optimizer)
        assert num_hooks(optimizer) == 2
        impl.close()
        assert num_hooks(optimizer) == 0
        forgotten = CountingAlgorithm().reify(group, optimizer=optimizer)
        assert num_hooks(optimizer) == 2
        del forgotten
        gc.collect()
        assert num_hooks(optimizer) == 0

    run_ranks(1, body)


def test_backward_passes_are_counted_from_the_last_step_on() -> None:
    """An optimizer that steps, however rarely, gets no warning."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    watch = StepWatch(optimizer)

    class Listener:
        def commit_step(self, parameters: list[torch.Tensor]) -> None: ...

    listener = Listener()
    steps = StepsTaken(listener, "an algorithm")
    steps.listen_to([watch])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            for _ in range(_MANY_BACKWARDS - 1):
                steps.before_backward()
            parameter.grad = torch.ones(2)
            optimizer.step()
            assert not watch.is_in_step
    steps.close()


def test_cleared_gradients_are_counted_from_the_last_step_on() -> None:
    """A loop that steps gets no error, however many gradients it clears in between."""

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(MODEL), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with tb.attach(ddp, optimizer, RARELY["decentralized"]):
            for _ in range(60):
                backward(ddp)
                backward(ddp)  # which clears the gradients
                optimizer.step()

    run_ranks(2, body)
