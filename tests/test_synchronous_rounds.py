"""SynchronousRounds: steps and rounds are counted, and compared on all ranks."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import torchbagua as tb
from components import WeightComponent, running
from ranks import run_ranks
from torchbagua.algorithms.weights.rounds import SynchronousRounds

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
