"""elastic.run: a training that goes on with the ranks that are there.

Execution order, on each rank:

1. `Machine.meet` finds the first members, over the launcher's store. From then on nobody uses that store.
2. A *generation* begins: the members open torch's default group over the mailbox of the first of them, and give all of
   them the newest state (state.py). `run` wraps the model, attaches the algorithm, and calls `train`.
3. `train` ends: it returns, and all ranks detach; or the user's own code raises, and this rank leaves; or communication
   fails, or a rank wants a change. Then the rank closes all groups, so that the others notice.
4. All agree on the members of the next generation (members.py), and continue at 2.
"""

import gc
import json
import logging
import os
import secrets
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import wraps
from types import FrameType
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from torchbagua import _concurrency
from torchbagua._torch import backend_of
from torchbagua._warnings import warn_user
from torchbagua.algorithms.base import Algorithm, init_for
from torchbagua.collectives.agreement import fingerprint
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.elastic.members import (
    SILENT_S,
    WAITS,
    Changes,
    EvictedError,
    Mailboxes,
    Member,
    Membership,
    NoQuorumError,
)
from torchbagua.elastic.sampler import Sampler
from torchbagua.elastic.state import Stateful, TrainingState, synchronize
from torchbagua.observe.events import Observer, Phase
from torchbagua.runtime.optimizer_steps import is_sharded
from torchbagua.runtime.parameters import sharded_parts
from torchbagua.runtime.rank_state import OF_RANK, norm_of, with_remaining
from torchbagua.training.attach import Attachment, attach
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError
from torchbagua.transport.gloo import end_waits
from torchbagua.transport.store_requests import SilentStoreError, StoreRequests
from torchbagua.version import __version__

# A connection without data is tested every second, and closed after three tests, or three seconds without an answer.
_KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 1,
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 3000,
}

_LOG = logging.getLogger("torchbagua.elastic")

# How often a rank looks for processes that want to join.
_LOOK_EVERY_S = 0.2

# Machines may start one after the other.
_START = timedelta(minutes=10)

# Generations in a row without a finished step, after which the job ends.
_MOST_BARREN = 5

# A process that is lost so soon after it has joined has to wait before it joins again.
_FEW_STEPS = 10


class Machine(Protocol):
    """What a rank needs of its process and of torch; a simulation replaces it."""

    def meet(self) -> tuple[Mailboxes, Membership | None, Collection[Member]]:
        """Open the mailbox of this process, and find the others.

        Returns:
            The mailboxes; the first members, or None if the training has begun without this process; and processes of
            the training that it may ask to join.
        """
        ...

    def open_group(self, membership: Membership, rank: int) -> dist.ProcessGroup | BaguaProcessGroup:
        """Open torch's default group of a generation."""
        ...

    def store(self, membership: Membership) -> dist.Store:
        """Return the store of a generation, in the mailbox of its first member."""
        ...

    def wrap(self, model: torch.nn.Module, arguments: Mapping[str, Any]) -> DistributedDataParallel:
        """Wrap the model in a DDP over the group of the generation, and send nothing."""
        ...

    def watch_hosts(self) -> None:
        """Have connections fail in a few seconds if the host at the other end has vanished."""
        ...

    def close_group(self) -> None:
        """Close the group, so that ranks that wait there notice at once."""
        ...


class _Boundary(BaseException):
    """Unwinds `train` at a boundary: no Exception, so that code that handles errors does not catch it."""


class _Changes(_Boundary):
    """A rank wants a change of the membership."""


class _Leaves(_Boundary):
    """This rank leaves, since it got SIGTERM."""


class Run:
    """One generation of a training, the argument of `train`.

    Attributes:
        module: the module to call: the DistributedDataParallel around the model, or the model itself if the algorithm
            averages weights.
        attachment: of the algorithm.
        members: the processes of the generation, in the order of their ranks.
        rank, size: of this process in the generation, and so in torch's default group.
        generation: the number of changes of the membership so far.
    """

    def __init__(self, training: "Training", membership: Membership, module: torch.nn.Module, attachment: Attachment):
        self._training = training
        self.module = module
        self.attachment = attachment
        self.members = membership.members
        self.rank = membership.members.index(training.mailboxes.own)
        self.size = len(membership.members)
        self.generation = membership.generation

    @property
    def step(self) -> int:
        """The optimizer steps that the training has taken, over all generations."""
        return self._training.state.num_steps

    def boundary(self) -> None:
        """Let ranks join and leave here, between two steps; for loops that do not use `batches`.

        It does not return if the membership changes: `train` is called again.
        """
        self._training.check_boundary()

    def batches(self, loader: "DataLoader[Any]") -> Iterator[Any]:
        """Yield the batches of this rank until the end of the epoch; a boundary before each.

        With `elastic.Sampler`, they continue where the training is in the epoch.

        Args:
            loader: with the sampler that `run` was given, and a batch size.

        Raises:
            ValueError: the loader has another sampler, or no batch size.
        """
        sampler = self._training.sampler
        if sampler is not None and (loader.sampler is not sampler or loader.batch_size is None):
            raise ValueError(
                "Run.batches: loader must have the sampler of elastic.run and a batch_size, got a DataLoader with "
                f"batch_size={loader.batch_size} and a sampler of the class {type(loader.sampler).__name__}"
            )
        num_left = 0 if sampler is None else len(sampler)
        for batch in loader:
            self.boundary()
            if sampler is not None and loader.batch_size is not None:
                sampler.fetch(min(loader.batch_size, num_left))
                num_left -= loader.batch_size
            yield batch
        if sampler is not None:
            sampler.end_epoch()


class Training:
    """A call of `run` on one rank."""

    def __init__(
        self,
        machine: Machine,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        objects: Mapping[str, Stateful],
        sampler: Sampler | None,
        timeout: timedelta,
        *,
        min_ranks: int = 1,
        needs_quorum: bool = True,
        joins_again: bool = False,
        ddp_arguments: Mapping[str, Any] | None = None,
        observers: Callable[[], Sequence[Observer]] = tuple,
    ) -> None:
        self._machine = machine
        self._algorithm = algorithm
        self._timeout = timeout
        self._min_ranks = min_ranks
        self._joins_again = joins_again
        self._ddp_arguments = ddp_arguments or {}
        self.sampler = sampler
        every = {**objects, **({} if sampler is None else {"the sampler": sampler})}
        self.state = TrainingState(model, optimizers, every, algorithm.averages_weights)
        self.mailboxes, membership, contacts = machine.meet()
        training = describe(model, optimizers, algorithm)
        self._changes = Changes(self.mailboxes, timeout, needs_quorum=needs_quorum, training=training)
        if membership is None:
            membership = self._changes.join(contacts)
        elif len(membership.members) < min_ranks:
            raise ValueError(
                f"elastic.run: min_ranks must be at most the number of ranks at the start, {len(membership.members)}, "
                f"got {min_ranks}"
            )
        else:
            self.state.begin()
        self._membership = membership
        self._is_leaving = False
        self._num_barren = 0
        self._joined = dict[Member, int]()  # after how many steps
        self._attachment: Attachment | None = None
        self._has_begun = False  # the generation, and the algorithm has its state
        self._norms = 0.0, 0.0  # of the residuals at the end of the last generation: this rank's, and its place's
        self._hooks: list[RemovableHandle] = []
        self._stepped = set[int]()
        self._looked_s = 0.0  # for candidates
        self.num_state_bytes = 0  # that this rank has sent to others
        self._observers = observers
        self._marked_ns = _concurrency.perf_counter_ns()
        self._marks: list[tuple[Phase, int, int]] = []  # the phases of the last change, with their begins and ends
        self._failure: BaseException | None = None  # of communication, within the step of an optimizer
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_post_hook(lambda stepped, *_: self.count_step(stepped)))

    def run(self, train: Callable[[Run], object], on_leave: Callable[[Run], object] | None) -> bool:
        """Call `train` for each generation until it returns on all ranks. Return False if this rank has left before."""
        with ExitStack() as at_end:
            gc.freeze()  # else each change would search all that was imported, for 0.2 s
            at_end.callback(gc.unfreeze)
            for hook in self._hooks:
                at_end.callback(hook.remove)
            for optimizer in self.state.optimizers:
                at_end.enter_context(self._deferring(optimizer))
            return self._run(train, on_leave)

    @contextmanager
    def _deferring(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Raise an error of communication in a step at the next boundary, so that the loop completes the step.

        The weights have changed. A scheduler that the loop steps next must not be left behind.
        """
        step = optimizer.step

        @wraps(step)
        def deferring(*arguments: Any, **named: Any) -> Any:
            num_steps = self.state.num_steps
            try:
                return step(*arguments, **named)
            except Exception as error:
                if not is_of_communication(error) or self.state.num_steps == num_steps:
                    raise
                self._failure = error
                return None

        is_patched = "step" in vars(optimizer)  # as by a scheduler
        optimizer.step = deferring  # type: ignore[method-assign]
        try:
            yield
        finally:
            if is_patched:
                optimizer.step = step  # type: ignore[method-assign]
            else:
                del optimizer.step

    def _run(self, train: Callable[[Run], object], on_leave: Callable[[Run], object] | None) -> bool:
        before, failed_s = self._membership, _concurrency.monotonic()
        while True:
            run: Run | None = None
            try:
                try:
                    run = self._begin()
                except (TimeoutError, SilentStoreError) as error:
                    raise CommunicationError(str(error)) from error
                if run is not None:
                    if run.rank == 0 and before != self._membership:
                        seconds = _concurrency.monotonic() - failed_s
                        line = describe_change(before, self._membership, self.state.num_steps, seconds)
                        _LOG.warning("%s%s", line, _describe_residuals("start again", self._norms[1]))
                    before = self._membership
                    train(run)
                    if self._failure is not None:
                        raise self._failure
                    run.attachment.detach()
                    if self._changes.finish(self._membership):
                        self._machine.close_group()
                        return True
            except _Leaves:
                self._leave()
                lost = _describe_residuals("are lost", self._norms[0])
                _LOG.warning("torchbagua: this rank leaves after step %s%s", f"{self.state.num_steps:,}", lost)
                if on_leave is not None and run is not None:
                    on_leave(run)
                return False
            except _Changes:
                pass
            except BaseException as error:
                if not is_of_communication(error):
                    self._leave()
                    raise
                _release(error)
            if run is not None:
                failed_s = _concurrency.monotonic()
                self._marks.clear()
                self._mark("notice")
            del run
            self._close()
            self._change()
            self._mark("agree")

    def _change(self) -> None:
        """Agree on the next members, or join them."""
        base = self._membership
        try:
            self._membership = self._changes.agree(base)
        except EvictedError as error:
            if not self._joins_again:
                raise
            self.state.forget()
            self._membership = self._changes.join(error.members)
        self._note_change(base, self._membership)
        self.mailboxes.forget(self._membership.members)

    def _mark(self, phase: Phase) -> None:
        """Note that a phase of a change has ended, which began at the end of the one before."""
        begin_ns, self._marked_ns = self._marked_ns, _concurrency.perf_counter_ns()
        self._marks.append((phase, begin_ns, self._marked_ns))

    def _note_change(self, before: Membership, after: Membership) -> None:
        num_steps = self.state.num_steps
        for member in {*before.members} - {*after.members}:
            joined = self._joined.pop(member, None)
            self._changes.note_loss(member, was_new=joined is not None and num_steps < joined + _FEW_STEPS)
        self._joined |= dict.fromkeys({*after.members} - {*before.members}, num_steps)

    def _begin(self) -> Run | None:
        """Begin a generation. Return None if another member is lost meanwhile."""
        membership = self._membership
        self._has_begun = False
        self._failure = None
        self._changes.enter(membership)
        if not self._changes.await_entries(membership):
            return None
        self._num_barren += 1
        if self._num_barren > _MOST_BARREN:
            position = "" if self.sampler is None else f", at sample {self.sampler.num_trained} of its epoch"
            raise NoProgressError(
                f"torchbagua: {_MOST_BARREN} generations in a row have not finished a step: the training ends after "
                f"step {self.state.num_steps}{position}. The next batch may end each rank that gets it"
            )
        own, size = membership.members.index(self.mailboxes.own), len(membership.members)
        if size < self._min_ranks:
            self._await_candidates(size)
            return None
        group = self._machine.open_group(membership, own)
        self._mark("open")
        requests = StoreRequests(dist.PrefixStore("state", self._machine.store(membership)), self._timeout)

        with ExitStack() as transfer:

            def connect() -> Communicator:
                connected = group if isinstance(group, BaguaProcessGroup) else BaguaProcessGroup(group)
                connected.open()
                transfer.callback(connected.close)
                return connected.world

            self.num_state_bytes += synchronize(self.state, requests, own, size, connect)
        self._mark("share")
        if self.sampler is not None:
            self.sampler.begin(own, size)
        module = self.state.model
        if not self._algorithm.averages_weights:
            module = self._machine.wrap(module, self._ddp_arguments)
        arguments = module, self.state.optimizers, self._algorithm
        self._attachment = attach(
            *arguments,
            process_group=group,
            timeout=self._timeout,
            observers=self._observers(),
            init_sync=False,
        )
        if membership.generation > 0:
            self._continue_algorithm(self._attachment)
            for mark in self._marks:
                self._attachment.runner.tracer.tell(*mark)
        self._machine.watch_hosts()
        self._has_begun = True
        self._marked_ns = _concurrency.perf_counter_ns()
        self._changes.train(membership)
        return Run(self, membership, module, self._attachment)

    def _continue_algorithm(self, attachment: Attachment) -> None:
        """Give the algorithm what remains of its state. Collective."""
        fresh = attachment.state_dict()
        if fresh["impl"]:
            remains = self.state.algorithm or {}
            attachment.load_state_dict({**fresh, "impl": with_remaining(fresh["impl"], remains)})

    def _await_candidates(self, size: int) -> None:
        """Wait for processes that want to join, since there are too few ranks."""
        end_s = _concurrency.monotonic() + self._timeout.total_seconds()
        while not self._changes.candidates():
            if _concurrency.monotonic() > end_s:
                raise NoQuorumError(
                    f"torchbagua: {size} ranks are left, fewer than min_ranks={self._min_ranks}, and no other rank has "
                    f"asked to join within {self._timeout.total_seconds():g} s: the training ends after step "
                    f"{self.state.num_steps}"
                )
            _concurrency.sleep(_LOOK_EVERY_S)

    def _close(self) -> None:
        """Leave the generation, as after a failure."""
        if self._attachment is not None:
            self._attachment.abandon()
            if self._has_begun:
                state = self._attachment.state_dict()["impl"]
                self._norms = norm_of(state, OF_RANK), norm_of(state, frozenset({"mean"}))
                self.state.keep_algorithm(state)
            self._attachment = None
        self._machine.close_group()
        gc.collect()  # the old DDP

    def _leave(self) -> None:
        """Leave the training: the others decide on the next members with the vote of this rank, but without it."""
        self._close()
        with suppress(CommunicationError):
            self._changes.leave(self._membership)

    def leave_at_boundary(self) -> None:
        """Have this rank leave at the next boundary."""
        self._is_leaving = True

    def count_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step once every optimizer has stepped."""
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self.state.optimizers):
            self._stepped.clear()
            self._num_barren = 0
            self._marked_ns = _concurrency.perf_counter_ns()
            self.state.count_step()
            if self.sampler is not None:
                self.sampler.commit()

    def check_boundary(self) -> None:
        """Raise _Leaves or _Changes if this rank leaves, or wants another rank to join, or else what has failed."""
        if self._failure is not None:
            raise self._failure
        if self._is_leaving:
            raise _Leaves
        if _concurrency.monotonic() > self._looked_s + _LOOK_EVERY_S:
            self._looked_s = _concurrency.monotonic()
            if self._changes.candidates():
                raise _Changes


def _describe_residuals(what: str, norm: float) -> str:
    return f"; residuals with a norm of {norm:.3g} {what}" if norm else ""


def describe_change(before: Membership, after: Membership, num_steps: int, seconds: float) -> str:
    """Return a line about a change of the membership."""
    lost = [
        f"rank {number} on {member.host}" for number, member in enumerate(before.members) if member not in after.members
    ]
    new = [
        f"rank {number} on {member.host}" for number, member in enumerate(after.members) if member not in before.members
    ]
    who = [f"{word} {', '.join(ranks)}" for word, ranks in (("lost", lost), ("with new", new)) if ranks]
    return (
        f"torchbagua: generation {after.generation}: {len(before.members)} to {len(after.members)} ranks"
        f"{' (' + '; '.join(who) + ')' if who else ''}, step {num_steps:,}, {seconds:.1f} s"
    )


class NoProgressError(CommunicationError):
    """Generations follow each other, and none finishes a step."""


def describe(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], algorithm: Algorithm
) -> dict[str, str]:
    """Return what must be the same on all ranks, by name."""
    tensors = [(name, tuple(each.shape), str(each.dtype)) for name, each in model.state_dict().items()]
    num = sum(parameter.numel() for parameter in model.parameters())
    return {
        "torchbagua": __version__,
        "the model": f"{type(model).__name__} of {num:,} parameters (layout {fingerprint(tensors):x})",
        "the optimizers": ", ".join(type(optimizer).__name__ for optimizer in optimizers),
        "the algorithm": str(algorithm),
    }


def is_of_communication(error: BaseException) -> bool:
    """Return whether an error is one of communication, and not of the user's code."""
    seen = set[int]()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, EvictedError | NoQuorumError | NoProgressError):
            return False
        if isinstance(current, CommunicationError | dist.DistError):
            return True
        if isinstance(current, RuntimeError) and "gloo" in str(current):
            return True
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return False


def _release(error: BaseException) -> None:
    """Drop what the frames of an error refer to, such as the DDP of the generation."""
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__


def run(
    train: Callable[[Run], object],
    model: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str,
    *,
    state: Mapping[str, Stateful] | None = None,
    sampler: Sampler | None = None,
    timeout: timedelta = timedelta(seconds=30),
    min_ranks: int = 1,
    quorum: Literal["majority", "any"] = "majority",
    join: Sequence[str] = (),
    on_leave: Callable[[Run], object] | None = None,
    on_evicted: Literal["raise", "join"] = "raise",
    ddp: Mapping[str, Any] | None = None,
    observers: Callable[[], Sequence[Observer]] = tuple,
) -> None:
    """Call `train` once for each membership of a job, until it returns on all ranks. Collective at the start.

    If a rank fails, leaves or joins, the others agree on who goes on, open a new default group, give each other the
    newest state, and call `train` again. `train` reads `run.step`, or `run.batches`, to continue where the training is.
    An exception of your own code in `train` ends this rank alone, and is raised.

    The processes find each other as with `init_process_group`, by the variables that torchrun sets. A process joins a
    job that runs if it is given `join`, or the variable TORCHBAGUA_JOIN. Without any of these, it begins a job alone.

    Args:
        train: trains with `run.module` until the training ends.
        model: on the CPU, the same on all ranks, not wrapped.
        optimizers: of its parameters.
        algorithm: to attach, or its registered name.
        state: further objects of the training, by name, such as schedulers: new ranks receive their states.
        sampler: of the DataLoader that `run.batches` is given.
        timeout: the longest wait for a rank that is busy.
        min_ranks: with fewer ranks, the training waits for others to join, for at most the timeout.
        quorum: "majority": only more than half of the ranks, or half with rank 0, may go on, so that there are never
            two trainings. With "any", every part of the ranks that is cut off goes on by itself.
        join: addresses of ranks of a job, "host:port", of which one must live.
        on_leave: called with the last `run` if this rank leaves since it got SIGTERM; it may save the model.
        on_evicted: with "join", a rank without which the others have gone on joins them again, and gets their state.
        ddp: arguments of DistributedDataParallel.
        observers: returns the observers of each membership, since an observer serves one attachment.

    Raises:
        TypeError, ValueError: an argument does not fit.
        EvictedError: the others go on without this rank, and `on_evicted` is "raise".
        NoQuorumError: too few ranks are left, or fewer than `min_ranks`.
        NoProgressError: five generations in a row have not finished a step.
        ConnectionError, TimeoutError: no rank of the job to join answers, or the ranks do not meet at the start.
    """
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    described = init_for(algorithm, given)
    check_arguments(model, given, described, state or {}, sampler, timeout, min_ranks, quorum, on_evicted)
    training = Training(
        TorchMachine(timeout, join),
        model,
        given,
        described,
        state or {},
        sampler,
        timeout,
        min_ranks=min_ranks,
        needs_quorum=quorum == "majority",
        joins_again=on_evicted == "join",
        ddp_arguments=ddp,
        observers=observers,
    )
    if quorum == "any":
        warn_user(
            'torchbagua: elastic.run: with quorum="any", a link that is cut makes two trainings out of one: each part '
            "of the ranks goes on by itself, and writes its own checkpoints"
        )
    with _leave_on_sigterm(training):
        training.run(train, on_leave)


def check_arguments(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: Algorithm,
    state: Mapping[str, Stateful],
    sampler: Sampler | None,
    timeout: timedelta,
    min_ranks: int,
    quorum: str,
    on_evicted: str,
) -> None:
    """Raise TypeError or ValueError if an argument of `run` does not fit."""
    if not isinstance(model, torch.nn.Module) or isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"elastic.run: model must be a module without DistributedDataParallel, got {type(model).__name__}"
        )
    if sharded_parts(model) or any(map(is_sharded, optimizers)):
        raise ValueError("elastic.run: model and optimizers must be whole on every rank, got sharded ones")
    if not all(parameter.is_cpu for parameter in model.parameters()):
        raise ValueError("elastic.run: model must be on the CPU: GPUs are not supported yet")
    if algorithm.averages_weights and algorithm.averages_gradients_within_nodes:
        raise ValueError(
            f"elastic.run: {type(algorithm).__name__} must have hierarchical=False: it would average gradients within "
            "the nodes that have several ranks, which a change of the membership does not keep"
        )
    if getattr(algorithm, "peer_selection_mode", "all") == "shift_one":
        raise ValueError(
            'elastic.run: peer_selection_mode must be "all": "shift_one" needs an even number of ranks, which a change '
            "of the membership does not keep"
        )
    for name, each in state.items():
        if not hasattr(each, "state_dict") or not hasattr(each, "load_state_dict"):
            raise TypeError(
                f"elastic.run: state[{name!r}] must have state_dict and load_state_dict, got {type(each).__name__}"
            )
    if sampler is not None and not isinstance(sampler, Sampler):
        raise TypeError(f"elastic.run: sampler must be an elastic.Sampler, got {type(sampler).__name__}")
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise ValueError(f"elastic.run: timeout must be a positive datetime.timedelta, got {timeout!r}")
    if not isinstance(min_ranks, int) or min_ranks < 1:
        raise ValueError(f"elastic.run: min_ranks must be at least 1, got {min_ranks!r}")
    if quorum not in ("majority", "any"):
        raise ValueError(f'elastic.run: quorum must be "majority" or "any", got {quorum!r}')
    if on_evicted not in ("raise", "join"):
        raise ValueError(f'elastic.run: on_evicted must be "raise" or "join", got {on_evicted!r}')
    if dist.is_initialized():
        raise ValueError(
            "elastic.run: torch's default group must not be open: elastic.run opens it for each membership; create "
            "groups of your own in train"
        )


@contextmanager
def _leave_on_sigterm(training: Training) -> Iterator[None]:
    """Have SIGTERM end the training of this rank at the next boundary."""

    def leave(number: int, frame: FrameType | None) -> None:
        training.leave_at_boundary()

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not on the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class TorchMachine:
    """This process, with torch.distributed."""

    def __init__(self, timeout: timedelta, join: Sequence[str] = ()) -> None:
        self._timeout = timeout
        self._join = join
        self._launcher: dist.Store | None = None
        self._own: Member | None = None
        self._mailbox: dist.Store | None = None
        self._has_warned = False
        self._excepthook = sys.excepthook
        self._other_connections: Collection[str] = ()

    def meet(self) -> tuple[Mailboxes, Membership | None, Collection[Member]]:
        num_local = os.environ.get("LOCAL_WORLD_SIZE", "1")
        if dist.is_torchelastic_launched() and num_local != "1" and os.environ["LOCAL_RANK"] == "0":
            warn_user(
                f"elastic.run: this agent of torchrun has {num_local} ranks, and ends all of them when one dies. Start "
                "an agent for each rank, with --nproc-per-node=1"
            )
        port = int(os.environ.get("TORCHBAGUA_PORT", "0"))
        self._mailbox = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False, timeout=self._timeout)
        addresses = self._join or [each for each in os.environ.get("TORCHBAGUA_JOIN", "").split(",") if each]
        is_alone = not addresses and "RANK" not in os.environ
        reachable = addresses[0].rpartition(":")[0] if addresses else os.environ.get("MASTER_ADDR", "localhost")
        host = own_address(reachable)
        name = secrets.token_hex(8)
        # An agent or a shell starts a rank again. A port that was chosen at random may be another process's later.
        place = f"{host} {os.getppid()} {os.environ.get('RANK') or port or name}"
        own = self._own = Member(name, host, self._mailbox.port, place)
        self._mailbox.set("owner", json.dumps(asdict(own)))
        store = dist.PrefixStore(own.id, self._mailbox)
        store.set("status", f"0 {WAITS}")
        mailboxes = Mailboxes(own, store, self._connect, _open_line)
        if addresses:
            return mailboxes, None, self._owners(mailboxes, addresses)
        if is_alone:
            return mailboxes, Membership(0, (own,)), ()
        is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        timeout = self._timeout if is_restarted else max(self._timeout, _START)
        try:
            return mailboxes, *self._meet_at_launcher(own, timeout)
        except RuntimeError as error:
            raise ConnectionError(
                "elastic.run: the ranks have not met at the launcher's store, "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, within {timeout.total_seconds():g} s. "
                "A process that joins a job whose launcher's store has ended needs the address of a rank that lives, "
                "as join or as TORCHBAGUA_JOIN"
            ) from error

    def _meet_at_launcher(self, own: Member, timeout: timedelta) -> tuple[Membership | None, Collection[Member]]:
        self._launcher, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        launcher = StoreRequests(dist.PrefixStore("torchbagua/elastic", self._launcher), timeout)
        text = json.dumps(asdict(own))
        if launcher.add(f"starts/{rank}", 1) > 1:
            members = _members_at(launcher, size)
            launcher.set(f"member/{rank}", text)  # the members that the next restarted process asks
            return None, members
        launcher.set(f"member/{rank}", text)
        members = _members_at(launcher, size)
        if launcher.add("have met", 1) == size:
            launcher.set("all have met", "")
        launcher.wait(["all have met"], timeout)  # the store may end with this process
        return Membership(0, tuple(members)), ()

    def _owners(self, mailboxes: Mailboxes, addresses: Sequence[str]) -> Collection[Member]:
        """Return the other processes that have mailboxes at these addresses; wait until there is one."""
        places = [address.rpartition(":") for address in addresses]
        if not all(host and port.isdecimal() for host, _, port in places):
            raise ValueError(f'elastic.run: join must have addresses of the form "host:port", got {list(addresses)}')
        nameless = [Member("", host, int(port)) for host, _, port in places]
        end_s = _concurrency.monotonic() + self._timeout.total_seconds()
        while True:
            texts = mailboxes.ask(nameless, lambda store: store.get("owner")).values.values()
            if owners := {Member(**json.loads(text)) for text in texts} - {mailboxes.own}:
                return owners
            if _concurrency.monotonic() > end_s:
                raise ConnectionError(
                    f"elastic.run: no process of the job to join answers at {', '.join(addresses)} within "
                    f"{self._timeout.total_seconds():g} s"
                )
            _concurrency.sleep(_LOOK_EVERY_S)

    def _connect(self, member: Member) -> dist.Store:
        client = self._client(member, timedelta(seconds=SILENT_S))
        return dist.PrefixStore(member.id, client) if member.id else client

    def _client(self, member: Member, timeout: timedelta) -> dist.Store:
        return dist.TCPStore(member.host, member.port, is_master=False, wait_for_workers=False, timeout=timeout)

    def store(self, membership: Membership) -> dist.Store:
        first = membership.members[0]
        assert self._mailbox is not None
        client = self._mailbox if first == self._own else self._client(first, self._timeout)
        client.set_timeout(self._timeout)
        return dist.PrefixStore(f"{first.id}/generation/{membership.generation}", client)

    def open_group(self, membership: Membership, rank: int) -> dist.ProcessGroup:
        self._other_connections = connections().keys()  # of the user
        store = dist.PrefixStore("group", self.store(membership))
        size = len(membership.members)
        self._excepthook = sys.excepthook
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=self._timeout)
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def wrap(self, model: torch.nn.Module, arguments: Mapping[str, Any]) -> DistributedDataParallel:
        return DistributedDataParallel(model, init_sync=False, **arguments)

    def watch_hosts(self) -> None:
        new = connections().keys() - self._other_connections
        if not keep_alive(new) and dist.get_world_size() > 1 and not self._has_warned:
            self._has_warned = True
            warn_user(
                "torchbagua: the sockets of this process cannot be found in /proc/self/fd, so the loss of a host is "
                f"noticed after timeout={self._timeout.total_seconds():g} s instead of 5 s"
            )

    def close_group(self) -> None:
        if (group := dist.group.WORLD) is not None:
            if group.size() > 1:
                end_waits(backend_of(group), int(group.rank() == 0))
            dist.destroy_process_group()
            sys.excepthook = self._excepthook  # torch adds the rank to every line of an error, for each group again


def connections() -> dict[str, int]:
    """Return the sockets of this process by their names, with their file descriptors."""
    found = {}
    with suppress(OSError):
        for entry in os.scandir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile
                name = os.readlink(entry.path)
                if name.startswith("socket:"):
                    found[name] = int(entry.name)
    return found


def keep_alive(names: Collection[str]) -> int:
    """Have the kernel close these connections if the other host does not answer; return how many are over TCP.

    gloo and TCPStore set no such option, so they would wait for as long as their timeout. The kernel of a host whose
    process is slow, or stopped, does answer.
    """
    num = 0
    for name, descriptor in connections().items():
        with suppress(OSError):  # it is not connected, or closed meanwhile
            if name in names:
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.getpeername()
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                        for option, value in _KEEP_ALIVE.items():
                            connection.setsockopt(socket.IPPROTO_TCP, option, value)
                        num += 1
    return num


def _open_line(member: Member) -> socket.socket:
    line = socket.create_connection((member.host, member.port), SILENT_S)
    line.setblocking(False)
    return line


def _members_at(launcher: StoreRequests, size: int) -> list[Member]:
    texts = launcher.read_texts([f"member/{number}" for number in range(size)])
    return [Member(**json.loads(text)) for text in texts]


def own_address(host: str) -> str:
    """Return the address of this machine that another host sees."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
