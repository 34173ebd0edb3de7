"""All ranks' files brought together in one, with an arrow for every message."""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torchbagua.traces.rank_files import RankFile, Row, find_files

Progress = Callable[[Iterable[RankFile]], Iterable[RankFile]]


# Half of the shortest way to another rank and back, on a local network.
_INEXACT_US = 50.0


class Merged(NamedTuple):
    """What `merge` has made.

    Attributes:
        path: the file.
        num_ranks: of which it holds the events.
        num_messages: that have an arrow.
        num_backwards: of these, how many arrive before they leave, by more than comparing clocks is inexact.
        worst_us: by how much at most.
    """

    path: Path
    num_ranks: int
    num_messages: int
    num_backwards: int
    worst_us: float


class _End(NamedTuple):
    """When a message left or was there, and where its arrow begins or ends."""

    time_us: float
    arrow_us: float
    pid: int
    tid: int


def merge(folder: Path, output: Path, progress: Progress = iter) -> Merged:
    """Write one trace of all ranks' files in `folder`, on rank 0's clock, with an arrow for every message.

    Memory: some 500 bytes a message.

    Args:
        folder: the path of PerfettoTrace.
        output: a .json.gz file.
        progress: told of the files, each of which is read twice.

    Raises:
        ValueError: not all ranks' files of one run are there.
        OSError: `output` cannot be written.
    """
    files = find_files(folder)
    first_us, delays_us = 0.0, []
    sends: dict[tuple[Any, ...], _End] = {}
    receives: dict[tuple[Any, ...], _End] = {}
    for file in progress(files):
        for row in file.rows_on_common_clock():
            if "ts" not in row:
                continue
            first_us = min(first_us or row["ts"], row["ts"])
            if row["cat"] == "send":
                sends[_message(row, sender=row["pid"], receiver=row["args"]["peers"][0])] = _start_of(row)
            elif row["cat"] == "receive":
                receives[_message(row, sender=row["args"]["peers"][0], receiver=row["pid"])] = _end_of(row)
    with gzip.open(output, "wt", encoding="utf-8", compresslevel=6) as trace:
        separator = "["
        for file in progress(files):
            for row in file.rows_on_common_clock():
                if "ts" in row:
                    row["ts"] = round(row["ts"] - first_us, 3)
                trace.write(f"{separator}{json.dumps(row)}")
                separator = ",\n"
        for message, sent in sends.items():
            if (received := receives.get(message)) is not None:
                delays_us.append(received.time_us - sent.time_us)
                for row in _arrow(len(delays_us), sent, received, first_us):
                    trace.write(f"{separator}{json.dumps(row)}")
        trace.write("]\n")
    backwards = [-delay_us for delay_us in delays_us if delay_us < -_INEXACT_US]
    return Merged(output, len(files), len(delays_us), len(backwards), max(backwards, default=0.0))


def _message(row: Row, *, sender: int, receiver: int) -> tuple[Any, ...]:
    args = row["args"]
    return args["scope"], tuple(args["ranks"]), sender, receiver, args["message"]


def _start_of(row: Row) -> _End:
    return _End(row["ts"], row["ts"], row["pid"], row["tid"])


def _end_of(row: Row) -> _End:
    # An arrow ends at the slice around its end, which need not be longer than a nanosecond.
    return _End(row["ts"] + row["dur"], row["ts"] + 0.99 * row["dur"], row["pid"], row["tid"])


def _arrow(number: int, sent: _End, received: _End, first_us: float) -> Iterator[Row]:
    """Yield the two flow events that Perfetto draws an arrow between."""
    common = {"name": "message", "cat": "message", "id": number}
    for kind, end in ({"ph": "s"}, sent), ({"ph": "f", "bp": "e"}, received):
        yield {**common, **kind, "ts": round(end.arrow_us - first_us, 3), "pid": end.pid, "tid": end.tid}
