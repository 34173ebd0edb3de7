"""Training without waiting: weights averaged in the background, on a slow network and with a slow rank.

Run it with two processes on this machine; it takes about twenty seconds:

    torchrun --standalone --nproc-per-node=2 tutorials/03_async_on_a_slow_network.py

That shows how a slow rank affects the others; the network within a machine is fast. On Linux, this command gives the
processes a private network of 100 Mbit/s, and shows both effects (if it is not permitted, run it as root without the
two options about users):

    unshare --user --map-root-user --net sh -c "ip link set lo up &&
        tc qdisc add dev lo root tbf rate 100mbit burst 256kb latency 100ms &&
        torchrun --standalone --local-addr=localhost --nproc-per-node=2 tutorials/03_async_on_a_slow_network.py"

With DistributedDataParallel all ranks step together, at the speed of the network and of the slowest rank. With
AsyncModelAverage each rank trains alone at its own speed, and a background thread averages the weights periodically.
Both get the same time here: first with two equally fast ranks, and then with rank 1 slow, as on a busy machine.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb

CONTEXT, BATCH = 8, 256
STEPS_ALIKE, STEPS_SLOW, PAUSE_S = 24, 12, 0.3
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


def build() -> tuple[DistributedDataParallel, torch.optim.Optimizer, torch.Generator]:
    """Return a network that predicts a byte from the 8 before it, its optimizer, and the source of its batches."""
    torch.manual_seed(0)
    layers = [nn.Embedding(256, 16), nn.Flatten(), nn.Linear(CONTEXT * 16, 512), nn.ReLU(), nn.Linear(512, 256)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    return DistributedDataParallel(model), optimizer, torch.Generator().manual_seed(dist.get_rank())


def step(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, batches: torch.Generator, *, is_slow: bool
) -> None:
    """One step of any DDP script, which takes longer on rank 1 if `is_slow`."""
    if is_slow and dist.get_rank() == 1:
        time.sleep(PAUSE_S)
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH, 1), generator=batches)
    windows = TEXT[starts + torch.arange(CONTEXT + 1)]
    loss = F.cross_entropy(ddp(windows[:, :-1]), windows[:, -1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@torch.no_grad()
def evaluate(ddp: DistributedDataParallel) -> float:
    """Return the loss on every fourth position of the text. Each rank takes a share, so all need the same weights."""
    starts = torch.arange(dist.get_rank(), len(TEXT) - CONTEXT, 4 * dist.get_world_size())
    windows = TEXT[starts[:, None] + torch.arange(CONTEXT + 1)]
    loss = F.cross_entropy(ddp.module(windows[:, :-1]), windows[:, -1])
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def largest_difference(ddp: DistributedDataParallel) -> float:
    """Return the largest difference between two ranks in any weight."""
    weights = nn.utils.parameters_to_vector(ddp.parameters()).detach()
    extremes = torch.stack([weights, -weights])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    return extremes.sum(0).max().item()


def report(name: str, steps_per_s: float, ddp: DistributedDataParallel, rounds: str = "") -> None:
    """Print a line of the table on rank 0."""
    speeds = [0.0] * dist.get_world_size()
    dist.all_gather_object(speeds, steps_per_s)
    loss = evaluate(ddp)
    if dist.get_rank() == 0:
        print(f"{name:24} {' '.join(f'{speed:8.1f}' for speed in speeds)} {loss:12.3f}  {rounds}", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    phases = [("ranks alike", STEPS_ALIKE, False), ("rank 1 slow", STEPS_SLOW, True)]
    if dist.get_rank() == 0:
        print("                         steps per second on each rank, and the loss", flush=True)

    ddp, optimizer, batches = build()
    seconds = []
    for phase, num_steps, is_slow in phases:
        start_s = time.perf_counter()
        for _ in range(num_steps):
            step(ddp, optimizer, batches, is_slow=is_slow)
        seconds.append(time.perf_counter() - start_s)
        report(f"DDP, {phase}", num_steps / seconds[-1], ddp)

    ddp, optimizer, batches = build()
    # `sync_interval_ms` is the pause between two rounds. More rounds keep the ranks closer together. No step waits.
    with tb.attach(ddp, optimizer, tb.AsyncModelAverageAlgorithm(sync_interval_ms=200)) as attachment:
        for (phase, _, is_slow), seconds_of_phase in zip(phases, seconds, strict=True):
            rounds_before = attachment.impl.num_rounds
            num_steps, start_s = 0, time.perf_counter()
            while time.perf_counter() - start_s < seconds_of_phase:  # however many steps the other ranks take
                step(ddp, optimizer, batches, is_slow=is_slow)
                num_steps += 1
            steps_per_s = num_steps / (time.perf_counter() - start_s)
            difference_before = largest_difference(ddp)
            attachment.impl.abort(ddp)  # stops the rounds once all ranks have called it; all get the mean
            rounds = attachment.impl.num_rounds - rounds_before
            difference_after = largest_difference(ddp)
            differences = f"weights differ by {difference_before:.2g}, after abort by {difference_after:g}"
            report(f"async, {phase}", steps_per_s, ddp, f"{rounds} rounds; {differences}")
            attachment.impl.resume(ddp)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
