"""The ring of low-precision decentralized training: compressed differences of weights, sent to two neighbors.

Shape suffixes: N elements, L elements of a piece, W wire bytes.
"""

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from torchbagua.codecs.base import DEFAULT_BLOCK, Compressor, TensorSpec, check_compression, divide, needs_feedback
from torchbagua.collectives.clamp import clamp_to_mean
from torchbagua.collectives.exchange import ElementCounts, Exchange, Pipeline
from torchbagua.collectives.hierarchical import Hierarchical
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.native import ring
from torchbagua.observe.events import Details, Phase
from torchbagua.observe.tracer import Span
from torchbagua.transport.communicator import Communicator

if TYPE_CHECKING:
    from torchbagua.collectives.encoding_error import EncodingErrorProbe

# The memory that one piece needs fits into the caches. A GPU uses a single piece, for few launches. With a codec that
# has one range per piece, a longer piece has a larger residual.
_PIECE_ELEMENTS = 1 << 18
_RANGE_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Replicas:
    """Copies of weights in their `sum_dtype`, separate from the weights. Neighbors hold bitwise equal copies of them.

    Attributes:
        weight: this rank's last agreed weights; equal to the right neighbor's `left` and the left neighbor's `right`.
        left, right: the neighbors' last agreed weights. In a ring of two, both may be the same tensor.
    """

    weight: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor

    def __getitem__(self, elements: slice) -> "Replicas":
        """Return views of a slice of the elements."""
        return Replicas(self.weight[elements], self.left[elements], self.right[elements])


def check_ring_compression(owner: str, compression: str | Compressor | None) -> None:
    """Raise ValueError, which names `owner`, unless differences of weights can be sent with this codec."""
    check_compression(f"{owner}: compression", compression)
    if needs_feedback(compression):
        raise ValueError(
            f"{owner}: compression must not be a codec that needs error feedback, got {compression!r}; weights become "
            "the values that neighbors receive, so the residual of a difference is lost"
        )


class LowPrecisionRing:
    """One round of difference compression on a ring (DCD-PSGD, arXiv 1803.06443; Bagua, arXiv 2107.01499).

    With w, L and R the replicas and x the weights:
    1. d = x + L/3 + R/3 - (5/3) w, in the dtype of w; send Q(d) to both neighbors.
    2. w += Q(d); x = w.
    3. L += Q(d) of the left neighbor, R += Q(d) of the right neighbor.

    `update` runs parts 1 and 2 without sending. `exchange` sends, and runs part 3. No rank needs the results of
    `exchange` before the next `update`. Since each rank adds the sent Q(d) to w, and not d, every replica stays bitwise
    equal to its original.

    A round with replicas of zeros and in full precision sets w, L and R to the ranks' weights. The first round does
    that.
    """

    def __init__(
        self,
        communicator: Communicator,
        compressor: Compressor,
        spec: TensorSpec,
        replicas: Replicas,
        is_bounded: bool,
    ) -> None:
        self._communicator = communicator
        self._compressor = compressor
        self._replicas = replicas
        self._bucket = spec.name
        self._is_bounded = is_bounded
        device, dtype, dtype_of_weights = replicas.weight.device, replicas.weight.dtype, spec.dtype
        piece_elements = _PIECE_ELEMENTS if compressor.blocks_are_independent else _RANGE_ELEMENTS
        num_pieces = max(1, len(replicas.weight) // piece_elements) if device.type == "cpu" else 1
        spec = replace(spec, dtype=dtype)
        layout = compressor.layout(spec, spec.even_cuts(num_pieces, compressor.block_elements))
        self._elements, self._byte_slices = layout.elements, layout.byte_slices
        self._layouts = [layout.chunk(index) for index in range(num_pieces)]
        self._tracer, self._name = communicator.tracer, spec.name
        self._wire_W = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
        of_all = [len(replicas.weight)] * communicator.size
        self._contents = ElementCounts(sent=of_all, received=of_all, element_bytes=replicas.weight.element_size())
        longest = max(elements.stop - elements.start for elements in layout.elements)
        self._difference_L = torch.empty(longest, dtype=dtype, device=device)
        # Weights below float32 have float32 replicas, and float64 weights have float64 replicas; the native operations
        # support neither.
        operations = torch.ops.torchbagua if dtype_of_weights == torch.float32 else ring
        self._ring_difference, self._ring_advance = operations.ring_difference, operations.ring_advance

    @cached_property
    def _error_probe(self) -> "EncodingErrorProbe":
        from torchbagua.collectives.encoding_error import EncodingErrorProbe

        return EncodingErrorProbe(self._tracer, self._compressor, self._layouts[0], self._name)

    def update(self, x_N: torch.Tensor) -> None:
        """Replace `x_N`, of any dtype, by this rank's replica after its compressed difference; nothing is sent."""
        with self._span("encode"):
            self._update(x_N)

    def _update(self, x_N: torch.Tensor) -> None:
        is_sampled = self._tracer.samples and not self._compressor.wire_is_tensor
        for elements, own_bytes, layout in zip(self._elements, self._byte_slices, self._layouts, strict=True):
            own, x_L = self._replicas[elements], x_N[elements]
            d_L = self._difference_L[: len(x_L)]
            self._ring_difference(x_L, own.weight, own.left, own.right, d_L)
            if self._is_bounded:
                _bound(d_L, x_L, own)
            self._compressor.encode(d_L, layout, self._wire_W[own_bytes])
            if is_sampled:
                self._error_probe.report(d_L, self._wire_W[own_bytes])
                is_sampled = False  # one piece per round is enough
            self._compressor.decode(self._wire_W[own_bytes], layout, d_L)
            self._ring_advance(d_L, own.weight, x_L)

    def exchange(self) -> None:
        """Send the bytes that `update` has encoded to both neighbors, and update the replicas of their weights."""
        communicator = self._communicator
        left, right = communicator.rank_before(1), communicator.rank_after(1)
        # In a ring of two, left and right are the same rank, which sends once.
        turns = [(right, left)] if left == right else [(right, left), (left, right)]
        memory = communicator.scratch("rows", len(turns) * len(self._wire_W), self._wire_W.device)
        receives = dict(zip((left, right), memory.view(len(turns), -1), strict=False))

        copies = [(left, self._replicas.left), (right, self._replicas.right)]
        pipeline = Pipeline(communicator, self._wire_W.device)
        exchange = Exchange(pipeline, "peer_exchange", receives, self._bucket, turns, self._contents)
        exchange.send(itertools.repeat(self._wire_W))
        for source in exchange.arrivals():
            with self._span("decode"):
                # By address: in a ring of two, both may be the same tensor.
                of_source = {copy_N.data_ptr(): copy_N for neighbour, copy_N in copies if neighbour == source}
                self._add(receives[source], of_source.values())
        pipeline.wait_for_sends()

    def _add(self, wire_W: torch.Tensor, copies: Collection[torch.Tensor]) -> None:
        for elements, own_bytes, layout in zip(self._elements, self._byte_slices, self._layouts, strict=True):
            d_L = self._difference_L[: elements.stop - elements.start]
            self._compressor.decode(wire_W[own_bytes], layout, d_L)
            for copy_N in copies:
                copy_N[elements].add_(d_L)

    def _span(self, phase: Phase) -> Span:
        weight = self._replicas.weight
        details = Details(
            "peer_exchange",
            self._bucket,
            num_elements=len(weight),
            raw_bytes=weight.nbytes,
            wire_bytes=len(self._wire_W),
        )
        return self._communicator.span(phase, details)


def _bound(difference_L: torch.Tensor, x_L: torch.Tensor, own: Replicas) -> None:
    """Clamp `own.weight + difference_L` between `x_L` and the mean of the replicas."""
    mean_L = own.weight + own.left + own.right
    divide(mean_L, 3.0, mean_L)
    difference_L.add_(own.weight)
    difference_L.copy_(clamp_to_mean(difference_L, x_L, mean_L)).sub_(own.weight)
    # Set unchanged elements to zero: their difference is zero already, but NaN for -inf, which a mask may contain.
    difference_L.masked_fill_((own.weight == x_L) & (own.weight == mean_L), 0)


def low_precision_ring(
    group: BaguaProcessGroup,
    compressor: Compressor,
    spec: TensorSpec,
    replicas: Replicas,
    *,
    hierarchical: bool,
    is_bounded: bool,
) -> tuple[Callable[[torch.Tensor], None], Callable[[], None]]:
    """Return `update` and `exchange` of the ring of ranks, or of nodes: see `LowPrecisionRing`."""
    if group.size == 1:
        return lambda x_N: None, lambda: None
    if not hierarchical or group.intra_node is None:
        ring = LowPrecisionRing(group.world, compressor, spec, replicas, is_bounded)
        return ring.update, ring.exchange
    ring_of_nodes = _RingOfNodes(group, compressor, spec, replicas, is_bounded, float(group.intra_node.size))
    return ring_of_nodes.update, ring_of_nodes.exchange


class _RingOfNodes:
    """The ring of nodes: the owners of a shard, one on each node, form a ring and exchange the means of their nodes."""

    def __init__(
        self,
        group: BaguaProcessGroup,
        compressor: Compressor,
        spec: TensorSpec,
        replicas: Replicas,
        is_bounded: bool,
        node_size: float,
    ) -> None:
        # Not the codec's blocks: replicas, and so their shards, outlive a codec such as that of the first round.
        self._hierarchical = hierarchical = Hierarchical(group, spec, DEFAULT_BLOCK)
        self._node_size = node_size
        self._ring: LowPrecisionRing | None = None
        if (owners := hierarchical.owners) is not None:
            of_shard = replicas[hierarchical.shard]
            self._ring = LowPrecisionRing(owners, compressor, hierarchical.shard_spec, of_shard, is_bounded)

    def update(self, x_N: torch.Tensor) -> None:
        """Replace `x_N` by the replicas of the owners of its shards; see `LowPrecisionRing.update`."""
        with self._hierarchical.sum_of_shard(x_N) as sum_L:
            if self._ring is not None:
                divide(sum_L, self._node_size, sum_L)
                self._ring.update(sum_L)

    def exchange(self) -> None:
        """See `LowPrecisionRing.exchange`."""
        if self._ring is not None:
            self._ring.exchange()
