"""Meetings of a gradient algorithm: in each synchronized backward, and at the end, ranks compare how far they are.

DDP averages the k-th synchronized backward of a rank with the k-th of every other rank. If a rank leaves out a step by
itself, its later gradients are averaged with earlier ones of the others, and no exchange of gradients notices.
"""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torchbagua._warnings import warn_user
from torchbagua.collectives.exchange import tag_of
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.lane import InSteps, Lane
from torchbagua.runtime.optimizer_steps import StepCount
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError, OutOfStep

# Agreements of other kinds have smaller piece numbers (collectives/agreement.py).
_PROGRESS_PIECE, _DIGEST_PIECE, _FINDING_PIECE = 1024, 1025, 1026

# The synchronized backward passes in which ranks compare their weights: some early ones, and then one in so many.
_EARLY, _INTERVAL = (1, 10, 100), 500

# More than one: a step may change nothing, for instance if a warm-up of the learning rate begins at 0.
_ENOUGH_CLEARED = 3

_HOST = torch.device("cpu")


class Progress(NamedTuple):
    """How far a rank is: 16 bytes on the wire.

    Attributes:
        num_backwards: the synchronized backward passes that it has begun.
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

    def pack(self) -> torch.Tensor:
        flags = 4 * self.compares_weights + 2 * self.has_ended + self.has_joined
        return torch.tensor([self.num_backwards, 8 * self.num_steps + flags])

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> "Progress":
        num_backwards, rest = packed.tolist()
        return cls(num_backwards, rest // 8, bool(rest & 4), bool(rest & 2), bool(rest & 1))

    def fits(self, other: "Progress") -> bool:
        """Return whether the gradients, or the ends, of two ranks with this progress belong together."""
        if (self.num_backwards, self.has_ended) != (other.num_backwards, other.has_ended):
            return False
        return self.num_steps == other.num_steps or self.has_joined or other.has_joined

    def __str__(self) -> str:
        steps = f"{self.num_steps} optimizer steps"
        if self.has_ended:
            return f"has ended after {self.num_backwards} synchronized backward passes and {steps}"
        return f"is in synchronized backward pass {self.num_backwards}, after {steps}"


class Finding(NamedTuple):
    """Weights that differ between two ranks.

    Attributes:
        rank: the rank whose weights differ from those of the rank before it.
        position: the position of the first weight that differs.
        has_more: whether more weights differ.
    """

    rank: int
    position: int
    has_more: bool

    def pack(self) -> int:
        """Return a positive number."""
        return ((self.rank + 1) << 32) + 2 * self.position + self.has_more

    @classmethod
    def unpack(cls, packed: int) -> "Finding":
        rest = packed & 0xFFFFFFFF
        return cls((packed >> 32) - 1, rest // 2, bool(rest & 1))


@dataclass
class Meeting:
    """Compares the progress of each rank with that of the rank before it, so that all ranks are equal if none raises.

    The message is in flight together with the first bucket. A rank that finds a difference posts the error for the
    others (`BaguaProcessGroup.post_reason`), whose exchanges fail as it closes its groups.

    Attributes:
        group: the ranks.
        own: the progress of this rank.
        digests: returns digests of the weights, int64.
        num_digests: their number.
        suspicion: why this rank compares its weights, if a step may have changed them on this rank alone.
        differing: the positions of the digests that differ from those of the rank before; None before `compare`.
    """

    group: BaguaProcessGroup
    own: Progress
    digests: Callable[[], torch.Tensor]
    num_digests: int
    suspicion: str | None = None
    differing: Sequence[int] | None = None
    _purpose: str = field(default="", init=False)
    _message: "_RingMessage | None" = field(default=None, init=False)

    def run(self) -> None:
        """Send and compare. Collective; on the lane's thread, as all methods."""
        self.post("the end of training" if self.own.has_ended else "the progress with a backward")
        self.compare()

    def post(self, purpose: str) -> None:
        """Start to send this rank's progress, and to receive that of the rank before; `purpose` is for errors."""
        self._purpose = purpose
        self._message = _RingMessage(self.group.world, self.own.pack(), self._purpose, _PROGRESS_PIECE)

    def compare(self) -> None:
        """Wait for the progress of the rank before.

        Raises:
            OutOfStep: it does not fit this rank's.
        """
        assert self._message is not None
        world, theirs = self.group.world, Progress.unpack(self._message.receive())
        if not self.own.fits(theirs):
            ends = sorted([(world.rank_before(1), theirs), (world.rank, self.own)])
            (first, its), (second, own) = ((world.name_of(rank), progress) for rank, progress in ends)
            text = (
                f"torchbagua: ranks are out of step: {first} {its}; {second} {own}. Every rank must run the same "
                "synchronized backward passes and optimizer steps, since DDP averages gradients in this order. Instead "
                "of leaving out a bad batch, let the rank run forward and backward with a loss of zero, and step"
            )
            self.group.post_reason(text)
            raise OutOfStep(text)
        self.differing = self._compare_weights(theirs) if self.own.compares_weights or theirs.compares_weights else ()

    def _compare_weights(self, theirs: Progress) -> Sequence[int]:
        """Send digests if this rank compares, and receive those of the rank before if it does."""
        own = self.digests() if self.own.compares_weights else torch.zeros(self.num_digests, dtype=torch.int64)
        message = _RingMessage(
            self.group.world,
            own,
            self._purpose,
            _DIGEST_PIECE,
            sends=self.own.compares_weights,
            receives=theirs.compares_weights,
        )
        other = message.receive()
        if not (self.own.compares_weights and theirs.compares_weights) or self.own.has_joined or theirs.has_joined:
            return ()
        return (own != other).nonzero().flatten().tolist()

    def gather_finding(self) -> Finding | None:
        """Return the finding of one of the ranks, the same on all; None without any. Collective.

        No rank returns before all have called it. It fails if a rank has raised instead.
        """
        world = self.group.world
        largest = torch.tensor([self.finding().pack() if self.differing else 0])
        distance = 1
        while distance < world.size:
            theirs = _RingMessage(world, largest, self._purpose, _FINDING_PIECE, distance).receive()
            largest = torch.maximum(largest, theirs)
            distance *= 2
        return Finding.unpack(int(largest)) if largest else None

    def finding(self) -> Finding:
        """Return what `compare` has found on this rank."""
        assert self.differing
        return Finding(self.group.world.rank, self.differing[0], len(self.differing) > 1)


class _RingMessage:
    """Sends a tensor to the rank `distance` places after this one, and receives one from the rank as far before.

    Observers are not notified: the message overlaps with those of the first bucket, and their spans nest.
    """

    def __init__(
        self,
        world: Communicator,
        own: torch.Tensor,
        purpose: str,
        piece: int,
        distance: int = 1,
        *,
        sends: bool = True,
        receives: bool = True,
    ) -> None:
        self._world = world
        self._sends, self._receives = sends, receives
        self._target, self._source = world.rank_after(distance), world.rank_before(distance)
        self._purpose = purpose
        self._tag = tag_of("agreement", piece)
        self._own, self._theirs = own, torch.empty_like(own)
        if world.posts_messages(own.device):
            world.connect([self._target, self._source], purpose)
            if receives:
                world.post("receiving from", self._source, self._theirs, tag=self._tag, purpose=purpose)
            if sends:
                world.post("sending to", self._target, own, tag=self._tag, purpose=purpose)
        else:
            sent, received = ([own.new_empty(0) for _ in range(world.size)] for _ in range(2))
            sent[self._target], received[self._source] = own, self._theirs
            world.all_to_all(received, sent, purpose, lambda: ())

    def receive(self) -> torch.Tensor:
        """Wait for both messages, and return the received one."""
        if self._world.posts_messages(self._own.device):
            if self._receives:
                self._world.wait("receiving from", self._source, tag=self._tag, purpose=self._purpose)
            if self._sends:
                self._world.wait("sending to", self._target, tag=self._tag, purpose=self._purpose)
        return self._theirs


class OpeningBucket:
    """The first bucket of a backward, with the meeting of this backward: work for a lane."""

    def __init__(self, meeting: Meeting, bucket: InSteps[torch.Tensor], name: str) -> None:
        self._meeting = meeting
        self._name = name
        self._bucket = bucket

    def may_begin(self) -> bool:
        return self._bucket.may_begin()

    def steps(self) -> Generator[None, None, torch.Tensor]:
        self._meeting.post(f"the progress with {self._name}")
        flat = yield from self._bucket.steps()
        self._meeting.compare()
        return flat


class Meetings:
    """The meetings of a gradient algorithm: in each synchronized backward with the first bucket, and when all detach.

    In some of them, ranks also compare their weights: a rank may change its weights alone, which neither DDP nor a
    gradient algorithm notices. One warning names the first parameter that differs.

    Args:
        group: the ranks, of which there are several.
        steps: counts the steps of the optimizers.

    Attributes:
        num_backwards: the synchronized backward passes begun.
    """

    def __init__(self, group: BaguaProcessGroup, steps: StepCount) -> None:
        self.num_backwards = 0
        self._group = group
        self._steps = steps
        self._weights: list[dict[str, torch.Tensor]] = []  # of each device
        self._unreported: list[Meeting] = []  # those that compare weights
        self._has_joined = False  # in any backward so far
        self._is_muted = False
        self._suspicion: str | None = None
        self._num_cleared: Counter[str] = Counter()  # suspicions after which the weights were equal
        self._has_ended = False

    def compare_weights(self, named: Mapping[str, torch.Tensor]) -> None:
        """Compare these weights from now on; the same on all ranks."""
        by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, weight in named.items():
            by_device.setdefault(weight.device, {})[name] = weight
        self._weights = list(by_device.values())

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
        """Meet for the last time, when all ranks detach. Collective.

        Raises:
            OutOfStep: a rank begins another backward, or has taken another number of steps.
            RuntimeWarning: weights differ between ranks, and a filter turns the warning into an error: on all ranks.
        """
        self._has_ended = True
        self.report()
        meeting = self._meeting(compares_weights=True, has_ended=True)

        def meet() -> Finding | CommunicationError | None:
            try:
                meeting.run()
                return meeting.gather_finding()
            except CommunicationError as error:
                explained = self._group.explain(error)
                if isinstance(explained, OutOfStep):
                    raise explained from error
                return error  # does not fail the lane: the training of this rank is complete

        outcome = lane.submit(meet).result()
        if isinstance(outcome, Finding):
            self._warn(meeting, outcome)
        elif outcome is not None:
            warn_user(
                f"torchbagua: rank {self._group.rank} has detached, but could not compare its progress with the other "
                f"ranks: {outcome}"
            )

    def _meeting(self, *, compares_weights: bool, has_ended: bool) -> Meeting:
        compares_weights &= bool(self._weights)
        own = Progress(self.num_backwards, self._steps.number, compares_weights, has_ended, self._has_joined)
        parts = [self._digests_of(list(members.values())) for members in self._weights] if compares_weights else []
        meeting = Meeting(
            self._group,
            own,
            lambda: torch.cat([part() for part in parts]),
            num_digests=sum(map(len, self._weights)),
            suspicion=self._suspicion if compares_weights else None,
        )
        if compares_weights:
            self._suspicion = None
            if not has_ended:
                self._unreported.append(meeting)
        return meeting

    def _digests_of(self, weights: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        if weights[0].is_cpu:  # the lane reads them during backward, in which they do not change
            return lambda: _digests(weights)
        on_device = _digests(weights)  # on the training stream, before the next step

        def on_host() -> torch.Tensor:
            self._group.private.wait_for_gpu(on_device.device, "comparing the weights of ranks")
            return on_device.cpu()

        return on_host

    def report(self) -> None:
        """Warn of what has been found so far. In stream order, the lane may be behind.

        Raises:
            RuntimeWarning: weights differ between ranks, and a filter turns the warning into an error.
        """
        while self._unreported and (differing := self._unreported[0].differing) is not None:
            meeting = self._unreported.pop(0)
            if differing:
                self._warn(meeting, meeting.finding())
            elif meeting.suspicion is not None:
                self._num_cleared[meeting.suspicion] += 1

    def _warn(self, meeting: Meeting, finding: Finding) -> None:
        if self._is_muted:
            return
        self.mute()
        names = [name for members in self._weights for name in members]
        world = self._group.world
        ranks = sorted(((finding.rank - 1) % world.size, finding.rank))
        first, second = map(world.name_of, ranks)
        found = (
            f"{first} and {second} hold different weights after {meeting.own.num_steps} optimizer steps: "
            f"{names[finding.position]}{', and others' if finding.has_more else ''}"
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
def _digests(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a digest of each tensor: the sum of its elements' bits as integers, which is exact in any order."""
    real = [torch.view_as_real(weight) if weight.is_complex() else weight for weight in weights]
    return torch.stack([part.view(_INTEGERS[part.element_size()]).sum(dtype=torch.int64) for part in real])
