"""What weight algorithms are made of: synchronous rounds, compared on all ranks, and means of other tensors."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import oracle
import torchbagua as tb
from components import WeightComponent, running
from ranks import run_ranks
from torchbagua.algorithms.weights.rounds import SynchronousRounds
from training import flat

ALGORITHM = WeightComponent(make=lambda runner: SynchronousRounds(runner, runner.algorithm))


@pytest.mark.parametrize(
    ("attribute", "name"),
    [
        ("step", "optimizer steps"),
        ("num_rounds", "rounds"),
        ("num_backwards", "backward passes in 0 steps of the optimizers"),
        ("searches", "searches for Inf"),
    ],
)
def test_ranks_that_differ_all_raise(attribute: str, name: str) -> None:
    """The purpose in the error contains the number of steps of this rank."""

    def body(group: dist.ProcessGroup) -> str:
        rank = group.rank()
        with running(group, ALGORITHM, module=nn.Linear(3, 2)) as (runner, rounds):
            assert [runner.agree_on_overflow(found and rank == 1) for found in (False, True)] == [False, True]
            runner.has_unknown_scaler = True  # only then do ranks compare their backward passes
            if attribute != "searches":
                setattr(rounds, attribute, 4 + rank)
            searches = attribute == "searches" and rank == 1
            with pytest.raises(tb.CommunicationError) as caught:
                runner.agree_on_overflow(False) if searches else rounds.start(lambda: None).result()
        return str(caught.value)

    first = 2 if attribute == "searches" else 4
    for rank, error in enumerate(run_ranks(2, body)):
        assert f"ranks disagree on {name}: rank 0 has {first}, rank 1 has {first + 1}." in error
        if attribute != "searches":
            num_steps = 4 + rank if attribute == "step" else 0
            assert f"out of step in the round after {num_steps} steps" in error


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_round_that_overlaps_the_next_step_is_part_of_it(overlaps: bool) -> None:
    def body(group: dist.ProcessGroup) -> set[int]:
        recorder: Any = tb.observe.Recorder()
        with running(group, ALGORITHM, module=nn.Linear(3, 2), observers=[recorder]) as (runner, rounds):
            runner.tracer.deliver()
            step = runner.tracer.step
            recorder.clear()
            if overlaps:
                rounds.overlap_next_step()
            rounds.start(lambda: None).result()
            runner.tracer.end_step()
            runner.tracer.end_step()
            return {event.step - step for event in recorder.events if event.phase == "send"}

    assert run_ranks(2, body) == [{int(overlaps)}] * 2


# WeightMeans.average_tensors: the mean over ranks of tensors outside the module.

NO_PROGRESS: dict[str, int] = {}
WEIGHTS = WeightComponent(make=lambda runner: runner.algorithm.make_weights(runner, lambda: NO_PROGRESS))


def tensors_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(4, 6, generator=generator).t(),  # not contiguous
        torch.randn(3, generator=generator, dtype=torch.float64),
        torch.randn(5, generator=generator, dtype=torch.complex64),
        torch.randn((), generator=generator),
    ]


@pytest.mark.parametrize("size", [1, 3])
def test_the_mean_of_tensors_outside_the_module(size: int) -> None:
    """Tensors of different shapes raise on all ranks, and stay unchanged."""

    def body(group: dist.ProcessGroup) -> Any:
        with running(group, WEIGHTS, module=nn.Linear(2, 2)) as (_, weights):
            tensors = tensors_of(group.rank())
            weights.means.average_tensors(tensors, "running means")
            if size > 1:
                different = [torch.full((2, 3), 1.0 + group.rank()), torch.zeros(2 + group.rank())]
                with pytest.raises(tb.CommunicationError, match=r"in the mean of running means: .* the fingerprint of"):
                    weights.means.average_tensors(different, "running means")
                assert bool((different[0] == 1.0 + group.rank()).all())
        return tensors

    ranks = run_ranks(size, body)
    for index, rows in enumerate(zip(*map(tensors_of, range(size)), strict=True)):
        expected = oracle.gradient_allreduce([flat(row) for row in rows])
        for found in ranks:
            np.testing.assert_array_equal(flat(found[index]), expected)
