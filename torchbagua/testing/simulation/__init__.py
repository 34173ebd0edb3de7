"""Ranks as threads of which one runs at a time, in a simulated network and virtual time; a seed determines all events.

May import all packages but cli; nothing imports it. Everything above the transport is the code that runs in training.
Begin with run.py, then scheduler.py. network.py and transport.py have the network, ddp.py and shards.py the modules to
train. trial.py draws training runs with faults and checks what must hold, and program.py trains.
"""

from torchbagua.testing.simulation.cluster import Cluster
from torchbagua.testing.simulation.ddp import SimulatedDdp
from torchbagua.testing.simulation.faults import Fault
from torchbagua.testing.simulation.network import Network
from torchbagua.testing.simulation.program import Program
from torchbagua.testing.simulation.run import Outcome, Rank, Simulation
from torchbagua.testing.simulation.scheduler import Deadlock, Scheduler
from torchbagua.testing.simulation.store import SimulatedStore
from torchbagua.testing.simulation.trace import SimulationTrace
from torchbagua.testing.simulation.trial import (
    Report,
    Subject,
    Trial,
    Violation,
    check,
    draw_trial,
    run_trial,
    simulate,
)

__all__ = [
    "Cluster",
    "Deadlock",
    "Fault",
    "Network",
    "Outcome",
    "Program",
    "Rank",
    "Report",
    "Scheduler",
    "SimulatedDdp",
    "SimulatedStore",
    "Simulation",
    "SimulationTrace",
    "Subject",
    "Trial",
    "Violation",
    "check",
    "draw_trial",
    "run_trial",
    "simulate",
]
