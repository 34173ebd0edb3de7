"""ErrorFeedback keeps residuals in float32, without the loss scale, once a step has used the averages.

Gradients are dyadic and their codec is bfloat16: residuals are exact, and so is each comparison.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from components import GradientComponent, backward, dyadic, running
from ranks import run_ranks
from torchbagua.algorithms.gradient.feedback import ErrorFeedback
from torchbagua.codecs.cast import Cast
from torchbagua.runtime.parameter_state import residual_state

SHAPES = [(5, 7), (11,)]


def append_mean(feedback: ErrorFeedback[Any], bucket: tb.extend.BaguaBucket) -> None:
    def append(part: tb.extend.BaguaBucket) -> None:
        residuals = feedback.state.of_bucket(part)
        part.append_centralized_synchronous_op(hierarchical=False, compression=Cast(), error_feedback=residuals)

    feedback.append(bucket, append)


ALGORITHM = GradientComponent(
    make=lambda runner: ErrorFeedback(runner, residual_state("a test")), append=append_mean, codec=Cast()
)


class Rank:
    """Parameters of one rank, and a runner that averages their gradients with error feedback."""

    def __init__(
        self, group: dist.ProcessGroup, runner: tb.extend.Runner, parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        self.number = group.rank()
        self.runner = runner
        self.parameters = parameters
        self.optimizer = runner.optimizers[0]

    def gradients(self, step: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        seeds = [1000 * self.number + 10 * step + index for index in range(len(SHAPES))]
        return [dyadic(*shape, seed=seed, dtype=dtype) for shape, seed in zip(SHAPES, seeds, strict=True)]

    def backward(self, gradients: Sequence[torch.Tensor], **options: bool) -> list[torch.Tensor]:
        bucket = backward(self.runner, self.parameters, gradients, **options)
        return [part.clone() for _, part in bucket.views(bucket.flat)]

    def left_out(self) -> list[torch.Tensor]:
        """Return this rank's residuals of the sums of all gradients, in the shapes of parameters."""
        state = self.runner.state_dict()
        size = self.runner.process_group.size
        return [sent + size * mean for sent, mean in zip(state["sent"].values(), state["mean"].values(), strict=True)]


def on_ranks(size: int, body: Any, dtype: torch.dtype = torch.float32) -> list[Any]:
    def run(group: dist.ProcessGroup) -> Any:
        parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
        with running(group, ALGORITHM, optimizer=torch.optim.SGD(parameters, lr=0.0)) as (runner, _):
            return body(Rank(group, runner, parameters))

    return run_ranks(size, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [2, 4])
def test_averages_and_residuals_sum_to_the_gradients(size: int, dtype: torch.dtype) -> None:
    """Over several steps. A float16 bucket is averaged in float32: 11 bits would round a gradient with its residual."""

    def body(rank: Rank) -> tuple[Any, ...]:
        sums_in, sums_out = ([torch.zeros(shape) for shape in SHAPES] for _ in range(2))
        for step in range(5):
            gradients = rank.gradients(step, dtype)
            averages = rank.backward(gradients)
            rank.optimizer.step()
            for total, gradient in zip(sums_in, gradients, strict=True):
                total += gradient
            for total, average in zip(sums_out, averages, strict=True):
                total += average
        return sums_in, sums_out, rank.left_out()

    results = on_ranks(size, body, dtype)
    for index in range(len(SHAPES)):
        total_in, left_out = (sum(result[which][index] for result in results) for which in (0, 2))
        total_out = results[0][1][index]
        assert all(torch.equal(result[1][index], total_out) for result in results)
        assert left_out.dtype == torch.float32
        assert left_out.any()
        assert torch.equal(size * total_out + left_out, total_in)


def test_no_residual_is_kept_before_a_step_has_used_the_average() -> None:
    def body(rank: Rank) -> None:
        rank.backward(rank.gradients(0))
        assert not any(kept.any() for kept in rank.left_out())
        rank.optimizer.step()
        assert all(kept.any() for kept in rank.left_out())

    on_ranks(2, body)


def test_residuals_are_without_the_loss_scale() -> None:
    """The scale changes between steps, and the averages are multiplied by it."""

    def averages_of(rank: Rank, scales: Sequence[float]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        averages: list[torch.Tensor] = []
        for step, scale in enumerate(scales):
            rank.runner.use_grad_scaler(torch.amp.GradScaler("cpu", init_scale=scale))
            found = rank.backward([gradient * scale for gradient in rank.gradients(step)])
            averages += [average / scale for average in found]
            rank.optimizer.step()
        return averages, rank.left_out()

    plain = on_ranks(2, lambda rank: averages_of(rank, [1.0, 1.0, 1.0]))
    scaled = on_ranks(2, lambda rank: averages_of(rank, [1024.0, 0.5, 64.0]))
    for of_plain, of_scaled in zip(plain, scaled, strict=True):
        for tensors, expected in zip(of_plain, of_scaled, strict=True):
            assert all(map(torch.equal, tensors, expected))


def test_a_loop_with_a_grad_scaler_has_to_pass_it() -> None:
    assert on_ranks(1, lambda rank: rank.runner.needs_grad_scaler) == [True]


def test_a_rank_that_has_joined_commits_without_a_step() -> None:
    """Except if the average is not finite, which makes the other ranks skip the step."""

    def body(rank: Rank) -> tuple[list[torch.Tensor], ...]:
        def step(number: int, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
            has_joined = rank.number == 1 and number > 0
            rank.backward(gradients, has_joined=has_joined)
            if not has_joined and number < 2:
                rank.optimizer.step()
            return rank.left_out()

        first = step(0, rank.gradients(0))
        zeros = [torch.zeros(shape) for shape in SHAPES]
        joined = step(1, zeros if rank.number == 1 else rank.gradients(1))
        infinite = [torch.full(shape, torch.inf) for shape in SHAPES]
        return first, joined, step(2, zeros if rank.number == 1 else infinite)

    for number, (first, joined, skipped) in enumerate(on_ranks(2, body)):
        assert not any(map(torch.equal, first, joined)), f"rank {number}"
        assert all(map(torch.equal, joined, skipped)), f"rank {number}"
