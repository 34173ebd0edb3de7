"""GradientRunner: drives a gradient algorithm, whose buckets DDP passes to the communication hook."""

from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, final

import torch

from torchbagua._warnings import UncompressedParametersWarning
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.lane import Job
from torchbagua.runtime.meeting import Meeting, Meetings
from torchbagua.runtime.optimizer_steps import parameters_of
from torchbagua.runtime.parameters import OF_GRADIENTS, BaguaTensor, LayoutWatch, MemoryOrder, check_gradient_layouts
from torchbagua.runtime.runner import AlgorithmImpl, Runner

T = TypeVar("T")


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


@final
class GradientRunner(Runner):
    """Runs a gradient algorithm: the state of `comm_hook`. See `Runner`.

    Between two backward passes the lane is idle, since DDP waits for all buckets at the end of each backward.
    Therefore `loss_scale` and the flat tensors of buckets need no lock.

    Attributes:
        gradient_buckets: the buckets that mirror DDP's. Empty before the first backward. Iterable.
        loss_scale: the loss scale of the gradients of this backward. It is 1 unless `needs_grad_scaler` is True and
            there is a GradScaler.
        meetings: compare the progress of ranks; None in a group of one rank, and until `start_meetings`.
        num_received: the number of gradient buckets that DDP has passed to the hook.
        has_joined: whether this rank has run out of data. It then participates with zero gradients until all ranks
            have run out of data (`torch.distributed.algorithms.Join`).
    """

    averages_weights = False
    loss_scale = 1.0
    num_received = 0
    has_joined = False
    _read_scale: Callable[[], float] | None = None
    _backward = -1
    _num_joined = 0
    _meeting: Meeting | None = None
    _newest_job: Job[torch.Tensor] | None = None
    meetings: Meetings | None = None

    def __init__(self, process_group: BaguaProcessGroup, algorithm: Any) -> None:
        super().__init__(process_group, algorithm)
        self.gradient_buckets = GradientBuckets()
        self._places: Mapping[int, str] = {}
        self._checked_dtypes: set[torch.dtype] = set()
        self._joined_listeners: list[Callable[[], None]] = []
        self._make_impl()

    def _check_impl(self) -> None:
        super()._check_impl()
        cls = type(self.impl)
        if cls.init_tensors is not AlgorithmImpl.init_tensors:
            raise TypeError(
                f"{cls.__name__} averages weights, because it is a WeightImpl or overrides init_tensors, but "
                f"{self.name}.averages_weights is False; set it to True"
            )
        if cls.tensors_to_buckets is not AlgorithmImpl.tensors_to_buckets:
            raise TypeError(
                f"{cls.__name__} overrides tensors_to_buckets without init_tensors: a gradient algorithm must use "
                "DDP's buckets, and a weight algorithm must override both"
            )

    def average(self, weights: Any) -> NoReturn:
        """Refuse to average weights, which only a `WeightRunner` does."""
        raise TypeError(
            f"{self.name}'s impl averages weights, because it calls runner.average, but "
            f"{self.name}.averages_weights is False; set it to True"
        )

    def use_grad_scaler(
        self, scaler: torch.amp.GradScaler | None, read_scale: Callable[[], float] | None = None
    ) -> None:
        """Set the GradScaler whose scale the gradients contain. `attach` calls it; without `attach`, call it yourself.

        Args:
            scaler: the GradScaler.
            read_scale: returns the scale at the first bucket of a backward. By default `GradScaler.get_scale`, which
                synchronizes with the GPU.
        """
        self._read_scale = read_scale or (scaler.get_scale if scaler is not None else None)

    # Steps of the optimizers.

    def start_meetings(self, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Have ranks compare their progress, and these weights, from now on. Call it on all ranks, after `watch_steps`.

        The ranks meet in the backward passes of DDP, so a runner without DDP's hook has no meetings.
        """
        if self.process_group.size > 1:
            self.meetings = Meetings(self.process_group, weights or {})
            self.meetings.steps.listen_to(self.step_watches, owner=self)

    def step_taken(self) -> None:
        """Report that your optimizer has taken a step. Call this after each step if you do not use `attach`.

        If you have a GradScaler, which may skip a step, or several synchronized backward passes before the first step,
        pass the optimizer to `Algorithm.reify` instead.

        Raises:
            RuntimeError: the runner already watches its optimizers.
        """
        if self.meetings is not None:
            self.meetings.steps.count()
        if self._steps is not None:
            self._steps.report_step(tensor.parameter for bucket in self.gradient_buckets for tensor in bucket.tensors)

    def commit_step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Commit the state of a step of these parameters; see `Runner.commit_step`.

        If they are copies of the communicated parameters, as float32 masters are, then the step is of those that no
        optimizer has.
        """
        if self._are_copies(parameters):
            stepped = {id(each) for optimizer in self.optimizers for each in parameters_of(optimizer)}
            every = [tensor.parameter for bucket in self.gradient_buckets for tensor in bucket.tensors]
            parameters = [each for each in every if each.grad is not None and id(each) not in stepped]
        super().commit_step(parameters)

    def _are_copies(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether an optimizer with these parameters has none that is communicated, but copies of them."""
        known = self.gradient_buckets.known_ids if self._module is None else self._names.keys()
        return bool(parameters and known) and not any(id(parameter) in known for parameter in parameters)

    def _parameters_of_state(self) -> list[torch.Tensor]:
        if self._kept_parameters is not None or self._module is None:
            return super()._parameters_of_state()
        if not any(self._are_copies(parameters_of(optimizer)) for optimizer in self.optimizers):
            return super()._parameters_of_state()
        return [parameter for parameter in self._module.parameters() if parameter.requires_grad]

    def _has_names(self) -> bool:
        return bool(self._names) and not (self._module is None and self._are_copies(self._parameters_of_state()))

    # The module and its buckets.

    def set_module(
        self,
        module: torch.nn.Module,
        ignored_names: frozenset[str] = frozenset(),
        *,
        parts: Sequence[torch.nn.Module] = (),
    ) -> None:
        if len(parts) > 1:
            self._places = {id(each): f" of module {at}" for at, part in enumerate(parts) for each in part.parameters()}
        trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        devices = {weight.device for weight in trained.values()}
        if len(devices) == 1:
            self.use_device(devices.pop())
        self.gradient_buckets.tensors_of({name: trained[name] for name in trained if name not in ignored_names})
        super().set_module(module, ignored_names, parts=parts)

    def rebuild_buckets(self) -> None:
        """Drop the buckets that mirror DDP's."""
        self.gradient_buckets.clear()

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
        if self._steps is not None and not has_joined:
            self._steps.before_backward()
        if self.needs_grad_scaler:
            self.loss_scale = 1.0 if self._read_scale is None else self._read_scale()
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

    def note_job(self, job: Job[torch.Tensor], *, is_first: bool, is_last: bool) -> Job[torch.Tensor] | None:
        """Note the job of a bucket, and return that of the bucket before it in this backward, if any."""
        before, self._newest_job = self._newest_job, None if is_last else job
        return None if is_first else before

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
                first backward.
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
        self.num_received += 1
        bucket.receive(flat, self.num_received)
        self.ends_in_order = True  # with a standalone hook, nobody calls finish
        return bucket

    def _check_new(self, bucket: BaguaBucket) -> None:
        """Check dtypes and layouts. If only this rank raises, for example by a warning filter, the others raise too."""
        try:
            if self._module is None:  # attach has checked all parameters at once
                self._check_dtypes({tensor.name: tensor.parameter for tensor in bucket.tensors})
            if not self.has_joined:
                check_gradient_layouts(bucket.parts(bucket.flat))
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

    def meet_at_end(self) -> None:
        """Compare the progress and the weights of all ranks, which have trained with DDP's hook. Collective."""
        if self.meetings is None:
            return
        in_stream_order = self._gpu is not None and self.process_group.world.in_stream_order(self._gpu)
        if self.lane.has_failed and not in_stream_order:  # a backward has raised the error already
            return
        with self.tracer.span("detach"):
            self.meetings.end(self.lane)

    def _close_lane_and_groups(self) -> None:
        if self.meetings is not None:
            self.meetings.steps.close()
        super()._close_lane_and_groups()

    def _leave_in_order(self) -> None:
        if self.meetings is not None:
            self.meetings.leave()
        super()._leave_in_order()
