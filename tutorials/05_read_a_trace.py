"""What does communication cost, and when? Measure, change one thing, and measure again.

Run it with two processes on this machine; it takes about twenty seconds:

    torchrun --standalone --nproc-per-node=2 tutorials/05_read_a_trace.py runs/traces

The network within a machine is fast. On Linux, this command gives the processes a private network of 1 Gbit/s, on which
communication takes a visible part of a step (if it is not permitted, run it as root without the two options about
users):

    unshare --user --map-root-user --net sh -c "ip link set lo up &&
        tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 100ms &&
        torchrun --standalone --local-addr=localhost --nproc-per-node=2 tutorials/05_read_a_trace.py runs/traces"

Then open the files that it has written:

    tensorboard --logdir runs/traces                  charts, and the timeline of a step
    torchbagua trace show runs/traces/small_buckets   a table, with a row for each rank
    torchbagua trace draw runs/traces/small_buckets   the timeline of both ranks, as a picture
    torchbagua trace merge runs/traces/small_buckets  one file with both ranks for https://ui.perfetto.dev

How to read the tables it prints: DDP puts gradients into buckets, and a bucket is sent while backward computes the next
one. "waited" is the time that training blocks at the end of backward, and "overlap" is the share of communication that
training does not wait for. The first run uses DDP's default buckets of 25 MiB, and the whole model fits into one:
nothing is sent before backward is done, and training waits for all communication. The second run uses buckets of 1 MiB,
and backward hides most of the communication. The bytes are the same. (Both ranks send through one interface here, so
each gets half of its rate.)
"""

import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb

WIDTH, NUM_LAYERS, BATCH, STEPS = 512, 10, 512, 40


def train(bucket_cap_mb: float, folder: Path) -> tb.observe.Summary:
    """Train for `STEPS` steps with a trace in `folder`; return what communication has cost this rank."""
    torch.manual_seed(0)
    layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=bucket_cap_mb)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    # Observers: tracing needs only these two lines, and `observers=` below.
    charts = tb.observe.TensorBoardTrace(folder, every_n_steps=10)
    timeline = tb.observe.PerfettoTrace(folder)
    with tb.attach(ddp, optimizer, "bytegrad", observers=[charts, timeline]) as attachment:
        for _ in range(STEPS):
            x = torch.randn(BATCH, WIDTH)
            optimizer.zero_grad()
            (ddp(x) - x).square().mean().backward()
            optimizer.step()
    return attachment.summary()


def main() -> None:
    output = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/traces")
    torch.set_num_threads(1)  # in each process, since they share this machine
    dist.init_process_group("gloo")
    for bucket_cap_mb, name in ((25, "large_buckets"), (1, "small_buckets")):
        if dist.get_rank() == 0:
            shutil.rmtree(output / name, ignore_errors=True)  # from an earlier run of this tutorial
        dist.barrier()
        summary = train(bucket_cap_mb, output / name)
        if dist.get_rank() == 0:
            print(f"\n{name}: up to {bucket_cap_mb} MiB\n\n{summary}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
