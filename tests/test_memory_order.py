"""Memory formats: conversion before attach works; after a conversion after attach, all ranks raise an error."""

import copy
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import leave_by_exception, on_each_rank, run_ranks
from torchbagua.runtime.parameters import MemoryOrder
from training import build

# Rounds of async follow each other immediately. QAdam needs an optimizer.
AVERAGED_WEIGHTS: dict[str, tb.Algorithm] = {
    "decentralized": tb.DecentralizedAlgorithm(),
    "low precision": tb.LowPrecisionDecentralizedAlgorithm(),
    "diloco": tb.DiLoCoAlgorithm(2),
    "streaming": tb.DiLoCoAlgorithm(4, fragments=2, delay=1),
    "async": tb.AsyncModelAverageAlgorithm(sync_interval_ms=0),
    "async warm-up": tb.AsyncModelAverageAlgorithm(sync_interval_ms=0, warmup_steps=100),
}
AVERAGED_GRADIENTS: dict[str, tb.Algorithm] = {
    "gradients": tb.GradientAllReduceAlgorithm(),
    "bytegrad": tb.ByteGradAlgorithm(),
    "error feedback": tb.ByteGradAlgorithm(error_feedback=True),
    "topk": tb.TopKAlgorithm(),
    "powersgd": tb.PowerSGDAlgorithm(start_step=1),
}
QADAM: dict[str, dict[str, Any]] = {
    "qadam": {},
    "qadam, one bit": {"compression": "sign1bit", "error_feedback": True},
}


class Pictures(nn.Sequential):
    """Convolutions. `0.weight` is the first parameter whose layout depends on the memory format."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(8, 4, 3, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(4 * 36, 1),
        )


PICTURES = build(Pictures)


def convert(module: nn.Module) -> None:
    """Convert as users do: parameters stay the same objects."""
    module.to(memory_format=torch.channels_last)


class Loop:
    """A copy of a model on one rank, with local batches."""

    def __init__(self, group: dist.ProcessGroup, model: nn.Module, name: str, **ddp_options: Any) -> None:
        self.rank = group.rank()
        self.module = copy.deepcopy(model)
        self.ddp = DistributedDataParallel(self.module, process_group=group, **ddp_options)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.algorithm = (AVERAGED_WEIGHTS | AVERAGED_GRADIENTS).get(name)
        if name in QADAM:
            self.optimizer = tb.QAdamOptimizer(self.module.parameters(), lr=0.01, warmup_steps=2)
            self.algorithm = tb.QAdamAlgorithm(self.optimizer, **QADAM[name])
        self.data = torch.Generator().manual_seed(self.rank)

    def attach(self, **options: Any) -> tb.Attachment:
        return tb.attach(self.ddp, self.optimizer, self.algorithm, **options)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.ddp(torch.randn(4, 3, 6, 6, generator=self.data)).square().mean().backward()
        self.optimizer.step()

    def steps_until_error(self, most: int = 2000) -> tuple[int, str]:
        """Return the number of steps before one raises, and its error. With async another thread determines it."""
        for step in range(most):
            try:
                self.step()
            except RuntimeError as error:
                return step, str(error)
            if isinstance(self.algorithm, tb.AsyncModelAverageAlgorithm):
                time.sleep(0.001)
        raise AssertionError(f"{most} steps without an error")


class Constant(nn.Module):
    """A model with an unused convolution: its gradient is zero, so only averaging changes its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.used = Pictures()
        self.unused = nn.Conv2d(5, 7, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + 0 * self.unused.weight.sum()


@pytest.mark.parametrize(
    ("name", "wraps_first"), [("decentralized", True), ("low precision", False), ("streaming", True), ("async", False)]
)
def test_weights_averaged_after_a_conversion(name: str, wraps_first: bool) -> None:
    """Averaging does not change weights that are equal on all ranks and have no gradient."""
    model = build(Constant)

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        loop = Loop(group, model, name)
        convert(loop.module)
        if not wraps_first:
            loop.ddp = DistributedDataParallel(loop.module, process_group=group)
        with loop.attach():
            for _ in range(6):
                loop.step()
        assert not loop.module.unused.weight.is_contiguous()
        return loop.module.unused.weight.detach().contiguous()

    for weight in run_ranks(2, body):
        # Codecs round, but must not move elements: elements differ by 0.1.
        atol = 2e-3 if name in ("low precision", "streaming") else 0
        torch.testing.assert_close(weight, model.unused.weight.detach(), rtol=0, atol=atol)


# Without powersgd, because the columns of its matrix are permuted.
@pytest.mark.parametrize(
    ("name", "num_steps_before"),
    [("bytegrad", 0), ("error feedback", 0), ("topk", 0), ("qadam", 0), ("gradients", 4), ("qadam", 4)],
)
def test_gradients_averaged_after_a_conversion_and_a_new_ddp(name: str, num_steps_before: int) -> None:
    """The weights equal those of a contiguous run: operations are elementwise, and moments belong to their elements."""

    def run(converts: bool) -> list[torch.Tensor]:
        def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
            loop = Loop(group, PICTURES, name)
            for loop_number, num_steps in enumerate((num_steps_before, 4)):
                if converts and loop_number:
                    convert(loop.module)
                loop.ddp = DistributedDataParallel(loop.module, process_group=group)
                with loop.attach():
                    for _ in range(num_steps):
                        loop.step()
            return [parameter.detach().contiguous() for parameter in loop.module.parameters()]

        return run_ranks(2, body)[0]

    # Convolutions in another format sum in another order, and QAdam divides by moments that may be small. A misplaced
    # element would be 0.01 off.
    for converted, contiguous in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(converted, contiguous, rtol=0, atol=1e-4 if num_steps_before else 1e-6)


@pytest.mark.parametrize("name", [*AVERAGED_WEIGHTS, *AVERAGED_GRADIENTS, *QADAM])
@pytest.mark.parametrize("num_steps_before", [0, pytest.param(3, marks=pytest.mark.release)])
def test_converted_after_attach_on_all_ranks(name: str, num_steps_before: int) -> None:
    def body(group: dist.ProcessGroup) -> tuple[int, str]:
        loop = Loop(group, PICTURES, name)
        loop.attach()
        for _ in range(num_steps_before):
            loop.step()
        convert(loop.module)
        return loop.steps_until_error()

    for num_steps, message in run_ranks(2, body):
        assert num_steps == 0 or name == "async"
        assert "the memory layout of parameter 0.weight has changed on rank" in message
        if name != "async":  # with async it may be an earlier error of another rank
            assert "its strides were (27, 9, 3, 1) and are (27, 1, 9, 3)" in message
        assert "attach" in message.split(". ")[-1]


@pytest.mark.parametrize("name", ["decentralized", "low precision", "streaming", "async", "error feedback", "qadam"])
def test_converted_after_attach_on_one_rank(name: str) -> None:
    """Every rank raises within a step or two. If ranks compare progress, all name the parameter and the rank."""

    def body(group: dist.ProcessGroup) -> tuple[int, str]:
        loop = Loop(group, PICTURES, name)
        loop.attach()
        for _ in range(3):
            loop.step()
        if loop.rank == 1:
            convert(loop.module)
        return loop.steps_until_error()

    (num_steps, first_message), _, (_, last_message) = messages = run_ranks(3, body)
    assert "parameter 0.weight has changed on rank 1 since attach" in messages[1][1]
    assert name == "async" or num_steps <= 3
    for message in (first_message, last_message):
        if name in AVERAGED_WEIGHTS or name.startswith("qadam"):
            assert "parameter 0.weight has changed on rank 1 since attach" in message
        else:
            assert "a rank has failed" in message or "closed" in message


@on_each_rank(2)
def test_a_rank_whose_peers_do_not_arrive_still_names_the_parameter(group: dist.ProcessGroup) -> None:
    """No round is due on the other ranks. The timeout bounds the wait, and the error names the parameter."""
    loop = Loop(group, PICTURES, "decentralized")
    loop.algorithm = tb.DecentralizedAlgorithm(communication_interval=100)
    attachment = loop.attach(timeout=timedelta(seconds=1))
    loop.step()
    if loop.rank == 1:
        convert(loop.module)
        start_s = time.monotonic()
        with pytest.raises(RuntimeError, match=r"0\.weight has changed on rank 1") as caught:
            loop.step()
        assert isinstance(caught.value.__cause__, tb.CommunicationError)
        assert time.monotonic() - start_s < 5
    dist.barrier(group=group)
    leave_by_exception(attachment)


@pytest.mark.parametrize("name", ["decentralized", "streaming", "low precision", "error feedback"])
def test_detach_after_a_conversion_works_if_no_step_follows(name: str) -> None:
    """The round in flight, the last mean and a saved state have their elements in the right order."""
    model = build(Constant)

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model, name)
        with loop.attach() as attachment:
            for _ in range(3):
                loop.step()
            before = attachment.runner.state_dict()
            convert(loop.module)
            after = attachment.runner.state_dict()
            kinds = before.keys() & {"differences", "theta", "weight", "left", "sent", "mean"}
            assert any(before[kind]["used.0.weight"].any() for kind in kinds)
            for kind in kinds:
                for weight, tensor in before[kind].items():
                    assert torch.equal(tensor, after[kind][weight]), (kind, weight)
        if name != "error feedback":
            torch.testing.assert_close(loop.module.unused.weight, model.unused.weight, rtol=0, atol=2e-3)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("name", "as_view", "num_steps_before"),
    [("gradients", False, 0), ("error feedback", True, 3), ("qadam", False, 3), ("gradients", True, 0)],
)
@on_each_rank(2)
def test_ddp_created_before_the_conversion(
    group: dist.ProcessGroup, name: str, as_view: bool, num_steps_before: int
) -> None:
    """DDP's buckets keep the layout of their creation, even after detach: a new DDP is needed."""
    loop = Loop(group, PICTURES, name, gradient_as_bucket_view=as_view)
    for _ in range(min(num_steps_before, 1)):
        with loop.attach():
            for _ in range(num_steps_before):
                loop.step()
    convert(loop.module)
    message = r"[02]\.weight has changed after DistributedDataParallel was created"
    with pytest.raises(RuntimeError, match=message), loop.attach():
        loop.step()


@on_each_rank(2)
def test_a_conversion_with_the_standalone_hook(group: dist.ProcessGroup) -> None:
    loop = Loop(group, PICTURES, "bytegrad")
    loop.ddp.register_comm_hook(loop.algorithm.reify(group), tb.comm_hook)
    for _ in range(3):
        loop.step()
    convert(loop.module)
    with pytest.raises(RuntimeError, match=r"the memory layout of parameter .* has changed on rank"):
        loop.step()


def test_layouts_with_the_same_memory_order() -> None:
    """Kernels of one element and depthwise kernels have the same memory order in both formats, so nothing raises."""

    class Thin(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(
                nn.Conv2d(3, 6, 1), nn.Tanh(), nn.Conv2d(6, 6, 3, groups=6, padding=1), nn.Flatten(), nn.Linear(216, 1)
            )

    model = build(Thin)

    def body(group: dist.ProcessGroup) -> None:
        for name in ("diloco", "error feedback"):
            loop = Loop(group, model, name)
            with loop.attach():
                for _ in range(3):
                    loop.step()
                strides = loop.module[0].weight.stride()
                convert(loop.module)
                assert loop.module[0].weight.stride() != strides
                for _ in range(3):
                    loop.step()

    run_ranks(2, body)


@pytest.mark.parametrize("is_complex", [False, True])
def test_order_of_any_layout(is_complex: bool) -> None:
    """`shape` inverts `flatten`, whatever the tensor's own layout; `matches` agrees with `flatten`."""
    dtype = torch.complex64 if is_complex else torch.float32
    values = torch.randn(2, 3, 4, 1, dtype=dtype)
    layouts = [
        values.contiguous(),
        values.contiguous(memory_format=torch.channels_last),
        values.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        torch.randn(2, 3, 4, 2, dtype=dtype)[..., :1].copy_(values),  # has gaps, so its order is that of its dimensions
    ]
    flats = []
    for parameter in layouts:
        order = MemoryOrder(parameter)
        for tensor in layouts:
            flat = order.flatten(tensor)
            real = torch.view_as_real(flat).reshape(-1) if is_complex else flat
            assert torch.equal(order.shape(real), values)
        flats.append(flat)
    for parameter, flat in zip(layouts, flats, strict=True):
        for tensor, tensor_flat in zip(layouts, flats, strict=True):
            assert MemoryOrder(parameter).matches(tensor) == torch.equal(flat, tensor_flat)
