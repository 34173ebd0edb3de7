"""WeightRunner: drives a weight algorithm, which communicates at the end of the training step, in its own buckets.

WeightImpl: the methods that it calls.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch

from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.parameters import BaguaTensor, local_shard
from torchbagua.runtime.runner import AlgorithmImpl, Runner
from torchbagua.runtime.weight_buckets import WeightBuckets

_LOAD_EFFECT = "and no round in flight changes them"


@final
class WeightRunner(Runner):
    """Runs a weight algorithm. See `Runner`.

    Its buckets are created by `impl.reset`, `rebuild_buckets`, `impl.init_tensors` and `impl.tensors_to_buckets`, which
    by default ask the `WeightBuckets` of `average`.

    Attributes:
        buckets: the buckets of weights.
        ignored_names: the parameters and buffers of the module that DDP ignores.
        loading: the names in `buckets` of weights that the module's `load_state_dict` has written since the last step.
            `AlgorithmImpl.weights_loaded` is called later. Until then, no round in flight may change these weights.
        weights: the weights to average, set by `average`.
        replicas_diverge: returns whether ranks currently hold different weights that `detach` would make equal.
        ended_by: the call that the missing-detach warning recommends; see `use_names`.
        agree_on_overflow: see `average`.
        has_unknown_scaler: whether an optimizer is stepped by a GradScaler that `attach` was not given.
        open_node_gradients: returns the runner that averages gradients among the ranks of this node, for the hook of a
            DDP of all ranks; collective. None unless DDP continues to average gradients within nodes.
        load_effect: the effect of `AlgorithmImpl.weights_loaded`, for the message that reports a load of weights.
    """

    averages_weights = True
    impl: "WeightImpl"
    ignored_names: frozenset[str] = frozenset()
    loading: frozenset[str] = frozenset()
    weights: WeightBuckets | None = None
    ended_by = "detach() of what attach returned"
    has_unknown_scaler = False
    open_node_gradients: Callable[[], GradientRunner] | None = None
    load_effect = _LOAD_EFFECT
    _has_lost_ranks = False
    _is_closed = False

    def __init__(self, process_group: BaguaProcessGroup, algorithm: Any) -> None:
        super().__init__(process_group, algorithm)
        self.buckets: list[BaguaBucket] = []
        self.replicas_diverge: Callable[[], bool] = lambda: False
        self.agree_on_overflow: Callable[[bool], bool] = bool
        process_group.launch_on_lane()
        self._make_impl()

    def _check_impl(self) -> None:
        super()._check_impl()
        cls: type[AlgorithmImpl] = type(self.impl)
        if not issubclass(cls, WeightImpl):
            raise TypeError(
                f"{cls.__name__} is not a subclass of torchbagua.extend.WeightImpl, but {self.name}.averages_weights "
                "is True; derive it from WeightImpl, or set averages_weights to False if it averages gradients"
            )
        if self.weights is None and cls.init_tensors is WeightImpl.init_tensors:
            raise TypeError(
                f"{cls.__name__} averages no weights, because it neither calls runner.average nor overrides "
                "init_tensors; call runner.average in its constructor"
            )

    def average(
        self,
        weights: WeightBuckets,
        *,
        agree_on_overflow: Callable[[bool], bool] | None = None,
        skips_alone: bool = False,
        requires_scaler: bool = True,
        replicas_diverge: Callable[[], bool] | None = None,
        load_effect: str = _LOAD_EFFECT,
        open_node_gradients: Callable[[], GradientRunner] | None = None,
    ) -> WeightBuckets:
        """Register and return the weights to average; for the constructor of an impl.

        With several ranks, all ranks then skip a step if the GradScaler of any rank skips it.

        Args:
            weights: the weights.
            agree_on_overflow: returns whether the GradScaler must skip the step, given whether this rank's gradients
                contain an Inf or NaN. By default, an Inf or NaN on any rank skips the step on all.
            skips_alone: whether each rank skips steps alone instead, by its own gradients.
            requires_scaler: whether a loop that has a GradScaler must pass it to `attach`, unless ranks skip alone.
            replicas_diverge: see the attribute. By default, ranks do if `detach` gives them the mean of their weights.
            load_effect, open_node_gradients: see the attributes.
        """
        self._require_constructor("average")
        self.weights = weights
        self.replicas_diverge = replicas_diverge or (lambda: weights.has_final_mean)
        self.load_effect, self.open_node_gradients = load_effect, open_node_gradients
        if self.process_group.size > 1 and not skips_alone:
            if requires_scaler:
                self.require_grad_scaler()
            self.agree_on_overflow = agree_on_overflow or weights.lockstep.agree_on_overflow
        return weights

    def set_module(
        self,
        module: torch.nn.Module,
        ignored_names: frozenset[str] = frozenset(),
        *,
        parts: Sequence[torch.nn.Module] = (),
    ) -> None:
        self.ignored_names = ignored_names
        super().set_module(module, ignored_names, parts=parts)

    def is_attached_to(self, module: torch.nn.Module | Sequence[torch.nn.Module]) -> bool:
        """Return whether this is the attached module, its DDP, or some of the attached ones; False after `close`."""
        given = [module] if isinstance(module, torch.nn.Module) else module
        own = [self._module, *self._parts]
        is_own = [each in own or getattr(each, "module", None) in own for each in given]
        return self._module is not None and not self._is_closed and bool(is_own) and all(is_own)

    def use_names(self, *, name: str | None = None, ended_by: str | None = None) -> None:
        """Set `name` or `ended_by`; for adapters of another API, whose users know these names."""
        self.name = name or self.name
        self.ended_by = ended_by or self.ended_by

    def note_loading(self, names: Iterable[str]) -> None:
        """Set `loading`."""
        self.loading = frozenset(names)
        if self.weights is not None:
            self.weights.lockstep.loads.note_pending(bool(self.loading))

    def note_unknown_scaler(self) -> None:
        """Set `has_unknown_scaler`."""
        self.has_unknown_scaler = True

    def note_lost_ranks(self) -> None:
        """A rank has left early, so the other ranks do not end in order."""
        self._has_lost_ranks = True

    def rebuild_buckets(self) -> None:
        """Rebuild the buckets."""
        if self._module is not None:
            self.buckets = self.impl.tensors_to_buckets(self.impl.init_tensors(self._module), do_flatten=True)
            for bucket in self.buckets:
                self.use_device(bucket.flat.device)
            for bucket in self.buckets:
                self.impl.init_operations(self._module, bucket)

    def reset_if_needed(self) -> None:
        """Have the impl rebuild its buckets, if `need_reset` returns True. Call it when no backward is in progress."""
        if self.impl.need_reset():
            self.impl.reset()

    @torch.no_grad()
    def average_as_saved(self, names: Sequence[str]) -> None:
        """Rebuild the buckets for a state that averages the parameters with these names. The weights do not change.

        Raises:
            ValueError: the module has no parameter with one of these names.
        """
        if self.weights is None or self._module is None or not self.weights.follow(names):
            return
        tensors = [local_shard(tensor) for tensor in (*self._module.parameters(), *self._module.buffers())]
        values = [tensor.clone() for tensor in tensors]
        self.impl.reset()  # applies the round in flight, which the state replaces
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)

    def before_step_end(self) -> None:
        """Reset the impl if needed. Raise RuntimeError in the capture of a CUDA graph, whose replay calls no hooks."""
        if self._gpu is not None and self._gpu.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.name}: a CUDA graph is being captured; capture parts of the model "
                "(torch.cuda.make_graphed_callables) without the optimizer's step"
            )
        self.reset_if_needed()

    def own_weights(self) -> AbstractContextManager[None]:
        """Within `averaged_weights`, give this rank its local weights in a nested context. Not collective.

        `Attachment.rank_state_dict` needs this if it is called within `averaged_weights`.

        Raises:
            NotImplementedError: the algorithm has no `weights`, because its impl does not call `average`.
        """
        if self.weights is None:
            raise NotImplementedError(f"{type(self.impl).__name__} must call runner.average in its constructor")
        return self.weights.means.own()

    def finish(self, *, failed: bool) -> bool:
        has_mean = super().finish(failed=failed)
        self.ends_in_order &= not self._has_lost_ranks
        return has_mean

    def close(self, *, in_order: bool = False) -> None:
        self._is_closed = True
        super().close(in_order=in_order)


class WeightImpl(AlgorithmImpl):
    """The running part of a weight algorithm. See `AlgorithmImpl`.

    Its constructor calls `runner.average`, and it overrides `init_operations` and `init_post_optimizer_step_hook`. An
    impl that communicates other tensors overrides `init_tensors` and `tensors_to_buckets` instead.
    """

    runner: WeightRunner

    def __init__(self, runner: WeightRunner) -> None:
        super().__init__(runner)

    def need_reset(self) -> bool:
        """Return True to have `reset` called: by default, if the set of parameters to average has changed.

        Called at the end of each step.
        """
        return self.runner.weights is not None and self.runner.weights.need_reset()

    def init_tensors(self, module: torch.nn.Module) -> list[BaguaTensor]:
        """Return the tensors to communicate. By default these are the weights that `WeightRunner.weights` selects."""
        assert self.runner.weights is not None  # the runner has checked this
        return self.runner.weights.select(module, self.runner.ignored_names)

    def tensors_to_buckets(self, tensors: list[BaguaTensor], do_flatten: bool) -> list[BaguaBucket]:
        """Group tensors into buckets. By default `WeightRunner.weights` does this. See `AlgorithmImpl`."""
        if self.runner.weights is None:
            raise TypeError(f"{type(self).__name__} overrides init_tensors, so it must override tensors_to_buckets too")
        return self.runner.weights.make_buckets(tensors)

    def weights_loaded(self, values: Mapping[str, torch.Tensor]) -> None:
        """Restart from weights that the user has loaded. See `AlgorithmImpl`.

        By default it records the load in `Lockstep.loads`, and ranks compare their loads in their next collective. An
        override also drops the changes to these weights from a round in flight.
        """
        if self.runner.weights is not None:
            self.runner.weights.lockstep.loads.add(values)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give all ranks the mean of their weights within the context, and restore each rank's weights afterwards.

        Collective.

        Raises:
            NotImplementedError: there is no `runner.weights`, and the impl does not override this method.
        """
        weights = self.runner.weights
        if weights is None:
            raise NotImplementedError(f"{type(self).__name__} must override WeightImpl.averaged_weights")
        if self.need_reset():  # parameters may have been unfrozen or replaced since the last step
            self.reset()
        with weights.means.averaged():
            yield

    def finish(self) -> bool:
        """End the work on the module, while ranks can still communicate. Return whether this made the weights equal.

        Not called if an exception ends the attachment. By default all ranks take the mean of their weights. An override
        first applies the round in flight.
        """
        return self.runner.weights is not None and self.runner.weights.take_final_mean()
