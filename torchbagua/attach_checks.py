"""What `attach` checks: that the module and its optimizers fit, on this rank and beside the others'."""

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from torchbagua.algorithms.base import Algorithm
from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.bucket import check_elements
from torchbagua.ddp import JOIN_REFUSAL, check_around, check_no_foreign_hook, ddps_around
from torchbagua.grad_scaler import is_stepped_by_scaler
from torchbagua.torch_private import has_delayed_all_reduce, has_step_hooks, is_joining
from torchbagua.user_warning import warn_user

# On a module with an algorithm attached, inside of its wrapper: its id, which a copy has not, and the impl's name.
_MARK = "_torchbagua_attached"


def mark_attached(module: torch.nn.Module, impl_name: str) -> ExitStack:
    """Let `check_detached` know, until what is returned is closed, that an impl is attached to `module`."""
    setattr(module, _MARK, (id(module), impl_name))
    marked = ExitStack()
    marked.callback(delattr, module, _MARK)
    return marked


def facts_of(
    module: torch.nn.Module,
    ddps: Sequence[DistributedDataParallel],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    with_scaler: bool,
    strict: bool,
) -> dict[str, Any]:
    """What ranks must have in common, in the order in which they are told of it."""

    def digest(tensors: Iterable[torch.Tensor]) -> str:
        kinds = [(list(tensor.shape), str(tensor.dtype), tensor.requires_grad) for tensor in tensors]
        return hashlib.sha256(repr(kinds).encode()).hexdigest()[:16]

    sizes = [(type(one).__name__, [len(group["params"]) for group in one.param_groups]) for one in optimizers]
    return {
        "the number of parameters": len(list(module.parameters())),
        "the shapes, dtypes and requires_grad of parameters, as a digest": digest(module.parameters()),
        "the shapes and dtypes of buffers, as a digest": digest(module.buffers()),
        "the optimizers, with the number of parameters in each group": repr(sizes),
        "the number of DistributedDataParallel modules around it": len(ddps),
        "whether attach was given a grad_scaler": with_scaler,
        "attach's argument strict": strict,
    }


def settings_of(module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
    """What a trace writes down of the training: the model and its optimizers, with what they were made with."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    settings = {
        "model": f"{type(inner).__name__}, {sum(parameter.numel() for parameter in trained):,} trained elements",
        "dtypes": ", ".join(sorted({str(parameter.dtype) for parameter in trained})),
    }
    if isinstance(module, DistributedDataParallel):
        settings["DDP's bucket_cap_mb"] = f"{module.bucket_bytes_cap / 2**20:g}"
    for index, optimizer in enumerate(optimizers):
        name = "optimizer" if index == 0 else f"optimizer {index}"
        settings[name] = (
            f"{type(optimizer).__name__}({', '.join(f'{key}={value}' for key, value in optimizer.defaults.items())})"
        )
    return settings


def check_detached(module: torch.nn.Module) -> None:
    """Raise ValueError where an algorithm is attached to `module`, or to a part of it, or DDP has a foreign hook."""
    for name, submodule in module.named_modules():
        attached_id, attached = getattr(submodule, _MARK, (None, None))
        if attached_id == id(submodule):
            what = f"the module's {name}" if name and submodule is not getattr(module, "module", None) else "the module"
            raise ValueError(f"attach: {attached} is attached to {what} already; detach it first")
    if isinstance(module, DistributedDataParallel):
        check_no_foreign_hook(module)


def check_module(module: torch.nn.Module) -> None:
    """Raise TypeError or ValueError where no algorithm can be attached to `module`."""
    inner, ignored_names = module, set[str]()
    if isinstance(module, DistributedDataParallel):
        inner, ignored_names = module.module, module.parameters_to_ignore
        if has_delayed_all_reduce(module):
            raise ValueError(
                "attach: the module was made with delay_all_reduce_named_params, whose gradients bypass communication "
                "hooks; wrap the model without it"
            )
    for name, submodule in inner.named_modules():
        if isinstance(submodule, DistributedDataParallel):
            raise TypeError(
                f"attach: module must be the DistributedDataParallel itself, got {type(module).__name__} with one in "
                f"it ({name}); with torch.compile, attach to it and then call ddp.compile()"
            )
        if getattr(submodule, "sparse", False) and isinstance(submodule, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise ValueError(f"attach: {name or 'the module'} has sparse=True; sparse gradients are not supported")
    for name, tensor in chain(inner.named_parameters(), inner.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"attach: {name} has no shape yet; run a forward of the module first")
        if tensor.is_meta:
            raise ValueError(f"attach: {name} must have values, got one on the meta device")
    for name, parameter in inner.named_parameters():
        if parameter.requires_grad and name not in ignored_names:
            check_elements(f"attach: parameter {name}", parameter)


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], module: torch.nn.Module) -> None:
    """Raise TypeError or ValueError unless `optimizers` are some, of the parameters of `module`."""
    if not optimizers:
        raise ValueError("attach: optimizer must be a torch.optim.Optimizer or several, got an empty sequence")
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"attach: optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
        if not has_step_hooks(optimizer):
            raise ValueError(
                f"attach: optimizer must have torch's step hooks, got a {type(optimizer).__name__} without: its "
                "__init__ does not call that of torch.optim.Optimizer; hand over the optimizer that it wraps"
            )
        foreign = [
            tuple(parameter.shape)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in own
        ]
        if foreign:
            raise ValueError(
                f"attach: {type(optimizer).__name__} has {len(foreign)} parameters that are not the module's, the "
                f"first of shape {foreign[0]}; was it made before the model was moved or copied?"
            )


def check_kind(
    algorithm: Algorithm,
    module: torch.nn.Module,
    ddps: Sequence[DistributedDataParallel],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    averages_weights: bool,
) -> None:
    """Raise TypeError or ValueError where the algorithm, which averages weights or gradients, does not fit the rest.

    Args:
        algorithm: named in errors.
        module: what is attached.
        ddps: itself, or those around it.
        optimizers: of its parameters.
        averages_weights: or gradients.
    """
    if not averages_weights:
        if not isinstance(module, DistributedDataParallel):
            raise TypeError(
                f"attach: module must be a torch.nn.parallel.DistributedDataParallel, got {type(module).__name__}: "
                f"{type(algorithm).__name__} averages gradients. Hugging Face's Trainer keeps it as "
                "trainer.model_wrapped, accelerate's prepare returns it, Lightning keeps it as trainer.strategy.model"
            )
        return
    for optimizer in optimizers:
        # By name: to import torch.distributed.optim means dozens of warnings of torch.jit (torch 2.13).
        if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
            raise ValueError(
                "attach: an algorithm that averages weights needs an optimizer that steps all weights on every rank, "
                "got ZeroRedundancyOptimizer, in which a rank steps its own share and sends it to the others"
            )
    for ddp in ddps:
        if ddp is not module:
            check_around(module, ddp)
        if is_joining(ddp):
            raise ValueError(f"attach: {JOIN_REFUSAL}. The module has been handed to it: wrap the model again")


def warn_of_closures(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn of optimizers that call backward as often as the rank's own loss demands."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            warn_user(
                "torchbagua: LBFGS calls its closure as often as the loss that it returns demands, and ranks must call "
                "backward equally often: have the closure return the mean of the loss over the ranks, or training ends "
                'in an error such as "Connection reset by peer" when a rank is done before the others',
            )


class Surroundings:
    """What is seen of the loop at the end of its first step.

    Args:
        module: what is attached.
        ddps: those that were known around it, or itself.
        optimizers: of its parameters.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        ddps: Sequence[DistributedDataParallel],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._module = module
        self._known_ids = {id(ddp) for ddp in ddps}
        self._optimizers = optimizers

    def check(self, impl: AlgorithmImpl) -> None:
        """Say what of the loop an attached algorithm should have been told.

        Raises:
            RuntimeError: a DDP that nobody knew of has averaged gradients meanwhile.
        """
        if impl.grad_scaler is None and impl.needs_grad_scaler and any(map(is_stepped_by_scaler, self._optimizers)):
            warn_user(
                f"torchbagua: a GradScaler steps {type(self._optimizers[0]).__name__}, and {type(impl).__name__} does "
                "not know it: ranks would skip different steps; attach(..., grad_scaler=scaler)",
            )
        if isinstance(self._module, DistributedDataParallel):
            return
        if any(id(ddp) not in self._known_ids for ddp in ddps_around(self._module)):
            raise RuntimeError(
                f"torchbagua: {type(self._module).__name__} was wrapped in DistributedDataParallel after attach, which "
                "averages gradients beside the algorithm: wrap it before attach"
            )


def check_same_ranks(own: dist.ProcessGroup, given: dist.ProcessGroup) -> None:
    """Raise ValueError unless both groups have the same ranks."""
    places = [f"rank {group.rank()} of {group.size()}" for group in (own, given)]
    if places[0] == places[1]:
        try:
            places = [f"ranks {dist.get_process_group_ranks(group)}" for group in (own, given)]
        except KeyError:  # a group made by hand does not know its global ranks
            return
    if places[0] != places[1]:
        raise ValueError(f"attach: process_group must have the module's ranks: {places[0]}, got {places[1]}")
