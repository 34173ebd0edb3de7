"""One rank of the demo: trains the same model with plain DDP and with ByteGrad."""

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import torchbagua as tb
from torchbagua._environment import usable_cores
from torchbagua.cli.demo.model import GPT, VOCABULARY
from torchbagua.cli.demo.text import read_standard_library

CONTEXT = 64
SEQUENCES_PER_RANK = 4
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 20
TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings from the command line."""

    nproc: int
    steps: int
    seed: int
    rate_mbit: int  # of each rank's emulated network, per second; 0: loopback
    traces: str  # the folder for traces of the ByteGrad run
    with_tensorboard: bool  # whether TensorBoardTrace is one of the traces


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run of all ranks; lists have one entry per step."""

    name: str
    num_elements: int  # gradient elements
    losses: list[float]  # nats per byte, before the step, mean over the ranks
    seconds: list[float]  # since the start, on one rank
    sent_bytes: list[int]  # per rank since the start, mean over the ranks
    sent_bytes_measured: bool  # if False, they are the volume of a float32 ring
    final_loss: float  # mean over the last tenth of the steps
    step_sent_bytes: float  # per rank, mean over the steps
    step_ms: float  # median of the steps of one rank
    bits_per_element: float  # 32 for a float32 ring
    ratio: float  # bytes of a float32 ring / bytes of this run


def summarise(
    name: str,
    losses: list[float],
    sent_bytes: list[float] | None,
    seconds: list[float],
    *,
    num_elements: int,
    nproc: int,
) -> Run:
    """Returns the `Run` with these observations. `sent_bytes` is None if nothing measured them."""
    num_steps = len(losses)
    # Bytes that each rank sends in a float32 ring all-reduce: 2 (n-1)/n of the tensor.
    ring_bytes = 2 * (nproc - 1) / nproc * 4 * num_elements
    by_step = [ring_bytes * step for step in range(1, num_steps + 1)] if sent_bytes is None else sent_bytes
    step_sent_bytes = by_step[-1] / num_steps
    return Run(
        name=name,
        num_elements=num_elements,
        losses=losses,
        seconds=seconds,
        sent_bytes=[round(value) for value in by_step],
        sent_bytes_measured=sent_bytes is not None,
        final_loss=statistics.fmean(losses[-num_final_steps(num_steps) :]),
        step_sent_bytes=step_sent_bytes,
        step_ms=1e3 * statistics.median(end - start for start, end in pairwise([0.0, *seconds])),
        bits_per_element=32 * step_sent_bytes / ring_bytes,
        ratio=ring_bytes / step_sent_bytes,
    )


def num_final_steps(num_steps: int) -> int:
    """Returns the number of steps that the final loss is averaged over: a tenth."""
    return max(1, num_steps // 10)


def train_rank(settings: Settings) -> list[Run]:
    """Trains with plain DDP, then with ByteGrad, from the same weights on the same batches; returns both runs.

    Needs the environment variables of torchrun.
    """
    torch.set_num_threads(max(1, usable_cores() // settings.nproc))
    text = read_standard_library()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        plain = _train("plain DDP", None, (), text, settings)
        traces: list[tb.observe.Observer] = [tb.observe.PerfettoTrace(settings.traces)]
        if settings.with_tensorboard:
            traces.append(tb.observe.TensorBoardTrace(settings.traces))
        return [plain, _train("ByteGrad", tb.ByteGradAlgorithm(), traces, text, settings)]
    finally:
        dist.destroy_process_group()


def _train(
    name: str, algorithm: tb.Algorithm | None, traces: Sequence[tb.observe.Observer], text: Tensor, settings: Settings
) -> Run:
    torch.manual_seed(settings.seed)
    rank = dist.get_rank()
    batches = torch.Generator().manual_seed(settings.seed + rank)
    ddp = DistributedDataParallel(GPT(width=160, num_layers=4, num_heads=5))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95))
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings.steps))
    recorder = tb.observe.Recorder()
    total_sent_bytes = 0
    losses, seconds, sent_bytes = [], [], []

    with nullcontext() if algorithm is None else tb.attach(ddp, optimizer, algorithm, observers=(recorder, *traces)):
        start_s = time.perf_counter()
        for step in range(settings.steps):
            inputs_bt, targets_bt = next_batch(text, batches, SEQUENCES_PER_RANK)
            loss = F.cross_entropy(ddp(inputs_bt).view(-1, VOCABULARY), targets_bt.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start_s)
            total_sent_bytes += recorder.bytes_sent
            recorder.clear()
            sent_bytes.append(total_sent_bytes)
            if rank == 0:
                _show_progress(name, step + 1, settings.steps, seconds[-1], losses[-1])

    return summarise(
        name,
        mean_over_ranks(losses),
        None if algorithm is None else mean_over_ranks(sent_bytes),
        seconds,
        num_elements=sum(parameter.numel() for parameter in ddp.parameters()),
        nproc=settings.nproc,
    )


def _show_progress(name: str, num_done: int, num_steps: int, seconds: float, loss: float) -> None:
    """Shows the progress on stderr: a line that changes on a terminal, else a line at first and for every tenth."""
    line = f"{name:9} {num_done:{len(str(num_steps))}}/{num_steps} steps, {seconds:3.0f} s, loss {loss:.3f}"
    if sys.stderr.isatty():
        print(f"\r{line}", end="\n" if num_done == num_steps else "", file=sys.stderr, flush=True)
    elif num_done == 1 or num_done % num_final_steps(num_steps) == 0:
        print(line, file=sys.stderr, flush=True)


def mean_over_ranks(values: Sequence[float]) -> list[float]:
    """Returns the mean of each value over the ranks. Collective, over the default group."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    means: list[float] = (total / dist.get_world_size()).tolist()
    return means


def next_batch(text: Tensor, batches: torch.Generator, num_sequences: int) -> tuple[Tensor, Tensor]:
    """Returns random windows: inputs and targets, each [num_sequences, CONTEXT] int64, targets one byte later."""
    starts = torch.randint(len(text) - CONTEXT, (num_sequences, 1), generator=batches)
    windows = text[starts + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def learning_rate_factor(step: int, steps: int) -> float:
    """Returns the factor of a linear warm-up, followed by a cosine decay to 2 %."""
    return min((step + 1) / WARMUP_STEPS, 0.51 + 0.49 * math.cos(math.pi * step / steps))


@record
def _main(settings: str, output: str) -> None:
    """Trains as the rank given by the environment; rank 0 writes the runs to `output`."""
    runs = train_rank(Settings(**json.loads(settings)))
    if os.environ["RANK"] == "0":
        Path(output).write_text(json.dumps([asdict(run) for run in runs]), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
