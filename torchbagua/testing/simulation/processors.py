"""The processors of a simulation: cores that ranks share, and codecs that take time on them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import count
from typing import Any

from torchbagua.codecs.base import Compressor
from torchbagua.testing.simulation.cluster import Cluster, Link, Streams
from torchbagua.testing.simulation.scheduler import Scheduler


class Processors:
    """The cores of all nodes. A thread uses at most one of them, and threads get equal parts of those of their node.

    Attributes:
        slowness: for each rank, how many times as long it computes.
    """

    def __init__(self, scheduler: Scheduler, cluster: Cluster) -> None:
        self._scheduler = scheduler
        self._cluster = cluster
        self._streams = Streams(lambda: scheduler.now_s, scheduler.call_at, self._capacity)
        self._numbers = count()
        self.slowness = [1.0] * len(cluster.nodes)

    def compute(self, rank: int, seconds: float) -> None:
        """Let the calling thread compute for the time that `seconds` of work on a dedicated core take."""
        if seconds <= 0:
            return
        done = [False]
        links = (("core", next(self._numbers)), ("node", self._cluster.nodes[rank]))
        self._streams.start(links, seconds * self.slowness[rank], lambda: done.__setitem__(0, True))
        self._scheduler.block(lambda: done[0])

    def _capacity(self, link: Link) -> float:
        assert isinstance(link, tuple)
        return 1.0 if link[0] == "core" else float(self._cluster.num_cores)

    @contextmanager
    def time_codecs(self) -> Iterator[None]:
        """Let the methods of all codecs take time, at the cluster's rates, in the block."""
        encode, decode = 1 / self._cluster.encode_rate, 1 / self._cluster.decode_rate
        if not encode and not decode:
            yield
            return
        seconds_of: dict[str, Callable[..., float]] = {
            "encode": lambda x, *rest: encode * x.nbytes,
            "encode_feedback": lambda x, *rest: encode * x.nbytes,
            "decode": lambda wire, layout, x: decode * x.nbytes,
            "decode_mean": lambda wires, layout, divisor, x: decode * len(wires) * x.nbytes,
            "decode_mean_encode": lambda wires, layout, *rest: (decode * len(wires) + encode) * _num_bytes(layout),
            "decode_mean_encode_feedback": lambda wires, layout, *rest: (
                (decode * len(wires) + encode) * _num_bytes(layout)
            ),
        }
        replaced = [
            (codec, name, vars(codec)[name])
            for codec in _classes(Compressor)  # type: ignore[type-abstract]
            for name in seconds_of
            if name in vars(codec)
        ]
        busy: set[object] = set()  # threads within a method, which may call another one
        for codec, name, method in replaced:
            setattr(codec, name, self._timed(method, seconds_of[name], busy))
        try:
            yield
        finally:
            for codec, name, method in replaced:
                setattr(codec, name, method)

    def _timed(
        self, method: Callable[..., Any], seconds_of: Callable[..., float], busy: set[object]
    ) -> Callable[..., Any]:
        @wraps(method)
        def timed(codec: Compressor, *arguments: Any, **named: Any) -> Any:
            thread = self._scheduler.current
            if thread is None or thread in busy:
                return method(codec, *arguments, **named)
            busy.add(thread)
            try:
                result = method(codec, *arguments, **named)
                self.compute(thread.rank, seconds_of(*arguments, *named.values()))
            finally:
                busy.discard(thread)
            return result

        return timed


def _num_bytes(layout: Any) -> float:
    return float(4 * sum(part.stop - part.start for part in layout.elements))


def _classes(base: type[Compressor]) -> Iterator[type[Compressor]]:
    yield base
    for derived in base.__subclasses__():
        yield from _classes(derived)
