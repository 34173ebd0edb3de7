"""mlbench's SparsifiedAggregation and PowerAggregation: the mean of gradients by what runs a gradient algorithm."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchbagua import Algorithm, BaguaProcessGroup, Observer, PowerSGDAlgorithm, Runner, TopKAlgorithm
from torchbagua.compat.mlbench.base import Aggregation, AggregationFunction, Denominator, Member
from torchbagua.compat.mlbench.centralized import AVG_WORLD, check_op, check_world_size, check_world_size_argument
from torchbagua.compat.mlbench.random_elements import RandomElementsAlgorithm


class AlgorithmAggregation(Aggregation):
    """Averages gradients as a gradient algorithm does, in its buckets, and keeps its errors from call to call.

    Errors change with each call whose result is finite: there is no step to wait for.
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
        self._runner: Runner | None = None
        self._known = {id(parameter) for parameter in model.parameters()}

    def state_dict(self) -> dict[str, Any]:
        """Return the errors of this rank, and what goes with them, by the names of the parameters in `model`.

        It opens the connections if there was no call yet, which is collective.
        """
        return self._opened_runner().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank. Collective.

        Raises:
            ValueError: it is of another rank, or of other parameters.
        """
        self._opened_runner().load_state_dict(state)

    def close(self) -> None:
        """Close the connections, and end the traces. A second call does nothing."""
        if self._runner is not None:
            self._runner.close()
        super().close()

    def _opened_runner(self) -> Runner:
        _ = self.group
        assert self._runner is not None
        return self._runner

    def _arguments(self) -> dict[str, Any]:
        return {"algorithm": repr(self._algorithm)}

    def _check_group(self, group: BaguaProcessGroup) -> None:
        self._algorithm.prepare()
        self._runner = Runner(group, self._algorithm)
        trained = {name: one for name, one in self._model.named_parameters() if one.requires_grad}
        self._algorithm.check_parameters(trained)
        self._runner.set_module(self._model)

    def _aggregate(self, what: str, model: torch.nn.Module, op: str, denom: Denominator, *, by_layer: bool) -> None:
        if isinstance(model, torch.nn.Module) and not {id(one) for one in model.parameters()} <= self._known:
            raise ValueError(f"{self._owner}: model must be the one that it was made with, whose errors it keeps")
        super()._aggregate(what, model, op, denom, by_layer=by_layer)

    def _aggregate_pack(
        self, index: int, members: Sequence[Member], op: str, denom: Denominator, *, by_layer: bool
    ) -> None:
        runner, parameters = self._opened_runner(), [one.parameter for one in members]
        if index == 0:
            # As on a rank that takes no steps: what is staged is committed together with the mean.
            runner.begin_backward(has_joined=True)
        flat = members[0].values.new_empty(sum(member.values.numel() for member in members))
        bucket = runner.gradient_bucket(parameters, flat, index=index)
        gradients = [one.parameter.grad for one in members if one.parameter.grad is not None]  # all of them
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
    """The mean of a share of the gradients' elements, over all ranks. The rest is added to what is sent next.

    What is sent, and what is kept of each parameter, is that of `TopKAlgorithm`, with `selection="block"` for "blockk",
    or of `RandomElementsAlgorithm`. All ranks get the same bits. The op is "avg_world"; `denom` is without effect.

    - Errors change with each call whose mean is finite. With a GradScaler, call its `unscale_` first: errors are kept
      without the loss scale. A call with NaN or Inf on any rank leaves the errors as they are.
    - float64 gradients travel in full precision, and a warning names them.
    - Weights cannot be sparsified: `agg_model` raises NotImplementedError.

    mlbench has the class, and has left what it does to be written.

    Args:
        model: the model whose gradients are aggregated.
        use_cuda: without effect, see `Aggregation`.
        compression: which elements are sent. "topk": the largest of each block. "blockk": those of the run of
            neighbours with the largest norm. "randomk": ones that all ranks draw alike, sent in full
            precision.
        ratio: the share of elements that is sent, above 0 and at most 1.
        process_group: see `Aggregation`.
        observers: see `Aggregation`.

    Raises:
        TypeError, ValueError: an argument does not fit.
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
        raise NotImplementedError("SparsifiedAggregation aggregates gradients; of weights hardly any would be left")

    def _check_op(self, op: str) -> None:
        check_op(self._owner, "Sparsified aggregation", op, [AVG_WORLD])


class PowerAggregation(AlgorithmAggregation):
    """The mean of gradients as products of two factors, over all ranks, with error feedback, as `PowerSGDAlgorithm`.

    The op is "avg"; `denom` is without effect. All ranks get the same bits. Tensors of one dimension, and matrices
    whose factors would not be smaller, travel as they are. A tensor of more dimensions is a matrix whose rows are its
    first.

    - Errors change with each call. What is said of them in `SparsifiedAggregation` is true here too.
    - Torch's random numbers are left alone. Factors are float32, and gradients keep their dtype.
    - As in mlbench, `agg_model()` returns the function that aggregates gradients, and `agg_model(by_layer=True)` raises
      NotImplementedError.
    - In a group of one rank gradients stay as they are.

    Args:
        model: the model whose gradients are aggregated.
        use_cuda: without effect, see `Aggregation`.
        reuse_query: start from the factor of the last call (warm start); else from pseudo-random numbers in each.
        world_size: the number of ranks.
        rank: the most vectors of a factor.
        process_group: see `Aggregation`.
        observers: see `Aggregation`.

    Raises:
        TypeError, ValueError: an argument does not fit.
        ValueError: at the first call, on all ranks: `world_size` is not that of the group.
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
            raise NotImplementedError("PowerAggregation aggregates gradients: agg_model has no by_layer=True")
        return self.agg_grad()

    def _check_op(self, op: str) -> None:
        check_op(self._owner, "Power aggregation", op, ["avg"])

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "world_size": self.world_size}

    def _check_group(self, group: BaguaProcessGroup) -> None:
        check_world_size(self._owner, self.world_size, group.size)
        super()._check_group(group)
