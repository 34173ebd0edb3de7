"""Times the codecs' kernels beside a copy of the same tensor, one thread, all operations alternated in one run.

    python benchmarks/codec.py [--rounds 31] [--json PATH]

A time is a median over the rounds. The copy is `y.copy_(x)` of the whole tensor in its own type: encode and decode move
fewer bytes than it does, and so does the mean, which decodes the chunks of 4 senders, a quarter of the tensor each, and
encodes their mean. `blocks of 2048` is one parameter in blocks of 2048 elements; `parameters` is transformer layers,
whose blocks follow their parameters; `one block` is all in one block, Bagua's one range.
"""

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from environment import environment_record
from torchbagua import native
from torchbagua.compressors import MinMaxUInt8, Sign1Bit
from torchbagua.compressors.blocks import TensorSpec, WireLayout
from torchbagua.native import reference

OPS = torch.ops.torchbagua
NUM_ELEMENTS = 6_553_600  # 25 MiB of float32
NUM_SENDERS = 4
BLOCK = 2048
WIDTH = 512
# Parameter sizes of a transformer layer.
NORM = [WIDTH, WIDTH]
ATTENTION = [3 * WIDTH * WIDTH, 3 * WIDTH, WIDTH * WIDTH, WIDTH]
FEED_FORWARD = [4 * WIDTH * WIDTH, 4 * WIDTH, 4 * WIDTH * WIDTH, WIDTH]
LAYER = [*NORM, *ATTENTION, *NORM, *FEED_FORWARD]
REFERENCE_ROUNDS = 3  # it takes as long as all the rest

Timed = dict[str, Callable[[], object]]


def parameters(num_elements: int) -> list[int]:
    """Sizes of the parameters of transformer layers, as many as fit, and one more for the rest."""
    sizes = LAYER * (num_elements // sum(LAYER))
    return [*sizes, num_elements - sum(sizes)]


# The sizes of the parameters, and the blocks that they are cut into; None is one.
LAYOUTS: dict[str, tuple[Callable[[int], list[int]], int | None]] = {
    "blocks of 2048": (lambda num_elements: [num_elements], BLOCK),
    "parameters": (parameters, BLOCK),
    "one block": (lambda num_elements: [num_elements], None),
}
CODECS: tuple[type[MinMaxUInt8 | Sign1Bit], ...] = (MinMaxUInt8, Sign1Bit)


def lay_out(codec: type[MinMaxUInt8 | Sign1Bit], layout: str, num_elements: int, dtype: torch.dtype) -> WireLayout:
    """The layout of `num_elements` elements in one chunk."""
    sizes, block = LAYOUTS[layout]
    spec = TensorSpec(tuple(sizes(num_elements)), dtype, torch.device("cpu"), layout)
    return codec(block).layout(spec, [0, num_elements])


def timed_functions(codec: type[MinMaxUInt8 | Sign1Bit], layout: str, dtype: torch.dtype) -> tuple[Timed, Timed]:
    """The copy and the native operations, which are compared; and the reference of each operation."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(NUM_ELEMENTS, generator=generator) * 1e-2).to(dtype)
    y = torch.zeros_like(x)
    whole = lay_out(codec, layout, NUM_ELEMENTS, dtype)
    wire = torch.zeros(whole.num_bytes, dtype=torch.uint8)
    part = lay_out(codec, layout, NUM_ELEMENTS // NUM_SENDERS, dtype)
    rows = torch.zeros(NUM_SENDERS, part.num_bytes, dtype=torch.uint8)
    for row, chunk in zip(rows, x.chunk(NUM_SENDERS), strict=True):
        codec().encode(chunk, part, row)
    mean_wire = torch.zeros(part.num_bytes, dtype=torch.uint8)

    def kernel(kernels: Any, operation: str) -> Callable[..., None]:
        found: Callable[..., None] = getattr(kernels, f"{codec.operations}_{operation}")
        return found

    def encode(kernels: Any) -> None:
        kernel(kernels, "encode")(x, whole.table, wire)

    def decode(kernels: Any) -> None:
        kernel(kernels, "decode")(wire, whole.table, y)

    def mean(kernels: Any) -> None:
        kernel(kernels, "decode_mean_encode")(rows, part.table, float(NUM_SENDERS), mean_wire)

    def feedback(kernels: Any) -> None:
        kernel(kernels, "encode_feedback")(x, residual, whole.table, wire, y)

    operations = [encode, decode, mean]
    if dtype == torch.float32:  # it reads two tensors and writes one, where the copy reads one
        residual = torch.randn(NUM_ELEMENTS, generator=generator) * 1e-2
        operations.append(feedback)
    compared: Timed = {"copy": lambda: y.copy_(x)}
    compared |= {operation.__name__: functools.partial(operation, OPS) for operation in operations}
    return compared, {operation.__name__: functools.partial(operation, reference) for operation in operations}


def median_ms(functions: Timed, rounds: int) -> dict[str, float]:
    """The median time of each function, called in turn, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(1 + rounds):
        for name, function in functions.items():
            start_ns = time.perf_counter_ns()
            function()
            times[name].append((time.perf_counter_ns() - start_ns) / 1e6)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def measure(rounds: int) -> list[dict[str, str | float]]:
    """A record for each codec, layout, element type and operation."""
    records: list[dict[str, str | float]] = []
    for codec, layout, dtype in itertools.product(CODECS, LAYOUTS, (torch.float32, torch.bfloat16, torch.float16)):
        compared, references = timed_functions(codec, layout, dtype)
        medians = median_ms(compared, rounds)
        reference_medians = median_ms(references, REFERENCE_ROUNDS)
        records += [
            {
                "codec": codec.__name__,
                "layout": layout,
                "dtype": str(dtype).removeprefix("torch."),
                "operation": operation,
                "copy_ms": medians["copy"],
                "native_ms": medians[operation],
                "ratio": medians[operation] / medians["copy"],
                "reference_ms": reference_medians[operation],
            }
            for operation in references
        ]
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result there, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    native.load()
    status = native.status()[0]
    if status.path == "reference":
        sys.exit(f"there are no native kernels to time: {status.why}")
    print(f"native kernels: {status.path}, {status.instruction_set}; {NUM_ELEMENTS} elements, one thread")

    records = measure(arguments.rounds)

    columns = ("codec", "layout", "dtype", "operation", "copy_ms", "native_ms", "ratio", "reference_ms")
    print(("{:<13}{:<15}{:<10}{:<10}" + "{:>14}" * 4).format(*columns))
    for record in records:
        print(("{:<13}{:<15}{:<10}{:<10}" + "{:>14.2f}" * 4).format(*(record[column] for column in columns)))
    if arguments.json is not None:
        result = {
            "environment": {**environment_record(), "instruction_set": status.instruction_set},
            "num_elements": NUM_ELEMENTS,
            "num_senders": NUM_SENDERS,
            "rounds": arguments.rounds,
            "results": records,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
