"""Model averaging in rounds that all ranks make at the same step."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torchbagua.algorithms.model_averaging import ModelAveragingImpl
from torchbagua.collectives import BaguaProcessGroup, require_same_progress
from torchbagua.lane import Job

T = TypeVar("T")


class SynchronousAveragingImpl(ModelAveragingImpl):
    """Averaging in rounds that all ranks make at the same step; a step counter that every round compares.

    Attributes:
        step: optimizer steps so far.
        num_rounds: rounds so far.
        num_backwards: backward passes so far. A step that a GradScaler skips on one rank alone shows here: that rank
            makes its next step after one more of them. So they are compared, unless attach was given the scaler.
    """

    def __init__(self, process_group: BaguaProcessGroup, communication_interval: int, **options: Any) -> None:
        super().__init__(process_group, **options)
        self.communication_interval = communication_interval
        self.step = 0
        self.num_rounds = 0
        self.num_backwards = 0
        self._num_overflow_checks = 0

    @property
    def is_due(self) -> bool:
        """Whether this step communicates."""
        return not self.is_alone and self.step % self.communication_interval == 0

    @property
    def needs_grad_scaler(self) -> bool:
        """True: all ranks skip a step, or none."""
        return not self.is_alone

    def after_step(self) -> None:
        """Do what comes after an optimizer step; counts it."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait for what is in flight and bring it into the weights."""
        raise NotImplementedError

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None]:
        """Count backward passes."""

        def count() -> None:
            self.num_backwards += 1

        return count

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        """Communicate where it is due."""
        return lambda optimizer: self.after_step()

    def submit_round(self, run: Callable[[], T]) -> Job[T]:
        """Have the lane run `run` when all ranks have come to the same step; where they have not, all ranks raise."""
        return self.start_in_step(run, f"the round after {self.step} steps")

    def agree_on_overflow(self, found_inf: bool) -> bool:
        """Return whether any rank has found an Inf or NaN in its gradients. Collective."""
        if self.is_alone:
            return found_inf
        self._num_overflow_checks += 1
        world, facts = self.process_group.world, self.facts()
        purpose = f"the search for Inf after {self.step} steps"
        return self.lane.submit(lambda: require_same_progress(world, facts, purpose, int(found_inf))).result() == 1

    def finish(self, *, failed: bool) -> bool:
        """Bring what is in flight into the weights and, where it is asked for, make them equal on all ranks."""
        if failed:
            return False
        self.settle()
        has_mean = self.final_average and not self.is_alone
        if has_mean:
            self.end_with_mean()
        self.ends_in_order = True
        return has_mean

    def facts(self, *, is_last: bool = False) -> dict[str, int]:
        """Return how far this rank has come."""
        return {
            "ended attachments": int(is_last),
            "optimizer steps": self.step,
            "searches for Inf": self._num_overflow_checks,
            "backward passes": 0 if self._num_overflow_checks else self.num_backwards,
            "rounds": self.num_rounds,
            "as fingerprint of the tensors to average": self.fingerprint,
        }
