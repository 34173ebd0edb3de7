"""A sharded GPT on a slow network: fully_shard with gradients in 8 bits, and with weights in 8 bits too.

Run it with two processes on this machine; it takes about half a minute:

    torchrun --standalone --nproc-per-node=2 tutorials/08_fsdp.py

That shows the bytes that each variant sends and the loss that it reaches; the network within a machine is fast. On
Linux, this command gives the processes a private network of 200 Mbit/s for each of the two, and shows the time that 8
bits save; it takes about a minute and a half (if it is not permitted, run it as root without the two options about
users):

    unshare --user --map-root-user --net sh -c "ip link set lo up &&
        tc qdisc add dev lo root tbf rate 400mbit burst 256kb latency 100ms &&
        torchrun --standalone --local-addr=localhost --nproc-per-node=2 tutorials/08_fsdp.py"

With fully_shard (FSDP2) each rank stores a shard of every weight. Each block of the GPT is gathered in full before it
computes, in forward and again in backward. Then its gradients are reduce-scattered, so that each rank has the mean of
its shard:

    forward    gather block 0 | compute | gather block 1 | compute | ...
    backward   ... | gather block 1 | compute | average gradients 1 | gather block 0 | compute | average gradients 0

`fsdp.attach` sends the gradients in 8 bits, and with `quantize_weights` the weights too. All three variants take the
same number of steps here, on the same batches. Every eighth step, the script prints the loss on held-out text.
"""

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.nn import functional as F

import torchbagua as tb

CONTEXT, WIDTH, BLOCKS, BATCH = 64, 128, 4, 4
STEPS, STEPS_A_LINE, LR = 80, 8, 2e-3  # LR: the best of 1, 2, 4 and 8 e-3 for float32

# The arguments of `attach`, after the model and its optimizer. Without arguments it is not called.
METHODS: dict[str, dict[str, Any]] = {
    "float32": {},
    "8-bit gradients": {"algorithm": "bytegrad"},
    "8-bit weights too": {"algorithm": "bytegrad", "quantize_weights": "minmax_uint8"},
}

SOURCES = sorted(Path(argparse.__file__).parent.glob("*.py"))  # of Python's standard library
TEXT = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, SOURCES))), dtype=torch.uint8)
NUM_HELD_OUT = len(TEXT) // 8


class GPT(nn.Module):
    """Predicts each byte of a text from at most CONTEXT bytes before it. Returns the mean loss, in nats per byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        block = {"nhead": 4, "dim_feedforward": 4 * WIDTH, "dropout": 0.0, "activation": "gelu"}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, **block, norm_first=True, batch_first=True) for _ in range(BLOCKS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.guess = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text[:, :-1]) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)  # each position sees those up to itself
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.guess(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


def draw_batch(size: int, begin: int, end: int, batches: torch.Generator) -> torch.Tensor:
    """Return `size` windows of this part of the text, each of CONTEXT + 1 bytes."""
    starts = torch.randint(begin, end - CONTEXT, (size, 1), generator=batches)
    return TEXT[starts + torch.arange(CONTEXT + 1)].long()


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    """Return the loss on text that no rank trains on. All ranks call it, since it gathers weights."""
    return model(draw_batch(64, 0, NUM_HELD_OUT, torch.Generator().manual_seed(0))).item()


def torchs_own_bytes_a_step(num_parameters: int, arguments: dict[str, Any]) -> float:
    """Return the bytes that torch itself sends from a rank: float32, 4 bytes per element, to each of the others."""
    num_times = 0
    if "quantize_weights" not in arguments:
        num_times += 2  # gathered in forward and in backward
    if "algorithm" not in arguments:
        num_times += 2  # gloo's reduce-scatter sends gradients twice (torch 2.13)
    ranks = dist.get_world_size()
    return num_times * (ranks - 1) / ranks * 4 * num_parameters


def train(arguments: dict[str, Any]) -> tuple[list[float], list[float], float]:
    """Return the loss after every 8 steps, the seconds until then, and the MB that this rank sends per step."""
    torch.manual_seed(0)
    model = GPT()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)  # the parameters outside the blocks
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    batches = torch.Generator().manual_seed(dist.get_rank())
    recorder = tb.observe.Recorder()  # counts the bytes

    losses, seconds = [], [0.0]
    with tb.fsdp.attach(model, optimizer, **arguments, observers=[recorder]) if arguments else contextlib.nullcontext():
        for _ in range(STEPS // STEPS_A_LINE):
            dist.barrier()
            start_s = time.perf_counter()
            for _ in range(STEPS_A_LINE):  # the loop of any FSDP2 script
                loss = model(draw_batch(BATCH, NUM_HELD_OUT, len(TEXT), batches))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            seconds.append(seconds[-1] + time.perf_counter() - start_s)
            losses.append(evaluate(model))
    # All steps send the same bytes. Those of an evaluation count for the next step, and the last step follows none.
    num_bytes = sum(event.bytes_sent for event in recorder.events if event.step == STEPS - 1)
    return losses, seconds[1:], (num_bytes + torchs_own_bytes_a_step(num_parameters, arguments)) / 1e6


def say(line: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    torch.set_num_threads(1)  # in each process, since they share this machine
    dist.init_process_group("gloo")
    num_parameters = sum(parameter.numel() for parameter in GPT().parameters())
    say(f"{dist.get_world_size()} ranks, {num_parameters} parameters, {STEPS} steps of {BATCH * CONTEXT} bytes each")
    table, first_s = ["                     loss   MB a step   ms a step   speed-up"], None
    for name, arguments in METHODS.items():
        say(name)
        losses, seconds, mb_a_step = train(arguments)
        for index, (loss, after_s) in enumerate(zip(losses, seconds, strict=True), 1):
            step = index * STEPS_A_LINE
            say(f"  step {step:3}: loss {loss:.3f}, sent {step * mb_a_step:7.2f} MB, after {after_s:5.2f} s")
        first_s = first_s or seconds[-1]
        step_ms, speed_up = 1000 * seconds[-1] / STEPS, first_s / seconds[-1]
        table.append(f"{name:17} {losses[-1]:7.3f} {mb_a_step:11.3f} {step_ms:11.1f} {speed_up:10.2f}")
    say("\n".join(["", *table]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
