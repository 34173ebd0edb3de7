"""Aggregate gradients or weights by hand, without DDP: by all-reduce, sparsified, as factors, or with neighbors.

Run it with two processes on this machine; it needs scikit-learn for its data, and takes about a minute:

    torchrun --standalone --nproc-per-node=2 tutorials/06_aggregation.py

An aggregation is a function that you call between backward and step, or after the step. The rest of the loop does not
depend on the other ranks. Nothing overlaps with backward, so the time of the aggregation adds to the step. You choose
what it sends, as with DDP:

    all-reduce     the mean of all gradients, in full precision
    sparsified     the mean of their largest hundredth; each rank adds the residual to its next gradient
    power          the mean as the product of two factors of two vectors each; their residual is stored too
    neighbors      each rank steps on its own gradient; then weights are averaged with those of the other rank

A CNN learns to read digits with each aggregation, with three seeds. The table shows the bytes that a step sends, how
long it takes, and the percentage of unseen digits that the CNN classifies correctly.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from sklearn import datasets
from torch import nn
from torch.nn import functional as F

from torchbagua.compat.mlbench import (
    Aggregation,
    AllReduceAggregation,
    DecentralizedAggregation,
    PowerAggregation,
    SparsifiedAggregation,
)
from torchbagua.observe import Summary

BATCH, STEPS, SEEDS, LR = 32, 400, (0, 1, 2), 0.3

DIGITS = datasets.load_digits()  # 1797 images of 8 x 8 pixels
IMAGES = torch.from_numpy(DIGITS.images).float().unsqueeze(1) / 16
LABELS = torch.from_numpy(DIGITS.target).long()
ORDER = torch.randperm(len(LABELS), generator=torch.Generator().manual_seed(0))
HELD_OUT, TRAIN = ORDER[:898], ORDER[898:]


def build(seed: int) -> nn.Module:
    """Return the same network on every rank, since no DDP makes weights equal."""
    torch.manual_seed(seed)
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(
        *convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def train(model: nn.Module, aggregation: Aggregation, op: str, seed: int, *, of_weights: bool) -> None:
    """A plain loop with one added line."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)  # momentum would amplify late sparsified values
    batches = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    aggregate = aggregation.agg_model() if of_weights else aggregation.agg_grad()
    for _ in range(STEPS):
        chosen = TRAIN[torch.randint(len(TRAIN), (BATCH,), generator=batches)]
        optimizer.zero_grad()
        F.cross_entropy(model(IMAGES[chosen]), LABELS[chosen]).backward()
        if not of_weights:
            aggregate(model, op)
        optimizer.step()
        if of_weights:
            aggregate(model, op)


def percent_right(model: nn.Module) -> float:
    with torch.no_grad():
        return 100 * (model(IMAGES[HELD_OUT]).argmax(1) == LABELS[HELD_OUT]).float().mean().item()


def report(
    name: str, make: Callable[[nn.Module, Summary], Aggregation], op: str = "avg_world", *, of_weights: bool = False
) -> None:
    """Train with each seed, and print a line of the table on rank 0."""
    accuracies, summary, began_s = [], Summary(), time.perf_counter()
    for seed in SEEDS:
        model, summary = build(seed), Summary()  # it shows the last seed
        with make(model, summary) as aggregation:
            train(model, aggregation, op, seed, of_weights=of_weights)
        accuracies.append(percent_right(model))
    step_ms = 1e3 * (time.perf_counter() - began_s) / (len(SEEDS) * STEPS)
    if dist.get_rank() == 0:
        figures = summary.figures
        costs = f"{figures.bytes_sent / STEPS / 1e3:12.1f} {step_ms:12.2f} {figures.wait_ns / STEPS / 1e6:12.2f}"
        right = " ".join(f"{accuracy:6.1f}" for accuracy in accuracies)
        print(f"{name:12} {costs}     {right} {sum(accuracies) / len(SEEDS):8.1f}", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    neighbors = sorted({(rank - 1) % ranks, (rank + 1) % ranks} - {rank})  # on a ring
    if rank == 0:
        num_parameters = sum(parameter.numel() for parameter in build(0).parameters())
        print(f"{ranks} ranks, {num_parameters} parameters, {STEPS} steps")
        print("                kB a step    ms a step   of it waits     % right with each seed     mean")

    report("all-reduce", lambda model, summary: AllReduceAggregation(ranks, observers=[summary]))
    report("sparsified", lambda model, summary: SparsifiedAggregation(model, ratio=0.01, observers=[summary]))
    report(
        "power",
        lambda model, summary: PowerAggregation(model, reuse_query=True, world_size=ranks, rank=2, observers=[summary]),
        "avg",
    )
    report(
        "neighbors",
        lambda model, summary: DecentralizedAggregation(rank, neighbors, observers=[summary]),
        of_weights=True,
    )

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
