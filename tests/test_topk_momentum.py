"""TopKAlgorithm's momentum and warm-up: bitwise equal to the oracle, equal in sum to SGD, and the refused settings.

Resuming, and a rank without data, are in test_bytegrad_feedback.py.
"""

import math
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import oracle
import torchbagua as tb
from pairwise import pairwise
from ranks import run_ranks
from test_bytegrad_feedback import Loop, equal, tensors, train_told
from training import Branches, Tower, build, flat

RATIO, MOMENTUM = 0.02, 0.75


@pairwise(
    ranks=[(2, None), (4, None), (4, [0, 0, 1, 1]), (3, [0, 0, 1])],
    options=[{}, {"bucket_cap_mb": 0.01}, {"num_micro_batches": 2}],
    momentum=[{}, {"momentum": MOMENTUM}, {"momentum": MOMENTUM, "momentum_masking": False}],
    warmup_steps=[0, 7],
)
def test_the_oracle(
    ranks: tuple[int, list[int] | None], options: dict[str, Any], momentum: dict[str, Any], warmup_steps: int
) -> None:
    model, (size, nodes) = build(Tower), ranks
    algorithm = tb.TopKAlgorithm(RATIO, block=512, warmup_steps=warmup_steps, **momentum)
    runs = run_ranks(size, lambda group: train_told(group, model, algorithm, nodes=nodes, num_steps=7, **options))
    means: dict[str, oracle.TwoPhaseResiduals] = {}
    for step, averaged in enumerate(runs[0].averaged):
        stage = min(4 * step // warmup_steps, 4) if warmup_steps else 4
        kept = math.ceil(512 * 0.25 * (RATIO / 0.25) ** (stage / 4))
        for name, gradient in averaged.items():
            assert all(torch.equal(run.averaged[step][name], gradient) for run in runs), f"replicas differ in {name}"
            rows = [flat(run.local[step][name]) for run in runs]
            if name not in means:
                means[name] = oracle.TwoPhaseResiduals(lambda row: row, nodes, algorithm.momentum)
                means[name].forgets = algorithm.momentum_masking
            coding = partial(oracle.quantise, segments=[rows[0].size], block=512, coded=oracle.largest_of(512, kept))
            means[name].quantise = coding
            np.testing.assert_array_equal(flat(gradient), means[name](rows), err_msg=f"{name}, step {step}")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("ratio", "selection"), [(0.02, "top"), (0.02, "block"), (1.0, "top")])
def test_sent_values_plus_residuals_equal_sgd_with_momentum(size: int, ratio: float, selection: str) -> None:
    """Without masking, up to float32 rounding, for any ratio."""
    model = build(Tower)
    algorithm = tb.TopKAlgorithm(ratio, selection=selection, momentum=MOMENTUM, momentum_masking=False)

    def body(group: dist.ProcessGroup) -> tuple[dict[str, torch.Tensor], ...]:
        loop = Loop(group, model, algorithm=algorithm)
        named = dict(loop.ddp.module.named_parameters())
        velocity, moved, size_of_moves, received = (
            {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in named.items()} for _ in range(4)
        )

        def add(gradient: torch.Tensor, name: str) -> None:
            velocity[name] += gradient

        for name, parameter in named.items():
            parameter.register_hook(partial(add, name=name))
        with loop.attachment:
            for _ in range(8):
                for values in velocity.values():
                    values *= MOMENTUM
                loop.zero_grad()
                loop.backward()
                for name, parameter in named.items():
                    moved[name] += velocity[name]
                    size_of_moves[name] += velocity[name].abs()
                    received[name] += parameter.grad
                loop.optimizers[0].step()
            residuals = loop.residuals()
        return moved, received, residuals["sent"], residuals["mean"], size_of_moves

    runs = run_ranks(size, body)
    for name, received in runs[0][1].items():
        moved = sum(run[0][name] for run in runs) / size
        residual = sum(run[2][name] / size + run[3][name] for run in runs)
        assert (received + residual - moved).norm() < 1e-6 * max(run[4][name].norm() for run in runs), name
        if ratio == 1.0:  # then the residual is the rounding to 8 bits
            assert residual.abs().max() <= 0.02 * max(run[0][name].abs().max() for run in runs)


@pytest.mark.parametrize(("size", "nodes"), [(2, None), (3, [0, 0, 1])])
def test_skipped_steps_and_unused_parameters_leave_no_trace(size: int, nodes: list[int] | None) -> None:
    model = build(Branches)
    algorithm = tb.TopKAlgorithm(momentum=0.9)

    def body(group: dist.ProcessGroup) -> bool:
        loop = Loop(group, model, algorithm=algorithm, nodes=nodes, scale=1024.0, find_unused_parameters=True)
        with loop.attachment:
            for _ in range(3):
                loop.step()
            before = loop.weights(), loop.residuals()
            loop.step(factor=torch.inf if group.rank() == 1 else 1.0)
            assert equal(loop.weights(), before[0])
            assert equal(tensors(loop.residuals()), tensors(before[1]))
            loop.step(choice=1)
            after = loop.residuals()["velocity"]
        assert torch.equal(after["left.weight"], before[1]["velocity"]["left.weight"])
        assert all(value.isfinite().all() for value in after.values())
        return not torch.equal(after["stem.weight"], before[1]["velocity"]["stem.weight"])

    assert any(run_ranks(size, body))


@pytest.mark.parametrize(
    ("make_optimizer", "message"),
    [
        (partial(torch.optim.Adam, lr=0.1), "the optimizer must be torch.optim.SGD, got Adam"),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.5), "SGD's momentum must be 0, .*got 0.5"),
    ],
)
def test_other_optimizers_are_refused(make_optimizer: Any, message: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
        optimizer = make_optimizer(ddp.parameters())
        with pytest.raises(ValueError, match=f"^TopKAlgorithm: with momentum=0.9 {message}"):
            tb.attach(ddp, optimizer, tb.TopKAlgorithm(momentum=0.9))
        with pytest.warns(RuntimeWarning, match="TopKAlgorithm with"):  # without a momentum, only a warning
            tb.attach(ddp, optimizer, tb.TopKAlgorithm()).detach()

    run_ranks(1, body)


def test_a_momentum_that_a_scheduler_gives_sgd_is_refused() -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with tb.attach(ddp, optimizer, tb.TopKAlgorithm(momentum=0.9)):
            ddp(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.param_groups[0]["momentum"] = 0.5
            with pytest.raises(ValueError, match=r"SGD's momentum must be 0, .*got 0\.5"):
                ddp(torch.ones(1, 3)).sum().backward()

    run_ranks(1, body)


def test_a_second_synchronized_backward_before_the_step_is_refused() -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> str:
        loop = Loop(group, model, algorithm=tb.TopKAlgorithm(momentum=0.9))
        with loop.attachment:
            for _ in range(3):
                loop.step()
                loop.zero_grad()
                loop.backward()  # without effect: it is cleared
            loop.optimizers[0].step()
            loop.zero_grad()
            loop.backward()
            with pytest.raises(RuntimeError) as raised:
                loop.backward()
        return str(raised.value)

    # A slower rank may first notice that the other one has closed its groups.
    refusal = r"one synchronized backward pass.* under ddp\.no_sync|by peer"
    errors = run_ranks(2, body)
    assert all(re.search(refusal, error) for error in errors)
    assert any("under ddp.no_sync" in error for error in errors)


def test_parameters_that_would_have_no_momentum_are_refused() -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(torch.nn.Linear(3, 2).double(), process_group=group)
        with pytest.raises(ValueError, match=r"^TopKAlgorithm: with momentum=0\.9 .* got torch\.float64 for weight"):
            tb.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), tb.TopKAlgorithm(momentum=0.9))

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"momentum": 1.0}, "momentum must be None or a number above 0 and below 1, got 1.0"),
        ({"momentum": -1}, "momentum must be None or a number above 0 and below 1, got -1"),
        ({"momentum": "0.9"}, "momentum must be None or a number above 0 and below 1, got '0.9'"),
        ({"momentum_masking": 1}, "momentum_masking must be True or False, got 1"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"warmup_steps": 1.5}, "warmup_steps must be an integer, got 1.5"),
        ({"warmup_steps": 10, "ratio": 0.25}, "warmup_steps must be 0 with a ratio of 0.25 or more, .*ratio=0.25"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^TopKAlgorithm: {message}"):
        tb.TopKAlgorithm(**arguments)
