"""The checks of attach, in one pass: whether module, optimizers and algorithm work together. Nothing is communicated.

Warnings about likely mistakes are in lint; checks of sharded modules are in `torchbagua.fsdp`.
"""

import hashlib
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from torchbagua._torch import (
    has_delayed_all_reduce,
    is_joining,
    is_stepped_in_backward,
    names_to_ignore,
    uses_python_reducer,
)
from torchbagua._warnings import UncompressedParametersWarning, warn_user
from torchbagua.algorithms.base import Algorithm, get, init_for
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.observe.events import Observer
from torchbagua.observe.tracer import check_observers
from torchbagua.runtime.bucket import check_elements
from torchbagua.runtime.optimizer_steps import check_optimizer, is_sharded, parameters_of, unwrap
from torchbagua.runtime.parameters import MemoryOrder, reshard, sharded_parts
from torchbagua.runtime.runner import Runner
from torchbagua.training.ddp import check_no_foreign_hook, named_tensors


class Sharding(Protocol):
    """FSDP2's part of an attachment, which `torchbagua.fsdp` implements for a module with sharded parts."""

    @property
    def replicate_group(self) -> dist.ProcessGroup | None: ...

    @property
    def quantize_weights(self) -> object: ...

    def check(self, setup: "TrainingSetup") -> None: ...

    def shard_group(self, setup: "TrainingSetup") -> dist.ProcessGroup: ...

    def uncompressed_weights(self, setup: "TrainingSetup") -> Iterator[str]: ...

    def install_gradients(self, setup: "TrainingSetup", runner: Runner, undo: ExitStack) -> None: ...

    def bound_waits(self, setup: "TrainingSetup", runner: Runner, undo: ExitStack) -> None: ...


@dataclass(frozen=True)
class TrainingSetup:
    """Modules, their optimizers, and the algorithm that is attached to them.

    Attributes:
        modules: the modules that `attach` was given: one, or those of a list. No module contains another.
        optimizers: the optimizers of their parameters.
        algorithm: the attached algorithm.
        grad_scaler: the loop's GradScaler.
        sharding: FSDP2's part of the attachment; None if fully_shard was called on no part of the module.
        has_default_group: whether `attach` was given no process group.
        init_sync: whether a weight algorithm makes weights, buffers and optimizers equal that no DDP has made equal.
    """

    modules: Sequence[torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    algorithm: Algorithm
    grad_scaler: torch.amp.GradScaler | None = None
    sharding: Sharding | None = None
    has_default_group: bool = False
    init_sync: bool = True

    @cached_property
    def ddps(self) -> Sequence[DistributedDataParallel]:
        """Those of `modules` that are DDPs. Others may be in a DDP that is unknown until it calls them."""
        return [module for module in self.modules if isinstance(module, DistributedDataParallel)]

    @cached_property
    def sharded_parts(self) -> Mapping[str, Any]:
        """The parts of the module, which may include itself, on which fully_shard was called, by name.

        Empty for a list, in which no module may be sharded.
        """
        return sharded_parts(self.modules[0]) if len(self.modules) == 1 else {}

    @property
    def is_sharded(self) -> bool:
        """Whether fully_shard was called on the module or a part of it."""
        return bool(self.sharded_parts)

    @cached_property
    def sharding_group(self) -> dist.ProcessGroup:
        """The ranks over which a sharded module's gradients are reduce-scattered. ValueError for several meshes."""
        assert self.sharding is not None
        return self.sharding.shard_group(self)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shards as this one, if `attach` was given them."""
        return None if self.sharding is None else self.sharding.replicate_group

    @cached_property
    def inners(self) -> Sequence[torch.nn.Module]:
        """The modules, without their DDPs."""
        return [module.module if isinstance(module, DistributedDataParallel) else module for module in self.modules]

    @cached_property
    def inner(self) -> torch.nn.Module:
        """The module, without its DDP. For a list, a container of `inners`, so that names begin with the position."""
        return self.inners[0] if len(self.inners) == 1 else torch.nn.ModuleList(self.inners)

    @cached_property
    def called(self) -> Sequence[torch.nn.Module]:
        """The modules that the loop calls: `modules`, or the modules in a container that has no forward."""
        return [called for module in self.modules for called in called_in(module)]

    @property
    def label(self) -> str:
        """The classes of the modules, for messages."""
        return ", ".join(type(module).__name__ for module in self.modules)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of all modules."""
        return chain.from_iterable(module.parameters() for module in self.modules)

    def ignored_names(self) -> frozenset[str]:
        """Return the names in `inner` of the parameters and buffers that a DDP ignores.

        They also include the names in the module's own ignore list, which a DDP created later would read.
        """
        if not any(ddp.parameters_to_ignore for ddp in self.ddps) and not any(map(names_to_ignore, self.inners)):
            return frozenset()
        ignored_ids = {
            id(tensor)
            for ddp in self.ddps
            for name, tensor in named_tensors(ddp.module)
            if name in ddp.parameters_to_ignore
        }
        if len(self.inners) == 1:
            listed = set(names_to_ignore(self.inner))
        else:
            listed = {f"{at}.{name}" for at, inner in enumerate(self.inners) for name in names_to_ignore(inner)}
        return frozenset(
            name for name, tensor in named_tensors(self.inner) if id(tensor) in ignored_ids or name in listed
        )

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of `inner` that are trained and that no DDP ignores, by name."""
        ignored = self.ignored_names()
        return {
            name: parameter
            for name, parameter in self.inner.named_parameters()
            if parameter.requires_grad and name not in ignored
        }

    @cached_property
    def optimizers_of_copies(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers that may have copies of the modules' parameters: float32 masters, one for each or flattened.

        None of their parameters is a module's. Together they have as many elements as the trained parameters that no
        other optimizer has. An algorithm that knows its optimizer needs the modules' parameters in it, and sharded
        modules have none of the hooks that would report a mistake later.
        """
        if self.is_sharded:
            return []
        own = {id(parameter) for parameter in self.parameters()}
        known = self.algorithm.own_optimizers()
        stepped = {id(optimizer): parameters_of(optimizer) for optimizer in self.optimizers if optimizer not in known}
        copies = {key: each for key, each in stepped.items() if each and own.isdisjoint(map(id, each))}
        if not copies:
            return []
        others = {id(each) for key, every in stepped.items() if key not in copies for each in every}
        num_copied = sum(parameter.numel() for every in copies.values() for parameter in every)
        num_left = sum(parameter.numel() for parameter in self.trained().values() if id(parameter) not in others)
        return [each for each in self.optimizers if id(each) in copies] if num_copied == num_left else []

    def optimizer_parameters(self) -> list[list[Any]]:
        """Return the class of each optimizer and the names of its parameters in `inner`, in JSON's types."""
        names = {id(parameter): name for name, parameter in self.inner.named_parameters()}
        return [
            [type(optimizer).__name__, [names[id(own)] for own in parameters_of(optimizer) if id(own) in names]]
            for optimizer in self.optimizers
        ]

    def check_saved_optimizers(self, saved: Sequence[Any] | None, num_saved: int) -> None:
        """Raise ValueError if a state has other optimizers, whose states would be loaded by their positions."""
        own = self.optimizer_parameters()
        if len(own) == num_saved and saved in (None, own):
            return
        is_listed = saved and len(saved) == num_saved
        had = _list_optimizers(saved or (), own) if is_listed else f"{num_saved} optimizer{'s' * (num_saved != 1)}"
        raise ValueError(
            f"Attachment.load_rank_state_dict: the state has {had}, but attach was given "
            f"{_list_optimizers(own, saved or ())}. Attach the optimizers of the saved run in the same order, with "
            "their parameters in the same order. To continue with other optimizers, load only the module's state, and "
            'then state["attachment"] with load_state_dict'
        )

    def check_gradients(self) -> None:
        """Raise ValueError if a parameter has a sparse gradient, which a function created, so attach did not see it."""
        for name, parameter in self.trained().items():
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise ValueError(
                    f"torchbagua: parameter {name} has a sparse gradient, for instance of "
                    "torch.nn.functional.embedding(sparse=True); sparse gradients are not supported: leave out "
                    "sparse=True"
                )

    def process_group(self) -> dist.ProcessGroup:
        """Return the group of the module if it is sharded, else of the DDPs, else the world.

        The group of a sharded module is the one over which its gradients are reduce-scattered. For a weight algorithm
        it is the group of the ranks that hold the same shards.
        """
        if self.is_sharded:
            return (
                self.replicate_group or self.sharding_group if self.algorithm.averages_weights else self.sharding_group
            )
        if self.ddps:
            if any(ddp.process_group is not self.ddps[0].process_group for ddp in self.ddps):
                raise ValueError(
                    "attach: process_group must be given if several DistributedDataParallel of "
                    f"{self.label} have different groups"
                )
            return self.ddps[0].process_group
        if not dist.is_initialized():
            raise ValueError(
                "attach: without DistributedDataParallel, attach needs a process group; call "
                "torch.distributed.init_process_group first, or pass process_group"
            )
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def groups_opened_later(self) -> list[dist.ProcessGroup]:
        """Return the groups over which an attachment compares settings after `process_group`."""
        if self.replicate_group is None:
            return []
        return [self.sharding_group if self.algorithm.averages_weights else self.replicate_group]

    def rank_invariants(self) -> dict[str, Any]:
        """Return the settings that ranks must have in common, in the order in which differences are reported."""
        own_ids = {id(parameter) for parameter in self.parameters()}
        sizes = []
        for optimizer in self.optimizers:
            groups = [group["params"] for group in optimizer.param_groups]
            own = [[parameter for parameter in group if id(parameter) in own_ids] for group in groups]
            # Parameters of other modules may belong to one rank alone. An optimizer of copies has no others.
            sizes.append((type(optimizer).__name__, list(map(len, own if any(own) else groups))))
        return {
            "the number of parameters": len(list(self.parameters())),
            "the shapes, dtypes and requires_grad of parameters, as a digest": _digest(self.parameters()),
            "the memory layout of parameters": _layout(self.inner),
            "the shapes and dtypes of buffers, as a digest": _digest(self.inner.buffers()),
            "the optimizers, with the number of parameters in each group": repr(sizes),
            "the number of modules that are a DistributedDataParallel": len(self.ddps),
            "attach's argument init_sync": self.init_sync,
            "whether attach was given a grad_scaler": self.grad_scaler is not None,
            "whether attach was given a replicate_group": self.replicate_group is not None,
            "attach's argument quantize_weights": repr(self.sharding and self.sharding.quantize_weights),
            "the shard that it holds": self._shard(),
        }

    def _shard(self) -> str | None:
        """Return which shard this rank holds, if weights are averaged over the ranks with the same shard."""
        if self.replicate_group is None or not self.algorithm.averages_weights:
            return None
        return f"{self.sharding_group.rank()} of {self.sharding_group.size()}"

    def run_settings(self) -> dict[str, str]:
        """Return the settings that a trace records: the model and its optimizers with their arguments."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        num_elements = sum(parameter.numel() for parameter in trained)
        settings = {
            "model": f"{', '.join(type(inner).__name__ for inner in self.inners)}, {num_elements:,} trained elements",
            "dtypes": ", ".join(sorted({str(parameter.dtype) for parameter in trained})),
        }
        if caps := {f"{ddp.bucket_bytes_cap / 2**20:g}" for ddp in self.ddps}:
            settings["DDP's bucket_cap_mb"] = ", ".join(sorted(caps))
        for index, optimizer in enumerate(self.optimizers):
            defaults = ", ".join(f"{key}={value}" for key, value in optimizer.defaults.items())
            settings["optimizer" if index == 0 else f"optimizer {index}"] = f"{type(optimizer).__name__}({defaults})"
        return settings


def _list_optimizers(optimizers: Sequence[Any], others: Sequence[Any]) -> str:
    """Return the classes, each with its first parameter that differs from `others`, or else with its first."""
    texts = []
    for index, (name, parameters) in enumerate(optimizers):
        other = others[index][1] if index < len(others) else []
        differing = (parameter for at, parameter in enumerate(parameters) if other[at : at + 1] != [parameter])
        first = next(differing, next(iter(parameters), None))
        texts.append(f"{name} (no parameters)" if first is None else f"{name} ({first} and {len(parameters) - 1} more)")
    return ", ".join(texts)


def called_in(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return `module`, or the modules that a loop calls in its place if it is a container without a forward."""
    if isinstance(module, torch.jit.ScriptModule) or type(module).forward is not torch.nn.Module.forward:
        return [module]
    if "forward" in vars(module):
        return [module]
    children = [child for child in module.children() if not isinstance(child, torch.jit.ScriptModule)]  # has no hooks
    return [called for child in children for called in called_in(child)]


def _layout(module: torch.nn.Module) -> str:
    """Return which parameters have a memory order other than that of their dimensions, for instance channels_last."""
    orders = {name: MemoryOrder(parameter) for name, parameter in module.named_parameters() if parameter.dim() > 1}
    reordered = {name: repr(order) for name, order in orders.items() if not order.is_natural}
    if not reordered:
        return "all contiguous"
    first = next(iter(reordered))
    digest = hashlib.sha256(repr(reordered).encode()).hexdigest()[:8]
    return f"{len(reordered)} of another order, the first {first} with strides {orders[first].strides}, digest {digest}"


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    kinds = [(list(tensor.shape), str(tensor.dtype), tensor.requires_grad) for tensor in tensors]
    return hashlib.sha256(repr(kinds).encode()).hexdigest()[:16]


JOIN_REFUSAL = (
    "an algorithm that averages weights does not support torch.distributed.algorithms.Join, in which ranks that have "
    "run out of data keep sending zeros as gradients; AsyncModelAverageAlgorithm lets ranks take different numbers of "
    "steps without it"
)

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
    sharding: Sharding | None = None,
    *,
    init_sync: bool = True,
) -> TrainingSetup:
    """Check all arguments of attach and return them as a TrainingSetup.

    Nothing is communicated, so a check fails on this rank alone.
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
    if not isinstance(init_sync, bool):
        raise TypeError(f"attach: init_sync must be True or False, got {init_sync!r}")
    for each in modules:
        check_detached(each)
    if sharding is None and any(map(sharded_parts, modules)):
        # torchbagua.fsdp is above this package, and no training without sharded parts imports it.
        sharding = importlib.import_module("torchbagua.fsdp.attach_sharded").Sharding()
    setup = TrainingSetup(modules, optimizers, algorithm, grad_scaler, sharding, process_group is None, init_sync)
    check_foreign_parameters(setup)
    if sharding is not None:
        sharding.check(setup)
        if not setup.is_sharded:  # torchbagua.fsdp.attach was given none of its own arguments
            setup = replace(setup, sharding=None)
    if algorithm.averages_weights:
        check_weight_averaging(setup)
    elif not setup.is_sharded:
        check_gradient_averaging(setup)
    if process_group is not None:
        check_same_ranks(setup, process_group)
    return setup


def warn_uncompressed(setup: TrainingSetup) -> str | None:
    """Warn of tensors that are sent in full precision; return the warning if a filter makes it an error here."""
    try:
        setup.algorithm.check_parameters(setup.trained())
        if setup.sharding is not None:
            for message in setup.sharding.uncompressed_weights(setup):
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
    # `Sharding.check` checks sharded parts. Inside a DDP they are rejected here, since the DDP would average shards.
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
    for module in setup.modules:
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
    if len(setup.ddps) > 1:
        check_averaged_once(setup.ddps)


def check_averaged_once(ddps: Sequence[DistributedDataParallel]) -> None:
    """Raise ValueError if several DDPs average the gradient of one parameter."""
    owners: dict[int, int] = {}  # the position in the list of the DDP that averages a parameter
    for index, ddp in enumerate(ddps):
        for name, parameter in ddp.module.named_parameters():
            if parameter.requires_grad and name not in ddp.parameters_to_ignore:
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


def mark_attached(module: torch.nn.Module, algorithm_name: str, undo: ExitStack) -> None:
    """Mark `module` as attached, for `check_detached`, until `undo` is closed."""
    setattr(module, _MARK, (id(module), algorithm_name))
    undo.callback(delattr, module, _MARK)
