"""torchbagua.compat.mlbench: mlbench's aggregations, with threads as ranks."""

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
from torchbagua.compat.mlbench.compressed import AlgorithmAggregation
from torchbagua.compat.mlbench.random_elements import RandomElementsAlgorithm
from training import build

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


def test_packs_of_one_length_keep_their_dtypes() -> None:
    """Parameters of each dtype are sent in one pack."""

    def body(group: dist.ProcessGroup) -> float:
        values = torch.full((4,), group.rank() + 1 / 3, dtype=torch.float64)
        model = nn.ParameterList([values.float(), values])
        with ring(group) as aggregation:
            aggregation.agg_model()(model, "avg_world")
        return float(model[1][0])

    assert run_ranks(2, body) == pytest.approx([1 / 2 + 1 / 3] * 2, rel=1e-12)  # float32 has a relative error of 1e-8


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


# SparsifiedAggregation and PowerAggregation: they equal the algorithms that run in DDP, but are called by hand.

NUM_STEPS = 4
MakeOfModel = Callable[[nn.Module, dist.ProcessGroup], AlgorithmAggregation]


def sparsified(model: nn.Module, group: dist.ProcessGroup, **options: Any) -> SparsifiedAggregation:
    return SparsifiedAggregation(model, ratio=0.1, process_group=group, **options)


def blockk(model: nn.Module, group: dist.ProcessGroup) -> SparsifiedAggregation:
    return sparsified(model, group, compression="blockk")


def randomk(model: nn.Module, group: dist.ProcessGroup) -> SparsifiedAggregation:
    return sparsified(model, group, compression="randomk")


def test_nan_in_an_element_that_is_not_drawn_reaches_all_ranks() -> None:
    """Otherwise it would stay in the residual of its rank."""

    def body(group: dist.ProcessGroup) -> list[bool]:
        found = []
        for index in range(3):  # one element of ten is drawn
            model = nn.Linear(10, 1, bias=False)
            model.weight.grad = torch.ones(1, 10)
            if group.rank() == 1:
                model.weight.grad[0, index] = torch.nan
            with randomk(model, group) as aggregation:
                aggregation.agg_grad()(model, op_of(aggregation))
            found.append(bool(model.weight.grad.isnan().all()))
        return found

    assert run_ranks(2, body) == [[True] * 3] * 2


def power(model: nn.Module, group: dist.ProcessGroup, **options: Any) -> PowerAggregation:
    return PowerAggregation(model, world_size=group.size(), rank=2, process_group=group, **options)


def warm_power(model: nn.Module, group: dist.ProcessGroup) -> PowerAggregation:
    return power(model, group, reuse_query=True)


def op_of(aggregation: AlgorithmAggregation) -> str:
    return "avg" if isinstance(aggregation, PowerAggregation) else "avg_world"


def network() -> nn.Module:
    return build(lambda: nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 10)))


def train(model: nn.Module, rank: int, before_step: Callable[[], None]) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=data)).square().sum().backward()
        before_step()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("make", "algorithm"),
    [
        (sparsified, tb.TopKAlgorithm(0.1)),
        (blockk, tb.TopKAlgorithm(0.1, selection="block")),
        (randomk, RandomElementsAlgorithm(0.1)),
        (power, tb.PowerSGDAlgorithm(2, start_step=0, min_rate=1, warm_start=False)),
        (warm_power, tb.PowerSGDAlgorithm(2, start_step=0, min_rate=1)),
    ],
)
def test_it_equals_the_algorithm(make: MakeOfModel, algorithm: tb.Algorithm) -> None:
    """The weights are bitwise equal, all at once and by layer."""
    template = network()

    def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
        ddp = DistributedDataParallel(copy.deepcopy(template), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        data = torch.Generator().manual_seed(group.rank())
        with tb.attach(ddp, optimizer, algorithm):
            for _ in range(NUM_STEPS):
                optimizer.zero_grad()
                ddp(torch.randn(8, 20, generator=data)).square().sum().backward()
                optimizer.step()
        found = [torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])]
        for by_layer in (False, True):
            model = copy.deepcopy(template)
            before = torch.random.get_rng_state()
            with make(model, group) as aggregation:
                function = aggregation.agg_grad(by_layer)
                found.append(train(model, group.rank(), lambda: function(model, op_of(aggregation))))  # noqa: B023
            assert torch.equal(torch.random.get_rng_state(), before), "torch's random numbers are left alone"
        return found

    first, second = run_ranks(2, body)
    assert all(torch.equal(weights, first[0]) for weights in [*first, *second])


@pytest.mark.parametrize("make", [sparsified, randomk, power])
def test_nothing_is_lost_between_calls(make: MakeOfModel) -> None:
    """The results of all calls plus the residuals are the mean of all gradients; a call with NaN leaves no trace.

    Calls may switch between all at once and by layer.
    """

    def body(group: dist.ProcessGroup) -> list[dict[str, torch.Tensor]]:
        rank = group.rank()
        model = copy.deepcopy(template)
        draw = torch.Generator().manual_seed(10 + rank)
        with make(model, group) as aggregation:
            given, received = ({name: torch.zeros_like(p) for name, p in model.named_parameters()} for _ in range(2))
            for step in range(5):
                for name, parameter in model.named_parameters():
                    parameter.grad = torch.randn(parameter.shape, generator=draw)
                    if step == 2:
                        parameter.grad[..., rank] = float("nan") if rank == 0 else 1.0
                    else:
                        given[name] += parameter.grad
                aggregation.agg_grad(by_layer=step == 3)(model, op_of(aggregation))
                for name, parameter in model.named_parameters():
                    assert not parameter.grad.isfinite().all() if step == 2 else parameter.grad.isfinite().all()
                    if step != 2:
                        received[name] += parameter.grad
            state = aggregation.state_dict()
        kinds = {sparsified: ("sent", "mean"), randomk: ("residual",), power: ("error",)}[make]
        return [given, received, *(state[kind] for kind in kinds)]

    template = network()
    ranks = run_ranks(2, body)
    for name, _ in template.named_parameters():
        given, received, kept, *of_mean = ([rank[kind][name] for rank in ranks] for kind in range(len(ranks[0])))
        assert torch.equal(received[0], received[1])
        mean = (given[0] + given[1]) / 2
        left = (kept[0] + kept[1]) / 2 + sum(residual[0] + residual[1] for residual in of_mean)
        assert float(left.norm()) > 0.1 or (make is power and mean.dim() == 1)
        # Sums of a few numbers of size 1, each rounded.
        torch.testing.assert_close(received[0] + left, mean, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*2 of 10 parameters in full precision, because .* does not encode torch.float64")
@pytest.mark.filterwarnings("error:torchbagua")
@pytest.mark.parametrize("make", [sparsified, power])
def test_dtypes_devices_and_storage_stay(device: torch.device, make: MakeOfModel) -> None:
    def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
        dtypes = (torch.float32, torch.bfloat16, torch.float64)
        model = nn.ModuleList(nn.Linear(30, 40, device=device, dtype=dtype) for dtype in dtypes)
        model.append(nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last))
        model.extend([nn.Linear(3, 3), nn.Linear(3, 3).double().requires_grad_(False)])  # unused, and frozen
        draw = torch.Generator().manual_seed(group.rank())
        used = list(model[:-2].parameters())
        for parameter in used:
            parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=draw))
        gradients = [parameter.grad for parameter in used]
        places = [(gradient.data_ptr(), gradient.stride(), gradient.dtype) for gradient in gradients]
        with make(model, group) as aggregation:
            aggregation.agg_grad()(model, op_of(aggregation))
        assert [(p.grad.data_ptr(), p.grad.stride(), p.grad.dtype) for p in used] == places
        assert all(parameter.grad is None for parameter in model[-2:].parameters())
        return gradients

    first, second = run_ranks(2, body, device=device)
    assert all(torch.equal(gradient, expected) for gradient, expected in zip(first, second, strict=True))


@pytest.mark.parametrize("make", [sparsified, randomk])
def test_resumed_bit_for_bit(make: MakeOfModel) -> None:
    """Over a group of the user's, with nodes, which stays open."""
    template = network()

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, nodes=[0, 0, 1, 1])
        found = []
        for is_resumed in (False, True):
            model = copy.deepcopy(template)
            aggregation = make(model, own)
            draw = torch.Generator().manual_seed(group.rank())
            for step in range(4):
                if step == 2 and is_resumed:
                    state = aggregation.state_dict()
                    aggregation.close()
                    aggregation = make(model, own)
                    aggregation.load_state_dict(state)
                for parameter in model.parameters():
                    parameter.grad = torch.randn(parameter.shape, generator=draw)
                aggregation.agg_grad()(model, op_of(aggregation))
            aggregation.close()
            found.append([parameter.grad for parameter in model.parameters()])
        assert all(map(torch.equal, *found))
        own.all_reduce(torch.ones(3))
        own.close()

    run_ranks(4, body)


def test_what_is_refused() -> None:
    model = nn.Linear(4, 4)
    for ratio in (0, 1.5, -0.1):
        with pytest.raises(ValueError, match="ratio must be above 0 and at most 1"):
            SparsifiedAggregation(model, ratio=ratio)
    for compression in ("minmax_uint8", "bytegrad", None):
        with pytest.raises(ValueError, match=r"compression must be one of \['.*topk'"):
            SparsifiedAggregation(model, compression=compression)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        PowerAggregation([model])
    with pytest.raises(ValueError, match="rank must be at least 1"):
        PowerAggregation(model, rank=0)
    for aggregation in (SparsifiedAggregation(model), PowerAggregation(model)):
        with pytest.raises(NotImplementedError):
            aggregation.agg_model(by_layer=True)
        with pytest.raises(NotImplementedError, match="aggregation not implemented for op=avg_custom"):
            aggregation.agg_grad()(model, "avg_custom")
        with pytest.raises(ValueError, match="model must be the model that the aggregation was created with"):
            aggregation.agg_grad()(nn.Linear(4, 4), op_of(aggregation))

    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match="world_size must be 2"):
            PowerAggregation(model, process_group=group).agg_grad()(model, "avg")
        with pytest.raises(ValueError, match="ranks disagree on .*ratio"):  # noqa: RUF043
            SparsifiedAggregation(model, ratio=0.1 * (1 + group.rank()), process_group=group).agg_grad()(
                model, "avg_world"
            )

    run_ranks(2, body)
