"""mlbench's optimizers: torch's optimizers that aggregate gradients before a step, or weights after a step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchbagua import BaguaProcessGroup
from torchbagua.compat.mlbench._torch import unhooked_step
from torchbagua.compat.mlbench.base import Aggregation
from torchbagua.compat.mlbench.centralized import AVG_WORLD, AllReduceAggregation
from torchbagua.compat.mlbench.compressed import PowerAggregation
from torchbagua.compat.mlbench.decentralized import DecentralizedAggregation
from torchbagua.observe import Observer

Closure = Callable[[], float] | None
Group = dist.ProcessGroup | BaguaProcessGroup | None


class AggregatingOptimizer(torch.optim.Optimizer):
    """The base class of the optimizers: a step that aggregates.

    A GradScaler may find overflows on some ranks only. All ranks take part in the aggregation anyway. A rank with
    non-finite gradients after the aggregation does not change its weights. Gradients are divided by the loss scale
    before they are sent, so loss scales may differ between ranks.

    Attributes:
        aggregation: the aggregation; `close` it when training is done.
    """

    # GradScaler then calls `step` after an overflow too, and `step` must divide by the scale.
    _step_supports_amp_scaling = True

    aggregation: Aggregation

    def _aggregate_with(
        self, aggregation: Aggregation, model: torch.nn.Module, op: str, *, by_layer: bool, agg_grad: bool
    ) -> None:
        self.aggregation = aggregation
        self._model, self._op, self._of_gradients = model, op, agg_grad
        self._aggregate = aggregation.agg_grad(by_layer) if agg_grad else aggregation.agg_model(by_layer)

    def _centralize(
        self, aggregation: AllReduceAggregation, model: torch.nn.Module, *, by_layer: bool, agg_grad: bool
    ) -> None:
        self._aggregate_with(aggregation, model, AVG_WORLD, by_layer=by_layer, agg_grad=agg_grad)
        if not agg_grad:
            self._aggregate(model, AVG_WORLD)

    def step(self, closure: Closure = None, tracker: Any = None) -> float | None:  # type: ignore[override]
        """Take a step, and aggregate. Collective.

        Args:
            closure: computes the loss and its gradients; `step` returns the loss.
            tracker: mlbench's tracker: `record_batch_agg` is called after the aggregation, and `record_batch_opt_step`
                after the update.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # GradScaler sets them, and deletes them after the step; torch's step must not see them.
        scaling: dict[str, torch.Tensor | None] = {
            name: vars(self).pop(name) for name in ("grad_scale", "found_inf") if name in vars(self)
        }
        try:
            if (scale := scaling.get("grad_scale")) is not None:
                for parameter in self._trained():
                    if parameter.grad is not None:
                        parameter.grad.div_(scale.to(parameter.device))
            if self._of_gradients:
                self._aggregate(self._model, self._op)
                _record(tracker, "record_batch_agg")
            if not scaling or self._has_finite_gradients():
                # The caller's `step` has already called the hooks.
                unhooked_step(super().step.__func__)(self)  # type: ignore[attr-defined]
            _record(tracker, "record_batch_opt_step")
            if not self._of_gradients:
                self._aggregate(self._model, self._op)
                _record(tracker, "record_batch_agg")
        finally:
            vars(self).update(scaling)
        return loss

    def _has_finite_gradients(self) -> bool:
        gradients = [parameter.grad for parameter in self._trained() if parameter.grad is not None]
        return all(bool(gradient.isfinite().all()) for gradient in gradients)

    def _trained(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


def _record(tracker: Any, method: str) -> None:
    if tracker:
        getattr(tracker, method)()


def _check_average(average_world: bool) -> None:
    if not average_world:
        raise NotImplementedError("Only average model is supported right now.")


class CentralizedSGD(AggregatingOptimizer, torch.optim.SGD):
    """SGD on the mean of gradients over all ranks; or, with `agg_grad=False`, on each rank's own gradients.

    With `agg_grad=False`, all ranks get the mean of their weights in the constructor, which is collective, and after
    each step. With `agg_grad=True`, all ranks must start with the same weights: the optimizer does not broadcast them.

    Args:
        world_size: the number of ranks.
        model: the model to train.
        lr, momentum, dampening, weight_decay, nesterov: see torch.optim.SGD.
        use_cuda: no effect, see `Aggregation`.
        by_layer: aggregate one parameter after the other.
        agg_grad: aggregate gradients; if False, weights.
        process_group: see `Aggregation`.
        observers: see `Aggregation`.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(
        self,
        world_size: int,
        model: torch.nn.Module,
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        use_cuda: bool = False,
        by_layer: bool = False,
        agg_grad: bool = True,
        *,
        process_group: Group = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        torch.optim.SGD.__init__(self, model.parameters(), lr, momentum, dampening, weight_decay, nesterov)
        aggregation = AllReduceAggregation(
            world_size, use_cuda=use_cuda, process_group=process_group, observers=observers
        )
        self._centralize(aggregation, model, by_layer=by_layer, agg_grad=agg_grad)


class CentralizedAdam(AggregatingOptimizer, torch.optim.Adam):
    """Adam on the mean of gradients over all ranks; or, with `agg_grad=False`, on each rank's own gradients.

    `agg_grad` works as in `CentralizedSGD`.

    Args:
        world_size: the number of ranks.
        model: the model to train.
        lr, betas, eps, weight_decay, amsgrad: see torch.optim.Adam.
        use_cuda: no effect, see `Aggregation`.
        by_layer: aggregate one parameter after the other.
        agg_grad: aggregate gradients; if False, weights.
        process_group: see `Aggregation`.
        observers: see `Aggregation`.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(
        self,
        world_size: int,
        model: torch.nn.Module,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        use_cuda: bool = False,
        by_layer: bool = False,
        agg_grad: bool = True,
        *,
        process_group: Group = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        torch.optim.Adam.__init__(self, model.parameters(), lr, betas, eps, weight_decay, amsgrad)
        aggregation = AllReduceAggregation(
            world_size, use_cuda=use_cuda, process_group=process_group, observers=observers
        )
        self._centralize(aggregation, model, by_layer=by_layer, agg_grad=agg_grad)


class PowerSGD(AggregatingOptimizer, torch.optim.SGD):
    """SGD on the mean of gradients, sent as two low-rank factors; see `PowerAggregation`.

    Its `state_dict` is the one of torch.optim.SGD. The `state_dict` of `aggregation` contains this rank's residuals.

    Args:
        model: the model to train.
        lr, momentum, weight_decay, dampening, nesterov: see torch.optim.SGD.
        average_world: must be True.
        use_cuda: no effect, see `Aggregation`.
        by_layer: aggregate one parameter after the other.
        reuse_query: start from the factor of the last step (warm start).
        world_size: the number of ranks.
        rank: the maximum number of vectors in a factor.
        process_group: see `Aggregation`.
        observers: see `Aggregation`.

    Raises:
        ValueError: an argument is invalid.
        NotImplementedError: `average_world` is False.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        lr: float,
        momentum: float = 0,
        weight_decay: float = 0,
        dampening: float = 0,
        nesterov: bool = False,
        average_world: bool = True,
        use_cuda: bool = False,
        by_layer: bool = False,
        reuse_query: bool = False,
        world_size: int = 1,
        rank: int = 1,
        *,
        process_group: Group = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        _check_average(average_world)
        torch.optim.SGD.__init__(self, model.parameters(), lr, momentum, dampening, weight_decay, nesterov)
        aggregation = PowerAggregation(
            model, use_cuda, reuse_query, world_size, rank, process_group=process_group, observers=observers
        )
        self._aggregate_with(aggregation, model, "avg", by_layer=by_layer, agg_grad=True)


class DecentralizedSGD(AggregatingOptimizer, torch.optim.SGD):
    """SGD on each rank's own gradients; each step then averages the weights with the neighbors' weights.

    See `DecentralizedAggregation`.

    Args:
        rank: this rank.
        neighbors: the other ranks to average with, each once.
        model: the model to train.
        lr, momentum, dampening, weight_decay, nesterov: see torch.optim.SGD.
        average_world: must be True.
        use_cuda: no effect, see `Aggregation`.
        by_layer: aggregate one parameter after the other.
        process_group: see `Aggregation`.
        observers: see `Aggregation`.

    Raises:
        ValueError: an argument is invalid.
        NotImplementedError: `average_world` is False.
    """

    def __init__(
        self,
        rank: int,
        neighbors: Sequence[int],
        model: torch.nn.Module,
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        average_world: bool = True,
        use_cuda: bool = False,
        by_layer: bool = False,
        *,
        process_group: Group = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        _check_average(average_world)
        torch.optim.SGD.__init__(self, model.parameters(), lr, momentum, dampening, weight_decay, nesterov)
        aggregation = DecentralizedAggregation(
            rank, neighbors, use_cuda, process_group=process_group, observers=observers
        )
        self._aggregate_with(aggregation, model, AVG_WORLD, by_layer=by_layer, agg_grad=False)
