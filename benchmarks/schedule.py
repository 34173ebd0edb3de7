"""The schedule of a training step: when each gradient is ready, and the earliest time at which all can be sent."""

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

# A full TCP/IPv4 segment on Ethernet carries 1448 bytes in a frame of 1514: `tbf` counts the frame.
FRAME_BYTES_PER_PAYLOAD_BYTE = 1.045
# The bucket size if DDP is not given one; the first bucket then has 1 MiB.
DDP_DEFAULT_MB = 25.0
WARM_UP_STEPS = 3
RECORDED_STEPS = 15


@dataclass(frozen=True)
class Schedule:
    """The times of a training step without communication, in seconds since the step began.

    Attributes:
        forward_s: the end of forward.
        ready_s: when the gradient of each parameter is ready, in the order of the module's parameters.
    """

    forward_s: float
    ready_s: list[float]

    def buckets_ready_s(self, buckets: Sequence[Sequence[int]]) -> list[float]:
        """Return when the last gradient of each bucket is ready; buckets contain the numbers of their parameters."""
        return [max(self.ready_s[index] for index in bucket) for bucket in buckets]

    def scaled_to(self, seconds: float) -> "Schedule":
        """Return a scaled schedule in which the last gradient is ready after `seconds`."""
        factor = seconds / max(self.ready_s)
        return Schedule(self.forward_s * factor, [ready_s * factor for ready_s in self.ready_s])


def record_schedule(model: nn.Module, batch: torch.Tensor) -> Schedule:
    """Train a copy of `model`, without communication, and return the medians over several steps."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ready_s: list[list[float]] = [[] for _ in model.parameters()]
    forward_s: list[float] = []
    start_s = 0.0

    def note_ready(index: int, parameter: torch.Tensor) -> None:
        ready_s[index].append(time.perf_counter() - start_s)

    for index, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(partial(note_ready, index))
    for _ in range(WARM_UP_STEPS + RECORDED_STEPS):
        start_s = time.perf_counter()
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        forward_s.append(time.perf_counter() - start_s)
        loss.backward()
        optimizer.step()
    medians = [statistics.median(times[WARM_UP_STEPS:]) for times in (forward_s, *ready_s)]
    return Schedule(medians[0], medians[1:])


def agree_on_schedule(schedule: Schedule) -> Schedule:
    """Return the schedule of the slowest rank, for each of its times. Collective."""
    times = torch.tensor([schedule.forward_s, *schedule.ready_s], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    forward_s, *ready_s = times.tolist()
    return Schedule(forward_s, ready_s)


def choose_schedule(model: nn.Module, batch: torch.Tensor, compute_ms: float | None) -> Schedule:
    """Record the model's schedule; with `compute_ms`, scale it to this time. The same on all ranks. Collective."""
    schedule = agree_on_schedule(record_schedule(model, batch))
    return schedule if compute_ms is None else schedule.scaled_to(compute_ms / 1e3)


def group_into_buckets(numels: Sequence[int], ready_s: Sequence[float], bucket_cap_mb: float) -> list[list[int]]:
    """Return the numbers of each bucket's parameters, as DDP groups them after its first step.

    DDP visits float32 gradients in the order in which they became ready. A bucket ends with the gradient that fills it
    to `bucket_cap_mb` MiB; with DDP's default size, the first bucket ends at 1 MiB.
    """
    buckets: list[list[int]] = [[]]
    num_bytes, cap_mb = 0, 1.0 if bucket_cap_mb == DDP_DEFAULT_MB else bucket_cap_mb
    for index in sorted(range(len(numels)), key=ready_s.__getitem__):
        if num_bytes >= cap_mb * 2**20:
            buckets.append([])
            num_bytes, cap_mb = 0, bucket_cap_mb
        buckets[-1].append(index)
        num_bytes += 4 * numels[index]
    return buckets


def transfer_s(num_bytes: float, bits_per_second: float) -> float:
    """Return the seconds that a payload takes on the wire."""
    return 8 * num_bytes * FRAME_BYTES_PER_PAYLOAD_BYTE / bits_per_second


def earliest_transfers_s(ready_s: Sequence[float], transfers_s: Sequence[float]) -> list[float]:
    """Return the earliest end of each bucket's transfer, one after the other, in seconds since the step began.

    The last of these is the maximum over all buckets k of ready_k + (the transfers from bucket k on).

    Args:
        ready_s: when each bucket is ready, in the order in which buckets are sent.
        transfers_s: time of each bucket on the wire.
    """
    ends: list[float] = []
    for ready, transfer in zip(ready_s, transfers_s, strict=True):
        ends.append(max([ready, *ends[-1:]]) + transfer)
    return ends


def schedule_floor_s(
    schedule: Schedule, numels: Sequence[int], bucket_cap_mb: float, num_bytes: float, bits_per_second: float
) -> float:
    """Return the seconds from the start of a step until `num_bytes`, spread evenly over all elements, can be sent.

    A bucket cannot be sent before the last of its gradients is ready.
    """
    buckets = group_into_buckets(numels, schedule.ready_s, bucket_cap_mb)
    shares = [sum(numels[index] for index in bucket) / sum(numels) for bucket in buckets]
    transfers_s = [transfer_s(share * num_bytes, bits_per_second) for share in shares]
    return earliest_transfers_s(schedule.buckets_ready_s(buckets), transfers_s)[-1]
