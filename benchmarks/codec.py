"""Times the codecs' kernels and a copy, alternated in one run.

    python benchmarks/codec.py [--device cpu|cuda] [--num-elements N] [--rounds 31] [--json PATH]

A time is a median over the rounds. On the CPU, with one thread, all operations are compared with one copy of the
tensor, `y.copy_(x)`, 25 MiB if it is float32. An operation's limit is the fraction of the copy's time in which the copy
moves as many bytes as the operation has to read and write: elements, wire and table of blocks, each once. On a GPU each
operation is compared with a copy of as many bytes as that, so its limit is 1. The tensor has 67.1 M elements. A round
replays a CUDA graph of the operation on several sets of buffers, together several times the size of the L2 cache, so
that the cache contains none of them. The reference is the same operation in plain torch. codec_cases.py defines the
timed operations.

TORCHBAGUA_NATIVE selects the kernels.
"""

import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from codec_cases import BLOCK, CODECS, LAYOUTS, OF_ALL, ONE_BLOCK, ONE_PARAMETER, OPS, Arguments, Buffers, Case, Codec
from environment import make_parser, write_record
from table import table
from timing import alternated, elapsed_ms, host_us
from torchbagua import native
from torchbagua.codecs import MinMaxUInt8
from torchbagua.codecs.sparse import SparseCodec
from torchbagua.native.ops import NATIVE_OPS

COPY = "copy"
REFERENCE_ROUNDS = 3  # the reference takes as long as everything else

Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """The measurements on a type of device.

    Attributes:
        rotated_bytes: the least total size of the buffers that a round uses.
        least_sets: the least number of sets of buffers that a round uses.
        copies_tensor: whether the copy is of the whole tensor; if not, of as many bytes as an operation reads and
            writes.
        least_percent: target of MinMaxUInt8 in percent of the copy's speed, by operation.
    """

    num_elements: int
    num_senders: int
    layouts: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    rotated_bytes: int
    least_sets: int
    copies_tensor: bool
    least_percent: dict[str, int]


SETTINGS = {
    "cpu": Setting(
        num_elements=6_553_600,
        num_senders=4,
        layouts=tuple(LAYOUTS),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        rotated_bytes=0,
        least_sets=1,
        copies_tensor=True,
        least_percent={},
    ),
    "cuda": Setting(
        num_elements=2**26,
        num_senders=8,
        layouts=(ONE_PARAMETER,),
        dtypes=(torch.float32, torch.bfloat16),
        rotated_bytes=2**28,  # several times the largest L2 cache
        least_sets=2,
        copies_tensor=False,
        least_percent={"encode": 90, "decode": 85, "decode_mean_encode": 85},
    ),
}


def replayed(device: torch.device, calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Return a function that runs all calls; on a GPU it replays a CUDA graph, since the host launches too slowly."""

    def run_all() -> None:
        for call in calls:
            call()

    if device.type == "cpu":
        return run_all
    calls[0]()  # loads the kernel's module, which a capture must not
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all()
    return graph.replay


def measure_with_one_copy(case: Case, names: Sequence[str], setting: Setting, rounds: int) -> list[Row]:
    """Time these operations and a copy in turns."""
    first = Buffers(case)
    arguments = {name: [first.arguments()[name]()] for name in names}
    num_bytes = {name: num_tensor_bytes(own) for name, [own] in arguments.items()}
    for name, sets in arguments.items():
        num_sets = max(setting.least_sets, 1 + setting.rotated_bytes // num_bytes[name])
        sets += [cloned(sets[0]) for _ in range(num_sets - 1)]
    if setting.copies_tensor:
        copies = [partial(first.y.copy_, first.x)]
        copied_bytes = 2 * first.x.nbytes
    else:
        [name] = names
        shape = 2, num_bytes[name] // 2
        buffers = [torch.ones(shape, dtype=torch.uint8, device=case.device) for _ in arguments[name]]
        copies = [partial(target.copy_, source) for source, target in buffers]
        copied_bytes = buffers[0].nbytes
    calls: dict[str, list[Callable[[], object]]] = {COPY: [*copies]}
    for name, sets in arguments.items():
        kernel = getattr(OPS, case.kernel(name)).default
        calls[name] = [partial(kernel, *own) for own in sets]
    timed = {
        name: partial(elapsed_ms, case.device, replayed(case.device, own), head_start=True)
        for name, own in calls.items()
    }
    times = alternated(timed, rounds, warm_ups=2)
    ms = {name: statistics.median(values) / len(calls[name]) for name, values in times.items()}
    return [
        {
            "codec": case.codec.__name__,
            "layout": case.layout,
            "dtype": str(case.dtype).removeprefix("torch."),
            "operation": name,
            "num_bytes": num_bytes[name],
            "num_sets": len(calls[name]),
            "copy_ms": ms[COPY],
            "ms": ms[name],
            "ratio": ms[name] / ms[COPY],
            "limit": num_bytes[name] / copied_bytes,
            "percent_of_copy": 100 * ms[COPY] / ms[name],
            "gb_per_s": num_bytes[name] / ms[name] / 1e6,
        }
        for name in names
    ]


def reference_ms(case: Case, name: str) -> float:
    """Return the median milliseconds of the same operation in plain torch."""
    arguments = Buffers(case).arguments()[name]()
    timed = partial(elapsed_ms, case.device, partial(NATIVE_OPS[case.kernel(name)], *arguments))
    return statistics.median(alternated({name: timed}, REFERENCE_ROUNDS)[name])


def cloned(arguments: Arguments) -> Arguments:
    return tuple(argument.clone() if isinstance(argument, Tensor) else argument for argument in arguments)


def num_tensor_bytes(arguments: Arguments) -> int:
    return sum(argument.nbytes for argument in arguments if isinstance(argument, Tensor))


def measure(
    codecs: Sequence[Codec], setting: Setting, rounds: int, device: torch.device, paths: dict[str, str]
) -> list[Row]:
    """Return a row for each layout, element type, operation, and codec with kernels on `device`."""
    rows: list[Row] = []
    for codec, layout, dtype in itertools.product(codecs, setting.layouts, setting.dtypes):
        path = paths[f"{codec.op_prefix}_encode"]
        if path == "reference" or (issubclass(codec, SparseCodec) and layout == ONE_BLOCK):
            continue
        case = Case(codec, layout, dtype, device, setting.num_elements, setting.num_senders)
        if dtype == torch.float32:
            case.check()
        names = list(Buffers(case).arguments())
        for group in [names] if setting.copies_tensor else [[name] for name in names]:
            rows += [{"path": path, **row} for row in measure_with_one_copy(case, group, setting, rounds)]
        for row in rows[-len(names) :]:
            name = row["operation"]
            if device.type == "cpu":
                row["reference_ms"] = reference_ms(case, name)
            target = setting.least_percent.get(name.removesuffix(OF_ALL)) if codec is MinMaxUInt8 else None
            if target is not None:
                row |= {"target_percent": target, "is_met": row["percent_of_copy"] >= target}
    return rows


def launches(device: torch.device) -> dict[str, float]:
    """Return the host's microseconds for one call on a tiny tensor, for each operation and for a copy."""
    x, y = torch.ones(2, BLOCK, device=device)
    case = Case(MinMaxUInt8, ONE_PARAMETER, torch.float32, device, num_elements=16 * BLOCK, num_senders=8)
    calls: dict[str, Callable[[], object]] = {"copy": partial(y.copy_, x)}
    for name, make in Buffers(case).arguments().items():
        if not name.endswith(OF_ALL):
            calls[name] = partial(getattr(OPS, case.kernel(name)).default, *make())
    times = alternated({name: partial(host_us, device, call) for name, call in calls.items()}, 11)
    return {name: statistics.median(values) for name, values in times.items()}


def table_of(rows: list[Row]) -> str:
    """Return the rows as a Markdown table. GB are 1e9 bytes."""
    head = ["path", "codec", "layout", "type", "operation", "copy ms", "ms", "x copy", "limit", "x limit"]
    head += ["GB/s", "% of copy speed"]
    body = []
    for row in rows:
        target = "" if "is_met" not in row else f"{row['target_percent']} {'met' if row['is_met'] else 'MISSED'}"
        cells = [row[name] for name in ("path", "codec", "layout", "dtype", "operation")]
        cells += [f"{row[name]:.4f}" for name in ("copy_ms", "ms")]
        cells += [f"{row['ratio']:.2f}", f"{row['limit']:.2f}", f"{row['ratio'] / row['limit']:.2f}"]
        cells += [f"{row['gb_per_s']:.0f}", f"{row['percent_of_copy']:.1f}"]
        body.append([*cells, f"{row['reference_ms']:.2f}" if "reference_ms" in row else "", target])
    return table([*head, "reference ms", "target"], body)


def launches_line(launch_us: dict[str, float]) -> str:
    return "host microseconds per call: " + ", ".join(f"{name} {us:.1f}" for name, us in launch_us.items())


def main() -> None:
    parser = make_parser(__doc__, rounds=31)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--num-elements", type=int, help="size of the tensor (default: 6.6 M, on a GPU 67.1 M)")
    names = [codec.__name__ for codec in CODECS]
    parser.add_argument("--codecs", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: this torch cannot use a GPU")
    device, setting = torch.device(arguments.device), SETTINGS[arguments.device]
    if arguments.num_elements is not None:
        # Small tensors need many sets of buffers; those of 0.8 M elements still exceed the L2 cache several times.
        rotated_bytes = min(setting.rotated_bytes, 320 * arguments.num_elements)
        setting = replace(setting, num_elements=arguments.num_elements, rotated_bytes=rotated_bytes)
    torch.set_num_threads(1)
    native.load()
    status = [row for row in native.status() if row.device == device.type]
    paths = {row.operation: row.path for row in status}
    if paths[f"{MinMaxUInt8.op_prefix}_encode"] == "reference":
        sys.exit(f"no native kernels to time: {status[0].why}")

    codecs = [codec for codec in CODECS if codec.__name__ in arguments.codecs]
    rows = measure(codecs, setting, arguments.rounds, device, paths)
    launch_us = launches(device)

    print(
        f"{setting.num_elements} elements, {setting.num_senders} senders; {status[0].instruction_set or device.type}\n"
    )
    print(f"{table_of(rows)}\n\n{launches_line(launch_us)}")
    result = {
        "device": device.type,
        "instruction_set": status[0].instruction_set,
        "num_elements": setting.num_elements,
        "num_senders": setting.num_senders,
        "rounds": arguments.rounds,
        "results": rows,
        "launch_us": launch_us,
    }
    write_record(arguments.json, result)


if __name__ == "__main__":
    main()
