"""Measures the host's work for a gradient bucket of ByteGrad over NCCL, by the number of ranks, without a GPU.

    python benchmarks/host_time.py [--ranks 2 4 8 16 64] [--rounds 31] [--json PATH]

Counts the kernels and NCCL operations that DDP's hook launches for one bucket, and times the hook. GPU and NCCL are
simulated (pretended_gpu.py): launches are recorded and not executed. The time is therefore that of Python, without the
few microseconds that CUDA needs to queue each kernel. All ranks are on one node and create their groups on threads;
then only rank 0's hook runs. The hooks take turns; a time is the median over the rounds, each the mean of CALLS calls,
in CPU time. The floor is a hook that only completes its future.
"""

import functools
import statistics
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

import torchbagua as tb
from environment import make_parser, write_record
from pretended_gpu import LaunchesOfTorch, PretendedNccl, pretend_gpu
from table import table
from timing import alternated, host_us
from torchbagua import native

CALLS = 50
FLOOR = "a hook that does nothing"
# The targets at any number of ranks.
MOST_LAUNCHES = 6
MOST_US = 60.0
WIDTH = 128
# Parameters of a transformer layer with small sizes: the host's time does not depend on them if every rank has a block.
SHAPES = ((WIDTH,), (3 * WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH))

Hook = Callable[[], object]


class MiddleBucket:
    """A bucket of gradients as DDP passes it to its hook, neither the first nor the last of a backward."""

    def __init__(self) -> None:
        self._parameters = [torch.zeros(shape) for shape in SHAPES]
        self._buffer = torch.zeros(sum(parameter.numel() for parameter in self._parameters))

    def index(self) -> int:
        return 1

    def is_last(self) -> bool:
        return False

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def buffer(self) -> torch.Tensor:
        return self._buffer


def make_hook(algorithm: tb.Algorithm, num_ranks: int) -> tuple[Hook, "Counter[str]"]:
    """Return DDP's hook on rank 0 of `num_ranks`, bound to a bucket, and the counter of its NCCL calls."""
    store = dist.HashStore()
    groups = [PretendedNccl(store, rank, num_ranks) for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as pool:
        impls = list(pool.map(algorithm.reify, groups))
    bucket: Any = MiddleBucket()
    return functools.partial(tb.comm_hook, impls[0], bucket), groups[0].calls


def do_nothing() -> object:
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    return future


def measure(ranks: list[int], rounds: int) -> dict[str, Any]:
    """Return a row for each number of ranks, and the floor."""
    native.load()
    launches = pretend_gpu()
    hooks = {num_ranks: make_hook(tb.ByteGradAlgorithm(), num_ranks) for num_ranks in ranks}
    counts: dict[int, tuple[dict[str, int], dict[str, int]]] = {}
    for num_ranks, (hook, nccl) in hooks.items():
        hook()  # the first call creates objects that the others reuse
        launches.clear()
        nccl.clear()
        with LaunchesOfTorch(launches):
            hook()
        counts[num_ranks] = dict(launches), dict(nccl)
    calls: dict[str, Hook] = {FLOOR: do_nothing} | {str(num_ranks): hook for num_ranks, (hook, _) in hooks.items()}
    host = torch.device("cpu")
    timed = {name: functools.partial(host_us, host, call, CALLS) for name, call in calls.items()}
    us = {name: statistics.median(values) for name, values in alternated(timed, rounds).items()}
    rows = [
        {
            "ranks": num_ranks,
            "launches": sum(of_kernels.values()),
            "nccl_calls": sum(of_nccl.values()),
            "host_us": us[str(num_ranks)],
            "floor_ratio": us[str(num_ranks)] / us[FLOOR],
            "is_met": sum(of_kernels.values()) <= MOST_LAUNCHES and us[str(num_ranks)] <= MOST_US,
            "calls_by_name": of_kernels | of_nccl,
        }
        for num_ranks, (of_kernels, of_nccl) in counts.items()
    ]
    return {"floor_us": us[FLOOR], "most_launches": MOST_LAUNCHES, "most_us": MOST_US, "results": rows}


def table_of(result: dict[str, Any]) -> str:
    """Return the rows as a Markdown table, followed by the target and the floor."""
    head = ["ranks", "kernel launches", "NCCL calls", "host us", "x floor", "target", "launched"]
    rows = [
        [
            *(str(row[name]) for name in ("ranks", "launches", "nccl_calls")),
            f"{row['host_us']:.1f}",
            f"{row['floor_ratio']:.1f}",
            "met" if row["is_met"] else "MISSED",
            ", ".join(f"{name} x{count}" for name, count in row["calls_by_name"].items()),
        ]
        for row in result["results"]
    ]
    target = f"target: at most {MOST_LAUNCHES} launches and {MOST_US:.0f} us"
    return f"{table(head, rows)}\n\nper bucket; {target}; floor, {FLOOR}: {result['floor_us']:.2f} us"


def main() -> None:
    parser = make_parser(__doc__, rounds=31)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 64])
    arguments = parser.parse_args()
    result = measure(arguments.ranks, arguments.rounds)
    print(table_of(result))
    write_record(arguments.json, {"rounds": arguments.rounds, "calls": CALLS, **result})


if __name__ == "__main__":
    main()
