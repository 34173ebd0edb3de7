"""The simplest observer: it stores all events."""

from torchbagua.observe.events import CommEvent


class Recorder:
    """An observer that stores every event in memory, in the order in which the phases ended.

    Pass it to `attach` or `Algorithm.reify` in `observers`. Events arrive at the end of their step.
    """

    def __init__(self) -> None:
        self.events: list[CommEvent] = []

    def on_comm(self, event: CommEvent) -> None:
        """Store `event`."""
        self.events.append(event)

    @property
    def bytes_sent(self) -> int:
        """The number of payload bytes that this rank has sent since the last `clear`."""
        return sum(event.bytes_sent for event in self.events)

    def clear(self) -> None:
        """Delete all events."""
        self.events.clear()
