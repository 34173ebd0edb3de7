"""One process of the benchmark of elastic training: it trains, and logs its steps.

elastic.py forks it, or starts it as a program, like torchrun:

    python benchmarks/elastic_rank.py SETTINGS_JSON elastic|plain
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from contestants import build_model
from processes import PR_SET_PDEATHSIG
from startup import read_figures
from torchbagua import elastic

NUM_SAMPLES, BATCH_SIZE = 4096, 8
CLONE_NEWNET = 0x40000000
POLL_S = 0.01
FIGURES_AT_STEP = 3  # of each generation; reading them must not lengthen its first step


@dataclass(frozen=True)
class Settings:
    """The settings that elastic.py passes to its processes, as JSON."""

    scratch: str  # folder of the logs and the checkpoint
    num_parameters: int
    compute_s: float  # for which each step waits in place of an accelerator, besides its real computation
    algorithm: str
    timeout_s: float
    num_steps: int
    checkpoint_every_steps: int  # of plain DDP


class Log:
    """The events of this process with their times, one JSON object a line, in a file named by its process number."""

    def __init__(self, folder: str) -> None:
        path = Path(folder, f"{os.getpid()}.jsonl")
        self._file = open(path, "w", buffering=1)  # noqa: SIM115 (of the whole process; a write for each line)

    def write(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, "at_s": time.monotonic(), **fields}) + "\n")


class Process:
    """A process of a training as the benchmark sees it: what it has logged so far.

    Attributes:
        slot: its number among the processes that train at the same time; a new process takes that of one that is gone.
        begun: for each of its generations, the event of its begin.
        steps: for each of its generations, the events of its steps.
        others: its other events, the last of each kind and generation.
    """

    def __init__(self, pid: int, slot: int, scratch: str, is_alive: Callable[[], bool]) -> None:
        self.pid = pid
        self.slot = slot
        self.is_alive = is_alive
        self.started_s = time.monotonic()
        self.begun: dict[int, dict[str, Any]] = {}
        self.steps: dict[int, list[dict[str, Any]]] = {}
        self.others: dict[tuple[str, int | None], dict[str, Any]] = {}
        self._log, self._output = Path(scratch, f"{pid}.jsonl"), Path(scratch, f"{pid}.out")
        self._offset = 0

    @property
    def newest(self) -> dict[str, Any]:
        return self.begun[max(self.begun)]

    def read(self) -> "Process":
        """Read what it has logged since the last call."""
        with contextlib.suppress(FileNotFoundError), open(self._log) as log:
            log.seek(self._offset)
            text = log.read()
            text = text[: text.rfind("\n") + 1]
            self._offset += len(text)
            for event in map(json.loads, text.splitlines()):
                generation = event.get("generation")
                if event["event"] == "begins":
                    self.begun[generation] = event
                    self.steps[generation] = []
                elif event["event"] == "step":
                    self.steps[generation].append(event)
                else:
                    self.others[event["event"], generation] = event
        return self

    def last_steps(self) -> list[int]:
        """Return the number of the last step of each of its generations."""
        return [steps[-1]["step"] for steps in self.steps.values() if steps]

    def output(self) -> str:
        return self._output.read_text(errors="replace")[-2000:] if self._output.exists() else ""

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.is_alive():
                os.kill(self.pid, signal.SIGKILL)
        while self.is_alive():
            time.sleep(POLL_S)


class Workload:
    """A multi-layer perceptron with AdamW, and its data."""

    def __init__(self, settings: Settings) -> None:
        self._compute_s = settings.compute_s
        self.model = build_model(settings.num_parameters)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        width = next(self.model.parameters()).shape[1]
        self.data = TensorDataset(torch.randn(NUM_SAMPLES, width, generator=torch.Generator().manual_seed(0)))

    def step(self, module: torch.nn.Module, inputs: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        time.sleep(self._compute_s)
        module(inputs).square().mean().backward()
        self.optimizer.step()


def train_elastic(settings: Settings) -> None:
    log, workload = Log(settings.scratch), Workload(settings)
    sampler = elastic.Sampler(workload.data)
    loader = DataLoader(workload.data, BATCH_SIZE, sampler=sampler)

    def train(run: elastic.Run) -> None:
        own = run.members[run.rank]
        about = {"generation": run.generation, "size": run.size}
        log.write("begins", **about, rank=run.rank, host=own.host, port=own.port)
        num_here = 0
        try:
            while run.step < settings.num_steps:
                for (inputs,) in run.batches(loader):
                    workload.step(run.module, inputs)
                    num_here += 1
                    if num_here == FIGURES_AT_STEP:
                        log.write("figures", **about, **read_figures())
                    log.write("step", **about, step=run.step)
                    if run.step >= settings.num_steps:
                        break
        except BaseException as error:
            log.write("ends", **about, error=repr(error))
            raise

    log.write("asks")
    timeout = timedelta(seconds=settings.timeout_s)
    elastic.run(train, workload.model, workload.optimizer, settings.algorithm, sampler=sampler, timeout=timeout)


def train_plain(settings: Settings) -> None:
    """Train with plain DDP, and with checkpoints of rank 0, which is enough since all ranks are equal."""
    log, workload = Log(settings.scratch), Workload(settings)
    log.write("asks")
    dist.init_process_group("gloo", timeout=timedelta(seconds=settings.timeout_s))
    rank, size = dist.get_rank(), dist.get_world_size()
    checkpoint, first = Path(settings.scratch, "checkpoint.pt"), 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        workload.model.load_state_dict(state["model"])
        workload.optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    ddp = DistributedDataParallel(workload.model)
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    about = {"generation": restart, "size": size}
    log.write("begins", **about, rank=rank)
    for step in range(first, settings.num_steps):
        start = (step * size + rank) * BATCH_SIZE % NUM_SAMPLES
        workload.step(ddp, workload.data[start : start + BATCH_SIZE][0])
        log.write("step", **about, step=step + 1)
        if rank == 0 and settings.checkpoint_every_steps and (step + 1) % settings.checkpoint_every_steps == 0:
            state = {
                "step": step + 1,
                "model": workload.model.state_dict(),
                "optimizer": workload.optimizer.state_dict(),
            }
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)  # a file is complete or absent
    dist.destroy_process_group()


def end_with_parent() -> None:
    """Have the kernel end this process with its parent, even if that is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def begin_child() -> None:
    """Make this child of the benchmark end with it, and leave its process group, which Ctrl-C reaches."""
    end_with_parent()
    os.setpgrp()


def run_forked(settings: Settings, namespace: str | None, environment: Mapping[str, str]) -> None:
    """Train in a process that the benchmark has forked; `namespace` is that of its network."""
    begin_child()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    output = os.open(Path(settings.scratch, f"{os.getpid()}.out"), os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    if namespace is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/var/run/netns/{namespace}") as opened:
            if libc.setns(opened.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    os.environ.update(environment)
    torch.set_num_threads(1)
    train_elastic(settings)


if __name__ == "__main__":
    end_with_parent()
    torch.set_num_threads(1)
    path, kind = sys.argv[1:]
    {"elastic": train_elastic, "plain": train_plain}[kind](Settings(**json.loads(Path(path).read_text())))
