"""AlgorithmImpl: the methods by which an algorithm says what is communicated, and when."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from torchbagua.runtime.bucket import BaguaBucket, BaguaTensor

if TYPE_CHECKING:
    from torchbagua.runtime.runner import Runner


class AlgorithmImpl:
    """The running part of an algorithm: what it communicates and when, and the state that only it knows.

    `Algorithm.make_impl` returns one, and a `Runner` calls its methods. There are two kinds:

    - A *gradient algorithm* communicates gradients, in DDP's buckets, from a DDP communication hook. It overrides
      `init_operations`.
    - A *weight algorithm* communicates weights, in buckets of its own, at the end of the training step. Its constructor
      calls `runner.average`, and it overrides `init_operations` and `init_post_optimizer_step_hook`. One that
      communicates other tensors overrides `init_tensors` and `tensors_to_buckets` instead.

    All other methods have a default.

    Args:
        runner: what runs it, which `Algorithm.make_impl` was given.

    Attributes:
        runner: its process group, lane and codec, and what it has been told of the training step.
        algorithm: the description, whose fields are the arguments.
    """

    # A subclass names its own description, so that its fields are typed.
    algorithm: Any

    def __init__(self, runner: "Runner") -> None:
        self.runner = runner
        self.algorithm = runner.algorithm

    def need_reset(self) -> bool:
        """Return True to have `reset` called.

        Called for a gradient algorithm exactly once in each backward, before its first bucket, so an override may count
        the backward, or have ranks compare something; for a weight algorithm at the end of each step. By default it is
        True if the module has other parameters to average than before.
        """
        weights = self.runner.weights
        return weights is not None and weights.need_reset()

    def init_tensors(self, module: torch.nn.Module) -> list[BaguaTensor]:
        """Return the tensors to communicate. By default the weights that `runner.weights` selects."""
        if self.runner.weights is None:
            raise TypeError(f"{type(self).__name__} is a gradient algorithm: DDP gives it its tensors")
        return self.runner.weights.select(module, self.runner.ignored_names)

    def tensors_to_buckets(self, tensors: list[BaguaTensor], do_flatten: bool) -> list[BaguaBucket]:
        """Group tensors into buckets. By default as `runner.weights` does.

        Args:
            tensors: what `init_tensors` returned.
            do_flatten: True; it is there because Bagua's method has it.
        """
        if self.runner.weights is None:
            raise TypeError(f"{type(self).__name__} must override tensors_to_buckets as it overrides init_tensors")
        return self.runner.weights.make_buckets(tensors)

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        """Append to `bucket` the operations that are to run on it. A subclass must override it.

        Args:
            module: the attached module; None without `attach`.
            bucket: a new bucket.
        """
        raise TypeError(f"{type(self).__name__} must override AlgorithmImpl.init_operations")

    def init_forward_pre_hook(self, module: torch.nn.Module) -> Callable[[Any], None] | None:
        """Return a function to call before each forward in training, with the inputs of the module; or None.

        This and the next three are called once by `attach`, when buckets of weights have been made.
        """
        return None

    def init_backward_hook(self, module: torch.nn.Module) -> Callable[[str, torch.Tensor], None] | None:
        """Return a function of (name, parameter) to call when the gradient of a parameter is accumulated; or None."""
        return None

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None] | None:
        """Return a function to call when autograd has finished a backward; or None. DDP may not have finished then."""
        return None

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None] | None:
        """Return a function to call at the end of each training step; or None.

        With several optimizers it is called once, when the last of them has stepped or was skipped by a GradScaler. Its
        argument is that optimizer. See `Runner.on_step_taken` for each step of each optimizer.
        """
        return None

    def reset(self) -> None:
        """Make buckets again: those of a weight algorithm at once, DDP's when they next come.

        Called when the module is attached, and after `need_reset`, when no backward is under way. An override first
        waits for what the lane is doing with the buckets, and then calls this.
        """
        self.runner.rebuild_buckets()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside `Runner.parameter_state`: plain tensors and numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, between two steps.

        Raises:
            ValueError: `state` is that of another algorithm or of another rank.
        """
        if state:
            raise ValueError(f"{self.runner.name} has no state to load, got the keys {sorted(state)}")

    def weights_loaded(self, values: Mapping[str, torch.Tensor]) -> None:
        """Start anew from weights that the user has loaded, on the training thread.

        Called for a weight algorithm of several ranks when the first step after the load begins, before the optimizer
        changes anything, and by `Attachment.weights_changed`. Other ranks may come later, or not at all, so it sends
        nothing. By default it notes them in `Lockstep.loads`, so that ranks compare them when they next meet. An
        override also drops what a round in flight would change of these weights.

        Args:
            values: copies of the loaded values, by the names of `Runner.buckets`; some of the weights, or all.
        """
        if self.runner.weights is not None:
            self.runner.weights.lockstep.loads.add(values)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give all ranks the mean of their weights, for as long as the context lasts; then each its own again.

        Collective. Does nothing for a gradient algorithm, since all ranks hold the same weights.

        Raises:
            NotImplementedError: an algorithm with buckets of its own has no `runner.weights`.
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
        """End the work on the module, while ranks still communicate. Return whether it made weights equal on all ranks.

        Not called if an exception ends the attachment. By default all ranks take the mean of their weights. An override
        first applies the round in flight.
        """
        return self.runner.weights is not None and self.runner.weights.take_final_mean()


def check_impl(runner: "Runner") -> None:
    """Raise TypeError if an impl does something other than its description says, by which `attach` goes."""
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
            f"{cls.__name__} overrides tensors_to_buckets without init_tensors: a gradient algorithm runs in DDP's "
            "buckets, and a weight algorithm overrides both"
        )
    if averages_weights != runner.algorithm.averages_weights:
        if not averages_weights:
            raise TypeError(
                f"{cls.__name__} averages gradients, because it neither calls runner.average nor overrides "
                f"init_tensors, but {name}.averages_weights is True; call runner.average in its constructor, or set "
                "averages_weights to False"
            )
        why = "overrides init_tensors" if overrides_tensors else "calls runner.average"
        raise TypeError(
            f"{cls.__name__} averages weights, because it {why}, but {name}.averages_weights is False; set it to True"
        )
