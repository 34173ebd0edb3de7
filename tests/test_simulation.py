"""Training in a simulated network: the bits of gloo, the same events for the same seed, and faults."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from ranks import run_ranks
from simulate import case
from simulated import ALGORITHMS, Fault, run_training, train
from source_tree import REPOSITORY, run_python
from torchbagua import _concurrency
from torchbagua.simulation.run import Rank, Simulation
from torchbagua.simulation.scheduler import Deadlock
from transports import group_like_the_oracle

NO_FAULT = Fault("none", 0, 0, 0, 0)
SAMPLE = 60


class GlooRank(Rank):
    """A rank over gloo, as a thread of this process."""

    def group(self, nodes: list[int] | None = None) -> tb.BaguaProcessGroup:
        return group_like_the_oracle(self.torch_group)

    def compute(self, seconds: float) -> None:
        pass


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "async"])
def test_results_are_those_of_gloo(algorithm: str) -> None:
    simulation = Simulation(4, seed=1)

    def over_gloo(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        return train(GlooRank(group.rank(), group.size(), simulation, group), algorithm, NO_FAULT)

    simulated = simulation.run(lambda rank: train(rank, algorithm, NO_FAULT))

    for own, expected in zip(simulated, run_ranks(4, over_gloo), strict=True):
        assert own.value is not None, own.error
        for name, weight in expected.items():
            assert torch.equal(own.value[name], weight), name


@pytest.mark.parametrize("seed", range(SAMPLE))
def test_faults_end_with_an_error_that_names_ranks(seed: int) -> None:
    algorithm, kind, size = case(seed)
    assert run_training(algorithm, kind, size, seed).violations == []


@pytest.mark.slow
def test_a_seed_determines_all_events_in_another_process() -> None:
    code = "from simulated import run_training; print(run_training('async', 'death', 4, 3).digest)"
    folder, tests = REPOSITORY, str(REPOSITORY / "tests")
    runs = [run_python(code, folder, PYTHONPATH=tests, PYTHONHASHSEED=seed) for seed in ("1", "2")]
    assert {out for _, out, _ in runs} == {run_training("async", "death", 4, 3).digest + "\n"}, runs


def test_time_is_virtual() -> None:
    def body(rank: Rank) -> float:
        start_s = _concurrency.monotonic()
        rank.compute(3600)
        return _concurrency.monotonic() - start_s

    simulation = Simulation(2, seed=0, limit_s=4000)
    assert [outcome.value for outcome in simulation.run(body)] == [3600, 3600]


def test_a_deadlock_has_the_stack_of_every_thread() -> None:
    locks = {}

    def wait_for_the_other(rank: Rank) -> None:
        locks[rank.number] = _concurrency.Lock()
        with locks[rank.number]:
            rank.compute(1)
            locks[1 - rank.number].acquire()

    with pytest.raises(Deadlock, match="for ever") as raised:
        Simulation(2, seed=0).run(wait_for_the_other)
    assert str(raised.value).count("locks[1 - rank.number].acquire()") == 2
    assert "rank 1 of rank 1" in str(raised.value)


def test_a_loop_of_waits_is_reported() -> None:
    def wait_again_and_again(rank: Rank) -> None:
        while True:
            rank.compute(1)

    with pytest.raises(Deadlock, match="after 50 s"):
        Simulation(1, seed=0, limit_s=50).run(wait_again_and_again)


def test_a_rank_that_dies_while_settings_are_compared_is_named() -> None:
    timeout = timedelta(seconds=5)
    simulation = Simulation(3, seed=0, timeout=timeout)
    simulation.kill_at(5e-4, 0)  # rank 0 has introduced itself, and has not decided

    outcomes = simulation.run(lambda rank: rank.group())

    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, TimeoutError)
        assert "waiting for ranks [0] of 3 to finish comparing settings: they have died" in str(outcome.error)
