"""Settings of all tests, and the devices that the tests of several run on."""

import hypothesis
import pytest
import torch

from devices import CPU, require_gpu
from host_kernels import HostKernels, compile_kernels

# A deadline measures how busy the machine is; the blob lets a failure that CI found be repeated.
hypothesis.settings.register_profile("torchbagua", deadline=None, print_blob=True)
# Under compute-sanitizer every launch takes long: `--hypothesis-profile=few`.
hypothesis.settings.register_profile("few", deadline=None, print_blob=True, max_examples=4)
hypothesis.settings.load_profile("torchbagua")


# Of the module: hypothesis calls a test many times with one fixture.
@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU; and once more, marked `gpu`, the first GPU."""
    return CPU if request.param == "cpu" else require_gpu()


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    """The first GPU, for tests that are marked `gpu` and have no like on the CPU."""
    return require_gpu()


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    """The CUDA kernels, compiled for the CPU; skips where there is no compiler."""
    return compile_kernels(tmp_path_factory.mktemp("cuda_on_host"))
