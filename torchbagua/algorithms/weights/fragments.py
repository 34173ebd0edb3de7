"""Fragments of the parameters, each with rounds of its own."""

from collections.abc import Sequence

from torchbagua.runtime.bucket import BaguaTensor
from torchbagua.runtime.weight_bucket import WeightBucket


class Fragments:
    """Which fragment each parameter is in, and when its rounds are due.

    Args:
        num_fragments: F.
        interval: steps between two rounds of a fragment, H. Fragment p communicates after step (p + 1) H // F, and then
            every H steps; buffers go with the last.

    Attributes:
        by_name: the fragment of each parameter.
    """

    def __init__(self, num_fragments: int, interval: int) -> None:
        self._num_fragments = num_fragments
        self._interval = interval
        self.by_name: dict[str, int] = {}

    def assign(self, tensors: Sequence[BaguaTensor]) -> None:
        """Assign each parameter: the largest first, each to the currently smallest fragment.

        So fragments differ in bytes by no more than the largest parameter has.
        """
        fragment_bytes = [0] * self._num_fragments
        self.by_name = {}
        for tensor in sorted(tensors, key=lambda tensor: tensor.parameter.nbytes, reverse=True):
            self.by_name[tensor.name] = smallest = fragment_bytes.index(min(fragment_bytes))
            fragment_bytes[smallest] += tensor.parameter.nbytes

    def of_tensor(self, tensor: BaguaTensor) -> int:
        """Return the fragment of a parameter, or of a buffer."""
        return self.by_name.get(tensor.name, self._num_fragments - 1)

    def of_bucket(self, bucket: WeightBucket) -> int:
        """Return the fragment of a bucket, all of whose tensors are in the same."""
        return self.of_tensor(bucket.tensors[0])

    def is_due(self, bucket: WeightBucket, step: int) -> bool:
        """Return whether a bucket communicates after so many steps."""
        offset = (self.of_bucket(bucket) + 1) * self._interval // self._num_fragments
        return (step - offset) % self._interval == 0
