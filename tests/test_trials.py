"""Trials: trainings with every algorithm and every fault, the bits of gloo and of the oracle, and bugs of the past."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import oracle
import torchbagua as tb
from past_bugs import PAST_BUGS
from ranks import run_ranks
from simulated import SUBJECTS, case, without_fault
from source_tree import REPOSITORY, run_python
from torchbagua.testing.simulation import Fault, Program, Rank, Trial, draw_trial, run_trial, simulate
from torchbagua.testing.simulation.faults import FAULTS, UserCode
from torchbagua.testing.simulation.program import Record, ThreeLayers, sgd
from transports import group_like_the_oracle

# Trainings with faults give all of the package's warnings.
pytestmark = [pytest.mark.usefixtures("on_one_core"), pytest.mark.filterwarnings("ignore")]

SEEDS_OF_A_BUG = 10_000


def violations(trial: Trial) -> list[str]:
    return run_trial(trial).violations


def trials_of(name: str, kind: str, num_seeds: int) -> Iterator[Trial]:
    """Yield the trials of the first seeds with this subject and this fault."""
    num_pairs = len(SUBJECTS) * len(FAULTS)
    place = (list(SUBJECTS).index(name), FAULTS.index(kind))
    first = next(seed for seed in range(num_pairs) if (seed % len(SUBJECTS), seed % len(FAULTS)) == place)
    for number in range(num_seeds):
        own_name, trial = case(first + number * num_pairs)
        assert own_name == name
        yield trial


class GlooRank(Rank):
    """A rank over gloo, as a thread of this process."""

    def group(self, **options: Any) -> tb.BaguaProcessGroup:
        return group_like_the_oracle(self.torch_group)

    def ddp(self, module: torch.nn.Module, **arguments: Any) -> DistributedDataParallel:  # type: ignore[override]
        del arguments["backward_s"]
        return DistributedDataParallel(module, process_group=self.torch_group, **arguments)

    def compute(self, seconds: float) -> None:
        pass


@pytest.mark.parametrize("name", [name for name in SUBJECTS if name != "async"])  # which depends on times
def test_results_are_those_of_gloo(name: str) -> None:
    """With accumulated gradients and a GradScaler."""
    program = Program(num_backwards=2, has_scaler=True, backward_s=0.0, forward_s=0.0)
    trial = replace(without_fault(name, 1, 4), program=program)
    subject = trial.subject

    def over_gloo(group: dist.ProcessGroup) -> Record:
        rank, record = GlooRank(group.rank(), group.size(), simulate(trial), group), Record()
        user = UserCode(Fault(), rank)
        subject.train(rank, program, user, record, subject.make_optimizer, subject.make)
        return record

    report = run_trial(trial)

    assert report.violations == []
    for own, expected in zip(report.records, run_ranks(4, over_gloo), strict=True):
        assert own.result is not None
        assert expected.result is not None
        assert torch.equal(own.result, expected.result)


MEANS: dict[str, Callable[[list[oracle.Array]], oracle.Array]] = {
    "gradient_allreduce": oracle.gradient_allreduce,
    "bytegrad": lambda rows: oracle.bytegrad(rows, [rows[0].size]),
}


@pytest.mark.parametrize("name", MEANS)
def test_results_are_those_of_the_oracle(name: str) -> None:
    size, program = 3, Program(backward_s=0.0, forward_s=0.0)
    network = ThreeLayers()
    parameters = list(network.parameters())
    optimizer = sgd(parameters)
    data = [torch.Generator().manual_seed(rank) for rank in range(size)]
    for _ in range(program.num_steps):
        losses = [network(torch.randn(3, 8, generator=own)).square().sum() for own in data]
        gradients = [torch.autograd.grad(loss, parameters) for loss in losses]
        for parameter, rows in zip(parameters, zip(*gradients, strict=True), strict=True):
            mean = MEANS[name]([row.flatten().numpy() for row in rows])
            parameter.grad = torch.from_numpy(mean).view_as(parameter)
        optimizer.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in parameters])
    report = run_trial(replace(without_fault(name, 1, size), program=program))
    assert report.violations == []
    assert all(record.result is not None and torch.equal(record.result, expected) for record in report.records)


@pytest.mark.parametrize("kind", FAULTS)
def test_faults(kind: str) -> None:
    for name in list(SUBJECTS)[FAULTS.index(kind) % 2 :: 2]:
        for trial in trials_of(name, kind, 1):
            assert violations(trial) == [], (name, trial.seed)


@pytest.mark.release
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_more_faults(name: str, kind: str) -> None:
    for trial in trials_of(name, kind, 3):
        assert violations(trial) == [], trial.seed


BUGS: dict[str, tuple[str, ...]] = {
    "group_closes_while_others_connect": ("rows_4_bits", "long stall", "slow store"),
    "search_for_inf_sends_one_number": ("local_sgd", "early end"),
    "qadam_compares_only_during_the_warmup": ("qadam_1_bit", "other state"),
    "residual_counts_twice": ("bytegrad_feedback", "none"),
    "failed_attach_cannot_be_retried": ("gradient_allreduce", "late attach"),
    "error_of_a_closed_group_has_no_cause": ("rows", "failed operation"),
    "loaded_weights_are_lost_at_the_next_round": ("diloco", "none"),
    "loaded_weights_are_changed_by_the_outer_round": ("fragments", "none"),
    "loaded_weights_are_changed_by_background_rounds": ("async", "late start", "slow link", "none", "late attach"),
    "calls_are_not_compared": ("diloco", "other call"),
    "late_open_names_no_rank": ("all", "long stall"),
    "errors_of_node_gradients_name_ranks_of_the_node": ("local_sgd", "long stall", "death", "error", "early end"),
}


@pytest.mark.release
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_the_past_is_found(bug: str) -> None:
    name, *kinds = BUGS[bug]
    num_seeds = SEEDS_OF_A_BUG // (len(SUBJECTS) * len(FAULTS))
    trials = chain.from_iterable(trials_of(name, kind, num_seeds) for kind in kinds)
    with PAST_BUGS[bug]():
        found = next(trial for trial in trials if violations(trial))
    assert violations(found) == []


def test_a_rank_that_takes_no_step_after_a_load() -> None:
    """It ends asynchronous averaging together with ranks that have taken one."""
    program = Program(loads_at=3, evaluates_at=3, freezes=True)
    fault = Fault("skipped step", rank=0, step=3)
    trials = [replace(without_fault("async", seed), program=program, fault=fault) for seed in range(6)]
    assert [violations(trial) for trial in trials] == [[]] * len(trials)
    with PAST_BUGS["pending_load_counts_as_another_one"]():
        assert any(map(violations, trials))


def test_the_error_of_one_operation_reaches_all_ranks() -> None:
    trial = replace(without_fault("bytegrad", 0, 3), fault=Fault("failed operation", rank=1, operation=20))
    report = run_trial(trial)
    assert report.violations == []
    assert "operation 20 of rank 1" in str(report.outcomes[1].error)
    assert all(isinstance(outcome.error, RuntimeError) for outcome in report.outcomes)


@pytest.mark.parametrize("name", ["fragments", "async", "rows"])
def test_a_seed_determines_all_events(name: str) -> None:
    trial = draw_trial(SUBJECTS[name], 7, "death")
    first, second = run_trial(trial), run_trial(trial)
    assert first.digest == second.digest
    assert first.digest != run_trial(replace(trial, seed=8)).digest


@pytest.mark.release
def test_a_seed_determines_all_events_in_another_process() -> None:
    code = "from simulated import case; from torchbagua.testing.simulation.trial import run_trial; "
    code += "print(run_trial(case(1000)[1]).digest)"
    path = str(REPOSITORY / "tests")
    runs = [run_python(code, REPOSITORY, PYTHONPATH=path, PYTHONHASHSEED=seed) for seed in ("1", "2")]
    assert {out for _, out, _ in runs} == {run_trial(case(1000)[1]).digest + "\n"}, runs
