"""MomentumMean: `.grad` becomes (mean - b1 m) / (1 - b1), bitwise equal to the formula on stacked arrays."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import oracle
import torchbagua as tb
from components import GradientComponent, backward, running
from ranks import run_ranks
from torchbagua.algorithms.qadam import algorithm as q_adam
from torchbagua.algorithms.qadam.algorithm import MomentumMean
from torchbagua.codecs import MinMaxUInt8
from torchbagua.runtime.parameter_state import residual_state

SHAPES = [(40, 60), (33,), (7, 3)]
BETA1 = [0.9, 0.75, 0.9]  # the second is in a separate parameter group
LENGTHS = [2400, 33, 21]


def gradients(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Rank:
    """Parameters of one rank after a warm-up of one step, with the same momenta on all ranks, and their optimizer."""

    def __init__(self) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        first, second, third = self.parameters
        groups = [
            {"params": [first, third], "betas": (BETA1[0], 0.99)},
            {"params": [second], "betas": (BETA1[1], 0.99)},
        ]
        self.optimizer = tb.QAdamOptimizer(groups, lr=0.01, warmup_steps=1)
        for parameter, gradient in zip(self.parameters, gradients(100, 0), strict=True):
            parameter.grad = gradient
        self.optimizer.step()

    @property
    def momenta(self) -> list[torch.Tensor]:
        return [self.optimizer.state[parameter]["exp_avg"].clone() for parameter in self.parameters]


def on_ranks(
    size: int,
    body: Any,
    *,
    has_feedback: bool = False,
    nodes: Sequence[int] | None = None,
) -> list[Any]:
    """Run `body(rank number, rank, runner, average)`, where `average` averages gradients and returns `.grad`."""

    def run(group: dist.ProcessGroup) -> Any:
        rank = Rank()

        def make(runner: tb.extend.Runner) -> MomentumMean:
            runner.require_grad_scaler()
            residuals = None
            if has_feedback:
                residuals = runner.keep(residual_state("a test"), lambda: rank.optimizer.parameters)
            rank.optimizer.attach_averager(runner)
            return MomentumMean(runner, rank.optimizer, residuals, hierarchical=nodes is not None)

        algorithm = GradientComponent(make=make, append=MomentumMean.append, codec=MinMaxUInt8())
        own_group = group if nodes is None else tb.BaguaProcessGroup(group, nodes=nodes)
        with running(own_group, algorithm, optimizer=rank.optimizer) as (runner, _):

            def average(values: Sequence[torch.Tensor], *, has_joined: bool = False) -> list[torch.Tensor]:
                bucket = backward(runner, rank.parameters, values, has_joined=has_joined)
                return [part.clone() for _, part in bucket.views(bucket.flat)]

            return body(group.rank(), rank, runner, average)

    return run_ranks(size, run)


class Formula:
    """The expected `.grad` by parameter, if blocks end where parameters do."""

    def __init__(self, nodes: Sequence[int] | None = None) -> None:
        self.nodes = nodes
        self.kept = [oracle.TwoPhaseResiduals(self.coding(length), nodes) for length in LENGTHS]

    @staticmethod
    def coding(length: int) -> Any:
        return lambda row: oracle.quantise(row, [length])

    def __call__(
        self, by_rank: Sequence[Sequence[torch.Tensor]], momenta: Sequence[torch.Tensor], *, has_feedback: bool
    ) -> list[oracle.Array]:
        results = []
        for index, (beta1, length) in enumerate(zip(BETA1, LENGTHS, strict=True)):
            rows = [values[index].numpy().ravel() for values in by_rank]

            def average(momenta_of_ranks: Sequence[oracle.Array], index: int = index, length: int = length) -> Any:
                if has_feedback:
                    return self.kept[index](momenta_of_ranks)
                return oracle.bytegrad(momenta_of_ranks, [length], self.nodes)

            results.append(oracle.qadam_gradient(rows, momenta[index].numpy().ravel(), beta1, average))
        return results


@pytest.mark.parametrize("has_feedback", [False, True])
@pytest.mark.parametrize(("size", "nodes"), [(2, None), (3, [0, 0, 1])])
def test_it_equals_the_formula(size: int, nodes: list[int] | None, has_feedback: bool) -> None:
    def body(number: int, rank: Rank, runner: tb.extend.Runner, average: Any) -> list[tuple[Any, Any]]:
        seen = []
        for step in range(3):
            before = rank.momenta
            seen.append((before, average(gradients(number, step))))
            rank.optimizer.step()
        return seen

    ranks = on_ranks(size, body, has_feedback=has_feedback, nodes=nodes)
    formula = Formula(nodes)
    for step in range(3):
        by_rank = [gradients(number, step) for number in range(size)]
        expected = formula(by_rank, ranks[0][step][0], has_feedback=has_feedback)
        for rank in ranks:
            for found, reference in zip(rank[step][1], expected, strict=True):
                np.testing.assert_array_equal(found.numpy().ravel(), reference, err_msg=f"step {step}")


@pytest.mark.parametrize("has_feedback", [False, True])
def test_one_pass_is_bitwise_equal_to_separate_operations(monkeypatch: pytest.MonkeyPatch, has_feedback: bool) -> None:
    """Separate operations are for other codecs, for GPUs, and for observers that sample."""

    def gradients_of_steps(longest_block: int) -> Any:
        monkeypatch.setattr(q_adam, "_LONGEST_BLOCK", longest_block)

        def body(number: int, rank: Rank, runner: tb.extend.Runner, average: Any) -> list[torch.Tensor]:
            runner.use_grad_scaler(torch.amp.GradScaler("cpu", init_scale=3.0))
            seen = []
            for step in range(3):
                seen += average(gradients(number, step))
                rank.optimizer.step()
            return seen

        return on_ranks(3, body, has_feedback=has_feedback)

    for in_turn, at_once in zip(gradients_of_steps(0), gradients_of_steps(1 << 15), strict=True):
        assert all(map(torch.equal, in_turn, at_once))


def test_the_loss_scale_is_in_gradients_and_not_in_momenta() -> None:
    """A power of two changes no bit of the sent values."""

    def with_scale(scale: float) -> Any:
        def body(number: int, rank: Rank, runner: tb.extend.Runner, average: Any) -> list[torch.Tensor]:
            runner.use_grad_scaler(torch.amp.GradScaler("cpu", init_scale=scale))
            found = average([gradient * scale for gradient in gradients(number, 0)])
            return [gradient / scale for gradient in found]

        return body

    plain, scaled = (on_ranks(2, with_scale(scale), has_feedback=True) for scale in (1.0, 512.0))
    for expected, actual in zip(plain, scaled, strict=True):
        assert all(map(torch.equal, expected, actual))


@pytest.mark.parametrize("has_feedback", [False, True])
def test_a_rank_that_has_joined_adopts_the_momenta_of_the_others(has_feedback: bool) -> None:
    """It adopts the momenta of the steps that the others take: they skip a step that is not finite."""

    def body(number: int, rank: Rank, runner: tb.extend.Runner, average: Any) -> list[Any]:
        seen = []
        for step in range(4):
            has_joined = number == 1 and step > 0
            values = gradients(number, step)
            if has_joined:
                values = [torch.zeros_like(value) for value in values]
            elif step == 2:
                values = [value * torch.inf for value in values]
            average(values, has_joined=has_joined)
            if not has_joined and step != 2:
                rank.optimizer.step()
            seen.append((rank.momenta, rank.optimizer.num_updates, runner.state_dict()))
        return seen

    first, second = on_ranks(2, body, has_feedback=has_feedback)
    for step, (own, joined) in enumerate(zip(first, second, strict=True)):
        assert own[1] == joined[1], f"step {step}"
        assert all(map(torch.equal, own[0], joined[0])), f"step {step}"
    assert not torch.equal(second[0][0][0], second[1][0][0])
    if has_feedback:  # and it sends with its residual
        sent = [next(iter(state["sent"].values())) for _, _, state in second]
        assert not torch.equal(sent[0], sent[1])
        assert torch.equal(sent[1], sent[2])
