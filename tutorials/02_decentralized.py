"""Average weights instead of gradients: with all ranks, with one peer at a time, or in 8 bits with two neighbors.

Run it with four processes on this machine; it takes about twenty seconds:

    torchrun --standalone --nproc-per-node=4 tutorials/02_decentralized.py

With DistributedDataParallel every step waits for the network, because optimizer.step() needs the mean gradient. With a
decentralized algorithm every rank steps on its own gradient at once. The ranks average their weights instead, as they
are after optimizer.step(), while they compute the next gradient. DDP itself sends nothing in the meantime:

    DDP             forward  backward, sends gradients  step  forward  backward, sends gradients  step
    decentralized   forward  backward  step  forward  backward  step  forward  backward  step
                    `-sends weights-'        `-sends weights-'        `-sends weights-'

So the ranks' weights differ slightly during training. A table shows by how much, how many bytes a step sends, and the
final loss, when all ranks have the mean. Then one of the runs is resumed from a checkpoint.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb

CONTEXT, BATCH, STEPS = 8, 128, 90
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()

ALGORITHMS = {
    "all": tb.DecentralizedAlgorithm(),
    "shift_one": tb.DecentralizedAlgorithm(peer_selection_mode="shift_one"),  # a different peer in each step
    "low precision": tb.LowPrecisionDecentralizedAlgorithm(),  # changes of the weights, in 8 bits, on a ring
}


def build() -> tuple[DistributedDataParallel, torch.optim.Optimizer, torch.Generator]:
    """Return a network that predicts a byte from the 8 before it, its optimizer, and the source of its batches."""
    torch.manual_seed(0)
    layers = [nn.Embedding(256, 16), nn.Flatten(), nn.Linear(CONTEXT * 16, 256), nn.ReLU(), nn.Linear(256, 256)]
    model = nn.Sequential(*layers)
    # Each rank has its own optimizer, which only sees gradients of local batches. SGD with momentum takes DDP's
    # learning rate. Adam needs a larger one, about 1.6 times here: it divides by the size of the gradient, and the
    # gradient of one rank is larger, because of its noise, than the mean of four.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    return DistributedDataParallel(model), optimizer, torch.Generator().manual_seed(dist.get_rank())


def loss_on_batch(model: nn.Module, size: int, batches: torch.Generator) -> torch.Tensor:
    """Return the mean loss over `size` positions of the text, in nats per byte."""
    windows = TEXT[torch.randint(len(TEXT) - CONTEXT, (size, 1), generator=batches) + torch.arange(CONTEXT + 1)]
    return F.cross_entropy(model(windows[:, :-1]), windows[:, -1])


def train(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, batches: torch.Generator, steps: int
) -> list[float]:
    """The training loop of any DDP script. Return how far apart the ranks were, after every 15 steps."""
    apart = []
    for step in range(1, steps + 1):
        loss = loss_on_batch(ddp, BATCH, batches)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # at its end the weights become the average, and the next round starts
        if step % 15 == 0:
            apart.append(far_apart(ddp))
    return apart


def weights_of(ddp: DistributedDataParallel) -> torch.Tensor:
    return nn.utils.parameters_to_vector(ddp.parameters()).detach()


def far_apart(ddp: DistributedDataParallel) -> float:
    """Return the relative distance from the mean of the weights, on the rank that is farthest from it."""
    own = weights_of(ddp).double()
    mean = own.clone()
    dist.all_reduce(mean)  # torchbagua has private connections, so the script can use its own group
    mean /= dist.get_world_size()
    distance = (own - mean).norm() / mean.norm()
    dist.all_reduce(distance, dist.ReduceOp.MAX)
    return distance.item()


def report(name: str, bytes_per_step: float, apart: list[float], ddp: DistributedDataParallel) -> None:
    """Print a line of the table on rank 0. All ranks have the same weights by now, and so the same loss."""
    apart_at_end = far_apart(ddp)
    with torch.no_grad():
        loss = loss_on_batch(ddp.module, 8192, torch.Generator().manual_seed(0)).item()
    distances = " ".join(f"{distance:.4f}" for distance in apart)
    say(f"{name:14} {bytes_per_step / 1e3:18.1f}   {distances}   {apart_at_end:11.4f} {loss:6.3f}")


def say(line: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main(checkpoints: Path) -> None:
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()

    ddp, optimizer, batches = build()
    say(f"{ranks} ranks, {len(weights_of(ddp))} parameters")
    say("             kB per step and rank   ranks apart while training                   at the end   loss")
    apart = train(ddp, optimizer, batches, STEPS)
    report("DDP", 8 * (ranks - 1) / ranks * len(weights_of(ddp)), apart, ddp)  # gloo's all-reduce is a ring

    finished = {}
    for name, algorithm in ALGORITHMS.items():
        ddp, optimizer, batches = build()
        recorder = tb.observe.Recorder()
        with tb.attach(ddp, optimizer, algorithm, observers=[recorder]) as attachment:
            apart = train(ddp, optimizer, batches, STEPS // 2)
            # Weights, momentum and the algorithm's state differ between ranks, so every rank writes a file.
            state = {
                "model": ddp.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "batches": batches.get_state(),
                "attachment": attachment.state_dict(),  # waits for the round in flight, which is part of it
            }
            torch.save(state, checkpoints / f"{name}-{rank}.pt")
            bytes_before = recorder.bytes_sent
            apart += train(ddp, optimizer, batches, STEPS // 2)
            bytes_per_step = (recorder.bytes_sent - bytes_before) / (STEPS // 2)
        # Here all ranks have the mean of their weights, and rank 0's momentum: DDP could continue from here.
        report(name, bytes_per_step, apart, ddp)
        finished[name] = weights_of(ddp)

    name = "shift_one"
    state = torch.load(checkpoints / f"{name}-{rank}.pt")
    ddp, optimizer, batches = build()  # DDP first: when it wraps a model, it gives all ranks rank 0's weights
    ddp.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    batches.set_state(state["batches"])
    with tb.attach(ddp, optimizer, ALGORITHMS[name]) as attachment:
        attachment.load_state_dict(state["attachment"])  # last: it belongs to these weights
        train(ddp, optimizer, batches, STEPS // 2)
    say(f"{name}, from the checkpoint: ends with the same weights: {torch.equal(weights_of(ddp), finished[name])}")

    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # a separate folder on each rank
        main(Path(folder))
