"""The test suite of transports: those of the package pass, and each broken transport fails the right check."""

import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from torchbagua.testing.transports import TransportFault, check_transport
from torchbagua.transport import Abilities, Members, Transport, TransportError, TransportMaker, gloo
from torchbagua.transport.gloo import GlooTransport
from transports import PlayedNccl, QueueTransport, StagedOnCpu, StagedOverGloo, play_pinned_memory

DEADLINE = timedelta(seconds=1)

MESSAGES = {"message_bits", "connect", "dtypes", "tags", "twin"}
DEADLINES = {"missing_member", "deadline_of_messages", "abort_of_peer", "abort_by_another_thread"}
ENDS = {"use_after_abort", "close", "threads"}
COLLECTIVES = {"all_gather", "all_reduce"}
ALL_TO_ALL = {"all_to_all", "all_to_all_single"}
LIVES = MESSAGES | DEADLINES | ENDS


class Endless(QueueTransport):
    abilities = Abilities(frozenset({"cpu"}), has_deadline=False)


@pytest.mark.parametrize(
    ("maker", "size", "included", "excluded"),
    [
        pytest.param(GlooTransport, 2, LIVES, ALL_TO_ALL, marks=pytest.mark.release),
        (GlooTransport, 3, LIVES | COLLECTIVES | {"deadline_of_collectives"}, ALL_TO_ALL),
        (StagedOnCpu, 3, LIVES | {"all_reduce"}, {"all_gather"}),
        pytest.param(StagedOverGloo, 3, LIVES, set(), marks=pytest.mark.gpu),
        # A host that never waits has no deadlines.
        (functools.partial(PlayedNccl, calls=[]), 3, ENDS | COLLECTIVES | ALL_TO_ALL, MESSAGES | DEADLINES),
        (QueueTransport, 2, LIVES, COLLECTIVES),
        pytest.param(QueueTransport, 4, LIVES, COLLECTIVES, marks=pytest.mark.release),
        (Endless, 3, MESSAGES | ENDS, DEADLINES),
    ],
    ids=["gloo of 2", "gloo", "staged", "staged gpu", "in stream order", "of the docs", "of the docs of 4", "endless"],
)
def test_checks_of_transports(
    maker: TransportMaker, size: int, included: set[str], excluded: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if maker is StagedOnCpu:
        play_pinned_memory(monkeypatch, [], [])
    if size == 2:  # connect when a message needs it
        monkeypatch.setattr(gloo, "MOST_CONNECTED_AT_ONCE", 1)
    ran = set(check_transport(maker, size, deadline=DEADLINE))
    assert ran > included
    assert not ran & excluded


# Transports of the package


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


class FailsInOneMember(QueueTransport):
    def post_send(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        if self.rank == 1:
            raise OSError("cable cut")
        super().post_send(peer, tensor, tag)


class GivesUpEarly(QueueTransport):
    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self.timeout_s *= 0.7


class ReturnsEarly(QueueTransport):
    def wait_receive(self, peer: int, tag: int) -> None:
        self.timeout_s = 0.5
        with suppress(TransportError):
            super().wait_receive(peer, tag)


class ForgetsPeer(QueueTransport):
    def wait_receive(self, peer: int, tag: int) -> None:
        try:
            super().wait_receive(peer, tag)
        except TransportError as error:
            raise TransportError(str(error)) from error


def broken(class_name: str, /, base: type[Transport] = QueueTransport, **changes: Any) -> type[Transport]:
    """Return a transport with other attributes than those of `base`."""
    return type(class_name, (base,), changes)


IGNORES_ABORT = broken("IgnoresAbort", abort=lambda transport: None)
CLAIMS_GROUP = broken("ClaimsGroup", abilities=replace(QueueTransport.abilities, has_torch_group=True))


class LeavesThread(QueueTransport):
    over = threading.Event()

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        threading.Thread(target=self.over.wait, name="left behind", daemon=True).start()


class SumsTwice(GlooTransport):
    def all_reduce(self, tensor: torch.Tensor) -> None:
        super().all_reduce(tensor)
        tensor.mul_(2)


class GathersElsewhere(GlooTransport):
    """Clears the output before it reads this member's part, which may be a part of the output."""

    def all_gather_into_tensor(self, output: torch.Tensor, own: torch.Tensor) -> None:
        output.zero_()
        super().all_gather_into_tensor(output, own)


LONG = timedelta(seconds=2)


@pytest.mark.parametrize(
    ("maker", "failed", "why"),
    [
        (broken("Nameless", name=""), "protocol", "name: expected str, got ''"),
        (broken("NoOpen", open=None), "protocol", "open: expected a method of this name, got none"),
        (FailsInOneMember, "message_bits", r"rank 1: post_send\(2, uint8\[1\], 0\): .* OSError: cable cut"),
        (WritesToSent, "sent_tensor_stays", r"tensor sent to rank \d, after wait_send: expected byte"),
        (SendsLater, "sent_tensor_is_free", r"message from rank \d, which has overwritten .* got 0; "),
        (ReturnsEarly, "late_send", r"message from rank 1, at the end of wait_receive: expected byte 0"),
        (MixesTags, "tags", r"message from rank \d with tag 4001 of \[0, 5, 1, 4001\]: expected byte"),
        (SumsTwice, "all_reduce", r"all_reduce of 1 elements of torch.float32: expected element 0"),
        (GathersElsewhere, "all_gather", r"all_gather_into_tensor in place: output of torch.uint8"),
        (IGNORES_ABORT, "use_after_abort", "post_send after abort: expected TransportError, got none"),
        (CLAIMS_GROUP, "torch_group", "torch_group.*: expected no error, got LacksAbility: queues has no"),
        (LeavesThread, "threads", r"expected no new thread, got \['left behind', 'left behind'"),
        (GivesUpEarly, "deadline_of_messages", r"rank 0: .*: expected no error before 1.6 s, got one after 1.4"),
        (ForgetsPeer, "deadline_of_messages", "rank 0: .*: expected an error with peer 2, got peer None"),
    ],
    ids=lambda argument: argument.__name__ if isinstance(argument, type) else "",
)
def test_a_broken_transport_fails_the_right_check(maker: type[Transport], failed: str, why: str) -> None:
    deadline = 3 * LONG if maker is ReturnsEarly else LONG if maker is GivesUpEarly else DEADLINE
    LeavesThread.over.clear()
    try:
        with pytest.raises(TransportFault, match=f"^torchbagua: check {failed!r} failed on .*{why}"):
            check_transport(maker, deadline=deadline, timeout=2 * deadline)
    finally:
        LeavesThread.over.set()
