"""The program of test_ray.py: the same training with Ray Train and, started by torchrun, in a plain loop.

Arguments: a folder for `<rank>.json`, and "ray" if this program is to start Ray.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb

STEPS, STOP = 6, 3
FOLDER = Path(sys.argv[1])

ALGORITHMS: dict[str, Callable[[torch.optim.Optimizer], tb.Algorithm]] = {
    "gradient_allreduce": lambda optimizer: tb.GradientAllReduceAlgorithm(),
    "bytegrad": lambda optimizer: tb.ByteGradAlgorithm(error_feedback=True),
    "qadam": lambda optimizer: tb.QAdamAlgorithm(optimizer, error_feedback=True),
    "decentralized": lambda optimizer: tb.DecentralizedAlgorithm(peer_selection_mode="shift_one"),
    "low_precision_decentralized": lambda optimizer: tb.LowPrecisionDecentralizedAlgorithm(),
    "diloco": lambda optimizer: tb.DiLoCoAlgorithm(2, delay=1),
}

Wrap = Callable[[nn.Module], nn.Module]


def start(name: str, wrap: Wrap) -> tuple[nn.Module, torch.optim.Optimizer, tb.Algorithm]:
    """Return a model, the same on all ranks, with its optimizer and algorithm."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 1)))
    if name == "qadam":
        optimizer: torch.optim.Optimizer = tb.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, ALGORITHMS[name](optimizer)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Sequence[int]) -> None:
    """Train with different data on each rank and in each step."""
    for step in steps:
        x = torch.randn(8, 10, generator=torch.Generator().manual_seed(100 * rank + step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def weights_of(model: nn.Module) -> dict[str, list[float]]:
    """Return the weights as lists, which JSON stores bitwise."""
    return {name: weight.detach().flatten().tolist() for name, weight in model.named_parameters()}


def write(file: str, found: dict[str, Any]) -> None:
    """Write a result for the test to read."""
    (FOLDER / file).write_text(json.dumps(found))


def runs(rank: int, wrap: Wrap) -> dict[str, Any]:
    """Run every algorithm, from the first step to the last."""
    found = {}
    for name in ALGORITHMS:
        model, optimizer, algorithm = start(name, wrap)
        recorder = tb.observe.Recorder()
        with tb.attach(model, optimizer, algorithm, observers=[recorder]):
            train(model, optimizer, rank, range(STEPS))
            during = weights_of(model)
        steps = sum(event.phase == "step" for event in recorder.events)
        found[name] = {"steps": steps, "during": during, "weights": weights_of(model)}
    return found


def worker(save: Callable[..., None], load: Callable[..., int]) -> None:
    """Run by Ray on each rank: every algorithm, and then a training whose rank 1 dies after a checkpoint."""
    import ray.train
    from ray.train.torch import prepare_model

    rank = ray.train.get_context().get_world_rank()
    torch.set_num_threads(1)
    is_restart = ray.train.get_checkpoint() is not None
    if not is_restart:
        write(f"{rank}.json", runs(rank, prepare_model))
    model, optimizer, algorithm = start("decentralized", prepare_model)
    with tb.attach(model, optimizer, algorithm) as attachment:
        first = load(model, optimizer, attachment)
        if not is_restart:
            train(model, optimizer, rank, range(STOP))
            save(STOP, model, optimizer, attachment)
            ray.train.get_all_reported_checkpoints()  # returns when the controller has registered it
            write(f"saved-{rank}.json", weights_of(model))
            if rank == 1:
                os._exit(1)
        loaded = weights_of(model)
        train(model, optimizer, rank, range(first or STOP, STEPS))
        write(f"resumed-{rank}.json", {"first": first, "loaded": loaded, "during": weights_of(model)})


def run_with_ray() -> None:
    """Run two workers in a private Ray session, which restarts them once; checkpoints are as on the docs page."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from documentation import names_in

    page = names_in("guides/ray.md", "train_loop_per_worker", module="ray_page")
    ray.init("local", num_cpus=2)
    TorchTrainer(
        lambda: worker(page["save"], page["load"]),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=str(FOLDER), name="run", failure_config=FailureConfig(max_failures=1)),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    if sys.argv[2:] == ["ray"]:
        run_with_ray()
    else:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        RANK = torch.distributed.get_rank()
        write(f"{RANK}.json", runs(RANK, DistributedDataParallel))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
