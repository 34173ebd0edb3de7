"""The compressed mean of gradients, with error feedback or without, as an operation of buckets."""

from torchbagua.algorithms.gradient.feedback import ErrorFeedback
from torchbagua.codecs.base import Compressor
from torchbagua.codecs.mean_codecs import MeanCodecs, codec_for_dtype
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.parameter_state import ParameterState


class CompressedMean:
    """Appends the mean of a compressed gradient to buckets, with error feedback or without.

    Args:
        codecs: those of the mean.
        average: divide by the number of ranks.
        feedback: keeps the residuals; None for none.
    """

    def __init__(
        self, codecs: MeanCodecs, average: bool, feedback: ErrorFeedback[ParameterState[TwoPhaseResiduals]] | None
    ) -> None:
        self._codecs = codecs
        self._average = average
        self._feedback = feedback

    def append(self, bucket: BaguaBucket) -> None:
        """Append it; in full precision, if the codec does not encode the bucket."""
        codec, feedback = codec_for_dtype(self._codecs.codec, bucket.flat.dtype), self._feedback
        # One rank leaves nothing out, and neither does full precision.
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
