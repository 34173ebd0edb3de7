"""The kernel of QAdam's update: native and reference are bitwise equal, in parallel too, and refuse the same arguments.

With the marker `gpu`, the kernel on a GPU is tested too.

The tests whose names contain `bits` run again under every other instruction set of this CPU.
"""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import programs
from devices import on_device
from native_codecs import random_bits
from torchbagua import native
from torchbagua.native.ops import NATIVE_OPS

OPS = torch.ops.torchbagua
NUMBERS = {
    "gradient_sign": -1.0,
    "weight_decay": 0.1,
    "shrink": 0.99,
    "beta1": 0.9,
    "root_correction2": 0.3,
    "eps": 1e-8,
    "largest_ratio": 0.7,  # many ratios of the random values are larger
    "step_size": 1e-3,
}
INTEGERS = {2: torch.int16, 4: torch.int32}
FORMS = {"qadam_form_momenta": "gradients", "qadam_form_gradients": "averages"}  # and the name of the first argument
LENGTHS = [0, 1, 15, 16, 17, 1000, 3 * 2**15 + 5]


@pytest.fixture(autouse=True, scope="module")
def _native_kernels() -> Iterator[None]:
    """Run on three threads, which share the longest tensor."""
    native.load()
    assert {row.path for row in native.status() if row.device == "cpu"} <= {"aot", "jit"}, native.status()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def arguments(dtype: torch.dtype, *, is_hostile: bool = False) -> list[list[Tensor]]:
    """Return weights, gradients, momenta and second moments of LENGTHS elements; a third of the last are zero."""

    def values(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        if is_hostile:
            return [random_bits(length, seed + length).to(dtype) for length in LENGTHS]
        return [torch.randn(length, generator=generator).to(dtype) for length in LENGTHS]

    weights, gradients, momenta, second_moments = map(values, range(4))
    for second_moment in second_moments:
        second_moment.square_()[::3] = 0
    return [weights, gradients, momenta, second_moments]


def same(first: Tensor, second: Tensor) -> bool:
    """Return whether bits are equal, or both values NaN: it is undefined which of two NaN an operation propagates."""
    differs = first.view(INTEGERS[first.itemsize]) != second.view(INTEGERS[first.itemsize])
    return bool((~differs | (first.isnan() & second.isnan())).all())


def copies(lists: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.clone() for tensor in tensors] for tensors in lists]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_hostile", [False, True])
def test_native_gives_the_bits_of_the_reference(device: torch.device, dtype: torch.dtype, is_hostile: bool) -> None:
    actual = arguments(dtype, is_hostile=is_hostile)
    expected = copies(actual)
    before = copies(actual)
    on_device(OPS.qadam_update.default, device)(*actual, **NUMBERS)
    NATIVE_OPS["qadam_update"](*expected, **NUMBERS)
    for tensors, references in zip(actual, expected, strict=True):
        assert all(map(same, tensors, references))
    for index in (1, 3):
        assert all(map(same, actual[index], before[index]))
    if not is_hostile:
        assert not torch.equal(actual[0][-1], before[0][-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_hostile", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_forms_have_the_bits_of_the_reference(
    device: torch.device, name: str, dtype: torch.dtype, is_hostile: bool
) -> None:
    _, values, *_ = arguments(torch.float32, is_hostile=is_hostile)
    _, _, momenta, _ = arguments(dtype, is_hostile=is_hostile)
    (actual, expected), before = copies([values, values]), copies([momenta])[0]
    on_device(getattr(OPS, name).default, device)(actual, momenta, beta1=0.9, share=0.1 / 1024)
    NATIVE_OPS[name](expected, momenta, beta1=0.9, share=0.1 / 1024)
    assert all(map(same, actual, expected))
    assert all(map(same, momenta, before))
    assert is_hostile or not torch.equal(actual[-1], values[-1])


def test_roots_have_the_bits_of_correctly_rounded_roots() -> None:
    """IEEE 754 requires this of numpy's roots; torch.sqrt of float32 is off in the last place for some values."""
    second_moment = random_bits(2**20, seed=0).abs().nan_to_num(1.0, 1.0)
    expected = -1.0 / np.sqrt(second_moment.numpy()[second_moment > 0])
    numbers = {**dict.fromkeys(NUMBERS, 0.0), "gradient_sign": 1.0, "shrink": 1.0, "root_correction2": 1.0}
    numbers |= {"largest_ratio": torch.inf, "step_size": 1.0}
    for operation in (OPS.qadam_update, NATIVE_OPS["qadam_update"]):
        weight, gradient, momentum = torch.zeros(2**20), torch.ones(2**20), torch.zeros(2**20)
        operation([weight], [gradient], [momentum], [second_moment], **numbers)
        assert np.array_equal(weight.numpy()[second_moment > 0], expected)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_gpu(gpu: torch.device) -> None:
    lists = [[tensor.to(gpu) for tensor in tensors] for tensors in arguments(torch.float32)]
    for mode in ("default", "error"):  # the first call may load the kernels
        torch.cuda.set_sync_debug_mode(mode)
        try:
            OPS.qadam_update(*lists, **NUMBERS)
            for name in FORMS:
                getattr(OPS, name)(*lists[1:3], beta1=0.9, share=0.1)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_one_form_inverts_the_other() -> None:
    _, values, momenta, _ = arguments(torch.float32)
    gradients = copies([values])[0]
    OPS.qadam_form_momenta(gradients, momenta, beta1=0.9, share=0.1)
    OPS.qadam_form_gradients(gradients, momenta, beta1=0.9, share=0.1)
    # The momentum, of magnitude 4, is rounded to 2^-22, and a tenth of it is from the gradient.
    assert all(torch.allclose(after, value, rtol=0, atol=1e-5) for after, value in zip(gradients, values, strict=True))


@pytest.mark.parametrize("name", FORMS)
def test_forms_refuse(name: str) -> None:
    values, momenta = [torch.ones(3)], [torch.ones(3)]
    for bad_values, bad_momenta, message in (
        (values, [], "momenta must be a list of 1 tensors, got a list of 0"),
        ([torch.ones(3).double()], momenta, f"{FORMS[name]} must be contiguous float32"),
        ([torch.ones(6)[::2]], momenta, f"{FORMS[name]} must be contiguous float32"),
        (values, [torch.ones(4)], r"momenta must be contiguous float32, bfloat16 or float16 \[3\]"),
        (values, [torch.ones(3).int()], r"momenta must be contiguous float32, bfloat16 or float16 \[3\]"),
    ):
        for operation in (getattr(OPS, name), NATIVE_OPS[name]):
            with pytest.raises(ValueError, match=f"torchbagua::{name}: {message}"):
                operation(bad_values, bad_momenta, beta1=0.9, share=0.1)
        assert torch.equal(values[0], torch.ones(3))


@pytest.mark.release
@pytest.mark.parametrize("instruction_set", ["default", "avx2"])
def test_under_other_instruction_sets(instruction_set: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-k", "bits", __file__]
    programs.run(command, env={**os.environ, "ATEN_CPU_CAPABILITY": instruction_set})


Change = Callable[[list[list[Tensor]]], Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lists: lists[1].pop(), "gradients must be a list of 7 tensors, got a list of 6"),
        (lambda lists: lists[2].__setitem__(2, torch.zeros(14)), "momenta must be like weights, "),
        (lambda lists: lists[3].__setitem__(2, torch.zeros(15).double()), "second_moments must be like weights, "),
        (lambda lists: lists[1].__setitem__(2, torch.zeros(30)[::2]), "gradients must be like weights, .*non-contig"),
        (
            lambda lists: [tensors.__setitem__(3, torch.zeros(16).double()) for tensors in lists],
            "weights must be contiguous float32, bfloat16 or float16 on cpu, got",
        ),
    ],
)
def test_refusals(change: Change, message: str) -> None:
    for operation in (OPS.qadam_update, NATIVE_OPS["qadam_update"]):
        lists = arguments(torch.float32)
        change(lists)
        before = copies(lists)
        with pytest.raises(ValueError, match=f"torchbagua::qadam_update: {message}"):
            operation(*lists, **NUMBERS)
        assert all(all(map(torch.equal, own, old)) for own, old in zip(lists, before, strict=True))


def test_opcheck(device: torch.device) -> None:
    lists = [[tensor.to(device) for tensor in tensors] for tensors in arguments(torch.float32)]
    torch.library.opcheck(OPS.qadam_update.default, tuple(lists), NUMBERS)
    for name in FORMS:
        torch.library.opcheck(getattr(OPS, name).default, tuple(lists[1:3]), {"beta1": 0.9, "share": 0.1})
