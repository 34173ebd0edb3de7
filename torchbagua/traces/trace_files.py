"""What PerfettoTrace has written: read back, and brought together from all ranks."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchbagua.events import CommEvent, Run
from torchbagua.traces.perfetto import HEADER
from torchbagua.traces.summary import Summary

_FIELDS = frozenset(CommEvent._fields)


class Merged(NamedTuple):
    """What `merge` has made.

    Attributes:
        path: the file.
        num_ranks: of which it holds the events.
        num_messages: that have an arrow.
        num_backwards: of these, how many arrive before they leave, for all that clocks have been aligned.
        worst_us: by how much at most.
    """

    path: Path
    num_ranks: int
    num_messages: int
    num_backwards: int
    worst_us: float


def find_files(folder: Path) -> list[Path]:
    """Return the ranks' files in `folder`, in rank order.

    Raises:
        ValueError: there are none, or not one of every rank of one run.
    """
    found = sorted(folder.glob("rank*.json.gz"))
    if not found:
        raise ValueError(f"there is no rank*.json.gz in {str(folder)!r}, which PerfettoTrace writes")
    headers = {path: header_of(path) for path in found}
    first = headers[found[0]]
    for path, header in headers.items():
        if header["id"] != first["id"]:
            raise ValueError(f"{path.name} is of another run than {found[0].name}; remove the older one")
    by_rank = {header["rank"]: path for path, header in headers.items()}
    missing = set(range(len(first["nodes"]))) - by_rank.keys()
    if missing:
        raise ValueError(f"of {len(first['nodes'])} ranks, those of {sorted(missing)} are missing in {str(folder)!r}")
    return [by_rank[rank] for rank in sorted(by_rank)]


def header_of(path: Path) -> dict[str, Any]:
    """Return what the file says of its run. Raises ValueError where it is not PerfettoTrace's."""
    for row in rows_in(path):
        if row["name"] == HEADER:
            header: dict[str, Any] = row["args"]
            return header
        break
    raise ValueError(f"{path.name} was not written by this version of PerfettoTrace")


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the trace events in a file; where it breaks off, as a killed process leaves it, those before that."""
    decompress = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(1 << 16):
            try:
                rest += decompress.decompress(chunk)
            except zlib.error:
                break
            *lines, rest = rest.split(b"\n")
            for line in lines:
                if text := line.strip(b"[],"):
                    yield json.loads(text)
    if (text := rest.strip(b"[],")).endswith(b"}}"):
        yield json.loads(text)


def event_of(row: Mapping[str, Any], algorithm: str, base_ns: int = 0) -> CommEvent:
    """Return the event of `algorithm` that a complete trace event stands for, whose times begin at `base_ns`."""
    start_ns = base_ns + round(row["ts"] * 1e3)
    details: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in row["args"].items() if key in _FIELDS
    }
    return CommEvent(row["cat"], start_ns, start_ns + round(row["dur"] * 1e3), algorithm=algorithm, **details)


def summarise(path: Path) -> Summary:
    """Return the summary of one rank's file."""
    header = header_of(path)
    summary = Summary()
    for row in rows_in(path):
        if row["ph"] == "X":
            summary.on_comm(event_of(row, header["algorithm"], header["base_ns"]))
        elif row["name"] == HEADER:
            header = row["args"]
    summary.on_end()
    told = {name: header[name] for name in ("id", "algorithm", "description", "rank", "settings", "failures")}
    summary.on_start(Run(**told, nodes=tuple(header["nodes"]), board=None))
    return summary


def events_of_step(folder: Path, step: int | None = None) -> dict[int, list[CommEvent]]:
    """Return the events of one step by rank, on rank 0's clock; by default of the step in the middle.

    Raises:
        ValueError: not all ranks' files of one run are there, or none of them has the step.
    """
    files = find_files(folder)
    algorithm = header_of(files[0])["algorithm"]
    ranks = [_on_common_clock(list(rows_in(path))) for path in files]
    numbers = sorted({row["args"].get("step", 0) for rows in ranks for row in rows if row.get("cat") == "step"})
    if not numbers or (step is not None and step not in numbers):
        have = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
        raise ValueError(f"step {step} is not in {str(folder)!r}, whose steps are {have}")
    step = numbers[len(numbers) // 2] if step is None else step
    return {
        rank: [event_of(row, algorithm) for row in rows if row["ph"] == "X" and row["args"].get("step", 0) == step]
        for rank, rows in enumerate(ranks)
    }


def merge(folder: Path, output: Path) -> Merged:
    """Write one trace of all ranks' files in `folder`, on rank 0's clock, with an arrow for every message.

    Raises:
        ValueError: not all ranks' files of one run are there.
        OSError: `output` cannot be written.
    """
    rows: list[dict[str, Any]] = []
    for path in find_files(folder):
        rows += _on_common_clock(list(rows_in(path)))
    arrows, delays_us = _arrows(rows)
    rows += arrows
    first_us = min((row["ts"] for row in rows if "ts" in row), default=0.0)
    for row in rows:
        if "ts" in row:
            row["ts"] = round(row["ts"] - first_us, 3)
    rows.sort(key=lambda row: (row.get("ts", -1.0), -row.get("dur", 0.0)))
    with gzip.open(output, "wt", encoding="utf-8", compresslevel=6) as file:
        file.write("[" + ",\n".join(map(json.dumps, rows)) + "]\n")
    backwards = [-delay_us for delay_us in delays_us if delay_us < 0]
    num_ranks = len({row["pid"] for row in rows})
    return Merged(output, num_ranks, len(delays_us), len(backwards), max(backwards, default=0.0))


def _on_common_clock(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put one rank's times on rank 0's clock, and leave out the headers."""
    header = [row["args"] for row in rows if row["name"] == HEADER][-1]
    offsets = header["clock_offsets"]
    (first_ns, first_offset_ns), (last_ns, last_offset_ns) = offsets[0], offsets[-1]
    # Clocks of two machines drift apart by some microseconds a second; between two comparisons, evenly.
    drift = (last_offset_ns - first_offset_ns) / max(1, last_ns - first_ns)
    base_ns = header["base_ns"]
    for row in rows:
        if "ts" in row:
            own_ns = base_ns + row["ts"] * 1e3
            row["ts"] = (own_ns + first_offset_ns + drift * (own_ns - first_ns)) / 1e3
    return [row for row in rows if row["name"] != HEADER]


def _arrows(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[float]]:
    """Return flow events from each send to its receive, and how long after the send each has ended, in us."""
    sends: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if row.get("cat") == "send":
            args = row["args"]
            sends[_message(args, row["pid"], args["peers"][0])] = row
    arrows: list[dict[str, Any]] = []
    delays_us: list[float] = []
    for row in rows:
        if row.get("cat") != "receive":
            continue
        args = row["args"]
        send = sends.get(_message(args, args["peers"][0], row["pid"]))
        if send is None:
            continue
        number = len(delays_us) + 1
        start_us, end_us = send["ts"], row["ts"] + row["dur"]
        delays_us.append(end_us - start_us)
        arrow = {"name": "message", "cat": "message", "id": number}
        arrows.append({**arrow, "ph": "s", "ts": start_us, "pid": send["pid"], "tid": send["tid"]})
        # Within the slice that it ends at, which need not be longer than a nanosecond.
        within_us = row["ts"] + 0.99 * row["dur"]
        arrows.append({**arrow, "ph": "f", "bp": "e", "ts": within_us, "pid": row["pid"], "tid": row["tid"]})
    return arrows, delays_us


def _message(args: Mapping[str, Any], sender: int, receiver: int) -> tuple[Any, ...]:
    return args["scope"], tuple(args["ranks"]), sender, receiver, args["message"]
