"""TensorBoardTrace: event files, read back by TensorBoard's own reader."""

import itertools
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import torchbagua as tb
import warm_python
from torchbagua.observe.events import Run
from torchbagua.observe.figures import Figures
from torchbagua.observe.tensorboard import OverRanks
from torchbagua.observe.tensorboard import scalars as shown
from tracing import train_traced

EVERY = 5  # DiLoCo's rounds are in even steps, and the fifth step is number 4


def read(folder: Path) -> EventAccumulator:
    """Return all events in the folder."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "histograms": 0, "tensors": 0})
    events.Reload()
    return events


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    events = read(folder)
    return {tag: {scalar.step: scalar.value for scalar in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def steps_of(events: list[tb.observe.CommEvent]) -> list[list[tb.observe.CommEvent]]:
    """Cut events after the end of each step."""
    ends = [index + 1 for index, event in enumerate(events) if event.phase == "step"]
    return [events[start:end] for start, end in itertools.pairwise([0, *ends])]


@pytest.mark.parametrize("name", ["bytegrad", "qadam_1bit", "shift_one", "diloco"])
def test_charts_show_the_observed_events(tmp_path: Path, name: str) -> None:
    recorders = [tb.observe.Recorder() for _ in range(2)]
    train_traced(
        2,
        name,
        lambda group: [recorders[group.rank()], tb.observe.TensorBoardTrace(tmp_path, EVERY)],
        num_steps=2 * EVERY + 1,
    )
    written = scalars(tmp_path)
    if name == "bytegrad":
        measured = {event.step for event in recorders[0].events if event.phase == "measure"}
        assert measured == {EVERY - 1, 2 * EVERY - 1}, "in the last step before it writes"
    batches = [steps_of(recorder.events) for recorder in recorders]
    sent_bytes = 0
    for first in range(0, 2 * EVERY + 1, EVERY):
        of_ranks = []
        for steps in batches:
            figures = Figures()
            for events in steps[first : first + EVERY]:
                figures.add(events)
            of_ranks.append(figures)
        num_steps = first + of_ranks[0].num_steps
        sent_bytes += of_ranks[0].bytes_sent
        own, other = (shown(figures, sent_bytes) for figures in of_ranks)
        if num_steps == 2 * EVERY + 1:  # with the bytes that detach sent
            own["communication_detail/sent_MB_in_all"] = recorders[0].bytes_sent / 1e6
        for tag, value in own.items():
            assert written[tag][num_steps] == pytest.approx(value, rel=1e-6), tag  # the files hold float32
        for tag in ("communication/step_ms", "communication/exposed_ms", "communication_detail/communication_ms"):
            both, of_all = [own[tag], other[tag]], f"communication_of_all_ranks/{tag.split('/')[1]}"
            assert written[f"{of_all}_mean"][num_steps] == pytest.approx(sum(both) / 2, rel=1e-6)
            assert written[f"{of_all}_maximum"][num_steps] == pytest.approx(max(both), rel=1e-6)

    tags = read(tmp_path).Tags()
    assert tags["images"] == ["communication/a_step"]
    assert tags["histograms"] == ["communication_detail/bucket_ms"]
    of_name = {
        "bytegrad": {"relative_quantisation_error"},
        "qadam_1bit": {"relative_quantisation_error", "residual_norm"},
        "shift_one": {"peer"},
        "diloco": {"relative_quantisation_error", "residual_norm", "rounds", "staleness_in_steps"},
    }[name]
    special = {"relative_quantisation_error", "residual_norm", "peer", "rounds", "staleness_in_steps"}
    assert {tag.split("/")[1] for tag in written} & special == of_name


def test_run_layout_and_pictures(tmp_path: Path) -> None:
    train_traced(2, "bytegrad", lambda group: [tb.observe.TensorBoardTrace(tmp_path, 2)], num_steps=6)
    events = read(tmp_path)
    (text,) = events.Tensors("communication/run/text_summary")
    table = text.tensor_proto.string_val[0].decode()
    for part in ("ByteGradAlgorithm(hierarchical=True", "| ranks | 2 |", "| optimizer | SGD(lr=0.01", "| torch |"):
        assert part in table
    (layout,) = events.Tensors("custom_scalars__config__")
    assert b"communication/exposed_ms" in layout.tensor_proto.string_val[0]
    pictures = events.Images("communication/a_step")
    assert [picture.step for picture in pictures] == [2, 6], "the first, and the last when it ends"
    for picture in pictures:
        assert picture.encoded_image_string.startswith(b"\x89PNG")
        assert (picture.width, picture.height) >= (700, 300)
    histograms = events.Histograms("communication_detail/bucket_ms")
    assert [histogram.step for histogram in histograms] == [2, 4, 6]
    assert all(histogram.histogram_value.num > 0 for histogram in histograms)


def test_a_user_provided_writer(tmp_path: Path) -> None:
    with SummaryWriter(tmp_path) as writer:
        writer.add_scalar("loss", 3.0, 1)
        train_traced(
            2, "bytegrad", lambda group: [tb.observe.TensorBoardTrace(writer if group.rank() == 0 else tmp_path, 2)]
        )
        writer.add_scalar("loss", 2.0, 2)
    written = scalars(tmp_path)
    assert list(written["loss"].values()) == [3.0, 2.0], "it is still open afterwards"
    assert list(written["communication/step_ms"]) == [2, 4, 6]
    assert len(list(tmp_path.iterdir())) == 1, "one file"


@pytest.mark.parametrize(
    ("ranks", "num_steps", "written"),
    [
        ((0,), 0, {0: []}),
        ((0,), 1, {0: [1]}),
        ((1, 2), 4, {1: [2, 4], 2: [2, 4]}),
        ("alone", 6, {0: [2, 4, 6]}),  # it does not wait for texts that the other ranks never put
    ],
)
def test_ranks_and_steps_that_are_written(
    tmp_path: Path, ranks: tuple[int, ...] | str, num_steps: int, written: dict[int, list[int]]
) -> None:
    """The first rank that writes has the figures of all ranks, if they all trace."""

    def observers(group: dist.ProcessGroup) -> list[tb.observe.TensorBoardTrace]:
        if ranks == "alone":
            return [tb.observe.TensorBoardTrace(tmp_path, 2)] if group.rank() == 0 else []
        return [tb.observe.TensorBoardTrace(tmp_path, 2, ranks=ranks)]

    start_s = time.monotonic()
    train_traced(3, "bytegrad", observers, num_steps=num_steps)
    assert time.monotonic() - start_s < 20
    for number, (rank, expected) in enumerate(written.items()):
        found = scalars(tmp_path if number == 0 else tmp_path / f"rank{rank}")
        assert list(found.get("communication/step_ms", ())) == expected
        of_all = list(found.get("communication_of_all_ranks/step_ms_mean", ()))
        assert of_all == (expected if number == 0 and ranks != "alone" else [])
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["rank2"][: len(written) - 1]


def test_slots_are_used_again() -> None:
    """However long the run, the store keeps only the last sixteen texts of a rank."""
    texts: dict[tuple[int, int], str] = {}
    gets: list[int] = []

    def get(slot: int) -> list[str] | None:
        gets.append(slot)
        found = [texts[slot, rank] for rank in range(2) if (slot, rank) in texts]
        return found if len(found) == 2 else None

    def board(rank: int) -> SimpleNamespace:
        return SimpleNamespace(put=lambda slot, text: texts.__setitem__((slot, rank), text), get=get)

    settings: dict[str, Any] = {"id": "", "algorithm": "", "description": "", "nodes": (0, 0), "settings": {}}
    ahead, behind = (OverRanks(Run(rank=rank, board=board(rank), **settings), collects=rank == 0) for rank in range(2))
    for step in range(10, 1010, 10):
        ahead.put(step, {"ms": 1.0})
    assert ahead.collect() == []
    assert len(gets) == 16
    found = []
    for step in range(10, 1010, 10):
        behind.put(step, {"ms": 2.0 + step})
        found += ahead.collect()
    assert len(texts) == 2 * (16 + 1)
    assert found == [(step, [{"ms": 1.0}, {"ms": 2.0 + step}]) for step in range(850, 1010, 10)], "the last sixteen"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"every_n_steps": each}, f"every_n_steps must be an integer from 1, got {each}") for each in (0, 2.5)),
        *(
            ({"ranks": each}, re.escape(f"ranks must be a list of ranks, integers from 0, got {each}"))
            for each in ((), (-1,), [True], 0)
        ),
        ({"log_dir": 3}, "log_dir must be a path or a SummaryWriter, got 3"),
        ({"log_dir": __file__}, f"log_dir must be a folder to write to, got '{__file__}'"),
    ],
    ids=str,
)
def test_refusals(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"TensorBoardTrace: {message}"):
        tb.observe.TensorBoardTrace(**{"log_dir": tmp_path, **arguments})


def test_ranks_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"ranks must be less than the world size 2, got \[5\]"):
        train_traced(2, "bytegrad", lambda group: [tb.observe.TensorBoardTrace(tmp_path, ranks=[5])], num_steps=1)


def test_missing_packages_are_named(tmp_path: Path) -> None:
    """In a process that has not imported them yet."""
    code = f"""
import sys
import torchbagua
for missing in "tensorboard", "matplotlib":
    sys.modules[missing] = None
    try:
        torchbagua.observe.TensorBoardTrace({str(tmp_path)!r})
    except ImportError as error:
        print(missing, repr(str(error)))
    del sys.modules[missing]
"""
    lines = warm_python.run(["-c", code]).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["tensorboard", "matplotlib"]
    for line in lines:
        assert "TensorBoardTrace: " in line
        assert "pip install 'torchbagua[traces]'" in line
