"""Verifies that ranks reduce the gradients of the same parameters, before any rank gets the result.

FSDP reduces the gradients that a rank has, end to end. If ranks use different branches of a module, rows of equal
length contain gradients of different parameters, and a row of another length may end the process.

With each row a rank sends a record to every other rank: its part, and the parameters that have a gradient. In a steady
step, records and row are in flight together, so nobody waits for the records alone. A rank whose row is not the one
that followed the previous row last time waits for the records first. If others have begun to reduce the row of last
time, it completes that row with zeros, so that they reach the comparison. Then all ranks raise.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from torchbagua.collectives.exchange import Exchange, Pipeline
from torchbagua.fsdp.parts import CommunicatingPart, Row
from torchbagua.runtime.lane import Lane
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError

_HOST = torch.device("cpu")
_MOST_NAMES = 4


class _Reduction(NamedTuple):
    """The reduction of a row: the number of the part, the row's length, and the places of its parameters."""

    part: int
    num_elements: int
    members: tuple[int, ...]


class _Record(NamedTuple):
    """A rank's reduction; and that of another rank, if this rank knows that the two differ."""

    own: _Reduction
    other: _Reduction


class SameRows:
    """Reduces rows over a group if all its ranks reduce the same rows."""

    def __init__(
        self,
        communicator: Communicator,
        parts: Sequence[CommunicatingPart],
        *,
        replicas: "SameRows | None" = None,
        lane: Lane | None = None,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._communicator = communicator
        self._parts = parts
        self._replicas = replicas
        self._lane = lane
        self._guard = guard
        self._mask_bytes = max(-(-len(part.parameter_names) // 8) for part in parts)
        self._sent: dict[int, tuple[_Record, torch.Tensor]] = {}  # the last record of each part, and its bytes
        self._received = torch.empty(communicator.size, 2 * (10 + self._mask_bytes), dtype=torch.uint8)
        # By the part of the previous row: the next row last time, and a function that reduces zeros like it. All ranks
        # have the same rows here.
        self._last_part: int | None = None
        self._expected: dict[int | None, tuple[_Reduction, Callable[[], None]]] = {}

    def reduce(
        self, part: CommunicatingPart, row: Row, reduce_row: Callable[..., None], *tensors: torch.Tensor
    ) -> None:
        """Call `reduce_row(*tensors)`, which reduces a row of `part`, and return if all ranks reduce the same row.

        In stream order, the lane compares an expected row meanwhile. If ranks differ, it closes the groups.
        """
        if self._communicator.size == 1:
            reduce_row(*tensors)
            return
        own = _Reduction(part.number, row.num_elements, row.members)
        previous, self._last_part = self._last_part, own.part
        if own == self._expected.get(previous, (None, None))[0]:
            if self._lane is None:
                compare = self._start(_Record(own, own))
                reduce_row(*tensors)
                self._require_same(own, compare())
            else:
                self._lane.submit(lambda: self._compare_on_lane(own))
                reduce_row(*tensors)
            return
        records = self._exchange(_Record(own, own))
        self._complete_expected(previous, records)
        self._require_same(own, records)
        layouts = [(x.shape, x.dtype, x.device) for x in tensors]
        self._expected[previous] = own, partial(_reduce_zeros, reduce_row, layouts)
        reduce_row(*tensors)

    def _exchange(self, record: _Record) -> Mapping[int, _Record]:
        """Return all ranks' records by rank, or nothing if they are equal. Collective."""
        if self._lane is None:
            return self._start(record)()
        return self._lane.submit(lambda: self._start(record)()).result()

    def _compare_on_lane(self, own: _Reduction) -> None:
        with self._guard():
            self._require_same(own, self._start(_Record(own, own))())

    def _start(self, record: _Record) -> Callable[[], Mapping[int, _Record]]:
        """Start to exchange records, and return a function that waits for them and returns what `_exchange` does."""
        sent = self._bytes_of(record)
        received = self._received
        pipeline = Pipeline(self._communicator, _HOST)
        exchange = Exchange(pipeline, "agreement", list(received), self._parts[record.own.part].name)
        received[self._communicator.rank] = sent
        exchange.send(itertools.repeat(sent))

        def finish() -> Mapping[int, _Record]:
            exchange.wait()
            pipeline.wait_for_sends()
            if torch.equal(received, sent.expand_as(received)) and record.own == record.other:
                return {}
            return dict(enumerate(map(self._record_of, received)))

        return finish

    def _require_same(self, own: _Reduction, records: Mapping[int, _Record]) -> None:
        """Raise CommunicationError if there are records, after telling the replicas."""
        if not records:
            return
        if self._replicas is not None:
            other = next(reduction for record in records.values() for reduction in record if reduction != own)
            with suppress(CommunicationError):
                self._replicas._tell(_Record(own, other))
        raise CommunicationError(self._message(records))

    def _tell(self, record: _Record) -> None:
        """Take part in the next comparison, in which all ranks then raise."""
        self._complete_expected(self._last_part, self._start(record)())

    def _complete_expected(self, previous: int | None, records: Mapping[int, _Record]) -> None:
        """Reduce zeros like the row that followed `previous` last time, if other ranks have begun to reduce it."""
        if previous in self._expected:
            expected, reduce_zeros = self._expected[previous]
            if (expected, expected) in records.values():
                reduce_zeros()

    def _bytes_of(self, record: _Record) -> torch.Tensor:
        part = record.own.part
        if part in self._sent and self._sent[part][0] == record:
            return self._sent[part][1]
        encoded = bytearray()
        for reduction in record:
            encoded += reduction.part.to_bytes(2, "big") + reduction.num_elements.to_bytes(8, "big")
            encoded += sum(1 << place for place in reduction.members).to_bytes(self._mask_bytes, "big")
        sent = torch.frombuffer(encoded, dtype=torch.uint8)
        self._sent[part] = record, sent
        return sent

    def _record_of(self, received: torch.Tensor) -> _Record:
        encoded = bytes(received.tolist())
        half = len(encoded) // 2
        return _Record(*(self._reduction_of(encoded[start:][:half]) for start in (0, half)))

    @staticmethod
    def _reduction_of(encoded: bytes) -> _Reduction:
        mask = int.from_bytes(encoded[10:], "big")
        members = tuple(place for place in range(mask.bit_length()) if mask >> place & 1)
        return _Reduction(int.from_bytes(encoded[:2], "big"), int.from_bytes(encoded[2:10], "big"), members)

    def _message(self, records: Mapping[int, _Record]) -> str:
        holders: dict[_Reduction, list[str]] = {}
        for rank, record in records.items():
            holders.setdefault(record.own, []).append(self._communicator.name_of(rank))
        for rank, record in records.items():
            if record.other not in holders:
                holders[record.other] = [
                    f"a rank with other shards of the module of {self._communicator.name_of(rank)}"
                ]
        parts = {reduction.part: self._parts[reduction.part].name for reduction in holders}
        common = set.intersection(*(set(reduction.members) for reduction in holders)) if len(parts) == 1 else set()
        found = "; ".join(
            f"{', '.join(ranks)}: {self._describe(reduction, common)}" for reduction, ranks in holders.items()
        )
        return (
            f"torchbagua: {' and '.join(parts.values())}: ranks have gradients of different parameters, which FSDP "
            f"would add, got {found}. Have all ranks use the same parameters in each backward; or call "
            "set_reduce_scatter_unused_params(True), which needs torch 2.13 or newer"
        )

    def _describe(self, reduction: _Reduction, common: set[int]) -> str:
        if not reduction.members:
            return f"{reduction.num_elements} elements, of parameters that FSDP does not report"
        names = self._parts[reduction.part].parameter_names
        own = [names[place] for place in reduction.members if place not in common]
        more = [f"{len(own) - _MOST_NAMES} more"] if len(own) > _MOST_NAMES else []
        return ", ".join(own[:_MOST_NAMES] + more) or "no others"


def _reduce_zeros(reduce_row: Callable[..., None], layouts: Sequence[tuple[Any, torch.dtype, torch.device]]) -> None:
    reduce_row(*(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in layouts))
