"""A gradient method of one's own from one function: `mean(flat, group)` replaces a bucket's gradients by their mean.

flat = gradients of one bucket of DDP
with error_feedback, for each rank i, with residual e_i (Karimireddy et al., arXiv 1901.09847, algorithm 1):
    p_i   = flat_i + e_i
    D_i   = error_feedback(p_i)            what this rank sends of p_i
    e_i  <- p_i - D_i                      committed by the optimizer's step
    flat <- D_i
mean(flat, group)                          on the lane, in place
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchbagua.algorithms.base import Algorithm, register
from torchbagua.algorithms.gradient.feedback import ErrorFeedback
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.residuals import Residual
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.parameter_state import ParameterState
from torchbagua.runtime.runner import AlgorithmImpl

Mean = Callable[[torch.Tensor, BaguaProcessGroup], None]
"""Replaces the flat tensor of a bucket by the mean over the group's ranks, in place."""

Sent = Callable[[torch.Tensor], torch.Tensor]
"""Returns what a rank sends of a flat tensor, of the same shape and dtype; it does not change its argument."""


@dataclass(frozen=True)
class MeanFunction(Algorithm):
    """The gradient algorithm of a function; `torchbagua.extend.mean` registers one."""

    name: str
    function: Mean
    error_feedback: Sent | None = None

    def prepare(self) -> None:
        """Do nothing: the package's kernels are loaded if the function uses a codec."""

    def make_impl(self, runner: GradientRunner) -> "MeanFunctionImpl":
        """Return the impl."""
        return MeanFunctionImpl(runner)


class MeanFunctionImpl(AlgorithmImpl):
    """See `MeanFunction`."""

    algorithm: MeanFunction
    runner: GradientRunner

    def __init__(self, runner: GradientRunner) -> None:
        super().__init__(runner)
        self._feedback: ErrorFeedback[ParameterState[SentResidual]] | None = None
        if self.algorithm.error_feedback is not None and runner.process_group.size > 1:
            state = ParameterState(self.algorithm.name, _make_residual, {"residual": None})
            self._feedback = ErrorFeedback(self.runner, state)

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        if self.runner.process_group.size == 1:
            return
        if self._feedback is None:
            bucket.append_python_op(_on_flat(self.algorithm.function))
        else:
            self._feedback.append(bucket, self._append_with_feedback)

    def _append_with_feedback(self, bucket: BaguaBucket) -> None:
        assert self._feedback is not None
        assert self.algorithm.error_feedback is not None
        residual, sent_of = self._feedback.state.of_bucket(bucket), self.algorithm.error_feedback

        def keep_what_is_sent(bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
            whole = slice(0, bucket.flat.numel())
            bucket.flat.add_(residual.added(whole))
            sent = sent_of(bucket.flat)
            # NaN and Inf do not enter the residual.
            residual.stage(whole).copy_(torch.nan_to_num(bucket.flat - sent, nan=0.0, posinf=0.0, neginf=0.0))
            bucket.flat.copy_(sent)

        bucket.append_local_op(functools.update_wrapper(keep_what_is_sent, sent_of))
        bucket.append_python_op(_on_flat(self.algorithm.function))


class SentResidual(Residual):
    """The residual of one rank for a whole bucket; a `BucketState`."""

    def expand(self, part: slice) -> Sequence[torch.Tensor]:  # type: ignore[override]
        return [super().expand(part)]


def _make_residual(bucket: BaguaBucket, held: Sequence[Sequence[torch.Tensor]] | None) -> SentResidual:
    residual = SentResidual(slice(0, bucket.flat.numel()), bucket.flat.device)
    if held is not None:
        torch.cat([values for (values,) in held], out=residual.values)
    return residual


def _on_flat(function: Mean) -> Callable[[BaguaBucket, BaguaProcessGroup], None]:
    """Return an operation of a bucket that has the function's name in errors."""

    def run(bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
        function(bucket.flat, group)

    return functools.update_wrapper(run, function)


def mean(name: str, *, error_feedback: Sent | None = None, description: str | None = None) -> Callable[[Mean], Mean]:
    """Register a function `f(flat, group) -> None` as a gradient algorithm; a decorator.

    `attach(ddp, optimizer, name)` then has the lane call `f` with each bucket: `flat`, the gradients, [N] in their
    dtype, on any device, which `f` replaces by the result, in place and equal on all ranks; and `group`, whose
    operations `all_reduce`, `all_gather`, `reduce_scatter` and `exchange` it calls. In a group of one rank, `f` is not
    called.

    Args:
        name: the name to register.
        error_feedback: a function of `flat` that returns what this rank sends of it, and does not change it. What it
            leaves out is added to the next gradients of the parameter. `f` then gets what is sent, in float32 and
            without the loss scale of a GradScaler. States contain the residuals.
        description: one line for `available_algorithms`.

    Raises:
        TypeError, ValueError: see `torchbagua.extend.register`. `attach` raises TypeError for a lambda or a nested
            function, since ranks compare functions by their names.
    """

    def add(function: Mean) -> Mean:
        register(name, functools.partial(MeanFunction, name, function, error_feedback), description)
        return function

    return add
