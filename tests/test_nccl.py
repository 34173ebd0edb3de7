"""The lane over NCCL, with one rank on one GPU: bitwise equal results, and the host never waits for the GPU."""

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import averaging
import q_adam_life
import torchbagua as tb
from cuda_calls import calls_within, events_of, waiting
from ranks import run_ranks, without_default_group
from test_ddp import ALGORITHMS, check_runs
from training import Tower, build, train

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from torchbagua.codecs import TensorSpec
from torchbagua.collectives.all_reduce_mean import AllReduceMean
from torchbagua.runtime.lane import Lane
from torchbagua.transport.nccl import PrivateNcclTransport
from whole_mean import WholeByteGradAlgorithm

pytestmark = pytest.mark.gpu

WIDTH, BATCH = 1024, 32


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


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
def test_gradients_of_one_rank_do_not_change(
    group: dist.ProcessGroup, gpu: torch.device, algorithm: tb.Algorithm
) -> None:
    check_runs([train(group, build(Tower).to(gpu), algorithm, bucket_cap_mb=0.01)], algorithm)


def test_qadam_is_bitwise_equal_to_qadam_over_gloo(group: dist.ProcessGroup, gpu: torch.device) -> None:
    model = build(Tower).to(gpu)

    def body(group: dist.ProcessGroup) -> q_adam_life.Life:
        trainer = q_adam_life.Trainer(group, model, bucket_cap_mb=0.01)
        impl = trainer.hook()
        for _ in range(q_adam_life.NUM_STEPS):
            trainer.step()
        impl.close()
        return trainer.life

    over_nccl, (over_gloo,) = body(group), run_ranks(1, body, device=gpu)
    assert not torch.equal(over_nccl.weights[0]["layers.0.weight"], over_nccl.weights[-1]["layers.0.weight"])
    for own, expected in zip(over_nccl.weights, over_gloo.weights, strict=True):
        assert all(torch.equal(weight, expected[name]) for name, weight in own.items())


@pytest.mark.parametrize("name", averaging.ALGORITHMS)
def test_weights_of_one_rank_do_not_change(group: dist.ProcessGroup, gpu: torch.device, name: str) -> None:
    model = build(averaging.Normed).to(gpu)
    averaging.check_unchanged(averaging.train(group, model, averaging.ALGORITHMS[name]))


def test_a_rank_that_is_its_own_peer_encodes_its_gradients_twice(group: dist.ProcessGroup, gpu: torch.device) -> None:
    """The algorithm of the tests below does encode and decode, and is bitwise equal to gloo and the CPU."""
    over_nccl = train(group, build(Tower).to(gpu), WholeByteGradAlgorithm(), bucket_cap_mb=0.01, num_steps=1)
    local, averaged = over_nccl.local[0], over_nccl.averaged[0]
    codec = tb.codecs.MinMaxUInt8()
    for name, gradient in local.items():
        expected = gradient.flatten()
        spec = TensorSpec((expected.numel(),), expected.dtype, expected.device, name)
        layout = codec.layout(spec, [0, spec.num_elements])
        for _ in range(2):
            wire = torch.zeros(layout.num_bytes, dtype=torch.uint8)
            codec.encode(expected, layout, wire)
            expected = torch.empty_like(expected)
            codec.decode(wire, layout, expected)
        assert torch.equal(averaged[name].flatten(), expected), name
    assert not torch.equal(averaged["layers.1.weight"], local["layers.1.weight"])


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


# The first is plain DDP, whose step does not wait either.
EVERY = pytest.mark.parametrize(
    "algorithm",
    [None, *ALGORITHMS, WholeByteGradAlgorithm()],
    ids=lambda algorithm: "plain DDP" if algorithm is None else type(algorithm).__name__,
)


@EVERY
def test_no_step_waits_according_to_torch(
    group: dist.ProcessGroup, gpu: torch.device, algorithm: tb.Algorithm | None
) -> None:
    step, end = make_step(group, gpu, algorithm)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            torch.ones(1, device=gpu).item()
        for _ in range(5):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    end()


@EVERY
def test_no_step_waits_according_to_the_profiler(
    group: dist.ProcessGroup, gpu: torch.device, algorithm: tb.Algorithm | None, tmp_path: Path
) -> None:
    """The debug mode of the test above does not cover torch.distributed, other threads and other libraries."""
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
    events = events_of(profile, tmp_path)
    calls = calls_within(events, "steps")
    assert sum(count for name, count in calls.items() if "LaunchKernel" in name) > 5, calls
    assert not waiting(calls), calls
    assert waiting(calls_within(events, "control")), "a wait is not seen"


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


def test_nccl_runs_an_all_to_all_and_a_mean(group: dist.ProcessGroup, gpu: torch.device) -> None:
    """A single rank sends to itself, and averages with itself."""
    own = tb.BaguaProcessGroup(group)
    x = torch.arange(1000, dtype=torch.float32, device=gpu)
    for is_private in (False, True):
        if is_private:
            own.launch_on_lane()
            own.private.use_device(gpu)
        received = torch.zeros_like(x)
        own.world.all_to_all([received], [x], "all_to_all of bucket 0", list)
        assert torch.equal(received, x)
        mean = torch.empty_like(x)
        AllReduceMean(own.world, TensorSpec((x.numel(),), x.dtype, gpu, "bucket 0"), 2.0)(x, mean)
        assert torch.equal(mean, x / 2)
        assert isinstance(own.world._transports["cuda"], PrivateNcclTransport) == is_private
    own.private.wait_for_gpu(gpu, "the end")
    assert not own.private.poll()
    own.private.end_in_order()
    own.close()
