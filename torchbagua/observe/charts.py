"""The charts that TensorBoardTrace writes: their names and their values."""

import statistics
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from torchbagua._torch import write_summary
from torchbagua.observe.events import CommEvent, Run
from torchbagua.observe.figures import PHASES, Figures
from torchbagua.observe.over_ranks import OverRanks

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
                self._writer.add_histogram(
                    f"{_DETAIL}/bucket_ms", torch.tensor(self._window.bucket_ns) / 1e6, num_steps
                )
            if time.monotonic() >= self._next_picture_s:
                self._draw()
            self._write_over_ranks(self._over_ranks.collect())
            if time.monotonic() > self._flushed_s + _FLUSH_EVERY_S:
                self._writer.flush()
                self._flushed_s = time.monotonic()
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

        start_s = time.monotonic()
        # The same as add_figure, without pyplot, which should not start on a thread other than the main thread.
        canvas: Any = FigureCanvasAgg(draw({self._run.rank: self._undrawn}))
        canvas.draw()
        picture = np.asarray(canvas.buffer_rgba())[..., :3]
        self._writer.add_image(f"{_OVERVIEW}/a_step", picture, self._num_steps, dataformats="HWC")
        self._undrawn = []
        self._next_picture_s = time.monotonic() + (time.monotonic() - start_s) / _PICTURE_SHARE


def _name(tag: str) -> str:
    return tag.split("/")[1]
