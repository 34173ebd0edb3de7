"""The low-rank kernels: native and reference are bitwise equal, vectors are orthonormal, bad arguments are refused.

The tests whose names contain `bits` run again under every other instruction set of this CPU.
"""

import os
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
import programs
from devices import on_device
from low_rank import FACTORS, OPERATIONS, argument_names, arguments_of, bad_tables, random_factors
from native_codecs import assert_same_values
from torchbagua import native
from torchbagua.collectives.low_rank_mean import FactorPlace, Orthogonaliser
from torchbagua.native.ops import NATIVE_OPS

OPS = torch.ops.torchbagua
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _native_kernels() -> Iterator[None]:
    """Run on three threads, which share the pieces."""
    native.load()
    assert {row.path for row in native.status() if row.device == "cpu"} <= {"aot", "jit"}, native.status()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def places_of(factors: list[tuple[int, int]]) -> list[FactorPlace]:
    places, start = [], 0
    for rank, length in factors:
        places.append(FactorPlace(start, rank, length))
        start += rank * length
    return places


@pytest.mark.parametrize("operation", OPERATIONS)
def test_native_gives_the_bits_of_the_reference(device: torch.device, operation: str) -> None:
    actual = arguments_of(operation)
    expected = copies(actual)
    on_device(getattr(OPS, f"low_rank_{operation}").default, device)(*actual)
    NATIVE_OPS[f"low_rank_{operation}"](*expected)
    for result, reference in zip(actual, expected, strict=True):
        assert torch.equal(result, reference)
    assert not torch.equal(actual[-1], arguments_of(operation)[-1])


def test_gram_schmidt_gives_the_bits_of_the_oracle_and_orthonormal_vectors() -> None:
    """Vectors that are zero or depend on others become zero; tiny and huge vectors get a length of 1."""
    factors = random_factors()
    places = places_of(FACTORS)
    expected = [oracle.orthonormal(factors[place.elements].view(place.rank, place.length).numpy()) for place in places]
    Orthogonaliser(places, CPU)(factors)
    for place, of_oracle in zip(places, expected, strict=True):
        vectors = factors[place.elements].view(place.rank, place.length)
        assert np.array_equal(vectors.numpy(), of_oracle)
        products = vectors.double() @ vectors.double().t()
        is_there = torch.tensor([i < place.length for i in range(place.rank)])
        if place == places[0]:
            is_there[1:3] = False
        # Each element is rounded to 2^-24 of its value.
        assert (products - torch.diag(is_there.double())).abs().max() < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_vector_that_is_not_finite_gives_the_bits_of_nan_and_so_do_later_vectors(bad: float) -> None:
    factors = torch.randn(4 * 2000, generator=torch.Generator().manual_seed(0))
    clean = factors.clone()
    factors[2 * 2000 + 1500] = bad
    orthogonalise = Orthogonaliser([FactorPlace(0, 2, 2000), FactorPlace(4000, 2, 2000)], CPU)
    orthogonalise(factors)
    orthogonalise(clean)
    assert torch.equal(factors[:4000], clean[:4000])
    assert factors[4000:].isnan().all()
    reference = clean.clone()
    reference[7000] = bad
    actual = copies([reference])[0]
    for operations, x in ((NATIVE_OPS, reference), ({name: getattr(OPS, name) for name in NATIVE_OPS}, actual)):
        products, coefficients = (torch.zeros(n, w, dtype=torch.float64) for n, w in ((4, 3), (2, 6)))
        operations["low_rank_gram"](x, orthogonalise._pieces, products)
        operations["low_rank_solve"](products, orthogonalise._matrices, coefficients)
        operations["low_rank_combine"](coefficients, orthogonalise._pieces, x)
    assert_same_values(actual, reference)


def test_nearly_dependent_vectors_stay_orthonormal() -> None:
    """Each adds a hundred-thousandth of its length to the vectors before: in float32, the process would lose it."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(3000, generator=generator)
    vectors = torch.stack([common + 1e-5 * torch.randn(3000, generator=generator) for _ in range(6)])
    Orthogonaliser([FactorPlace(0, 6, 3000)], CPU)(vectors.view(-1))
    products = vectors.double() @ vectors.double().t()
    assert (products - torch.eye(6)).abs().max() < 1e-5


@pytest.mark.release
@pytest.mark.parametrize("instruction_set", ["default", "avx2"])
def test_under_other_instruction_sets(instruction_set: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-k", "bits", __file__]
    programs.run(command, env={**os.environ, "ATEN_CPU_CAPABILITY": instruction_set})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_refusals(operation: str) -> None:
    """If an argument is invalid, or a table points outside of the other tensors, nothing is written."""
    names, good = argument_names(operation), arguments_of(operation)
    cases = [("table", table, "rows that lie within the other tensors") for table in bad_tables(operation)]
    for index, name in enumerate(names):
        cases += [(name, good[index].to(torch.int16), "contiguous "), (name, good[index][None], "contiguous ")]
        strided = torch.stack((good[index], good[index]), -1)[..., 0]
        cases += [(name, strided, "contiguous ")]
    for argument, value, message in cases:
        arguments = copies(good)
        arguments[names.index(argument)] = value
        before = copies(arguments)
        for kernel in (getattr(OPS, f"low_rank_{operation}"), NATIVE_OPS[f"low_rank_{operation}"]):
            with pytest.raises(ValueError, match=f"^torchbagua::low_rank_{operation}: {argument} must be {message}"):
                kernel(*arguments)
        assert all(map(torch.equal, arguments, before))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_opcheck(device: torch.device, operation: str) -> None:
    arguments = tuple(tensor.to(device) for tensor in arguments_of(operation))
    torch.library.opcheck(getattr(OPS, f"low_rank_{operation}").default, arguments)
