"""attach: put an algorithm to work on a module and its optimizer, and take it off again."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchbagua.algorithms.base import Algorithm, AlgorithmImpl
from torchbagua.bucket import check_elements
from torchbagua.collectives import BaguaProcessGroup, broadcast_state, broadcast_tensors
from torchbagua.ddp import check_no_foreign_hook, silenced, trampoline_of
from torchbagua.events import Observer
from torchbagua.step_hooks import agree_on_overflow, install_step_hooks

# On a module with an algorithm attached: its id, which a copy of it has not, and the name of the impl.
_MARK = "_torchbagua_attached"


def attach(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str,
    *,
    process_group: BaguaProcessGroup | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    observers: Sequence[Observer] = (),
    timeout: timedelta | None = None,
) -> "Attachment":
    """Let `algorithm` do what `module` communicates, until the returned attachment is detached. Collective.

    The training loop stays as it is. Works as a context manager; leaving it detaches. With the decentralized algorithms
    all ranks make the same number of backward passes through the module for a step.

    Args:
        module: wrapped in DistributedDataParallel, with no communication hook of its own. An algorithm that averages
            weights takes any module, and first gives all ranks rank 0's parameters, buffers and optimizer state, as DDP
            did for weights and buffers when it wrapped the module.
        optimizer: the optimizer of its parameters, or several; the steps of the first are the clock.
        algorithm: an Algorithm, or a registered name.
        process_group: the ranks and their nodes, where nodes are given explicitly; default: the module's group, or the
            world where there is no DDP, with nodes told by host names.
        grad_scaler: the loop's GradScaler, where an algorithm averages weights: all ranks then skip a step together.
        observers: hear of every exchange.
        timeout: bound on every wait of the algorithm for another rank; default: that of the group, which bounds what
            DDP itself sends, buffers for instance.

    Raises:
        TypeError, ValueError: an argument does not fit; ranks disagree in algorithm, arguments, the version of the
            package or the number of parameters.
        KeyError: no algorithm has that name.
        TimeoutError: a rank did not call it in time.
        CommunicationError: a private group could not be opened.
        RuntimeError: the native library is there and does not load.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"attach: module must be a torch.nn.Module, got {type(module).__name__}")
    if isinstance(algorithm, str):
        algorithm = Algorithm.init(algorithm)
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"attach: algorithm must be an Algorithm or a registered name, got {algorithm!r}")
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    _check_module(module)
    _check_optimizers(optimizers, module)
    if process_group is not None and not isinstance(process_group, BaguaProcessGroup):
        raise TypeError(f"attach: process_group must be a BaguaProcessGroup, got {type(process_group).__name__}")
    if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
        raise TypeError(f"attach: grad_scaler must be a torch.amp.GradScaler, got {type(grad_scaler).__name__}")
    if process_group is not None and isinstance(module, DistributedDataParallel):
        _check_same_ranks(module.process_group, process_group.process_group)
    _check_detached(module)
    impl = algorithm.reify(
        process_group or _group_of(module),
        observers=observers,
        timeout=timeout,
        facts=_facts_of(module, with_scaler=grad_scaler is not None),
    )
    return Attachment(module, optimizers, algorithm, impl, grad_scaler)


class Attachment:
    """An algorithm at work on a module; made by `attach`.

    Attributes:
        algorithm: the description.
        impl: the running algorithm.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        impl: AlgorithmImpl,
        grad_scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.algorithm = algorithm
        self.impl = impl
        self._optimizers = optimizers
        self._is_detached = False
        with ExitStack() as undo:  # closed here only where one of these steps raises
            undo.callback(impl.close)
            undo.callback(delattr, module, _MARK)
            setattr(module, _MARK, (id(module), type(impl).__name__))
            ddp = module if isinstance(module, DistributedDataParallel) else None
            inner = module if ddp is None else ddp.module
            ignored_names = frozenset(() if ddp is None else ddp.parameters_to_ignore)
            if ddp is None:
                if not impl.owns_buckets:
                    raise TypeError(
                        f"attach: module must be a torch.nn.parallel.DistributedDataParallel, got "
                        f"{type(module).__name__}: {type(algorithm).__name__} averages gradients"
                    )
                broadcast_tensors(impl.process_group.world, [*module.parameters(), *module.buffers()], "the module")
                self._broadcast_optimizer_state()
            impl.set_module(inner, ignored_names)
            trained = {
                name: parameter
                for name, parameter in inner.named_parameters()
                if parameter.requires_grad and name not in ignored_names
            }
            undo.enter_context(install_step_hooks(module, inner, trained, optimizers[0], impl))
            if impl.owns_buckets:
                if ddp is not None:
                    undo.enter_context(silenced(ddp, optimizers[0]))
                if grad_scaler is not None:
                    undo.enter_context(agree_on_overflow(grad_scaler, optimizers, impl))
            else:
                assert ddp is not None
                trampoline = trampoline_of(ddp)
                undo.callback(setattr, trampoline, "impl", None)
                trampoline.impl = impl
            self._undo = undo.pop_all()

    def detach(self) -> None:
        """Finish what is in flight and give the module back to plain DDP. Collective; may be called again.

        Where the algorithm averages weights, all ranks then hold the same weights and rank 0's optimizer state, unless
        it was constructed with `final_average=False`.

        Raises:
            RuntimeError: what was in flight failed. The module is given back all the same.
        """
        self._end(failed=False)

    def _end(self, *, failed: bool) -> None:
        if self._is_detached:
            return
        self._is_detached = True
        with self._undo:
            if self.impl.finish(failed=failed):
                self._broadcast_optimizer_state()

    def _broadcast_optimizer_state(self) -> None:
        world = self.impl.process_group.world
        for optimizer in self._optimizers:
            state = broadcast_state(world, optimizer.state_dict(), "the optimizer's state")
            if world.rank != 0:
                optimizer.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the algorithm: plain tensors and numbers, loadable with `weights_only=True`."""
        return {"algorithm": repr(self.algorithm), "impl": self.impl.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank, when the weights that go with it have been loaded.

        Collective where the algorithm averages weights.

        Raises:
            ValueError: it is the state of another algorithm, or of other arguments.
        """
        if not isinstance(state, Mapping) or state.keys() != {"algorithm", "impl"}:
            raise ValueError(
                "Attachment.load_state_dict: state must be what Attachment.state_dict returned, with the keys "
                f"algorithm and impl, got {sorted(state) if isinstance(state, Mapping) else state!r}"
            )
        if state["algorithm"] != repr(self.algorithm):
            raise ValueError(
                f"Attachment.load_state_dict: the state is of {state['algorithm']}, attached is {self.algorithm!r}"
            )
        self.impl.load_state_dict(state["impl"])

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(failed=exception_type is not None)


def _facts_of(module: torch.nn.Module, *, with_scaler: bool) -> dict[str, Any]:
    """What ranks must have in common, in the order in which they are told of it."""
    kinds = [(list(tensor.shape), str(tensor.dtype), tensor.requires_grad) for tensor in module.parameters()]
    digest = hashlib.sha256(repr(kinds).encode()).hexdigest()[:16]
    return {
        "the number of parameters": len(kinds),
        "the shapes, dtypes and requires_grad of parameters, as a digest": digest,
        "whether attach was given a grad_scaler": with_scaler,
    }


def _group_of(module: torch.nn.Module) -> dist.ProcessGroup:
    if isinstance(module, DistributedDataParallel):
        return module.process_group
    if not dist.is_initialized():
        raise ValueError(
            "attach: without DistributedDataParallel, process_group must be given or "
            "torch.distributed.init_process_group called first"
        )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _check_detached(module: torch.nn.Module) -> None:
    attached_id, attached = getattr(module, _MARK, (None, None))
    if attached_id == id(module):
        raise ValueError(f"attach: {attached} is attached to the module already; detach it first")
    if isinstance(module, DistributedDataParallel):
        check_no_foreign_hook(module)


def _check_module(module: torch.nn.Module) -> None:
    inner, ignored_names = module, set[str]()
    if isinstance(module, DistributedDataParallel):
        inner, ignored_names = module.module, module.parameters_to_ignore
        if module._delay_all_reduce_params:
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
    for name, parameter in inner.named_parameters():
        if parameter.requires_grad and name not in ignored_names:
            check_elements(f"attach: parameter {name}", parameter)


def _check_optimizers(optimizers: Sequence[torch.optim.Optimizer], module: torch.nn.Module) -> None:
    if not optimizers:
        raise ValueError("attach: optimizer must be a torch.optim.Optimizer or several, got an empty sequence")
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"attach: optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
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


def _check_same_ranks(own: dist.ProcessGroup, given: dist.ProcessGroup) -> None:
    places = [f"rank {group.rank()} of {group.size()}" for group in (own, given)]
    if places[0] == places[1]:
        try:
            places = [f"ranks {dist.get_process_group_ranks(group)}" for group in (own, given)]
        except KeyError:  # a group made by hand does not know its global ranks
            return
    if places[0] != places[1]:
        raise ValueError(f"attach: process_group must have the module's ranks: {places[0]}, got {places[1]}")
