"""Phases of a warm-up: operations that change after a number of training steps, on all ranks in the same step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchbagua.collectives.agreement import all_reduce_max, require_same_progress
from torchbagua.runtime.rank_state import check_keys
from torchbagua.runtime.runner import Runner

_PASSES, _STEPS = "num_backward_passes", "num_steps"


class Phases:
    """Counts training steps, and says in which phase of a warm-up a backward is.

    A rank knows its own steps only. It takes none while it has joined, and a loop may skip one on a single rank. But
    all ranks count the same synchronised backward passes, and no step is without one. So ranks agree on the number of
    steps, the largest that one has counted, before each backward that may begin a phase by the passes so far.

    Args:
        runner: that of the impl.
        phase_after: returns the phase of the backward after so many steps. It never decreases.

    Attributes:
        current: the phase of the current backward; None before the first.
        num_backward_passes: how many synchronised ones have begun, including the current one. The same on all ranks.
        num_steps: how many training steps this rank knows of.
    """

    def __init__(self, runner: Runner, phase_after: Callable[[int], int]) -> None:
        self.current: int | None = None
        self.num_backward_passes = 0
        self.num_steps = 0
        self._runner = runner
        self._phase_after = phase_after
        self._agreed_steps = 0
        self._has_backward = False  # since the last step
        runner.on_step_taken(self._count_step)

    def begin_backward(self) -> bool:
        """Count the backward; return whether it is the first of a phase. For `AlgorithmImpl.need_reset`."""
        if self._phase_after(self._agreed_steps) != self._phase_after(self.num_backward_passes):
            self._agree_on_steps()
        before, self.current = self.current, self._phase_after(self._agreed_steps)
        self.num_backward_passes += 1
        self._has_backward = True
        return self.current != before

    def _count_step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Count the step; those of several optimizers after one backward are one."""
        self.num_steps += int(self._has_backward)
        self._has_backward = False

    def _agree_on_steps(self) -> None:
        own, world = self.num_steps, self._runner.process_group.world
        agreement = self._runner.lane.submit(lambda: all_reduce_max(world, [own], "the number of training steps"))
        self.num_steps = self._agreed_steps = agreement.result()[0]

    def state_dict(self) -> dict[str, int]:
        """Return the backward passes and steps so far."""
        return {_PASSES: self.num_backward_passes, _STEPS: self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Collective.

        Raises:
            ValueError: `state` lacks one of the two.
            CommunicationError: other ranks have another number of backward passes in their states.
        """
        check_keys(self._runner.name, state, [_PASSES, _STEPS])
        num_passes, num_steps, world = int(state[_PASSES]), int(state[_STEPS]), self._runner.process_group.world
        progress = {"as backward passes so far in its state": num_passes}
        agreement = self._runner.lane.submit(
            lambda: require_same_progress(world, progress, "loading the state", value=num_steps)
        )
        # The largest: a rank that had joined knows of fewer.
        self.num_steps = self._agreed_steps = agreement.result()
        self.num_backward_passes, self._has_backward = num_passes, False
