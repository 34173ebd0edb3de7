"""PerfettoTrace records each rank's events, and `merge` creates one file for https://ui.perfetto.dev from them.

The file of a rank contains lines of JSON, compressed with gzip. The first line contains the run as it began. A line for
each step follows, a list of its events, and a line with the events after the last complete step. An event is a list of
the fields of CommEvent. The last line contains the run again, with its state at the end. A file without this line is
truncated, for example because the process was killed; it can be read nevertheless.
"""

import fcntl
import gzip
import json
import math
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from torchbagua.observe.background_trace import BackgroundTrace, Writer, folder_of
from torchbagua.observe.events import TRAINING_PHASES, ClockOffset, CommEvent, Run, TraceError
from torchbagua.observe.summary import Summary

_SUFFIX = ".jsonl.gz"
_RUN_LINE = '{"torchbagua trace":1,'

# json writes tuples as lists, and not every kind of mapping: hence `default`. No event contains itself, so the check
# for cycles is off: it would take as long as the rest of the encoding.
_encode = json.JSONEncoder(default=dict, separators=(",", ":"), check_circular=False).encode

# The name of a slice, if it differs from its phase.
_NAMES = {"step": "step {event.step}", "send": "send {event.bucket}", "bucket": "{event.bucket}"}
_DETAILS = ("operation", "bucket", "scope", "ranks", "peers", "num_elements", "raw_bytes", "wire_bytes")

_LANE = 2  # its track

Row = dict[str, Any]
"""An event in Chrome's trace event format."""


class PerfettoTrace(BackgroundTrace):
    """An observer that writes all events of a rank to a file, for Perfetto and for `torchbagua trace`.

    It writes `rank<r>.jsonl.gz` in `path`, on a separate thread, and replaces the file of an earlier run.
    `torchbagua trace merge` creates one file for https://ui.perfetto.dev from all ranks' files. The file shows the
    training thread, the lane, messages by peer and an arrow for each message, on one clock. `torchbagua trace show`
    prints a table. A trace serves one attachment, or one `Algorithm.reify`.

    Args:
        path: a folder. The ranks of a run share it, or you copy their files into one folder later.
        steps: the steps to record; by default all. A step takes about 20 bytes for each of its events.

    Raises:
        ValueError: `path` is not writable, or `steps` contains no step number of 0 or more.
        TypeError: `path` is not a path, or `steps` is not a range.
    """

    compares_clocks = True

    def __init__(self, path: str | os.PathLike[str], *, steps: range | None = None) -> None:
        super().__init__(path)
        if steps is not None and not isinstance(steps, range):
            raise TypeError(f"PerfettoTrace: steps must be a range or None, got {steps!r}")
        if steps is not None and not any(step >= 0 for step in steps):
            raise ValueError(f"PerfettoTrace: steps must contain a step number of 0 or more, got {steps!r}")
        self.path = folder_of("PerfettoTrace", "path", path)
        self._steps = steps

    def open(self, run: Run) -> Writer:
        return RankFileWriter(self.path, run)

    def on_comm(self, event: CommEvent) -> None:
        """Record the event, if its step is one of the steps to record."""
        if self._steps is None or event.step in self._steps:
            super().on_comm(event)


class RankFileWriter:
    """Writes the file of one rank, and replaces the file of an earlier run."""

    def __init__(self, folder: Path, run: Run) -> None:
        self._run = run
        self._locked_file = _open_locked(folder / f"rank{run.rank}{_SUFFIX}")
        self._file = gzip.open(self._locked_file, "wt", encoding="utf-8", compresslevel=1)  # noqa: SIM115 - for the run
        self._write_run()
        self._file.flush()

    def write(self, steps: list[list[CommEvent]]) -> None:
        for events in steps:
            self._file.write(f"{_encode(events)}\n")
        self._file.flush()

    def close(self, events: list[CommEvent]) -> None:
        self.write([events])
        self._write_run()
        self._file.close()
        self._locked_file.close()

    def _write_run(self) -> None:
        run = {**vars(self._run), "board": None}
        self._file.write(f'{_RUN_LINE}"event":{_encode(CommEvent._fields)},"run":{_encode(run)}}}\n')


def _open_locked(path: Path) -> BinaryIO:
    """Open a file, lock it and empty it; raise TraceError if another trace is writing it."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise TraceError(f"another PerfettoTrace is writing {str(path)!r}; give each trace a separate path") from error
    file.truncate(0)
    return file


class RankFile:
    """Reads one rank's file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        runs = [line for line in self._lines() if line.startswith(_RUN_LINE)]
        if not runs:
            raise ValueError(f"{path.name} does not begin like a PerfettoTrace file: it is truncated, or foreign")
        run = json.loads(runs[-1])["run"]
        offsets = [ClockOffset(*offset) for offset in run["clock_offsets"]]
        self.run = Run(**{**run, "nodes": tuple(run["nodes"]), "clock_offsets": offsets})
        self.is_whole = len(runs) > 1  # the trace ended normally, and `run` is the run at its end
        self._offset, self._drift = _clock_of(self.run)

    def events(self) -> Iterator[CommEvent]:
        """Yield the events of the rank."""
        for line in self._lines():
            if not line.startswith(_RUN_LINE):
                for fields in json.loads(line):
                    yield CommEvent._make(tuple(field) if isinstance(field, list) else field for field in fields)

    def events_on_common_clock(self) -> Iterator[CommEvent]:
        """Yield the events of the rank, with times on rank 0's clock."""
        for event in self.events():
            yield event._replace(start_ns=self._common_ns(event.start_ns), end_ns=self._common_ns(event.end_ns))

    @property
    def clock_error_ns(self) -> int:
        """The largest possible error of the times on rank 0's clock."""
        return self._offset.error_ns

    def summary(self) -> Summary:
        """Return the summary of the rank's events."""
        summary = Summary()
        summary.on_start(self.run)
        for event in self.events():
            summary.on_comm(event)
        summary.on_end()
        return summary

    def _common_ns(self, own_ns: int) -> int:
        return own_ns + self._offset.offset_ns + round(self._drift * (own_ns - self._offset.own_ns))

    def _lines(self) -> Iterator[str]:
        """Yield the complete lines."""
        with gzip.open(self.path, "rt", encoding="utf-8") as file:
            try:
                for line in file:
                    if line.endswith("\n"):
                        yield line
            except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError):
                return


def _clock_of(run: Run) -> tuple[ClockOffset, float]:
    """Return the offset to add to a rank's clock at one time, and the drift to add per ns after that time."""
    offsets = run.clock_offsets
    first, last = offsets[0], offsets[-1]
    moved_ns, error_ns = last.offset_ns - first.offset_ns, first.error_ns + last.error_ns
    if abs(moved_ns) <= error_ns:
        return min(offsets, key=lambda offset: offset.error_ns), 0.0
    # The clocks of two machines drift apart by a few microseconds per second, evenly between two comparisons.
    both = first._replace(error_ns=max(first.error_ns, last.error_ns))
    return both, moved_ns / (last.own_ns - first.own_ns)


class Found(NamedTuple):
    """The files of a run, in rank order, and descriptions of their problems."""

    files: list[RankFile]
    problems: list[str]


def find_files(folder: Path) -> Found:
    """Return the ranks' files in `folder`. If the run ended early, files may be missing or truncated."""
    files, problems = [], []
    for path in sorted(folder.glob(f"rank*{_SUFFIX}")):
        try:
            files.append(RankFile(path))
        except ValueError as error:
            problems.append(str(error))
    if not files:
        hint = "; ".join(["", *problems])
        if below := sorted(path.parent.name for path in folder.glob(f"*/rank0{_SUFFIX}")):
            hint = f"; its subfolders {below[:5]} contain such files"
        raise ValueError(f"found no rank*{_SUFFIX} file of PerfettoTrace in {str(folder)!r}{hint}")
    for file in files:
        if file.run.id != files[0].run.id:
            raise ValueError(f"{file.path.name} and {files[0].path.name} are of different runs; remove the older file")
    files.sort(key=lambda file: file.run.rank)
    num_ranks = files[0].run.num_ranks
    if missing := sorted(set(range(num_ranks)) - {file.run.rank for file in files}):
        problems.append(f"files of ranks {missing} are missing, of {num_ranks} ranks")
    for file in files:
        if not file.is_whole:
            last = max((event.step for event in file.events() if event.phase == "step"), default=None)
            where = "before the end of its first step" if last is None else f"after step {last}"
            problems.append(f"{file.path.name} is truncated {where}: the process or its trace ended early")
    return Found(files, problems)


def events_of_step(files: Sequence[RankFile], step: int | None = None) -> dict[int, list[CommEvent]]:
    """Return the events of one step by rank, on rank 0's clock; by default of the middle step."""
    numbers = sorted({event.step for file in files for event in file.events() if event.phase == "step"})
    if not numbers:
        raise ValueError("this trace contains no complete step")
    if step is None:
        step = numbers[len(numbers) // 2]
    if step not in numbers:
        raise ValueError(f"step {step} is not in this trace, which ranges from step {numbers[0]} to {numbers[-1]}")
    return {file.run.rank: [event for event in file.events_on_common_clock() if event.step == step] for file in files}


Progress = Callable[[Iterable[RankFile]], Iterable[RankFile]]


class Merged(NamedTuple):
    """The result of `merge`."""

    path: Path
    num_ranks: int
    num_messages: int  # that have an arrow
    clock_error_us: float  # the largest possible error of any rank's times, provided that its clock runs evenly
    num_backwards: int  # messages that arrive before they are sent, by more than the clock errors explain


class _Span(NamedTuple):
    """The time in which a rank sent a message, or waited for it, and the track that shows it."""

    start_ns: int
    end_ns: int
    rank: int
    track: int


def merge(files: Sequence[RankFile], output: Path, progress: Progress = iter) -> Merged:
    """Write one trace of all ranks' files, on rank 0's clock, with an arrow for every message.

    Memory: about 900 bytes per message.

    Source: "Trace Event Format", the Chromium project.
    """
    if output.resolve() in [file.path.resolve() for file in files]:
        raise ValueError(f"the output must be a separate file, got {str(output)!r}, which is a rank's file")
    origin_ns, messages = _find_messages(progress(files))
    with _open_atomically(output) as trace:
        rows = (row for file in progress(files) for row in _rows_of_rank(file, origin_ns))
        arrows = (row for number, ends in enumerate(messages, 1) for row in _arrow(number, *ends, origin_ns))
        separator = "["
        for row in chain(rows, arrows):
            trace.write(f"{separator}{json.dumps(row)}")
            separator = ",\n"
        trace.write("]\n")
    errors_ns = {file.run.rank: file.clock_error_ns for file in files}
    num_backwards = sum(
        sent.start_ns - received.end_ns > errors_ns[sent.rank] + errors_ns[received.rank] for sent, received in messages
    )
    return Merged(output, len(files), len(messages), max(errors_ns.values()) / 1e3, num_backwards)


def _find_messages(files: Iterable[RankFile]) -> tuple[int, list[tuple[_Span, _Span]]]:
    """Return when the first event begins, and for each message the spans of its send and its receive."""
    sent: dict[tuple[object, ...], _Span] = {}  # by what both sides know: group, sender, receiver and number
    received: dict[tuple[object, ...], _Span] = {}
    origin_ns = sys.maxsize
    for file in files:
        rank, tracks = file.run.rank, _Tracks()
        for event in file.events_on_common_clock():
            origin_ns = min(origin_ns, event.start_ns)
            span = _Span(event.start_ns, event.end_ns, rank, tracks.of(event)[0])
            if event.scope.endswith(" of replicas"):  # other replicas are not part of this run
                continue
            if event.phase == "send":
                sent[event.scope, event.ranks, rank, event.peers[0], event.message] = span
            elif event.phase == "receive":
                received[event.scope, event.ranks, event.peers[0], rank, event.message] = span
    return origin_ns, [(sent[message], received[message]) for message in sent if message in received]


class _Tracks:
    """Assigns the events of a rank to tracks, in order."""

    def __init__(self) -> None:
        self._last_ns: Counter[int] = Counter()  # when a peer's track, or the lane's, is free again

    def of(self, event: CommEvent) -> tuple[int, str]:
        """Return the number and the name of the event's track."""
        if event.phase == "bucket":
            if event.start_ns < self._last_ns[_LANE]:  # it began while the bucket before was in progress
                return 3, "lane, next bucket"
            self._last_ns[_LANE] = event.end_ns
        if event.phase != "send":
            return (1, "training") if event.phase in TRAINING_PHASES else (_LANE, "lane")
        (peer,) = event.peers
        track = 10 + 2 * peer
        if event.start_ns < self._last_ns[track]:  # passed to gloo while the message before was in flight
            return track + 1, f"to rank {peer}, next"
        self._last_ns[track] = event.end_ns
        return track, f"to rank {peer}"


def _rows_of_rank(file: RankFile, origin_ns: int) -> Iterator[Row]:
    rank = file.run.rank
    yield from _metadata_rows("process", rank, 0, f"rank {rank}, node {file.run.nodes[rank]}", order=rank)
    tracks, named_tracks = _Tracks(), set()
    for event in file.events_on_common_clock():
        track, name = tracks.of(event)
        if track not in named_tracks:
            named_tracks.add(track)
            yield from _metadata_rows("thread", rank, track, name, order=track)
        yield {
            "name": _NAMES.get(event.phase, event.phase).format(event=event),
            "cat": event.phase,
            "ph": "X",
            "ts": (event.start_ns - origin_ns) / 1e3,
            "dur": event.duration_ns / 1e3,
            "pid": rank,
            "tid": track,
            "args": _args_of(event),
        }


def _metadata_rows(kind: str, rank: int, track: int, name: str, *, order: int) -> Iterator[Row]:
    common = {"ph": "M", "pid": rank, "tid": track}
    yield {"name": f"{kind}_name", **common, "args": {"name": name}}
    yield {"name": f"{kind}_sort_index", **common, "args": {"sort_index": order}}


def _args_of(event: CommEvent) -> Row:
    """Return the details that Perfetto shows when the user clicks on an event."""
    args: Row = {"step": event.step, "message": event.message}
    args |= {name: value for name in _DETAILS if (value := getattr(event, name))}
    if event.wire_bytes:
        args["bits_per_element"] = round(event.bits_per_element, 3)
    if event.values:
        # JSON has no NaN, which a step that overflows produces.
        args["values"] = {name: value if math.isfinite(value) else None for name, value in event.values.items()}
    return args


def _arrow(number: int, sent: _Span, received: _Span, origin_ns: int) -> Iterator[Row]:
    """Yield the two flow events between which Perfetto draws an arrow."""
    common = {"name": "message", "cat": "message", "id": number}
    # The arrow ends at the slice that encloses its end time; a slice may be as short as a nanosecond.
    end_ns = received.start_ns + 0.99 * (received.end_ns - received.start_ns)
    for kind, time_ns, span in ({"ph": "s"}, sent.start_ns, sent), ({"ph": "f", "bp": "e"}, end_ns, received):
        yield {**common, **kind, "ts": round((time_ns - origin_ns) / 1e3, 3), "pid": span.rank, "tid": span.track}


@contextmanager
def _open_atomically(path: Path) -> Iterator[TextIO]:
    """Yield a compressed file to write to; it appears at `path` only after it is complete."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with gzip.open(partial, "wt", encoding="utf-8", compresslevel=6) as file:
            yield file
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
