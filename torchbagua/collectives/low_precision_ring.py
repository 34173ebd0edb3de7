"""The ring of low-precision decentralized training: compressed differences of weights, to two neighbours.

Shape suffixes: N elements, C chunks, L elements of a chunk, W wire bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from torchbagua.collectives.communicator import Communicator
from torchbagua.collectives.exchange import Contents, Exchange
from torchbagua.collectives.hierarchical import Hierarchical
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.sampled_values import tell_error
from torchbagua.compressors import Compressor
from torchbagua.compressors.blocks import block_bounds, deal_blocks
from torchbagua.events import Phase
from torchbagua.tracer import Span

# What the arithmetic of one chunk touches stays in a core's cache. On a GPU there is one chunk, and few launches.
_CHUNK_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Replicas:
    """Three copies of weights in their `sum_dtype`, beside the weights, which neighbours hold bit-equal copies of.

    Attributes:
        weight: own last agreed weights; the right neighbour's `left` and the left neighbour's `right`.
        left, right: the neighbours' last agreed weights.
    """

    weight: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor

    def __getitem__(self, elements: slice) -> "Replicas":
        """Return views of some elements."""
        return Replicas(self.weight[elements], self.left[elements], self.right[elements])


class LowPrecisionRing:
    """One round of difference compression on a ring (DCD-PSGD, arXiv 1803.06443; Bagua, arXiv 2107.01499).

    With w, L and R the replicas and x the weights:
    1. d = x + L/3 + R/3 - (5/3) w, in the dtype of w; send Q(d) to both neighbours.
    2. w += Q(d); x = w.
    3. L += what came from the left, R += what came from the right.

    `update` does 1 and 2, `exchange` sends and does 3, and nobody needs its results before the next `update`. Since w
    takes what is sent, and not d, every replica stays equal to its original to the bit.

    With replicas of zeros and full precision a round makes w, L and R the ranks' own weights: that is how they start.

    Args:
        communicator: the ring, in rank order.
        compressor: makes Q.
        bounds_B: the weights' blocks.
        replicas: changed in place.
        bucket: the weights' name, for events and errors.
        is_bounded: keep each element between x and the mean of w, L and R, as `moved_within` does.
    """

    def __init__(
        self,
        communicator: Communicator,
        compressor: Compressor,
        bounds_B: torch.Tensor,
        replicas: Replicas,
        bucket: str,
        is_bounded: bool,
    ) -> None:
        self._communicator = communicator
        self._compressor = compressor
        self._replicas = replicas
        self._bucket = bucket
        self._is_bounded = is_bounded
        device, dtype = replicas.weight.device, replicas.weight.dtype
        num_chunks = max(1, len(replicas.weight) // _CHUNK_ELEMENTS) if device.type == "cpu" else 1
        layout = compressor.layout(bounds_B, deal_blocks(bounds_B, num_chunks), dtype, device)
        self._elements, self._rows = layout.elements, layout.rows
        self._chunks = [layout.chunk(index) for index in range(num_chunks)]
        self._wire_W = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
        of_all = [len(replicas.weight)] * communicator.size
        self._contents = Contents(sent=of_all, received=of_all, element_bytes=replicas.weight.element_size())
        longest = max(elements.stop - elements.start for elements in layout.elements)
        self._difference_L, self._third_L = torch.empty(2, longest, dtype=dtype, device=device).unbind()
        # Tensors, because on CUDA division by a Python number is a multiplication by its reciprocal.
        self._three = torch.full((1,), 3.0, dtype=dtype, device=device)
        self._five_thirds = torch.full((1,), 5.0, dtype=dtype, device=device) / self._three

    def update(self, x_N: torch.Tensor) -> None:
        """Replace `x_N`, of any dtype, by the own replica that its compressed difference leads to; nothing is sent."""
        with self._span("encode"):
            self._update(x_N)

    def _update(self, x_N: torch.Tensor) -> None:
        tracer = self._communicator.tracer
        is_sampled = tracer.samples and not self._compressor.in_place
        for elements, row, layout in zip(self._elements, self._rows, self._chunks, strict=True):
            own = self._replicas[elements]
            x_L = x_N[elements]
            d_L, third_L = self._difference_L[: len(x_L)], self._third_L[: len(x_L)]
            torch.div(own.left, self._three, out=third_L)
            torch.add(third_L, x_L, out=d_L)
            torch.div(own.right, self._three, out=third_L)
            d_L.add_(third_L)
            torch.mul(own.weight, self._five_thirds, out=third_L)
            d_L.sub_(third_L)
            if self._is_bounded:
                mean_L = (own.weight + own.left + own.right) / self._three
                d_L.add_(own.weight)
                torch.clamp(d_L, torch.minimum(x_L, mean_L), torch.maximum(x_L, mean_L), out=d_L)
                d_L.sub_(own.weight)
            before_L = d_L.clone() if is_sampled else d_L
            self._compressor.encode(d_L, layout, self._wire_W[row])
            self._compressor.decode(self._wire_W[row], layout, d_L)
            if is_sampled:
                tell_error(tracer, self._bucket, partial(_left_out, before_L, d_L))
                is_sampled = False  # one chunk will do
            own.weight.add_(d_L)
            x_L.copy_(own.weight)

    def exchange(self) -> None:
        """Send what `update` has encoded to both neighbours, and bring the copies of theirs up to date.

        Raises:
            CommunicationError: a neighbour is gone or did not take part within the group's timeout.
        """
        communicator = self._communicator
        left, right = communicator.rank_before(1), communicator.rank_after(1)
        # Between two ranks, left and right are the same one, which sends once.
        rounds = [(right, left)] if left == right else [(right, left), (left, right)]
        rows_RW = communicator.scratch("rows", len(rounds) * len(self._wire_W), self._wire_W.device)
        receives = dict(zip((left, right), rows_RW.view(len(rounds), -1), strict=False))

        def take(source: int) -> None:
            copies = [(left, self._replicas.left), (right, self._replicas.right)]
            with self._span("decode"):
                self._add(receives[source], [copy_N for neighbour, copy_N in copies if neighbour == source])

        exchange = Exchange(communicator, "peer_exchange", receives, self._bucket, rounds, self._contents)
        exchange.run(lambda _: self._wire_W, take)

    def _add(self, wire_W: torch.Tensor, copies: list[torch.Tensor]) -> None:
        for elements, row, layout in zip(self._elements, self._rows, self._chunks, strict=True):
            d_L = self._difference_L[: elements.stop - elements.start]
            self._compressor.decode(wire_W[row], layout, d_L)
            for copy_N in copies:
                copy_N[elements].add_(d_L)

    def _span(self, phase: Phase) -> Span:
        weight = self._replicas.weight
        return self._communicator.span(
            phase,
            self._bucket,
            operation="peer_exchange",
            num_elements=len(weight),
            raw_bytes=weight.nbytes,
            wire_bytes=len(self._wire_W),
        )


def _left_out(before_L: torch.Tensor, after_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return before_L, before_L - after_L


def low_precision_ring(
    group: BaguaProcessGroup,
    compressor: Compressor,
    segment_lengths: Sequence[int],
    dtype: torch.dtype,
    replicas: Replicas,
    *,
    hierarchical: bool,
    is_bounded: bool,
    bucket: str,
) -> tuple[Callable[[torch.Tensor], None], Callable[[], None]]:
    """Return `update` and `exchange` of the ring of ranks, or of nodes: see `LowPrecisionRing`.

    Args:
        group: whose ranks take part.
        compressor: of the differences; it encodes `dtype`.
        segment_lengths: elements of the parameters that lie one after the other in the weights.
        dtype: of the weights.
        replicas: as long as the weights; where nodes take part, a rank uses its own shard of them.
        hierarchical: where there are several nodes with several ranks: the ring is of nodes, what a node holds is the
            mean of its ranks, and each of them gets the result.
        is_bounded: see `LowPrecisionRing`.
        bucket: the weights' name, for events and errors.
    """
    if group.size == 1:
        return lambda x_N: None, lambda: None
    bounds = block_bounds(segment_lengths, compressor.granularity)
    if not hierarchical or group.intra_node is None:
        ring = LowPrecisionRing(group.world, compressor, bounds, replicas, bucket, is_bounded)
        return ring.update, ring.exchange
    device = replicas.weight.device
    node_size = torch.full((1,), float(group.intra_node.size), device=device)
    exchanges: list[Callable[[], None]] = []

    def make_inner(owners: Communicator, shard: slice, shard_bounds_B: torch.Tensor) -> Callable[[torch.Tensor], None]:
        ring = LowPrecisionRing(owners, compressor, shard_bounds_B, replicas[shard], bucket, is_bounded)
        exchanges.append(ring.exchange)
        return lambda sum_L: ring.update(sum_L.div_(node_size))

    update = Hierarchical(group, bounds, dtype, device, make_inner, bucket)

    def exchange() -> None:
        for one in exchanges:  # none on a rank that owns no shard
            one()

    return update, exchange
