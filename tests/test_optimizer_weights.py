"""EMA of weights, and optimizers whose state or groups are part of the model: weights, modes, learnt numbers."""

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchbagua as tb
from caught import torchbagua_warnings
from ranks import leave_by_exception, on_each_rank, run_ranks
from training import build

ALGORITHMS: dict[str, tb.Algorithm] = {
    "decentralized": tb.DecentralizedAlgorithm(),
    "low_precision": tb.LowPrecisionDecentralizedAlgorithm(),
    "async": tb.AsyncModelAverageAlgorithm(sync_interval_ms=5),
    "diloco": tb.DiLoCoAlgorithm(inner_steps=3),
}
BETA = 0.6


class Interpolated(torch.optim.Optimizer):
    """Schedule-free SGD: the module has y to train with, the state has z, and x = y + (1 - 1 / BETA) (z - y)."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0, "train_mode": True})

    def eval(self) -> None:
        self._change(False, 1 - 1 / BETA)

    def train(self) -> None:
        self._change(True, 1 - BETA)

    @torch.no_grad()
    def _change(self, mode: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] != mode:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight)
                group["train_mode"] = mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, 1 / group["k"])
                parameter.sub_(parameter.grad, alpha=group["lr"] * (1 - BETA * (1 - 1 / group["k"])))
                z.sub_(parameter.grad, alpha=group["lr"])


class SGDScheduleFree(Interpolated):
    """Has the name of a known class."""


class ModeInAttribute(SGDScheduleFree):
    is_training = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.is_training = True

    def _change(self, mode: bool, weight: float) -> None:
        if self.is_training != mode:
            self.param_groups[0]["train_mode"] = not mode
            super()._change(mode, weight)
            self.param_groups[0]["train_mode"] = True
            self.is_training = mode


class Lookahead(torch.optim.Optimizer):
    """Goes back halfway to the slow weights in every third step; keeps all state in the optimizer that it wraps."""

    def __init__(self, parameters: Any) -> None:
        self.base = torch.optim.SGD(parameters, lr=0.02)
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        for parameter in parameters:
            self.base.state[parameter].setdefault("slow", parameter.clone())
        self.base.step()
        self.num_steps += 1
        if self.num_steps % 3 == 0:
            for parameter in parameters:
                parameter.copy_(self.base.state[parameter]["slow"].lerp_(parameter, 0.5))

    def state_dict(self) -> Any:
        return self.base.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.base.load_state_dict(state)
        self.param_groups = self.base.param_groups


class Anchored(torch.optim.SGD):
    """Keeps a momentum under another name, and the first weights, which do not change and are equal on all ranks."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("x0", parameter.clone())
            state["velocity"] = 0.5 * state.get("velocity", 0.0) + parameter.grad
            parameter.sub_(state["velocity"] + 0.1 * (parameter - state["x0"]), alpha=0.01)


class Loop:
    """The training loop of a rank."""

    def __init__(self, group: dist.ProcessGroup, model: nn.Module, make: Callable[[Any], Any]) -> None:
        self.group = group
        self.ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        self.optimizer = make(self.ddp.parameters())
        self.data = torch.Generator().manual_seed(group.rank())

    def attach(self, algorithm: tb.Algorithm | str) -> tb.Attachment:
        return tb.attach(self.ddp, self.optimizer, algorithm, process_group=tb.BaguaProcessGroup(self.group))

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            x = torch.randn(8, 6, generator=self.data)
            (self.ddp(x) - x.sum(1, keepdim=True)).square().mean().backward()
            self.optimizer.step()

    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.ddp.parameters()])

    def state(self, name: str = "z") -> torch.Tensor:
        return torch.cat([self.optimizer.state[parameter][name].flatten() for parameter in self.ddp.parameters()])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))


MLP = build(mlp)


def values_of(module: nn.Module) -> torch.Tensor:
    tensors = [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.is_floating_point())]
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_ema_is_averaged_over_the_ranks(name: str) -> None:
    """For an evaluation, and at the end; its buffers too."""
    model = build(lambda: nn.Sequential(nn.Linear(6, 13), nn.BatchNorm1d(13), nn.Linear(13, 1)))

    def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
        loop = Loop(group, model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        ema = AveragedModel(loop.ddp.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        with loop.attach(ALGORITHMS[name]) as attachment:
            attachment.average_also(ema)
            for _ in range(3):
                loop.step()
                ema.update_parameters(loop.ddp.module)
            own = values_of(ema)
            with attachment.averaged_weights():
                within = values_of(ema)
            assert torch.equal(values_of(ema), within)
            loop.step()
            ema.update_parameters(loop.ddp.module)
            last_own = values_of(ema)
        return [own, last_own, within, values_of(ema)]

    own, last_own, *averaged = zip(*run_ranks(3, body), strict=True)
    for values, means in zip((own, last_own), averaged, strict=True):
        assert not torch.equal(values[0], values[1])
        assert all(torch.equal(mean, (values[0] + values[1] + values[2]) / 3) for mean in means)  # in rank order


@pytest.mark.parametrize("name", ["decentralized", "async"])
@on_each_rank(2)
def test_ranks_that_average_different_modules_raise(group: dist.ProcessGroup, name: str) -> None:
    attachment = Loop(group, nn.Linear(6, 1), torch.optim.SGD).attach(ALGORITHMS[name])
    with pytest.raises(RuntimeError, match="the fingerprint of the other tensors to average"):
        attachment.average_also(nn.Linear(2, 2 + group.rank()))
    leave_by_exception(attachment)


@on_each_rank(2)
def test_refused(group: dist.ProcessGroup) -> None:
    loop, ema = Loop(group, nn.Linear(6, 1), Interpolated), nn.Linear(6, 1)
    not_a_name = "average_also: state must be the name of an optimizer's state"
    refused: list[tuple[Any, str | None, type[Exception], str]] = [
        (loop.optimizer, None, TypeError, not_a_name),
        (loop.ddp, "z", TypeError, not_a_name),
        ("ema", None, TypeError, r"module must be a torch\.nn\.Module or an .*, got str"),
        (torch.optim.SGD(ema.parameters()), "z", ValueError, "average_also: the SGD is not attached"),
        (loop.optimizer, "zz", ValueError, r"Interpolated has a state tensor 'zz' .* such tensors are z$"),
    ]
    with loop.attach("decentralized") as attachment:
        loop.step()
        for module, state, error, message in refused:
            with pytest.raises(error, match=message):
                attachment.average_also(module, state)
        with attachment.averaged_weights(), pytest.raises(RuntimeError, match="within averaged_weights"):
            attachment.average_also(ema)
        wrapper: Any = SimpleNamespace(optimizer=loop.optimizer, state=loop.optimizer.state)  # as accelerate's
        attachment.average_also(wrapper, "z")
    with pytest.raises(RuntimeError, match="was detached"):
        attachment.average_also(ema)
    with loop.attach("bytegrad") as attachment:
        attachment.average_also(loop.optimizer, "z")


@pytest.mark.parametrize(
    ("name", "cls"), [*((name, SGDScheduleFree) for name in ALGORITHMS), ("decentralized", Interpolated)]
)
def test_evaluation_weights_after_detach_are_the_mean_of_the_ranks(name: str, cls: type[Interpolated]) -> None:
    """For a class that is known by name, or with a call."""

    def body(group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
        loop = Loop(group, MLP, cls)
        with loop.attach(ALGORITHMS[name]) as attachment:
            if cls is Interpolated:
                attachment.average_also(loop.optimizer, "z")
            loop.step(7)
            if name == "async":
                attachment.impl.abort(loop.ddp.module)
            y, z = loop.weights().clone(), loop.state().clone()
        averaged = loop.state().clone()
        loop.optimizer.eval()
        return y + (1 - 1 / BETA) * (z - y), z, averaged, loop.weights()

    with torchbagua_warnings() as messages:
        ranks = run_ranks(3, body)
    assert not messages
    xs, zs, averaged, evaluated = zip(*ranks, strict=True)
    assert not torch.equal(zs[0], zs[1])
    for rank in range(3):
        assert torch.equal(averaged[rank], (zs[0] + zs[1] + zs[2]) / 3)  # in rank order
        # Rounding of float32, and of the extrapolation.
        torch.testing.assert_close(evaluated[rank], (xs[0] + xs[1] + xs[2]) / 3, atol=1e-6, rtol=1e-6)
        assert torch.equal(evaluated[rank], evaluated[0])


# The calls before the block, at its start, at its end, and after it.
HABITS: dict[str, tuple[str, str, str, str]] = {
    "around": ("eval", "", "", "train"),
    "within": ("", "eval", "train", ""),
    "train after": ("", "eval", "", "train"),
    "train within": ("eval", "", "train", ""),
    "none": ("", "", "", ""),
    "an error": ("", "eval", "", "train"),
}


@pytest.mark.parametrize("cls", [SGDScheduleFree, pytest.param(ModeInAttribute, marks=pytest.mark.release)])
@pytest.mark.parametrize("habit", HABITS)
def test_eval_and_train_about_averaged_weights(cls: type[Interpolated], habit: str) -> None:
    """All ranks evaluate the same model, and training is bitwise the same as with these calls without the block.

    With both calls within the block, it is the same as without the calls, which round.
    """

    def body(group: dist.ProcessGroup, calls: tuple[str, ...], has_block: bool) -> tuple[torch.Tensor, ...]:
        loop = Loop(group, MLP, cls)
        before, start, end, after = (getattr(loop.optimizer, call, lambda: None) for call in calls)
        with loop.attach("decentralized") as attachment:
            loop.step(4)
            before()
            with suppress(ArithmeticError), attachment.averaged_weights() if has_block else nullcontext():
                start()
                evaluated, saved = loop.weights().clone(), copy.deepcopy(attachment.rank_state_dict())
                assert torch.equal(loop.weights(), evaluated)
                end()
                if habit == "an error":
                    raise ArithmeticError
            after()
            weights, state = loop.weights().clone(), loop.state().clone()
            loop.step(2)
        saved_weights = torch.cat([value.flatten() for value in saved["module"].values()])
        saved_state = torch.cat([each["z"].flatten() for each in saved["optimizers"][0]["state"].values()])
        return evaluated, saved_weights, saved_state, weights, state, loop.weights()

    def evaluated_mean(ranks: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        return (ranks[0][0] + ranks[1][0]) / 2

    with torchbagua_warnings() as messages:
        ranks = run_ranks(2, lambda group: body(group, HABITS[habit], has_block=True))
        same_calls = run_ranks(2, lambda group: body(group, HABITS[habit], has_block=False))
        plain = run_ranks(2, lambda group: body(group, HABITS["none" if habit == "within" else habit], has_block=False))
    assert not messages
    assert torch.equal(ranks[0][0], ranks[1][0])
    assert not torch.equal(ranks[0][4], ranks[1][4])
    torch.testing.assert_close(ranks[0][0], evaluated_mean(same_calls), atol=1e-6, rtol=1e-6)
    for with_block, with_calls, without in zip(ranks, same_calls, plain, strict=True):
        for value, expected in zip(with_block[1:3], with_calls[1:3], strict=True):
            assert torch.equal(value, expected)
        for value, expected in zip(with_block[3:], without[3:], strict=True):
            assert torch.equal(value, expected)


class Branches(nn.Module):
    """Rank 1 never uses the second branch, so its optimizer has no state for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 1), nn.Linear(6, 1)
        self.uses_both = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x) if self.uses_both else self.first(x)


def test_a_rank_without_state_contributes_its_weights() -> None:
    model = build(Branches)

    def body(group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
        loop = Loop(group, model, SGDScheduleFree)
        loop.ddp.module.uses_both = group.rank() == 0
        with loop.attach(tb.DiLoCoAlgorithm(inner_steps=100)) as attachment:
            loop.step(4)
            y, state = loop.weights().clone(), loop.optimizer.state
            z = torch.cat([state.get(each, {}).get("z", each.detach()).flatten() for each in loop.ddp.parameters()])
            with attachment.averaged_weights():
                loop.optimizer.eval()
                evaluated = loop.weights().clone()
            loop.optimizer.train()
            assert sum("z" in loop.optimizer.state[weight] for weight in loop.ddp.parameters()) == 4 - 2 * group.rank()
        loop.optimizer.eval()
        return y + (1 - 1 / BETA) * (z - y), evaluated, loop.weights()

    xs, *evaluated = zip(*run_ranks(2, body), strict=True)
    for first, second in evaluated:
        torch.testing.assert_close(first, (xs[0] + xs[1]) / 2, atol=1e-6, rtol=1e-6)
        assert torch.equal(first, second)


class Stashing(torch.optim.SGD):
    """Keeps the training weights in its state while the module is evaluated."""

    def eval(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["stash"] = parameter.detach().clone()

    def train(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            del self.state[parameter]["stash"]


def train(loop: Loop, attachment: tb.Attachment) -> None:
    loop.step(14)


def take_two_steps(loop: Loop, attachment: tb.Attachment) -> None:
    loop.step(2)


def evaluate_before_the_state_is_recognized(loop: Loop, attachment: tb.Attachment) -> None:
    """Ranks evaluate different weights, until the state is averaged too."""
    loop.step()
    for _ in range(2):
        with attachment.averaged_weights():
            loop.optimizer.eval()
        loop.optimizer.train()
        attachment.average_also(loop.optimizer, "z")


def save_in_the_block(loop: Loop, attachment: tb.Attachment) -> None:
    loop.step()
    with attachment.averaged_weights():
        attachment.rank_state_dict()
    attachment.average_also(loop.optimizer, "z")


def stash_during_evaluations(loop: Loop, attachment: tb.Attachment) -> None:
    for _ in range(2):
        loop.step()
        loop.optimizer.eval()
        with attachment.averaged_weights():
            pass
        loop.optimizer.train()


def name_a_state_that_never_exists(loop: Loop, attachment: tb.Attachment) -> None:
    attachment.average_also(loop.optimizer, "slow")
    loop.step(2)


@pytest.mark.parametrize(
    ("name", "make", "use", "message"),
    [
        ("decentralized", Interpolated, train, r"Interpolated keeps weights in its state 'z'.*also\(optimizer, 'z'\)"),
        ("async", Lookahead, train, "Lookahead keeps weights in its state 'slow'"),
        ("diloco", Interpolated, train, "Interpolated keeps weights in its state 'z'"),
        ("decentralized", lambda p: Interpolated(p, lr=1e-5), take_two_steps, "keeps weights in its state 'z'"),
        ("decentralized", Interpolated, evaluate_before_the_state_is_recognized,
         r"weights were changed within averaged_weights, as eval\(\) of Interpolated does"),
        ("decentralized", torch.optim.Adam, name_a_state_that_never_exists,
         "no parameter of Adam has a state tensor 'slow' with its shape; such tensors are exp_avg, exp_avg_sq"),
        ("decentralized", Interpolated, save_in_the_block, None),
        ("decentralized", lambda p: Stashing(p, lr=0.05), stash_during_evaluations, None),
    ],
)  # fmt: skip
def test_one_warning_of_weights_in_the_state_that_are_not_averaged(
    name: str, make: Callable[[Any], Any], use: Callable[[Loop, tb.Attachment], None], message: str | None
) -> None:
    """One on each rank, or none. The last layer's weights begin at zero."""
    model = build(mlp)
    nn.init.zeros_(model[2].weight)

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model, make)
        with loop.attach(ALGORITHMS[name]) as attachment:
            use(loop, attachment)

    with torchbagua_warnings() as messages:
        run_ranks(2, body)
    assert len(messages) == (0 if message is None else 2), messages
    assert all(re.search(message or "", each) for each in messages), messages


def test_momenta_moments_and_first_weights_are_not_taken_for_weights() -> None:
    """Of any optimizer of torch, although gradients are nearly parallel to the weights, which begin at one."""
    optim = torch.optim
    makes: list[Callable[[Any], torch.optim.Optimizer]] = [
        *(getattr(optim, name) for name in ("Adadelta", "Adam", "Adamax", "AdamW", "NAdam", "RAdam", "Rprop", "ASGD")),
        optim.Adafactor,
        Anchored,
        lambda parameters: optim.Adam(parameters, betas=(0.0, 0.9), amsgrad=True),
        lambda parameters: optim.Adagrad(parameters, initial_accumulator_value=1.0),
        lambda parameters: optim.RMSprop(parameters, centered=True, momentum=0.9),
        lambda parameters: optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1.0),
        lambda parameters: optim.SGD(parameters, lr=0.05, momentum=0.9, dampening=0.9),
        lambda parameters: optim.SGD(parameters, lr=1e-3, momentum=0.9, maximize=True),
    ]
    model = nn.ModuleList(nn.LayerNorm(16) for _ in makes)

    def body(group: dist.ProcessGroup) -> None:
        own, noise = copy.deepcopy(model), torch.Generator().manual_seed(group.rank())
        optimizers = [make(part.parameters()) for make, part in zip(makes, own, strict=True)]
        with tb.attach(own, optimizers, "decentralized", process_group=group):
            for _ in range(11):
                for parameter in own.parameters():
                    parameter.grad = parameter.detach() + 0.1 * torch.randn(parameter.shape, generator=noise)
                for optimizer in optimizers:
                    optimizer.step()

    with torchbagua_warnings() as messages:
        run_ranks(2, body)
    assert not messages


class Learner(torch.optim.SGD):
    """Learns its step size, as Prodigy does, as a float and as a tensor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group.update(d=0.01, d_tensor=torch.zeros(()), is_warm=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm = sum(float(parameter.grad.norm()) for parameter in group["params"])
            group["d"] = max(group["d"], 0.01 * norm)
            group["d_tensor"] += norm
            group["numerator"] = norm
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["d"])


@pytest.mark.parametrize("name", ["decentralized", "async"])
def test_learnt_numbers_of_groups_are_rank_0s_after_detach_and_stay_equal_with_ddp(name: str) -> None:
    """And after attach to a plain module. Options that schedulers set, and modes, remain each rank's own."""

    def body(group: dist.ProcessGroup) -> tuple[Any, ...]:
        loop, module = Loop(group, MLP, Learner), copy.deepcopy(MLP)
        optimizer = Learner(module.parameters())
        optimizer.param_groups[0]["d"] = 0.5 + group.rank()
        with tb.attach(module, optimizer, "decentralized", process_group=group):
            assert optimizer.param_groups[0]["d"] == 0.5

        def learnt() -> tuple[float, ...]:
            options = loop.optimizer.param_groups[0]
            return options["d"], float(options["d_tensor"]), options["numerator"]

        with loop.attach(ALGORITHMS[name]):
            loop.step(5)
            options = loop.optimizer.param_groups[0]
            options["lr"] = options["weight_decay"] = float(group.rank())
            options["is_warm"] = group.rank() == 1
            own = learnt()
        options, after = loop.optimizer.param_groups[0], learnt()
        assert (options["lr"], options["weight_decay"], options["is_warm"]) == (group.rank(),) * 3
        loop.step(5)
        return own, after, loop.weights()

    ranks = run_ranks(2, body)
    assert ranks[0][0] != ranks[1][0]
    assert ranks[0][1] == ranks[1][1] == ranks[0][0]
    assert torch.equal(ranks[0][2], ranks[1][2])


class SharedWork(torch.optim.SGD):
    """Each rank steps every second parameter and broadcasts it. Its parent's step is nested in its own."""

    def __init__(self, parameters: Any, group: dist.ProcessGroup) -> None:
        super().__init__(parameters, lr=0.01)
        self.group = group

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        own = [parameter.clone() for parameter in parameters]
        super().step(closure)
        if self.group.size() == 2:
            for index, (parameter, before) in enumerate(zip(parameters, own, strict=True)):
                if index % 2 != self.group.rank():
                    parameter.copy_(before)
                dist.broadcast(parameter, group=self.group, group_src=index % 2)


@pytest.mark.parametrize(
    ("algorithm", "has_closure", "warns"),
    [
        ("decentralized", False, True),
        ("diloco", False, True),
        ("decentralized", True, False),
        ("bytegrad", False, False),
    ],
)
def test_an_optimizer_that_communicates_in_its_step_warns(algorithm: str, has_closure: bool, warns: bool) -> None:
    """Not with a closure, which may communicate: every rank's loss is then the mean."""

    def body(group: dist.ProcessGroup) -> None:
        torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # torch hooks the step of a class with an instance
        loop = Loop(group, MLP, lambda parameters: SharedWork(parameters, group))
        with loop.attach(algorithm):
            for _ in range(2):
                loop.ddp(torch.ones(2, 6)).sum().backward()
                loop.optimizer.step(*([lambda: torch.zeros(())] if has_closure else []))

    with torchbagua_warnings() as messages:
        run_ranks(2, body)
    assert len(messages) == (2 if warns else 0), messages
    if warns:
        assert "SharedWork has issued 4 collectives in its first step()" in messages[0]
