"""Records what the threads of a simulation wait for, and all messages, in virtual time, for Perfetto."""

import json
from itertools import count
from pathlib import Path
from typing import Any

from torchbagua.testing.simulation.run import Simulation
from torchbagua.testing.simulation.scheduler import SimulatedThread

_US_PER_S = 1e6


class SimulationTrace:
    """Records a simulation that has not run yet. `write` writes a file for https://ui.perfetto.dev.

    A process of the trace is a rank. It has a track for each of its threads, which shows what the thread waits for, and
    tracks for the messages to each other rank.

    Source: "Trace Event Format", the Chromium project.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._tracks: dict[tuple[int, str], int] = {}
        self._events: list[dict[str, Any]] = []
        self._numbers = count()
        self._simulation = simulation
        simulation.scheduler.recorder = self._waited
        simulation.network.recorder = self._arrived

    def write(self, path: Path) -> None:
        """Write the trace."""
        fault_s = self._simulation.fault_s
        fault = {"ph": "i", "name": "fault", "s": "g", "ts": (fault_s or 0) * _US_PER_S, "pid": 0, "tid": 0}
        names = [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
            for (rank, name), track in self._tracks.items()
        ]
        processes = [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
            for rank in sorted({rank for rank, _ in self._tracks})
        ]
        path.write_text(
            json.dumps({"traceEvents": [*processes, *names, *([] if fault_s is None else [fault]), *self._events]})
        )

    def _waited(self, thread: SimulatedThread, begin_s: float, code: str) -> None:
        track = self._tracks.setdefault((thread.rank, thread.name), len(self._tracks) + 1)
        seconds = self._simulation.scheduler.now_s - begin_s
        times = {"ts": begin_s * _US_PER_S, "dur": seconds * _US_PER_S}
        self._events.append({"ph": "X", "name": code, "pid": thread.rank, "tid": track, **times})

    def _arrived(self, sender: int, receiver: int, num_bytes: int, begin_s: float, end_s: float) -> None:
        # Messages overlap: one leaves while the last one has not arrived.
        same = {"cat": "message", "name": f"to rank {receiver}", "id": next(self._numbers), "pid": sender, "tid": 0}
        self._events.append({"ph": "b", "ts": begin_s * _US_PER_S, "args": {"bytes": num_bytes}, **same})
        self._events.append({"ph": "e", "ts": end_s * _US_PER_S, **same})
