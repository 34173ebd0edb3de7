"""The mean of momenta, in place of that of gradients, as operations of a bucket."""

import torch

from torchbagua.algorithms.qadam.momentum_form import MomentumForm
from torchbagua.algorithms.qadam.optimizer import QAdamOptimizer
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.parameter_state import ParameterState
from torchbagua.runtime.runner import Runner


class MomentumMean:
    """Appends operations to a bucket that average its gradients in the form of momenta.

    A gradient g is sent as b1 m + (1 - b1) g, and `.grad` becomes (mean - b1 m) / (1 - b1), from which the optimizer's
    step forms the mean again. Between CPUs the codec's kernels do both while they encode and decode.

    Args:
        runner: that of the impl; its codec is that of momenta.
        q_adam: the optimizer, which has the momenta m and the betas.
        residuals: those of error feedback, or None.
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
        """Append them to a bucket of float32, of parameters past their warm-up."""
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
        """Do what the other ranks' steps do with the mean: this rank takes none, and what it sends must not be old."""
        if self._residuals is not None:
            self._residuals.commit_without_step(bucket)
        if not bool(bucket.flat.isfinite().all()):  # then they skip it
            return
        form.take_step(bucket.flat)
        for tensor, momentum in bucket.views(bucket.flat):
            self._q_adam.adopt_momentum(tensor.parameter, momentum)
