"""Trials in which ranks train a sharded module and one rank fails; a process that has imported torch forks the ranks.

Arguments: a Trial's fields as JSON for each trial. Prints a line of JSON for each: the trial, and each rank's report.
"""

import atexit
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import init_device_mesh

import torchbagua as tb

ATTACH_TIMEOUT_S = 3.0
INIT_TIMEOUT = timedelta(seconds=60)
SLEEP_S = ATTACH_TIMEOUT_S + 2.5
# After a fault; a rank that hangs for longer is killed.
PATIENCE_S = ATTACH_TIMEOUT_S + 20
NUM_LAYERS = 4
MOST_TRIES = 3


class Way(NamedTuple):
    """An algorithm, None if FSDP averages with register_backend, and how its module is sharded and attached to."""

    algorithm: tb.Algorithm | None = tb.ByteGradAlgorithm()
    replicas: int = 1
    gathers_ahead: bool = False
    quantize_weights: str | None = None


def gather_ahead(module: Any) -> None:
    """Have each layer's forward start to gather the weights of the next."""
    for layer, following in itertools.pairwise(module):
        layer.set_modules_to_forward_prefetch([following])
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part._set_unshard_async_op(True)


WAYS = {
    "bytegrad": Way(),
    "gathered ahead": Way(gathers_ahead=True),
    "weights in 8 bits": Way(quantize_weights="minmax_uint8"),
    "replicas": Way(replicas=2),
    "replicas, flat": Way(tb.ByteGradAlgorithm(hierarchical=False), replicas=2),
    "decentralized": Way(tb.DecentralizedAlgorithm(hierarchical=False), replicas=2),
    "backend": Way(None, replicas=2),
}


@dataclass(frozen=True)
class Trial:
    """A run, and its fault.

    Attributes:
        way: of WAYS.
        size: the number of ranks.
        fault: "stop" comes from outside after the second step; "sleep", for longer than the timeout, "raise" and "die"
            come at `place`: "forward", "backward" or "step" of a step and a layer.
        victim: the rank that fails.
        timeout_s: attach's timeout.
        ends_whole: whether the ranks end as an interpreter does, which takes seconds in a fork.
    """

    way: str
    size: int
    fault: str
    victim: int
    place: tuple[str, int, int] = ("forward", 2, 0)
    timeout_s: float = ATTACH_TIMEOUT_S
    ends_whole: bool = False


class Misbehaviour(ArithmeticError):
    """The error that the failing rank raises."""


def train(trial: Trial, rank: int, report: Callable[..., None]) -> None:
    """Train until an error is raised, and fail if this is the victim."""
    way = WAYS[trial.way]
    shape = (way.replicas, trial.size // way.replicas)
    override = {}
    if way.algorithm is None:
        tb.fsdp.register_backend(tb.ByteGradAlgorithm())
        override = {"replicas": "torchbagua"}
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"), backend_override=override)
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(NUM_LAYERS)))
    for part in (*module, module):
        fully_shard(part, mesh=mesh if way.algorithm is None else mesh["shards"])
    if way.gathers_ahead:
        gather_ahead(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    step = 0

    def reach(place: str, layer: int) -> None:
        if rank == trial.victim and (place, step, layer) == tuple(trial.place) and trial.fault != "stop":
            report(fault_at=time.monotonic())
            if trial.fault == "sleep":
                time.sleep(SLEEP_S)
            elif trial.fault == "raise":
                raise Misbehaviour("the loss is not what it was")
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    for index, layer in enumerate(module):

        def watch(layer: nn.Module, inputs: Any, output: torch.Tensor, index: int = index) -> None:
            reach("forward", index)
            output.register_hook(lambda _: reach("backward", index))

        layer.register_forward_hook(watch)
    dist.barrier()  # all ranks have finished the slow parts of their start
    with ExitStack() as stack:
        if way.algorithm is None:
            tb.fsdp.align_blocks(module)
            stack.callback(dist.destroy_process_group)
        else:
            attaching = tb.fsdp.attach(
                module,
                optimizer,
                way.algorithm,
                timeout=timedelta(seconds=trial.timeout_s),
                replicate_group=mesh.get_group("replicas") if way.replicas > 1 else None,
                quantize_weights=way.quantize_weights,
            )
            stack.enter_context(attaching)
        while True:
            optimizer.zero_grad()
            module(torch.randn(8, 64)).square().mean().backward()
            for index in range(NUM_LAYERS):
                reach("step", index)
            optimizer.step()
            step += 1
            if step == 2:
                report(ready_at=time.monotonic())


def run_rank(trial: Trial, rank: int, folder: Path) -> NoReturn:
    """Train, record the raised error and its time, and exit."""
    facts: dict[str, Any] = {}
    path = folder / f"rank{rank}.json"

    def report(**new: Any) -> None:
        facts.update(new)
        path.with_suffix(".new").write_text(json.dumps(facts))
        path.with_suffix(".new").rename(path)

    with open(folder / f"rank{rank}.txt", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    try:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=trial.size, timeout=INIT_TIMEOUT)
        train(trial, rank, report)
    except Exception as error:
        # The error's first line, or the whole traceback if the error is not ours.
        words = str(error).splitlines()[0] if isinstance(error, RuntimeError) else traceback.format_exc()
        report(raised_at=time.monotonic(), error=f"{type(error).__name__}: {words}")
    report(lanes=[thread.name for thread in threading.enumerate() if thread.name.startswith("torchbagua")])
    if trial.ends_whole:
        sys.exit()
    # Registered exit functions run, and must end. The rest of an interpreter's exit takes seconds in a fork, which then
    # copies everything that torch has imported.
    atexit._run_exitfuncs()
    os._exit(0)


def run(trial: Trial, folder: Path) -> dict[str, Any] | None:
    """Run a trial, end all processes, and return their reports; None if a busy machine reached no second step."""
    processes, statuses = {}, dict[int, int]()
    for rank in range(trial.size):
        processes[rank] = os.fork()
        if not processes[rank]:
            run_rank(trial, rank, folder)

    def read(rank: int) -> dict[str, Any]:
        path = folder / f"rank{rank}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def wait(is_over: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not is_over() and time.monotonic() < until:
            time.sleep(0.01)
            for rank, process_id in processes.items():
                if rank not in statuses:
                    done, status = os.waitpid(process_id, os.WNOHANG)
                    if done:
                        statuses[rank] = status

    key = "ready_at" if trial.fault == "stop" else "fault_at"
    try:
        wait(lambda: key in read(trial.victim) or len(statuses) == trial.size, 60)
        if key not in read(trial.victim):
            return None
        if trial.fault == "stop":
            os.kill(processes[trial.victim], signal.SIGSTOP)
            fault_at = time.monotonic()
        else:
            fault_at = read(trial.victim)["fault_at"]
        lives_on = {trial.victim} if trial.fault in ("sleep", "raise") else set()
        ending = {*range(trial.size)} - {trial.victim} | lives_on
        wait(lambda: ending <= statuses.keys(), PATIENCE_S)
    finally:
        for rank, process_id in processes.items():
            if rank not in statuses:
                with suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
                os.waitpid(process_id, 0)
    ranks = []
    for rank in range(trial.size):
        facts = read(rank)
        seconds = facts["raised_at"] - fault_at if "raised_at" in facts else None
        output = (folder / f"rank{rank}.txt").read_text()
        ranks.append({**facts, "seconds": seconds, "status": statuses.get(rank), "output": output})
    return {"trial": asdict(trial), "ranks": ranks}


def main() -> NoReturn:
    for argument in sys.argv[1:]:
        for _ in range(MOST_TRIES):
            folder = Path(tempfile.mkdtemp(prefix="torchbagua-fault-"))  # as a context, a rank's exit would remove it
            result = run(Trial(**json.loads(argument)), folder)
            shutil.rmtree(folder)
            if result is not None:
                break
        print(json.dumps(result), flush=True)
    sys.exit()


if __name__ == "__main__":
    main()
