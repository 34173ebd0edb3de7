"""Runner: drives an algorithm's impl until `close`. AlgorithmImpl: the methods that it calls.

A gradient algorithm has a `GradientRunner`, and a weight algorithm a `WeightRunner` and a `WeightImpl`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, TypeVar

import torch

from torchbagua.codecs.base import Compressor, codec_for_dtype
from torchbagua.collectives.agreement import Progress, compare_progress, fingerprint
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.native.loader import load_kernels
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.lane import Lane
from torchbagua.runtime.optimizer_steps import StepsTaken, StepWatch, parameters_of
from torchbagua.runtime.parameter_state import ParameterState
from torchbagua.runtime.parameters import BaguaTensor
from torchbagua.runtime.rank_state import check_rank_state, continued, owner_of

S = TypeVar("S", bound=ParameterState[Any])


class Runner:
    """Runs an algorithm over a process group: the state of `comm_hook`, and the return value of `Algorithm.reify`.

    It contains the lane and the per-parameter state, is notified of optimizer steps, and calls the methods of an
    `AlgorithmImpl`. The constructor of an impl calls `keep`, `on_step_taken`, `require_grad_scaler` and `on_close`, and
    its methods call `codec_for`. A loop with a standalone hook calls `state_dict`, `load_state_dict` and `close`.
    `attach` calls the other methods. `GradientRunner` and `WeightRunner` add what only their kind of algorithm needs.

    With a standalone hook, a runner that was not closed ends when it is garbage-collected.

    Args:
        process_group: owned by the runner, and closed with it.
        algorithm: the `Algorithm`. Its `make_impl` returns the impl.

    Attributes:
        process_group: the group, with private communicators for the lane.
        algorithm: the description.
        name: the algorithm's name, for errors.
        impl: the return value of `make_impl`.
        codec: the return value of `Algorithm.make_codec`; see `codec_for`.
        lane: runs the communication.
        tracer: notifies the observers of the group.
        averages_weights: whether it runs a weight algorithm, which has separate buckets.
        parameter_state: the per-parameter state, set by `keep`.
        needs_grad_scaler: whether a loop that has a GradScaler must pass it to `attach`; see `require_grad_scaler`.
        optimizers: the optimizers with watched steps. Empty without `attach`, unless optimizers were passed to
            `Algorithm.reify`.
        step_watches: one for each of these optimizers; it notifies its listeners of each step.
        ends_in_order: whether all ranks will call `close`. If so, `close` completes pending stream-ordered work.
            Otherwise it aborts this work.

    Raises:
        TypeError: `make_impl` did not return an impl of the algorithm's kind.
    """

    averages_weights: ClassVar[bool]
    impl: "AlgorithmImpl"
    parameter_state: ParameterState[Any] | None = None
    needs_grad_scaler = False
    ends_in_order = False
    _kept_parameters: Callable[[], list[torch.Tensor]] | None = None
    _steps: StepsTaken | None = None  # if the algorithm needs to be notified of them
    _watches_steps = False
    _module: torch.nn.Module | None = None
    _parts: Sequence[torch.nn.Module] = ()
    _gpu: torch.device | None = None

    def __init__(self, process_group: BaguaProcessGroup, algorithm: Any) -> None:
        self.process_group = process_group
        self.algorithm = algorithm
        self.name = type(algorithm).__name__
        self.codec: Compressor = algorithm.make_codec()
        self.tracer = process_group.tracer
        self.lane = Lane(f"torchbagua lane of {self.name}", on_failure=process_group.fail, group=process_group)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.step_watches: list[StepWatch] = []
        self._names: Mapping[int, str] = {}
        self._step_listeners: list[Callable[[Sequence[torch.Tensor]], None]] = []
        self._before_close = ExitStack()
        self._after_close = ExitStack()

    def _make_impl(self) -> None:
        """Create the impl; the last call in the constructor of a subclass."""
        try:
            self.impl = self.algorithm.make_impl(self)
            self._check_impl()
        except BaseException:
            self.close()
            raise

    def _check_impl(self) -> None:
        """Raise TypeError if the impl contradicts its description, on which `attach` relies."""
        impl: object = self.impl
        if not isinstance(impl, AlgorithmImpl):
            raise TypeError(f"{self.name}.make_impl must return an AlgorithmImpl, got {impl!r}")
        if not hasattr(impl, "runner"):
            raise TypeError(f"{type(impl).__name__}.__init__ must call AlgorithmImpl.__init__")

    def codec_for(self, bucket: BaguaBucket) -> Compressor:
        """Return `codec`, or the codec of full precision if `codec` does not encode the dtype of the bucket."""
        return codec_for_dtype(self.codec, bucket.flat.dtype)

    def keep(self, state: S, parameters: Callable[[], list[torch.Tensor]] | None = None) -> S:
        """Register and return a per-parameter state. Steps that are taken commit it, and `state_dict` contains it.

        Args:
            state: the state; becomes `parameter_state`.
            parameters: returns the parameters with this state. By default, the parameters of `optimizers`, or all
                parameters of the module if there are no optimizers because the loop averages gradients itself.
        """
        self._require_constructor("keep")
        self.parameter_state = state
        self._kept_parameters = parameters
        return state

    def watch_steps(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Watch the steps of these optimizers, if the algorithm needs them; `bind` calls this."""
        self.optimizers = list(optimizers)
        self._watches_steps = True
        self.step_watches = [StepWatch(optimizer) for optimizer in dict.fromkeys(optimizers)]
        if self.parameter_state is not None or self._step_listeners:
            self._steps = StepsTaken(self, self.name)
            self._steps.listen_to(self.step_watches)

    def name_parameters(self) -> None:
        """Name the parameters of the optimizers by their positions, since a standalone hook knows no module."""
        kept = self._parameters_of_state()
        self._names = {id(parameter): f"parameter {index}" for index, parameter in enumerate(kept)}

    def require_grad_scaler(self) -> None:
        """Require that a loop with a GradScaler passes it to `attach`; for the constructor of an impl."""
        self._require_constructor("require_grad_scaler")
        self.needs_grad_scaler = True

    def on_step_taken(self, listener: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Call `listener` after each step of each optimizer that was not skipped; for the constructor of an impl.

        The argument of `listener` is the list of the optimizer's parameters that have a gradient. The runner calls it
        before the function from `AlgorithmImpl.init_post_optimizer_step_hook`, and before it commits `parameter_state`
        for the parameters with gradients that contain an average from DDP.
        """
        self._require_constructor("on_step_taken")
        self._step_listeners.append(listener)

    def _require_constructor(self, method: str) -> None:
        if self._watches_steps:
            raise RuntimeError(f"{self.name}: Runner.{method} was called too late; call it in the impl's constructor")

    def commit_step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Commit the state of a step of these parameters, which have a gradient; `StepsTaken` calls this."""
        for listener in self._step_listeners:
            listener(parameters)
        if self.parameter_state is not None:
            self.parameter_state.commit(parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: tensors and numbers, keyed by parameter name.

        It merges the impl's state, `parameter_state`, and the rank and the number of ranks.

        Raises:
            RuntimeError: parameters have no names, because neither `attach` nor an optimizer provides them.
        """
        own = self.impl.state_dict()
        if self.parameter_state is None:
            return own
        return {**owner_of(self.process_group), **self.parameter_state.state_dict(self._named_parameters()), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the return value of `state_dict`. Call it between two steps. Collective if there is a `parameter_state`.

        Raises:
            ValueError: `state` belongs to another algorithm or to another rank.
            CommunicationError: other ranks have a state of different parameters, or did not load a state in time.
        """
        kept = self.parameter_state
        if kept is None:
            self.impl.load_state_dict(state)
            return
        check_rank_state(self.name, state, kept.names, self.process_group)
        known = {*owner_of(self.process_group), *kept.names}
        self.impl.load_state_dict({key: value for key, value in state.items() if key not in known})
        kept.load_state_dict(self.name, continued(self.name, state, self.process_group), self._named_parameters())
        # Whether ranks sum the state in the next backward depends on the state, so all ranks must load the same names.
        names = list(state[kept.names[0]])
        own = Progress("loading the state", {"a digest of the names in the state": fingerprint(names)})
        world = self.process_group.world
        self.lane.submit(lambda: compare_progress(world, own)).result()
        self.impl.reset()

    def _parameters_of_state(self) -> list[torch.Tensor]:
        if self._kept_parameters is not None:
            return self._kept_parameters()
        if not self.optimizers and self._module is not None:
            return list(self._module.parameters())
        own = [parameters_of(optimizer) for optimizer in self.optimizers]
        return [parameter for parameters in own for parameter in parameters]

    def _named_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters that have state, by module name, or by optimizer index with a standalone hook."""
        if not self._has_names():
            raise RuntimeError(
                f"{self.name}: with a standalone hook, parameters have no names to save state by; create the runner "
                "with reify(group, optimizer=optimizer), where the optimizer has the DDP's parameters, or use attach"
            )
        known = [parameter for parameter in self._parameters_of_state() if id(parameter) in self._names]
        encodes = self.codec.encodes
        return {self._names[id(parameter)]: parameter for parameter in known if encodes(parameter.dtype.to_real())}

    def _has_names(self) -> bool:
        return bool(self._names)

    def set_module(
        self,
        module: torch.nn.Module,
        ignored_names: frozenset[str] = frozenset(),
        *,
        parts: Sequence[torch.nn.Module] = (),
    ) -> None:
        """Set the module, and reset the impl. Collective on GPUs.

        `attach` calls it after `bind` and the broadcast of rank 0's weights and optimizer state, and before
        it installs hooks. From then on, parameters have their names in the module.

        Args:
            module: the attached module, without its DDP. If `attach` was given a list, a container of its modules.
            ignored_names: names of parameters and buffers that DDP ignores.
            parts: the modules of the list, without their DDPs.
        """
        self._module, self._parts = module, parts
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.impl.reset()

    def use_device(self, device: torch.device) -> None:
        """Set the device of the tensors that the lane processes. The first call with a GPU is collective.

        Raises:
            ValueError: the GPU differs from an earlier one, or the process group has no backend for it. Or the backend
                lacks an operation; all ranks then raise.
            CommunicationError: the backend could not connect the ranks on this device.
        """
        if device.type != "cpu" and device != self._gpu:  # called for every bucket
            self.process_group.world.check_device(device)
            self.lane.use_gpu(device)
            if device.type == "cuda":  # on other devices, observers get the host's begin and end times
                self.tracer.use_gpu(device, self.process_group.private.wait_for_mark)
                load_kernels(torch.cuda.current_device() if device.index is None else device.index)
            self.process_group.private.use_device(device)
            self.process_group.private.check_operations(device, self.name)
            self._gpu = device

    def rebuild_buckets(self) -> None:
        """Rebuild the buckets, or have them rebuilt when DDP next sends one."""
        raise NotImplementedError

    # The end.

    def finish(self, *, failed: bool) -> bool:
        """End the work on the module, before `close`. Return whether this made the weights equal on all ranks.

        Args:
            failed: True if an exception ends the attachment. Other ranks may then not call this method.
        """
        self.ends_in_order = False
        if failed:
            return False
        has_mean = self.impl.finish()
        self.ends_in_order = True
        return has_mean

    def close(self, *, in_order: bool = False) -> None:
        """Finish the queued jobs, and end the lane, the private groups and the traces. A second call does nothing.

        Args:
            in_order: True if all ranks call this method; by default, `ends_in_order`.
        """
        self.ends_in_order |= in_order
        with self._after_close:
            try:
                self._before_close.close()
            finally:
                self._close_lane_and_groups()

    def _close_lane_and_groups(self) -> None:
        if self._steps is not None:
            self._steps.close()
        try:
            self.lane.close(in_order=self.ends_in_order)
            if self.ends_in_order and not self.lane.has_failed:
                self._leave_in_order()
        finally:
            if self.parameter_state is not None:
                self.parameter_state.close()
            if not self.ends_in_order or self.lane.has_failed:
                self.process_group.announce_failure()
            self.process_group.close()  # before the traces, which may take long to write, so that peers notice at once
            self.tracer.end()

    def _leave_in_order(self) -> None:
        self.process_group.private.end_in_order()

    def on_close(self, callback: Callable[[], object], *, first: bool = False) -> None:
        """Call `callback` when the runner is closed, for example by `Attachment.detach`. For impls and adapters.

        Args:
            callback: the function to call.
            first: call it before the lane and the groups are closed, to end work that uses them.
        """
        (self._before_close if first else self._after_close).callback(callback)


class AlgorithmImpl:
    """The running part of an algorithm: what it communicates and when, and its private state.

    `Algorithm.make_impl` returns one, and a `Runner` calls its methods. An impl is of one of two kinds:

    - A *gradient algorithm* communicates gradients, in DDP's buckets, from a DDP communication hook. It overrides
      `init_operations`.
    - A *weight algorithm* communicates weights, in separate buckets, at the end of the training step. Its impl is a
      `torchbagua.extend.WeightImpl`.

    All other methods have a default, which suits a gradient algorithm.

    Args:
        runner: the runner of this impl, the argument of `Algorithm.make_impl`.

    Attributes:
        runner: provides the process group, the lane, the codec and the state of the training step.
        algorithm: the description. Its fields are the user's arguments.
    """

    # A subclass annotates its description class here, so that the fields are typed.
    algorithm: Any

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.algorithm = runner.algorithm

    def need_reset(self) -> bool:
        """Return True to have `reset` called.

        For a gradient algorithm it is called exactly once in each backward, before the first bucket, so an override may
        count backward passes or have ranks compare values. For a weight algorithm it is called at the end of each step.
        """
        return False

    def init_tensors(self, module: torch.nn.Module) -> list[BaguaTensor]:
        """Return the tensors to communicate, if this is a weight algorithm."""
        raise TypeError(f"{type(self).__name__} is a gradient algorithm, so DDP provides its tensors")

    def tensors_to_buckets(self, tensors: list[BaguaTensor], do_flatten: bool) -> list[BaguaBucket]:
        """Group tensors into buckets, if this is a weight algorithm.

        Args:
            tensors: the return value of `init_tensors`.
            do_flatten: always True; exists because Bagua's method has it.
        """
        raise TypeError(f"{type(self).__name__} is a gradient algorithm, so DDP provides its buckets")

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
        it must not communicate. Does nothing by default.

        Args:
            values: copies of the loaded values, by the names in `WeightRunner.buckets`, of some weights or all.
        """

    def forget_in_flight(self) -> None:
        """Forget the round in flight, which has failed, so that `state_dict` returns the state without it.

        Called by `Attachment.abandon`, after the lane has ended. Does nothing by default.
        """

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give all ranks the mean of their weights within the context, and restore each rank's weights afterwards.

        Collective. Does nothing by default, since all ranks of a gradient algorithm hold the same weights.
        """
        yield

    def finish(self) -> bool:
        """End the work on the module, while ranks can still communicate. Return whether this made the weights equal.

        Not called if an exception ends the attachment. Returns False by default.
        """
        return False
