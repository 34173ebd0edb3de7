"""What communication costs, from events: the figures of a number of steps."""

import math
from collections import Counter
from collections.abc import Iterable

from torchbagua.events import CommEvent

FLOAT32_BITS = 32

# What the lane or the network is busy with; "bucket" lies around these, and "measure" is work for observers.
_COMMUNICATION = ("encode", "send", "receive", "reduce", "decode")
_NETWORK = ("send", "receive")


def busy_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Return for how long at least one of these (start, end) was under way."""
    total, last = 0, 0
    for start, end in sorted(spans):
        if end > last:
            total += end - max(start, last)
            last = end
    return total


class Figures:
    """Sums over the events that have been added; times in ns, of this rank.

    Attributes:
        num_steps: steps that have ended.
        step_ns, wait_ns: of the training thread: whole steps, and what they waited for communication (exposed time).
        communication_ns: in which the lane or the network was busy, hidden behind training or not.
        network_ns: in which a message was under way.
        phase_ns: by phase, also where phases were under way at the same time.
        bytes_sent, bytes_received: on the wire, without headers of the transport.
        num_elements, raw_bytes: of what was sent.
        bucket_ns: of each bucket's run.
        squares: by name, sums of squares of the norms that were measured.
        latest: by name, the last of other values; and `peer`, where messages go to one peer at a time.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.step_ns = self.wait_ns = self.communication_ns = self.network_ns = 0
        self.phase_ns: Counter[str] = Counter()
        self.bytes_sent = self.bytes_received = self.num_elements = self.raw_bytes = 0
        self.bucket_ns: list[int] = []
        self.squares: Counter[str] = Counter()
        self.latest: dict[str, float] = {}
        self._num_samples = 0
        self._sampled_step = -1

    def add(self, events: Iterable[CommEvent]) -> None:
        """Add the events of whole steps; of what overlaps, all together."""
        communication: list[tuple[int, int]] = []
        network: list[tuple[int, int]] = []
        for event in events:
            phase, duration_ns = event.phase, event.end_ns - event.start_ns
            self.phase_ns[phase] += duration_ns
            if phase in _COMMUNICATION:
                communication.append((event.start_ns, event.end_ns))
                if phase in _NETWORK:
                    network.append((event.start_ns, event.end_ns))
                if phase == "send":
                    self.bytes_sent += event.wire_bytes
                    self.num_elements += event.num_elements
                    self.raw_bytes += event.raw_bytes
                    if event.operation == "peer_exchange":
                        self.latest["peer"] = event.peers[0]
                elif phase == "receive":
                    self.bytes_received += event.wire_bytes
            elif phase == "bucket":
                self.bucket_ns.append(duration_ns)
            elif phase == "wait":
                self.wait_ns += duration_ns
            elif phase == "step":
                self.num_steps += 1
                self.step_ns += duration_ns
            elif phase == "measure":
                if event.step != self._sampled_step:
                    self._sampled_step = event.step
                    self._num_samples += 1
                for name, value in event.values.items():
                    self.squares[name] += value * value  # type: ignore[assignment]
            elif phase == "apply":
                self.latest.update(event.values)
        self.communication_ns += busy_ns(communication)
        self.network_ns += busy_ns(network)

    @property
    def bits_per_element(self) -> float:
        """Wire bits for each element that was sent, agreements included; 0 where nothing was."""
        return 8 * self.bytes_sent / self.num_elements if self.num_elements else 0.0

    @property
    def ratio(self) -> float:
        """How much less that is than float32; 0 where nothing was sent."""
        return FLOAT32_BITS / self.bits_per_element if self.num_elements else 0.0

    @property
    def overlap(self) -> float:
        """The share of communication that training did not wait for, 0 to 1; 1 where there was none."""
        return 1 - min(1.0, self.wait_ns / self.communication_ns) if self.communication_ns else 1.0

    @property
    def gbit_per_s(self) -> float:
        """Bits sent a second while messages were under way, in 10^9; 0 where there were none."""
        return 8 * self.bytes_sent / self.network_ns if self.network_ns else 0.0

    @property
    def relative_error(self) -> float | None:
        """What encoding left out of the sampled values, as a fraction of their norm; None where none were sampled."""
        encoded = self.squares.get("encoded")
        return None if encoded is None else math.sqrt(self.squares["left out"] / encoded) if encoded else 0.0

    @property
    def residual_norm(self) -> float | None:
        """Norm of this rank's residuals in a sampled step, all together; None where there are none."""
        found = [square for name, square in self.squares.items() if name.startswith("residual")]
        return math.sqrt(sum(found) / self._num_samples) if found else None
