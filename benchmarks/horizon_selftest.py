"""Compares the steps of a CUDA graph with eager steps and with those of the CPU, and times them."""

import time
from dataclasses import replace

import torch
from torch import Tensor

from convergence_tasks import SEQUENCES_PER_RANK
from horizon_methods import DDP, Compressed, Method, TopK
from horizon_momentum import DeMo, Dion, TwoPhaseDeMo
from horizon_optimizers import OPTIMIZERS
from horizon_training import Group, Setup, Task, Trainings
from horizon_weights import Async, Decentralized, DesLoc, DiLoCo, LowPrecision, StreamingDiLoCo

NUM_STEPS = 5
RATE = 3e-2
# Sums in another order change a loss by about 1e-6; quantizers, and Newton-Schulz in bfloat16, amplify this. The losses
# themselves fall by more than 0.5.
TOLERANCE = 2e-2
TIMED_STEPS = 40


def _groups(inner: str) -> list[Group]:
    momentum: list[Method] = [DeMo(), TwoPhaseDeMo(), TopK()]
    methods: dict[str, list[Method]] = {"sign": momentum, "muon_of_sums": momentum, "orthogonal": [Dion(2)]}
    averaging: list[Method] = [
        DDP(),
        Compressed("minmax_uint8"),
        Compressed("minmax_uint4", decay=1.0),
        Compressed("sign1bit", decay=1.0),
        DiLoCo(2),
        DiLoCo(2, codec="two_bits", decay=0.95),
        DiLoCo(2, codec="two_bits_table", short_last=0.5),
        StreamingDiLoCo(4, fragments=2, delay=1),
        Decentralized(moments_every=2),
        Decentralized(mode="shift_one", on_time=True, exact_last=0.2),
        LowPrecision(),
        Async(interval=2, delay=1),
    ]
    if inner == "adamw":
        averaging.append(DesLoc(2, moments_every=(2, 4)))
    return [Group(method, [Setup(0, RATE), Setup(1, RATE)]) for method in methods.get(inner, averaging)]


def _final_losses(task: Task, inner: str, *, use_graph: bool) -> tuple[Tensor, bool]:
    trainings = Trainings(task, inner, _groups(inner), SEQUENCES_PER_RANK, NUM_STEPS, use_graph=use_graph)
    trainings.run()
    return torch.stack(trainings.losses), trainings.is_captured


def _step_ms(task: Task, inner: str, num_trainings: int, *, use_graph: bool) -> float:
    """Return the milliseconds of a step of DDP, divided by the number of trainings."""
    group = Group(DDP(), [Setup(0, RATE)] * num_trainings)
    trainings = Trainings(task, inner, [group], SEQUENCES_PER_RANK, TIMED_STEPS, use_graph=use_graph)
    num_warm = TIMED_STEPS // 4
    for step in range(1, TIMED_STEPS + 1):
        if step == num_warm + 1:
            _synchronize(task)
            start_s = time.perf_counter()
        trainings.step(step)
    _synchronize(task)
    return 1e3 * (time.perf_counter() - start_s) / (TIMED_STEPS - num_warm) / num_trainings


def _synchronize(task: Task) -> None:
    if task.train.device.type == "cuda":
        torch.cuda.synchronize()


def selftest(task: Task, num_trainings: int) -> bool:
    """Print differences of losses and times of steps; return whether they are small and a graph was captured."""
    is_gpu = task.train.device.type == "cuda"
    held_out = task.held_out[:32]
    small = replace(task, held_out=held_out)
    on_cpu = Task(task.model, task.train.cpu(), held_out.cpu())
    is_right = True
    for inner in OPTIMIZERS:
        start_s = time.perf_counter()
        graph, is_captured = _final_losses(small, inner, use_graph=True)
        eager, _ = _final_losses(small, inner, use_graph=False)
        cpu, _ = _final_losses(on_cpu, inner, use_graph=False) if is_gpu else (eager, False)
        by_graph, by_device = ((graph - other).abs().max().item() for other in (eager, cpu))
        is_right &= max(by_graph, by_device) < TOLERANCE and is_captured == is_gpu
        print(
            f"{inner}: graph {'captured' if is_captured else 'NOT captured'}, losses fall by "
            f"{(graph[0] - graph[-1]).min().item():.2g} and differ by {by_graph:.2g} from eager steps, by "
            f"{by_device:.2g} from the CPU, in {time.perf_counter() - start_s:.1f} s",
            flush=True,
        )
    for inner in ("adamw", "muon"):
        for count in (1, num_trainings):
            by_graph, by_eager = (_step_ms(task, inner, count, use_graph=use_graph) for use_graph in (True, False))
            print(
                f"{inner}, {count} trainings: {by_graph:.3f} ms a step and training; without a graph {by_eager:.3f} ms",
                flush=True,
            )
    if is_gpu:
        print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    print(f"self-test: {'right' if is_right else 'WRONG'}", flush=True)
    return is_right
