"""Parameters in buckets: the order of their elements, which is that of their memory, and the shards of fully_shard.

DDP's buckets have the memory order too, for example channels_last. For a DTensor, elements and shape are those of the
shard that this rank holds. What FSDP2 needs beyond that is in `torchbagua.fsdp`: these functions are also called for
plain modules, of which they return the tensors unchanged.

An algorithm stores the state of a parameter in this order, and retains the initial one, so it reads its state correctly
if the memory layout of a parameter changes after attach. DDP's buckets retain it too, but DDP reads gradients in the
new order: hence `LayoutWatch`, which has all ranks raise an error that names the parameter.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch

OF_WEIGHTS = "Convert the module before attach; or detach, convert it, and attach again"
OF_GRADIENTS = (
    "Convert the module, then wrap it in a new DistributedDataParallel, since the buckets of the old one keep the old "
    "layout, and then attach"
)
_CAUSE = "for example by .to(memory_format=...)"


def sharded_parts(module: torch.nn.Module) -> dict[str, Any]:
    """Return the parts of `module`, which may include the module itself, to which fully_shard was applied, by name."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing takes a second, and fully_shard has imported it
    if fsdp is None:
        return {}
    return {name: part for name, part in module.named_modules() if isinstance(part, fsdp.FSDPModule)}


def reshard(parts: Iterable[Any]) -> None:
    """Free the gathered parameters that a forward without backward may have left in these parts.

    While gathered parameters exist, the module lists them and computes with them, and ignores writes to its shards.
    """
    for part in parts:
        part.reshard()


def is_shard(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a DTensor, of which this rank holds a shard."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, as a view of its memory. Return any other tensor unchanged."""
    if not is_shard(tensor):
        return tensor
    with torch.no_grad():
        shard: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return shard


def name_of_shard(name: str, tensor: torch.Tensor) -> str:
    """Return `name`, and for a DTensor also the number of this rank's shard."""
    if not is_shard(tensor):
        return name
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    return f"{name}, shard {mesh.get_local_rank()} of {mesh.size()}"


def flat_length(parameter: torch.Tensor) -> int:
    """Return the number of elements of `parameter` in a flat tensor. A complex element counts as two."""
    return local_shard(parameter).numel() * (2 if parameter.is_complex() else 1)


def flatten_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, of the parameter's shape, as a vector in the parameter's current memory order.

    The vector is a view if `tensor` has that memory order.
    """
    if parameter.is_contiguous() and tensor.is_contiguous():  # the common case, in a tenth of the time
        return tensor.view(-1)
    return MemoryOrder(parameter).flatten(tensor)


class MemoryOrder:
    """The order of a parameter's elements in memory at construction. Later changes of the parameter do not affect it.

    Code that writes to a flat tensor and code that later reads it use the same MemoryOrder, so that the elements match.
    The user may call `.to(memory_format=torch.channels_last)` between the two.

    Attributes:
        strides: the strides of the parameter at construction.
        sizes: the sizes of its dimensions, the slowest-varying in memory first.
    """

    __slots__ = ("_inverse", "_is_complex", "_is_contiguous", "_key", "_slowest_first", "sizes", "strides")

    def __init__(self, parameter: torch.Tensor) -> None:
        self._is_complex = parameter.is_complex()
        self.strides = parameter.stride()
        parameter = local_shard(parameter)
        self._is_contiguous = parameter.is_contiguous()
        self._slowest_first = order = _slowest_first(parameter)
        self._inverse = sorted(range(len(order)), key=order.__getitem__)
        self.sizes = [parameter.shape[dim] for dim in order]
        # A dimension of size 1 may have any position in the order.
        self._key = [dim for dim in order if parameter.shape[dim] > 1]

    def __repr__(self) -> str:
        """Return the dimensions of size above 1, slowest first. Equal orders have the same representation."""
        return f"MemoryOrder({self._key})"

    @property
    def is_natural(self) -> bool:
        """Whether the memory order is the order of the dimensions, as in a contiguous tensor."""
        return self._key == sorted(self._key)

    def matches(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor`, of the parameter's shape, has this memory order."""
        return tensor.stride() == self.strides or MemoryOrder(tensor)._key == self._key

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, of the parameter's shape, as a vector in this order.

        The vector is a view if `tensor` has this memory order.
        """
        if self._is_contiguous and tensor.is_contiguous():  # the common case, in a third of the time
            return tensor.view(-1)
        return tensor.permute(self._slowest_first).reshape(-1)

    def shape(self, flat: torch.Tensor) -> torch.Tensor:
        """Return `flat`, a vector as from `flatten`, with complex numbers as pairs, viewed in the parameter's shape."""
        if self._is_complex:
            flat = torch.view_as_complex(flat.view(-1, 2))
        return flat.view(self.sizes).permute(self._inverse)


def _slowest_first(parameter: torch.Tensor) -> list[int]:
    """Return the dimensions in memory order, slowest first; in natural order if the memory has gaps."""
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    return order if parameter.permute(order).is_contiguous() else list(range(parameter.dim()))


@dataclass(frozen=True)
class BaguaTensor:
    """A parameter or buffer in a bucket.

    Attributes:
        name: its name in the module. Without `attach`, which knows the module, its position in the optimizers that were
            passed to `Algorithm.reify`, or else its position in the bucket. The name of a shard includes its number.
        parameter: the parameter or the buffer. For a DTensor, the bucket contains the shard of this rank.
        order: the order of its elements in the bucket: the parameter's memory order when this object was created. It
            does not change if the parameter's memory format changes.

    Args:
        kept_order: the order of an earlier tensor of this name, on which the flat tensors of all ranks agree.
    """

    name: str
    parameter: torch.Tensor
    kept_order: InitVar[MemoryOrder | None] = None
    order: MemoryOrder = field(init=False, repr=False, compare=False)

    def __post_init__(self, kept_order: MemoryOrder | None) -> None:
        object.__setattr__(self, "order", kept_order or MemoryOrder(self.parameter))

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter rather than a buffer."""
        return isinstance(self.parameter, torch.nn.Parameter)


class LayoutWatch:
    """Detects a parameter whose layout has changed. All ranks watch the same parameters, in the same order.

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
        """Raise RuntimeError, which names the parameter, if a layout has changed on any rank."""
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


def check_gradient_layouts(parts: Sequence[tuple[BaguaTensor, torch.Tensor]]) -> None:
    """Raise RuntimeError if DDP has written gradients to a bucket in a different order than it reads them.

    This happens if the layout of a parameter changed after DDP was created: DDP's buckets retain the initial layout,
    and DDP reads their contents in the current layout of the parameter (torch 2.13). Plain DDP does so silently.

    Called once for each new bucket, with its parts, since it compares values: in backward, when the bucket contains
    this rank's gradients.
    """
    with_gradient = [
        (tensor, tensor.parameter.grad, part)
        for tensor, part in parts
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
    """Return whether `part` of DDP's bucket certainly contains the gradient in another order than the parameter's."""
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
