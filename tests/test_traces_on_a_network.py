"""Traces of real processes on an emulated network: their bytes compared with those of the network interfaces."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import programs
from torchbagua.cli.namespaces import EmulatedNetwork, why_unavailable
from torchbagua.observe.perfetto import find_files, merge

TESTS = Path(__file__).resolve().parent

LIMIT_S = 120

# For headers of TCP, IP and Ethernet, for acknowledgements, and for the ranks' requests to the store.
MOST_OVERHEAD = 0.03


@pytest.mark.release
@pytest.mark.network
@pytest.mark.parametrize("name", ["bytegrad", "decentralized"])
def test_bytes_match_those_of_the_interface(tmp_path: Path, name: str) -> None:
    if reason := why_unavailable():
        pytest.skip(f"cannot emulate a network: {reason}")
    with EmulatedNetwork([0, 0], rank_rate="500mbit") as network, ExitStack() as stack:
        commands = [
            [
                *("ip", "netns", "exec", network.namespace(rank)),
                *(sys.executable, str(TESTS / "traced_rank.py")),
                *(str(rank), "2", network.address(0), name, str(tmp_path)),
            ]
            for rank in range(2)
        ]
        starting = [programs.started(command, stderr=subprocess.PIPE) for command in commands]
        for rank in [stack.enter_context(process) for process in starting]:
            _, stderr = rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 0, stderr

    for rank, folder in enumerate((tmp_path, tmp_path / "rank1")):
        result = json.loads((tmp_path / f"result{rank}.json").read_text())
        assert result["bytes_sent"] < result["interface_bytes"] < (1 + MOST_OVERHEAD) * result["bytes_sent"]
        events = EventAccumulator(str(folder))
        events.Reload()
        written = events.Scalars("communication_detail/sent_MB_in_all")[-1]
        assert written.step == 20
        assert written.value * 1e6 == pytest.approx(result["bytes_sent"], rel=1e-6)  # the file holds float32
        assert [offset_ns for _, offset_ns, _ in result["clock_offsets"]] == [0, 0], "processes of one machine"
    merged = merge(find_files(tmp_path).files, tmp_path / "merged.json.gz")
    assert merged.num_messages > 100
    assert merged.num_backwards == 0
