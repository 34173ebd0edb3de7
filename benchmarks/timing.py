"""Times calls in turns: on a GPU by the GPU's clock, on the CPU by the host's."""

import random
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from tqdm import tqdm

T = TypeVar("T")

# Half a millisecond: the GPU spins while the host launches, so that the time of the launch does not count.
HEAD_START_CYCLES = 1_000_000


def alternated(
    contestants: Mapping[str, Callable[[], T]], rounds: int, *, warm_ups: int = 1, shows_progress: bool = False
) -> dict[str, list[T]]:
    """Return the results of each contestant in each round.

    A round calls every contestant once, in a random order that is the same on all ranks: a temporary load on the
    machine slows down all of them, and none always follows the same contestant. Warm-up rounds come first and are not
    counted.
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
    """Return the milliseconds from the start to the end of the work of `call` on `device`, a GPU or the CPU.

    With `head_start`, a GPU spins until the host has launched a short `call`.
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
    """Return the host's microseconds for one `call`, without the GPU's work: a mean of `num_calls` calls.

    In CPU time of this thread: other processes of the machine do not count.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_ns = time.thread_time_ns()
    for _ in range(num_calls):  # fewer than the capacity of a stream's queue, so that no call waits for an earlier one
        call()
    return (time.thread_time_ns() - start_ns) / 1e3 / num_calls
