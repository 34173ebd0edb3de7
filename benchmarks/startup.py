"""Measures the cost of `attach` with increasing numbers of ranks on this machine: time, sockets, threads and memory.

    python benchmarks/startup.py [--ranks 8 16 32 64] [--only NAME ...] [--rounds 1] [--json PATH]

Ranks are processes forked from one that has imported torch, over the loopback device. Each opens torch's default group,
attaches an algorithm, trains three steps and detaches. The resources of an attachment are the difference between after
training and before `attach`. Memory is a rank's unshared memory (Private_Clean and Private_Dirty of Linux). With more
ranks than cores, the time is mostly CPU time; the table also lists the CPU seconds of all ranks.
"""

import importlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import torchbagua as tb
from environment import make_parser, write_record
from table import table

ALGORITHMS = {
    "bytegrad": tb.ByteGradAlgorithm(),
    "bytegrad, group given": tb.ByteGradAlgorithm(),
    "ring": tb.DecentralizedAlgorithm(peer_selection_mode=tb.topology.Ring()),
}
DEADLINE_S = 600.0


def read_figures() -> dict[str, float]:
    """Read the resources that this process uses now."""
    private_kib = sum(
        int(line.split()[1]) for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if "Private_" in line
    )
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "private_mib": private_kib / 1024,
        "processor_s": usage.ru_utime + usage.ru_stime,
        "at_s": time.monotonic(),
    }


def run_rank(rank: int, size: int, port: int, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    module = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    ddp = torch.nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    train(ddp, optimizer)
    dist.barrier()
    before = read_figures()
    group = tb.BaguaProcessGroup(dist.group.WORLD) if name.endswith("given") else None
    attachment = tb.attach(ddp, optimizer, ALGORITHMS[name], process_group=group)
    attached = read_figures()
    train(ddp, optimizer)
    trained = read_figures()
    Path(folder, f"{rank}.json").write_text(json.dumps([before, attached, trained]))
    dist.barrier()
    attachment.detach()
    dist.barrier()
    dist.destroy_process_group()


def train(ddp: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()


def measure(size: int, name: str) -> dict[str, Any]:
    """Run the ranks once."""
    with tempfile.TemporaryDirectory(prefix="torchbagua-startup-") as folder:
        # In a separate process: the store has threads, and a forked rank does not inherit threads.
        ports, has_ended = mp.SimpleQueue(), mp.Event()
        server = mp.get_context("fork").Process(target=serve, args=(ports, has_ended), daemon=True)
        server.start()
        ranks = mp.start_processes(
            run_rank, (size, ports.get(), name, folder), nprocs=size, join=False, start_method="fork"
        )
        end_s = time.monotonic() + DEADLINE_S
        try:
            while not ranks.join(timeout=1.0):
                if time.monotonic() > end_s:
                    raise TimeoutError(f"timed out after {DEADLINE_S:g} s waiting for {size} ranks")
        finally:
            for process in ranks.processes:
                process.kill()
            has_ended.set()
            server.join(10)
        figures = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
    before, attached, trained = zip(*figures, strict=True)
    return {
        "attach_s": max(rank["at_s"] for rank in attached) - min(rank["at_s"] for rank in before),
        "attach_processor_s_of_all": sum(
            b["processor_s"] - a["processor_s"] for a, b in zip(before, attached, strict=True)
        ),
        "steps_processor_s_of_all": sum(
            b["processor_s"] - a["processor_s"] for a, b in zip(attached, trained, strict=True)
        ),
        **{
            key: statistics.median(b[key] - a[key] for a, b in zip(before, trained, strict=True))
            for key in ("descriptors", "threads", "private_mib")
        },
        "private_mib_of_a_rank": statistics.median(rank["private_mib"] for rank in trained),
    }


def total(figures: Sequence[dict[str, float]], key: str) -> float:
    return sum(rank[key] for rank in figures)


def serve(ports: Any, has_ended: Any) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ports.put(store.port)
    has_ended.wait(2 * DEADLINE_S)


def main() -> int:
    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--only", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    arguments = parser.parse_args()
    importlib.import_module("torch.distributed.fsdp")  # imported before the fork, so that no rank has to import it
    results = []
    for name in arguments.only:
        for size in arguments.ranks:
            runs = [measure(size, name) for _ in range(arguments.rounds)]
            results.append({"algorithm": name, "ranks": size, "runs": runs})
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    rows = []
    for result in results:
        median = {key: statistics.median(run[key] for run in result["runs"]) for key in result["runs"][0]}
        rows.append(
            [
                result["algorithm"],
                str(result["ranks"]),
                f"{median['attach_s']:.2f}",
                f"{median['attach_processor_s_of_all']:.2f}",
                *(f"{median[key]:.0f}" for key in ("descriptors", "threads")),
                f"{median['private_mib']:.1f}",
            ]
        )
    head = ["algorithm", "ranks", "attach, s", "CPU s, all ranks", "descriptors", "threads", "private MiB"]
    print(table(head, rows))
    write_record(arguments.json, {"results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
