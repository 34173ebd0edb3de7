"""The communication cost of steps since the last query, for the logs of a trainer."""

from torchbagua.observe.charts import scalars
from torchbagua.observe.events import CommEvent
from torchbagua.observe.figures import Figures


class StepCost:
    """An observer that sums the communication cost of the steps since the last `take`."""

    def __init__(self) -> None:
        self._events: list[CommEvent] = []
        self._figures = Figures()

    def on_comm(self, event: CommEvent) -> None:
        """Add the events of a step when it ends."""
        self._events.append(event)
        if event.phase == "step":
            self._figures.add(self._events)
            self._figures.bucket_ns.clear()  # it would grow forever if nothing is logged
            self._events.clear()

    def take(self) -> dict[str, float]:
        """Return the values of TensorBoardTrace's overview, and reset; return an empty dict if no step has ended."""
        figures, self._figures = self._figures, Figures()
        shown = scalars(figures, sent_bytes=0).items() if figures.num_steps else ()
        return {tag.replace("communication", "torchbagua"): v for tag, v in shown if tag.startswith("communication/")}
