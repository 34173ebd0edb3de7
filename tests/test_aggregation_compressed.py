"""SparsifiedAggregation and PowerAggregation: they are the algorithms that run in DDP, called by hand."""

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

Make = Callable[[nn.Module, dist.ProcessGroup], AlgorithmAggregation]


def sparsified(model: nn.Module, group: dist.ProcessGroup, **options: Any) -> SparsifiedAggregation:
    return SparsifiedAggregation(model, ratio=0.1, process_group=group, **options)


def size_of(group: Any) -> int:
    return group.size if isinstance(group, tb.BaguaProcessGroup) else group.size()


def blocks(model: nn.Module, group: dist.ProcessGroup) -> SparsifiedAggregation:
    return sparsified(model, group, compression="blockk")


def drawn(model: nn.Module, group: dist.ProcessGroup) -> SparsifiedAggregation:
    return sparsified(model, group, compression="randomk")


def power(model: nn.Module, group: dist.ProcessGroup, **options: Any) -> PowerAggregation:
    return PowerAggregation(model, world_size=size_of(group), rank=2, process_group=group, **options)


def warm_power(model: nn.Module, group: dist.ProcessGroup) -> PowerAggregation:
    return power(model, group, reuse_query=True)


def op_of(aggregation: AlgorithmAggregation) -> str:
    return "avg" if isinstance(aggregation, PowerAggregation) else "avg_world"


def network() -> nn.Module:
    return build(lambda: nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 10)))


def train(model: nn.Module, rank: int, num_steps: int, before_step: Callable[[], None]) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=data)).square().sum().backward()
        before_step()
        optimizer.step()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


@pytest.mark.parametrize(("make", "algorithm"), [
    (sparsified, tb.TopKAlgorithm(0.1)),
    (blocks, tb.TopKAlgorithm(0.1, selection="block")),
    (drawn, RandomElementsAlgorithm(0.1)),
    (power, tb.PowerSGDAlgorithm(2, start_step=0, min_rate=1, warm_start=False)),
    (warm_power, tb.PowerSGDAlgorithm(2, start_step=0, min_rate=1)),
])  # fmt: skip
def test_it_is_the_algorithm(make: Make, algorithm: tb.Algorithm) -> None:
    """Bit for bit, all at once and by layer."""
    template = network()

    def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
        ddp = DistributedDataParallel(copy.deepcopy(template), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        data = torch.Generator().manual_seed(group.rank())
        with tb.attach(ddp, optimizer, algorithm):
            for _ in range(6):
                optimizer.zero_grad()
                ddp(torch.randn(8, 20, generator=data)).square().sum().backward()
                optimizer.step()
        found = [torch.cat([one.detach().flatten() for one in ddp.parameters()])]
        for by_layer in (False, True):
            model = copy.deepcopy(template)
            before = torch.random.get_rng_state()
            with make(model, group) as aggregation:
                function = aggregation.agg_grad(by_layer)
                found.append(train(model, group.rank(), 6, lambda: function(model, op_of(aggregation))))  # noqa: B023
            assert torch.equal(torch.random.get_rng_state(), before), "torch's random numbers are left alone"
        return found

    first, second = run_ranks(2, body)
    assert all(torch.equal(one, first[0]) for one in [*first, *second])


@pytest.mark.parametrize("make", [sparsified, drawn, power])
def test_nothing_is_lost_between_calls(make: Make) -> None:
    """What all calls have given, and what is kept, is the mean of all gradients; a call with NaN leaves no trace.

    Ways to call it, all at once or by layer, may change in between.
    """

    def body(group: dist.ProcessGroup) -> list[dict[str, torch.Tensor]]:
        rank = group.rank()
        model = copy.deepcopy(template)
        draw = torch.Generator().manual_seed(10 + rank)
        with make(model, group) as aggregation:
            given, received = ({name: torch.zeros_like(p) for name, p in model.named_parameters()} for _ in range(2))
            for step in range(5):
                for name, one in model.named_parameters():
                    one.grad = torch.randn(one.shape, generator=draw)
                    if step == 2:
                        one.grad[..., rank] = float("nan") if rank == 0 else 1.0
                    else:
                        given[name] += one.grad
                aggregation.agg_grad(by_layer=step == 3)(model, op_of(aggregation))
                for name, one in model.named_parameters():
                    assert not one.grad.isfinite().all() if step == 2 else one.grad.isfinite().all()
                    if step != 2:
                        received[name] += one.grad
            state = aggregation.state_dict()
        kinds = {sparsified: ("sent", "mean"), drawn: ("residual",), power: ("error",)}[make]
        return [given, received, *(state[kind] for kind in kinds)]

    template = network()
    ranks = run_ranks(2, body)
    for name, _ in template.named_parameters():
        given, received, kept, *of_mean = ([rank[kind][name] for rank in ranks] for kind in range(len(ranks[0])))
        assert torch.equal(received[0], received[1])
        mean = (given[0] + given[1]) / 2
        left = (kept[0] + kept[1]) / 2 + sum(one[0] + one[1] for one in of_mean)
        assert float(left.norm()) > 0.1 or (make is power and mean.dim() == 1)
        # Sums of a few numbers of size 1, each rounded.
        torch.testing.assert_close(received[0] + left, mean, rtol=0, atol=1e-5)


def test_reference_values_of_power() -> None:
    """Rank 1 is enough for gradients that are constant, also without any vector in the model."""

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
        for one in used:
            one.grad = torch.empty_like(one).copy_(torch.randn(one.shape, generator=draw))
        gradients = [one.grad for one in used]
        places = [(one.data_ptr(), one.stride(), one.dtype) for one in gradients]
        with make(model, group) as aggregation:
            aggregation.agg_grad()(model, op_of(aggregation))
        assert [(one.grad.data_ptr(), one.grad.stride(), one.grad.dtype) for one in used] == places
        assert all(one.grad is None for one in model[-2:].parameters())
        return gradients

    first, second = run_ranks(2, body, device=device)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("make", [sparsified, drawn, power])
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
                for one in model.parameters():
                    one.grad = torch.randn(one.shape, generator=draw)
                aggregation.agg_grad()(model, op_of(aggregation))
            aggregation.close()
            found.append(torch.cat([one.grad.flatten() for one in model.parameters()]))
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
        with pytest.raises(ValueError, match="model must be the one that it was made with"):
            aggregation.agg_grad()(nn.Linear(4, 4), op_of(aggregation))

    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match="world_size must be 2"):
            PowerAggregation(model, process_group=group).agg_grad()(model, "avg")
        with pytest.raises(ValueError, match="ranks disagree in .*ratio"):  # noqa: RUF043
            SparsifiedAggregation(model, ratio=0.1 * (1 + group.rank()), process_group=group).agg_grad()(
                model, "avg_world"
            )

    run_ranks(2, body)


@pytest.mark.parametrize("make", [sparsified, power])
def test_nodes_of_a_group(make: Make) -> None:
    """Between nodes it is compressed, and within them in full precision; the group that was given stays open."""

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        model = nn.Linear(64, 32)
        own = tb.BaguaProcessGroup(group, nodes=[0, 0, 1, 1])
        for one in model.parameters():
            one.grad = torch.full_like(one, group.rank() + 1.0)
        recorder = tb.observe.Recorder()
        with make(model, own, observers=[recorder]) as aggregation:
            aggregation.agg_grad()(model, op_of(aggregation))
        assert {"intra_node", "inter_node"} <= {event.scope for event in recorder.events}
        own.all_reduce(torch.ones(3))
        own.close()
        return torch.cat([one.grad.flatten() for one in model.parameters()])

    first, *others = run_ranks(4, body)
    assert all(torch.equal(first, one) for one in others)
    # Rounded to 8 bits, or to a product of rounded factors.
    torch.testing.assert_close(first[first != 0], torch.full_like(first[first != 0], 2.5), rtol=1e-2, atol=0)


def test_bytes_are_told() -> None:
    def body(group: dist.ProcessGroup) -> tuple[int, int]:
        sent = []
        for make in (sparsified, power):
            recorder, model = tb.observe.Recorder(), nn.Linear(512, 256)
            for one in model.parameters():
                one.grad = torch.ones_like(one)
            with make(model, group, observers=[recorder]) as aggregation:
                aggregation.agg_grad()(model, op_of(aggregation))
            assert [event.algorithm for event in recorder.events if event.phase == "step"] == [
                type(aggregation).__name__
            ]
            sent.append(sum(event.bytes_sent for event in recorder.events if event.operation != "agreement"))
        return sent[0], sent[1]

    for of_sparsified, of_power in run_ranks(2, body):
        # A tenth, with index and value in 2.4 bytes or so, and headers; of float32 it would be 4 bytes an element.
        assert 0.1 * 2.2 < of_sparsified / (512 * 256) < 0.1 * 2.6
        # Two vectors of each side and the bias, half of it scattered and the other half gathered.
        assert of_power == 4 * (2 * (512 + 256) + 256)
