"""One member's side of a check: its transports, the messages that it expects, and its barriers with other members."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from torchbagua.transport.base import Abilities, Members, Transport, TransportError, TransportMaker

_SCHEDULING_S = 1.0  # a thread may wait this long for a processor
_POLL_S = 0.002


class TransportFault(AssertionError):
    """A transport failed a check. Names the check, the rank, the operation, and the expected and actual results."""


class Mismatch(Exception):
    """A check failed on this rank. Names the operation, and the expected and actual results."""


class OtherMemberFailed(Exception):
    """The check failed on another rank, so this rank need not finish it."""


class SuiteThread(threading.Thread):
    """A thread of the suite. `error` is the exception that its target raised, if any."""

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(name=f"transport suite: {name}", daemon=True)
        self._function = target
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self.error = error


class Member:
    """The context in which a check runs on one rank.

    Attributes:
        rank, size: this rank, and the number of members.
        after, before: the ranks of the two neighbors around the ring.
        peers: the ranks of all other members.
        deadline_s: the deadline in seconds.
        last_call: the last call of a transport.
        is_meeting: whether this rank is waiting for others in `meet`.
    """

    def __init__(
        self, maker: TransportMaker, members: Members, deadline: timedelta, device: torch.device | None
    ) -> None:
        self.rank, self.size = members.rank, members.size
        self.after, self.before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.peers = [rank for rank in range(self.size) if rank != self.rank]
        self.deadline_s = deadline.total_seconds()
        self.last_call = "the transport's constructor"
        self.is_meeting = False
        self._maker = maker
        self._members = members
        self._deadline = deadline
        self._device = device
        self._abilities: Abilities | None = None
        self._transports: list[Transport] = []
        self._num_meetings = 0

    def open(self, *, has_short_timeout: bool = False, is_connected: bool = True) -> Transport:
        """Return a new transport. Collective."""
        store = dist.PrefixStore(f"transport{len(self._transports)}", self._members.store)
        timeout = self._deadline if has_short_timeout else self._members.timeout
        transport = self._watch(self._maker(replace(self._members, store=store, timeout=timeout)))
        self._abilities = getattr(transport, "abilities", None)  # a transport without abilities fails the first check
        if is_connected:
            transport.open()
            transport.use_device(self.device_of(transport.abilities))
            if transport.abilities.has_messages:
                transport.connect(None)
        return transport

    @property
    def abilities(self) -> Abilities:
        """The abilities of the transport that `open` returned last."""
        assert self._abilities is not None
        return self._abilities

    def twin_of(self, transport: Transport) -> Transport:
        """Return a twin, which `abort` aborts too. Raises TransportError if the transport serves one thread."""
        return self._watch(transport.twin())

    def device_of(self, abilities: Abilities) -> torch.device:
        """Return the device of this rank's tensors."""
        if self._device is None:
            self._device = torch.device("cpu" if "cpu" in abilities.devices else min(abilities.devices))
        return self._device

    def zeros(self, transport: Transport, num_elements: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return a tensor to receive into."""
        return torch.zeros(num_elements, dtype=dtype, device=self.device_of(transport.abilities))

    def message(self, transport: Transport, sender: int, receiver: int, num_bytes: int, tag: int = 0) -> torch.Tensor:
        """Return the message from `sender` to `receiver`: random bytes, the same on every member."""
        random = torch.Generator().manual_seed((tag * self.size + sender) * self.size + receiver)
        values = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=random)
        return values.to(self.device_of(transport.abilities))

    def exchange(self, transport: Transport, peers: Iterable[int], *, num_bytes: int = 1000, tag: int = 0) -> None:
        """Send a message to each of `peers` and receive theirs; post the receives first."""
        peers = list(peers)
        received = {peer: self.zeros(transport, num_bytes) for peer in peers}
        sent = {peer: self.message(transport, self.rank, peer, num_bytes, tag) for peer in peers}
        for peer in peers:
            transport.post_receive(peer, received[peer], tag)
        for peer in peers:
            transport.post_send(peer, sent[peer], tag)
        for peer in peers:
            transport.wait_receive(peer, tag)
            expected = self.message(transport, peer, self.rank, num_bytes, tag)
            self.expect_bits(f"message from rank {peer} with tag {tag}", received[peer], expected)
        for peer in peers:
            transport.wait_send(peer, tag)

    def use(self, transport: Transport) -> None:
        """Exchange messages with all peers, and run each collective, if the transport has them. Collective."""
        if transport.abilities.has_messages:
            self.exchange(transport, self.peers)
        for collective in sorted(transport.abilities.collectives):
            self.run_collective(transport, collective)

    def run_collective(self, transport: Transport, collective: str) -> None:
        """Run a collective of `Abilities.collectives` on a few bytes. Collective."""
        many, few = self.zeros(transport, self.size, torch.float32), self.zeros(transport, 1, torch.float32)
        if collective == "all_to_all":
            transport.all_to_all_single(torch.zeros_like(many), many)
        elif collective == "all_gather":
            transport.all_gather_into_tensor(many, few)
        else:
            transport.all_reduce(few)
        self.settle(transport)

    def settle(self, transport: Transport) -> None:
        """Wait for the GPU's current stream; do nothing on other devices."""
        device = self.device_of(transport.abilities)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def meet(self) -> None:
        """Wait at a barrier of all members, which uses the store and not the transport."""
        key = f"meeting{self._num_meetings}"
        self._num_meetings += 1
        if self._members.store.add(key, 1) == self.size:
            self._members.store.set(f"{key} is complete", "")
        self.is_meeting = True
        while not self._members.store.check([f"{key} is complete"]):
            if self._members.store.check(["failed"]):
                raise OtherMemberFailed
            time.sleep(_POLL_S)
        self.is_meeting = False

    def expect_bits(self, subject: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise Mismatch unless both tensors have the same bytes; `subject` names the tensor."""
        got_bytes, expected_bytes = (tensor.cpu().view(-1).view(torch.uint8) for tensor in (got, expected))
        differs = (got_bytes != expected_bytes).nonzero()
        if len(differs):
            index = int(differs[0])
            raise Mismatch(
                f"{subject}: expected byte {index} of {len(expected_bytes)} to be {int(expected_bytes[index])}, got "
                f"{int(got_bytes[index])}; {len(differs)} bytes differ"
            )

    def expect_values(self, subject: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise Mismatch unless both tensors are equal; `subject` names the tensor."""
        differs = (got != expected).view(-1).nonzero()
        if len(differs):
            index = int(differs[0])
            raise Mismatch(
                f"{subject}: expected element {index} of {expected.numel()} to be {expected.view(-1)[index].item()}, "
                f"got {got.view(-1)[index].item()}; {len(differs)} elements differ"
            )

    def expect_failure(
        self,
        subject: str,
        call: Callable[[], object],
        *,
        peer: int | None = None,
        at_least_s: float = 0.0,
    ) -> None:
        """Raise Mismatch unless `call` raises TransportError within `deadline_s`, with a tolerance.

        The tolerance is a second `deadline_s`, and a second for the host's scheduler.
        """
        start_s = time.monotonic()
        try:
            call()
        except TransportError as error:
            taken_s = time.monotonic() - start_s
            if peer is not None and error.peer != peer:
                raise Mismatch(f"{subject}: expected an error with peer {peer}, got peer {error.peer}") from error
        except Exception as error:
            raise Mismatch(f"{subject}: expected TransportError, got {type(error).__name__}: {error}") from error
        else:
            raise Mismatch(f"{subject}: expected TransportError, got none")
        if taken_s < at_least_s:
            raise Mismatch(f"{subject}: expected no error before {at_least_s:g} s, got one after {taken_s:.2f} s")
        if taken_s > 2 * self.deadline_s + _SCHEDULING_S:
            raise Mismatch(f"{subject}: expected an error within {self.deadline_s:g} s, got one after {taken_s:.2f} s")

    def abort(self) -> None:
        """Abort all transports of this check."""
        for transport in self._transports:
            transport.abort()
        for transport in self._transports:
            transport.join()

    def _watch(self, transport: Transport) -> Transport:
        watched = cast(Transport, _Watched(transport, self))
        self._transports.append(watched)
        return watched


class _Watched:
    """Forwards calls to a transport, and records each call for errors."""

    def __init__(self, transport: Transport, member: Member) -> None:
        self._transport = transport
        self._member = member

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._transport, name)
        if not callable(value):
            return value

        def call(*arguments: object) -> object:
            self._member.last_call = f"{name}({', '.join(map(_describe, arguments))})"
            return value(*arguments)

        return call


def _describe(argument: object) -> str:
    """Return an argument as text for errors; for a tensor, its dtype and shape."""
    if isinstance(argument, torch.Tensor):
        return f"{str(argument.dtype).removeprefix('torch.')}{list(argument.shape)}"
    if isinstance(argument, list):
        return f"[{', '.join(map(_describe, argument))}]"
    return repr(argument)
