"""Checks that error feedback loses nothing: the gradients of all ranks are in the steps, or in the residuals."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class GradientSums:
    """The sums, over the steps that were taken, of a rank's own gradients and of those that its optimizer got.

    Attributes:
        own: by parameter, the sum of its own gradients, in float64.
        applied: by parameter, the sum of the gradients in its steps, in float64.
        residuals: by name and parameter, the residuals after the last step; empty before.
    """

    def __init__(self) -> None:
        self.own: dict[str, torch.Tensor] = {}
        self.applied: dict[str, torch.Tensor] = {}
        self.residuals: dict[str, Mapping[str, torch.Tensor]] = {}
        self._since_step: dict[str, torch.Tensor] = {}
        self._scale = 1.0
        self._removers: list[Any] = []

    def watch(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Sum gradients from now on."""
        named = dict(module.named_parameters())
        for name, parameter in named.items():
            for sums in (self.own, self.applied, self._since_step):
                sums[name] = torch.zeros(parameter.shape, dtype=torch.float64)

            def add(gradient: torch.Tensor, name: str = name) -> None:
                self._since_step[name] += gradient.double() / self._scale

            self._removers.append(parameter.register_hook(add))

        def step_taken(*_: object) -> None:
            for name, parameter in named.items():
                self.own[name] += self._since_step[name]
                if parameter.grad is not None:
                    self.applied[name] += parameter.grad.double()

        self._removers.append(optimizer.register_step_post_hook(step_taken))

    def begin(self, scaler: torch.amp.GradScaler) -> None:
        """Note the loss scale of the next backward."""
        self._scale = scaler.get_scale()

    def clear(self) -> None:
        """Forget the gradients since the last step, which was taken or skipped."""
        for sums in self._since_step.values():
            sums.zero_()

    def take_residuals(self, state: Mapping[str, Any]) -> None:
        """Take the residuals from an attachment's state, if it is of a mean of gradients with error feedback."""
        impl = state.get("impl", {})
        if {"sent", "mean"} <= impl.keys():
            self.residuals = {name: impl[name] for name in ("sent", "mean")}

    def close(self) -> None:
        """Remove the hooks."""
        for remover in self._removers:
            remover.remove()


def lost_gradients(ranks: Sequence[GradientSums]) -> str | None:
    """Return what error feedback has lost or counted twice; None if nothing, or if there is none.

    The mean of all ranks' gradients is what the optimizers got, and the residuals: those of what ranks send, divided by
    the number of ranks, and those of the means.
    """
    if not all(rank.residuals for rank in ranks):
        return None
    for name, applied in ranks[0].applied.items():
        expected = torch.stack([rank.own[name] for rank in ranks]).mean(0)
        sent = torch.stack([rank.residuals["sent"][name].double() for rank in ranks]).mean(0)
        mean = torch.stack([rank.residuals["mean"][name].double() for rank in ranks]).sum(0)
        lost = float((applied + sent + mean - expected).abs().max())
        # All are sums of some ten float32 values.
        if lost > 1e-4 * max(1.0, float(expected.abs().max())):
            return f"error feedback has lost, or counted twice, {lost:.3g} of the gradients of {name}"
    return None
