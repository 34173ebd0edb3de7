"""AllReduceAggregationHVD without Horovod, and with Horovod, which `make test-horovod` builds."""

import importlib.util
import os
import shutil
import sys
import types
from pathlib import Path

import pytest

import programs
from aggregation_checks import constant_model
from torchbagua.compat.mlbench import AllReduceAggregationHVD
from torchbagua.compat.mlbench.horovod import init_from_torch

TESTS = Path(__file__).parent


def test_without_horovod() -> None:
    if importlib.util.find_spec("horovod") is not None:
        pytest.skip("there is Horovod")
    for make in (lambda: AllReduceAggregationHVD(2), init_from_torch):
        with pytest.raises(ImportError, match=r"CMAKE_CXX_STANDARD 17 for 14.*make test-horovod"):
            make()


def test_a_horovod_that_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    hvd = types.ModuleType("horovod.torch")
    vars(hvd).update(is_initialized=lambda: False, size=lambda: 1, rank=lambda: 0)
    monkeypatch.setitem(sys.modules, "horovod", types.ModuleType("horovod"))
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
    with pytest.raises(RuntimeError, match=r"call hvd\.init\(\), under horovodrun"):
        AllReduceAggregationHVD(2).agg_grad()(constant_model(0), "avg_world")
    vars(hvd).update(is_initialized=lambda: True)
    with pytest.raises(RuntimeError, match=r"With torchrun alone, Horovod sees only one rank"):
        AllReduceAggregationHVD(2).agg_grad()(constant_model(0), "avg_world")


@pytest.mark.horovod
@pytest.mark.parametrize("launcher", ["horovodrun", "torchrun"])
def test_with_horovod(launcher: str) -> None:
    command = {
        "horovodrun": [shutil.which("horovodrun", path=str(Path(sys.executable).parent)), "--gloo", "-np", "2"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    }[launcher]
    python = [sys.executable] if launcher == "horovodrun" else []
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])

    run = programs.run(
        [*command, *python, str(TESTS / "horovod_rank.py")], timeout_s=120, env={**os.environ, "PYTHONPATH": path}
    )

    assert run.stdout.count("as it should be") == 2
