"""Short training runs with observers, and checks of the events of any run."""

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import run_ranks
from torchbagua.observe.events import TRAINING_PHASES
from torchbagua.observe.perfetto import Merged, find_files, merge
from training import Tower, build

NUM_STEPS = 6
TRAINING = tuple(TRAINING_PHASES)
ON_LANE = ("bucket", "encode", "receive", "reduce", "decode", "measure")


def algorithm_of(name: str, parameters: Any) -> tuple[tb.Algorithm, torch.optim.Optimizer]:
    """Return an algorithm by a short name, and an optimizer for it."""
    if name.startswith("qadam"):
        adam = tb.QAdamOptimizer(parameters, lr=1e-3, warmup_steps=2)
        one_bit = {"compression": "sign1bit", "error_feedback": True} if name == "qadam_1bit" else {}
        return tb.QAdamAlgorithm(adam, **one_bit), adam
    arguments: dict[str, dict[str, Any]] = {
        "shift_one": {"peer_selection_mode": "shift_one"},
        "diloco": {"inner_steps": 4, "fragments": 2, "delay": 1},
        "async": {"sync_interval_ms": 1, "warmup_steps": 2},
    }
    registered = {"shift_one": "decentralized"}.get(name, name)
    algorithm = tb.Algorithm.init(registered, **arguments.get(name, {}))
    return algorithm, torch.optim.SGD(parameters, lr=0.01)


NAMES = (
    "bytegrad",
    "gradient_allreduce",
    "qadam",
    "qadam_1bit",
    "decentralized",
    "shift_one",
    "low_precision_decentralized",
    "diloco",
    "async",
)


def train_traced(
    size: int,
    name: str,
    make_observers: Callable[[dist.ProcessGroup], Sequence[tb.observe.Observer]],
    *,
    nodes: Sequence[int] | None = None,
    num_steps: int = NUM_STEPS,
    model: torch.nn.Module | None = None,
) -> list[tb.Attachment]:
    """Train on `size` ranks, and return the attachments, detached."""
    model = build(lambda: Tower((10, 301, 47, 1))) if model is None else model

    def body(group: dist.ProcessGroup) -> tb.Attachment:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group, bucket_cap_mb=0.02)
        algorithm, optimizer = algorithm_of(name, ddp.parameters())
        own = None if nodes is None else tb.BaguaProcessGroup(group, nodes=nodes)
        data = torch.Generator().manual_seed(group.rank())
        observers = make_observers(group)
        with tb.attach(ddp, optimizer, algorithm, process_group=own, observers=observers) as attachment:
            for step in range(num_steps):
                optimizer.zero_grad()
                ddp(torch.randn(6, 10, generator=data), step).square().sum().backward()
                optimizer.step()
        return attachment

    return run_ranks(size, body)


def record(size: int, name: str, **options: Any) -> list[list[tb.observe.CommEvent]]:
    """Train, and return each rank's events."""
    recorders = [tb.observe.Recorder() for _ in range(size)]
    train_traced(size, name, lambda group: [recorders[group.rank()]], **options)
    return [recorder.events for recorder in recorders]


def write_trace(
    folder: Path, size: int = 2, name: str = "bytegrad", *, num_steps: int = NUM_STEPS, **options: Any
) -> list[tb.Attachment]:
    return train_traced(size, name, lambda group: [tb.observe.PerfettoTrace(folder, **options)], num_steps=num_steps)


def merge_files(folder: Path, output: Path) -> Merged:
    return merge(find_files(folder).files, output)


def check_nested(spans: Sequence[tuple[float, float]], tolerance: float = 0) -> None:
    """Check that any two spans are nested, or do not overlap by more than `tolerance`."""
    open_ends: list[float] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        assert start <= end
        while open_ends and open_ends[-1] <= start + tolerance:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + tolerance, f"{start} to {end} crosses {open_ends[-1]}"
        open_ends.append(end)


def check_two_at_a_time(events: Iterable[tb.observe.CommEvent]) -> None:
    """Check that no event, in the order of starts, starts before the event two before it has ended."""
    spans = sorted((event.start_ns, event.end_ns) for event in events)
    for before, later in zip(spans, spans[2:], strict=False):
        assert before[1] <= later[0], f"{later} begins within {before}"
