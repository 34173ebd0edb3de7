"""Events of communication, the tracer that emits them, and the observers that display them.

May import only the modules whose names begin with _. Observers depend on events.py, not on the tracer.
Begin with events.py, then summary.py.
"""

from torchbagua.observe.events import CommEvent, Details, Observer, Run, Trace
from torchbagua.observe.observed import ObservedTracer as ObservedTracer
from torchbagua.observe.perfetto import PerfettoTrace
from torchbagua.observe.recorder import Recorder
from torchbagua.observe.summary import Summary
from torchbagua.observe.tensorboard import TensorBoardTrace
from torchbagua.observe.tracer import Tracer
from torchbagua.observe.tracer import check_observers as check_observers

__all__ = [
    "CommEvent",
    "Details",
    "Observer",
    "PerfettoTrace",
    "Recorder",
    "Run",
    "Summary",
    "TensorBoardTrace",
    "Trace",
    "Tracer",
]
