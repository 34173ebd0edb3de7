"""WeightBucket: one bucket of weights, and the flat tensors that a weight algorithm keeps beside it."""

from collections.abc import Callable, Container
from functools import cached_property
from operator import attrgetter

import torch

from torchbagua.codecs.base import sum_dtype
from torchbagua.collectives.low_precision_ring import Replicas
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.memory_order import flat_length

FlatOf = Callable[["WeightBucket"], torch.Tensor]
"""Picks one of a bucket's flat tensors, or returns one like them."""

FLAT: FlatOf = attrgetter("flat")
SNAPSHOT: FlatOf = attrgetter("snapshot")
DIFFERENCE: FlatOf = attrgetter("difference")


class WeightBucket(BaguaBucket):
    """A bucket of weights, with the tensors that an algorithm keeps beside the flat one; see `WeightBuckets`.

    Each tensor is made when it is first asked for, on the current stream of that thread.

    Attributes:
        is_in_ring_of_two: whether its `replicas` are those of a ring of two ranks, or nodes; set before these are made.
    """

    # What they hold, and which thread's they are: T, the training thread, and L, the lane. Where nothing else is said,
    # T has them until it submits a job to L, and again when it has waited for that.
    #
    # | algorithm      | flat                           | snapshot              | difference               | replicas |
    # | -------------- | ------------------------------ | --------------------- | ------------------------ | -------- |
    # | decentralized  | the snapshot                   |                       | mean, then mean - flat   |          |
    # | async          | L: mean, then mean - snapshot  | T's while L asks for  | last rounds' mean -      |          |
    # |                |                                | one, and L's after    | snapshot, under a lock   |          |
    # | async, warm-up | means of gradients             | gradients             |                          |          |
    # | low precision  | weights, before and after a    |                       |                          | L's, and |
    # |                | bucket's `start`               |                       |                          | in states |
    # | DiLoCo, no     | snapshot, then the outer       |                       |                          |          |
    # | delay          | gradient, then its mean        |                       |                          |          |
    # | DiLoCo, delay  | outer gradient, its mean, then | the snapshot          | of buffers, mean -       |          |
    # |                | theta' - snapshot; or mean     |                       | snapshot                 |          |

    is_in_ring_of_two = False

    @cached_property
    def are_buffers(self) -> bool:
        """Whether it holds buffers, and not parameters."""
        return not self.tensors[0].is_parameter

    @cached_property
    def snapshot(self) -> torch.Tensor:
        """Like the flat tensor: the weights as they were between two steps, while that one becomes their mean."""
        return torch.zeros_like(self.flat)

    @cached_property
    def difference(self) -> torch.Tensor:
        """Like the flat tensor: mean minus snapshot, which is still to be added to the weights."""
        return torch.zeros_like(self.flat)

    @cached_property
    def replicas(self) -> Replicas:
        """The replicas of the ring of compressed differences, as long as the flat tensor, in its `sum_dtype`.

        In a ring of two, whose neighbours are one rank, left and right are one tensor.
        """
        num_replicas = 2 if self.is_in_ring_of_two else 3
        own, left, *right = (torch.zeros_like(self.flat, dtype=sum_dtype(self.flat.dtype)) for _ in range(num_replicas))
        return Replicas(own, left, *right or [left])

    def subtract(self, mean: torch.Tensor, snapshot: torch.Tensor, out: torch.Tensor) -> None:
        """Write mean minus snapshot to `out`, which may be one of them.

        A buffer may well hold -inf, a mask of attention say: where that stays, the difference is zero and not NaN.
        """
        stays = mean == snapshot if self.are_buffers else None
        torch.sub(mean, snapshot, out=out)
        if stays is not None:
            out.masked_fill_(stays, 0)

    def slices_of(self, names: Container[str]) -> list[slice]:
        """Return where the weights of these names lie in the flat tensor."""
        found, start = [], 0
        for tensor in self.tensors:
            stop = start + flat_length(tensor.parameter)
            if tensor.name in names:
                found.append(slice(start, stop))
            start = stop
        return found

    def clear(self, flat: torch.Tensor, names: Container[str]) -> None:
        """Write zeros to those parts of `flat` that belong to the weights of these names."""
        for part in self.slices_of(names):
            flat[part] = 0

    def named(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of `flat`, in the shapes of the weights, by their names."""
        return {tensor.name: part for tensor, part in self.views(flat)}
