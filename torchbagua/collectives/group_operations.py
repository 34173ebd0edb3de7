"""Operations of a group for custom algorithms. They work over every transport, on CPUs and GPUs."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from torchbagua.codecs.base import Compressor, sum_dtype
from torchbagua.codecs.blocks import TensorSpec
from torchbagua.codecs.cast import Identity
from torchbagua.codecs.lookup import by_name
from torchbagua.collectives.all_gather import all_gather
from torchbagua.collectives.centralized_mean import centralized_mean
from torchbagua.collectives.exchange import ElementCounts, Exchange, Pipeline
from torchbagua.collectives.nodes import NodeGroups
from torchbagua.collectives.rank_chunks import RankChunks
from torchbagua.collectives.reduce_scatter import reduce_scatter

T = TypeVar("T")

_MAX_CACHED = 64


class GroupOperations(NodeGroups):
    """The operations of a `BaguaProcessGroup`.

    All ranks call the same operations, in the same order, with tensors of the same sizes. Call them on the lane, as a
    bucket's operations do, and never concurrently with other work of the lane. On a GPU they run on the current stream,
    and in stream order no host waits. Observers are notified of every message by `name`; errors contain it too.

    All operations raise CommunicationError if a rank disconnects or does not take part within the group's timeout.
    """

    def __init__(self) -> None:
        # One for each kind of tensor: planning a layout costs more than sending a short tensor.
        self._collectives: OrderedDict[object, object] = OrderedDict()

    def all_reduce(
        self,
        x: torch.Tensor,
        *,
        average: bool = False,
        compression: str | Compressor | None = None,
        hierarchical: bool = True,
        name: str = "all_reduce",
    ) -> torch.Tensor:
        """Replace `x` by its sum over the ranks, and return it. The result is bitwise equal on all ranks.

        Args:
            x: a contiguous tensor of any shape, floating-point or complex.
            average: divide by the number of ranks.
            compression: the codec, see `BaguaBucket.append_centralized_synchronous_op`.
            hierarchical: in a multi-node group, sum within nodes in full precision, and use `compression` between
                nodes.
            name: the name of the operation in events and errors.

        Raises:
            ValueError: `x` does not meet these requirements, or `compression` does not encode its dtype.
        """
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
            lambda: centralized_mean(self, compressor, spec, hierarchical=hierarchical, average=average),
        )
        mean(flat)
        return x

    def all_gather(self, x: torch.Tensor, *, name: str = "all_gather") -> torch.Tensor:
        """Return the `x` of all ranks in rank order, of shape [R, *x.shape] with R ranks.

        Args:
            x: a contiguous tensor. Its dtype and shape are the same on all ranks.
            name: the name of the operation in events and errors.

        Raises:
            ValueError: `x` is not contiguous.
        """
        flat = _flat("all_gather", "x", x)
        every = flat.new_empty(self.size, flat.numel())
        every[self.rank] = flat
        if self.size > 1:
            spec = _spec(every.view(-1), name)
            cuts = [rank * flat.numel() for rank in range(self.size + 1)]
            chunks = self._collective(("all_gather", spec), lambda: RankChunks(self.world, Identity(), spec, cuts))
            all_gather(chunks, every[self.rank], every.view(-1))
        return _like(every, x).view(self.size, *x.shape)

    def reduce_scatter(self, x: torch.Tensor, *, average: bool = False, name: str = "reduce_scatter") -> torch.Tensor:
        """Return the sum over the ranks of `x[rank]`, this rank's part of `x`. `x` is unchanged.

        Values are summed in rank order, in float32, or in float64 if `x` is float64.

        Args:
            x: a contiguous tensor of shape [R, ...] with R ranks, floating-point or complex.
            average: divide by the number of ranks.
            name: the name of the operation in events and errors.

        Raises:
            ValueError: `x` does not meet these requirements.
        """
        if x.dim() == 0 or len(x) != self.size:
            raise ValueError(
                f"BaguaProcessGroup.reduce_scatter: x must have shape [{self.size}, ...], one part for each rank, got "
                f"{list(x.shape)}"
            )
        flat = _flat("reduce_scatter", "x", x, sums=True)
        length = flat.numel() // self.size
        own = flat[self.rank * length :][:length].clone()
        if self.size > 1:
            spec = _spec(flat, name)
            chunks = self._collective(("reduce_scatter", spec), lambda: self._equal_chunks(spec))
            total = own.to(sum_dtype(own.dtype))
            reduce_scatter(chunks, flat, total, divisor=float(self.size) if average else 1.0)
            own.copy_(total)
        return _like(own, x).view(x.shape[1:])

    def exchange(
        self,
        sends: Mapping[int, torch.Tensor],
        receives: Mapping[int, torch.Tensor],
        *,
        name: str = "exchange",
    ) -> None:
        """Send a tensor to each of several ranks, and receive one from each of several ranks.

        If you send to a rank, that rank must receive the same number of bytes from you. If the numbers differ, a
        transport may end the process.

        Args:
            sends: contiguous tensors, by the rank that receives them.
            receives: contiguous tensors to fill, by the rank that sends them.
            name: the name of the operation in events and errors.

        Raises:
            ValueError: a tensor is not contiguous, or a key is not another rank of the group.
        """
        for argument, tensors in (("sends", sends), ("receives", receives)):
            for peer in tensors:
                if peer not in range(self.size) or peer == self.rank:
                    raise ValueError(
                        f"BaguaProcessGroup.exchange: the keys of {argument} must be other ranks of {self.size}, got "
                        f"{peer!r} on rank {self.rank}"
                    )
        # As bytes: a collective sends tensors of one dtype, and a transport may not support every dtype.
        outgoing = {peer: _bytes_of(f"sends[{peer}]", tensor) for peer, tensor in sends.items()}
        incoming = {peer: _bytes_of(f"receives[{peer}]", tensor) for peer, tensor in receives.items()}
        turns = []
        for distance in range(1, self.size):
            target, source = self.world.rank_after(distance), self.world.rank_before(distance)
            if target in sends or source in receives:
                turns.append((target, source))
        exchanged = (*outgoing.values(), *incoming.values())
        device = exchanged[0].device if exchanged else self.device
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        received = {source: incoming.get(source, empty) for _, source in turns}
        counts = ElementCounts(
            sent={peer: tensor.numel() for peer, tensor in sends.items()},
            received={peer: tensor.numel() for peer, tensor in receives.items()},
        )
        exchange = Exchange(Pipeline(self.world, device), "peer_exchange", received, name, turns, counts)
        exchange.run(outgoing.get(target, empty) for target in exchange.targets)

    def _equal_chunks(self, spec: TensorSpec) -> RankChunks:
        """Return the tensor in chunks of equal length, one for each rank."""
        length = spec.num_elements // self.size
        return RankChunks(self.world, Identity(), spec, [rank * length for rank in range(self.size + 1)])

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
