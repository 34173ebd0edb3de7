"""What the algorithms that average weights share: weights in buckets, read and changed between two steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from torchbagua.algorithms.base import Algorithm, check_flags
from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.bucket import BaguaBucket, BaguaTensor, check_elements
from torchbagua.collectives import BaguaProcessGroup, clamp_to_mean, fingerprint, require_same_progress
from torchbagua.lane import Job
from torchbagua.memory_order import flat_length

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ModelAveragingAlgorithm(Algorithm):
    """Options of all algorithms that average weights.

    A state goes on under other arguments, except that `average_buffers` says which tensors are in it.

    Args:
        average_buffers: average floating-point and complex buffers too (BatchNorm's, say), those that `state_dict`
            holds. Integer buffers are left alone.
        final_average: when the attachment ends in order, give all ranks the mean of their weights, and rank 0's
            optimizer state: plain DDP, or another algorithm, can go on from there.
        bucket_cap_mb: size of the buckets that are sent one after the other, in MiB.

    Raises:
        TypeError, ValueError: an argument is none of these.
    """

    averages_weights: ClassVar[bool | None] = True

    average_buffers: bool = True
    final_average: bool = True
    bucket_cap_mb: float = 8.0

    def __post_init__(self) -> None:
        check_flags(self, "average_buffers", "final_average")
        check_at_least(self, "bucket_cap_mb", 0, float | int)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments above, by name."""
        return {name: getattr(self, name) for name in ("average_buffers", "final_average", "bucket_cap_mb")}

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return `average_buffers`."""
        return {"average_buffers": self.average_buffers}


def check_at_least(algorithm: Algorithm, name: str, least: int, kind: Any = int) -> None:
    """Raise TypeError or ValueError unless this argument of `algorithm` is a number of `kind`, at least `least`."""
    value = getattr(algorithm, name)
    if not isinstance(value, kind) or isinstance(value, bool):
        what = "an integer" if kind is int else "a number"
        raise TypeError(f"{type(algorithm).__name__}: {name} must be {what}, got {value!r}")
    if not value >= least:  # NaN compares false
        raise ValueError(f"{type(algorithm).__name__}: {name} must be at least {least}, got {value!r}")


class ModelAveragingImpl(AlgorithmImpl):
    """Weights in buckets by dtype. Arguments: see `ModelAveragingAlgorithm`.

    Attributes:
        buffer_buckets: those of `buckets` that hold buffers; the others hold parameters.
        fingerprint: a number below 2^40 that ranks have in common where they have the same buckets.
    """

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        *,
        average_buffers: bool = True,
        final_average: bool = True,
        bucket_cap_mb: float = 8.0,
    ) -> None:
        super().__init__(process_group)
        self.average_buffers = average_buffers
        self.final_average = final_average
        self.bucket_cap_bytes = bucket_cap_mb * 2**20
        self.buffer_buckets: list[BaguaBucket] = []
        self.fingerprint = 0
        self._averaged: dict[int, torch.Tensor] = {}  # parameters, by id

    @property
    def is_alone(self) -> bool:
        """Whether this is a group of one, which communicates nothing and changes nothing."""
        return self.process_group.size == 1

    @property
    def flats(self) -> list[torch.Tensor]:
        """The flat tensors of the buckets."""
        return [bucket.flat for bucket in self.buckets]

    def need_reset(self) -> bool:
        """Return True where parameters have been set free, or replaced by others, since the buckets were made."""
        return any(
            parameter.requires_grad and id(parameter) not in self._averaged and name not in self.ignored_names
            for name, parameter in self._attached_module.named_parameters()
        )

    def init_tensors(self, module: torch.nn.Module) -> list[BaguaTensor]:
        """Return the parameters that are trained, or once were, and the buffers that are averaged.

        A layer that is frozen after some steps goes on being averaged: it would stay different on every rank.

        Raises:
            ValueError: one of them is not of a dtype that can be averaged, or they are on several devices.
        """
        tensors = [
            BaguaTensor(name, parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad or id(parameter) in self._averaged
        ]
        if self.average_buffers:
            in_state = module.state_dict().keys()  # what is not in there is a cache, the same on all ranks
            buffers = [(name, buffer) for name, buffer in module.named_buffers() if name in in_state]
            tensors += [BaguaTensor(name, buffer) for name, buffer in buffers if _is_inexact(buffer)]
        tensors = [tensor for tensor in tensors if tensor.name not in self.ignored_names]
        for tensor in tensors:
            kind = "parameter" if _is_parameter(tensor) else "buffer"
            check_elements(f"{type(self).__name__}: {kind} {tensor.name}", tensor.parameter)
        devices = sorted({str(tensor.parameter.device) for tensor in tensors})
        if len(devices) > 1:
            raise ValueError(f"{type(self).__name__}: the module must be on one device, got {', '.join(devices)}")
        self._averaged = {id(tensor.parameter): tensor.parameter for tensor in tensors if _is_parameter(tensor)}
        return [] if self.is_alone else tensors

    def tensors_to_buckets(self, tensors: list[BaguaTensor], do_flatten: bool) -> list[BaguaBucket]:
        """Group tensors of one dtype into buckets of at most `bucket_cap_bytes`; buffers stand apart."""
        kinds: dict[tuple[torch.dtype, bool], list[BaguaTensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.parameter.dtype, _is_parameter(tensor)), []).append(tensor)
        buckets: list[BaguaBucket] = []
        self.buffer_buckets = []
        for (dtype, are_parameters), alike in kinds.items():
            for members in _parted(alike, self.bucket_cap_bytes):
                name = f"{'weight' if are_parameters else 'buffer'} bucket {len(buckets)}"
                num_elements = sum(flat_length(one.parameter) for one in members)
                flat = torch.zeros(num_elements, dtype=dtype.to_real(), device=members[0].parameter.device)
                buckets.append(BaguaBucket(name, members, self.process_group, flat))
                if not are_parameters:
                    self.buffer_buckets.append(buckets[-1])
        layout = [(tensor.name, tuple(tensor.parameter.shape), str(tensor.parameter.dtype)) for tensor in tensors]
        self.fingerprint = fingerprint(layout)
        return buckets

    def facts(self, *, is_last: bool = False) -> dict[str, int]:
        """Return what ranks must have in common when they meet, by what an error calls it; as many always.

        Args:
            is_last: whether they meet for the last time.
        """
        raise TypeError(f"{type(self).__name__} must override ModelAveragingImpl.facts")

    def start_in_step(self, run: Callable[[], T], purpose: str, *, is_last: bool = False) -> Job[T]:
        """Have the lane run `run` when all ranks have come to the same place; where they have not, all ranks raise."""
        facts = self.facts(is_last=is_last)

        def job() -> T:
            require_same_progress(self.process_group.world, facts, purpose)
            return run()

        return self.lane.submit(job)

    def end_with_mean(self) -> None:
        """Give all ranks the mean of their weights; buckets serve for nothing else from then on."""
        for bucket in self.buckets:
            bucket.clear_ops().append_centralized_synchronous_op()
        self.read_weights(self.flats)
        self.start_in_step(lambda: [bucket.run() for bucket in self.buckets], "the last mean", is_last=True).result()
        self.write_weights(self.flats)

    @torch.no_grad()
    def read_weights(self, flats: Sequence[torch.Tensor]) -> None:
        """Copy the weights into flat tensors, one for each bucket."""
        for bucket, flat in zip(self.buckets, flats, strict=True):
            for weight, part in self._with_weights(bucket, flat):
                part.copy_(weight)

    @torch.no_grad()
    def write_weights(self, flats: Sequence[torch.Tensor]) -> None:
        """Replace the weights, in place, by flat tensors, one for each bucket."""
        with self.tracer.span("apply"):
            for bucket, flat in zip(self.buckets, flats, strict=True):
                for weight, part in self._with_weights(bucket, flat):
                    weight.copy_(part)

    @torch.no_grad()
    def add_to_weights(self, differences: Sequence[torch.Tensor], buffer_snapshots: Sequence[torch.Tensor]) -> None:
        """Add mean minus snapshot to the weights: what they have gone through since the snapshot is kept.

        Args:
            differences: mean minus snapshot, one flat tensor for each bucket.
            buffer_snapshots: the snapshots, of `buffer_buckets` only: buffers decay, see `clamp_to_mean`.
        """
        with self.tracer.span("apply"):
            snapshots = dict(zip(self.buffer_buckets, buffer_snapshots, strict=True))
            for bucket, difference in zip(self.buckets, differences, strict=True):
                if bucket in snapshots:
                    means = bucket.views(snapshots[bucket] + difference)
                    for (weight, part), (_, mean) in zip(self._with_weights(bucket, difference), means, strict=True):
                        weight.copy_(clamp_to_mean(weight, part, mean))
                else:
                    for weight, part in self._with_weights(bucket, difference):
                        weight.add_(part)

    def by_name(
        self, flats: Sequence[torch.Tensor], buckets: Sequence[BaguaBucket] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return a copy of flat tensors, one for each bucket (or of `buckets`), as tensors by parameter name."""
        return {
            tensor.name: part.clone()
            for bucket, flat in zip(self.buckets if buckets is None else buckets, flats, strict=True)
            for tensor, part in bucket.views(flat)
        }

    def load_by_name(
        self,
        flats: Sequence[torch.Tensor],
        state: Mapping[str, torch.Tensor],
        buckets: Sequence[BaguaBucket] | None = None,
    ) -> None:
        """Copy what `by_name` returned into `flats`.

        Raises:
            ValueError: the names or shapes are not those of this module's weights.
        """
        views = {
            tensor.name: part
            for bucket, flat in zip(self.buckets if buckets is None else buckets, flats, strict=True)
            for tensor, part in bucket.views(flat)
        }
        if state.keys() != views.keys() or any(state[name].shape != part.shape for name, part in views.items()):
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: the state must hold the weights of this module, "
                f"{len(views)} tensors, got {len(state)}; they differ in "
                f"{sorted(state.keys() ^ views.keys())[:5] or 'shapes'}"
            )
        for name, part in views.items():
            part.copy_(state[name])

    def _with_weights(self, bucket: BaguaBucket, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the module's tensors with their parts of `flat`; buffers by name, since a module may replace them."""
        if bucket not in self.buffer_buckets:
            return [(tensor.parameter, part) for tensor, part in bucket.views(flat)]
        return [(self._attached_module.get_buffer(tensor.name), part) for tensor, part in bucket.views(flat)]

    @property
    def _attached_module(self) -> torch.nn.Module:
        assert self._module is not None
        return self._module


def _is_parameter(tensor: BaguaTensor) -> bool:
    return isinstance(tensor.parameter, torch.nn.Parameter)


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _parted(tensors: Sequence[BaguaTensor], cap_bytes: float) -> list[list[BaguaTensor]]:
    """Cut a list into parts of at most `cap_bytes`, or of one tensor."""
    parts: list[list[BaguaTensor]] = [[]]
    num_bytes = 0
    for tensor in tensors:
        if parts[-1] and num_bytes + tensor.parameter.nbytes > cap_bytes:
            parts.append([])
            num_bytes = 0
        parts[-1].append(tensor)
        num_bytes += tensor.parameter.nbytes
    return parts
