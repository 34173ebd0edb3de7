"""Times the codecs in plain torch and under torch.compile beside their native kernels, alternated in one run.

    python benchmarks/plain_torch.py [--num-elements N] [--rounds 9] [--json PATH]

For a device without kernels: there the codecs run in plain torch. All is on the CPU, with one thread, on one parameter
in float32. A time is a median over the rounds of CPU time, in which other processes of the machine do not count, and a
factor is the time in kernels' times. The bits are what an operation has written, compared with what the kernel has.
Calls are those of torch that plain torch makes: on a GPU each would be a launch. Compiled is compiled anew, without the
caches on disk; the CPU time of that is the compiler's too. What is timed: codec_cases.py.
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
    """Counts the calls of torch, apart from those that make views."""

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
    """Whether all tensors have the same bytes."""
    pairs = [(one, other) for one, other in zip(first, second, strict=True) if isinstance(one, Tensor)]
    return all(torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)) for one, other in pairs)


def measure(case: Case, name: str, rounds: int) -> Row:
    """Time one operation in the three ways."""
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
    """The rows as a Markdown table."""
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
    parser.add_argument("--num-elements", type=int, default=NUM_ELEMENTS, help="of the tensor (default: 1.6 M)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.compiler.config.force_disable_caches = True
    torch._inductor.config.compile_threads = 1  # in this process, whose CPU time is known
    native.load()
    paths = {row.operation: row.path for row in native.status() if row.device == CPU.type}
    if paths[f"{MinMaxUInt8.op_prefix}_encode"] == "reference":
        sys.exit("there are no native kernels to compare with")
    rows = []
    for codec in CODECS:
        case = Case(codec, ONE_PARAMETER, torch.float32, CPU, arguments.num_elements, NUM_SENDERS)
        for name in Buffers(case).arguments():
            torch._dynamo.reset()  # each operation is compiled as in a program that calls it alone
            rows.append(measure(case, name, arguments.rounds))
    print(f"{arguments.num_elements} elements, {NUM_SENDERS} senders\n\n{table_of(rows)}")
    result = {"num_elements": arguments.num_elements, "num_senders": NUM_SENDERS, "rounds": arguments.rounds}
    write_record(arguments.json, {**result, "results": rows})


if __name__ == "__main__":
    main()
