"""What the programs of the ranks share: algorithms, weights, counts of events, errors, and the file of results."""

import json
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb

STEPS, STOP = 6, 3
FOLDER = Path(sys.argv[-1])

ALGORITHMS: dict[str, Callable[[Any], tb.Algorithm]] = {
    "gradient_allreduce": lambda optimizer: tb.GradientAllReduceAlgorithm(),
    "bytegrad": lambda optimizer: tb.ByteGradAlgorithm(error_feedback=True),
    "qadam": lambda optimizer: tb.QAdamAlgorithm(optimizer, error_feedback=True),
    "decentralized": lambda optimizer: tb.DecentralizedAlgorithm(peer_selection_mode="shift_one"),
    "low_precision_decentralized": lambda optimizer: tb.LowPrecisionDecentralizedAlgorithm(),
    "diloco": lambda optimizer: tb.DiLoCoAlgorithm(2, delay=1),
    "async": lambda optimizer: tb.AsyncModelAverageAlgorithm(sync_interval_ms=5),
}


def optimizer_for(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "qadam":
        return tb.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
    return torch.optim.Adam(model.parameters(), lr=0.01)


def weights_of(model: torch.nn.Module) -> dict[str, list[float]]:
    """Return all tensors of the state dict as numbers that JSON stores exactly."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {key: value.double().flatten().tolist() for key, value in inner.state_dict().items()}


def threads_since(before: set[threading.Thread]) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread not in before]


class Counts:
    """Counts steps and buckets, and finds the threads that are left."""

    def __init__(self) -> None:
        self.recorder = tb.observe.Recorder()
        self.threads = set(threading.enumerate())

    def result(self) -> dict[str, Any]:
        phases = [event.phase for event in self.recorder.events]
        counts = {"steps": phases.count("step"), "buckets": phases.count("bucket")}
        return {**counts, "threads": threads_since(self.threads)}


def error_of(call: Callable[[], Any], *, or_warnings: bool = False) -> str:
    """Return the error that `call` raises, or its warnings if they are asked for."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            call()
        except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    messages = [str(warning.message) for warning in caught if "torchbagua" in str(warning.message)]
    return "; ".join(messages if or_warnings else []) or "nothing"


def write(name: str, result: Any) -> None:
    """Write a result for the test to read."""
    (FOLDER / f"{name}.json").write_text(json.dumps(result))


def run(rank: int, scenarios: Iterable[Callable[[], Any]]) -> None:
    """Run scenarios, and write their results to the file of this rank."""
    found = {}
    for scenario in scenarios:
        print(f"rank {rank}: {scenario.__name__}", flush=True)
        found[scenario.__name__] = scenario()
    write(str(rank), found)
