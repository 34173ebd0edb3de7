"""One rank of convergence_times.py, started inside its namespace."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from convergence_contestants import CONTESTANTS
from convergence_rank import train_step
from convergence_tasks import TASKS, Data
from processes import begin_rank, leave_process_group, report_progress
from timing import alternated

WARM_UP_STEPS = 3  # DDP rebuilds its buckets after the first step, PowerSGD compresses from the third


@dataclass(frozen=True)
class Settings:
    """The settings that convergence_times.py passes to its ranks, as JSON."""

    scratch: str  # folder of progress.json and step_ms.json
    init_method: str
    num_ranks: int
    tasks: list[str]
    contestants: list[str]
    num_steps: int
    num_rounds: int


def block_ms(task_name: str, contestant_name: str, data: Data, num_steps: int, report: Callable[[str], None]) -> float:
    """Return the milliseconds per step on the slowest rank, after the contestant's warm-up. Collective.

    A block is `num_steps` steps, or whole rounds. If averaging rounds run concurrently with training, a round is in
    flight when the timing begins and when it ends.
    """
    task, contestant = TASKS[task_name], CONTESTANTS[contestant_name]
    num_steps = contestant.steps_a_round * math.ceil(num_steps / contestant.steps_a_round)
    torch.manual_seed(0)
    batches = torch.Generator().manual_seed(dist.get_rank())
    trainee = contestant.begin(
        task.build_model(), lambda parameters: task.build_optimizer(parameters, task.rate), warmup_steps=1
    )
    for _ in range(WARM_UP_STEPS):
        train_step(trainee, task, data.sample(batches))
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        train_step(trainee, task, data.sample(batches))
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    trainee.close()
    report(f"{task_name}, {contestant.label}")
    return 1e3 * seconds.item() / num_steps


def main() -> None:
    settings, rank = begin_rank(Settings)
    dist.init_process_group("gloo", init_method=settings.init_method, rank=rank, world_size=settings.num_ranks)
    blocks: dict[tuple[str, str], Callable[[], float]] = {}
    num_done = 0

    def report(label: str) -> None:
        nonlocal num_done
        num_done += 1
        if rank == 0:
            report_progress(Path(settings.scratch), num_done, (1 + settings.num_rounds) * len(blocks), label)

    for name in settings.tasks:
        data = TASKS[name].load_data()
        for contestant in settings.contestants:
            if name in CONTESTANTS[contestant].tasks:
                blocks[name, contestant] = partial(block_ms, name, contestant, data, settings.num_steps, report)
    step_ms: dict[str, dict[str, list[float]]] = {name: {} for name in settings.tasks}
    for (name, contestant), times in alternated(blocks, settings.num_rounds).items():
        step_ms[name][contestant] = times
    leave_process_group()
    if rank == 0:
        (Path(settings.scratch) / "step_ms.json").write_text(json.dumps(step_ms))


if __name__ == "__main__":
    main()
