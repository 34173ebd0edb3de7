"""The cost of communication, computed from events: the figures of a number of steps."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from torchbagua.observe.events import CommEvent

FLOAT32_BITS = 32

# The phases that tables and charts show.
PHASES = ("encode", "send", "receive", "reduce", "decode", "apply")

# The phases in which the lane or the network is busy. "bucket" encloses these, and "measure" is work for observers.
_COMMUNICATION = ("encode", "send", "receive", "reduce", "decode")
_NETWORK = ("send", "receive")


def busy_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of these (start, end) intervals."""
    total, last = 0, 0
    for start, end in sorted(spans):
        if end > last:
            total += end - max(start, last)
            last = end
    return total


class Figures:
    """Sums over the events of one rank. Times are in nanoseconds.

    Attributes:
        num_steps: the number of completed steps.
        step_ns: the total duration of these steps.
        wait_ns: how long training waited for communication in these steps (exposed time).
        communication_ns: how long the lane or the network was busy, whether or not training overlapped it.
        network_ns: how long a message was in flight or waited for.
        phase_ns: the total duration of each phase, by name. Phases may overlap.
        bytes_sent: bytes on the wire, without transport headers.
        bytes_received: bytes on the wire, without transport headers.
        num_elements: the number of elements sent.
        num_rounds: the number of rounds whose mean was applied to the weights; 0 if ranks do not average in rounds.
        staleness_steps: the total staleness of these rounds: the steps between a snapshot and the use of its mean.
        bucket_ns: the duration of each bucket of each step.
        latest: the latest sampled values, by name; and `peer`, if the mean is taken with a single peer.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.step_ns = self.wait_ns = self.communication_ns = self.network_ns = 0
        self.phase_ns: Counter[str] = Counter()
        self.bytes_sent = self.bytes_received = self.num_elements = 0
        self.num_rounds = self.staleness_steps = 0
        self.bucket_ns: list[int] = []
        self.latest: dict[str, float] = {}
        self._encoded_squared = self._residual_squared = 0.0
        self._residuals: dict[tuple[str, str], float] = {}  # by bucket and name

    def add(self, events: Sequence[CommEvent]) -> None:
        """Add events up to the end of a step."""
        communication: list[tuple[int, int]] = []
        network: list[tuple[int, int]] = []
        buckets: dict[str, list[tuple[int, int]]] = {}
        for event in events:
            self.bytes_sent += event.bytes_sent
            self.bytes_received += event.bytes_received
            if event.phase == "send":
                self.num_elements += event.num_elements
            elif event.phase == "reduce" and event.peers:
                self.latest["peer"] = event.peers[0]
            span = (event.start_ns, event.end_ns)
            self.phase_ns[event.phase] += event.end_ns - event.start_ns
            if event.phase in _COMMUNICATION:
                communication.append(span)
                if event.phase in _NETWORK:
                    network.append(span)
            elif event.phase == "bucket":
                buckets.setdefault(event.bucket, []).append(span)
            elif event.phase == "wait":
                self.wait_ns += event.duration_ns
            elif event.phase == "step":
                self.num_steps += 1
                self.step_ns += event.duration_ns
            elif event.phase == "measure":
                self._add_measured(event)
            elif event.phase == "apply":
                self.latest.update(event.values)
                if "rounds" in event.values:
                    self.num_rounds += 1
                    self.staleness_steps += int(event.values["staleness in steps"])
        self.communication_ns += busy_ns(communication)
        self.network_ns += busy_ns(network)
        self.bucket_ns += map(busy_ns, buckets.values())

    def _add_measured(self, event: CommEvent) -> None:
        self._encoded_squared += event.values.get("encoded", 0.0) ** 2
        self._residual_squared += event.values.get("left out", 0.0) ** 2
        for name, norm in event.values.items():
            if name.startswith("residual"):
                self._residuals[event.bucket, name] = norm

    @property
    def bits_per_element(self) -> float:
        """Bits on the wire per element sent, including agreements; 0 if nothing was sent."""
        return 8 * self.bytes_sent / self.num_elements if self.num_elements else 0.0

    @property
    def ratio(self) -> float:
        """The 32 bits of float32 divided by `bits_per_element`; 0 if nothing was sent."""
        return FLOAT32_BITS / self.bits_per_element if self.num_elements else 0.0

    @property
    def overlap(self) -> float:
        """The share of communication that training did not wait for, from 0 to 1; 1 without communication."""
        return 1 - min(1.0, self.wait_ns / self.communication_ns) if self.communication_ns else 1.0

    @property
    def gbit_per_s(self) -> float:
        """Bits sent / 10^9 per second in which messages were in flight or waited for; 0 without messages."""
        return 8 * self.bytes_sent / self.network_ns if self.network_ns else 0.0

    @property
    def relative_error(self) -> float | None:
        """The norm of the sampled residuals relative to the norm of the encoded values; None without samples."""
        if not self._encoded_squared:  # NaN is not zero
            return None
        return math.sqrt(self._residual_squared / self._encoded_squared)

    @property
    def residual_norm(self) -> float | None:
        """The norm of all residuals of this rank at their last sample; None without residuals."""
        return math.hypot(*self._residuals.values()) if self._residuals else None
