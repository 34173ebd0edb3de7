"""The weights of a module in flat buckets: which they are, and how they are read and changed between two steps."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchbagua.collectives.agreement import fingerprint
from torchbagua.collectives.clamp import clamp_to_mean
from torchbagua.runtime.bucket import BaguaBucket, BaguaTensor, check_elements
from torchbagua.runtime.lockstep import Lockstep
from torchbagua.runtime.memory_order import MemoryOrder, flat_length
from torchbagua.runtime.shards import local_shard, name_of_shard, reshard, sharded_parts
from torchbagua.runtime.weight_bucket import FLAT, FlatOf, WeightBucket
from torchbagua.runtime.weight_means import WeightMeans

if TYPE_CHECKING:
    from torchbagua.runtime.runner import Runner

T = TypeVar("T")


class WeightBuckets:
    """The weights of a module in buckets, for an impl that averages them; see `Runner.average`.

    Iterating over it gives each `WeightBucket`. In a group of one rank there are no buckets, and nothing changes.

    Args:
        runner: that of the impl.
        progress: returns numbers that say how far this rank has come, by the names that an error gives them. Ranks
            compare them whenever they meet. Each is below 2^40, and their number never changes.
        average_buffers: average floating-point and complex buffers too, if the module's `state_dict` holds them.
            Integer buffers are left alone.
        final_average: give all ranks the mean of their weights when the attachment ends in order.
        bucket_cap_mb: size of the buckets, in MiB.

    Attributes:
        lockstep: has ranks compare their progress; see `Lockstep.submit`.
        means: forms the mean of all ranks' weights, for an evaluation or at the end.
    """

    def __init__(
        self,
        runner: "Runner",
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
        self._averaged: dict[str, torch.Tensor] = {}  # parameters, by name
        self._sharded_parts: list[Any] = []
        self._shapes: dict[str, torch.Size] = {}
        # By name: that of the first tensor of this name. Flat tensors of all ranks have it, also after a reset.
        self._orders: dict[str, MemoryOrder] = {}
        self._buckets: list[WeightBucket] = []

    def __iter__(self) -> Iterator[WeightBucket]:
        """Iterate over the buckets, in their order, which is the same on all ranks."""
        return iter(self._buckets)

    @property
    def of_buffers(self) -> list[WeightBucket]:
        """The buckets of buffers."""
        return [bucket for bucket in self if bucket.are_buffers]

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
            kind = "parameter" if tensor.is_parameter else "buffer"
            check_elements(f"{self._owner}: {kind} {tensor.name}", tensor.parameter)
        devices = sorted({str(tensor.parameter.device) for tensor in tensors})
        if len(devices) > 1:
            raise ValueError(f"{self._owner}: the module must be on one device, got {', '.join(devices)}")
        self._averaged = {tensor.name: tensor.parameter for tensor in tensors if tensor.is_parameter}
        if self._group.size == 1:
            return []
        named = [
            BaguaTensor(name_of_shard(tensor.name, tensor.parameter), tensor.parameter, self._kept_order(tensor))
            for tensor in tensors
        ]
        self.lockstep.layout_watch.watch([tensor for tensor in named if tensor.is_parameter])
        return named

    def _kept_order(self, tensor: BaguaTensor) -> MemoryOrder:
        """Return the order of the first tensor of this name and shape: other ranks may have kept that one."""
        kept = self._orders.get(tensor.name)
        if kept is None or sorted(kept.sizes) != sorted(tensor.order.sizes):
            kept = self._orders[tensor.name] = tensor.order
        return kept

    def need_reset(self, *, meets: bool = True) -> bool:
        """Return whether parameters have been unfrozen, or replaced by others, since `select`.

        Args:
            meets: whether other ranks compare progress in this step, and so can be notified of a changed layout.

        Raises:
            RuntimeError: one was replaced by a parameter that is not trained, and would no longer be averaged. Or the
                memory layout of one has changed, which all ranks then raise.
        """
        if self._group.size == 1:
            return False
        has_changed_layout = self.lockstep.layout_watch.look()
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
        if has_changed_layout and meets:
            self.lockstep.refuse_changed_layout()
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
            kinds.setdefault((part_of(tensor), tensor.parameter.dtype, tensor.is_parameter), []).append(tensor)
        self._buckets = []
        for (part, dtype, are_parameters), alike in kinds.items():
            for members in parted(alike, self._cap_bytes, lambda tensor: local_shard(tensor.parameter).nbytes):
                name = f"{part}{'weight' if are_parameters else 'buffer'} bucket {len(self._buckets)}"
                num_elements = sum(flat_length(tensor.parameter) for tensor in members)
                flat = torch.zeros(num_elements, dtype=dtype.to_real(), device=members[0].parameter.device)
                self._buckets.append(WeightBucket(name, members, self._group, flat))
        self._shapes = {tensor.name: local_shard(tensor.parameter).shape for tensor in tensors}
        kinds_of = [
            (tensor.name, tuple(self._shapes[tensor.name]), str(tensor.parameter.dtype), tensor.order)
            for tensor in tensors
        ]
        self.lockstep.fingerprint = fingerprint(kinds_of)
        return list(self._buckets)

    @torch.no_grad()
    def read(self, flat: FlatOf = FLAT, buckets: Iterable[WeightBucket] | None = None) -> None:
        """Copy the weights into the flat tensors of all buckets, or of some, or into those that `flat` returns."""
        reshard(self._sharded_parts)
        for bucket in self if buckets is None else buckets:
            for weight, part in self._with_weights(bucket, flat(bucket)):
                part.copy_(weight)

    @torch.no_grad()
    def write(self, flat: FlatOf = FLAT, buckets: Iterable[WeightBucket] | None = None) -> None:
        """Replace weights, in place, by the flat tensors of all buckets, or some, or by those that `flat` returns."""
        reshard(self._sharded_parts)
        with self._group.tracer.span("apply"):
            for bucket in self if buckets is None else buckets:
                for weight, part in self._with_weights(bucket, flat(bucket)):
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
        """Return the module's tensors with their parts of `flat`; buffers by name, since a module may replace them."""
        found = []
        for tensor in bucket.tensors:
            weight = self._module.get_buffer(tensor.name) if bucket.are_buffers else local_shard(tensor.parameter)
            if weight.shape != self._shapes[tensor.name]:
                raise RuntimeError(
                    f"torchbagua: {'buffer' if bucket.are_buffers else 'parameter'} {tensor.name} was of shape "
                    f"{list(self._shapes[tensor.name])} when the algorithm was attached, and is of "
                    f"{list(weight.shape)} now; detach before it changes, or leave buffers out: average_buffers=False"
                )
            found.append(weight)
        return list(zip(found, bucket.named(flat).values(), strict=True))

    @property
    def has_final_mean(self) -> bool:
        """Whether all ranks get the mean of their weights at the end; not in a group of one, which has it."""
        return self._final_average and self._group.size > 1

    def take_final_mean(self) -> bool:
        """Give all ranks the mean of their weights, unless `final_average` is False; return whether. Collective."""
        if self.has_final_mean:
            with self._group.tracer.span("detach"):
                self.means.take()
        return self.has_final_mean

    def by_name(self, flat: FlatOf, buckets: Iterable[WeightBucket] | None = None) -> dict[str, torch.Tensor]:
        """Return copies of what the flat tensors of all buckets, or of some, hold, by the names of the weights."""
        own = self if buckets is None else buckets
        return {name: part.clone() for bucket in own for name, part in bucket.named(flat(bucket)).items()}

    def load_by_name(
        self, flat: FlatOf, state: Mapping[str, torch.Tensor], buckets: Iterable[WeightBucket] | None = None
    ) -> None:
        """Copy what `by_name` returned into the flat tensors.

        Raises:
            ValueError: the names or shapes are not those of this module's weights.
        """
        own = self if buckets is None else buckets
        parts = {name: part for bucket in own for name, part in bucket.named(flat(bucket)).items()}
        if state.keys() != parts.keys() or any(state[name].shape != part.shape for name, part in parts.items()):
            raise ValueError(
                f"{self._owner}.load_state_dict: the state must hold the weights of this module, "
                f"{len(parts)} tensors, got {len(state)}; they differ in "
                f"{sorted(state.keys() ^ parts.keys())[:5] or 'shapes'}"
            )
        for name, part in parts.items():
            part.copy_(state[name])


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
