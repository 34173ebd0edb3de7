"""BaguaStrategy, started by Lightning's own launcher, and by torchrun in processes that run `lightning_rank.py`."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rank_programs import GRADIENTS, WEIGHTS

import torchbagua as tb
from documentation import ROOT, blocks_of
from programs import run, torchrun

pytestmark = pytest.mark.integrations
lightning = pytest.importorskip("lightning")  # the other tests run without frameworks
pytorch_lightning = import_module("pytorch_lightning")
adapter = import_module("torchbagua.integrations.lightning")
BaguaStrategy = adapter.BaguaStrategy

RANK = Path(__file__).parent / "lightning_rank.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
ALGORITHMS = (*GRADIENTS, *WEIGHTS)
# One process per rank runs all scenarios, because importing Lightning takes seconds.
TWO_RANK_SCENARIOS = [
    *("counts", "as_in_a_plain_loop", "pytorch_lightning_by_name", "validation", "async_rounds", "resume"),
    *("finetuning", "saved_by_an_exception", "learning_rate_finder", "manual", "overflow", "twice"),
    "failing_everywhere",
]
Results = dict[str, list[Any]]
ONE_RANK_SCENARIOS = ["one_device", "from_two_ranks", "qadam_refusals"]


def results_of(folder: Path, scenarios: list[str], ranks: int) -> Results:
    """Run scenarios; return the result or failure of each rank, by scenario."""
    done = run(torchrun(RANK, str(folder), *scenarios, ranks=ranks), timeout_s=170, check=False, env=ENVIRONMENT)
    results: Results = {}
    for name in scenarios:
        paths = [folder / f"{name}-rank{rank}.json" for rank in range(ranks)]
        results[name] = [json.loads(path.read_text()) if path.exists() else {"failure": done.stderr} for path in paths]
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def two_rank_results(folder: Path) -> Results:
    return results_of(folder, TWO_RANK_SCENARIOS, 2)


@pytest.fixture(scope="module")
def one_rank_results(folder: Path, two_rank_results: Any) -> Results:
    return results_of(folder, ONE_RANK_SCENARIOS, 1)


def results_by_rank(results: Results, scenario: str) -> list[Any]:
    """Return the results of a scenario in rank order; fail if a rank failed."""
    for outcome in results[scenario]:
        assert "failure" not in outcome, outcome["failure"]
    return [outcome["result"] for outcome in results[scenario]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_steps_and_replicas(two_rank_results: Results, algorithm: str) -> None:
    runs = [result[algorithm] for result in results_by_rank(two_rank_results, "counts")]
    for (whole, accumulated), num_steps in zip(zip(*runs, strict=True), (10, 5), strict=True):
        for run_result in (whole, accumulated):
            assert run_result["steps"] == run_result["step events"] == num_steps
            assert run_result["is detached"]
            assert run_result["threads"] == []
            assert run_result["sent"] > 0
            if algorithm in GRADIENTS:
                assert run_result["buckets"] == num_steps  # calls of the hook: DDP has one bucket for this small model
        assert whole["end"] == accumulated["end"]
        assert (whole["own"] == accumulated["own"]) == (algorithm in GRADIENTS)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_weights_equal_those_without_the_strategy(
    two_rank_results: Results, one_rank_results: Results, algorithm: str
) -> None:
    """Bitwise those of a plain loop, with several settings of each algorithm; and on one device, those of Lightning."""
    for result in results_by_rank(two_rank_results, "as_in_a_plain_loop"):
        assert result[algorithm]["lightning"] == result[algorithm]["plain"]
    (of_one_device,) = results_by_rank(one_rank_results, "one_device")
    alone, bagua = of_one_device.get(algorithm, (None, None))  # QAdam has no counterpart
    assert alone == bagua


def test_single_runs(two_rank_results: Results) -> None:
    for result in results_by_rank(two_rank_results, "pytorch_lightning_by_name"):
        assert result["ddp"] == result["bagua"]
    for result in results_by_rank(two_rank_results, "learning_rate_finder"):
        assert result["buckets"] == 5 + 10, "it stays attached"
    for result in results_by_rank(two_rank_results, "finetuning"):
        for straight, resumed in result.values():
            assert straight == resumed, "a run that has unfrozen a layer resumes"
    first, second = results_by_rank(two_rank_results, "async_rounds")
    assert min(first["num_rounds"], second["num_rounds"]) > 0
    assert first["threads"] == second["threads"] == []
    assert first["during"] == second["during"]
    assert first["end"] == second["end"]
    first, second = results_by_rank(two_rank_results, "saved_by_an_exception")
    for result in (first, second):
        assert not result["has_states"]
        assert ["no state of the ranks" in warning for warning in result["warnings"]] == [True]
    assert first["end"] == second["end"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_validation_uses_the_mean_and_leaves_training_unchanged(two_rank_results: Results, algorithm: str) -> None:
    first, second = (result[algorithm] for result in results_by_rank(two_rank_results, "validation"))
    for result in (first, second):
        assert result["averaged"]["end"] == result["own"]["end"] == result["not validated"]["end"]
        assert result["averaged"]["own"] == result["own"]["own"] == result["not validated"]["own"]
        assert result["averaged"]["before"] == result["averaged"]["after"]
        assert result["own"]["before"] == result["own"]["during"] == result["own"]["after"]
        assert len(set(result["averaged"]["during"])) == 5  # the sanity check, and twice an epoch
    assert first["averaged"]["during"] == second["averaged"]["during"]
    if algorithm in WEIGHTS:
        after_training = slice(2 if algorithm == "async" else 1, None)  # its warm-up is longer than the first five
        assert not set(first["own"]["during"][after_training]) & set(second["own"]["during"][after_training])
        assert not set(first["averaged"]["before"][after_training]) & set(first["averaged"]["during"])


@pytest.mark.parametrize(
    "case", [*ALGORITHMS, *(f"{algorithm}, in validation" for algorithm in ("bytegrad", *WEIGHTS))]
)
def test_resumed_runs_are_bitwise_equal(two_rank_results: Results, case: str) -> None:
    for result in results_by_rank(two_rank_results, "resume"):
        assert result[case]["straight"] == result[case]["resumed"]
        assert result[case]["straight"]["steps"] == 30
        assert result[case]["num_states"] == 2
        assert result[case]["is_mean"]
        assert result[case]["are_different"] == case.startswith(WEIGHTS)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_checkpoint_of_another_world_size(one_rank_results: Results, algorithm: str) -> None:
    (result,) = results_by_rank(one_rank_results, "from_two_ranks")
    assert result[algorithm] == "accepted"


def test_manual_optimization(two_rank_results: Results) -> None:
    """Manual optimization with two optimizers and clipping. With weight algorithms DDP averages nothing."""
    first, second = results_by_rank(two_rank_results, "manual")
    for result in (first, second):
        assert result["gradient_allreduce"]["end"] == result["None"]["end"]
        for algorithm in ("gradient_allreduce", "bytegrad"):
            assert result[algorithm]["buckets"] == 2 * 10  # two backward passes in a step
        assert all(result[algorithm]["steps"] == 10 for algorithm in result if algorithm != "None")
        assert result["decentralized"]["end"] == result["decentralized, plain loop"]["end"]
    assert all(first[algorithm]["end"] == second[algorithm]["end"] for algorithm in first)
    assert first["decentralized"]["own"] != second["decentralized"]["own"]


@pytest.mark.parametrize("algorithm", [algorithm for algorithm in ALGORITHMS if algorithm != "async"])
def test_an_overflow_on_one_rank_skips_the_step_on_all_ranks(two_rank_results: Results, algorithm: str) -> None:
    results = [result[algorithm] for result in results_by_rank(two_rank_results, "overflow")]
    for result in results:
        assert result["steps"] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
        assert result["scale"] == 512
        assert result["end"] == results[0]["end"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_fits(two_rank_results: Results, algorithm: str) -> None:
    first, second = (result[algorithm] for result in results_by_rank(two_rank_results, "twice"))
    assert first == second
    assert first["steps"] == 20
    assert first["first"] != first["second"]


@pytest.mark.parametrize("kind", ["training", "validation", "interrupt"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_exception_leaves_no_thread(two_rank_results: Results, algorithm: str, kind: str) -> None:
    raised = "SystemExit" if kind == "interrupt" else "ZeroDivisionError"  # Lightning exits at Ctrl+C
    for result in results_by_rank(two_rank_results, "failing_everywhere"):
        assert result[algorithm][kind] == {"raised": raised, "threads": [], "is detached": True}


@pytest.mark.parametrize("scenario", ["rank_1_fails_in_training", "rank_1_fails_in_validation"])
def test_an_exception_on_one_rank_ends_the_other(tmp_path: Path, scenario: str) -> None:
    other, failed = results_by_rank(results_of(tmp_path, [scenario], 2), scenario)
    assert failed == {"raised": "ZeroDivisionError", "threads": [], "is detached": True}
    assert other["threads"] == []
    assert other["is detached"]
    assert other["raised"].endswith("Error")


def test_the_program_of_the_page(tmp_path: Path) -> None:
    """The page's program runs with Lightning's own launcher and prints the output that the page shows."""
    program, output = (block.text for block in blocks_of(ROOT / "docs/guides/lightning.md")[:2])
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    done = run([sys.executable, "train.py"], cwd=tmp_path, env=ENVIRONMENT)
    for line in output.splitlines():
        assert line in done.stdout


@pytest.mark.parametrize(
    ("algorithm", "arguments", "error", "message"),
    [
        (tb.ByteGradAlgorithm(), {"hierarchical": 0}, TypeError, "hierarchical is not an argument of ByteGradAlgori"),
        ("bytegard", {}, KeyError, r"no algorithm is named 'bytegard'; .*\['async', 'bytegrad'"),
        ("async", {"intervall": 3}, TypeError, "BaguaStrategy: intervall is not an argument of 'async', which has "),
        ("qadam", {"ddp_comm_hook": print}, TypeError, "ddp_comm_hook is not an argument of 'qadam'"),
        ("async", {"sync_interval_ms": -1}, ValueError, "sync_interval_ms must be"),
    ],
)
def test_the_constructor_refuses(algorithm: Any, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BaguaStrategy(algorithm, **arguments)


def test_the_constructor_accepts() -> None:
    for algorithm in (*ALGORITHMS, tb.ByteGradAlgorithm()):
        strategy = BaguaStrategy(algorithm, find_unused_parameters=True)
        assert isinstance(strategy, lightning.pytorch.strategies.DDPStrategy)
    of_ddp = {"static_graph": True, "process_group_backend": "gloo"}
    strategy = BaguaStrategy("decentralized", flatten=False, bucket_cap_mb=3, **of_ddp)
    assert strategy._ddp_kwargs == {"gradient_as_bucket_view": False, "static_graph": True}
    assert strategy._arguments == {"bucket_cap_mb": 3}  # weights have separate buckets
    assert strategy.process_group_backend == "gloo"


def test_qadam_requires_its_own_optimizer(one_rank_results: Results) -> None:
    (result,) = results_by_rank(one_rank_results, "qadam_refusals")
    message = "MisconfigurationException: Bagua QAdam can only accept one QAdamOptimizer and one LR Scheduler."
    assert result["Adam"] == result["two schedulers"] == message
    assert result["QAdam"] == "accepted"
    assert result["another value"].startswith("ValueError: QAdamAlgorithm: compression 'sign1bit' needs error_feedback")


def test_both_registries_have_the_strategy() -> None:
    for package, strategy in (
        (lightning.pytorch, BaguaStrategy),
        (pytorch_lightning, adapter.PytorchLightningBaguaStrategy),
    ):
        trainer = package.Trainer(accelerator="cpu", devices=1, strategy="BAGUA", logger=False)
        assert type(trainer.strategy) is strategy
        assert isinstance(trainer.strategy, package.strategies.DDPStrategy)


def test_without_lightning() -> None:
    imports = "from torchbagua.integrations.lightning import BaguaStrategy; print(BaguaStrategy.__mro__[2].__module__)"

    def run_without(*packages: str) -> "subprocess.CompletedProcess[str]":
        program = f"import sys; sys.modules.update(dict.fromkeys({packages})); {imports}"
        return run([sys.executable, "-c", program], check=False, env=ENVIRONMENT)

    message = r"ImportError: torchbagua.integrations.lightning needs lightning, .*pip install 'torchbagua\[lightning\]'"
    assert re.search(message, run_without("lightning", "pytorch_lightning").stderr)
    assert run_without("lightning").stdout.startswith("pytorch_lightning.")
