"""Observers of communication. They know `torchbagua.events` and nothing else of the package."""

from torchbagua.events import Trace
from torchbagua.traces.perfetto import PerfettoTrace
from torchbagua.traces.recorder import Recorder
from torchbagua.traces.summary import Summary
from torchbagua.traces.tensorboard import TensorBoardTrace

__all__ = ["PerfettoTrace", "Recorder", "Summary", "TensorBoardTrace", "Trace"]
