"""Muon as the inner optimizer of DiLoCo, compared with AdamW, and with both optimizers in DDP.

Run it with four processes on this machine; it takes about half a minute:

    torchrun --standalone --nproc-per-node=4 tutorials/09_muon_diloco.py

Muon steps the weight matrices of the hidden layers along an orthogonal matrix: all directions of the update have about
the same length. AdamW steps all other parameters: the embedding, the output head, norms and biases. Both are attached,
and a round of DiLoCo follows when both have stepped for the 30th time:

    DDP       backward, send|Muon|AdamW|backward, send|Muon|AdamW|backward, send|Muon|AdamW|...
    DiLoCo    backward|Muon|AdamW|backward|Muon|AdamW|...|backward|Muon|AdamW|send, outer step|...

All methods take the same number of steps here, on the same batches. Every 30 steps, when all ranks have the same
weights, the script computes the loss on held-out text. `--seed 1` trains with other weights and batches, and
`--lr 0.01` with one learning rate for all methods instead of the best one of each.
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

CONTEXT, WIDTH, BLOCKS, BATCH, STEPS, INNER_STEPS = 16, 96, 3, 64, 300, 30

# Each method has its best learning rate of 2.5, 4, 6.3, 10, 16 and 25 e-3. The last round comes after the last step, so
# no further mean is needed at detach.
DILOCO = tb.DiLoCoAlgorithm(inner_steps=INNER_STEPS, final_average=False)
METHODS = {
    "DDP, AdamW": (None, "AdamW", 6.3e-3),
    "DDP, Muon": (None, "Muon", 10e-3),
    "DiLoCo, AdamW": (DILOCO, "AdamW", 10e-3),
    "DiLoCo, Muon": (DILOCO, "Muon", 10e-3),
}

SOURCES = sorted(Path(argparse.__file__).parent.glob("*.py"))  # of Python's standard library
TEXT = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, SOURCES))), dtype=torch.uint8)
NUM_HELD_OUT = len(TEXT) // 8


class Block(nn.Sequential):
    """Two layers with a residual connection around them."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Network(nn.Module):
    """Predicts the next byte from the bytes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.hidden = nn.Sequential(nn.Linear(CONTEXT * 16, WIDTH), *(Block() for _ in range(BLOCKS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.embedding(x).flatten(1)))


def make_optimizers(network: Network, name: str, lr: float) -> list[torch.optim.Optimizer]:
    """Return AdamW for all parameters, or Muon for the matrices of the hidden layers and AdamW for the others."""
    if name == "AdamW":
        return [torch.optim.AdamW(network.parameters(), lr=lr, betas=(0.9, 0.95))]
    matrices = [parameter for parameter in network.hidden.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in network.parameters() if all(parameter is not matrix for matrix in matrices)]
    # match_rms_adamw scales Muon's updates to the size of AdamW's, so one learning rate suits both.
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95)),
    ]


def loss_on_batch(model: nn.Module, size: int, begin: int, end: int, batches: torch.Generator) -> torch.Tensor:
    """Return the mean loss over `size` positions of this part of the text, in nats per byte."""
    starts = torch.randint(begin, end - CONTEXT, (size, 1), generator=batches)
    windows = TEXT[starts + torch.arange(CONTEXT + 1)].long()
    return F.cross_entropy(model(windows[:, :-1]), windows[:, -1])


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    """Return the loss on text that no rank trains on."""
    return loss_on_batch(model, 8192, 0, NUM_HELD_OUT, torch.Generator().manual_seed(0)).item()


def train(algorithm: tb.Algorithm | None, name: str, lr: float, seed: int) -> tuple[list[float], float, float]:
    """Return the loss after every 30 steps, the seconds of all steps, and the MB that this rank sends per step."""
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(Network())
    optimizers = make_optimizers(ddp.module, name, lr)
    batches = torch.Generator().manual_seed(seed * dist.get_world_size() + dist.get_rank())
    recorder = tb.observe.Recorder()  # counts the bytes

    losses, seconds = [], 0.0
    with tb.attach(ddp, optimizers, algorithm, observers=[recorder]) if algorithm else contextlib.nullcontext():
        for _ in range(STEPS // INNER_STEPS):
            dist.barrier()
            start_s = time.perf_counter()
            for _ in range(INNER_STEPS):
                loss = loss_on_batch(ddp, BATCH, NUM_HELD_OUT, len(TEXT), batches)
                ddp.zero_grad()
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()  # in the 30th step, a round of DiLoCo follows the last of them
            seconds += time.perf_counter() - start_s
            losses.append(evaluate(ddp.module))

    # gloo's all-reduce is a ring: each of n ranks sends 2 (n-1)/n times the bytes of the float32 gradients.
    ranks, num_parameters = dist.get_world_size(), sum(parameter.numel() for parameter in ddp.parameters())
    num_bytes = recorder.bytes_sent / STEPS if algorithm else 2 * (ranks - 1) / ranks * 4 * num_parameters
    return losses, seconds, num_bytes / 1e6


def say(line: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches")
    parser.add_argument("--lr", type=float, help="one learning rate for all methods (default: the best one of each)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # in each process, since they share this machine
    dist.init_process_group("gloo")
    network = Network()
    num_all = sum(parameter.numel() for parameter in network.parameters())
    muon, _ = make_optimizers(network, "Muon", lr=0.0)
    num_muon = sum(parameter.numel() for group in muon.param_groups for parameter in group["params"])
    say(f"{dist.get_world_size()} ranks, {STEPS} steps of {BATCH} bytes of text each")
    say(f"{num_all:,} parameters, of which Muon steps {num_muon:,}")
    losses, table = {}, ["                 loss   vs. DDP, AdamW   MB sent by a rank   seconds"]
    for name, (algorithm, optimizer_name, best_lr) in METHODS.items():
        say(name)
        lr = best_lr if arguments.lr is None else arguments.lr
        losses[name], seconds, mb_a_step = train(algorithm, optimizer_name, lr, arguments.seed)
        for step in range(2 * INNER_STEPS, STEPS + 1, 2 * INNER_STEPS):
            loss = losses[name][step // INNER_STEPS - 1]
            say(f"  step {step}: loss {loss:.3f}, sent {step * mb_a_step:7.3f} MB")
        change = losses[name][-1] / losses["DDP, AdamW"][-1] - 1
        table.append(
            f"{name:14} {losses[name][-1]:6.3f} {100 * change:+14.1f} % {STEPS * mb_a_step:19.3f} {seconds:9.2f}"
        )
    say("\n".join(["", *table]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
