"""Detects, in the first step, a GradScaler that `attach` was not given."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from torchbagua._torch import call_before_scaled_step, is_scaled_in_step
from torchbagua._warnings import warn_user
from torchbagua.runtime.runner import Runner


class UnknownScaler:
    """Warns, and sets `Runner.has_unknown_scaler`, if a GradScaler calls the first step of an optimizer."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._is_asked = False
        self._installed = {watch.optimizer: ExitStack() for watch in runner.step_watches}
        for watch in runner.step_watches:
            self._installed[watch.optimizer].callback(call_before_scaled_step(watch.optimizer, self._ask))
            watch.call_at_next_start(partial(self._before_step, watch.optimizer))

    def close(self) -> None:
        """Stop watching."""
        for stack in self._installed.values():
            stack.close()

    def _ask(self) -> None:
        self._is_asked = True

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._installed[optimizer].close()
        if self._runner.has_unknown_scaler or not (self._is_asked or is_scaled_in_step(optimizer)):
            return
        runner = self._runner
        runner.note_unknown_scaler()
        consequence = (
            "ranks would skip different steps"
            if runner.averages_weights
            else "residuals would be stored with a wrong scale"
        )
        warn_user(
            f"torchbagua: {type(optimizer).__name__} is stepped by a GradScaler that {runner.name} was not given: "
            f"{consequence}; pass the GradScaler: attach(..., grad_scaler=scaler)"
        )
