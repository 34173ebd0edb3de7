"""The kernels of the ring of compressed differences: native results are bitwise equal to plain torch's; refusals.

Tests with `bits` in their names run again with the other instruction sets that this CPU has.
"""

import os
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import programs
from native_codecs import random_bits
from torchbagua import native
from torchbagua.native.ops import NATIVE_OPS

OPS = torch.ops.torchbagua
LENGTHS = [0, 1, 15, 16, 17, 1000, 2**15 + 5]
Operation = Callable[..., None]


@pytest.fixture(autouse=True, scope="module")
def _native_kernels() -> None:
    native.load()
    assert {row.path for row in native.status() if row.device == "cpu"} <= {"aot", "jit"}, native.status()


def values(number: int, length: int, *, is_hostile: bool = False) -> Tensor:
    if is_hostile:
        return random_bits(length, 10 * length + number)
    return torch.randn(length, generator=torch.Generator().manual_seed(10 * length + number))


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are bitwise equal; all NaNs count as equal."""
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(
        first.nan_to_num().view(torch.int32), second.nan_to_num().view(torch.int32)
    )


@pytest.mark.parametrize("is_hostile", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_bits(length: int, is_hostile: bool) -> None:
    inputs = [values(number, length, is_hostile=is_hostile) for number in range(4)]
    results = []
    for difference_of, advance in (
        (OPS.ring_difference, OPS.ring_advance),
        (NATIVE_OPS["ring_difference"], NATIVE_OPS["ring_advance"]),
    ):
        weights, own, left, right = (tensor.clone() for tensor in inputs)
        difference = torch.full_like(weights, 7.0)
        difference_of(weights, own, left, right, difference)
        before = difference.clone()
        advance(difference, own, weights)
        for tensor, unchanged in ((left, inputs[2]), (right, inputs[3]), (difference, before)):
            assert same_bits(tensor, unchanged)
        results.append((difference, own, weights))
    for of_native, of_torch in zip(*results, strict=True):
        assert same_bits(of_native, of_torch)


@pytest.mark.parametrize("length", LENGTHS)
def test_one_neighbour_has_the_bits_of_two_that_are_equal(length: int) -> None:
    weights, own, left = (values(number, length) for number in range(3))
    of_one, of_two = torch.zeros(2, length).unbind()
    OPS.ring_difference(weights, own, left, left, of_one)
    OPS.ring_difference(weights, own, left, left.clone(), of_two)
    assert same_bits(of_one, of_two)


@pytest.mark.release
@pytest.mark.parametrize("instruction_set", ["default", "avx2"])
def test_under_other_instruction_sets(instruction_set: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-k", "bits", __file__]
    programs.run(command, env={**os.environ, "ATEN_CPU_CAPABILITY": instruction_set})


def test_a_known_difference() -> None:
    weights, own, left, right = (torch.tensor([number]) for number in (1.0, 3.0, 6.0, 9.0))
    difference = torch.zeros(1)
    OPS.ring_difference(weights, own, left, right, difference)
    assert difference.item() == pytest.approx(1 + 6 / 3 + 9 / 3 - 5 / 3 * 3)
    OPS.ring_advance(difference, own, weights)
    assert own.item() == weights.item() == pytest.approx(4.0)


def both(name: str) -> list[Operation]:
    return [getattr(OPS, name), NATIVE_OPS[name]]


@pytest.mark.parametrize("operation", [*both("ring_difference")])
def test_refusals_of_the_difference(operation: Operation) -> None:
    good = [torch.zeros(6) for _ in range(5)]
    for index, name in enumerate(["weights", "own", "left", "right", "difference"]):
        for bad in (torch.zeros(6, dtype=torch.float64), torch.zeros(12)[::2], *([torch.zeros(5)] if index else [])):
            with pytest.raises((ValueError, RuntimeError), match=rf"torchbagua::ring_difference: {name} must be"):
                operation(*good[:index], bad, *good[index + 1 :])


@pytest.mark.parametrize("operation", [*both("ring_advance")])
def test_refusals_of_the_advance(operation: Operation) -> None:
    good = [torch.zeros(6) for _ in range(3)]
    for index, name in enumerate(["difference", "own", "weights"]):
        for bad in (torch.zeros(6, dtype=torch.bfloat16), *([torch.zeros(5)] if index else [])):
            with pytest.raises((ValueError, RuntimeError), match=rf"torchbagua::ring_advance: {name} must be"):
                operation(*good[:index], bad, *good[index + 1 :])
