"""Base class of impls whose operations change after a number of training steps, on all ranks in the same step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchbagua.algorithms.base import Algorithm
from torchbagua.algorithms.gradient.feedback import FeedbackImpl
from torchbagua.algorithms.rank_state import check_rank_state
from torchbagua.collectives.agreement import all_reduce_max, require_same_progress
from torchbagua.collectives.process_group import BaguaProcessGroup

_PASSES, _STEPS = "num_backward_passes", "num_steps"


class PhasedFeedbackImpl(FeedbackImpl):
    """An impl whose operations depend on how many training steps there were. It saves the count.

    A rank knows its own steps only. It takes none while it has joined, and a loop may skip one on a single rank. But
    all ranks count the same synchronised backward passes, and no step is without one. So ranks agree on the number of
    steps, the largest that one has counted, before each backward that may begin a phase by the passes so far.

    Attributes:
        num_backward_passes: how many synchronised ones have begun, including the current one. The same on all ranks.
        num_steps: how many training steps this rank knows of.
    """

    def __init__(self, process_group: BaguaProcessGroup, algorithm: Algorithm) -> None:
        super().__init__(process_group, algorithm)
        self.num_backward_passes = 0
        self.num_steps = 0
        self._agreed_steps = 0
        self._has_backward = False  # since the last step
        self._phase: int | None = None
        self._has_changed_phase = False

    def phase_after(self, num_steps: int) -> int:
        """Return the phase of the backward after so many steps. It never decreases."""
        raise NotImplementedError

    def begin_phase(self, phase: int) -> None:
        """Prepare for the operations of a phase, which `init_operations` then appends."""
        raise NotImplementedError

    def need_reset(self) -> bool:
        """Return True in the first backward of a phase."""
        return self._has_changed_phase

    def on_step_taken(self, parameters: Sequence[torch.Tensor]) -> None:
        """Count the step; those of several optimizers after one backward are one."""
        self.num_steps += int(self._has_backward)
        self._has_backward = False
        super().on_step_taken(parameters)

    def on_backward_begin(self) -> None:
        """Count the backward, and begin the phase that it is in."""
        if self.phase_after(self._agreed_steps) != self.phase_after(self.num_backward_passes):
            self._agree_on_steps()
        phase = self.phase_after(self._agreed_steps)
        self._has_changed_phase = phase != self._phase
        if self._has_changed_phase:
            self.begin_phase(phase)
        self._phase = phase
        self.num_backward_passes += 1
        self._has_backward = True

    def _agree_on_steps(self) -> None:
        own, world = self.num_steps, self.process_group.world
        agreement = self.lane.submit(lambda: all_reduce_max(world, [own], "the number of training steps"))
        self.num_steps = self._agreed_steps = agreement.result()[0]

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: the `parameter_state`, and the backward passes and steps so far."""
        return {**super().state_dict(), _PASSES: self.num_backward_passes, _STEPS: self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, see `AlgorithmImpl.load_state_dict`."""
        assert self.parameter_state is not None
        check_rank_state(type(self).__name__, state, [*self.parameter_state.names, _PASSES, _STEPS], self.process_group)
        num_passes, num_steps, world = int(state[_PASSES]), int(state[_STEPS]), self.process_group.world
        progress = {"as backward passes so far in its state": num_passes}
        agreement = self.lane.submit(
            lambda: require_same_progress(world, progress, "loading the state", value=num_steps)
        )
        num_steps = agreement.result()  # the largest: a rank that had joined knows of fewer
        super().load_state_dict(state)
        self.num_backward_passes, self._has_backward = num_passes, False
        self.num_steps = self._agreed_steps = num_steps
