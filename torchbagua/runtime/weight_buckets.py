"""The weights of a module in flat buckets: selects them, and reads and changes them between two steps."""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar

import torch

from torchbagua.codecs.base import sum_dtype
from torchbagua.collectives.agreement import fingerprint
from torchbagua.collectives.clamp import clamp_to_mean
from torchbagua.collectives.low_precision_ring import Replicas
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket, check_elements
from torchbagua.runtime.lockstep import Lockstep
from torchbagua.runtime.parameters import (
    BaguaTensor,
    MemoryOrder,
    flat_length,
    local_shard,
    name_of_shard,
    reshard,
    sharded_parts,
)
from torchbagua.runtime.runner import Runner

_PART_ELEMENTS = 2**21  # for tensors outside buckets, since the group caches buffers for each length that it averages

T = TypeVar("T")

FlatOf = Callable[["WeightBucket"], torch.Tensor]
"""Returns one of a bucket's flat tensors, or a tensor of the same kind."""

FLAT: FlatOf = attrgetter("flat")

SNAPSHOT: FlatOf = attrgetter("snapshot")

DIFFERENCE: FlatOf = attrgetter("difference")


class WeightMeans:
    """Computes the mean of all ranks' weights, apart from the algorithm's rounds. Call its methods between two steps.

    Args:
        weights: the weights.
        group: the ranks.
    """

    def __init__(self, weights: "WeightBuckets", group: BaguaProcessGroup) -> None:
        self._weights = weights
        self._group = group
        self._own: dict[WeightBucket, torch.Tensor] = {}  # this rank's weights, while the module has the mean

    def take(self) -> None:
        """Give all ranks the mean of their weights. Collective. The buckets cannot be used for anything else after."""
        weights = self._weights
        for bucket in weights:
            bucket.clear_ops().append_centralized_synchronous_op(hierarchical=False)
        weights.read()
        weights.lockstep.submit(lambda: [bucket.run() for bucket in weights], "the last mean", is_last=True).finish()
        weights.write()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give all ranks the mean of their weights within the context, and restore each rank's weights afterwards.

        Collective on entry. The flat tensors of the buckets do not change. It needs additional memory of the size of
        the weights, and of twice that size while it computes the mean.
        """
        if self._group.size == 1:
            yield
            return
        weights, group = self._weights, self._group
        own = weights.copy()
        means = {bucket: flat.clone() for bucket, flat in own.items()}

        def average() -> None:
            for bucket, mean in means.items():
                group.all_reduce(mean, average=True, hierarchical=False, name=bucket.name)

        weights.lockstep.submit(average, "the mean of the weights").finish()
        weights.write(means.__getitem__)
        means.clear()
        self._own = own
        try:
            yield
        finally:
            self._own = {}
            weights.write(own.__getitem__)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Within `averaged`, give this rank its local weights within this context; elsewhere it has them already.

        Not collective. It needs additional memory of the size of the weights.
        """
        if not self._own:
            yield
            return
        means = self._weights.copy()
        self._weights.write(self._own.__getitem__)
        try:
            yield
        finally:
            self._weights.write(means.__getitem__)

    @torch.no_grad()
    def average_tensors(self, tensors: Sequence[torch.Tensor], purpose: str) -> None:
        """Replace these tensors, which do not belong to the module, by their mean over the ranks. Collective.

        Call it within `averaged`, or after the last mean, when no round is in progress.

        Args:
            tensors: floating-point or complex, contiguous or not, with the same shapes and dtypes on all ranks.
            purpose: the description of the tensors, for errors.
        """
        if self._group.size == 1:
            return
        by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        flats = {key: torch.cat([tensor.reshape(-1) for tensor in members]) for key, members in by_kind.items()}
        layout = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
        also = ("the fingerprint of the other tensors to average", fingerprint(layout))
        group = self._group

        def average() -> None:
            for flat in flats.values():
                for part in flat.split(_PART_ELEMENTS):
                    group.all_reduce(part, average=True, hierarchical=False, name=purpose)

        self._weights.lockstep.submit(average, f"the mean of {purpose}", also=also).finish()
        for key, members in by_kind.items():
            parts = flats[key].split([tensor.numel() for tensor in members])
            for tensor, part in zip(members, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


class WeightBucket(BaguaBucket):
    """A bucket of weights, with the additional flat tensors of an algorithm; see `WeightBuckets`.

    `snapshot` and `difference` are created on their first access, on the current stream of the accessing thread.
    """

    # The contents of the tensors, and the thread that owns them: T, the training thread, or L, the lane. Unless noted
    # otherwise, T owns them until it submits a job to L, and again after it has waited for that job.
    #
    # | algorithm      | flat                           | snapshot              | difference               | replicas |
    # | -------------- | ------------------------------ | --------------------- | ------------------------ | -------- |
    # | decentralized  | the snapshot                   |                       | mean, then mean - flat   |          |
    # | async          | L: mean, then mean - snapshot  | T: while L requests   | last rounds' mean -      |          |
    # |                |                                | one; L: afterwards    | snapshot, under a lock   |          |
    # | async, warm-up | means of gradients             | gradients             |                          |          |
    # | low precision  | weights, before and after a    |                       |                          | L, and   |
    # |                | bucket's `start`               |                       |                          | in states |
    # | DiLoCo, no     | snapshot, then the outer       |                       |                          |          |
    # | delay          | gradient, then its mean        |                       |                          |          |
    # | DiLoCo, delay  | outer gradient, its mean, then | the snapshot          | of buffers, mean -       |          |
    # |                | theta' - snapshot; or mean     |                       | snapshot                 |          |

    @cached_property
    def are_buffers(self) -> bool:
        """Whether it contains buffers rather than parameters."""
        return not self.tensors[0].is_parameter

    @cached_property
    def snapshot(self) -> torch.Tensor:
        """A tensor of the same kind as the flat tensor: weights between two steps, unless `flat` itself stores them."""
        return torch.zeros_like(self.flat)

    @cached_property
    def difference(self) -> torch.Tensor:
        """A tensor of the same kind as the flat tensor: mean minus snapshot, or the mean before the subtraction."""
        return torch.zeros_like(self.flat)

    def make_replicas(self, ring_size: int) -> None:
        """Create `replicas` for a ring of so many ranks or nodes: zeros of the length of `flat`, in its `sum_dtype`.

        In a ring of two, both neighbors are the same rank, so left and right are the same tensor.
        """
        num_replicas = 2 if ring_size == 2 else 3
        own, left, *right = (torch.zeros_like(self.flat, dtype=sum_dtype(self.flat.dtype)) for _ in range(num_replicas))
        self.replicas = Replicas(own, left, *right or [left])

    def swap_difference(self) -> None:
        """Exchange `flat` and `difference`, without a copy."""
        self.difference, self.flat = self.flat, self.difference

    def subtract(self, mean: torch.Tensor, snapshot: torch.Tensor, out: torch.Tensor) -> None:
        """Write mean minus snapshot to `out`, which may be either of them.

        A buffer, for example an attention mask, may contain -inf. If mean and snapshot are equal there, the difference
        is zero rather than NaN.
        """
        is_equal = mean == snapshot if self.are_buffers else None
        torch.sub(mean, snapshot, out=out)
        if is_equal is not None:
            out.masked_fill_(is_equal, 0)

    def slices_of(self, names: Container[str]) -> list[slice]:
        """Return the slices of the flat tensor for the weights with these names."""
        found, start = [], 0
        for tensor in self.tensors:
            stop = start + flat_length(tensor.parameter)
            if tensor.name in names:
                found.append(slice(start, stop))
            start = stop
        return found

    def clear(self, flat: torch.Tensor, names: Container[str]) -> None:
        """Write zeros to the parts of `flat` that belong to the weights with these names."""
        for part in self.slices_of(names):
            flat[part] = 0

    def named(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of `flat`, in the shapes of the weights, by weight name."""
        return {tensor.name: part for tensor, part in self.views(flat)}


class WeightBuckets:
    """The weights of a module in buckets, for an impl that averages them; see `WeightRunner.average`.

    Iteration yields each `WeightBucket`. A group of one rank has no buckets, and its weights do not change.

    Args:
        runner: the runner of the impl.
        progress: returns numbers that describe the progress of this rank, keyed by their names in errors. Ranks compare
            them before each collective.
        average_buffers: average floating-point and complex buffers too, if the module's `state_dict` contains them.
            Integer buffers are not averaged.
        final_average: give all ranks the mean of their weights when the attachment ends without an error.
        bucket_cap_mb: the size limit of a bucket, in MiB.

    Attributes:
        lockstep: compares the progress of the ranks; see `Lockstep.submit`.
        means: computes the mean of all ranks' weights, for an evaluation or at the end.
    """

    def __init__(
        self,
        runner: Runner,
        progress: Callable[[], Mapping[str, int]],
        *,
        average_buffers: bool = True,
        final_average: bool = True,
        bucket_cap_mb: float = 8.0,
    ) -> None:
        self._group = runner.process_group
        self.lockstep = Lockstep(runner.lane, self._group.world, progress)
        self.means = WeightMeans(self, self._group)
        self._owner = runner.name
        self._average_buffers = average_buffers
        self._final_average = final_average
        self._cap_bytes = bucket_cap_mb * 2**20
        self._module = torch.nn.Module()
        self._ignored_names: frozenset[str] = frozenset()
        self._averaged: dict[str, torch.nn.Parameter] = {}  # parameters, by name
        self._averaged_ids: set[int] = set()
        self._followed_ids: set[int] | None = None  # parameters of a loaded state, until `need_reset`
        self._sharded_parts: list[Any] = []
        self._shapes: dict[str, torch.Size] = {}
        # By name, the order of the first tensor with this name. Flat tensors of all ranks use it, even after a reset.
        self._orders: dict[str, MemoryOrder] = {}
        self._buckets: list[WeightBucket] = []

    def __iter__(self) -> Iterator[WeightBucket]:
        """Iterate over the buckets, in the same order on all ranks."""
        return iter(self._buckets)

    @property
    def of_buffers(self) -> list[WeightBucket]:
        """The buckets that contain buffers."""
        return [bucket for bucket in self if bucket.are_buffers]

    def select(self, module: torch.nn.Module, ignored_names: frozenset[str] = frozenset()) -> list[BaguaTensor]:
        """Return the parameters of `module` that are or were trained, and the buffers to average.

        A layer that the user freezes after a few steps is still averaged. Otherwise it would remain different on every
        rank.

        For a sharded parameter (`fully_shard`), the rank averages its local shard. The name of the tensor includes the
        number of the shard, so that a state of another shard is rejected.

        Args:
            module: the module to read and write from now on.
            ignored_names: names of parameters and buffers that are not averaged.

        Raises:
            ValueError: a tensor has a dtype that cannot be averaged, or the tensors are on several devices.
        """
        self._module, self._ignored_names = module, ignored_names
        self._sharded_parts = list(sharded_parts(module).values())
        reshard(self._sharded_parts)
        parameters = [(name, weight) for name, weight in module.named_parameters() if name not in ignored_names]
        buffers: list[tuple[str, torch.Tensor]] = []
        if self._average_buffers:
            in_state = module.state_dict().keys() - ignored_names  # other buffers are caches, equal on all ranks
            buffers = [(name, buffer) for name, buffer in module.named_buffers() if name in in_state]
        averaged = {name: weight for name, weight in parameters if self._is_selected(weight)}
        weights = {**averaged, **{name: buffer for name, buffer in buffers if _is_inexact(buffer)}}
        for name, weight in weights.items():
            kind = "parameter" if name in averaged else "buffer"
            check_elements(f"{self._owner}: {kind} {name}", weight)
        devices = sorted({str(weight.device) for weight in weights.values()})
        if len(devices) > 1:
            raise ValueError(f"{self._owner}: the module must be on one device, got {', '.join(devices)}")
        self._averaged, self._averaged_ids = averaged, {id(weight) for weight in averaged.values()}
        if self._group.size == 1:
            return []
        tensors = [self._tensor(name_of_shard(name, weight), weight) for name, weight in weights.items()]
        self.lockstep.layout_watch.watch([tensor for tensor in tensors if tensor.is_parameter])
        return tensors

    def _is_selected(self, parameter: torch.nn.Parameter) -> bool:
        if self._followed_ids is not None:
            return id(parameter) in self._followed_ids
        return parameter.requires_grad or id(parameter) in self._averaged_ids

    @property
    def parameter_names(self) -> list[str]:
        """The names of the averaged parameters in the module."""
        return list(self._averaged)

    def follow(self, names: Collection[str]) -> bool:
        """Have `select` return the parameters with these names until `need_reset`. Return whether they are new.

        A state that is loaded defines which parameters are averaged, since layers may be unfrozen and frozen at any
        time. Layers that are trained and not in the state follow at the end of the next step, as in the saved run.

        Raises:
            ValueError: the module has no parameter with one of these names.
        """
        reshard(self._sharded_parts)
        parameters = dict(self._module.named_parameters())
        if unknown := [name for name in names if name not in parameters]:
            raise ValueError(
                f"{self._owner}.load_state_dict: the state must hold the weights of this module, got others: "
                f"{unknown[:5]}"
            )
        self._followed_ids = {id(parameters[name]) for name in names}
        return set(names) != self._averaged.keys()

    def _tensor(self, name: str, weight: torch.Tensor) -> BaguaTensor:
        """Return a tensor in the order of the first with its name and shape, which other ranks may still use."""
        order = MemoryOrder(weight)
        kept = self._orders.setdefault(name, order)
        if sorted(kept.sizes) != sorted(order.sizes):
            kept = self._orders[name] = order
        return BaguaTensor(name, weight, kept)

    def need_reset(self, *, meets: bool = True) -> bool:
        """Return whether parameters have been unfrozen or replaced since `select`.

        Args:
            meets: whether other ranks compare progress in this step, so that they can be notified of a changed layout.

        Raises:
            RuntimeError: a parameter was replaced by a parameter that is not trained, which would no longer be
                averaged. Or the memory layout of a parameter has changed; all ranks then raise.
        """
        if self._group.size == 1:
            return False
        if self.lockstep.layout_watch.look() and meets:
            self.lockstep.refuse_changed_layout()
        reshard(self._sharded_parts)
        averaged_ids, ignored = self._averaged_ids, self._ignored_names
        weights = self._module.named_parameters()
        others = {name: weight for name, weight in weights if id(weight) not in averaged_ids and name not in ignored}
        for name, parameter in others.items():
            if parameter.requires_grad or name not in self._averaged:
                continue
            if all(current is not self._averaged[name] for current in self._module.parameters()):
                raise RuntimeError(
                    f"torchbagua: parameter {name} was averaged, and has been replaced by a parameter with "
                    "requires_grad=False, which would not be averaged. Freeze it only after a step, or detach before "
                    "you replace it"
                )
        self._followed_ids = None
        return any(parameter.requires_grad for parameter in others.values())

    def make_buckets(
        self, tensors: Sequence[BaguaTensor], part_of: Callable[[BaguaTensor], str] = lambda tensor: ""
    ) -> list[BaguaBucket]:
        """Group tensors of one dtype into buckets of at most `bucket_cap_mb`. Buffers get separate buckets.

        Args:
            tensors: the return value of `select`.
            part_of: returns a prefix for the name of the tensor's bucket. Only tensors with the same prefix share a
                bucket.
        """
        kinds: dict[tuple[str, torch.dtype, bool], list[BaguaTensor]] = {}
        for tensor in tensors:
            kinds.setdefault((part_of(tensor), tensor.parameter.dtype, tensor.is_parameter), []).append(tensor)
        self._buckets = []
        for (part, dtype, are_parameters), same in kinds.items():
            for members in split_by_bytes(same, self._cap_bytes, lambda tensor: local_shard(tensor.parameter).nbytes):
                name = f"{part}{'weight' if are_parameters else 'buffer'} bucket {len(self._buckets)}"
                num_elements = sum(flat_length(tensor.parameter) for tensor in members)
                flat = torch.zeros(num_elements, dtype=dtype.to_real(), device=members[0].parameter.device)
                self._buckets.append(WeightBucket(name, members, self._group, flat))
        self._shapes = {tensor.name: local_shard(tensor.parameter).shape for tensor in tensors}
        kinds_of = [
            (tensor.name, tuple(self._shapes[tensor.name]), str(tensor.parameter.dtype), tensor.order)
            for tensor in tensors
        ]
        self.lockstep.set_layout(kinds_of)
        return list(self._buckets)

    @torch.no_grad()
    def read(self, flat: FlatOf = FLAT, buckets: Iterable[WeightBucket] | None = None) -> None:
        """Copy the weights of `buckets`, by default of all, into the flat tensors that `flat` returns."""
        reshard(self._sharded_parts)
        for bucket in self if buckets is None else buckets:
            for weight, part in self._with_weights(bucket, flat(bucket)):
                part.copy_(weight)

    def copy(self) -> dict[WeightBucket, torch.Tensor]:
        """Return the weights of each bucket, in new flat tensors."""
        copies = {bucket: torch.empty_like(bucket.flat) for bucket in self}
        self.read(copies.__getitem__)
        return copies

    @torch.no_grad()
    def write(self, flat: FlatOf = FLAT, buckets: Iterable[WeightBucket] | None = None) -> None:
        """Overwrite the weights of `buckets`, by default of all, with the flat tensors that `flat` returns."""
        reshard(self._sharded_parts)
        with self._group.tracer.span("apply"):
            for bucket in self if buckets is None else buckets:
                for weight, part in self._with_weights(bucket, flat(bucket)):
                    weight.copy_(part)

    @torch.no_grad()
    def add(self, difference: FlatOf, snapshot: FlatOf, buckets: Iterable[WeightBucket] | None = None) -> None:
        """Add mean minus snapshot to the weights, which retains their changes since the snapshot.

        A buffer is clamped between its local value and the mean, since running statistics decay.

        Args:
            difference: returns mean minus snapshot of a bucket.
            snapshot: returns the snapshot of a bucket; called for buckets of buffers only.
            buckets: the buckets to change; by default all.
        """
        reshard(self._sharded_parts)
        with self._group.tracer.span("apply"):
            for bucket in self if buckets is None else buckets:
                pairs = self._with_weights(bucket, difference(bucket))
                if not bucket.are_buffers:
                    for weight, part in pairs:
                        weight.add_(part)
                    continue
                means = bucket.named(snapshot(bucket) + difference(bucket)).values()
                for (weight, part), mean in zip(pairs, means, strict=True):
                    weight.copy_(clamp_to_mean(weight + part, weight, mean))

    def _with_weights(self, bucket: WeightBucket, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the module's tensors with their parts of `flat`. Find buffers by name: a module may replace them."""
        found = []
        for tensor in bucket.tensors:
            weight = self._module.get_buffer(tensor.name) if bucket.are_buffers else local_shard(tensor.parameter)
            if weight.shape != self._shapes[tensor.name]:
                raise RuntimeError(
                    f"torchbagua: {'buffer' if bucket.are_buffers else 'parameter'} {tensor.name} must keep the shape "
                    f"{list(self._shapes[tensor.name])} that it had when the algorithm was attached, got "
                    f"{list(weight.shape)}; detach before it changes, or exclude buffers with average_buffers=False"
                )
            found.append(weight)
        return list(zip(found, bucket.named(flat).values(), strict=True))

    @property
    def has_final_mean(self) -> bool:
        """Whether all ranks get the mean of their weights at the end. False in a group of one rank, which has it."""
        return self._final_average and self._group.size > 1

    def take_final_mean(self) -> bool:
        """Give all ranks the mean of their weights, unless `final_average` is False. Collective.

        Return whether the ranks got the mean.
        """
        if self.has_final_mean:
            with self._group.tracer.span("detach"):
                self.means.take()
        return self.has_final_mean

    def by_name(self, flat: FlatOf, buckets: Iterable[WeightBucket] | None = None) -> dict[str, torch.Tensor]:
        """Return copies of the values in the flat tensors of `buckets`, by default of all, by weight name."""
        selected = self if buckets is None else buckets
        return {name: part.clone() for bucket in selected for name, part in bucket.named(flat(bucket)).items()}

    def load_by_name(
        self, flat: FlatOf, state: Mapping[str, torch.Tensor], buckets: Iterable[WeightBucket] | None = None
    ) -> None:
        """Copy the return value of `by_name` into the flat tensors.

        Raises:
            ValueError: the names or shapes do not match this module's weights.
        """
        selected = self if buckets is None else buckets
        parts = {name: part for bucket in selected for name, part in bucket.named(flat(bucket)).items()}
        if state.keys() != parts.keys() or any(state[name].shape != part.shape for name, part in parts.items()):
            raise ValueError(
                f"{self._owner}.load_state_dict: the state must hold the weights of this module, "
                f"{len(parts)} tensors, got {len(state)}; they differ in "
                f"{sorted(state.keys() ^ parts.keys())[:5] or 'shapes'}. A state holds the layers that have or had "
                "requires_grad=True when it was saved"
            )
        for name, part in parts.items():
            part.copy_(state[name])


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def split_by_bytes(tensors: Sequence[T], cap_bytes: float, bytes_of: Callable[[T], int]) -> list[list[T]]:
    """Split a list into parts of at most `cap_bytes`. A larger tensor gets a separate part."""
    parts: list[list[T]] = [[]]
    num_bytes = 0
    for tensor in tensors:
        if parts[-1] and num_bytes + bytes_of(tensor) > cap_bytes:
            parts.append([])
            num_bytes = 0
        parts[-1].append(tensor)
        num_bytes += bytes_of(tensor)
    return parts
