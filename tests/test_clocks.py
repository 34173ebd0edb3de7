"""Times of what a GPU does: told when it has come to the end of a step, and not waited for. The test plays the GPU."""

import pytest
import torch

from torchbagua import clocks
from torchbagua.tracer import Tracer
from torchbagua.traces import Recorder

START_NS = 5_000_000_000


class PlayedGpu:
    """Comes to the event that was recorded k-th at `k` ms, as far as it has come."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.num_recorded = 0
        self.num_waits = 0


class PlayedEvent:
    def __init__(self, gpu: PlayedGpu) -> None:
        self._gpu = gpu
        self.at_ms = gpu.num_recorded
        gpu.num_recorded += 1

    def query(self) -> bool:
        return self._gpu.now_ms >= self.at_ms

    def synchronize(self) -> None:
        self._gpu.num_waits += 1
        self._gpu.now_ms = max(self._gpu.now_ms, self.at_ms)

    def elapsed_time(self, end: "PlayedEvent") -> float:
        assert self.query()
        assert end.query()
        return float(end.at_ms - self.at_ms)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PlayedGpu:
    played = PlayedGpu()
    monkeypatch.setattr(clocks.GpuClock, "now", lambda clock: PlayedEvent(played))
    monkeypatch.setattr(clocks.GpuClock, "fetch", lambda clock, values: values)
    monkeypatch.setattr(clocks.time, "perf_counter_ns", lambda: START_NS)
    return played


def heard(recorder: Recorder) -> list[tuple[str, int, int, int]]:
    """Phase, step, start and end, of which the last two are in ms since the clock was made."""
    ms = 10**6
    return [
        (event.phase, event.step, (event.start_ns - START_NS) // ms, (event.end_ns - START_NS) // ms)
        for event in recorder.events
    ]


def test_observers_hear_of_a_step_when_the_gpu_has_come_to_its_end(gpu: PlayedGpu) -> None:
    recorder = Recorder()
    tracer = Tracer([recorder])
    tracer._is_started = True
    tracer.use_gpu(torch.device("cuda"))  # event 0, with which the first step starts
    assert gpu.num_waits == 1, "to compare the clocks"

    with tracer.span("encode"):  # 1 to 2
        pass
    with tracer.span("receive", on_host=True):
        pass
    tracer.end_step()  # 3
    assert recorder.events == []
    with tracer.span("decode"):  # 4 to 5
        gpu.now_ms = 3
    tracer.end_step()  # 6
    first = [("encode", 0, 1, 2), ("receive", 0, 0, 0), ("step", 0, 0, 3)]
    assert heard(recorder) == first
    assert gpu.num_waits == 1

    tracer.measure(lambda: {"encoded": torch.tensor(3.0)}, "bucket")  # 7 to 8
    gpu.now_ms = 5
    tracer.end_step()  # 9
    assert heard(recorder) == first, "the GPU has not come to the end of the second step"
    tracer.end()
    second = [("decode", 1, 4, 5), ("step", 1, 3, 6)]
    assert heard(recorder) == [*first, *second, ("measure", 2, 7, 8), ("step", 2, 6, 9)]
    assert recorder.events[-2].values == {"encoded": 3.0}


def test_a_wait_for_what_was_done_before_is_none(gpu: PlayedGpu) -> None:
    recorder = Recorder()
    tracer = Tracer([recorder])
    tracer._is_started = True
    tracer.use_gpu(torch.device("cuda"))
    done = tracer.now()
    begun = tracer.now()
    tracer.tell("wait", begun, done)
    tracer.tell("wait", done, begun)
    tracer.end()
    assert heard(recorder) == [("wait", 0, 1, 2)]


def test_without_observers_nothing_is_recorded(gpu: PlayedGpu) -> None:
    tracer = Tracer([])
    tracer.use_gpu(torch.device("cuda"))
    with tracer.span("encode"):
        pass
    tracer.end_step()
    assert gpu.num_recorded == 0
