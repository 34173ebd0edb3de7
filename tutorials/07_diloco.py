"""Send once in thirty steps, in 4 bits: DiLoCo and local SGD compared with DDP, on a slow network.

Run it with four processes on this machine; it takes about half a minute:

    torchrun --standalone --nproc-per-node=4 tutorials/07_diloco.py

That shows the bytes that each method sends and the loss that it reaches; the network within a machine is fast. On
Linux, this command gives the processes a private network of 20 Mbit/s for each of the four, and shows the time that
DiLoCo saves; it takes about a minute (if it is not permitted, run it as root without the two options about users):

    unshare --user --map-root-user --net sh -c "ip link set lo up &&
        tc qdisc add dev lo root tbf rate 80mbit burst 128kb latency 100ms &&
        torchrun --standalone --local-addr=localhost --nproc-per-node=4 tutorials/07_diloco.py"

With DistributedDataParallel every step waits until all gradients have been sent. With DiLoCo a rank takes 30 steps on
its own gradients and sends nothing. Then the ranks average the changes of their weights over these steps, in 4 bits per
element. An outer optimizer takes one step with this mean, from the weights with which the round began:

    DDP       step|send|step|send|step|send|step|send|step|send|step|send|step|send|...
    DiLoCo    step|step|step|step|step|step|...|step|send, outer step|step|step|step|...

Local SGD has no outer optimizer: the weights become the mean. All methods take the same number of steps here, on the
same batches. Every 30 steps, when all ranks have the same weights, the script prints the loss on held-out text.
"""

import argparse
import contextlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb

CONTEXT, BATCH, STEPS, INNER_STEPS = 8, 128, 300, 30

# Each method has its best learning rate of 1, 1.6, 2.5, 4, 6.3, 10, 16 and 25 e-3. The last round comes after the last
# step, so no further mean is needed at detach.
METHODS = {
    "DDP": (None, 16e-3),
    "DiLoCo": (tb.DiLoCoAlgorithm(inner_steps=INNER_STEPS, final_average=False), 10e-3),
    "local SGD": (tb.LocalSGDAlgorithm(inner_steps=INNER_STEPS, final_average=False), 16e-3),
}

SOURCES = sorted(Path(argparse.__file__).parent.glob("*.py"))  # of Python's standard library
TEXT = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, SOURCES))), dtype=torch.uint8)
NUM_HELD_OUT = len(TEXT) // 8


def loss_on_batch(model: nn.Module, size: int, begin: int, end: int, batches: torch.Generator) -> torch.Tensor:
    """Return the mean loss over `size` positions of this part of the text, in nats per byte."""
    starts = torch.randint(begin, end - CONTEXT, (size, 1), generator=batches)
    windows = TEXT[starts + torch.arange(CONTEXT + 1)].long()
    return F.cross_entropy(model(windows[:, :-1]), windows[:, -1])


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    """Return the loss on text that no rank trains on."""
    return loss_on_batch(model, 8192, 0, NUM_HELD_OUT, torch.Generator().manual_seed(0)).item()


def train(algorithm: tb.Algorithm | None, lr: float) -> tuple[list[float], list[float], float]:
    """Return the loss after every 30 steps, the seconds until then, and the MB that this rank sends per step."""
    torch.manual_seed(0)
    # The network predicts the next byte from the 8 before it.
    layers = [nn.Embedding(256, 16), nn.Flatten(), nn.Linear(CONTEXT * 16, 128), nn.ReLU(), nn.Linear(128, 256)]
    ddp = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=lr)
    batches = torch.Generator().manual_seed(dist.get_rank())
    recorder = tb.observe.Recorder()  # counts the bytes

    losses, seconds = [], [0.0]
    with tb.attach(ddp, optimizer, algorithm, observers=[recorder]) if algorithm else contextlib.nullcontext():
        for _ in range(STEPS // INNER_STEPS):
            dist.barrier()
            start_s = time.perf_counter()
            for _ in range(INNER_STEPS):  # the loop of any DDP script
                loss = loss_on_batch(ddp, BATCH, NUM_HELD_OUT, len(TEXT), batches)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()  # with an algorithm, the last of these thirty ends with a round
            seconds.append(seconds[-1] + time.perf_counter() - start_s)
            losses.append(evaluate(ddp.module))

    # gloo's all-reduce is a ring: each of n ranks sends 2 (n-1)/n times the bytes of the float32 gradients.
    ranks, num_parameters = dist.get_world_size(), sum(parameter.numel() for parameter in ddp.parameters())
    num_bytes = recorder.bytes_sent / STEPS if algorithm else 2 * (ranks - 1) / ranks * 4 * num_parameters
    return losses, seconds[1:], num_bytes / 1e6


def say(line: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    torch.set_num_threads(1)  # in each process, since they share this machine
    dist.init_process_group("gloo")
    say(f"{dist.get_world_size()} ranks, {STEPS} steps of {BATCH} bytes of text each")
    runs, table = {}, ["             loss   MB sent by a rank   seconds"]
    for name, (algorithm, lr) in METHODS.items():
        say(name)
        losses, seconds, mb_a_step = train(algorithm, lr)
        runs[name] = list(zip(range(INNER_STEPS, STEPS + 1, INNER_STEPS), losses, seconds, strict=True))
        for step, loss, after_s in runs[name]:
            say(f"  step {step:3}: loss {loss:.3f}, sent {step * mb_a_step:7.3f} MB, after {after_s:5.2f} s")
        table.append(f"{name:10} {losses[-1]:6.3f} {STEPS * mb_a_step:19.3f} {seconds[-1]:9.2f}")
    say("\n".join(["", *table]))
    _, _, done_s = runs["DiLoCo"][-1]
    step, loss, after_s = next((point for point in runs["DDP"] if point[2] >= done_s), runs["DDP"][-1])
    say(f"DiLoCo was done after {done_s:.2f} s; after {after_s:.2f} s DDP was at step {step}, with loss {loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
