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


def size_of(group: Any) -> int:
    return group.size if isinstance(group, tb.BaguaProcessGroup) else group.size()


def blockk(model: nn.Module, group: dist.ProcessGroup) -> SparsifiedAggregation:
    return sparsified(model, group, compression="blockk")


def randomk(model: nn.Module, group: dist.ProcessGroup) -> SparsifiedAggregation:
    return sparsified(model, group, compression="randomk")


def power(model: nn.Module, group: dist.ProcessGroup, **options: Any) -> PowerAggregation:
    return PowerAggregation(model, world_size=size_of(group), rank=2, process_group=group, **options)


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


@pytest.mark.parametrize(("make", "algorithm"), [
    (sparsified, tb.TopKAlgorithm(0.1)),
    (blockk, tb.TopKAlgorithm(0.1, selection="block")),
    (randomk, RandomElementsAlgorithm(0.1)),
    (power, tb.PowerSGDAlgorithm(2, start_step=0, min_rate=1, warm_start=False)),
    (warm_power, tb.PowerSGDAlgorithm(2, start_step=0, min_rate=1)),
])  # fmt: skip
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


def test_reference_values_of_power() -> None:
    """Rank 1 suffices for constant gradients, also in a model without vectors."""

    def body(group: dist.ProcessGroup) -> None:
        model = nn.Linear(6, 8, bias=False)
        for reuse_query in (False, True):
            with PowerAggregation(model, reuse_query=reuse_query, world_size=2, process_group=group) as aggregation:
                for function in (aggregation.agg_grad(), aggregation.agg_model()):
                    model.weight.grad = torch.full((8, 6), group.rank() + 1.0)
                    function(model, op="avg")
                    # The factors are rounded, and so is their product.
                    torch.testing.assert_close(model.weight.grad, torch.full((8, 6), 1.5), rtol=1e-5, atol=0)
            small = nn.Linear(2, 2, bias=False)
            small.weight.grad = (group.rank() + 1) * torch.arange(1.0, 5.0).view(2, 2)
            with PowerAggregation(small, world_size=2, process_group=group) as aggregation:
                aggregation.agg_grad(by_layer=True)(small, "avg")
            assert small.weight.grad.tolist() == [[1.5, 3.0], [4.5, 6.0]], "no smaller in factors: sent as it is"

    run_ranks(2, body)


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
        assert [
            (parameter.grad.data_ptr(), parameter.grad.stride(), parameter.grad.dtype) for parameter in used
        ] == places
        assert all(parameter.grad is None for parameter in model[-2:].parameters())
        return gradients

    first, second = run_ranks(2, body, device=device)
    assert all(torch.equal(gradient, expected) for gradient, expected in zip(first, second, strict=True))


@pytest.mark.parametrize("make", [sparsified, randomk])
def test_resumed_bit_for_bit(make: Make) -> None:
    template = network()

    def body(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for is_resumed in (False, True):
            model = copy.deepcopy(template)
            aggregation = make(model, group)
            draw = torch.Generator().manual_seed(group.rank())
            for step in range(4):
                if step == 2 and is_resumed:
                    state = aggregation.state_dict()
                    aggregation.close()
                    aggregation = make(model, group)
                    aggregation.load_state_dict(state)
                for parameter in model.parameters():
                    parameter.grad = torch.randn(parameter.shape, generator=draw)
                aggregation.agg_grad()(model, op_of(aggregation))
            aggregation.close()
            found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        return found[0], found[1]

    for straight, resumed in run_ranks(2, body):
        assert torch.equal(straight, resumed)


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


def test_nodes_of_a_group() -> None:
    """Messages are compressed between nodes and in full precision within them; the given group stays open."""

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        model = nn.Linear(64, 32)
        own = tb.BaguaProcessGroup(group, nodes=[0, 0, 1, 1])
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, group.rank() + 1.0)
        recorder = tb.observe.Recorder()
        with sparsified(model, own, observers=[recorder]) as aggregation:
            aggregation.agg_grad()(model, op_of(aggregation))
        assert {"intra_node", "inter_node"} <= {event.scope for event in recorder.events}
        own.all_reduce(torch.ones(3))
        own.close()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    first, *of_other_ranks = run_ranks(4, body)
    assert all(torch.equal(first, gradients) for gradients in of_other_ranks)
    # Rounded to 8 bits.
    torch.testing.assert_close(first[first != 0], torch.full_like(first[first != 0], 2.5), rtol=1e-2, atol=0)


def test_bytes_are_reported() -> None:
    def body(group: dist.ProcessGroup) -> tuple[int, int]:
        sent = []
        for make in (sparsified, power):
            recorder, model = tb.observe.Recorder(), nn.Linear(512, 256)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            with make(model, group, observers=[recorder]) as aggregation:
                aggregation.agg_grad()(model, op_of(aggregation))
            assert [event.algorithm for event in recorder.events if event.phase == "step"] == [
                type(aggregation).__name__
            ]
            sent.append(sum(event.bytes_sent for event in recorder.events if event.operation != "agreement"))
        return sent[0], sent[1]

    for of_sparsified, of_power in run_ranks(2, body):
        # A tenth of the elements, with index and value in about 2.4 bytes, and headers; float32 has 4 bytes an element.
        assert 0.1 * 2.2 < of_sparsified / (512 * 256) < 0.1 * 2.6
        # Two vectors for each side, and the bias; half is sent in the scatter, and half in the gather.
        assert of_power == 4 * (2 * (512 + 256) + 256)
