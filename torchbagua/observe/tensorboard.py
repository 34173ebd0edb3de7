"""TensorBoardTrace: what communication costs, as charts and pictures in TensorBoard."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from torchbagua.observe.background_trace import BackgroundTrace, Writer, folder_of
from torchbagua.observe.charts import ChartWriter, layout
from torchbagua.observe.events import Run, TraceError
from torchbagua.observe.over_ranks import OverRanks

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardTrace(BackgroundTrace):
    """An observer that writes to TensorBoard what communication costs: charts, bucket times, the timeline of a step.

    Every `every_n_steps` steps it writes the means over these steps, on a thread of its own:

    - under `communication/` the time of a step, the exposed communication in it, overlap, bytes, compression ratio and
      the timeline;
    - under `communication_detail/` the rest;
    - under `communication_of_all_ranks/` mean and maximum over the ranks.

    It serves one attachment, or one `Algorithm.reify`.

    Args:
        log_dir: a folder, another one for each run; or a SummaryWriter of yours, which stays open and keeps its layout
            of Custom Scalars.
        every_n_steps: how often to write. In one of these steps the quantisation error is measured.
        ranks: which ranks write. The first of them also writes what all ranks have in common. In a folder, the others
            write to `rank<r>` in it. Every rank must have the trace, whether it writes or not.

    Raises:
        ValueError: `log_dir` cannot be written to, or another argument is out of range.
        TypeError: `log_dir` is neither a path nor a SummaryWriter.
        ImportError: tensorboard or matplotlib is not installed.
    """

    def __init__(
        self,
        log_dir: "str | os.PathLike[str] | SummaryWriter",
        every_n_steps: int = 10,
        *,
        ranks: Collection[int] = (0,),
    ) -> None:
        super().__init__(log_dir)
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise ValueError(f"TensorBoardTrace: every_n_steps must be an integer from 1, got {every_n_steps!r}")
        are_ranks = isinstance(ranks, Collection) and all(type(rank) is int and rank >= 0 for rank in ranks)
        if not are_ranks or not ranks:
            raise ValueError(f"TensorBoardTrace: ranks must be a list of ranks, integers from 0, got {ranks!r}")
        try:
            import matplotlib  # noqa: F401
            import torch.utils.tensorboard
        except ImportError as error:
            raise ImportError(f"TensorBoardTrace: {error}; pip install 'torchbagua[traces]'") from error
        self._folder: Path | None = None
        self._given_writer: SummaryWriter | None = None
        if isinstance(log_dir, torch.utils.tensorboard.SummaryWriter):
            self._given_writer = log_dir
        elif not isinstance(log_dir, str | os.PathLike):
            raise TypeError(f"TensorBoardTrace: log_dir must be a path or a SummaryWriter, got {log_dir!r}")
        else:
            self._folder = folder_of("TensorBoardTrace", "log_dir", log_dir)
        self._every_n_steps = every_n_steps
        self._ranks = sorted(ranks)

    def samples(self, step: int) -> bool:
        """Return whether values are measured in this step: in the one after which it writes."""
        return (step + 1) % self._every_n_steps == 0

    def open(self, run: Run) -> Writer:
        if self._ranks[-1] >= run.num_ranks:
            raise TraceError(f"ranks {self._ranks} are to write, and there are {run.num_ranks} ranks, from 0")
        is_first = run.rank == self._ranks[0]
        writer = None
        if run.rank in self._ranks:
            writer = self._given_writer or _open(self._folder, None if is_first else run.rank)
        over_ranks = OverRanks(run, collects=is_first)
        is_own = self._given_writer is None
        return ChartWriter(run, writer, over_ranks, self._every_n_steps, closes_writer=is_own)


def _open(folder: Path | None, rank: int | None) -> "SummaryWriter":
    from torch.utils.tensorboard import SummaryWriter

    assert folder is not None
    # A queue that is full would make one thread wait for the other at every chart.
    writer = SummaryWriter(folder if rank is None else folder / f"rank{rank}", max_queue=1000)
    writer.add_custom_scalars(layout())
    return writer
