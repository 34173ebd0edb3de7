"""Attachment: what is installed on a module while an algorithm is attached to it, and what can be asked of it."""

import copy
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchbagua.algorithms.saved_state import check_saved, load_state, save_state
from torchbagua.collectives.broadcast import broadcast_state, broadcast_tensors
from torchbagua.observe.summary import Summary
from torchbagua.runtime.optimizer_steps import is_sharded
from torchbagua.runtime.runner import Runner
from torchbagua.runtime.shards import local_shard
from torchbagua.training.attach_checks import mark_attached
from torchbagua.training.comm_hook import comm_hook
from torchbagua.training.ddp import ddp_sync_disabled, ddp_within_nodes, hooked, named_tensors
from torchbagua.training.end_warnings import (
    warn_of_different_weights,
    warn_of_missing_detach,
    warn_of_unused_optimizers,
)
from torchbagua.training.fsdp2.communication import bound_waits, install_communication
from torchbagua.training.late_checks import check_caller, check_first_step, check_within_nodes
from torchbagua.training.optimizer_state import broadcast_optimizer_state
from torchbagua.training.outer_ddps import CallerWatch
from torchbagua.training.running_means import RunningMeans
from torchbagua.training.setup import TrainingSetup
from torchbagua.training.step_hooks import install_step_hooks
from torchbagua.training.weight_loads import WeightLoads


class Attachment:
    """An algorithm at work on a module. `attach` returns it; it is a context manager that detaches when you leave it.

    Attributes:
        algorithm: what you handed to `attach`.
        impl: the running part of the algorithm; that of asynchronous averaging has methods of its own.
        runner: what runs it: its process group, lane, buckets and state.
    """

    def __init__(self, setup: TrainingSetup, runner: Runner, summary: Summary | None) -> None:
        self.algorithm = setup.algorithm
        self.runner = runner
        self.impl = runner.impl
        self._summary = summary
        self._setup = setup
        self._is_detached = False
        self._has_mean = False  # within averaged_weights
        # Undone in reverse, by detach or where one of these steps raises: DDP's hook first, runner.close last.
        with ExitStack() as undo:
            undo.callback(runner.close)
            undo.callback(mark_attached(setup.inner, runner.name).close)
            within_nodes = runner.open_node_gradients is not None
            if within_nodes:
                check_within_nodes(runner, setup)
            of_all_ranks = [ddp for ddp in setup.ddps if ddp.process_group.size() == runner.process_group.size]
            node_gradients = runner.open_node_gradients() if runner.open_node_gradients and of_all_ranks else None
            ignored = setup.ignored_names()
            # Gradients of shards say nothing of who holds the same: fully_shard takes the weights as they are.
            holds_alike = not setup.is_sharded or runner.averages_weights
            if setup.ddp not in of_all_ranks and holds_alike:
                own = [local_shard(tensor) for name, tensor in named_tensors(setup.inner) if name not in ignored]
                broadcast_tensors(runner.process_group.world, own, "the module")
            if setup.module not in of_all_ranks and holds_alike:
                self.broadcast_optimizers()
            runner.grad_scaler = setup.grad_scaler
            runner.set_module(setup.inner, ignored)
            self._loads = WeightLoads(setup, runner)
            undo.callback(self._loads.close)
            differs = runner.averages_weights and runner.process_group.size > 1
            self._running_means = RunningMeans(setup.inner, runner) if differs else None
            if self._running_means is not None:
                undo.callback(self._running_means.close)
            silenced = undo.enter_context(ExitStack())

            def silence(ddp: DistributedDataParallel) -> None:
                if node_gradients is not None and ddp in of_all_ranks:
                    silenced.enter_context(ddp_within_nodes(ddp, partial(comm_hook, node_gradients)))
                else:
                    silenced.enter_context(ddp_within_nodes(ddp, None) if within_nodes else ddp_sync_disabled(ddp))

            def silence_caller(ddp: DistributedDataParallel) -> None:
                check_caller(runner, setup, ddp)
                silence(ddp)

            watch: CallerWatch | None = None
            if runner.averages_weights:
                # Where attach was given a DDP, another one may be around the same module; else none may be made later.
                watch = CallerWatch(setup.inner, setup.ddps, silence_caller if setup.ddp is setup.module else None)
                undo.callback(watch.close)
            step_hooks, self._clock = install_step_hooks(
                setup,
                runner,
                after_first_step=partial(check_first_step, runner, setup, watch),
                running_means=self._running_means,
            )
            undo.enter_context(step_hooks)
            if runner.averages_weights:
                if setup.is_sharded:
                    bound_waits(undo, runner, setup.module, setup.sharded_parts)
                for ddp in setup.ddps:
                    silence(ddp)
            elif setup.is_sharded:
                parts = setup.sharded_parts
                install_communication(undo, runner, setup.module, parts, setup.sharding, setup.must_agree())
            else:
                assert setup.ddp is not None
                undo.enter_context(hooked(setup.ddp, partial(comm_hook, runner)))
            self._undo = undo.pop_all()
        self._forgotten = weakref.finalize(self, warn_of_missing_detach, weakref.ref(runner))

    @property
    def is_detached(self) -> bool:
        """Whether `detach` was called, or the `with` block left."""
        return self._is_detached

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The DistributedDataParallel that communicates gradients, if there is one."""
        return None if self.runner.averages_weights else self._setup.ddp

    def detach(self) -> None:
        """Finish what is in flight and give the module back to plain DDP. Collective.

        After an algorithm that averages weights, all ranks hold the same weights, and the state of rank 0's optimizers
        and GradScaler. They also hold the same floating-point buffers, if these were averaged. With
        `final_average=False` nothing of this is done. Learning rates and schedulers are yours: they differ between
        ranks that have taken different numbers of steps.

        A second call does nothing.

        Raises:
            RuntimeError: what was in flight failed. The module is given back all the same. Or it is called within
                `averaged_weights`.
        """
        self._check_no_mean("detach")
        self._end(failed=False)

    def _end(self, *, failed: bool) -> None:
        if self._is_detached:
            return
        self._is_detached = True
        self._forgotten.detach()
        # Both before the weights are averaged for the last time.
        unused = [] if failed else self._clock.unused_optimizers()
        differ = failed and self.runner.replicas_diverge() and self._clock.has_trained
        with self._undo:
            if not failed:
                self._loads.settle()
            if self._running_means is not None and not failed:
                self._running_means.before_end()
            if self.runner.finish(failed=failed):
                self.broadcast_optimizers()
                if self._running_means is not None:
                    self._running_means.average()
            if not failed and self.runner.process_group.compares_clocks:
                with suppress(RuntimeError):  # a rank has left: what was compared when the run began has to do
                    self.runner.lane.submit(self.runner.process_group.compare_clocks).result()
        if unused:
            warn_of_unused_optimizers(unused)
        if differ:
            warn_of_different_weights(self.algorithm)

    def broadcast_optimizers(self) -> None:
        """Give all ranks the state of rank 0's optimizers and GradScaler, but not its learning rates. Collective.

        A ZeroRedundancyOptimizer is left as it is.
        """
        world = self.runner.process_group.world
        for optimizer in self._setup.optimizers:
            if not is_sharded(optimizer):
                broadcast_optimizer_state(world, optimizer)
        scaler = self._setup.grad_scaler
        if scaler is not None and scaler.is_enabled():
            scaler.load_state_dict(broadcast_state(world, scaler.state_dict(), "the state of the GradScaler"))

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give all ranks the mean of their weights within a `with` block, for an evaluation or a file. Collective.

        After the block each rank has its own weights again, and training goes on as if there had been no block. Buffers
        are averaged too where the algorithm averages them. Does nothing where gradients are averaged, since all ranks
        hold the same weights, and after `detach`. It takes the memory of the weights once more.

        Asynchronous averaging pauses: finished rounds are applied before the block, and ranks must leave it within the
        timeout of each other. A block within a block changes nothing.

        Raises:
            NotImplementedError: the algorithm is not of this package, and does not offer it.
            RuntimeError: communication failed, or a rank has left.
        """
        if self._is_detached or self._has_mean:
            yield
            return
        with self.runner.averaged_weights():
            self._has_mean = self._loads.has_mean = True
            try:
                if self._running_means is not None:
                    self._running_means.average()
                yield
            finally:
                self._has_mean = self._loads.has_mean = False
                if self._running_means is not None:
                    self._running_means.after_averaged()

    def average_also(self, module: torch.nn.Module) -> None:
        """Average another module over the ranks too, a running mean (EMA, SWA) for instance. Collective.

        Its parameters, and floating-point and complex buffers, are replaced by their mean over the ranks: now, where
        each block of `averaged_weights` begins, and in `detach` if that makes weights equal. They stay so after the
        block: of ranks that have made the same updates it is the running mean of the ranks' mean. Does nothing where
        gradients are averaged, since all ranks hold the same weights.

        Args:
            module: an AveragedModel for instance; of the same parameters on all ranks.

        Raises:
            TypeError: `module` is not a module.
            RuntimeError: it is called after `detach` or within `averaged_weights`, or communication failed.
            NotImplementedError: the algorithm is not of this package.
            CommunicationError: ranks gave different modules, or one rank did not call it.
        """
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"average_also: module must be a torch.nn.Module, got {type(module).__name__}")
        if self._is_detached:
            raise RuntimeError("average_also: the algorithm was detached; call it before")
        self._check_no_mean("average_also")
        if self._running_means is not None:
            with self.averaged_weights():
                self._running_means.add(module)

    def rank_state_dict(self) -> dict[str, Any]:
        """Return all that this rank needs to go on as if it had never stopped. Every rank has its own.

        Under "attachment", what `state_dict` returns. Where weights are averaged, ranks hold different ones, so there
        are also this rank's module, its optimizers and its GradScaler: their own state dicts. Like those, they are no
        copies; only within `averaged_weights` the module's is one, of this rank's own weights. Loadable with
        `weights_only=True`.

        Raises:
            NotImplementedError: it is called within `averaged_weights`, and the algorithm is not of this package and
                does not offer it.
        """
        state: dict[str, Any] = {"attachment": self.state_dict()}
        if self.runner.averages_weights:
            scaler = self._setup.grad_scaler
            with self.runner.own_weights() if self._has_mean else nullcontext():
                module = self._setup.inner.state_dict()
                state["module"] = copy.deepcopy(module) if self._has_mean else module
            state["optimizers"] = [optimizer.state_dict() for optimizer in self._setup.optimizers]
            state["grad_scaler"] = None if scaler is None else scaler.state_dict()
        return state

    def load_rank_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `rank_state_dict` returned on this rank. Collective where `load_state_dict` is.

        Where gradients are averaged, load module, optimizers and GradScaler yourself, as under DDP.

        Raises:
            ValueError: it is no such state, or is of another number of optimizers; or as `load_state_dict`.
            RuntimeError: as the `load_state_dict` of the module or of the GradScaler; or it is called within
                `averaged_weights`.
            CommunicationError: as `load_state_dict`.
        """
        self._check_no_mean("load_rank_state_dict")
        keys = ["attachment", *(["grad_scaler", "module", "optimizers"] if self.runner.averages_weights else [])]
        if isinstance(state, Mapping) and "attachment" in state:
            check_saved(self.runner, state["attachment"])  # before anything is overwritten
        if not isinstance(state, Mapping) or not set(keys) <= state.keys():
            raise ValueError(
                f"Attachment.load_rank_state_dict: state must be what rank_state_dict returned, with the keys {keys}, "
                f"got {sorted(state) if isinstance(state, Mapping) else state!r}"
            )
        if self.runner.averages_weights:
            optimizers = self._setup.optimizers
            if len(state["optimizers"]) != len(optimizers):
                raise ValueError(
                    f"Attachment.load_rank_state_dict: state must be of {len(optimizers)} optimizers, as there are "
                    f"attached, got {len(state['optimizers'])}"
                )
            self._setup.inner.load_state_dict(state["module"])
            for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            if self._setup.grad_scaler is not None and state["grad_scaler"] is not None:
                self._setup.grad_scaler.load_state_dict(state["grad_scaler"])
        self.load_state_dict(state["attachment"])

    def _check_no_mean(self, method: str) -> None:
        if self._has_mean and self.runner.averages_weights:
            raise RuntimeError(
                f"torchbagua: Attachment.{method} is called within averaged_weights, whose end undoes what it does to "
                "the weights; call it outside of the block"
            )

    def weights_changed(self) -> None:
        """Have training go on from the weights as they are now, which must be the same on all ranks.

        For edits that are no `load_state_dict` of the module, which is noticed without it: a LoRA adapter merged, a
        layer reset, weights that one rank has loaded and broadcast. Call it on all ranks, between two steps. It reads
        all parameters. What an algorithm that averages weights keeps of them starts anew: shadow weights, their
        momentum and residuals, replicas, and a round in flight, which no longer changes them. Buffers are left alone,
        and so are the inner optimizer's state and what gradient algorithms keep. A load that was noticed since the last
        step counts as part of it.

        Without it such an edit counts as what the rank has learnt: the other ranks get their share of it in the next
        round, and an outer optimizer carries it on.

        Ranks compare what they hold when they next meet: in a round, a state, or detach. Does nothing where gradients
        are averaged, in a group of one rank, and after `detach`.

        Raises:
            RuntimeError: it is called within `averaged_weights`; or what is in flight failed.
            CommunicationError: raised later, on all ranks, where ranks hold different values, or some did not call it.
        """
        self._check_no_mean("weights_changed")
        if self.runner.averages_weights and self.runner.process_group.size > 1 and not self._is_detached:
            self._loads.take_all()

    def summary(self) -> Summary:
        """Return what communication has cost this rank so far. `print` it for a table.

        On a GPU it waits until the GPU has come to the end of the last step.

        Raises:
            RuntimeError: `attach` was given no observer, so nothing was noted.
        """
        if self._summary is None:
            raise RuntimeError(
                "torchbagua: there is nothing to sum up: without observers nothing is noted; "
                "attach(..., observers=[torchbagua.observe.Summary()])"
            )
        self.runner.tracer.deliver()
        return self._summary

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to resume the algorithm; save it beside model and optimizer.

        It holds plain tensors and numbers, which `torch.load(..., weights_only=True)` loads. It also holds, as JSON,
        the version of its format and those arguments of the algorithm that it depends on.
        """
        self._loads.settle()
        return save_state(self.runner)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank. Load the weights that go with it first.

        Collective if the algorithm averages weights or has error feedback.
        Which arguments may have changed since is said where the algorithm is documented.

        Raises:
            ValueError: it is the state of another algorithm, of a later format, or of arguments that may not change.
            RuntimeError: it is called within `averaged_weights`.
            CommunicationError: ranks have states of different parameters, or communication failed.
        """
        self._check_no_mean("load_state_dict")
        with self._loads.superseded():
            load_state(self.runner, state)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(failed=exception_type is not None)
        if isinstance(exception, NotImplementedError):  # as DDP's, which does not name the parameter (torch 2.13)
            self._setup.check_gradients()
