"""The training loop that you already have, and the one line to add.

Run it with two processes on this machine; it takes about fifteen seconds:

    torchrun --standalone --nproc-per-node=2 tutorials/00_your_own_loop.py

The network within a machine is fast. On Linux, this command gives the processes a private network of 1 Gbit/s, on which
sending fewer bytes takes less time (if it is not permitted, run it as root without the two options about users):

    unshare --user --map-root-user --net sh -c "ip link set lo up &&
        tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 100ms &&
        torchrun --standalone --local-addr=localhost --nproc-per-node=2 tutorials/00_your_own_loop.py"

`train` is the loop of many scripts. It accumulates gradients over micro-batches and sends them with the last one: the
loop sets `require_backward_grad_sync` by hand, as nanoGPT does. It uses autocast with a GradScaler, clipping, a
learning rate that warms up and then decays along a cosine, periodic evaluations, and a checkpoint.

It runs three times: with plain DDP; with 8-bit gradients, from the same weights on the same batches; and again with
8-bit gradients, from the checkpoint of the second run. Nothing in `train` depends on which of these runs it is. The
line that makes the difference is marked.
"""

import math
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb

NUM_FEATURES, WIDTH, NUM_CLASSES, NUM_EXAMPLES = 64, 512, 10, 16384
BATCH, MICRO_STEPS, STEPS, EVALUATE_EVERY, SAVE_AFTER = 64, 4, 120, 30, 60
WARMUP_STEPS, LEARNING_RATE, LOWEST_LEARNING_RATE, MAX_NORM = 10, 2e-3, 1e-4, 1.0
DTYPE = torch.float16  # the dtype that needs a GradScaler
CHECKPOINT = Path("runs/your_own_loop/checkpoint.pt")


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random points, and the class of ten that a random network assigns to each; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(NUM_EXAMPLES, NUM_FEATURES, generator=generator)
    hidden = torch.tanh(points @ torch.randn(NUM_FEATURES, 16, generator=generator) / 4)
    return points, (hidden @ torch.randn(16, NUM_CLASSES, generator=generator)).argmax(1)


POINTS, CLASSES = make_data()
NUM_HELD_OUT = NUM_EXAMPLES // 8


def build() -> tuple[DistributedDataParallel, torch.optim.Optimizer, torch.amp.GradScaler]:
    torch.manual_seed(0)
    layers = [nn.Linear(NUM_FEATURES, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()]
    ddp = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, NUM_CLASSES)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    return ddp, optimizer, torch.amp.GradScaler("cpu")


def learning_rate(step: int) -> float:
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)
    return LOWEST_LEARNING_RATE + (LEARNING_RATE - LOWEST_LEARNING_RATE) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def evaluate(model: nn.Module) -> tuple[float, float]:
    """Return the loss and the accuracy on examples that no rank trains on."""
    model.eval()
    logits, expected = model(POINTS[:NUM_HELD_OUT]), CLASSES[:NUM_HELD_OUT]
    model.train()
    return F.cross_entropy(logits, expected).item(), (logits.argmax(1) == expected).float().mean().item()


def train(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    first_step: int = 0,
) -> float:
    """Your loop. Return the median time of a step, in ms."""
    step_ms = []
    for step in range(first_step, STEPS):
        start_s = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        # Batches are determined by step and rank, so that a resumed run sees the same batches.
        batches = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        for micro_step in range(MICRO_STEPS):
            ddp.require_backward_grad_sync = micro_step == MICRO_STEPS - 1  # only the last micro-step sends
            chosen = torch.randint(NUM_HELD_OUT, NUM_EXAMPLES, (BATCH,), generator=batches)
            with torch.autocast("cpu", dtype=DTYPE):
                loss = F.cross_entropy(ddp(POINTS[chosen]), CLASSES[chosen]) / MICRO_STEPS
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        step_ms.append(1e3 * (time.perf_counter() - start_s))

        if (step + 1) % EVALUATE_EVERY == 0:
            held_out_loss, accuracy = evaluate(ddp.module)
            rate = optimizer.param_groups[0]["lr"]
            say(f"  step {step + 1:3}: lr {rate:.5f}, held-out loss {held_out_loss:.5f}, {100 * accuracy:.1f} % right")
        if step + 1 == SAVE_AFTER and dist.get_rank() == 0:
            state = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
            CHECKPOINT.parent.mkdir(parents=True, exist_ok=True)
            torch.save({**state, "scaler": scaler.state_dict(), "step": step + 1}, CHECKPOINT)
    return statistics.median(step_ms)


def weights_of(ddp: DistributedDataParallel) -> torch.Tensor:
    return nn.utils.parameters_to_vector(ddp.parameters()).detach()


def say(line: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    torch.set_num_threads(1)  # in each process, since they share this machine
    dist.init_process_group("gloo")

    say("plain DDP")
    ddp, optimizer, scaler = build()
    plain_ms = train(ddp, optimizer, scaler)
    plain_loss, _ = evaluate(ddp.module)

    say("8-bit gradients")
    ddp, optimizer, scaler = build()
    summary = tb.observe.Summary()  # records what is sent and when; optional
    attachment = tb.attach(ddp, optimizer, "bytegrad", grad_scaler=scaler, observers=[summary])  # <-- the one line
    bytegrad_ms = train(ddp, optimizer, scaler)
    bytegrad_loss, _ = evaluate(ddp.module)
    finished = weights_of(ddp)
    attachment.detach()  # back to plain DDP; not needed if the script ends here

    say(f"8-bit gradients, from the checkpoint of step {SAVE_AFTER}")
    dist.barrier()  # until rank 0 has written it
    ddp, optimizer, scaler = build()
    state = torch.load(CHECKPOINT)
    ddp.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scaler.load_state_dict(state["scaler"])
    with tb.attach(ddp, optimizer, "bytegrad", grad_scaler=scaler):  # the same line; `with` detaches at its end
        train(ddp, optimizer, scaler, first_step=state["step"])
    say(f"  ends with the same weights: {torch.equal(weights_of(ddp), finished)}\n")

    # gloo's all-reduce is a ring: each of n ranks sends 2 (n-1)/n times the bytes of the float32 gradients.
    ranks = dist.get_world_size()
    plain_mb = 2 * (ranks - 1) / ranks * 4 * finished.numel() / 1e6
    bytegrad_mb = summary.figures.bytes_sent / summary.figures.num_steps / 1e6
    say("                 held-out loss   MB sent per step and rank   ms a step")
    say(f"plain DDP        {plain_loss:13.5f} {plain_mb:27.3f} {plain_ms:11.1f}")
    say(f"8-bit gradients  {bytegrad_loss:13.5f} {bytegrad_mb:27.3f} {bytegrad_ms:11.1f}")
    say(f"\n{summary}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
