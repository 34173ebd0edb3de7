"""Settings of all tests, and the devices that the tests of several run on."""

import gc
import importlib
import os
from collections.abc import Generator, Iterator

# Before torch is imported, which is when OpenMP reads it for threads that are still to come, such as ranks.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import torch

from devices import CPU, require_gpu
from host_kernels import HostKernels, compile_kernels
from made_once import made_once

# A deadline measures how busy the machine is; the blob lets a failure that CI found be repeated.
hypothesis.settings.register_profile("torchbagua", deadline=None, print_blob=True)
# Under compute-sanitizer every launch takes long: `--hypothesis-profile=few`.
hypothesis.settings.register_profile("few", deadline=None, print_blob=True, max_examples=4)
hypothesis.settings.load_profile("torchbagua")

# Ranks are threads, and several tests run at once: with a pool of threads for each they would wait for one another.
# A test of what such a pool computes sets its size itself.
torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector from looking at what is imported while more is imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Has the garbage collector leave alone what was imported: it looked at all of torch each time, as attach does."""
    # The first DDP imports it: a hundred thousand objects, among which each attach would look for what holds a module.
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _no_groups_left() -> Iterator[None]:
    """Ends the groups that reference cycles keep: each has threads, which look at their sockets every 10 ms."""
    yield
    gc.collect()


# Of the module: hypothesis calls a test many times with one fixture.
@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU; and once more, marked `gpu`, the first GPU."""
    return CPU if request.param == "cpu" else require_gpu()


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    """The first GPU, for tests that are marked `gpu` and have no like on the CPU."""
    return require_gpu()


@pytest.fixture(params=["host", "device"])
def where_commits_are_decided(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step commits is decided on the host, or as on a GPU, where reading a value would be a wait."""
    if request.param == "device":
        monkeypatch.setattr("torchbagua.runtime.unstaging.is_read_with_a_wait", lambda tensor: True)


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    """The CUDA kernels, compiled for the CPU, once for all workers; skips where there is no compiler."""
    folder = made_once(tmp_path_factory, "cuda_on_host", compile_kernels)
    return HostKernels(folder / "kernels.so")
