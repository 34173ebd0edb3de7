"""One rank of replicas of sharded modules (HSDP), which compares gradients with an oracle; started by torchrun.

Two ranks share a module, of which the others have replicas. The oracle: each rank forms the gradients of all ranks'
data with an unsharded copy, adds the rows of those that share a module, and forms the coded mean of these over the
replicas. What FSDP leaves in `.grad` must have these bits, whichever way the mean is formed in.

Arguments: the way, "hook" or "backend", and the names of the cases; or "otherwise".
"""

import copy
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DeviceMesh, init_device_mesh

import torchbagua as tb
from oracle import ordered_sum, quantise, quantise_block, quantise_block_4_bits
from rank_cases import run_cases
from sharded_rank import BLOCK, BYTEGRAD, EIGHT, F32, FOUR_BITS, OWN, Net, decoded, divide_by_three, row_of, sum_alone
from torchbagua.codecs import Compressor

GROUPS = [["first", "middle.0"], ["middle.1"], ["last"]]
BFLOAT16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
FLAT = tb.ByteGradAlgorithm(hierarchical=False, block=BLOCK)
CAST_WITHIN = tb.CompressedAllReduceAlgorithm(tb.codecs.MinMaxUInt8(BLOCK), intra_compression="bfloat16")


def in_bfloat16(x: Any) -> Any:
    return torch.from_numpy(x).bfloat16().float().numpy()


def in_8_bits(x: Any, segments: list[int]) -> Any:
    return quantise(x, segments, BLOCK, quantise_block)


def in_4_bits(x: Any, segments: list[int]) -> Any:
    return quantise(x, segments, BLOCK, quantise_block_4_bits)


def sum_then_divide_by_three(module: FSDPModule) -> None:
    sum_alone(module)
    divide_by_three(module)


@dataclass
class Case:
    """What differs from plain `fully_shard` with ByteGrad, where torch itself reduce-scatters.

    Attributes:
        algorithm: is attached, or registered.
        coded: what its codec makes of a row.
        within: what is made of a row that goes to a rank of the same module.
        policy: an argument of `fully_shard`.
        prepare: called with the sharded module.
        divisors: of the sum within a module, of that over replicas, and of what comes of it; by default as many as add.
        accumulates: two micro-steps: "all" reduces both over all ranks, "shards" the first within the module alone.
        shards: how many ranks share a module; with 1 it is torch's `replicate`.
        weights: the codec in whose bytes they are gathered.
    """

    algorithm: tb.Algorithm = BYTEGRAD
    coded: Callable[[Any, list[int]], Any] = in_8_bits
    within: Callable[[Any, list[int]], Any] = lambda x, segments: x
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    prepare: Callable[[FSDPModule], None] = lambda module: None
    divisors: tuple[float, float, float] | None = None
    accumulates: str = ""
    shards: int = 2
    weights: Compressor | None = None


BOTH_WAYS = {
    "bytegrad": Case(),
    "four bits": Case(FOUR_BITS, in_4_bits),
    "own algorithm": Case(OWN, in_4_bits),
    "accumulated": Case(accumulates="all"),
    "accumulated within": Case(accumulates="shards"),
    "a divide factor": Case(prepare=sum_then_divide_by_three, divisors=(1, 1, 3), accumulates="shards"),
    "reduced in bfloat16": Case(policy=BFLOAT16, accumulates="shards"),
}
BY_HOOK = {
    "compressed within": Case(FLAT, within=in_8_bits, accumulates="shards"),
    "cast within": Case(CAST_WITHIN, within=lambda x, segments: in_bfloat16(x)),
    "premultiplied sum": Case(FLAT, within=in_8_bits, prepare=divide_by_three, divisors=(3, 1, 1)),
    "weights in 8 bits": Case(accumulates="shards", weights=EIGHT),
}
BY_BACKEND = {"replicated": Case(shards=1, accumulates="shards")}
CASES = {**BOTH_WAYS, **BY_HOOK, **BY_BACKEND}
WAYS = {"hook": [*BOTH_WAYS, *BY_HOOK, "otherwise"], "backend": [*BOTH_WAYS, *BY_BACKEND, "otherwise"]}


def rounded(case: Case, x: Any) -> Any:
    return in_bfloat16(x) if case.policy.reduce_dtype is torch.bfloat16 else x


def row_within(case: Case, gradients: list[list[torch.Tensor]]) -> tuple[Any, list[int]]:
    """Return what the reduce-scatter gives one rank of a module, of the gradients of its ranks."""
    shard = dist.get_rank() % case.shards
    rows = [[row_of(one, shard, case.shards) for one in of_rank] for of_rank in gradients]
    segments = [one.size for one in rows[0]]
    total = ordered_sum([case.within(np.concatenate(one), segments) for one in rows])
    return rounded(case, total / F32(case.divisors[0] if case.divisors else case.shards)), segments


def mean_over_replicas(case: Case, rows: list[Any], segments: list[int]) -> Any:
    total = ordered_sum([case.coded(row, segments) for row in rows])
    mean = rounded(case, case.coded(total / F32(case.divisors[1] if case.divisors else len(rows)), segments))
    return mean / F32(case.divisors[2] if case.divisors else 1)


def data_of(step: int, rank: int, micro: int) -> torch.Tensor:
    return torch.randn(4, 10, generator=torch.Generator().manual_seed(1000 * step + 100 * micro + rank))


def loss_of(module: nn.Module, x: torch.Tensor, case: Case) -> torch.Tensor:
    return module(x.to(case.policy.param_dtype or torch.float32)).float().square().sum()


def gradients_of_all(copied: nn.Module, step: int, micro: int, case: Case) -> list[dict[str, torch.Tensor]]:
    every = []
    for rank in range(dist.get_world_size()):
        unsharded = copy.deepcopy(copied).to(case.policy.param_dtype or torch.float32)
        decoded(case.weights, [[one] for one in unsharded.parameters()], case.shards)
        loss_of(unsharded, data_of(step, rank, micro), case).backward()
        every.append({name: one.grad for name, one in unsharded.named_parameters() if one.grad is not None})
    return every


def expected(case: Case, micros: list[list[dict[str, torch.Tensor]]], members: list[str]) -> list[Any]:
    """Return what the gradients of `members` are, which are all of one FSDP parameter group, on this rank."""
    total: Any = None
    kept: list[Any] = []
    for index, of_ranks in enumerate(micros):
        every = [[one[name] for name in members] for one in of_ranks]
        within = [row_within(case, every[i : i + case.shards]) for i in range(0, len(every), case.shards)]
        rows, segments = [row for row, _ in within], within[0][1]
        rows = [rounded(case, row + before) for row, before in zip(rows, kept, strict=True)] if kept else rows
        if case.accumulates == "shards" and index == 0:
            kept = rows
            continue
        mean = mean_over_replicas(case, rows, segments)
        total = mean if total is None else total + mean
    return np.split(total, np.cumsum(segments)[:-1])


def shard(case: Case, module: Net, mesh: DeviceMesh) -> None:
    wrap = fully_shard if case.shards > 1 else replicate
    wrap([module.first, module.middle[0]], mesh=mesh, mp_policy=case.policy)
    wrap(module.middle[1], mesh=mesh, mp_policy=case.policy)
    wrap(module, mesh=mesh, mp_policy=case.policy)
    case.prepare(module)  # type: ignore[arg-type]


def train(way: str, name: str) -> None:
    case, rank = CASES[name], dist.get_rank()
    shape, names = (dist.get_world_size() // case.shards, case.shards), ("replicas", "shards")
    torch.manual_seed(0)
    copied = Net()
    torch.manual_seed(rank // case.shards if way == "hook" else 0)  # attach gives replicas the weights of the first
    module = Net()
    attachment = None
    if way == "hook":
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        shard(case, module, mesh["shards"])
    else:
        backend = f"torchbagua_{name.replace(' ', '_')}"
        tb.fsdp.register_backend(case.algorithm, name=backend)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override={"replicas": backend})
        shard(case, module, mesh if case.shards > 1 else mesh["replicas"])
        tb.fsdp.align_blocks(module)
    replicas = mesh.get_group("replicas")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    recorder = tb.observe.Recorder()
    if way == "hook":
        attachment = tb.fsdp.attach(
            module,
            optimizer,
            case.algorithm,
            replicate_group=replicas,
            quantize_weights=case.weights,
            observers=[recorder],
        )
    parameters = dict(module.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        micros = []
        for micro in range(2 if case.accumulates else 1):
            micros.append(gradients_of_all(copied, step, micro, case))
            module.set_requires_all_reduce(micro == 1 or case.accumulates != "shards")
            loss_of(module, data_of(step, rank, micro), case).backward()
        for modules in GROUPS:
            members = [one for one in parameters if one.rsplit(".", 1)[0] in modules]
            for one, row in zip(members, expected(case, micros, members), strict=True):
                local = parameters[one].grad.to_local().reshape(-1)
                assert torch.equal(local, torch.from_numpy(row[: local.numel()])), (
                    f"{way}, {name}, step {step}, {one}: {local[:5]} {row[:5]}"
                )
        optimizer.step()
        for one in parameters.values():
            check_same(one.to_local().detach(), mesh)
        with torch.no_grad():
            for one, parameter in copied.named_parameters():
                parameter.copy_(parameters[one].full_tensor())
    if attachment is not None:
        check_trace(name, recorder)
        attachment.detach()


def check_same(shard: torch.Tensor, mesh: DeviceMesh) -> None:
    """That all replicas hold the same bits; over a group that no codec touches."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, shard)
    every = gathered[dist.get_rank() % mesh.size(1) :: mesh.size(1)]
    assert len(every) == mesh.size(0)
    assert all(torch.equal(one, shard) for one in every)


def use_the_backend_otherwise() -> None:
    """What is no sum or mean of a flat floating-point tensor is exact; of others there is one warning."""
    size, rank = dist.get_world_size(), dist.get_rank()
    tb.fsdp.register_backend(BYTEGRAD, name="torchbagua_otherwise")
    group = init_device_mesh("cpu", (size,), backend_override={0: "torchbagua_otherwise"}).get_group()
    for exact in (torch.tensor(rank + 0.1), torch.arange(9) + rank, torch.full((2, 3), rank + 0.1)):
        every: list[Any] = [None] * size
        dist.all_gather_object(every, exact)
        dist.all_reduce(exact, group=group)
        assert torch.allclose(exact, torch.stack(every).sum(0))
    largest = torch.tensor([rank + 0.1, -rank - 0.1])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    assert torch.equal(largest, torch.tensor([size - 0.9, -0.1]))
    gathered = torch.empty(size)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=group)
    assert gathered.tolist() == list(range(size))
    first = torch.tensor([float(rank)])
    dist.broadcast(first, group=group, group_src=0)
    assert first.item() == 0
    dist.barrier(group=group)
    rows = [torch.randn(100, generator=torch.Generator().manual_seed(other)).numpy() for other in range(size)]
    sent = in_8_bits(ordered_sum([in_8_bits(row, [100]) for row in rows]), [100])
    for functional in (False, True):  # from Python, and from C++
        x = torch.from_numpy(rows[rank].copy())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if functional:
                x = funcol.all_reduce(x, "sum", group).wait()
            else:
                dist.all_reduce(x, group=group)
        told = [one for one in caught if "call torchbagua.fsdp.align_blocks" in str(one.message)]
        assert len(told) == (not functional)
        assert torch.equal(x, torch.from_numpy(sent))


def refuse_and_attach_to_one() -> None:
    """Refused is what differs between replicas; a single replica has its gradients compressed as without any."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicas", "shards"))
    module = fully_shard(nn.Linear(512, 512), mesh=mesh["shards"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    replicas = mesh.get_group("replicas")
    with pytest.raises(ValueError, match="disagree in the rank that holds a shard"):
        tb.fsdp.attach(module, optimizer, BYTEGRAD, replicate_group=mesh.get_group("shards"))
    with pytest.raises(ValueError, match="disagree in the algorithm"):
        tb.fsdp.attach(module, optimizer, BYTEGRAD if rank < 2 else FOUR_BITS, replicate_group=replicas)
    with pytest.raises(ValueError, match="disagree in attach's argument quantize_weights"):
        tb.fsdp.attach(module, optimizer, BYTEGRAD, replicate_group=replicas, quantize_weights=[EIGHT, None][rank // 2])
    with tb.fsdp.attach(module, optimizer, BYTEGRAD, replicate_group=replicas):
        module(torch.ones(1, 512)).sum().backward()

    # A filter of one rank reaches the other meshes too, through whichever groups an attachment opens first.
    for algorithm in (BYTEGRAD, tb.LowPrecisionDecentralizedAlgorithm()):
        wide = fully_shard(nn.Linear(512, 512).double(), mesh=mesh["shards"])
        optimizer = torch.optim.SGD(wide.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if rank == 1 else "ignore", tb.UncompressedParametersWarning)
            with pytest.raises(tb.UncompressedParametersWarning, match=r"the filter of rank 1 makes this an error$"):
                tb.fsdp.attach(wide, optimizer, algorithm, replicate_group=replicas)

    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("replicas", "shards"))
    module = fully_shard(nn.Linear(512, 512), mesh=mesh["shards"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    recorder = tb.observe.Recorder()
    with tb.fsdp.attach(
        module, optimizer, "bytegrad", replicate_group=mesh.get_group("replicas"), observers=[recorder]
    ):
        module(torch.ones(1, 512)).sum().backward()
    sent = [event for event in recorder.events if event.phase == "send"]
    assert 3.9 * sum(one.wire_bytes for one in sent) < sum(one.raw_bytes for one in sent)


def check_trace(name: str, recorder: tb.observe.Recorder) -> None:
    sent = [event for event in recorder.events if event.phase == "send"]
    scopes = {event.scope for event in sent}
    assert scopes == ({"world of replicas"} if name in BOTH_WAYS else {"world", "world of replicas"})
    assert 0 < sum(event.bytes_sent for event in sent) < sum(event.raw_bytes for event in sent)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    way, *names = sys.argv[1:]
    otherwise = refuse_and_attach_to_one if way == "hook" else use_the_backend_otherwise
    run_cases(names, lambda name: otherwise() if name == "otherwise" else train(way, name))
    assert not [one for one in threading.enumerate() if "torchbagua" in one.name]


if __name__ == "__main__":
    main()
