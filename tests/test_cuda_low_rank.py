"""The low-rank CUDA kernels on the host: bitwise equal to the reference, and no index outside a tensor."""

import pytest
import torch
from torch import Tensor

from host_kernels import HostKernels
from low_rank import OPERATIONS, argument_names, arguments_of, bad_tables
from native_codecs import assert_same_values
from torchbagua.native.launcher import THREADS
from torchbagua.native.ops import NATIVE_OPS


def run(host_kernels: HostKernels, operation: str, arguments: list[Tensor], num_blocks: int = 3) -> str:
    kernel = f"torchbagua_low_rank_{operation}"
    return host_kernels.run(kernel, *arguments, blocks=range(num_blocks), num_blocks=num_blocks, num_threads=THREADS)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_give_the_bits_of_the_reference(host_kernels: HostKernels, operation: str) -> None:
    """The launch has fewer thread blocks than rows."""
    mine = arguments_of(operation)
    theirs = [tensor.clone() for tensor in mine]
    assert run(host_kernels, operation, mine) == "done"
    NATIVE_OPS[f"low_rank_{operation}"](*theirs)
    for own, expected in zip(mine, theirs, strict=True):
        assert torch.equal(own, expected)


def test_values_that_are_not_finite_give_nan(host_kernels: HostKernels) -> None:
    for bad in (float("nan"), float("inf")):
        mine = arguments_of("solve")
        mine[0][0, 2] = bad
        theirs = [tensor.clone() for tensor in mine]
        assert run(host_kernels, "solve", mine) == "done"
        NATIVE_OPS["low_rank_solve"](*theirs)
        assert mine[2][0].isnan().any()
        assert_same_values(mine[2], theirs[2])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_table_that_leads_out_of_a_tensor_ends_the_kernel(host_kernels: HostKernels, operation: str) -> None:
    table = argument_names(operation).index("table")
    for bad in bad_tables(operation)[::2]:
        arguments = arguments_of(operation)
        arguments[table] = bad
        assert run(host_kernels, operation, arguments) == "trapped"
