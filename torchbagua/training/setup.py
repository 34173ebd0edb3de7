"""The arguments of `attach` that describe a training loop, and the facts that follow from them."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchbagua._torch import names_to_ignore
from torchbagua.algorithms.base import Algorithm
from torchbagua.runtime.optimizer_steps import parameters_of
from torchbagua.runtime.parameters import MemoryOrder, sharded_parts
from torchbagua.training.ddp import named_tensors

if TYPE_CHECKING:
    from torchbagua.training.fsdp2.options import Sharding


@dataclass(frozen=True)
class TrainingSetup:
    """Modules, their optimizers, and the algorithm that is attached to them.

    Attributes:
        modules: the modules that `attach` was given: one, or those of a list. No module contains another.
        optimizers: the optimizers of their parameters.
        algorithm: the attached algorithm.
        grad_scaler: the loop's GradScaler.
        sharding: the further arguments of `torchbagua.fsdp.attach`; None for `torchbagua.attach`.
        has_default_group: whether `attach` was given no process group.
    """

    modules: Sequence[torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    algorithm: Algorithm
    grad_scaler: torch.amp.GradScaler | None = None
    sharding: "Sharding | None" = None
    has_default_group: bool = False

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
        from torchbagua.training.fsdp2.parts import sharding_group

        return sharding_group(self.sharded_parts)

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
        """Raise ValueError if a state has other optimizers, whose states would be loaded by their positions.

        Args:
            saved: the return value of `optimizer_parameters` when the state was saved, or None if it was not saved.
            num_saved: the number of optimizers in the state.
        """
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

        Raises:
            ValueError: the DDPs have different groups, or torch.distributed is not initialized. Also raised by
                `sharding_group`.
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
