"""SparsifiedAggregation and PowerAggregation: they equal the algorithms that run in DDP, but are called by hand."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import run_ranks
from torchbagua.compat.mlbench import PowerAggregation, SparsifiedAggregation
from torchbagua.compat.mlbench.compressed import AlgorithmAggregation
from torchbagua.compat.mlbench.random_elements import RandomElementsAlgorithm
from training import build

NUM_STEPS = 4
Make = Callable[[nn.Module, dist.ProcessGroup], AlgorithmAggregation]


def sparsified(model: nn.Module, group: dist.ProcessGroup, **options: Any) -> SparsifiedAggregation:
    return SparsifiedAggregation(model, ratio=0.1, process_group=group, **options)


def blockk(model: nn.Module, group: dist.ProcessGroup) -> SparsifiedAggregation:
    return sparsified(model, group, compression="blockk")


def randomk(model: nn.Module, group: dist.ProcessGroup) -> SparsifiedAggregation:
    return sparsified(model, group, compression="randomk")


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
def test_it_equals_the_algorithm(make: Make, algorithm: tb.Algorithm) -> None:
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
def test_nothing_is_lost_between_calls(make: Make) -> None:
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
def test_dtypes_devices_and_storage_stay(device: torch.device, make: Make) -> None:
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
def test_resumed_bit_for_bit(make: Make) -> None:
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
