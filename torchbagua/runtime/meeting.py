"""Meetings of a gradient algorithm: in each synchronized backward, and at the end, ranks compare how far they are.

DDP averages the k-th synchronized backward of a rank with the k-th of every other rank. If a rank leaves out a step by
itself, its later gradients are averaged with earlier ones of the others, and no exchange of gradients notices.

The k-th message of a rank meets the k-th message of the rank before it in the same way. Between two ranks that are both
in a backward, `num_backwards` is therefore always equal, and only `num_steps` shows that one has left out a step. If it
has left out backward and step, ranks notice at the end: its last message meets a backward of the other rank.
"""

import struct
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torchbagua._warnings import warn_user
from torchbagua.collectives.agreement import PROGRESS_CHANNEL, WEIGHTS_CHANNEL, agree
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.lane import Lane, Overlappable
from torchbagua.runtime.optimizer_steps import StepCount
from torchbagua.transport.communicator import RingMessage
from torchbagua.transport.errors import CommunicationError, OutOfStep

# The synchronized backward passes in which ranks compare their weights: some early ones, and then one in so many.
_EARLY, _INTERVAL = (1, 10, 100), 500

# More than one: a step may change nothing, for instance if a warm-up of the learning rate begins at 0.
_ENOUGH_CLEARED = 3

_HOST = torch.device("cpu")

_NONE = torch.empty(0, dtype=torch.int64)

_WIRE = struct.Struct("<qi3?x")


class BackwardProgress(NamedTuple):
    """How far a rank is: 16 bytes on the wire, in this order.

    Attributes:
        num_backwards: the synchronized backward passes that it has begun; differs only if one of two ranks has ended.
        num_steps: the steps of its optimizers; 0 behind a standalone hook that knows no optimizer.
        compares_weights: whether it sends digests of its weights too.
        has_ended: whether it detaches, and begins no other backward.
        has_joined: whether it has ever run out of data, and taken fewer steps (`torch.distributed.algorithms.Join`).
    """

    num_backwards: int
    num_steps: int
    compares_weights: bool = False
    has_ended: bool = False
    has_joined: bool = False

    def encode(self) -> torch.Tensor:
        return torch.tensor(list(_WIRE.pack(*self)), dtype=torch.uint8)

    @classmethod
    def decode(cls, wire: torch.Tensor) -> "BackwardProgress":
        return cls(*_WIRE.unpack(bytes(wire.tolist())))

    def fits(self, other: "BackwardProgress") -> bool:
        """Return whether the gradients, or the ends, of two ranks with this progress belong together."""
        if (self.num_backwards, self.has_ended) != (other.num_backwards, other.has_ended):
            return False
        return self.num_steps == other.num_steps or self.has_joined or other.has_joined

    def __str__(self) -> str:
        steps = f"{self.num_steps} optimizer steps"
        if self.has_ended:
            return f"has ended after {self.num_backwards} synchronized backward passes and {steps}"
        return f"is in synchronized backward pass {self.num_backwards}, after {steps}"


@dataclass(frozen=True)
class Finding:
    """Weights that differ between a rank and the rank before it.

    Attributes:
        position: the position of the first weight that differs; None without any.
        has_more: whether more weights differ.
    """

    position: int | None
    has_more: bool


@dataclass
class Meeting:
    """Compares the progress of each rank with that of the rank before it, so that all ranks are equal if none raises.

    The message is in flight together with the first bucket. A rank that finds a difference posts the error for the
    others (`BaguaProcessGroup.post_reason`), whose exchanges fail as it closes its groups.

    Attributes:
        group: the ranks.
        own: the progress of this rank.
        num_digests: the number of weights.
        digests: returns digests of the weights, int64, if this rank compares them.
        suspicion: why this rank compares its weights, if a step may have changed them on this rank alone.
        finding: what `compare` has found; None before.
    """

    group: BaguaProcessGroup
    own: BackwardProgress
    num_digests: int
    digests: Callable[[], torch.Tensor] = lambda: _NONE
    suspicion: str | None = None
    finding: Finding | None = None
    _purpose: str = field(default="", init=False)
    _message: RingMessage | None = field(default=None, init=False)

    def run(self) -> None:
        """Send and compare. Collective; on the lane's thread, as all methods."""
        self.post("the end of training" if self.own.has_ended else "the progress with a backward")
        self.compare()

    def post(self, purpose: str) -> None:
        """Start to send this rank's progress, and to receive that of the rank before; `purpose` is for errors."""
        self._purpose, wire = purpose, self.own.encode()
        self._message = RingMessage(self.group.world, wire, torch.empty_like(wire), purpose, PROGRESS_CHANNEL)

    def compare(self) -> None:
        """Wait for the progress of the rank before."""
        assert self._message is not None
        world, own, theirs = self.group.world, self.own, BackwardProgress.decode(self._message.receive())
        if not own.fits(theirs):
            first, second = (
                f"{world.name_of(rank)} {progress}"
                for rank, progress in sorted([(world.rank_before(1), theirs), (world.rank, own)])
            )
            text = (
                f"torchbagua: ranks are out of step: {first}; {second}. Every rank must run the same "
                "synchronized backward passes and optimizer steps, since DDP averages gradients in this order. Instead "
                "of leaving out a bad batch, let the rank run forward and backward with a loss of zero, and step"
            )
            self.group.post_reason(text)
            raise OutOfStep(text)
        differing: list[int] = []
        if own.compares_weights or theirs.compares_weights:
            # A rank sends its digests if it compares, and receives those of the rank before if that compares.
            sent = self.digests()
            received = torch.empty(self.num_digests, dtype=torch.int64) if theirs.compares_weights else _NONE
            RingMessage(world, sent, received, self._purpose, WEIGHTS_CHANNEL).receive()
            if len(sent) == len(received) and not (own.has_joined or theirs.has_joined):
                differing = (sent != received).nonzero().flatten().tolist()
        self.finding = Finding(differing[0] if differing else None, has_more=len(differing) > 1)


class OpeningBucket:
    """The first bucket of a backward, with the meeting of this backward: work for a lane."""

    def __init__(self, meeting: Meeting, bucket: Overlappable[torch.Tensor], name: str) -> None:
        self._meeting = meeting
        self._name = name
        self._bucket = bucket

    def may_begin(self) -> bool:
        return self._bucket.may_begin()

    def run_overlapping(self) -> Generator[None, None, torch.Tensor]:
        self._meeting.post(f"the progress with {self._name}")
        flat = yield from self._bucket.run_overlapping()
        self._meeting.compare()
        return flat


class Meetings:
    """The meetings of a gradient algorithm: in each synchronized backward with the first bucket, and when all detach.

    In some of them, ranks also compare their weights: a rank may change its weights alone, which neither DDP nor a
    gradient algorithm notices. One warning names the first parameter that differs.

    Attributes:
        num_backwards: the synchronized backward passes begun.
        steps: counts the steps of the optimizers.
    """

    def __init__(self, group: BaguaProcessGroup, weights: Mapping[str, torch.Tensor]) -> None:
        self.num_backwards = 0
        self.steps = StepCount()
        self._group = group
        self._weights = dict(weights)
        self._unreported: list[Meeting] = []  # those that compare weights
        self._has_joined = False  # in any backward so far
        self._is_muted = False
        self._suspicion: str | None = None
        self._num_cleared: Counter[str] = Counter()  # suspicions after which the weights were equal
        self._has_ended = False

    def mute(self) -> None:
        """Warn of no more weights that differ: a warning has named the cause."""
        self._is_muted = True

    def suspect(self, problem: str) -> None:
        """Compare weights in the next meeting, since a step may have changed them on this rank alone.

        If they differ, the warning begins with `problem`, whose subject is the optimizer. After several meetings in
        which they were equal, the loop is right, for instance because all ranks take the same step.
        """
        if self._num_cleared[problem] < _ENOUGH_CLEARED:
            self._suspicion = problem

    def begin(self, *, has_joined: bool) -> Meeting:
        """Return the meeting of a backward that begins now. Call `report` before."""
        self.num_backwards += 1
        self._has_joined |= has_joined
        is_due = self.num_backwards in _EARLY or self.num_backwards % _INTERVAL == 0
        # Without messages, an exchange needs all ranks, and only some may suspect.
        is_suspect = self._suspicion is not None and self._group.world.posts_messages(_HOST)
        return self._meeting(compares_weights=is_due or is_suspect, has_ended=False)

    def leave(self) -> None:
        """Tell ranks that still run backward over the private groups that this rank has ended, unless all have met.

        Over the user's group the end of a rank notifies nobody, and a reason would count as its failure.
        """
        if self.num_backwards and not (self._has_ended or self._group.launches_on_users_group):
            own = self._group.world.name_of(self._group.world.rank)
            self._group.post_reason(
                f"torchbagua: ranks are out of step: {own} has ended after {self.num_backwards} synchronized backward "
                "passes, and other ranks still train"
            )

    def end(self, lane: Lane) -> None:
        """Meet for the last time, when all ranks detach. Collective."""
        self._has_ended = True
        self.report()
        meeting = self._meeting(compares_weights=True, has_ended=True)

        def meet() -> Sequence[Finding] | CommunicationError:
            try:
                meeting.run()
                assert meeting.finding is not None
                # No rank returns before all have called it. It fails if a rank has raised instead.
                purpose = "the weights at the end of training"
                return agree(self._group.world, meeting.finding, purpose, is_observed=False)
            except CommunicationError as error:
                explained = self._group.explain(error)
                if isinstance(explained, OutOfStep):
                    raise explained from error
                return error  # does not fail the lane: the training of this rank is complete

        outcome = lane.submit(meet).result()
        if isinstance(outcome, CommunicationError):
            warn_user(
                f"torchbagua: rank {self._group.rank} has detached, but could not compare its progress with the other "
                f"ranks: {outcome}"
            )
            return
        for rank, finding in enumerate(outcome):  # the first of them warns, on all ranks of the same two
            self._warn(meeting, rank, finding)

    def _meeting(self, *, compares_weights: bool, has_ended: bool) -> Meeting:
        compares_weights &= bool(self._weights)
        own = BackwardProgress(self.num_backwards, self.steps.number, compares_weights, has_ended, self._has_joined)
        meeting = Meeting(self._group, own, num_digests=len(self._weights))
        if compares_weights:
            meeting.digests, meeting.suspicion = self._digests(), self._suspicion
            self._suspicion = None
            if not has_ended:
                self._unreported.append(meeting)
        return meeting

    def _digests(self) -> Callable[[], torch.Tensor]:
        """Return a function for the lane that returns a digest of each weight, as the weights are now."""
        weights = list(self._weights.values())
        devices = {weight.device for weight in weights}
        # The lane reads weights in host memory during backward, in which they do not change. GPUs read them on the
        # training stream, before the next step.
        sums = [] if devices == {_HOST} else _sums_of_bits(weights)

        def on_host() -> torch.Tensor:
            for device in devices:
                self._group.private.wait_for_gpu(device, "comparing the weights of ranks")
            return torch.stack([each.cpu() for each in sums or _sums_of_bits(weights)])

        return on_host

    def report(self) -> None:
        """Warn of what has been found so far. In stream order, the lane may be behind."""
        while self._unreported and (finding := self._unreported[0].finding) is not None:
            meeting = self._unreported.pop(0)
            if finding.position is None and meeting.suspicion is not None:
                self._num_cleared[meeting.suspicion] += 1
            self._warn(meeting, self._group.world.rank, finding)

    def _warn(self, meeting: Meeting, rank: int, finding: Finding) -> None:
        """Warn of the finding of a rank, unless it has found nothing."""
        if finding.position is None or self._is_muted:
            return
        self.mute()
        world = self._group.world
        first, second = map(world.name_of, sorted(((rank - 1) % world.size, rank)))
        found = (
            f"{first} and {second} hold different weights after {meeting.own.num_steps} optimizer steps: "
            f"{[*self._weights][finding.position]}{', and others' if finding.has_more else ''}"
        )
        if meeting.suspicion is not None:
            warn_user(f"torchbagua: {meeting.suspicion}. Now {found}")
            return
        warn_user(
            f"torchbagua: {found}. A rank has changed its weights alone, for instance by a scheduler that follows its "
            "own loss, by resetting a layer, or by a backward that is not averaged. Take such decisions from values "
            "that are equal on all ranks, or broadcast the weights of one rank afterwards"
        )


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def _sums_of_bits(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sum of the elements' bits of each tensor as integers, which is exact in any order."""
    real = [torch.view_as_real(weight) if weight.is_complex() else weight for weight in weights]
    return [part.view(_INTEGERS[part.element_size()]).sum(dtype=torch.int64) for part in real]
