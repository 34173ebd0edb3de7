"""The actions of a GPU's lane and their order, tested without a GPU, with fakes of NCCL and of CUDA's streams."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from ranks import run_ranks
from torchbagua.codecs import Cast, Identity, MinMaxUInt8, Sign1Bit, TensorSpec
from torchbagua.collectives.all_reduce_mean import AllReduceMean
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.mean import Mean, RankChunks, TwoPhaseMean, centralized_mean
from torchbagua.observe.tracer import Tracer
from torchbagua.runtime import lane as lane_module
from torchbagua.runtime.lane import Lane
from torchbagua.transport import streams as side_stream
from torchbagua.transport.base import TransportMaker
from torchbagua.transport.streams import StreamHandoff
from transports import PlayedNccl, PlayedStream, StagedOnCpu, play_pinned_memory

LENGTHS = (3000, 17, 1, 5000)


def mean_of_ranks(
    compressor: Any, nodes: list[int], transport: TransportMaker | None = None, *, has_feedback: bool = False
) -> list[torch.Tensor]:
    """Return each of four ranks' second mean; both are computed in the same memory."""

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        own = tb.BaguaProcessGroup(group, nodes=nodes, transport=transport)
        spec = TensorSpec(LENGTHS, torch.float32, torch.device("cpu"), "bucket 0")
        residuals = TwoPhaseResiduals(spec.device) if has_feedback else None
        mean: Mean = TwoPhaseMean(own.world, compressor, spec, 4.0)
        if not isinstance(compressor, Identity):  # which the backend's all-reduce replaces in stream order
            mean = centralized_mean(own, compressor, spec, hierarchical=True, residuals=residuals)
        for round_index in range(2):
            x = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(10 * round_index + group.rank()))
            mean(x)
            if residuals is not None:
                residuals.commit()
        own.close()
        return x

    return run_ranks(4, body)


NODES = [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]]
EXCHANGES = [
    *((MinMaxUInt8(), nodes) for nodes in NODES),
    (MinMaxUInt8(block=None), NODES[2]),
    (Cast("float16"), NODES[1]),
]


@pytest.mark.parametrize(("compressor", "nodes"), [*EXCHANGES, (Identity(), NODES[0])], ids=str)
def test_exchanges_over_nccl_are_bitwise_equal(compressor: Any, nodes: list[int]) -> None:
    expected = mean_of_ranks(compressor, nodes)
    calls: list[str] = []
    found = mean_of_ranks(compressor, nodes, functools.partial(PlayedNccl, calls=calls))
    assert all(torch.equal(mean, wanted) for mean, wanted in zip(found, expected, strict=True))
    assert calls.count("rank 0") == 2 * {1: 2, 2: 4}[len(set(nodes))], "an all-to-all for each phase"


@pytest.mark.parametrize(
    ("compressor", "nodes"),
    [
        (MinMaxUInt8(), NODES[0]),
        (MinMaxUInt8(block=None), NODES[2]),
        (Cast("float16"), NODES[0]),
        (Identity(), NODES[2]),
    ],
    ids=str,
)
def test_chunks_coded_at_once_and_sent_by_gloo_are_bitwise_equal(
    monkeypatch: pytest.MonkeyPatch, compressor: Any, nodes: list[int]
) -> None:
    expected = mean_of_ranks(compressor, nodes)
    make = RankChunks.__init__

    def init_as_on_a_gpu(rows: RankChunks, *arguments: Any, **options: Any) -> None:
        make(rows, *arguments, **options)
        rows.are_coded_at_once = True

    monkeypatch.setattr(RankChunks, "__init__", init_as_on_a_gpu)
    found = mean_of_ranks(compressor, nodes)
    assert all(torch.equal(mean, wanted) for mean, wanted in zip(found, expected, strict=True))


@pytest.mark.parametrize("nodes", [NODES[0], NODES[2]], ids=str)
def test_error_feedback_over_nccl_is_bitwise_equal(nodes: list[int]) -> None:
    expected = mean_of_ranks(Sign1Bit(), nodes, has_feedback=True)
    assert not torch.equal(expected[0], mean_of_ranks(Sign1Bit(), nodes)[0])
    found = mean_of_ranks(Sign1Bit(), nodes, functools.partial(PlayedNccl, calls=[]), has_feedback=True)
    assert all(torch.equal(mean, wanted) for mean, wanted in zip(found, expected, strict=True))


def test_messages_of_gpus_pass_through_memory_that_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = mean_of_ranks(MinMaxUInt8(), [0, 0, 0, 0])
    log: list[str] = []
    allocated: list[int] = []
    play_pinned_memory(monkeypatch, log, allocated)
    found = mean_of_ranks(MinMaxUInt8(), [0, 0, 0, 0], StagedOnCpu)
    assert all(torch.equal(mean, wanted) for mean, wanted in zip(found, expected, strict=True))
    messages = 4 * 3 * 2  # four ranks, three peers, two phases
    assert len(allocated) == 2 * messages, "one for each sent message, and one for each received message"
    num_sent = 2 * messages
    num_reused = messages  # in the second round a buffer waits until the first round's message was copied from it
    assert len(log) == num_sent + num_reused


class PlayedSideStream:
    """Records a lane's calls to its stream."""

    device = torch.device("cuda:0")

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.token = torch.zeros(1)

    def new_future(self) -> "torch.futures.Future[Any]":
        return torch.futures.Future()

    def bind_thread(self) -> None:
        self._log.append(f"bound {threading.current_thread().name}")

    def mark(self) -> str:
        self._log.append(f"marked on {threading.current_thread().name}")
        return f"mark {len(self._log)}"

    def end(self) -> Any:
        return SimpleNamespace(query=lambda: True)

    def join(self) -> None:
        self._log.append("joined")

    @contextmanager
    def after(self, mark: str) -> Iterator[None]:
        self._log.append(f"begins after {mark}")
        yield
        self._log.append("ends")


def pretend_group(**of_private: Callable[..., object]) -> Any:
    """Return a group for a lane, whose private groups have these methods."""
    private = SimpleNamespace(**{"poll": lambda: False, **of_private})
    return SimpleNamespace(private=private, tracer=Tracer(), explain=lambda error: error, launches_on_users_group=False)


def play_streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have lanes use a PlayedSideStream of the first GPU; return the log of all these streams."""
    log: list[str] = []
    monkeypatch.setattr(lane_module, "SideStream", lambda device: PlayedSideStream(log))
    return log


@pytest.fixture
def waited() -> list[str]:
    """Return the marks of the GPU's stream that the lane of `played` has waited for."""
    return []


@pytest.fixture
def played(
    monkeypatch: pytest.MonkeyPatch, waited: list[str]
) -> Iterator[tuple[Lane, list[str], Callable[[], torch.Tensor]]]:
    log = play_streams(monkeypatch)
    group = pretend_group(wait_for_mark=lambda mark, check: waited.append(mark) or True)
    lane = Lane("lane", on_failure=lambda: None, group=group)
    lane.use_gpu(PlayedSideStream.device)

    def run() -> torch.Tensor:
        log.append(f"runs on {threading.current_thread().name}")
        return torch.ones(3)

    yield lane, log, run
    lane.close()


def test_a_job_runs_on_the_side_stream_after_its_submitters_work(
    played: tuple[Lane, list[str], Callable[[], torch.Tensor]],
) -> None:
    lane, log, run = played
    own = threading.current_thread().name
    job = lane.submit(run)
    assert job.result().sum() == 3
    assert torch.equal(lane.submit(run).future().wait(), torch.ones(3))
    lane.close()
    assert log[:4] == [f"marked on {own}", "bound lane", "begins after mark 1", "runs on lane"]
    assert log.count("runs on lane") == log.count("ends") == 2
    assert log[-1] == "joined", "memory that the lane writes to may be freed"


def test_finish_waits_for_the_job_or_for_the_stream_of_a_reader(
    played: tuple[Lane, list[str], Callable[[], torch.Tensor]], waited: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, log, run = played
    monkeypatch.setattr(lane_module, "has_reached", lambda mark: False)
    job = lane.submit(run)
    job.finish()
    job.finish(reads=True)
    places = [int(mark.removeprefix("mark ")) - 1 for mark in waited]
    assert [log[place] for place in places] == ["marked on lane", f"marked on {threading.current_thread().name}"]
    assert places == sorted(places)


def test_the_lanes_thread_selects_the_gpu_before_it_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does a thread that runs before the GPU is known. Every thread begins on GPU 0, and returns there.

    Before it uses the GPU, it also allows itself to do so while another thread captures a CUDA graph.
    """
    modes: dict[str, int] = {}

    def exchange(mode: Any) -> int:
        modes[threading.current_thread().name] = mode._obj.value
        return 0

    monkeypatch.setattr(side_stream, "_exchange_capture_mode", lambda: exchange)
    gpu = torch.device("cuda", 1)
    here = threading.local()
    used: list[tuple[str, torch.device]] = []

    def note() -> None:
        used.append((threading.current_thread().name, getattr(here, "device", torch.device("cuda", 0))))

    @contextmanager
    def within(stream: PlayedStream) -> Iterator[None]:
        note()
        yield

    class Played(PlayedStream):
        def __init__(self, device: torch.device, priority: int = 0) -> None:
            super().__init__([])

        def wait_event(self, mark: object) -> None:
            pass

        wait_stream = wait_event

    class Torch:
        class cuda:
            Stream = Played
            current_stream = staticmethod(Played)
            stream = staticmethod(within)
            set_device = staticmethod(functools.partial(setattr, here, "device"))

        class futures:
            Future = staticmethod(lambda devices: torch.futures.Future())

        empty = staticmethod(lambda size, device: torch.empty(size))

    monkeypatch.setattr(side_stream, "torch", Torch)
    lane = Lane("lane", on_failure=lambda: None, group=pretend_group())
    lane.submit(lambda: None).result()
    lane.use_gpu(gpu)
    lane.submit(lambda: None).result()
    lane.launch(lambda: torch.ones(1))
    lane.close()
    assert used == [("lane", gpu), (threading.current_thread().name, torch.device("cuda", 0))]
    assert modes == {"lane": 1}, "the mode of the training thread stays"


def test_launched_work_runs_at_once_on_the_callers_thread(
    played: tuple[Lane, list[str], Callable[[], torch.Tensor]],
) -> None:
    lane, log, run = played
    own = threading.current_thread().name
    future = lane.launch(run)
    assert log == [f"marked on {own}", "begins after mark 1", f"runs on {own}", "ends"]
    assert torch.equal(future.value(), torch.ones(3))
    assert not [thread for thread in threading.enumerate() if thread.name == "lane"]
    lane.close()
    with pytest.raises(RuntimeError, match="lane is closed"):
        lane.launch(run)


def test_work_that_fails_at_launch_ends_the_lane(
    played: tuple[Lane, list[str], Callable[[], torch.Tensor]],
) -> None:
    lane, _, run = played

    def fail() -> torch.Tensor:
        raise ValueError("no")

    for work in (fail, run):
        with pytest.raises(ValueError, match="no"):
            lane.launch(work)


def test_work_launched_while_a_job_fails_raises_the_jobs_error(
    played: tuple[Lane, list[str], Callable[[], torch.Tensor]],
) -> None:
    """The failed job has closed the groups; the launched work only notices that they are closed."""
    lane, _, _ = played

    def fail() -> None:
        raise ValueError("why")

    def run() -> torch.Tensor:
        with pytest.raises(ValueError, match="why"):
            lane.submit(fail).result()
        raise RuntimeError("the group is closed")

    with pytest.raises(ValueError, match="why"):
        lane.launch(run)


def test_tensors_of_two_gpus_are_refused(played: tuple[Lane, list[str], Callable[[], torch.Tensor]]) -> None:
    lane, _, _ = played
    lane.use_gpu(torch.device("cuda:0"))
    with pytest.raises(ValueError, match="must be on one GPU, got some on cuda:1, others on cuda:0"):
        lane.use_gpu(torch.device("cuda:1"))


def test_a_failed_job_raises_its_error_in_its_waiter(
    played: tuple[Lane, list[str], Callable[[], torch.Tensor]],
) -> None:
    lane, _, _ = played

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        lane.submit(fail).result()
    with pytest.raises(ValueError, match="no"):
        lane.launch(lambda: pytest.fail("it runs behind a failure"))


@pytest.mark.parametrize(
    ("dtype", "average"), [(torch.float32, True), (torch.bfloat16, False), (torch.float16, True), (torch.float64, True)]
)
def test_mean_in_full_precision_is_one_all_reduce(dtype: torch.dtype, average: bool) -> None:
    size = 4
    whole = torch.randint(-40, 41, (size, 1000), generator=torch.Generator().manual_seed(0)).to(dtype) / 8
    if dtype == torch.float64:
        whole += 2.0**-40  # more bits than float32 has
    expected = whole.double().sum(0) / (size if average else 1)
    recorder = tb.observe.Recorder()

    def body(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        own = tb.BaguaProcessGroup(group, observers=[recorder] if group.rank() == 0 else [])
        divisor = float(size) if average else 1.0
        mean = AllReduceMean(own.world, TensorSpec((1000,), dtype, torch.device("cpu"), "bucket 0"), divisor)
        x, out = whole[group.rank()].clone(), torch.empty(1000, dtype=dtype)
        mean(x, out)
        assert torch.equal(x, whole[group.rank()])
        mean(x)
        own.close()
        return x, out

    for x, out in run_ranks(size, body):
        assert torch.equal(x.double(), expected)
        assert torch.equal(out.double(), expected)
    messages = [(event.phase, event.operation, event.peers, event.wire_bytes) for event in recorder.events]
    ring_bytes = 1000 * dtype.itemsize * 3 // 2
    assert messages == [("send", "all_reduce", (1,), ring_bytes), ("receive", "all_reduce", (3,), ring_bytes)] * 2


class CountingStream:
    """A stream that records its calls."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.calls: list[str] = []

    def record_event(self) -> str:
        self.calls.append("mark")
        return f"mark {len(self.calls)} of {self._name}"

    def wait_event(self, mark: str) -> None:
        self.calls.append(f"waits for {mark}")


def test_tensors_pass_from_stream_to_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    training, lane = CountingStream("training"), CountingStream("lane")
    current = [training]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    handoff = StreamHandoff(torch.device("cuda"))
    handoff.wait()
    handoff.record()
    assert training.calls == ["mark"], "nothing had been recorded"
    current[0] = lane
    handoff.record()
    assert lane.calls == ["waits for mark 1 of training", "mark"], "after what was recorded before"
    current[0] = training
    handoff.wait()
    assert training.calls[1:] == ["waits for mark 2 of lane"]


def test_a_handoff_on_the_cpu_uses_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: pytest.fail("there is none"))
    handoff = StreamHandoff(torch.device("cpu"))
    for use in (handoff.wait, handoff.record, handoff.wait):
        use()
