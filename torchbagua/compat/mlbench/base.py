"""mlbench's Aggregation: a model's gradients or weights put together over the ranks, when you call it."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from torchbagua import BaguaProcessGroup, CommunicationError, Observer
from torchbagua.collectives import all_reduce_max
from torchbagua.compat.mlbench.arguments import check_values
from torchbagua.observe import Details, Run, Tracer, check_observers

Denominator = float | torch.Tensor | None
AggregationFunction = Callable[..., None]
"""Of (model, op, denom=None): what `Aggregation.agg_grad` and `Aggregation.agg_model` return."""


A = TypeVar("A", bound="Aggregation")
_TIMEOUT_ALONE = timedelta(minutes=1)


class Member(NamedTuple):
    """A parameter, and those of its values that are aggregated: its gradient or its weights, real, outside autograd."""

    name: str
    parameter: torch.Tensor
    values: torch.Tensor


class Aggregation:
    """Puts a model's gradients or weights together over the ranks. A subclass implements `_agg`.

    `agg_grad` and `agg_model` return a function of (model, op, denom=None), which works in place: gradients and weights
    stay the tensors that they are. All ranks call it, in the same order, with models of the same parameters. They
    compare that in one small exchange, and raise an error if it is not so. In a group of one rank nothing is sent.

    - A parameter without a gradient on any rank is left out. Where another rank has one, it counts as zeros, and
      becomes a gradient.
    - Parameters of one dtype and device go together. Tied weights go once. Complex values go as pairs of real ones.
    - `model` may be of any layout of memory, but not sparse, and its parameters must be floating-point or complex.

    Private connections are opened at the first call, and closed by `close`, or by leaving a `with` block.

    Args:
        use_cuda: without effect, since values stay on their device; it is there because mlbench's class has it.
        process_group: the ranks: a torch ProcessGroup, or a BaguaProcessGroup to say which rank is on which node. By
            default the world; without torch.distributed, this rank alone.
        observers: are told of every phase of communication. A step is from the end of one call to that of the next.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """

    def __init__(
        self,
        use_cuda: bool = False,
        *,
        process_group: dist.ProcessGroup | BaguaProcessGroup | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._owner = type(self).__name__
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup | BaguaProcessGroup):
            raise TypeError(
                f"{self._owner}: process_group must be a torch.distributed.ProcessGroup, a BaguaProcessGroup or None, "
                f"got {process_group!r}"
            )
        check_observers(self._owner, observers)
        self.use_cuda = use_cuda
        self._process_group = process_group
        self._observers = tuple(observers)
        self._group: BaguaProcessGroup | None = None
        self._num_calls = 0
        self._name = ""  # of what is being aggregated, in events and errors

    @property
    def group(self) -> BaguaProcessGroup:
        """The group that a `_agg` of yours may send over. The first use opens it, which is collective.

        Raises:
            TypeError, ValueError: ranks disagree in the arguments, or these do not fit the group.
            TimeoutError: a rank did not come in time.
            CommunicationError: the connections could not be opened.
        """
        if self._group is None:
            self._group = self._open()
        return self._group

    def agg_grad(self, by_layer: bool = False) -> AggregationFunction:
        """Return the function that aggregates gradients: all at once, or those of one parameter after the other."""
        return self._agg_gradients_by_layer if by_layer else self._agg_gradients_by_model

    def agg_model(self, by_layer: bool = False) -> AggregationFunction:
        """Return the function that aggregates weights: all at once, or those of one parameter after the other."""
        return self._agg_weights_by_layer if by_layer else self._agg_weights_by_model

    def close(self) -> None:
        """Close the connections, and end the traces. A second call does nothing."""
        if self._group is not None:
            self._group.close()
            self._group.tracer.end()

    def __enter__(self: A) -> A:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _agg(self, data: torch.Tensor, op: str, denom: Denominator = None) -> torch.Tensor:
        """Return `data`, contiguous, put together over the ranks: in place, or another tensor of its size.

        Args:
            data: by layer, the values of a parameter in their shape; else those of several, in one dimension.
            op: what the caller asks for.
            denom: what the caller gives with it.
        """
        raise NotImplementedError(f"{self._owner} must override Aggregation._agg")

    def _agg_gradients_by_model(self, model: torch.nn.Module, op: str, denom: Denominator = None) -> None:
        self._aggregate("gradients", model, op, denom, by_layer=False)

    def _agg_gradients_by_layer(self, model: torch.nn.Module, op: str, denom: Denominator = None) -> None:
        self._aggregate("gradients", model, op, denom, by_layer=True)

    def _agg_weights_by_model(self, model: torch.nn.Module, op: str, denom: Denominator = None) -> None:
        self._aggregate("weights", model, op, denom, by_layer=False)

    def _agg_weights_by_layer(self, model: torch.nn.Module, op: str, denom: Denominator = None) -> None:
        self._aggregate("weights", model, op, denom, by_layer=True)

    def _check_op(self, op: str) -> None:
        """Raise what all ranks raise alike, before anything is sent. By default any op is taken."""

    def _check_denominator(self, op: str, denom: Denominator) -> None:
        """Raise ValueError if this rank's denominator does not fit; all ranks are then told."""

    def _arguments(self) -> dict[str, Any]:
        """Return those arguments that must be the same on all ranks."""
        return {}

    def _check_group(self, group: BaguaProcessGroup) -> None:
        """Raise ValueError, on all ranks, if the arguments do not fit the group. Collective."""

    def _open(self) -> BaguaProcessGroup:
        own = {"the aggregation": self._owner}
        own |= {f"{self._owner}'s argument {name}": value for name, value in self._arguments().items()}
        given = self._process_group or dist.group.WORLD
        if isinstance(given, BaguaProcessGroup):
            opening = given.duplicate
        elif given is not None:
            opening = partial(BaguaProcessGroup, given)
        else:  # this rank alone
            opening = partial(BaguaProcessGroup, dist.ProcessGroup(dist.HashStore(), 0, 1), timeout=_TIMEOUT_ALONE)
        group = opening(observers=self._observers, must_agree=own)
        try:
            group.open()
            self._check_group(group)
            group.compare_clocks()
            if group.tracer.is_on:
                run = Run(
                    id=group.id, algorithm=self._owner, description=self._description, rank=group.rank,
                    nodes=tuple(group.nodes), settings={}, board=group.board, clock_offsets=group.clock_offsets,
                )  # fmt: skip
                group.tracer.start(run)
        except BaseException:
            group.close()
            raise
        return group

    @property
    def _description(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self._arguments().items())
        return f"{self._owner}({arguments})"

    @property
    def _rank_and_size(self) -> tuple[int, int]:
        return self.group.rank, self.group.size

    @property
    def _tracer(self) -> Tracer:
        return self.group.tracer

    def _largest(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of every number over the ranks."""
        return all_reduce_max(self.group.world, numbers, self._owner)

    def _use_device(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._tracer.use_gpu(device)
            self.group.use_device(device)

    @torch.no_grad()
    def _aggregate(self, what: str, model: torch.nn.Module, op: str, denom: Denominator, *, by_layer: bool) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"{self._owner}: model must be a torch.nn.Module, got {model!r}")
        self._check_op(op)
        of_gradients = what == "gradients"
        named = {
            name: one
            for name, one in model.named_parameters()
            if not of_gradients or one.requires_grad or one.grad is not None
        }
        for name, one in named.items():
            values = one.grad if of_gradients and one.grad is not None else one
            check_values(f"{self._owner}: {what} of {name}", values)
        with self._tracer.span("wait"):
            is_there = [not of_gradients or one.grad is not None for one in named.values()]
            call = f"{what}, by_layer={by_layer}, op={op!r}"
            is_there = self._agree(call, named, is_there, partial(self._check_denominator, op, denom))
            members = [_member(*one, of_gradients) for one, there in zip(named.items(), is_there, strict=True) if there]
            try:
                for index, pack in enumerate(_packs(members, by_layer=by_layer)):
                    self._use_device(pack[0].values.device)
                    self._name = pack[0].name if by_layer else what
                    self._aggregate_pack(index, pack, op, denom, by_layer=by_layer)
            except BaseException:
                self.close()  # which tells the other ranks
                raise
        self._tracer.end_step()

    def _agree(
        self,
        call: str,
        named: Mapping[str, torch.Tensor],
        is_there: Sequence[bool],
        check_denominator: Callable[[], None],
    ) -> list[bool]:
        """Return which values are there on any rank; raise on all ranks if they do not all do the same."""
        problem: ValueError | None = None
        try:
            check_denominator()
        except ValueError as error:
            problem = error
        rank, size = self._rank_and_size
        if size == 1:
            if problem is not None:
                raise problem
            return list(is_there)
        layout = [(name, tuple(one.shape), str(one.dtype), one.device.type) for name, one in named.items()]
        digest = _fingerprint((self._num_calls, call, layout))
        largest = self._largest([digest, -digest, 0 if problem is None else rank + 1, not all(is_there)])
        self._num_calls += 1
        if problem is not None:
            raise problem
        if largest[0] != -largest[1]:
            raise CommunicationError(
                f"{self._owner}: ranks are out of step: rank {rank} aggregates {call}, of {len(named)} parameters, in "
                f"its call {self._num_calls}, and another rank something else; all ranks must make the same calls, in "
                "the same order, with models of the same parameters"
            )
        if largest[2]:
            raise ValueError(
                f"{self._owner}: denom must be one number other than zero, and is not on rank {largest[2] - 1}"
            )
        return [bool(one) for one in self._largest(is_there)] if largest[3] else list(is_there)

    def _aggregate_pack(
        self, index: int, members: Sequence[Member], op: str, denom: Denominator, *, by_layer: bool
    ) -> None:
        """Aggregate the values of parameters that go together; `index` counts these packs in a call."""
        values = [one.values for one in members]
        data = values[0].contiguous() if by_layer else torch.cat([one.reshape(-1) for one in values])
        details = Details(bucket=self._name, num_elements=data.numel(), raw_bytes=data.nbytes)
        with self._tracer.span("bucket", details):
            result = self._agg(data, op, denom)
        if not isinstance(result, torch.Tensor) or result.numel() != data.numel():
            raise TypeError(
                f"{self._owner}._agg must return a tensor of {data.numel()} elements, as it was given, got "
                f"{list(result.shape) if isinstance(result, torch.Tensor) else result!r}"
            )
        parts = result.reshape(-1).split([one.numel() for one in values])
        for one, part in zip(values, parts, strict=True):
            one.copy_(part.view(one.shape))


def _fingerprint(value: object) -> int:
    """Return a number that tells `value`, by its repr, from others."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:5], "big")


def _member(name: str, parameter: torch.Tensor, of_gradients: bool) -> Member:
    if of_gradients:  # autograd may have put off a complex one's conjugation
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.resolve_conj()
    values = parameter.grad if of_gradients else parameter
    assert values is not None
    values = values.detach()
    return Member(name, parameter, torch.view_as_real(values) if values.is_complex() else values)


def _packs(members: Sequence[Member], *, by_layer: bool) -> list[list[Member]]:
    """Return those that go together: of one dtype, on one device."""
    if by_layer:
        return [[one] for one in members]
    alike: dict[tuple[torch.dtype, torch.device], list[Member]] = {}
    for one in members:
        alike.setdefault((one.values.dtype, one.values.device), []).append(one)
    return list(alike.values())
