"""The adapter of accelerate, in two processes: training, states loaded from checkpoints, and refusals."""

import importlib
import importlib.metadata
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_programs
import torch
from rank_programs import GRADIENTS, WEIGHTS, Found

from documentation import ROOT

pytestmark = pytest.mark.integrations
accelerate = pytest.importorskip("accelerate")
safetensors = pytest.importorskip("safetensors.torch")

ADAPTER = ROOT / "torchbagua" / "integrations" / "accelerate.py"
STEPS = 6


def parameters(state: dict[str, Any]) -> dict[str, Any]:
    """Remove BatchNorm's buffers: DDP broadcasts rank 0's buffers in a forward, and not after a step."""
    return {name: value for name, value in state.items() if not name.startswith("1.") or name.endswith("t")}


@pytest.mark.parametrize("name", GRADIENTS + WEIGHTS)
def test_training(found: Found, name: str) -> None:
    """Weights are those of a plain loop, and equal in the end; every step is reported; no thread is left."""
    for accumulation in (1, 2):
        runs = [result["runs"][name][f"accumulation {accumulation}"] for result in found]
        for run in runs:
            assert run["steps"] == STEPS / accumulation
            if name in GRADIENTS:
                assert run["buckets"] == STEPS / accumulation  # the hook's calls: DDP has a single bucket
            assert run["threads"] == []
        assert (parameters(runs[0]["during"]) == parameters(runs[1]["during"])) == (name in GRADIENTS)
        assert parameters(runs[0]["weights"]) == parameters(runs[1]["weights"])
        if accumulation == 1 and name != "async":  # its rounds start at random steps
            assert [run["weights"] for run in runs] == [result["runs"][name]["plain"] for result in found]


@pytest.mark.parametrize("name", GRADIENTS + WEIGHTS)
def test_each_rank_restores_its_own_weights(found: Found, name: str) -> None:
    for result in found:
        resumed = result["resumed"][name]
        if name in GRADIENTS:
            assert parameters(resumed["loaded"]) == parameters(resumed["saved"])
        elif name == "async":
            assert resumed["loaded"] in (resumed["saved"], resumed["applied"])
        else:
            assert resumed["loaded"] == resumed["saved"]
        if name != "async":
            assert resumed["again"] == resumed["straight"]
    saved = [parameters(result["resumed"][name]["saved"]) for result in found]
    assert (saved[0] == saved[1]) == (name in GRADIENTS)


@pytest.mark.parametrize("name", GRADIENTS + WEIGHTS)
def test_a_checkpoint_contains_the_mean(found: Found, folder: Path, name: str) -> None:
    model = safetensors.load_file(folder / name / "model.safetensors")
    saved = [result["resumed"][name]["saved"] for result in found]
    for key in parameters(saved[0]):
        mean = torch.tensor([weights[key] for weights in saved], dtype=torch.float64).mean(0)
        # The mean is rounded to float32 once, and a difference to it may be added to weights that are larger.
        torch.testing.assert_close(model[key].double().flatten(), mean, rtol=1e-6, atol=1e-7)


def test_hooks_that_store_the_models_themselves(found: Found) -> None:
    """They are registered before or after attach, and save the mean."""
    for result in found:
        for case, own_files in result["own_files"].items():
            saved, loaded = own_files["outcomes"]
            assert parameters(saved[0]) == parameters(loaded[0]), case
            assert saved[1:3] == loaded[1:3] or case.startswith("gradient"), case
            assert parameters(saved[3]) == parameters(loaded[3]), case
    for case, own_files in found[0]["own_files"].items():
        assert parameters(own_files["own"]) == parameters(own_files["mean"]), case


def test_the_main_process_saves_alone(found: Found) -> None:
    results = [result["main_process_alone"] for result in found]
    for result in results:
        assert result["gradient_allreduce"] == "nothing"
        assert re.search(
            r"FileNotFoundError: .*torchbagua_1\.pt, which rank 1 must load, .*: ranks \[1\] did not save, ",
            result["bytegrad"],
        )
        assert re.search(
            r"CommunicationError: .*out of step .* Rank 0 is in the mean of the weights, rank 1 in the round after ",
            result["decentralized"],
        )
    advice = "accelerator.save_state saves the mean of the ranks' weights, so all"
    assert advice in results[0]["decentralized"]
    assert re.search(
        rf"CommunicationError: .*{advice} .* has waited longer than the timeout of 1 s", results[0]["async"]
    )
    assert results[1]["async"] == "nothing"  # it trains on alone


def test_steps_models_and_memory(found: Found) -> None:
    """An overflow on one rank; a forced synchronization; two models; another algorithm; a model after free_memory."""
    for result in found:
        assert result["overflow"]["skipped"] == [step == 2 for step in range(STEPS)]
        assert result["overflow"]["scale"] == 2
        assert result["forced_sync"]["True"] == result["forced_sync"]["False"]
        assert result["switched"]["loaded"] == result["switched"]["saved"]
        assert result["freed"]["is freed"]
        assert result["freed"]["scaler is taken"]
        assert result["freed"]["loaded"] == result["freed"]["saved"]
        assert result["exception"] == [], "no thread is left when training is interrupted"
    first, second = found
    assert first["overflow"]["weights"] == second["overflow"]["weights"]
    assert first["forced_sync"]["True"] != second["forced_sync"]["True"], "no gradients are averaged"
    assert {"torchbagua_1.pt", "torchbagua_model1_1.pt"} <= set(first["switched"]["files"])
    assert first["freed"]["saved"] != second["freed"]["saved"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("before prepare", "ValueError: .* got Sequential; call attach after model, optimizer = accelerator.prepare"),
        ("unwrapped", "ValueError: .* got Sequential; call attach after model, optimizer = accelerator.prepare"),
        ("optimizer", "ValueError: .* got another Adam; call attach after model, optimizer = "),
        ("no accelerator", "TypeError: .* must be an accelerate.Accelerator, got DistributedDataParallel"),
        ("twice", "ValueError: .* is attached to the module already; detach it first"),
        ("saved without", "ValueError: .*plain was saved when no algorithm was attached; load it before attach"),
        ("saved detached", "ValueError: .* was saved when no algorithm was attached; load it before attach"),
    ],
)
def test_refusals(found: Found, case: str, message: str) -> None:
    rank_programs.assert_refused(found, case, message)


def test_one_process_is_refused() -> None:
    from torchbagua.integrations.accelerate import attach

    accelerator = accelerate.Accelerator(cpu=True)
    raw = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"in several processes, got DistributedType\.NO; start with torchrun"):
        attach(accelerator, model, optimizer, "bytegrad")


def test_without_accelerate_or_with_an_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(importlib.metadata, "version", lambda package: "1.2.3")
        message = r"tested with accelerate 1\.15\.0 and later; installed is accelerate 1\.2\.3"
        with pytest.warns(RuntimeWarning, match=message):
            runpy.run_path(str(ADAPTER))
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match=r"needs accelerate.*; pip install 'torchbagua\[accelerate\]'"):
        runpy.run_path(str(ADAPTER))


def test_the_private_names_that_the_adapter_reads_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = importlib.import_module("torchbagua.integrations.accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator._models == accelerator._optimizers == accelerator._custom_objects == []
    monkeypatch.setattr(adapter, "check_uses_ddp", lambda accelerator: None)
    del accelerator._optimizers
    with pytest.raises(RuntimeError, match=r"needs Accelerator\._optimizers, which accelerate \S+ does not have"):
        adapter.attach(accelerator, torch.nn.Linear(2, 1), None, "bytegrad")
