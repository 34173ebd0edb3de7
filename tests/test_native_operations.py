"""QAdam's, LowPrecisionRing's and PowerSGD's native operations: every backend has the bits of plain torch.

Both refuse the same arguments, and then write nothing.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import low_rank
import oracle
from backends import BACKENDS, Backend, backend_of
from devices import CPU
from host_kernels import HostKernels, QAdamForm, QAdamStep
from native_codecs import QADAM, assert_same_values, random_bits
from torchbagua.codecs.base import TensorSpec, by_name
from torchbagua.collectives.low_rank_mean import FactorPlace, Orthogonaliser
from torchbagua.native import launcher, tensor_tables
from torchbagua.native.ops import ELEMENT_TYPES, NATIVE_OPS
from torchbagua.native.qadam import MOMENTA_CODECS

OPS = torch.ops.torchbagua
# Of a tensor: shorter and longer than a vector of a kernel, empty ones first, last and several in a row.
LENGTHS = [0, 1, 0, 0, 15, 16, 17, 1000, 3 * 2**15 + 5, *[0] * 61, 7, 7, 0]
NUMBERS, FORM = QADAM["qadam_update"], QADAM["qadam_form_momenta"]
RING = {
    "ring_difference": ["weights", "own", "left", "right", "difference"],
    "ring_advance": ["difference", "own", "weights"],
}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backend_of(request)


@pytest.fixture(scope="module")
def cpu() -> Backend:
    return Backend("cpu", lambda name: getattr(OPS, name).default)


@pytest.fixture(autouse=True)
def _threads_and_grids(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let threads of a CPU share a tensor, and a thread block of a GPU process several parts."""
    monkeypatch.setattr(launcher, "LARGEST_GRID", 3)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def copied(value: Any) -> Any:
    if isinstance(value, list):
        return [copied(each) for each in value]
    if not isinstance(value, Tensor) or not value.is_contiguous():
        return value
    shift = value.data_ptr() % 16 // value.itemsize
    return torch.cat((value.new_zeros(shift), value.flatten()))[shift:].view(value.shape)  # of the same alignment


def tensors_of(value: Any) -> list[Tensor]:
    return [tensor for each in value for tensor in tensors_of(each)] if isinstance(value, list) else [value]


def check_bits(backend: Backend, operation: str, arguments: list[Any], **numbers: float) -> list[Any]:
    """Run an operation on a backend and in plain torch; return its arguments after it, which are bitwise equal."""
    own, expected = copied(arguments), copied(arguments)
    backend.kernel(operation)(*own, **numbers)
    NATIVE_OPS[operation](*expected, **numbers)
    for result, reference in zip(tensors_of(own), tensors_of(expected), strict=True):
        if not isinstance(result, Tensor):
            continue
        if result.is_floating_point():
            assert_same_values(result, reference)
        else:
            assert torch.equal(result, reference)
    return expected


def values(dtypes: tuple[torch.dtype, ...], seed: int, *, is_hostile: bool = False, shift: int = 0) -> list[Tensor]:
    """Return tensors of LENGTHS, the first of them with the first dtype, and the others with the last."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for index, length in enumerate(LENGTHS):
        x = random_bits(length, seed + length) if is_hostile else torch.randn(length, generator=generator)
        x = x.to(dtypes[0 if index < 6 else -1])
        result.append(torch.cat((x.new_zeros(shift), x))[shift:])
    return result


def qadam_lists(
    operation: str, dtypes: tuple[torch.dtype, ...] = (torch.float32,), *, is_hostile: bool = False, shifted: int = -1
) -> list[list[Tensor]]:
    """Return the lists of an operation. The list `shifted` is not aligned; all are with -1, and none with -2."""
    shifts = [int(shifted in (index, -2)) for index in range(4)]
    if operation != "qadam_update":
        kinds = ((torch.float32,), dtypes)
        return [values(kinds[i], i, is_hostile=is_hostile, shift=shifts[i]) for i in range(2)]
    lists = [values(dtypes, i, is_hostile=is_hostile, shift=shifts[i]) for i in range(4)]
    for second_moment in lists[3]:
        second_moment.square_()[::3] = 0
    return lists


@pytest.mark.parametrize("operation", QADAM)
def test_qadam_has_the_bits_of_plain_torch(backend: Backend, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For values of any kind, of every dtype and of two dtypes, at any address, and in chunks of any length."""
    if backend.name == "host":  # slow
        monkeypatch.setitem(globals(), "LENGTHS", [min(length, 3 * 1024 + 5) for length in LENGTHS])
        monkeypatch.setattr(tensor_tables, "CHUNK_ELEMENTS", 1024)
    numbers = QADAM[operation]
    for dtype in ELEMENT_TYPES:
        for is_hostile in (False, True):
            check_bits(backend, operation, qadam_lists(operation, (dtype,), is_hostile=is_hostile), **numbers)
    check_bits(backend, operation, qadam_lists(operation, (torch.float16, torch.float32)), **numbers)
    for shifted in (-2, 0, 1, *([2, 3] if operation == "qadam_update" else [])):
        check_bits(backend, operation, qadam_lists(operation, shifted=shifted), **numbers)
    monkeypatch.setattr(tensor_tables, "CHUNK_ELEMENTS", 1001)  # later chunks of an aligned tensor are not aligned
    before = qadam_lists(operation)
    after = check_bits(backend, operation, before, **numbers)
    written = {"qadam_update": (0, 2)}.get(operation, (0,))
    for index, (tensors, old) in enumerate(zip(after, before, strict=True)):
        assert all(map(torch.equal, tensors, old)) == (index not in written)
    for empty in ([], [torch.zeros(0)]):
        check_bits(backend, operation, [empty for _ in before], **numbers)


def test_roots_have_the_bits_of_correctly_rounded_roots(cpu: Backend) -> None:
    """IEEE 754 requires this of numpy's roots; torch.sqrt of float32 is off in the last place for some values."""
    second_moment = random_bits(2**18, seed=0).abs().nan_to_num(1.0, 1.0)
    expected = -1.0 / np.sqrt(second_moment.numpy()[second_moment > 0])
    numbers = {**dict.fromkeys(NUMBERS, 0.0), "gradient_sign": 1.0, "shrink": 1.0, "root_correction2": 1.0}
    numbers |= {"largest_ratio": torch.inf, "step_size": 1.0}
    zeros = torch.zeros(2**18)
    (weight, *_), *_ = check_bits(cpu, "qadam_update", [[zeros], [zeros + 1], [zeros], [second_moment]], **numbers)
    assert np.array_equal(weight.numpy()[second_moment > 0], expected)


@pytest.mark.parametrize("operation", QADAM)
def test_elements_of_qadam_beyond_32_bits(host_kernels: HostKernels, operation: str) -> None:
    """The last chunk of a tensor of 2^33 + 1000 elements, of which only that chunk is in memory."""
    before, chunk_elements = 2**33, 1024
    lists = [[tensors[LENGTHS.index(1000)]] for tensors in qadam_lists(operation)]
    expected = copied(lists)
    last = before // chunk_elements
    table = tensor_tables.table_type(len(lists))(num_rows=1, chunk_elements=chunk_elements, num_chunks=last + 1)
    table.rows[0].pointers[:] = [tensor.data_ptr() - before * tensor.itemsize for (tensor,) in lists]
    table.rows[0].num_elements = before + 1000
    numbers = QADAM[operation]
    step = QAdamStep((*numbers.values(), 1.0 - 0.9)) if len(lists) == 4 else QAdamForm(tuple(numbers.values()))
    kernel, grid = f"torchbagua_{operation}_float32", {"blocks": range(last, last + 1), "num_blocks": last + 1}
    assert host_kernels.run(kernel, table, step, num_threads=64, **grid) == "done"  # type: ignore[arg-type]
    NATIVE_OPS[operation](*expected, **numbers)
    for (own,), (reference,) in zip(lists, expected, strict=True):
        assert_same_values(own, reference)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_gpu(gpu: torch.device) -> None:
    for mode in ("default", "error"):  # the first call may load the kernels
        for operation, numbers in QADAM.items():
            lists = [[tensor.to(gpu) for tensor in tensors] for tensors in qadam_lists(operation)]
            torch.cuda.set_sync_debug_mode(mode)
            try:
                getattr(OPS, operation)(*lists, **numbers)
            finally:
                torch.cuda.set_sync_debug_mode("default")


# Momenta that are encoded in one pass.

# Of parameters: shorter and longer than a part, a block and a tile, odd lengths, and 0.
PARAMETERS = [1, 127, 128, 300, 0, 2048, 2 * 4096 + 5, 33]
BETA1S = [0.9, 0.9, 0.5, 0.9, 0.9, 0.75, 0.9, 0.0]
SHARES = [(1.0 - beta1) / 1024.0 for beta1 in BETA1S]


class Momenta:
    """Gradients, momenta of several dtypes, a residual, and the blocks of a codec over them."""

    def __init__(self, codec: str, block: int, hostile: str = "no") -> None:
        generator = torch.Generator().manual_seed(block)
        total = sum(PARAMETERS)
        self.gradients, self.residual = torch.randn(2, total, generator=generator).unbind()
        self.gradients = self.gradients * 1024.0
        if hostile == "bits":
            self.gradients, self.residual = random_bits(total, 1), random_bits(total, 2)
        if hostile == "nan":
            self.gradients[[0, 500, 5000]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        momenta = [
            torch.randn(length, generator=generator).to(ELEMENT_TYPES[index % len(ELEMENT_TYPES)])
            for index, length in enumerate(PARAMETERS)
        ]
        self.numbers: list[Any] = [momenta, BETA1S, SHARES]
        spec = TensorSpec(tuple(PARAMETERS), torch.float32, CPU, "a test")
        layout = type(by_name(codec))(block=block).layout(spec, [0, total])
        self.table, self.wire = layout.table, torch.full((layout.num_bytes,), 7, dtype=torch.uint8)

    def transformed(self, form: str, x: Tensor) -> Tensor:
        """Return the result of QAdam's separate operation."""
        x = x.clone()
        for part, momentum, beta1, share in zip(x.split(PARAMETERS), *self.numbers, strict=True):
            NATIVE_OPS[f"qadam_form_{form}"]([part], [momentum], beta1=beta1, share=share)
        return x


@pytest.mark.parametrize("hostile", ["no", "nan", "bits"])
@pytest.mark.parametrize("block", [128, 2048, 8192])  # the last does not fit a tile
@pytest.mark.parametrize("codec", sorted(MOMENTA_CODECS))
def test_momenta_in_one_pass_have_the_bits_of_two_operations(
    cpu: Backend, codec: str, block: int, hostile: str
) -> None:
    case = Momenta(codec, block, hostile)
    gradients, residual, table, wire = case.gradients, case.residual, case.table, case.wire
    sent = case.transformed("momenta", gradients)
    encoded = check_bits(cpu, f"{codec}_encode_momenta", [gradients, table, wire, *case.numbers])[2]
    assert torch.equal(encoded, check_bits(cpu, f"{codec}_encode", [sent, table, wire])[2])

    empty = torch.zeros_like(sent)
    decoded = check_bits(cpu, f"{codec}_decode_gradients", [encoded, table, empty, *case.numbers])[2]
    averages = check_bits(cpu, f"{codec}_decode", [encoded, table, empty])[2]
    assert_same_values(decoded, case.transformed("gradients", averages))

    arguments = [gradients, residual, table, wire, empty, *case.numbers]
    fused = check_bits(cpu, f"{codec}_encode_momenta_feedback", arguments)
    two_steps = check_bits(cpu, f"{codec}_encode_feedback", [sent, residual, table, wire, empty])
    assert torch.equal(fused[3], two_steps[3])
    assert_same_values(fused[4], two_steps[4])


def test_a_table_of_momenta_may_have_blocks_in_any_order_and_leave_elements_out(cpu: Backend) -> None:
    case = Momenta("minmax_uint8", 128)
    table = case.table.flip(0)[::2].contiguous()
    encoded = check_bits(cpu, "minmax_uint8_encode_momenta", [case.gradients, table, case.wire, *case.numbers])[2]
    filled = torch.full_like(case.gradients, 3.0)
    decoded = check_bits(cpu, "minmax_uint8_decode_gradients", [encoded, table, filled, *case.numbers])[2]
    assert (decoded == 3.0).any()
    case.table[-1, 1] += 1
    for name, arguments in (
        ("encode_momenta", [case.gradients, case.table, case.wire]),
        ("decode_gradients", [case.wire, case.table, filled]),
    ):
        with pytest.raises(ValueError, match=f"minmax_uint8_{name}: table must be rows .* of blocks within"):
            cpu.kernel(f"minmax_uint8_{name}")(*arguments, *case.numbers)


def test_the_ring_has_the_bits_of_plain_torch(cpu: Backend) -> None:
    for length in (0, 1, 15, 16, 17, 2**15 + 5):
        for make in (random_bits, lambda size, seed: torch.randn(size, generator=torch.Generator().manual_seed(seed))):
            weights, own, left, right, difference = (make(length, 10 * length + seed) for seed in range(5))
            check_bits(cpu, "ring_difference", [weights, own, left, right, difference])
            check_bits(cpu, "ring_difference", [weights, own, left, left, difference])
            check_bits(cpu, "ring_advance", [difference, own, weights])
    numbers = [torch.tensor([number]) for number in (1.0, 3.0, 6.0, 9.0, 0.0)]
    difference = check_bits(cpu, "ring_difference", numbers)[4]
    assert difference.item() == pytest.approx(1 + 6 / 3 + 9 / 3 - 5 / 3 * 3)
    _, own, weights = check_bits(cpu, "ring_advance", [difference, *numbers[1::-1]])
    assert own.item() == weights.item() == pytest.approx(4.0)


# Low-rank gradients.


@pytest.mark.parametrize("operation", low_rank.OPERATIONS)
def test_low_rank_has_the_bits_of_plain_torch(backend: Backend, operation: str) -> None:
    arguments = low_rank.arguments_of(operation)
    after = check_bits(backend, f"low_rank_{operation}", arguments)
    assert not torch.equal(after[-1], arguments[-1])
    for bad in (torch.nan, torch.inf):
        arguments = low_rank.arguments_of(operation)
        arguments[0].view(-1)[2] = bad
        check_bits(backend, f"low_rank_{operation}", arguments)


def test_gram_schmidt_has_the_bits_of_the_oracle() -> None:
    """Its inner products are in float64: vectors that are nearly dependent become orthonormal too."""
    common, *small = torch.randn(7, 3000, generator=torch.Generator().manual_seed(0))
    factors = torch.cat((low_rank.random_factors(), *(common + 1e-5 * vector for vector in small)))
    places, expected, start = [], [], 0
    for rank, length in (*low_rank.FACTORS, (6, 3000)):
        places.append(FactorPlace(start, rank, length))
        expected.append(oracle.orthonormal(factors[places[-1].elements].view(rank, length).numpy()))
        start += rank * length
    Orthogonaliser(places, CPU)(factors)
    for place, of_oracle in zip(places, expected, strict=True):
        assert np.array_equal(factors[place.elements].view(place.rank, place.length).numpy(), of_oracle)
    assert abs(of_oracle.astype(np.float64) @ of_oracle.T - np.eye(6)).max() < 1e-5


def test_a_vector_that_is_not_finite_makes_only_its_factor_nan() -> None:
    factors = torch.randn(4 * 2000, generator=torch.Generator().manual_seed(0))
    orthogonalise = Orthogonaliser([FactorPlace(0, 2, 2000), FactorPlace(4000, 2, 2000)], CPU)
    orthogonalise(clean := factors.clone())
    for bad in (torch.nan, torch.inf, -torch.inf):
        factors[2 * 2000 + 1500] = bad
        orthogonalise(broken := factors.clone())
        assert torch.equal(broken[:4000], clean[:4000])
        assert broken[4000:].isnan().all()


# What they refuse.

ONE, STRIDED = torch.ones(3), torch.ones(6)[::2]


def refusals() -> Iterator[tuple[str, list[Any], dict[str, float], str]]:
    """Yield operations, arguments and messages."""
    good = [[ONE] * 2 for _ in range(4)]
    for index, bad, message in (
        (1, [ONE], "gradients must be a list of 2 tensors, got a list of 1"),
        (2, [ONE, torch.ones(2)], "momenta must be like weights, "),
        (3, [ONE, ONE.double()], "second_moments must be like weights, "),
        (1, [ONE, STRIDED], "gradients must be like weights, .*non-contig"),
    ):
        yield "qadam_update", [*good[:index], bad, *good[index + 1 :]], NUMBERS, message
    message = r"weights must be contiguous float32, bfloat16 or float16 on (cpu|cuda:0), got"
    for bad in (ONE.double(), STRIDED):
        yield "qadam_update", [[bad]] * 4, NUMBERS, message
        for operation, name in {"qadam_form_momenta": "gradients", "qadam_form_gradients": "averages"}.items():
            yield operation, [[bad], [ONE]], FORM, f"{name} must be contiguous float32"
    for operation in ("qadam_form_momenta", "qadam_form_gradients"):
        yield operation, [[ONE], []], FORM, "momenta must be a list of 1 tensors, got a list of 0"
        for bad in (torch.ones(4), ONE.int()):
            yield operation, [[ONE], [bad]], FORM, r"momenta must be contiguous float32, bfloat16 or float16 \[3\]"
    of_ring = {operation: (names, [ONE] * len(names)) for operation, names in RING.items()}
    of_low_rank = {
        f"low_rank_{operation}": (low_rank.argument_names(operation), low_rank.arguments_of(operation))
        for operation in low_rank.OPERATIONS
    }
    for operation, (names, given) in {**of_ring, **of_low_rank}.items():
        for index, (name, tensor) in enumerate(zip(names, given, strict=True)):
            forms = [tensor.to(torch.int16), tensor[None], torch.stack((tensor, tensor), -1)[..., 0]]
            cases = [(bad, "contiguous ") for bad in forms]
            if name == "table":
                within = "rows that lie within the other tensors"
                cases += [(table, within) for table in low_rank.bad_tables(operation.removeprefix("low_rank_"))]
            if operation in RING and index:
                cases.append((tensor[:-1], ""))
            for bad, message in cases:
                yield operation, [*given[:index], bad, *given[index + 1 :]], {}, f"{name} must be {message}"
    for operation in ("gram", "solve"):
        *given, grid = low_rank.arguments_of(operation)
        yield f"low_rank_{operation}", [*given, torch.cat((grid, grid))], {}, "(products|coefficients) must be "
    case = Momenta("sign1bit", 128)
    tensors, (momenta, beta1s, shares) = [case.gradients, case.table, case.wire], case.numbers
    total = f"momenta must be of the same total length as gradients, {sum(PARAMETERS)}"
    for numbers, message in (
        ([momenta[:-1], beta1s[:-1], shares[:-1]], total),
        ([[*momenta[:-1], momenta[-1].double()], beta1s, shares], "momenta must be contiguous float32, bfloat16 or"),
        ([momenta, beta1s[:-1], shares], "beta1s must be a list of 8 numbers, got a list of 7"),
        ([momenta, beta1s, [*shares, 1.0]], "shares must be a list of 8 numbers, got a list of 9"),
    ):
        yield "sign1bit_encode_momenta", [*tensors, *numbers], {}, message


def test_refusals(backend: Backend) -> None:
    """A table that leads out of a tensor ends a kernel of CUDA, which only then sees it."""
    for index, (operation, arguments, numbers, message) in enumerate(refusals()):
        is_trap = "rows that lie within" in message and backend.name != "cpu"
        if not backend.has(operation) or (is_trap and (backend.name == "gpu" or index % 3)):
            continue
        own_message = f"^torchbagua_{operation} is trapped" if is_trap else f"^torchbagua::{operation}: {message}"
        of_reference = (NATIVE_OPS[operation], ValueError, f"^torchbagua::{operation}: {message}")
        for kernel, error, expected in (
            of_reference,
            (backend.kernel(operation), RuntimeError if is_trap else ValueError, own_message),
        ):
            before = copied(arguments)
            with pytest.raises(error, match=expected):
                kernel(*arguments, **numbers)
            for tensor, old in zip(tensors_of(arguments), tensors_of(before), strict=True):
                assert not isinstance(tensor, Tensor) or is_trap or torch.equal(tensor, old)


def test_opcheck(device: torch.device) -> None:
    def there(value: Any) -> Any:
        if isinstance(value, list):
            return [there(each) for each in value]
        return value.to(device) if isinstance(value, Tensor) else value

    case = Momenta("minmax_uint8", 128)
    calls: dict[str, tuple[list[Any], dict[str, float]]] = {
        "qadam_update": ([[ONE, ONE]] * 4, NUMBERS),
        "qadam_form_momenta": ([[ONE, ONE]] * 2, FORM),
        "ring_difference": ([ONE] * 5, {}),
        **{f"low_rank_{operation}": (low_rank.arguments_of(operation), {}) for operation in low_rank.OPERATIONS},
        "minmax_uint8_encode_momenta_feedback": (
            [case.gradients, case.residual, case.table, case.wire, torch.zeros_like(case.gradients), *case.numbers],
            {},
        ),
    }
    for operation, (arguments, numbers) in calls.items():
        torch.library.opcheck(getattr(OPS, operation).default, tuple(there(copied(arguments))), numbers)
