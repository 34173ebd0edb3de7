"""Checks of failures and shutdown: missing peers, peers that abort, and the use of a closed transport."""

import functools
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torchbagua.testing.transports.member import Member, Mismatch, SuiteThread
from torchbagua.transport.base import COLLECTIVES, Transport, TransportError

_EARLIEST = 0.8  # a fraction of the timeout: socket clocks are coarse
_THREADS_END_WITHIN_S = 2.0


def check_deadline_of_messages(member: Member) -> None:
    """Waiting for a peer that does not send fails after the timeout, and the error names the peer."""
    transport = member.open(has_short_timeout=True)
    member.meet()
    if member.rank == 0:
        silent = member.size - 1
        transport.post_receive(silent, member.zeros(transport, 100), 7)
        member.expect_failure(
            f"wait_receive({silent}, 7), which rank {silent} does not send",
            lambda: transport.wait_receive(silent, 7),
            peer=silent,
            at_least_s=_EARLIEST * member.deadline_s,
        )
    member.meet()


def check_deadline_of_collectives(member: Member) -> None:
    """A collective that a member does not call fails within the timeout."""
    for collective in sorted(member.open(has_short_timeout=True).abilities.collectives):
        transport = member.open(has_short_timeout=True)
        member.meet()
        if member.rank != member.size - 1:
            _expect_failure_of_collective(member, transport, collective, f"without rank {member.size - 1}")
        member.meet()


def check_missing_member(member: Member) -> None:
    """If one member calls nothing, the others fail to connect to it or to communicate."""
    transport = member.open(has_short_timeout=True, is_connected=False)
    missing = member.size - 1

    def communicate() -> None:
        transport.open()
        transport.use_device(member.device_of(transport.abilities))
        if transport.abilities.has_messages:
            transport.connect(None)
            transport.post_receive(missing, member.zeros(transport, 10), 0)
            transport.wait_receive(missing, 0)
        for collective in sorted(transport.abilities.collectives):
            member.run_collective(transport, collective)

    if member.rank != missing:
        member.expect_failure(f"connect and receive, while rank {missing} does neither", communicate)
    member.meet()


def check_abort_of_peer(member: Member) -> None:
    """If a member aborts, members that wait for it get an error that names it, at once or within the timeout."""
    transport = member.open(has_short_timeout=True)
    aborting = member.size - 1
    if member.rank == aborting:
        member.meet()
        time.sleep(member.deadline_s / 4)
        transport.abort()
    else:
        transport.post_receive(aborting, member.zeros(transport, 100), 0)
        member.meet()
        member.expect_failure(
            f"wait_receive({aborting}, 0), rank {aborting} has aborted",
            lambda: transport.wait_receive(aborting, 0),
            peer=aborting,
        )
    member.meet()


def check_abort_of_collective(member: Member) -> None:
    """If a member aborts, members in a collective with it get an error at once or within the timeout."""
    for collective in sorted(member.open(has_short_timeout=True).abilities.collectives):
        transport = member.open(has_short_timeout=True)
        member.meet()
        if member.rank == member.size - 1:
            time.sleep(member.deadline_s / 4)
            transport.abort()
        else:
            _expect_failure_of_collective(member, transport, collective, f"rank {member.size - 1} has aborted")
        member.meet()


def check_abort_by_another_thread(member: Member) -> None:
    """`abort` returns while another thread waits, and ends that wait with an error at once or within the timeout."""
    transport = member.open(has_short_timeout=True)
    if member.rank == 0:
        transport.post_receive(member.before, member.zeros(transport, 100), 0)
        waiting = SuiteThread(lambda: transport.wait_receive(member.before, 0), "waits while another thread aborts")
        waiting.start()
        time.sleep(member.deadline_s / 4)
        transport.abort()

        def wait() -> None:
            waiting.join()
            if waiting.error is not None:
                raise waiting.error

        member.expect_failure(f"wait_receive({member.before}, 0), aborted by another thread", wait)
    member.meet()


def check_use_after_abort(member: Member) -> None:
    """After `abort` every message and collective fails, even if posted before. A second `abort` does nothing."""
    transport = member.open()
    member.use(transport)
    if transport.abilities.has_messages:
        transport.post_receive(member.before, member.zeros(transport, 10), 1)
    member.meet()
    transport.abort()
    transport.abort()
    transport.join()
    _expect_unusable(member, transport, "after abort")
    if transport.abilities.has_messages:
        member.expect_failure(
            f"wait_receive({member.before}, 1), posted before abort", lambda: transport.wait_receive(member.before, 1)
        )
    transport.abort()
    member.meet()


def check_close(member: Member) -> None:
    """After all members have closed, every message and collective fails, and `abort` does nothing."""
    transport = member.open()
    member.use(transport)
    member.meet()
    transport.close()
    _expect_unusable(member, transport, "after close")
    transport.abort()
    transport.join()
    member.meet()


def check_threads(member: Member) -> None:
    """No Python thread of the transport is left after `abort` and `join`."""
    member.meet()
    before = set(threading.enumerate())
    member.meet()
    transport = member.open()
    member.use(transport)
    member.meet()
    transport.abort()
    transport.join()
    member.meet()
    give_up_s = time.monotonic() + _THREADS_END_WITHIN_S
    while left := sorted(thread.name for thread in {*threading.enumerate()} - before if _is_of_transport(thread)):
        if time.monotonic() > give_up_s:
            raise Mismatch(f"abort and join: expected no new thread, got {left}")
        time.sleep(0.01)


def _is_of_transport(thread: threading.Thread) -> bool:
    return not isinstance(thread, SuiteThread)


def check_unclaimed(member: Member) -> None:
    """A message or collective that the transport does not claim works, or raises TransportError and no other error."""
    abilities = member.open().abilities
    if not abilities.has_messages:
        _allow_failure(member, lambda transport: transport.post_receive(member.before, member.zeros(transport, 10), 0))
        _allow_failure(member, lambda transport: transport.post_send(member.after, member.zeros(transport, 10), 0))
    for collective in sorted(COLLECTIVES - abilities.collectives):
        _allow_failure(member, functools.partial(member.run_collective, collective=collective))


def _allow_failure(member: Member, call: Callable[[Transport], None]) -> None:
    """Call a function with a separate transport, which is unusable after an error."""
    with suppress(TransportError):
        call(member.open())


def _expect_failure_of_collective(member: Member, transport: Transport, collective: str, why: str) -> None:
    member.expect_failure(f"{collective}, {why}", functools.partial(member.run_collective, transport, collective))


def _expect_unusable(member: Member, transport: Transport, when: str) -> None:
    """Expect an error from every operation that the transport claims."""
    if transport.abilities.has_messages:
        tensor = member.zeros(transport, 10)
        member.expect_failure(f"post_send {when}", lambda: transport.post_send(member.after, tensor, 9))
        member.expect_failure(f"post_receive {when}", lambda: transport.post_receive(member.before, tensor, 9))
    for collective in sorted(transport.abilities.collectives):
        _expect_failure_of_collective(member, transport, collective, when)
