"""AlgorithmImpl: the methods by which an algorithm defines what it communicates, and when."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from torchbagua.runtime.bucket import BaguaBucket, BaguaTensor

if TYPE_CHECKING:
    from torchbagua.runtime.runner import Runner


class AlgorithmImpl:
    """The running part of an algorithm: what it communicates and when, and its private state.

    `Algorithm.make_impl` returns one, and a `Runner` calls its methods. An impl is of one of two kinds:

    - A *gradient algorithm* communicates gradients, in DDP's buckets, from a DDP communication hook. It overrides
      `init_operations`.
    - A *weight algorithm* communicates weights, in separate buckets, at the end of the training step. Its constructor
      calls `runner.average`, and it overrides `init_operations` and `init_post_optimizer_step_hook`. A weight algorithm
      that communicates other tensors overrides `init_tensors` and `tensors_to_buckets` instead.

    All other methods have a default.

    Args:
        runner: the runner of this impl, the argument of `Algorithm.make_impl`.

    Attributes:
        runner: provides the process group, the lane, the codec and the state of the training step.
        algorithm: the description. Its fields are the user's arguments.
    """

    # A subclass annotates its description class here, so that the fields are typed.
    algorithm: Any

    def __init__(self, runner: "Runner") -> None:
        self.runner = runner
        self.algorithm = runner.algorithm

    def need_reset(self) -> bool:
        """Return True to have `reset` called.

        For a gradient algorithm it is called exactly once in each backward, before the first bucket, so an override may
        count backward passes or have ranks compare values. For a weight algorithm it is called at the end of each step.
        By default it is True if the set of parameters to average has changed.
        """
        weights = self.runner.weights
        return weights is not None and weights.need_reset()

    def init_tensors(self, module: torch.nn.Module) -> list[BaguaTensor]:
        """Return the tensors to communicate. By default these are the weights that `runner.weights` selects."""
        if self.runner.weights is None:
            raise TypeError(f"{type(self).__name__} is a gradient algorithm, so DDP provides its tensors")
        return self.runner.weights.select(module, self.runner.ignored_names)

    def tensors_to_buckets(self, tensors: list[BaguaTensor], do_flatten: bool) -> list[BaguaBucket]:
        """Group tensors into buckets. By default `runner.weights` does this.

        Args:
            tensors: the return value of `init_tensors`.
            do_flatten: always True; exists because Bagua's method has it.
        """
        if self.runner.weights is None:
            raise TypeError(f"{type(self).__name__} overrides init_tensors, so it must override tensors_to_buckets too")
        return self.runner.weights.make_buckets(tensors)

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        """Append to `bucket` the operations to run on it. A subclass must override this method.

        Args:
            module: the attached module; None without `attach`.
            bucket: a new bucket.
        """
        raise TypeError(f"{type(self).__name__} must override AlgorithmImpl.init_operations")

    def init_forward_pre_hook(self, module: torch.nn.Module) -> Callable[[Any], None] | None:
        """Return a function to call before each forward in training, with the inputs of the module; or None.

        `attach` calls this method and the next three once, after the buckets of weights have been created.
        """
        return None

    def init_backward_hook(self, module: torch.nn.Module) -> Callable[[str, torch.Tensor], None] | None:
        """Return a function of (name, parameter) to call when the gradient of a parameter is accumulated; or None."""
        return None

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None] | None:
        """Return a function to call when autograd has finished a backward; or None. DDP may not have finished yet."""
        return None

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None] | None:
        """Return a function to call at the end of each training step; or None.

        With several optimizers, the function is called once, after the last of them has stepped or a GradScaler has
        skipped it. Its argument is that optimizer. For each step of each optimizer, see `Runner.on_step_taken`.
        """
        return None

    def reset(self) -> None:
        """Rebuild the buckets: of a weight algorithm immediately, of a gradient algorithm when DDP next sends one.

        Called when the module is attached, and after `need_reset`, when no backward is in progress. An override first
        waits for the lane to finish with the buckets, and then calls this method.
        """
        self.runner.rebuild_buckets()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs in addition to `Runner.parameter_state`: tensors and numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the return value of `state_dict`. Called between two steps.

        Raises:
            ValueError: `state` belongs to another algorithm or to another rank.
        """
        if state:
            raise ValueError(f"{self.runner.name} has no state to load, got a state with the keys {sorted(state)}")

    def weights_loaded(self, values: Mapping[str, torch.Tensor]) -> None:
        """Restart from weights that the user has loaded, on the training thread.

        Called for a weight algorithm with several ranks at the beginning of the first step after the load, before the
        optimizer changes the weights, and by `Attachment.weights_changed`. Other ranks may call it later or never, so
        it must not communicate. By default it records the load in `Lockstep.loads`, and ranks compare their loads in
        their next collective. An override also drops the changes to these weights from a round in flight.

        Args:
            values: copies of the loaded values, by the names in `Runner.buckets`, for a subset of the weights or all.
        """
        if self.runner.weights is not None:
            self.runner.weights.lockstep.loads.add(values)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give all ranks the mean of their weights within the context, and restore each rank's weights afterwards.

        Collective. Does nothing for a gradient algorithm, since all ranks hold the same weights.

        Raises:
            NotImplementedError: a weight algorithm has no `runner.weights`, and does not override this method.
        """
        weights = self.runner.weights
        if weights is None:
            if self.runner.averages_weights:
                raise NotImplementedError(f"{type(self).__name__} must override AlgorithmImpl.averaged_weights")
            yield
            return
        self.runner.reset_if_needed()  # parameters may have been unfrozen or replaced since the last step
        with weights.means.averaged():
            yield

    def finish(self) -> bool:
        """End the work on the module, while ranks can still communicate. Return whether weights are now equal on all.

        Not called if an exception ends the attachment. By default all ranks take the mean of their weights. An override
        first applies the round in flight.
        """
        return self.runner.weights is not None and self.runner.weights.take_final_mean()


def check_impl(runner: "Runner") -> None:
    """Raise TypeError if an impl contradicts its description, on which `attach` relies."""
    impl: object = runner.impl
    name = type(runner.algorithm).__name__
    if not isinstance(impl, AlgorithmImpl):
        raise TypeError(f"{name}.make_impl must return an AlgorithmImpl, got {impl!r}")
    cls = type(impl)
    if not hasattr(impl, "runner"):
        raise TypeError(f"{cls.__name__}.__init__ must call AlgorithmImpl.__init__")
    overrides_tensors = cls.init_tensors is not AlgorithmImpl.init_tensors
    averages_weights = runner.weights is not None or overrides_tensors
    if cls.tensors_to_buckets is not AlgorithmImpl.tensors_to_buckets and not averages_weights:
        raise TypeError(
            f"{cls.__name__} overrides tensors_to_buckets without init_tensors: a gradient algorithm must use DDP's "
            "buckets, and a weight algorithm must override both"
        )
    if averages_weights != runner.algorithm.averages_weights:
        if not averages_weights:
            raise TypeError(
                f"{cls.__name__} averages gradients, because it neither calls runner.average nor overrides "
                f"init_tensors, but {name}.averages_weights is True; call runner.average in its constructor, or set "
                "averages_weights to False"
            )
        reason = "overrides init_tensors" if overrides_tensors else "calls runner.average"
        raise TypeError(
            f"{cls.__name__} averages weights, because it {reason}, but {name}.averages_weights is False; set it to "
            "True"
        )
