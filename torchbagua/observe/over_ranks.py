"""Figures of all ranks, brought to one of them without anybody waiting."""

import json
import time
from collections.abc import Mapping

from torchbagua.observe.events import Run

# How many times a rank may have written since the one that collects has looked.
_NUM_SLOTS = 16
_LAST_WAIT_S = 2.0
# The slot that says who takes part.
_PRESENCE = -1


class OverRanks:
    """Puts up this rank's figures for a number of steps, and finds those of all ranks for the same.

    Args:
        run: has the board.
        collects: whether this rank wants to find them.
    """

    def __init__(self, run: Run, *, collects: bool) -> None:
        self._run = run
        self._board = run.board if run.num_ranks > 1 else None
        self._collects = collects
        self._num_puts = 0
        self._awaited: dict[int, int] = {}  # slots, by the number of steps
        if self._board is not None:
            self._board.put(_PRESENCE, "here")

    def put(self, num_steps: int, figures: Mapping[str, float]) -> None:
        """Put up what this rank has found after `num_steps` steps."""
        if self._board is not None:
            slot = self._num_puts % _NUM_SLOTS
            self._num_puts += 1
            self._board.put(slot, json.dumps({"num_steps": num_steps, **figures}))
            if self._collects:
                self._awaited = {steps: used for steps, used in self._awaited.items() if used != slot}
                self._awaited[num_steps] = slot

    def found(self) -> list[tuple[int, list[dict[str, float]]]]:
        """Return, by the number of steps, what all ranks have put up; each once, when the last rank has."""
        complete = []
        for num_steps, slot in list(self._awaited.items()):
            assert self._board is not None
            texts = self._board.get(slot)
            ranks = [json.loads(text) for text in texts or ()]
            if ranks and all(figures.pop("num_steps") == num_steps for figures in ranks):
                complete.append((num_steps, ranks))
                del self._awaited[num_steps]
        return complete

    def found_last(self) -> list[tuple[int, list[dict[str, float]]]]:
        """Return what `found` does, when ranks that are a moment behind have come; where all put figures up."""
        complete = self.found()
        is_alone = self._board is None or self._board.get(_PRESENCE) is None
        if self._board is not None and is_alone:
            self._run.failures.append("TensorBoardTrace: not every rank has one, so nothing is written of all ranks")
        deadline_s = time.monotonic() + (0.0 if is_alone else _LAST_WAIT_S)
        while self._awaited and time.monotonic() < deadline_s:
            time.sleep(0.01)
            complete += self.found()
        return complete
