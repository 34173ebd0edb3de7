"""BaguaStrategy: by Lightning's own launcher, and in processes of torchrun, which run `lightning_rank.py`."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
from rank_programs import GRADIENTS, WEIGHTS

import torchbagua as tb
from documentation import ROOT, blocks_of
from programs import run, torchrun
from torchbagua.integrations import common as frameworks

pytestmark = pytest.mark.integrations
lightning = pytest.importorskip("lightning")  # the other tests run where no framework is
pytorch_lightning = import_module("pytorch_lightning")
adapter = import_module("torchbagua.integrations.lightning")
BaguaStrategy = adapter.BaguaStrategy

RANK = Path(__file__).parent / "lightning_rank.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
ALGORITHMS = (*GRADIENTS, *WEIGHTS)
# One process of each for all of them: it takes seconds to import Lightning.
OF_TWO = [
    "counts",
    "as_in_a_plain_loop",
    "beside_ddp",
    "pytorch_lightning_by_name",
    "validation",
    "async_rounds",
    "resume",
    "saved_by_an_exception",
    "learning_rate_finder",
    "manual",
    "overflow",
    "twice",
    "failing_everywhere",
]
OF_ONE = ["one_device", "from_two_ranks", "qadam_refusals"]


def results_of(folder: Path, scenarios: list[str], ranks: int) -> dict[str, list[Any]]:
    """What each rank's scenarios returned, or how they failed, by their names."""
    done = run(torchrun(RANK, str(folder), *scenarios, ranks=ranks), timeout_s=170, check=False, env=ENVIRONMENT)
    results: dict[str, list[Any]] = {}
    for name in scenarios:
        paths = [folder / f"{name}-rank{rank}.json" for rank in range(ranks)]
        results[name] = [json.loads(path.read_text()) if path.exists() else {"failure": done.stderr} for path in paths]
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def of_two(folder: Path) -> dict[str, list[Any]]:
    return results_of(folder, OF_TWO, 2)


@pytest.fixture(scope="module")
def of_one(folder: Path, of_two: Any) -> dict[str, list[Any]]:
    return results_of(folder, OF_ONE, 1)


def each(results: dict[str, list[Any]], scenario: str) -> list[Any]:
    """What the ranks returned, in their order."""
    for one in results[scenario]:
        assert "failure" not in one, one["failure"]
    return [one["result"] for one in results[scenario]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_steps_and_replicas(of_two: dict[str, list[Any]], algorithm: str) -> None:
    runs = [result[algorithm] for result in each(of_two, "counts")]
    for (whole, accumulated), num_steps in zip(zip(*runs, strict=True), (10, 5), strict=True):
        for one in (whole, accumulated):
            assert one["steps"] == one["step events"] == num_steps
            assert one["is detached"]
            assert one["threads"] == []
            assert one["sent"] > 0
            if algorithm in GRADIENTS:
                assert one["buckets"] == num_steps  # the hook's calls: DDP makes one bucket of so small a model
        assert whole["end"] == accumulated["end"]
        assert (whole["own"] == accumulated["own"]) == (algorithm in GRADIENTS)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_weights_are_those_of_a_plain_loop(of_two: dict[str, list[Any]], algorithm: str) -> None:
    """Without any difference, with several settings of each: error feedback, one bit, an interval, a warm-up."""
    for result in each(of_two, "as_in_a_plain_loop"):
        assert result[algorithm]["lightning"] == result[algorithm]["plain"]


def test_the_weights_are_near_those_of_ddp(of_two: dict[str, list[Any]]) -> None:
    for result in each(of_two, "beside_ddp"):
        assert result["gradient_allreduce"] == result["bagua"] <= 1e-7  # float32, sums of two
        assert 0 < result["bytegrad"] < 1.2e-4  # 20 steps, of which each adds at most half a 255th of a block's range


@pytest.mark.parametrize("algorithm", [algorithm for algorithm in ALGORITHMS if algorithm != "qadam"])
def test_one_device_is_like_no_strategy(of_one: dict[str, list[Any]], algorithm: str) -> None:
    (result,) = each(of_one, "one_device")
    assert result[algorithm]["alone"] == result[algorithm]["bagua"]


def test_pytorch_lightning_takes_it_by_name(of_two: dict[str, list[Any]]) -> None:
    for result in each(of_two, "pytorch_lightning_by_name"):
        assert result["ddp"] == result["bagua"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_validation_sees_the_mean_and_training_nothing_of_it(of_two: dict[str, list[Any]], algorithm: str) -> None:
    own, other = (result[algorithm] for result in each(of_two, "validation"))
    for one in (own, other):
        assert one["averaged"]["end"] == one["own"]["end"] == one["not validated"]["end"]
        assert one["averaged"]["own"] == one["own"]["own"] == one["not validated"]["own"]
        assert one["averaged"]["before"] == one["averaged"]["after"]
        assert one["own"]["before"] == one["own"]["during"] == one["own"]["after"]
        assert len(set(one["averaged"]["during"])) == 5  # the sanity check, and twice an epoch
    assert own["averaged"]["during"] == other["averaged"]["during"]
    if algorithm in WEIGHTS:
        after_training = slice(2 if algorithm == "async" else 1, None)  # its warm-up is longer than the first five
        assert not set(own["own"]["during"][after_training]) & set(other["own"]["during"][after_training])
        assert not set(own["averaged"]["before"][after_training]) & set(own["averaged"]["during"])


def test_validation_and_checkpoints_between_rounds_in_the_background(of_two: dict[str, list[Any]]) -> None:
    own, other = each(of_two, "async_rounds")
    for one in (own, other):
        assert one["num_rounds"] > 0
        assert one["threads"] == []
    assert own["during"] == other["during"]
    assert own["end"] == other["end"]


@pytest.mark.parametrize(
    "case", [*ALGORITHMS, *(f"{algorithm}, in validation" for algorithm in ("bytegrad", *WEIGHTS))]
)
def test_resumed_runs_are_the_same_to_the_bit(of_two: dict[str, list[Any]], case: str) -> None:
    for result in each(of_two, "resume"):
        assert result[case]["straight"] == result[case]["resumed"]
        assert result[case]["straight"]["steps"] == 30
        assert result[case]["num_states"] == 2
        assert result[case]["is_mean"]
        assert result[case]["are_different"] == case.startswith(WEIGHTS)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_file_of_another_number_of_ranks(of_one: dict[str, list[Any]], algorithm: str) -> None:
    (result,) = each(of_one, "from_two_ranks")
    if algorithm in ("gradient_allreduce", "diloco"):  # it has no state; what ranks share goes on with any number
        assert result[algorithm] == "accepted"
    else:  # the others have a state of their own on each rank, with the settings of these tests
        assert "must be that of rank 0 of 1, got that of rank 0 of 2" in result[algorithm]


def test_a_file_that_an_exception_saved(of_two: dict[str, list[Any]]) -> None:
    results = each(of_two, "saved_by_an_exception")
    for result in results:
        assert not result["has_states"]
        assert ["no state of the ranks" in one for one in result["warnings"]] == [True]
        assert result["end"] == results[0]["end"]


def test_it_stays_where_lightning_looks_for_a_learning_rate(of_two: dict[str, list[Any]]) -> None:
    for result in each(of_two, "learning_rate_finder"):
        assert result["buckets"] == 5 + 10


def test_manual_optimization(of_two: dict[str, list[Any]]) -> None:
    """Of two optimizers, with clipping; weight algorithms have DDP average nothing."""
    own, other = each(of_two, "manual")
    for one in (own, other):
        assert one["gradient_allreduce"]["end"] == one["None"]["end"]
        for algorithm in ("gradient_allreduce", "bytegrad"):
            assert one[algorithm]["buckets"] == 2 * 10  # two backward passes in a step
        assert all(one[algorithm]["steps"] == 10 for algorithm in one if algorithm != "None")
        assert one["decentralized"]["end"] == one["decentralized, plain loop"]["end"]
    assert all(own[algorithm]["end"] == other[algorithm]["end"] for algorithm in own)
    assert own["decentralized"]["own"] != other["decentralized"]["own"]


@pytest.mark.parametrize("algorithm", [algorithm for algorithm in ALGORITHMS if algorithm != "async"])
def test_an_overflow_on_one_rank_skips_on_all(of_two: dict[str, list[Any]], algorithm: str) -> None:
    results = [result[algorithm] for result in each(of_two, "overflow")]
    for result in results:
        assert result["steps"] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
        assert result["scale"] == 512
        assert result["end"] == results[0]["end"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_fits(of_two: dict[str, list[Any]], algorithm: str) -> None:
    first, second = (result[algorithm] for result in each(of_two, "twice"))
    assert first == second
    assert first["steps"] == 20
    assert first["first"] != first["second"]


@pytest.mark.parametrize("kind", ["training", "validation", "interrupt"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_exception_leaves_no_thread(of_two: dict[str, list[Any]], algorithm: str, kind: str) -> None:
    raised = "SystemExit" if kind == "interrupt" else "ZeroDivisionError"  # Lightning exits at Ctrl+C
    for result in each(of_two, "failing_everywhere"):
        assert result[algorithm][kind] == {"raised": raised, "threads": [], "is detached": True}


@pytest.mark.parametrize("scenario", ["training_bytegrad", "validation_async"])
def test_an_exception_on_one_rank_ends_the_other(tmp_path: Path, scenario: str) -> None:
    there, here = each(results_of(tmp_path, [scenario], 2), scenario)
    assert here == {"raised": "ZeroDivisionError", "threads": [], "is detached": True}
    assert there["threads"] == []
    assert there["is detached"]
    assert there["raised"].endswith("Error")


def test_the_page_of_it(tmp_path: Path) -> None:
    """By Lightning's own launcher; what it shows of the run is so."""
    program, output = (block.text for block in blocks_of(ROOT / "docs/guides/lightning.md")[:2])
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    done = run([sys.executable, "train.py"], cwd=tmp_path, env=ENVIRONMENT)
    for line in output.splitlines():
        assert line in done.stdout


class TestConstructor:
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_takes_every_algorithm(self, algorithm: str) -> None:
        assert isinstance(BaguaStrategy(algorithm), lightning.pytorch.strategies.DDPStrategy)

    def test_takes_an_algorithm(self) -> None:
        BaguaStrategy(tb.ByteGradAlgorithm(), find_unused_parameters=True)
        with pytest.raises(TypeError, match="hierarchical is no argument of ByteGradAlgorithm"):
            BaguaStrategy(tb.ByteGradAlgorithm(), hierarchical=False)

    def test_refuses_what_is_unknown(self) -> None:
        with pytest.raises(KeyError, match=r"no algorithm is named 'bytegard'; there are \['async', 'bytegrad'"):
            BaguaStrategy("bytegard")
        with pytest.raises(TypeError, match=r"BaguaStrategy: intervall is no argument of 'async', which has \["):
            BaguaStrategy("async", intervall=3)
        with pytest.raises(TypeError, match="ddp_comm_hook is no argument of 'qadam'"):
            BaguaStrategy("qadam", ddp_comm_hook=print)

    def test_refuses_values(self) -> None:
        with pytest.raises(ValueError, match="sync_interval_ms must be"):
            BaguaStrategy("async", sync_interval_ms=-1)

    def test_hands_arguments_on(self) -> None:
        strategy = BaguaStrategy(
            "decentralized", flatten=False, bucket_cap_mb=3, static_graph=True, process_group_backend="gloo"
        )
        assert strategy._ddp_kwargs == {"gradient_as_bucket_view": False, "static_graph": True}
        assert strategy._arguments == {"bucket_cap_mb": 3}  # weights have buckets of their own
        assert strategy.process_group_backend == "gloo"


def test_qadam_takes_its_own_optimizer(of_one: dict[str, list[Any]]) -> None:
    (result,) = each(of_one, "qadam_refusals")
    old = "MisconfigurationException: Bagua QAdam can only accept one QAdamOptimizer and one LR Scheduler."
    assert result["Adam"] == result["two schedulers"] == old
    assert result["QAdam"] == "accepted"
    assert result["another value"].startswith("ValueError: QAdamAlgorithm: compression 'sign1bit' needs error_feedback")


def test_both_registries_have_it() -> None:
    for package, strategy in (
        (lightning.pytorch, BaguaStrategy),
        (pytorch_lightning, adapter.PytorchLightningBaguaStrategy),
    ):
        trainer = package.Trainer(accelerator="cpu", devices=1, strategy="BAGUA", logger=False)
        assert type(trainer.strategy) is strategy
        assert isinstance(trainer.strategy, package.strategies.DDPStrategy)


def test_what_is_overridden_is_there() -> None:
    """None is private; a release that calls them otherwise may lack one."""
    overridden = [name for name in vars(adapter._BaguaStrategy) if not name.startswith("_")]
    assert len(overridden) == 8
    for package in (lightning.pytorch, pytorch_lightning):
        for name in overridden:
            assert callable(getattr(package.strategies.DDPStrategy, name)), name
        assert issubclass(package.utilities.exceptions.MisconfigurationException, Exception)


def without(package: str) -> "subprocess.CompletedProcess[str]":
    hidden = "; ".join(f"sys.modules[{name!r}] = None" for name in package.split())
    adapter = "from torchbagua.integrations.lightning import BaguaStrategy"
    program = f"import sys; {hidden}; {adapter}; print(BaguaStrategy.__mro__[2].__module__)"
    return run([sys.executable, "-c", program], check=False, env=ENVIRONMENT)


def test_without_lightning() -> None:
    done = without("lightning pytorch_lightning")
    assert re.search(
        r"ImportError: torchbagua.integrations.lightning needs lightning, .*pip install 'torchbagua\[lightning\]'",
        done.stderr,
    )
    assert without("lightning").stdout.startswith("pytorch_lightning.")


def test_an_older_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(RuntimeWarning) as warned, frameworks.framework("torch", tested="999.1", adapter="here"):
        pass
    assert f"here was tested with torch 999.1 and later, installed is torch {metadata.version('torch')}" in str(
        warned[0].message
    )
    monkeypatch.setattr(metadata, "version", lambda package: "2.10.0")
    with frameworks.framework("lightning", tested="2.9.9", adapter="here"):
        pass
