"""The operations of a `BaguaProcessGroup` for custom algorithms."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from torchbagua.codecs.base import Compressor, Identity, TensorSpec, by_name, sum_dtype
from torchbagua.collectives.exchange import ElementCounts, Exchange, Pipeline
from torchbagua.collectives.mean import NodeGroups, RankChunks, all_gather, centralized_mean, reduce_scatter

T = TypeVar("T")

_MAX_CACHED = 64


class GroupOperations:
    """The operations of a group. See `BaguaProcessGroup` for their arguments and errors."""

    def __init__(self, group: NodeGroups) -> None:
        self._group = group
        # One for each kind of tensor: planning a layout costs more than sending a short tensor.
        self._collectives: OrderedDict[object, object] = OrderedDict()

    def all_reduce(
        self,
        x: torch.Tensor,
        *,
        average: bool,
        compression: str | Compressor | None,
        hierarchical: bool,
        name: str,
    ) -> torch.Tensor:
        """Replace `x` by its sum or mean over the ranks, and return it."""
        flat = _flat("all_reduce", "x", x, sums=True)
        compressor = by_name(compression)
        if not compressor.encodes(flat.dtype):
            raise ValueError(
                f"BaguaProcessGroup.all_reduce: compression must be a codec that encodes {flat.dtype}, got "
                f"{compressor!r}"
            )
        spec = _spec(flat, name)
        mean = self._collective(
            ("all_reduce", spec, compressor, average, hierarchical),
            lambda: centralized_mean(self._group, compressor, spec, hierarchical=hierarchical, average=average),
        )
        mean(flat)
        return x

    def all_gather(self, x: torch.Tensor, *, name: str) -> torch.Tensor:
        """Return the `x` of all ranks in rank order."""
        flat = _flat("all_gather", "x", x)
        every = flat.new_empty(self._group.size, flat.numel())
        every[self._group.rank] = flat
        if self._group.size > 1:
            spec = _spec(every.view(-1), name)
            cuts = [rank * flat.numel() for rank in range(self._group.size + 1)]
            chunks = self._collective(
                ("all_gather", spec), lambda: RankChunks(self._group.world, Identity(), spec, cuts)
            )
            all_gather(chunks, every[self._group.rank], every.view(-1))
        return _like(every, x).view(self._group.size, *x.shape)

    def reduce_scatter(self, x: torch.Tensor, *, average: bool, name: str) -> torch.Tensor:
        """Return the sum over the ranks of `x[rank]`."""
        if x.dim() == 0 or len(x) != self._group.size:
            raise ValueError(
                f"BaguaProcessGroup.reduce_scatter: x must have shape [{self._group.size}, ...], one part for each "
                f"rank, got {list(x.shape)}"
            )
        flat = _flat("reduce_scatter", "x", x, sums=True)
        length = flat.numel() // self._group.size
        own = flat[self._group.rank * length :][:length].clone()
        if self._group.size > 1:
            spec = _spec(flat, name)
            chunks = self._collective(("reduce_scatter", spec), lambda: self._equal_chunks(spec))
            total = own.to(sum_dtype(own.dtype))
            reduce_scatter(chunks, flat, total, divisor=float(self._group.size) if average else 1.0)
            own.copy_(total)
        return _like(own, x).view(x.shape[1:])

    def exchange(
        self,
        sends: Mapping[int, torch.Tensor],
        receives: Mapping[int, torch.Tensor],
        *,
        name: str,
    ) -> None:
        """Send a tensor to each of several ranks, and receive one from each of several ranks."""
        for argument, tensors in (("sends", sends), ("receives", receives)):
            for peer in tensors:
                if peer not in range(self._group.size) or peer == self._group.rank:
                    raise ValueError(
                        f"BaguaProcessGroup.exchange: the keys of {argument} must be other ranks of "
                        f"{self._group.size}, got {peer!r} on rank {self._group.rank}"
                    )
        # As bytes: a collective sends tensors of one dtype, and a transport may not support every dtype.
        outgoing = {peer: _bytes_of(f"sends[{peer}]", tensor) for peer, tensor in sends.items()}
        incoming = {peer: _bytes_of(f"receives[{peer}]", tensor) for peer, tensor in receives.items()}
        turns = []
        for distance in range(1, self._group.size):
            target, source = self._group.world.rank_after(distance), self._group.world.rank_before(distance)
            if target in sends or source in receives:
                turns.append((target, source))
        exchanged = (*outgoing.values(), *incoming.values())
        device = exchanged[0].device if exchanged else self._group.device
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        received = {source: incoming.get(source, empty) for _, source in turns}
        counts = ElementCounts(
            sent={peer: tensor.numel() for peer, tensor in sends.items()},
            received={peer: tensor.numel() for peer, tensor in receives.items()},
        )
        exchange = Exchange(Pipeline(self._group.world, device), "peer_exchange", received, name, turns, counts)
        exchange.run(outgoing.get(target, empty) for target in exchange.targets)

    def _equal_chunks(self, spec: TensorSpec) -> RankChunks:
        """Return the tensor in chunks of equal length, one for each rank."""
        length = spec.num_elements // self._group.size
        return RankChunks(self._group.world, Identity(), spec, [rank * length for rank in range(self._group.size + 1)])

    def _collective(self, key: object, make: Callable[[], T]) -> T:
        """Return what `make` returned for this key, from a cache of the most recently used keys."""
        if key not in self._collectives:
            self._collectives[key] = make()
            if len(self._collectives) > _MAX_CACHED:
                self._collectives.popitem(last=False)
        self._collectives.move_to_end(key)
        found: T = self._collectives[key]  # type: ignore[assignment]
        return found


def _flat(operation: str, argument: str, tensor: torch.Tensor, *, sums: bool = False) -> torch.Tensor:
    """Return a one-dimensional view of a tensor, complex numbers as pairs; raise ValueError if that is impossible."""
    subject = f"BaguaProcessGroup.{operation}: {argument} must be"
    if not tensor.is_contiguous():
        raise ValueError(f"{subject} contiguous, got {list(tensor.shape)} with strides {list(tensor.stride())}")
    if sums and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{subject} floating-point or complex, got {tensor.dtype}")
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)


def _bytes_of(argument: str, tensor: torch.Tensor) -> torch.Tensor:
    return _flat("exchange", argument, tensor).view(torch.uint8)


def _like(flat: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return `flat`, with its pairs as complex numbers if `x` is complex."""
    return torch.view_as_complex(flat.view(flat.numel() // 2, 2)) if x.is_complex() else flat


def _spec(flat: torch.Tensor, name: str) -> TensorSpec:
    return TensorSpec((flat.numel(),), flat.dtype, flat.device, name)
