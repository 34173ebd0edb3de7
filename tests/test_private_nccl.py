"""The life cycle of private NCCL groups, without a GPU: connect at attach, watch, and close in bounded time."""

import functools
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from caught import torchbagua_warnings
from ranks import TIMEOUT, gloo_group, run_ranks
from torchbagua.collectives import process_group
from torchbagua.collectives.process_group import PrivateGroups
from torchbagua.compat.bagua.node_mean import LowPrecisionDecentralizedAlgorithm as NodeMeanAlgorithm
from torchbagua.observe.tracer import Tracer
from torchbagua.runtime import lane as lane_module
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.lane import Job, Lane
from torchbagua.runtime.parameters import BaguaTensor
from torchbagua.transport import communicator
from torchbagua.transport import nccl as private_nccl
from torchbagua.transport.base import COLLECTIVES
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.gloo import GlooTransport
from transports import StagedOnCpu

GPU = torch.device("cuda", 0)
SHORT = timedelta(seconds=1)


class Event:
    """An event in a stream, which completes when the test sets `is_done`."""

    def __init__(self, *, is_done: bool) -> None:
        self.is_done, self.is_forbidden = is_done, False

    def query(self) -> bool:
        if self.is_forbidden:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return self.is_done


class Nccl:
    """A fake of torch's NCCL groups, and of their GPU."""

    def __init__(self) -> None:
        self.calls: dict[str, list[str]] = {}  # on the groups of each rank, by the name of its thread; no collectives
        self.collectives: list[str] = []  # all ranks' calls of these while they connected
        self.timeouts: list[timedelta] = []
        self.hangs: set[str] = set()  # the calls that do not return
        self.events: list[Event] = []
        self.is_stuck = True  # whether the GPU finishes no work that is launched from now on, until an abort
        self.is_capturing = False
        self._end = threading.Event()
        self.end = self._end.set
        self.use_gpu: Callable[[Lane, torch.device], None]  # gives a lane a stream of this fake

    def make_group(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> "Group":
        self.timeouts.append(timeout)
        return Group(functools.partial(self.do, threading.current_thread().name))

    def record_event(self) -> Event:
        self.events.append(Event(is_done=not self.is_stuck))
        return self.events[-1]

    def finish(self) -> None:
        for event in self.events:
            event.is_done = True

    def wait_event(self, event: Event) -> None:
        """Queue a wait of the GPU."""

    def synchronize(self) -> None:
        """Wait for the GPU, which has nothing to do."""

    def do(self, rank: str, call: str, *_: Any) -> None:
        if call in COLLECTIVES:
            self.collectives.append(call)
        else:
            self.calls.setdefault(rank, []).append(call)
        if call == "abort":  # the operations end, with partial results
            self.finish()
        if call in self.hangs:
            self._end.wait(60)


class Group:
    """A fake NCCL group. A launched collective is done when the events that are recorded afterwards are."""

    _device_types = (GPU,)

    def __init__(self, do: Callable[..., None]) -> None:
        self.shutdown, self.abort = functools.partial(do, "shutdown"), functools.partial(do, "abort")
        self.eager_connect_single_device = lambda device: do(f"connect on {device}")
        self.allreduce = functools.partial(do, "all_reduce")
        self._allgather_base, self.alltoall_base = (
            functools.partial(do, "all_gather"),
            functools.partial(do, "all_to_all"),
        )

    def _get_backend(self, device: torch.device) -> "Group":
        return self


class Stream:
    """A fake of the lane's stream: threads wait for no work, and every mark is an event of the fake GPU."""

    device, token = GPU, torch.ones(1)
    new_future = staticmethod(torch.futures.Future)
    after = staticmethod(lambda mark: nullcontext())
    bind_thread = join = staticmethod(lambda: None)

    def __init__(self, nccl: Nccl) -> None:
        self.mark = self.end = nccl.record_event


def launch(communicator: Communicator, purpose: str) -> None:
    class GpuTensor(torch.Tensor):
        device = GPU

    communicator.all_reduce(torch.ones(1).as_subclass(GpuTensor), purpose, list)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fake NCCL, and pass the first GPU to runners as the device of every tensor."""
    fake, use_device = Nccl(), tb.extend.Runner.use_device
    fake.use_gpu = Lane.use_gpu
    names = ("cuda", "empty_like", "device", "Tensor")
    on_cpu = SimpleNamespace(zeros=lambda length, device: torch.zeros(length), **{n: getattr(torch, n) for n in names})
    for owner, replaced in (
        (tb.extend.Runner, {"use_device": lambda runner, device: use_device(runner, GPU)}),
        (lane_module, {"SideStream": lambda device: Stream(fake)}),
        (Lane, {"use_gpu": lambda lane, device: None}),  # the lanes that a test chooses have streams
        (Tracer, {"use_gpu": lambda tracer, device, wait: None}),
        (communicator, {"has_nccl": lambda group: True}),
        (private_nccl, {"nccl_group": fake.make_group, "torch": on_cpu}),
        (
            torch.cuda,
            {
                "set_device": lambda device: None,
                "Stream": lambda device: fake,
                "stream": lambda stream: nullcontext(),
                "is_current_stream_capturing": lambda: fake.is_capturing,
                "current_stream": lambda device=None: fake,
            },
        ),
    ):
        for name, value in replaced.items():
            monkeypatch.setattr(owner, name, value)
    yield fake
    fake.end()


def attach_small_model(
    group: dist.ProcessGroup, algorithm: tb.Algorithm | str, timeout: timedelta = TIMEOUT
) -> tuple[Callable[[], None], tb.Attachment]:
    """Attach to a small model; return a function that takes a step, and the attachment."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(3, 2), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    nodes = [0] * (group.size() - 1) + [1] if group.size() > 2 else None
    own = tb.BaguaProcessGroup(group, nodes=nodes)
    attachment = tb.attach(ddp, optimizer, algorithm, process_group=own, timeout=timeout)

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    return step, attachment


@pytest.mark.parametrize(
    ("algorithm", "size", "setting"),
    [
        ("decentralized", 2, "CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ("diloco", 2, "NCCL_LAUNCH_ORDER_IMPLICIT=1"),
        ("async", 2, "CUDA_DEVICE_MAX_CONNECTIONS=8"),
        ("bytegrad", 3, "CUDA_DEVICE_MAX_CONNECTIONS=1"),  # over nodes; rank 1 owns no shard
        (tb.GradientAllReduceAlgorithm(hierarchical=True), 3, ""),
    ],
    ids=str,
)
def test_groups_are_connected_at_attach_and_shut_down_in_order(
    nccl: Nccl, algorithm: tb.Algorithm | str, size: int, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attach warns of settings with which two groups deadlock, if the algorithm uses two at once."""
    if setting:
        monkeypatch.setenv(*setting.split("="))

    def body(group: dist.ProcessGroup) -> None:
        step, attachment = attach_small_model(group, algorithm)
        num_groups = 2 if size == 3 and group.rank() != 1 else 1
        calls = nccl.calls[threading.current_thread().name]
        assert calls == ["connect on cuda:0"] * num_groups, "before the first step"
        assert set(nccl.collectives) == COLLECTIVES, "NCCL opens a connection at its first use"
        step()
        attachment.detach()
        assert calls[num_groups:] == ["shutdown"] * num_groups

    with torchbagua_warnings() as messages:
        run_ranks(size, body)
    assert bool(messages) == ("=1" in setting and size == 2)
    assert all(re.search(f"{setting} is set.* different orders deadlock", message) for message in messages)
    assert min(nccl.timeouts) > TIMEOUT, "NCCL's watchdog, which ends the process, comes after ours"


@pytest.mark.parametrize("algorithm", ["async", "bytegrad"])
def test_if_one_rank_raises_all_ranks_abort_without_waiting(nccl: Nccl, algorithm: str) -> None:
    """The other ranks end in order, if the error has not reached them, or with the error that they get."""
    nccl.hangs = {"shutdown"}
    stepped = threading.Barrier(3)

    def body(group: dist.ProcessGroup) -> None:
        step, attachment = attach_small_model(group, algorithm)
        with suppress(ZeroDivisionError, tb.CommunicationError), attachment:
            step()
            stepped.wait()
            start_s = time.monotonic()
            if group.rank() == 1:
                raise ZeroDivisionError("on one rank")
        assert time.monotonic() - start_s < TIMEOUT.total_seconds() / 2

    run_ranks(3, body)
    for calls in nccl.calls.values():
        assert calls.count("abort") == sum("connect" in call for call in calls)
        assert "shutdown" not in calls


def test_the_standalone_hook_shuts_down_the_groups_that_it_has_used(nccl: Nccl) -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(nn.Linear(3, 2), process_group=group)
        impl = tb.ByteGradAlgorithm().reify(tb.BaguaProcessGroup(group, nodes=[0, 0, 1]))
        ddp.register_comm_hook(impl, tb.comm_hook)
        ddp(torch.ones(1, 3)).sum().backward()
        impl.close()
        tb.ByteGradAlgorithm().reify(tb.BaguaProcessGroup(group, nodes=[0, 0, 1])).close()

    run_ranks(3, body)
    for rank, calls in nccl.calls.items():
        num_groups = 1 if rank == "rank 1" else 2
        assert [call for call in calls if "connect" not in call] == ["shutdown"] * num_groups + ["abort"] * num_groups


def test_detach_takes_bounded_time_whatever_nccl_does(nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl.hangs = {"shutdown", "abort"}
    monkeypatch.setattr(private_nccl, "LONGEST_ABORT_S", 1.0)

    def body(group: dist.ProcessGroup) -> None:
        step, attachment = attach_small_model(group, "decentralized", SHORT)
        step()
        start_s = time.monotonic()
        attachment.detach()
        assert time.monotonic() - start_s < 5

    with pytest.warns(RuntimeWarning, match="NCCL did not shut down within 1 s; aborting the NCCL groups"):
        run_ranks(2, body)
    for calls in nccl.calls.values():
        assert calls == ["connect on cuda:0", "shutdown", "abort"]


def test_connecting_to_a_missing_rank_raises_within_the_timeout(nccl: Nccl) -> None:
    nccl.hangs = {"all_to_all"}
    with pytest.raises(
        tb.CommunicationError,
        match=r"^torchbagua: connecting NCCL over the world group failed on rank 0: NCCL did not connect within 1 s$",
    ):
        run_ranks(2, lambda group: attach_small_model(group, "decentralized", SHORT))
    assert all(calls == ["connect on cuda:0", "abort"] for calls in nccl.calls.values())


@pytest.fixture
def own(nccl: Nccl) -> Iterator[tb.BaguaProcessGroup]:
    """The group of a weight algorithm on one rank."""
    own = tb.BaguaProcessGroup(gloo_group(dist.HashStore(), 0, 1), timeout=SHORT)
    own.launch_on_lane()
    yield own
    own.close()


@pytest.fixture
def lane(nccl: Nccl, own: tb.BaguaProcessGroup) -> Iterator[Lane]:
    """The lane of this group."""
    lane = Lane("watched", on_failure=own.close, group=own)
    nccl.use_gpu(lane, GPU)
    yield lane
    nccl.end()
    lane.close()


def launch_in_job(lane: Lane, own: tb.BaguaProcessGroup, bucket: int = 0) -> Job[None]:
    return lane.submit(lambda: launch(own.world, f"all_to_all of weight bucket {bucket}"))


OVERDUE = (
    r"^torchbagua: all_to_all of weight bucket 0 over the world group failed on rank 0: NCCL did not finish within "
    r"1 s: a rank died or is blocked; if it is only busy, .* pass a longer attach\(\.\.\., timeout=.*$"
)


@pytest.mark.parametrize("waits", [True, False])
def test_an_overdue_nccl_operation_ends_the_lane(
    nccl: Nccl, own: tb.BaguaProcessGroup, lane: Lane, waits: bool
) -> None:
    """A job launched it and returned; the error is raised by the result of that job, and of later jobs.

    The host waits for the GPU only before it reads what a job computes. An abort that does not return changes nothing.
    """
    nccl.hangs = {"abort"} if waits else set()
    good, start_s = launch_in_job(lane, own, 1), time.monotonic()
    threading.Timer(0.2, nccl.finish).start()
    good.finish()
    assert 0.1 < time.monotonic() - start_s < 5
    bad = launch_in_job(lane, own)
    if waits:
        with pytest.raises(tb.CommunicationError, match=OVERDUE):
            bad.finish()
        assert time.monotonic() - start_s < 5
        return
    bad.result()
    lane.submit(lambda: None).result()
    time.sleep(SHORT.total_seconds() + 0.5)
    assert nccl.calls["MainThread"] == ["abort"]
    for job in (bad, lane.submit(lambda: None)):
        with pytest.raises(tb.CommunicationError, match=OVERDUE):
            job.result()
    with pytest.raises(tb.CommunicationError, match="failed on rank 0: the group is closed"):
        launch(own.world, "all_to_all of weight bucket 1")


def test_a_capture_of_a_graph_does_not_end_the_lane(nccl: Nccl, own: tb.BaguaProcessGroup, lane: Lane) -> None:
    """While it forbids to ask whether an operation has ended, this is unknown; it is no failure of the GPU."""
    job = launch_in_job(lane, own, 1)
    job.result()
    for event in nccl.events:
        event.is_forbidden = True

    def end_capture() -> None:
        nccl.finish()
        for event in nccl.events:
            event.is_forbidden = False

    threading.Timer(0.3, end_capture).start()
    job.finish()
    lane.submit(lambda: None).result()
    assert not lane.has_failed
    assert not own.private.poll()


def test_a_step_within_a_capture_is_refused(nccl: Nccl) -> None:
    """A replay would not call the hooks of the step, so ranks would silently train apart."""

    def body(group: dist.ProcessGroup) -> None:
        step, attachment = attach_small_model(group, "decentralized")
        step()
        stepped.wait()
        with suppress(ZeroDivisionError), attachment:
            with pytest.raises(RuntimeError, match="a CUDA graph is being captured; capture parts of the model"):
                step()
            stepped.wait()
            raise ZeroDivisionError

    stepped = threading.Barrier(2, action=lambda: setattr(nccl, "is_capturing", True))
    run_ranks(2, body)


@pytest.mark.parametrize("closes", [True, False])
def test_another_failure_also_fails_launched_operations(own: tb.BaguaProcessGroup, lane: Lane, closes: bool) -> None:
    """As when gloo reports that a rank died, while NCCL still waits for it.

    Or a later job closes the groups, which aborts the operations in flight, long before its error ends the lane.
    """

    def fail() -> None:
        if closes:
            own.close()
            time.sleep(0.3)
        raise tb.CommunicationError("rank 1 is gone")

    launched = launch_in_job(lane, own)
    launched.result()
    failing = lane.submit(fail)
    for wait in (launched.finish, failing.result, *([] if closes else [launched.result])):
        with pytest.raises(tb.CommunicationError, match="rank 1 is gone"):
            wait()


# In these, a round begins and a round ends in a few steps.
WRITERS: dict[str, tb.Algorithm] = {
    "decentralized": tb.DecentralizedAlgorithm(),
    "low precision": tb.LowPrecisionDecentralizedAlgorithm(),
    "low precision over nodes": tb.LowPrecisionDecentralizedAlgorithm(),
    "diloco": tb.DiLoCoAlgorithm(1),
    "streaming diloco": tb.DiLoCoAlgorithm(4, fragments=2, delay=1),
    "async": tb.AsyncModelAverageAlgorithm(sync_interval_ms=1, warmup_steps=2),
    "async, rarely": tb.AsyncModelAverageAlgorithm(sync_interval_ms=30_000, warmup_steps=2),
    "async, warm-up": tb.AsyncModelAverageAlgorithm(warmup_steps=1000),
    "Bagua's node mean": NodeMeanAlgorithm(),
}


@pytest.mark.parametrize(
    ("moment", "name"),
    [
        *(("steps", name) for name in WRITERS if name != "async, rarely"),
        ("averaged_weights", "decentralized"),
        ("average_tensors", "decentralized"),
        ("detach", "decentralized"),
        ("detach", "async, rarely"),
    ],
)
def test_nothing_is_written_to_a_module_before_the_gpu_has_finished(
    nccl: Nccl, monkeypatch: pytest.MonkeyPatch, name: str, moment: str
) -> None:
    """A write that only follows the communication in stream order would follow its abort too."""
    size = 3 if name == "low precision over nodes" else 2
    monkeypatch.setattr(process_group, "_POLL_MARGIN_S", 0.0)
    nccl.is_stuck = False
    spoil_messages(monkeypatch, nccl)
    if name == "async":  # its rounds wait for the device of the weights, which are on the CPU here
        wait = PrivateGroups.wait_for_gpu
        monkeypatch.setattr(PrivateGroups, "wait_for_gpu", lambda private, _, purpose: wait(private, GPU, purpose))
    gets_stuck, ends = threading.Barrier(size, action=lambda: setattr(nccl, "is_stuck", True)), threading.Barrier(size)

    def body(group: dist.ProcessGroup) -> None:
        step, attachment = attach_small_model(group, WRITERS[name])
        runner, extra = attachment.runner, torch.ones(3)
        nccl.use_gpu(runner.lane, GPU)
        weights = [parameter.detach() for group in runner.optimizers[0].param_groups for parameter in group["params"]]
        moments = {
            "steps": lambda: [(step(), time.sleep(0.005)) for _ in range(200)],
            "averaged_weights": lambda: attachment.averaged_weights().__enter__(),
            "average_tensors": lambda: runner.weights.means.average_tensors([extra], "a test"),
            "detach": attachment.detach,
        }
        with suppress(ZeroDivisionError), attachment:
            for _ in range(4):
                step()
            if name not in ("async", "async, rarely"):  # their job runs until the end
                runner.lane.submit(lambda: None).result()  # so that all ranks get stuck in the same job
            gets_stuck.wait()
            runner.process_group.private.timeout = timedelta(seconds=0.3)
            with pytest.raises(tb.CommunicationError, match="the GPU did not finish within 0"):
                moments[moment]()
            ends.wait()
            assert all(tensor.isfinite().all() for tensor in (*weights, extra))
            raise ZeroDivisionError

    run_ranks(size, body)


def spoil_messages(monkeypatch: pytest.MonkeyPatch, nccl: Nccl) -> None:
    """Replace what a rank receives by NaN while the GPU is stuck, except for the numbers that ranks agree on."""
    received: dict[tuple[object, int, int], torch.Tensor] = {}

    def spoil(tensor: torch.Tensor) -> None:
        if nccl.is_stuck and tensor.dtype != torch.int64:
            tensor.view(torch.uint8).fill_(255)

    class Spoiling(GlooTransport):
        def post_receive(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
            received[self, peer, tag] = tensor
            super().post_receive(peer, tensor, tag)

        def wait_receive(self, peer: int, tag: int) -> None:
            super().wait_receive(peer, tag)
            spoil(received.pop((self, peer, tag)))

        def all_reduce(self, tensor: torch.Tensor) -> None:
            super().all_reduce(tensor)
            spoil(tensor)

    monkeypatch.setattr(communicator, "GlooTransport", Spoiling)


@pytest.mark.parametrize("is_stuck", [True, False])
def test_a_rank_that_raises_is_named_to_ranks_that_wait_for_it_on_the_users_group(
    nccl: Nccl, monkeypatch: pytest.MonkeyPatch, is_stuck: bool
) -> None:
    """Its host fails in a gradient hook. The others look for this when they have launched nothing for a while."""
    monkeypatch.setattr(lane_module, "_LOOK_EVERY_S", 0.1)
    users = Group(functools.partial(nccl.do, "the user's group"))
    monkeypatch.setattr(process_group, "backend_of", lambda group, device_type: users)
    nccl.is_stuck = is_stuck
    ends = threading.Barrier(3, timeout=20)

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, timeout=TIMEOUT)
        lane = tb.extend.Runner(own, tb.ByteGradAlgorithm()).lane
        nccl.use_gpu(lane, GPU)
        flat = torch.ones(3)
        bucket = BaguaBucket("gradient bucket 0", [BaguaTensor("x", torch.nn.Parameter(flat))], own, flat)

        def fail(bucket: BaguaBucket, group: tb.BaguaProcessGroup) -> None:
            raise ZeroDivisionError("on one rank")

        message = "ZeroDivisionError: on one rank"
        if group.rank() == 1:
            bucket.append_python_op(fail)
        else:
            lane.launch(bucket.run)
            deadline_s, message = time.monotonic() + 10, "rank 1 has raised an error, see its output"
            while not lane.has_failed:
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
        with pytest.raises(RuntimeError, match=message):
            lane.launch(bucket.run)
        ends.wait()
        lane.close()

    run_ranks(3, body)
    assert set(nccl.calls.get("the user's group", [])) == ({"abort"} if is_stuck else set())


def test_ranks_that_end_in_order_leave_no_reason_for_a_failure(nccl: Nccl) -> None:
    """Another rank may still evaluate, and would look."""
    ends = threading.Barrier(2, timeout=20)

    def body(group: dist.ProcessGroup) -> None:
        step, attachment = attach_small_model(group, "bytegrad")
        step()
        attachment.detach()
        own = attachment.runner.process_group
        ends.wait()
        assert own.launches_on_users_group
        own.look_for_failed_rank(lambda: False)

    run_ranks(2, body)


@pytest.mark.parametrize("has_finished", [True, False])
def test_a_job_whose_lane_and_groups_were_closed_by_an_exception(
    nccl: Nccl, own: tb.BaguaProcessGroup, lane: Lane, has_finished: bool
) -> None:
    """A program may save its state after the exception: with what the GPU had computed by then, or an error."""
    job = lane.submit(lambda: 5)
    job.result()
    nccl.is_stuck = not has_finished
    lane.close()
    own.close()
    nccl.finish()  # the abort ends all work
    if has_finished:
        assert job.finish() == 5
    else:
        with pytest.raises(RuntimeError, match="the groups were closed while a GPU was working"):
            job.finish()


def test_waits_of_the_host_for_the_gpu_are_bounded(nccl: Nccl, own: tb.BaguaProcessGroup) -> None:
    with pytest.raises(tb.CommunicationError, match=r"round 3 over .* rank 0: the GPU did not finish within 1 s"):
        own.private.wait_for_gpu(GPU, "averaging round 3")
    launch(own.world, "all_to_all of weight bucket 0")
    with pytest.raises(tb.CommunicationError, match=OVERDUE):
        own.private.wait_for_gpu(GPU, "averaging round 3")
    nccl.finish()
    threading.Timer(0.1, lambda: setattr(nccl.events[-1], "is_done", True)).start()
    own.private.wait_for_gpu(GPU, "averaging round 4")


def test_messages_that_the_gpu_never_reaches_raise(nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gloo the host waits for the GPU before it sends."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, timeout=SHORT, transport=StagedOnCpu)
        own.open()
        own.world.post("sending to", 1 - group.rank(), torch.ones(3), tag=0, purpose="all_gather of x")

    with pytest.raises(
        tb.CommunicationError, match=r"^torchbagua: all_gather of x over .* rank 0 sending to rank 1: the"
    ):
        run_ranks(2, body)
