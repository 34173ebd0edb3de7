"""All ranks' files brought together in one, with an arrow for every message."""

import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torchbagua.traces.rank_files import RankFile, Row

Progress = Callable[[Iterable[RankFile]], Iterable[RankFile]]


class Merged(NamedTuple):
    """What `merge` has made.

    Attributes:
        path: the file.
        num_ranks: of which it holds the events.
        num_messages: that have an arrow.
        clock_error_us: how far off the time of any rank may be, as far as its clock runs evenly.
        num_backwards: how many messages arrive before they leave, by more than that explains.
    """

    path: Path
    num_ranks: int
    num_messages: int
    clock_error_us: float
    num_backwards: int


class _End(NamedTuple):
    """When a message left or was there, and where its arrow begins or ends."""

    time_us: float
    arrow_us: float
    pid: int
    tid: int


def merge(files: Sequence[RankFile], output: Path, progress: Progress = iter) -> Merged:
    """Write one trace of all ranks' files, on rank 0's clock, with an arrow for every message.

    Memory: some 500 bytes a message.

    Args:
        files: what `find_files` has found.
        output: a .json.gz file, none of these.
        progress: told of the files, once for messages and once for all that is in them.

    Raises:
        ValueError: `output` is one of the files.
        OSError: `output` cannot be written; nothing is left of it then.
    """
    if output.resolve() in [file.path.resolve() for file in files]:
        raise ValueError(f"the output must be a file of its own, got {str(output)!r}, which is one of the ranks'")
    errors_us = {int(file.header["rank"]): file.clock_error_us for file in files}
    first_us, num_messages, num_backwards = math.inf, 0, 0
    sends: dict[tuple[Any, ...], _End] = {}
    receives: dict[tuple[Any, ...], _End] = {}
    for file in progress(files):
        for row in file.rows_on_common_clock():
            if "ts" not in row:
                continue
            first_us = min(first_us, row["ts"])
            if row["cat"] == "send":
                sends[_message(row, sender=row["pid"], receiver=row["args"]["peers"][0])] = _start_of(row)
            elif row["cat"] == "receive":
                receives[_message(row, sender=row["args"]["peers"][0], receiver=row["pid"])] = _end_of(row)
    partial = output.with_name(f"{output.name}.partial")
    with _removed_on_failure(partial), gzip.open(partial, "wt", encoding="utf-8", compresslevel=6) as trace:
        separator = "["
        for file in progress(files):
            for row in file.rows_on_common_clock():
                if "ts" in row:
                    # Both ends, so that what ended before the next began still does.
                    end_us = round(row["ts"] + row["dur"] - first_us, 3)
                    row["ts"] = round(row["ts"] - first_us, 3)
                    row["dur"] = round(end_us - row["ts"], 3)
                trace.write(f"{separator}{json.dumps(row)}")
                separator = ",\n"
        for message, sent in sends.items():
            if (received := receives.get(message)) is not None:
                num_messages += 1
                num_backwards += received.time_us - sent.time_us < -(errors_us[sent.pid] + errors_us[received.pid])
                for row in _arrow(num_messages, sent, received, first_us):
                    trace.write(f"{separator}{json.dumps(row)}")
        trace.write("]\n")
    partial.rename(output)
    return Merged(output, len(files), num_messages, max(errors_us.values()), num_backwards)


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


@contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise
