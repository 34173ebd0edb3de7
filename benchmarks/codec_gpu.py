"""Times the codecs' CUDA kernels beside a device-to-device copy of as many bytes, alternated in one run.

    python benchmarks/codec_gpu.py [--rounds 41] [--json PATH]

67.1 M elements, which are 256 MiB of float32 and 128 MiB of bfloat16, in blocks of 2048. Bytes are those that an
operation has to read and write: elements, wire and table of blocks, each once. The copy beside it, `y.copy_(x)`, reads
half as many and writes them. A round of each goes over several sets of buffers, together many times the L2 cache, so
that nothing is found there; a time is the median over the rounds. The two chunked operations run on 8 chunks that are
together as large as the tensor, as in a bucket of 256 MiB between 8 ranks, and, where it says `of all`, on 8 that are
each as large as the tensor.

The kernels are those that TORCHBAGUA_NATIVE asks for. `--device cpu --num-elements 100000` tries the program out.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codec import BLOCK, CODECS, lay_out
from device_time import alternated_ms, host_us
from environment import environment_record
from torchbagua import native
from torchbagua.compressors import MinMaxUInt8

OPS = torch.ops.torchbagua
NUM_ELEMENTS = 2**26
NUM_CHUNKS = 8
ROTATED_BYTES = 2**30  # many times the largest L2 cache
LEAST_PERCENT = {"encode": 90, "decode": 85, "decode_mean_encode": 85}

Call = Callable[[], object]
Row = dict[str, Any]


def filled(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random values of the size of gradients."""
    generator = torch.Generator(device).manual_seed(0)
    return (torch.randn(num_elements, generator=generator, device=device) * 1e-2).to(dtype)


class Operation:
    """An operation of a codec on tensors of one size, on its own buffers.

    Attributes:
        name: for the table.
        num_bytes: that it reads and writes.
        calls: the same on one set of buffers after the other.
    """

    def __init__(self, name: str, make: Callable[[], tuple[Call, list[Tensor]]], rotated_bytes: int) -> None:
        self.name = name
        call, tensors = make()
        self.num_bytes = sum(tensor.nbytes for tensor in tensors)
        num_sets = max(1, -(-rotated_bytes // self.num_bytes))
        self.calls = [call, *(make()[0] for _ in range(num_sets - 1))]

    def run(self) -> None:
        for call in self.calls:
            call()

    def copies(self, device: torch.device) -> Call:
        """Copies of as many bytes, as many times, each between its own buffers."""
        buffers = [torch.ones(2, self.num_bytes // 2, dtype=torch.uint8, device=device) for _ in self.calls]

        def run() -> None:
            for source, target in buffers:
                target.copy_(source)

        return run


def operations_of(
    codec: type[Any], dtype: torch.dtype, num_elements: int, device: torch.device, rotated_bytes: int
) -> list[Operation]:
    """What is timed, and buffers of `rotated_bytes` in all for each."""

    def kernel(step: str) -> Callable[..., None]:
        found: Callable[..., None] = getattr(OPS, f"{codec.operations}_{step}").default
        return found

    def layout(length: int) -> tuple[Tensor, int]:
        own = lay_out(codec, "blocks of 2048", length, dtype)
        return own.table.to(device), own.num_bytes

    def encoded(x: Tensor) -> tuple[Tensor, Tensor]:
        table, num_bytes = layout(x.numel())
        wire = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        kernel("encode")(x, table, wire)
        return wire, table

    def encode() -> tuple[Call, list[Tensor]]:
        x = filled(num_elements, dtype, device)
        wire, table = encoded(x)
        call = kernel("encode")
        return lambda: call(x, table, wire), [x, table, wire]

    def decode() -> tuple[Call, list[Tensor]]:
        x = filled(num_elements, dtype, device)
        wire, table = encoded(x)
        call = kernel("decode")
        return lambda: call(wire, table, x), [x, table, wire]

    def feedback() -> tuple[Call, list[Tensor]]:
        x, residual = filled(2 * num_elements, dtype, device).view(2, -1).unbind()
        wire, table = encoded(x)
        left_out = torch.zeros_like(x)
        call = kernel("encode_feedback")
        return lambda: call(x, residual, table, wire, left_out), [x, residual, left_out, table, wire]

    def chunked(step: str, length: int) -> Callable[[], tuple[Call, list[Tensor]]]:
        def make() -> tuple[Call, list[Tensor]]:
            wire, table = encoded(filled(length, dtype, device))
            rows = wire.repeat(NUM_CHUNKS, 1)
            if step == "decode_mean":
                wire = torch.zeros(length, device=device)
            call = kernel(step)
            return lambda: call(rows, table, float(NUM_CHUNKS), wire), [rows, table, wire]

        return make

    chunk = num_elements // NUM_CHUNKS
    makers = {
        "encode": encode,
        "decode": decode,
        "decode_mean_encode": chunked("decode_mean_encode", chunk),
        "decode_mean_encode of all": chunked("decode_mean_encode", num_elements),
    }
    if dtype == torch.float32:
        makers |= {"decode_mean": chunked("decode_mean", chunk), "encode_feedback": feedback}
    return [Operation(name, make, rotated_bytes) for name, make in makers.items()]


def check(codec: type[Any], num_elements: int, device: torch.device) -> None:
    """Raise RuntimeError where decoding does not give back what was encoded: a wrong kernel's time is of no use."""
    x = filled(num_elements, torch.float32, device)
    own = lay_out(codec, "blocks of 2048", num_elements, torch.float32)
    table, wire = own.table.to(device), torch.zeros(own.num_bytes, dtype=torch.uint8, device=device)
    decoded = torch.full_like(x, torch.nan)
    getattr(OPS, f"{codec.operations}_encode")(x, table, wire)
    getattr(OPS, f"{codec.operations}_decode")(wire, table, decoded)
    error = float((decoded - x).abs().max())
    largest = float(x.max() - x.min()) / 255 if codec is MinMaxUInt8 else 2 * float(x.abs().max())
    if not error <= largest:
        raise RuntimeError(f"{codec.__name__} on {device}: decoded values are off by {error}, not at most {largest}")


def measure(num_elements: int, rounds: int, device: torch.device, paths: dict[str, str]) -> list[Row]:
    """A row for each codec that has kernels on `device`, element type and operation."""
    rows: list[Row] = []
    rotated_bytes = min(ROTATED_BYTES, 64 * num_elements)
    for codec in CODECS:
        path = paths[f"{codec.operations}_encode"]
        if path == "reference":
            continue
        check(codec, num_elements, device)
        for dtype in (torch.float32, torch.bfloat16):
            for operation in operations_of(codec, dtype, num_elements, device, rotated_bytes):
                contestants = {"copy": operation.copies(device), "operation": operation.run}
                milliseconds = alternated_ms(device, contestants, rounds, head_start=True)
                ms = statistics.median(milliseconds["operation"]) / len(operation.calls)
                copy_ms = statistics.median(milliseconds["copy"]) / len(operation.calls)
                target = LEAST_PERCENT.get(operation.name.split(" of ")[0]) if codec is MinMaxUInt8 else None
                rows.append(
                    {
                        "path": path,
                        "codec": codec.__name__,
                        "dtype": str(dtype).removeprefix("torch."),
                        "operation": operation.name,
                        "num_bytes": operation.num_bytes,
                        "num_sets": len(operation.calls),
                        "ms": ms,
                        "copy_ms": copy_ms,
                        "gb_per_s": operation.num_bytes / ms / 1e6,
                        "copy_gb_per_s": operation.num_bytes / copy_ms / 1e6,
                        "percent_of_copy": 100 * copy_ms / ms,
                        "target_percent": target,
                        "is_met": None if target is None else 100 * copy_ms / ms >= target,
                    }
                )
                del operation, contestants
    return rows


def launches(device: torch.device) -> dict[str, float]:
    """Microseconds of the host for one call on a tiny tensor: of each operation, and of a copy."""
    result: dict[str, float] = {}
    x = torch.ones(BLOCK, device=device)
    y = torch.zeros_like(x)
    result["copy"] = host_us(device, lambda: y.copy_(x))
    for operation in operations_of(MinMaxUInt8, torch.float32, 2 * BLOCK * NUM_CHUNKS, device, 0):
        if " of " not in operation.name:
            result[operation.name] = host_us(device, operation.calls[0])
    return result


def table_of(rows: list[Row]) -> str:
    """The rows as a Markdown table. GB are 1e9 bytes."""
    lines = ["| path | codec | type | operation | ms | GB/s | copy GB/s | % of the copy's | target |"]
    lines.append("| --- | --- | --- | --- | ---: | ---: | ---: | ---: | --- |")
    for row in rows:
        target = (
            "" if row["target_percent"] is None else f"{row['target_percent']} {'met' if row['is_met'] else 'MISSED'}"
        )
        lines.append(
            f"| {row['path']} | {row['codec']} | {row['dtype']} | {row['operation']} | {row['ms']:.4f} | "
            f"{row['gb_per_s']:.0f} | {row['copy_gb_per_s']:.0f} | {row['percent_of_copy']:.1f} | {target} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--num-elements", type=int, default=NUM_ELEMENTS)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result there, too")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: there is no GPU that this torch can use")
    device = torch.device(arguments.device)
    native.load()
    status = [row for row in native.status() if row.device == device.type]
    paths = {row.operation: row.path for row in status}
    if paths[f"{MinMaxUInt8.operations}_encode"] == "reference":
        sys.exit(f"there are no native kernels to time: {status[0].why}")

    rows = measure(arguments.num_elements, arguments.rounds, device, paths)
    launch_us = launches(device)

    print(table_of(rows))
    print("\nmicroseconds of the host for a call: " + ", ".join(f"{name} {us:.1f}" for name, us in launch_us.items()))
    if arguments.json is not None:
        result = {
            "environment": environment_record(),
            "num_elements": arguments.num_elements,
            "num_chunks": NUM_CHUNKS,
            "rounds": arguments.rounds,
            "results": rows,
            "launch_us": launch_us,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
