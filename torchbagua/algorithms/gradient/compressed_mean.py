"""The compressed mean of gradients, with or without error feedback, as a bucket operation."""

from torchbagua.algorithms.gradient.feedback import ErrorFeedback
from torchbagua.codecs.base import Compressor
from torchbagua.codecs.mean_codecs import MeanCodecs, codec_for_dtype
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.parameter_state import ParameterState


class CompressedMean:
    """Appends the mean of compressed gradients to buckets, with or without error feedback.

    Args:
        codecs: the codecs of the mean.
        average: divide by the number of ranks.
        feedback: stores the residuals. None for no error feedback.
    """

    def __init__(
        self, codecs: MeanCodecs, average: bool, feedback: ErrorFeedback[ParameterState[TwoPhaseResiduals]] | None
    ) -> None:
        self._codecs = codecs
        self._average = average
        self._feedback = feedback

    def append(self, bucket: BaguaBucket) -> None:
        """Append the mean, in full precision if the codec does not encode the bucket's dtype."""
        codec, feedback = codec_for_dtype(self._codecs.codec, bucket.flat.dtype), self._feedback
        # A single rank has no residuals, and full precision has none either.
        if feedback is None or codec is not self._codecs.codec or bucket.group.size == 1:
            self._append_mean(bucket, codec)
        else:
            feedback.append(bucket, lambda part: self._append_mean(part, codec, feedback.state.of_bucket(part)))

    def _append_mean(self, bucket: BaguaBucket, codec: Compressor, residuals: TwoPhaseResiduals | None = None) -> None:
        bucket.append_centralized_synchronous_op(
            hierarchical=self._codecs.hierarchical,
            average=self._average,
            compression=codec,
            error_feedback=residuals,
            intra_compression=self._codecs.for_dtype(bucket.flat.dtype).intra_codec,
        )
