"""Fragments of the parameters, each of which has separate rounds."""

from collections.abc import Sequence

from torchbagua.runtime.bucket import BaguaTensor
from torchbagua.runtime.weight_buckets import WeightBucket


class Fragments:
    """Assigns each parameter to a fragment, and determines when the rounds of a fragment are due.

    Args:
        num_fragments: the number of fragments, F.
        interval: the number of steps between two rounds of a fragment, H. Fragment p communicates after step
            (p + 1) H // F, and then every H steps. Buffers are sent with the last fragment.

    Attributes:
        by_name: the fragment of each parameter.
    """

    def __init__(self, num_fragments: int, interval: int) -> None:
        self._num_fragments = num_fragments
        self._interval = interval
        self.by_name: dict[str, int] = {}

    def assign(self, tensors: Sequence[BaguaTensor]) -> None:
        """Assign the parameters, largest first, each to the currently smallest fragment.

        The fragments' sizes then differ by at most the size of the largest parameter.
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
        """Return the fragment of a bucket. All tensors of a bucket are in the same fragment."""
        return self.of_tensor(bucket.tensors[0])

    def is_due(self, bucket: WeightBucket, step: int) -> bool:
        """Return whether a bucket communicates after `step` steps."""
        offset = (self.of_bucket(bucket) + 1) * self._interval // self._num_fragments
        return (step - offset) % self._interval == 0
