"""attach: put an algorithm to work on a module and its optimizer, and take it off again.

The whole order:

1. `attach` checks what can fail on one rank alone.
2. `Algorithm.reify` checks the rest of it, has ranks compare over their group's store what must agree, and opens
   private groups.
3. Within that, `Algorithm.make_impl` binds the algorithm to them, and the impl watches the optimizers' steps.
4. `Attachment` gives ranks the same weights where no DDP has, and `AlgorithmImpl.set_module` makes the buckets of a
   weight algorithm; a gradient algorithm's are made when DDP first hands them over (`gradient_bucket`).
5. It installs the hooks: step hooks (step_hooks.py), then DDP's one hook, which ddp.py has call comm_hook.py, or DDP's
   silence.
6. A step of a gradient algorithm: DDP hands a bucket to the hook, the lane runs it, backward waits for all, the
   optimizer steps and commits what the algorithm keeps, the `StepClock` ends the step. A weight algorithm
   communicates at that end, in buckets of its own.
7. `detach` finishes what is in flight, removes the hooks of 5, and closes the lane and the groups of 3 and 2.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchbagua.algorithms.base import Algorithm, init_for
from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.algorithms.saved_state import load_state, save_state
from torchbagua.checks import (
    check_detached,
    check_first_step,
    check_kind,
    check_module,
    check_optimizers,
    check_same_ranks,
    mark_attached,
    warn_of_closures,
)
from torchbagua.collectives import BaguaProcessGroup, broadcast_state, broadcast_tensors
from torchbagua.comm_hook import comm_hook
from torchbagua.ddp import ddp_sync_disabled, hooked, named_tensors
from torchbagua.events import Observer, check_observers
from torchbagua.optimizers import unwrap
from torchbagua.step_hooks import install_step_hooks
from torchbagua.traces import Summary
from torchbagua.training_setup import TrainingSetup, ddps_of


def attach(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str,
    *,
    process_group: BaguaProcessGroup | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    observers: Sequence[Observer] = (),
    timeout: timedelta | None = None,
    strict: bool = False,
) -> "Attachment":
    """Put an algorithm in charge of what a module communicates, until you detach it. Collective.

    Your training loop stays as it is. What is returned is a context manager: leaving it detaches.

    With `DecentralizedAlgorithm` and `LowPrecisionDecentralizedAlgorithm`, all ranks must make the same number of
    backward passes through the module in each step.

    Args:
        module: for an algorithm that averages gradients, a DistributedDataParallel without a communication hook. An
            algorithm that averages weights takes any module. If it is not a DistributedDataParallel, all ranks first
            get rank 0's parameters, buffers and optimizer state. While such an algorithm is attached, DDP sends neither
            gradients nor buffers, also if it is around the module.
        optimizer: the optimizer of the module's parameters, or a list of them. What accelerate or Lightning have
            wrapped is taken too. A step ends when each of them has stepped, or was skipped by a GradScaler. Parameters
            of other modules are left alone; an algorithm that averages weights takes no optimizer that has some.
        algorithm: an algorithm, or its registered name.
        process_group: give it to say which rank is on which node. By default it is the module's group, or the world
            where there is no DDP, and nodes are told apart by host names.
        grad_scaler: the GradScaler of your loop. QAdam and error feedback read the loss scale from it. With the two
            decentralized algorithms, all ranks then skip a step together; with asynchronous averaging, each rank skips
            alone.
        observers: are told of every phase of communication and of each training step; see `torchbagua.traces`.
        timeout: the longest that the algorithm waits for another rank; by default that of the group. What DDP itself
            sends, buffers for instance, keeps the group's. The end of asynchronous averaging is not bounded: it waits
            for the ranks that are still training.
        strict: raise ValueError if parameters cannot be compressed, float64 ones for instance. By default they travel
            in full precision, and a RuntimeWarning names them.

    Raises:
        TypeError, ValueError: an argument does not fit, or ranks disagree in the algorithm, its arguments, the version
            of the package, or the module's parameters.
        KeyError: no algorithm has that name.
        TimeoutError: a rank did not call it in time.
        CommunicationError: a private group could not be opened.
        RuntimeError: the native library exists and cannot be loaded.
    """
    # Whatever can fail on one rank alone comes before reify, the first collective: the others would wait for this rank.
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"attach: module must be a torch.nn.Module, got {type(module).__name__}")
    given = optimizer if isinstance(optimizer, Sequence) and not isinstance(optimizer, str) else [optimizer]
    optimizers = [unwrap(one) for one in given]
    check_module(module)
    check_optimizers(optimizers, module)
    if isinstance(algorithm, str):
        algorithm = init_for(algorithm, optimizers)
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"attach: algorithm must be an Algorithm or a registered name, got {algorithm!r}")
    if process_group is not None and not isinstance(process_group, BaguaProcessGroup):
        raise TypeError(f"attach: process_group must be a BaguaProcessGroup, got {type(process_group).__name__}")
    if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
        raise TypeError(f"attach: grad_scaler must be a torch.amp.GradScaler, got {type(grad_scaler).__name__}")
    if not isinstance(strict, bool):
        raise TypeError(f"attach: strict must be True or False, got {strict!r}")
    if process_group is not None and isinstance(module, DistributedDataParallel):
        check_same_ranks(module.process_group, process_group.process_group)
    check_detached(module)
    ddps = ddps_of(module, averages_weights=algorithm.averages_weights)
    setup = TrainingSetup(module, ddps, optimizers, grad_scaler)
    if algorithm.averages_weights is not None:  # None: an own algorithm, asked again once the impl is there
        check_kind(algorithm, setup, averages_weights=algorithm.averages_weights)
    warn_of_closures(optimizers)
    check_observers("attach", observers)  # reify checks again, for those who call it alone: optimizers too
    summary = _summary_among(observers, process_group)
    impl = algorithm.reify(
        process_group or setup.process_group(),
        optimizer=optimizers,
        observers=[*observers, *([] if summary is None else [summary])],  # the same one twice hears once
        timeout=timeout,
        must_agree={**setup.must_agree(), "attach's argument strict": strict},
        run_settings=setup.run_settings(),
    )
    return Attachment(setup, algorithm, impl, summary, strict=strict)


def _summary_among(observers: Sequence[Observer], process_group: BaguaProcessGroup | None) -> Summary | None:
    """Return what `Attachment.summary` returns: the user's, or one of our own where anything is observed, or None."""
    is_observed = bool(observers) or (process_group is not None and process_group.tracer.is_on)
    return next((one for one in observers if isinstance(one, Summary)), Summary() if is_observed else None)


class Attachment:
    """An algorithm at work on a module. `attach` returns it; it is a context manager that detaches when you leave it.

    Attributes:
        algorithm: what you handed to `attach`.
        impl: the running algorithm, with its state.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        algorithm: Algorithm,
        impl: AlgorithmImpl,
        summary: Summary | None,
        *,
        strict: bool,
    ) -> None:
        self.algorithm = algorithm
        self.impl = impl
        self._summary = summary
        self._setup = setup
        self._is_detached = False
        # Undone in reverse, by detach or where one of these steps raises: DDP's hook first, impl.close last.
        with ExitStack() as undo:
            undo.callback(impl.close)
            undo.callback(mark_attached(setup.inner, type(impl).__name__).close)
            check_kind(algorithm, setup, averages_weights=impl.averages_weights)
            impl.tell_uncompressed(setup.trained(), strict=strict)
            ignored = setup.ignored_names()
            if setup.ddp is None:
                own = [tensor for name, tensor in named_tensors(setup.module) if name not in ignored]
                broadcast_tensors(impl.process_group.world, own, "the module")
                self._broadcast_state()
            impl.grad_scaler = setup.grad_scaler
            impl.set_module(setup.inner, ignored)
            undo.enter_context(install_step_hooks(setup, impl, after_first_step=partial(check_first_step, impl, setup)))
            if impl.averages_weights:
                for ddp in setup.ddps:
                    undo.enter_context(ddp_sync_disabled(ddp))
            else:
                assert setup.ddp is not None
                undo.enter_context(hooked(setup.ddp, partial(comm_hook, impl)))
            self._undo = undo.pop_all()

    def detach(self) -> None:
        """Finish what is in flight and give the module back to plain DDP. Collective.

        After an algorithm that averages weights, all ranks hold the same weights, and the state of rank 0's optimizers
        and GradScaler. They also hold the same floating-point buffers, if these were averaged. With
        `final_average=False` nothing of this is done. Learning rates and schedulers are yours: they differ between
        ranks that have taken different numbers of steps.

        A second call does nothing.

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
                self._broadcast_state()
            if not failed and self.impl.process_group.compares_clocks:
                with suppress(RuntimeError):  # a rank has left: what was compared when the run began has to do
                    self.impl.lane.submit(self.impl.process_group.compare_clocks).result()

    def _broadcast_state(self) -> None:
        world = self.impl.process_group.world
        for optimizer in self._setup.optimizers:
            # Not its groups: learning rates belong to the loop, and to its schedulers.
            own = optimizer.state_dict()
            without_groups = {key: value for key, value in own.items() if key != "param_groups"}
            state = broadcast_state(world, without_groups, f"the state of {type(optimizer).__name__}")
            if world.rank != 0:
                optimizer.load_state_dict({**own, **state})
        scaler = self._setup.grad_scaler
        if scaler is not None and scaler.is_enabled():
            scaler.load_state_dict(broadcast_state(world, scaler.state_dict(), "the state of the GradScaler"))

    def summary(self) -> Summary:
        """Return what communication has cost this rank so far. `print` it for a table.

        Raises:
            RuntimeError: `attach` was given no observer, so nothing was noted.
        """
        if self._summary is None:
            raise RuntimeError(
                "torchbagua: there is nothing to sum up: without observers nothing is noted; "
                "attach(..., observers=[torchbagua.traces.Summary()])"
            )
        return self._summary

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to resume the algorithm; save it beside model and optimizer.

        It holds plain tensors and numbers, which `torch.load(..., weights_only=True)` loads. It also holds, as JSON,
        the version of its format and those arguments of the algorithm that it depends on.
        """
        return save_state(self.algorithm, self.impl)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank. Load the weights that go with it first.

        Collective if the algorithm averages weights or has error feedback. States of earlier releases can be loaded.
        Which arguments may have changed since is said where the algorithm is documented.

        Raises:
            ValueError: it is the state of another algorithm, of a later format, or of arguments that may not change.
            CommunicationError: ranks have states of different parameters, or communication failed.
        """
        load_state(self.algorithm, self.impl, state)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(failed=exception_type is not None)
