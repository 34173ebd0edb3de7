"""Settings of all tests, and the devices that tests run on."""

import gc
import importlib
import os
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager

# Set before torch is imported, when OpenMP reads it for threads that start later, such as ranks.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from devices import CPU, decide_on_device, require_gpu
from host_kernels import HostKernels, compile_kernels
from made_once import made_once
from processor_time import ProcessorTime

# A deadline would measure how busy the machine is; the blob reproduces a failure that CI found.
hypothesis.settings.register_profile("torchbagua", deadline=None, print_blob=True)
hypothesis.settings.load_profile("torchbagua")

# Ranks are threads, and several tests run at once: with a thread pool for each they would wait for one another.
# A test of such a pool's results sets its size.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessorTime())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable the garbage collector during imports, so that it does not scan everything imported so far."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Freeze imported objects: each garbage collection would scan all of torch, and so would each attach."""
    # The first DDP imports it: a hundred thousand objects, which each attach would search for references to a module.
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _no_groups_left() -> Iterator[None]:
    """End the groups that reference cycles keep: each has threads, which poll their sockets every 10 ms."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def on_one_core() -> Iterator[None]:
    """Run all threads of simulations on one core, since they run one at a time, and collect only new garbage.

    DDP's reducer keeps errors, and what they refer to, of ranks that fail. Later collections do not visit these either.
    """
    gc.collect()
    gc.freeze()
    cores = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    os.sched_setaffinity(0, {sorted(cores)[worker % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)
    gc.collect()
    gc.freeze()


# Module scope: hypothesis calls a test many times with the same fixture.
@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU and, in tests marked `gpu`, the first GPU."""
    return CPU if request.param == "cpu" else require_gpu()


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    """The first GPU, for tests that are marked `gpu` and have no counterpart on the CPU."""
    return require_gpu()


@pytest.fixture(params=["host", "device"])
def where_commits_are_decided(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide on the host what a step commits, or as on a GPU, where reading a value would block."""
    if request.param == "device":
        decide_on_device(monkeypatch)


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    """The CUDA kernels, compiled for the CPU, once for all workers; skips if no compiler is found."""
    folder = made_once(tmp_path_factory, "cuda_on_host", compile_kernels)
    return HostKernels(folder / "kernels.so")


@pytest.fixture
def forwards_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one rank at a time run the forward within a DDP: torch has one attribute for the running DDP of a process."""
    lock, inside = threading.RLock(), DistributedDataParallel._inside_ddp_forward

    @contextmanager
    def inside_alone(ddp: DistributedDataParallel) -> Iterator[None]:
        with lock, inside(ddp):
            yield

    monkeypatch.setattr(DistributedDataParallel, "_inside_ddp_forward", inside_alone)
