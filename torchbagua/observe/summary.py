"""A summary for people without a browser: one table of what communication costs."""

import math
from collections.abc import Sequence

from torchbagua._text_table import table
from torchbagua.observe.events import CommEvent, Run, Trace
from torchbagua.observe.figures import PHASES, Figures

_NS_PER_MS = 1e6


class Summary(Trace):
    """An observer that adds up what the communication of one rank costs. `print` it for a table.

    Hand it to `attach` or `Algorithm.reify` in `observers`. `Attachment.summary` returns one.

    Attributes:
        figures: the sums over the steps that have ended.
        bytes_after: how many bytes were sent after these, in a round that was under way and in detaching. It is known
            when the attachment has ended.
        bytes_in_detaching: how many of `bytes_after` detaching sent, which forms the last mean of the weights.
    """

    def __init__(self) -> None:
        self.figures = Figures()
        self.bytes_after = self.bytes_in_detaching = 0
        self.run: Run | None = None
        self._pending: list[CommEvent] = []

    def check(self) -> None:
        """Raise ValueError if it has been attached before."""
        if self.run is not None:
            raise ValueError("Summary: it serves one attachment; make another one")

    def on_start(self, run: Run) -> None:
        """Keep the description of the run."""
        self.run = run

    def on_comm(self, event: CommEvent) -> None:
        """Add the events of a step when it ends."""
        self._pending.append(event)
        if event.phase == "step":
            self.figures.add(self._pending)
            self.figures.bucket_ns.clear()  # which would grow for ever
            self._pending.clear()

    def on_end(self) -> None:
        """Count what was sent after the last whole step."""
        detaching_ns = min((event.start_ns for event in self._pending if event.phase == "detach"), default=math.inf)
        for event in self._pending:
            self.bytes_after += event.bytes_sent
            if event.end_ns > detaching_ns:
                self.bytes_in_detaching += event.bytes_sent
        self._pending.clear()

    def __str__(self) -> str:
        return table_of([self])


def table_of(summaries: Sequence[Summary]) -> str:
    """Return one table of several ranks' summaries, a row each, with what the columns mean."""
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
        f"{figures.staleness_steps / figures.num_rounds:.1f} steps after its snapshot; training stood still for "
        f"{figures.wait_ns / figures.num_rounds / _NS_PER_MS:.2f} ms a round"
        for summary in summaries
        if summary.run is not None and (figures := summary.figures).num_rounds
    ]
    notes += [f"rank {run.rank}: {failure}" for run in runs for failure in run.failures]
    return "\n".join([*titles, rows, "", _LEGEND, *(["", *notes] if notes else [])])


def _sent_after(summary: Summary) -> str:
    after, in_detaching = (f"{num / 1e6:.3f} MB" for num in (summary.bytes_after, summary.bytes_in_detaching))
    if not summary.bytes_in_detaching:
        return f"{after} more after its last step"
    return f"{after} more after its last step,{'' if in_detaching == after else f' {in_detaching} of it'} in detaching"


_LEGEND = """\
Means over the steps, each from the end of one optimizer.step to that of the next, whatever lies between. waited: for
how long training stood still for communication. overlap: the share of communication that it did not wait for. receive:
the lane waited for messages. send: messages were on their way, while the lane did other things. MB: payload that this
rank has sent, without headers of the transport. ratio: float32's bits to these. Gbit/s: sent, over the time that
messages were on their way or waited for, a late rank's included."""


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
