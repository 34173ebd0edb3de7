"""Transports that tests use instead of the package's: fakes on the CPU, and the transport that a page of docs shows."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from documentation import names_in
from torchbagua.transport import staged
from torchbagua.transport.base import COLLECTIVES, Abilities, Members, Transport
from torchbagua.transport.gloo import GlooTransport
from torchbagua.transport.staged import StagedTransport

QueueTransport: type[Transport] = names_in("extend/transport.md", "class QueueTransport", module=__name__)[
    "QueueTransport"
]


class MessagesAlone(GlooTransport):
    """A gloo transport without collectives: sums are then computed in rank order, as the oracle computes them."""

    abilities = replace(GlooTransport.abilities, collectives=frozenset())


def group_like_the_oracle(group: dist.ProcessGroup) -> tb.BaguaProcessGroup:
    """Return a group that sums in rank order: more than two ranks, whose sums have an order, use only messages."""
    return tb.BaguaProcessGroup(group, transport=MessagesAlone if group.size() > 2 else None)


class PlayedNccl(GlooTransport):
    """A gloo transport with the abilities of NCCL's, which records the threads that call collectives."""

    abilities = Abilities(frozenset({"cpu"}), in_stream_order=True, has_messages=False, collectives=COLLECTIVES)

    def __init__(self, members: Members, calls: list[str]) -> None:
        super().__init__(members)
        self._rank = members.rank
        self._calls = calls

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        """Exchange tensors of one dtype, some of them empty, as NCCL does in a single operation."""
        assert len({tensor.dtype for tensor in [*outputs, *inputs]}) == 1
        self._calls.append(threading.current_thread().name)
        group = self.torch_group()
        works = [group.recv([outputs[rank]], rank, 0) for rank in self._peers_of(outputs)]
        works += [group.send([inputs[rank]], rank, 0) for rank in self._peers_of(inputs)]
        outputs[self._rank].copy_(inputs[self._rank])
        for work in works:
            work.wait()

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self._calls.append(threading.current_thread().name)
        super().all_to_all_single(output, input)

    def all_gather_into_tensor(self, output: torch.Tensor, own: torch.Tensor) -> None:
        self._calls.append(threading.current_thread().name)
        theirs = torch.empty_like(output)
        super().all_gather_into_tensor(theirs, own.clone())
        output.copy_(theirs)

    def _peers_of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        return [rank for rank, tensor in enumerate(tensors) if tensor.numel() and rank != self._rank]


class CollectivesAlone(PlayedNccl):
    """A gloo transport without messages; the host waits for its collectives."""

    abilities = replace(PlayedNccl.abilities, in_stream_order=False)
    post_send, post_receive = Transport.post_send, Transport.post_receive  # which raise

    def __init__(self, members: Members) -> None:
        super().__init__(members, [])


class StagedOverGloo(StagedTransport):
    """A staged transport that opens and closes its own host transport."""

    def __init__(self, members: Members) -> None:
        super().__init__(GlooTransport(members), members.timeout)

    def abort(self) -> None:
        super().abort()
        self._host.abort()


class StagedOnCpu(StagedOverGloo):
    """Passes CPU tensors through other host memory, as a staged transport passes GPU tensors."""

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self.abilities = replace(self.abilities, devices=frozenset({"cpu"}))


class PlayedStream:
    """A stream whose work is always complete, and which records when the host waits for it."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def query(self) -> bool:
        self._log.append("host waits")
        return True

    def record_event(self) -> "PlayedStream":
        return self


def play_pinned_memory(monkeypatch: pytest.MonkeyPatch, log: list[str], allocated: list[int]) -> None:
    """Make staged transports work without a GPU.

    Args:
        monkeypatch: the test's.
        log: gets an entry each time the host waits for a stream.
        allocated: gets the number of bytes of each buffer.
    """

    def pinned(num_bytes: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        allocated.append(num_bytes)
        return torch.zeros(num_bytes, dtype=dtype)

    class Torch:
        cuda = type("cuda", (), {"current_stream": staticmethod(lambda device: PlayedStream(log))})
        uint8 = torch.uint8
        empty = staticmethod(pinned)

    monkeypatch.setattr(staged, "torch", Torch)
