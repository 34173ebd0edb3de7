"""The simplest observer: it keeps what it hears."""

from torchbagua.observe.events import CommEvent


class Recorder:
    """An observer that keeps every event in memory, in the order in which the phases ended.

    Hand it to `attach` or `Algorithm.reify` in `observers`. Events arrive at the end of their step.
    """

    def __init__(self) -> None:
        self.events: list[CommEvent] = []

    def on_comm(self, event: CommEvent) -> None:
        """Keep `event`."""
        self.events.append(event)

    @property
    def bytes_sent(self) -> int:
        """How many payload bytes this rank has sent since the last `clear`."""
        return sum(event.bytes_sent for event in self.events)

    def clear(self) -> None:
        """Forget all events."""
        self.events.clear()
