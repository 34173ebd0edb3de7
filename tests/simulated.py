"""The algorithms that are trained in simulations."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

import torchbagua as tb
from torchbagua.testing.simulation.faults import FAULTS
from torchbagua.testing.simulation.program import train_sharded
from torchbagua.testing.simulation.trial import Subject, Trial, draw_trial


def q_adam(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return tb.QAdamOptimizer(parameters, lr=1e-3, warmup_steps=2)


def one_bit(optimizer: torch.optim.Optimizer) -> tb.Algorithm:
    assert isinstance(optimizer, tb.QAdamOptimizer)
    return tb.QAdamAlgorithm(optimizer, compression="sign1bit", error_feedback=True)


# Sharded modules need another GradScaler, and have no attachment.
FAULTS_OF_ROWS = tuple(kind for kind in FAULTS if kind not in ("overflow", "other call", "other state"))

SUBJECTS = {
    "gradient_allreduce": Subject(lambda _: tb.GradientAllReduceAlgorithm(in_rank_order=True)),
    "bytegrad": Subject(lambda _: tb.ByteGradAlgorithm()),
    "bytegrad_feedback": Subject(lambda _: tb.ByteGradAlgorithm(error_feedback=True)),
    "4_bits": Subject(lambda _: tb.CompressedAllReduceAlgorithm()),
    "powersgd": Subject(lambda _: tb.PowerSGDAlgorithm(rank=1, start_step=1, min_rate=1)),
    "topk": Subject(lambda _: tb.TopKAlgorithm(ratio=0.25)),
    "qadam": Subject(tb.QAdamAlgorithm, q_adam),  # type: ignore[arg-type]
    "qadam_1_bit": Subject(one_bit, q_adam),
    "rows": Subject(lambda _: tb.ByteGradAlgorithm(), train=train_sharded, faults=FAULTS_OF_ROWS),
    "rows_4_bits": Subject(lambda _: tb.CompressedAllReduceAlgorithm(), train=train_sharded, faults=FAULTS_OF_ROWS),
    "all": Subject(lambda _: tb.DecentralizedAlgorithm()),
    "shift_one": Subject(lambda _: tb.DecentralizedAlgorithm(peer_selection_mode="shift_one"), sizes=(2, 4)),
    "low_precision": Subject(lambda _: tb.LowPrecisionDecentralizedAlgorithm()),
    "local_sgd": Subject(lambda _: tb.LocalSGDAlgorithm(2)),
    "diloco": Subject(lambda _: tb.DiLoCoAlgorithm(2)),
    "fragments": Subject(lambda _: tb.DiLoCoAlgorithm(4, fragments=2, delay=1)),
    "async": Subject(lambda _: tb.AsyncModelAverageAlgorithm(sync_interval_ms=5, warmup_steps=1)),
}
"""By the names of rows in tables."""


def case(seed: int) -> tuple[str, Trial]:
    """Return the trial of a seed, and the name of its subject.

    Their numbers have no common divisor, so that as many consecutive seeds as there are pairs have each pair once.
    """
    names = list(SUBJECTS)
    assert math.gcd(len(names), len(FAULTS)) == 1
    name, kind = names[seed % len(names)], FAULTS[seed % len(FAULTS)]
    return name, draw_trial(SUBJECTS[name], seed, kind)


def without_fault(name: str, seed: int, size: int | None = None) -> Trial:
    """Return a trial of a subject without a fault, of `size` ranks on one node each."""
    trial = draw_trial(SUBJECTS[name], seed, "none")
    if size is None:
        return trial
    return replace(trial, cluster=replace(trial.cluster, nodes=tuple(range(size))))
