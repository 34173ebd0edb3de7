"""The test suite of transports: those of the package pass, and each broken transport fails the right check."""

import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from torchbagua.testing.transports import TransportFault, check_transport
from torchbagua.transport import Abilities, Members, TransportError, TransportMaker, gloo
from torchbagua.transport.gloo import GlooTransport
from transports import PlayedNccl, QueueTransport, StagedOnCpu, StagedOverGloo, play_pinned_memory

DEADLINE = timedelta(seconds=1)

MESSAGES = {"message_bits", "connect", "dtypes", "tags", "twin"}
DEADLINES = {"missing_member", "deadline_of_messages", "abort_of_peer", "abort_by_another_thread"}
ENDS = {"use_after_abort", "close", "threads"}
COLLECTIVES = {"all_gather", "all_reduce"}


def check(maker: TransportMaker, size: int = 3) -> set[str]:
    return set(check_transport(maker, size, deadline=DEADLINE))


# Transports of the package


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.release), 3])
def test_gloo(size: int) -> None:
    ran = check(GlooTransport, size)
    assert ran > MESSAGES | DEADLINES | ENDS | COLLECTIVES | {"deadline_of_collectives"}
    assert "all_to_all" not in ran


@pytest.mark.release
def test_gloo_that_connects_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "MOST_CONNECTED_AT_ONCE", 1)
    check(GlooTransport)


def test_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    play_pinned_memory(monkeypatch, [], [])
    ran = check(StagedOnCpu)
    assert ran > MESSAGES | DEADLINES | ENDS
    assert ran & COLLECTIVES == {"all_reduce"}


@pytest.mark.gpu
def test_staging_of_a_gpu() -> None:
    assert check(StagedOverGloo) > MESSAGES | DEADLINES | ENDS


def test_collectives_in_stream_order() -> None:
    """A host that never waits has no deadlines."""
    ran = check(functools.partial(PlayedNccl, calls=[]))
    assert ran > ENDS | COLLECTIVES | {"all_to_all", "all_to_all_single"}
    assert not ran & (MESSAGES | DEADLINES)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.release)])
def test_the_queue_transport_of_the_docs(size: int) -> None:
    ran = check(QueueTransport, size)
    assert ran > MESSAGES | DEADLINES | ENDS
    assert not ran & COLLECTIVES


def test_deadlines_that_are_not_claimed_are_not_tested() -> None:
    class Endless(QueueTransport):
        abilities = Abilities(frozenset({"cpu"}), has_deadline=False)

    ran = check(Endless)
    assert ran > MESSAGES | ENDS
    assert not ran & DEADLINES


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Abilities("cpu"), "Abilities: devices must be a frozenset of device types, .* got 'cpu'"),
        (
            lambda: Abilities(frozenset()),
            r"Abilities: devices must be a frozenset of device types, .* got frozenset\(\)",
        ),
        (
            lambda: Abilities(frozenset({"cpu"}), collectives=frozenset({"allgather"})),
            r"Abilities: collectives must be a frozenset within \['all_gather', 'all_reduce', 'all_to_all'\], got froz",
        ),
        (lambda: check_transport(GlooTransport, 1), "check_transport: size must be 2 or more, got 1"),
    ],
)
def test_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


# Broken transports


class MixesTags(QueueTransport):
    """Receives messages in the order of sends, whatever their tags."""

    def post_send(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        super().post_send(peer, tensor, 0)

    def wait_receive(self, peer: int, tag: int) -> None:
        if (peer, tag) in self.receives:
            self.receives[peer, 0] = self.receives.pop((peer, tag))
            super().wait_receive(peer, 0)


class DropsLastByte(QueueTransport):
    def post_send(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        changed = tensor.clone()
        changed.view(torch.uint8)[-1] ^= 1
        super().post_send(peer, changed, tag)


class WritesToSent(QueueTransport):
    def post_send(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        super().post_send(peer, tensor, tag)
        tensor.zero_()


class SendsLater(QueueTransport):
    """Reads a sent tensor only at the receive; the sender may have overwritten it by then."""

    def post_send(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        super().post_send(peer, tensor, tag)
        messages = self.postbox.messages[self.rank, peer, tag]
        messages[-1] = tensor


class ReturnsEarly(QueueTransport):
    def wait_receive(self, peer: int, tag: int) -> None:
        self.timeout_s = 0.5
        with suppress(TransportError):
            super().wait_receive(peer, tag)


class GivesUpEarly(QueueTransport):
    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self.timeout_s *= 0.7


class WaitsForever(QueueTransport):
    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self.timeout_s = None


class ForgetsPeer(QueueTransport):
    def wait_receive(self, peer: int, tag: int) -> None:
        try:
            super().wait_receive(peer, tag)
        except TransportError as error:
            raise TransportError(str(error)) from error


class RaisesAnotherError(QueueTransport):
    def wait_receive(self, peer: int, tag: int) -> None:
        try:
            super().wait_receive(peer, tag)
        except TransportError as error:
            raise OSError("cable cut") from error


class IgnoresAbort(QueueTransport):
    def abort(self) -> None:
        pass


class LeavesThread(QueueTransport):
    over = threading.Event()

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        threading.Thread(target=self.over.wait, name="left behind", daemon=True).start()


class Nameless(QueueTransport):
    name = ""


class ClaimsGroup(QueueTransport):
    abilities = replace(QueueTransport.abilities, has_torch_group=True)


class HasNoMethods:
    name = "bare"
    abilities = QueueTransport.abilities

    def __init__(self, members: Members) -> None:
        pass

    def abort(self) -> None:
        pass

    join = abort


class SumsTwice(GlooTransport):
    def all_reduce(self, tensor: torch.Tensor) -> None:
        super().all_reduce(tensor)
        tensor.mul_(2)


class GathersElsewhere(GlooTransport):
    """Clears the output before it reads this member's part, which may be a part of the output."""

    def all_gather_into_tensor(self, output: torch.Tensor, own: torch.Tensor) -> None:
        output.zero_()
        super().all_gather_into_tensor(output, own)


class FailsInOneMember(QueueTransport):
    def post_send(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        if self.rank == 1:
            raise OSError("cable cut")
        super().post_send(peer, tensor, tag)


LONG = timedelta(seconds=2)


@pytest.mark.parametrize(
    ("maker", "deadline", "failed", "why"),
    [
        (Nameless, DEADLINE, "protocol", "name: expected str, got ''"),
        (HasNoMethods, DEADLINE, "protocol", "open: expected a method of this name, got none"),
        (DropsLastByte, DEADLINE, "message_bits", r"message of 1 bytes from rank \d, .*: expected byte 3 of 9 to be"),
        (
            FailsInOneMember,
            DEADLINE,
            "message_bits",
            r"rank 1: post_send\(2, uint8\[1\], 0\): .* OSError: cable cut",
        ),
        (WritesToSent, DEADLINE, "sent_tensor_stays", r"tensor sent to rank \d, after wait_send: expected byte"),
        (SendsLater, DEADLINE, "sent_tensor_is_free", r"message from rank \d, which has overwritten .* got 0; "),
        (ReturnsEarly, 3 * LONG, "late_send", r"message from rank 1, at the end of wait_receive: expected byte 0"),
        (MixesTags, DEADLINE, "tags", r"message from rank \d with tag 4001 of \[0, 5, 1, 4001\]: expected byte"),
        (SumsTwice, DEADLINE, "all_reduce", r"all_reduce of 1 elements of torch.float32: expected element 0"),
        (GathersElsewhere, DEADLINE, "all_gather", r"all_gather_into_tensor in place: output of torch.uint8"),
        (IgnoresAbort, DEADLINE, "use_after_abort", "post_send after abort: expected TransportError, got none"),
        (ClaimsGroup, DEADLINE, "torch_group", "torch_group.*: expected no error, got LacksAbility: queues has no"),
        (LeavesThread, DEADLINE, "threads", r"expected no new thread, got \['left behind', 'left behind'"),
        pytest.param(
            WaitsForever,
            DEADLINE,
            "deadline_of_messages",
            r"rank 0: wait_receive\(2, 7\): expected an end within 8 s",
            marks=pytest.mark.release,
        ),
        (GivesUpEarly, LONG, "deadline_of_messages", r"rank 0: .*: expected no error before 1.6 s, got one after 1.4"),
        (ForgetsPeer, DEADLINE, "deadline_of_messages", "rank 0: .*: expected an error with peer 2, got peer None"),
        (
            RaisesAnotherError,
            DEADLINE,
            "use_after_abort",
            "posted before abort: expected .*, got OSError: cable cut",
        ),
    ],
    ids=lambda argument: argument.__name__ if isinstance(argument, type) else "",
)
def test_a_broken_transport_fails_the_right_check(
    maker: TransportMaker, deadline: timedelta, failed: str, why: str
) -> None:
    LeavesThread.over.clear()
    try:
        with pytest.raises(TransportFault, match=f"^torchbagua: check {failed!r} failed on .*{why}"):
            check_transport(maker, deadline=deadline, timeout=2 * deadline)
    finally:
        LeavesThread.over.set()
