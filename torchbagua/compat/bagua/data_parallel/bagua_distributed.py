"""BaguaDistributedDataParallel: connects a module and its algorithm, and is passed to custom algorithms."""

import inspect
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from torchbagua import algorithms
from torchbagua.collectives import broadcast_tensors
from torchbagua.compat.bagua import env
from torchbagua.compat.bagua._torch import ignore_names
from torchbagua.compat.bagua.data_parallel.driven_ddp import DrivenForward
from torchbagua.compat.bagua.node_mean import with_node_mean
from torchbagua.compat.bagua.own_algorithm import OwnAlgorithm, OwnImpl, is_own
from torchbagua.compat.bagua.process_groups import ProcessGroupFacade

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class BaguaDistributedDataParallel:
    """An algorithm attached to a module. `with_bagua` creates it, as the module's `bagua_ddp`. Collective.

    Args:
        module: the module.
        optimizers: the optimizers of its parameters.
        algorithm: an algorithm of this package, its registered name, or an algorithm written for Bagua's API.
        process_group: the ranks that train together.
        bagua_module_name: a name for the module; no effect on training.
        gradient_as_bucket_view: make gradients views of the buckets.
        find_unused_parameters: allow backward passes that do not use all parameters.
        ddp: the DDP around the module; by default it is created if the algorithm needs a DDP.
        grad_scaler: the GradScaler of the loop.

    Attributes:
        module: the module.
        attachment: the result of `torchbagua.attach`. `detach` ends the algorithm.
        bagua_algorithm: the running part of the algorithm; with AsyncModelAverage it has `abort(module)` and
            `resume(module)`.
        bagua_optimizers: the optimizers.
        bagua_buckets: the buckets. Gradient buckets exist after the first backward.
        bagua_train_step_counter: the number of forward passes in training so far; only with a custom algorithm.
        parameters_to_ignore: the names of parameters that are not communicated.
        require_backward_grad_sync: if False, a custom algorithm does not communicate, as in `no_sync`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Optimizers,
        algorithm: tb.Algorithm | str,
        process_group: ProcessGroupFacade,
        bagua_module_name: str | None = None,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        *,
        ddp: DistributedDataParallel | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.module = module
        self.bagua_module_name = bagua_module_name or f"{type(module).__name__}_{id(module)}"
        self.bagua_optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self.process_group = process_group
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self.require_backward_grad_sync = True
        self.bagua_train_step_counter = 0
        self.parameters_to_ignore = ignore_names(module, getattr(module, "_bagua_params_and_buffers_to_ignore", ()))
        self.own_impl: OwnImpl | None = None
        ended_by = f"{'model.bagua_ddp' if ddp is None else 'ddp.inner'}.attachment.detach()"
        torch_group = process_group.require_torch_group()
        algorithm = self._adapt(algorithm)
        driven: DrivenForward | None = None
        if ddp is None and not algorithm.averages_weights:
            driven = DrivenForward(module, torch_group, self._ddp_arguments())
            ddp = driven.ddp
        with ExitStack() as undo:  # closed here only if one of these steps raises
            if driven is not None:
                undo.callback(driven.remove)
            self.attachment = undo.enter_context(
                tb.attach(
                    module if ddp is None else ddp,
                    self.bagua_optimizers,
                    algorithm,
                    process_group=torch_group,
                    grad_scaler=grad_scaler,
                )
            )
            if isinstance(self.attachment.runner, tb.extend.WeightRunner):
                self.attachment.runner.use_names(ended_by=ended_by)
            if driven is not None:
                driven.install()
                self.attachment.runner.on_close(driven.remove)
            if ddp is not None:
                self.attachment.broadcast_optimizers()  # attach does this only without a DDP
            undo.pop_all()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of the module has no algorithm."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle as None: a loaded module has no algorithm."""
        return type(None), ()

    @property
    def bagua_algorithm(self) -> Any:
        """The running part of the algorithm."""
        return self.attachment.impl if self.own_impl is None else self.own_impl.own

    @property
    def bagua_buckets(self) -> list[Any]:
        """The buckets."""
        if self.own_impl is not None:
            return self.own_impl.own_buckets
        runner = self.attachment.runner
        if isinstance(runner, tb.extend.WeightRunner):
            return list(runner.buckets)
        return list(runner.gradient_buckets) if isinstance(runner, tb.extend.GradientRunner) else []

    def use_own_impl(self, impl: OwnImpl) -> None:
        """Have `impl` run a custom algorithm; its constructor calls this."""
        self.own_impl = impl

    def ignore(self, names: Iterable[str]) -> None:
        """Communicate no parameters with these names either."""
        self.parameters_to_ignore = sorted({*self.parameters_to_ignore, *names})

    def count_forward(self) -> None:
        """Count a forward pass in training."""
        self.bagua_train_step_counter += 1

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters that are trained and not ignored, with their names in the module."""
        return [
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and name not in self.parameters_to_ignore
        ]

    def wait_pending_comm_ops(self) -> None:
        """Wait for the running buckets; for custom algorithms."""
        if self.own_impl is not None:
            self.own_impl.wait_pending()

    @property
    def _bagua_backend(self) -> "BaguaDistributedDataParallel":
        """This object: custom algorithms call `bagua_ddp._bagua_backend.wait_pending_comm_ops()`."""
        return self

    def broadcast_from_first_rank(self) -> None:
        """Broadcast rank 0's parameters, and the state of its optimizers. Collective."""
        world = self.attachment.runner.process_group.world
        parameters = [parameter for _, parameter in self.bagua_build_params()]
        broadcast_tensors(world, parameters, "the parameters")
        self.attachment.broadcast_optimizers()

    def _adapt(self, algorithm: tb.Algorithm | str) -> tb.Algorithm:
        """Return the algorithm to attach."""
        algorithm = algorithms.init_for(algorithm, self.bagua_optimizers)
        if not isinstance(algorithm, tb.Algorithm):
            raise TypeError(
                f"torchbagua.compat.bagua: algorithm must be an Algorithm or a registered name, got {algorithm!r}"
            )
        return OwnAlgorithm(algorithm, self) if is_own(algorithm) else with_node_mean(algorithm)

    def _ddp_arguments(self) -> dict[str, Any]:
        return {
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "find_unused_parameters": self.find_unused_parameters,
            "bucket_cap_mb": env.get_default_bucket_size() / 2**20,
            **buffers_option(False),  # in Bagua, ranks do not synchronize buffers
        }


def buffers_option(are_broadcast: bool) -> dict[str, Any]:
    """Return the argument with which DDP broadcasts rank 0's buffers before each forward; torch 2.13 renamed it."""
    if are_broadcast:
        return {}
    renamed = "forward_sync_buffers"
    has_new = renamed in inspect.signature(DistributedDataParallel).parameters
    return {renamed if has_new else "broadcast_buffers": False}
