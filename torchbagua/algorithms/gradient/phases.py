"""Warm-up phases: operations that change after a number of training steps, at the same step on all ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchbagua.collectives.agreement import Progress, agree, all_reduce_max, require_same_progress
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.rank_state import check_keys

_PASSES, _STEPS = "num_backward_passes", "num_steps"


@dataclass(frozen=True)
class _Position:
    """The counts in the state that a rank loads."""

    num_backward_passes: int
    num_steps: int


class Phases:
    """Counts training steps and determines the warm-up phase of each backward.

    A rank knows only its own steps. It takes no steps after it has joined, and a training loop may skip a step on a
    single rank. However, all ranks count the same synchronized backward passes, and every step follows at least one. So
    the ranks agree on the number of steps, the maximum over ranks, before each backward that may begin a phase
    according to the number of passes so far.

    Attributes:
        current: the phase of the current backward. None before the first backward.
        num_backward_passes: the number of synchronized backward passes that have begun, including the current one. The
            same on all ranks.
        num_steps: the number of training steps that this rank knows of.
    """

    def __init__(self, runner: GradientRunner, phase_after: Callable[[int], int]) -> None:
        self.current: int | None = None
        self.num_backward_passes = 0
        self.num_steps = 0
        self._runner = runner
        self._phase_after = phase_after
        self._agreed_steps = 0
        self._has_backward = False  # since the last step
        runner.on_step_taken(self._count_step)

    def begin_backward(self) -> bool:
        """Count a backward and return whether it is the first of a phase. For `AlgorithmImpl.need_reset`."""
        if self._phase_after(self._agreed_steps) != self._phase_after(self.num_backward_passes):
            self._agree_on_steps()
        before, self.current = self.current, self._phase_after(self._agreed_steps)
        self.num_backward_passes += 1
        self._has_backward = True
        return self.current != before

    def _count_step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Count a step. The steps of several optimizers after one backward count as one."""
        self.num_steps += int(self._has_backward)
        self._has_backward = False

    def _agree_on_steps(self) -> None:
        own, world = self.num_steps, self._runner.process_group.world
        purpose = "the number of training steps"
        agreement = self._runner.submit_agreement(lambda: all_reduce_max(world, [own], purpose))
        self.num_steps = self._agreed_steps = agreement.result()[0]

    def state_dict(self) -> dict[str, int]:
        """Return the backward passes and steps so far."""
        return {_PASSES: self.num_backward_passes, _STEPS: self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Collective."""
        check_keys(self._runner.name, state, [_PASSES, _STEPS])
        num_passes, num_steps, world = int(state[_PASSES]), int(state[_STEPS]), self._runner.process_group.world
        own = _Position(num_passes, num_steps)

        def compare() -> int:
            positions = agree(world, own, purpose := "loading the state")
            passes = [{"backward passes so far in the state": each.num_backward_passes} for each in positions]
            require_same_progress(world, [Progress(purpose, numbers) for numbers in passes])
            # Not the same on all ranks: a rank that had joined has counted fewer steps.
            return max(each.num_steps for each in positions)

        self.num_steps = self._agreed_steps = self._runner.lane.submit(compare).result()
        self.num_backward_passes, self._has_backward = num_passes, False
