"""DDP as users run it: replicas stay bitwise identical, and averages are bitwise equal to the one-process oracle's."""

import dataclasses
import inspect
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oracle
import torchbagua as tb
from ranks import run_ranks
from torchbagua.algorithms.base import get
from training import Branches, OneElement, Run, Tower, build, flat, train

ALGORITHMS = [tb.ByteGradAlgorithm(), tb.GradientAllReduceAlgorithm(in_rank_order=True)]
IN_4_BITS = tb.CompressedAllReduceAlgorithm()


def in_numpy(tensor: torch.Tensor) -> oracle.Array:
    """Return all elements, 16-bit floats in float32: numpy has no bfloat16, and is not suited to float16."""
    return flat(tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor)


def expected_average(
    algorithm: tb.Algorithm, gradients: Sequence[torch.Tensor], nodes: Sequence[int] | None
) -> torch.Tensor:
    """Return the oracle's average of a parameter's local gradients, flat and in the parameter's dtype."""
    rows = [in_numpy(gradient) for gradient in gradients]
    if isinstance(algorithm, tb.ByteGradAlgorithm):
        block = algorithm.block
        assert block is not None
        average = oracle.bytegrad(rows, [rows[0].size], nodes, block)
    elif isinstance(algorithm, tb.CompressedAllReduceAlgorithm):
        average = oracle.bytegrad(rows, [rows[0].size], nodes, 128, oracle.quantise_block_4_bits)
    else:
        average = oracle.gradient_allreduce(rows, nodes)
    return torch.from_numpy(average).to(gradients[0].dtype.to_real())


def check_runs(runs: Sequence[Run], algorithm: tb.Algorithm, nodes: Sequence[int] | None = None) -> None:
    """Check that replicas are equal on all ranks, and every average is bitwise equal to the oracle's."""
    for run in runs[1:]:
        for name, weight in runs[0].weights.items():
            assert torch.equal(weight, run.weights[name]), f"replicas differ in {name}"
    num_compared = 0
    for step in range(len(runs[0].local)):
        for name, averaged in runs[0].averaged[step].items():
            gradients = [run.local[step][name] for run in runs]
            expected = gradients[0] if len(runs) == 1 else expected_average(algorithm, gradients, nodes)
            np.testing.assert_array_equal(in_numpy(averaged), in_numpy(expected), f"step {step}, {name}")
            num_compared += 1
    assert num_compared >= len(runs[0].local)


SCENARIOS: dict[str, tuple[Any, dict[str, Any]]] = {
    "one bucket": (Tower, {}),
    "several buckets": (Tower, {"bucket_cap_mb": 0.01}),
    "accumulation": (Tower, {"bucket_cap_mb": 0.01, "num_micro_batches": 3}),
    "unused parameters": (Branches, {"find_unused_parameters": True, "bucket_cap_mb": 0.005}),
    "static graph": (Tower, {"static_graph": True, "bucket_cap_mb": 0.01}),
    "bucket views": (Tower, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}),
    "mixed dtypes": (lambda: Tower(dtypes=(torch.float32, torch.bfloat16, torch.float16)), {"bucket_cap_mb": 0.01}),
    "one element": (OneElement, {}),
}


BYTEGRAD, IN_RANK_ORDER = ALGORITHMS


def name_of(value: object) -> str:
    return type(value).__name__ if isinstance(value, tb.Algorithm) else str(value)


@pytest.mark.parametrize(
    ("scenario", "algorithm"),
    [*product(SCENARIOS, [BYTEGRAD]), *product(["several buckets", "mixed dtypes"], [IN_RANK_ORDER])],
    ids=name_of,
)
def test_scenarios(device: torch.device, scenario: str, algorithm: tb.Algorithm) -> None:
    make_model, options = SCENARIOS[scenario]
    model = build(make_model).to(device)
    options = {"num_steps": 3, **options}
    check_runs(run_ranks(3, lambda group: train(group, model, algorithm, **options), device=device), algorithm)


@pytest.mark.parametrize(
    ("size", "algorithm"),
    [
        *product([1, 2, 5, 8], [BYTEGRAD]),
        *product([1, 4], [IN_RANK_ORDER]),
        (2, IN_4_BITS),
        (3, tb.ByteGradAlgorithm(block=8)),
    ],
    ids=name_of,
)
def test_numbers_of_ranks(size: int, algorithm: tb.Algorithm) -> None:
    model = build(Tower)
    options = {"bucket_cap_mb": 0.01, "num_steps": 2}  # DDP rebuilds its buckets after the first step
    check_runs(run_ranks(size, lambda group: train(group, model, algorithm, **options)), algorithm)


@pytest.mark.parametrize(
    ("nodes", "algorithm", "hierarchical"),
    [
        ([0, 1, 0, 1], BYTEGRAD, True),
        ([0, 0, 0, 1, 1], BYTEGRAD, True),
        ([0, 0, 1], IN_RANK_ORDER, True),
        ([0, 0, 1, 1, 2, 2], IN_RANK_ORDER, True),
        ([0, 0, 1, 1], IN_4_BITS, True),
        ([0, 0, 1, 1], BYTEGRAD, False),
        ([0, 0, 1, 1], IN_RANK_ORDER, False),
    ],
    ids=name_of,
)
def test_nodes(device: torch.device, nodes: list[int], algorithm: tb.Algorithm, hierarchical: bool) -> None:
    model = build(lambda: Tower(dtypes=(torch.float32, torch.bfloat16, torch.float16))).to(device)
    of_nodes = dataclasses.replace(algorithm, hierarchical=hierarchical)

    def body(group: torch.distributed.ProcessGroup) -> Run:
        return train(group, model, of_nodes, nodes=nodes, num_steps=2, bucket_cap_mb=0.01)

    check_runs(run_ranks(len(nodes), body, device=device), algorithm, nodes if hierarchical else None)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_sum_instead_of_mean(algorithm: tb.Algorithm) -> None:
    """On two ranks a sum is exactly twice the mean, in both codecs."""
    model = build(Tower)
    summed = dataclasses.replace(algorithm, average=False)
    runs = run_ranks(2, lambda group: train(group, model, summed, num_steps=1))
    for name, gradient in runs[0].averaged[0].items():
        expected = 2 * expected_average(algorithm, [run.local[0][name] for run in runs], None)
        assert torch.equal(gradient.flatten(), expected), name


def test_one_range_per_chunk_keeps_replicas_equal() -> None:
    model, algorithm = build(Tower), tb.ByteGradAlgorithm(block=None)
    runs = run_ranks(3, lambda group: train(group, model, algorithm, num_steps=1))
    for name, averaged in runs[0].averaged[0].items():
        gradients = torch.stack([run.local[0][name] for run in runs])
        assert all(torch.equal(run.averaged[0][name], averaged) for run in runs)
        # Two quantizations, each off by half a step; no chunk's range exceeds the range of all gradients.
        whole = torch.cat([gradient.flatten() for run in runs for gradient in run.local[0].values()])
        bound = 1.01 * (whole.max() - whole.min()) / 255
        assert (averaged - gradients.mean(0)).abs().max() <= bound


def test_means_become_gradients_while_the_last_bucket_is_in_flight() -> None:
    """DDP copies the means of earlier buckets meanwhile, so the copies of all but the last cost no time."""

    def body(group: dist.ProcessGroup) -> bool:
        first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        ddp = DistributedDataParallel(nn.Sequential(first, last), process_group=group, bucket_cap_mb=1e-5)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        were_copied = list[bool]()
        with tb.attach(ddp, optimizer, MarkedMean(first.weight, last.weight, were_copied)):
            for _ in range(3):  # DDP makes one bucket in the first backward, and two later
                optimizer.zero_grad()
                ddp(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        return were_copied == [True, True]

    assert run_ranks(1, body) == [True]


@dataclasses.dataclass(frozen=True)
class MarkedMean(tb.Algorithm):
    """Averages gradients to 7; the bucket of `first` waits until `last`, of an earlier bucket, has this gradient."""

    first: torch.Tensor = dataclasses.field(repr=False)
    last: torch.Tensor = dataclasses.field(repr=False)
    were_copied: list[bool]

    def make_impl(self, runner: tb.extend.GradientRunner) -> tb.AlgorithmImpl:
        return MarkedMeanImpl(runner)


class MarkedMeanImpl(tb.AlgorithmImpl):
    algorithm: MarkedMean

    def init_operations(self, module: nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
        bucket.append_python_op(self.mark)

    def mark(self, bucket: tb.extend.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
        bucket.flat.fill_(7)
        if [tensor.name for tensor in bucket.tensors] == ["0.weight"]:
            deadline_s = time.monotonic() + 5
            while not (is_copied := bool((self.algorithm.last.grad == 7).all())) and time.monotonic() < deadline_s:
                time.sleep(0.001)
            self.algorithm.were_copied.append(is_copied)


def test_nodes_are_respected_by_default() -> None:
    """Except where the backend's all-reduce handles nodes."""
    functions = [get(name) for name in tb.available_algorithms()]
    for cls in (tb.extend.BaguaBucket, tb.BaguaProcessGroup):
        functions += [function for _, function in inspect.getmembers(cls, inspect.isfunction)]
    parameters = {function.__qualname__: inspect.signature(function).parameters for function in functions}
    defaults = {name: own["hierarchical"].default for name, own in parameters.items() if "hierarchical" in own}
    assert "BaguaProcessGroup.all_reduce" in defaults
    assert not defaults.pop("GradientAllReduceAlgorithm")
    assert set(defaults.values()) == {True}, defaults
