"""mlbench's AllReduceAggregation: the mean over all ranks."""

import math
from collections.abc import Sequence
from contextlib import suppress
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from torchbagua import BaguaProcessGroup
from torchbagua.codecs import sum_dtype
from torchbagua.compat.mlbench.base import Aggregation, Denominator
from torchbagua.observe import Observer

AVG_WORLD = "avg_world"
"""The op that divides by the number of ranks."""
AVG_CUSTOM = "avg_custom"
"""The op that divides by `denom`."""
ALLREDUCE_AGGREGATION_OPS = [AVG_WORLD, AVG_CUSTOM]
"""The ops of `AllReduceAggregation`."""
_CUSTOM_AVG = "custom_avg"  # as mlbench's documentation spells it


class AllReduceAggregation(Aggregation):
    """The sum over all ranks, divided by their number or by a denominator. In full precision.

    The op "avg_world" divides by `world_size`, and "avg_custom" (or "custom_avg") by `denom`: one number, or a tensor
    with one element, other than zero. As in mlbench, reduce it over the ranks yourself: each rank divides by its own
    denominator. With the same denominator on all ranks, the results are bitwise equal.

    Values are summed in rank order, in float32, or in float64 for float64 values. Between GPUs, NCCL sums them.

    Args:
        world_size: the number of ranks.
        divide_before: divide each rank's values before the sum, so that float16 sums do not overflow.
        use_cuda: no effect, see `Aggregation`.
        process_group: see `Aggregation`.
        observers: see `Aggregation`.

    Raises:
        ValueError: at the first call, on all ranks: `world_size` is not the size of the group. At each call, on all
            ranks: a rank's `denom` is missing, zero or has several elements.
        NotImplementedError: at each call, before anything is sent: the op does not exist.
    """

    def __init__(
        self,
        world_size: int,
        divide_before: bool = False,
        use_cuda: bool = False,
        *,
        process_group: dist.ProcessGroup | BaguaProcessGroup | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        super().__init__(use_cuda, process_group=process_group, observers=observers)
        check_world_size_argument(self._owner, world_size)
        if not isinstance(divide_before, bool):
            raise TypeError(f"{self._owner}: divide_before must be True or False, got {divide_before!r}")
        self.world_size = world_size
        self.divide_before = divide_before

    def _agg(self, data: torch.Tensor, op: str, denom: Denominator = None) -> torch.Tensor:
        divisor = float(self.world_size) if op == AVG_WORLD else _number(denom)
        if not self.divide_before and op == AVG_WORLD:
            return self._reduce(data, average=True)
        if self.divide_before:
            divide(data, divisor)
        data = self._reduce(data)
        if not self.divide_before:
            divide(data, divisor)
        return data

    def _reduce(self, data: torch.Tensor, *, average: bool = False) -> torch.Tensor:
        """Return the sum or the mean over the ranks; it may be computed in place."""
        return self.group.all_reduce(data, average=average, hierarchical=False, name=self._name)

    def _check_op(self, op: str) -> None:
        check_op(self._owner, "Allreduce", op, [*ALLREDUCE_AGGREGATION_OPS, _CUSTOM_AVG])

    def _check_denominator(self, op: str, denom: Denominator) -> None:
        if op != AVG_WORLD:
            _number(denom)

    def _arguments(self) -> dict[str, Any]:
        return {"world_size": self.world_size, "divide_before": self.divide_before}

    def _check_group(self, group: BaguaProcessGroup) -> None:
        check_world_size(self._owner, self.world_size, group.size)


def divide(data: torch.Tensor, divisor: float) -> None:
    """Divide in place, in the dtype that sums of `data` have."""
    # Divide by a tensor on the device: on CUDA, division by a Python number multiplies by its reciprocal.
    by = torch.full((1,) * data.dim(), divisor, dtype=sum_dtype(data.dtype), device=data.device)
    torch.div(data, by, out=data)


def check_op(owner: str, operation: str, op: str, allowed: Sequence[str]) -> None:
    """Raise NotImplementedError, with mlbench's wording, unless `op` is one of `allowed`."""
    if op not in allowed:
        raise NotImplementedError(f"{operation} not implemented for op={op}; {owner} supports {', '.join(allowed)}")


def check_world_size_argument(owner: str, world_size: object) -> None:
    """Raise ValueError unless `world_size` is a positive integer."""
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"{owner}: world_size must be a number of ranks, got {world_size!r}")


def check_world_size(owner: str, world_size: int, size: int) -> None:
    """Raise ValueError unless `size`, the size of the group, is `world_size`."""
    if world_size != size:
        raise ValueError(f"{owner}: world_size must be {size}, the number of ranks in the group, got {world_size}")


def _number(denom: Denominator) -> float:
    """Return the denominator as a number; ValueError, with mlbench's wording, if it is invalid."""
    number = math.nan
    if isinstance(denom, Real | torch.Tensor):
        with suppress(ValueError, RuntimeError, OverflowError):  # a tensor with several elements, for example
            number = float(denom)
    if number == 0 or not math.isfinite(number):
        raise ValueError(
            f"Denominator should be one element tensor, or a number, finite and other than zero, got {denom!r}"
        )
    return number
