"""Run the checks: as one member of a group, or with all members as threads of this process."""

import functools
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from torchbagua.testing.transports import failures
from torchbagua.testing.transports.collectives import COLLECTIVE_CHECKS, check_collectives_in_turn, check_torch_group
from torchbagua.testing.transports.member import Member, Mismatch, OtherMemberFailed, SuiteThread, TransportFault
from torchbagua.testing.transports.messages import MESSAGE_CHECKS
from torchbagua.transport.base import COLLECTIVES, Abilities, Members, Transport, TransportMaker
from torchbagua.transport.gloo import gloo_group

Check = Callable[[Member], None]

_TIMEOUT = timedelta(seconds=20)
_DEADLINE = timedelta(seconds=1)


def check_protocol(member: Member) -> None:
    """The transport has the attributes and the methods of `Transport`."""
    transport = member.open(is_connected=False)
    for attribute, wanted in (("name", str), ("abilities", Abilities)):
        got = getattr(transport, attribute, None)
        if not isinstance(got, wanted) or got == "":
            raise Mismatch(f"{attribute}: expected {wanted.__name__}, got {got!r}")
    abilities = transport.abilities
    if not abilities.has_messages and abilities.collectives != COLLECTIVES:
        got = sorted(abilities.collectives)
        raise Mismatch(f"abilities: expected messages, or the collectives {sorted(COLLECTIVES)}, got {got}")
    for method in vars(Transport):
        if not method.startswith("_") and not callable(getattr(transport, method, None)):
            raise Mismatch(f"{method}: expected a method of this name, got none")


def checks_of(abilities: Abilities) -> dict[str, Check]:
    """Return the checks of a transport with these abilities, by name, in execution order."""
    found: list[Check] = []
    if abilities.has_messages:
        found += MESSAGE_CHECKS
    for collective in sorted(abilities.collectives):
        found += COLLECTIVE_CHECKS[collective]
    if abilities.collectives:
        found.append(check_collectives_in_turn)
    if abilities.has_torch_group:
        found.append(check_torch_group)
    found += [failures.check_unclaimed, failures.check_use_after_abort, failures.check_close, failures.check_threads]
    if abilities.has_deadline and not abilities.in_stream_order:
        if abilities.has_messages:
            found += [
                failures.check_deadline_of_messages,
                failures.check_abort_of_peer,
                failures.check_abort_by_another_thread,
            ]
        if abilities.collectives:
            found += [failures.check_deadline_of_collectives, failures.check_abort_of_collective]
        found.append(failures.check_missing_member)
    return {check.__name__.removeprefix("check_"): check for check in found}


def check_member(
    maker: TransportMaker,
    members: Members,
    *,
    deadline: timedelta = _DEADLINE,
    device: torch.device | None = None,
) -> list[str]:
    """Test a transport as one member. All members call it, each in a separate process or thread. Collective.

    Args:
        maker: opens the transports, one or more for each check.
        members: at least two. `members.timeout` bounds all waits of checks in which every peer takes part.
        deadline: the timeout of transports whose waits should fail.
        device: the device of the tensors; by default the CPU, or else the first device type that the transport names.

    Returns:
        the names of the checks that the transport's abilities require.

    Raises:
        ValueError: the group has fewer than two members.
        TransportFault: the transport failed a check; all members raise the same error.
    """
    if members.size < 2:
        raise ValueError(f"check_member: members must be 2 or more, got {members.size}")
    suite = _Suite(maker, members, deadline, device)
    checks = checks_of(suite.run("protocol", check_protocol).abilities)
    for name, check in checks.items():
        suite.run(name, check)
    return ["protocol", *checks]


def check_transport(
    maker: TransportMaker,
    size: int = 3,
    *,
    timeout: timedelta = _TIMEOUT,
    deadline: timedelta = _DEADLINE,
    device: torch.device | None = None,
) -> list[str]:
    """Test a transport with one thread of this process for each member.

    Args:
        maker: opens the transports.
        size: the number of members, 2 or more.
        timeout: the bound on waits of checks in which every peer takes part.
        deadline, device: see `check_member`.

    Returns:
        the names of the checks that the transport's abilities require.

    Raises:
        ValueError: `size` is less than 2.
        TransportFault: the transport failed a check.
    """
    if size < 2:
        raise ValueError(f"check_transport: size must be 2 or more, got {size}")
    store = dist.HashStore()
    ranks = tuple(range(size))
    groups: dict[int, dist.ProcessGroup] = {}  # must live until all members are done
    names: dict[int, list[str]] = {}

    def run(rank: int) -> None:
        group = groups[rank] = gloo_group(dist.PrefixStore("group", store), rank, size, timeout)
        members = Members(group, ranks, rank, dist.PrefixStore("members", store), timeout, ranks)
        names[rank] = check_member(maker, members, deadline=deadline, device=device)

    threads = [SuiteThread(functools.partial(run, rank), f"rank {rank}") for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for thread in threads:
        if thread.error is not None:
            raise thread.error
    return names[0]


class _Suite:
    """Runs the checks on one member; all members take part in each check."""

    def __init__(
        self, maker: TransportMaker, members: Members, deadline: timedelta, device: torch.device | None
    ) -> None:
        self._maker = maker
        self._members = members
        self._deadline = deadline
        self._device = device
        # A check may wait for one timeout, and for a few deadlines in sequence.
        self._limit_s = members.timeout.total_seconds() + 4 * deadline.total_seconds() + 2

    def run(self, name: str, check: Check) -> Member:
        """Run one check. Raises TransportFault on all members if it fails on one."""
        store = dist.PrefixStore(name, self._members.store)
        member = Member(self._maker, replace(self._members, store=store), self._deadline, self._device)
        problem = self._problem_of(member, name, check)
        order = 0
        if problem:
            # A later failure on another rank may be a consequence of this one.
            order = store.add("failures", 1)
            store.set("failed", "")
            self._abort(member)
        store.set(f"verdict{member.rank}", f"{order} {problem}")
        verdicts = self._verdicts(store, name)
        self._abort(member)
        failed = [(order, rank, problem) for rank, (order, problem) in enumerate(verdicts) if order]
        if failed:
            _, rank, problem = min(failed)
            raise TransportFault(f"torchbagua: check {name!r} failed on rank {rank}: {problem}")
        return member

    def _problem_of(self, member: Member, name: str, check: Check) -> str:
        """Run the check, and return the problem that it found; "" if it found none."""

        def run() -> None:
            if self._device is not None and self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            check(member)

        thread = SuiteThread(run, name)
        thread.start()
        thread.join(self._limit_s)
        if thread.is_alive() and member.is_meeting:  # for a member that is about to report its own delay
            thread.join(self._limit_s)
        if thread.is_alive():
            return f"{member.last_call}: expected an end within {self._limit_s:g} s, got none"
        error = thread.error
        if error is None or isinstance(error, OtherMemberFailed):
            return ""
        if isinstance(error, Mismatch):
            return str(error)
        return f"{member.last_call}: expected no error, got {type(error).__name__}: {error}"

    def _verdicts(self, store: dist.Store, name: str) -> list[tuple[int, str]]:
        """Return for each rank its place in the order of failures, 0 if it did not fail, and its problem."""
        keys = [f"verdict{rank}" for rank in range(self._members.size)]
        try:
            store.wait(keys, timedelta(seconds=2 * self._limit_s))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise TransportFault(f"torchbagua: check {name!r} did not end on ranks {missing}") from error
        found = [store.get(key).decode().partition(" ") for key in keys]
        return [(int(order), problem) for order, _, problem in found]

    def _abort(self, member: Member) -> None:
        """Abort the member's transports. The checks detect an abort that raises or does not return."""
        thread = SuiteThread(member.abort, "aborts")
        thread.start()
        thread.join(self._limit_s)
