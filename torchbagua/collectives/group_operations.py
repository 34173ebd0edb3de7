"""What an algorithm of one's own sends: operations of a group that work over every transport, on CPUs and GPUs."""

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

_MOST_KEPT = 64


class GroupOperations(NodeGroups):
    """The operations of a `BaguaProcessGroup`.

    All ranks call the same ones, in the same order, with tensors of the same sizes: on the lane, as a bucket's
    operations do, and never beside what that runs. On a GPU they are done on the current stream, and in stream order no
    host waits. Observers are notified of every message by `name`, which errors have too.

    All raise CommunicationError where a rank is gone or did not take part within the group's timeout.
    """

    def __init__(self) -> None:
        # One for each kind of tensor: to lay one out costs more than to send a short one.
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
        """Replace `x` by its sum over the ranks, and return it. All ranks get the same bits.

        Args:
            x: a contiguous tensor of any shape, floating-point or complex.
            average: divide by the number of ranks.
            compression: how it is sent, see `BaguaBucket.append_centralized_synchronous_op`.
            hierarchical: with several nodes of several ranks: sum within nodes in full precision, and use `compression`
                between them.
            name: its name in events and errors.

        Raises:
            ValueError: `x` is not such a tensor, or `compression` does not encode it.
        """
        flat = _flat("all_reduce", "x", x, sums=True)
        compressor = by_name(compression)
        if not compressor.encodes(flat.dtype):
            raise ValueError(
                f"BaguaProcessGroup.all_reduce: compression must be one that encodes {flat.dtype}, got {compressor!r}"
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
            name: its name in events and errors.

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
        """Return the sum over the ranks of this rank's part of `x`, which is `x[rank]`. `x` stays as it is.

        Sums are formed in rank order, in float32, or in float64 if `x` is float64.

        Args:
            x: a contiguous tensor of shape [R, ...] with R ranks, floating-point or complex.
            average: divide by the number of ranks.
            name: its name in events and errors.

        Raises:
            ValueError: `x` is not such a tensor.
        """
        if x.dim() == 0 or len(x) != self.size:
            raise ValueError(
                f"BaguaProcessGroup.reduce_scatter: x must have a part for each of {self.size} ranks, got "
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
        """Send a tensor to each of some ranks, and receive one from each of some ranks.

        If you send to a rank, that rank must receive from you, as many bytes. If they differ, a transport may end the
        process.

        Args:
            sends: contiguous tensors, by the rank that they go to.
            receives: contiguous tensors to fill, by the rank that they come from.
            name: its name in events and errors.

        Raises:
            ValueError: a tensor is not contiguous, or a rank is none of the others.
        """
        for what, tensors in (("sends", sends), ("receives", receives)):
            for peer in tensors:
                if peer not in range(self.size) or peer == self.rank:
                    raise ValueError(
                        f"BaguaProcessGroup.exchange: {what} must be by another rank of {self.size}, got {peer!r} on "
                        f"rank {self.rank}"
                    )
        # As bytes: a collective moves tensors of one dtype, and a transport may not know every dtype.
        outgoing = {peer: _bytes_of(f"sends[{peer}]", tensor) for peer, tensor in sends.items()}
        incoming = {peer: _bytes_of(f"receives[{peer}]", tensor) for peer, tensor in receives.items()}
        turns = []
        for distance in range(1, self.size):
            target, source = self.world.rank_after(distance), self.world.rank_before(distance)
            if target in sends or source in receives:
                turns.append((target, source))
        moved = (*outgoing.values(), *incoming.values())
        device = moved[0].device if moved else self.device
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        of_all = {source: incoming.get(source, nothing) for _, source in turns}
        counts = ElementCounts(
            sent={peer: tensor.numel() for peer, tensor in sends.items()},
            received={peer: tensor.numel() for peer, tensor in receives.items()},
        )
        exchange = Exchange(Pipeline(self.world, device), "peer_exchange", of_all, name, turns, counts)
        exchange.run(outgoing.get(target, nothing) for target in exchange.targets)

    def _equal_chunks(self, spec: TensorSpec) -> RankChunks:
        """Return the tensor in chunks, where each rank has as many of its elements as any other."""
        length = spec.num_elements // self.size
        return RankChunks(self.world, Identity(), spec, [rank * length for rank in range(self.size + 1)])

    def _collective(self, key: object, make: Callable[[], T]) -> T:
        """Return what `make` returned for this key before, of the keys that were used last."""
        if key not in self._collectives:
            self._collectives[key] = make()
            if len(self._collectives) > _MOST_KEPT:
                self._collectives.popitem(last=False)
        self._collectives.move_to_end(key)
        found: T = self._collectives[key]  # type: ignore[assignment]
        return found


def _flat(operation: str, argument: str, tensor: torch.Tensor, *, sums: bool = False) -> torch.Tensor:
    """Return a view of a tensor in one dimension, complex numbers as pairs; ValueError where there is none."""
    subject = f"BaguaProcessGroup.{operation}: {argument} must be"
    if not tensor.is_contiguous():
        raise ValueError(f"{subject} contiguous, got {list(tensor.shape)} with strides {list(tensor.stride())}")
    if sums and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{subject} floating-point or complex, got {tensor.dtype}")
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)


def _bytes_of(argument: str, tensor: torch.Tensor) -> torch.Tensor:
    return _flat("exchange", argument, tensor).view(torch.uint8)


def _like(flat: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return `flat` as the complex numbers that its pairs are, where `x` is complex."""
    return torch.view_as_complex(flat.view(flat.numel() // 2, 2)) if x.is_complex() else flat


def _spec(flat: torch.Tensor, name: str) -> TensorSpec:
    return TensorSpec((flat.numel(),), flat.dtype, flat.device, name)
