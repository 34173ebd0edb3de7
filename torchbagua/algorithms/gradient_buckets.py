"""The buckets that stand for DDP's, found again by the identity of their parameters: DDP forms others after a step."""

from collections.abc import Iterator, Sequence

import torch

from torchbagua.bucket import BaguaBucket


class GradientBuckets:
    """Those that are in use: none has a parameter of another."""

    def __init__(self) -> None:
        self._by_first: dict[int, BaguaBucket] = {}  # by the id of the first parameter

    def __iter__(self) -> Iterator[BaguaBucket]:
        """Yield all."""
        return iter(self._by_first.values())

    def find(self, parameters: Sequence[torch.Tensor]) -> BaguaBucket | None:
        """Return the bucket of these parameters, in this order."""
        bucket = self._by_first.get(id(parameters[0]))
        if bucket is None or len(bucket.tensors) != len(parameters):
            return None
        is_same = all(one.parameter is parameter for one, parameter in zip(bucket.tensors, parameters, strict=True))
        return bucket if is_same else None

    def add(self, bucket: BaguaBucket) -> None:
        """Add a bucket, in the place of those that share parameters with it."""
        members = {id(tensor.parameter) for tensor in bucket.tensors}
        self._by_first = {
            key: other
            for key, other in self._by_first.items()
            if members.isdisjoint(id(tensor.parameter) for tensor in other.tensors)
        }
        self._by_first[id(bucket.tensors[0].parameter)] = bucket

    def clear(self) -> None:
        """Forget all."""
        self._by_first.clear()
