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
    (Identity(), NODES[0]),
]


@pytest.mark.parametrize(("compressor", "nodes"), EXCHANGES, ids=str)
def test_exchanges_over_nccl_are_bitwise_equal(compressor: Any, nodes: list[int]) -> None:
    expected = mean_of_ranks(compressor, nodes)
    calls: list[str] = []
    check_bitwise_equal(expected, mean_of_ranks(compressor, nodes, functools.partial(PlayedNccl, calls=calls)))
    assert calls.count("rank 0") == 2 * {1: 2, 2: 4}[len(set(nodes))], "an all-to-all for each phase"


@pytest.mark.parametrize(
    ("compressor", "nodes"),
    [(MinMaxUInt8(), NODES[0]), (MinMaxUInt8(block=None), NODES[2]), (Identity(), NODES[2])],
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
    check_bitwise_equal(expected, mean_of_ranks(compressor, nodes))


def check_bitwise_equal(expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("nodes", [NODES[0], NODES[2]], ids=str)
def test_error_feedback_over_nccl_is_bitwise_equal(nodes: list[int]) -> None:
    expected = mean_of_ranks(Sign1Bit(), nodes, has_feedback=True)
    assert not torch.equal(expected[0], mean_of_ranks(Sign1Bit(), nodes)[0])
    check_bitwise_equal(
        expected, mean_of_ranks(Sign1Bit(), nodes, functools.partial(PlayedNccl, calls=[]), has_feedback=True)
    )


def test_messages_of_gpus_pass_through_memory_that_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = mean_of_ranks(MinMaxUInt8(), [0, 0, 0, 0])
    log: list[str] = []
    allocated: list[int] = []
    play_pinned_memory(monkeypatch, log, allocated)
    check_bitwise_equal(expected, mean_of_ranks(MinMaxUInt8(), [0, 0, 0, 0], StagedOnCpu))
    messages = 4 * 3 * 2  # four ranks, three peers, two phases
    assert len(allocated) == 2 * messages, "one for each sent message, and one for each received message"
    # In the second round a buffer waits until the first round's message was copied from it.
    assert len(log) == 2 * messages + messages


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


Played = tuple[Lane, list[str], Callable[[], torch.Tensor]]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    """Return a lane of the first GPU, the log of its stream, and work for it, which the log shows too."""
    log = play_streams(monkeypatch)
    group = pretend_group(wait_for_mark=lambda mark, check: log.append(f"waits for {mark}") or True)
    lane = Lane("lane", on_failure=lambda: None, group=group)
    lane.use_gpu(PlayedSideStream.device)

    def run() -> torch.Tensor:
        log.append(f"runs on {threading.current_thread().name}")
        return torch.ones(3)

    yield lane, log, run
    lane.close()


def test_the_lanes_thread_selects_the_gpu_before_it_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does a thread that runs before the GPU is known. Every thread begins on GPU 0, and returns there.

    Before it uses the GPU, it also allows itself to do so while another thread captures a CUDA graph.
    """
    modes, here, used = dict[str, int](), threading.local(), list[tuple[str, int]]()

    def exchange(mode: Any) -> int:
        modes[threading.current_thread().name] = mode._obj.value
        return 0

    @contextmanager
    def within(stream: PlayedStream) -> Iterator[None]:
        used.append((threading.current_thread().name, getattr(here, "device", torch.device("cuda", 0)).index))
        yield

    class Played(PlayedStream):
        wait_event = wait_stream = lambda self, mark: None

    played = lambda device, priority=0: Played([])  # noqa: E731
    set_device = functools.partial(setattr, here, "device")
    cuda = SimpleNamespace(Stream=played, current_stream=played, stream=within, set_device=set_device)
    futures = SimpleNamespace(Future=lambda devices: torch.futures.Future())
    empty = lambda size, device: torch.empty(size)  # noqa: E731
    monkeypatch.setattr(side_stream, "torch", SimpleNamespace(cuda=cuda, futures=futures, empty=empty))
    monkeypatch.setattr(side_stream, "_exchange_capture_mode", lambda: exchange)
    lane = Lane("lane", on_failure=lambda: None, group=pretend_group())
    lane.submit(lambda: None).result()
    lane.use_gpu(torch.device("cuda", 1))
    lane.submit(lambda: None).result()
    lane.launch(lambda: torch.ones(1))
    lane.close()
    assert used == [("lane", 1), (threading.current_thread().name, 0)]
    assert modes == {"lane": 1}, "the mode of the training thread stays"


def test_jobs_and_launched_work_run_on_the_side_stream_after_their_callers_work(played: Played) -> None:
    """Launched work runs at once on the caller's thread."""
    lane, log, run = played
    own = threading.current_thread().name
    assert torch.equal(lane.launch(run).value(), torch.ones(3))
    assert log == [f"marked on {own}", "begins after mark 1", f"runs on {own}", "ends"]
    log.clear()
    assert lane.submit(run).result().sum() == 3
    assert torch.equal(lane.submit(run).future().wait(), torch.ones(3))
    lane.close()
    assert log[:4] == [f"marked on {own}", "bound lane", "begins after mark 1", "runs on lane"]
    assert log[-1] == "joined", "memory that the lane writes to may be freed"
    with pytest.raises(RuntimeError, match="lane is closed"):
        lane.launch(run)


@pytest.mark.parametrize("fails_in", ["job", "launched work", "job while work is launched"])
def test_a_failure_ends_the_lane(played: Played, fails_in: str) -> None:
    lane, _, _ = played

    def fail() -> torch.Tensor:
        raise ValueError("no")

    def notice() -> torch.Tensor:
        """Notice only that the groups are closed, by a job that failed."""
        with pytest.raises(ValueError, match="no"):
            lane.submit(fail).result()
        raise RuntimeError("the group is closed")

    calls = {
        "job": lambda: lane.submit(fail).result(),
        "launched work": lambda: lane.launch(fail),
        "job while work is launched": lambda: lane.launch(notice),
    }
    with pytest.raises(ValueError, match="no"):
        calls[fails_in]()
    with pytest.raises(ValueError, match="no"):
        lane.launch(lambda: pytest.fail("it runs behind a failure"))
    with pytest.raises(ValueError, match="must be on one GPU, got some on cuda:1, others on cuda:0"):
        lane.use_gpu(torch.device("cuda:1"))


@pytest.mark.parametrize(
    ("dtype", "average"), [(torch.float32, True), (torch.bfloat16, False), (torch.float16, True), (torch.float64, True)]
)
def test_mean_in_full_precision_is_one_all_reduce(dtype: torch.dtype, average: bool) -> None:
    size, recorder = 4, tb.observe.Recorder()
    whole = torch.randint(-40, 41, (size, 1000), generator=torch.Generator().manual_seed(0)).to(dtype) / 8
    if dtype == torch.float64:
        whole += 2.0**-40  # more bits than float32 has
    expected = (whole.double().sum(0) / (size if average else 1)).to(dtype)

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, observers=[recorder] if group.rank() == 0 else [])
        spec = TensorSpec((1000,), dtype, torch.device("cpu"), "bucket 0")
        mean = AllReduceMean(own.world, spec, float(size) if average else 1.0)
        x, out = whole[group.rank()].clone(), torch.empty(1000, dtype=dtype)
        mean(x, out)
        assert torch.equal(x, whole[group.rank()])
        mean(x)
        own.close()
        assert torch.equal(x, expected)
        assert torch.equal(out, expected)

    run_ranks(size, body)
    messages = [(event.phase, event.operation, event.peers, event.wire_bytes) for event in recorder.events]
    ring_bytes = 1000 * dtype.itemsize * 3 // 2
    assert messages == [("send", "all_reduce", (1,), ring_bytes), ("receive", "all_reduce", (3,), ring_bytes)] * 2


def test_tensors_pass_from_stream_to_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream waits for what was recorded before on another one; on a CPU there are no streams."""
    calls: list[str] = []

    def use(name: str) -> None:
        stream = SimpleNamespace(
            record_event=lambda: calls.append(f"{name} marks") or f"mark {len(calls)}",
            wait_event=lambda mark: calls.append(f"{name} waits for {mark}"),
        )
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    handoff = StreamHandoff(torch.device("cuda"))
    use("training")
    handoff.wait()
    handoff.record()
    use("lane")
    handoff.record()
    use("training")
    handoff.wait()
    assert calls == ["training marks", "lane waits for mark 1", "lane marks", "training waits for mark 3"]
    on_cpu = StreamHandoff(torch.device("cpu"))
    on_cpu.record()
    on_cpu.wait()
    assert len(calls) == 4
