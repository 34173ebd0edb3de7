"""The files that PerfettoTrace has written, one a rank, read back."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchbagua.events import CommEvent, Run
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
        header: what it says of the run; where the run has ended in order, with all that is known by then.

    Raises:
        ValueError: PerfettoTrace has not written it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        headers = [json.loads(line)["args"] for line in _lines(path) if line.startswith(_HEADER_LINE)]
        if not headers:
            raise ValueError(f"{path.name} was not written by this version of PerfettoTrace")
        self.header: dict[str, Any] = headers[-1]

    def rows(self) -> Iterator[Row]:
        """Yield the trace events; times are us since the file was begun."""
        for line in _lines(self.path):
            if not line.startswith(_HEADER_LINE):
                yield json.loads(line)

    def rows_on_common_clock(self) -> Iterator[Row]:
        """Yield the trace events; times are us on rank 0's clock."""
        offsets, base_ns = self.header["clock_offsets"], self.header["base_ns"]
        (first_ns, first_offset_ns), (last_ns, last_offset_ns) = offsets[0], offsets[-1]
        # Clocks of two machines drift apart by some microseconds a second; between two comparisons, evenly.
        drift = (last_offset_ns - first_offset_ns) / max(1, last_ns - first_ns)
        for row in self.rows():
            if "ts" in row:
                own_ns = base_ns + row["ts"] * 1e3
                row["ts"] = (own_ns + first_offset_ns + drift * (own_ns - first_ns)) / 1e3
            yield row

    def event(self, row: Row, base_ns: int = 0) -> CommEvent:
        """Return what observers heard, of which `row`, a complete event, tells in times since `base_ns`."""
        start_ns = base_ns + round(row["ts"] * 1e3)
        details: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in row["args"].items()
            if key in _FIELDS
        }
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


def find_files(folder: Path) -> list[RankFile]:
    """Return the ranks' files in `folder`, in rank order.

    Raises:
        ValueError: there are none, or not one of every rank of one run.
    """
    found = [RankFile(path) for path in sorted(folder.glob("rank*.json.gz"))]
    if not found:
        raise ValueError(f"there is no rank*.json.gz in {str(folder)!r}, which PerfettoTrace writes")
    for file in found:
        if file.header["id"] != found[0].header["id"]:
            raise ValueError(f"{file.path.name} is of another run than {found[0].path.name}; remove the older one")
    by_rank = {file.header["rank"]: file for file in found}
    num_ranks = len(found[0].header["nodes"])
    if missing := sorted(set(range(num_ranks)) - by_rank.keys()):
        raise ValueError(f"of {num_ranks} ranks, those of {missing} are missing in {str(folder)!r}")
    return [by_rank[rank] for rank in range(num_ranks)]


def events_of_step(folder: Path, step: int | None = None) -> dict[int, list[CommEvent]]:
    """Return the events of one step by rank, on rank 0's clock; by default of the step in the middle.

    Raises:
        ValueError: not all ranks' files of one run are there, or none of them has the step.
    """
    files = find_files(folder)
    numbers = [event.step for event in files[0].events() if event.phase == "step"]
    if step is None and numbers:
        step = numbers[len(numbers) // 2]
    if step not in numbers:
        have = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
        raise ValueError(f"step {step} is not in {str(folder)!r}, whose steps are {have}")
    return {
        rank: [
            file.event(row) for row in file.rows_on_common_clock() if row["ph"] == "X" and row["args"]["step"] == step
        ]
        for rank, file in enumerate(files)
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
