"""PerfettoTrace: what every rank does and when, for https://ui.perfetto.dev."""

import fcntl
import gzip
import json
import math
import operator
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from torchbagua.events import CommEvent, Run, TraceError
from torchbagua.traces.background_trace import BackgroundTrace, folder_of

HEADER = "torchbagua"
"""Name of the metadata event that every file begins with; what it holds is `header`'s."""

TRAINING_THREAD, LANE_THREAD, FIRST_SENDER = 1, 2, 10
"""Numbers of the tracks of a rank; messages to rank p are on FIRST_SENDER + p."""

_TRAINING_PHASES = ("step", "backward", "wait", "apply")
_DETAILS = ("operation", "bucket", "scope", "ranks", "peers", "num_elements", "raw_bytes")
_details_of = operator.attrgetter(*_DETAILS)
_FLUSH_EVERY_S = 2.0


class PerfettoTrace(BackgroundTrace):
    """Writes one file a rank, in Chrome's trace event format: training thread, lane, and messages by peer. An observer.

    Writes `rank<r>.json.gz` in `path`, on a thread of its own, and replaces what an earlier run has left there.
    `torchbagua trace merge` makes one file of all ranks', with their clocks aligned and an arrow for every message;
    `torchbagua trace show` prints a table. Serves one attachment, or one `reify`.

    Args:
        path: a folder; the ranks of one run share it, or their files are brought together later.
        steps: which steps to keep; default all. A step takes some 20 bytes for each event of it.

    Raises:
        ValueError: `path` cannot be written to, or `steps` is empty.
        TypeError: `path` is no path, or `steps` no range.

    Source: "Trace Event Format", the Chromium project.
    """

    compares_clocks = True

    def __init__(self, path: str | os.PathLike[str], *, steps: range | None = None) -> None:
        super().__init__(path)
        if steps is not None and not isinstance(steps, range):
            raise TypeError(f"PerfettoTrace: steps must be a range or None, got {steps!r}")
        if steps is not None and not any(step >= 0 for step in steps):
            raise ValueError(f"PerfettoTrace: steps must be some steps, which count from 0, got {steps!r}")
        self.path = folder_of("PerfettoTrace", "path", path)
        self._steps = steps

    def open(self, run: Run) -> tuple[Callable[[list[CommEvent]], None], Callable[[], None]]:
        """Return what writes the rank's file, and what closes it."""
        file = _File(self.path / f"rank{run.rank}.json.gz", run)
        return file.write, file.close

    def on_comm(self, event: CommEvent) -> None:
        """Keep the event, where its step is one to keep."""
        if self._steps is None or event.step in self._steps:
            super().on_comm(event)


class _File:
    def __init__(self, path: Path, run: Run) -> None:
        self._run = run
        self._base_ns = time.perf_counter_ns()
        self._named: set[int] = set()
        self._rendered: dict[tuple[Any, ...], tuple[int, str, str]] = {}
        self._raw_file = _locked(path)
        self._file = gzip.open(self._raw_file, "wt", encoding="utf-8", compresslevel=1)  # noqa: SIM115 - for the run
        self._flushed_s = time.monotonic()
        # One event a line, so that what a killed process leaves can be read; the format allows that the end is missing.
        self._file.write("[" + self._header())
        self._name("process_name", 0, f"rank {run.rank}, node {run.nodes[run.rank]}")
        self._file.flush()

    def write(self, events: list[CommEvent]) -> None:
        for event in events:
            self._put(event)
        if time.monotonic() > self._flushed_s + _FLUSH_EVERY_S:
            self._file.flush()
            self._flushed_s = time.monotonic()

    def close(self) -> None:
        self._file.write(",\n" + self._header() + "]\n")  # with the clocks that have been compared since
        self._file.close()
        self._raw_file.close()

    def _header(self) -> str:
        run = self._run
        args = {
            "id": run.id,
            "rank": run.rank,
            "nodes": run.nodes,
            "algorithm": run.algorithm,
            "description": run.description,
            "base_ns": self._base_ns,
            "clock_offsets": run.clock_offsets,
            "settings": dict(run.settings),
            "failures": run.failures,
        }
        return json.dumps({"name": HEADER, "ph": "M", "pid": run.rank, "args": args})

    def _put(self, event: CommEvent) -> None:
        # All but step, message and times comes again in every step.
        key = (event.phase, *_details_of(event), event.wire_bytes)
        known = self._rendered.get(key)
        if known is None:
            known = self._rendered[key] = self._render(event)
        tid, name, details = known
        if event.phase == "step":
            name = f"step {event.step}"
        if event.values:
            # JSON has no NaN, which a step that overflows is full of.
            values = {key: value if math.isfinite(value) else None for key, value in event.values.items()}
            details += f',"values":{json.dumps(values)}'
        self._file.write(
            f',\n{{"name":"{name}","cat":"{event.phase}","ph":"X","ts":{(event.start_ns - self._base_ns) / 1e3:.3f},'
            f'"dur":{(event.end_ns - event.start_ns) / 1e3:.3f},"pid":{self._run.rank},"tid":{tid},'
            f'"args":{{"step":{event.step},"message":{event.message}{details}}}}}'
        )

    def _render(self, event: CommEvent) -> tuple[int, str, str]:
        """Return track, name and details of an event, the latter two in JSON."""
        name: str = event.phase
        if event.phase == "send":
            tid, track = FIRST_SENDER + event.peers[0], f"to rank {event.peers[0]}"
            name = f"send {event.bucket}"
        elif event.phase in _TRAINING_PHASES:
            tid, track = TRAINING_THREAD, "training"
        else:
            tid, track = LANE_THREAD, "lane"
            name = event.bucket if event.phase == "bucket" else event.phase
        if tid not in self._named:
            self._named.add(tid)
            self._name("thread_name", tid, track)
        details: dict[str, Any] = {
            name: value for name, value in zip(_DETAILS, _details_of(event), strict=True) if value
        }
        if event.wire_bytes:
            details |= {"wire_bytes": event.wire_bytes, "bits_per_element": round(event.bits_per_element, 3)}
        return tid, json.dumps(name)[1:-1], f",{json.dumps(details)[1:-1]}" if details else ""

    def _name(self, kind: str, tid: int, name: str) -> None:
        row = {"name": kind, "ph": "M", "pid": self._run.rank, "tid": tid, "args": {"name": name}}
        order = {"name": kind.replace("name", "sort_index"), "ph": "M", "pid": self._run.rank, "tid": tid}
        order["args"] = {"sort_index": tid or self._run.rank}
        self._file.write(f",\n{json.dumps(row)},\n{json.dumps(order)}")


def _locked(path: Path) -> BinaryIO:
    """Open a file anew, unless another trace is writing it: then raise TraceError."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise TraceError(f"another PerfettoTrace is writing {str(path)!r}; give each a path of its own") from error
    file.truncate(0)
    return file
