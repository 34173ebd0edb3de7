"""The checks of attach, in one pass: whether module, optimizers and algorithm work together. Nothing is communicated.

Warnings about likely mistakes are in lint; checks of sharded modules are in fsdp2/checks.py.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from torchbagua._torch import has_delayed_all_reduce, is_joining, is_stepped_in_backward, uses_python_reducer
from torchbagua._warnings import UncompressedParametersWarning, warn_user
from torchbagua.algorithms.base import Algorithm, get, init_for
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.observe.events import Observer
from torchbagua.observe.tracer import check_observers
from torchbagua.runtime.bucket import check_elements
from torchbagua.runtime.optimizer_steps import check_optimizer, is_sharded, parameters_of, unwrap
from torchbagua.runtime.parameters import reshard, sharded_parts
from torchbagua.training.ddp import JOIN_REFUSAL, check_no_foreign_hook, named_tensors, parameters_in
from torchbagua.training.lint import lint_arguments
from torchbagua.training.setup import TrainingSetup

if TYPE_CHECKING:
    from torchbagua.training.fsdp2.options import Sharding

# Attribute of an attached module, inside of its wrapper: the module's id, which does not match in a copy, and the
# algorithm's name.
_MARK = "_torchbagua_attached"


def check_arguments(
    module: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str,
    process_group: dist.ProcessGroup | BaguaProcessGroup | None,
    grad_scaler: torch.amp.GradScaler | None,
    observers: Sequence[Observer],
    timeout: timedelta | None,
    sharding: "Sharding | None" = None,
) -> TrainingSetup:
    """Check all arguments of attach and return them as a TrainingSetup.

    Nothing is communicated, so a check fails on this rank alone.

    Raises:
        TypeError, ValueError, KeyError: see `torchbagua.attach`.
    """
    modules = _list_modules(module)
    for each in modules:
        reshard(sharded_parts(each).values())  # an evaluation may have left the full parameters in the module
    given = optimizer if isinstance(optimizer, Sequence) and not isinstance(optimizer, str) else [optimizer]
    optimizers = [unwrap(each) for each in given]
    for each in modules:
        check_module(each)
    check_list(modules)
    check_optimizers(optimizers)
    check_algorithm("attach", algorithm)
    algorithm = init_for(algorithm, optimizers)
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup | BaguaProcessGroup):
        is_outside = process_group is dist.GroupMember.NON_GROUP_MEMBER
        raise TypeError(
            "attach: process_group must be a torch.distributed.ProcessGroup or a BaguaProcessGroup, got "
            f"{'a group of which this rank is not a member' if is_outside else type(process_group).__name__}"
        )
    if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
        raise TypeError(f"attach: grad_scaler must be a torch.amp.GradScaler, got {type(grad_scaler).__name__}")
    check_observers("attach", observers)
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"attach: timeout must be a datetime.timedelta, got {timeout!r}")
    for each in modules:
        check_detached(each)
    setup = TrainingSetup(modules, optimizers, algorithm, grad_scaler, sharding, process_group is None)
    check_foreign_parameters(setup)
    if setup.is_sharded or sharding is not None:
        from torchbagua.training.fsdp2.checks import check_sharding

        check_sharding(setup.inner, setup.sharded_parts, algorithm, sharding)
    if algorithm.averages_weights:
        check_weight_averaging(setup)
    elif not setup.is_sharded:
        check_gradient_averaging(setup)
    if process_group is not None:
        check_same_ranks(setup, process_group)
    lint_arguments(setup)
    return setup


def warn_uncompressed(setup: TrainingSetup) -> str | None:
    """Warn of tensors that are sent in full precision; return the warning if a filter makes it an error here."""
    try:
        setup.algorithm.check_parameters(setup.trained())
        if setup.sharding is not None:
            from torchbagua.training.fsdp2.checks import unquantized_weights

            for message in unquantized_weights(setup.inner, setup.sharded_parts, setup.sharding):
                warn_user(message, UncompressedParametersWarning)
    except UncompressedParametersWarning as warning:
        return str(warning)
    return None


def _list_modules(module: object) -> list[torch.nn.Module]:
    """Return the module, or the modules of a list, that attach was given."""
    given = list(module) if isinstance(module, Sequence) and not isinstance(module, str) else [module]
    if not given:
        raise ValueError("attach: module must be at least one torch.nn.Module, got an empty sequence")
    modules = [each for each in given if isinstance(each, torch.nn.Module)]
    if len(modules) < len(given):
        wrong = next(each for each in given if not isinstance(each, torch.nn.Module))
        raise TypeError(f"attach: module must be a torch.nn.Module, or a list of them, got {type(wrong).__name__}")
    return modules


def check_list(modules: Sequence[torch.nn.Module]) -> None:
    """Raise TypeError or ValueError if modules cannot be attached together."""
    if len(modules) == 1:
        return
    for index, module in enumerate(modules):
        if sharded_parts(module):
            raise TypeError(
                f"attach: module {index} of the list, {type(module).__name__}, is sharded by fully_shard; attach to it "
                "alone, with its own optimizer"
            )
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        for other, outer in enumerate(modules):
            if other != index and any(part is inner for part in outer.modules()):
                raise ValueError(
                    f"attach: module {index} of the list, {type(module).__name__}, is also in module {other}, "
                    f"{type(outer).__name__}; leave out one of them"
                )


def check_module(module: torch.nn.Module) -> None:
    """Raise TypeError or ValueError if no algorithm can be attached to `module`."""
    inner, ignored_names = module, set[str]()
    if isinstance(module, DistributedDataParallel):
        inner, ignored_names = module.module, module.parameters_to_ignore
        if has_delayed_all_reduce(module):
            raise ValueError(
                "attach: the module was created with delay_all_reduce_named_params, whose gradients bypass "
                "communication hooks; wrap the model without it"
            )
    # `check_sharding` checks sharded parts. Inside a DDP they are rejected here, since the DDP would average shards.
    parts = {} if isinstance(module, DistributedDataParallel) else sharded_parts(module)
    sharded_ids = {id(item) for part in parts.values() for item in (part, *part.parameters())}
    for name, submodule in inner.named_modules():
        if isinstance(submodule, DistributedDataParallel):
            raise TypeError(
                f"attach: module must be the DistributedDataParallel itself, got {type(module).__name__}, which wraps "
                f"a DistributedDataParallel ({name}); pass the DistributedDataParallel, or a list of modules if there "
                "are several, and with torch.compile, call ddp.compile() after attach"
            )
        if _is_sharded(submodule) and id(submodule) not in sharded_ids:
            raise TypeError(_explain_sharded(name or "the module", submodule))
        if getattr(submodule, "sparse", False) and isinstance(submodule, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise ValueError(
                f"attach: {name or 'the module'} of {type(inner).__name__} has sparse=True; create it with "
                "sparse=False, because sparse gradients are not supported"
            )
    for name, tensor in named_tensors(inner):
        if is_lazy(tensor):
            raise ValueError(f"attach: {name} has no shape yet; run a forward of the module first")
        if tensor.is_meta:
            raise ValueError(f"attach: {name} must have values, got a tensor on the meta device")
        if _is_sharded(tensor) and id(tensor) not in sharded_ids:
            raise TypeError(_explain_sharded(name, tensor))
    for name, parameter in inner.named_parameters():
        if is_stepped_in_backward(parameter):
            raise ValueError(
                f"attach: {name} has an optimizer that steps it in backward (_apply_optimizer_in_backward), before any "
                "average; have optimizers step after backward"
            )
        if parameter.requires_grad and name not in ignored_names:
            check_elements(f"attach: parameter {name}", parameter)


def _is_sharded(item: torch.nn.Module | torch.Tensor) -> bool:
    """Return whether a class of `item` is from torch's sharding modules.

    It compares module names, since importing these classes takes a second.
    """
    origins = ("torch.distributed.fsdp", "torch.distributed.tensor")
    return any(cls.__module__.startswith(origins) for cls in type(item).__mro__)


def _explain_sharded(name: str, item: torch.nn.Module | torch.Tensor) -> str:
    return (
        f"attach: {name} is sharded ({type(item).__name__}): ranks hold different parts of the weights, which is not "
        "supported"
    )


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise TypeError or ValueError unless there is an optimizer, and the steps of each one can be watched."""
    if not optimizers:
        raise ValueError("attach: optimizer must be at least one torch.optim.Optimizer, got an empty sequence")
    for optimizer in optimizers:
        check_optimizer("attach", optimizer)


def check_foreign_parameters(setup: TrainingSetup) -> None:
    """Raise ValueError if an optimizer has parameters of other modules that the algorithm cannot leave alone.

    A weight algorithm would never average them. A gradient algorithm needs one of the module's, or master copies of
    the module's. Whether an optimizer really has master copies shows in its first steps: see `MasterCheck`.
    """
    own = {id(parameter) for parameter in setup.parameters()}
    for optimizer in setup.optimizers:
        parameters = parameters_of(optimizer)
        foreign = [parameter for parameter in parameters if id(parameter) not in own]
        if not foreign:
            continue
        is_allowed = len(foreign) < len(parameters) or optimizer in setup.optimizers_of_copies
        if setup.algorithm.averages_weights or not is_allowed:
            raise ValueError(_explain_foreign(setup, optimizer, foreign))


def _explain_foreign(setup: TrainingSetup, optimizer: torch.optim.Optimizer, foreign: Sequence[torch.Tensor]) -> str:
    name = type(optimizer).__name__
    found = (
        f"attach: {name} has {len(foreign)} parameters that are not the module's, the first of shape "
        f"{tuple(foreign[0].shape)}. If they are another module's, pass both modules: attach([module, other], ...)"
    )
    if optimizer in setup.optimizers_of_copies:
        found += (
            ". If they are master copies of the module's weights, average these: attach(torch.nn.ParameterList(masters)"
            ", ...), and call the module without DistributedDataParallel"
        )
    return (
        f"{found}. If they belong to this rank alone, as parts of a model that is divided among the ranks, step them "
        f"with an optimizer of their own, which you do not attach. If {name} was created before the model was moved or "
        "copied, create it again"
    )


def check_gradient_averaging(setup: TrainingSetup) -> None:
    """Raise TypeError or ValueError if gradients cannot be averaged by a communication hook of the module's DDP."""
    owners: dict[int, int] = {}  # the position in the list of the DDP that averages a parameter
    for index, module in enumerate(setup.modules):
        if not isinstance(module, DistributedDataParallel):
            raise TypeError(
                "attach: module must be a torch.nn.parallel.DistributedDataParallel, got "
                f"{type(module).__name__}: {type(setup.algorithm).__name__} averages gradients, so wrap the "
                "module in DistributedDataParallel. Hugging Face's Trainer has it as trainer.model_wrapped, "
                "accelerate's prepare returns it, Lightning has it as trainer.strategy.model"
            )
        if uses_python_reducer(module):
            raise ValueError(
                'attach: the module was created with torch._dynamo.config.optimize_ddp = "python_reducer", which does '
                "not call a communication hook as DDP does; wrap the model with another value of it"
            )
        for name, parameter in module.module.named_parameters():
            if parameter.requires_grad and name not in module.parameters_to_ignore:
                owner = owners.setdefault(id(parameter), index)
                if owner != index:
                    raise ValueError(
                        f"attach: modules {owner} and {index} of the list both average the gradient of {name}; wrap "
                        "one module that contains both in DistributedDataParallel"
                    )


def check_weight_averaging(setup: TrainingSetup) -> None:
    """Raise ValueError if weights cannot be averaged after the steps of the optimizers."""
    for optimizer in setup.optimizers:
        if is_sharded(optimizer):
            raise ValueError(
                "attach: an algorithm that averages weights needs an optimizer that steps all weights on every rank, "
                "got ZeroRedundancyOptimizer, in which each rank steps its own share and sends it to the others"
            )
    if any(map(is_joining, setup.ddps)):
        raise ValueError(f"attach: {JOIN_REFUSAL}. The module was passed to Join: wrap the model again")


def check_outer_ddp(
    setup: TrainingSetup, ddp: DistributedDataParallel, group: dist.ProcessGroup, *, within_nodes: bool, is_late: bool
) -> None:
    """Raise an error unless a weight algorithm over `group` can disable `ddp`, which calls a module, or a part of it.

    `attach` was not given `ddp`. `is_late`: the first step has ended, and other ranks may have different weights.
    """
    name = type(setup.inner).__name__
    parameters = parameters_in(ddp)
    own = {id(parameter) for parameter in setup.parameters()}
    foreign = [each for each, parameter in parameters.items() if parameter.requires_grad and id(parameter) not in own]
    if foreign:
        raise ValueError(
            f"attach: module must be the DistributedDataParallel around {name}, which averages gradients of "
            f"{len(foreign)} other parameters too, the first {foreign[0]}; or wrap {name} alone"
        )
    if is_joining(ddp):
        raise ValueError(f"torchbagua: {JOIN_REFUSAL}")
    if within_nodes:
        raise ValueError(
            f"torchbagua: {type(setup.algorithm).__name__} with hierarchical=True has one DistributedDataParallel "
            f"average gradients within nodes, but {name} was called by another "
            "DistributedDataParallel; call the one that attach was given"
        )
    plain = [module for module in setup.modules if module not in setup.ddps]
    in_plain = {id(tensor) for module in plain for _, tensor in named_tensors(module)}
    if in_plain.isdisjoint(map(id, parameters.values())):
        return
    if is_late:
        raise RuntimeError(
            f"torchbagua: {type(ddp.module).__name__} was wrapped in DistributedDataParallel after attach, or is "
            "called by it only after the first step, so DistributedDataParallel averages gradients alongside the "
            "algorithm: wrap it before attach, and pass attach the DistributedDataParallel, or a list of all modules"
        )
    ignored = {id(tensor): each for each, tensor in named_tensors(ddp.module) if each in ddp.parameters_to_ignore}
    known = setup.ignored_names()
    for own_name, tensor in named_tensors(setup.inner):
        if id(tensor) in ignored and id(tensor) in in_plain and own_name not in known:
            raise ValueError(
                f"torchbagua: the DistributedDataParallel around {name} ignores {ignored[id(tensor)]}, which attach "
                "did not know and has made equal on all ranks: pass attach the DistributedDataParallel"
            )
    if setup.has_default_group:
        expected = f"the ranks of the DistributedDataParallel around {name}"
        require_same_ranks(ddp.process_group, group, range(group.size()), expected)


def check_same_ranks(setup: TrainingSetup, given: dist.ProcessGroup | BaguaProcessGroup) -> None:
    """Raise ValueError unless `given` has the ranks of the module's group.

    If the algorithm averages gradients within nodes, the DDP's group may have fewer ranks: see `check_within_nodes`.
    """
    group = given.process_group if isinstance(given, BaguaProcessGroup) else given
    within_nodes = setup.algorithm.averages_gradients_within_nodes
    owners = [setup.process_group()] if setup.is_sharded else [ddp.process_group for ddp in setup.ddps]
    for owner in owners:
        if not within_nodes or owner.size() == group.size():
            require_same_ranks(owner, group, list(range(group.size())), "the module's ranks")


def require_same_ranks(own: dist.ProcessGroup, given: dist.ProcessGroup, members: Sequence[int], expected: str) -> None:
    """Raise ValueError unless the ranks of `own` are the ranks `members` of `given`."""
    places = [f"rank {own.rank()} of {own.size()}", f"rank {members.index(given.rank())} of {len(members)}"]
    if places[0] == places[1]:
        try:
            of_given = dist.get_process_group_ranks(given)
            places = [
                f"ranks {dist.get_process_group_ranks(own)}",
                f"ranks {[of_given[member] for member in members]}",
            ]
        except KeyError:  # a group that was built by hand does not know its global ranks
            return
    if places[0] != places[1]:
        raise ValueError(f"attach: process_group must have {expected}: {places[0]}, got {places[1]}")


def check_algorithm(caller: str, algorithm: object) -> None:
    """Raise TypeError unless `algorithm` is an Algorithm or a name, and KeyError if no algorithm has that name."""
    if isinstance(algorithm, str):
        get(algorithm)
    elif not isinstance(algorithm, Algorithm):
        hint = f"construct it: {algorithm.__name__}()" if isinstance(algorithm, type) else 'for example "bytegrad"'
        raise TypeError(f"{caller}: algorithm must be an Algorithm or a registered name, got {algorithm!r}; {hint}")


def check_detached(module: torch.nn.Module) -> None:
    """Raise ValueError if an algorithm is attached to `module` or to a part of it, or DDP has a foreign hook."""
    for name, submodule in module.named_modules():
        attached_id, attached = getattr(submodule, _MARK, (None, None))
        if attached_id == id(submodule):
            part = f"the module's {name}" if name and submodule is not getattr(module, "module", None) else "the module"
            raise ValueError(f"attach: {attached} is attached to {part} already; detach it first")
    if isinstance(module, DistributedDataParallel):
        check_no_foreign_hook(module)


def mark_attached(module: torch.nn.Module, algorithm_name: str) -> ExitStack:
    """Mark `module` as attached, for `check_detached`, until the returned stack is closed."""
    setattr(module, _MARK, (id(module), algorithm_name))
    marked = ExitStack()
    marked.callback(delattr, module, _MARK)
    return marked


def check_within_nodes(group: BaguaProcessGroup, algorithm: str, setup: TrainingSetup) -> None:
    """Raise ValueError unless DDP can keep averaging gradients within the nodes of the runner's group."""
    if setup.is_sharded:
        raise ValueError(
            f"attach: {algorithm}: hierarchical must be False for a sharded module whose "
            f"replicate_group has several ranks on a node, here {group.node_ranks}: gradients are "
            "averaged over the ranks of a mesh, and not of a node"
        )
    subject = f"attach: {algorithm} with hierarchical=True has DDP average gradients within nodes"
    if not setup.ddps:
        raise ValueError(
            f"{subject}, so module must be a DistributedDataParallel, got {setup.label}; with "
            "hierarchical=False every rank trains alone between rounds"
        )
    for ddp in setup.ddps:
        if ddp.process_group.size() != group.size:
            node = group.node_ranks[group.nodes[group.rank]]
            expected = "the module's ranks, or have them on one node"
            require_same_ranks(ddp.process_group, group.process_group, node, expected)
        if ddp.find_unused_parameters and ddp.process_group.size() == group.size:
            raise ValueError(
                f"{subject}, so a DistributedDataParallel over all ranks must have find_unused_parameters=False: with "
                "True, all nodes would communicate in every step. Wrap the model over the ranks of each node, and give "
                "attach the process_group of all ranks"
            )
