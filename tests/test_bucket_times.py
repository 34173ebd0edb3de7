"""The times at which a benchmark's buckets were sent, from the events of a recorder."""

import sys

import pytest

from source_tree import REPOSITORY
from torchbagua.observe.events import CommEvent, Phase

sys.path.append(str(REPOSITORY / "benchmarks"))
from bucket_times import BucketTimes, measure_buckets, table_of_buckets
from schedule import FRAME_BYTES_PER_PAYLOAD_BYTE


def test_buckets_are_measured_against_the_schedule_floor() -> None:
    def event(phase: Phase, start_ms: float, end_ms: float, bucket: str, wire_bytes: int = 0) -> CommEvent:
        times_ns = (round(1e6 * start_ms), round(1e6 * end_ms))
        operation = "" if phase == "bucket" else "all_to_all"
        return CommEvent(phase, *times_ns, bucket=bucket, operation=operation, wire_bytes=wire_bytes)

    def step(start_ms: float, slower_ms: float) -> list[CommEvent]:
        return [
            event("bucket", start_ms + 3, start_ms + 10 + slower_ms, "0"),
            event("send", start_ms + 4, start_ms + 8, "0", 500),
            event("send", start_ms + 5, start_ms + 9, "0", 500),
            event("receive", start_ms + 6, start_ms + 9, "0", 1000),
            event("bucket", start_ms + 11, start_ms + 20, "1"),
            event("send", start_ms + 12, start_ms + 18, "1", 2000),
            event("receive", start_ms + 13, start_ms + 19, "1", 2000),
            CommEvent("send", *[round(1e6 * start_ms)] * 2, bucket="progress", operation="agreement", wire_bytes=8),
        ]

    rate = 8e6 * FRAME_BYTES_PER_PAYLOAD_BYTE  # 1000 bytes a millisecond
    steps_ns = [(round(1e6 * start_ms), round(1e6 * (start_ms + 50))) for start_ms in (100, 200, 300)]
    events = [part for start_ms, slower in ((100, 0), (200, 0.5), (300, 40)) for part in step(start_ms, slower)]
    measured = measure_buckets(events, steps_ns, [0.002, 0.010], rate)
    assert measured == [
        BucketTimes(1000, 2.0, 4.0, 9.0, 10.5, pytest.approx(3.0)),
        BucketTimes(2000, 10.0, 12.0, 19.0, 20.0, pytest.approx(12.0)),
    ]
    assert table_of_buckets(measured).splitlines()[2:] == [
        "| 0 | 0.00 | 2.0 | 4.0 | 9.0 | 10.5 | 3.0 | 7.5 |",
        "| 1 | 0.00 | 10.0 | 12.0 | 19.0 | 20.0 | 12.0 | 8.0 |",
    ]
    with pytest.raises(ValueError, match="averaged 2 buckets, but the schedule has 1"):
        measure_buckets(events, steps_ns, [0.002], rate)
