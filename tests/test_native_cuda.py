"""Tests that only a GPU can run: streams, devices, and tensors that would take too long on a CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from native_codecs import MINMAX_UINT8, SIGN_1BIT, Codec, assert_same_values, hostile_values
from torchbagua.codecs import TensorSpec
from torchbagua.native.ops import NATIVE_OPS

pytestmark = pytest.mark.gpu

BLOCK = 2048
# More elements than an int32 counts; the last block is short.
MANY = 2**31 + 50 * 2**20 + 77
DELAY_CYCLES = 200_000_000  # about a tenth of a second

Call = tuple[torch._ops.OpOverload, tuple[Tensor | float, ...], list[Tensor]]


@pytest.fixture(scope="module")
def codec(gpu: torch.device) -> Codec:
    return MINMAX_UINT8.on(gpu)


@pytest.fixture(scope="module", params=[MINMAX_UINT8, SIGN_1BIT], ids=lambda codec: codec.name)
def dense_codec(request: pytest.FixtureRequest, gpu: torch.device) -> Codec:
    return request.param.on(gpu)


def dense_table(codec: Codec, num_elements: int) -> Tensor:
    """Return blocks that fill x; the wire has all headers first, and payloads spaced for one byte per element."""
    bounds = TensorSpec((num_elements,), torch.float32, torch.device("cpu"), "x").block_bounds(BLOCK)
    starts, lengths = bounds[:-1], bounds.diff()
    headers = codec.header_bytes * torch.arange(len(starts))
    return torch.stack((starts, lengths, headers, codec.header_bytes * len(starts) + starts), dim=1)


def calls_of(codec: Codec, x: Tensor, table: Tensor) -> dict[str, Call]:
    """Return every operation on the device of x, with its arguments and the tensors that it writes."""
    wire_bytes = codec.header_bytes * len(table) + x.numel()
    wire, mean_wire = torch.zeros(2, wire_bytes, dtype=torch.uint8, device=x.device)
    decoded, mean, left_out = torch.zeros_like(x).float(), torch.zeros_like(x).float(), torch.zeros_like(x).float()
    rows = torch.zeros(3, wire_bytes, dtype=torch.uint8, device=x.device)
    codec.native("encode")(x, table, rows[0])
    rows.copy_(rows[0].clone())
    return {
        "encode": (codec.native("encode"), (x, table, wire), [wire]),
        "decode": (codec.native("decode"), (rows[0], table, decoded), [decoded]),
        "decode_mean": (codec.native("decode_mean"), (rows, table, 3.0, mean), [mean]),
        "decode_mean_encode": (codec.native("decode_mean_encode"), (rows, table, 3.0, mean_wire), [mean_wire]),
        "encode_feedback": (
            codec.native("encode_feedback"),
            (x, x.flip(0), table, wire, left_out),
            [wire, left_out],
        ),
    }


@pytest.mark.parametrize("name", ["encode", "decode", "decode_mean", "decode_mean_encode", "encode_feedback"])
def test_kernels_run_on_the_current_stream(dense_codec: Codec, name: str) -> None:
    """Their inputs are written late, on the current stream; on another stream, kernels would read zeros."""
    table = dense_table(dense_codec, 10 * BLOCK + 5).to(dense_codec.device)
    x = hostile_values("scaled", 10 * BLOCK + 5, 38).to(dense_codec.device)
    operation, arguments, written = calls_of(dense_codec, x, table)[name]
    operation(*arguments)  # loads the kernel, which may wait for the device
    expected = [tensor.clone() for tensor in written]
    inputs = [value for value in arguments if isinstance(value, Tensor) and value.is_floating_point()]
    inputs += [value for value in arguments if isinstance(value, Tensor) and value.dtype == torch.uint8]
    originals = [tensor.clone() for tensor in inputs]
    for tensor in inputs:
        tensor.zero_()
    torch.cuda.synchronize()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        for tensor, original in zip(inputs, originals, strict=True):
            if all(tensor is not output for output in written):
                tensor.copy_(original)
        operation(*arguments)
    assert not stream.query(), "the call has waited for the stream"
    stream.synchronize()

    for tensor, original in zip(written, expected, strict=True):
        assert torch.equal(tensor, original)


@pytest.mark.parametrize("name", ["encode", "decode", "decode_mean", "decode_mean_encode", "encode_feedback"])
def test_the_host_does_not_wait(dense_codec: Codec, name: str) -> None:
    table = dense_table(dense_codec, 3 * BLOCK).to(dense_codec.device)
    x = torch.linspace(-1, 1, 3 * BLOCK, device=dense_codec.device)
    operation, arguments, _ = calls_of(dense_codec, x, table)[name]
    operation(*arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        operation(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("there", ["x", "wire", "table"])
@pytest.mark.parametrize("others_on_gpu", [False, True])
@pytest.mark.parametrize("operation", ["encode", "decode"])
def test_tensors_on_two_devices_are_refused(codec: Codec, operation: str, there: str, others_on_gpu: bool) -> None:
    """One tensor is on the GPU and the others are not, or the other way round."""
    table = dense_table(codec, BLOCK)
    good = {"x": torch.linspace(-1, 1, BLOCK), "table": table, "wire": torch.zeros(8 + BLOCK, dtype=torch.uint8)}
    arguments = {
        name: tensor.to(codec.device) if (name == there) != others_on_gpu else tensor for name, tensor in good.items()
    }
    before = {name: tensor.clone() for name, tensor in arguments.items()}

    with pytest.raises(
        ValueError,
        match=rf"^torchbagua::minmax_uint8_{operation}: \w+ must be contiguous .* on (cpu|cuda|cuda:0), got .* on ",
    ):
        codec.native(operation)(**arguments)

    assert all(torch.equal(tensor, before[name]) for name, tensor in arguments.items())


def test_rows_on_another_device_are_refused(codec: Codec) -> None:
    table = dense_table(codec, BLOCK)
    rows, wire = torch.zeros(2, 8 + BLOCK, dtype=torch.uint8), torch.zeros(8 + BLOCK, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"wire must be contiguous .* on cuda:0, got"):
        codec.native("decode_mean_encode")(rows.to(codec.device), table.to(codec.device), 2.0, wire)
    with pytest.raises(ValueError, match=r"x must be contiguous .* on cuda:0, got"):
        codec.native("decode_mean")(rows.to(codec.device), table.to(codec.device), 2.0, torch.zeros(BLOCK))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
def test_a_tensor_of_another_gpu_than_the_current_one(codec: Codec) -> None:
    table = dense_table(codec, 5 * BLOCK + 3)
    x = hostile_values("scaled", 5 * BLOCK + 3, 38)
    wire = torch.zeros(codec.header_bytes * len(table) + x.numel(), dtype=torch.uint8)
    NATIVE_OPS["minmax_uint8_encode"](x, table, wire)
    second = torch.device("cuda", 1)
    own = torch.zeros_like(wire, device=second)

    codec.native("encode")(x.to(second), table.to(second), own)

    assert torch.cuda.current_device() == 0
    assert torch.equal(own.cpu(), wire)


def blocks_to_compare(num_blocks: int) -> list[int]:
    """Return the first and the last blocks, and those around element 2^31."""
    middle = 2**31 // BLOCK
    return [0, 1, middle - 1, middle, middle + 1, num_blocks - 2, num_blocks - 1]


def assert_block_has_the_bytes_of_the_reference(
    block: Tensor, values: Tensor, wire: Tensor, encode: Callable[..., None]
) -> None:
    """Check that `wire` has the reference encoding of the float32 `values` of `block`, a row of the table."""
    _, length, header, payload = block.tolist()
    own = torch.cat((wire[header : header + 8], wire[payload : payload + length])).cpu()
    expected = torch.zeros_like(own)
    encode(values.cpu(), torch.tensor([[0, length, 0, 8]]), expected)
    assert torch.equal(own, expected), block


def test_more_elements_than_32_bits_count(codec: Codec) -> None:
    """In bfloat16, 4.4 GB; the mean is over two rows, so that byte offsets exceed 2^32 too."""
    total_bytes = torch.cuda.get_device_properties(codec.device).total_memory
    if total_bytes < 40 * 2**30:
        pytest.skip(f"takes 30 GB of the GPU's memory, and it has {total_bytes / 2**30:.0f} GiB")
    table = dense_table(codec, MANY)
    on_gpu = table.to(codec.device)
    x = torch.empty(MANY, dtype=torch.bfloat16, device=codec.device)
    generator = torch.Generator(codec.device).manual_seed(0)
    for piece in x.split(2**28):
        piece.normal_(generator=generator)
    rows = torch.full((2, codec.header_bytes * len(table) + MANY), 7, dtype=torch.uint8, device=codec.device)

    codec.native("encode")(x, on_gpu, rows[0])
    for index in blocks_to_compare(len(table)):
        start, length, *_ = table[index].tolist()
        values = x[start : start + length].float()
        assert_block_has_the_bytes_of_the_reference(table[index], values, rows[0], NATIVE_OPS["minmax_uint8_encode"])

    decoded = torch.full_like(x, torch.nan)
    codec.native("decode")(rows[0], on_gpu, decoded)
    for original, piece in zip(x.split(2**28), decoded.split(2**28), strict=True):
        # Half a step of a range of about 8 (the largest is 12), and half a unit of bfloat16's last place below 8.
        assert float((piece.float() - original.float()).abs().max()) < 12 / 510 + 2**-6
    del decoded

    rows[1].copy_(rows[0])
    mean = torch.full((MANY,), torch.nan, device=codec.device)
    codec.native("decode_mean")(rows, on_gpu, 2.0, mean)
    mean_wire = torch.full_like(rows[0], 7)
    codec.native("decode_mean_encode")(rows, on_gpu, 2.0, mean_wire)
    for index in blocks_to_compare(len(table)):
        block = table[index]
        start, length, header, payload = block.tolist()
        wire = torch.cat((rows[0, header : header + 8], rows[0, payload : payload + length])).cpu()
        expected = torch.zeros(length)
        NATIVE_OPS["minmax_uint8_decode_mean"](
            torch.stack((wire, wire)), torch.tensor([[0, length, 0, 8]]), 2.0, expected
        )
        assert_same_values(mean[start : start + length].cpu(), expected)
        assert_block_has_the_bytes_of_the_reference(block, expected, mean_wire, NATIVE_OPS["minmax_uint8_encode"])
    assert not any(piece.isnan().any() for piece in mean.split(2**28))
