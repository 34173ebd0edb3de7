"""One rank of the convergence benchmark, started by convergence.py. All trainings run in one set of processes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from convergence_contestants import CONTESTANTS, Trainee
from convergence_sweep import Record, Sweep, Trial, load, save, trial_cost
from convergence_tasks import TASKS, Batch, Data, Task
from processes import begin_rank, leave_process_group, report_progress
from torchbagua.cli.demo.train import learning_rate_factor, mean_over_ranks

NUM_EVALUATIONS = 16


@dataclass(frozen=True)
class Settings:
    """The settings that convergence.py passes to its ranks, as JSON."""

    scratch: str  # folder of progress.json
    results: str  # file to which rank 0 adds each training
    init_method: str
    num_ranks: int
    patience_s: float  # timeout when waiting for another rank
    sweep: dict[str, Any]  # fields of Sweep
    steps: dict[str, int]  # by task
    num_held_out: int | None  # how many of the held-out inputs to evaluate; None: all
    facts: dict[str, Any]  # the settings in the file


def run_all(settings: Settings, rank: int) -> None:
    """Train until no training is missing. Collective; rank 0 selects the next training and stores its result."""
    sweep = Sweep(**settings.sweep)
    data = {name: TASKS[name].load_data() for name in sweep.tasks}
    document, _ = load(Path(settings.results), settings.facts, settings.steps)
    records: list[Record] = document["trainings"]
    cost_done = 0

    def report(trial: Trial, cost_planned: int, step: int) -> None:
        if rank == 0:
            cost = cost_done + trial_cost(trial, {trial.task: step})
            label = f"{trial.task}, {CONTESTANTS[trial.contestant].label}, {trial.rate:.3g}, seed {trial.seed}"
            report_progress(Path(settings.scratch), cost, cost_planned, label)

    while (trial := broadcast_trial(sweep.next_trial(records))) is not None:
        report_step = partial(report, trial, cost_done + sweep.cost(records, settings.steps))
        record = train(trial, data[trial.task], settings.steps[trial.task], settings.num_held_out, report_step)
        records.append(record)
        cost_done += trial_cost(trial, settings.steps)
        if rank == 0:
            save(Path(settings.results), document)


def broadcast_trial(trial: Trial | None) -> Trial | None:
    """Return rank 0's trial on all ranks. Collective."""
    trials = [trial]
    dist.broadcast_object_list(trials, src=0)
    return trials[0]


def train(
    trial: Trial, data: Data, num_steps: int, num_held_out: int | None, report_step: Callable[[int], None]
) -> Record:
    """Train once. Initial weights and batches depend only on the seed. Collective.

    A training ends early if its held-out loss is not finite; the record then contains None for that loss.
    """
    task, contestant = TASKS[trial.task], CONTESTANTS[trial.contestant]
    torch.manual_seed(trial.seed)
    batches = torch.Generator().manual_seed(trial.seed * dist.get_world_size() + dist.get_rank())
    model = task.build_model()
    held_out = (data.held_out[0][:num_held_out], data.held_out[1][:num_held_out])
    evaluation = Evaluation(task.build_model(), held_out)
    before = written_bytes()
    losses, evaluated = [finite(evaluation.of(model).loss)], [0]
    evaluation_bytes = written_bytes() - before

    warmup_steps = contestant.warmup_steps(num_steps)
    trainee = contestant.begin(model, lambda parameters: task.build_optimizer(parameters, trial.rate), warmup_steps)
    before = written_bytes()
    _floating_point(model)  # an evaluation gathers sharded tensors
    evaluation_bytes += written_bytes() - before
    schedule = LambdaLR(trainee.optimizer, lambda step: learning_rate_factor(step, num_steps))
    evaluation_steps = {round(num_steps * share / NUM_EVALUATIONS) for share in range(1, NUM_EVALUATIONS)}
    before = written_bytes()
    for step in range(1, num_steps + 1):
        train_step(trainee, task, data.sample(batches))
        schedule.step()
        report_step(step)
        if step in evaluation_steps and step < num_steps:
            losses.append(finite(evaluation.of(model).loss))
            evaluated.append(step)
            if losses[-1] is None:
                break
    sent_bytes = written_bytes() - before - evaluation_bytes * (len(losses) - 1)
    num_rounds = trainee.num_rounds
    trainee.close()

    accuracy = math.nan
    if losses[-1] is not None:
        check_equal_weights(model, contestant.label)
        score = evaluation.of(model)
        losses.append(finite(score.loss))
        evaluated.append(num_steps)
        accuracy = score.accuracy
    return {
        "task": trial.task,
        "contestant": trial.contestant,
        "label": contestant.label,
        "warmup_steps": warmup_steps,
        "settings": contestant.describe(warmup_steps),
        "rung": trial.rung,
        "rate": trial.rate,
        "seed": trial.seed,
        "evaluated_steps": evaluated,
        "held_out_losses": losses,  # of the mean of the ranks' weights; None if not finite
        "held_out_accuracy": finite(accuracy),
        "sent_bytes_a_step": finite(mean_over_ranks([sent_bytes / step])[0]),
        "num_elements": sum(parameter.numel() for parameter in model.parameters()),
        "num_rounds": num_rounds,
    }


def train_step(trainee: Trainee, task: Task, batch: Batch) -> None:
    inputs, targets = batch
    loss = cross_entropy(trainee.module(inputs), targets)
    trainee.optimizer.zero_grad()
    loss.backward()
    if task.max_gradient_norm is not None:
        nn.utils.clip_grad_norm_(trainee.module.parameters(), task.max_gradient_norm)
    trainee.optimizer.step()


@dataclass(frozen=True)
class Score:
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Evaluation:
    """Evaluates the mean of the ranks' weights and buffers, each rank on its share of the data.

    The evaluated models do not change, and the way in which ranks have trained does not matter.
    """

    model: nn.Module  # a model of the same class, overwritten with the mean
    held_out: Batch

    @torch.no_grad()
    def of(self, model: nn.Module) -> Score:
        """Evaluate the mean of all ranks' `model`. Collective."""
        own, mean = (_floating_point(module) for module in (model, self.model))
        flat = nn.utils.parameters_to_vector(own)
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for tensor, values in zip(mean, flat.split([tensor.numel() for tensor in mean]), strict=True):
            tensor.copy_(values.view_as(tensor))
        self.model.eval()
        inputs, targets = (tensor[dist.get_rank() :: dist.get_world_size()] for tensor in self.held_out)
        logits = self.model(inputs)
        loss_sum = cross_entropy(logits, targets, reduction="sum")
        num_right = (logits.argmax(-1) == targets).sum()
        loss, right, count = mean_over_ranks([loss_sum.item(), num_right.item(), targets.numel()])
        return Score(loss / count, right / count)


def _floating_point(model: nn.Module) -> list[Tensor]:
    """Return parameters and buffers: the model's own tensors, or gathered copies of a sharded model. Collective."""
    return [_whole(value) for value in model.state_dict().values() if value.is_floating_point()]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross entropy over the batch and over all positions, if the logits have positions."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def written_bytes() -> float:
    """Return the bytes that this process has written so far, almost all of them to gloo's sockets. NaN except on Linux.

    The kernel counts them, in the same way for all contestants.
    """
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except FileNotFoundError:
        return math.nan
    return float(dict(line.split(": ") for line in lines)["wchar"])


def check_equal_weights(model: nn.Module, label: str) -> None:
    """Raise RuntimeError if this rank's weights are not bitwise identical to rank 0's. Collective."""
    own = nn.utils.parameters_to_vector(map(_whole, model.parameters())).detach().view(torch.int32)
    first = own.clone()
    dist.broadcast(first, src=0)
    if not torch.equal(own, first):
        raise RuntimeError(f"{label}: after detach, the weights of rank {dist.get_rank()} differ from those of rank 0")


def main() -> None:
    settings, rank = begin_rank(Settings)
    dist.init_process_group(
        "gloo",
        init_method=settings.init_method,
        rank=rank,
        world_size=settings.num_ranks,
        timeout=timedelta(seconds=settings.patience_s),
    )
    run_all(settings, rank)
    leave_process_group()


if __name__ == "__main__":
    main()
