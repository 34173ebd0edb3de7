"""Collects the figures of all ranks on one rank, without blocking any rank."""

import json
from collections.abc import Mapping

from torchbagua import _concurrency
from torchbagua.observe.events import Run

# How many times a rank may publish between two reads by the collecting rank.
_NUM_SLOTS = 16
_LAST_WAIT_S = 2.0
# The slot in which the participating ranks announce themselves.
_PRESENCE = -1


class OverRanks:
    """Publishes this rank's figures after a number of steps, and collects all ranks' figures after as many steps."""

    def __init__(self, run: Run, *, collects: bool) -> None:
        self._run = run
        self._board = run.board if run.num_ranks > 1 else None
        self._collects = collects
        self._num_puts = 0
        self._awaited: dict[int, int] = {}  # slots, by the number of steps
        if self._board is not None:
            self._board.put(_PRESENCE, "here")

    def put(self, num_steps: int, figures: Mapping[str, float]) -> None:
        """Publish this rank's figures after `num_steps` steps."""
        if self._board is not None:
            slot = self._num_puts % _NUM_SLOTS
            self._num_puts += 1
            self._board.put(slot, json.dumps({"num_steps": num_steps, **figures}))
            if self._collects:
                self._awaited = {steps: used for steps, used in self._awaited.items() if used != slot}
                self._awaited[num_steps] = slot

    def collect(self) -> list[tuple[int, list[dict[str, float]]]]:
        """Return the newly complete figures of all ranks, with their number of steps."""
        complete = []
        for num_steps, slot in list(self._awaited.items()):
            assert self._board is not None
            texts = self._board.get(slot)
            ranks = [json.loads(text) for text in texts or ()]
            if ranks and all(figures.pop("num_steps") == num_steps for figures in ranks):
                complete.append((num_steps, ranks))
                del self._awaited[num_steps]
        return complete

    def collect_last(self) -> list[tuple[int, list[dict[str, float]]]]:
        """Return the same as `collect`, after waiting briefly for slower ranks if all ranks publish figures."""
        complete = self.collect()
        is_alone = self._board is None or self._board.get(_PRESENCE) is None
        if self._board is not None and is_alone:
            self._run.failures.append("TensorBoardTrace: not every rank has one, so charts over ranks are missing")
        deadline_s = _concurrency.monotonic() + (0.0 if is_alone else _LAST_WAIT_S)
        while self._awaited and _concurrency.monotonic() < deadline_s:
            _concurrency.sleep(0.01)
            complete += self.collect()
        return complete
