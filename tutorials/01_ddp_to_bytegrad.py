"""From plain DDP to 8-bit gradients in three lines.

Run it with two processes on this machine; it takes about ten seconds:

    torchrun --standalone --nproc-per-node=2 tutorials/01_ddp_to_bytegrad.py

It trains a small network twice, from the same weights on the same batches: first with plain DistributedDataParallel,
then with ByteGrad, which sends each gradient element in 8 bits instead of 32. The training loop is the same for both.
The lines that differ are marked with (1), (2) and (3). At the end it prints the losses and the bytes of both runs.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb  # (1)

CONTEXT, BATCH, STEPS = 8, 256, 200

# Real text that every Python installation has: a module of the standard library.
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


def build() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Return a network that predicts the next byte from the 8 before it, the same at every call, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, 16),
        nn.Flatten(),
        nn.Linear(CONTEXT * 16, 512),
        nn.ReLU(),
        nn.Linear(512, 256),
    )
    return DistributedDataParallel(model), torch.optim.Adam(model.parameters(), lr=3e-3)


def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> float:
    """The training loop of any DDP script. Return this rank's mean loss over the last 20 steps, in nats per byte."""
    batches = torch.Generator().manual_seed(dist.get_rank())  # each rank has different batches
    losses = []
    for step in range(STEPS):
        starts = torch.randint(len(TEXT) - CONTEXT, (BATCH, 1), generator=batches)
        windows = TEXT[starts + torch.arange(CONTEXT + 1)]
        loss = F.cross_entropy(ddp(windows[:, :-1]), windows[:, -1])
        optimizer.zero_grad()
        loss.backward()  # in here, DDP averages the gradients over the ranks
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0:
            say(f"  step {step:3}: loss {losses[-1]:.3f}")
    return sum(losses[-20:]) / 20


def say(line: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    dist.init_process_group("gloo")

    say("plain DDP")
    ddp, optimizer = build()
    plain_loss = train(ddp, optimizer)

    say("ByteGrad")
    ddp, optimizer = build()
    recorder = tb.observe.Recorder()  # (2) counts the bytes; optional
    with tb.attach(ddp, optimizer, tb.ByteGradAlgorithm(), observers=[recorder]):  # (3)
        bytegrad_loss = train(ddp, optimizer)

    # gloo's all-reduce is a ring: each of n ranks sends 2 (n-1)/n times the bytes of the float32 gradients. ByteGrad's
    # bytes are measured. They are slightly more than a quarter: every 2048 gradients take a few more bytes for their
    # range.
    ranks = dist.get_world_size()
    plain_bytes = STEPS * 2 * (ranks - 1) / ranks * 4 * sum(parameter.numel() for parameter in ddp.parameters())
    say(f"plain DDP: loss {plain_loss:.3f}, {plain_bytes / 1e6:.1f} MB sent by each rank")
    say(f"ByteGrad:  loss {bytegrad_loss:.3f}, {recorder.bytes_sent / 1e6:.1f} MB sent by each rank")
    say(f"{plain_bytes / recorder.bytes_sent:.2f} times fewer bytes")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
