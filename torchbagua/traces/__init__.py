"""Observers of communication. Of the package they know `events`, and the helpers `text_table` and `torch_private`."""

from torchbagua.events import Trace
from torchbagua.traces.perfetto import PerfettoTrace
from torchbagua.traces.recorder import Recorder
from torchbagua.traces.summary import Summary
from torchbagua.traces.tensorboard import TensorBoardTrace

__all__ = ["PerfettoTrace", "Recorder", "Summary", "TensorBoardTrace", "Trace"]
