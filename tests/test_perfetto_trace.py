"""PerfettoTrace: one file per rank, merged into the trace event format on one clock; and `torchbagua trace`."""

import dataclasses
import gzip
import json
import math
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from ranks import run_ranks
from torchbagua.cli import trace
from torchbagua.collectives import clock, process_group
from torchbagua.observe.events import ClockOffset, Trace
from torchbagua.observe.perfetto import RankFile, RankFileWriter, find_files, merge
from tracing import NUM_STEPS, check_nested, merge_files, train_traced, write_trace
from training import Tower, build

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON, and Perfetto refuses it")

    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows: list[Row] = json.load(file, parse_constant=refuse)
    return rows


def check_format(rows: list[Row]) -> None:
    """Check the requirements of the "Trace Event Format" document on complete, flow and metadata events."""
    types = {"name": str, "pid": int, "tid": int, "cat": str, "args": dict, "id": int}
    for row in rows:
        fields = {"M": ("args",), "X": ("tid", "cat", "args")}.get(row["ph"], ("tid", "cat", "id"))
        assert all(isinstance(row[field], types[field]) for field in ("name", "pid", *fields)), row
        if row["ph"] == "M":
            assert row["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            assert set(row["args"]) & {"name", "sort_index"}
            continue
        assert row["ts"] >= 0
        if row["ph"] == "X":
            assert row["dur"] >= 0
        else:
            assert row["ph"] in ("s", "f")
            assert row.get("bp") == ("e" if row["ph"] == "f" else None)


def slices_by_track(rows: list[Row]) -> dict[tuple[int, int], list[Row]]:
    tracks = defaultdict(list)
    for row in rows:
        if row["ph"] == "X":
            tracks[row["pid"], row["tid"]].append(row)
    return tracks


@pytest.mark.parametrize("name", ["bytegrad", "async"])
def test_a_file_for_each_rank(tmp_path: Path, name: str) -> None:
    write_trace(tmp_path, size=3, name=name)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank{rank}.jsonl.gz" for rank in range(3)]
    merged = read(merge_files(tmp_path, tmp_path / "all.json.gz").path)
    check_format(merged)
    assert {row["pid"] for row in merged} == {0, 1, 2}
    for rank in range(3):
        rows = [row for row in merged if row["pid"] == rank]
        tracks = slices_by_track(rows)
        named = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
        assert {tid for _, tid in tracks} == set(named)
        always = {"training", "lane"} | {f"to rank {peer}" for peer in {0, 1, 2} - {rank}}
        assert always <= set(named.values()) <= always | {f"{track}, next" for track in always} | {"lane, next bucket"}
        steps = [row["name"] for row in rows if row.get("cat") == "step"]
        assert steps == [f"step {step}" for step in range(NUM_STEPS)]
        for slices in tracks.values():
            # In us: the sum of two floats is not exact.
            check_nested([(row["ts"], row["ts"] + row["dur"]) for row in slices], tolerance=1e-4)
        buckets = [(row["ts"] - 0.01, row["ts"] + row["dur"] + 0.01) for row in rows if row.get("cat") == "bucket"]
        for row in (row for row in tracks[rank, 2] if row["cat"] in ("encode", "reduce", "decode")):
            assert any(start <= row["ts"] and row["ts"] + row["dur"] <= end for start, end in buckets), row


def test_files_contain_the_events_that_observers_receive(tmp_path: Path) -> None:
    """They are lines of JSON: the run, which names an event's fields; the events of each step; the run again."""
    recorders = [tb.observe.Recorder() for _ in range(2)]
    traces = [tb.observe.PerfettoTrace(tmp_path) for _ in range(2)]
    attachments = train_traced(
        2, "qadam_1bit", lambda group: [recorders[group.rank()], traces[group.rank()]], nodes=[0, 1]
    )
    for rank, (recorder, attachment) in enumerate(zip(recorders, attachments, strict=True)):
        file = RankFile(tmp_path / f"rank{rank}.jsonl.gz")
        run = file.run
        assert run.description == repr(attachment.algorithm)
        assert run.nodes == (0, 1)
        assert run.settings["optimizer"].startswith("QAdamOptimizer(lr=0.001")
        assert {"torch", "python", "torchbagua", "model"} <= set(run.settings)
        assert list(file.events()) == recorder.events
        assert str(file.summary()) == str(attachment.summary())
        with gzip.open(file.path, "rt") as lines:
            first, *steps, rest, last = map(json.loads, lines)
        assert first["run"]["algorithm"] == last["run"]["algorithm"] == "QAdamAlgorithm"
        assert len(first["run"]["clock_offsets"]) < len(last["run"]["clock_offsets"]), "more comparisons of clocks"
        phase = first["event"].index("phase")
        assert [step[-1][phase] for step in steps] == ["step"] * NUM_STEPS
        events = [dict(zip(first["event"], event, strict=True)) for step in [*steps, rest] for event in step]
        assert [event["end_ns"] for event in events] == [event.end_ns for event in recorder.events]


def test_merged_ranks_have_an_arrow_for_every_message(tmp_path: Path) -> None:
    """Also if ranks send each other messages of the same numbers within nodes, and over all ranks."""
    recorders, nodes = [tb.observe.Recorder() for _ in range(4)], [0, 0, 1, 1]
    train_traced(
        4, "decentralized", lambda group: [recorders[group.rank()], tb.observe.PerfettoTrace(tmp_path)], nodes=nodes
    )
    merged = merge_files(tmp_path, tmp_path / "all.json.gz")
    num_messages = sum(event.phase == "send" for recorder in recorders for event in recorder.events)
    assert (merged.num_ranks, merged.num_messages, merged.num_backwards) == (4, num_messages, 0)
    assert merged.clock_error_us == 0, "ranks of one machine have one clock"
    rows = read(tmp_path / "all.json.gz")
    check_format(rows)
    assert min(row["ts"] for row in rows if "ts" in row) == 0
    tracks = slices_by_track(rows)
    assert {pid for pid, _ in tracks} == {0, 1, 2, 3}
    for slices in tracks.values():
        check_nested([(row["ts"], row["ts"] + row["dur"]) for row in slices], tolerance=1e-4)
    starts = {row["id"]: row for row in rows if row["ph"] == "s"}
    ends = {row["id"]: row for row in rows if row["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == num_messages

    def slice_at(row: Row, category: str) -> Row:
        (found,) = (
            candidate
            for candidate in tracks[row["pid"], row["tid"]]
            if candidate["cat"] == category
            and candidate["ts"] <= row["ts"] + 1e-9 <= candidate["ts"] + candidate["dur"] + 2e-3
            and (category == "receive" or candidate["ts"] == row["ts"])
        )
        return found

    for number, start in starts.items():
        end = ends[number]
        send, receive = slice_at(start, "send"), slice_at(end, "receive")
        assert send["args"]["peers"] == [end["pid"]]
        assert receive["args"]["peers"] == [start["pid"]]
        for key in ("message", "bucket", "operation", "wire_bytes", "scope", "ranks"):
            assert send["args"].get(key) == receive["args"].get(key)


def test_clocks_are_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks of ranks 1 and 2 are off by seconds, and are fast or slow by a thousandth."""

    rates, offsets_s = [1.0, 1.001, 0.999], [0.0, 1000.0, -3.5]

    def perf_counter_ns() -> int:
        rank = int(threading.current_thread().name.removeprefix("rank "))
        return round(time.perf_counter_ns() * rates[rank] + offsets_s[rank] * 1e9)

    monkeypatch.setattr(clock, "_concurrency", SimpleNamespace(perf_counter_ns=perf_counter_ns))
    monkeypatch.setattr(process_group, "clock_of_machine", lambda: threading.current_thread().name)

    def body(group: dist.ProcessGroup) -> tuple[int, list[ClockOffset]]:
        own = tb.BaguaProcessGroup(group, observers=[tb.observe.PerfettoTrace(tmp_path)])
        for _ in range(2):
            own.compare_clocks()
            time.sleep(0.2)
        return group.rank(), own.clock_offsets

    for rank, offsets in run_ranks(3, body):
        for own_ns, offset_ns, error_ns in offsets:
            true_ns = (own_ns - offsets_s[rank] * 1e9) / rates[rank]
            # Plus a microsecond for the rounding of a float of this many nanoseconds.
            assert abs(own_ns + offset_ns - true_ns) <= 1.002 * error_ns + 1000
            assert (error_ns == 0) == (rank == 0)
        if rank:
            drift_ns = offsets[1].offset_ns - offsets[0].offset_ns
            if abs(drift_ns) > offsets[0].error_ns + offsets[1].error_ns:
                assert (drift_ns < 0) == (rates[rank] > 1)


def test_merging_undoes_clock_differences(tmp_path: Path) -> None:
    """Rank 1's file is rewritten as if its clock were 7 s ahead and a thousandth fast."""
    plain, skewed = tmp_path / "plain", tmp_path / "skewed"
    write_trace(plain)
    skewed.mkdir()
    (skewed / "rank0.jsonl.gz").write_bytes((plain / "rank0.jsonl.gz").read_bytes())
    file = RankFile(plain / "rank1.jsonl.gz")
    ahead_ns, rate = 7 * 10**9, 1.001
    base_ns = file.run.clock_offsets[0].own_ns

    def on_skewed(own_ns: int) -> int:
        return own_ns + ahead_ns + round((rate - 1) * (own_ns - base_ns))

    offsets = []
    for own_ns, offset_ns, error_ns in file.run.clock_offsets:
        offsets.append(ClockOffset(on_skewed(own_ns), own_ns + offset_ns - on_skewed(own_ns), error_ns))
    writer = RankFileWriter(skewed, dataclasses.replace(file.run, clock_offsets=offsets))
    writer.close(
        [event._replace(start_ns=on_skewed(event.start_ns), end_ns=on_skewed(event.end_ns)) for event in file.events()]
    )

    expected = [row for row in read(merge_files(plain, tmp_path / "a.json.gz").path) if row["ph"] == "X"]
    found = [row for row in read(merge_files(skewed, tmp_path / "b.json.gz").path) if row["ph"] == "X"]

    def key(row: Row) -> tuple[Any, ...]:
        return row["pid"], row["tid"], row["ts"]

    for plain_row, skewed_row in zip(sorted(expected, key=key), sorted(found, key=key), strict=True):
        assert (plain_row["name"], plain_row["args"]) == (skewed_row["name"], skewed_row["args"])
        assert abs(plain_row["ts"] - skewed_row["ts"]) < 5, "within 5 us: offsets are linear between two comparisons"


def test_a_merge_that_fails_leaves_no_file(tmp_path: Path) -> None:
    write_trace(tmp_path, num_steps=1)
    before = sorted(tmp_path.iterdir())
    calls: list[object] = []

    def fail_at_second(files: Iterable[RankFile]) -> Iterable[RankFile]:
        calls.append(files)
        if len(calls) == 2:
            raise OSError("disk full")
        return files

    with pytest.raises(OSError, match="disk full"):
        merge(find_files(tmp_path).files, tmp_path / "all.json.gz", fail_at_second)
    assert sorted(tmp_path.iterdir()) == before


def test_one_rank_and_only_some_steps(tmp_path: Path) -> None:
    used = tb.observe.PerfettoTrace(tmp_path, steps=range(2, 4))
    train_traced(2, "bytegrad", lambda group: [used] if group.rank() == 1 else [])
    assert [path.name for path in tmp_path.iterdir()] == ["rank1.jsonl.gz"]
    (file,), problems = find_files(tmp_path)
    assert problems == ["files of ranks [0] are missing, of 2 ranks"]
    assert {event.step for event in file.events()} == {2, 3}
    merged = merge_files(tmp_path, tmp_path / "all.json.gz")
    assert (merged.num_ranks, merged.num_messages) == (1, 0)
    rows = read(merged.path)
    check_format(rows)
    assert [row["name"] for row in rows if row.get("cat") == "step"] == ["step 2", "step 3"]
    with pytest.raises(ValueError, match="PerfettoTrace: a trace serves one attachment; create another trace"):
        train_traced(1, "bytegrad", lambda group: [used], num_steps=1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"path": None}, TypeError, "path must be a path, got None"),
        *(
            ({"path": path}, ValueError, "path must be a folder to write to, got")
            for path in ("", "a\0b", "/proc/self", Path(__file__) / "trace")
        ),
        ({"steps": 10}, TypeError, "steps must be a range or None, got 10"),
        ({"steps": range(-3, 0)}, ValueError, "steps must contain a step number of 0 or more, got range"),
    ],
    ids=str,
)
def test_refusals(tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"PerfettoTrace: {message}"):
        tb.observe.PerfettoTrace(**{"path": tmp_path, **arguments})


def test_files_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    write_trace(tmp_path, size=3)
    write_trace(tmp_path, size=2)
    message = r"rank2.jsonl.gz and rank0.jsonl.gz are of different runs; remove the older file"
    with pytest.raises(ValueError, match=message):
        find_files(tmp_path)
    steps = [event.step for event in RankFile(tmp_path / "rank0.jsonl.gz").events() if event.phase == "step"]
    assert steps == [*range(NUM_STEPS)], "the file of the earlier run is replaced"


def test_a_step_that_overflows_is_valid_json(tmp_path: Path) -> None:
    sampler = type("Sampler", (Trace,), {"samples": lambda self, step: True})
    model = build(lambda: Tower((10, 301, 47, 1)))
    torch.nn.init.constant_(next(model.parameters()), torch.nan)
    train_traced(2, "bytegrad", lambda group: [tb.observe.PerfettoTrace(tmp_path), sampler()], model=model)
    rows = read(merge_files(tmp_path, tmp_path / "all.json.gz").path)
    assert any(row.get("cat") == "measure" for row in rows)
    measured = [event for event in RankFile(tmp_path / "rank0.jsonl.gz").events() if event.phase == "measure"]
    assert measured
    assert all(math.isnan(event.values["encoded"]) for event in measured)


def test_trace_shows_merges_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    write_trace(folder)

    def run(command: str, *arguments: object, path: Path = folder, status: int = 0) -> tuple[str, str]:
        assert trace.main([command, str(path), *map(str, arguments)]) == status
        return capsys.readouterr()

    def rows_of(output: str) -> list[list[str]]:
        return [line.split()[:2] for line in output.splitlines() if line[:5].strip() in ("0", "1")]

    output, _ = run("show")
    assert "ByteGradAlgorithm(hierarchical=True, average=True, block=2048, error_feedback=False), 2 ranks" in output
    assert rows_of(output) == [["0", "6"], ["1", "6"]]
    with monkeypatch.context() as without_extras:
        for missing in "tqdm", "matplotlib", "tensorboard":
            without_extras.setitem(sys.modules, missing, None)
        assert "merged.json.gz: 2 ranks" in run("merge")[0]
    check_format(read(folder / "merged.json.gz"))
    run("show")  # the merged file is in the same folder
    pictures = set()
    for step in (["--step", 0], ["--step", 5], []):  # the middle one
        run("draw", *step)
        pictures.add((folder / "timeline.png").read_bytes())
    assert len(pictures) == 3
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)

    for message, arguments in {
        "step 99 is not in this trace, which ranges from step 0 to 5": ("draw", "--step", 99),
        "the output must be a separate file": ("merge", "--output", folder / "rank1.jsonl.gz"),
    }.items():
        assert message in run(*arguments, status=1)[1]
    run("merge", "--output", folder / "rank1.jsonl.gz" / "x", status=1)
    assert "found no rank*.jsonl.gz file" in run("show", path=folder / "nothing", status=1)[1]
    assert "its subfolders ['run'] contain such files" in run("show", path=tmp_path, status=1)[1]
    (folder / "rank0.jsonl.gz").write_bytes(gzip.compress(b"[1]"))
    output, errors = run("show")
    assert "rank0.jsonl.gz does not begin like a PerfettoTrace file" in errors
    assert "files of ranks [0] are missing, of 2 ranks" in errors
    assert rows_of(output) == [["1", "6"]]
    assert not list(folder.glob("*.partial"))
