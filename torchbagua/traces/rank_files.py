"""The files that PerfettoTrace has written, one a rank, read back."""

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchbagua.events import ClockOffset, CommEvent, Run
from torchbagua.traces.perfetto import HEADER
from torchbagua.traces.summary import Summary

Row = dict[str, Any]
"""An event in Chrome's trace event format."""

_FIELDS = frozenset(CommEvent._fields)
_HEADER_LINE = f'{{"name": "{HEADER}"'.encode()


class RankFile:
    """One rank's file.

    Attributes:
        path: the file.
        header: what it says of the run; where the trace has ended in order, with all that is known by then.
        is_whole: whether it has.

    Raises:
        ValueError: there is no such header in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        headers = [json.loads(line)["args"] for line in _lines(path) if line.startswith(_HEADER_LINE)]
        if not headers:
            raise ValueError(f"{path.name} does not begin as PerfettoTrace's files do: cut off, or of another program")
        self.header: dict[str, Any] = headers[-1]
        self.is_whole = len(headers) > 1

    def rows(self) -> Iterator[Row]:
        """Yield the trace events; times are us since the file was begun."""
        for line in _lines(self.path):
            if not line.startswith(_HEADER_LINE):
                yield json.loads(line)

    def rows_on_common_clock(self) -> Iterator[Row]:
        """Yield the trace events; times are us on rank 0's clock."""
        base_ns, offset, drift = self.header["base_ns"], *self._clock()
        for row in self.rows():
            if "ts" in row:
                own_ns = base_ns + row["ts"] * 1e3
                row["ts"] = (own_ns + offset.offset_ns + drift * (own_ns - offset.own_ns)) / 1e3
                row["dur"] *= 1 + drift
            yield row

    @property
    def clock_error_us(self) -> float:
        """How far off these times may be at most."""
        return self._clock()[0].error_ns / 1e3

    def _clock(self) -> tuple[ClockOffset, float]:
        """Return what to add to own clock at one moment, and by how much more for each later ns."""
        offsets = [ClockOffset(*offset) for offset in self.header["clock_offsets"]]
        first, last = offsets[0], offsets[-1]
        moved_ns, error_ns = last.offset_ns - first.offset_ns, first.error_ns + last.error_ns
        if abs(moved_ns) <= error_ns:
            return min(offsets, key=lambda offset: offset.error_ns), 0.0
        # Clocks of two machines drift apart by some microseconds a second; between two comparisons, evenly.
        both = first._replace(error_ns=max(first.error_ns, last.error_ns))
        return both, moved_ns / (last.own_ns - first.own_ns)

    def event(self, row: Row, base_ns: int = 0) -> CommEvent:
        """Return what observers heard, of which `row`, a complete event, tells in times since `base_ns`."""
        start_ns = base_ns + round(row["ts"] * 1e3)
        details: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in row["args"].items()
            if key in _FIELDS
        }
        if "values" in details:
            values = details["values"].items()
            details["values"] = {name: math.nan if value is None else value for name, value in values}
        end_ns = start_ns + round(row["dur"] * 1e3)
        return CommEvent(row["cat"], start_ns, end_ns, algorithm=self.header["algorithm"], **details)

    def events(self) -> Iterator[CommEvent]:
        """Yield what observers heard."""
        return (self.event(row, self.header["base_ns"]) for row in self.rows() if row["ph"] == "X")

    def summary(self) -> Summary:
        """Return the summary of what observers heard."""
        summary = Summary()
        told = {name: self.header[name] for name in ("id", "algorithm", "description", "rank", "settings", "failures")}
        summary.on_start(Run(**told, nodes=tuple(self.header["nodes"]), board=None))
        for event in self.events():
            summary.on_comm(event)
        summary.on_end()
        return summary


class Found(NamedTuple):
    """The files of a run, in rank order, and what is wrong with them, in sentences."""

    files: list[RankFile]
    problems: list[str]


def find_files(folder: Path) -> Found:
    """Return the ranks' files in `folder`; those of a run that broke off may be missing, or not whole.

    Raises:
        ValueError: there are none, or they are of several runs.
    """
    files, problems = [], []
    paths = sorted(folder.glob("rank*.json.gz"))
    for path in paths:
        try:
            files.append(RankFile(path))
        except ValueError as error:
            problems.append(str(error))
    if not files:
        below = sorted(path.parent.name for path in folder.glob("*/rank0.json.gz"))
        hint = f"; there are some in its folders {below[:5]}" if below else "; ".join(["", *problems])
        raise ValueError(f"there is no rank*.json.gz of PerfettoTrace in {str(folder)!r}{hint}")
    for file in files:
        if file.header["id"] != files[0].header["id"]:
            raise ValueError(f"{file.path.name} is of another run than {files[0].path.name}; remove the older one")
    files.sort(key=lambda file: int(file.header["rank"]))
    num_ranks = len(files[0].header["nodes"])
    if missing := sorted(set(range(num_ranks)) - {file.header["rank"] for file in files}):
        problems.append(f"of {num_ranks} ranks, there is nothing of {missing}")
    for file in files:
        if not file.is_whole:
            last = max((event.step for event in file.events() if event.phase == "step"), default=None)
            where = "before its first step ended" if last is None else f"after step {last}"
            problems.append(f"{file.path.name} breaks off {where}: the process, or its trace, ended early")
    return Found(files, problems)


def events_of_step(files: Sequence[RankFile], step: int | None = None) -> dict[int, list[CommEvent]]:
    """Return the events of one step by rank, on rank 0's clock; by default of the one in the middle.

    Raises:
        ValueError: no file has the step.
    """
    numbers = sorted({event.step for file in files for event in file.events() if event.phase == "step"})
    if not numbers:
        raise ValueError("no step has ended in this trace")
    if step is None:
        step = numbers[len(numbers) // 2]
    if step not in numbers:
        raise ValueError(f"step {step} is not in this trace, whose steps are {numbers[0]} to {numbers[-1]}")
    return {
        file.header["rank"]: [
            file.event(row) for row in file.rows_on_common_clock() if row["ph"] == "X" and row["args"]["step"] == step
        ]
        for file in files
    }


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the JSON of each event; where the file breaks off, as a killed process leaves it, of those before that."""
    decompress = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(1 << 16):
            try:
                rest += decompress.decompress(chunk)
            except zlib.error:
                break
            *lines, rest = rest.split(b"\n")
            yield from (text for line in lines if (text := line.strip(b"[],")))
    if (text := rest.strip(b"[],")).endswith(b"}}"):
        yield text
