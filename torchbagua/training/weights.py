"""A weight algorithm in a training loop: what differs between ranks, and the DDPs around the modules.

Execution order of `install_weights`:

1. All ranks get rank 0's weights and optimizer states, if no DDP has done so and the user has not excluded it.
2. The runner creates its buckets.
3. On several ranks, `DivergingWeights` watches loads of weights, the states of optimizers and running means.
4. The DDPs send nothing any more: those that `attach` was given at once, others when they call a module (`OuterDdps`).
   With `hierarchical=True`, DiLoCo's DDPs average gradients within a node.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from torchbagua._torch import active_ddp, call_at_compilation, has_learnt_graph, is_joining
from torchbagua.collectives.broadcast import broadcast_state, broadcast_tensors
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.optimizer_steps import StepWatch, is_sharded
from torchbagua.runtime.parameters import local_shard
from torchbagua.runtime.weight_runner import WeightRunner
from torchbagua.training.checks import JOIN_REFUSAL, TrainingSetup, require_same_ranks
from torchbagua.training.ddp import Hook, ModuleHook, comm_hook, install_hook, named_tensors
from torchbagua.training.optimizer_weights import OptimizerWeights, broadcast_optimizer_state
from torchbagua.training.steps import StepClock, install_step_hooks
from torchbagua.training.weight_loads import WeightLoads


def install_weights(setup: TrainingSetup, runner: WeightRunner, undo: ExitStack) -> "RankWeights":
    """Prepare modules, optimizers and DDPs for a weight algorithm until `undo` is closed. Collective."""
    group = runner.process_group
    global_ddps = [ddp for ddp in setup.ddps if ddp.process_group.size() == group.size]
    within_nodes = runner.open_node_gradients is not None
    if within_nodes:
        check_within_nodes(group, runner.name, setup)
    node_gradients = runner.open_node_gradients() if runner.open_node_gradients and global_ddps else None
    ignored = setup.ignored_names()
    unequal = [inner for module, inner in zip(setup.modules, setup.inners, strict=True) if module not in global_ddps]
    if unequal and setup.init_sync:
        members = {id(tensor) for inner in unequal for _, tensor in named_tensors(inner)}
        own = [each for name, each in named_tensors(setup.inner) if name not in ignored and id(each) in members]
        broadcast_tensors(group.world, list(map(local_shard, own)), "the module")
        broadcast_optimizers(setup, group)
    runner.set_module(setup.inner, ignored, parts=setup.inners)
    weights = RankWeights(runner) if group.size == 1 else DivergingWeights(setup, runner, undo)
    silenced = undo.enter_context(ExitStack())

    def silence(ddp: DistributedDataParallel) -> None:
        if node_gradients is not None and ddp in global_ddps:
            silenced.enter_context(limit_ddp_to_nodes(ddp, partial(comm_hook, node_gradients)))
        else:
            silenced.enter_context(limit_ddp_to_nodes(ddp, None) if within_nodes else disable_ddp_sync(ddp))

    def silence_outer(ddp: DistributedDataParallel, is_late: bool) -> None:
        check_outer_ddp(setup, ddp, group.process_group, within_nodes=within_nodes, is_late=is_late)
        silence(ddp)

    undo.callback(OuterDdps(setup.modules, setup.called, runner.step_watches, silence_outer).close)
    if setup.sharding is not None:
        setup.sharding.bound_waits(setup, runner, undo)
    for ddp in setup.ddps:
        silence(ddp)
    return weights


def install_step_end(setup: TrainingSetup, runner: WeightRunner, undo: ExitStack) -> StepClock:
    """Have the algorithm average weights at the end of each training step, until `undo` is closed."""
    clock = install_step_hooks(setup, runner, undo, before_end=runner.before_step_end, is_weight_algorithm=True)
    scaler = setup.grad_scaler
    if scaler is not None:
        from torchbagua.training.grad_scaler import install_overflow_agreement

        agreement = install_overflow_agreement(
            scaler, setup.optimizers, runner.agree_on_overflow, clock.after_search_for_inf
        )
        undo.enter_context(agreement)
    elif runner.needs_grad_scaler:
        from torchbagua.training.grad_scaler import UnknownScaler

        unknown = UnknownScaler(runner, "ranks would skip different steps", runner.note_unknown_scaler)
        undo.callback(unknown.close)
    return clock


def broadcast_optimizers(setup: TrainingSetup, group: BaguaProcessGroup) -> None:
    """Give all ranks the state of rank 0's optimizers and GradScaler; see `Attachment.broadcast_optimizers`."""
    for optimizer in setup.optimizers:
        if not is_sharded(optimizer):
            broadcast_optimizer_state(group.world, optimizer)
    scaler = setup.grad_scaler
    if scaler is not None and scaler.is_enabled():
        scaler.load_state_dict(broadcast_state(group.world, scaler.state_dict(), "the state of the GradScaler"))


class RankWeights:
    """This rank's weights, beyond the runner's rounds. A group of one rank needs little, since they are the mean."""

    def __init__(self, runner: WeightRunner) -> None:
        self._runner = runner

    def may_differ(self) -> bool:
        """Return whether ranks currently hold different weights."""
        return self._runner.replicas_diverge()

    def averaged(self) -> AbstractContextManager[None]:
        """Give all ranks the mean of their weights within the block; see `Attachment.averaged_weights`."""
        return self._runner.impl.averaged_weights()

    def own(self) -> AbstractContextManager[None]:
        """Give this rank its own weights and optimizer state in a block within `averaged`."""
        return self._runner.own_weights()

    def add_module(self, module: torch.nn.Module) -> None:
        """Average the weights of another module too, now and at each later mean. Collective."""

    def add_state(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        """Average the state tensors with this name too."""

    def names_in(self, optimizer: torch.optim.Optimizer) -> Sequence[str]:
        """Return the names of the optimizer's state tensors that are averaged."""
        return ()

    def call_before_means(self, function: Callable[[], None]) -> None:
        """Call the function before weights are averaged for an evaluation or for the last time."""

    def weights_changed(self) -> None:
        """Notify the runner that all parameters have changed; see `Attachment.weights_changed`."""

    def settle_loads(self) -> None:
        """Notify the runner of weights loaded since the last step."""

    def discard_loads(self) -> AbstractContextManager[None]:
        """Forget the loads so far if the block, which loads the matching state, does not raise."""
        return nullcontext()

    def before_end(self) -> None:
        """Prepare for the last mean. Call it before the runner finishes."""

    def last_means(self) -> AbstractContextManager[None]:
        """Average optimizer states before the block, which makes the rest of them equal, and running means after it."""
        return nullcontext()


class DivergingWeights(RankWeights):
    """The weights of one of several ranks: averages those in optimizer states and running means, and watches loads."""

    def __init__(self, setup: TrainingSetup, runner: WeightRunner, undo: ExitStack) -> None:
        super().__init__(runner)
        self._modules: dict[int, torch.nn.Module] = {}  # to average too, by id
        self._in_optimizers = OptimizerWeights(setup.optimizers, runner)
        self._before_means: list[Callable[[], None]] = []
        self._loads = WeightLoads(setup, runner)
        undo.callback(self._loads.close)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        self._notify_before_mean()
        with self._in_optimizers.averaged(super().averaged()), self._loads.refused():
            self._average_modules()
            yield

    def own(self) -> AbstractContextManager[None]:
        return self._in_optimizers.own(super().own())

    def add_module(self, module: torch.nn.Module) -> None:
        with self.averaged():
            self._average(module)  # first, since ranks compare the added modules in it
            self._modules[id(module)] = module

    def add_state(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        self._in_optimizers.add(optimizer, name)

    def names_in(self, optimizer: torch.optim.Optimizer) -> Sequence[str]:
        return self._in_optimizers.names(optimizer)

    def call_before_means(self, function: Callable[[], None]) -> None:
        self._before_means.append(function)

    def _notify_before_mean(self) -> None:
        for function in self._before_means:
            function()

    def weights_changed(self) -> None:
        self._loads.take_all()

    def settle_loads(self) -> None:
        self._loads.settle()

    def discard_loads(self) -> AbstractContextManager[None]:
        return self._loads.discard_loads()

    def before_end(self) -> None:
        self._loads.settle()
        self._notify_before_mean()
        self._in_optimizers.before_end()

    @contextmanager
    def last_means(self) -> Iterator[None]:
        self._in_optimizers.average()
        yield
        self._average_modules()

    def _average_modules(self) -> None:
        for module in self._modules.values():
            self._average(module)

    def _average(self, module: torch.nn.Module) -> None:
        weights = self._runner.weights
        if weights is None:
            raise NotImplementedError(f"average_also: {type(self._runner.impl).__name__} must call runner.average")
        tensors = [local_shard(tensor) for tensor in chain(module.parameters(), module.buffers())]
        inexact = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
        weights.means.average_tensors(inexact, f"a {type(module).__name__}'s weights")


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


def parameters_in(ddp: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of the DDP's module that it does not ignore, by name."""
    return {
        name: parameter for name, parameter in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore
    }


class _Off(int):
    """False as the value of a flag, and True in a copy or pickle of the DDP, which has no algorithm attached."""

    def __reduce__(self) -> tuple[type, tuple[bool]]:
        return bool, (True,)


_OFF: Any = _Off()


def disable_ddp_sync(ddp: DistributedDataParallel) -> ExitStack:
    """Keep `ddp` from sending gradients and buffers until the returned stack is closed, whatever the loop sets."""
    was_on = dict.fromkeys(("require_backward_grad_sync", "require_forward_param_sync"), False)

    def turn_off() -> None:
        for attribute in was_on:
            was_on[attribute] |= bool(getattr(ddp, attribute))
            setattr(ddp, attribute, _OFF)
        # DDP still calls its hook in two cases: in the first backward of a static graph, which fails otherwise (torch
        # 2.13), and if the attribute is set between forward and backward, as accelerate's trigger_sync_in_backward
        # does. The hook then leaves the gradients unchanged.
        if not has_learnt_graph(ddp):
            ddp.require_backward_grad_sync = True

    def turn_on() -> None:
        for attribute, is_on in was_on.items():
            setattr(ddp, attribute, is_on)

    def before_forward(module: torch.nn.Module, inputs: Any) -> None:
        if module is not ddp:  # a shallow copy shares this hook
            return
        if is_joining(ddp):
            raise RuntimeError(f"torchbagua: {JOIN_REFUSAL}")
        # no_sync sets require_backward_grad_sync, and DDP's next forward then sets the other attribute. Loops that
        # accumulate gradients set the former before each forward, and DDP reads it only in forward.
        turn_off()

    with ExitStack() as undo:  # closed here only if one of these steps raises
        undo.callback(turn_on)
        before_forward(ddp, ())  # its forward may be running
        undo.callback(ddp.register_forward_pre_hook(ModuleHook(before_forward)).remove)
        install_hook(ddp, _keep_gradients, undo)
        return undo.pop_all()


class OuterDdps:
    """Finds the DDPs that call attached modules, or parts of them, and that `attach` was not given.

    A module has no reference to its DDP, so forward pre-hooks ask which DDP is running. It may wrap any part of a
    module: a part with parameters has the hook until it was called, at least in the first step.
    """

    _is_compiled = False

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        called: Sequence[torch.nn.Module],
        watches: Sequence[StepWatch],
        on_found: Callable[[DistributedDataParallel, bool], None],
    ) -> None:
        self._modules = modules
        self._on_found = on_found  # called within the DDP's forward, with whether the first step has ended
        self._known = weakref.WeakSet[DistributedDataParallel]()  # DDPs of other modules too, which may be dropped
        self._unstepped = {watch.optimizer: watch for watch in watches}
        self._installed = ExitStack()
        self._parts: dict[torch.nn.Module, RemovableHandle] = {}
        self._look_while_compiling = call_at_compilation(self._look_at_compilation)
        for ddp in modules:
            if isinstance(ddp, DistributedDataParallel):
                self._known.add(ddp)
                self._watch(ddp)
                self._watch(ddp.module)
        plain = [module for module in called if not isinstance(module, DistributedDataParallel)]
        for module in plain:
            self._watch(module)
        for part in chain.from_iterable(module.modules() for module in plain):
            own = [] if isinstance(part, torch.jit.ScriptModule) or part in plain else part.parameters(recurse=False)
            if any(parameter.requires_grad for parameter in own):
                self._parts[part] = part.register_forward_pre_hook(ModuleHook(self._before_forward))
        self._uncalled = set(self._parts)
        for watch in watches:
            watch.add(self._after_step, reads_overflow=False)

    def close(self) -> None:
        """Find no more DDPs."""
        for watch in self._unstepped.values():
            watch.remove(self._after_step)
        for hook in self._parts.values():
            hook.remove()
        self._installed.close()

    def _watch(self, module: torch.nn.Module) -> None:
        if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
            self._installed.callback(module.register_forward_pre_hook(ModuleHook(self._before_forward)).remove)

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            self._look_while_compiling()
            return
        self._look()
        if module in self._uncalled:
            self._uncalled.remove(module)
            self._leave_parts()

    def _look_at_compilation(self) -> None:
        self._is_compiled = True
        self._look()

    def _look(self) -> None:
        ddp = active_ddp()
        if ddp is None or ddp in self._known:
            return
        own = {id(parameter) for module in self._modules for parameter in module.parameters()}
        common = [parameter for parameter in parameters_in(ddp).values() if id(parameter) in own]
        if any(parameter.requires_grad for parameter in common):
            self._on_found(ddp, not self._unstepped)
            self._watch(ddp)  # another DDP may wrap it
        elif common:  # all are frozen, perhaps only now
            return
        self._known.add(ddp)

    def _after_step(self, optimizer: torch.optim.Optimizer, is_taken: bool) -> None:
        self._unstepped.pop(optimizer).remove(self._after_step)
        self._leave_parts()

    def _leave_parts(self) -> None:
        if not (self._unstepped or self._is_compiled):  # without its hook, a compiled part would be compiled again
            for part in self._parts.keys() - self._uncalled:
                self._parts.pop(part).remove()


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


def limit_ddp_to_nodes(ddp: DistributedDataParallel, hook: Hook | None) -> ExitStack:
    """Have `ddp` average gradients within the node, and refuse Join, until the returned stack is closed."""

    def refuse_join(module: torch.nn.Module, inputs: Any) -> None:
        if module is ddp and is_joining(ddp):
            raise RuntimeError(f"torchbagua: {JOIN_REFUSAL}")

    with ExitStack() as undo:
        undo.callback(ddp.register_forward_pre_hook(ModuleHook(refuse_join)).remove)
        if hook is not None:
            undo.callback(setattr, ddp, "broadcast_buffers", ddp.broadcast_buffers)
            ddp.broadcast_buffers = _OFF if ddp.broadcast_buffers else False
            install_hook(ddp, hook, undo)
        return undo.pop_all()


def _keep_gradients(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    flat = bucket.buffer()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[] if flat.is_cpu else [flat.device])
    future.set_result(flat)
    return future
