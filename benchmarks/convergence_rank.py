"""One rank of the convergence benchmark, started by convergence.py."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import torchbagua as tb
from convergence_contestants import Contestant
from convergence_tasks import TASKS, Batch, Data
from processes import begin_rank, leave_process_group, report_progress
from torchbagua.cli.demo.train import learning_rate_factor, mean_over_ranks

TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Settings:
    """What convergence.py tells its ranks, as JSON."""

    scratch: str  # folder of progress.json and of results.json
    init_method: str
    num_ranks: int
    num_seeds: int
    steps: dict[str, int]  # by task
    num_held_out: int | None  # how many of the held-out inputs to evaluate; None: all


@dataclass(frozen=True)
class Training:
    """What is to be trained, and how."""

    task: str
    label: str
    contestant: Contestant
    seed: int
    num_steps: int
    num_held_out: int | None


@dataclass(frozen=True)
class Run:
    """What came of one training."""

    task: str
    contestant: str
    algorithm: str
    seed: int
    losses: list[float]  # mean of the ranks' batches, before each step
    step_sent_bytes: float  # mean of the ranks; without what detaching sends
    seconds: float  # of rank 0's steps
    held_out_loss: float  # of the weights that all ranks have after detaching
    held_out_accuracy: float


def plan(settings: Settings) -> list[Training]:
    """Every training, in the order in which they run."""
    return [
        Training(name, label, contestant, seed, num_steps, settings.num_held_out)
        for name, num_steps in settings.steps.items()
        for seed in range(settings.num_seeds)
        for label, contestant in TASKS[name].contestants(num_steps).items()
    ]


def run_all(settings: Settings, rank: int) -> list[Run]:
    """Train with each contestant in turn, for every task and seed. Collective."""
    data = {name: TASKS[name].load_data() for name in settings.steps}
    trainings = plan(settings)
    num_planned = sum(training.num_steps for training in trainings)
    num_done = 0

    def report_step(label: str) -> None:
        nonlocal num_done
        num_done += 1
        if rank == 0:
            report_progress(Path(settings.scratch), num_done, num_planned, label)

    return [train(training, data[training.task], report_step) for training in trainings]


def train(training: Training, data: Data, report_step: Callable[[str], None]) -> Run:
    """Train once and evaluate. First weights and batches depend on nothing but the seed. Collective."""
    task, rank = TASKS[training.task], dist.get_rank()
    torch.manual_seed(training.seed)
    batches = torch.Generator().manual_seed(training.seed * dist.get_world_size() + rank)
    ddp = DistributedDataParallel(task.build_model())
    optimizer = training.contestant.wrap(task.build_optimizer(ddp.parameters()))
    algorithm = training.contestant.algorithm(optimizer)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, training.num_steps))
    recorder = tb.traces.Recorder()
    losses: list[float] = []

    start = time.perf_counter()
    with tb.attach(ddp, optimizer, algorithm, observers=[recorder]):
        for _ in range(training.num_steps):
            inputs, targets = data.sample(batches)
            loss = cross_entropy(ddp(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            report_step(training.label)
        seconds = time.perf_counter() - start
        sent_bytes = recorder.bytes_sent

    check_equal_weights(ddp.module, training.label)
    held_out_loss, held_out_accuracy = math.nan, math.nan
    if rank == 0:
        held_out_loss, held_out_accuracy = evaluate(ddp.module, data.held_out, training.num_held_out)
    return Run(
        task=training.task,
        contestant=training.label,
        algorithm=repr(algorithm),
        seed=training.seed,
        losses=mean_over_ranks(losses),
        step_sent_bytes=mean_over_ranks([sent_bytes / training.num_steps])[0],
        seconds=seconds,
        held_out_loss=held_out_loss,
        held_out_accuracy=held_out_accuracy,
    )


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all positions, where there are any, and the batch."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Batch, num_inputs: int | None) -> tuple[float, float]:
    """Loss and accuracy on the first `num_inputs`; None: on all."""
    inputs, targets = (tensor[:num_inputs] for tensor in held_out)
    model.eval()
    logits = model(inputs)
    return cross_entropy(logits, targets).item(), (logits.argmax(-1) == targets).double().mean().item()


def check_equal_weights(model: nn.Module, label: str) -> None:
    """Raise RuntimeError where this rank's weights are not rank 0's, bit for bit. Collective."""
    own = nn.utils.parameters_to_vector(model.parameters()).detach()
    first = own.clone()
    dist.broadcast(first, src=0)
    if not torch.equal(own, first):
        raise RuntimeError(f"{label}: after detaching, the weights of rank {dist.get_rank()} are not those of rank 0")


def main() -> None:
    settings, rank = begin_rank(Settings)
    dist.init_process_group(
        "gloo", init_method=settings.init_method, rank=rank, world_size=settings.num_ranks, timeout=TIMEOUT
    )
    runs = run_all(settings, rank)
    leave_process_group()
    if rank == 0:
        (Path(settings.scratch) / "results.json").write_text(json.dumps([asdict(run) for run in runs]))


if __name__ == "__main__":
    main()
