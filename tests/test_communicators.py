"""How a communicator uses the abilities of a transport, and handles its failures."""

import functools
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from ranks import run_ranks
from torchbagua.transport import Members, Transport, TransportError
from torchbagua.transport.gloo import GlooTransport
from transports import PlayedNccl

SHORT = timedelta(seconds=2)


class WithoutAllGather(GlooTransport):
    """A transport with some collectives, but without all_gather."""

    name = "some"
    abilities = replace(GlooTransport.abilities, has_messages=False, collectives=frozenset({"all_to_all"}))


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        (WithoutAllGather, "backend some has no all_gather, which ByteGradAlgorithm needs for tensors on cpu"),
        (
            functools.partial(PlayedNccl, calls=[]),
            "a transport in stream order must serve tensors on cuda only, got cpu from gloo",
        ),
    ],
)
def test_missing_abilities_of_a_transport_raise_on_all_ranks(
    transport: Callable[[Members], GlooTransport], expected: str
) -> None:
    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, timeout=SHORT, transport=transport)
        with pytest.raises(ValueError, match=expected):
            tb.ByteGradAlgorithm().reify(own)

    run_ranks(2, body)


@pytest.mark.parametrize("maker", [lambda members: 5, lambda members: object.__new__(Nameless)])
def test_objects_that_are_no_transport_are_refused(maker: Callable[[Members], GlooTransport]) -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(
            TypeError, match=r"^BaguaProcessGroup: transport must return a .* with a name and Abilities"
        ):
            tb.BaguaProcessGroup(group, timeout=SHORT, transport=maker)

    run_ranks(2, body)


class Nameless:
    """An object with abilities, but without a name."""

    abilities = GlooTransport.abilities


class CountingTransport(GlooTransport):
    """A transport that records its twins, its ends and its devices."""

    def __init__(self, members: Members, counts: list[str]) -> None:
        super().__init__(members)
        self._counts = counts

    def use_device(self, device: torch.device) -> None:
        self._counts.append(f"use {device}")

    def twin(self) -> "CountingTransport":
        self._counts.append("twin")
        return super().twin()  # type: ignore[return-value]

    def abort(self) -> None:
        self._counts.append("abort")
        super().abort()

    def join(self) -> None:
        self._counts.append("join")


def test_a_twin_is_a_single_transport_that_ends_with_the_communicator() -> None:
    """The host's transport also serves GPUs, but a twin does not send their tensors. A device is prepared once."""

    def body(group: dist.ProcessGroup) -> list[str]:
        counts: list[str] = []
        own = tb.BaguaProcessGroup(group, timeout=SHORT, transport=functools.partial(CountingTransport, counts=counts))
        own.open()
        for _ in range(2):
            own.world.use_device(torch.device("cpu"))
        own.world.silent_twin()
        own.close()
        return counts

    for counts in run_ranks(2, body):
        assert [counts.count(name) for name in ("use cpu", "twin", "abort", "join")] == [1, 1, 2, 2], counts


class OneThread(GlooTransport):
    """A transport that serves one thread."""

    name = "one"

    def twin(self) -> GlooTransport:
        return Transport.twin(self)  # type: ignore[return-value]


def test_a_transport_of_one_thread_has_no_twin() -> None:
    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, timeout=SHORT, transport=OneThread)
        own.open()
        with pytest.raises(ValueError, match="for one more thread: one serves one thread"):
            own.world.silent_twin()
        own.close()

    run_ranks(2, body)


class FailsOnce(GlooTransport):
    """A transport whose collective fails."""

    abilities = replace(GlooTransport.abilities, has_messages=False)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        raise TransportError("Connection closed by peer")


def test_a_failed_collective_closes_the_group_and_later_errors_repeat_the_first() -> None:
    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, timeout=SHORT, transport=FailsOnce, global_ranks=[4])
        own.open()
        where = r"the first over the world group failed on rank 0 \(global rank 4\)"
        first = f"^torchbagua: {where}: Connection closed by peer; a rank has"
        with pytest.raises(tb.CommunicationError, match=first):
            own.world.all_reduce(torch.ones(1), "the first", list)
        for purpose in ("the first", "another"):
            with pytest.raises(tb.CommunicationError, match=first):
                own.world.connect(None, purpose)

    run_ranks(1, body)
