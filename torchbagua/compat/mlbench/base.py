"""mlbench's Aggregation: explicit calls aggregate a model's gradients or weights over the ranks."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from torchbagua import BaguaProcessGroup, CommunicationError
from torchbagua.collectives import agree, all_reduce_max
from torchbagua.compat.mlbench.arguments import check_values
from torchbagua.observe import Details, Observer, Run, Tracer, check_observers

Denominator = float | torch.Tensor | None
AggregationFunction = Callable[..., None]
"""A function of (model, op, denom=None), as `Aggregation.agg_grad` and `Aggregation.agg_model` return."""


A = TypeVar("A", bound="Aggregation")
_TIMEOUT_ALONE = timedelta(minutes=1)


class Member(NamedTuple):
    """A parameter and the values to aggregate: its gradient or its weights, as real numbers, detached from autograd."""

    name: str
    parameter: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Call:
    """The record of a rank's call, which ranks compare.

    Attributes:
        checksum: of the number of the call, its arguments, and the model's parameters.
        has_denominator: whether the denominator is valid.
        has_all_values: whether every parameter has values.
    """

    checksum: int
    has_denominator: bool
    has_all_values: bool


class Aggregation:
    """Aggregates a model's gradients or weights over the ranks. A subclass implements `_agg`.

    `agg_grad` and `agg_model` return a function of (model, op, denom=None), which works in place: gradients and weights
    stay the same tensors. All ranks must call it in the same order, with models of the same parameters. One small
    exchange verifies this, and all ranks raise an error if calls differ. In a group of one rank nothing is sent.

    - A parameter that has no gradient on any rank is left out. If only some ranks have a gradient, the other ranks
      contribute zeros, and get a gradient.
    - Parameters of one dtype and device are sent together. Tied weights are sent once. Complex values are sent as pairs
      of real values.
    - The tensors of `model` may have any memory layout, but must not be sparse. Parameters must be floating-point or
      complex.

    The first call opens private connections. `close`, or the end of a `with` block, closes them.

    Args:
        use_cuda: no effect, since values stay on their device; accepted because mlbench's class has it.
        process_group: the ranks: a torch ProcessGroup, or a BaguaProcessGroup to specify the node of each rank. By
            default the world; without torch.distributed, this rank alone.
        observers: are notified of every phase of communication. A step lasts from the end of one call to the end of
            the next call.

    Raises:
        TypeError, ValueError: an argument is invalid.
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
        self._name = ""  # of the values being aggregated, in events and errors

    @property
    def group(self) -> BaguaProcessGroup:
        """The group that your `_agg` may communicate over. The first use opens it, which is collective.

        Raises:
            TypeError, ValueError: ranks disagree on the arguments, or the arguments do not match the group.
            TimeoutError: timed out while waiting for a rank.
            CommunicationError: the connections could not be opened.
        """
        if self._group is None:
            self._group = self._open()
        return self._group

    def agg_grad(self, by_layer: bool = False) -> AggregationFunction:
        """Return the function that aggregates gradients: all at once, or one parameter after the other."""
        return self._agg_gradients_by_layer if by_layer else self._agg_gradients_by_model

    def agg_model(self, by_layer: bool = False) -> AggregationFunction:
        """Return the function that aggregates weights: all at once, or one parameter after the other."""
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
        """Aggregate `data`, a contiguous tensor, over the ranks; return it, or another tensor of its size.

        Args:
            data: by layer, the values of one parameter in their shape; else the values of several, in one dimension.
            op: the op passed by the caller.
            denom: the denominator passed by the caller.
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
        """Raise the error for an unknown op, on all ranks, before anything is sent. By default any op is allowed."""

    def _check_denominator(self, op: str, denom: Denominator) -> None:
        """Raise ValueError if this rank's denominator is invalid; all ranks are then notified."""

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments that must be the same on all ranks."""
        return {}

    def _check_group(self, group: BaguaProcessGroup) -> None:
        """Raise ValueError, on all ranks, if the arguments do not match the group. Collective."""

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
        group = opening(observers=self._observers, rank_invariants=own)
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

    def _calls(self, own: Call) -> list[Call]:
        """Return the calls of all ranks, in rank order."""
        return agree(self.group.world, own, self._owner)

    def _largest(self, numbers: Sequence[int]) -> list[int]:
        """Return the maximum of each number over the ranks."""
        return all_reduce_max(self.group.world, numbers, self._owner)

    def _use_device(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._tracer.use_gpu(device, self.group.private.wait_for_mark)
            self.group.private.use_device(device)

    @torch.no_grad()
    def _aggregate(self, kind: str, model: torch.nn.Module, op: str, denom: Denominator, *, by_layer: bool) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"{self._owner}: model must be a torch.nn.Module, got {model!r}")
        self._check_op(op)
        of_gradients = kind == "gradients"
        named = {
            name: parameter
            for name, parameter in model.named_parameters()
            if not of_gradients or parameter.requires_grad or parameter.grad is not None
        }
        for name, parameter in named.items():
            values = parameter.grad if of_gradients and parameter.grad is not None else parameter
            check_values(f"{self._owner}: {kind} of {name}", values)
        with self._tracer.span("wait"):
            is_there = [not of_gradients or parameter.grad is not None for parameter in named.values()]
            call = f"{kind}, by_layer={by_layer}, op={op!r}"
            is_there = self._agree(call, named, is_there, partial(self._check_denominator, op, denom))
            members = [
                _member(*item, of_gradients) for item, there in zip(named.items(), is_there, strict=True) if there
            ]
            try:
                for index, pack in enumerate(_packs(members, by_layer=by_layer)):
                    self._use_device(pack[0].values.device)
                    self._name = pack[0].name if by_layer else kind
                    self._aggregate_pack(index, pack, op, denom, by_layer=by_layer)
            except BaseException:
                self.close()  # notifies the other ranks
                raise
        self._tracer.end_step()

    def _agree(
        self,
        call: str,
        named: Mapping[str, torch.Tensor],
        is_there: Sequence[bool],
        check_denominator: Callable[[], None],
    ) -> list[bool]:
        """Return, for each parameter, whether any rank has values; raise on all ranks if their calls differ."""
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
        layout = [(name, tuple(tensor.shape), str(tensor.dtype), tensor.device.type) for name, tensor in named.items()]
        checksum = zlib.crc32(repr((self._num_calls, call, layout)).encode())
        calls = self._calls(Call(checksum, problem is None, all(is_there)))
        self._num_calls += 1
        if problem is not None:
            raise problem
        if len({each.checksum for each in calls}) > 1:
            raise CommunicationError(
                f"{self._owner}: ranks are out of step: rank {rank} aggregates {call}, of {len(named)} parameters, in "
                f"its call {self._num_calls}, but the call of another rank differs; all ranks must make the same "
                "calls, in the same order, with models of the same parameters"
            )
        bad_ranks = [other for other, each in enumerate(calls) if not each.has_denominator]
        if bad_ranks:
            raise ValueError(
                f"{self._owner}: denom must be one number other than zero, but it is not on rank {bad_ranks[-1]}"
            )
        if all(each.has_all_values for each in calls):
            return list(is_there)
        return [bool(there) for there in self._largest(is_there)]

    def _aggregate_pack(
        self, index: int, members: Sequence[Member], op: str, denom: Denominator, *, by_layer: bool
    ) -> None:
        """Aggregate the values of parameters that are sent together; `index` counts these packs in a call."""
        values = [member.values for member in members]
        data = values[0].contiguous() if by_layer else torch.cat([tensor.reshape(-1) for tensor in values])
        details = Details(bucket=self._name, num_elements=data.numel(), raw_bytes=data.nbytes)
        with self._tracer.span("bucket", details):
            result = self._agg(data, op, denom)
        if not isinstance(result, torch.Tensor) or result.numel() != data.numel():
            raise TypeError(
                f"{self._owner}._agg must return a tensor of {data.numel()} elements, like its argument, got "
                f"{list(result.shape) if isinstance(result, torch.Tensor) else result!r}"
            )
        parts = result.reshape(-1).split([tensor.numel() for tensor in values])
        for tensor, part in zip(values, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def _member(name: str, parameter: torch.Tensor, of_gradients: bool) -> Member:
    if of_gradients:  # autograd may have deferred the conjugation of a complex gradient
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.resolve_conj()
    values = parameter.grad if of_gradients else parameter
    assert values is not None
    values = values.detach()
    return Member(name, parameter, torch.view_as_real(values) if values.is_complex() else values)


def _packs(members: Sequence[Member], *, by_layer: bool) -> list[list[Member]]:
    """Return packs of members to send together: of one dtype, on one device."""
    if by_layer:
        return [[member] for member in members]
    packs: dict[tuple[torch.dtype, torch.device], list[Member]] = {}
    for member in members:
        packs.setdefault((member.values.dtype, member.values.device), []).append(member)
    return list(packs.values())
