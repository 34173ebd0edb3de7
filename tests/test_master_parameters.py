"""Optimizers that hold copies of the module's parameters: float32 masters, or stale copies by mistake."""

import copy
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import on_each_rank, run_ranks
from training import build

NUM_STEPS = 5
FEEDBACK = {
    "4 bits": tb.CompressedAllReduceAlgorithm(error_feedback=True),
    "topk": tb.TopKAlgorithm(0.2, warmup_steps=3),
    "powersgd": tb.PowerSGDAlgorithm(rank=1, start_step=1, min_rate=1),
}
ALGORITHMS = {"all_reduce": tb.GradientAllReduceAlgorithm(in_rank_order=True), **FEEDBACK}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 67), nn.Tanh(), nn.Linear(67, 3))


NETWORK = build(network)


class Masters:
    """A module whose weights are copies of an optimizer's parameters: one each, or one that contains all."""

    def __init__(self, module: nn.Module, *, is_flat: bool = False, num_optimizers: int = 1) -> None:
        self.copied = list(module.parameters())
        self.is_flat = is_flat
        values = [parameter.detach().clone() for parameter in self.copied]
        values = [torch.cat([value.flatten() for value in values])] if is_flat else values
        self.masters = [nn.Parameter(value) for value in values]
        self.optimizers = [torch.optim.SGD(self.masters[i::num_optimizers], lr=0.05) for i in range(num_optimizers)]

    def step(self) -> None:
        gradients = [parameter.grad.clone() for parameter in self.copied]
        gradients = [torch.cat([gradient.flatten() for gradient in gradients])] if self.is_flat else gradients
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        for optimizer in self.optimizers:
            optimizer.step()
        lengths = [parameter.numel() for parameter in self.copied]
        flat = torch.cat([master.detach().flatten() for master in self.masters])
        for parameter, part in zip(self.copied, flat.split(lengths), strict=True):
            parameter.data.copy_(part.view_as(parameter))


def backward(ddp: nn.Module, step: int, rank: int) -> None:
    ddp.zero_grad()
    ddp(torch.randn(6, 10, generator=torch.Generator().manual_seed(100 * step + rank))).square().sum().backward()


def weights_of(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def run(group: dist.ProcessGroup, ddp: nn.Module, take_step: Callable[[], object], steps: Sequence[int]) -> None:
    for step in steps:
        backward(ddp, step, group.rank())
        take_step()


@pytest.mark.parametrize(
    ("name", "options"),
    [("all_reduce", {}), ("4 bits", {"is_flat": True}), ("topk", {"num_optimizers": 2}), ("powersgd", {})],
)
def test_masters_train_as_the_parameters_themselves(name: str, options: dict[str, int]) -> None:
    """Bitwise, and with the same residuals under the same names; also if resumed in the middle."""
    algorithm = ALGORITHMS[name]

    def body(group: dist.ProcessGroup) -> None:
        plain = DistributedDataParallel(copy.deepcopy(NETWORK), process_group=group)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
        with tb.attach(plain, optimizer, algorithm) as attachment:
            run(group, plain, optimizer.step, range(NUM_STEPS))
            expected = attachment.runner.state_dict()

        ddp = DistributedDataParallel(copy.deepcopy(NETWORK), process_group=group)
        masters = Masters(ddp.module, **options)
        with tb.attach(ddp, masters.optimizers, algorithm) as attachment:
            run(group, ddp, masters.step, range(3))
            saved = attachment.rank_state_dict()
        with tb.attach(ddp, masters.optimizers, algorithm) as attachment:
            attachment.load_rank_state_dict(saved)
            run(group, ddp, masters.step, range(3, NUM_STEPS))
            state = attachment.runner.state_dict()
        assert all(map(torch.equal, weights_of(ddp), weights_of(plain)))
        for kind in {"sent", "received", "error", "factor"} & state.keys():
            assert state[kind].keys() == expected[kind].keys()
            assert all(torch.equal(state[kind][key], value) for key, value in expected[kind].items())
            assert any(value.any() for value in expected[kind].values())

    run_ranks(2, body)


@pytest.mark.parametrize("case", ["standalone hook", "another optimizer"])
def test_steps_of_masters_commit_residuals(case: str) -> None:
    """As if the loop stepped the parameters, or reported the steps. They leave those of another optimizer's parameters,
    which are the module's own, as those of float32 in Apex O2, and which steps more rarely."""
    algorithm = FEEDBACK["4 bits"]

    def body(group: dist.ProcessGroup, has_masters: bool) -> list[torch.Tensor]:
        ddp = DistributedDataParallel(copy.deepcopy(NETWORK), process_group=group)
        first = ddp.module[0] if case == "another optimizer" else ddp.module
        rare = torch.optim.SGD(ddp.module[2].parameters(), lr=0.05)
        masters = Masters(first)
        optimizers = masters.optimizers if has_masters else [torch.optim.SGD(first.parameters(), lr=0.05)]
        others = [rare] if case == "another optimizer" else []
        if case == "standalone hook":
            runner = algorithm.reify(group, optimizer=optimizers if has_masters else None)
            ddp.register_comm_hook(runner, tb.comm_hook)
        else:
            runner = tb.attach(ddp, [*optimizers, *others], algorithm).runner
        for step in range(NUM_STEPS):
            backward(ddp, step, group.rank())
            (masters if has_masters else optimizers[0]).step()
            if case == "standalone hook" and not has_masters:
                runner.step_taken()
            if step % 2:
                for optimizer in others:
                    optimizer.step()
        if case == "standalone hook":
            with pytest.raises(RuntimeError, match="parameters have no names to save state by"):
                runner.state_dict()
        runner.close()
        return weights_of(ddp)

    of_masters, plain = (run_ranks(2, lambda group, has=has: body(group, has)) for has in (True, False))
    assert all(map(torch.equal, of_masters[0], plain[0]))


@pytest.mark.parametrize("name", ["all_reduce", "4 bits"])
def test_an_optimizer_that_was_created_before_the_model_was_copied(name: str) -> None:
    """It raises in its first step, on all ranks. If the old model still has gradients, it warns after some steps."""

    def body(group: dist.ProcessGroup) -> None:
        old = copy.deepcopy(NETWORK)
        optimizer = torch.optim.SGD(old.parameters(), lr=0.05)
        ddp = DistributedDataParallel(copy.deepcopy(old), process_group=group)
        with tb.attach(ddp, optimizer, ALGORITHMS[name]):
            optimizer.step()  # before any backward it says nothing
            backward(ddp, 0, group.rank())
            with pytest.raises(RuntimeError, match="SGD has no parameters of the module, and its own have no grad"):
                optimizer.step()
        old(torch.ones(1, 10)).sum().backward()
        with tb.attach(ddp, optimizer, ALGORITHMS[name]):
            run(group, ddp, optimizer.step, range(25))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, body)
    messages = [str(warning.message) for warning in caught]
    assert sum("after 20 steps the module's weights have not changed" in message for message in messages) == 2
    assert len(messages) == 2


def test_masters_that_learn_do_not_warn() -> None:
    """Also if the module has 16 bits and the learning rate begins at zero."""

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(NETWORK).bfloat16(), process_group=group)
        masters = [nn.Parameter(parameter.detach().float()) for parameter in ddp.parameters()]
        optimizer = torch.optim.AdamW(masters, lr=0.0)
        with tb.attach(ddp, optimizer, "gradient_allreduce"):
            for step in range(25):
                optimizer.param_groups[0]["lr"] = step * 1e-4 / 1000
                ddp.zero_grad()
                ddp(torch.ones(1, 10, dtype=torch.bfloat16)).square().sum().backward()
                for master, parameter in zip(masters, ddp.parameters(), strict=True):
                    master.grad = parameter.grad.float()
                optimizer.step()
                for master, parameter in zip(masters, ddp.parameters(), strict=True):
                    parameter.data.copy_(master)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(1, body)


@on_each_rank(2)
def test_error_feedback_needs_the_gradients_of_the_module_in_the_step(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(nn.Linear(10, 3), process_group=group)
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in ddp.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.05)
    with tb.attach(ddp, optimizer, FEEDBACK["4 bits"]):
        backward(ddp, 0, group.rank())
        for master, parameter in zip(masters, ddp.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad, None
        with pytest.raises(RuntimeError, match=r"no gradients in a step of SGD, .* gradients after the step"):
            optimizer.step()
