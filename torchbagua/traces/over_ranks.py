"""Figures of all ranks, brought to one of them without anybody waiting."""

import json
import time
from collections.abc import Mapping

from torchbagua.events import Run

# How many times a rank may have written since the one that collects has looked.
_NUM_SLOTS = 16
_LAST_WAIT_S = 2.0


class OverRanks:
    """Puts up this rank's figures for a number of steps, and finds those of all ranks for the same.

    Args:
        run: has the board.
        every_n_steps: how often figures are put up.
        collects: whether this rank wants to find them.
    """

    def __init__(self, run: Run, every_n_steps: int, *, collects: bool) -> None:
        self._board = run.board if run.num_ranks > 1 else None
        self._every_n_steps = every_n_steps
        self._collects = collects
        self._awaited: list[int] = []

    def put(self, num_steps: int, figures: Mapping[str, float]) -> None:
        """Put up what this rank has found after `num_steps` steps."""
        if self._board is not None:
            self._board.put(self._slot(num_steps), json.dumps({"num_steps": num_steps, **figures}))
            if self._collects:
                self._awaited = [*self._awaited, num_steps][-_NUM_SLOTS:]

    def found(self) -> list[tuple[int, list[dict[str, float]]]]:
        """Return, by the number of steps, what all ranks have put up; each once, when the last rank has."""
        complete = []
        for num_steps in list(self._awaited):
            assert self._board is not None
            texts = self._board.get(self._slot(num_steps))
            ranks = [json.loads(text) for text in texts or ()]
            if ranks and all(figures.pop("num_steps") == num_steps for figures in ranks):
                complete.append((num_steps, ranks))
                self._awaited.remove(num_steps)
        return complete

    def found_last(self) -> list[tuple[int, list[dict[str, float]]]]:
        """Return what `found` does, when ranks that are a moment behind have come."""
        complete = self.found()
        deadline_s = time.monotonic() + _LAST_WAIT_S
        while self._awaited and time.monotonic() < deadline_s:
            time.sleep(0.01)
            complete += self.found()
        return complete

    def _slot(self, num_steps: int) -> int:
        return num_steps // self._every_n_steps % _NUM_SLOTS
