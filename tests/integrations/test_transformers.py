"""The adapter of transformers, in two processes: what trains, what checkpoints and logs hold, and what is refused."""

import importlib.metadata
import inspect
import runpy
import sys
from pathlib import Path

import pytest
import rank_programs
import torch
from rank_programs import GRADIENTS, RANKS, WEIGHTS, Found

from documentation import ROOT

pytestmark = pytest.mark.integrations
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

RANK_PROGRAM = Path(__file__).parent / "transformers_rank.py"
ADAPTER = ROOT / "torchbagua" / "integrations" / "transformers.py"
STEPS, STOP = 6, 3
LOGGED = {"step_ms", "exposed_ms", "overlap_percent", "sent_MB_a_step", "compression_ratio_to_float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both ranks have written."""
    folder = tmp_path_factory.mktemp("transformers")
    rank_programs.run(RANK_PROGRAM, folder)
    return folder


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", GRADIENTS + WEIGHTS)
def test_every_step_is_heard_of(found: Found, name: str, accumulation: int) -> None:
    for one in found:
        run = one["runs"][name][f"accumulation {accumulation}"]
        assert run["steps"] == run["global_step"] == STEPS
        if name in GRADIENTS:
            assert run["buckets"] == STEPS  # the hook's calls: DDP makes one bucket of it


@pytest.mark.parametrize("name", [name for name in GRADIENTS + WEIGHTS if name != "async"])  # whose rounds are timed
def test_weights_are_those_of_a_plain_loop(found: Found, name: str) -> None:
    for one in found:
        assert one["runs"][name]["accumulation 1"]["weights"] == one["runs"][name]["plain"]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", GRADIENTS + WEIGHTS)
def test_ranks_are_equal_in_the_end_and_no_thread_is_left(found: Found, name: str, accumulation: int) -> None:
    runs = [one["runs"][name][f"accumulation {accumulation}"] for one in found]
    assert (runs[0]["during"] == runs[1]["during"]) == (name in GRADIENTS)
    assert runs[0]["weights"] == runs[1]["weights"]
    assert [run["threads"] for run in runs] == [[], []]


@pytest.mark.parametrize("name", [name for name in GRADIENTS + WEIGHTS if name != "async"])
def test_a_resumed_run_goes_on_bit_for_bit(found: Found, name: str) -> None:
    for one in found:
        assert len(one["resumed"][name]["straight"]) == STEPS - STOP
        assert one["resumed"][name]["again"] == one["resumed"][name]["straight"]


@pytest.mark.parametrize("name", GRADIENTS + WEIGHTS)
def test_a_checkpoint_holds_the_mean_and_each_ranks_own(found: Found, folder: Path, name: str) -> None:
    checkpoint = folder / name / f"checkpoint-{STOP}"
    model = safetensors.load_file(checkpoint / "model.safetensors")
    saved = [one["resumed"][name]["saved"] for one in found]
    assert (saved[0] == saved[1]) == (name in GRADIENTS)
    for key in model:
        if name != "async":  # a round may have come between the step and the checkpoint
            mean = torch.tensor([one[key] for one in saved], dtype=torch.float64).mean(0)
            # The mean is rounded to float32, and may be written as a difference to weights that are larger.
            torch.testing.assert_close(model[key].double().flatten(), mean, rtol=1e-6, atol=1e-7)
        if name in WEIGHTS:
            own = [torch.load(checkpoint / f"torchbagua_{rank}.pt")["module"][key].double() for rank in RANKS]
            torch.testing.assert_close(model[key].double(), sum(own) / len(own), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["Seq2SeqTrainer", "OwnTrainer"])
def test_logs_have_what_communication_costs(found: Found, folder: Path, kind: str) -> None:
    attached, detached = found[0]["logged"][kind]["logs"]
    expected = {f"torchbagua/{name}" for name in LOGGED}
    of_losses = [one for one in attached if "loss" in one]
    assert len(of_losses) == STEPS / 2
    for one in of_losses:
        assert expected <= one.keys()
        assert one["torchbagua/sent_MB_a_step"] > 0
        assert ("own" in one) == (kind == "OwnTrainer")
    assert not [name for one in [*detached, attached[-1]] for name in one if "torchbagua" in name]
    assert found[0]["logged"][kind]["detached"]
    assert found[0]["logged"][kind]["patched"] == []
    events = [path.read_bytes() for path in (folder / kind).rglob("events.out.tfevents.*")]
    assert all(any(f"train/torchbagua/{name}".encode() in one for one in events) for name in LOGGED)


def test_evaluations_and_the_best_model_are_of_the_mean(found: Found) -> None:
    evaluated = [one["evaluated"] for one in found]
    assert len(evaluated[0]["seen"]) == STEPS / 2
    assert evaluated[0]["seen"] == evaluated[1]["seen"]
    assert all(mine != other for mine, other in zip(*(one["during"] for one in evaluated), strict=True))
    assert evaluated[0]["weights"] == evaluated[1]["weights"]
    assert evaluated[0]["weights"] == evaluated[0]["seen"][int(evaluated[0]["best"].split("-")[1]) // 2 - 1]


def test_no_thread_is_left_where_training_raises(found: Found) -> None:
    cases = ["on_step_end RuntimeError", "on_prediction_step RuntimeError", "on_step_end KeyboardInterrupt"]
    expected = {case: [] for case in cases}
    assert [one["exceptions"] for one in found] == [expected, expected]


def test_an_exception_on_one_rank_ends_the_other(found: Found) -> None:
    there, here = (one["one_raises"] for one in found)
    assert here == {"raised": "RuntimeError", "is detached": True, "threads": []}
    # Where DDP sends buffers, it may be the first to miss the other rank.
    assert there.pop("raised") in ("CommunicationError", "RuntimeError")
    assert there == {"is detached": True, "threads": []}


def test_an_overflow_on_one_rank_is_skipped_on_all(found: Found) -> None:
    for one in found:
        assert one["overflow"]["steps"] == STEPS - 1
        assert one["overflow"]["scale"] == 2
    assert found[0]["overflow"]["weights"] == found[1]["overflow"]["weights"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no trainer", "TypeError: attach: trainer must be a transformers.Trainer, got Regression"),
        ("twice", "ValueError: attach: an algorithm is attached to the trainer already; detach it first"),
        ("too late", "ValueError: .* call attach before trainer.train"),
        ("name", "KeyError: .*no algorithm is named 'bytegrd'; there are "),
        ("class", r"TypeError: attach: algorithm must be .* construct it: ByteGradAlgorithm\(\)"),
        ("option", "TypeError: attach: observer is no option of torchbagua.attach, which has .*'observers'"),
        ("no QAdamOptimizer", r"ValueError: attach: qadam needs .* with optimizers=\(q_adam, None\)"),
        ("another optimizer", r"ValueError: .* one QAdamOptimizer, got \['SGD'\]"),
        ("too early", "RuntimeError: .*detach: the trainer is training; call it when trainer.train is done"),
        ("missing file", r"FileNotFoundError: torchbagua: .*own 1/checkpoint-3/torchbagua_1.pt, which rank 1 has to"),
        ("plain checkpoint", "has no state of an algorithm; it starts anew from these weights"),
    ],
)
def test_refusals(found: Found, case: str, message: str) -> None:
    rank_programs.assert_refused(found, case, message)


def test_one_process_is_refused(tmp_path: Path) -> None:
    from torchbagua.integrations.transformers import attach

    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=r"of several processes, got DistributedType\.NO; start with torchrun"):
        attach(transformers.Trainer(torch.nn.Linear(2, 1), arguments), "bytegrad")


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers.*; pip install 'torchbagua\[transformers\]'"):
        runpy.run_path(str(ADAPTER))


@pytest.mark.parametrize("missing", [["accelerate"], ["accelerate", "transformers"]])
def test_without_accelerate_the_extra_is_that_of_transformers(
    monkeypatch: pytest.MonkeyPatch, missing: list[str]
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torchbagua.integrations.accelerate", raising=False)
    with pytest.raises(ImportError, match=r"transformers needs .*; pip install 'torchbagua\[transformers\]'"):
        runpy.run_path(str(ADAPTER))


def test_an_earlier_transformers_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "4.57.1")
    with pytest.warns(
        RuntimeWarning, match=r"with transformers 5\.23\.0 and later, installed is transformers 4\.57\.1"
    ):
        runpy.run_path(str(ADAPTER))


def test_a_trainer_without_a_private_method_is_refused() -> None:
    from torchbagua.integrations.transformers import TrainerAttachment

    class EarlierTrainer:
        _inner_training_loop = None

    trainer = EarlierTrainer()
    with pytest.raises(
        RuntimeError,
        match=r"needs EarlierTrainer._prepare_for_training, which transformers \S+ does not have; it was tested with "
        r"transformers 5\.23\.0: pip install 'transformers>=5\.23\.0'",
    ):
        TrainerAttachment(trainer, "bytegrad", {})
    assert vars(trainer) == {}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_prepare_for_training", ["max_steps", "train_dataloader", "resume_from_checkpoint"]),
        ("_save_checkpoint", ["model", "trial"]),
        ("_get_output_dir", ["trial"]),
        ("_inner_training_loop", None),
        ("_finalize_training", None),
    ],
)
def test_the_private_methods_are_there(name: str, parameters: list[str] | None) -> None:
    """That Trainer calls them when it should is seen above."""
    found = list(inspect.signature(getattr(transformers.Trainer, name)).parameters)[1:]
    assert parameters is None or found == parameters
