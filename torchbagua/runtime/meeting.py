"""Meetings of a gradient algorithm: in each synchronized backward, and at the end, ranks compare how far they are.

DDP averages the k-th synchronized backward of a rank with the k-th of every other rank. If a rank leaves out a step by
itself, its later gradients are averaged with earlier ones of the others, and no exchange of gradients notices.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torchbagua._warnings import warn_user
from torchbagua.collectives.exchange import tag_of
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.job import InSteps
from torchbagua.runtime.lane import Lane
from torchbagua.runtime.optimizer_steps import StepCount
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import CommunicationError, OutOfStep

# Agreements of other kinds have smaller piece numbers (collectives/agreement.py).
_PROGRESS_PIECE, _DIGEST_PIECE, _BARRIER_PIECE = 1024, 1025, 1026

# The synchronized backward passes in which ranks compare their weights: some early ones, and then one in so many.
_EARLY, _INTERVAL = (1, 10, 100), 500

_NUM_NAMED = 3


class Progress(NamedTuple):
    """How far a rank is: 16 bytes on the wire.

    Attributes:
        num_backwards: the synchronized backward passes that it has begun.
        num_steps: the steps of its optimizers; 0 behind a standalone hook that knows no optimizer.
        has_ended: whether it detaches, and begins no other backward.
        has_joined: whether it has ever run out of data, and taken fewer steps (`torch.distributed.algorithms.Join`).
    """

    num_backwards: int
    num_steps: int
    has_ended: bool = False
    has_joined: bool = False

    def pack(self) -> torch.Tensor:
        return torch.tensor([self.num_backwards, 4 * self.num_steps + 2 * self.has_ended + self.has_joined])

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> "Progress":
        num_backwards, rest = packed.tolist()
        return cls(num_backwards, rest // 4, bool(rest & 2), bool(rest & 1))

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


@dataclass
class Meeting:
    """Compares the progress of each rank with that of the rank before it, so that all ranks are equal if none raises.

    The message is in flight together with the first bucket. A rank that finds a difference posts the error for the
    others (`BaguaProcessGroup.post_reason`), whose exchanges fail as it closes its groups.

    Attributes:
        group: the ranks.
        own: the progress of this rank.
        digests: returns digests of the weights, to compare too; None at most meetings.
        differing: after `compare`, the positions of the digests that differ from those of the rank before.
    """

    group: BaguaProcessGroup
    own: Progress
    digests: Callable[[], torch.Tensor] | None = None
    differing: Sequence[int] = ()
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
        if self.digests is not None:
            own_digests = self.digests()
            other = _RingMessage(world, own_digests, self._purpose, _DIGEST_PIECE).receive()
            if not (self.own.has_joined or theirs.has_joined):
                self.differing = (own_digests != other).nonzero().flatten().tolist()

    def wait_for_all(self) -> None:
        """Return when all ranks have called this. Fails if a rank has raised instead. Collective."""
        distance = 1
        while distance < self.group.world.size:
            _RingMessage(self.group.world, torch.zeros(1), self._purpose, _BARRIER_PIECE, distance).receive()
            distance *= 2


class _RingMessage:
    """Sends a tensor to the rank `distance` places after this one, and receives one from the rank as far before.

    Observers are not notified: the message overlaps with those of the first bucket, and their spans nest.
    """

    def __init__(self, world: Communicator, own: torch.Tensor, purpose: str, piece: int, distance: int = 1) -> None:
        self._world = world
        self._target, self._source = world.rank_after(distance), world.rank_before(distance)
        self._purpose = purpose
        self._tag = tag_of("agreement", piece)
        self._own, self._theirs = own, torch.empty_like(own)
        if world.posts_messages(own.device):
            world.connect([self._target, self._source], purpose)
            world.post("receiving from", self._source, self._theirs, tag=self._tag, purpose=purpose)
            world.post("sending to", self._target, own, tag=self._tag, purpose=purpose)
        else:
            sent, received = ([own.new_empty(0) for _ in range(world.size)] for _ in range(2))
            sent[self._target], received[self._source] = own, self._theirs
            world.all_to_all(received, sent, purpose, lambda: ())

    def receive(self) -> torch.Tensor:
        """Wait for both messages, and return the received one."""
        if self._world.posts_messages(self._own.device):
            self._world.wait("receiving from", self._source, tag=self._tag, purpose=self._purpose)
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
    gradient algorithm notices. One warning names the first parameters that differ.

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
        self._weights: Mapping[str, torch.Tensor] = {}
        self._last: Meeting | None = None  # the last one that compares weights, until its result is reported
        self._has_joined = False  # in any backward so far
        self._is_muted = False
        self._has_ended = False

    def compare_weights(self, named: Mapping[str, torch.Tensor]) -> None:
        """Compare these weights from now on; the same on all ranks."""
        self._weights = named

    def mute(self) -> None:
        """Warn of no more weights that differ: a warning has named the cause."""
        self._is_muted = True

    def begin(self, *, has_joined: bool) -> Meeting:
        """Return the meeting of a backward that begins now.

        Raises:
            RuntimeWarning: weights differ between ranks, and a filter turns the warning into an error.
        """
        self._report()
        self.num_backwards += 1
        self._has_joined |= has_joined
        is_due = self.num_backwards in _EARLY or self.num_backwards % _INTERVAL == 0
        return self._meeting(Progress(self.num_backwards, self._steps.number, has_joined=self._has_joined), is_due)

    def leave(self) -> None:
        """Tell ranks that still train that this rank has ended, unless all ranks have met at the end."""
        if not self._has_ended:
            own = self._group.world.name_of(self._group.world.rank)
            self._group.post_reason(
                f"torchbagua: ranks are out of step: {own} has ended after {self.num_backwards} synchronized backward "
                "passes, and other ranks still train"
            )

    def end(self, lane: Lane) -> None:
        """Meet for the last time, when all ranks detach. Collective.

        Raises:
            OutOfStep: a rank begins another backward, or has taken another number of steps.
            RuntimeWarning: see `begin`.
        """
        self._has_ended = True

        def meet() -> None:
            meeting.run()
            meeting.wait_for_all()

        own = Progress(self.num_backwards, self._steps.number, has_ended=True, has_joined=self._has_joined)
        meeting = self._meeting(own, compares_weights=True)
        try:
            lane.submit(meet).result()
        except OutOfStep:
            raise
        except CommunicationError as error:  # the training of this rank is complete nevertheless
            warn_user(
                f"torchbagua: rank {self._group.rank} has detached, but could not compare its progress with the other "
                f"ranks: {error}"
            )
        self._report()

    def _meeting(self, own: Progress, compares_weights: bool) -> Meeting:
        if not (compares_weights and self._weights):
            return Meeting(self._group, own)
        weights = list(self._weights.values())
        if weights[0].is_cpu:  # the lane reads them during backward, in which they do not change
            meeting = Meeting(self._group, own, lambda: _digests(weights))
        else:
            digests = _digests(weights)  # on the training stream, before the next step
            meeting = Meeting(self._group, own, lambda: self._on_host(digests))
        self._last = meeting
        return meeting

    def _on_host(self, digests: torch.Tensor) -> torch.Tensor:
        self._group.wait_for_gpu(digests.device, "comparing the weights of ranks")
        return digests.cpu()

    def _report(self) -> None:
        meeting, self._last = self._last, None
        if meeting is None or not meeting.differing or self._is_muted:
            return
        self.mute()
        names = [list(self._weights)[position] for position in meeting.differing]
        world = self._group.world
        first, second = (world.name_of(rank) for rank in sorted((world.rank_before(1), world.rank)))
        listed = ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")
        warn_user(
            f"torchbagua: {first} and {second} hold different weights after {meeting.own.num_steps} optimizer steps: "
            f"{listed}. A rank has changed its weights alone, for instance by a scheduler that follows its own loss or "
            "by resetting a layer. Take such decisions from values that are equal on all ranks, or broadcast the "
            "weights of one rank afterwards"
        )


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def _digests(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a digest of each tensor: the sum of its elements' bits as integers, which is exact in any order."""
    real = [torch.view_as_real(weight) if weight.is_complex() else weight for weight in weights]
    return torch.stack([part.view(_INTEGERS[part.element_size()]).sum(dtype=torch.int64) for part in real])
