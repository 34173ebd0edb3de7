"""Traces of processes that end early, of full disks, and of an emulated network; and two traces with one path."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import programs
import torchbagua as tb
import warm_python
from ranks import run_ranks
from torchbagua.cli.namespaces import EmulatedNetwork, why_unavailable
from torchbagua.observe import background_trace
from torchbagua.observe.events import CommEvent, Run
from torchbagua.observe.perfetto import RankFile, find_files
from tracing import NUM_STEPS, merge_files, train_traced, write_trace


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
    traces = [tb.observe.PerfettoTrace(tmp_path) for _ in range(2)]
    message = "(?s)another PerfettoTrace is writing '.*rank0.jsonl.gz'; give each trace a"
    with pytest.warns(RuntimeWarning, match=message):
        (attachment,) = train_traced(1, "bytegrad", lambda group: traces)
    assert str(attachment.summary()).count("another PerfettoTrace") == 1
    assert RankFile(tmp_path / "rank0.jsonl.gz").summary().figures.num_steps == NUM_STEPS


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
import resource, sys
import torchbagua as tb
from tracing import train_traced
traces = {"PerfettoTrace": tb.observe.PerfettoTrace}
trace = traces.get(sys.argv[1], lambda path: tb.observe.TensorBoardTrace(path, 1))
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, most))
attachments = train_traced(2, "bytegrad", lambda group: [trace(sys.argv[2])], num_steps=400)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
print(attachments[0].summary())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_warnings"), [("PerfettoTrace", 2), ("TensorBoardTrace", 1)])
def test_a_full_disk_ends_the_trace_but_not_the_training(tmp_path: Path, name: str, num_warnings: int) -> None:
    """A limit on file sizes replaces a full disk: writes raise OSError in the same places."""
    command = [sys.executable, "-W", "always", "-c", FULL, name, str(tmp_path / "trace")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    done = programs.run(command, timeout_s=200, env=environment)
    warnings = re.findall(r"RuntimeWarning: (.*)", done.stderr)
    assert sum(f"the observer {name} failed in step" in warning for warning in warnings) == num_warnings, done.stderr
    assert f"{name} stopped in step" in done.stdout
    assert "File too large" in done.stdout
    assert "Traceback" not in done.stdout
    assert "atexit" not in done.stderr
    steps = [line.split()[1] for line in done.stdout.splitlines() if line[:6].strip() == "0"]
    assert steps == ["400"], "training completed"


@pytest.mark.release
@pytest.mark.network
@pytest.mark.parametrize("name", ["bytegrad", "decentralized"])
def test_bytes_match_those_of_the_network_interface(tmp_path: Path, name: str) -> None:
    """Traces of two processes, each in a network namespace."""
    if reason := why_unavailable():
        pytest.skip(f"cannot emulate a network: {reason}")
    program = str(Path(__file__).with_name("traced_rank.py"))
    with EmulatedNetwork([0, 0], rank_rate="500mbit") as network, ExitStack() as stack:
        starting = [
            programs.started(
                [
                    *("ip", "netns", "exec", network.namespace(rank), sys.executable, program),
                    *(str(rank), "2", network.address(0), name, str(tmp_path)),
                ],
                stderr=subprocess.PIPE,
            )
            for rank in range(2)
        ]
        for process in [stack.enter_context(each) for each in starting]:
            _, stderr = process.communicate(timeout=120)
            assert process.returncode == 0, stderr

    for rank, folder in enumerate((tmp_path, tmp_path / "rank1")):
        result = json.loads((tmp_path / f"result{rank}.json").read_text())
        # 3 % are for headers of TCP, IP and Ethernet, for acknowledgements, and for requests to the store.
        assert result["bytes_sent"] < result["interface_bytes"] < 1.03 * result["bytes_sent"]
        events = EventAccumulator(str(folder))
        events.Reload()
        written = events.Scalars("communication_detail/sent_MB_in_all")[-1]
        assert written.step == 20
        assert written.value * 1e6 == pytest.approx(result["bytes_sent"], rel=1e-6)  # the file holds float32
        assert [offset_ns for _, offset_ns, _ in result["clock_offsets"]] == [0, 0], "processes of one machine"
    merged = merge_files(tmp_path, tmp_path / "merged.json.gz")
    assert merged.num_messages > 100
    assert merged.num_backwards == 0
