"""The lane over NCCL, with one rank on one GPU: the host never waits for the GPU, and graphs can be captured."""

import gc
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import without_default_group
from test_ddp import ALGORITHMS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from torchbagua.runtime.lane import Lane
from whole_mean import WholeByteGradAlgorithm

pytestmark = pytest.mark.gpu

WIDTH, BATCH = 1024, 32
# Calls in which the host waits for the GPU. cudaMemcpyAsync does not wait if the host's memory is pinned.
WAITING_CALLS = {
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaFree"),
    *("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"),
}


def calls_within(events: list[dict[str, Any]], name: str) -> Counter[str]:
    """Count the CUDA functions called on all threads in `torch.profiler.record_function(name)` of a trace's events."""
    (span,) = (event for event in events if event.get("cat") == "user_annotation" and event["name"] == name)
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    return Counter(call["name"] for call in calls if span["ts"] <= call["ts"] <= span["ts"] + span["dur"])


@pytest.fixture(scope="module")
def group(gpu: torch.device) -> Iterator[dist.ProcessGroup]:
    """The default group, over NCCL, of one rank."""
    if not dist.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    torch.cuda.set_device(gpu)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    with without_default_group():
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=gpu)
        yield dist.group.WORLD
        gc.collect()


def make_step(
    group: dist.ProcessGroup, gpu: torch.device, algorithm: tb.Algorithm | None
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a warmed-up training step of several buckets that itself does not wait, and a function that ends it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))).to(gpu)
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=4)
    impl = None
    if algorithm is not None:
        impl = algorithm.reify(group)
        ddp.register_comm_hook(impl, tb.comm_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    x = torch.randn(BATCH, WIDTH, device=gpu)

    def step() -> None:
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()

    for _ in range(12):  # in its first ten steps, DDP waits for its own events, to log times
        step()
    torch.cuda.synchronize()
    return step, impl.close if impl is not None else lambda: None


# The first is plain DDP, whose step does not wait either; in the last, a rank is its own peer, and encodes.
@pytest.mark.parametrize(
    "algorithm",
    [None, *ALGORITHMS, WholeByteGradAlgorithm()],
    ids=lambda algorithm: "plain DDP" if algorithm is None else type(algorithm).__name__,
)
def test_no_step_waits(
    group: dist.ProcessGroup, gpu: torch.device, algorithm: tb.Algorithm | None, tmp_path: Path
) -> None:
    """According to torch's profiler: its debug mode covers no torch.distributed, other threads and other libraries."""
    step, end = make_step(group, gpu, algorithm)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        with torch.profiler.record_function("steps"):
            for _ in range(5):
                step()
        with torch.profiler.record_function("control"):
            torch.cuda.synchronize()
    end()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    calls = calls_within(events, "steps")
    assert sum(count for name, count in calls.items() if "LaunchKernel" in name) > 5, calls
    assert not calls.keys() & WAITING_CALLS, calls
    assert calls_within(events, "control").keys() & WAITING_CALLS, "a wait is not seen"


def test_a_graph_is_captured_while_the_lane_polls(group: dist.ProcessGroup, gpu: torch.device) -> None:
    """In the default mode, which forbids other threads to query events, unless they have asked to be left out."""
    own = tb.BaguaProcessGroup(group)
    own.launch_on_lane()
    own.private.use_device(gpu)
    lane = Lane("capture", on_failure=own.close, group=own)
    lane.use_gpu(gpu)
    x, y = torch.ones(64, 64, device=gpu), torch.ones(3, device=gpu)
    torch.mm(x, x)  # creates cuBLAS's workspace

    def occupy() -> None:
        torch.cuda._sleep(10**9)  # about half a second
        own.world.all_reduce(y, "a test", list)

    def communicate() -> None:
        lane.submit(occupy).result()

    graph = torch.cuda.CUDAGraph()
    other = threading.Thread(target=communicate)
    with torch.cuda.graph(graph):
        other.start()  # only now: the capture begins when the GPU is idle
        time.sleep(0.3)
        z = torch.mm(x, x)
    other.join()
    graph.replay()
    lane.submit(lambda: None).finish()
    assert torch.equal(z, torch.full_like(z, 64.0))
    assert not lane.has_failed
    lane.close()
    own.close()
