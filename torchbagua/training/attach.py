"""attach: install an algorithm on a module and its optimizers, and remove it again.

Execution order:

1. `check_arguments` (checks.py) checks everything that can fail on one rank alone. `warn_uncompressed` warns of
   parameters that the codec does not encode.
2. `bind` (algorithms/base.py), like `Algorithm.reify`, has ranks compare their settings over the group's store and
   opens private groups.
3. `bind` also creates a runner over these groups, a `GradientRunner` or a `WeightRunner`. The runner calls
   `Algorithm.make_impl` and watches the optimizers' steps.
4. With a weight algorithm, `install_weights` (weights.py) gives all ranks the same weights if no DDP has done so, has
   the runner create its buckets, and disables DDP's communication. The buckets of a gradient algorithm are created when
   DDP first passes them (`gradient_bucket`).
5. `Attachment._install_weights` or `Attachment._install_gradients` installs the step hooks (steps.py), if the algorithm
   or an observer needs one, and the lints. The latter then installs DDP's communication hook, `comm_hook` of ddp.py, or
   replaces the collectives of a sharded module (fsdp/attach_sharded.py).
6. In a step of a gradient algorithm, DDP passes a bucket to the hook, the lane reduces the bucket, backward waits for
   all buckets, and the optimizer steps. The runner then commits the algorithm's state by parameter, if it keeps any.
   With a weight algorithm, the `StepClock` ends the step, and the lane averages the runner's own buckets.
7. `detach` finishes the communication in flight, removes the hooks of 5, undoes 4, and closes the lane and the groups
   of 3 and 2.
"""

import copy
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchbagua import _concurrency
from torchbagua._warnings import UncompressedParametersWarning
from torchbagua.algorithms.base import Algorithm, bind
from torchbagua.algorithms.saved_state import check_saved, load_state, save_state
from torchbagua.collectives.process_group import BaguaProcessGroup, ranks_in_job
from torchbagua.observe.events import Observer
from torchbagua.observe.summary import Summary
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.optimizer_steps import unwrap
from torchbagua.runtime.runner import AlgorithmImpl, Runner
from torchbagua.runtime.weight_runner import WeightRunner
from torchbagua.training.checks import TrainingSetup, check_arguments, mark_attached, warn_uncompressed
from torchbagua.training.ddp import abandon_ddp, comm_hook, install_hook
from torchbagua.training.lint import install_gradient_lints, install_weight_lints, lint_arguments

if TYPE_CHECKING:
    from torchbagua.training.steps import StepClock
    from torchbagua.training.weights import RankWeights

_STEP_HOOKS = (
    "init_forward_pre_hook",
    "init_backward_hook",
    "init_post_backward_hook",
    "init_post_optimizer_step_hook",
)


class Attachment:
    """An algorithm that is attached to modules. `attach` returns it as a context manager that detaches on exit.

    Attributes:
        algorithm: the algorithm that was passed to `attach`.
        impl: the object with the algorithm's own code and state. With asynchronous averaging it has additional methods,
            such as `abort` and `resume`.
        runner: the object that owns the algorithm's process group, lane (the thread that communicates), buckets and
            per-parameter state, and calls `impl`.
    """

    _is_detached = False
    _has_mean = False  # True within averaged_weights
    _weights: "RankWeights | None" = None  # None for a gradient algorithm
    _clock: "StepClock | None" = None
    _forgotten: Any = None  # a finalizer

    def __init__(self, setup: TrainingSetup, runner: GradientRunner | WeightRunner, summary: Summary | None) -> None:
        self.algorithm = setup.algorithm
        self.runner: Runner = runner
        self.impl = runner.impl
        self._summary = summary
        self._setup = setup
        # Undone in reverse order, by detach or if one of these steps raises; runner.close last.
        with ExitStack() as undo:
            undo.callback(runner.close)
            for inner in setup.inners:
                mark_attached(inner, runner.name, undo)
            runner.tracer.count_optimizer_steps()
            if isinstance(runner, WeightRunner):
                self._install_weights(setup, runner, undo)
            else:
                self._install_gradients(setup, runner, undo)
            self._undo = undo.pop_all()

    def _install_weights(self, setup: TrainingSetup, runner: WeightRunner, undo: ExitStack) -> None:
        from torchbagua.training.lint.end_warnings import warn_of_missing_detach
        from torchbagua.training.weights import install_step_end, install_weights

        self._weights = install_weights(setup, runner, undo)
        install_weight_lints(setup, runner, self._weights, undo)
        self._clock = install_step_end(setup, runner, undo)
        references = weakref.ref(runner), weakref.ref(self._clock)
        self._forgotten = _concurrency.finalize(self, warn_of_missing_detach, *references)

    def _install_gradients(self, setup: TrainingSetup, runner: GradientRunner, undo: ExitStack) -> None:
        runner.set_module(setup.inner, setup.ignored_names(), parts=setup.inners)
        if setup.sharding is None:
            runner.start_meetings(setup.trained())
        if asks_for_hooks(runner.impl) or runner.tracer.is_on:
            from torchbagua.training.steps import install_step_hooks

            self._clock = install_step_hooks(setup, runner, undo)
        if runner.needs_grad_scaler:
            from torchbagua.training.grad_scaler import watch_loss_scale

            watch_loss_scale(setup, runner, undo)
        install_gradient_lints(setup, runner, undo)
        if setup.sharding is not None:
            setup.sharding.install_gradients(setup, runner, undo)
            return
        for ddp in setup.ddps:
            install_hook(ddp, partial(comm_hook, runner), undo)

    @property
    def is_detached(self) -> bool:
        """Whether `detach` was called or the `with` block has ended."""
        return self._is_detached

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The DistributedDataParallel whose gradients are communicated; None if there is none, or several."""
        ddps = self._setup.ddps
        return ddps[0] if self._weights is None and len(ddps) == 1 else None

    def detach(self) -> None:
        """Finish the communication in flight and return the module to plain DDP. Collective.

        With a gradient algorithm and DDP, ranks compare how many backward passes and steps they have run, and a digest
        of their weights; a warning names weights that differ.

        With a weight algorithm, all ranks then have the same weights, and rank 0's optimizer and GradScaler state, in
        which tensors that hold weights are averaged: see `average_also`. They also have the same floating-point
        buffers, if the algorithm averages buffers. With `final_average=False` none of this is done. Learning rates and
        schedulers are left to you: they differ between ranks that have taken different numbers of steps.

        A second call does nothing.

        Raises:
            RuntimeError: the communication in flight failed; the module is returned to plain DDP anyway. Or `detach`
                was called within `averaged_weights`.
            CommunicationError: with a gradient algorithm, a rank still trains; names both ranks and their progress.
        """
        self._check_no_mean("detach")
        self.runner.lane.check_process()
        self._end(failed=False)

    def abandon(self) -> None:
        """Leave at once, as after a failure. The other ranks raise CommunicationError when they next communicate.

        Not collective. Weights, buffers and optimizers remain as they are. If the module is a DistributedDataParallel,
        it does nothing in a later backward, and its forward raises RuntimeError. To train on over other ranks, delete
        all references to it, such as those in the traceback of a stored exception, wrap its module again, and attach.
        While there is a reference, the forward of the new one raises RuntimeError, which names what refers to it.
        Destroy the process group of the module too: other ranks may wait there, if DDP broadcasts buffers.

        `state_dict` still returns the algorithm's state, without what was in flight.

        Call it on the training thread. After `detach`, it does nothing else.

        Raises:
            RuntimeError: it was called within `averaged_weights`.
        """
        self._check_no_mean("abandon")
        if not self._is_detached:
            self.runner.process_group.private.abandon()
            self._end(failed=True, is_abandoned=True)
            for ddp in self._setup.ddps:
                abandon_ddp(ddp)
            self._setup = replace(self._setup, modules=self._setup.inners)  # refers to no DDP
        # After a detach that has failed too.
        self._weights = self._clock = None
        self.runner.impl.forget_in_flight()
        self.runner.lane.clear_failure()

    def _end(self, *, failed: bool, is_abandoned: bool = False) -> None:
        if self._is_detached or self.runner.lane.is_of_other_process:
            return
        self._is_detached = True
        if self._forgotten is not None:
            self._forgotten.detach()
        # Both must be determined before the final average of the weights.
        unused = [] if failed or self._clock is None else self._clock.unused_optimizers()
        differ = failed and not is_abandoned and self._may_differ()
        with self._undo:
            if self._weights is not None and not failed:
                self._weights.before_end()
            # An exception is about to leave the caller: other ranks may not come.
            is_leaving = failed or sys.exc_info()[0] is not None
            if isinstance(self.runner, GradientRunner) and not is_leaving:
                self.runner.meet_at_end()
            if self.runner.finish(failed=failed):
                with nullcontext() if self._weights is None else self._weights.last_means():
                    self.broadcast_optimizers()
            if not failed and self.runner.process_group.compares_clocks:
                with suppress(RuntimeError):  # a rank has left: the clock comparison from the start must suffice
                    self.runner.lane.submit(self.runner.process_group.compare_clocks).result()
        if unused:
            from torchbagua.training.lint.end_warnings import warn_of_unused_optimizers

            warn_of_unused_optimizers(unused)
        if differ:
            from torchbagua.training.lint.end_warnings import warn_of_different_weights

            warn_of_different_weights(self.algorithm)

    def _may_differ(self) -> bool:
        """Return whether ranks have been training different weights."""
        weights, clock = self._weights, self._clock
        return weights is not None and weights.may_differ() and clock is not None and clock.has_trained

    def broadcast_optimizers(self) -> None:
        """Give all ranks the state of rank 0's optimizers and GradScaler, but not its learning rates. Collective.

        The state includes numbers that an optimizer counts or learns in its parameter groups, such as Prodigy's `d`.
        The state of a ZeroRedundancyOptimizer is not changed.
        """
        from torchbagua.training.weights import broadcast_optimizers

        broadcast_optimizers(self._setup, self.runner.process_group)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give all ranks the mean of their weights within a `with` block, to evaluate or save the model. Collective.

        After the block each rank has its own weights again, and training continues as if there had been no block.
        Buffers are averaged too if the algorithm averages them, and so are the weights that an optimizer keeps in its
        state: see `average_also`. Such an optimizer remains in the mode in which you left it by its `eval` or `train`
        within the block. It does nothing with a gradient algorithm, since all ranks hold the same weights, and nothing
        after `detach`. It takes the memory of one more copy of the weights.

        Asynchronous averaging pauses: finished rounds are applied before the block, and no rank may leave the block
        later than the timeout of `attach` after the first rank has left it. A nested block has no effect.

        Raises:
            NotImplementedError: the algorithm is not from this package and does not support it.
            RuntimeError: communication failed, or a rank has left.
        """
        if self._weights is None or self._is_detached or self._has_mean:
            yield
            return
        with self._weights.averaged():
            self._has_mean = True
            try:
                yield
            finally:
                self._has_mean = False

    def average_also(self, module: torch.nn.Module | torch.optim.Optimizer, state: str | None = None) -> None:
        """Average another module, or an optimizer's state tensors that hold weights, over the ranks too.

        A module is, for instance, a running mean (EMA, SWA). The call is then collective. The module's parameters and
        its floating-point and complex buffers are replaced by their mean over the ranks: now, at the start of each
        `averaged_weights` block, and in `detach` if it makes weights equal. The averaged values remain after the block.
        If all ranks have made the same number of updates, they equal the running mean of the averaged weights.

        With an optimizer, its state tensors with the name `state` are averaged: within each `averaged_weights` block,
        after which each rank has its own again, and in `detach` if it makes weights equal. In the rounds of the
        algorithm they remain each rank's own. Optimizers whose class has "ScheduleFree" in its name, and ASGD, need no
        call. Call it on all ranks.

        This method does nothing with a gradient algorithm, since all ranks hold the same weights.

        Args:
            module: for instance an AveragedModel, with the same parameters on all ranks; or an attached optimizer.
            state: with an optimizer, the name of its state tensors, which have the shapes of the parameters.

        Raises:
            TypeError: `module` is neither a module nor an optimizer, or `state` is not given for an optimizer alone.
            ValueError: the optimizer is not attached, or it has stepped but has no such state.
            RuntimeError: it was called after `detach` or within `averaged_weights`, or communication failed.
            NotImplementedError: the algorithm is not from this package.
            CommunicationError: ranks gave different modules, or a rank did not call it. For an optimizer, it is raised
                by the next `averaged_weights` or `detach`.
        """
        given = unwrap(module)
        if not isinstance(given, torch.nn.Module | torch.optim.Optimizer):
            raise TypeError(
                "average_also: module must be a torch.nn.Module or an attached torch.optim.Optimizer, got "
                f"{type(module).__name__}"
            )
        if isinstance(state, str) != isinstance(given, torch.optim.Optimizer):
            raise TypeError(
                "average_also: state must be the name of an optimizer's state tensors, and is for optimizers only, got "
                f"{state!r} for a {type(module).__name__}"
            )
        if self._is_detached:
            raise RuntimeError("average_also: the algorithm was detached; call it before detach")
        self._check_no_mean("average_also")
        if self._weights is None:
            return
        if isinstance(given, torch.nn.Module):
            self._weights.add_module(given)
        elif state is not None:
            self._weights.add_state(given, state)

    def rank_state_dict(self) -> dict[str, Any]:
        """Return everything that this rank needs to continue as if it had never stopped. Every rank has its own state.

        The key "attachment" has the result of `state_dict`, with the names of the optimizers' parameters. With a weight
        algorithm, ranks hold different weights. The result then also has the state dicts of this rank's module,
        optimizers and GradScaler. These state dicts are not copies, except within `averaged_weights`: there, the
        module's and those of optimizers whose weights are averaged are copies of this rank's own. The result can be
        loaded with `weights_only=True`.

        Raises:
            NotImplementedError: it was called within `averaged_weights`, and the algorithm is not from this package and
                does not support it.
        """
        optimizers = {"optimizers": self._setup.optimizer_parameters()}
        state: dict[str, Any] = {"attachment": self._save(optimizers)}
        if self._weights is not None:
            scaler = self._setup.grad_scaler
            with self._weights.own() if self._has_mean else nullcontext():
                module = self._setup.inner.state_dict()
                state["module"] = copy.deepcopy(module) if self._has_mean else module
                state["optimizers"] = [self._state_of(optimizer, self._weights) for optimizer in self._setup.optimizers]
            state["grad_scaler"] = None if scaler is None else scaler.state_dict()
        return state

    def _state_of(self, optimizer: torch.optim.Optimizer, weights: "RankWeights") -> dict[str, Any]:
        state = optimizer.state_dict()
        return copy.deepcopy(state) if self._has_mean and weights.names_in(optimizer) else state

    def load_rank_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `rank_state_dict` returned on this rank. Collective if `load_state_dict` is.

        A weight algorithm then averages the layers that the saved run averaged, whichever are trained now.

        With a gradient algorithm, load the module, the optimizers and the GradScaler yourself, as with DDP.

        Raises:
            ValueError: `state` is not such a state, or was saved with other optimizers or in another order. Also raised
                by `load_state_dict`.
            RuntimeError: it was called within `averaged_weights`. Also raised by the `load_state_dict` of the module or
                of the GradScaler.
            CommunicationError: see `load_state_dict`.
        """
        self._check_no_mean("load_rank_state_dict")
        averages_weights = self._weights is not None
        keys = ["attachment", *(["grad_scaler", "module", "optimizers"] if averages_weights else [])]
        loop = {}
        if isinstance(state, Mapping) and "attachment" in state:
            loop = check_saved(self.runner, state["attachment"])  # before anything is overwritten
        if not isinstance(state, Mapping) or not set(keys) <= state.keys():
            raise ValueError(
                f"Attachment.load_rank_state_dict: state must be what rank_state_dict returned, with the keys {keys}, "
                f"got {sorted(state) if isinstance(state, Mapping) else state!r}"
            )
        if averages_weights:
            self._setup.check_saved_optimizers(loop.get("optimizers"), len(state["optimizers"]))
            self._setup.inner.load_state_dict(state["module"])
            for optimizer, saved in zip(self._setup.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            if self._setup.grad_scaler is not None and state["grad_scaler"] is not None:
                self._setup.grad_scaler.load_state_dict(state["grad_scaler"])
        self.load_state_dict(state["attachment"])

    def _check_no_mean(self, method: str) -> None:
        if self._has_mean:
            raise RuntimeError(
                f"torchbagua: Attachment.{method} was called within averaged_weights, which restores the weights at "
                "its end; call it outside of the block"
            )

    def weights_changed(self) -> None:
        """Continue training from the current weights, which must be the same on all ranks.

        Call it on all ranks, between two steps, after you have edited the weights: after merging a LoRA adapter,
        resetting a layer, or broadcasting weights that one rank has loaded. A `load_state_dict` of the module is
        detected without this call. If a `load_state_dict` was detected since the last step, it counts as part of the
        same edit.

        It reads all parameters. The state that a weight algorithm derives from the weights starts again from them:
        shadow weights, their momentum and residuals, and replicas. A round in flight no longer changes the weights.
        Buffers, the inner optimizer's state and the state of gradient algorithms are not changed.

        Without this call such an edit counts as an update by this rank: it is averaged into the other ranks' weights in
        the next round, and an outer optimizer carries it forward.

        Ranks compare their weights when they next communicate: in a round, in `averaged_weights`, or in `detach`. This
        method does nothing with a gradient algorithm, in a group of one rank, and after `detach`.

        Raises:
            RuntimeError: it was called within `averaged_weights`, or the communication in flight failed.
            CommunicationError: raised later, on all ranks, if ranks hold different values or a rank did not call it.
        """
        self._check_no_mean("weights_changed")
        if self._weights is not None and not self._is_detached:
            self._weights.weights_changed()

    def summary(self) -> Summary:
        """Return the cost of communication on this rank so far. `print` shows it as a table.

        On a GPU it waits until the GPU has finished the last step.

        Raises:
            RuntimeError: `attach` was given no observer, so nothing was recorded.
        """
        if self._summary is None:
            raise RuntimeError(
                "torchbagua: there is nothing to summarize: without observers nothing is recorded; "
                "attach(..., observers=[torchbagua.observe.Summary()])"
            )
        self.runner.tracer.deliver()
        return self._summary

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank needs to resume the algorithm. Save it alongside model and optimizer.

        It contains plain tensors and numbers, which `torch.load(..., weights_only=True)` loads. It also contains, as
        JSON, the version of its format, the arguments of the algorithm that it depends on, and the optimizers that have
        stepped since the last training step ended.
        """
        return self._save({})

    def _save(self, loop: Mapping[str, Any]) -> dict[str, Any]:
        if self._weights is not None:
            self._weights.settle_loads()
        return save_state(self.runner, {**loop, "unfinished_step": [] if self._clock is None else self._clock.state()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` returned on this rank. Load the matching weights first.

        Collective if the algorithm averages weights or has error feedback.
        The algorithm's documentation lists the arguments that may differ from those of the saved run.

        Raises:
            ValueError: the state is of another algorithm, has a later format, or was saved with other values of
                arguments that may not change.
            RuntimeError: it was called within `averaged_weights`.
            CommunicationError: ranks have states of different parameters, or communication failed.
        """
        self._check_no_mean("load_state_dict")
        with nullcontext() if self._weights is None else self._weights.discard_loads():
            loop = load_state(self.runner, state)
        if self._clock is not None:
            self._clock.load_state(loop.get("unfinished_step", []))

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(failed=exception_type is not None)
        if isinstance(exception, NotImplementedError):  # DDP raises it without naming the parameter (torch 2.13)
            self._setup.check_gradients()


def asks_for_hooks(impl: AlgorithmImpl) -> bool:
    """Return whether the impl must be notified of more than the buckets of DDP."""
    return any(getattr(type(impl), name) is not getattr(AlgorithmImpl, name) for name in _STEP_HOOKS)


def attach(
    module: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str,
    *,
    process_group: dist.ProcessGroup | BaguaProcessGroup | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    observers: Sequence[Observer] = (),
    timeout: timedelta | None = None,
    init_sync: bool = True,
) -> Attachment:
    """Attach an algorithm, which communicates a module's gradients or weights until you call `detach`. Collective.

    Call it on every rank. Your training loop does not change. `attach` returns a context manager that detaches on exit.

    With a synchronous weight algorithm, all ranks must take the same number of optimizer steps. With a gradient
    algorithm, they must also run the same synchronized backward passes.

    Args:
        module: the module that your loop calls, or a list of modules if one optimizer trains several. A gradient
            algorithm takes a DistributedDataParallel without a communication hook. A gradient algorithm that supports
            sharded modules also takes a module that fully_shard has sharded, in whole or in part. A weight algorithm
            takes any other module too; for a sharded module, see `torchbagua.fsdp.attach`. If the module is not a
            DistributedDataParallel, a weight algorithm first broadcasts rank 0's parameters, buffers and optimizer
            state to all ranks. While a weight algorithm is attached, DDP sends neither gradients nor buffers. This also
            holds for a DDP that wraps the module you pass, or a part of it, from its first forward on, which must be in
            the first step. A list contains no sharded module, and names of parameters begin with the module's position
            in it: "0.weight".
        optimizer: the optimizer of the module's parameters, or a list of optimizers. An optimizer that accelerate or
            Lightning has wrapped is accepted. A step ends when every optimizer has stepped, or was skipped by a
            GradScaler. If the optimizer also has parameters of other modules, a gradient algorithm ignores these, and a
            weight algorithm rejects the optimizer. With a gradient algorithm other than QAdam, the optimizer may have
            copies of the module's parameters in their place, such as float32 masters.
        algorithm: an algorithm, or its registered name.
        process_group: a torch process group, whose ranks are assigned to nodes by host name, or a BaguaProcessGroup,
            which specifies the node of each rank. The default is the module's group, or the world if it is no DDP.
            If the algorithm averages gradients within nodes, DDP's own process group is allowed to be smaller: it
            can consist of the ranks of one node.
        grad_scaler: the GradScaler of your loop. QAdam and error feedback read the loss scale from it. With a
            synchronous weight algorithm, all ranks then skip a step together; with asynchronous averaging, each rank
            skips alone.
        observers: objects that are notified of every phase of communication and of each training step; see
            `torchbagua.observe`.
        timeout: the longest time that the algorithm waits for another rank. The default is the group's timeout. With
            CPU tensors it also bounds FSDP's own collectives. DDP's own collectives, for instance those that broadcast
            buffers, keep the group's timeout. The end of asynchronous averaging is not bounded: it waits for the ranks
            that are still training.
        init_sync: as in DistributedDataParallel: whether a weight algorithm first broadcasts rank 0's parameters,
            buffers and optimizer state, if the module is not a DistributedDataParallel. With False it sends nothing,
            and you ensure that they are equal on all ranks. The same on all ranks. A gradient algorithm ignores it.

    Raises:
        TypeError, ValueError: an argument is invalid, or ranks disagree on the algorithm, its arguments, the version
            of the package, or the module's parameters.
        KeyError: no algorithm has that name.
        UncompressedParametersWarning: some parameters have a dtype that the codec does not encode, and a warning filter
            on any rank turns this warning into an error. All ranks then raise it. Without such a filter, the warning
            names these parameters, and they are sent in full precision.
        TimeoutError: a rank did not call `attach` in time.
        CommunicationError: a private group could not be opened.
        RuntimeError: the native library exists but cannot be loaded.
    """
    arguments = module, optimizer, algorithm, process_group, grad_scaler, observers, timeout
    setup = check_arguments(*arguments, init_sync=init_sync)
    return install(setup, process_group, observers, timeout)


def install(
    setup: TrainingSetup,
    process_group: dist.ProcessGroup | BaguaProcessGroup | None,
    observers: Sequence[Observer],
    timeout: timedelta | None,
) -> Attachment:
    """Attach the algorithm of `setup` over `process_group`, or the module's own. Collective; see `attach`."""
    lint_arguments(setup)
    summary = _summary_among(observers, process_group)
    group = process_group or setup.process_group()
    refusal = warn_uncompressed(setup)
    if refusal is not None:
        torch_group = group.process_group if isinstance(group, BaguaProcessGroup) else group
        own_rank = ranks_in_job(torch_group)[torch_group.rank()]
        refusal += f"; the filter of rank {own_rank} makes this an error"
    try:
        runner = bind(
            setup.algorithm,
            group,
            setup.optimizers,
            [*observers, *([] if summary is None else [summary])],  # a duplicate observer is notified once
            timeout,
            rank_invariants=setup.rank_invariants(),
            run_settings=setup.run_settings,
            refusal=refusal,
        )
    except UncompressedParametersWarning as warning:
        for later_group in setup.groups_opened_later():  # ranks of other meshes would wait there for this rank
            with suppress(UncompressedParametersWarning, TimeoutError):
                BaguaProcessGroup(later_group, timeout=timeout, refusal=str(warning))
        raise
    return Attachment(setup, runner, summary)


def _summary_among(
    observers: Sequence[Observer], process_group: dist.ProcessGroup | BaguaProcessGroup | None
) -> Summary | None:
    """Return the Summary for `Attachment.summary`: the user's, or a new one if anything is observed, or None."""
    is_observed = bool(observers) or (isinstance(process_group, BaguaProcessGroup) and process_group.tracer.is_on)
    given = next((observer for observer in observers if isinstance(observer, Summary)), None)
    return given or (Summary() if is_observed else None)
