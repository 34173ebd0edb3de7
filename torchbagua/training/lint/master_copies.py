"""Checks in the first steps that an optimizer with none of the modules' parameters has master copies of them."""

import torch

from torchbagua._warnings import warn_user
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.optimizer_steps import parameters_of
from torchbagua.training.checks import TrainingSetup

# Far more than a learning rate that starts at zero leaves without a change, also in a module of 16 bits.
_NUM_STEPS = 20


class MasterCopies:
    """Watches the first steps of `TrainingSetup.optimizers_of_copies` after a synchronized backward.

    The loop copies gradients to the masters before a step, and the masters to the modules after it. When attached, an
    optimizer that was created before the model was copied looks the same, but the loop does neither.
    """

    def __init__(self, setup: TrainingSetup, runner: GradientRunner) -> None:
        self._trained = list(setup.trained().values())
        self._runner = runner
        self._num_steps = {id(optimizer): 0 for optimizer in setup.optimizers_of_copies}
        self._first_sums: torch.Tensor | None = None
        self._watches = [watch for watch in runner.step_watches if id(watch.optimizer) in self._num_steps]
        for watch in self._watches:
            watch.add(self._after_step, reads_overflow=False)

    def close(self) -> None:
        """Stop watching steps."""
        for watch in self._watches:
            watch.remove(self._after_step)

    def _after_step(self, optimizer: torch.optim.Optimizer, is_taken: bool) -> None:
        if not is_taken or not self._runner.num_received:
            return
        self._num_steps[id(optimizer)] += 1
        if self._num_steps[id(optimizer)] == 1:
            self._check_gradients(optimizer)
        if self._first_sums is None:
            self._first_sums = self._sums()
        if max(self._num_steps.values()) < _NUM_STEPS:
            return
        self.close()
        if torch.equal(self._sums(), self._first_sums):
            warn_user(
                f"torchbagua: {type(optimizer).__name__} has no parameters of the module, and after {_NUM_STEPS} steps "
                "the module's weights have not changed. If it has master copies, copy them into the module after each "
                "step. If it was created before the model was moved or copied, create it again, and attach again"
            )

    def _check_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError unless masters have gradients in a step, and error feedback can see the modules' too."""
        name = type(optimizer).__name__
        if all(parameter.grad is None for parameter in parameters_of(optimizer)):
            raise RuntimeError(
                f"torchbagua: {name} has no parameters of the module, and its own have no gradients, so its step "
                "changes nothing. If it was created before the model was moved or copied, create it again, and attach "
                "again. If it has master copies, copy the module's gradients to them before the step"
            )
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        if self._runner.parameter_state is not None and not any(bool(gradient.any()) for gradient in gradients):
            raise RuntimeError(
                f"torchbagua: the module has no gradients in a step of {name}, which has master copies, so "
                f"{self._runner.name} cannot see which averages the step used. Clear the module's gradients after the "
                "step"
            )

    def _sums(self) -> torch.Tensor:
        """Return a number for each trained parameter, which changes with its values."""
        sums = [
            parameter.detach().sum(dtype=torch.complex128 if parameter.is_complex() else torch.float64).cpu()
            for parameter in self._trained
        ]
        return torch.stack([torch.view_as_real(each.to(torch.complex128)) for each in sums])
