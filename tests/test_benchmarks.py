"""Shared parts of the benchmarks: turns, tables and ranks; and the measurement of the host's time without a GPU."""

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import warm_python
from source_tree import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))
import host_time
from contestants import CONTESTANTS, ring_payload_bytes
from processes import RankFailure, run_ranks
from rank import WARM_UP_STEPS, num_block_steps, trial_steps
from table import table
from timing import alternated, elapsed_ms, host_us


def test_contestants_take_turns_in_an_order_that_is_the_same_everywhere() -> None:
    def order(names: str, rounds: int, warm_ups: int) -> tuple[list[str], dict[str, list[int]]]:
        called: list[str] = []

        def contestant(name: str) -> int:
            called.append(name)
            return called.count(name)

        return called, alternated({name: partial(contestant, name) for name in names}, rounds, warm_ups=warm_ups)

    called, results = order("abc", rounds=20, warm_ups=2)
    rounds = {"".join(called[start : start + 3]) for start in range(0, len(called), 3)}
    assert len(called) == 66
    assert {"".join(sorted(turns)) for turns in rounds} == {"abc"}
    assert len(rounds) == 6, "every order"
    assert results == {name: list(range(3, 23)) for name in "abc"}, "warm-ups do not count"
    assert order("abc", rounds=20, warm_ups=2)[0] == called


def test_times_on_the_cpu_are_those_of_the_call() -> None:
    cpu, calls = torch.device("cpu"), []
    assert 0 < elapsed_ms(cpu, lambda: calls.append(1), head_start=True) < 1e3
    assert 0 < host_us(cpu, lambda: calls.append(1), num_calls=10) < 1e6
    assert len(calls) == 11


def test_blocks_have_whole_rounds_and_end_where_none_is_in_flight() -> None:
    ddp, compute, diloco = CONTESTANTS["ddp"], CONTESTANTS["compute"], CONTESTANTS["diloco"]
    assert [num_block_steps(contestant, 2, 40) for contestant in (ddp, compute, diloco)] == [2, 40, 90]
    assert num_block_steps(diloco, 91, 40) == 120
    assert WARM_UP_STEPS - 1 + trial_steps(ddp) == WARM_UP_STEPS
    assert WARM_UP_STEPS - 1 + trial_steps(diloco) == 59, "a round begins with the next step"
    a_step, a_round = (ring_payload_bytes(CONTESTANTS[name], [4096], 4) for name in ("diloco", "four_bits"))
    assert a_step == pytest.approx(1.5 * (2048 + 32 * 4) / 30)
    assert a_round == pytest.approx(30 * a_step)


def test_columns_of_numbers_are_aligned_to_the_right() -> None:
    rows = [["a", "1.50 (1 to 2)", "", "90 met"], ["2", "-3", "", ""]]
    assert table(["", "x", "y", "z"], rows).splitlines() == [
        "|  | x | y | z |",
        "| --- | ---: | --- | ---: |",
        "| a | 1.50 (1 to 2) |  | 90 met |",
        "| 2 | -3 |  |  |",
    ]
    assert table(["x"], []).splitlines() == ["| x |", "| --- |"]


@dataclass(frozen=True)
class NoSettings:
    """The settings of ranks that read none."""


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize(
    ("second", "error", "message"),
    [
        (["sh", "-c", "echo the reason; exit 3"], RankFailure, "^rank 1 ended with 3:\nthe reason\n$"),
        (["no-such-program"], FileNotFoundError, "no-such-program"),
        (["sh", "-c", "sleep 600"], KeyboardInterrupt, "asked for"),
    ],
)
def test_all_ranks_end_whatever_ends_one(
    tmp_path: Path, second: list[str], error: type[BaseException], message: str
) -> None:
    def stop() -> None:
        if error is KeyboardInterrupt:
            raise KeyboardInterrupt("asked for")

    limits: Any = SimpleNamespace(check=stop)
    before = children()
    with pytest.raises(error, match=message):
        run_ranks(
            *("rank.py", NoSettings(), tmp_path, limits, "ranks"),
            # The shell takes the words after its commands for their arguments.
            prefixes=[["sh", "-c", "sleep 600 & wait"], second],
            environment={},
        )
    assert children() == before


def children() -> set[str]:
    """Return the process ids of this process's children."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since it was listed
            found.update((task / "children").read_text().split())
    return found


def test_the_hosts_work_for_a_bucket_is_counted_and_timed(tmp_path: Path) -> None:
    program = [str(REPOSITORY / "benchmarks" / "host_time.py"), "--ranks", "2", "8"]
    run = warm_python.run([*program, "--rounds", "3", "--json", str(tmp_path / "result.json")], cwd=REPOSITORY)
    result = json.loads((tmp_path / "result.json").read_text())
    assert [row["ranks"] for row in result["results"]] == [2, 8]
    for row in result["results"]:
        assert row["launches"] + row["nccl_calls"] == sum(row["calls_by_name"].values())
        assert row["nccl_calls"] == 2, "one for each phase"
        # Encode, reduce and decode; their number does not grow with the number of ranks.
        assert 3 <= row["launches"] <= host_time.MOST_LAUNCHES
        assert row["host_us"] > result["floor_us"] > 0
        assert f"| {row['ranks']} | {row['launches']} | 2 | {row['host_us']:.1f} |" in run.stdout
    assert "git_revision" in result["environment"]
