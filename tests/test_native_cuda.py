"""Tests that only a GPU can run: streams, devices, and tensors that would take too long on a CPU."""

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


def dense_table(codec: Codec, num_elements: int) -> Tensor:
    """Return blocks that fill x; the wire has all headers first, and payloads spaced for one byte per element."""
    bounds = TensorSpec((num_elements,), torch.float32, torch.device("cpu"), "x").block_bounds(BLOCK)
    starts, lengths = bounds[:-1], bounds.diff()
    headers = codec.header_bytes * torch.arange(len(starts))
    return torch.stack((starts, lengths, headers, codec.header_bytes * len(starts) + starts), dim=1)


@pytest.fixture(scope="module", params=[MINMAX_UINT8, SIGN_1BIT], ids=lambda codec: codec.name)
def codec(request: pytest.FixtureRequest, gpu: torch.device) -> Codec:
    return request.param.on(gpu)


def test_kernels_run_on_the_current_stream(codec: Codec) -> None:
    """Their inputs are written late, on the current stream; on another stream, kernels would read zeros."""
    table = dense_table(codec, 10 * BLOCK + 5).to(codec.device)
    x = hostile_values("scaled", 10 * BLOCK + 5, 38).to(codec.device)
    wire = torch.zeros(codec.header_bytes * len(table) + x.numel(), dtype=torch.uint8, device=x.device)
    codec.native("encode")(x, table, wire)
    rows = wire.repeat(3, 1)
    for operation, inputs, outputs in (
        ("encode", [x, table], [wire]),
        ("decode", [rows[0], table], [x.clone()]),
        ("decode_mean", [rows, table, 3.0], [x.clone()]),
        ("decode_mean_encode", [rows, table, 3.0], [wire]),
        ("encode_feedback", [x, x.flip(0), table], [wire, x.clone()]),
    ):
        kernel = codec.native(operation)
        kernel(*inputs, *outputs)  # loads the kernel, which may wait for the device
        expected = [tensor.clone() for tensor in outputs]
        late = [value for value in inputs if isinstance(value, Tensor) and value is not table]
        originals = [tensor.clone() for tensor in late]
        for tensor in (*late, *outputs):
            tensor.zero_()
        torch.cuda.synchronize()

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY_CYCLES)
            for tensor, original in zip(late, originals, strict=True):
                tensor.copy_(original)
            torch.cuda.set_sync_debug_mode("error")
            try:
                kernel(*inputs, *outputs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert not stream.query(), "the call has waited for the stream"
        stream.synchronize()
        assert all(map(torch.equal, outputs, expected)), operation


@pytest.mark.parametrize("others_on_gpu", [False, True])
def test_tensors_on_two_devices_are_refused(gpu: torch.device, others_on_gpu: bool) -> None:
    """One tensor is on the GPU and the others are not, or the other way round."""
    codec = MINMAX_UINT8.on(gpu)
    x, wire = torch.linspace(-1, 1, BLOCK), torch.zeros(8 + BLOCK, dtype=torch.uint8)
    good = {"x": x, "rows": wire.repeat(2, 1), "wire": wire, "table": dense_table(codec, BLOCK)}
    for operation in ("encode", "decode", "decode_mean", "decode_mean_encode"):
        names = [argument.name for argument in codec.native(operation)._schema.arguments if argument.name != "divisor"]
        numbers = {"divisor": 2.0} if "mean" in operation else {}
        for there in names:
            tensors = {name: good[name].to(gpu) if (name == there) != others_on_gpu else good[name] for name in names}
            before = {name: tensor.clone() for name, tensor in tensors.items()}
            message = (
                rf"^torchbagua::minmax_uint8_{operation}: \w+ must be contiguous .* on (cpu|cuda(:0)?), got .* on "
            )
            with pytest.raises(ValueError, match=message):
                codec.native(operation)(**tensors, **numbers)
            assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())


def assert_block_has_the_bytes_of_the_reference(block: list[int], values: Tensor, wire: Tensor) -> None:
    """Check that `wire` has the reference encoding of the float32 `values` of `block`, a row of the table."""
    _, length, header, payload = block
    own = torch.cat((wire[header : header + 8], wire[payload : payload + length])).cpu()
    expected = torch.zeros_like(own)
    NATIVE_OPS["minmax_uint8_encode"](values.cpu(), torch.tensor([[0, length, 0, 8]]), expected)
    assert torch.equal(own, expected), block


def test_more_elements_than_32_bits_count(gpu: torch.device) -> None:
    """In bfloat16, 4.4 GB; the mean is over two rows, so that byte offsets exceed 2^32 too."""
    total_bytes = torch.cuda.get_device_properties(gpu).total_memory
    if total_bytes < 40 * 2**30:
        pytest.skip(f"takes 30 GB of the GPU's memory, and it has {total_bytes / 2**30:.0f} GiB")
    codec = MINMAX_UINT8.on(gpu)
    table = dense_table(codec, MANY)
    on_gpu, middle = table.to(gpu), 2**31 // BLOCK
    blocks = table[[0, 1, middle - 1, middle, middle + 1, -2, -1]].tolist()
    x = torch.empty(MANY, dtype=torch.bfloat16, device=gpu)
    generator = torch.Generator(gpu).manual_seed(0)
    for piece in x.split(2**28):
        piece.normal_(generator=generator)
    rows = torch.full((2, codec.header_bytes * len(table) + MANY), 7, dtype=torch.uint8, device=gpu)

    codec.native("encode")(x, on_gpu, rows[0])
    for block in blocks:
        assert_block_has_the_bytes_of_the_reference(block, x[block[0] : block[0] + block[1]].float(), rows[0])

    decoded = torch.full_like(x, torch.nan)
    codec.native("decode")(rows[0], on_gpu, decoded)
    for original, piece in zip(x.split(2**28), decoded.split(2**28), strict=True):
        # Half a step of a range of about 8 (the largest is 12), and half a unit of bfloat16's last place below 8.
        assert float((piece.float() - original.float()).abs().max()) < 12 / 510 + 2**-6
    del decoded

    rows[1].copy_(rows[0])
    mean = torch.full((MANY,), torch.nan, device=gpu)
    codec.native("decode_mean")(rows, on_gpu, 2.0, mean)
    mean_wire = torch.full_like(rows[0], 7)
    codec.native("decode_mean_encode")(rows, on_gpu, 2.0, mean_wire)
    for block in blocks:
        start, length, header, payload = block
        wire = torch.cat((rows[0, header : header + 8], rows[0, payload : payload + length])).cpu()
        expected = torch.zeros(length)
        alone = torch.tensor([[0, length, 0, 8]])
        NATIVE_OPS["minmax_uint8_decode_mean"](torch.stack((wire, wire)), alone, 2.0, expected)
        assert_same_values(mean[start : start + length].cpu(), expected)
        assert_block_has_the_bytes_of_the_reference(block, expected, mean_wire)
    assert not any(piece.isnan().any() for piece in mean.split(2**28))
