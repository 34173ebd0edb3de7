"""Determines when each bucket of a training step was sent, and the earliest time at which that was possible."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from schedule import earliest_transfers_s, transfer_s
from table import table
from torchbagua.observe.events import CommEvent


@dataclass(frozen=True)
class BucketTimes:
    """One bucket on one rank. Times are in ms since the step began, medians over several steps.

    Attributes:
        sent_bytes: bytes that this rank sends for the bucket, without headers.
        ready_ms: when the bucket's last gradient is ready, as recorded without communication.
        first_byte_ms: when the first message was passed to the transport.
        last_byte_ms: when the lane had received the last message.
        done_ms: when the bucket's gradients were averaged.
        earliest_ms: when the bucket's last byte can have been sent, if the wire is never idle while a bucket is ready.
    """

    sent_bytes: int
    ready_ms: float
    first_byte_ms: float
    last_byte_ms: float
    done_ms: float
    earliest_ms: float


def measure_buckets(
    events: Sequence[CommEvent],
    steps_ns: Sequence[tuple[int, int]],
    ready_s: Sequence[float],
    bits_per_second: float | None,
) -> list[BucketTimes]:
    """Determine the buckets' times from the events of one rank; buckets in the order in which they are ready.

    Args:
        events: events of a gradient algorithm.
        steps_ns: begin and end of each step, on the clock of the events.
        ready_s: when each bucket is ready, in seconds since the step began.
        bits_per_second: rate of the network; None if it has no limit.

    Raises:
        ValueError: a step has a different number of buckets than `ready_s`.
    """
    steps = []
    for begin_ns, end_ns in steps_ns:
        inside = [event for event in events if begin_ns <= event.start_ns < end_ns and event.operation != "agreement"]
        whole = sorted((event for event in inside if event.phase == "bucket"), key=lambda event: event.start_ns)
        if len(whole) != len(ready_s):
            raise ValueError(f"the step averaged {len(whole)} buckets, but the schedule has {len(ready_s)}")
        step = []
        for bucket in whole:
            own = [event for event in inside if event.bucket == bucket.bucket]
            sends = [event for event in own if event.phase == "send"]
            received_ns = [event.end_ns for event in own if event.phase == "receive"]
            times_ns = (min(event.start_ns for event in sends), max(received_ns), bucket.end_ns)
            num_bytes = sum(event.bytes_sent for event in sends)
            step.append((num_bytes, *((time_ns - begin_ns) / 1e6 for time_ns in times_ns)))
        steps.append(step)
    medians = [
        [statistics.median(column) for column in zip(*bucket, strict=True)] for bucket in zip(*steps, strict=True)
    ]
    transfers_s = [0.0 if bits_per_second is None else transfer_s(bucket[0], bits_per_second) for bucket in medians]
    earliest_s = earliest_transfers_s(ready_s, transfers_s)
    return [
        BucketTimes(round(num_bytes), 1e3 * ready, first_ms, last_ms, done_ms, 1e3 * earliest)
        for (num_bytes, first_ms, last_ms, done_ms), ready, earliest in zip(medians, ready_s, earliest_s, strict=True)
    ]


def table_of_buckets(buckets: Sequence[BucketTimes]) -> str:
    """Return a Markdown table. The last column is the delay of each bucket's mean relative to the schedule floor."""
    head = ["bucket", "MB sent", "ready, ms", "first byte", "last byte", "averaged", "schedule floor", "gap"]
    rows = []
    for number, bucket in enumerate(buckets):
        times_ms = (bucket.ready_ms, bucket.first_byte_ms, bucket.last_byte_ms, bucket.done_ms, bucket.earliest_ms)
        gap_ms = bucket.done_ms - bucket.earliest_ms
        rows.append(
            [str(number), f"{bucket.sent_bytes / 1e6:.2f}", *(f"{time_ms:.1f}" for time_ms in (*times_ms, gap_ms))]
        )
    return table(head, rows)
