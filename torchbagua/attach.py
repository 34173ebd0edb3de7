"""attach: put an algorithm to work on a DistributedDataParallel module and its optimizer, and take it off again."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from torchbagua.algorithms.base import Algorithm, AlgorithmImpl
from torchbagua.collectives import BaguaProcessGroup
from torchbagua.comm_hook import check_gradients, comm_hook
from torchbagua.events import Observer
from torchbagua.step_hooks import install_step_hooks

# On a module with an algorithm attached: its id, which a copy of it has not, and the name of the impl.
_MARK = "_torchbagua_attached"


def attach(
    module: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str,
    *,
    process_group: BaguaProcessGroup | None = None,
    observers: Sequence[Observer] = (),
    timeout: timedelta | None = None,
) -> "Attachment":
    """Let `algorithm` do what `module` communicates, until the returned attachment is detached. Collective.

    The training loop stays as it is. Works as a context manager; leaving it detaches.

    Args:
        module: wrapped in DistributedDataParallel, with no communication hook of its own.
        optimizer: the optimizer of its parameters, or several; the steps of the first are the clock.
        algorithm: an Algorithm, or a registered name.
        process_group: the ranks and their nodes, where nodes are given explicitly; default: the module's group, with
            nodes told by host names.
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
    if not isinstance(module, DistributedDataParallel):
        raise TypeError(
            f"attach: module must be a torch.nn.parallel.DistributedDataParallel, got {type(module).__name__}"
        )
    if isinstance(algorithm, str):
        algorithm = Algorithm.init(algorithm)
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"attach: algorithm must be an Algorithm or a registered name, got {algorithm!r}")
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    _check_module(module)
    _check_optimizers(optimizers, module)
    if process_group is not None and not isinstance(process_group, BaguaProcessGroup):
        raise TypeError(f"attach: process_group must be a BaguaProcessGroup, got {type(process_group).__name__}")
    if process_group is not None:
        _check_same_ranks(module.process_group, process_group.process_group)
    _check_detached(module)
    impl = algorithm.reify(
        process_group or module.process_group,
        observers=observers,
        timeout=timeout,
        facts={"the number of parameters": sum(1 for _ in module.parameters())},
    )
    return Attachment(module, optimizers, algorithm, impl)


class Attachment:
    """An algorithm at work on a module; made by `attach`.

    Attributes:
        algorithm: the description.
        impl: the running algorithm.
    """

    def __init__(
        self,
        module: DistributedDataParallel,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        impl: AlgorithmImpl,
    ) -> None:
        self.algorithm = algorithm
        self.impl = impl
        with ExitStack() as undo:  # closed here only where one of these steps raises
            undo.callback(impl.close)
            undo.callback(delattr, module, _MARK)
            setattr(module, _MARK, (id(module), type(impl).__name__))
            impl.set_module(module.module)
            trained = {
                name: parameter
                for name, parameter in module.module.named_parameters()
                if parameter.requires_grad and name not in module.parameters_to_ignore
            }
            undo.enter_context(install_step_hooks(module, module.module, trained, optimizers[0], impl))
            if impl.owns_buckets:
                undo.enter_context(_silenced(module, optimizers[0]))
            else:
                trampoline = _trampoline_of(module)
                undo.callback(setattr, trampoline, "impl", None)
                trampoline.impl = impl
            self._undo = undo.pop_all()

    def detach(self) -> None:
        """Finish what is in flight and give the module back to plain DDP. May be called again."""
        self._undo.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the algorithm: plain tensors and numbers, loadable with `weights_only=True`."""
        return {"algorithm": repr(self.algorithm), "impl": self.impl.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank.

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
        self.detach()


def _silenced(module: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> ExitStack:
    """Keep DDP from sending gradients and buffers until what is returned is closed."""

    def silence() -> None:
        # What no_sync sets, and what it leads to a forward later.
        for attribute in ("require_backward_grad_sync", "require_forward_param_sync"):
            restore.callback(setattr, module, attribute, getattr(module, attribute))
            setattr(module, attribute, False)

    def silence_after_step(*_: Any) -> None:
        first_step.remove()
        silence()

    restore = ExitStack()
    # With static_graph DDP learns the graph in its first backward, and fails (torch 2.13) where that one sends nothing.
    if module.static_graph and not module._static_graph_delay_allreduce_enqueued:
        first_step = optimizer.register_step_post_hook(silence_after_step)
        restore.callback(first_step.remove)
    else:
        silence()
    return restore


class _Trampoline:
    """What DDP holds as its one hook's state for ever: the algorithm that is attached now, or none."""

    module_id: int | None = None
    process_group: dist.ProcessGroup | None = None
    impl: AlgorithmImpl | None = None

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module_id = id(module)
        self.process_group = module.process_group

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: a copy of the module lists this hook, but its reducer does not have it (torch 2.13)."""
        return {}


def _trampoline_hook(state: _Trampoline, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if state.impl is None:
        assert state.process_group is not None  # only a copy has none, and no reducer calls that
        return allreduce_hook(state.process_group, bucket)
    return comm_hook(state.impl, bucket)


def _check_detached(module: DistributedDataParallel) -> None:
    attached_id, attached = getattr(module, _MARK, (None, None))
    if attached_id == id(module):
        raise ValueError(f"attach: {attached} is attached to the module already; detach it first")
    # DDP's own list of its hooks; there is no public way to ask whether one is registered.
    for hook, state in module._comm_hooks:
        if not isinstance(state, _Trampoline):
            raise ValueError(
                f"attach: the module has the communication hook {hook.__qualname__} already, and DDP takes only one; "
                "wrap the model again without it"
            )


def _trampoline_of(module: DistributedDataParallel) -> _Trampoline:
    """Return the module's trampoline, which the first attach registers."""
    for _, state in module._comm_hooks:
        assert isinstance(state, _Trampoline)  # _check_detached has refused any other
        if state.module_id == id(module):
            return state
    module._comm_hooks.clear()
    trampoline = _Trampoline(module)
    try:
        module.register_comm_hook(trampoline, _trampoline_hook)
    except RuntimeError as error:
        module._comm_hooks.clear()  # where DDP has entered the hook before it refused it
        raise ValueError(f"attach: DDP takes no communication hook for this module: {error}") from error
    return trampoline


def _check_module(module: DistributedDataParallel) -> None:
    if module._delay_all_reduce_params:
        raise ValueError(
            "attach: the module was made with delay_all_reduce_named_params, whose gradients bypass communication "
            "hooks; wrap the model without it"
        )
    for name, submodule in module.module.named_modules():
        if getattr(submodule, "sparse", False) and isinstance(submodule, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise ValueError(f"attach: {name or 'the module'} has sparse=True; sparse gradients are not supported")
    for name, parameter in module.module.named_parameters():
        if parameter.requires_grad and name not in module.parameters_to_ignore:
            check_gradients(f"attach: parameter {name}", parameter)


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
