"""A text summary of the cost of communication: one table."""

import math
from collections.abc import Sequence

from torchbagua._text_table import table
from torchbagua.observe.events import CHANGE_PHASES, CommEvent, Run, Trace
from torchbagua.observe.figures import PHASES, Figures

_NS_PER_MS = 1e6


class Summary(Trace):
    """An observer that sums the communication cost of one rank. `print` it for a table.

    Pass it to `attach` or `Algorithm.reify` in `observers`. `Attachment.summary` returns a Summary.

    Attributes:
        figures: the sums over the completed steps.
        bytes_after: the number of bytes sent after these steps, in a round still in progress and in detach. It is known
            once the attachment has ended.
        bytes_in_detaching: the part of `bytes_after` sent by detach, which computes the last mean of the weights.
    """

    def __init__(self) -> None:
        self.figures = Figures()
        self.bytes_after = self.bytes_in_detaching = 0
        self.change_ns: dict[str, int] = {}
        self.run: Run | None = None
        self._pending: list[CommEvent] = []

    def check(self) -> None:
        """Raise ValueError if the summary has been attached before."""
        if self.run is not None:
            raise ValueError("Summary: a summary serves one attachment; create another Summary")

    def on_start(self, run: Run) -> None:
        """Store the description of the run."""
        self.run = run

    def on_comm(self, event: CommEvent) -> None:
        """Add the events of a step when it ends."""
        if event.phase in CHANGE_PHASES:
            self.change_ns[event.phase] = event.duration_ns
            return
        self._pending.append(event)
        if event.phase == "step":
            self.figures.add(self._pending)
            self.figures.bucket_ns.clear()  # it would grow forever
            self._pending.clear()

    def on_end(self) -> None:
        """Count the bytes sent after the last complete step."""
        detaching_ns = min((event.start_ns for event in self._pending if event.phase == "detach"), default=math.inf)
        for event in self._pending:
            self.bytes_after += event.bytes_sent
            if event.end_ns > detaching_ns:
                self.bytes_in_detaching += event.bytes_sent
        self._pending.clear()

    def __str__(self) -> str:
        return table_of([self])


def table_of(summaries: Sequence[Summary]) -> str:
    """Return one table of several ranks' summaries, one row per rank, with a legend of the columns."""
    head = [
        ["", "steps", "ms", "waited", "overlap", *(["ms"] * len(PHASES)), "MB sent", "bits per", "ratio", "Gbit/s"],
        ["rank", "", "a step", "ms", "%", *PHASES, "a step", "element", "", ""],
    ]
    rows = table([*head, *map(_row, summaries)], num_head_rows=len(head), num_left=0)
    runs = [summary.run for summary in summaries if summary.run is not None]
    count = f"{runs[0].num_ranks} ranks" if runs and runs[0].num_ranks > 1 else "1 rank"
    titles = [f"{runs[0].description}, {count}", ""] if runs else []
    notes = [
        f"rank {summary.run.rank} sent {_sent_after(summary)}"
        for summary in summaries
        if summary.run is not None and summary.bytes_after
    ]
    notes += [
        f"rank {summary.run.rank}: {figures.num_rounds} rounds, each applied "
        f"{figures.staleness_steps / figures.num_rounds:.1f} steps after its snapshot; training blocked for "
        f"{figures.wait_ns / figures.num_rounds / _NS_PER_MS:.2f} ms a round"
        for summary in summaries
        if summary.run is not None and (figures := summary.figures).num_rounds
    ]
    notes += [
        f"rank {summary.run.rank}: the change of the membership before took {sum(each.values()) / 1e9:.2f} s: "
        + ", ".join(f"{phase} {duration_ns / 1e9:.2f} s" for phase, duration_ns in each.items())
        for summary in summaries
        if summary.run is not None and (each := summary.change_ns)
    ]
    notes += [f"rank {run.rank}: {failure}" for run in runs for failure in run.failures]
    return "\n".join([*titles, rows, "", _LEGEND, *(["", *notes] if notes else [])])


def _sent_after(summary: Summary) -> str:
    after, in_detaching = (f"{num / 1e6:.3f} MB" for num in (summary.bytes_after, summary.bytes_in_detaching))
    if not summary.bytes_in_detaching:
        return f"{after} more after its last step"
    return f"{after} more after its last step,{'' if in_detaching == after else f' {in_detaching} of it'} during detach"


_LEGEND = """\
Means over the steps. A step lasts from the end of one optimizer.step to the end of the next, including all work in
between. waited: how long training blocked for communication. overlap: the share of communication for which training did
not wait. receive: the lane waited for messages. send: messages were in flight, while the lane did other work. MB:
payload that this rank sent, without transport headers. ratio: float32's 32 bits over the bits per element. Gbit/s: bits
sent, over the time in which messages were in flight or waited for, including waits for a late rank."""


def _row(summary: Summary) -> list[str]:
    figures = summary.figures
    num_steps = max(1, figures.num_steps)

    def ms(total_ns: int) -> str:
        return f"{total_ns / num_steps / _NS_PER_MS:.2f}"

    return [
        "?" if summary.run is None else str(summary.run.rank),
        str(figures.num_steps),
        ms(figures.step_ns),
        ms(figures.wait_ns),
        f"{100 * figures.overlap:.0f}" if figures.communication_ns else "-",
        *(ms(figures.phase_ns[phase]) for phase in PHASES),
        f"{figures.bytes_sent / num_steps / 1e6:.3f}",
        *([f"{figures.bits_per_element:.2f}", f"{figures.ratio:.2f}x"] if figures.num_elements else ["-", "-"]),
        f"{figures.gbit_per_s:.2f}" if figures.network_ns else "-",
    ]
