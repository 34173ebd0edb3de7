"""TensorBoardTrace: the cost of communication, as charts and pictures in TensorBoard."""

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
    """An observer that writes the cost of communication to TensorBoard: charts, bucket times, the timeline of a step.

    Every `every_n_steps` steps it writes the means over these steps, on a separate thread:

    - under `communication/`: the time of a step, its exposed communication, overlap, bytes, compression ratio and the
      timeline;
    - under `communication_detail/`: the remaining charts;
    - under `communication_of_all_ranks/`: the mean and the maximum over the ranks.

    A trace serves one attachment, or one `Algorithm.reify`.

    Args:
        log_dir: a folder, a different one for each run; or your SummaryWriter, which stays open and retains its layout
            of Custom Scalars.
        every_n_steps: the interval between writes, in steps. The quantization error is measured in the last step of
            each interval.
        ranks: the ranks that write. The first of them also writes the charts over all ranks. If `log_dir` is a folder,
            the other ranks write to its subfolders `rank<r>`. Every rank must have the trace, even if it does not
            write.

    Raises:
        ValueError: `log_dir` is not writable, or another argument is out of range.
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
        """Return whether to measure values in this step, which is true for the step after which the trace writes."""
        return (step + 1) % self._every_n_steps == 0

    def open(self, run: Run) -> Writer:
        if self._ranks[-1] >= run.num_ranks:
            raise TraceError(f"ranks must be less than the world size {run.num_ranks}, got {self._ranks}")
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
    # If its queue were full, the writer would block this thread at every chart.
    writer = SummaryWriter(folder if rank is None else folder / f"rank{rank}", max_queue=1000)
    writer.add_custom_scalars(layout())
    return writer
