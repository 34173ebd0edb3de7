"""Steps on gradients that are not averaged, while a gradient algorithm is attached: one warning, or none."""

import copy
import re
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchbagua as tb
import torchbagua.compat.bagua
from caught import torchbagua_warnings
from ranks import run_ranks
from torchbagua.runtime.optimizer_steps import StepEnd, StepWatch
from training import build

NUM_STEPS = 6


def tower() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


class Loop:
    """A rank's training loop: it calls the module `called`; `backward` computes gradients of this rank's data."""

    def __init__(self, group: dist.ProcessGroup, model: nn.Module, *, lr: float = 0.1, **ddp_options: Any) -> None:
        self.net = copy.deepcopy(model)
        self.ddp = DistributedDataParallel(self.net, process_group=group, **ddp_options)
        self.called: nn.Module = self.ddp
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=lr)
        self.data = torch.Generator().manual_seed(group.rank())
        self.group = group

    def attach(self, algorithm: str = "gradient_allreduce") -> tb.Attachment:
        return tb.attach(self.called, self.optimizer, algorithm, process_group=tb.BaguaProcessGroup(self.group))

    def loss(self, module: nn.Module | None = None) -> torch.Tensor:
        dtype = next(self.net.parameters()).dtype
        x = torch.randn(8, 4, generator=self.data).to(dtype)
        return (module or self.called)(x).square().mean()

    def backward(self, module: nn.Module | None = None) -> None:
        self.loss(module).backward()

    def step(self, module: nn.Module | None = None) -> None:
        self.optimizer.zero_grad()
        self.backward(module)
        self.optimizer.step()

    def average_by_hand(self) -> None:
        for parameter in self.net.parameters():
            self.group.allreduce([parameter.data]).wait()
            parameter.data.div_(self.group.size())

    def weights(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector(self.net.parameters()).detach().double()


def weights_of_ranks(body: Callable[[dist.ProcessGroup], torch.Tensor], size: int = 2) -> list[torch.Tensor]:
    return run_ranks(size, body)


def check_one_warning(body: Callable[[dist.ProcessGroup], torch.Tensor], *parts: str) -> None:
    """Check that each rank warns once, with all parts, and that the ranks' weights do differ."""
    with torchbagua_warnings() as messages:
        first, second = weights_of_ranks(body)
    assert len(messages) == 2, messages  # one per rank
    for message in messages:
        assert all(part in message for part in parts), message
    assert not torch.equal(first, second)


def check_no_warning(body: Callable[[dist.ProcessGroup], Any]) -> None:
    """Check that no rank warns: the suite turns torchbagua's warnings into errors, and here every RuntimeWarning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        run_ranks(2, body)


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "double": lambda module: module.double(),
    "bfloat16": lambda module: module.to(torch.bfloat16),
}


class BaguasLoop(Loop):
    """A loop that calls the module itself, which `with_bagua` wraps in a DDP."""

    def __init__(self, group: dist.ProcessGroup, model: nn.Module) -> None:
        super().__init__(group, model)
        self.ddp, self.called = None, self.net  # type: ignore[assignment]

    def attach(self, algorithm: str = "gradient_allreduce") -> tb.Attachment:
        self.net.with_bagua(self.optimizer, algorithm, self.group)
        return self.net.bagua_ddp.attachment


@pytest.mark.parametrize("make_loop", [Loop, BaguasLoop])
@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_module_that_is_converted_after_ddp_was_created(
    convert: Callable[[nn.Module], object], make_loop: type[Loop]
) -> None:
    model = build(tower)

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        loop = make_loop(group, model)
        with loop.attach():
            loop.step()
            convert(loop.called)
            for _ in range(NUM_STEPS):
                loop.step()
        return loop.weights()

    check_one_warning(
        body, "SGD has stepped", "ddp.double()", "wrap it in a new DDP", "call ddp(x)", "different weights"
    )


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "powersgd"])
def test_the_inner_module_called_instead_of_ddp(name: str) -> None:
    model = build(tower)

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        loop = Loop(group, model)
        with loop.attach(name):
            for _ in range(NUM_STEPS):
                loop.step(loop.net)
        return loop.weights()

    check_one_warning(body, "net(x)", "call ddp(x)", "ddp.double()")


def test_the_inner_module_called_in_every_other_step_of_a_loop_that_accumulates() -> None:
    model = build(tower)

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        loop = Loop(group, model)
        assert loop.ddp is not None
        with loop.attach():
            for step in range(NUM_STEPS):
                loop.optimizer.zero_grad()
                if step % 2 == 0:
                    with loop.ddp.no_sync():
                        loop.backward()
                    loop.backward()
                else:
                    loop.backward(loop.net)
                loop.optimizer.step()
        return loop.weights()

    check_one_warning(body, "SGD has stepped")


def late_flag(loop: Loop, step: int) -> None:
    for micro_batch in range(4):
        loss = loop.loss()
        loop.ddp.require_backward_grad_sync = micro_batch == 3
        loss.backward()


def first_micro_batch_synchronized(loop: Loop, step: int) -> None:
    loop.backward()
    with loop.ddp.no_sync():
        loop.backward()
    nn.utils.clip_grad_norm_(loop.net.parameters(), 1e-3)


def two_losses_of_a_forward(loop: Loop, step: int) -> None:
    loss = loop.loss()
    loss.backward(retain_graph=True)
    loss.sqrt().backward()


def two_forwards_then_two_backwards(loop: Loop, step: int) -> None:
    losses = [loop.loss(), loop.loss()]
    for loss in losses:
        loss.backward()


def inner_loss_after_ddps(loop: Loop, step: int) -> None:
    loop.backward()
    if step % 3 == 0:  # a regularization of some steps only
        loop.backward(loop.net)


def loss_of_the_first_layer_after_ddps(loop: Loop, step: int) -> None:
    loop.backward()
    loop.backward(loop.net[0])  # type: ignore[index]


def loss_of_the_last_layer_after_ddps(loop: Loop, step: int) -> None:
    loop.backward()
    loop.backward(loop.net[2])  # type: ignore[index]


def inner_loss_between_ddps_forward_and_backward(loop: Loop, step: int) -> None:
    loss = loop.loss()
    loop.backward(loop.net)
    loss.backward()


def leftover_window(loop: Loop, step: int) -> None:
    """Accumulate over two micro-batches, except in every third step, the last of an epoch."""
    with loop.ddp.no_sync():
        loop.backward()
    if step % 3 != 2:
        loop.backward()
    nn.utils.clip_grad_norm_(loop.net.parameters(), 1e-3)


def forward_within_no_sync(loop: Loop, step: int) -> None:
    with loop.ddp.no_sync():
        loss = loop.loss()
    loss.backward()


@pytest.mark.parametrize(
    ("add_gradients", "first_step", "cure"),
    [
        (late_flag, 1, "enter no_sync(), before the forward"),
        (first_micro_batch_synchronized, 1, "synchronize the last pass"),
        (two_losses_of_a_forward, 1, "Sum the losses and call backward once"),
        (two_forwards_then_two_backwards, 1, "Sum the losses and call backward once"),
        (inner_loss_after_ddps, 1, "call ddp(x), not the inner module"),
        (loss_of_the_first_layer_after_ddps, 1, "call ddp(x), not the inner module"),
        (loss_of_the_last_layer_after_ddps, 1, "call ddp(x), not the inner module"),
        (inner_loss_between_ddps_forward_and_backward, 1, "call ddp(x), not the inner module"),
        (leftover_window, 3, "of a shorter window at the end of an epoch"),
        (forward_within_no_sync, 1, "leave no_sync() before the forward"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_last_backward_before_a_step_is_not_averaged(
    add_gradients: Callable[[Loop, int], None], first_step: int, cure: str
) -> None:
    """Ranks compare their weights after the first such step: an added gradient may be equal on all."""
    model = build(tower)

    def train(num_steps: int) -> Callable[[dist.ProcessGroup], torch.Tensor]:
        def body(group: dist.ProcessGroup) -> torch.Tensor:
            loop = Loop(group, model)
            with loop.attach():
                for step in range(num_steps):
                    loop.optimizer.zero_grad()
                    add_gradients(loop, step)
                    loop.optimizer.step()
            return loop.weights()

        return body

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights_of_ranks(train(first_step - 1))
    assert not any("has stepped" in str(warning.message) for warning in caught)
    check_one_warning(train(first_step), "SGD has stepped", cure, "different weights")


def test_two_bare_steps_are_enough_and_one_is_not() -> None:
    model = build(tower)
    counts: list[int] = []

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model)
        with loop.attach():
            for _ in range(3):
                loop.step(loop.net)
                group.barrier().wait()
                if group.rank() == 0:
                    counts.append(len(caught))
                group.barrier().wait()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(1, body)  # one rank cannot differ from another
        assert counts == [0, 0, 0]
        counts.clear()
        run_ranks(2, body)
        assert counts == [0, 2, 2]


def steps_within_no_sync(loop: Loop) -> None:
    assert loop.ddp is not None
    with loop.ddp.no_sync():
        for _ in range(NUM_STEPS):
            loop.step()
    loop.average_by_hand()


def two_optimizers_within_no_sync(loop: Loop) -> None:
    assert loop.ddp is not None
    halves = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (loop.net[0], loop.net[2])]  # type: ignore[index]
    with tb.attach(loop.ddp, halves, "gradient_allreduce", process_group=tb.BaguaProcessGroup(loop.group)):
        for _ in range(NUM_STEPS):
            with loop.ddp.no_sync():
                loop.ddp.zero_grad()
                loop.backward()
            for half in halves:
                half.step()
        loop.average_by_hand()


def a_flag_instead_of_no_sync(loop: Loop) -> None:
    assert loop.ddp is not None
    for step in range(2 * NUM_STEPS):
        loop.ddp.require_backward_grad_sync = step % 2 == 1
        loop.step()
        if step % 2 == 0:
            loop.average_by_hand()


def accumulation(loop: Loop) -> None:
    assert loop.ddp is not None
    for step in range(2 * NUM_STEPS):
        with loop.ddp.no_sync() if step % 2 == 0 else nullcontext():
            loop.backward()
        if step % 2 == 1:
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def steps_without_gradients(loop: Loop) -> None:
    for set_to_none in (True, False):
        loop.step()
        for _ in range(NUM_STEPS):
            loop.optimizer.zero_grad(set_to_none=set_to_none)
            loop.optimizer.step()


def the_same_gradients_again(loop: Loop) -> None:
    for _ in range(2):
        loop.step()
        for _ in range(3):
            loop.optimizer.step()


def frozen_phases(loop: Loop) -> None:
    for _ in range(3):
        loop.step()
        loop.net.requires_grad_(False)
        for _ in range(3):
            nn.utils.clip_grad_norm_(loop.net.parameters(), 1e-3)
            loop.optimizer.step()
        loop.net.requires_grad_(True)


def skipped_steps(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        share = torch.inf if step % 2 == 0 else 1.0
        scaler.scale(share * loop.called(torch.ones(2, 4)).sum()).backward()
        scaler.step(loop.optimizer)
        scaler.update()


def evaluation_of_the_inner_module(loop: Loop) -> None:
    """Compute gradients of an adversarial attack, which no step uses."""
    for _ in range(NUM_STEPS):
        loop.net.eval()
        loop.backward(loop.net)
        loop.net.train()
        loop.step()


def a_generator_and_its_critic(loop: Loop) -> None:
    """Attach the critic, which gets gradients from the generator's loss too, through the inner module."""
    generator = nn.Linear(4, 4)
    generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    for _ in range(NUM_STEPS):
        for _ in range(2):
            loop.step()
        generator_optimizer.zero_grad()
        loop.net(generator(torch.randn(8, 4, generator=loop.data))).mean().backward()
        generator_optimizer.step()


def a_closure(loop: Loop) -> None:
    def closure() -> float:
        loop.optimizer.zero_grad()
        loop.backward()
        return 0.0

    for _ in range(NUM_STEPS):
        loop.optimizer.step(closure)


def a_forward_outside_no_sync(loop: Loop) -> None:
    """DDP averages in each backward, since it reads the flag in the forward."""
    assert loop.ddp is not None
    for step in range(2 * NUM_STEPS):
        loss = loop.loss()
        with loop.ddp.no_sync():
            loss.backward()
        if step % 2 == 1:
            loop.optimizer.step()
            loop.optimizer.zero_grad(set_to_none=False)


def several_synchronized_passes(loop: Loop) -> None:
    for step in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        for _ in range(1 + step % 2):
            loop.backward()
        loop.optimizer.step()


def inner_losses_before_ddps(loop: Loop) -> None:
    for _ in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        loop.backward(loop.net)
        loop.backward()
        with torch.no_grad():
            loop.loss(loop.net)
        loop.optimizer.step()


def a_discarded_gradient_after_the_average(loop: Loop) -> None:
    """Compute a gradient of the critic in the generator's pass, clear it, and train the critic."""
    for set_to_none in (False, True) * 3:
        loop.optimizer.zero_grad(set_to_none=set_to_none)
        loop.backward()
        loop.backward(loop.net)
        loop.step()
        loop.backward(loop.net)
        loop.optimizer.zero_grad(set_to_none=set_to_none)
        loop.optimizer.step()


def a_synchronization_in_backward(loop: Loop) -> None:
    """Prepare DDP for the last of several backward passes, as accelerate's `trigger_sync_in_backward` does."""
    assert loop.ddp is not None
    for _ in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        with loop.ddp.no_sync():
            losses = [loop.loss(), loop.loss()]
            losses[0].backward()
        loop.ddp.require_forward_param_sync = True
        loop.ddp.reducer.prepare_for_backward([])
        losses[1].backward()
        loop.optimizer.step()


def a_gradient_penalty(loop: Loop) -> None:
    for _ in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        x = torch.randn(8, 4, generator=loop.data, requires_grad=True)
        loss = loop.called(x).square().sum()
        slope = torch.autograd.grad(loss, x, create_graph=True)[0]
        (loss + slope.square().sum()).backward()
        loop.optimizer.step()


def a_penalty_on_weights_after_the_average(loop: Loop) -> None:
    for _ in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        loop.backward()
        torch.stack([parameter.square().sum() for parameter in loop.net.parameters()]).sum().backward()
        loop.optimizer.step()
    weights = [torch.empty_like(loop.weights()) for _ in range(2)]
    loop.group.allgather([weights], [loop.weights()]).wait()
    assert torch.equal(*weights)


def gradients_averaged_by_hand(loop: Loop) -> None:
    assert loop.ddp is not None
    for _ in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        for _ in range(2):
            with loop.ddp.no_sync():
                loop.backward()
        for parameter in loop.net.parameters():
            assert parameter.grad is not None
            loop.group.allreduce([parameter.grad]).wait()
            parameter.grad /= 2
        loop.optimizer.step()


def accumulation_with_scaler_and_clipping(loop: Loop) -> None:
    assert loop.ddp is not None
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(NUM_STEPS):
        share = torch.inf if step % 2 == 0 else 1.0
        with loop.ddp.no_sync():
            scaler.scale(share * loop.loss()).backward()
        scaler.scale(loop.loss()).backward()
        scaler.unscale_(loop.optimizer)
        nn.utils.clip_grad_norm_(loop.net.parameters(), 1e-3)
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()


def a_short_window_that_is_synchronized(loop: Loop) -> None:
    assert loop.ddp is not None
    for step in range(7):
        is_last = step % 3 == 2 or step == 6
        loop.ddp.require_backward_grad_sync = is_last
        loop.backward()
        if is_last:
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def hooks_that_change_gradients(loop: Loop) -> None:
    for parameter in loop.net.parameters():
        parameter.register_hook(lambda gradient: gradient + 1)
        parameter.register_post_accumulate_grad_hook(lambda parameter: nn.utils.clip_grad_value_(parameter, 0.1))
    accumulation(loop)


def a_step_after_two_of_the_other_optimizer(loop: Loop) -> None:
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (loop.net[0], loop.net[2]))  # type: ignore[index]
    with tb.attach(loop.ddp, [first, second], "bytegrad", process_group=tb.BaguaProcessGroup(loop.group)):
        for step in range(2 * NUM_STEPS):
            first.zero_grad()
            loop.backward()
            first.step()
            if step % 2 == 1:
                second.step()
                second.zero_grad()


def a_metric_without_gradients_and_a_penalty(loop: Loop) -> None:
    """DDP's forward under no_grad clears the flag of its parameters' synchronization."""
    for _ in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        loop.backward()
        with torch.no_grad():
            loop.called(torch.ones(2, 4))
        sum(parameter.square().sum() for parameter in loop.net.parameters()).backward()  # type: ignore[union-attr]
        loop.optimizer.step()


def an_inner_loss_on_data_that_is_equal_on_all_ranks(loop: Loop) -> None:
    for _ in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        loop.backward()
        loop.net(torch.ones(2, 4)).square().mean().backward()
        loop.optimizer.step()


def a_local_gradient_that_is_not_used(loop: Loop) -> None:
    """As a Fisher information or a noise scale is computed."""
    for _ in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        loop.backward()
        averages = [parameter.grad for parameter in loop.net.parameters()]
        loop.optimizer.zero_grad()
        loop.backward(loop.net)
        for parameter, average in zip(loop.net.parameters(), averages, strict=True):
            parameter.grad = average
        loop.optimizer.step()


def steps_on_a_penalty_alone(loop: Loop) -> None:
    for _ in range(NUM_STEPS):
        loop.step()
        loop.optimizer.zero_grad()
        sum(parameter.square().sum() for parameter in loop.net.parameters()).backward()  # type: ignore[union-attr]
        loop.optimizer.step()


LEGITIMATE: list[Callable[[Loop], None]] = [
    a_metric_without_gradients_and_a_penalty,
    an_inner_loss_on_data_that_is_equal_on_all_ranks,
    a_local_gradient_that_is_not_used,
    steps_on_a_penalty_alone,
    steps_within_no_sync,
    a_flag_instead_of_no_sync,
    accumulation,
    steps_without_gradients,
    the_same_gradients_again,
    frozen_phases,
    skipped_steps,
    evaluation_of_the_inner_module,
    a_generator_and_its_critic,
    a_closure,
    a_forward_outside_no_sync,
    several_synchronized_passes,
    inner_losses_before_ddps,
    a_discarded_gradient_after_the_average,
    a_synchronization_in_backward,
    a_gradient_penalty,
    a_penalty_on_weights_after_the_average,
    gradients_averaged_by_hand,
    accumulation_with_scaler_and_clipping,
    a_short_window_that_is_synchronized,
    hooks_that_change_gradients,
]


@pytest.mark.parametrize("habit", LEGITIMATE, ids=lambda habit: habit.__name__)
def test_no_warning(habit: Callable[[Loop], None]) -> None:
    model = build(tower)

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model)
        with loop.attach("bytegrad"):
            habit(loop)

    check_no_warning(body)


@pytest.mark.parametrize("habit", [two_optimizers_within_no_sync, a_step_after_two_of_the_other_optimizer])
def test_no_warning_for_two_optimizers(habit: Callable[[Loop], None]) -> None:
    model = build(tower)
    check_no_warning(lambda group: habit(Loop(group, model)))


class Checkpointed(nn.Module):
    """A tower whose last layers run again in backward, in a nested backward."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = tower()
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.tower[0](x)
        output: torch.Tensor = checkpoint(self.tower[1:], hidden, use_reentrant=True)
        return output


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters", "gradient_as_bucket_view"])
@pytest.mark.parametrize("habit", [accumulation, several_synchronized_passes])
def test_no_warning_whatever_ddp_was_told(habit: Callable[[Loop], None], option: str) -> None:
    model = build(Checkpointed if option == "static_graph" else tower)

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model, **{option: True})
        with loop.attach("bytegrad"):
            loop.step()
            habit(loop)

    check_no_warning(body)


def test_no_warning_for_a_ddp_created_by_with_bagua() -> None:
    model = build(tower)

    def body(group: dist.ProcessGroup) -> None:
        loop = BaguasLoop(group, model)
        with loop.attach() as attachment:
            assert attachment.ddp is not None
            for step in range(NUM_STEPS):
                with attachment.ddp.no_sync() if step < 3 else nullcontext():
                    loop.step()
                if step == 2:
                    loop.average_by_hand()

    check_no_warning(body)


@pytest.mark.parametrize("is_attached_first", [False, True], ids=["before attach", "after attach"])
def test_parameters_unfrozen_after_ddp_was_created(is_attached_first: bool) -> None:
    def frozen_tower() -> nn.Module:
        model = tower()
        model[0].requires_grad_(False)
        return model

    model = build(frozen_tower)

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        loop = Loop(group, model)
        if not is_attached_first:
            loop.net.requires_grad_(True)
        with loop.attach():
            for step in range(NUM_STEPS):
                if step == 2:
                    loop.net.requires_grad_(True)
                loop.step()
        return loop.weights()

    check_one_warning(body, "the gradients of 2 parameters are not averaged: 0.weight, 0.bias", "a new DDP")


def test_parameters_added_after_ddp_was_created() -> None:
    model = build(tower)

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        loop = Loop(group, model)
        with loop.attach():
            for step in range(NUM_STEPS):
                if step == 2:
                    added = nn.Linear(1, 1)
                    nn.init.ones_(added.weight)
                    nn.init.zeros_(added.bias)
                    loop.net.append(added)  # type: ignore[operator]
                    loop.optimizer.add_param_group({"params": list(added.parameters())})
                loop.step()
        return loop.weights()

    check_one_warning(body, "the gradients of 2 parameters are not averaged: 3.weight, 3.bias")


def test_no_warning_for_parameters_that_ddp_ignores_or_that_are_not_used() -> None:
    model = build(tower)

    def body(group: dist.ProcessGroup) -> None:
        net = copy.deepcopy(model)
        net[1] = nn.Linear(4, 4)  # type: ignore[operator]
        net[1].requires_grad_(False)  # type: ignore[operator, union-attr]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight", "0.bias"])
        loop = Loop(group, net)
        with loop.attach():
            for _ in range(NUM_STEPS):
                loop.step()

    check_no_warning(body)


def test_an_optimizer_in_backward() -> None:
    model = build(tower)

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        loop = Loop(group, model)
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in loop.net.parameters()}

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            parameter.grad = None

        for parameter in loop.net.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        own_group = tb.BaguaProcessGroup(group)
        with tb.attach(loop.called, list(optimizers.values()), "gradient_allreduce", process_group=own_group):
            for _ in range(NUM_STEPS):
                loop.backward()
        return loop.weights()

    check_one_warning(body, "SGD steps within backward", "Step after backward", "averages weights")


def test_the_warning_points_at_the_step_of_the_loop() -> None:
    model = build(tower)

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        loop = Loop(group, model)
        with loop.attach():
            for _ in range(3):
                loop.step(loop.net)
        return loop.weights()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, body)
    assert {re.sub(r".*/", "", warning.filename) for warning in caught} == {"test_unaveraged_gradients.py"}


def test_one_of_many_frozen_parameters_is_found() -> None:
    class FrozenLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4).requires_grad_(False) for _ in range(130))
            self.head = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers[-1](x))

    model = build(FrozenLayers)

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        loop = Loop(group, model)
        with loop.attach():
            for step in range(NUM_STEPS):
                if step == 2:
                    loop.net.get_parameter("layers.129.bias").requires_grad_(True)
                loop.step()
        return loop.weights()

    check_one_warning(body, "the gradients of 1 parameters are not averaged: layers.129.bias")


def test_a_suspicion_that_was_cleared_leaves_the_comparison_of_weights() -> None:
    """A right loop that looks wrong for a while; then one rank changes its weights."""
    model = build(tower)

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        loop = Loop(group, model)
        with loop.attach():
            an_inner_loss_on_data_that_is_equal_on_all_ranks(loop)
            if group.rank() == 1:
                with torch.no_grad():
                    loop.net[0].bias.zero_()  # type: ignore[index]
            loop.step()
        return loop.weights()

    check_one_warning(body, "hold different weights", "A rank has changed its weights alone")


def count_listeners(monkeypatch: pytest.MonkeyPatch) -> Counter[StepWatch]:
    """Return the numbers of listeners that are added to watches of steps from now on, and not yet removed."""
    add, remove, counts = StepWatch.add, StepWatch.remove, Counter[StepWatch]()

    def count_added(watch: StepWatch, listener: StepEnd, **options: Any) -> None:
        counts[watch] += 1
        add(watch, listener, **options)

    def count_removed(watch: StepWatch, listener: StepEnd) -> None:
        counts[watch] -= 1
        remove(watch, listener)

    monkeypatch.setattr(StepWatch, "add", count_added)
    monkeypatch.setattr(StepWatch, "remove", count_removed)
    return counts


def test_only_the_first_steps_of_each_optimizer_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without an average do not count, so that a mistake after a long warm-up without averages is found."""
    model = build(tower)
    listeners = count_listeners(monkeypatch)

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model)
        halves = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (loop.net[0], loop.net[2])]  # type: ignore[index]
        own_group = tb.BaguaProcessGroup(group)

        def num_hooks() -> int:
            return sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in loop.net.parameters())

        with tb.attach(loop.ddp, halves, "gradient_allreduce", process_group=own_group) as attachment:
            with loop.ddp.no_sync():
                for _ in range(30):
                    loop.step()
                    halves[0].step()
                    loop.average_by_hand()
            assert num_hooks() == 4
            for step in range(30):
                loop.ddp.zero_grad()
                loop.backward()
                halves[0].step()
                if step >= 5:
                    halves[1].step()
                assert num_hooks() == 2 * (step < 19) + 2 * (step < 24)
            assert [listeners[watch] for watch in attachment.runner.step_watches] == [1, 1]  # of the meetings

    check_no_warning(body)
