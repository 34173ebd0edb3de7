"""Training that waits for nobody: weights averaged in the background, on a slow network and with a slow rank.

Run it over two processes on this machine; it takes about twenty-five seconds:

    torchrun --standalone --nproc-per-node=2 tutorials/03_async_on_a_slow_network.py

The loopback is fast, so that shows what a slow rank does to the others. On Linux this gives the two processes a network
of their own, of 100 Mbit/s, and shows what a slow network does; where `unshare` is not permitted, run it as root:

    unshare --user --map-root-user --net sh -c "ip link set lo up && \
        tc qdisc add dev lo root tbf rate 100mbit burst 256kb latency 100ms && \
        torchrun --standalone --local-addr=localhost --nproc-per-node=2 tutorials/03_async_on_a_slow_network.py"

With DistributedDataParallel all ranks take a step together, at the speed of the network and of the slowest rank. With
AsyncModelAverage each trains alone at its own speed, and a background thread averages the weights now and then. Both
get the same time here: first with two ranks alike, and then with rank 1 as slow as on a busy machine.
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
    """A network that guesses the next byte from the 8 before it, its optimizer, and the source of its batches."""
    torch.manual_seed(0)
    layers = [nn.Embedding(256, 16), nn.Flatten(), nn.Linear(CONTEXT * 16, 512), nn.ReLU(), nn.Linear(512, 256)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    return DistributedDataParallel(model), optimizer, torch.Generator().manual_seed(dist.get_rank())


def step(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, batches: torch.Generator, *, is_slow: bool
) -> None:
    """One step of any DDP script."""
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH, 1), generator=batches)
    windows = TEXT[starts + torch.arange(CONTEXT + 1)]
    loss = F.cross_entropy(ddp(windows[:, :-1]), windows[:, -1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if is_slow and dist.get_rank() == 1:
        time.sleep(PAUSE_S)


@torch.no_grad()
def evaluate(ddp: DistributedDataParallel) -> float:
    """The loss on the whole text, of which every rank reads its share: all have to hold the same weights for it."""
    starts = torch.arange(dist.get_rank(), len(TEXT) - CONTEXT, 4 * dist.get_world_size())
    windows = TEXT[starts[:, None] + torch.arange(CONTEXT + 1)]
    loss = F.cross_entropy(ddp.module(windows[:, :-1]), windows[:, -1])
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()
