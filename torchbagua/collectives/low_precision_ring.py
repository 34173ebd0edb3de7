"""The ring of low-precision decentralized training: compressed differences of weights, to two neighbours.

Shape suffixes: N elements, L elements of a piece, W wire bytes.
"""

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from torchbagua.codecs.base import DEFAULT_BLOCK, Compressor, divide
from torchbagua.codecs.blocks import TensorSpec
from torchbagua.codecs.lookup import check_compression, needs_feedback
from torchbagua.collectives.clamp import clamp_to_mean
from torchbagua.collectives.encoding_error import EncodingErrorProbe
from torchbagua.collectives.exchange import ElementCounts, Exchange, Pipeline
from torchbagua.collectives.hierarchical import Hierarchical
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.native import ring
from torchbagua.observe.events import Details, Phase
from torchbagua.observe.tracer import Span
from torchbagua.transport.communicator import Communicator

# What the arithmetic of one piece touches stays in the caches. On a GPU there is one piece, and few launches. A codec
# with one range per piece leaves more out in a longer one.
_PIECE_ELEMENTS = 1 << 18
_RANGE_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Replicas:
    """Copies of weights in their `sum_dtype`, beside the weights, which neighbours hold bit-equal copies of.

    Attributes:
        weight: own last agreed weights; the right neighbour's `left` and the left neighbour's `right`.
        left, right: the neighbours' last agreed weights. One tensor in a ring of two may be both.
    """

    weight: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor

    def __getitem__(self, elements: slice) -> "Replicas":
        """Return views of some elements."""
        return Replicas(self.weight[elements], self.left[elements], self.right[elements])


def check_ring_compression(owner: str, compression: str | Compressor | None) -> None:
    """Raise ValueError, which names `owner`, unless differences of weights can be sent by this codec."""
    check_compression(f"{owner}: compression", compression)
    if needs_feedback(compression):
        raise ValueError(
            f"{owner}: compression must not be one that needs error feedback: weights become what neighbours were "
            f"sent, so what is left out of a difference is lost; got {compression!r}"
        )


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
        spec: the weights.
        replicas: changed in place, in the dtype that sums of the weights are formed in.
        is_bounded: keep each element between x and the mean of w, L and R, as `clamp_to_mean` does.
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
        piece_elements = _PIECE_ELEMENTS if compressor.codes_blocks_alone else _RANGE_ELEMENTS
        num_pieces = max(1, len(replicas.weight) // piece_elements) if device.type == "cpu" else 1
        spec = replace(spec, dtype=dtype)
        layout = compressor.layout(spec, spec.even_cuts(num_pieces, compressor.block_elements))
        self._elements, self._byte_slices = layout.elements, layout.byte_slices
        self._layouts = [layout.chunk(index) for index in range(num_pieces)]
        self._error_probe = EncodingErrorProbe(communicator.tracer, compressor, self._layouts[0], spec.name)
        self._wire_W = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
        of_all = [len(replicas.weight)] * communicator.size
        self._contents = ElementCounts(sent=of_all, received=of_all, element_bytes=replicas.weight.element_size())
        longest = max(elements.stop - elements.start for elements in layout.elements)
        self._difference_L = torch.empty(longest, dtype=dtype, device=device)
        # Shorter weights have replicas in float32, float64 ones in float64; the operations take neither.
        operations = torch.ops.torchbagua if dtype_of_weights == torch.float32 else ring
        self._ring_difference, self._ring_advance = operations.ring_difference, operations.ring_advance

    def update(self, x_N: torch.Tensor) -> None:
        """Replace `x_N`, of any dtype, by the own replica that its compressed difference leads to; nothing is sent."""
        with self._span("encode"):
            self._update(x_N)

    def _update(self, x_N: torch.Tensor) -> None:
        is_sampled = self._error_probe.is_wanted
        for elements, own_bytes, layout in zip(self._elements, self._byte_slices, self._layouts, strict=True):
            own, x_L = self._replicas[elements], x_N[elements]
            d_L = self._difference_L[: len(x_L)]
            self._ring_difference(x_L, own.weight, own.left, own.right, d_L)
            if self._is_bounded:
                _bound(d_L, x_L, own)
            self._compressor.encode(d_L, layout, self._wire_W[own_bytes])
            if is_sampled:
                self._error_probe.tell(d_L, self._wire_W[own_bytes])
                is_sampled = False  # the first piece will do
            self._compressor.decode(self._wire_W[own_bytes], layout, d_L)
            self._ring_advance(d_L, own.weight, x_L)

    def exchange(self) -> None:
        """Send what `update` has encoded to both neighbours, and bring the copies of theirs up to date.

        Raises:
            CommunicationError: a neighbour is gone or did not take part within the group's timeout.
        """
        communicator = self._communicator
        left, right = communicator.rank_before(1), communicator.rank_after(1)
        # Between two ranks, left and right are the same one, which sends once.
        turns = [(right, left)] if left == right else [(right, left), (left, right)]
        memory = communicator.scratch("rows", len(turns) * len(self._wire_W), self._wire_W.device)
        receives = dict(zip((left, right), memory.view(len(turns), -1), strict=False))

        copies = [(left, self._replicas.left), (right, self._replicas.right)]
        pipeline = Pipeline(communicator, self._wire_W.device)
        exchange = Exchange(pipeline, "peer_exchange", receives, self._bucket, turns, self._contents)
        exchange.send(itertools.repeat(self._wire_W))
        for source in exchange.arrivals():
            with self._span("decode"):
                # By address: in a ring of two, both may be one.
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
    """Keep `own.weight + difference_L` between `x_L` and the mean of the replicas."""
    mean_L = own.weight + own.left + own.right
    divide(mean_L, 3.0, mean_L)
    difference_L.add_(own.weight)
    difference_L.copy_(clamp_to_mean(difference_L, x_L, mean_L)).sub_(own.weight)
    # Where nothing has changed that is zero already, but of -inf, in a mask say, NaN.
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
    """Return `update` and `exchange` of the ring of ranks, or of nodes: see `LowPrecisionRing`.

    Args:
        group: whose ranks take part.
        compressor: of the differences; it encodes the weights' dtype.
        spec: the weights.
        replicas: as long as the weights; where nodes take part, a rank uses its own shard of them.
        hierarchical: where there are several nodes with several ranks: the ring is of nodes, what a node holds is the
            mean of its ranks, and each of them gets the result.
        is_bounded: see `LowPrecisionRing`.
    """
    if group.size == 1:
        return lambda x_N: None, lambda: None
    if not hierarchical or group.intra_node is None:
        ring = LowPrecisionRing(group.world, compressor, spec, replicas, is_bounded)
        return ring.update, ring.exchange
    ring_of_nodes = _RingOfNodes(group, compressor, spec, replicas, is_bounded, float(group.intra_node.size))
    return ring_of_nodes.update, ring_of_nodes.exchange


class _RingOfNodes:
    """The ring of nodes: each rank that owns a shard is in the ring of its owners, with the mean of its node."""

    def __init__(
        self,
        group: BaguaProcessGroup,
        compressor: Compressor,
        spec: TensorSpec,
        replicas: Replicas,
        is_bounded: bool,
        node_size: float,
    ) -> None:
        # Not the codec's blocks: replicas outlive a codec, as that of the first round, and so do their shards.
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
