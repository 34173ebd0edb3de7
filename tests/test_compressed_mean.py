"""CompressedMean: which codec sends a bucket, and whether residuals are added; bitwise equal to the oracle."""

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
from torchbagua.algorithms.gradient.compressed import CompressedMean
from torchbagua.algorithms.gradient.feedback import ErrorFeedback
from torchbagua.codecs import MinMaxUInt8
from torchbagua.codecs.base import Identity, MeanCodecs
from torchbagua.runtime.parameter_state import residual_state

LENGTH = 3000  # of two blocks
IN_8_BITS = MeanCodecs(MinMaxUInt8())


def gradient(rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(10 * rank + step)).to(dtype)


def means(
    size: int,
    codecs: MeanCodecs,
    dtype: torch.dtype = torch.float32,
    *,
    average: bool = True,
    has_feedback: bool = False,
    nodes: Sequence[int] | None = None,
    num_steps: int = 1,
) -> tuple[list[torch.Tensor], Any, list[str]]:
    """Return the mean that all ranks receive in each step, and rank 0's state and names of operations."""

    def make(runner: tb.extend.Runner) -> CompressedMean:
        feedback = ErrorFeedback(runner, residual_state("a test")) if has_feedback else None
        return CompressedMean(codecs, average, feedback)

    algorithm = GradientComponent(make=make, append=CompressedMean.append, codec=codecs.codec)

    def body(group: dist.ProcessGroup) -> tuple[Any, ...]:
        parameters = [torch.nn.Parameter(torch.zeros(LENGTH, dtype=dtype))]
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        own_group = group if nodes is None else tb.BaguaProcessGroup(group, nodes=nodes)
        found = []
        with running(own_group, algorithm, optimizer=optimizer) as (runner, _):
            for step in range(num_steps):
                bucket = backward(runner, parameters, [gradient(group.rank(), step, dtype)])
                found.append(bucket.flat.clone())
                optimizer.step()
            return found, runner.state_dict(), [operation.name for operation in bucket.operations]

    ranks = run_ranks(size, body)
    for found, _, _ in ranks:
        assert all(map(torch.equal, found, ranks[0][0]))
    return ranks[0]


def rows(size: int, step: int, dtype: torch.dtype = torch.float32) -> list[oracle.Array]:
    return [gradient(rank, step, dtype).numpy() for rank in range(size)]


@pytest.mark.parametrize("nodes", [None, [0, 0, 1]])
@pytest.mark.filterwarnings("ignore:torchbagua. GradientComponent sends")
def test_a_dtype_that_the_codec_does_not_encode_is_sent_in_full_precision(nodes: list[int] | None) -> None:
    """Also within nodes. Full precision has no residual, so none is stored."""
    codecs = MeanCodecs(MinMaxUInt8(), None if nodes is None else MinMaxUInt8(block=64))
    (found,), state, operations = means(3, codecs, torch.float64, has_feedback=True, nodes=nodes)
    np.testing.assert_array_equal(found.numpy(), oracle.gradient_allreduce(rows(3, 0, torch.float64), nodes))
    assert state["sent"] == state["mean"] == {}
    assert operations == ["centralized_mean in Identity()"]


def test_residuals_are_added_in_the_next_step() -> None:
    found, state, _ = means(2, IN_8_BITS, has_feedback=True, num_steps=3)
    expected = oracle.TwoPhaseResiduals(lambda row: oracle.quantise(row, [LENGTH]))
    for step, mean in enumerate(found):
        np.testing.assert_array_equal(mean.numpy(), expected(rows(2, step)), err_msg=f"step {step}")
    assert expected.sent is not None
    np.testing.assert_array_equal(state["sent"]["parameter 0"].numpy(), expected.sent[0])


def test_without_error_feedback_steps_are_independent() -> None:
    found, state, _ = means(2, IN_8_BITS, num_steps=2)
    for step, mean in enumerate(found):
        np.testing.assert_array_equal(mean.numpy(), oracle.bytegrad(rows(2, step), [LENGTH]))
    assert state == {}


def test_the_codec_within_nodes() -> None:
    nodes, within = [0, 0, 1], MinMaxUInt8(block=64)
    ((found,), _, _), ((exact,), _, _) = (
        means(3, MeanCodecs(MinMaxUInt8(), codec), nodes=nodes) for codec in (within, Identity())
    )
    expected = oracle.bytegrad(rows(3, 0), [LENGTH], nodes)
    np.testing.assert_array_equal(exact.numpy(), expected)
    assert not np.array_equal(found.numpy(), expected)
    (flat,), _, _ = means(3, IN_8_BITS, nodes=nodes)
    np.testing.assert_array_equal(flat.numpy(), oracle.bytegrad(rows(3, 0), [LENGTH]))


@pytest.mark.parametrize("has_feedback", [False, True])
def test_the_sum_is_the_mean_times_the_number_of_ranks(has_feedback: bool) -> None:
    (mean,), _, _ = means(2, IN_8_BITS, has_feedback=has_feedback)
    (total,), _, _ = means(2, IN_8_BITS, average=False, has_feedback=has_feedback)
    assert torch.equal(total, 2 * mean)


def test_a_single_rank_has_no_residual() -> None:
    (first, second), state, operations = means(1, IN_8_BITS, has_feedback=True, num_steps=2)
    assert torch.equal(first, gradient(0, 0, torch.float32))
    assert torch.equal(second, gradient(0, 1, torch.float32))
    assert not state["sent"]["parameter 0"].any()
    assert len(operations) == 1
