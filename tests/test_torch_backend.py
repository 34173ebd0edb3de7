"""TorchBackendTransport: bitwise equal to the default transport, its refusals, and ranks that die."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
import warm_python
from ranks import run_ranks
from test_faults import SIZE, TIMEOUT_S, check_raised_in_time, run_with_fault
from torch_backend_rank import CASES
from torchbagua.transport import torch_backend
from torchbagua.transport.base import Members
from torchbagua.transport.streams import ThreadStream


def run(ranks: int, names: list[str]) -> None:
    """Run in real processes: private groups are found in torch's registry, which all threads of a process share."""
    script = Path(__file__).with_name("torch_backend_rank.py")
    printed = warm_python.run_ranks(script, *names, ranks=ranks, timeout_s=300).stdout
    assert [line for line in printed.splitlines() if line.startswith("right: ")] == [f"right: {name}" for name in names]


FAST = ["refused", "other_backend"]


def test_results_are_bitwise_equal_to_the_default_transport() -> None:
    run(3, FAST)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in FAST])
def test_results_are_bitwise_equal_to_the_default_transport_with_four_ranks(name: str) -> None:
    run(4, [name])


@pytest.mark.parametrize(
    ("fault", "algorithm", "calls"),
    [
        ("kill", "bytegrad", "messages"),
        *(
            pytest.param(fault, algorithm, calls, marks=pytest.mark.release)
            for fault, algorithm, calls in (
                ("stop", "bytegrad", "messages"),
                ("raise", "bytegrad", "messages"),
                ("kill", "low_precision", "messages"),
                ("kill", "bytegrad", "collectives"),
                ("stop", "bytegrad", "collectives"),
                ("kill", "diloco", "collectives"),
            )
        ),
    ],
)
def test_survivors_raise_and_exit(fault: str, algorithm: str, calls: str, tmp_path: Path) -> None:
    outputs, seconds_until_exit = run_with_fault(fault, algorithm, tmp_path / "store", SIZE, calls)
    for output in outputs:
        assert re.search("raised on MainThread: CommunicationError: .* failed on rank", output), output
        assert "lanes []" in output, output
        check_raised_in_time(fault, output)
    assert seconds_until_exit < TIMEOUT_S + 10, outputs


def test_devices_and_ranks_without_a_backend_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has MPI only if it was built from source, so the test fakes the name of the backend."""

    def body(group: dist.ProcessGroup) -> None:
        impl = tb.ByteGradAlgorithm().reify(group)
        expected = "tensors must be on cpu or cuda, got a tensor on mps:0, for which the process group has no backend"
        with pytest.raises(ValueError, match=expected):
            impl.use_device(torch.device("mps:0"))
        impl.close()

    run_ranks(1, body)
    monkeypatch.setattr(torch_backend, "backend_names", lambda group: {"cpu": "mpi"})
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    world = dist.group.WORLD
    assert world is not None
    members = Members(world, (0,), 0, dist.HashStore(), tb.BaguaProcessGroup(world).timeout, (0,))
    with pytest.raises(ValueError, match=r"must have all ranks of the job with mpi, .* got 1 of 2; .* nodes=\[0\]"):
        torch_backend.TorchBackendTransport(members)
    with pytest.raises(ValueError, match="must have a backend for tensors on xpu, got mpi for cpu"):
        torch_backend.TorchBackendTransport(members, "xpu")


def test_on_other_accelerators_jobs_run_after_earlier_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """No such accelerator is available here, so the test fakes its streams."""
    calls, device = list[object](), torch.device("meta:0")
    stream = SimpleNamespace(
        record_event=lambda: calls.append("record") or "mark", wait_event=lambda event: calls.append(("wait", event))
    )
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda of: calls.append(of) or stream)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda of: calls.append(("set", of)))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda of: calls.append(("synchronize", of)))
    lane = ThreadStream(device)
    mark = lane.mark()
    lane.bind_thread()
    with lane.after(mark):
        calls.append("job")
    lane.join()
    expected = [device, "record", ("set", device), device, ("wait", "mark"), "job", ("synchronize", device)]
    assert calls == expected
