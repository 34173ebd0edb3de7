"""How long calls take on a GPU, by its own clock; on the CPU, for a trial of the program, by the host's."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

# Half a millisecond: while the GPU spins the host queues all calls, so that what is timed never waits for the host.
HEAD_START_CYCLES = 1_000_000


def elapsed_ms(device: torch.device, call: Callable[[], object], *, head_start: bool) -> float:
    """Milliseconds from the start to the end of what `call` does on `device`.

    Args:
        head_start: let the GPU begin only when the host has queued the call, or much of it.
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


def alternated_ms(
    device: torch.device, contestants: dict[str, Callable[[], object]], rounds: int, *, head_start: bool
) -> dict[str, list[float]]:
    """Milliseconds of each contestant in each round; they take turns, in the other order every second round.

    Two rounds before the first are not counted.
    """
    milliseconds: dict[str, list[float]] = {name: [] for name in contestants}
    for index in range(-2, rounds):
        for name in list(contestants)[:: -1 if index % 2 else 1]:
            took_ms = elapsed_ms(device, contestants[name], head_start=head_start)
            if index >= 0:
                milliseconds[name].append(took_ms)
    return milliseconds


def host_us(device: torch.device, call: Callable[[], object], *, num_calls: int = 200, num_batches: int = 11) -> float:
    """Microseconds for which `call` keeps the host, the GPU's own work not included: a median over batches."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    batches: Sequence[list[float]] = [[] for _ in range(num_batches + 1)]
    for batch in batches:
        synchronize()
        start_ns = time.perf_counter_ns()
        for _ in range(num_calls):  # fewer than a stream's queue holds, so that none waits for an earlier one
            call()
        batch.append((time.perf_counter_ns() - start_ns) / 1e3 / num_calls)
    synchronize()
    return statistics.median(value for batch in batches[1:] for value in batch)
