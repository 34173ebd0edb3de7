"""The members of a job: the processes of each generation, and how they agree on those of the next.

Every process has a mailbox: a TCPStore server of its own, which answers from a thread in C++ while Python computes, and
ends with the process. No other process keeps anything for it, so the loss of none ends the job. A mailbox contains:

- `status`: the generation of its owner and its phase there, such as OPENS or WAITS. Only the owner writes it.
- `register/g`: the owner's vote on the members of generation g, from the time at which it is a member of g - 1.
- `decided/g`: the members of generation g. Whoever knows them writes them.
- `membership`: the generation of its owner with its members, for processes that want to join.
- `candidate/n`: the n-th process that has asked the owner to join, with a description of its training.
- `refused`: why the owner may not join.

Execution order of a change, `Changes.agree`, of each rank that has noticed a failure and closed its groups:

1. It writes that it waits for the next generation, and reads the mailboxes of all members until each of them waits
   too, has ended, has been silent for 3 s, or has been busy for the timeout and 3 s.
2. The first of the ranks that wait proposes; the others follow one second after the other, if they see no decision.
3. A proposal collects promises from the registers of a quorum of the old members. It then has a quorum accept a list:
   the one that was accepted under the highest ballot, or else the ranks that wait and the processes that want to join,
   if those that wait or leave are a quorum.
4. The accepted list is decided. A rank that finds itself missing in it is evicted.

This is Paxos with registers at the members in place of acceptors that run code, since a rank's Python may be busy:
L. Lamport, "The Part-Time Parliament", 1998; E. Gafni and L. Lamport, "Disk Paxos", 2003; with compare-and-swap, as in
D. Rystsov, "CASPaxos", 2018.
"""

import json
import queue
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from torchbagua import _concurrency
from torchbagua.transport.errors import CommunicationError
from torchbagua.transport.store_requests import REQUEST_THREAD

T = TypeVar("T")

SILENT_S = 3.0
"""A process whose mailbox does not answer for so long is lost. Only C++ has to run there."""

# A mailbox is read after a short while first, and then less and less often.
_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 0.5
_NEXT_PROPOSES_S = 1.0
_ASK_AGAIN_S = 5.0
_BACK_OFF_S = 0.1

OPENS, TRAINS, IS_DONE = "opens", "trains", "is done"
"""The phases of the owner of a mailbox in its generation."""

WAITS, LEAVES = "waits", "leaves"
"""The phases of the owner of a mailbox before its generation is decided: whether it wants to be in it."""

JOINS = "joins"
"""The phase of a process that is in no generation yet."""

# The pauses before a process joins again that was lost soon after it had joined: after the first time, the second, ...
_FLAPPING_PAUSES_S = (60.0, 120.0, 240.0)


class EvictedError(CommunicationError):
    """The other ranks go on without this one: it did not answer in time.

    Attributes:
        members: the other ranks.
    """

    def __init__(self, message: str, members: Sequence["Member"] = ()) -> None:
        super().__init__(message)
        self.members = tuple(members)


class NoQuorumError(CommunicationError):
    """Too few ranks are left to decide that they go on: the others may be doing so."""


@dataclass(frozen=True)
class Member:
    """A process of a job.

    Attributes:
        id: no other process has it, not even one that has the same address later.
        host, port: the address of its mailbox.
        place: what a process that replaces it has too: the host and the number there, see `Changes.note_loss`.
    """

    id: str
    host: str
    port: int
    place: str = ""


@dataclass(frozen=True)
class Membership:
    """The members of a generation, in the order of their ranks."""

    generation: int
    members: tuple[Member, ...]

    @classmethod
    def of(cls, text: bytes | str) -> "Membership":
        """Return the membership that `text` contains."""
        fields = json.loads(text)
        return cls(fields["generation"], _members_of(fields["members"]))

    def text(self) -> str:
        """Return the text for a mailbox."""
        return json.dumps(asdict(self))

    def is_quorum(self, part: Collection[Member]) -> bool:
        """Return whether `part` may decide: more than half of the members, or half of them with the first."""
        num = len([member for member in self.members if member in part])
        return 2 * num > len(self.members) or (2 * num == len(self.members) and self.members[0] in part)


@dataclass(frozen=True)
class Register:
    """A vote on the members of a generation.

    Attributes:
        promised: the highest ballot that has a promise; lower ones are refused.
        ballot: the ballot under which `members` was accepted; 0 if none was.
        members: the accepted list.
    """

    promised: int = 0
    ballot: int = 0
    members: tuple[Member, ...] = ()

    @classmethod
    def of(cls, text: bytes | str) -> "Register":
        """Return the register that `text` contains."""
        fields = json.loads(text)
        return cls(fields["promised"], fields["ballot"], _members_of(fields["members"]))

    def text(self) -> str:
        """Return the text for the mailbox."""
        return json.dumps(asdict(self))


def _members_of(entries: Iterable[Any]) -> tuple[Member, ...]:
    return tuple(Member(**entry) for entry in entries)


@dataclass(frozen=True)
class Answers(Generic[T]):
    """The answers of several mailboxes.

    Attributes:
        values: by member, of those that have answered.
        gone: the members whose processes have ended.
    """

    values: dict[Member, T]
    gone: set[Member]


class Mailboxes:
    """The mailbox of this process, and connections to the mailboxes of others.

    Args:
        own: this process.
        store: its mailbox.
        connect: returns a connection to the mailbox of another process. It may block.
        open_line: opens a connection to the same port that carries nothing, and breaks when the process ends; raises
            ConnectionRefusedError if it has ended. TCPStore would write to stderr, or try to connect for the timeout.
    """

    def __init__(
        self,
        own: Member,
        store: dist.Store,
        connect: Callable[[Member], dist.Store],
        open_line: Callable[[Member], socket.socket | None] = lambda member: None,
    ) -> None:
        self.own = own
        self.store = store
        self._connect = connect
        self._open_line = open_line
        self._lines: dict[Member, socket.socket | None] = {}
        self._connections: dict[Member, dist.Store] = {}
        self._unanswered: dict[Member, _concurrency.Lock] = {}

    def ask(self, members: Iterable[Member], request: Callable[[dist.Store], T]) -> Answers[T]:
        """Make a request to each of these mailboxes at the same time, and wait for 3 s for the last answer.

        A connection that breaks is opened once more.
        """
        answers: _concurrency.SimpleQueue[tuple[Member, list[T], bool]] = _concurrency.SimpleQueue()
        values: dict[Member, T] = {}
        others = set[Member]()
        for member in members:
            earlier = self._unanswered.get(member)
            if member == self.own:
                values[member] = request(self.store)
            elif earlier is None or not earlier.locked():
                pending = self._unanswered[member] = _concurrency.Lock()
                pending.acquire()
                arguments = (member, request, answers, pending)
                _concurrency.Thread(target=self._ask, args=arguments, name=REQUEST_THREAD, daemon=True).start()
                others.add(member)
        gone = set[Member]()
        end_s = _concurrency.monotonic() + SILENT_S
        while others and (left_s := end_s - _concurrency.monotonic()) > 0:
            with suppress(queue.Empty):
                member, value, has_ended = answers.get(timeout=left_s)
                others.remove(member)
                if value:
                    values[member] = value[0]
                elif has_ended:
                    gone.add(member)
        return Answers(values, gone)

    def _ask(
        self,
        member: Member,
        request: Callable[[dist.Store], T],
        answers: "_concurrency.SimpleQueue[tuple[Member, list[T], bool]]",
        pending: "_concurrency.Lock",
    ) -> None:
        value, has_ended = list[T](), False
        try:
            self._check_line(member)
            try:
                value.append(request(self._connection(member)))
            except RuntimeError:  # the connection has been closed
                self._connections.pop(member, None)
                value.append(request(self._connection(member)))
        except ConnectionRefusedError:
            has_ended = True
        except (OSError, RuntimeError):  # as good as silent
            self._connections.pop(member, None)
        pending.release()
        answers.put((member, value, has_ended))

    def _check_line(self, member: Member) -> None:
        """Raise ConnectionRefusedError if another process has ended."""
        if member in self._lines and _is_broken(self._lines[member]):
            self._hang_up(member)
        if member not in self._lines:
            self._lines[member] = self._open_line(member)

    def _hang_up(self, member: Member) -> None:
        self._connections.pop(member, None)
        if (line := self._lines.pop(member, None)) is not None:
            line.close()

    def _connection(self, member: Member) -> dist.Store:
        if member not in self._connections:
            self._connections[member] = self._connect(member)
        return self._connections[member]

    def forget(self, members: Collection[Member]) -> None:
        """Close the connections to all processes but these."""
        for member in {*self._connections, *self._lines} - {*members}:
            self._hang_up(member)
        self._unanswered = {member: pending for member, pending in self._unanswered.items() if member in members}


def _is_broken(line: socket.socket | None) -> bool:
    """Return whether the process at the other end of a line has ended."""
    if line is None:
        return False
    try:
        return not line.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


@dataclass(frozen=True)
class View:
    """What a mailbox says about a generation.

    Attributes:
        generation: of its owner.
        phase: OPENS, TRAINS, IS_DONE, WAITS or LEAVES.
        decided: the members of the generation that was asked for; None if the mailbox does not know them.
        register: the vote on them; None if the owner has none.
    """

    generation: int
    phase: str
    decided: tuple[Member, ...] | None = None
    register: Register | None = None

    def waits_for(self, generation: int) -> bool:
        """Return whether the owner waits for a generation."""
        return self.phase == WAITS and self.generation == generation

    def has_closed_its_groups(self, generation: int) -> bool:
        """Return whether the owner waits for a generation, or leaves before it."""
        return self.phase in (WAITS, LEAVES) and self.generation == generation


def _pauses_s() -> Iterator[float]:
    """Yield the pauses between two looks at a mailbox."""
    seconds = _FIRST_LOOK_S
    while True:
        yield seconds
        seconds = min(2 * seconds, _LAST_LOOK_S)


def _read(store: dist.Store, key: str) -> bytes | None:
    return store.get(key) if store.check([key]) else None


def _append(store: dist.Store, key: str, text: str) -> None:
    """Write a text under the first unused number of a key."""
    number = 0
    while store.compare_set(f"{key}/{number}", "", text).decode() != text:
        number += 1


def _status(store: dist.Store) -> View:
    status = _read(store, "status")
    if status is None:  # another process has taken over the port
        raise ConnectionRefusedError
    number, phase = status.decode().split(" ", 1)
    return View(int(number), phase)


def _view(store: dist.Store, generation: int, register: Register | None = None) -> View:
    decided = _read(store, f"decided/{generation}")
    return replace(
        _status(store), decided=None if decided is None else _members_of(json.loads(decided)), register=register
    )


def update_register(store: dist.Store, generation: int, change: Callable[[Register], Register | None]) -> View:
    """Replace a register by `change(register)`, unless that is None; return the view with the register afterwards."""
    key = f"register/{generation}"
    register = None
    while (text := _read(store, key)) is not None:
        register = Register.of(text)
        new = change(register)
        if new is None:
            break
        if store.compare_set(key, text.decode(), new.text()).decode() == new.text():
            register = new
            break
    return _view(store, generation, register)


class Changes:
    """The part of one process in the changes of the membership.

    Args:
        mailboxes: of this process.
        timeout: the longest wait for a rank that is busy.
        needs_quorum: whether only a quorum of a generation decides on the next. Otherwise every part that is cut off
            goes on by itself.
        training: describes the training, by what must be the same on all ranks.
    """

    def __init__(
        self,
        mailboxes: Mailboxes,
        timeout: timedelta,
        *,
        needs_quorum: bool = True,
        training: Mapping[str, str] | None = None,
    ) -> None:
        self.mailboxes = mailboxes
        self.timeout_s = timeout.total_seconds()
        self.needs_quorum = needs_quorum
        self._training = dict(training or {})
        self._num_requests = 0  # to join, that were read
        self._candidates: list[Member] = []  # in the order of their requests
        self._losses: dict[str, tuple[int, float]] = {}  # by place: how many in a row, and when it may join again

    def candidates(self) -> list[Member]:
        """Return the processes that have asked this one to join, still wait, and may join now."""
        while (text := _read(self.mailboxes.store, f"candidate/{self._num_requests}")) is not None:
            request = json.loads(text)
            candidate = Member(**request["member"])
            if request["training"] == self._training:
                self._candidates.append(candidate)
            else:
                self._refuse(candidate, request["training"])
            self._num_requests += 1
        views = self.mailboxes.ask(self._candidates, _status).values
        self._candidates = [each for each in self._candidates if each in views and views[each].phase == JOINS]
        now_s = _concurrency.monotonic()
        return [each for each in self._candidates if self._losses.get(each.place, (0, now_s))[1] <= now_s]

    def _refuse(self, candidate: Member, training: Mapping[str, str]) -> None:
        names = [name for name, own in self._training.items() if training.get(name) != own]
        own, theirs = (", ".join(f"{name} {each.get(name)}" for name in names) for each in (self._training, training))
        reason = f"elastic.run: this process cannot join a training with {own}, since it has {theirs}"
        self.mailboxes.ask([candidate], lambda store: store.set("refused", reason))

    def note_loss(self, member: Member, *, was_new: bool) -> None:
        """Have the process at the place of a lost member wait before it joins, if the member was new."""
        num = self._losses.get(member.place, (0, 0.0))[0] + 1 if was_new else 0
        pause_s = _FLAPPING_PAUSES_S[min(num, len(_FLAPPING_PAUSES_S)) - 1] if was_new else 0.0
        self._losses[member.place] = num, _concurrency.monotonic() + pause_s

    def join(self, contacts: Collection[Member]) -> Membership:
        """Ask the members of a job to join, and return the first membership that contains this process.

        Args:
            contacts: processes of the job, of which one must live.

        Raises:
            TimeoutError: no member answers within the timeout.
            ValueError: this process trains something else.
        """
        own = self.mailboxes.own
        request = json.dumps({"member": asdict(own), "training": self._training})
        self.mailboxes.store.set("status", f"0 {JOINS}")
        asked = set[Member]()
        known = {*contacts}
        last_s = asked_s = _concurrency.monotonic()
        pauses_s = _pauses_s()
        while True:
            if _concurrency.monotonic() > asked_s + _ASK_AGAIN_S:  # a member may have taken this process for lost
                asked_s = _concurrency.monotonic()
                asked.clear()
            if (reason := _read(self.mailboxes.store, "refused")) is not None:
                raise ValueError(reason.decode())
            texts = self.mailboxes.ask(known, lambda store: _read(store, "membership")).values.values()
            memberships = [Membership.of(text) for text in texts if text is not None]
            if memberships:
                last_s = _concurrency.monotonic()
                newest = max(memberships, key=lambda membership: membership.generation)
                if own in newest.members:
                    return newest
                known |= {*newest.members}
                new = {*newest.members} - asked
                asked |= self.mailboxes.ask(new, lambda store: _append(store, "candidate", request)).values.keys()
            elif _concurrency.monotonic() > last_s + self.timeout_s:
                addresses = ", ".join(f"{member.host}:{member.port}" for member in known)
                raise TimeoutError(
                    f"torchbagua: no rank of the job to join answers within {self.timeout_s:g} s: {addresses}"
                )
            _concurrency.sleep(next(pauses_s))

    def enter(self, membership: Membership) -> None:
        """Announce that this process opens its groups of a generation, and may vote on the next."""
        store = self.mailboxes.store
        store.set(f"register/{membership.generation + 1}", Register().text())
        store.set("membership", membership.text())
        store.set("status", f"{membership.generation} {OPENS}")
        store.delete_key(f"register/{membership.generation - 1}")

    def train(self, membership: Membership) -> None:
        """Announce that this process trains."""
        self.mailboxes.store.set("status", f"{membership.generation} {TRAINS}")

    def await_entries(self, membership: Membership) -> bool:
        """Wait until all members have called `enter`. Return False if one of them is lost, or does so too late."""
        others = {member for member in membership.members if member != self.mailboxes.own}
        pauses_s = _pauses_s()
        end_s = _concurrency.monotonic() + self.timeout_s
        while others and _concurrency.monotonic() < end_s:
            answers = self.mailboxes.ask(others, _status)
            if answers.gone or any(view.generation > membership.generation for view in answers.values.values()):
                return False
            for member, view in answers.values.items():
                if view.generation == membership.generation and view.phase != WAITS:
                    others.remove(member)
            if others:
                _concurrency.sleep(next(pauses_s))
        return not others

    def finish(self, membership: Membership) -> bool:
        """Wait until all other members have finished too, or are lost. Return False if one of them wants to go on."""
        generation = membership.generation
        self.mailboxes.store.set("status", f"{generation} {IS_DONE}")
        looks = self._look_while(membership, generation, lambda view: view.phase == TRAINS)
        return not any(view.waits_for(generation + 1) for views in looks for view in views)

    def leave(self, base: Membership) -> None:
        """Take part in the decision on the next generation, without being in it; for at most the timeout."""
        generation = base.generation + 1
        self.mailboxes.store.set("status", f"{generation} {LEAVES}")
        for _ in self._look_while(base, generation, lambda view: view.decided is None and view.phase != LEAVES):
            pass

    def _look_while(
        self, membership: Membership, generation: int, is_pending: Callable[[View], bool]
    ) -> Iterator[Collection[View]]:
        """Yield the views of the other members that are pending and not lost, until none is, or until the timeout."""
        others = {member for member in membership.members if member != self.mailboxes.own}
        pauses_s = _pauses_s()
        end_s = _concurrency.monotonic() + self.timeout_s
        while others and _concurrency.monotonic() < end_s:
            views = self.mailboxes.ask(others, lambda store: _view(store, generation)).values
            yield views.values()
            others = {member for member, view in views.items() if is_pending(view)}
            if others:
                _concurrency.sleep(next(pauses_s))

    def agree(self, base: Membership) -> Membership:
        """Agree with the other members of `base` on the next generation, and return it.

        Raises:
            EvictedError: this process is not in it.
            NoQuorumError: too few members of `base` answer within the timeout.
        """
        generation = base.generation + 1
        self.mailboxes.store.set("status", f"{generation} {WAITS}")
        decided = _Change(self, base).decide()
        if self.mailboxes.own not in decided:
            addresses = ", ".join(f"{member.host}:{member.port}" for member in decided)
            raise EvictedError(
                f"torchbagua: the other ranks go on without this one, as generation {generation} of {len(decided)} "
                f"ranks, at {addresses}. This rank did not answer for {SILENT_S:g} s, or it did not notice a failure "
                f"within {self.timeout_s:g} s",
                decided,
            )
        return Membership(generation, decided)


class _Change:
    """One change of the membership, on one rank.

    Attributes:
        gone: the members whose processes have ended.
        silent: the members that have not answered.
    """

    def __init__(self, changes: Changes, base: Membership) -> None:
        self._changes = changes
        self._mailboxes = changes.mailboxes
        self._base = base
        self._generation = base.generation + 1
        # A busy rank notices within the timeout that this one has closed its groups.
        self._end_s = _concurrency.monotonic() + changes.timeout_s + SILENT_S
        self.gone = set[Member]()
        self.silent = set[Member]()

    def decide(self) -> tuple[Member, ...]:
        """Return the next members."""
        own = self._mailboxes.own
        decided, waiting = self._await_others()
        position = waiting.index(own)
        wait_s, turn = _NEXT_PROPOSES_S * position, 0
        while decided is None:
            decided = self._await_decision(wait_s)
            if decided is None:
                turn += 1
                decided = self._propose(turn * len(self._base.members) + self._base.members.index(own))
                wait_s = _BACK_OFF_S * turn * (1 + position)
            if decided is None:
                self._check_quorum()
        return decided

    def _check_quorum(self) -> None:
        left = [member for member in self._base.members if member not in self.gone]
        if not self._may_decide(left) or _concurrency.monotonic() > self._end_s:
            ended, silent = (
                [rank for rank, member in enumerate(self._base.members) if member in lost]
                for lost in (self.gone, self.silent)
            )
            raise NoQuorumError(
                f"torchbagua: too few ranks are left to go on after generation {self._base.generation}, which had "
                f"{len(self._base.members)} ranks: more than half of them must answer, or half with rank 0. Ranks "
                f"{ended} have ended, ranks {silent} do not answer. With quorum='any', every part that is cut off goes "
                "on by itself"
            )
        self.silent.clear()  # they may answer again

    def _may_decide(self, part: Collection[Member]) -> bool:
        return self._base.is_quorum(part) if self._changes.needs_quorum else bool(part)

    def _ask(self, members: Iterable[Member], request: Callable[[dist.Store], T]) -> dict[Member, T]:
        """Make a request to those of `members` that are not lost, and note who is."""
        asked = [member for member in members if member not in self.gone | self.silent]
        answers = self._mailboxes.ask(asked, request)
        self.gone |= answers.gone
        self.silent |= {*asked} - answers.values.keys() - answers.gone
        return answers.values

    def _waiting(self, views: Mapping[Member, "View"]) -> tuple[Member, ...]:
        """Return the members that wait, in the order of their ranks."""
        return tuple(
            member for member in self._base.members if member in views and views[member].waits_for(self._generation)
        )

    def _await_others(self) -> tuple[tuple[Member, ...] | None, tuple[Member, ...]]:
        """Wait until each other member waits, or is lost. Return the decision, if there is one, and who waits."""
        pauses_s = _pauses_s()
        while True:
            views = self._ask(self._base.members, lambda store: _view(store, self._generation))
            waiting = self._waiting(views)
            decided = next((view.decided for view in views.values() if view.decided is not None), None)
            are_settled = all(view.has_closed_its_groups(self._generation) for view in views.values())
            if decided is not None or are_settled or _concurrency.monotonic() > self._end_s:
                return decided, waiting
            _concurrency.sleep(next(pauses_s))

    def _await_decision(self, seconds: float) -> tuple[Member, ...] | None:
        pauses_s = _pauses_s()
        end_s = _concurrency.monotonic() + seconds
        while True:
            decided = _view(self._mailboxes.store, self._generation).decided
            left_s = end_s - _concurrency.monotonic()
            if decided is not None or left_s <= 0:
                return decided
            _concurrency.sleep(min(left_s, next(pauses_s)))

    def _propose(self, ballot: int) -> tuple[Member, ...] | None:
        """Propose the next members under a ballot. Return the decision; None if there is no quorum for it."""

        def promise(register: Register) -> Register | None:
            return replace(register, promised=ballot) if register.promised < ballot else None

        views = self._ask(self._base.members, lambda store: update_register(store, self._generation, promise))
        for view in views.values():
            if view.decided is not None:
                return view.decided
        promised = {member: view.register for member, view in views.items() if view.register is not None}
        promised = {member: register for member, register in promised.items() if register.promised == ballot}
        if not self._may_decide(promised):
            return None
        latest = max(promised.values(), key=lambda register: register.ballot)
        members = latest.members
        if not latest.ballot:
            # Registers vote for busy ranks too, but a few ranks must not leave out many that are late.
            if not self._may_decide(
                [member for member, view in views.items() if view.has_closed_its_groups(self._generation)]
            ):
                return None
            members = (*self._waiting(views), *self._changes.candidates())
        accepted = Register(ballot, ballot, members)

        def accept(register: Register) -> Register | None:
            return accepted if register.promised <= ballot else None

        views = self._ask(views, lambda store: update_register(store, self._generation, accept))
        if not self._may_decide([member for member, view in views.items() if view.register == accepted]):
            return None
        text = json.dumps([asdict(member) for member in members])
        self._ask({*self._base.members, *members}, lambda store: store.set(f"decided/{self._generation}", text))
        return members
