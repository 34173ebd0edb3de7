"""Figures that are computed from events: sums, shares and the table."""

import pytest

import torchbagua as tb
from torchbagua.observe.events import CommEvent, Run
from torchbagua.observe.figures import Figures, busy_ns
from torchbagua.observe.summary import Summary, table_of


def test_busy_time_counts_overlaps_once() -> None:
    assert [busy_ns(spans) for spans in ([], [(3, 5)], [(1, 1), (1, 1)], [(0, 5), (5, 9)])] == [0, 2, 0, 9]
    assert [busy_ns(spans) for spans in ([(0, 10), (2, 4), (8, 12)], [(8, 12), (0, 3)])] == [12, 7]


def one_step(step: int = 0) -> list[CommEvent]:
    """Return a step of 100 ms: 40 of communication, 10 of them waited for; 1000 elements in 1000 bytes to each of 2."""
    ms = 10**6

    def event(phase, start_ms, end_ms, **details):
        return CommEvent(phase, start_ms * ms, end_ms * ms, step, "ByteGradAlgorithm", **details)

    message = {"num_elements": 1000, "raw_bytes": 4000, "wire_bytes": 1000}
    return [
        event("backward", 10, 60),
        event("encode", 30, 35),
        event("send", 35, 50, peers=(1,), **message),
        event("send", 36, 55, peers=(2,), **message),
        event("receive", 35, 45, peers=(1,), **message),
        event("receive", 45, 55, peers=(2,), **message),
        event("reduce", 55, 60),
        event("decode", 60, 70),
        event("bucket", 30, 70, bucket="gradient bucket 0"),
        event("measure", 70, 71, values={"encoded": 5.0, "left out": 3.0, "residual of what is sent": 4.0}),
        event("measure", 71, 72, bucket="gradient bucket 1", values={"residual of what is sent": 3.0}),
        event("wait", 60, 70),
        event("step", 0, 100),
    ]


def test_figures_of_a_step() -> None:
    figures = Figures()
    figures.add(one_step())
    figures.add(one_step(step=1))
    assert (figures.num_steps, figures.step_ns, figures.wait_ns) == (2, 200 * 10**6, 20 * 10**6)
    assert figures.communication_ns == 80 * 10**6
    assert figures.overlap == 0.75
    assert figures.network_ns == 40 * 10**6
    assert (figures.bytes_sent, figures.bytes_received) == (4000, 4000)
    assert (figures.bits_per_element, figures.ratio) == (8.0, 4.0)
    assert figures.gbit_per_s == pytest.approx(8 * 4000 / 0.04 / 1e9)
    assert figures.bucket_ns == [40 * 10**6] * 2
    assert figures.relative_error == pytest.approx(0.6)
    assert figures.residual_norm == pytest.approx(5.0), "of a step, however many were sampled"


def test_figures_of_few_events() -> None:
    figures = Figures()
    assert (figures.bits_per_element, figures.ratio, figures.gbit_per_s, figures.overlap) == (0.0, 0.0, 0.0, 1.0)
    assert (figures.relative_error, figures.residual_norm) == (None, None)
    row = str(Summary()).splitlines()[3].split()
    assert row == ["?", "0", "0.00", "0.00", "-", *["0.00"] * 6, "0.000", "-", "-", "-"]
    means = [CommEvent("reduce", start, start + 1, peers=(peer,)) for start, peer in ((0, 2), (5, 3))]
    figures.add([*means, CommEvent("step", 0, 10)])
    assert figures.latest == {"peer": 3}, "of the last mean"


def test_the_table_has_a_row_for_each_rank() -> None:
    summaries, about = [], {"algorithm": "ByteGradAlgorithm", "description": "ByteGradAlgorithm()"}
    for rank in range(2):
        summary = tb.observe.Summary()
        run = Run(id="1", rank=rank, nodes=(0, 0), settings={}, board=None, **about)
        run.failures.extend(["Broken stopped in step 3: OSError: no disk"] * rank)
        summary.on_start(run)
        for step in range(3):
            for event in one_step(step):
                summary.on_comm(event)
        summary.on_end()
        with pytest.raises(ValueError, match="Summary: a summary serves one attachment; create another Summary"):
            summary.check()
        summaries.append(summary)
    lines = table_of(summaries).splitlines()
    assert lines[0] == "ByteGradAlgorithm(), 2 ranks"
    rows = [line.split() for line in lines if line.split()[:1] in (["0"], ["1"])]
    ms = ["100.00", "10.00", "75", "5.00", "34.00", "20.00", "5.00", "10.00", "0.00"]
    assert rows == [[str(rank), "3", *ms, "0.002", "8.00", "4.00x", "0.00"] for rank in range(2)]
    assert lines[-1] == "rank 1: Broken stopped in step 3: OSError: no disk"
    assert all(len(line) <= 120 for line in lines)
