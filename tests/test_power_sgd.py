"""PowerSGD: bitwise equal to the oracle in any buckets; NaN, its wire bytes and errors.

Its residuals are in test_error_feedback.py.

The oracle uses torch's matrix products, as the algorithm does: with one thread (conftest.py), on separate tensors.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import oracle
import torchbagua as tb
from pairwise import pairwise
from q_adam_life import ChannelsLast
from ranks import run_ranks
from test_error_feedback import Loop
from torchbagua.collectives.low_rank_mean import MatrixShape, matrix_shape
from training import Branches, OneElement, Run, Tower, Wide, build, flat, train

START_STEP = 1
run_training = partial(train, tells_optimizer=True)


def product(vectors: oracle.Array, matrix: oracle.Array, *, is_transposed: bool) -> oracle.Array:
    operand = torch.tensor(matrix)
    return torch.mm(torch.tensor(vectors), operand.t() if is_transposed else operand).numpy()


def in_bfloat16(x: oracle.Array) -> oracle.Array:
    return torch.from_numpy(x).bfloat16().float().numpy()


def first_factor(seed: str, rank: int, columns: int) -> oracle.Array:
    numbers = np.frombuffer(hashlib.shake_256(seed.encode()).digest(2 * rank * columns), np.int16)
    return ((2 * numbers.astype(np.float32) + 1) / np.float32(65536)).reshape(rank, columns)


def in_memory_order(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    return tensor.permute(order).contiguous()


def check_runs(
    runs: Sequence[Run], model: nn.Module, algorithm: tb.PowerSGDAlgorithm, nodes: Sequence[int] | None = None
) -> int:
    """Compare the averaged gradients with the oracle; return how many means were low-rank."""
    named = dict(model.named_parameters())
    places = {
        name: index for index, name in enumerate(name for name, parameter in named.items() if parameter.requires_grad)
    }
    means: dict[str, oracle.PowerSGD] = {}
    sent = in_bfloat16 if algorithm.compression else lambda x: x
    num_low_rank = 0
    for step, averaged in enumerate(runs[0].averaged):
        for name, gradient in averaged.items():
            assert all(torch.equal(run.averaged[step][name], gradient) for run in runs), f"replicas differ in {name}"
            parameter, dtype = named[name], gradient.dtype
            ordered = [in_memory_order(local, parameter) for local in (run.local[step][name] for run in runs)]
            is_short = dtype in (torch.bfloat16, torch.float16)
            rows = [flat(gradient.float() if is_short else gradient) for gradient in ordered]
            found = flat(in_memory_order(gradient.float() if is_short else gradient, parameter))
            shape = matrix_shape(ordered[0].shape, rows[0].size, algorithm.rank, algorithm.min_rate)
            if rows[0].dtype == np.float64 or step < algorithm.start_step:
                expected = oracle.gradient_allreduce(rows, nodes)
            elif shape is None:
                total = oracle.ordered_sum([sent(row) for row in oracle.node_sums(rows, nodes)])
                expected = sent(total / np.float32(len(rows)))
            else:
                num_low_rank += 1
                if name not in means or not algorithm.warm_start:
                    seed = f"{algorithm.seed} parameter {places[name]}"
                    seed += "" if algorithm.warm_start else f" {step + 1}"
                    first = first_factor(seed, shape.rank, shape.columns)
                    if name in means:
                        means[name].first = first
                    else:
                        means[name] = oracle.PowerSGD(first, product, nodes, sent, keeps_factor=algorithm.warm_start)
                expected = means[name]([row.reshape(shape.rows, shape.columns) for row in rows]).ravel()
            if is_short:
                expected = flat(torch.from_numpy(expected).to(dtype).float())
            np.testing.assert_array_equal(found, expected, err_msg=f"{name}, step {step}")
    return num_low_rank


@pairwise(
    ranks=[(2, None), (4, [0, 0, 1, 1]), (3, [0, 0, 1])],
    bucket_cap_mb=[25, 0.01],
    arguments=[{}, {"rank": 1, "compression": "bfloat16"}, {"warm_start": False}, {"rank": 7, "min_rate": 1.2}],
    options=[{}, {"gradient_as_bucket_view": True}, {"static_graph": True}],
)
def test_the_oracle(
    ranks: tuple[int, list[int] | None], bucket_cap_mb: float, arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    model, (size, nodes) = build(Tower), ranks
    algorithm = tb.PowerSGDAlgorithm(**{"rank": 3, "start_step": START_STEP, **arguments})
    runs = run_ranks(
        size, lambda group: run_training(group, model, algorithm, nodes=nodes, bucket_cap_mb=bucket_cap_mb, **options)
    )
    assert check_runs(runs, model, algorithm, nodes) > 0


@pytest.mark.parametrize(("rows", "expected"), [(39, None), (40, None), (41, MatrixShape(41, 40, 4))])
def test_matrices_whose_factors_are_not_much_smaller_have_none(rows: int, expected: MatrixShape | None) -> None:
    assert matrix_shape((rows, 8, 5), 40 * rows, rank=4, min_rate=5) == expected


def mixed() -> nn.Module:
    return Tower((10, 101, 47, 20, 1), dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float32))


@pytest.mark.parametrize("make_model", [Branches, OneElement, mixed, Wide, ChannelsLast])
@pytest.mark.filterwarnings("ignore:torchbagua. PowerSGDAlgorithmImpl sends")
def test_the_oracle_for_other_models(make_model: Callable[[], nn.Module]) -> None:
    """Models with parts that some ranks or no rank uses, with one element, and with other dtypes and memory orders."""
    model = build(make_model)
    unused = {"find_unused_parameters": True} if make_model is Branches else {}
    # Its only bucket has no matrix.
    compression = "bfloat16" if make_model is OneElement else None
    algorithm = tb.PowerSGDAlgorithm(rank=2, start_step=START_STEP, min_rate=1.5, compression=compression)
    # The learning rate of `train` is too high for ChannelsLast, which overflows in its fourth step.
    runs = run_ranks(2, lambda group: run_training(group, model, algorithm, num_steps=3, **unused))
    assert check_runs(runs, model, algorithm) > 0 or make_model is OneElement


@pytest.mark.usefixtures("where_commits_are_decided")
@pytest.mark.parametrize(("bad", "good"), [(torch.nan, 0.0), (torch.inf, 0.5)])
def test_non_finite_gradients_do_not_enter_the_state_even_if_the_optimizer_steps(bad: float, good: float) -> None:
    """The loop replaces NaN and Inf before the step, as some loops do; all ranks see those of a single rank."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, tb.PowerSGDAlgorithm(rank=2, start_step=0), model, lr=0.1)
        with loop.attachment:
            loop.step()
            before = loop.kept()

            def spoil(gradient: torch.Tensor) -> torch.Tensor:
                spoiled = gradient.clone()
                spoiled[0, 3] = bad
                return spoiled

            if loop.rank == 1:
                handle = loop.named["layers.1.weight"].register_hook(spoil)
            loop.ddp.zero_grad()
            loop.backward()
            if loop.rank == 1:
                handle.remove()
            assert loop.named["layers.1.weight"].grad.isnan().all()
            assert loop.named["layers.0.weight"].grad.isfinite().all()
            loop.named["layers.1.weight"].grad.fill_(good)
            loop.update()
            after = loop.kept()
            for kind in before:
                assert torch.equal(after[kind]["layers.1.weight"], before[kind]["layers.1.weight"])
                assert not torch.equal(after[kind]["layers.0.weight"], before[kind]["layers.0.weight"])
            loop.step()
            assert all(weight.isfinite().all() for weight in loop.named.values())

    run_ranks(2, body)


def test_a_matrix_starts_again_after_zero_gradients() -> None:
    """Its factor became zero, and would stay zero; a gradient of lower rank leaves vectors out."""

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, tb.PowerSGDAlgorithm(rank=4, start_step=0), nn.Linear(40, 50, bias=False), lr=0.1)
        weight = loop.ddp.module.weight
        with loop.attachment:

            def step(gradient: torch.Tensor) -> torch.Tensor:
                loop.ddp.zero_grad()
                (loop.ddp(torch.eye(40)).t() * gradient).sum().backward()
                loop.update()
                return weight.grad

            for _ in range(2):
                assert not step(torch.zeros(50, 40)).any()
            of_rank_2 = torch.randn(50, 2, generator=loop.data) @ torch.randn(2, 40, generator=loop.data)
            group_mean = of_rank_2.clone()
            dist.all_reduce(group_mean, group=group)
            for _ in range(3):
                averaged = step(of_rank_2)
            # The mean has rank 4, as the factors have: after a few steps they reproduce it, up to float32 rounding.
            state = loop.kept()
            assert state["factor"]["weight"].any(1).all()
            assert (averaged - group_mean / 2).norm() <= 1e-4 * group_mean.norm()

    run_ranks(2, body)


@pytest.mark.parametrize("compression", [None, "bfloat16"])
def test_wire_bytes(compression: str | None) -> None:
    """A rank sends 2 (n-1)/n of r (rows + columns) elements per matrix, and of all elements of other parameters.

    A rank sends at most four messages per bucket.
    """
    model = build(lambda: Tower((10, 300, 40, 1)))

    def body(group: dist.ProcessGroup) -> list[tb.observe.CommEvent]:
        recorder = tb.observe.Recorder()
        algorithm = tb.PowerSGDAlgorithm(rank=2, start_step=1, compression=compression)
        loop = Loop(group, algorithm, model, lr=0.1, observers=[recorder], bucket_cap_mb=0.01)
        with loop.attachment:
            for _ in range(3):
                loop.step()
        return [e for e in recorder.events if e.step == 2 and e.phase == "send" and e.bucket.startswith("gradient")]

    num_elements = 2 * (300 + 10) + 2 * (40 + 300) + 300 + 40 + 40 + 1  # matrices, biases, and the last weight
    expected = num_elements * (4 if compression is None else 2)
    for events in run_ranks(2, body):
        assert 0 < len(events) <= 4 * len({event.bucket for event in events})
        total = sum(event.wire_bytes for event in events)
        # A chunk that Cast encodes is padded to 32 bytes. Chunks of the two ranks may differ by a block.
        assert abs(total - expected) <= 32 * len(events)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rank": 0}, ValueError, "rank must be at least 1, got 0"),
        ({"rank": 2.0}, TypeError, "rank must be an integer, got 2.0"),
        ({"start_step": -1}, ValueError, "start_step must be at least 0, got -1"),
        ({"min_rate": 0}, ValueError, "min_rate must be positive and finite, got 0"),
        ({"min_rate": "2"}, TypeError, "min_rate must be a number, got '2'"),
        ({"warm_start": 1}, TypeError, "warm_start must be True or False, got 1"),
        ({"compression": "float16"}, ValueError, "compression must be None or 'bfloat16', got 'float16'"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^PowerSGDAlgorithm: {message}$"):
        tb.PowerSGDAlgorithm(**arguments)


def test_ranks_that_disagree_raise() -> None:
    """On the arguments, or on the backward passes in the state that they load."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match="PowerSGDAlgorithm's argument rank"):
            Loop(group, tb.PowerSGDAlgorithm(rank=2 + group.rank()), model)
        loop = Loop(group, tb.PowerSGDAlgorithm(rank=2), model)
        state = loop.attachment.state_dict()
        with loop.attachment:
            num_steps = state["impl"].pop("num_steps")
            with pytest.raises(ValueError, match=r"must have the keys \['num_backward_passes', 'num_steps'\]"):
                loop.attachment.load_state_dict(state)
            state["impl"] |= {"num_steps": num_steps, "num_backward_passes": group.rank()}
            with pytest.raises(tb.CommunicationError, match="backward passes so far"):
                loop.attachment.load_state_dict(state)

    run_ranks(2, body)
