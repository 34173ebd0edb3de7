"""Phases: all ranks begin the next phase of a warm-up in the same backward, whatever each has counted."""

from typing import Any

import pytest
import torch.distributed as dist

import torchbagua as tb
from components import GradientComponent, running
from ranks import run_ranks
from torchbagua.algorithms.gradient.phases import Phases

STEPS_A_PHASE = 3


def phase_after(num_steps: int) -> int:
    return min(num_steps // STEPS_A_PHASE, 2)


ALGORITHM = GradientComponent(make=lambda runner: Phases(runner, phase_after))


def on_ranks(size: int, body: Any) -> list[Any]:
    def run(group: dist.ProcessGroup) -> Any:
        with running(group, ALGORITHM) as (runner, phases):
            return body(group.rank(), runner, phases)

    return run_ranks(size, run)


def begin(phases: Phases) -> tuple[bool, int | None]:
    """Begin a backward; return whether it is the first of a phase, and the phase."""
    return phases.begin_backward(), phases.current


def test_each_phase_begins_once_and_ranks_communicate_only_when_one_may_begin() -> None:
    def body(group: dist.ProcessGroup) -> tuple[list[tuple[bool, int | None]], list[int]]:
        recorder = tb.observe.Recorder()
        seen, sent = [], []
        with running(group, ALGORITHM, observers=[recorder]) as (runner, phases):
            assert phases.current is None
            for _ in range(8):
                seen.append(begin(phases))
                runner.step_taken()
                runner.tracer.deliver()
                sent.append(sum(event.phase == "send" for event in recorder.events))
                recorder.clear()
            assert (phases.num_backward_passes, phases.num_steps) == (8, 8)
        return seen, sent

    begins = [(True, 0), (False, 0), (False, 0), (True, 1), (False, 1), (False, 1), (True, 2), (False, 2)]
    assert run_ranks(2, body) == [(begins, [0, 0, 0, 1, 0, 0, 1, 0])] * 2


def test_a_step_counts_once_for_each_optimizer_that_takes_it_together() -> None:
    """It does not count without a synchronized backward, or if GradScaler skips it without a notification."""

    def body(rank: int, runner: tb.extend.Runner, phases: Phases) -> list[int]:
        counts = []
        for num_passes, num_calls in ((1, 1), (1, 2), (2, 1), (1, 0), (0, 1), (1, 1)):
            for _ in range(num_passes):
                phases.begin_backward()
            for _ in range(num_calls):
                runner.step_taken()
            counts.append(phases.num_steps)
        return counts

    # The fifth iteration takes the step of the fourth's backward.
    assert on_ranks(1, body) == [[1, 2, 3, 3, 4, 5]]


def test_phases_follow_the_rank_with_the_highest_count() -> None:
    """Rank 0 misses two steps, and rank 2 one; no phase begins before a rank has counted enough steps."""

    def body(rank: int, runner: tb.extend.Runner, phases: Phases) -> list[tuple[bool, int | None]]:
        seen = []
        for step in range(8):
            seen.append(begin(phases))
            is_lost = step == 0 or (step in {1, 2} and rank == 0) or (step == 1 and rank == 2)
            if not is_lost:
                runner.step_taken()
        return seen

    # All ranks miss the first step: phases begin one backward later than the number of passes suggests.
    expected = [(True, 0), *[(False, 0)] * 3, (True, 1), *[(False, 1)] * 2, (True, 2)]
    assert on_ranks(3, body) == [expected] * 3


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_loaded_state_continues(stop: int) -> None:
    """With the highest count of all ranks: a rank that had joined has counted fewer steps."""

    def steps(rank: int, runner: tb.extend.Runner, phases: Phases, numbers: range) -> list[tuple[bool, int | None]]:
        seen = []
        for number in numbers:
            seen.append(begin(phases))
            if rank == 1 or number != 1:
                runner.step_taken()
        return seen

    def first(rank: int, runner: tb.extend.Runner, phases: Phases) -> tuple[Any, Any]:
        seen = steps(rank, runner, phases, range(stop))
        state = phases.state_dict()
        return state, seen + steps(rank, runner, phases, range(stop, 9))

    states, whole = zip(*on_ranks(2, first), strict=True)

    def second(rank: int, runner: tb.extend.Runner, phases: Phases) -> Any:
        phases.load_state_dict(states[rank])
        assert phases.num_steps == max(state["num_steps"] for state in states) == stop
        return steps(rank, runner, phases, range(stop, 9))

    resumed = on_ranks(2, second)
    for before, after in zip(whole, resumed, strict=True):
        # A new impl has appended no operations yet: its first backward begins a phase.
        assert after[0] == (True, before[stop][1])
        assert after[1:] == before[stop + 1 :]


def test_states_of_different_backward_passes_are_an_error_on_all_ranks() -> None:
    def body(rank: int, runner: tb.extend.Runner, phases: Phases) -> str:
        state = {"num_backward_passes": 5 if rank == 1 else 4, "num_steps": 4}
        with pytest.raises(tb.CommunicationError, match="loading the state") as caught:
            phases.load_state_dict(state)
        return str(caught.value)

    (message,) = set(on_ranks(3, body))
    assert "backward passes so far in the state: ranks 0 and 2 have 4, rank 1 has 5" in message
