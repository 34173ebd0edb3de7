"""Detects parameters whose memory layout has changed since attach. All ranks then raise an error that names one.

An algorithm stores the state of a parameter in the order of the parameter's memory (parameters.py). It retains the
initial order, so it reads its state correctly. DDP's buckets also retain the initial order, but DDP reads gradients in
the new order.
"""

from collections.abc import Callable, Sequence

import torch

from torchbagua.runtime.bucket import BaguaBucket, BaguaTensor
from torchbagua.runtime.parameters import is_shard

OF_WEIGHTS = "Convert the module before attach; or detach, convert it, and attach again"
OF_GRADIENTS = (
    "Convert the module, then wrap it in a new DistributedDataParallel, since the buckets of the old one keep the old "
    "layout, and then attach"
)
_CAUSE = "for example by .to(memory_format=...)"


class LayoutWatch:
    """Detects a parameter whose layout has changed. All ranks watch the same parameters, in the same order.

    Args:
        advice: how to change a layout, for the error.

    Attributes:
        changed_parameter: 1 + the index of a parameter whose layout had changed at the last `look`; 0 for none.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._tensors: list[BaguaTensor] = []
        self._checked: list[tuple[int, BaguaTensor]] = []
        # For each of these, a function that returns its strides, and strides that are known to be in the stored order.
        self._get_strides: list[Callable[[], tuple[int, ...]]] = []
        self._known: list[tuple[int, ...]] = []
        self.changed_parameter = 0

    def watch(self, tensors: Sequence[BaguaTensor]) -> None:
        """Watch these parameters instead of the previous ones."""
        self._tensors = list(tensors)
        # A vector has only one layout, and a module with fully_shard cannot be converted.
        self._checked = [
            (number, tensor)
            for number, tensor in enumerate(tensors, start=1)
            if sum(size > 1 for size in tensor.parameter.shape) > 1 and not is_shard(tensor.parameter)
        ]
        self._get_strides = [tensor.parameter.stride for _, tensor in self._checked]
        self._known = [tensor.order.strides for _, tensor in self._checked]

    def look(self) -> bool:
        """Return whether the layout of a watched parameter has changed. Costs 0.1 us per parameter."""
        now = [get_strides() for get_strides in self._get_strides]
        changed = 0 if now == self._known else self._compare(now)
        self.changed_parameter = changed  # one assignment, since a lane may read it concurrently
        return changed > 0

    def _compare(self, now: Sequence[tuple[int, ...]]) -> int:
        for index, (strides, (number, tensor)) in enumerate(zip(now, self._checked, strict=True)):
            if strides != self._known[index]:
                if not tensor.order.matches(tensor.parameter):
                    return number
                self._known[index] = strides
        return 0

    def check(self, changed_parameters: Sequence[int]) -> None:
        """Raise RuntimeError, which names the parameter, if a layout has changed on any rank.

        Args:
            changed_parameters: the `changed_parameter` of each rank.
        """
        for rank, number in enumerate(changed_parameters):
            if number:
                raise self._error(number, rank)

    def local_error(self, rank: int) -> RuntimeError:
        """Return the error for the changed layout that the last `look` found on this rank."""
        return self._error(self.changed_parameter, rank)

    def _error(self, number: int, rank: int) -> RuntimeError:
        tensor = self._tensors[number - 1]
        now = tensor.parameter.stride()
        has_changed = not tensor.order.matches(tensor.parameter)
        return RuntimeError(
            f"torchbagua: the memory layout of parameter {tensor.name} has changed on rank {rank} since attach, "
            f"{_CAUSE}: its strides were {tensor.order.strides}{f' and are {now}' if has_changed else ''}. "
            f"{self._advice}"
        )


def check_gradient_layouts(bucket: BaguaBucket) -> None:
    """Raise RuntimeError if DDP has written gradients of a bucket in a different order than it reads them.

    This happens if the layout of a parameter changed after DDP was created: DDP's buckets retain the initial layout,
    and DDP reads their contents in the current layout of the parameter (torch 2.13). Plain DDP does so silently.

    Called once for each new bucket, since it compares values: in backward, when the bucket contains this rank's
    gradients.
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
                f"was created, {_CAUSE}, so DDP would assign gradients to the wrong elements. {OF_GRADIENTS}"
            )


def _is_in_other_order(tensor: BaguaTensor, gradient: torch.Tensor, part: torch.Tensor, *, are_views: bool) -> bool:
    """Return whether `part` of DDP's bucket certainly contains the gradient in another order than the parameter's.

    Args:
        tensor: the parameter.
        gradient: its gradient.
        part: the parameter's part of the bucket.
        are_views: whether gradients are views of the bucket (gradient_as_bucket_view=True).
    """
    if _is_view(gradient, part):
        return not tensor.order.matches(gradient)
    if gradient.dtype != part.dtype or _are_bitwise_equal(tensor.order.flatten(gradient), part):
        return False
    if are_views:  # a converted gradient is no longer a view, but DDP continues to write to the old one
        return True
    # A hook may have changed the gradient since, so a mismatch proves nothing. Only a match in another order does.
    channels_last = gradient.permute(0, *range(2, gradient.dim()), 1)
    return any(_are_bitwise_equal(candidate.reshape(-1), part) for candidate in (gradient, channels_last))


def _is_view(gradient: torch.Tensor, part: torch.Tensor) -> bool:
    return gradient.data_ptr() == part.data_ptr()


def _are_bitwise_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))
