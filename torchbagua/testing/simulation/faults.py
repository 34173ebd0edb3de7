"""The faults of a simulation: those of machines and networks, and those of the user's code."""

import copy
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

import torchbagua as tb
from torchbagua import _concurrency
from torchbagua.testing.simulation.run import Rank, Simulation

T = TypeVar("T")

HARMLESS = ("none", "short stall", "slow link", "late start", "late attach", "overflow", "slow store", "late store")
FROM_THE_START = ("none", "late start", "late attach", "slow store", "late store")
FATAL = (
    "death",
    "cut link",
    "long stall",
    "error",
    "early end",
    "skipped step",
    "other call",
    "other state",
    "failed operation",
    "lost store",
    "silent store",
)
FAULTS = (*HARMLESS, *FATAL)
PLACES = ("forward", "backward", "step", "averaged_weights")


class UserError(Exception):
    """The user's code raised."""


@dataclass(frozen=True)
class Fault:
    """What happens to one rank.

    Attributes:
        kind: one of FAULTS.
        rank: the rank.
        peer: the other end of a link.
        turn: the turn of the scheduler at which a rank dies or stalls, or its link fails.
        operation: the operation of its transports that fails.
        request: the request from which on the store is silent.
        step: the step in which the user's code of the rank does something else.
        place: where in the step it raises; one of PLACES.
    """

    kind: str = "none"
    rank: int = 0
    peer: int = 1
    turn: int = 0
    operation: int = 0
    request: int = 1
    step: int = 0
    place: str = "forward"

    @classmethod
    def drawn(
        cls, draw: random.Random, kind: str, size: int, num_turns: int, num_steps: int, places: Sequence[str]
    ) -> "Fault":
        """Draw a fault of this kind, in a run that has about `num_turns` turns without it."""
        rank = draw.randrange(size)
        return cls(
            kind,
            rank,
            peer=(rank + 1 + draw.randrange(size - 1)) % size,
            turn=draw.randrange(1, num_turns),
            operation=draw.randrange(1, max(2, num_turns // size)),
            step=draw.randrange(num_steps),
            place=draw.choice(places),
            request=draw.randrange(1, 16 * size),
        )

    def prepare(self, simulation: Simulation) -> None:
        """Schedule the fault. `UserCode` has the faults of the user's code."""
        rank, peer, network, store = self.rank, self.peer, simulation.network, simulation.store
        timeout_s = simulation.timeout.total_seconds()
        at_turn: dict[str, Callable[[], None]] = {
            "death": lambda: simulation.kill(rank),
            "cut link": lambda: network.cut.add((rank, peer)),
            "slow link": lambda: network.limit(rank, peer, 1e4),
            "long stall": lambda: simulation.scheduler.pause(rank, 2 * timeout_s),
            "short stall": lambda: simulation.scheduler.pause(rank, 0.5 * timeout_s),
            "lost store": lambda: setattr(store, "is_gone", True),
        }
        if (happen := at_turn.get(self.kind)) is not None:

            def begin() -> None:
                simulation.note_fault()
                happen()

            simulation.scheduler.call_at_turn(self.turn, begin)
        elif self.kind == "failed operation":
            network.failing[rank] = self.operation
            network.on_failure = simulation.note_fault
        elif self.kind == "silent store":
            store.silent_from = self.request
            store.on_silence = simulation.note_fault
        elif self.kind == "slow store":
            store.latency_s = timeout_s / 100
        elif self.kind == "late store":
            store.starts_at_s = timeout_s / 2


class UserCode:
    """What the user's code of one rank does differently."""

    def __init__(self, fault: Fault, rank: Rank) -> None:
        self._fault = fault
        self._rank = rank
        self._has_fault = fault.rank == rank.number
        self._state: dict[str, Any] = {}

    def start(self) -> None:
        """Wait, if the rank starts later than the others."""
        timeout_s = self._rank.simulation.timeout.total_seconds()
        if self._has_fault and self._fault.kind == "late start":
            _concurrency.sleep(0.5 * timeout_s)
        if self._has_fault and self._fault.kind == "late attach":
            _concurrency.sleep(1.5 * timeout_s)

    def attach_with_retries(self, attach: Callable[[], T]) -> T:
        """Call `attach`, and again after a TimeoutError if a rank is late."""
        for _ in range(2 if self._fault.kind == "late attach" else 0):
            with suppress(TimeoutError):
                return attach()
            _concurrency.sleep(1.0)
        return attach()

    def leaves(self, step: int) -> bool:
        """Return whether the rank takes no more steps."""
        return self._begin_if_due("early end", step)

    def skips_step(self, step: int) -> bool:
        """Return whether the rank does not step its optimizer."""
        return self._begin_if_due("skipped step", step)

    def at(self, place: str, step: int) -> None:
        """Raise UserError, if the code raises here."""
        if self._fault.place == place and self._begin_if_due("error", step):
            raise UserError(f"in {place} of step {step}")

    def loss(self, loss: torch.Tensor, step: int) -> torch.Tensor:
        """Return a loss whose gradients overflow, or whose backward raises, in the step of the fault."""
        if self._begin_if_due("overflow", step):
            return loss * torch.inf
        if self._fault.place == "backward" and self._fault.kind == "error":
            loss = loss * 1.0
            loss.register_hook(lambda gradient: self.at("backward", step))
        return loss

    def change_state(self, optimizer: torch.optim.Optimizer, attachment: tb.Attachment, step: int) -> None:
        """Load an old state of the optimizer, or call other methods of the attachment than the other ranks."""
        if self._fault.kind == "other state":
            if step == 0:
                self._state = copy.deepcopy(optimizer.state_dict())
            elif self._begin_if_due("other state", step):
                optimizer.load_state_dict(self._state)
        if self._fault.kind == "other call" and self._fault.step == step:
            if self._begin_if_due("other call", step):
                with attachment.averaged_weights():
                    pass
            else:
                attachment.load_state_dict(attachment.state_dict())

    def _begin_if_due(self, kind: str, step: int) -> bool:
        happens = self._has_fault and self._fault.kind == kind and self._fault.step == step
        if happens:
            self._rank.simulation.note_fault()
        return happens
