"""What observers are told about communication: data only."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class CommEvent:
    """One exchange of a rank with the other ranks of one group.

    Bytes are payload as handed to the transport, without its headers. Times are `time.perf_counter_ns` of this process.
    """

    operation: str
    """What ran: "all_to_all", "all_gather", "peer_exchange" or, of small numbers, "agreement"."""
    scope: str
    """Which group it ran over: "world", "intra_node" or "inter_node"."""
    bucket: str
    """The bucket that it served, by name; of an agreement, what it is about."""
    group_size: int
    """Ranks in that group."""
    bytes_sent: int
    bytes_received: int
    start_ns: int
    end_ns: int


def check_observers(owner: str, observers: object) -> None:
    """Raise TypeError unless `observers` is a list of observers; `owner` is what the error names."""
    if not isinstance(observers, list | tuple):
        raise TypeError(f"{owner}: observers must be a list of objects with a method on_comm(event), got {observers!r}")
    for observer in observers:
        if isinstance(observer, type) or not callable(getattr(observer, "on_comm", None)):
            raise TypeError(f"{owner}: an observer must be an object with a method on_comm(event), got {observer!r}")


class Observer(Protocol):
    """Hears of every exchange. Called on the thread that communicates, so it should return quickly."""

    def on_comm(self, event: CommEvent) -> None:
        """Take note of one finished exchange."""
        ...
