"""torchbagua causes no page faults in a step: its memory is reused from step to step.

As a program, this prints the page faults of a training step with each algorithm; its ranks are threads.
"""

import itertools
import json
import os
import resource
import statistics
import sys
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import programs
import torchbagua as tb
from ranks import run_ranks
from transports import group_like_the_oracle

# Each of three ranks has a chunk of 0.75 MiB of every bucket, and sums avoid the special case of two ranks.
SIZE = 3
WIDTH = 768
NUM_LAYERS = 3
BUCKET_CAP_MB = 2
WARM_UP_STEPS = 5
NUM_STEPS = 9  # heaps of threads grow in some steps, especially under load

ALGORITHMS: dict[str, Callable[[], tb.Algorithm]] = {
    "GradientAllReduce": tb.GradientAllReduceAlgorithm,
    "ByteGrad": tb.ByteGradAlgorithm,
    "4 bits, error feedback": lambda: tb.CompressedAllReduceAlgorithm("minmax_uint4", error_feedback=True),
    "bfloat16": lambda: tb.CompressedAllReduceAlgorithm("bfloat16"),
    "TopK": tb.TopKAlgorithm,
    "PowerSGD": lambda: tb.PowerSGDAlgorithm(start_step=2),
    "Decentralized": tb.DecentralizedAlgorithm,
    "low precision": tb.LowPrecisionDecentralizedAlgorithm,
    "asynchronous": lambda: tb.AsyncModelAverageAlgorithm(warmup_steps=2, sync_interval_ms=1),
}

barrier = threading.Barrier(SIZE)


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


def count_page_faults(step: Callable[[], None]) -> float:
    """Return the median faults of all threads in a step of all ranks; not the mean, since heaps grow at times."""
    for _ in range(WARM_UP_STEPS):
        step()
    counts = []
    for _ in range(NUM_STEPS + 1):
        barrier.wait()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        barrier.wait()
        step()
    return statistics.median(after - before for before, after in itertools.pairwise(counts))


def count_with_algorithm(group: dist.ProcessGroup, name: str) -> float:
    x, model = torch.ones(2, WIDTH), make_model()
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=BUCKET_CAP_MB, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer
    if name == "QAdam":
        optimizer = tb.QAdamOptimizer(model.parameters(), warmup_steps=2)
        algorithm: tb.Algorithm = tb.QAdamAlgorithm(optimizer, compression="sign1bit", error_feedback=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        algorithm = ALGORITHMS[name]()

    def step() -> None:
        ddp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    # With messages only: gloo's all-reduce allocates memory in each call, as with plain DDP.
    with tb.attach(ddp, optimizer, algorithm, process_group=group_like_the_oracle(group)):
        return count_page_faults(step)


def count_on_rank(group: dist.ProcessGroup) -> dict[str, float]:
    return {name: count_with_algorithm(group, name) for name in [*ALGORITHMS, "QAdam"]}


# The system maps, and unmaps, every allocation of at least this many bytes; smaller allocations reuse memory.
_MAPPED_BYTES = 1 << 19


@pytest.mark.slow
def test_no_algorithm_takes_new_memory_in_a_step() -> None:
    """Autograd does, for the gradients that it adds to the buckets' gradients."""
    thresholds = {"MALLOC_MMAP_THRESHOLD_": str(_MAPPED_BYTES), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    printed = json.loads(programs.run([sys.executable, __file__], env={**os.environ, **thresholds}).stdout)
    page = resource.getpagesize()
    # Half of the pages that an allocation of ours on every rank would add; a few pages are the interpreter's.
    most = (printed["gradient_bytes"] + printed["num_ranks"] * _MAPPED_BYTES / 2) / page
    assert len(printed["page_faults"]) == 10
    above = {name: number for name, number in printed["page_faults"].items() if number >= most}
    assert not above, (most, above)


if __name__ == "__main__":
    torch.set_num_threads(1)
    gradient_bytes = SIZE * sum(parameter.nbytes for parameter in make_model().parameters())
    faults = run_ranks(SIZE, count_on_rank)[0]
    print(json.dumps({"num_ranks": SIZE, "gradient_bytes": gradient_bytes, "page_faults": faults}))
