"""Runner: drives an algorithm's impl, from `Algorithm.reify` to `close`."""

from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NoReturn, TypeVar, final

import torch

from torchbagua._warnings import UncompressedParametersWarning
from torchbagua.codecs.base import Compressor
from torchbagua.codecs.lookup import codec_for_dtype
from torchbagua.collectives.agreement import fingerprint, require_same_progress
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.native.loader import load_kernels
from torchbagua.runtime.bucket import BaguaBucket, BaguaTensor
from torchbagua.runtime.changed_layout import OF_GRADIENTS, LayoutWatch, check_gradient_layouts
from torchbagua.runtime.impl import AlgorithmImpl, check_impl
from torchbagua.runtime.lane import Job, Lane
from torchbagua.runtime.meeting import Meeting, Meetings
from torchbagua.runtime.optimizer_steps import StepCount, StepsTaken, StepWatch, parameters_of
from torchbagua.runtime.parameter_state import ParameterState
from torchbagua.runtime.parameters import MemoryOrder, local_shard
from torchbagua.runtime.rank_state import check_rank_state, owner_of
from torchbagua.runtime.weight_buckets import WeightBuckets


class GradientBuckets:
    """The buckets in use. No two of them share a parameter.

    Attributes:
        layout_watch: detects whether the memory layout of a parameter has changed since the parameter was first seen.
    """

    def __init__(self) -> None:
        self._by_first: dict[int, BaguaBucket] = {}  # by the id of the first parameter
        self._seen: dict[int, BaguaTensor] = {}  # by the id of the parameter, in the state when it was first seen
        self.layout_watch = LayoutWatch(OF_GRADIENTS)

    def __iter__(self) -> Iterator[BaguaBucket]:
        """Iterate over all buckets."""
        return iter(self._by_first.values())

    @property
    def known_ids(self) -> KeysView[int]:
        """The ids of the parameters that have been in a bucket."""
        return self._seen.keys()

    def find(self, parameters: Sequence[torch.Tensor]) -> BaguaBucket | None:
        """Return the bucket of exactly these parameters, in this order, or None."""
        bucket = self._by_first.get(id(parameters[0]))
        if bucket is None or len(bucket.tensors) != len(parameters):
            return None
        is_same = all(
            tensor.parameter is parameter for tensor, parameter in zip(bucket.tensors, parameters, strict=True)
        )
        return bucket if is_same else None

    def add(self, bucket: BaguaBucket) -> None:
        """Add a bucket, and remove the buckets that share parameters with it."""
        members = {id(tensor.parameter) for tensor in bucket.tensors}
        self._by_first = {
            key: other
            for key, other in self._by_first.items()
            if members.isdisjoint(id(tensor.parameter) for tensor in other.tensors)
        }
        self._by_first[id(bucket.tensors[0].parameter)] = bucket

    def clear(self) -> None:
        """Remove all buckets."""
        self._by_first.clear()

    def tensors_of(self, named: Mapping[str, torch.Tensor]) -> list[BaguaTensor]:
        """Return the bucket tensors of these parameters, each in the memory order in which it was first seen."""
        tensors = [BaguaTensor(name, parameter, self._order_of(parameter)) for name, parameter in named.items()]
        if new := {id(tensor.parameter): tensor for tensor in tensors if id(tensor.parameter) not in self._seen}:
            self._seen |= new
            self.layout_watch.watch(list(self._seen.values()))
        return tensors

    def _order_of(self, parameter: torch.Tensor) -> MemoryOrder | None:
        seen = self._seen.get(id(parameter))
        return None if seen is None else seen.order


S = TypeVar("S", bound=ParameterState[Any])
T = TypeVar("T")


@final
class Runner:
    """Runs an algorithm over a process group: the state of `comm_hook`, and the return value of `Algorithm.reify`.

    It contains the lane, the buckets and the per-parameter state. It is notified of backward passes and of optimizer
    steps, and calls the methods of an `AlgorithmImpl`. The constructor of an impl calls `keep`, `average`,
    `on_step_taken` and `on_close`, and its methods call `codec_for`. A loop with a standalone hook calls `step_taken`,
    `state_dict`, `load_state_dict` and `close`. `attach` and `comm_hook` call the other methods.

    With a standalone hook, a runner that was not closed ends when it is garbage-collected.

    Between two backward passes the lane of a gradient algorithm is idle, since DDP waits for all buckets at the end of
    each backward. Therefore `loss_scale` and the flat tensors of buckets need no lock.

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
        buckets: the buckets of a weight algorithm; empty for a gradient algorithm, which uses DDP's.
        gradient_buckets: the buckets that mirror DDP's. Empty before the first backward. Iterable.
        ignored_names: the parameters and buffers of the module that DDP ignores.
        optimizers: the optimizers with watched steps. Empty without `attach`, unless optimizers were passed to
            `Algorithm.reify`.
        step_watches: one for each of these optimizers; it notifies its listeners of each step.
        grad_scaler: the GradScaler that was passed to `attach`.
        has_unknown_scaler: whether an optimizer is stepped by a GradScaler that `attach` was not given.
        loss_scale: the loss scale of the gradients of this backward. It is 1 unless `needs_grad_scaler` is True and
            there is a GradScaler.
        read_loss_scale: returns the loss scale, at the first bucket of a backward. `attach` sets it. If it is None, the
            runner reads the scale from the GradScaler, which synchronizes with the GPU.
        meetings: compare the progress of ranks with a gradient algorithm; None in a group of one rank.
        num_received: the number of gradient buckets that DDP has passed to the hook.
        has_joined: whether this rank has run out of data. It then participates with zero gradients until all ranks
            have run out of data (`torch.distributed.algorithms.Join`).
        loading: the names in `buckets` of weights that the module's `load_state_dict` has written since the last step.
            `AlgorithmImpl.weights_loaded` is called later. Until then, no round in flight may change these weights.
        ends_in_order: whether all ranks will call `close`. If so, `close` completes pending stream-ordered work.
            Otherwise it aborts this work.
        has_lost_ranks: set to True when a rank has left early, so that the other ranks do not end in order.
        ended_by: the call that the missing-detach warning recommends. Adapters set a different one.

        An impl sets these in its constructor:

        parameter_state: the per-parameter state, set by `keep`.
        weights: the weights to average, set by `average`.
        needs_grad_scaler: whether a loop that has a GradScaler must pass it to `attach`.
        agree_on_overflow: a function of a bool, whether this rank's gradients contain an Inf or NaN. Returns whether
            the GradScaler must skip the step. By default, this rank's gradients decide; for a weight algorithm, an Inf
            or NaN on any rank skips the step on all.
        replicas_diverge: returns whether ranks currently hold different weights that `detach` would make equal.
        open_node_gradients: returns the runner that averages gradients among the ranks of this node, for the hook of a
            DDP of all ranks; collective. None unless DDP continues to average gradients within nodes.
        load_effect: the effect of `AlgorithmImpl.weights_loaded`, for the message that reports a load of weights.

    Raises:
        TypeError: `make_impl` did not return an impl of the algorithm's kind.
    """

    def __init__(self, process_group: BaguaProcessGroup, algorithm: Any) -> None:
        self.process_group = process_group
        self.algorithm = algorithm
        self.name = type(algorithm).__name__
        self.codec: Compressor = algorithm.make_codec()
        self.tracer = process_group.tracer
        self.lane = Lane(
            f"torchbagua lane of {self.name}",
            on_failure=process_group.fail,
            waiting=partial(process_group.tracer.span, "wait"),
            poll=process_group.poll,
            explain=process_group.explain,
            wait_for_gpu=process_group.wait_for_mark,
            look=process_group.look_for_failed_rank if process_group.launches_on_users_group else None,
            on_abandon=process_group.abandon,
        )
        self.buckets: list[BaguaBucket] = []
        self.gradient_buckets = GradientBuckets()
        self.ignored_names: frozenset[str] = frozenset()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.step_watches: list[StepWatch] = []
        self.grad_scaler: torch.amp.GradScaler | None = None
        self.has_unknown_scaler = False
        self.loss_scale = 1.0
        self.read_loss_scale: Callable[[], float] | None = None
        self._num_steps = StepCount()
        compares = process_group.size > 1 and not algorithm.averages_weights
        self.meetings = Meetings(process_group, self._num_steps) if compares else None
        self.num_received = 0
        self.has_joined = False
        self.loading: frozenset[str] = frozenset()
        self.ends_in_order = False
        self.has_lost_ranks = False
        self.ended_by = "detach() of what attach returned"
        self.parameter_state: ParameterState[Any] | None = None
        self.weights: WeightBuckets | None = None
        self.needs_grad_scaler = False
        self.agree_on_overflow: Callable[[bool], bool] = bool
        self.replicas_diverge: Callable[[], bool] = lambda: False
        self.open_node_gradients: Callable[[], Runner] | None = None
        self.load_effect = "and no round in flight changes them"
        self._kept_parameters: Callable[[], list[torch.Tensor]] | None = None
        self._names: Mapping[int, str] = {}
        self._module: torch.nn.Module | None = None
        self._parts: Sequence[torch.nn.Module] = ()
        self._places: Mapping[int, str] = {}
        self._backward = -1
        self._num_joined = 0
        self._gpu: torch.device | None = None
        self._checked_dtypes: set[torch.dtype] = set()
        self._steps = StepsTaken(self, self.name)
        self._meeting: Meeting | None = None
        self._joined_listeners: list[Callable[[], None]] = []
        self._step_listeners: list[Callable[[Sequence[torch.Tensor]], None]] = []
        self._watches_steps = False
        self._is_closed = False
        self._before_close = ExitStack()
        self._after_close = ExitStack()
        if algorithm.averages_weights:
            process_group.move_to_lane()
        try:
            self.impl: AlgorithmImpl = algorithm.make_impl(self)
            check_impl(self)
        except BaseException:
            self.close()
            raise

    @property
    def averages_weights(self) -> bool:
        """Whether it runs a weight algorithm, which has separate buckets."""
        return bool(self.algorithm.averages_weights)

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

    def average(self, weights: WeightBuckets) -> WeightBuckets:
        """Register and return the weights to average. This makes the algorithm a weight algorithm.

        With several ranks, all ranks then skip a step if the GradScaler of any rank skips it.
        """
        self._require_constructor("average")
        self.weights = weights
        self.replicas_diverge = lambda: weights.has_final_mean
        weights.lockstep.loads.is_pending = lambda: bool(self.loading)
        if self.process_group.size > 1:
            self.needs_grad_scaler = True
            self.agree_on_overflow = weights.lockstep.agree_on_overflow
        return weights

    # Steps of the optimizers.

    def watch_steps(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Watch the steps of these optimizers, if the algorithm needs them. `Algorithm.reify` calls this."""
        self.optimizers = list(optimizers)
        self._watches_steps = True
        kept = self._parameters_of_state()
        self._names = {id(parameter): f"parameter {index}" for index, parameter in enumerate(kept)}
        self.step_watches = [StepWatch(optimizer) for optimizer in dict.fromkeys(optimizers)]
        if self.commits_on_step:
            self._steps.listen_to(self.step_watches)
        if self.meetings is not None:
            self._num_steps.listen_to(self.step_watches, owner=self)

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

    @property
    def commits_on_step(self) -> bool:
        """Whether the runner must be notified of the steps that are taken."""
        return self.parameter_state is not None or bool(self._step_listeners)

    def step_taken(self) -> None:
        """Report that your optimizer has taken a step. Call this after each step if you do not use `attach`.

        If you have a GradScaler, which may skip a step, or several synchronized backward passes before the first step,
        pass the optimizer to `Algorithm.reify` instead.

        Raises:
            RuntimeError: the runner already watches its optimizers.
        """
        self._num_steps.number += 1
        self._steps.report_step(tensor.parameter for bucket in self.gradient_buckets for tensor in bucket.tensors)

    def commit_step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Commit the state of a step; `StepsTaken` calls this.

        Args:
            parameters: the parameters of the optimizer that have a gradient. If they are copies of the communicated
                parameters, as float32 masters are, then the step is of those that no optimizer has.
        """
        if self._are_copies(parameters):
            stepped = {id(each) for optimizer in self.optimizers for each in parameters_of(optimizer)}
            every = [tensor.parameter for bucket in self.gradient_buckets for tensor in bucket.tensors]
            parameters = [each for each in every if each.grad is not None and id(each) not in stepped]
        for listener in self._step_listeners:
            listener(parameters)
        if self.parameter_state is not None:
            self.parameter_state.commit(parameters)

    def _are_copies(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether an optimizer with these parameters has none that is communicated, but copies of them."""
        known = self.gradient_buckets.known_ids if self._module is None else self._names.keys()
        return bool(parameters and known) and not any(id(parameter) in known for parameter in parameters)

    # State.

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
        kept.load_state_dict(self.name, state, self._named_parameters())
        # Whether ranks sum the state in the next backward depends on the state, so all ranks must load the same names.
        names = list(state[kept.names[0]])
        progress = {"as a digest of the names in its state": fingerprint(names)}
        world = self.process_group.world
        self.lane.submit(lambda: require_same_progress(world, progress, "loading the state")).result()
        self.impl.reset()

    def _parameters_of_state(self) -> list[torch.Tensor]:
        if self._kept_parameters is not None:
            return self._kept_parameters()
        if not self.optimizers and self._module is not None:
            return list(self._module.parameters())
        own = [parameters_of(optimizer) for optimizer in self.optimizers]
        if self._module is not None and any(map(self._are_copies, own)):
            return [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        return [parameter for parameters in own for parameter in parameters]

    def _named_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters that have state, by module name, or by optimizer index with a standalone hook."""
        if not self._names or (self._module is None and self._are_copies(self._parameters_of_state())):
            raise RuntimeError(
                f"{self.name}: with a standalone hook, parameters have no names to save state by; create the runner "
                "with reify(group, optimizer=optimizer), where the optimizer has the DDP's parameters, or use attach"
            )
        known = [parameter for parameter in self._parameters_of_state() if id(parameter) in self._names]
        encodes = self.codec.encodes
        return {self._names[id(parameter)]: parameter for parameter in known if encodes(parameter.dtype.to_real())}

    # The module and its buckets.

    def set_module(
        self,
        module: torch.nn.Module,
        ignored_names: frozenset[str] = frozenset(),
        *,
        parts: Sequence[torch.nn.Module] = (),
    ) -> None:
        """Set the module, and create the buckets of a weight algorithm. Collective on GPUs.

        `attach` calls it after `Algorithm.reify` and the broadcast of rank 0's weights and optimizer state, and before
        it installs hooks. From then on, parameters have their names in the module.

        Args:
            module: the attached module, without its DDP. If `attach` was given a list, a container of its modules.
            ignored_names: names of parameters and buffers that DDP ignores.
            parts: the modules of the list, without their DDPs.
        """
        self._module, self._parts = module, parts
        if len(parts) > 1:
            self._places = {id(each): f" of module {at}" for at, part in enumerate(parts) for each in part.parameters()}
        self.ignored_names = ignored_names
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        devices = {parameter.device for parameter in module.parameters() if parameter.requires_grad}
        if len(devices) == 1 and not self.averages_weights:  # a weight algorithm uses the devices of its buckets
            self.use_device(devices.pop())
        if not self.averages_weights:
            trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
            self.gradient_buckets.tensors_of({name: trained[name] for name in trained if name not in ignored_names})
        self.impl.reset()

    def is_attached_to(self, module: torch.nn.Module | Sequence[torch.nn.Module]) -> bool:
        """Return whether this is the attached module, its DDP, or some of the attached ones; False after `close`."""
        given = [module] if isinstance(module, torch.nn.Module) else module
        own = [self._module, *self._parts]
        is_own = [each in own or getattr(each, "module", None) in own for each in given]
        return self._module is not None and not self._is_closed and bool(is_own) and all(is_own)

    def rebuild_buckets(self) -> None:
        """Rebuild the buckets of a weight algorithm, and drop the buckets that mirror DDP's."""
        self.gradient_buckets.clear()
        if self.averages_weights and self._module is not None:
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
                self.tracer.use_gpu(device, self.process_group.wait_for_mark)
                load_kernels(torch.cuda.current_device() if device.index is None else device.index)
            self.process_group.use_device(device)
            self.process_group.check_operations(device, self.name)
            self._gpu = device

    def refuse_capture(self) -> None:
        """Raise RuntimeError if a CUDA graph is being captured: a replay would not call the hooks of the step."""
        if self._gpu is not None and self._gpu.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.name}: a CUDA graph is being captured; capture parts of the model "
                "(torch.cuda.make_graphed_callables) without the optimizer's step"
            )

    # A backward of a gradient algorithm.

    def begin_backward(self, *, has_joined: bool, backward: int = -1) -> None:
        """Prepare for a backward; `comm_hook` calls it before the first bucket of each DDP.

        Args:
            has_joined: see the attribute of this name.
            backward: the number of the backward, in which another DDP may have called it already; -1 if it has none.

        Raises:
            RuntimeError: the memory layout of a parameter has changed. The message names the parameter.
            RuntimeWarning: ranks hold different weights, and a filter turns the warning into an error.
        """
        if 0 <= backward == self._backward:
            return
        self._backward = backward
        self.has_joined = has_joined
        self._num_joined += has_joined
        layout_watch = self.gradient_buckets.layout_watch
        has_changed = layout_watch.look()
        if self.meetings is not None:
            self.report_differences()
            self._meeting = self.meetings.begin(has_joined=has_joined)
        if self.commits_on_step and not has_joined:
            self._steps.before_backward()
        if self.needs_grad_scaler:
            scaler = self.grad_scaler
            self.loss_scale = 1.0 if scaler is None else (self.read_loss_scale or scaler.get_scale)()
        needs_reset = self.impl.need_reset()
        if has_changed:  # after `need_reset`, which may notify other ranks of it
            self._fail(layout_watch.local_error(self.process_group.rank))
        if needs_reset:
            self.impl.reset()

    def report_differences(self) -> None:
        """Warn of weights that meetings have found to differ; if a filter makes this an error, all ranks raise."""
        if self.meetings is not None:
            try:
                self.meetings.report()
            except RuntimeWarning as error:
                self.process_group.post_reason(str(error))
                self._fail(error)

    def take_meeting(self) -> Meeting | None:
        """Return the meeting of the backward that has begun, once; None if an agreement has run it already."""
        meeting, self._meeting = self._meeting, None
        return meeting

    def submit_agreement(self, run: Callable[[], T]) -> Job[T]:
        """Have the lane run an agreement of the ranks: in a backward, after the meeting of this backward.

        Ranks that are out of step could be in different agreements, and wait for each other.
        """
        meeting = self.take_meeting()
        if meeting is None:
            return self.lane.submit(run)

        def meet_and_run() -> T:
            meeting.run()
            return run()

        return self.lane.submit(meet_and_run)

    @property
    def is_end_of_joined_step(self) -> bool:
        """Whether this rank has joined, and each attached module has had a backward since the last step's end."""
        return self.has_joined and self._num_joined % max(len(self._parts), 1) == 0

    def on_joined_backward(self, listener: Callable[[], None]) -> None:
        """Call `listener` after the last bucket of each backward in which this rank has joined and sends zeros.

        Only in stream order: otherwise the lane may still be processing the bucket.
        """
        self._joined_listeners.append(listener)

    def end_joined_backward(self) -> None:
        """Notify the listeners of `on_joined_backward`; `comm_hook` calls it after the last bucket."""
        for listener in self._joined_listeners:
            listener()

    def gradient_bucket(self, parameters: Sequence[torch.Tensor], flat: torch.Tensor, *, index: int) -> BaguaBucket:
        """Return the bucket for a DDP bucket, with `flat` as its flat tensor; `comm_hook` calls it.

        Args:
            parameters: the parameters of the DDP bucket. They identify it, since DDP rebuilds its buckets after its
                first step.
            flat: the buffer of the DDP bucket.
            index: DDP's number of the bucket, for names.
        """
        bucket = self.gradient_buckets.find(parameters)
        if bucket is None:
            names = [
                self._names.get(id(parameter), f"parameter {position} of bucket {index}")
                for position, parameter in enumerate(parameters)
            ]
            tensors = self.gradient_buckets.tensors_of(dict(zip(names, parameters, strict=True)))
            name = f"gradient bucket {index}{self._places.get(id(parameters[0]), '')}"
            bucket = BaguaBucket(name, tensors, self.process_group, flat)
            self._check_new(bucket)
            self.impl.init_operations(self._module, bucket)
            self.gradient_buckets.add(bucket)
        bucket.flat = flat
        self.num_received = bucket.num_received = self.num_received + 1
        self.ends_in_order = True  # with a standalone hook, nobody calls finish
        return bucket

    def _check_new(self, bucket: BaguaBucket) -> None:
        """Check dtypes and layouts. If only this rank raises, for example by a warning filter, the others raise too."""
        try:
            if self._module is None:  # attach has checked all parameters at once
                self._check_dtypes({tensor.name: tensor.parameter for tensor in bucket.tensors})
            if not self.has_joined:
                check_gradient_layouts(bucket)
        except (UncompressedParametersWarning, ValueError, RuntimeError) as error:
            self._fail(error)

    def _check_dtypes(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Have the algorithm check parameters, once for each dtype that it does not compress."""
        dtypes = {parameter.dtype for parameter in self.algorithm.uncompressed(parameters).values()}
        if not dtypes <= self._checked_dtypes:
            self._checked_dtypes |= dtypes
            self.algorithm.check_parameters(parameters)

    def _fail(self, error: Exception) -> NoReturn:
        """Raise an error, and end the lane, which closes the groups so that other ranks do not wait for this rank."""

        def fail() -> NoReturn:
            raise RuntimeError(str(error))

        self.lane.submit(fail)
        raise error

    # The end.

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Give all ranks the mean of their weights in a context. Collective; see `AlgorithmImpl.averaged_weights`."""
        return self.impl.averaged_weights()

    def own_weights(self) -> AbstractContextManager[None]:
        """Within `averaged_weights`, give this rank its local weights in a nested context. Not collective.

        `Attachment.rank_state_dict` needs this if it is called within `averaged_weights`.

        Raises:
            NotImplementedError: a weight algorithm has no `weights`, because its impl does not call `average`.
        """
        if self.weights is not None:
            return self.weights.means.own()
        if self.averages_weights:
            raise NotImplementedError(f"{type(self.impl).__name__} must call runner.average in its constructor")
        return nullcontext()

    def finish(self, *, failed: bool) -> bool:
        """End the work on the module, before `close`. Return whether this made the weights equal on all ranks.

        Args:
            failed: True if an exception ends the attachment. Other ranks may then not call this method.
        """
        self.ends_in_order = False
        if failed:
            return False
        has_mean = self.impl.finish()
        self.ends_in_order = not self.has_lost_ranks
        return has_mean

    def meet_at_end(self) -> None:
        """Compare the progress and the weights of all ranks, which have trained with DDP's hook. Collective."""
        if self.meetings is None:
            return
        in_stream_order = self._gpu is not None and self.process_group.world.in_stream_order(self._gpu)
        if self.lane.has_failed and not in_stream_order:  # a backward has raised the error already
            return
        with self.tracer.span("detach"):
            self.meetings.end(self.lane)

    def close(self) -> None:
        """Finish the queued jobs, and end the lane, the private groups and the traces. A second call does nothing."""
        self._is_closed = True
        with self._after_close:
            try:
                self._before_close.close()
            finally:
                self._close_lane_and_groups()

    def _close_lane_and_groups(self) -> None:
        self._steps.close()
        self._num_steps.close()
        try:
            self.lane.close(in_order=self.ends_in_order)
            if self.ends_in_order and not self.lane.has_failed:
                if self.meetings is not None:
                    self.meetings.leave()
                self.process_group.end_in_order()
        finally:
            if self.parameter_state is not None:
                self.parameter_state.close()
            if not self.ends_in_order or self.lane.has_failed:
                self.process_group.announce_failure()
            self.process_group.close()  # before the traces, which may take long to write, so that peers notice at once
            self.tracer.end()

    def on_close(self, callback: Callable[[], object], *, first: bool = False) -> None:
        """Call `callback` when the runner is closed, for example by `Attachment.detach`. For impls and adapters.

        Args:
            callback: the function to call.
            first: call it before the lane and the groups are closed, to end work that uses them.
        """
        (self._before_close if first else self._after_close).callback(callback)
