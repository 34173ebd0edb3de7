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


def on_ranks(size: int, body: Any, **options: Any) -> list[Any]:
    def run(group: dist.ProcessGroup) -> Any:
        with running(group, ALGORITHM, module=nn.Linear(3, 2), **options) as (runner, rounds):
            return body(group.rank(), runner, rounds)

    return run_ranks(size, run)


def error_of(rounds: SynchronousRounds) -> str:
    with pytest.raises(tb.CommunicationError) as caught:
        rounds.start(lambda: None).result()
    return str(caught.value)


def test_a_round_is_counted_and_runs_on_the_lane() -> None:
    def body(rank: int, runner: tb.extend.Runner, rounds: SynchronousRounds) -> tuple[int, int]:
        assert len(list(rounds.weights)) == 1
        assert rounds.submit(lambda: 3 + rank).result() == 3 + rank
        assert rounds.num_rounds == 0
        result = rounds.start(lambda: 5 + rank).result()
        return result, rounds.num_rounds

    assert on_ranks(2, body) == [(5, 1), (6, 1)]


@pytest.mark.parametrize(("size", "due_after"), [(1, []), (2, [0, 3, 6])])
def test_one_step_in_an_interval_is_due(size: int, due_after: list[int]) -> None:
    def body(rank: int, runner: tb.extend.Runner, rounds: SynchronousRounds) -> list[int]:
        due = []
        for rounds.step in range(7):
            if rounds.is_due(3):
                due.append(rounds.step)
        return due

    assert on_ranks(size, body) == [due_after] * size


@pytest.mark.parametrize(
    ("attribute", "name"),
    [
        ("step", "optimizer steps"),
        ("num_rounds", "rounds"),
        ("num_backwards", "backward passes in 0 steps of the optimizers"),
    ],
)
def test_ranks_that_differ_all_raise(attribute: str, name: str) -> None:
    """The purpose in the error contains the number of steps of this rank."""

    def body(rank: int, runner: tb.extend.Runner, rounds: SynchronousRounds) -> str:
        runner.has_unknown_scaler = True  # only then do ranks compare their backward passes
        setattr(rounds, attribute, 4 + rank)
        return error_of(rounds)

    first, second = on_ranks(2, body)
    num_steps = [4, 5] if attribute == "step" else [0, 0]
    for error, number in zip((first, second), num_steps, strict=True):
        assert (
            f"out of step in the round after {number} steps: ranks disagree on {name}: rank 0 has 4, rank 1 has 5."
            in error
        )


def test_an_inf_of_one_rank_is_known_to_all() -> None:
    """A rank may run more backward passes than another."""

    def body(rank: int, runner: tb.extend.Runner, rounds: SynchronousRounds) -> list[bool]:
        assert runner.needs_grad_scaler
        for _ in range(1 + rank):
            rounds.count_backward()
        found = [runner.agree_on_overflow(is_mine and rank == 1) for is_mine in (False, True, False)]
        rounds.start(lambda: None).result()
        return found

    assert on_ranks(2, body) == [[False, True, False]] * 2


def test_all_ranks_raise_if_only_one_searches_for_inf() -> None:
    def body(rank: int, runner: tb.extend.Runner, rounds: SynchronousRounds) -> str:
        if rank == 0:
            return error_of(rounds)
        with pytest.raises(tb.CommunicationError) as caught:
            runner.agree_on_overflow(False)
        return str(caught.value)

    for error in on_ranks(2, body):
        assert "searches for Inf: rank 0 has 0, rank 1 has 1." in error


def test_a_single_rank_needs_no_agreement() -> None:
    def body(rank: int, runner: tb.extend.Runner, rounds: SynchronousRounds) -> None:
        assert not runner.needs_grad_scaler
        assert [runner.agree_on_overflow(found) for found in (False, True)] == [False, True]
        assert list(rounds.weights) == []

    on_ranks(1, body)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_round_that_overlaps_the_next_step_is_part_of_it(overlaps: bool) -> None:
    def body(group: dist.ProcessGroup) -> set[int]:
        recorder = tb.observe.Recorder()
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
