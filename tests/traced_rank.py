"""A rank, in a separate network namespace, that trains with both traces and counts its interface's bytes.

Usage: traced_rank.py RANK NUM_RANKS ADDRESS ALGORITHM FOLDER, where ADDRESS is rank 0's.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from tracing import algorithm_of

NUM_STEPS = 20
EVERY = 5


def sent_bytes() -> int:
    """Return the bytes that eth0 has sent so far; field 9 of its line counts transmitted bytes."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.split(":")[0].strip() == "eth0")
    return int(line.split(":")[1].split()[8])


def main(rank: int, num_ranks: int, address: str, name: str, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:29500", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60)
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    algorithm, optimizer = algorithm_of(name, ddp.parameters())
    traces = [tb.observe.TensorBoardTrace(folder, EVERY, ranks=range(num_ranks)), tb.observe.PerfettoTrace(folder)]
    with tb.attach(ddp, optimizer, algorithm, observers=traces) as attachment:
        before = sent_bytes()
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            ddp(torch.randn(8, 512)).square().mean().backward()
            optimizer.step()
    result = {
        "interface_bytes": sent_bytes() - before,
        "bytes_sent": attachment.summary().figures.bytes_sent + attachment.summary().bytes_after,
        "clock_offsets": attachment.runner.process_group.clock_offsets,
    }
    (folder / f"result{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]))
