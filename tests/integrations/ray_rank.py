"""The program of test_ray.py: the same training with Ray Train and, started by torchrun, in a plain loop.

Arguments: a folder for `<rank>.json`, and "ray" if this program is to start Ray.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import scenarios
import torch
from scenarios import FOLDER, STEPS, STOP, weights_of, write
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb

NAMES = [name for name in scenarios.ALGORITHMS if name != "async"]

Wrap = Callable[[nn.Module], nn.Module]


def start(name: str, wrap: Wrap) -> tuple[nn.Module, torch.optim.Optimizer, tb.Algorithm]:
    """Return a model, the same on all ranks, with its optimizer and algorithm."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 1)))
    optimizer = scenarios.optimizer_for(name, model)
    return model, optimizer, scenarios.ALGORITHMS[name](optimizer)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Sequence[int]) -> None:
    """Train with different data on each rank and in each step."""
    for step in steps:
        x = torch.randn(8, 10, generator=torch.Generator().manual_seed(100 * rank + step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def runs(rank: int, wrap: Wrap) -> dict[str, Any]:
    """Run every algorithm, from the first step to the last."""
    found = {}
    for name in NAMES:
        model, optimizer, algorithm = start(name, wrap)
        counts = scenarios.Counts()
        with tb.attach(model, optimizer, algorithm, observers=[counts.recorder]):
            train(model, optimizer, rank, range(STEPS))
            during = weights_of(model)
        found[name] = {"steps": counts.result()["steps"], "during": during, "weights": weights_of(model)}
    return found


def worker(save: Callable[..., None], load: Callable[..., int]) -> None:
    """Run by Ray on each rank: every algorithm, and then a training whose rank 1 dies after a checkpoint."""
    import ray.train
    from ray.train.torch import prepare_model

    rank = ray.train.get_context().get_world_rank()
    torch.set_num_threads(1)
    is_restart = ray.train.get_checkpoint() is not None
    if not is_restart:
        write(str(rank), runs(rank, prepare_model))
    model, optimizer, algorithm = start("decentralized", prepare_model)
    with tb.attach(model, optimizer, algorithm) as attachment:
        first = load(model, optimizer, attachment)
        if not is_restart:
            train(model, optimizer, rank, range(STOP))
            save(STOP, model, optimizer, attachment)
            ray.train.get_all_reported_checkpoints()  # returns when the controller has registered it
            write(f"saved-{rank}", weights_of(model))
            if rank == 1:
                os._exit(1)
        loaded = weights_of(model)
        train(model, optimizer, rank, range(first or STOP, STEPS))
        write(f"resumed-{rank}", {"first": first, "loaded": loaded, "during": weights_of(model)})


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
        write(str(RANK), runs(RANK, DistributedDataParallel))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
