"""Residuals that a load clears, or that a failure interrupts; test_error_feedback.py compares whole trainings."""

from contextlib import suppress

import torch

import torchbagua as tb
from devices import CPU
from torchbagua.codecs import MinMaxUInt8, TensorSpec
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.mean import centralized_mean
from torchbagua.collectives.residuals import Residual
from torchbagua.testing.simulation import Rank, Simulation


def test_a_residual_that_a_load_clears_stays_zero_when_the_round_in_flight_commits() -> None:
    residual = Residual(slice(0, 4), CPU)
    residual.stage(slice(0, 4)).fill_(1)
    residual.clear(slice(1, 3))
    residual.commit()
    assert residual.values.tolist() == [1, 0, 0, 1]


def test_a_failure_while_residuals_are_redistributed_changes_none() -> None:
    """They are saved, or redistributed again, after it. Each operation of rank 0 fails in turn."""
    whole = {name: torch.arange(8.0) for name in ("sent", "mean")}
    spec = TensorSpec((8,), torch.float32, CPU, "x")

    def body(rank: Rank) -> bool:
        residuals = TwoPhaseResiduals(CPU, {name: values.clone() for name, values in whole.items()})
        group = rank.group()
        with suppress(tb.CommunicationError):
            centralized_mean(group, MinMaxUInt8(), spec, hierarchical=False, residuals=residuals)(torch.ones(8))
        group.close()
        waits = residuals.initial is not None
        assert not waits or all(map(torch.equal, residuals.expand(slice(0, 8)), whole.values()))
        return waits

    waited = []
    for number in range(1, 30):
        simulation = Simulation(2, seed=0)
        simulation.network.failing[0] = number
        outcome = simulation.run(body)[0]
        assert outcome.error is None
        waited.append(outcome.value)
    assert waited[0]
    assert not waited[-1]
