"""Rounds of asynchronous averaging that send compressed differences between the weights and the last mean."""

from collections.abc import Container

import torch

from torchbagua.codecs.base import Compressor
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.runtime.sub_buckets import sub_bucket_of
from torchbagua.runtime.weight_buckets import WeightBucket


class CompressedDifferences:
    """Averages the snapshots of one bucket by their differences from a mean c, bitwise equal on all ranks.

    From the snapshots s_i, with a two-phase mean of the codec Q and a residual E of its second phase:

    1. d_i = s_i - c;
    2. D = Q(mean_j Q(d_j) + E), and E becomes the residual of this encoding;
    3. c += D; rank i estimates the mean as c + (d_i - Q(d_i)).

    The residual of d_i thus stays in the weights of rank i and is part of its next difference: the weights are their
    own residual. (Compare Qsparse-local-SGD, Basu et al., arXiv 1906.02367, which stores a separate memory.)

    Args:
        bucket: the bucket, whose snapshots have a dtype that the codec encodes.
        compressor: the codec Q.
    """

    def __init__(self, bucket: WeightBucket, compressor: Compressor) -> None:
        self._bucket = bucket
        device = bucket.flat.device
        self._residuals = TwoPhaseResiduals(device)
        self._differences = sub_bucket_of(bucket, bucket.tensors, torch.float32)
        self._differences.append_centralized_synchronous_op(
            hierarchical=False, compression=compressor, error_feedback=self._residuals
        )
        self._mean = torch.zeros_like(self._differences.flat)

    def begin(self) -> None:
        """Set c to the flat tensor, a mean in full precision."""
        self._mean.copy_(self._bucket.flat)

    def forget(self, names: Container[str]) -> None:
        """Reset E of these weights, which were loaded and need no correction. Do not call it during `average`."""
        self._residuals.clear(self._bucket.slices_of(names))

    def average(self) -> None:
        """Write this rank's estimate of the mean snapshot to the flat tensor."""
        torch.sub(self._bucket.snapshot, self._mean, out=self._differences.flat)
        self._mean.add_(self._differences.run())
        self._residuals.mean.commit()  # the first phase's residual is not committed: it stays in the weights
        torch.add(self._mean, self._residuals.sent.staged(slice(None)), out=self._bucket.flat)


class SnapshotMeans:
    """Writes the means of buckets' snapshots, in full precision or by compressed differences.

    It does not reference the module, even indirectly.
    """

    def __init__(self) -> None:
        self._differences: dict[WeightBucket, CompressedDifferences] = {}

    def compress(self, bucket: WeightBucket, compressor: Compressor) -> None:
        """From now on, send the compressed differences of this bucket."""
        self._differences[bucket] = CompressedDifferences(bucket, compressor)

    def clear(self) -> None:
        """Forget all buckets, before they are rebuilt."""
        self._differences.clear()

    def forget(self) -> None:
        """Reset the residuals of all buckets."""
        for bucket, differences in self._differences.items():
            differences.forget([tensor.name for tensor in bucket.tensors])

    def average(self, bucket: WeightBucket, is_exact: bool, loaded: Container[str]) -> None:
        """Write the mean of the snapshots of a bucket, or this rank's estimate of it, to the flat tensor.

        Args:
            bucket: the bucket.
            is_exact: whether the result must be the mean, identical on all ranks.
            loaded: names of weights that were loaded since the last mean.
        """
        differences = self._differences.get(bucket)
        if differences is None:
            bucket.run()
            return
        differences.forget(loaded)
        if is_exact:
            bucket.run()
            differences.begin()
        else:
            differences.average()
