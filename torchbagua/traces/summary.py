"""A summary for people without a browser: one table of what communication costs."""

from collections.abc import Sequence

from torchbagua.events import CommEvent, Run
from torchbagua.traces.figures import Figures

_NS_PER_MS = 1e6
_PHASES = ("encode", "send", "receive", "reduce", "decode", "apply")


class Summary:
    """Adds up what one rank's communication costs; `str` of it is a table. An observer.

    Pass it as one of the `observers` of `attach` or `reify`. What `attachment.summary()` returns is one.

    Attributes:
        figures: the sums, of the steps that have ended.
    """

    def __init__(self) -> None:
        self.figures = Figures()
        self.run: Run | None = None
        self._pending: list[CommEvent] = []

    def on_start(self, run: Run) -> None:
        """Keep what the run is."""
        self.run = run

    def on_comm(self, event: CommEvent) -> None:
        """Add the events of a step when it ends."""
        self._pending.append(event)
        if event.phase == "step":
            self.on_end()

    def on_end(self) -> None:
        """Add what belongs to no whole step."""
        self.figures.add(self._pending)
        self.figures.bucket_ns.clear()  # which would grow for ever
        self._pending.clear()

    def __str__(self) -> str:
        return table([self])


def table(summaries: Sequence[Summary]) -> str:
    """Return one table of several ranks' summaries, a row each, with what the columns mean."""
    head = [
        ["", "steps", "ms", "waited", "overlap", *(["ms"] * len(_PHASES)), "MB sent", "bits per", "ratio", "Gbit/s"],
        ["rank", "", "a step", "ms", "%", *_PHASES, "a step", "element", "", ""],
    ]
    rows = [*head, *map(_row, summaries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(len(head), "-" * max(map(len, lines)))
    runs = [summary.run for summary in summaries if summary.run is not None]
    titles = [f"{runs[0].description}, {runs[0].num_ranks} ranks", ""] if runs else []
    failures = [f"rank {run.rank}: {failure}" for run in runs for failure in run.failures]
    return "\n".join([*titles, *lines, "", _LEGEND, *(["", *failures] if failures else [])])


_LEGEND = """\
Means over the steps. waited: for how long training stood still for communication. overlap: the share of communication
that it did not wait for. receive: the lane waited for messages. send: messages were on their way, while the lane did
other things. MB: payload that this rank has sent, without headers of the transport. ratio: float32's bits to these.
Gbit/s: sent, while messages were under way."""


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
        f"{100 * figures.overlap:.0f}",
        *(ms(figures.phase_ns[phase]) for phase in _PHASES),
        f"{figures.bytes_sent / num_steps / 1e6:.3f}",
        f"{figures.bits_per_element:.2f}",
        f"{figures.ratio:.2f}x",
        f"{figures.gbit_per_s:.2f}",
    ]
