"""One rank of the profile of a step, started by step_profile.py inside its namespace."""

import json
import statistics
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bucket_times import measure_buckets
from contestants import CONTESTANTS, Setup, build_batch, build_model
from processes import begin_rank, leave_process_group, report_progress
from schedule import choose_schedule, group_into_buckets
from torchbagua.observe.timeline import draw

WARM_UP_STEPS = 6  # the first means determine whether chunks are sent in pieces
TASKS = Path("/proc/self/task")


@dataclass(frozen=True)
class Settings:
    """The settings that step_profile.py passes to its ranks, as JSON."""

    scratch: str  # folder of progress.json, and of rank 0's profile.json
    init_method: str
    num_ranks: int
    contestant: str
    num_parameters: int
    is_idle: bool  # the model waits instead of computing
    compute_ms: float | None  # how long it waits; None: for the recorded compute time
    bits_per_second: float | None  # rate of the network; None: not shaped
    bucket_cap_mb: float
    num_steps: int
    picture: str | None  # file in which rank 0 draws its last step


def main() -> None:
    settings, rank = begin_rank(Settings)
    dist.init_process_group("gloo", init_method=settings.init_method, rank=rank, world_size=settings.num_ranks)
    model = build_model(settings.num_parameters)
    batch = build_batch(model, rank)
    schedule = choose_schedule(model, batch, settings.compute_ms)
    nodes = [0] * settings.num_ranks
    setup = Setup(model, settings.bucket_cap_mb, nodes, schedule if settings.is_idle else None)
    contestant = CONTESTANTS[settings.contestant]
    entry = contestant.wrap(setup)
    numels = [parameter.numel() for parameter in model.parameters()]
    del model, setup
    entry.resume()
    steps_ns, before = [], Counter[str]()
    for step in range(WARM_UP_STEPS + settings.num_steps):
        if step == WARM_UP_STEPS:
            dist.barrier()
            before = processor_ns()
        start_ns = time.perf_counter_ns()
        entry.train_step(batch)
        steps_ns.append((start_ns, time.perf_counter_ns()))
        if rank == 0:
            report_progress(Path(settings.scratch), step + 1, WARM_UP_STEPS + settings.num_steps, "step")
    used = processor_ns() - before
    entry.finish_round()
    entry.pause()
    if rank == 0:
        profile: dict[str, Any] = {
            "step_ms": statistics.median(end_ns - start_ns for start_ns, end_ns in steps_ns[WARM_UP_STEPS:]) / 1e6,
            "processor_ms": {name: ns / 1e6 / settings.num_steps for name, ns in used.most_common()},
            "peak_mib": peak_mib(),
        }
        if entry.recorder is not None and contestant.waits_for_gradients:
            buckets = group_into_buckets(numels, schedule.ready_s, contestant.bucket_cap_mb or settings.bucket_cap_mb)
            times = measure_buckets(
                entry.recorder.events,
                steps_ns[WARM_UP_STEPS:],
                schedule.buckets_ready_s(buckets),
                settings.bits_per_second,
            )
            profile["buckets"] = list(map(asdict, times))
        Path(settings.scratch, "profile.json").write_text(json.dumps(profile))
        if settings.picture is not None and entry.recorder is not None:
            last = max(event.step for event in entry.recorder.events if event.phase == "step")
            events = [event for event in entry.recorder.events if event.step == last]
            draw({0: events}).savefig(settings.picture)
    entry.close()
    leave_process_group()


def processor_ns() -> "Counter[str]":
    """Return the CPU time so far: of the training thread, the lane, and the threads of torch and gloo."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    names[threading.main_thread().native_id] = "training"
    used = Counter[str]()
    for task in TASKS.iterdir():
        name = names.get(int(task.name))
        kind = "training" if name == "training" else "lane" if name and "lane" in name else "gloo and torch"
        used[kind] += int((task / "schedstat").read_text().split()[0])
    return used


def peak_mib() -> float:
    """Return the peak memory of this process."""
    return next(int(line.split()[1]) / 1024 for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
