"""The algorithms in one process, on stacked numpy arrays, written from the formulas and independent of torchbagua.

Arrays are float32 or float64. No codec encodes float64: such arrays are summed in float64 and sent uncompressed.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

F32 = np.float32
Array = npt.NDArray[np.floating]
Coded = Callable[[Array], Array]  # returns a block after encode and decode


def rne(y: Array) -> Array:
    """Round half to even, for magnitudes below 2^22."""
    return (y + F32(12582912)) - F32(12582912)


def quantise_block(x: Array, num_steps: int = 255, header: Coded = lambda bounds: bounds) -> Array:
    """Return a block after a min-max codec's encode and decode, by default MinMaxUInt8's.

    `header` returns minimum and maximum as the header represents them, NaN if it cannot.
    """
    if not np.all(np.abs(x) < F32(2.0**126)):  # NaN compares false
        return np.full_like(x, np.nan)
    low, high = header(np.array([x.min(), x.max()]) + F32(0))
    if np.isnan(low) or np.isnan(high):
        return np.full_like(x, np.nan)
    pivot = low if low > 0 else high if high < 0 else F32(0)
    spread = high - low
    inverse, step = (F32(0), F32(0)) if spread < F32(2.0**-118) else (F32(num_steps) / spread, spread / F32(num_steps))
    upper = rne((high - pivot) * inverse)
    lower = upper - F32(num_steps)
    code = np.clip(rne((x - pivot) * inverse), lower, upper) - lower
    return np.clip(pivot + (code + lower) * step, low, high)


def bfloat16_outwards(bounds: Array) -> Array:
    """Return the largest bfloat16 no larger than the first bound, and the smallest no smaller than the second."""
    cut = (bounds.view(np.int32) & -0x10000).view(F32)
    is_inside = np.array([cut[0] > bounds[0], cut[1] < bounds[1]])
    next_away = (cut.view(np.int32) + 0x10000).view(F32)
    outwards = np.where(is_inside, next_away, cut) + F32(0)
    return np.where(np.abs(outwards) < F32(2.0**126), outwards, F32(np.nan))


def quantise_block_4_bits(x: Array) -> Array:
    """Return a block after MinMaxUInt4's encode and decode."""
    return quantise_block(x, 15, bfloat16_outwards)


def mean_magnitude(x: Array) -> np.float32:
    """Return the mean of |x|, summed in 32 lanes, which are then summed by halves."""
    lanes = np.zeros(32, F32)
    for first in range(0, x.size, 32):
        part = np.abs(x[first : first + 32])
        lanes[: part.size] += part
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return F32(lanes[0] / F32(x.size))


def sign_block(x: Array) -> Array:
    """Return a block after Sign1Bit's encode and decode."""
    with np.errstate(over="ignore"):
        scale = mean_magnitude(x)
    if not scale < F32(2.0**126):  # NaN compares false
        return np.full_like(x, np.nan)
    return np.copysign(scale, x)


def quantise(x: Array, segments: Sequence[int], block: int = 2048, coded: Coded = quantise_block) -> Array:
    """Encode and decode blocks of at most `block` elements that do not cross the ends of segments."""
    result = np.empty_like(x)
    start = 0
    for length in segments:
        for first in range(start, start + length, block):
            stop = min(first + block, start + length)
            result[first:stop] = coded(x[first:stop])
        start += length
    return result


def ordered_sum(rows: Sequence[Array]) -> Array:
    """Sum rows in order, in float32, or in float64 if they are float64."""
    total = rows[0].astype(np.float64 if rows[0].dtype == np.float64 else F32, copy=True)
    for row in rows[1:]:
        total = total + row
    return total


def gradient_allreduce(rows: Sequence[Array], nodes: Sequence[int] | None = None) -> Array:
    """Return the mean in full precision; with `nodes`, node sums are added in node order."""
    return ordered_sum(node_sums(rows, nodes)) / F32(len(rows))


def bytegrad(
    rows: Sequence[Array],
    segments: Sequence[int],
    nodes: Sequence[int] | None = None,
    block: int = 2048,
    coded: Coded = quantise_block,
    within_nodes: Coded = lambda row: row,
) -> Array:
    """Q(mean_j Q(g_j)); with `nodes`, over the node sums of W(g_j), and W of the result, where W is `within_nodes`."""
    if rows[0].dtype == np.float64:
        return gradient_allreduce(rows, nodes)
    sums = node_sums([within_nodes(row) for row in rows], nodes)
    sent = [quantise(row.astype(F32), segments, block, coded) for row in sums]
    return within_nodes(quantise(ordered_sum(sent) / F32(len(rows)), segments, block, coded))


class TwoPhaseResiduals:
    """The compressed mean of stacked arrays, with the residuals of ranks' (or nodes') sent values and of the mean.

    With a momentum, it averages velocities; the velocity of an element that is sent becomes zero if it `forgets`.
    """

    def __init__(
        self,
        quantise: Callable[[Array], Array],
        nodes: Sequence[int] | None = None,
        momentum: float | None = None,
    ) -> None:
        self.quantise, self.nodes, self.momentum, self.forgets = quantise, nodes, momentum, True
        self.sent: list[Array] | None = None
        self.mean = F32(0)
        self.velocities: list[Array] = []

    def __call__(self, rows: Sequence[Array]) -> Array:
        """Return the mean, and update the residuals."""
        sums = node_sums(rows, self.nodes)
        if self.momentum is not None:
            before = self.velocities or [np.zeros_like(row) for row in sums]
            sums = [velocity * F32(self.momentum) + row for velocity, row in zip(before, sums, strict=True)]
        full = sums if self.sent is None else [row + residual for row, residual in zip(sums, self.sent, strict=True)]
        wires = [self.quantise(row) for row in full]
        self.sent = [row - wire for row, wire in zip(full, wires, strict=True)]
        if self.momentum is not None:
            pairs = zip(sums, wires, strict=True)
            self.velocities = [np.where(self.forgets & (wire != 0), F32(0), velocity) for velocity, wire in pairs]
        mean = ordered_sum(wires) / F32(len(rows)) + self.mean
        result = self.quantise(mean)
        self.mean = mean - result
        return result


def orthonormal(vectors: Array) -> Array:
    """Apply the Gram-Schmidt process to the rows of a float32 array, with inner products in float64."""
    rank, length = vectors.shape
    padded = np.zeros((rank, -(-length // 1024) * 1024))
    padded[:, :length] = vectors
    total = np.zeros((rank, rank))
    for piece in np.split(padded, padded.shape[1] // 1024, axis=1):
        lanes = np.zeros((rank, rank, 32))
        for part in np.split(piece, 32, axis=1):
            lanes += part[:, None] * part
        while lanes.shape[2] > 1:
            lanes = lanes[..., : lanes.shape[2] // 2] + lanes[..., lanes.shape[2] // 2 :]
        total += lanes[..., 0]
    factor, inverse = np.zeros((rank, rank)), np.zeros((rank, rank))
    for j in range(rank):
        rest = total[:, j].copy()
        for k in range(j):
            rest -= factor[:, k] * factor[j, k]
        is_new = rest[j] > total[j, j] * 2.0**-40
        inverse[j, j] = 1 / np.sqrt(rest[j]) if is_new else 0
        factor[:, j] = rest * inverse[j, j]
    for j in range(rank):
        for i in range(j + 1, rank):
            below = np.float64(0)
            for k in range(j, i):
                below += factor[i, k] * inverse[k, j]
            inverse[i, j] = -(below * inverse[i, i])
    result = np.zeros_like(padded)
    for i in range(rank):
        for j in range(i + 1):
            result[i] += padded[j] * inverse[i, j]
    return result[:, :length].astype(F32)


class PowerSGD:
    """Averages the gradient of one matrix over all ranks as a product of two factors."""

    def __init__(
        self,
        first: Array,
        product: Callable[..., Array],
        nodes: Sequence[int] | None = None,
        sent: Callable[[Array], Array] = lambda x: x,
        *,
        keeps_factor: bool = True,
    ) -> None:
        self.first, self.product, self.nodes, self.sent, self.keeps_factor = first, product, nodes, sent, keeps_factor
        self.right = np.zeros_like(first)
        self.errors: list[Array] = []

    def mean(self, rows: Sequence[Array]) -> Array:
        return self.sent(ordered_sum([self.sent(row) for row in node_sums(rows, self.nodes)]) / F32(len(rows)))

    def __call__(self, rows: Sequence[Array]) -> Array:
        """Return the mean of matrices."""
        errors = self.errors or [F32(0) for _ in rows]
        full = [row + error for row, error in zip(rows, errors, strict=True)]
        kept = self.right if self.keeps_factor else np.zeros_like(self.right)
        right = orthonormal(np.where(kept.any(1, keepdims=True), kept, self.first))
        left = orthonormal(self.mean([self.product(right, matrix, is_transposed=True) for matrix in full]))
        self.right = self.mean([self.product(left, matrix, is_transposed=False) for matrix in full])
        result = np.zeros_like(full[0])
        for left_vector, right_vector in zip(left, self.right, strict=True):
            result += left_vector[:, None] * right_vector
        self.errors = [matrix - result for matrix in full]
        return result


def qadam_gradient(
    rows: Sequence[Array], momentum: Array, beta1: float, average: Callable[[Sequence[Array]], Array]
) -> Array:
    """The gradient that explains the ranks' averaged momenta: (average(m_j) - b1 m) / (1 - b1)."""
    if momentum.dtype == np.float64:
        return average(rows)
    history, share = momentum * F32(beta1), F32(1 - beta1)
    return (average([row * share + history for row in rows]) - history) / share


def qadam_step(
    weight: Array,
    gradient: Array,
    momentum: Array,
    second_moment: Array,
    *,
    num_warm: int,
    num_since: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    sqrt: Callable[[Array], Array] = np.sqrt,
) -> tuple[Array, Array]:
    """Return weight and momentum after step `num_since` past the warm-up of `num_warm` steps."""
    number = weight.dtype.type
    kept = weight * number(1 - lr * weight_decay if decoupled else 1)
    slope = gradient + kept * number(0 if decoupled else weight_decay)
    moved = momentum * number(betas[0]) + slope * number(1 - betas[0])
    denominator = sqrt(second_moment) / number((1 - betas[1] ** num_warm) ** 0.5) + number(eps)
    correction1 = 1 - betas[0] ** (num_warm + num_since)
    most = number(max(1, (1 - betas[0]) / (1 - betas[1]) ** 0.5) * correction1)
    distance = np.clip(moved / denominator, -most, most) * number(lr / correction1)
    return kept - np.where(second_moment == 0, number(0), distance), moved


def node_sums(rows: Sequence[Array], nodes: Sequence[int] | None) -> list[Array]:
    """Return the sums of the rows of each node, in node order; without nodes, the rows themselves."""
    if nodes is None:
        return list(rows)
    return [
        ordered_sum([row for row, on in zip(rows, nodes, strict=True) if on == node]) for node in dict.fromkeys(nodes)
    ]


def peers_mean(rows: Sequence[Array], nodes: Sequence[int] | None, num_before: int) -> list[Array]:
    """Return each rank's mean with its peer of round `num_before` in shift_one; with `nodes`, of the nodes' means."""
    means = node_means(rows, nodes)
    half = len(means) // 2
    peers = [(num_before + r) % half + half if r < half else (r - half - num_before) % half for r in range(len(means))]
    return to_ranks([(mean + means[peer]) / F32(2) for mean, peer in zip(means, peers, strict=True)], nodes)


def moved(x: Array, difference: Array, snapshot: Array, *, is_buffer: bool) -> Array:
    """Return x + (mean - snapshot); a buffer, which decays, stays between its own value and the mean."""
    if not is_buffer:
        return x + difference
    mean = snapshot + difference
    return np.clip(x + difference, np.minimum(x, mean), np.maximum(x, mean))


class LowPrecisionRing:
    """Low-precision decentralized training on stacked arrays; `w` contains the replicas of all members of the ring.

    Buffers are in full precision, and stay between their own value and the mean of the replicas. float64 is also in
    full precision.
    """

    def __init__(
        self,
        rows: Sequence[Array],
        segments: Sequence[int],
        nodes: Sequence[int] | None = None,
        *,
        is_buffer: bool,
        block: int = 2048,
        coded: Coded = quantise_block,
    ) -> None:
        self.segments, self.nodes, self.is_buffer, self.block, self.coded = segments, nodes, is_buffer, block, coded
        self.w = node_means(rows, nodes)

    def round(self, rows: Sequence[Array]) -> list[Array]:
        """Return the new weights of all ranks, given their weights after the optimizer's step."""
        n, w = len(self.w), self.w
        number = w[0].dtype.type
        differences = [
            x + w[r - 1] / number(3) + w[(r + 1) % n] / number(3) - (number(5) / number(3)) * w[r]
            for r, x in enumerate(node_means(rows, self.nodes))
        ]
        if self.is_buffer:
            for r, x in enumerate(node_means(rows, self.nodes)):
                mean = (w[r] + w[r - 1] + w[(r + 1) % n]) / F32(3)
                differences[r] = np.clip(differences[r] + w[r], np.minimum(x, mean), np.maximum(x, mean)) - w[r]
        is_full = self.is_buffer or number == np.float64
        sent = differences if is_full else [quantise(d, self.segments, self.block, self.coded) for d in differences]
        self.w = [old + d for old, d in zip(w, sent, strict=True)]
        return to_ranks(self.w, self.nodes)


def node_means(rows: Sequence[Array], nodes: Sequence[int] | None) -> list[Array]:
    """Return the mean of each node, in node order; without nodes, the rows themselves."""
    if nodes is None:
        return list(rows)
    sizes = [list(nodes).count(node) for node in dict.fromkeys(nodes)]
    return [total / F32(size) for total, size in zip(node_sums(rows, nodes), sizes, strict=True)]


def to_ranks(results: Sequence[Array], nodes: Sequence[int] | None) -> list[Array]:
    """Return each rank's node's result; without nodes, the results themselves."""
    if nodes is None:
        return list(results)
    order = list(dict.fromkeys(nodes))
    return [results[order.index(node)] for node in nodes]


def largest_of(block: int, kept: int) -> Coded:
    """Return a function that encodes and decodes a block with TopK, which keeps `kept` of `block` elements."""
    return lambda x: largest_of_block(x, -(-x.size * kept // block))


def largest_of_block(x: Array, kept: int) -> Array:
    """Return a block after TopK's encode and decode."""
    return in_8_bits(x, np.argsort(-np.abs(x), kind="stable")[:kept])


def in_8_bits(x: Array, places: npt.NDArray[np.integer]) -> Array:
    """Return a block after encode and decode by a sparse codec that keeps these places."""
    if not np.all(np.abs(x) < F32(2.0**126)):  # NaN compares false
        return np.full_like(x, np.nan)
    largest = np.abs(x[places]).max()
    narrow = largest < F32(2.0**-118)
    inverse, step = (F32(0), F32(0)) if narrow else (F32(127) / largest, largest / F32(127))
    result = np.zeros_like(x)
    result[places] = rne(x[places] * inverse) * step + F32(0)
    return result


def largest_run_of(block: int, kept: int) -> Coded:
    """Return a function that encodes and decodes a block with BlockK, which keeps `kept` of `block` elements."""
    return lambda x: largest_run_of_block(x, -(-x.size * kept // block))


def largest_run_of_block(x: Array, kept: int) -> Array:
    """Return a block after BlockK's encode and decode."""
    starts = [min(start, x.size - kept) for start in range(0, x.size, kept)]
    sums = [sum(float(value) ** 2 for value in x[start : start + kept]) for start in starts]
    return in_8_bits(x, np.arange(kept) + starts[sums.index(max(sums))])
