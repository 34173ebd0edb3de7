"""TensorBoardTrace: the cost of communication, as charts and pictures in TensorBoard."""

import json
import os
import statistics
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchbagua import _concurrency
from torchbagua._torch import write_summary
from torchbagua.observe.background_trace import BackgroundTrace, Writer, folder_of
from torchbagua.observe.events import CommEvent, Run, TraceError
from torchbagua.observe.figures import PHASES, Figures

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# TensorBoard sorts groups (the name up to the slash), and the charts in a group, alphabetically.
_OVERVIEW, _DETAIL, _RANKS = "communication", "communication_detail", "communication_of_all_ranks"
_SENT_IN_ALL = f"{_DETAIL}/sent_MB_in_all"
_OVER_RANKS = (
    f"{_OVERVIEW}/step_ms",
    f"{_OVERVIEW}/exposed_ms",
    f"{_OVERVIEW}/sent_MB_a_step",
    f"{_DETAIL}/communication_ms",
)

# A picture takes several tenths of a second. Pictures are drawn so rarely that they take at most this share of time.
_PICTURE_SHARE = 0.001
_FLUSH_EVERY_S = 2.0

# How many times a rank may publish between two reads by the collecting rank.
_NUM_SLOTS = 16
_LAST_WAIT_S = 2.0
# The slot in which the participating ranks announce themselves.
_PRESENCE = -1


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


def layout() -> dict[str, dict[str, list[Any]]]:
    """Return the charts of the tab Custom Scalars, which shows several lines in one chart."""
    of_a_step = [f"{_OVERVIEW}/step_ms", f"{_DETAIL}/communication_ms", f"{_OVERVIEW}/exposed_ms"]
    phases = [f"{_DETAIL}/{phase}_ms" for phase in PHASES]
    over_ranks = {
        _name(tag): ["Multiline", [f"{_RANKS}/{_name(tag)}_{kind}" for kind in ("mean", "maximum")]]
        for tag in _OVER_RANKS
    }
    return {
        "communication": {"a step (ms)": ["Multiline", of_a_step], "phases of a step (ms)": ["Multiline", phases]},
        "communication of all ranks": over_ranks,
    }


def scalars(figures: Figures, sent_bytes: int) -> dict[str, float]:
    """Return the values of the charts, by tag."""
    num_steps = figures.num_steps

    def ms(total_ns: int) -> float:
        return total_ns / num_steps / 1e6

    optional = {
        f"{_DETAIL}/relative_quantisation_error": figures.relative_error,
        f"{_DETAIL}/residual_norm": figures.residual_norm,
        **{f"{_DETAIL}/{name.replace(' ', '_')}": value for name, value in figures.latest.items()},
    }
    return {
        f"{_OVERVIEW}/step_ms": ms(figures.step_ns),
        f"{_OVERVIEW}/exposed_ms": ms(figures.wait_ns),
        f"{_OVERVIEW}/overlap_percent": 100 * figures.overlap,
        f"{_OVERVIEW}/sent_MB_a_step": figures.bytes_sent / num_steps / 1e6,
        f"{_OVERVIEW}/compression_ratio_to_float32": figures.ratio,
        f"{_DETAIL}/bits_per_element": figures.bits_per_element,
        _SENT_IN_ALL: sent_bytes / 1e6,
        f"{_DETAIL}/achieved_Gbit_per_s": figures.gbit_per_s,
        f"{_DETAIL}/communication_ms": ms(figures.communication_ns),
        **{f"{_DETAIL}/{phase}_ms": ms(figures.phase_ns[phase]) for phase in PHASES},
        **{tag: value for tag, value in optional.items() if value is not None},
    }


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


class ChartWriter:
    """Writes the charts, step by step."""

    def __init__(
        self,
        run: Run,
        writer: "SummaryWriter | None",
        over_ranks: OverRanks,
        every_n_steps: int,
        *,
        closes_writer: bool,
    ) -> None:
        self._run = run
        self._writer: Any = writer  # its methods have no type annotations (torch 2.13)
        self._over_ranks = over_ranks
        self._every_n_steps = every_n_steps
        self._closes_writer = closes_writer
        self._window = Figures()
        self._sent_bytes = self._num_steps = 0
        self._undrawn: list[CommEvent] = []
        self._next_picture_s = 0.0
        self._flushed_s = 0.0
        if self._writer is not None:
            rows = {"algorithm": run.description, "ranks": str(run.num_ranks), "nodes": str(run.nodes), **run.settings}
            text = "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())])
            self._writer.add_text(f"{_OVERVIEW}/run", text)

    def write(self, steps: list[list[CommEvent]]) -> None:
        """Add the events of steps, and write every `every_n_steps` steps."""
        for events in steps:
            self._sent_bytes += sum(event.bytes_sent for event in events)
            self._window.add(events)
            self._num_steps = events[-1].step + 1
            self._undrawn = events
            if self._num_steps % self._every_n_steps == 0:
                self._write()

    def close(self, events: list[CommEvent]) -> None:
        """Write the steps since the last write, the last timeline, and the figures that other ranks published."""
        if self._window.num_steps:
            self._write()
        found = self._over_ranks.collect_last()
        if self._writer is None:
            return
        if sent_bytes := sum(event.bytes_sent for event in events):
            self._writer.add_scalar(_SENT_IN_ALL, (self._sent_bytes + sent_bytes) / 1e6, self._num_steps)
        self._write_over_ranks(found)
        if self._undrawn:
            self._draw()
        self._writer.flush()
        if self._closes_writer:
            self._writer.close()

    def _write(self) -> None:
        num_steps = self._num_steps
        values = scalars(self._window, self._sent_bytes)
        self._over_ranks.put(num_steps, {tag: values[tag] for tag in _OVER_RANKS})
        if self._writer is not None:
            self._write_charts(values, num_steps)
            if self._window.bucket_ns:
                bucket_ms = torch.tensor(self._window.bucket_ns) / 1e6
                self._writer.add_histogram(f"{_DETAIL}/bucket_ms", bucket_ms, num_steps)
            if _concurrency.monotonic() >= self._next_picture_s:
                self._draw()
            self._write_over_ranks(self._over_ranks.collect())
            if _concurrency.monotonic() > self._flushed_s + _FLUSH_EVERY_S:
                self._writer.flush()
                self._flushed_s = _concurrency.monotonic()
        self._window = Figures()

    def _write_charts(self, values: Mapping[str, float], num_steps: int) -> None:
        """Write one point of each chart."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from torch.utils.tensorboard.summary import scalar

        points = [point for tag, value in values.items() for point in scalar(tag, value).value]
        write_summary(self._writer, Summary(value=points), num_steps)

    def _write_over_ranks(self, found: list[tuple[int, list[dict[str, float]]]]) -> None:
        for num_steps, ranks in found:
            points: dict[str, float] = {}
            for tag in _OVER_RANKS:
                values = [figures[tag] for figures in ranks]
                points[f"{_RANKS}/{_name(tag)}_mean"] = statistics.fmean(values)
                points[f"{_RANKS}/{_name(tag)}_maximum"] = max(values)
            self._write_charts(points, num_steps)

    def _draw(self) -> None:
        import numpy as np
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        from torchbagua.observe.timeline import draw

        start_s = _concurrency.monotonic()
        # The same as add_figure, without pyplot, which should not start on a thread other than the main thread.
        canvas: Any = FigureCanvasAgg(draw({self._run.rank: self._undrawn}))
        canvas.draw()
        picture = np.asarray(canvas.buffer_rgba())[..., :3]
        self._writer.add_image(f"{_OVERVIEW}/a_step", picture, self._num_steps, dataformats="HWC")
        self._undrawn = []
        self._next_picture_s = _concurrency.monotonic() + (_concurrency.monotonic() - start_s) / _PICTURE_SHARE


def _name(tag: str) -> str:
    return tag.split("/")[1]
