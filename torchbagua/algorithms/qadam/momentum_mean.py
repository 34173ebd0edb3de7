"""The mean of momenta, instead of gradients, as bucket operations."""

import torch

from torchbagua.algorithms.qadam.momentum_form import MomentumForm
from torchbagua.algorithms.qadam.optimizer import QAdamOptimizer
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.parameter_state import ParameterState
from torchbagua.runtime.runner import Runner


class MomentumMean:
    """Appends operations to a bucket that average its gradients as momenta.

    A gradient g is sent as b1 m + (1 - b1) g, and `.grad` is set to (mean - b1 m) / (1 - b1), from which the
    optimizer's step reconstructs the mean. On CPUs, the codec's kernels perform both conversions while they encode and
    decode.

    Args:
        runner: the impl's runner, whose codec encodes the momenta.
        q_adam: the optimizer, which stores the momenta m and the betas.
        residuals: the residuals of error feedback, or None.
        hierarchical: whether nodes average in full precision first.
    """

    def __init__(
        self,
        runner: Runner,
        q_adam: QAdamOptimizer,
        residuals: ParameterState[TwoPhaseResiduals] | None,
        *,
        hierarchical: bool,
    ) -> None:
        self._runner = runner
        self._q_adam = q_adam
        self._residuals = residuals
        self._hierarchical = hierarchical

    def append(self, bucket: BaguaBucket) -> None:
        """Append the operations to `bucket`, a float32 bucket of parameters past their warm-up."""
        feedback = None
        if self._residuals is not None:
            feedback = self._residuals.of_bucket(bucket)
            bucket.append_local_op(self._residuals.resolve_last_backward)
        form = MomentumForm(self._runner, self._q_adam, bucket)
        bucket.append_centralized_synchronous_op(
            hierarchical=self._hierarchical, compression=self._runner.codec, error_feedback=feedback, form=form
        )

        def adopt_if_joined(bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
            if self._runner.has_joined:
                self._adopt_momenta(bucket, form)

        bucket.append_local_op(adopt_if_joined)

    @torch.no_grad()
    def _adopt_momenta(self, bucket: BaguaBucket, form: MomentumForm) -> None:
        """Update the momenta as the steps of the other ranks do.

        This rank has joined and takes no steps, but must not send stale momenta.
        """
        if self._residuals is not None:
            self._residuals.commit_without_step(bucket)
        if not bool(bucket.flat.isfinite().all()):  # the other ranks skip this step
            return
        form.take_step(bucket.flat)
        for tensor, momentum in bucket.views(bucket.flat):
            self._q_adam.adopt_momentum(tensor.parameter, momentum)
