"""How long calls take, in turns: on a GPU by its own clock, on the CPU by the host's."""

import random
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from tqdm import tqdm

T = TypeVar("T")

# Half a millisecond: while the GPU spins the host queues all calls, so that what is timed never waits for the host.
HEAD_START_CYCLES = 1_000_000


def alternated(
    contestants: Mapping[str, Callable[[], T]], rounds: int, *, warm_ups: int = 1, shows_progress: bool = False
) -> dict[str, list[T]]:
    """What each contestant has returned in each round.

    A round calls every one of them once, in an order of its own, which is the same on all ranks: whatever slows the
    machine down for a while slows all of them, and none runs behind the same other each time. Rounds that warm up come
    before and are not counted.
    """
    results: dict[str, list[T]] = {name: [] for name in contestants}
    order, shuffle = list(contestants), random.Random(0).shuffle
    for index in tqdm(range(warm_ups + rounds), desc="rounds", disable=not shows_progress):
        shuffle(order)
        for name in order:
            result = contestants[name]()
            if index >= warm_ups:
                results[name].append(result)
    return results


def elapsed_ms(device: torch.device, call: Callable[[], object], *, head_start: bool = False) -> float:
    """Milliseconds from the start to the end of what `call` does on `device`.

    Args:
        device: a GPU or the CPU.
        call: what is timed.
        head_start: let a GPU begin only when the host has queued the call, or much of it.
    """
    if device.type == "cpu":
        start_s = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start_s)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if head_start:
        torch.cuda._sleep(HEAD_START_CYCLES)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def host_us(device: torch.device, call: Callable[[], object], num_calls: int = 200) -> float:
    """Microseconds for which one `call` keeps the host, the GPU's own work not included: a mean of some calls.

    In CPU time of this thread: other processes of the machine do not count.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_ns = time.thread_time_ns()
    for _ in range(num_calls):  # fewer than a stream's queue holds, so that none waits for an earlier one
        call()
    return (time.thread_time_ns() - start_ns) / 1e3 / num_calls
