"""The trace file of one rank: lines of JSON, compressed with gzip.

The first line contains the run as it began. A line for each step follows, a list of its events, and a line with the
events after the last complete step. An event is a list of the fields of CommEvent. The last line contains the run
again, with its state at the end. A file without this line is truncated, for example because the process was killed; it
can be read nevertheless.
"""

import fcntl
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from torchbagua.observe.events import ClockOffset, CommEvent, Run, TraceError
from torchbagua.observe.summary import Summary

_SUFFIX = ".jsonl.gz"
_RUN_LINE = '{"torchbagua trace":1,'

# json writes tuples as lists, and not every kind of mapping: hence `default`. No event contains itself, so the check
# for cycles is off: it would take as long as the rest of the encoding.
_encode = json.JSONEncoder(default=dict, separators=(",", ":"), check_circular=False).encode


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
    """Reads one rank's file.

    Attributes:
        path: the file.
        run: the run, with its state at the end if the trace ended normally, and else at the start.
        is_whole: whether the trace ended normally.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        runs = [line for line in self._lines() if line.startswith(_RUN_LINE)]
        if not runs:
            raise ValueError(f"{path.name} does not begin like a PerfettoTrace file: it is truncated, or foreign")
        self.run = _run_of(json.loads(runs[-1])["run"])
        self.is_whole = len(runs) > 1
        self._offset, self._drift = _clock_of(self.run)

    def events(self) -> Iterator[CommEvent]:
        """Yield the events of the rank."""
        for line in self._lines():
            if not line.startswith(_RUN_LINE):
                yield from map(_event_of, json.loads(line))

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


def _run_of(fields: dict[str, Any]) -> Run:
    offsets = [ClockOffset(*offset) for offset in fields["clock_offsets"]]
    return Run(**{**fields, "nodes": tuple(fields["nodes"]), "clock_offsets": offsets})


def _event_of(fields: list[Any]) -> CommEvent:
    return CommEvent._make(tuple(field) if isinstance(field, list) else field for field in fields)


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
