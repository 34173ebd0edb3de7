"""Adam with its momentum sent in 8 bits, or in one: the warm-up, the switch and the rest of a run.

Run it with two processes on this machine; it takes about twenty seconds:

    torchrun --standalone --nproc-per-node=2 tutorials/04_qadam.py

Adam divides a momentum, the running mean of gradients, by the root of a second moment, the running mean of their
squares. Compressed gradients would disturb both. But the second moment settles early: after a few hundred steps it
hardly changes, and can be frozen. From then on a step is linear in the gradient, and only the momentum has to be
averaged over the ranks. The momentum is smooth and loses little in 8 bits:

    steps 1 to W      torch.optim.Adam, on gradients averaged in float32
    from step W + 1   every rank forms b1 m + (1 - b1) g of its own gradient g; their mean, in 8 bits, is the momentum

One bit per element, its sign, is enough if every rank stores the residual and adds it to the next momentum that it
sends: error feedback.

The table shows the bytes that a rank sends in both parts of the run, and the loss compared with plain Adam and DDP. You
change three lines: the optimizer's class, its warmup_steps, and attach.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb

CONTEXT, BATCH, STEPS, WARMUP_STEPS, LR = 8, 128, 200, 60, 2e-3
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


def build() -> tuple[DistributedDataParallel, torch.Generator]:
    """Return a network that predicts the next byte from the 8 before it, and the source of its batches."""
    torch.manual_seed(0)
    layers = [nn.Embedding(256, 16), nn.Flatten(), nn.Linear(CONTEXT * 16, 256), nn.ReLU(), nn.Linear(256, 256)]
    return DistributedDataParallel(nn.Sequential(*layers)), torch.Generator().manual_seed(dist.get_rank())


def loss_on_batch(model: nn.Module, size: int, batches: torch.Generator) -> torch.Tensor:
    """Return the mean loss over `size` positions of the text, in nats per byte."""
    windows = TEXT[torch.randint(len(TEXT) - CONTEXT, (size, 1), generator=batches) + torch.arange(CONTEXT + 1)]
    return F.cross_entropy(model(windows[:, :-1]), windows[:, -1])


def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, batches: torch.Generator, steps: int) -> None:
    """The training loop of any DDP script."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss_on_batch(ddp, BATCH, batches).backward()
        optimizer.step()


def final_loss(ddp: DistributedDataParallel) -> float:
    with torch.no_grad():
        return loss_on_batch(ddp.module, 8192, torch.Generator().manual_seed(0)).item()


def say(line: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()

    ddp, batches = build()
    train(ddp, torch.optim.Adam(ddp.parameters(), lr=LR), batches, STEPS)
    num_parameters = sum(parameter.numel() for parameter in ddp.parameters())
    say(f"{ranks} ranks, {num_parameters} parameters, {STEPS} steps, {WARMUP_STEPS} of them warm-up")
    say("        kB per step and rank: warm-up   after it     loss")
    float32_bytes = 8 * (ranks - 1) / ranks * num_parameters  # gloo's all-reduce is a ring
    say(f"Adam   {float32_bytes / 1e3:30.1f} {float32_bytes / 1e3:10.1f} {final_loss(ddp):8.3f}")

    for name, arguments in {
        "QAdam": {},
        "1 bit": {"compression": "sign1bit", "error_feedback": True},
    }.items():
        ddp, batches = build()
        optimizer = tb.QAdamOptimizer(ddp.parameters(), lr=LR, warmup_steps=WARMUP_STEPS)
        recorder = tb.observe.Recorder()
        with tb.attach(ddp, optimizer, tb.QAdamAlgorithm(optimizer, **arguments), observers=[recorder]):
            train(ddp, optimizer, batches, WARMUP_STEPS)
            warmup_bytes = recorder.bytes_sent
            train(ddp, optimizer, batches, STEPS - WARMUP_STEPS)
            later_bytes = recorder.bytes_sent - warmup_bytes
        per_step = warmup_bytes / WARMUP_STEPS, later_bytes / (STEPS - WARMUP_STEPS)
        say(f"{name}  {per_step[0] / 1e3:30.1f} {per_step[1] / 1e3:10.1f} {final_loss(ddp):8.3f}")

    # The state is that of an Adam: torch.optim.Adam loads it, and continues in full precision.
    adam = torch.optim.Adam(ddp.parameters(), lr=LR)
    adam.load_state_dict(optimizer.state_dict())
    train(ddp, adam, batches, 20)
    say(f"20 more steps of torch.optim.Adam from there: loss {final_loss(ddp):.3f}")

    # Check that the weights are bitwise identical on all ranks.
    weights = nn.utils.parameters_to_vector(ddp.parameters()).detach()
    first = weights.clone()
    dist.broadcast(first, src=0)
    differs = torch.tensor(float(not torch.equal(weights, first)))
    dist.all_reduce(differs)
    say(f"ranks whose weights differ from rank 0's: {int(differs)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
