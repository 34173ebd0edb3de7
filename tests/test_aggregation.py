"""torchbagua.compat.mlbench: mlbench's aggregations, with threads as ranks."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchbagua as tb
from aggregation_checks import (
    check_bad_denominators,
    check_every_kind_of_parameter,
    check_reference_values,
    constant_model,
)
from ranks import TIMEOUT, run_ranks, without_default_group
from torchbagua.compat.mlbench import (
    Aggregation,
    AllReduceAggregation,
    DecentralizedAggregation,
    PowerAggregation,
    SparsifiedAggregation,
)

BY_LAYER = [False, True]
Make = Callable[[dist.ProcessGroup], Aggregation]


def all_reduce(group: dist.ProcessGroup, **options: Any) -> AllReduceAggregation:
    return AllReduceAggregation(group.size(), process_group=group, **options)


def ring(group: dist.ProcessGroup, **options: Any) -> DecentralizedAggregation:
    rank, size = group.rank(), group.size()
    neighbors = sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
    return DecentralizedAggregation(rank, neighbors, process_group=group, **options)


def test_reference_values_of_all_reduce() -> None:
    def body(group: dist.ProcessGroup) -> None:
        check_reference_values(group.rank(), lambda **options: all_reduce(group, **options))

    run_ranks(2, body)


def path(group: dist.ProcessGroup) -> DecentralizedAggregation:
    return DecentralizedAggregation(group.rank(), [[1], [0, 2], [1]][group.rank()], process_group=group)


def weighted_ring(group: dist.ProcessGroup) -> DecentralizedAggregation:
    return ring(group, weights={(group.rank() - 1) % 3: 0.25, (group.rank() + 1) % 3: 0.125})


@pytest.mark.parametrize(
    ("make", "size", "expected"),
    [
        (ring, 2, [1.5, 1.5]),
        (path, 3, [1.5, 2.0, 2.5]),
        (weighted_ring, 3, [0.625 + 0.75 + 0.25, 1.25 + 0.25 + 0.375, 1.875 + 0.5 + 0.125]),
    ],
)
def test_reference_values_of_neighbours(make: Make, size: int, expected: list[float]) -> None:
    def body(group: dist.ProcessGroup) -> float:
        values = set()
        with make(group) as aggregation:
            for by_layer in BY_LAYER:
                model = constant_model(group.rank())
                aggregation.agg_model(by_layer)(model, "avg_world")
                aggregation.agg_grad(by_layer)(model, "avg_world")
                values |= {model.weight[0, 0].item(), model.weight.grad[0, 0].item()}
        (value,) = values
        return value

    assert run_ranks(size, body) == expected


@pytest.mark.parametrize("make", [all_reduce, ring])
def test_every_kind_of_parameter(device: torch.device, make: Make) -> None:
    def body(group: dist.ProcessGroup) -> None:
        with make(group) as aggregation:
            for by_layer in BY_LAYER:
                check_every_kind_of_parameter(group.rank(), 3, aggregation, by_layer=by_layer, device=device)

    run_ranks(3, body, device=device)


def test_a_subclass_that_overrides_only_agg() -> None:
    class Largest(Aggregation):
        """The maximum over a group; `data` has the shape of a layer."""

        def _agg(self, data: torch.Tensor, op: str, denom: Any = None) -> torch.Tensor:
            assert (op, denom, data.dim()) in (("largest", 3, 1), ("largest", 3, 2))
            return self.group.all_gather(data).amax(0)

    def body(group: dist.ProcessGroup) -> list[float]:
        model = constant_model(group.rank())
        with Largest(process_group=group) as aggregation:
            aggregation.agg_grad()(model, "largest", 3)
            aggregation.agg_model(by_layer=True)(model, "largest", denom=3)
        return [*model.weight.grad.flatten().tolist(), *model.weight.flatten().tolist()]

    assert run_ranks(2, body) == [[2.0, 4.0, 6.0, 8.0] * 2] * 2

    class Nothing(Aggregation):
        def _agg(self, data: torch.Tensor, op: str, denom: Any = None) -> Any:
            return None

    with pytest.raises(TypeError, match=r"Nothing\._agg must return a tensor of 4 elements"):
        Nothing().agg_grad()(constant_model(0), "any")
    with pytest.raises(NotImplementedError, match="must override"):
        Aggregation().agg_model()(constant_model(0), "any")


@pytest.mark.parametrize("sizes", [[(), (0,), (3,)], []])
def test_few_and_empty_parameters(sizes: list[tuple[int, ...]]) -> None:
    def body(group: dist.ProcessGroup) -> None:
        model = nn.ParameterList([torch.full(size, group.rank() + 1.0) for size in sizes])
        for by_layer in BY_LAYER:
            for aggregation in (
                all_reduce(group, divide_before=True),
                ring(group),
                SparsifiedAggregation(model, ratio=1, process_group=group),
                PowerAggregation(model, world_size=2, process_group=group),
            ):
                for parameter in model:
                    parameter.grad = parameter.detach().clone()
                with aggregation:
                    op = "avg" if isinstance(aggregation, PowerAggregation) else "avg_world"
                    aggregation.agg_grad(by_layer)(model, op)
                for parameter in model:
                    assert torch.equal(parameter.grad, torch.full_like(parameter, 1.5))

    run_ranks(2, body)


def test_a_world_of_one_needs_no_process_group() -> None:
    with without_default_group():
        model = constant_model(1)
        for aggregation in (AllReduceAggregation(1), DecentralizedAggregation(0, [])):
            aggregation.agg_grad()(model, "avg_world")
            aggregation.agg_model(by_layer=True)(model, "avg_world")
            assert torch.equal(model.weight, constant_model(1).weight)
        SparsifiedAggregation(model).agg_grad()(model, "avg_world")
        PowerAggregation(model).agg_grad(by_layer=True)(model, "avg")
        assert torch.equal(model.weight.grad, constant_model(1).weight)
        AllReduceAggregation(1).agg_grad()(model, "avg_custom", 4)
        assert torch.equal(model.weight.grad, constant_model(1).weight / 4)
        with pytest.raises(ValueError, match="world_size must be 1, the number of ranks in the group, got 2"):
            AllReduceAggregation(2).agg_grad()(model, "avg_world")


def test_all_ranks_raise_for_a_bad_denominator() -> None:
    """A call is a step, with its bucket, bytes and time."""

    def body(group: dist.ProcessGroup) -> None:
        recorder, summary = tb.observe.Recorder(), tb.observe.Summary()
        with all_reduce(group, observers=[recorder, summary]) as aggregation:
            check_bad_denominators(group.rank(), aggregation)
        sent = [event for event in recorder.events if event.phase == "send" and event.operation != "agreement"]
        assert sum(event.num_elements for event in sent) == 4, "only the valid call sends elements"
        assert {event.algorithm for event in sent} == {"AllReduceAggregation"}
        assert {event.bucket for event in recorder.events if event.phase == "bucket"} == {"gradients"}
        assert summary.figures.wait_ns == sum(e.duration_ns for e in recorder.events if e.phase == "wait") > 0
        assert "AllReduceAggregation(world_size=2, divide_before=False), 2 ranks" in str(summary)

    run_ranks(2, body)


def test_all_ranks_raise_the_same_error_at_the_first_call() -> None:
    def neighbours(*neighbors_by_rank: list[int]) -> Make:
        return lambda group: DecentralizedAggregation(
            group.rank(), neighbors_by_rank[group.rank()], process_group=group
        )

    cases: list[tuple[Make, str]] = [
        (lambda group: AllReduceAggregation(3, process_group=group), "world_size must be 2"),
        (lambda group: AllReduceAggregation(2 + group.rank(), process_group=group), r"ranks disagree on .*world_size"),
        (neighbours([1], []), "rank 0 lists 1 as a neighbor, but rank 1 does not list 0"),
        (neighbours([1], [0, 2]), r"neighbors must be ranks below 2, got \[2\]|the neighbors of rank 1 are invalid"),
        (
            lambda group: DecentralizedAggregation(0, [1], process_group=group),
            "rank must be 1, this rank's number in the group, got 0|the rank or the neighbors of rank 1",
        ),
    ]

    def body(group: dist.ProcessGroup) -> None:
        for make, message in cases:
            with pytest.raises(ValueError, match=message):
                make(group).agg_model()(constant_model(0), "avg_world")

    run_ranks(2, body)


def test_refusals_before_anything_is_sent() -> None:
    """One rank raises while the other rank of the group does nothing."""

    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 1:
            return
        model = constant_model(0)
        for make in (all_reduce, ring):
            with pytest.raises(NotImplementedError, match=r"not implemented for op=sum; .*avg_world"):
                make(group).agg_grad()(model, "sum")
        for neighbors, message in (
            ([1, 1], "ring of two"),
            ([0], "other ranks"),
            ([-1], "must be ranks"),
            ([1.0], "ra"),
        ):
            with pytest.raises(ValueError, match=message):
                DecentralizedAggregation(0, neighbors, process_group=group)
        for weights in ({}, {1: 1.0}, {1: -0.5}, {1: 0.5, 0: 0.6}, {1: 0.5, 2: 0.5}):
            with pytest.raises(ValueError, match="weights must be"):
                DecentralizedAggregation(0, [1], weights=weights, process_group=group)
        sparse = nn.Embedding(4, 2, sparse=True)
        sparse(torch.tensor([1])).sum().backward()
        with pytest.raises(ValueError, match="gradients of weight must be dense"):
            all_reduce(group).agg_grad()(sparse, "avg_world")
        with pytest.raises(ValueError, match=r"weights of 1\.weight must be on the CPU or on a CUDA device, got meta"):
            all_reduce(group).agg_model()(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), "avg_world")
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
            all_reduce(group).agg_grad()([1], "avg_world")
        with pytest.raises(TypeError, match="process_group must be"):
            AllReduceAggregation(2, process_group="world")
        for world_size in (0, None, 2.0):
            with pytest.raises(ValueError, match="world_size must be a number of ranks"):
                AllReduceAggregation(world_size)

    run_ranks(2, body)


@pytest.mark.parametrize("differs", ["model", "call"])
def test_ranks_with_different_calls_raise(differs: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        other = differs if group.rank() == 1 else ""
        model = nn.Linear(3, 2, bias=False) if other == "model" else constant_model(0)
        with all_reduce(group) as aggregation, pytest.raises(tb.CommunicationError, match="out of step: rank"):
            (aggregation.agg_grad() if other == "call" else aggregation.agg_model())(model, "avg_world")

    run_ranks(2, body)


@pytest.mark.parametrize("make", [all_reduce, ring])
def test_a_failure_on_one_rank_ends_the_others(make: Make) -> None:
    """The other ranks raise at once, not after the timeout."""

    def body(group: dist.ProcessGroup) -> None:
        aggregation = make(group)
        if group.rank() == 0:
            aggregation._agg = lambda data, op, denom=None: 1 / 0
        with pytest.raises(ZeroDivisionError if group.rank() == 0 else tb.CommunicationError):
            aggregation.agg_model()(constant_model(0), "avg_world")

    start_s = time.monotonic()
    run_ranks(2, body)
    assert time.monotonic() - start_s < TIMEOUT.total_seconds() / 2
