"""Rounds of asynchronous averaging that send how weights differ from the last mean, compressed."""

from collections.abc import Container

import torch

from torchbagua.codecs.base import Compressor
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.runtime.sub_buckets import sub_bucket_of
from torchbagua.runtime.weight_bucket import WeightBucket


class CompressedDifferences:
    """Averages the snapshots of one bucket by their differences from a mean c, which all ranks hold bit-equal.

    From the snapshots s_i, with a two-phase mean of the codec Q and a residual E of its second phase:

    1. d_i = s_i - c;
    2. D = Q(mean_j Q(d_j) + E), and E is what Q leaves out of that;
    3. c += D; what rank i takes for the mean is c + (d_i - Q(d_i)).

    So what Q leaves out of d_i stays in the weights of rank i, and is in its next difference: weights are their own
    residual (as in Qsparse-local-SGD, Basu et al., arXiv 1906.02367, whose memory is beside them).

    Args:
        bucket: the bucket, whose snapshots are of a dtype that the codec encodes.
        compressor: Q.
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
        """Take what is in the flat tensor, a mean in full precision, for c."""
        self._mean.copy_(self._bucket.flat)

    def forget(self, names: Container[str]) -> None:
        """Start without E of these weights, if they are loaded and lack nothing of it. Not beside `average`."""
        self._residuals.clear(self._bucket.slices_of(names))

    def average(self) -> None:
        """Write this rank's estimate of the mean snapshot to the flat tensor."""
        torch.sub(self._bucket.snapshot, self._mean, out=self._differences.flat)
        self._mean.add_(self._differences.run())
        self._residuals.mean.commit()  # that of the first phase is not: it stays in the weights
        torch.add(self._mean, self._residuals.sent.staged(slice(None)), out=self._bucket.flat)


class SnapshotMeans:
    """Writes the means of buckets' snapshots, in full precision or by compressed differences.

    Nothing leads from it to the module.
    """

    def __init__(self) -> None:
        self._differences: dict[WeightBucket, CompressedDifferences] = {}

    def compress(self, bucket: WeightBucket, compressor: Compressor) -> None:
        """Send a bucket by its differences from now on."""
        self._differences[bucket] = CompressedDifferences(bucket, compressor)

    def clear(self) -> None:
        """Forget all buckets, which are made again."""
        self._differences.clear()

    def forget(self) -> None:
        """Start without residuals of what was sent."""
        for bucket, differences in self._differences.items():
            differences.forget([tensor.name for tensor in bucket.tensors])

    def average(self, bucket: WeightBucket, is_exact: bool, loaded: Container[str]) -> None:
        """Write the mean of the snapshots of a bucket, or this rank's estimate of it, to the flat tensor.

        Args:
            bucket: the bucket.
            is_exact: whether it must be the mean, the same on all ranks.
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
