"""mlbench's local optimizers, SignSGD and SparsifiedSGD: they send nothing."""

from typing import Any

import torch

from torchbagua.compat.mlbench.optimizers import Closure


class SignSGD(torch.optim.SGD):
    """SGD with only the sign of each element of the update, and the arguments of torch.optim.SGD. It sends nothing."""

    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Take a step, and return the loss that `closure` returned."""
        loss = _loss_of(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(self._direction(parameter, group).sign(), alpha=-group["lr"])
        return loss

    def _direction(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        assert parameter.grad is not None
        gradient = -parameter.grad if group["maximize"] else parameter.grad
        gradient = gradient.add(parameter, alpha=group["weight_decay"])
        if not group["momentum"]:
            return gradient
        state = self.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = gradient.clone()
        else:
            state["momentum_buffer"].mul_(group["momentum"]).add_(gradient, alpha=1 - group["dampening"])
        buffer: torch.Tensor = state["momentum_buffer"]
        return gradient.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer


class SparsifiedSGD(torch.optim.Optimizer):
    """SGD with memory: each step applies the largest elements of the update, and keeps the residual in the memory.

    memory += lr (gradient + weight_decay * weight); the `sparse_grad_size` largest elements of the memory are then
    subtracted from the weights, and zeroed in the memory (Stich, Cordonnier and Jaggi, arXiv 1809.07599, algorithm 1 on
    one rank). It sends nothing: between ranks use `SparsifiedAggregation` with torch.optim.SGD. The constructor does
    not change the weights; mlbench's constructor reinitializes them.

    Args:
        params: the parameters, or groups of them.
        lr: the learning rate.
        weight_decay: the factor with which weights are added to gradients.
        sparse_grad_size: the number of elements of each parameter that a step changes.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(self, params: Any, lr: float, weight_decay: float = 0, sparse_grad_size: int = 10) -> None:
        if lr < 0 or weight_decay < 0:
            raise ValueError(f"SparsifiedSGD: lr and weight_decay must not be negative, got {lr} and {weight_decay}")
        if not isinstance(sparse_grad_size, int) or sparse_grad_size < 1:
            raise ValueError(
                f"SparsifiedSGD: sparse_grad_size must be an integer of at least 1, got {sparse_grad_size!r}"
            )
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "sparse_grad_size": sparse_grad_size})

    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Take a step, and return the loss that `closure` returned."""
        loss = _loss_of(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    state = self.state[parameter]
                    if "memory" not in state:
                        state["memory"] = torch.zeros_like(parameter)
                    update = parameter.grad.add(parameter, alpha=group["weight_decay"])
                    memory = state["memory"].add_(update, alpha=group["lr"])
                    count = min(group["sparse_grad_size"], memory.numel())
                    is_sent = torch.zeros(memory.numel(), dtype=torch.bool, device=memory.device)
                    is_sent[memory.reshape(-1).abs().topk(count).indices] = True
                    is_sent = is_sent.view(memory.shape)
                    parameter.sub_(memory.where(is_sent, 0))
                    memory.masked_fill_(is_sent, 0)
        return loss


def _loss_of(closure: Closure) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
