"""Times of what a GPU does: told when it has come to the end of a step, and not waited for. The test plays the GPU."""

from collections.abc import Mapping

import pytest
import torch

from torchbagua import gpu_clock
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


class PlayedValues:
    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self._values = values

    def read(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._values.items()}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PlayedGpu:
    played = PlayedGpu()
    monkeypatch.setattr(gpu_clock.GpuClock, "now", lambda clock: PlayedEvent(played))
    monkeypatch.setattr(gpu_clock.time, "perf_counter_ns", lambda: START_NS)
    monkeypatch.setattr("torchbagua.tracer.LateValues", PlayedValues)
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
    tracer.use_gpu(torch.device("cuda"))  # event 0, and 1 is where the first step starts
    assert gpu.num_waits == 1, "to compare the clocks"

    with tracer.span("encode"):  # 2 to 3
        pass
    with tracer.span("receive", on_host=True):
        pass
    tracer.end_step()  # 4
    assert recorder.events == []
    with tracer.span("decode"):  # 5 to 6
        gpu.now_ms = 4
    tracer.end_step()  # 7
    first = [("encode", 0, 2, 3), ("receive", 0, 0, 0), ("step", 0, 1, 4)]
    assert heard(recorder) == first
    assert gpu.num_waits == 1

    tracer.measure(lambda: {"encoded": torch.tensor(3.0)}, "bucket")  # 8 to 9
    gpu.now_ms = 6
    tracer.end_step()  # 10
    assert heard(recorder) == first, "the GPU has not come to the end of the second step"
    tracer.end()
    second = [("decode", 1, 5, 6), ("step", 1, 4, 7)]
    assert heard(recorder) == [*first, *second, ("measure", 2, 8, 9), ("step", 2, 7, 10)]
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
    assert heard(recorder) == [("wait", 0, 2, 3)]


def test_without_observers_nothing_is_recorded(gpu: PlayedGpu) -> None:
    tracer = Tracer([])
    tracer.use_gpu(torch.device("cuda"))
    with tracer.span("encode"):
        pass
    tracer.end_step()
    assert gpu.num_recorded == 0
