"""One process of a trial of faults.py, which passes its `Program` as JSON.

It writes an event to stdout as a line of JSON, with the time of the machine's clock: `asks` before it joins, and for
each generation `begins`, for each step `fetches` and `steps`, then `fault` if it misbehaves, and `ends`.
"""

import ctypes
import faulthandler
import hashlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchbagua as tb
from torchbagua import elastic
from torchbagua.algorithms import init_for

TIMEOUT = timedelta(seconds=6)
LIMIT_S = 100.0  # of a process: then it hangs
NUM_SAMPLES = 90
BATCH_SIZE = 2
COMPUTE_S = 0.03  # of a step
POISON = 17  # a sample

# Arguments with which few steps run all that an algorithm does.
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "async": {"sync_interval_ms": 20, "warmup_steps": 2},
    "diloco": {"inner_steps": 3},
    "local_sgd": {"inner_steps": 2},
    "powersgd": {"rank": 1, "start_step": 2, "min_rate": 1},
    "streaming_diloco": {"inner_steps": 4, "fragments": 2, "delay": 1},
    "topk": {"ratio": 0.25},
}
# These need a DistributedDataParallel on nodes of several ranks, which elastic training does not make.
HIERARCHICAL = ("diloco", "local_sgd", "streaming_diloco")
# Algorithms that are no registered name, with their own arguments.
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bytegrad_feedback": ("bytegrad", {"error_feedback": True}),
    "shift_one": ("decentralized", {"peer_selection_mode": "shift_one"}),
}


class UserError(Exception):
    """The user's code raised."""


@dataclass(frozen=True)
class Program:
    """What a process does.

    Attributes:
        algorithm: its registered name, or a key of VARIANTS.
        namespace, host: the network namespace of its node, and its host name there; empty without namespaces.
        own_faults: what it does itself: number, kind ("stall", "raise" or "poison"), first step and seconds.
        join: addresses of processes of the job that it joins.
    """

    algorithm: str
    is_elastic: bool
    num_steps: int
    namespace: str = ""
    host: str = ""
    own_faults: Sequence[tuple[int, str, int, float]] = ()
    join: Sequence[str] = ()


def emit(event: str, **fields: Any) -> None:
    """Write an event in one piece."""
    os.write(1, (json.dumps({"event": event, "at_s": time.monotonic(), **fields}) + "\n").encode())


def enter_node(program: Program) -> None:
    """Move this process to its network namespace, under a host name of the node, which determines its local ranks."""
    if program.namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/var/run/netns/{program.namespace}") as namespace:
            for call, *arguments in ((libc.setns, namespace.fileno(), 0x40000000), (libc.unshare, 0x04000000)):
                if call(*arguments):
                    raise OSError(ctypes.get_errno(), f"{call.__name__}{tuple(arguments)}")
        socket.sethostname(program.host)


class Training:
    """The model, the optimizer and the data of a process."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._own_faults = [*program.own_faults]
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        name, arguments = VARIANTS.get(program.algorithm, (program.algorithm, ARGUMENTS.get(program.algorithm, {})))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.01, momentum=0.0 if name == "topk" else 0.9
        )
        if name == "qadam":
            self.optimizer = tb.QAdamOptimizer(self.model.parameters(), lr=1e-3, warmup_steps=2)
        if program.is_elastic and name in HIERARCHICAL:
            arguments = {**arguments, "hierarchical": False}
        self.algorithm = init_for(name, [self.optimizer], **arguments)
        self._x, self._y = torch.randn(NUM_SAMPLES, 8), torch.randn(NUM_SAMPLES, 1)
        self.sampler = elastic.Sampler(range(NUM_SAMPLES), seed=1, drop_last=True)
        self.loader = DataLoader(TensorDataset(torch.arange(NUM_SAMPLES)), BATCH_SIZE, sampler=self.sampler)

    def take_step(self, module: torch.nn.Module, samples: torch.Tensor, generation: int, step: int) -> None:
        where = {"generation": generation, "step": step}
        emit("fetches", **where, epoch=self.sampler.epoch, samples=samples.tolist())
        self._misbehave(step, samples.tolist())
        time.sleep(COMPUTE_S)
        self.optimizer.zero_grad()
        (module(self._x[samples]) - self._y[samples]).square().mean().backward()
        self.optimizer.step()
        emit("steps", **where)

    def _misbehave(self, step: int, samples: list[int]) -> None:
        for fault in [*self._own_faults]:
            number, kind, first_step, seconds = fault
            if step < first_step or (kind == "poison" and POISON not in samples):
                continue
            self._own_faults.remove(fault)
            emit("fault", number=number)
            if kind == "raise":
                raise UserError
            if kind == "poison":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(seconds)

    def run(self, run: elastic.Run) -> None:
        """Train one generation of elastic training."""
        emit(
            "begins",
            generation=run.generation,
            step=run.step,
            members=[member.id for member in run.members],
            own=run.rank,
            address=f"{run.members[run.rank].host}:{run.members[run.rank].port}",
        )
        while run.step < self._program.num_steps:
            for (samples,) in run.batches(self.loader):
                self.take_step(run.module, samples, run.generation, run.step + 1)
                if run.step >= self._program.num_steps:
                    break

    def run_without_elastic(self) -> None:
        """Train with `attach` alone."""
        dist.init_process_group("gloo", timeout=TIMEOUT)
        rank, size = dist.get_rank(), dist.get_world_size()
        module = DistributedDataParallel(self.model)
        with tb.attach(module, self.optimizer, self.algorithm, timeout=TIMEOUT):
            emit("begins", generation=0, step=0, members=[*range(size)], own=rank, address="")
            for step in range(1, self._program.num_steps + 1):
                samples = (torch.arange(BATCH_SIZE) + BATCH_SIZE * (step * size + rank)) % NUM_SAMPLES
                self.take_step(module, samples, 0, step)


def train(program: Program) -> None:
    """Train; write how it ended: "done", "left", or the names of the classes of the error."""
    training, how = Training(program), ["done"]

    def leave(run: elastic.Run) -> None:
        how[:] = ["left"]

    try:
        if not program.is_elastic:
            training.run_without_elastic()
        else:
            emit("asks")
            elastic.run(
                training.run,
                training.model,
                training.optimizer,
                training.algorithm,
                sampler=training.sampler,
                timeout=TIMEOUT,
                join=program.join,
                on_leave=leave,
            )
    except Exception as error:
        traceback.print_exc()
        how = [each.__name__ for each in type(error).__mro__]
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in training.model.parameters())
    emit("ends", how=how, weights=hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMIT_S)
    torch.set_num_threads(1)
    program = Program(**json.loads(sys.argv[1]))
    enter_node(program)
    train(program)
