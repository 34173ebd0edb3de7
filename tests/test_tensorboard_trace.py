"""TensorBoardTrace: event files, read back by TensorBoard's own reader."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import torchbagua as tb
from torchbagua.events import Run
from torchbagua.traces.figures import Figures
from torchbagua.traces.over_ranks import OverRanks
from tracing import NAMES, train_traced

EVERY = 4


def read(folder: Path) -> EventAccumulator:
    """Return all that lies in the folder."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "histograms": 0, "tensors": 0})
    events.Reload()
    return events


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    events = read(folder)
    return {tag: {one.step: one.value for one in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("name", NAMES)
def test_charts_show_what_observers_hear(tmp_path: Path, name: str) -> None:
    recorders = [tb.traces.Recorder() for _ in range(2)]
    train_traced(
        2,
        name,
        lambda group: [recorders[group.rank()], tb.traces.TensorBoardTrace(tmp_path, EVERY)],
        num_steps=3 * EVERY + 1,
    )
    written = scalars(tmp_path)
    sent_bytes = 0
    expected: list[list[Figures]] = []
    for window in range(3):
        steps = range(window * EVERY, (window + 1) * EVERY)
        of_ranks = []
        for recorder in recorders:
            figures = Figures()
            ends = [index for index, event in enumerate(recorder.events) if event.phase == "step"]
            first = 0 if window == 0 else ends[steps[0] - 1] + 1
            for index in range(first, ends[steps[-1]] + 1):
                figures.add([recorder.events[index]])
            of_ranks.append(figures)
        expected.append(of_ranks)
    for window, (own, other) in enumerate(expected):
        num_steps = (window + 1) * EVERY
        sent_bytes += own.bytes_sent

        def at(tag: str, num_steps: int = num_steps) -> float:
            return written[tag][num_steps]

        def about(value: float) -> object:
            return pytest.approx(value, rel=1e-6)  # the files hold float32

        assert at("communication/step_ms") == about(own.step_ns / EVERY / 1e6)
        assert at("communication/exposed_ms") == about(own.wait_ns / EVERY / 1e6)
        assert at("communication/sent_MB_a_step") == about(own.bytes_sent / EVERY / 1e6)
        assert at("communication/compression_ratio_to_float32") == about(own.ratio)
        assert at("communication_detail/bits_per_element") == about(own.bits_per_element)
        assert at("communication_detail/sent_MB_in_all") == about(sent_bytes / 1e6)
        assert 0 <= at("communication/overlap_percent") <= 100
        assert at("communication_detail/encode_ms") == about(own.phase_ns["encode"] / EVERY / 1e6)
        for figure, value in {"step_ms": "step_ns", "exposed_ms": "wait_ns"}.items():
            both = [getattr(one, value) / EVERY / 1e6 for one in (own, other)]
            assert at(f"communication_of_all_ranks/{figure}_mean") == about(sum(both) / 2)
            assert at(f"communication_of_all_ranks/{figure}_maximum") == about(max(both))

    tags = read(tmp_path).Tags()
    assert tags["images"] == ["communication/a_step"]
    assert tags["histograms"] == ["communication_detail/bucket_ms"]
    of_name = {
        "bytegrad": {"relative_quantisation_error"},
        "qadam": {"relative_quantisation_error"},
        "qadam_1bit": {"relative_quantisation_error", "residual_norm"},
        "shift_one": {"peer"},
        "low_precision_decentralized": {"relative_quantisation_error", "peer"},
        "async": {"rounds", "staleness_in_steps"},
    }.get(name, set())
    special = {"relative_quantisation_error", "residual_norm", "peer", "rounds", "staleness_in_steps"}
    found = {tag.split("/")[1] for tag in written} & special
    if name == "async":  # in so few steps there need not have been a round
        assert found <= of_name
    else:
        assert found == of_name


def test_the_peer_of_shift_one_changes(tmp_path: Path) -> None:
    train_traced(4, "shift_one", lambda group: [tb.traces.TensorBoardTrace(tmp_path, 1)], num_steps=8)
    peers = list(scalars(tmp_path)["communication_detail/peer"].values())
    assert set(peers) == {2.0, 3.0}, "rank 0 meets the upper half"


def test_asynchronous_rounds_and_their_age(tmp_path: Path) -> None:
    train_traced(2, "async", lambda group: [tb.traces.TensorBoardTrace(tmp_path, 10)], num_steps=100)
    written = scalars(tmp_path)
    rounds = list(written["communication_detail/rounds"].values())
    assert rounds == sorted(rounds)
    assert rounds[-1] > 0
    assert min(written["communication_detail/staleness_in_steps"].values()) >= 1


def test_run_layout_and_pictures(tmp_path: Path) -> None:
    train_traced(2, "bytegrad", lambda group: [tb.traces.TensorBoardTrace(tmp_path, 2)], num_steps=6)
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


def test_ranks_that_write(tmp_path: Path) -> None:
    train_traced(3, "bytegrad", lambda group: [tb.traces.TensorBoardTrace(tmp_path, 2, ranks=(1, 2))], num_steps=4)
    written, beside = scalars(tmp_path), scalars(tmp_path / "rank2")
    assert not (tmp_path / "rank0").exists()
    assert list(written["communication_of_all_ranks/step_ms_mean"]) == [2, 4]
    assert list(beside["communication/step_ms"]) == [2, 4]
    assert not any(tag.startswith("communication_of_all_ranks") for tag in beside)


def test_a_writer_of_the_users(tmp_path: Path) -> None:
    with SummaryWriter(tmp_path) as writer:
        writer.add_scalar("loss", 3.0, 1)
        train_traced(
            2, "bytegrad", lambda group: [tb.traces.TensorBoardTrace(writer if group.rank() == 0 else tmp_path, 2)]
        )
        writer.add_scalar("loss", 2.0, 2)
    written = scalars(tmp_path)
    assert list(written["loss"].values()) == [3.0, 2.0], "it is still open afterwards"
    assert list(written["communication/step_ms"]) == [2, 4, 6]
    assert len(list(tmp_path.iterdir())) == 1, "one file"


def test_one_rank_alone_may_trace(tmp_path: Path) -> None:
    start_s = time.monotonic()
    train_traced(2, "bytegrad", lambda group: [tb.traces.TensorBoardTrace(tmp_path, 2)] if group.rank() == 0 else [])
    assert time.monotonic() - start_s < 20, "it does not wait for what the other never puts up"
    written = scalars(tmp_path)
    assert list(written["communication/step_ms"]) == [2, 4, 6]
    assert not any(tag.startswith("communication_of_all_ranks") for tag in written)


def test_slots_are_used_again() -> None:
    """However long a run is, the store keeps sixteen texts of a rank."""

    class Board:
        texts: dict[tuple[int, int], str]

        def __init__(self, rank: int, texts: dict[tuple[int, int], str]) -> None:
            self.rank, self.texts = rank, texts

        def put(self, slot: int, text: str) -> None:
            self.texts[slot, self.rank] = text

        def get(self, slot: int) -> list[str] | None:
            found = [self.texts.get((slot, rank)) for rank in range(2)]
            return None if None in found else [text for text in found if text is not None]

    texts: dict[tuple[int, int], str] = {}
    ahead, behind = (
        OverRanks(
            Run(id="", algorithm="", description="", rank=rank, nodes=(0, 0), settings={}, board=Board(rank, texts)),
            10,
            collects=rank == 0,
        )
        for rank in range(2)
    )
    for step in range(10, 1010, 10):
        ahead.put(step, {"ms": 1.0})
    assert ahead.found() == []
    found = []
    for step in range(10, 1010, 10):
        behind.put(step, {"ms": 2.0 + step})
        found += ahead.found()
    assert len(texts) == 32
    assert found == [(step, [{"ms": 1.0}, {"ms": 2.0 + step}]) for step in range(850, 1010, 10)], "the last sixteen"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be an integer from 1, got 0"),
        ({"every_n_steps": 2.5}, "every_n_steps must be an integer from 1, got 2.5"),
        ({"ranks": ()}, r"ranks must be some ranks, got \(\)"),
        ({"ranks": (-1,)}, r"ranks must be some ranks, got \(-1,\)"),
    ],
)
def test_refusals(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"TensorBoardTrace: {message}"):
        tb.traces.TensorBoardTrace(tmp_path, **arguments)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="TensorBoardTrace: log_dir must be a path, got 3"):
        tb.traces.TensorBoardTrace(3)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"TensorBoardTrace: log_dir must be a folder to write to, got '.*file'"):
        tb.traces.TensorBoardTrace(tmp_path / "file")


@pytest.mark.parametrize("missing", ["tensorboard", "matplotlib"])
def test_what_is_not_installed_is_named(tmp_path: Path, missing: str) -> None:
    code = f"""
import sys
sys.modules["{missing}"] = None
import torchbagua
try:
    torchbagua.traces.TensorBoardTrace({str(tmp_path)!r})
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "TensorBoardTrace: " in done.stdout
    assert "pip install 'torchbagua[traces]'" in done.stdout


def test_import_takes_neither_tensorboard_nor_matplotlib() -> None:
    code = "import sys, torchbagua; print([name for name in ('tensorboard', 'matplotlib') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
