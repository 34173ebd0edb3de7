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
        one: the bucket, whose snapshots are of a dtype that the codec encodes.
        compressor: Q.
    """

    def __init__(self, one: WeightBucket, compressor: Compressor) -> None:
        self._one = one
        device = one.bucket.flat.device
        self._residuals = TwoPhaseResiduals(device)
        self._differences = sub_bucket_of(one.bucket, one.bucket.tensors, torch.float32)
        self._differences.append_centralized_synchronous_op(
            hierarchical=False, compression=compressor, error_feedback=self._residuals
        )
        self._mean = torch.zeros_like(self._differences.flat)

    def begin(self) -> None:
        """Take what is in the flat tensor, a mean in full precision, for c."""
        self._mean.copy_(self._one.bucket.flat)

    def forget(self, names: Container[str]) -> None:
        """Start without E of these weights, if they are loaded and lack nothing of it. Not beside `average`."""
        self._residuals.clear(self._one.slices_of(names))

    def average(self) -> None:
        """Write to the flat tensor what this rank takes for the mean of the snapshots."""
        torch.sub(self._one.snapshot, self._mean, out=self._differences.flat)
        self._mean.add_(self._differences.run())
        self._residuals.mean.commit()  # that of the first phase is not: it stays in the weights
        torch.add(self._mean, self._residuals.sent.staged(slice(None)), out=self._one.bucket.flat)
