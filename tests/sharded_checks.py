"""Checks of sharded modules, in real ranks, that compare no gradients with an oracle: weights, branches, refusals."""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import init_device_mesh

import torchbagua as tb
from oracle import ordered_sum
from sharded_gradients import BLOCK, BYTEGRAD, EIGHT, FLAT, FOUR_BITS, FULL, decode_shards, in_8_bits
from torchbagua.fsdp._torch import fsdp_all_gather, fsdp_param_groups, fsdp_reduce_scatter
from torchbagua.fsdp.collectives import BoundedGather


def change_the_divisor() -> None:
    """The sum is divided by the factor of the step, also if it changes while the algorithm is attached."""
    size = dist.get_world_size()
    module = fully_shard(nn.Linear(10, 37))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    with tb.attach(module, optimizer, FULL):
        for factor in (float(size), 1.0, 2.0 * size):
            module.set_gradient_divide_factor(factor)
            optimizer.zero_grad()
            module(torch.ones(1, 10)).sum().backward()
            assert module.weight.grad.to_local().unique().tolist() == [size / factor]


def gather_weights() -> None:
    """Gathered weights are bitwise equal to the oracle's, NaN included; weights that no codec encodes are named."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = fully_shard(nn.Linear(10, 37))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    if rank == size - 1:
        with torch.no_grad():
            module.weight.to_local()[0, 3] = torch.nan
    whole = [parameter.full_tensor().detach() for parameter in module.parameters()]
    quantized = [weight.clone() for weight in whole]
    for weight in quantized:
        decode_shards(EIGHT, weight, size)
    assert quantized[0].isnan().sum() == BLOCK
    for async_op in (False, True):
        with torch.no_grad():
            module(torch.ones(1, 10))  # leaves unsharded weights behind, which were not encoded
        with tb.fsdp.attach(module, optimizer, BYTEGRAD, quantize_weights=EIGHT):
            handle = module.unshard(async_op=async_op)
            if handle is not None:
                handle.wait()
            for parameter, expected in zip(module.parameters(), quantized, strict=True):
                assert torch.equal(parameter.nan_to_num(7e7), expected.nan_to_num(7e7))
        module.unshard()  # with torch's all-gather again
        for parameter, expected in zip(module.parameters(), whole, strict=True):
            assert torch.equal(parameter.nan_to_num(7e7), expected.nan_to_num(7e7))

    with pytest.raises(ValueError, match="ranks disagree on attach's argument quantize_weights"):
        tb.fsdp.attach(module, optimizer, BYTEGRAD, quantize_weights=["minmax_uint8", "minmax_uint4"][rank % 2])

    mixed = make_layer_with_bfloat16_bias()
    (param_group,) = fsdp_param_groups(mixed)
    whole = [parameter.full_tensor().detach() for parameter in mixed.parameters()]
    optimizer = torch.optim.SGD(mixed.parameters(), lr=0.1)
    message = "torchbagua: weights of FSDPLinear are gathered in full precision, because"
    with warnings.catch_warnings():
        # With the filter on one rank, all ranks raise, and nothing is installed.
        warnings.simplefilter("error" if rank == 1 else "ignore", tb.UncompressedParametersWarning)
        with pytest.raises(
            tb.UncompressedParametersWarning, match=f"{message}.* filter of rank 1 makes this an error$"
        ):
            tb.fsdp.attach(mixed, optimizer, BYTEGRAD, quantize_weights=EIGHT)
    assert fsdp_all_gather(param_group)[1]
    assert fsdp_reduce_scatter(param_group)[1]
    with pytest.warns(tb.UncompressedParametersWarning, match=message):
        attachment = tb.fsdp.attach(mixed, optimizer, BYTEGRAD, quantize_weights=EIGHT)
    with attachment, warnings.catch_warnings():
        warnings.simplefilter("error")  # attach has already warned
        mixed.unshard()
        assert all(map(torch.equal, mixed.parameters(), whole))
        mixed.reshard()


class SentAsBfloat16(torch.Tensor):
    """A shard that defines how FSDP gathers it."""

    def fsdp_pre_all_gather(self, *_: Any) -> tuple[tuple[torch.Tensor], None]:
        return (self.as_subclass(torch.Tensor).bfloat16(),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor], metadata: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        (gathered,) = outputs
        if out is None:
            return gathered.to(dtype).view(-1, 10), outputs
        out.detach().copy_(gathered.view_as(out))
        return None


def make_layer_with_bfloat16_bias() -> nn.Linear:
    """Return a layer of two dtypes, which FSDP gathers as bytes."""
    layer = nn.Linear(10, 37)
    layer.bias = nn.Parameter(layer.bias.detach().bfloat16(), requires_grad=False)
    return fully_shard(layer)


def make_layer_with_extension() -> nn.Linear:
    layer = fully_shard(nn.Linear(10, 36))  # shards of equal length, since the extension does not pad
    weight: Any = layer.weight
    weight._local_tensor = weight._local_tensor.detach().as_subclass(SentAsBfloat16)
    return layer


def gather_exactly() -> None:
    """Full-precision weights are bitwise equal to torch's, in every way that FSDP gathers; its group stays idle."""
    makers = {
        "float32": lambda: fully_shard(nn.Linear(10, 37)),
        "bfloat16": lambda: fully_shard(nn.Linear(10, 37), mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
        "bytes": make_layer_with_bfloat16_bias,
        "an extension": make_layer_with_extension,
    }
    for name, make in makers.items():
        torch.manual_seed(0)
        module = make()
        module.unshard()
        whole = [parameter.detach().clone() for parameter in module.parameters()]
        module.reshard()
        (param_group,) = fsdp_param_groups(module)
        torch_gather = fsdp_all_gather(param_group)[0]
        optimizer = torch.optim.SGD([parameter for parameter in module.parameters() if parameter.requires_grad], lr=0.1)
        with tb.attach(module, optimizer, BYTEGRAD):
            assert type(fsdp_all_gather(param_group)[0]) is BoundedGather
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist, "all_gather_single", refuse_to_gather, raising=False)
                patch.setattr(dist, "all_gather_into_tensor", refuse_to_gather)
                for async_op in (False, True, False):
                    handle = module.unshard(async_op=async_op)
                    if handle is not None:
                        handle.wait()
                    assert all(map(torch.equal, module.parameters(), whole)), name
                    module.reshard()
                with torch.inference_mode():
                    module.unshard()
                assert all(map(torch.equal, module.parameters(), whole)), name
                module.reshard()
        assert fsdp_all_gather(param_group)[0] is torch_gather
    own: Any = object()
    module.set_custom_all_gather(own)
    with tb.attach(module, optimizer, BYTEGRAD):
        assert fsdp_all_gather(param_group)[0] is own


def refuse_to_gather(*_: Any, **__: Any) -> None:
    raise AssertionError("FSDP gathers over its own group")


def watch_gradient(reached: threading.Event, layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    output.register_hook(lambda _: reached.set())


def overlap_with_backward() -> None:
    """Backward continues while the lane is busy, unless a hook reads the gradient before backward ends."""
    for reads in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(10, 37), nn.Linear(37, 8))
        fully_shard(module[1])
        fully_shard(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with tb.attach(module, optimizer, BYTEGRAD) as attachment:
            if reads:
                module[1].weight.register_post_accumulate_grad_hook(lambda _: None)
            reached = threading.Event()
            job = attachment.runner.lane.submit(partial(reached.wait, 1.0 if reads else 60.0))
            module[0].register_forward_hook(partial(watch_gradient, reached))
            module(torch.ones(1, 10)).sum().backward()
            assert job.result() != reads
            assert module[1].weight.grad.to_local().abs().sum() > 0


def refuse_uneven_nodes() -> None:
    """Three ranks on two nodes: the hierarchical algorithm is refused, and the flat algorithm trains."""
    module = fully_shard(nn.Linear(10, 37))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    groups = [tb.BaguaProcessGroup(dist.group.WORLD, nodes=["a", "a", "b"]) for _ in range(2)]
    with pytest.raises(ValueError, match=r"hierarchical must be False .* got \[\[0, 1\], \[2\]\]"):
        tb.attach(module, optimizer, BYTEGRAD, process_group=groups[0])
    flat = tb.ByteGradAlgorithm(hierarchical=False)
    with tb.attach(module, optimizer, flat, process_group=groups[1]):
        module(torch.ones(1, 10)).sum().backward()


class Experts(nn.Module):
    """Layers of which a step uses some: in one FSDP parameter group, or in separate ones."""

    def __init__(self, widths: Sequence[int], *, separate: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, width, bias=False) for width in widths)
        for layer in self.layers:
            nn.init.ones_(layer.weight)
        if separate:
            for layer in self.layers:
                fully_shard(layer, reshard_after_forward=False)  # or else backward gathers what it uses

    def forward(self, x: torch.Tensor, used: Sequence[int]) -> torch.Tensor:
        """Compute with all layers, and return the sum of those that are used."""
        sums = [layer(x).sum() for layer in self.layers]
        return torch.stack([sums[index] for index in used]).sum()


def branches_of(size: int) -> Iterator[tuple[list[int], bool, list[list[list[int]]]]]:
    """Yield the widths of experts, whether they are separate parts, and those that each rank uses in each step."""
    others = [[0]] * (size - 1)
    yield [16, 16], False, [[[1], *others]]
    yield [16, 48], False, [[[0, 1]] * size] * 2 + [[[1], *others]]
    yield [16, 16, 8], False, [[[0]] * size, [[1]] * size, [[0]] * size, [[1]] * size, [*others, [1]]]
    yield [16, 48], False, [[[0, 1]] * size] * 2 + [[*others, [0, 1]]]
    yield [16, 48], True, [[[0, 1]] * size] * 2 + [[*others, [1]]]


def use_different_branches() -> None:
    """All ranks raise before a gradient is added, and name the parameters; equal branches may alternate."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for widths, separate, steps in branches_of(size):
        module = Experts(widths, separate=separate)
        fully_shard(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        attachment = tb.attach(module, optimizer, BYTEGRAD, timeout=timedelta(seconds=30))
        parameters = list(module.parameters())
        for used in steps[:-1]:
            optimizer.zero_grad()
            module(torch.full((1, 8), rank + 1.0), used[rank]).backward()
            for index, parameter in enumerate(parameters):
                assert (parameter.grad is not None) == (index in used[rank])
                if parameter.grad is not None:
                    assert parameter.grad.to_local().unique().tolist() == [(size + 1) / 2]
        optimizer.zero_grad()
        with pytest.raises(tb.CommunicationError) as caught:
            module(torch.full((1, 8), rank + 1.0), steps[-1][rank]).backward()
        for number in (0, size - 1):
            common = set(steps[-1][0]) & set(steps[-1][-1])
            names = ", ".join(f"layers.{index}.weight" for index in steps[-1][number] if index not in common)
            assert f"rank {number}" in str(caught.value)
            assert names in str(caught.value) or separate, (str(caught.value), names)
        assert "ranks have gradients of different parameters" in str(caught.value), caught.value
        attachment.detach()


def use_the_backend_otherwise() -> None:
    """Only sums and means of flat floating-point tensors are compressed; the first without align_blocks warns."""
    size, rank = dist.get_world_size(), dist.get_rank()
    tb.fsdp.register_backend(BYTEGRAD, name="torchbagua_otherwise")
    group = init_device_mesh("cpu", (size,), backend_override={0: "torchbagua_otherwise"}).get_group()
    for exact in (torch.tensor(rank + 0.1), torch.arange(9) + rank, torch.full((2, 3), rank + 0.1)):
        tensors: list[Any] = [None] * size
        dist.all_gather_object(tensors, exact)
        dist.all_reduce(exact, group=group)
        assert torch.allclose(exact, torch.stack(tensors).sum(0))
    largest = torch.tensor([rank + 0.1, -rank - 0.1])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    assert torch.equal(largest, torch.tensor([size - 0.9, -0.1]))
    dist.broadcast(largest, group=group, group_src=0)
    dist.barrier(group=group)
    rows = [torch.randn(100, generator=torch.Generator().manual_seed(peer)).numpy() for peer in range(size)]
    sent = in_8_bits(ordered_sum(list(map(in_8_bits, rows))))
    for functional in (False, True):  # from Python, and from C++
        x = torch.from_numpy(rows[rank].copy())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if functional:
                x = funcol.all_reduce(x, "sum", group).wait()
            else:
                dist.all_reduce(x, group=group)
        reported = [warning for warning in caught if "call torchbagua.fsdp.align_blocks" in str(warning.message)]
        assert len(reported) == (not functional)
        assert torch.equal(x, torch.from_numpy(sent))


def refuse_replicas() -> None:
    """Refuse arguments that differ between replicas; the filter of one rank raises on all."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicas", "shards"))
    module = fully_shard(nn.Linear(512, 512), mesh=mesh["shards"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    replicas = mesh.get_group("replicas")
    with pytest.raises(ValueError, match="disagree on the rank that holds a shard"):
        tb.fsdp.attach(module, optimizer, BYTEGRAD, replicate_group=mesh.get_group("shards"))
    with pytest.raises(ValueError, match="disagree on the algorithm"):
        tb.fsdp.attach(module, optimizer, BYTEGRAD if rank < 2 else FOUR_BITS, replicate_group=replicas)
    with pytest.raises(ValueError, match="disagree on attach's argument quantize_weights"):
        tb.fsdp.attach(module, optimizer, BYTEGRAD, replicate_group=replicas, quantize_weights=[EIGHT, None][rank // 2])

    # The filter of rank 1 also raises on the other meshes, through the groups that an attachment opens first.
    for algorithm in (BYTEGRAD, tb.LowPrecisionDecentralizedAlgorithm()):
        wide = fully_shard(nn.Linear(512, 512).double(), mesh=mesh["shards"])
        optimizer = torch.optim.SGD(wide.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if rank == 1 else "ignore", tb.UncompressedParametersWarning)
            with pytest.raises(tb.UncompressedParametersWarning, match=r"the filter of rank 1 makes this an error$"):
                tb.fsdp.attach(wide, optimizer, algorithm, replicate_group=replicas)


def attach_to_one_replica() -> None:
    """A single replica compresses as without replicas."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicas", "shards"))
    module = fully_shard(nn.Linear(512, 512), mesh=mesh["shards"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    recorder = tb.observe.Recorder()
    with tb.fsdp.attach(
        module, optimizer, "bytegrad", replicate_group=mesh.get_group("replicas"), observers=[recorder]
    ):
        module(torch.ones(1, 512)).sum().backward()
    sent = [event for event in recorder.events if event.phase == "send"]
    assert 3.9 * sum(event.wire_bytes for event in sent) < sum(event.raw_bytes for event in sent)


def use_different_branches_of_replicas(way: str) -> None:
    """All ranks raise and name the parameters, if replicas differ, if the ranks of a module differ, or one rank does.

    Replicas of a weight algorithm do not add gradients, and may differ. With the backend, torch itself reduces within a
    module.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    by_replica, by_shard = [number // 2 % 2 for number in range(size)], [number % 2 for number in range(size)]
    alone = [int(number == 0) for number in range(size)]
    decentralized = tb.DecentralizedAlgorithm(hierarchical=False)
    trials = {
        "hook": [
            (BYTEGRAD, by_shard),
            (BYTEGRAD, by_replica),
            (FLAT, by_shard),
            (FLAT, alone),
            (decentralized, by_shard),
            (decentralized, by_replica),
        ],
        "backend": [(BYTEGRAD, by_replica)],
    }
    for algorithm, used in trials[way]:
        override = {}
        if way == "backend":
            tb.fsdp.register_backend(algorithm, name="torchbagua_branches")
            override["replicas"] = "torchbagua_branches"
        names = ("replicas", "shards")
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=names, backend_override=override)
        module = fully_shard(Experts([16, 48]), mesh=mesh if way == "backend" else mesh["shards"])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        if way == "backend":
            tb.fsdp.align_blocks(module)
            attachment: Any = ExitStack()
        else:
            attachment = tb.fsdp.attach(module, optimizer, algorithm, replicate_group=mesh.get_group("replicas"))
        may_differ = algorithm is decentralized and used is by_replica
        message = "ranks have gradients of different parameters, .*, got .*layers.[01].weight; .*layers.[01].weight"
        raises: Any = ExitStack() if may_differ else pytest.raises(tb.CommunicationError, match=message)
        with raises, attachment:
            for branches in ([[0, 1]] * size, [[0, 1]] * size, [[branch] for branch in used]):
                optimizer.zero_grad()
                module(torch.full((1, 8), rank + 1.0), branches[rank]).backward()
                optimizer.step()


CHECKS: dict[str, Callable[[], None]] = {
    "branches": use_different_branches,
    "another divisor": change_the_divisor,
    "gathered": gather_weights,
    "gathered exactly": gather_exactly,
    "overlapped": overlap_with_backward,
    "uneven nodes": refuse_uneven_nodes,
    "replicas by hook: refused": refuse_replicas,
    "replicas by hook: one replica": attach_to_one_replica,
    "replicas by hook: branches": partial(use_different_branches_of_replicas, "hook"),
    "replicas by backend: other operations": use_the_backend_otherwise,
    "replicas by backend: branches": partial(use_different_branches_of_replicas, "backend"),
}
