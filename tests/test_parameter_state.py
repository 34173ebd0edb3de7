"""State by parameter for a user's algorithm: PowerSGD's, a full residual and a factor of each matrix.

Written as a user would, against the documented interface: about 80 lines (Vogels et al., arXiv 1905.13727).
"""

import copy
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from q_adam_life import ChannelsLast
from ranks import run_ranks
from torchbagua.runtime.parameter_state import ParameterState
from training import Branches, Tower, build


@dataclass(frozen=True)
class LowRankAlgorithm(tb.Algorithm):
    """Average gradients as products of two factors; one factor and the residual are stored."""

    rank: int = 2

    def make_impl(self, runner: tb.extend.Runner) -> "LowRankImpl":
        return LowRankImpl(runner)


class LowRankImpl(tb.AlgorithmImpl):
    algorithm: LowRankAlgorithm

    def __init__(self, runner: tb.extend.Runner) -> None:
        super().__init__(runner)
        shapes = {"residual": None, "factor": self.factor_shape}
        self.parameter_state = runner.keep(ParameterState("LowRankAlgorithm", self.make_state, shapes))

    def factor_shape(self, parameter: torch.Tensor) -> tuple[int, int]:
        """Return columns and rank; no columns for vectors and smaller matrices, which are sent uncompressed."""
        columns = parameter.numel() // max(1, parameter.shape[0]) if parameter.dim() > 1 else 0
        return (columns if min(columns, *parameter.shape[:1]) >= self.algorithm.rank else 0), self.algorithm.rank

    def make_state(
        self, bucket: tb.extend.BaguaBucket, held: Sequence[Sequence[torch.Tensor]] | None
    ) -> "LowRankState":
        if held is None:
            flats = [part for _, part in bucket.parts(bucket.flat)]
            shapes = [self.factor_shape(tensor.parameter) for tensor in bucket.tensors]
            held = [
                (torch.zeros_like(x), torch.randn(*shape, generator=seed()))
                for x, shape in zip(flats, shapes, strict=True)
            ]
        return LowRankState(held)

    def init_operations(self, module: nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
        state = self.parameter_state.of_bucket(bucket)
        bucket.append_python_op(self.parameter_state.resolve_last_backward)

        def average(bucket: tb.extend.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
            for number, (tensor, part) in enumerate(bucket.parts(bucket.flat)):
                columns, rank = self.factor_shape(tensor.parameter)
                residual, factor = state.last[number]
                if columns == 0:
                    part.copy_(self.mean(part, group))
                    state.staged[number] = residual, factor
                    continue
                full = (part + residual).view(-1, columns)
                left = torch.linalg.qr(self.mean(full @ factor.view(columns, rank), group)).Q
                right = self.mean(full.t() @ left, group)
                part.copy_((left @ right.t()).flatten())
                state.staged[number] = full.flatten() - part, right.flatten()

        bucket.append_python_op(average)

    def mean(self, x: torch.Tensor, group: tb.BaguaProcessGroup) -> torch.Tensor:
        dist.all_reduce(x, group=group.world.torch_group)
        return x / group.size


def seed() -> torch.Generator:
    return torch.Generator().manual_seed(7)


class LowRankState:
    """Residual and factor of each parameter of a bucket."""

    def __init__(self, held: Sequence[Sequence[torch.Tensor]]) -> None:
        ends = list(itertools.accumulate(len(residual) for residual, _ in held))
        self.starts = [0, *ends[:-1]]
        self.values = list(held)
        self.last = list(held)  # the values from which the next step continues
        self.staged = list(held)

    def numbers(self, parts: Sequence[slice]) -> list[int]:
        return [n for n, start in enumerate(self.starts) if any(part.start <= start < part.stop for part in parts)]

    def continue_from_staged(self, parts: Sequence[slice]) -> None:
        self.last = list(self.values)
        for number in self.numbers(parts):
            self.last[number] = self.staged[number]

    def commit(self, parts: Sequence[slice] | None = None) -> None:
        for number in range(len(self.starts)) if parts is None else self.numbers(parts):
            self.values[number] = self.staged[number]

    def expand(self, part: slice) -> Sequence[torch.Tensor]:
        return self.values[self.starts.index(part.start)]


class Loop:
    def __init__(self, group: dist.ProcessGroup, model: nn.Module, **ddp_options: Any) -> None:
        self.ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group, **ddp_options)
        self.named = {
            name: parameter for name, parameter in self.ddp.module.named_parameters() if parameter.requires_grad
        }
        self.optimizer = torch.optim.SGD(self.named.values(), lr=1e-6)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        self.data = torch.Generator().manual_seed(1000 + group.rank())
        self.attachment = tb.attach(self.ddp, self.optimizer, LowRankAlgorithm())

    def step(self, choice: int = 0, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        loss = self.ddp(torch.randn(6, 10, generator=self.data), choice).square().sum()
        self.scaler.scale(loss * factor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        state = self.attachment.runner.state_dict()
        return {kind: state[kind] for kind in ("residual", "factor")}

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.named.values()]


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("make_model", [Tower, ChannelsLast])
def test_residuals_are_stored(make_model: type[nn.Module]) -> None:
    """Over rebuilt buckets, in the parameter's shape; replicas are equal."""
    model = build(make_model)

    def body(group: dist.ProcessGroup) -> tuple[Any, ...]:
        loop = Loop(group, model, bucket_cap_mb=0.01)
        total_in = {name: torch.zeros_like(parameter) for name, parameter in loop.named.items()}
        total_out = copy.deepcopy(total_in)

        def add(gradient: torch.Tensor, name: str) -> None:
            total_in[name] += gradient

        for name, parameter in loop.named.items():
            parameter.register_hook(partial(add, name=name))
        with loop.attachment:
            for _ in range(6):
                loop.step()
                for name, parameter in loop.named.items():
                    total_out[name] += parameter.grad
            return total_in, total_out, loop.state(), loop.weights()

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first[3], second[3]))
    for name, total_out in first[1].items():
        total_in = (first[0][name] + second[0][name]) / 2
        residual = (first[2]["residual"][name] + second[2]["residual"][name]) / 2
        # The tolerance of sums over six steps in float32.
        assert (total_out + residual - total_in).norm() <= 1e-5 * total_in.norm()
        assert torch.equal(first[2]["factor"][name], second[2]["factor"][name])
        is_compressed = first[2]["factor"][name].numel() > 0
        assert first[2]["residual"][name].any() == second[2]["residual"][name].any() == is_compressed


@pytest.mark.parametrize("later_cap_mb", [0.01, 25])
def test_resume_bit_for_bit(later_cap_mb: float) -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> bool:
        first = Loop(group, model, bucket_cap_mb=0.01)
        with first.attachment:
            for step in range(5):
                if step == 2:
                    file = io.BytesIO()
                    state = {"model": first.ddp.module.state_dict(), "attachment": first.attachment.state_dict()}
                    torch.save(state | {"data": first.data.get_state()}, file)
                first.step()
        second = Loop(group, model, bucket_cap_mb=later_cap_mb)
        with second.attachment:
            state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            second.ddp.module.load_state_dict(state["model"])
            second.attachment.load_state_dict(state["attachment"])
            second.data.set_state(state["data"])
            for _ in range(3):
                second.step()
        return all(map(torch.equal, first.weights(), second.weights()))

    assert run_ranks(2, body) == [True, True]


def test_a_skipped_step_and_an_unused_parameter_leave_no_trace() -> None:
    model = build(Branches)

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model, find_unused_parameters=True)
        with loop.attachment:
            for _ in range(3):
                loop.step()
            before = loop.state()
            loop.step(factor=float("inf"))
            assert all(equal(loop.state()[kind], before[kind]) for kind in before)
            loop.step(choice=1)
            after = loop.state()
        for kind in before:
            changed = {name for name in after[kind] if not torch.equal(after[kind][name], before[kind][name])}
            assert {"stem.weight", "right.weight"} <= changed
            assert "left.weight" not in changed
        assert before["residual"]["left.weight"].any()

    run_ranks(2, body)


def test_a_state_of_other_shapes_is_refused() -> None:
    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, nn.Linear(10, 3))
        with loop.attachment:
            state = loop.attachment.runner.state_dict()
            state["factor"]["weight"] = torch.zeros(10, 3)
            with pytest.raises(
                ValueError, match=r"residual and factor must contain .* of the parameters, got .*\['weight'\]"
            ):
                loop.attachment.runner.load_state_dict(state)

    run_ranks(1, body)
