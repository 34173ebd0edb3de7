"""Warnings about optimizer steps on gradients that were not averaged: mistakes that plain DDP ignores silently."""

import weakref
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from torchbagua._torch import is_in_backward
from torchbagua._warnings import warn_user
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.optimizer_steps import StepWatch, parameters_of
from torchbagua.training.checks import TrainingSetup

# The steps of each optimizer after a synchronized backward, with all steps before them, that are checked.
_NUM_STEPS = 20

_NUM_NAMED = 3
_NEVER_AVERAGED = (
    "has stepped on gradients that DistributedDataParallel did not average. If the module was converted after it "
    "was wrapped (ddp.double(), .half(), .to(...)), DDP's hooks were dropped: convert it first, wrap it in a new DDP, "
    "and attach. If the loop calls the inner module (net(x), ddp.module(x)): call ddp(x). If only the forward runs in "
    "no_sync(): leave no_sync() before the forward. To average by hand, call the module and backward within no_sync()"
)
_LATE_FLAG = (
    "has stepped on an average to which later backward passes had added this rank's gradients: their forward was "
    "within no_sync(). Set require_backward_grad_sync, or enter no_sync(), before the forward, not between forward and "
    "backward, and synchronize the last pass of each step"
)
_SECOND_BACKWARD = (
    "has stepped on an average to which a later backward had added this rank's gradients: DistributedDataParallel "
    "averages once per forward. Sum the losses and call backward once, and call ddp(x), not the inner module (net(x))"
)
_LEFTOVER = (
    "has stepped on gradients of passes within no_sync() only, although this loop averages in other steps. Leave "
    "no_sync() before the last forward of each window of accumulation, also of a shorter window at the end of an epoch"
)


class UnaveragedGradients:
    """Warns once if one of an optimizer's first steps is on local gradients although a gradient algorithm is attached.

    Four mistakes cause this. Each is also wrong with plain DDP. None is an error, since a loop may do it on purpose:

    - DDP passes no bucket to the hook. The module was converted, which drops DDP's hooks, or the loop calls the module
      instead of the DDP, or calls it within `no_sync` only.
    - A backward adds to an average: DDP averages only in the first backward after a forward outside `no_sync`.
    - A parameter is in none of DDP's buckets. It was frozen or absent when the DDP was created.
    - The optimizer steps within backward, before DDP has averaged.
    """

    def __init__(self, setup: TrainingSetup, runner: GradientRunner) -> None:
        self._setup = setup
        self._runner = runner
        self._ignored_names = setup.ignored_names()
        self._untrained: list[torch.Tensor] = []
        self._watched: dict[torch.optim.Optimizer, _WatchedOptimizer] = {}
        trained_ids = {id(parameter) for parameter in setup.trained().values()}
        ddps = {id(parameter): ddp for ddp in setup.ddps for parameter in ddp.parameters()}
        for watch in runner.step_watches:
            by_ddp: dict[DistributedDataParallel, list[torch.Tensor]] = {}
            for parameter in parameters_of(watch.optimizer):
                if id(parameter) in trained_ids:
                    by_ddp.setdefault(ddps[id(parameter)], []).append(parameter)
            gradients = [  # almost every loss trains the first or the last parameter
                _WatchedGradient(parameter, ddp, runner)
                for ddp, trained in by_ddp.items()
                for parameter in dict.fromkeys((trained[0], trained[-1]))
            ]
            self._watched[watch.optimizer] = _WatchedOptimizer(watch, gradients)
            watch.add(self._after_step, reads_overflow=False)

    def close(self) -> None:
        """Stop watching backward passes and steps."""
        for watched in self._watched.values():
            self._leave(watched)

    def _leave(self, watched: "_WatchedOptimizer") -> None:
        watched.watch.remove(self._after_step)
        for gradient in watched.gradients:
            gradient.hook.remove()

    def _after_step(self, optimizer: torch.optim.Optimizer, is_taken: bool) -> None:
        watched = self._watched[optimizer]
        num_received = watched.num_received or 0
        self._check_step(optimizer, watched)
        watched.num_steps += self._runner.num_received != num_received
        if watched.num_steps == _NUM_STEPS:
            self._leave(watched)

    def _check_step(self, optimizer: torch.optim.Optimizer, watched: "_WatchedOptimizer") -> None:
        before = watched.num_received
        if before is None and is_in_backward():
            self._warn(
                f"{type(optimizer).__name__} steps within backward, before DistributedDataParallel has averaged "
                "gradients. Step after backward, or attach an algorithm that averages weights"
            )
            return
        before, watched.num_received = before or 0, self._runner.num_received
        local = None
        for gradient in watched.gradients:
            if gradient.is_local():
                local = local or gradient
            gradient.end_step()
        self._runner.report_differences()
        problem = None if local is None else self._problem(local, before)
        if local is None or problem is None or not local.has_values():
            if self._runner.num_received != before:
                self._check_untrained(watched)
            return
        # The gradient may be equal on all ranks, as that of a penalty on weights, or averaged by hand. So ranks compare
        # their weights in the next backward. If DDP passes no bucket, none compares.
        problem = f"{type(optimizer).__name__} {problem}"
        is_bare, was_bare_at = self._runner.num_received == before, watched.bare_at
        if is_bare:
            watched.bare_at = before
        if is_bare and was_bare_at == before and not local.is_in_no_sync:
            self._warn(problem)
        elif self._runner.meetings is not None:
            self._runner.meetings.suspect(problem)

    def _problem(self, local: "_WatchedGradient", before: int) -> str | None:
        """Return how a step used a local gradient; None if it is in none of DDP's buckets."""
        if local.num_received > before:
            return _LATE_FLAG if local.follows_silent_forward else _SECOND_BACKWARD
        if local.is_in_no_sync:
            return _LEFTOVER
        is_in_bucket = local.num_received > 0 or self._runner.num_received == before
        return _NEVER_AVERAGED if is_in_bucket else None

    def _check_untrained(self, watched: "_WatchedOptimizer") -> None:
        """Search for gradients of parameters that are in none of DDP's buckets, after buckets were averaged."""
        num_parameters = sum(len(group["params"]) for group in watched.watch.optimizer.param_groups)
        if watched.num_parameters != num_parameters:
            watched.num_parameters = num_parameters
            self._untrained = list(self._without_bucket().values())
        if any(parameter.requires_grad and parameter.grad is not None for parameter in self._untrained):
            found = [
                name
                for name, parameter in self._without_bucket().items()
                if parameter.requires_grad and parameter.grad is not None
            ]
            if found:
                self._warn(
                    f"the gradients of {len(found)} parameters are not averaged: {', '.join(found[:_NUM_NAMED])}"
                    f"{', ...' if len(found) > _NUM_NAMED else ''}. DistributedDataParallel averages the parameters "
                    "that required gradients when it was created. Before you unfreeze or add parameters, call "
                    "detach(); then unfreeze them, wrap the module in a new DDP, create the optimizer, and attach again"
                )

    def _without_bucket(self) -> dict[str, torch.Tensor]:
        in_buckets = {id(tensor.parameter) for bucket in self._runner.gradient_buckets for tensor in bucket.tensors}
        return {
            name: parameter
            for name, parameter in self._setup.inner.named_parameters()
            if id(parameter) not in in_buckets and name not in self._ignored_names
        }

    def _warn(self, problem: str) -> None:
        self.close()
        if self._runner.meetings is not None:
            self._runner.meetings.mute()  # ranks compare their weights later
        warn_user(f"torchbagua: {problem}. Ranks now hold different weights")


class _WatchedOptimizer:
    """The steps of one optimizer."""

    num_steps = 0  # with an average
    num_received: int | None = None  # of the runner, at the last step
    bare_at: int | None = None  # `num_received` of the runner at the last step without an average
    num_parameters: int | None = None  # when `UnaveragedGradients._untrained` was computed

    def __init__(self, watch: StepWatch, gradients: "list[_WatchedGradient]") -> None:
        self.watch = watch
        self.gradients = gradients


class _WatchedGradient:
    """The gradient of one parameter: has DDP averaged it since the last backward that added to it?"""

    num_received = 0  # of the runner, when DDP last passed the bucket with this gradient
    follows_silent_forward = False  # whether DDP's forward before the last backward was within `no_sync`
    is_in_no_sync = False  # whether the last backward was
    _bucket: BaguaBucket | None = None
    _num_received_before = 0  # the last backward
    _num_backwards = 0  # that have added to it since the last step

    def __init__(self, parameter: torch.Tensor, ddp: DistributedDataParallel, runner: GradientRunner) -> None:
        self._parameter = parameter
        self._ddp = ddp
        self._runner = runner
        # The garbage collector does not see what such a hook refers to.
        self.hook = parameter.register_post_accumulate_grad_hook(partial(self._after_addition, weakref.ref(self)))

    def is_local(self) -> bool:
        """Return whether a backward has added to it since the last step, and DDP has not averaged it since."""
        if self._num_backwards == 0 or (self._bucket and self._bucket.num_received > self._num_received_before):
            return False
        for bucket in self._runner.gradient_buckets:  # DDP rebuilds its buckets
            if any(tensor.parameter is self._parameter for tensor in bucket.tensors):
                self._bucket = bucket
        self.num_received = 0 if self._bucket is None else self._bucket.num_received
        return self.num_received <= self._num_received_before

    def end_step(self) -> None:
        """Begin a new step."""
        self._num_backwards = 0

    def has_values(self) -> bool:
        """Return whether any element is nonzero; zero_grad(set_to_none=False) leaves zeros. Waits for a GPU."""
        gradient = self._parameter.grad
        return gradient is not None and (gradient.layout != torch.strided or bool(gradient.any()))

    @staticmethod
    def _after_addition(watched: "weakref.ref[_WatchedGradient]", _: torch.Tensor) -> None:
        if (this := watched()) is not None:
            ddp = this._ddp
            this._num_backwards += 1
            this._num_received_before = this._runner.num_received  # DDP may yet average in this backward
            this.follows_silent_forward = not ddp.require_forward_param_sync
            this.is_in_no_sync = not ddp.require_backward_grad_sync
