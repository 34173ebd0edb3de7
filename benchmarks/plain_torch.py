"""Times the codecs in plain torch, with torch.compile, and with their native kernels, alternated in one run.

    python benchmarks/plain_torch.py [--num-elements N] [--rounds 9] [--json PATH]

This shows the cost of a device without kernels, on which the codecs run in plain torch. Everything runs on the CPU,
with one thread, on one float32 parameter. A time is a median over the rounds of CPU time, which does not include other
processes of the machine. A factor is the ratio of a time to the kernel's time. "Same bits" compares an operation's
output with the kernel's. "Calls" counts the torch calls of plain torch: on a GPU each would be a launch. Operations are
compiled again, without the caches on disk, and the CPU time of that includes the compiler's. codec_cases.py defines the
timed operations.
"""

import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from codec_cases import CODECS, ONE_PARAMETER, OPS, Arguments, Buffers, Case
from environment import make_parser, write_record
from table import table
from timing import alternated, host_us
from torchbagua import native
from torchbagua.codecs import MinMaxUInt8
from torchbagua.native.ops import NATIVE_OPS

CPU = torch.device("cpu")
NUM_ELEMENTS = 1_638_400
NUM_SENDERS = 4

Row = dict[str, Any]


class CallCounter(TorchDispatchMode):
    """Counts the torch calls that do not create views."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += not func.is_view
        return func(*args, **(kwargs or {}))


def num_calls(call: Callable[[], object]) -> int:
    with CallCounter() as counter:
        call()
    return counter.num_calls


def same_bits(first: Arguments, second: Arguments) -> bool:
    """Return whether all tensors are bitwise identical."""
    pairs = [(left, right) for left, right in zip(first, second, strict=True) if isinstance(left, Tensor)]
    return all(torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8)) for left, right in pairs)


def measure(case: Case, name: str, rounds: int) -> Row:
    """Time one operation in three ways: native, plain and compiled."""
    operation = NATIVE_OPS[case.kernel(name)]
    ways: dict[str, Callable[..., object]] = {
        "native": getattr(OPS, case.kernel(name)).default,
        "plain": operation.compute,
        "compiled": torch.compile(operation.compute),
    }
    arguments = {way: Buffers(case).arguments()[name]() for way in ways}
    start_s = sum(os.times()[:4])
    ways["compiled"](*arguments["compiled"])
    compile_s = sum(os.times()[:4]) - start_s
    timed = {way: partial(host_us, CPU, partial(call, *arguments[way]), 1) for way, call in ways.items()}
    ms = {way: statistics.median(times) / 1e3 for way, times in alternated(timed, rounds).items()}
    return {
        "codec": case.codec.__name__,
        "operation": name,
        "native_ms": ms["native"],
        "plain_ms": ms["plain"],
        "compiled_ms": ms["compiled"],
        "plain_factor": ms["plain"] / ms["native"],
        "compiled_factor": ms["compiled"] / ms["native"],
        "plain_has_same_bits": same_bits(arguments["native"], arguments["plain"]),
        "compiled_has_same_bits": same_bits(arguments["native"], arguments["compiled"]),
        "compile_s": compile_s,
        "plain_calls": num_calls(partial(operation.compute, *arguments["plain"])),
    }


def table_of(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    head = [
        "codec",
        "operation",
        "native ms",
        "plain torch",
        "same bits",
        "calls",
        "compiled",
        "same bits",
        "compiled in s",
    ]
    body = []
    for row in rows:
        bits = ["yes" if row[f"{way}_has_same_bits"] else "NO" for way in ("plain", "compiled")]
        cells = [row["codec"], row["operation"], f"{row['native_ms']:.2f}", f"{row['plain_factor']:.1f} x", bits[0]]
        cells += [str(row["plain_calls"]), f"{row['compiled_factor']:.1f} x", bits[1], f"{row['compile_s']:.1f}"]
        body.append(cells)
    return table(head, body)


def main() -> None:
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument("--num-elements", type=int, default=NUM_ELEMENTS, help="size of the tensor (default: 1.6 M)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.compiler.config.force_disable_caches = True
    torch._inductor.config.compile_threads = 1  # compile in this process, so that its CPU time includes the compiler's
    native.load()
    paths = {row.operation: row.path for row in native.status() if row.device == CPU.type}
    if paths[f"{MinMaxUInt8.op_prefix}_encode"] == "reference":
        sys.exit("no native kernels to compare with")
    rows = []
    for codec in CODECS:
        case = Case(codec, ONE_PARAMETER, torch.float32, CPU, arguments.num_elements, NUM_SENDERS)
        for name in Buffers(case).arguments():
            torch._dynamo.reset()  # each operation is compiled as in a program that calls only this operation
            rows.append(measure(case, name, arguments.rounds))
    print(f"{arguments.num_elements} elements, {NUM_SENDERS} senders\n\n{table_of(rows)}")
    result = {"num_elements": arguments.num_elements, "num_senders": NUM_SENDERS, "rounds": arguments.rounds}
    write_record(arguments.json, {**result, "results": rows})


if __name__ == "__main__":
    main()
