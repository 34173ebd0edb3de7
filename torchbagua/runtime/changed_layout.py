"""Parameters whose memory layout has changed since an algorithm was attached: ranks refuse them together, by name.

What an algorithm keeps of a parameter lies in the order of the parameter's memory (memory_order.py). That order is kept
from the start, so nothing is read wrongly; but DDP's own buckets keep theirs too, and read gradients in the new one.
"""

from collections.abc import Callable, Sequence

import torch

from torchbagua.runtime.bucket import BaguaBucket, BaguaTensor
from torchbagua.runtime.shards import is_shard

OF_WEIGHTS = "Convert the module before attach; or detach, convert it, and attach again"
OF_GRADIENTS = (
    "Convert the module, then wrap it in a new DistributedDataParallel, since the buckets of the old one keep the old "
    "layout, and then attach"
)
_AS_AFTER = "as .to(memory_format=...) does"


class LayoutWatch:
    """Finds the parameter whose layout has changed, and tells it to other ranks in a number.

    Ranks watch the same parameters, in the same order.

    Args:
        advice: how to change a layout, for the error.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._tensors: list[BaguaTensor] = []
        self._looked_at: list[tuple[int, BaguaTensor]] = []
        # Of these, what returns the strides, and the strides that are known to be of the kept order.
        self._get_strides: list[Callable[[], tuple[int, ...]]] = []
        self._known: list[tuple[int, ...]] = []
        self._changed = 0  # 1 + the index of the parameter; 0 for none

    def watch(self, tensors: Sequence[BaguaTensor]) -> None:
        """Watch these parameters from now on, and no others."""
        self._tensors = list(tensors)
        # A vector has only one layout, and fully_shard refuses to convert a module.
        self._looked_at = [
            (number, tensor)
            for number, tensor in enumerate(tensors, start=1)
            if sum(size > 1 for size in tensor.parameter.shape) > 1 and not is_shard(tensor.parameter)
        ]
        self._get_strides = [tensor.parameter.stride for _, tensor in self._looked_at]
        self._known = [tensor.order.strides for _, tensor in self._looked_at]

    def look(self) -> bool:
        """Return whether the layout of a watched parameter has changed. It costs 0.1 us a parameter."""
        now = [get_strides() for get_strides in self._get_strides]
        changed = 0 if now == self._known else self._compare(now)
        self._changed = changed  # a lane may read it meanwhile
        return self.has_found_one

    def _compare(self, now: Sequence[tuple[int, ...]]) -> int:
        for index, (strides, (number, tensor)) in enumerate(zip(now, self._looked_at, strict=True)):
            if strides != self._known[index]:
                if not tensor.order.is_that_of(tensor.parameter):
                    return number
                self._known[index] = strides
        return 0

    @property
    def has_found_one(self) -> bool:
        """Whether the last `look` has found a changed layout."""
        return self._changed > 0

    def message(self, rank: int, size: int, *, flag: bool = False) -> int:
        """Return a number of which the largest over the ranks says to `check` what the last `look` of each has found.

        Args:
            rank: own rank.
            size: number of ranks.
            flag: one bit more, for `has_flag`.
        """
        return 2 * (self._changed * size + rank if self._changed else 0) + flag

    def check(self, largest_message: int, size: int) -> None:
        """Raise RuntimeError, with the name of the parameter, if a layout has changed on a rank.

        Args:
            largest_message: the largest over the ranks.
            size: number of ranks.
        """
        number, rank = divmod(largest_message // 2, size)
        if number:
            raise self._error(number, rank)

    @staticmethod
    def has_flag(largest_message: int) -> bool:
        """Return whether a rank has set the flag, if no layout has changed."""
        return largest_message % 2 == 1

    def own_error(self, rank: int) -> RuntimeError:
        """Return the error of what the last `look` has found on this rank."""
        return self._error(self._changed, rank)

    def _error(self, number: int, rank: int) -> RuntimeError:
        tensor = self._tensors[number - 1]
        now = tensor.parameter.stride()
        has_changed = not tensor.order.is_that_of(tensor.parameter)
        return RuntimeError(
            f"torchbagua: the memory layout of parameter {tensor.name} has changed on rank {rank} since attach, "
            f"{_AS_AFTER}: its strides were {tensor.order.strides}{f' and are {now}' if has_changed else ''}. "
            f"{self._advice}"
        )


def check_gradient_layouts(bucket: BaguaBucket) -> None:
    """Raise RuntimeError if DDP has written gradients of a bucket in another order than it reads them in.

    It does if it was made before the layout of a parameter changed: its buckets keep the layout that they were made
    with, and what comes out of them is read in the one of the parameter (torch 2.13). Plain DDP is silent about it.

    Called once for each new bucket, since it compares values: in backward, when the bucket holds this rank's gradients.
    """
    with_gradient = [
        (tensor, tensor.parameter.grad, part)
        for tensor, part in bucket.parts(bucket.flat)
        if tensor.parameter.grad is not None and tensor.parameter.grad.layout is torch.strided
    ]
    are_views = any(_is_view(gradient, part) for _, gradient, part in with_gradient)
    for tensor, gradient, part in with_gradient:
        if gradient.dim() >= 4 and _is_in_other_order(tensor, gradient, part, are_views=are_views):  # memory formats
            raise RuntimeError(
                f"torchbagua: the memory layout of parameter {tensor.name} has changed after DistributedDataParallel "
                f"was made, {_AS_AFTER}: it would take gradients for those of other elements. {OF_GRADIENTS}"
            )


def _is_in_other_order(tensor: BaguaTensor, gradient: torch.Tensor, part: torch.Tensor, *, are_views: bool) -> bool:
    """Return whether `part` of DDP's bucket is known to hold the gradient in another order than the parameter's.

    Args:
        tensor: the parameter.
        gradient: its gradient.
        part: of the bucket.
        are_views: whether gradients are views of the bucket (gradient_as_bucket_view=True).
    """
    if _is_view(gradient, part):
        return not tensor.order.is_that_of(gradient)
    if gradient.dtype != part.dtype or _are_same_bits(tensor.order.flatten(gradient), part):
        return False
    if are_views:  # a view that has been converted is none any more, and DDP goes on writing to it
        return True
    # A hook may have changed the gradient since. So only what is found in another order is in one.
    channels_last = gradient.permute(0, *range(2, gradient.dim()), 1)
    return any(_are_same_bits(other.reshape(-1), part) for other in (gradient, channels_last))


def _is_view(gradient: torch.Tensor, part: torch.Tensor) -> bool:
    return gradient.data_ptr() == part.data_ptr()


def _are_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
