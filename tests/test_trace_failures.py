"""Traces that end early: killed processes, processes without detach, full disks, two traces with one path."""

import gc
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import programs
import torchbagua as tb
import warm_python
from ranks import run_ranks
from torchbagua.observe import background_trace
from torchbagua.observe.events import CommEvent, Run
from torchbagua.observe.perfetto import RankFile, find_files
from tracing import merge_files, train_traced, write_trace


def test_the_file_of_a_killed_process_can_be_read(tmp_path: Path) -> None:
    write_trace(tmp_path)
    path = tmp_path / "rank0.jsonl.gz"
    whole = len(list(RankFile(path).events()))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert 20 < len(list(RankFile(path).events())) < whole
    (problem,) = find_files(tmp_path).problems
    assert problem.startswith("rank0.jsonl.gz is truncated after step")
    assert merge_files(tmp_path, tmp_path / "all.json.gz").num_messages > 0
    assert RankFile(path).summary().figures.num_steps > 0


KILLED = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import torchbagua as tb
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=0, world_size=1)
ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
tb.attach(ddp, optimizer, "bytegrad", observers=[tb.observe.PerfettoTrace(sys.argv[1])])
for step in range(51):
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()
{end}
"""


@pytest.mark.parametrize(
    ("end", "status"),
    # Events are written when half a second old, and at exit.
    [("time.sleep(1.5); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL), ("", 0)],
    ids=["killed", "exit"],
)
def test_a_process_that_does_not_detach_loses_almost_nothing(tmp_path: Path, end: str, status: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(KILLED.format(end=end))
    arguments = [str(script), str(tmp_path / "trace"), str(tmp_path / "store")]
    done = warm_python.run(arguments, check=False, ends_whole=True)
    assert done.returncode == status, done.stderr
    file = RankFile(tmp_path / "trace" / "rank0.jsonl.gz")
    assert sum(event.phase == "step" for event in file.events()) == 51
    assert file.is_whole == (status == 0)


def test_two_traces_at_once_need_two_paths(tmp_path: Path) -> None:
    def body(group: dist.ProcessGroup) -> list[str]:
        attached = []
        for _ in range(2):
            ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            attached.append(tb.attach(ddp, optimizer, "bytegrad", observers=[tb.observe.PerfettoTrace(tmp_path)]))
            ddp(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        for attachment in attached:
            attachment.detach()
        return [str(attachment.summary()) for attachment in attached]

    with pytest.warns(
        RuntimeWarning, match="(?s)another PerfettoTrace is writing '.*rank0.jsonl.gz'; give each trace a"
    ):
        (first, second) = run_ranks(1, body)[0]
    assert "another PerfettoTrace" not in first
    assert "another PerfettoTrace" in second
    assert RankFile(tmp_path / "rank0.jsonl.gz").summary().figures.num_steps == 1


def test_with_the_standalone_hook_no_thread_outlives_the_trace(tmp_path: Path) -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
        traces = [tb.observe.PerfettoTrace(tmp_path), tb.observe.TensorBoardTrace(tmp_path)]
        impl = tb.ByteGradAlgorithm().reify(group, observers=traces)
        ddp.register_comm_hook(impl, tb.comm_hook)
        for _ in range(3):
            ddp(torch.ones(2, 4)).sum().backward()

    def threads() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if "PerfettoTrace" in name or "TensorBoardTrace" in name]

    before = len(threads())
    run_ranks(2, body)
    deadline_s = time.monotonic() + 20
    while len(threads()) > before and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.05)
    assert len(threads()) == before
    for rank in range(2):
        assert RankFile(tmp_path / f"rank{rank}.jsonl.gz").is_whole


@pytest.mark.parametrize(("hangs", "message"), [(True, "so slow that 50 events wait"), (False, "disk full")])
def test_a_disk_that_hangs_or_is_full(monkeypatch: pytest.MonkeyPatch, hangs: bool, message: str) -> None:
    """It ends the trace, and neither fills the memory nor ends the training."""
    can_continue = threading.Event()

    class Broken:
        def write(self, steps: list[list[CommEvent]]) -> None:
            if not hangs:
                raise OSError("disk full")
            can_continue.wait()

        def close(self, events: list[CommEvent]) -> None:
            pass

    class BrokenTrace(background_trace.BackgroundTrace):
        def open(self, run: Run) -> Broken:
            return Broken()

    if hangs:
        monkeypatch.setattr(background_trace, "_MOST_WAITING", 50)
    try:
        with pytest.warns(RuntimeWarning, match=f"cannot write to 'a disk': .*{message}"):
            (attachment,) = train_traced(1, "bytegrad", lambda group: [BrokenTrace("a disk")], num_steps=60)
    finally:
        can_continue.set()
    assert attachment.summary().figures.num_steps == 60


FULL = """
import resource, sys, warnings
sys.path.insert(0, sys.argv[2])
import torchbagua as tb
from tracing import train_traced
kinds = {"perfetto": tb.observe.PerfettoTrace, "tensorboard": lambda path: tb.observe.TensorBoardTrace(path, 1)}
observers = {}

def observe(group):
    observers[group.rank()] = kinds[sys.argv[1]](sys.argv[3])
    return [observers[group.rank()]]

_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, most))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    attachments = train_traced(2, "bytegrad", observe, num_steps=400)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
for warning in caught:
    if "torchbagua" in str(warning.message):
        print("WARNING", str(warning.message).splitlines()[0])
print(attachments[0].summary())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_warnings"), [("perfetto", 2), ("tensorboard", 1)])
def test_a_full_disk_ends_the_trace_but_not_the_training(tmp_path: Path, kind: str, num_warnings: int) -> None:
    """A limit on file sizes replaces a full disk: writes raise OSError in the same places."""
    script = tmp_path / "train.py"
    script.write_text(FULL)
    command = [sys.executable, str(script), kind, str(Path(__file__).parent), str(tmp_path / "trace")]
    done = programs.run(command, timeout_s=200)
    warnings = [line for line in done.stdout.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == num_warnings, done.stdout
    name = {"perfetto": "PerfettoTrace", "tensorboard": "TensorBoardTrace"}[kind]
    assert all(f"the observer {name} failed in step" in line for line in warnings)
    assert f"{name} stopped in step" in done.stdout
    assert "File too large" in done.stdout
    assert "Traceback" not in done.stdout
    assert "atexit" not in done.stderr
    steps = [line.split()[1] for line in done.stdout.splitlines() if line[:6].strip() == "0"]
    assert steps == ["400"], "training completed"
