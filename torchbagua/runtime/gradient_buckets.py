"""The buckets that mirror DDP's, looked up by the identity of their parameters, since DDP rebuilds its buckets."""

from collections.abc import Iterator, KeysView, Mapping, Sequence

import torch

from torchbagua.runtime.bucket import BaguaBucket, BaguaTensor
from torchbagua.runtime.changed_layout import OF_GRADIENTS, LayoutWatch
from torchbagua.runtime.memory_order import MemoryOrder


class GradientBuckets:
    """The buckets in use. No two of them share a parameter.

    Attributes:
        layout_watch: detects whether the memory layout of a parameter has changed since the parameter was first seen.
    """

    def __init__(self) -> None:
        self._by_first: dict[int, BaguaBucket] = {}  # by the id of the first parameter
        self._seen: dict[int, BaguaTensor] = {}  # by the id of the parameter, in the state when it was first seen
        self.layout_watch = LayoutWatch(OF_GRADIENTS)

    def __iter__(self) -> Iterator[BaguaBucket]:
        """Iterate over all buckets."""
        return iter(self._by_first.values())

    @property
    def known_ids(self) -> KeysView[int]:
        """The ids of the parameters that have been in a bucket."""
        return self._seen.keys()

    def find(self, parameters: Sequence[torch.Tensor]) -> BaguaBucket | None:
        """Return the bucket of exactly these parameters, in this order, or None."""
        bucket = self._by_first.get(id(parameters[0]))
        if bucket is None or len(bucket.tensors) != len(parameters):
            return None
        is_same = all(
            tensor.parameter is parameter for tensor, parameter in zip(bucket.tensors, parameters, strict=True)
        )
        return bucket if is_same else None

    def add(self, bucket: BaguaBucket) -> None:
        """Add a bucket, and remove the buckets that share parameters with it."""
        members = {id(tensor.parameter) for tensor in bucket.tensors}
        self._by_first = {
            key: other
            for key, other in self._by_first.items()
            if members.isdisjoint(id(tensor.parameter) for tensor in other.tensors)
        }
        self._by_first[id(bucket.tensors[0].parameter)] = bucket

    def clear(self) -> None:
        """Remove all buckets."""
        self._by_first.clear()

    def tensors_of(self, named: Mapping[str, torch.Tensor]) -> list[BaguaTensor]:
        """Return the bucket tensors of these parameters, each in the memory order in which it was first seen."""
        tensors = [BaguaTensor(name, parameter, self._order_of(parameter)) for name, parameter in named.items()]
        if new := {id(tensor.parameter): tensor for tensor in tensors if id(tensor.parameter) not in self._seen}:
            self._seen |= new
            self.layout_watch.watch(list(self._seen.values()))
        return tensors

    def _order_of(self, parameter: torch.Tensor) -> MemoryOrder | None:
        seen = self._seen.get(id(parameter))
        return None if seen is None else seen.order
