"""The simplest observer: it keeps what it hears."""

from torchbagua.events import CommEvent


class Recorder:
    """Keeps every event in memory, in the order in which the phases ended.

    Pass it as one of the `observers` of `attach` or `reify`. Events arrive when the step in which they ended does.
    """

    def __init__(self) -> None:
        self.events: list[CommEvent] = []

    def on_comm(self, event: CommEvent) -> None:
        """Keep `event`."""
        self.events.append(event)

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent since the last `clear`."""
        return sum(event.bytes_sent for event in self.events)

    def clear(self) -> None:
        """Forget everything heard so far."""
        self.events.clear()
