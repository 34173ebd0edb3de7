"""What `attach` checks: that the module and its optimizers fit, on this rank and beside the others'."""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from torchbagua._torch import has_delayed_all_reduce, is_joining, is_stepped_in_backward, uses_python_reducer
from torchbagua._warnings import warn_user
from torchbagua.algorithms.base import Algorithm, get
from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import check_elements
from torchbagua.runtime.optimizer_steps import check_optimizer, is_sharded, parameters_of
from torchbagua.runtime.shards import sharded_parts
from torchbagua.training.ddp import JOIN_REFUSAL, check_around, check_no_foreign_hook, named_tensors
from torchbagua.training.grad_scaler import is_stepped_by_scaler
from torchbagua.training.outer_ddps import CallerWatch, search_ddps_around
from torchbagua.training.setup import TrainingSetup
from torchbagua.training.sharded.parts import check_all_reduce_hooks, check_reduce_scatters, check_sharded

# On a module with an algorithm attached, inside of its wrapper: its id, which a copy has not, and the impl's name.
_MARK = "_torchbagua_attached"


def mark_attached(module: torch.nn.Module, impl_name: str) -> ExitStack:
    """Let `check_detached` know, until what is returned is closed, that an impl is attached to `module`."""
    setattr(module, _MARK, (id(module), impl_name))
    marked = ExitStack()
    marked.callback(delattr, module, _MARK)
    return marked


def check_detached(module: torch.nn.Module) -> None:
    """Raise ValueError where an algorithm is attached to `module`, or to a part of it, or DDP has a foreign hook."""
    for name, submodule in module.named_modules():
        attached_id, attached = getattr(submodule, _MARK, (None, None))
        if attached_id == id(submodule):
            what = f"the module's {name}" if name and submodule is not getattr(module, "module", None) else "the module"
            raise ValueError(f"attach: {attached} is attached to {what} already; detach it first")
    if isinstance(module, DistributedDataParallel):
        check_no_foreign_hook(module)


def check_algorithm(caller: str, algorithm: object) -> None:
    """Raise TypeError unless it is an algorithm or a name, and KeyError if no algorithm has that name."""
    if isinstance(algorithm, str):
        get(algorithm)
    elif not isinstance(algorithm, Algorithm):
        hint = f"; construct it: {algorithm.__name__}()" if isinstance(algorithm, type) else ""
        raise TypeError(f"{caller}: algorithm must be an Algorithm or a registered name, got {algorithm!r}{hint}")


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
    # Of these `check_kind` decides. A DDP around them would average shards.
    parts = {} if isinstance(module, DistributedDataParallel) else sharded_parts(module)
    sharded_ids = {id(one) for part in parts.values() for one in (part, *part.parameters())}
    for name, submodule in inner.named_modules():
        if isinstance(submodule, DistributedDataParallel):
            raise TypeError(
                f"attach: module must be the DistributedDataParallel itself, got {type(module).__name__} with one in "
                f"it ({name}); with torch.compile, attach to it and then call ddp.compile()"
            )
        if _is_sharded(submodule) and id(submodule) not in sharded_ids:
            raise TypeError(_refusal_of_shards(name or "the module", submodule))
        if getattr(submodule, "sparse", False) and isinstance(submodule, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise ValueError(f"attach: {name or 'the module'} has sparse=True; sparse gradients are not supported")
    for name, tensor in named_tensors(inner):
        if is_lazy(tensor):
            raise ValueError(f"attach: {name} has no shape yet; run a forward of the module first")
        if tensor.is_meta:
            raise ValueError(f"attach: {name} must have values, got one on the meta device")
        if _is_sharded(tensor) and id(tensor) not in sharded_ids:
            raise TypeError(_refusal_of_shards(name, tensor))
    for name, parameter in inner.named_parameters():
        if is_stepped_in_backward(parameter):
            raise ValueError(
                f"attach: {name} has an optimizer that steps it in backward (_apply_optimizer_in_backward), before any "
                "average; have optimizers step after backward"
            )
        if parameter.requires_grad and name not in ignored_names:
            check_elements(f"attach: parameter {name}", parameter)


def _is_sharded(one: torch.nn.Module | torch.Tensor) -> bool:
    """By where its classes come from: to import them takes a second, and whoever has such a one has done so."""
    origins = ("torch.distributed.fsdp", "torch.distributed.tensor")
    return any(cls.__module__.startswith(origins) for cls in type(one).__mro__)


def _refusal_of_shards(name: str, one: torch.nn.Module | torch.Tensor) -> str:
    return (
        f"attach: {name} is sharded ({type(one).__name__}): ranks hold different parts of the weights, which is not "
        "supported"
    )


# What others may choose of the DistributedDataParallel that somebody makes for them.
DDP_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters.keys() - {
    *("module", "process_group", "device_mesh"),
    *("delay_all_reduce_named_params", "param_to_hook_all_reduce"),  # gradients that bypass communication hooks
    "mixed_precision",  # which has a communication hook of its own
}


def check_ddp_arguments(module: torch.nn.Module, arguments: Mapping[str, object]) -> None:
    """Raise TypeError or ValueError where a DistributedDataParallel of `module` cannot be made with `arguments`."""
    if not isinstance(arguments, Mapping):
        raise TypeError(f"attach: ddp_arguments must be a mapping of names to values, got {arguments!r}")
    if sharded_parts(module):
        raise ValueError("attach: ddp_arguments must be None for a module on which fully_shard was called")
    if isinstance(module, DistributedDataParallel):
        raise ValueError("attach: ddp_arguments is for a module without a DistributedDataParallel, got one that is one")
    if unknown := arguments.keys() - DDP_ARGUMENTS:
        raise ValueError(
            f"attach: ddp_arguments has {sorted(unknown)}, which attach does not hand on to DistributedDataParallel; "
            f"allowed are {sorted(DDP_ARGUMENTS)}"
        )


def check_replicate_group(module: torch.nn.Module, group: object) -> None:
    """Raise TypeError or ValueError unless it is None, or a torch group, and fully_shard was called on the module."""
    if group is None:
        return
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"attach: replicate_group must be a torch.distributed.ProcessGroup of which this rank is a member, got "
            f"{type(group).__name__}"
        )
    if not sharded_parts(module):
        raise ValueError(
            f"attach: replicate_group must be None for {type(module).__name__}, on no part of which fully_shard was "
            "called; ranks that hold all of it are those of process_group"
        )


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], module: torch.nn.Module) -> None:
    """Raise TypeError or ValueError unless `optimizers` are some, and each has parameters of `module`."""
    if not optimizers:
        raise ValueError("attach: optimizer must be a torch.optim.Optimizer or several, got an empty sequence")
    for optimizer in optimizers:
        check_optimizer("attach", optimizer)
        foreign = _foreign_parameters(optimizer, module)
        if foreign and len(foreign) == len(parameters_of(optimizer)):
            raise ValueError(_refusal_of_foreign(optimizer, foreign))


def _foreign_parameters(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> list[torch.Tensor]:
    own = {id(parameter) for parameter in module.parameters()}
    return [parameter for parameter in parameters_of(optimizer) if id(parameter) not in own]


def _refusal_of_foreign(optimizer: torch.optim.Optimizer, foreign: Sequence[torch.Tensor]) -> str:
    return (
        f"attach: {type(optimizer).__name__} has {len(foreign)} parameters that are not the module's, the first of "
        f"shape {tuple(foreign[0].shape)}; was it made before the model was moved or copied?"
    )


def check_kind(algorithm: Algorithm, setup: TrainingSetup, *, averages_weights: bool) -> None:
    """Raise TypeError or ValueError where the algorithm, which averages weights or gradients, does not fit."""
    if setup.is_sharded and not averages_weights:
        check_sharded("attach", algorithm)
        check_reduce_scatters(setup.sharded_parts)
        if setup.replicate_group is not None:
            check_all_reduce_hooks(setup.sharded_parts)
        return
    if setup.is_sharded and setup.replicate_group is None:
        raise ValueError(
            f"attach: {type(algorithm).__name__} averages weights among ranks that hold the same ones, and the module "
            "is sharded: give the ranks that hold the same shards as this one, replicate_group=..., while "
            "several meshes train copies of it; to compress gradients within one mesh, attach ByteGradAlgorithm or "
            "CompressedAllReduceAlgorithm"
        )
    if not averages_weights:
        if setup.ddp is None:
            raise TypeError(
                "attach: module must be a torch.nn.parallel.DistributedDataParallel, got "
                f"{type(setup.module).__name__}: {type(algorithm).__name__} averages gradients. Hugging Face's Trainer "
                "keeps it as trainer.model_wrapped, accelerate's prepare returns it, Lightning keeps it as "
                "trainer.strategy.model"
            )
        if uses_python_reducer(setup.ddp):
            raise ValueError(
                'attach: the module was made with torch._dynamo.config.optimize_ddp = "python_reducer", which does not '
                "call a communication hook as DDP does; wrap the model with another value of it"
            )
        return
    for optimizer in setup.optimizers:
        if foreign := _foreign_parameters(optimizer, setup.module):  # which would never be averaged
            raise ValueError(_refusal_of_foreign(optimizer, foreign))
        if is_sharded(optimizer):
            raise ValueError(
                "attach: an algorithm that averages weights needs an optimizer that steps all weights on every rank, "
                "got ZeroRedundancyOptimizer, in which a rank steps its own share and sends it to the others"
            )
    for ddp in setup.ddps:
        if ddp is not setup.module:
            check_around(setup.module, ddp)
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


def check_first_step(impl: AlgorithmImpl, setup: TrainingSetup, watch: CallerWatch | None) -> None:
    """Say, within the loop's first step, what of it an attached algorithm should have been told.

    Raises:
        RuntimeError: a DDP that nobody knew of has averaged gradients meanwhile.
    """
    if setup.grad_scaler is None and impl.needs_grad_scaler and any(map(is_stepped_by_scaler, setup.optimizers)):
        what = (
            "ranks would skip different steps"
            if impl.averages_weights
            else "what it keeps from step to step would not be in the unit of gradients"
        )
        warn_user(
            f"torchbagua: a GradScaler steps {type(setup.optimizers[0]).__name__}, and {type(impl).__name__} does not "
            f"know it: {what}; hand it over, grad_scaler=scaler",
        )
    if watch is None or setup.ddp is setup.module:
        return
    new = watch.new if watch.has_seen else [ddp for ddp in search_ddps_around(setup.module) if ddp not in setup.ddps]
    if new:
        _refuse_later_ddp(setup.module)
    watch.on_new = lambda ddp: _refuse_later_ddp(setup.module)


def _refuse_later_ddp(module: torch.nn.Module) -> None:
    raise RuntimeError(
        f"torchbagua: {type(module).__name__} was wrapped in DistributedDataParallel after attach, which averages "
        "gradients beside the algorithm: wrap it before attach"
    )


def check_caller(impl: AlgorithmImpl, setup: TrainingSetup, ddp: DistributedDataParallel) -> None:
    """Raise ValueError where an algorithm that averages weights cannot silence `ddp`, in whose forward this is called.

    `ddp` is another one than that which attach was given, around the same module.
    """
    check_around(setup.inner, ddp)
    if is_joining(ddp):
        raise ValueError(f"torchbagua: {JOIN_REFUSAL}")
    if impl.averages_gradients_within_nodes:
        raise ValueError(
            f"torchbagua: {type(impl.algorithm).__name__} with hierarchical=True has one DistributedDataParallel "
            f"average gradients within nodes, and {type(setup.inner).__name__} was called by another one; call the one "
            "that attach was given"
        )


def check_same_ranks(own: dist.ProcessGroup, given: BaguaProcessGroup, *, or_node: bool) -> None:
    """Raise ValueError unless `own`, that of a DDP, has the ranks of `given`, or those of this rank's node there."""
    ranks, what = list(range(given.size)), "the module's ranks"
    if or_node and own.size() != given.size:
        ranks, what = given.node_ranks[given.nodes[given.rank]], "the module's ranks, or have them on one node"
    places = [f"rank {own.rank()} of {own.size()}", f"rank {ranks.index(given.rank)} of {len(ranks)}"]
    if places[0] == places[1]:
        try:
            every = dist.get_process_group_ranks(given.process_group)
            places = [f"ranks {dist.get_process_group_ranks(own)}", f"ranks {[every[rank] for rank in ranks]}"]
        except KeyError:  # a group made by hand does not know its global ranks
            return
    if places[0] != places[1]:
        raise ValueError(f"attach: process_group must have {what}: {places[0]}, got {places[1]}")


def check_within_nodes(impl: AlgorithmImpl, setup: TrainingSetup) -> None:
    """Raise ValueError where DDP cannot go on averaging gradients within nodes."""
    if setup.is_sharded:
        raise ValueError(
            f"attach: {type(impl.algorithm).__name__}: hierarchical must be False for a sharded module whose "
            f"replicate_group has several ranks on a node, here {impl.process_group.node_ranks}: gradients are "
            "averaged among the ranks of a mesh, and not of a node"
        )
    subject = f"attach: {type(impl.algorithm).__name__} with hierarchical=True has DDP average gradients within nodes"
    if not setup.ddps:
        raise ValueError(
            f"{subject}, so module must be a DistributedDataParallel, got {type(setup.module).__name__}; with "
            "hierarchical=False every rank trains alone between rounds"
        )
    for ddp in setup.ddps:
        if ddp.find_unused_parameters and ddp.process_group.size() == impl.process_group.size:
            raise ValueError(
                f"{subject}, so a DistributedDataParallel of all ranks must have find_unused_parameters=False: with "
                "it all nodes would talk in every step; wrap the model over the ranks of each node, and give "
                "attach the process_group of all"
            )
