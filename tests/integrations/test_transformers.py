"""The adapter of transformers, in two processes: training, the contents of checkpoints and logs, and refusals."""

import importlib.metadata
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

ADAPTER = ROOT / "torchbagua" / "integrations" / "transformers.py"
STEPS, STOP = 6, 3
LOGGED = {"step_ms", "exposed_ms", "overlap_percent", "sent_MB_a_step", "compression_ratio_to_float32"}


@pytest.mark.parametrize("name", GRADIENTS + WEIGHTS)
def test_training(found: Found, name: str) -> None:
    """Weights are those of a plain loop, equal in the end, and the same if resumed; every step counts; threads end."""
    for accumulation in (1, 2):
        runs = [result["runs"][name][f"accumulation {accumulation}"] for result in found]
        for run in runs:
            assert run["steps"] == run["global_step"] == STEPS
            if name in GRADIENTS:
                assert run["buckets"] == STEPS  # the hook's calls: DDP has a single bucket
            assert run["threads"] == []
        assert (runs[0]["during"] == runs[1]["during"]) == (name in GRADIENTS)
        assert runs[0]["weights"] == runs[1]["weights"]
    if name == "async":  # it depends on time
        return
    for result in found:
        assert result["runs"][name]["accumulation 1"]["weights"] == result["runs"][name]["plain"]
        assert len(result["resumed"][name]["straight"]) == STEPS - STOP
        assert result["resumed"][name]["again"] == result["resumed"][name]["straight"]


@pytest.mark.parametrize("name", GRADIENTS + WEIGHTS)
def test_a_checkpoint_contains_the_mean_and_each_ranks_weights(found: Found, folder: Path, name: str) -> None:
    checkpoint = folder / name / f"checkpoint-{STOP}"
    model = safetensors.load_file(checkpoint / "model.safetensors")
    saved = [result["resumed"][name]["saved"] for result in found]
    assert (saved[0] == saved[1]) == (name in GRADIENTS)
    for key in model:
        if name != "async":  # a round may have run between the step and the checkpoint
            mean = torch.tensor([weights[key] for weights in saved], dtype=torch.float64).mean(0)
            # The mean is rounded to float32, and may be stored as a difference to weights that are larger.
            torch.testing.assert_close(model[key].double().flatten(), mean, rtol=1e-6, atol=1e-7)
        if name in WEIGHTS:
            own = [torch.load(checkpoint / f"torchbagua_{rank}.pt")["module"][key].double() for rank in RANKS]
            torch.testing.assert_close(model[key].double(), sum(own) / len(own), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["Seq2SeqTrainer", "OwnTrainer"])
def test_logs_contain_the_cost_of_communication(found: Found, folder: Path, kind: str) -> None:
    attached, detached = found[0]["logged"][kind]["logs"]
    expected = {f"torchbagua/{name}" for name in LOGGED}
    of_losses = [entry for entry in attached if "loss" in entry]
    assert len(of_losses) == STEPS / 2
    for entry in of_losses:
        assert expected <= entry.keys()
        assert entry["torchbagua/sent_MB_a_step"] > 0
        assert ("own" in entry) == (kind == "OwnTrainer")
    assert not [name for entry in [*detached, attached[-1]] for name in entry if "torchbagua" in name]
    assert found[0]["logged"][kind]["detached"]
    assert found[0]["logged"][kind]["patched"] == []
    events = [path.read_bytes() for path in (folder / kind).rglob("events.out.tfevents.*")]
    assert all(any(f"train/torchbagua/{name}".encode() in content for content in events) for name in LOGGED)


def test_evaluations_and_the_best_model_use_the_mean(found: Found) -> None:
    evaluated = [result["evaluated"] for result in found]
    assert len(evaluated[0]["seen"]) == STEPS / 2
    assert evaluated[0]["seen"] == evaluated[1]["seen"]
    assert all(first != second for first, second in zip(*(rank["during"] for rank in evaluated), strict=True))
    assert evaluated[0]["weights"] == evaluated[1]["weights"]
    assert evaluated[0]["weights"] == evaluated[0]["seen"][int(evaluated[0]["best"].split("-")[1]) // 2 - 1]


def test_exceptions_and_an_overflow(found: Found) -> None:
    cases = ["on_step_end RuntimeError", "on_prediction_step RuntimeError", "on_step_end KeyboardInterrupt"]
    for result in found:
        assert result["exceptions"] == {case: [] for case in cases}, "no thread is left"
        assert result["overflow"]["steps"] == STEPS - 1, "an overflow on one rank is skipped on all"
        assert result["overflow"]["scale"] == 2
    assert found[0]["overflow"]["weights"] == found[1]["overflow"]["weights"]
    survivor, raiser = (result["one_raises"] for result in found)
    assert raiser == {"raised": "RuntimeError", "is detached": True, "threads": []}
    # If DDP broadcasts buffers, it may be the first to notice that the other rank is missing.
    assert survivor.pop("raised") in ("CommunicationError", "RuntimeError")
    assert survivor == {"is detached": True, "threads": []}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no trainer", "TypeError: attach: trainer must be a transformers.Trainer, got Regression"),
        ("twice", "ValueError: attach: an algorithm is attached to the trainer already; detach it first"),
        ("too late", "ValueError: .* call attach before trainer.train"),
        ("name", "KeyError: .*no algorithm is named 'bytegrd'; the registered names are "),
        ("class", r"TypeError: attach: algorithm must be .* construct it: ByteGradAlgorithm\(\)"),
        ("option", "TypeError: attach: observer is not an option of torchbagua.attach, which has .*'observers'"),
        ("no QAdamOptimizer", r"ValueError: attach: qadam needs .* with optimizers=\(q_adam, None\)"),
        ("another optimizer", r"ValueError: .* one QAdamOptimizer, got \['SGD'\]"),
        ("too early", "RuntimeError: .*detach: the trainer is training; call it after trainer.train is done"),
        ("missing file", r"FileNotFoundError: torchbagua: .*own 1/checkpoint-3/torchbagua_1.pt, which rank 1 must"),
        ("plain checkpoint", "has no state of an algorithm; it starts again from these weights"),
    ],
)
def test_refusals(found: Found, case: str, message: str) -> None:
    rank_programs.assert_refused(found, case, message)


def test_one_process_is_refused(tmp_path: Path) -> None:
    from torchbagua.integrations.transformers import attach

    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=r"in several processes, got DistributedType\.NO; start with torchrun"):
        attach(transformers.Trainer(torch.nn.Linear(2, 1), arguments), "bytegrad")


@pytest.mark.parametrize("missing", [["transformers"], ["accelerate"], ["accelerate", "transformers"]], ids=str)
def test_without_packages_the_extra_is_that_of_transformers(
    monkeypatch: pytest.MonkeyPatch, missing: list[str]
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    if "accelerate" in missing:
        monkeypatch.delitem(sys.modules, "torchbagua.integrations.accelerate", raising=False)
    with pytest.raises(ImportError, match=r"transformers needs .*; pip install 'torchbagua\[transformers\]'"):
        runpy.run_path(str(ADAPTER))


def test_an_earlier_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchbagua.integrations.transformers import TrainerAttachment

    trainer = type("EarlierTrainer", (), {"_inner_training_loop": None})()
    message = r"needs EarlierTrainer._prepare_for_training, which transformers \S+ does not have; it was tested with "
    message += r"transformers 5\.23\.0: pip install 'transformers>=5\.23\.0'"
    with pytest.raises(RuntimeError, match=message):
        TrainerAttachment(trainer, "bytegrad", {})
    assert vars(trainer) == {}
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "4.57.1")
    message = r"with transformers 5\.23\.0 and later; installed is transformers 4\.57\.1"
    with pytest.warns(RuntimeWarning, match=message):
        runpy.run_path(str(ADAPTER))
