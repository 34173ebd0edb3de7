"""The mean of momenta, in place of that of gradients, as operations of a bucket."""

from collections.abc import Iterator

import torch

from torchbagua.algorithms.qadam.optimizer import QAdamOptimizer
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.parameter_state import ParameterState
from torchbagua.runtime.runner import Runner


class MomentumMean:
    """Appends operations to a bucket that turn gradients into momenta, average these, and turn the mean back.

    `.grad` becomes (mean - b1 m) / (1 - b1), from which the optimizer's step forms the mean again.

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
            bucket.append_python_op(self._residuals.resolve_last_backward)
        bucket.append_python_op(self._form_momenta)
        bucket.append_centralized_synchronous_op(
            hierarchical=self._hierarchical, compression=self._runner.codec, error_feedback=feedback
        )
        bucket.append_python_op(self._form_gradients_or_adopt_momenta)

    @torch.no_grad()
    def _form_momenta(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        for gradients, momenta, beta1, share in self._with_momenta(bucket):
            torch.ops.torchbagua.qadam_form_momenta(gradients, momenta, beta1=beta1, share=share)

    @torch.no_grad()
    def _form_gradients(self, bucket: BaguaBucket) -> None:
        for averages, momenta, beta1, share in self._with_momenta(bucket):
            torch.ops.torchbagua.qadam_form_gradients(averages, momenta, beta1=beta1, share=share)

    def _form_gradients_or_adopt_momenta(self, bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        if self._runner.has_joined:
            self._adopt_momenta(bucket)
        else:
            self._form_gradients(bucket)

    @torch.no_grad()
    def _adopt_momenta(self, bucket: BaguaBucket) -> None:
        """Do what the other ranks' steps do with the mean: this rank takes none, and what it sends must not be old."""
        if self._residuals is not None:
            self._residuals.commit_without_step(bucket)
        if not bool(bucket.flat.isfinite().all()):  # then they skip it
            return
        self._form_gradients(bucket)
        bucket.flat.div_(self._runner.loss_scale)
        for gradients, momenta, beta1, _ in self._with_momenta(bucket):
            torch.ops.torchbagua.qadam_form_momenta(gradients, momenta, beta1=beta1, share=1.0 - beta1)
        for tensor, momentum in bucket.views(bucket.flat):
            self._q_adam.adopt_momentum(tensor.parameter, momentum)

    def _with_momenta(
        self, bucket: BaguaBucket
    ) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor], float, float]]:
        """Yield, for each beta1 that parameters have, their parts of the flat tensor, their momenta, beta1 and share.

        The share is (1 - beta1) / loss scale: gradients carry the scale, momenta do not.
        """
        alike: dict[float, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for tensor, part in bucket.parts(bucket.flat):
            momentum = self._q_adam.state[tensor.parameter]["exp_avg"]
            beta1 = self._q_adam.beta1_of(tensor.parameter)
            alike.setdefault(beta1, []).append((part, tensor.order.flatten(momentum)))
        for beta1, pairs in alike.items():
            parts, momenta = map(list, zip(*pairs, strict=True))
            yield parts, momenta, beta1, (1.0 - beta1) / self._runner.loss_scale
