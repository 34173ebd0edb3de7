"""One rank of the page fault benchmark, started by page_faults.py."""

import json
import resource
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from contestants import build_batch, build_model
from processes import begin_rank, leave_process_group, report_progress

NUM_PARAMETERS = 12_500_000
WARM_UP_STEPS = 6
NUM_STEPS = 18


@dataclass(frozen=True)
class Settings:
    """The settings that page_faults.py passes to its ranks, as JSON."""

    scratch: str  # folder of progress.json and result.json
    init_method: str
    contestant: str
    gradient_as_bucket_view: bool
    set_to_none: bool


def main() -> None:
    settings, rank = begin_rank(Settings)
    dist.init_process_group("gloo", init_method=settings.init_method, rank=rank, world_size=2)
    run(settings, rank)
    leave_process_group()


def run(settings: Settings, rank: int) -> None:
    model = build_model(NUM_PARAMETERS)
    batch = build_batch(model, rank)
    ddp = DistributedDataParallel(model, bucket_cap_mb=8.0, gradient_as_bucket_view=settings.gradient_as_bucket_view)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    attachment = tb.attach(ddp, optimizer, tb.ByteGradAlgorithm()) if settings.contestant == "ByteGrad" else None
    ms, page_faults = [], []
    for step in range(WARM_UP_STEPS + NUM_STEPS):
        before, start_s = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        optimizer.zero_grad(set_to_none=settings.set_to_none)
        ddp(batch).square().mean().backward()
        optimizer.step()
        if step >= WARM_UP_STEPS:
            ms.append(1e3 * (time.perf_counter() - start_s))
            page_faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        if rank == 0:
            report_progress(Path(settings.scratch), step + 1, WARM_UP_STEPS + NUM_STEPS, "step")
    if attachment is not None:
        attachment.detach()
    if rank == 0:
        result = {"ms": statistics.median(ms), "page_faults": statistics.median(page_faults)}
        Path(settings.scratch, "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
