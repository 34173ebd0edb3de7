"""Warnings about optimizer steps on gradients that were not averaged: mistakes that plain DDP ignores silently."""

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from torchbagua._torch import is_in_backward, num_writes
from torchbagua._warnings import warn_user
from torchbagua.runtime.optimizer_steps import parameters_of
from torchbagua.runtime.runner import Runner
from torchbagua.training.module_hook import ModuleHook
from torchbagua.training.setup import TrainingSetup

_requires_grad = attrgetter("requires_grad")
_NUM_NAMED = 3
# How many of the parameters that DDP does not train are checked in a step. A check takes 0.05 us, and a model with an
# adapter has a thousand such parameters.
_NUM_LOOKED_AT = 100


class UnaveragedGradients:
    """Warns once if an attached optimizer steps on this rank's local gradients although a gradient algorithm is used.

    Three mistakes cause this. Each is also wrong with plain DDP. None is an error, since a loop may do it on purpose:

    - DDP passes no bucket to the hook. The module was converted, which drops DDP's hooks, or the loop calls the module
      instead of the DDP.
    - A parameter is in none of DDP's buckets. It was frozen or absent when the DDP was created.
    - The optimizer steps within backward, before DDP has averaged.

    A normal step costs one comparison and a check of `_NUM_LOOKED_AT` parameters that DDP does not train. Consecutive
    steps check all of these parameters in turn.

    Args:
        setup: the attached module, its DDP and its optimizers.
        runner: counts synchronized backward passes, and watches the optimizers' steps.
    """

    def __init__(self, setup: TrainingSetup, runner: Runner) -> None:
        self._setup = setup
        self._runner = runner
        self._ignored_names = setup.ignored_names()
        self._num_synchronised: dict[int, int] = {}  # at the last step of each optimizer, by its id
        self._num_parameters: dict[int, int] = {}  # of each optimizer, when `_untrained` was computed
        self._untrained: list[torch.Tensor] = []
        self._position = 0  # index into `_untrained` at which the next check begins
        self._bare_steps: _BareSteps | None = None
        self._watches = list(runner.step_watches)
        for watch in self._watches:
            watch.add(self._after_step, reads_overflow=False)

    def close(self) -> None:
        """Stop watching steps."""
        for watch in self._watches:
            watch.remove(self._after_step)
        if self._bare_steps is not None:
            self._bare_steps.close()

    def _after_step(self, optimizer: torch.optim.Optimizer, is_taken: bool) -> None:
        before = self._num_synchronised.get(id(optimizer))
        if before is None and is_in_backward():  # called once per optimizer, since it raises an exception inside
            self._warn(
                f"{type(optimizer).__name__} steps within backward, before DistributedDataParallel has averaged "
                "gradients. Step after backward, or attach an algorithm that averages weights"
            )
            return
        now = self._num_synchronised[id(optimizer)] = self._runner.num_synchronised
        is_bare = now == (before or 0)
        if is_bare and self._bare_steps is None:
            self._bare_steps = _BareSteps(self._setup)
        if self._bare_steps is not None and self._bare_steps.are_local(optimizer, is_bare=is_bare):
            self._warn_of_missing_buckets(optimizer)
        elif not is_bare:
            self._check_untrained(optimizer)

    def _warn_of_missing_buckets(self, optimizer: torch.optim.Optimizer) -> None:
        self._warn(
            f"{type(optimizer).__name__} has stepped twice on gradients that DistributedDataParallel did not "
            "average. If the module was converted after it was wrapped (ddp.double(), .half(), .to(...)), DDP's hooks "
            "were dropped: convert it first, wrap it in a new DDP, and attach. If the loop calls the inner module "
            "(net(x), ddp.module(x)): call ddp(x). To average by hand, call the module within no_sync()"
        )

    def _check_untrained(self, optimizer: torch.optim.Optimizer) -> None:
        """Search for gradients of parameters that are in none of DDP's buckets, after buckets were averaged."""
        num_parameters = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._num_parameters.get(id(optimizer)) != num_parameters:
            self._num_parameters[id(optimizer)] = num_parameters
            self._untrained = list(self._without_bucket().values())
        begin, end = self._position, self._position + _NUM_LOOKED_AT
        self._position = end if end < len(self._untrained) else 0
        if not any(map(_requires_grad, self._untrained[begin:end])):
            return
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
        warn_user(f"torchbagua: {problem}. Ranks now hold different weights")


class _BareSteps:
    """Detects local gradients in bare steps: steps before which DDP passed no bucket to the hook.

    A bare step is not always a mistake. It may have no gradients, use the last gradients again, or belong to a loop
    that averages by hand within `no_sync`. The first bare step is therefore only recorded. Gradients of a second bare
    step are local if a forward outside `no_sync` computed them.
    """

    def __init__(self, setup: TrainingSetup) -> None:
        assert setup.ddp is not None
        self._ddp = setup.ddp
        self._module = setup.module
        self._trained_ids = {id(parameter) for parameter in setup.trained().values()}
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # gradients, by the parameter's id
        self._num_noted: dict[int, int] = {}  # number of bare steps with gradients, by the optimizer's id
        self._has_silent_forward = False  # since the last step
        self._is_by_hand = False
        self._hook: RemovableHandle | None = None

    def close(self) -> None:
        """Stop watching forwards."""
        if self._hook is not None:
            self._hook.remove()

    def are_local(self, optimizer: torch.optim.Optimizer, *, is_bare: bool) -> bool:
        """Return whether this step of `optimizer` and an earlier bare step used local gradients."""
        has_silent_forward, self._has_silent_forward = self._has_silent_forward, False
        if is_bare and has_silent_forward:
            self._is_by_hand = True
            self.close()
        if self._is_by_hand or (not is_bare and not self._num_noted):
            return False
        gradients = self._new_gradients(optimizer)
        if not is_bare or not any(map(_has_values, gradients)):
            return False
        self._num_noted[id(optimizer)] = self._num_noted.get(id(optimizer), 0) + 1
        if self._hook is None:
            self._hook = self._module.register_forward_pre_hook(ModuleHook(self._before_forward))
        return self._num_noted[id(optimizer)] == 2

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if module is self._module and torch.is_grad_enabled():  # a shallow copy of the module shares this hook
            self._has_silent_forward |= not self._ddp.require_backward_grad_sync

    def _new_gradients(self, optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
        """Return the gradients that were written since the last call, and record them."""
        found = []
        for parameter in parameters_of(optimizer):
            gradient = parameter.grad
            if gradient is None or not parameter.requires_grad or id(parameter) not in self._trained_ids:
                continue
            known, num_known_writes = self._seen.get(id(parameter), (None, 0))
            if known is None or known() is not gradient or num_known_writes != num_writes(gradient):
                self._seen[id(parameter)] = weakref.ref(gradient), num_writes(gradient)
                found.append(gradient)
        return found


def _has_values(gradient: torch.Tensor) -> bool:
    """Return whether any element is nonzero; zero_grad(set_to_none=False) leaves zeros. Waits for a GPU."""
    return gradient.layout != torch.strided or bool(gradient.any())
