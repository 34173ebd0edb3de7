"""Times of the host's work, and of a GPU's work, for which the host does not wait. The test simulates the GPU."""

import pytest
import torch

from torchbagua import _concurrency
from torchbagua.observe import Recorder, observed
from torchbagua.observe.events import Details, Run
from torchbagua.observe.observed import HostClock, ObservedTracer, TimedPhase, TimedStep

START_NS = 5_000_000_000


class SimulatedGpu:
    """Reaches the event that was recorded k-th at `k` ms. Its current time is `now_ms`."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.num_recorded = 0
        self.num_waits = 0


class SimulatedEvent:
    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self.at_ms = gpu.num_recorded
        gpu.num_recorded += 1

    def query(self) -> bool:
        return self._gpu.now_ms >= self.at_ms

    def synchronize(self) -> None:
        self._gpu.num_waits += 1
        self._gpu.now_ms = max(self._gpu.now_ms, self.at_ms)

    def elapsed_time(self, end: "SimulatedEvent") -> float:
        assert self.query()
        assert end.query()
        return float(end.at_ms - self.at_ms)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    simulated = SimulatedGpu()
    monkeypatch.setattr(observed.GpuClock, "now", lambda clock: SimulatedEvent(simulated))
    monkeypatch.setattr(observed.GpuClock, "fetch", lambda clock, values: values)
    monkeypatch.setattr(_concurrency, "perf_counter_ns", lambda: START_NS)
    return simulated


def start_tracer(recorder: Recorder) -> ObservedTracer:
    tracer = ObservedTracer([recorder])
    tracer.start(Run(id="", algorithm="", description="", rank=0, nodes=(0,), settings={}, board=None))
    return tracer


def events_of(recorder: Recorder) -> list[tuple[str, int, int, int]]:
    """Return phase, step, start and end of the events; start and end are in ms since the clock was created."""
    ms = 10**6
    return [
        (event.phase, event.step, (event.start_ns - START_NS) // ms, (event.end_ns - START_NS) // ms)
        for event in recorder.events
    ]


def test_observers_are_notified_of_a_step_when_the_gpu_has_reached_its_end(gpu: SimulatedGpu) -> None:
    recorder = Recorder()
    tracer = start_tracer(recorder)
    tracer.use_gpu(torch.device("cuda"))  # event 0, at which the first step starts
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
    assert events_of(recorder) == first
    assert gpu.num_waits == 1

    tracer.measure(lambda: {"encoded": torch.tensor(3.0)}, "bucket")  # 7 to 8
    gpu.now_ms = 5
    tracer.end_step()  # 9
    assert events_of(recorder) == first, "the GPU has not come to the end of the second step"
    tracer.end()
    second = [("decode", 1, 4, 5), ("step", 1, 3, 6)]
    assert events_of(recorder) == [*first, *second, ("measure", 2, 7, 8), ("step", 2, 6, 9)]
    assert recorder.events[-2].values == {"encoded": 3.0}


def test_events_that_the_gpu_does_not_reach_in_time_are_given_up(gpu: SimulatedGpu) -> None:
    """With a warning, and after one wait: each later step would be waited for as long."""
    recorder = Recorder()
    tracer = start_tracer(recorder)

    def wait(event: SimulatedEvent) -> None:
        gpu.num_waits += 1
        if gpu.num_waits > 1:
            raise RuntimeError("the GPU did not finish within 1 s")

    tracer.use_gpu(torch.device("cuda"), wait)
    for _ in range(3):
        tracer.end_step()
    with pytest.warns(RuntimeWarning, match="the events since step 0 are lost: the GPU did not finish within 1 s"):
        tracer.end()
    assert gpu.num_waits == 2
    assert recorder.events == []


def test_a_phase_that_raises_is_not_reported() -> None:
    recorder = Recorder()
    tracer = start_tracer(recorder)
    with pytest.raises(ZeroDivisionError), tracer.span("encode"):
        raise ZeroDivisionError
    tracer.end_step()
    assert [event.phase for event in recorder.events] == ["step"]


def step(number: int, *phases: tuple[str, int, int], end: int | None, lane_end: int | None = None) -> TimedStep:
    timed = [TimedPhase(phase, start, stop, Details()) for phase, start, stop in phases]
    return TimedStep(number, "Algorithm", timed, end, lane_end)


def resolve(clock: HostClock, timed: TimedStep) -> list[tuple[str, int, int, int]]:
    events = clock.resolve(timed, waits=False)
    assert events is not None, "on the host all times are known"
    assert {event.algorithm for event in events} <= {"Algorithm"}
    return [(event.phase, event.step, event.start_ns, event.end_ns) for event in events]


def test_lane_work_that_overlaps_the_next_step_belongs_to_it() -> None:
    clock = HostClock()
    resolve(clock, step(2, end=5))
    old, new, apply = ("send", 10, 40), ("send", 41, 50), ("apply", 38, 52)
    assert resolve(clock, step(3, old, new, apply, end=60, lane_end=40)) == [
        ("send", 3, 10, 40),
        ("apply", 3, 38, 52),
        ("step", 3, 5, 60),
    ]
    late = ("receive", 45, 55)  # the lane reports it after the step was reported
    assert resolve(clock, step(4, late, end=None)) == [("send", 4, 41, 50), ("receive", 4, 45, 55)]
    assert resolve(clock, step(4, ("wait", 55, 59), end=90)) == [("wait", 3, 55, 59), ("step", 4, 60, 90)]


def test_on_a_gpu_lane_work_that_overlaps_the_next_step_belongs_to_it(gpu: SimulatedGpu) -> None:
    recorder = Recorder()
    tracer = start_tracer(recorder)
    tracer.use_gpu(torch.device("cuda"))  # event 0
    with tracer.span("send"):  # 1 to 2
        pass
    tracer.end_step_of_lane(0)  # 3
    with tracer.span("send"), tracer.span("apply"):  # 4 to 7; 5 to 6
        pass
    tracer.end_step()  # 8
    tracer.end_step_of_lane(0)  # 9, too late
    assert recorder.events == []
    tracer.deliver()
    first = [("send", 0, 1, 2), ("apply", 0, 5, 6), ("step", 0, 0, 8)]
    assert events_of(recorder) == [*first, ("send", 1, 4, 7)]
    tracer.end_step()
    tracer.end()
    assert events_of(recorder)[4:] == [("step", 1, 8, 10)]
