"""WeightBucket: one bucket of weights, and the additional flat tensors of a weight algorithm."""

from collections.abc import Callable, Container
from functools import cached_property
from operator import attrgetter

import torch

from torchbagua.codecs.base import sum_dtype
from torchbagua.collectives.low_precision_ring import Replicas
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.memory_order import flat_length

FlatOf = Callable[["WeightBucket"], torch.Tensor]
"""Returns one of a bucket's flat tensors, or a tensor of the same kind."""

FLAT: FlatOf = attrgetter("flat")
SNAPSHOT: FlatOf = attrgetter("snapshot")
DIFFERENCE: FlatOf = attrgetter("difference")


class WeightBucket(BaguaBucket):
    """A bucket of weights, with the additional flat tensors of an algorithm; see `WeightBuckets`.

    Each tensor is created on its first access, on the current stream of the accessing thread.

    Attributes:
        is_in_ring_of_two: whether its `replicas` belong to a ring of two ranks or nodes; set before the first access of
            `replicas`.
    """

    # The contents of the tensors, and the thread that owns them: T, the training thread, or L, the lane. Unless noted
    # otherwise, T owns them until it submits a job to L, and again after it has waited for that job.
    #
    # | algorithm      | flat                           | snapshot              | difference               | replicas |
    # | -------------- | ------------------------------ | --------------------- | ------------------------ | -------- |
    # | decentralized  | the snapshot                   |                       | mean, then mean - flat   |          |
    # | async          | L: mean, then mean - snapshot  | T: while L requests   | last rounds' mean -      |          |
    # |                |                                | one; L: afterwards    | snapshot, under a lock   |          |
    # | async, warm-up | means of gradients             | gradients             |                          |          |
    # | low precision  | weights, before and after a    |                       |                          | L, and   |
    # |                | bucket's `start`               |                       |                          | in states |
    # | DiLoCo, no     | snapshot, then the outer       |                       |                          |          |
    # | delay          | gradient, then its mean        |                       |                          |          |
    # | DiLoCo, delay  | outer gradient, its mean, then | the snapshot          | of buffers, mean -       |          |
    # |                | theta' - snapshot; or mean     |                       | snapshot                 |          |

    is_in_ring_of_two = False

    @cached_property
    def are_buffers(self) -> bool:
        """Whether it contains buffers rather than parameters."""
        return not self.tensors[0].is_parameter

    @cached_property
    def snapshot(self) -> torch.Tensor:
        """A tensor of the same kind as the flat tensor: weights between two steps, while `flat` becomes their mean."""
        return torch.zeros_like(self.flat)

    @cached_property
    def difference(self) -> torch.Tensor:
        """A tensor of the same kind as the flat tensor: mean minus snapshot, not yet added to the weights."""
        return torch.zeros_like(self.flat)

    @cached_property
    def replicas(self) -> Replicas:
        """The replicas of the ring of compressed differences, with the length of the flat tensor, in its `sum_dtype`.

        In a ring of two, both neighbors are the same rank, so left and right are the same tensor.
        """
        num_replicas = 2 if self.is_in_ring_of_two else 3
        own, left, *right = (torch.zeros_like(self.flat, dtype=sum_dtype(self.flat.dtype)) for _ in range(num_replicas))
        return Replicas(own, left, *right or [left])

    def subtract(self, mean: torch.Tensor, snapshot: torch.Tensor, out: torch.Tensor) -> None:
        """Write mean minus snapshot to `out`, which may be either of them.

        A buffer, for example an attention mask, may contain -inf. If mean and snapshot are equal there, the difference
        is zero rather than NaN.
        """
        is_equal = mean == snapshot if self.are_buffers else None
        torch.sub(mean, snapshot, out=out)
        if is_equal is not None:
            out.masked_fill_(is_equal, 0)

    def slices_of(self, names: Container[str]) -> list[slice]:
        """Return the slices of the flat tensor for the weights with these names."""
        found, start = [], 0
        for tensor in self.tensors:
            stop = start + flat_length(tensor.parameter)
            if tensor.name in names:
                found.append(slice(start, stop))
            start = stop
        return found

    def clear(self, flat: torch.Tensor, names: Container[str]) -> None:
        """Write zeros to the parts of `flat` that belong to the weights with these names."""
        for part in self.slices_of(names):
            flat[part] = 0

    def named(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of `flat`, in the shapes of the weights, by weight name."""
        return {tensor.name: part for tensor, part in self.views(flat)}
