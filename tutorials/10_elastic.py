"""Ranks come and go: four ranks train, one is killed, three train on, and a new one joins them.

Run it on this machine; it takes about twenty seconds:

    python tutorials/10_elastic.py

It starts the ranks itself, because an agent of torchrun that has several ranks ends all of them when one dies. Rank 2
kills itself after five seconds, as the kernel would if memory ran out. Nobody notifies the others. They notice that
their connections to it have closed, agree that the three of them continue, and repeat the step in which it died:

    rank 0    step|step|step|agree|step|step|step|step|agree|step|step|...
    rank 1    step|step|step|agree|step|step|step|step|agree|step|step|...
    rank 2    step|step|killed              starts, asks to join|step|step|...
    rank 3    step|step|step|agree|step|step|step|step|agree|step|step|...

Five seconds later a process starts in its place. It builds its model while the others train, asks to join, and receives
the weights and the optimizer's state from one of them. Twice a second, rank 0 prints the loss on held-out text and the
steps per second since the line before.
"""

import argparse
import os
import signal
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchbagua import elastic

RANKS, CONTEXT, BATCH = 4, 8, 64
PART_S, LOOK_EVERY_S, LONGEST_S = 5.0, 0.5, 100.0

SOURCES = sorted(Path(argparse.__file__).parent.glob("*.py"))  # of Python's standard library
TEXT = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, SOURCES))), dtype=torch.uint8)[:500_000].long()
WINDOWS = TEXT.unfold(0, CONTEXT + 1, 1)
HELD_OUT, TRAINED_ON = WINDOWS[:10_000], WINDOWS[20_000:]


def loss_of(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of predicting the last byte of each window, in nats."""
    return F.cross_entropy(model(windows[:, :-1]), windows[:, -1])


class Report:
    """Prints the loss and the speed, on rank 0."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.began_s = self.last_s = 0.0
        self.last_step = 0

    def begin(self, run: elastic.Run) -> None:
        """Print a line about a membership."""
        if run.generation == 0:
            self.began_s = self.last_s = time.time()
        self.say(f"generation {run.generation}, {run.size} ranks")

    def say(self, text: str) -> None:
        """Print a line with the time since the training has begun."""
        print(f"  {time.time() - self.began_s:5.1f} s: {text}", flush=True)

    def step(self, run: elastic.Run) -> None:
        """Print a line if it is time for one."""
        seconds = time.time() - self.last_s
        if seconds > LOOK_EVERY_S:
            with torch.no_grad():
                loss = loss_of(self.model, HELD_OUT)
            speed = (run.step - self.last_step) / seconds
            self.say(f"step {run.step:4}, {run.size} ranks, loss {loss:.3f}, {speed:5.1f} steps/s")
            self.last_s, self.last_step = time.time(), run.step


def train_rank(rank: int, port: int, has_changed: Event) -> None:
    """Train on one rank; the variables are those that a launcher sets."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the launcher has the store, not rank 0
    torch.set_num_threads(1)  # in each process, since they share this machine
    torch.manual_seed(0)
    layers = [nn.Embedding(256, 16), nn.Flatten(), nn.Linear(CONTEXT * 16, 128), nn.ReLU(), nn.Linear(128, 256)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    sampler = elastic.Sampler(TRAINED_ON)
    loader = DataLoader(TensorDataset(TRAINED_ON), batch_size=BATCH, sampler=sampler)
    report = Report(model)

    def train(run: elastic.Run) -> None:  # called for each membership
        if run.generation > 0:
            has_changed.set()
        if run.rank == 0:
            report.begin(run)
        end_s = time.time() + PART_S
        while True:
            for (windows,) in run.batches(loader):  # from the first sample that is not trained
                optimizer.zero_grad()
                loss_of(run.module, windows).backward()
                optimizer.step()
                if run.rank == 0:
                    report.step(run)
                if (run.generation, run.rank) == (0, 2) and time.time() > end_s:
                    os.kill(os.getpid(), signal.SIGKILL)
                is_over = torch.tensor(run.generation > 1 and time.time() > end_s)
                dist.broadcast(is_over, src=0)  # torch's default group is the membership
                if is_over:
                    return

    elastic.run(train, model, optimizer, "bytegrad", sampler=sampler)
    total = sum(parameter.detach().double().sum().item() for parameter in model.parameters())
    print(f"the sum of the weights is {total:.12f}", flush=True)


def main() -> None:
    """Start the ranks, as a launcher does, and another one after one has been killed."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torchbagua.elastic"])  # imported once, not by each rank
    has_changed = context.Event()
    ranks = [
        context.Process(target=train_rank, args=(rank, store.port, has_changed))
        for rank in (*range(RANKS), 2)  # the last one is for the one that is killed
    ]
    try:
        for process in ranks[:RANKS]:
            process.start()
        has_changed.wait(LONGEST_S)
        time.sleep(PART_S)
        ranks[RANKS].start()
        for process in ranks:
            process.join(LONGEST_S)
        assert [process.exitcode for process in ranks] == [0, 0, -signal.SIGKILL, 0, 0]
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()


if __name__ == "__main__":
    main()
