"""The program of test_ray.py: a training with Ray Train whose rank 1 dies after a checkpoint, and one that goes on.

Argument: a folder for the results of each rank.
"""

import json
import os
from collections.abc import Callable, Sequence

import ray
import ray.train
import scenarios
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from scenarios import FOLDER, STEPS, STOP, weights_of
from torch import nn

import torchbagua as tb
from documentation import names_in


def start() -> tuple[nn.Module, torch.optim.Optimizer, tb.Algorithm]:
    """Return a model, the same on all ranks, with its optimizer and algorithm."""
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 1)))
    optimizer = scenarios.optimizer_for("decentralized", model)
    return model, optimizer, scenarios.ALGORITHMS["decentralized"](optimizer)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Sequence[int]) -> None:
    """Train with different data on each rank and in each step."""
    for step in steps:
        x = torch.randn(8, 10, generator=torch.Generator().manual_seed(100 * rank + step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def write(name: str, result: object) -> None:
    """Write to this program's folder. Ray imports `scenarios` again, and sends workers the functions of this file."""
    (FOLDER / f"{name}.json").write_text(json.dumps(result))


def worker(save: Callable[..., None], load: Callable[..., int]) -> None:
    """Run by Ray on each rank."""
    rank = ray.train.get_context().get_world_rank()
    torch.set_num_threads(1)
    is_restart = ray.train.get_checkpoint() is not None
    if not is_restart:
        model, optimizer, algorithm = start()
        counts = scenarios.Counts()
        with tb.attach(model, optimizer, algorithm, observers=[counts.recorder]):
            train(model, optimizer, rank, range(STEPS))
            during = weights_of(model)
        write(str(rank), {"steps": counts.result()["steps"], "during": during, "weights": weights_of(model)})
    model, optimizer, algorithm = start()
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


if __name__ == "__main__":  # two workers in a private session, restarted once; checkpoints are as on the docs page
    page = names_in("guides/ray.md", "train_loop_per_worker", module="ray_page")
    ray.init("local", num_cpus=2)
    TorchTrainer(
        lambda: worker(page["save"], page["load"]),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=str(FOLDER), name="run", failure_config=FailureConfig(max_failures=1)),
    ).fit()
    ray.shutdown()
