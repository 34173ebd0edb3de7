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

NUM_STEPS = 4


def tower() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


class Loop:
    """A rank's training loop: it calls the module `called`; `backward` computes gradients of this rank's data."""

    def __init__(self, group: dist.ProcessGroup, model: nn.Module, **ddp_options: Any) -> None:
        self.net: Any = copy.deepcopy(model)
        self.ddp = DistributedDataParallel(self.net, process_group=group, **ddp_options)
        self.called: nn.Module = self.ddp
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.data = torch.Generator().manual_seed(group.rank())
        self.group = group

    def attach(self, algorithm: str = "gradient_allreduce", optimizers: Any = None) -> tb.Attachment:
        group = tb.BaguaProcessGroup(self.group)
        return tb.attach(self.called, optimizers or self.optimizer, algorithm, process_group=group)

    def loss(self, module: nn.Module | None = None) -> torch.Tensor:
        dtype = next(self.net.parameters()).dtype
        x = torch.randn(8, 4, generator=self.data).to(dtype)
        return (module or self.called)(x).square().mean()

    def backward(self, module: nn.Module | None = None) -> None:
        self.loss(module).backward()

    def accumulate(self, *, in_sync: bool) -> None:
        """Compute gradients of a micro-batch, within `no_sync` or not."""
        with nullcontext() if in_sync else self.ddp.no_sync():
            self.backward()

    def step(self, module: nn.Module | None = None) -> None:
        self.optimizer.zero_grad()
        self.backward(module)
        self.optimizer.step()

    def penalty(self) -> torch.Tensor:
        """Return a penalty on the weights, which is equal on all ranks."""
        return torch.stack([parameter.square().sum() for parameter in self.net.parameters()]).sum()

    def halves(self) -> list[torch.optim.Optimizer]:
        """Return two optimizers, of one layer each."""
        return [torch.optim.SGD(self.net[index].parameters(), lr=0.1) for index in (0, 2)]

    def average_by_hand(self) -> None:
        for parameter in self.net.parameters():
            self.group.allreduce([parameter.data]).wait()
            parameter.data.div_(self.group.size())

    def weights(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector(self.net.parameters()).detach().double()


class BaguasLoop(Loop):
    """A loop that calls the module itself, which `with_bagua` wraps in a DDP."""

    def __init__(self, group: dist.ProcessGroup, model: nn.Module) -> None:
        super().__init__(group, model)
        del self.ddp
        self.called = self.net

    def attach(self, algorithm: str = "gradient_allreduce", optimizers: Any = None) -> tb.Attachment:
        self.net.with_bagua(self.optimizer, algorithm, self.group)
        self.ddp = self.net.bagua_ddp.attachment.ddp
        attachment: tb.Attachment = self.net.bagua_ddp.attachment
        return attachment


Body = Callable[[dist.ProcessGroup], torch.Tensor]


def check_one_warning(body: Body, *parts: str) -> None:
    """Check that each rank warns once, with all parts, and that the ranks' weights do differ."""
    with torchbagua_warnings() as messages:
        first, second = run_ranks(2, body)
    assert len(messages) == 2, messages  # one per rank
    for message in messages:
        assert all(part in message for part in parts), message
    assert not torch.equal(first, second)


def check_no_warning(body: Callable[[dist.ProcessGroup], Any], size: int = 2) -> None:
    """Check that no rank warns: the suite turns torchbagua's warnings into errors, and here every RuntimeWarning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        run_ranks(size, body)


def train(
    step: Callable[[Loop, int], None],
    num_steps: int = NUM_STEPS,
    make_model: Callable[[], nn.Module] = tower,
    make_loop: type[Loop] = Loop,
) -> Body:
    """Return a body that takes steps of a loop with an attached algorithm, and returns the weights."""
    model = build(make_model)

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        loop = make_loop(group, model)
        with loop.attach():
            for number in range(num_steps):
                step(loop, number)
        return loop.weights()

    return body


def conversion(dtype: torch.dtype) -> Callable[[Loop, int], None]:
    def step(loop: Loop, number: int) -> None:
        if number == 1:
            loop.called.to(dtype)
        loop.step()

    return step


def inner_module(loop: Loop, number: int) -> None:
    loop.step(loop.net)


def inner_module_in_every_other_step(loop: Loop, number: int) -> None:
    if number % 2 == 1:
        inner_module(loop, number)
        return
    loop.optimizer.zero_grad()
    for in_sync in (False, True):
        loop.accumulate(in_sync=in_sync)
    loop.optimizer.step()


@pytest.mark.parametrize(
    ("step", "make_loop", "parts"),
    [
        (conversion(torch.double), Loop, ["ddp.double()", "wrap it in a new DDP", "call ddp(x)", "different weights"]),
        (conversion(torch.bfloat16), BaguasLoop, []),
        (inner_module, Loop, ["net(x)"]),
        (inner_module_in_every_other_step, Loop, []),
    ],
)
def test_ddp_averages_nothing(step: Callable[[Loop, int], None], make_loop: type[Loop], parts: list[str]) -> None:
    check_one_warning(train(step, make_loop=make_loop), "SGD has stepped", *parts)


def test_two_bare_steps_are_enough_and_one_is_not() -> None:
    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model)
        with loop.attach():
            for _ in range(3):
                loop.step(loop.net)
                group.barrier().wait()
                if group.rank() == 0:
                    counts.append(len(caught))
                group.barrier().wait()

    model, counts = build(tower), list[int]()
    check_no_warning(train(inner_module), size=1)  # one rank cannot differ from another
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, body)
    assert counts == [0, 2, 2]
    own_file = re.sub(r".*/", "", __file__)
    assert {re.sub(r".*/", "", warning.filename) for warning in caught} == {own_file}, "at the step of the loop"


def late_flag(loop: Loop) -> None:
    for micro_batch in range(3):
        loss = loop.loss()
        loop.ddp.require_backward_grad_sync = micro_batch == 2
        loss.backward()


def first_micro_batch_synchronized(loop: Loop) -> None:
    for in_sync in (True, False):
        loop.accumulate(in_sync=in_sync)
    nn.utils.clip_grad_norm_(loop.net.parameters(), 1e-3)


def two_losses_of_a_forward(loop: Loop) -> None:
    loss = loop.loss()
    loss.backward(retain_graph=True)
    loss.sqrt().backward()


def loss_of_the_first_layer_after_ddps(loop: Loop) -> None:
    loop.backward()
    loop.backward(loop.net[0])


def loss_of_the_last_layer_after_ddps(loop: Loop) -> None:
    loop.backward()
    loop.backward(loop.net[2])


def inner_loss_between_ddps_forward_and_backward(loop: Loop) -> None:
    loss = loop.loss()
    loop.backward(loop.net)
    loss.backward()


def forward_within_no_sync(loop: Loop) -> None:
    with loop.ddp.no_sync():
        loss = loop.loss()
    loss.backward()


@pytest.mark.parametrize(
    ("add_gradients", "cure"),
    [
        (late_flag, "enter no_sync(), before the forward"),
        (first_micro_batch_synchronized, "synchronize the last pass"),
        (two_losses_of_a_forward, "Sum the losses and call backward once"),
        (loss_of_the_first_layer_after_ddps, "call ddp(x), not the inner module"),
        (loss_of_the_last_layer_after_ddps, "call ddp(x), not the inner module"),
        (inner_loss_between_ddps_forward_and_backward, "call ddp(x), not the inner module"),
        (forward_within_no_sync, "leave no_sync() before the forward"),
    ],
)
def test_the_last_backward_before_a_step_is_not_averaged(add_gradients: Callable[[Loop], None], cure: str) -> None:
    """Ranks compare their weights after the first such step: an added gradient may be equal on all."""

    def step(loop: Loop, number: int) -> None:
        add_gradients(loop)
        loop.optimizer.step()

    check_one_warning(train(step, num_steps=1), "SGD has stepped", cure, "different weights")


def test_a_leftover_window() -> None:
    """Accumulate over two micro-batches, except in every third step, the last of an epoch."""

    def step(loop: Loop, number: int) -> None:
        loop.optimizer.zero_grad()
        loop.accumulate(in_sync=False)
        if number % 3 != 2:
            loop.backward()
        nn.utils.clip_grad_norm_(loop.net.parameters(), 1e-3)
        loop.optimizer.step()

    check_no_warning(train(step, num_steps=2))
    check_one_warning(train(step, num_steps=3), "SGD has stepped", "of a shorter window at the end of an epoch")


# Loops that are right, although some steps follow a backward that DDP has not averaged.


def steps_within_no_sync(loop: Loop) -> None:
    with loop.ddp.no_sync():
        for _ in range(NUM_STEPS):
            loop.step()
    loop.average_by_hand()


def a_flag_instead_of_no_sync(loop: Loop) -> None:
    for step in range(2 * NUM_STEPS):
        loop.ddp.require_backward_grad_sync = step % 2 == 1
        loop.step()
        if step % 2 == 0:
            loop.average_by_hand()


def accumulation(loop: Loop) -> None:
    for step in range(2 * NUM_STEPS):
        loop.accumulate(in_sync=step % 2 == 1)
        if step % 2 == 1:
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def hooks_that_change_gradients(loop: Loop) -> None:
    for parameter in loop.net.parameters():
        parameter.register_hook(lambda gradient: gradient + 1)
        parameter.register_post_accumulate_grad_hook(lambda parameter: nn.utils.clip_grad_value_(parameter, 0.1))
    accumulation(loop)


def accumulation_with_scaler_and_clipping(loop: Loop) -> None:
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


def steps_without_gradients(loop: Loop) -> None:
    for set_to_none in (True, False):
        loop.step()
        for _ in range(3):
            loop.backward(loop.net)
            loop.optimizer.zero_grad(set_to_none=set_to_none)
            loop.optimizer.step()


def the_same_gradients_again(loop: Loop) -> None:
    for _ in range(2):
        loop.step()
        for _ in range(3):
            loop.optimizer.step()


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
    for set_to_none in (False, True) * 2:
        loop.optimizer.zero_grad(set_to_none=set_to_none)
        loop.backward()
        loop.backward(loop.net)
        loop.step()
        loop.backward(loop.net)
        loop.optimizer.zero_grad(set_to_none=set_to_none)
        loop.optimizer.step()


def a_synchronization_in_backward(loop: Loop) -> None:
    """Prepare DDP for the last of several backward passes, as accelerate's `trigger_sync_in_backward` does."""
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


def a_metric_without_gradients_and_a_penalty(loop: Loop) -> None:
    """DDP's forward under no_grad clears the flag of its parameters' synchronization."""
    for _ in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        loop.backward()
        with torch.no_grad():
            loop.called(torch.ones(2, 4))
        loop.penalty().backward()
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
        loop.penalty().backward()
        loop.optimizer.step()
        loop.optimizer.step()


def averages_by_hand_within_no_sync_at_first(loop: Loop) -> None:
    for step in range(NUM_STEPS):
        with loop.ddp.no_sync() if step < 2 else nullcontext():
            loop.step()
        if step == 1:
            loop.average_by_hand()


@pytest.mark.parametrize(
    ("habit", "make_loop"),
    [
        *(
            (habit, Loop)
            for habit in (
                *(steps_within_no_sync, a_flag_instead_of_no_sync, hooks_that_change_gradients),
                *(accumulation_with_scaler_and_clipping, steps_without_gradients, the_same_gradients_again),
                *(a_generator_and_its_critic, a_closure, a_forward_outside_no_sync, inner_losses_before_ddps),
                *(a_discarded_gradient_after_the_average, a_synchronization_in_backward, a_gradient_penalty),
                *(a_metric_without_gradients_and_a_penalty, a_local_gradient_that_is_not_used),
                steps_on_a_penalty_alone,
            )
        ),
        (averages_by_hand_within_no_sync_at_first, BaguasLoop),
    ],
)
def test_no_warning(habit: Callable[[Loop], None], make_loop: type[Loop]) -> None:
    model = build(tower)

    def body(group: dist.ProcessGroup) -> None:
        loop = make_loop(group, model)
        with loop.attach("bytegrad"):
            habit(loop)

    check_no_warning(body)


def test_no_warning_for_two_optimizers() -> None:
    """Some steps are within `no_sync`, and the second optimizer steps after every other average only."""
    model = build(tower)

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model)
        first, second = halves = loop.halves()
        with loop.attach("bytegrad", halves):
            for _ in range(NUM_STEPS):
                loop.ddp.zero_grad()
                loop.accumulate(in_sync=False)
                for half in halves:
                    half.step()
            loop.average_by_hand()
            loop.ddp.zero_grad()
            for step in range(NUM_STEPS):
                first.zero_grad()
                loop.backward()
                first.step()
                if step % 2 == 1:
                    second.step()
                    second.zero_grad()

    check_no_warning(body)


class Checkpointed(nn.Module):
    """A tower whose last layers run again in backward, in a nested backward."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = tower()
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(self.tower[1:], self.tower[0](x), use_reentrant=True)
        return output


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters", "gradient_as_bucket_view"])
def test_no_warning_whatever_ddp_was_told(option: str) -> None:
    model = build(Checkpointed if option == "static_graph" else tower)

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model, **{option: True})
        with loop.attach("bytegrad"):
            loop.step()
            accumulation(loop)
            several_synchronized_passes(loop)

    check_no_warning(body)


def frozen_tower() -> nn.Module:
    model = tower()
    model[0].requires_grad_(False)
    return model


class FrozenLayers(nn.Module):
    """Many frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4).requires_grad_(False) for _ in range(130))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[-1](x))


def unfreeze(loop: Loop) -> None:
    loop.net.requires_grad_(True)


def unfreeze_one(loop: Loop) -> None:
    loop.net.get_parameter("layers.129.bias").requires_grad_(True)


def add_a_layer(loop: Loop) -> None:
    added = nn.Linear(1, 1)
    nn.init.ones_(added.weight)
    nn.init.zeros_(added.bias)
    loop.net.append(added)
    loop.optimizer.add_param_group({"params": list(added.parameters())})


@pytest.mark.parametrize(
    ("make_model", "change", "names"),
    [
        (frozen_tower, unfreeze, "2 parameters are not averaged: 0.weight, 0.bias"),
        (FrozenLayers, unfreeze_one, "1 parameters are not averaged: layers.129.bias"),
        (tower, add_a_layer, "2 parameters are not averaged: 3.weight, 3.bias"),
    ],
)
@pytest.mark.parametrize("at_step", [0, 2])
def test_parameters_unfrozen_or_added_after_ddp_was_created(
    make_model: Callable[[], nn.Module], change: Callable[[Loop], None], names: str, at_step: int
) -> None:
    def step(loop: Loop, number: int) -> None:
        if number == at_step:
            change(loop)
        loop.step()

    check_one_warning(train(step, make_model=make_model), f"the gradients of {names}", "a new DDP")


def test_no_warning_for_parameters_that_ddp_ignores_or_that_are_not_used() -> None:
    model = build(tower)

    def body(group: dist.ProcessGroup) -> None:
        net: Any = copy.deepcopy(model)
        net[1] = nn.Linear(4, 4).requires_grad_(False)
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
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in loop.net.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        with loop.attach(optimizers=list(optimizers.values())):
            for _ in range(NUM_STEPS):
                loop.backward()
        return loop.weights()

    check_one_warning(body, "SGD steps within backward", "Step after backward", "averages weights")


def test_a_suspicion_that_was_cleared_leaves_the_comparison_of_weights() -> None:
    """An inner loss on data that are equal on all ranks looks wrong for a while; then one rank changes its weights."""
    model = build(tower)

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        loop = Loop(group, model)
        with loop.attach():
            for _ in range(6):
                loop.optimizer.zero_grad()
                loop.backward()
                loop.net(torch.ones(2, 4)).square().mean().backward()
                loop.optimizer.step()
            if group.rank() == 1:
                with torch.no_grad():
                    loop.net[0].bias.zero_()
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
        halves = loop.halves()

        def num_hooks() -> int:
            return sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in loop.net.parameters())

        with loop.attach(optimizers=halves) as attachment:
            with loop.ddp.no_sync():
                for _ in range(22):
                    loop.step()
                    halves[0].step()
                loop.average_by_hand()
            assert num_hooks() == 4
            for step in range(26):
                loop.ddp.zero_grad()
                loop.backward()
                halves[0].step()
                if step >= 5:
                    halves[1].step()
                assert num_hooks() == 2 * (step < 19) + 2 * (step < 24)
            assert [listeners[watch] for watch in attachment.runner.step_watches] == [1, 1]  # of the meetings

    check_no_warning(body)
