"""The weights of a module in flat buckets: which they are, and how they are read and changed between two steps."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, TypeVar

import torch

from torchbagua.codecs.base import sum_dtype
from torchbagua.collectives.agreement import fingerprint, require_same_progress
from torchbagua.collectives.clamp import clamp_to_mean
from torchbagua.collectives.low_precision_ring import Replicas
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket, BaguaTensor, check_elements
from torchbagua.runtime.changed_layout import OF_WEIGHTS, LayoutWatch
from torchbagua.runtime.lane import Job, Lane
from torchbagua.runtime.load_record import LoadRecord, require_same_loads
from torchbagua.runtime.memory_order import MemoryOrder, flat_length
from torchbagua.runtime.shards import local_shard, name_of_shard, reshard, sharded_parts

T = TypeVar("T")
FlatOf = Callable[["WeightBucket"], torch.Tensor]
"""Picks one of a bucket's flat tensors, or returns one like them."""

FLAT: FlatOf = attrgetter("bucket.flat")
SNAPSHOT: FlatOf = attrgetter("snapshot")
DIFFERENCE: FlatOf = attrgetter("difference")


@dataclass(eq=False)
class WeightBucket:
    """One bucket of weights, with the tensors that an algorithm keeps beside the flat one; see `WeightBuckets`.

    Each tensor is made when it is first asked for, on the current stream of that thread.

    Attributes:
        bucket: the flat tensor of these weights, and its operations.
        are_buffers: True if they are buffers, False if they are parameters.
    """

    bucket: BaguaBucket
    are_buffers: bool

    # What they hold, and which thread's they are: T, the training thread, and L, the lane. Where nothing else is said,
    # T has them until it submits a job to L, and again when it has waited for that.
    #
    # | algorithm      | flat                           | snapshot              | difference               | replicas |
    # | -------------- | ------------------------------ | --------------------- | ------------------------ | -------- |
    # | decentralized  | the snapshot                   |                       | mean, then mean - flat   |          |
    # | async          | L: mean, then mean - snapshot  | T's while L asks for  | last rounds' mean -      |          |
    # |                |                                | one, and L's after    | snapshot, under a lock   |          |
    # | async, warm-up | means of gradients             | gradients             |                          |          |
    # | low precision  | weights, before and after a    |                       |                          | L's, and |
    # |                | bucket's `start`               |                       |                          | in states |
    # | DiLoCo, no     | snapshot, then the outer       |                       |                          |          |
    # | delay          | gradient, then its mean        |                       |                          |          |
    # | DiLoCo, delay  | outer gradient, its mean, then | the snapshot          | of buffers, mean -       |          |
    # |                | theta' - snapshot; or mean     |                       | snapshot                 |          |

    @cached_property
    def snapshot(self) -> torch.Tensor:
        """Like the flat tensor: the weights as they were between two steps, while that one becomes their mean."""
        return torch.zeros_like(self.bucket.flat)

    @cached_property
    def difference(self) -> torch.Tensor:
        """Like the flat tensor: mean minus snapshot, which is still to be added to the weights."""
        return torch.zeros_like(self.bucket.flat)

    @cached_property
    def replicas(self) -> Replicas:
        """The replicas of the ring of compressed differences, as long as the flat tensor, in its `sum_dtype`."""
        dtype = sum_dtype(self.bucket.flat.dtype)
        return Replicas(*(torch.zeros_like(self.bucket.flat, dtype=dtype) for _ in range(3)))

    def subtract(self, mean: torch.Tensor, snapshot: torch.Tensor, out: torch.Tensor) -> None:
        """Write mean minus snapshot to `out`, which may be one of them.

        A buffer may well hold -inf, a mask of attention say: where that stays, the difference is zero and not NaN.
        """
        stays = mean == snapshot if self.are_buffers else None
        torch.sub(mean, snapshot, out=out)
        if stays is not None:
            out.masked_fill_(stays, 0)

    def slices_of(self, names: Container[str]) -> list[slice]:
        """Return where the weights of these names lie in the flat tensor."""
        found, start = [], 0
        for tensor in self.bucket.tensors:
            stop = start + flat_length(tensor.parameter)
            if tensor.name in names:
                found.append(slice(start, stop))
            start = stop
        return found

    def clear(self, flat: torch.Tensor, names: Container[str]) -> None:
        """Write zeros to those parts of `flat` that belong to the weights of these names."""
        for part in self.slices_of(names):
            flat[part] = 0

    def named(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of `flat`, in the shapes of the weights, by their names."""
        return {tensor.name: part for tensor, part in self.bucket.views(flat)}


class WeightBuckets:
    """The weights of a module in buckets, for an algorithm of yours that averages them.

    The impl makes one in its constructor. Its `AlgorithmImpl.init_tensors` returns what `select` returns, its
    `tensors_to_buckets` what `make_buckets` returns, and its `need_reset` what `need_reset` returns. Iterating over it
    gives each `WeightBucket`. In a group of one rank there are no buckets, and nothing changes.

    Args:
        process_group: the group of the ranks that average.
        owner: the name of the algorithm, for errors.
        average_buffers: average floating-point and complex buffers too, if the module's `state_dict` holds them.
            Integer buffers are left alone.
        bucket_cap_mb: size of the buckets, in MiB.

    Attributes:
        fingerprint: a number below 2^40 that is the same on ranks with the same buckets.
        loads: notes the loads of weights that `AlgorithmImpl.weights_loaded` is told of. Where one is new,
            `submit_in_lockstep` has ranks compare them.
        layout_watch: looks in `need_reset` whether a parameter's memory layout has changed. In `submit_in_lockstep` all
            ranks then raise.
    """

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        owner: str,
        *,
        average_buffers: bool = True,
        bucket_cap_mb: float = 8.0,
    ) -> None:
        self.fingerprint = 0
        self.loads = LoadRecord()
        self.layout_watch = LayoutWatch(OF_WEIGHTS)
        self._group = process_group
        self._owner = owner
        self._average_buffers = average_buffers
        self._cap_bytes = bucket_cap_mb * 2**20
        self._module = torch.nn.Module()
        self._ignored_names: frozenset[str] = frozenset()
        self._averaged: dict[str, torch.Tensor] = {}  # parameters, by name
        self._sharded_parts: list[Any] = []
        self._shapes: dict[str, torch.Size] = {}
        # By name: that of the first tensor of this name. Flat tensors of all ranks have it, also after a reset.
        self._orders: dict[str, MemoryOrder] = {}
        self._buckets: dict[BaguaBucket, WeightBucket] = {}
        self._own: dict[WeightBucket, torch.Tensor] = {}  # this rank's weights, while the module has the mean

    def __iter__(self) -> Iterator[WeightBucket]:
        """Iterate over the buckets, in their order, which is the same on all ranks."""
        return iter(self._buckets.values())

    def __getitem__(self, bucket: BaguaBucket) -> WeightBucket:
        """Return what belongs to `bucket`."""
        return self._buckets[bucket]

    @property
    def of_buffers(self) -> list[WeightBucket]:
        """The buckets of buffers."""
        return [one for one in self if one.are_buffers]

    def select(self, module: torch.nn.Module, ignored_names: frozenset[str] = frozenset()) -> list[BaguaTensor]:
        """Return the parameters of `module` that are trained, or were before, and the buffers that are averaged.

        A layer that you freeze after some steps goes on being averaged; else it would stay different on every rank.

        Of a parameter that is sharded (`fully_shard`) the rank averages its own shard, whose name says which it is: a
        state of another shard is then refused.

        Args:
            module: the module that is read and written from now on.
            ignored_names: names of parameters and buffers to leave alone.

        Raises:
            ValueError: one of them is of a dtype that cannot be averaged, or they are on several devices.
        """
        self._module, self._ignored_names = module, ignored_names
        self._sharded_parts = list(sharded_parts(module).values())
        reshard(self._sharded_parts)
        once_averaged = {id(parameter) for parameter in self._averaged.values()}
        tensors = [
            BaguaTensor(name, parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad or id(parameter) in once_averaged
        ]
        if self._average_buffers:
            in_state = module.state_dict().keys()  # what is not in there is a cache, the same on all ranks
            buffers = [(name, buffer) for name, buffer in module.named_buffers() if name in in_state]
            tensors += [BaguaTensor(name, buffer) for name, buffer in buffers if _is_inexact(buffer)]
        tensors = [tensor for tensor in tensors if tensor.name not in ignored_names]
        for tensor in tensors:
            kind = "parameter" if _is_parameter(tensor) else "buffer"
            check_elements(f"{self._owner}: {kind} {tensor.name}", tensor.parameter)
        devices = sorted({str(tensor.parameter.device) for tensor in tensors})
        if len(devices) > 1:
            raise ValueError(f"{self._owner}: the module must be on one device, got {', '.join(devices)}")
        self._averaged = {tensor.name: tensor.parameter for tensor in tensors if _is_parameter(tensor)}
        if self._group.size == 1:
            return []
        named = [
            BaguaTensor(name_of_shard(one.name, one.parameter), one.parameter, self._kept_order(one)) for one in tensors
        ]
        self.layout_watch.watch(list(filter(_is_parameter, named)))
        return named

    def _kept_order(self, tensor: BaguaTensor) -> MemoryOrder:
        """Return the order of the first tensor of this name and shape: other ranks may have kept that one."""
        kept = self._orders.get(tensor.name)
        if kept is None or sorted(kept.sizes) != sorted(tensor.order.sizes):
            kept = self._orders[tensor.name] = tensor.order
        return kept

    def need_reset(self) -> bool:
        """Return whether parameters have been unfrozen, or replaced by others, since `select`.

        Raises:
            RuntimeError: one was replaced by a parameter that is not trained, and would no longer be averaged.
        """
        if self._group.size == 1:
            return False
        self.layout_watch.look()
        reshard(self._sharded_parts)
        averaged = {id(parameter) for parameter in self._averaged.values()}
        others = {
            name: parameter
            for name, parameter in self._module.named_parameters()
            if id(parameter) not in averaged and name not in self._ignored_names
        }
        kept = {id(parameter) for parameter in self._module.parameters()} if others else set()
        for name, parameter in others.items():
            if not parameter.requires_grad and name in self._averaged and id(self._averaged[name]) not in kept:
                raise RuntimeError(
                    f"torchbagua: parameter {name} was averaged, and has been replaced by one that is not trained "
                    "(requires_grad=False) and would not be: freeze it after a step, or detach before it is replaced"
                )
        return any(parameter.requires_grad for parameter in others.values())

    def make_buckets(
        self, tensors: Sequence[BaguaTensor], part_of: Callable[[BaguaTensor], str] = lambda tensor: ""
    ) -> list[BaguaBucket]:
        """Group tensors of one dtype into buckets of at most `bucket_cap_mb`. Buffers get buckets of their own.

        Args:
            tensors: what `select` returned.
            part_of: returns a word, the same for tensors that may share a bucket, which the bucket's name begins with.
        """
        kinds: dict[tuple[str, torch.dtype, bool], list[BaguaTensor]] = {}
        for tensor in tensors:
            kinds.setdefault((part_of(tensor), tensor.parameter.dtype, _is_parameter(tensor)), []).append(tensor)
        self._buckets = {}
        for (part, dtype, are_parameters), alike in kinds.items():
            for members in parted(alike, self._cap_bytes, lambda one: local_shard(one.parameter).nbytes):
                name = f"{part}{'weight' if are_parameters else 'buffer'} bucket {len(self._buckets)}"
                num_elements = sum(flat_length(one.parameter) for one in members)
                flat = torch.zeros(num_elements, dtype=dtype.to_real(), device=members[0].parameter.device)
                bucket = BaguaBucket(name, members, self._group, flat)
                self._buckets[bucket] = WeightBucket(bucket, are_buffers=not are_parameters)
        self._shapes = {tensor.name: local_shard(tensor.parameter).shape for tensor in tensors}
        kinds_of = [(one.name, tuple(self._shapes[one.name]), str(one.parameter.dtype), one.order) for one in tensors]
        self.fingerprint = fingerprint(kinds_of)
        return list(self._buckets)

    @torch.no_grad()
    def read(self, flat: FlatOf = FLAT, buckets: Iterable[WeightBucket] | None = None) -> None:
        """Copy the weights into the flat tensors of all buckets, or of some, or into those that `flat` returns."""
        reshard(self._sharded_parts)
        for one in self if buckets is None else buckets:
            for weight, part in self._with_weights(one, flat(one)):
                part.copy_(weight)

    @torch.no_grad()
    def write(self, flat: FlatOf = FLAT, buckets: Iterable[WeightBucket] | None = None) -> None:
        """Replace weights, in place, by the flat tensors of all buckets, or some, or by those that `flat` returns."""
        reshard(self._sharded_parts)
        with self._group.tracer.span("apply"):
            for one in self if buckets is None else buckets:
                for weight, part in self._with_weights(one, flat(one)):
                    weight.copy_(part)

    @torch.no_grad()
    def add(self, difference: FlatOf, snapshot: FlatOf, buckets: Iterable[WeightBucket] | None = None) -> None:
        """Add mean minus snapshot to the weights, so that their changes since the snapshot are kept.

        A buffer is kept between its own value and the mean, since running statistics decay.

        Args:
            difference: returns mean minus snapshot of a bucket.
            snapshot: returns the snapshot of a bucket; called for buckets of buffers only.
            buckets: some; by default all.
        """
        reshard(self._sharded_parts)
        with self._group.tracer.span("apply"):
            for one in self if buckets is None else buckets:
                pairs = self._with_weights(one, difference(one))
                if not one.are_buffers:
                    for weight, part in pairs:
                        weight.add_(part)
                    continue
                means = one.named(snapshot(one) + difference(one)).values()
                for (weight, part), mean in zip(pairs, means, strict=True):
                    weight.copy_(clamp_to_mean(weight + part, weight, mean))

    def _with_weights(self, one: WeightBucket, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the module's tensors with their parts of `flat`; buffers by name, since a module may replace them."""
        found = []
        for tensor in one.bucket.tensors:
            weight = self._module.get_buffer(tensor.name) if one.are_buffers else local_shard(tensor.parameter)
            if weight.shape != self._shapes[tensor.name]:
                raise RuntimeError(
                    f"torchbagua: {'buffer' if one.are_buffers else 'parameter'} {tensor.name} was of shape "
                    f"{list(self._shapes[tensor.name])} when the algorithm was attached, and is of "
                    f"{list(weight.shape)} now; detach before it changes, or leave buffers out: average_buffers=False"
                )
            found.append(weight)
        return list(zip(found, one.named(flat).values(), strict=True))

    def submit_in_lockstep(self, lane: Lane, run: Callable[[], T], purpose: str, progress: Mapping[str, int]) -> Job[T]:
        """Have `lane` run a function once all ranks have called this. If their progress differs, all ranks raise.

        So they do if a rank has noted a load of weights in `loads` since the last call, and others have not.

        Args:
            lane: the lane of the algorithm.
            run: the function.
            purpose: what it is for, in errors.
            progress: numbers that say how far this rank has come, by the name that an error gives them. Each is below
                2^40, and there are always as many.
        """
        mark, is_new = self.loads.take()
        compare = self.comparison(progress, purpose, flag=is_new)

        def job() -> T:
            if compare():  # there is a new load on any rank
                require_same_loads(self._group.world, mark, purpose)
            return run()

        return lane.submit(job)

    def comparison(self, progress: Mapping[str, int], purpose: str, *, flag: bool = False) -> Callable[[], bool]:
        """Return what the lane is to call once all ranks are here. It returns whether one of them has set `flag`.

        It raises RuntimeError on all ranks if a rank has found another memory layout, and CommunicationError if their
        progress differs.
        """
        progress, world, watch = dict(progress), self._group.world, self.layout_watch
        message = watch.message(world.rank, world.size, flag=flag)

        def compare() -> bool:
            check = partial(watch.check, size=world.size)
            return watch.has_flag(require_same_progress(world, progress, purpose, message, check))

        return compare

    def take_mean(self, lane: Lane, progress: Mapping[str, int]) -> None:
        """Give all ranks the mean of their weights. Collective. The buckets cannot be used for anything else after it.

        Args:
            lane: the lane of the algorithm.
            progress: as in `submit_in_lockstep`.
        """
        for one in self:
            one.bucket.clear_ops().append_centralized_synchronous_op(hierarchical=False)
        self.read()
        self.submit_in_lockstep(lane, lambda: [one.bucket.run() for one in self], "the last mean", progress).result()
        self.write()

    @contextmanager
    def averaged(self, lane: Lane, progress: Mapping[str, int]) -> Iterator[None]:
        """Give all ranks the mean of their weights, for as long as the context lasts; then each its own again.

        Collective where it begins. The flat tensors of the buckets stay as they are. It takes the memory of the
        weights once more, and twice while the mean is formed.

        Args:
            lane: the lane of the algorithm.
            progress: as in `submit_in_lockstep`.
        """
        own = {one: torch.empty_like(one.bucket.flat) for one in self}
        self.read(own.__getitem__)
        means = {one: flat.clone() for one, flat in own.items()}

        def average() -> None:
            for one, mean in means.items():
                self._group.all_reduce(mean, average=True, hierarchical=False, name=one.bucket.name)

        self.submit_in_lockstep(lane, average, "the mean of the weights", progress).result()
        self.write(means.__getitem__)
        means.clear()
        self._own = own
        try:
            yield
        finally:
            self._own = {}
            self.write(own.__getitem__)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Within `averaged`, give this rank its own weights, for as long as the context lasts; elsewhere it has them.

        Not collective. It takes the memory of the weights once more.
        """
        if not self._own:
            yield
            return
        means = {one: torch.empty_like(flat) for one, flat in self._own.items()}
        self.read(means.__getitem__)
        self.write(self._own.__getitem__)
        try:
            yield
        finally:
            self.write(means.__getitem__)

    def by_name(self, flat: FlatOf, buckets: Iterable[WeightBucket] | None = None) -> dict[str, torch.Tensor]:
        """Return copies of what the flat tensors of all buckets, or of some, hold, by the names of the weights."""
        own = self if buckets is None else buckets
        return {name: part.clone() for one in own for name, part in one.named(flat(one)).items()}

    def load_by_name(
        self, flat: FlatOf, state: Mapping[str, torch.Tensor], buckets: Iterable[WeightBucket] | None = None
    ) -> None:
        """Copy what `by_name` returned into the flat tensors.

        Raises:
            ValueError: the names or shapes are not those of this module's weights.
        """
        own = self if buckets is None else buckets
        parts = {name: part for one in own for name, part in one.named(flat(one)).items()}
        if state.keys() != parts.keys() or any(state[name].shape != part.shape for name, part in parts.items()):
            raise ValueError(
                f"{self._owner}.load_state_dict: the state must hold the weights of this module, "
                f"{len(parts)} tensors, got {len(state)}; they differ in "
                f"{sorted(state.keys() ^ parts.keys())[:5] or 'shapes'}"
            )
        for name, part in parts.items():
            part.copy_(state[name])


def _is_parameter(tensor: BaguaTensor) -> bool:
    return isinstance(tensor.parameter, torch.nn.Parameter)


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def parted(tensors: Sequence[T], cap_bytes: float, bytes_of: Callable[[T], int]) -> list[list[T]]:
    """Cut a list into parts of at most `cap_bytes`, or of one tensor."""
    parts: list[list[T]] = [[]]
    num_bytes = 0
    for tensor in tensors:
        if parts[-1] and num_bytes + bytes_of(tensor) > cap_bytes:
            parts.append([])
            num_bytes = 0
        parts[-1].append(tensor)
        num_bytes += bytes_of(tensor)
    return parts
