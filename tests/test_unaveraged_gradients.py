"""Steps on gradients that are not averaged, while a gradient algorithm is attached: one warning, or none."""

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

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
from training import build


def tower() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


TOWER = build(tower)


class Checkpointed(nn.Module):
    """A tower whose last layers run again in backward, in a nested backward."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = tower()
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(self.tower[1:], self.tower[0](x), use_reentrant=True)
        return output


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


def partly_ignored() -> nn.Module:
    model: Any = tower()
    model[1] = nn.Linear(4, 4).requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "0.bias"])
    return model


class Case(NamedTuple):
    """A training: the calls of a `Loop`'s methods, and parts of the warning that each rank gives, if it gives one."""

    calls: str
    parts: tuple[str, ...] | None = None
    make_model: Callable[[], nn.Module] = tower
    options: dict[str, Any] = {}  # noqa: RUF012
    is_baguas: bool = False
    has_halves: bool = False


# Calls of one line; the others are methods of `Loop`.
CALLS: dict[str, Callable[["Loop"], Any]] = {
    "zero": lambda loop: loop.optimizer.zero_grad(),
    "zeros": lambda loop: loop.optimizer.zero_grad(set_to_none=False),
    "step": lambda loop: loop.optimizer.step(),
    "sync": lambda loop: loop.loss().backward(),
    "inner": lambda loop: loop.loss(loop.net).backward(),
    "first_layer": lambda loop: loop.loss(loop.net[0]).backward(),
    "last_layer": lambda loop: loop.loss(loop.net[2]).backward(),
    "inner_of_equal_data": lambda loop: loop.net(torch.ones(2, 4)).square().mean().backward(),
    "scaled_sync": lambda loop: loop.scaler.scale(loop.loss()).backward(),
    "clip": lambda loop: nn.utils.clip_grad_norm_(loop.net.parameters(), 1e-3),
    "step_first": lambda loop: loop.halves[0].step(),
    "step_second": lambda loop: loop.halves[1].step(),
    "zero_first": lambda loop: loop.halves[0].zero_grad(),
    "double": lambda loop: loop.called.double(),
    "bfloat16": lambda loop: loop.called.bfloat16(),
    "unfreeze": lambda loop: loop.net.requires_grad_(True),
    "unfreeze_one": lambda loop: loop.net.get_parameter("layers.129.bias").requires_grad_(True),
}


class Loop:
    """A rank's training loop, whose calls a `Case` names: of the DDP, or of a module that `with_bagua` wraps."""

    def __init__(self, group: dist.ProcessGroup, model: nn.Module, case: Case) -> None:
        self.net: Any = copy.deepcopy(model)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.group, self.data = group, torch.Generator().manual_seed(group.rank())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        if case.has_halves:
            self.halves = [torch.optim.SGD(self.net[index].parameters(), lr=0.1) for index in (0, 2)]
        if case.is_baguas:
            self.net.with_bagua(self.optimizer, "gradient_allreduce", group)
            self.attachment = self.net.bagua_ddp.attachment
            self.ddp, self.called = self.attachment.ddp, self.net
        else:
            self.called = self.ddp = DistributedDataParallel(self.net, process_group=group, **case.options)
            optimizers = self.halves if case.has_halves else self.optimizer
            own = tb.BaguaProcessGroup(group)
            self.attachment = tb.attach(self.ddp, optimizers, "gradient_allreduce", process_group=own)

    def call(self, name: str) -> None:
        if name in CALLS:
            CALLS[name](self)
        else:
            getattr(self, name)()

    def loss(self, module: nn.Module | None = None) -> torch.Tensor:
        x = torch.randn(8, 4, generator=self.data).to(next(self.net.parameters()).dtype)
        return (module or self.called)(x).square().mean()

    def silent(self) -> None:
        with self.ddp.no_sync():
            self.call("sync")

    def inner_between_forward_and_backward(self) -> None:
        loss = self.loss()
        self.call("inner")
        loss.backward()

    def penalty(self) -> None:
        """Add the gradient of a penalty on the weights, which is equal on all ranks."""
        torch.stack([parameter.square().sum() for parameter in self.net.parameters()]).sum().backward()

    def gradient_penalty(self) -> None:
        x = torch.randn(8, 4, generator=self.data, requires_grad=True)
        loss = self.called(x).square().sum()
        slope = torch.autograd.grad(loss, x, create_graph=True)[0]
        (loss + slope.square().sum()).backward()

    def metric(self) -> None:
        """DDP's forward under no_grad clears the flag of its parameters' synchronization."""
        with torch.no_grad():
            self.loss()

    def inner_metric(self) -> None:
        with torch.no_grad():
            self.loss(self.net)

    def forward_within_no_sync(self) -> None:
        with self.ddp.no_sync():
            loss = self.loss()
        loss.backward()

    def backward_within_no_sync(self) -> None:
        """DDP averages nevertheless, since it reads the flag in the forward."""
        loss = self.loss()
        with self.ddp.no_sync():
            loss.backward()

    def set_the_flag_late(self) -> None:
        for micro_batch in range(3):
            loss = self.loss()
            self.ddp.require_backward_grad_sync = micro_batch == 2
            loss.backward()

    def two_losses_of_a_forward(self) -> None:
        loss = self.loss()
        loss.backward(retain_graph=True)
        loss.sqrt().backward()

    def sync_in_backward(self) -> None:
        """Prepare DDP for the last of several backward passes, as accelerate's `trigger_sync_in_backward` does."""
        with self.ddp.no_sync():
            losses = [self.loss(), self.loss()]
            losses[0].backward()
        self.ddp.require_forward_param_sync = True
        self.ddp.reducer.prepare_for_backward([])
        losses[1].backward()

    def measure_a_local_gradient(self) -> None:
        """As a Fisher information or a noise scale is computed."""
        averages = [parameter.grad for parameter in self.net.parameters()]
        self.call("zero")
        self.call("inner")
        for parameter, average in zip(self.net.parameters(), averages, strict=True):
            parameter.grad = average

    def scaled_silent_overflow(self) -> None:
        with self.ddp.no_sync():
            self.scaler.scale(torch.inf * self.loss()).backward()

    def scaled_step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.call("clip")
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def closure_step(self) -> None:
        def closure() -> float:
            self.call("zero")
            self.call("sync")
            return 0.0

        self.optimizer.step(closure)

    def average_by_hand(self) -> None:
        for parameter in self.net.parameters():
            self.group.allreduce([parameter.data]).wait()
            parameter.data.div_(self.group.size())

    def hook_gradients(self) -> None:
        for parameter in self.net.parameters():
            parameter.register_hook(lambda gradient: gradient + 1)
            parameter.register_post_accumulate_grad_hook(lambda parameter: nn.utils.clip_grad_value_(parameter, 0.1))

    def add_a_layer(self) -> None:
        added = nn.Linear(1, 1)
        nn.init.ones_(added.weight)
        nn.init.zeros_(added.bias)
        self.net.append(added)
        self.optimizer.add_param_group({"params": list(added.parameters())})

    def change_one_rank(self) -> None:
        if self.group.rank() == 1:
            self.net[0].bias.data.zero_()


PLAIN, INNER = "zero sync step ", "zero inner step "
ACCUMULATION = "silent sync step zero "
STEPPED, NEW_DDP = "SGD has stepped", "a new DDP"
LAST = (STEPPED, "different weights")
CALL_DDP = (*LAST, "call ddp(x), not the inner module")
ADDED = {
    "unfreeze": (frozen_tower, "the gradients of 2 parameters are not averaged: 0.weight, 0.bias"),
    "unfreeze_one": (FrozenLayers, "the gradients of 1 parameters are not averaged: layers.129.bias"),
    "add_a_layer": (tower, "the gradients of 2 parameters are not averaged: 3.weight, 3.bias"),
}
CASES: dict[str, Case] = {
    # DDP averages nothing.
    "converted": Case(f"{PLAIN} double {PLAIN * 3}", (*LAST, "ddp.double()", "wrap it in a new DDP", "call ddp(x)")),
    "converted, with_bagua": Case(f"{PLAIN} bfloat16 {PLAIN * 3}", (STEPPED,), is_baguas=True),
    "the inner module": Case(INNER * 4, (STEPPED, "net(x)")),
    "the inner module in every other step": Case(f"zero {ACCUMULATION} {INNER}" * 2, (STEPPED,)),
    # The last backward before the first step. Ranks compare weights: an added gradient may be equal on all.
    "a late flag": Case("set_the_flag_late step", (*LAST, "enter no_sync(), before the forward")),
    "the first micro-batch synchronized": Case("sync silent clip step", (*LAST, "synchronize the last pass")),
    "two losses": Case("two_losses_of_a_forward step", (*LAST, "Sum the losses and call backward once")),
    "a loss of the first layer": Case("sync first_layer step", CALL_DDP),
    "a loss of the last layer": Case("sync last_layer step", CALL_DDP),
    "an inner loss between": Case("inner_between_forward_and_backward step", CALL_DDP),
    "a forward within no_sync": Case("forward_within_no_sync step", (*LAST, "leave no_sync() before the forward")),
    "a leftover window": Case(
        "zero silent sync clip step " * 2 + "zero silent clip step",
        (STEPPED, "of a shorter window at the end of an ep"),
    ),
    # An inner loss on data that are equal on all ranks looks wrong for a while; then one rank changes its weights.
    "a change after a suspicion that was cleared": Case(
        "zero sync inner_of_equal_data step " * 6 + f"change_one_rank {PLAIN}",
        ("hold different weights", "A rank has changed its weights alone"),
    ),
    # Parameters that DDP does not know.
    **{
        f"{change} at step {number}": Case(f"{PLAIN * number} {change} {PLAIN * (4 - number)}", (part, NEW_DDP), make)
        for change, (make, part) in ADDED.items()
        for number in (0, 2)
    },
    # Loops that are right, although some steps follow a backward that DDP has not averaged.
    "whole windows": Case("zero silent sync clip step " * 2),
    "steps within no_sync": Case("zero silent step " * 4 + "average_by_hand"),
    "every other step within no_sync": Case(f"zero silent step average_by_hand {PLAIN}" * 4),
    "hooks that change gradients": Case(f"hook_gradients {ACCUMULATION * 4}"),
    "a scaler": Case("scaled_silent_overflow scaled_sync scaled_step zero silent scaled_sync scaled_step zero " * 2),
    "steps without gradients": Case(
        f"{PLAIN} inner zero step inner zero step {PLAIN} inner zeros step inner zeros step"
    ),
    "the same gradients again": Case(f"{PLAIN} step step step " * 2),
    "a generator that trains its critic too": Case(f"{PLAIN} {PLAIN} inner " * 4),
    "a closure": Case("closure_step " * 4),
    "a backward within no_sync": Case("backward_within_no_sync backward_within_no_sync step zeros " * 4),
    "inner losses before": Case("zero inner sync inner_metric step " * 4),
    "a discarded gradient": Case(
        f"zeros sync inner {PLAIN} inner zeros step zero sync inner {PLAIN} inner zero step " * 2
    ),
    "a synchronization in backward": Case("zero sync_in_backward step " * 4),
    "a gradient penalty": Case("zero gradient_penalty step " * 4),
    "a metric and a penalty": Case("zero sync metric penalty step " * 4),
    "a local gradient that is not used": Case("zero sync measure_a_local_gradient step " * 4),
    "steps on a penalty alone": Case(f"{PLAIN} zero penalty step step " * 4),
    "averages by hand at first": Case(f"{'zero silent step ' * 2} average_by_hand {PLAIN * 2}", is_baguas=True),
    # The second optimizer steps after every other average only.
    "two optimizers": Case(
        "zero silent step_first step_second " * 4
        + "average_by_hand zero "
        + "zero_first sync step_first zero_first sync step_first step_second zero " * 2,
        has_halves=True,
    ),
    **{
        option: Case(
            f"{PLAIN} {ACCUMULATION * 4} {f'{PLAIN} zero sync sync step ' * 2}",
            make_model=Checkpointed if option == "static_graph" else tower,
            options={option: True},
        )
        for option in ("static_graph", "find_unused_parameters", "gradient_as_bucket_view")
    },
    "ignored and frozen parameters": Case(PLAIN * 4, make_model=partly_ignored),
}


@pytest.mark.parametrize("name", CASES)
def test_one_warning_or_none(name: str) -> None:
    """Each rank warns if its weights differ from those of another."""
    case = CASES[name]
    model = build(case.make_model)

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        loop = Loop(group, model, case)
        with loop.attachment:
            for call in case.calls.split():
                loop.call(call)
        return nn.utils.parameters_to_vector(loop.net.parameters()).detach().double()

    with torchbagua_warnings() as messages:
        first, second = run_ranks(2, body)
    assert len(messages) == (0 if case.parts is None else 2), messages
    for message in messages:
        assert all(part in message for part in case.parts or ()), message
    assert case.parts is None or not torch.equal(first, second)


def test_two_bare_steps_are_enough_and_one_is_not() -> None:
    """But not on a single rank, which cannot differ from another."""
    counts, case = list[int](), Case("")

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, TOWER, case)
        with loop.attachment:
            for _ in range(3):
                loop.call("inner")
                loop.call("step")
                loop.call("zero")
                group.barrier().wait()
                if group.rank() == 0:
                    counts.append(len(caught))
                group.barrier().wait()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(1, body)
        run_ranks(2, body)
    assert counts == [0, 0, 0, 0, 2, 2]
    own_file = re.sub(r".*/", "", __file__)
    assert {re.sub(r".*/", "", warning.filename) for warning in caught} == {own_file}, "at the step of the loop"


def test_an_optimizer_in_backward() -> None:
    def body(group: dist.ProcessGroup) -> torch.Tensor:
        ddp = DistributedDataParallel(copy.deepcopy(TOWER), process_group=group)
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in ddp.parameters()}

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in ddp.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        with tb.attach(ddp, list(optimizers.values()), "gradient_allreduce"):
            for _ in range(4):
                ddp(torch.full((2, 4), 1.0 + group.rank())).sum().backward()
        return ddp.module[0].weight.detach()

    with torchbagua_warnings() as messages:
        first, second = run_ranks(2, body)
    assert not torch.equal(first, second)
    assert len(messages) == 2, messages
    message = messages[0]
    assert all(part in message for part in ("SGD steps within backward", "Step after backward", "averages weights"))


def test_only_the_first_steps_of_each_optimizer_are_checked() -> None:
    """Steps without an average do not count, so that a mistake after a long warm-up without averages is found."""
    case = Case("", has_halves=True)

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, TOWER, case)

        def num_hooks() -> int:
            return sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in loop.net.parameters())

        with loop.attachment:
            for _ in range(22):
                loop.call("zero")
                loop.silent()
                loop.call("step_first")
            loop.average_by_hand()
            assert num_hooks() == 4
            for step in range(26):
                loop.call("zero")
                loop.call("sync")
                loop.call("step_first")
                if step >= 5:
                    loop.call("step_second")
                assert num_hooks() == 2 * (step < 19) + 2 * (step < 24)

    with torchbagua_warnings() as messages:
        run_ranks(2, body)
    assert not messages
