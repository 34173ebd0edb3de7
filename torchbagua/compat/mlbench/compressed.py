"""mlbench's SparsifiedAggregation and PowerAggregation: a gradient algorithm averages the gradients."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchbagua import Algorithm, BaguaProcessGroup, PowerSGDAlgorithm, TopKAlgorithm
from torchbagua.compat.mlbench.base import Aggregation, AggregationFunction, Denominator, Member
from torchbagua.compat.mlbench.centralized import AVG_WORLD, check_op, check_world_size, check_world_size_argument
from torchbagua.compat.mlbench.random_elements import RandomElementsAlgorithm
from torchbagua.extend import GradientRunner
from torchbagua.observe import Observer


class AlgorithmAggregation(Aggregation):
    """Averages gradients with a gradient algorithm, in its buckets, and keeps its residuals from call to call.

    Every call with a finite result updates the residuals, without waiting for a step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        algorithm: Algorithm,
        use_cuda: bool,
        *,
        process_group: dist.ProcessGroup | BaguaProcessGroup | None,
        observers: Sequence[Observer],
    ) -> None:
        super().__init__(use_cuda, process_group=process_group, observers=observers)
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"{self._owner}: model must be a torch.nn.Module, got {model!r}")
        self._model = model
        self._algorithm = algorithm
        self._runner: GradientRunner | None = None
        self._known = {id(parameter) for parameter in model.parameters()}

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals of this rank and the related state, by the names of the parameters in `model`.

        Before the first call it opens the connections, which is collective.
        """
        return self._opened_runner().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned on this rank. Collective.

        Raises:
            ValueError: the state belongs to another rank, or to other parameters.
        """
        self._opened_runner().load_state_dict(state)

    def close(self) -> None:
        """Close the connections, and end the traces. A second call does nothing."""
        if self._runner is not None:
            self._runner.close()
        super().close()

    def _opened_runner(self) -> GradientRunner:
        _ = self.group
        assert self._runner is not None
        return self._runner

    def _arguments(self) -> dict[str, Any]:
        return {"algorithm": repr(self._algorithm)}

    def _check_group(self, group: BaguaProcessGroup) -> None:
        self._algorithm.prepare()
        self._runner = GradientRunner(group, self._algorithm)
        trained = {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        self._algorithm.check_parameters(trained)
        self._runner.set_module(self._model)
        self._runner.start_meetings()

    def _aggregate(self, kind: str, model: torch.nn.Module, op: str, denom: Denominator, *, by_layer: bool) -> None:
        if isinstance(model, torch.nn.Module) and not {id(tensor) for tensor in model.parameters()} <= self._known:
            raise ValueError(
                f"{self._owner}: model must be the model that the aggregation was created with; "
                "create another aggregation for another model"
            )
        super()._aggregate(kind, model, op, denom, by_layer=by_layer)

    def _aggregate_pack(
        self, index: int, members: Sequence[Member], op: str, denom: Denominator, *, by_layer: bool
    ) -> None:
        runner, parameters = self._opened_runner(), [member.parameter for member in members]
        if index == 0:
            # As on a rank that takes no steps: staged residuals are committed together with the mean.
            runner.begin_backward(has_joined=True)
        flat = members[0].values.new_empty(sum(member.values.numel() for member in members))
        bucket = runner.gradient_bucket(parameters, flat, index=index)
        gradients = [member.parameter.grad for member in members if member.parameter.grad is not None]  # all of them
        places = list(zip(gradients, (part for _, part in bucket.views(flat)), strict=True))
        for gradient, part in places:
            part.copy_(gradient)
        bucket.run()
        for gradient, part in places:
            gradient.copy_(part)


_SPARSE: Mapping[str, Callable[..., Algorithm]] = {
    "topk": TopKAlgorithm,
    "blockk": partial(TopKAlgorithm, selection="block"),
    "randomk": RandomElementsAlgorithm,
}


class SparsifiedAggregation(AlgorithmAggregation):
    """The mean of a fraction of the gradients' elements over all ranks. The residual is added to the next gradients.

    Messages and residuals are those of `TopKAlgorithm`, with `selection="block"` for "blockk", or of
    `RandomElementsAlgorithm`. Results are bitwise equal on all ranks. The op is "avg_world"; `denom` has no effect.

    - Every call with a finite mean updates the residuals. With a GradScaler, call its `unscale_` first: residuals are
      stored without the loss scale. A call with NaN or Inf on any rank does not change the residuals.
    - float64 gradients are sent in full precision, and a warning names them.
    - Weights cannot be sparsified: `agg_model` raises NotImplementedError.

    mlbench has this class, but does not implement it.

    Args:
        model: the model with the gradients to aggregate.
        use_cuda: no effect, see `Aggregation`.
        compression: which elements are sent. "topk": the largest elements of each block. "blockk": the consecutive
            elements with the largest norm. "randomk": random elements, the same on all ranks, sent in full precision.
        ratio: the fraction of elements that is sent, above 0 and at most 1.
        process_group: see `Aggregation`.
        observers: see `Aggregation`.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        use_cuda: bool = False,
        *,
        compression: str = "topk",
        ratio: float = 0.01,
        process_group: dist.ProcessGroup | BaguaProcessGroup | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        if compression not in _SPARSE:
            raise ValueError(f"SparsifiedAggregation: compression must be one of {list(_SPARSE)}, got {compression!r}")
        super().__init__(
            model, _SPARSE[compression](ratio=ratio), use_cuda, process_group=process_group, observers=observers
        )

    def agg_model(self, by_layer: bool = False) -> AggregationFunction:
        """Raise NotImplementedError."""
        raise NotImplementedError("SparsifiedAggregation aggregates gradients only: most weights would be lost")

    def _check_op(self, op: str) -> None:
        check_op(self._owner, "Sparsified aggregation", op, [AVG_WORLD])


class PowerAggregation(AlgorithmAggregation):
    """The mean of gradients over all ranks, sent as two low-rank factors, with error feedback; see `PowerSGDAlgorithm`.

    The op is "avg"; `denom` has no effect. Results are bitwise equal on all ranks. One-dimensional tensors, and
    matrices with factors that would not be smaller, are sent uncompressed. A tensor with more dimensions is flattened
    to a matrix with its first dimension as the rows.

    - Every call with a finite mean updates the residuals, with the same rules as in `SparsifiedAggregation`.
    - Torch's random number generators are not used. Factors are float32, and gradients keep their dtype.
    - As in mlbench, `agg_model()` returns the function that aggregates gradients, and `agg_model(by_layer=True)` raises
      NotImplementedError.
    - In a group of one rank, gradients do not change.

    Args:
        model: the model with the gradients to aggregate.
        use_cuda: no effect, see `Aggregation`.
        reuse_query: start from the factor of the last call (warm start); else from new pseudo-random numbers.
        world_size: the number of ranks.
        rank: the maximum number of vectors in a factor.
        process_group: see `Aggregation`.
        observers: see `Aggregation`.

    Raises:
        TypeError, ValueError: an argument is invalid.
        ValueError: at the first call, on all ranks: `world_size` is not the size of the group.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        use_cuda: bool = False,
        reuse_query: bool = False,
        world_size: int = 1,
        rank: int = 1,
        *,
        process_group: dist.ProcessGroup | BaguaProcessGroup | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        check_world_size_argument("PowerAggregation", world_size)
        algorithm = PowerSGDAlgorithm(rank=rank, start_step=0, min_rate=1, warm_start=reuse_query)
        super().__init__(model, algorithm, use_cuda, process_group=process_group, observers=observers)
        self.world_size = world_size

    def agg_model(self, by_layer: bool = False) -> AggregationFunction:
        """Return the function that aggregates gradients."""
        if by_layer:
            raise NotImplementedError("PowerAggregation aggregates gradients: agg_model does not support by_layer=True")
        return self.agg_grad()

    def _check_op(self, op: str) -> None:
        check_op(self._owner, "Power aggregation", op, ["avg"])

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "world_size": self.world_size}

    def _check_group(self, group: BaguaProcessGroup) -> None:
        check_world_size(self._owner, self.world_size, group.size)
        super()._check_group(group)
