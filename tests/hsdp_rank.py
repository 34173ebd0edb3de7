"""Train replicas of sharded modules (HSDP) on one rank, and compare gradients with an oracle; started by torchrun.

Two ranks share a module, and the other ranks have replicas of it. The oracle: each rank computes the gradients of every
rank's data with an unsharded copy, sums the rows of the ranks that share a module, and computes the compressed mean of
these sums over the replicas. The gradients that FSDP stores in `.grad` must be bitwise equal, in both ways of reducing.

Arguments: the way, "hook" or "backend", and the names of the cases; or "otherwise".
"""

import copy
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
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
from sharded_rank import (
    BLOCK,
    BYTEGRAD,
    EIGHT,
    F32,
    FOUR_BITS,
    OWN,
    Experts,
    Net,
    decoded,
    divide_by_three,
    row_of,
    sum_alone,
)
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
    """The differences of a case from plain `fully_shard` with ByteGrad, if torch itself reduce-scatters.

    Attributes:
        algorithm: the attached or registered algorithm.
        coded: returns a row as the codec of the algorithm decodes it.
        within: returns a row as the ranks of the same module receive it.
        policy: an argument of `fully_shard`.
        prepare: called with the sharded module.
        divisors: divide the sum within a module, the sum over replicas, and the result; by default the number of summed
            rows, the number of replicas, and 1.
        accumulates: if not empty, two micro-steps: "all" reduces both over all ranks, "shards" reduces the first only
            within the module.
        shards: the number of ranks that share a module; with 1, torch's `replicate` is used.
        weights: the codec of gathered weights; None for full precision.
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
WAYS = {
    "hook": [*BOTH_WAYS, *BY_HOOK, "otherwise", "branches"],
    "backend": [*BOTH_WAYS, *BY_BACKEND, "otherwise", "branches"],
}


def round_to_reduce_dtype(case: Case, x: Any) -> Any:
    return in_bfloat16(x) if case.policy.reduce_dtype is torch.bfloat16 else x


def row_within(case: Case, gradients: list[list[torch.Tensor]]) -> tuple[Any, list[int]]:
    """Return the reduce-scattered row of this rank's shard of a module, given the gradients of the module's ranks."""
    shard = dist.get_rank() % case.shards
    rows = [[row_of(gradient, shard, case.shards) for gradient in rank_gradients] for rank_gradients in gradients]
    segments = [row.size for row in rows[0]]
    total = ordered_sum([case.within(np.concatenate(rank_rows), segments) for rank_rows in rows])
    return round_to_reduce_dtype(case, total / F32(case.divisors[0] if case.divisors else case.shards)), segments


def mean_over_replicas(case: Case, rows: list[Any], segments: list[int]) -> Any:
    total = ordered_sum([case.coded(row, segments) for row in rows])
    mean = round_to_reduce_dtype(
        case, case.coded(total / F32(case.divisors[1] if case.divisors else len(rows)), segments)
    )
    return mean / F32(case.divisors[2] if case.divisors else 1)


def data_of(step: int, rank: int, micro: int) -> torch.Tensor:
    return torch.randn(4, 10, generator=torch.Generator().manual_seed(1000 * step + 100 * micro + rank))


def loss_of(module: nn.Module, x: torch.Tensor, case: Case) -> torch.Tensor:
    return module(x.to(case.policy.param_dtype or torch.float32)).float().square().sum()


def gradients_of_all(copied: nn.Module, step: int, micro: int, case: Case) -> list[dict[str, torch.Tensor]]:
    gradients = []
    for rank in range(dist.get_world_size()):
        unsharded = copy.deepcopy(copied).to(case.policy.param_dtype or torch.float32)
        decoded(case.weights, [[parameter] for parameter in unsharded.parameters()], case.shards)
        loss_of(unsharded, data_of(step, rank, micro), case).backward()
        gradients.append(
            {name: parameter.grad for name, parameter in unsharded.named_parameters() if parameter.grad is not None}
        )
    return gradients


def expected_gradients(case: Case, micros: list[list[dict[str, torch.Tensor]]], members: list[str]) -> list[Any]:
    """Return this rank's gradients of `members`, the parameters of one FSDP parameter group."""
    total: Any = None
    accumulated: list[Any] = []
    for index, rank_gradients in enumerate(micros):
        selected = [[gradients[name] for name in members] for gradients in rank_gradients]
        within = [row_within(case, selected[i : i + case.shards]) for i in range(0, len(selected), case.shards)]
        rows, segments = [row for row, _ in within], within[0][1]
        rows = (
            [round_to_reduce_dtype(case, row + before) for row, before in zip(rows, accumulated, strict=True)]
            if accumulated
            else rows
        )
        if case.accumulates == "shards" and index == 0:
            accumulated = rows
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
    torch.manual_seed(rank // case.shards if way == "hook" else 0)  # attach broadcasts the weights of the first replica
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
            members = [parameter_name for parameter_name in parameters if parameter_name.rsplit(".", 1)[0] in modules]
            for parameter_name, row in zip(members, expected_gradients(case, micros, members), strict=True):
                local = parameters[parameter_name].grad.to_local().reshape(-1)
                assert torch.equal(local, torch.from_numpy(row[: local.numel()])), (
                    f"{way}, {name}, step {step}, {parameter_name}: {local[:5]} {row[:5]}"
                )
        optimizer.step()
        for parameter in parameters.values():
            check_same(parameter.to_local().detach(), mesh)
        with torch.no_grad():
            for parameter_name, parameter in copied.named_parameters():
                parameter.copy_(parameters[parameter_name].full_tensor())
    if attachment is not None:
        check_trace(name, recorder)
        attachment.detach()


def check_same(shard: torch.Tensor, mesh: DeviceMesh) -> None:
    """Check that all replicas are bitwise equal, over a group without a codec."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, shard)
    replicas = gathered[dist.get_rank() % mesh.size(1) :: mesh.size(1)]
    assert len(replicas) == mesh.size(0)
    assert all(torch.equal(replica, shard) for replica in replicas)


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
    gathered = torch.empty(size)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=group)
    assert gathered.tolist() == list(range(size))
    first = torch.tensor([float(rank)])
    dist.broadcast(first, group=group, group_src=0)
    assert first.item() == 0
    dist.barrier(group=group)
    rows = [torch.randn(100, generator=torch.Generator().manual_seed(peer)).numpy() for peer in range(size)]
    sent = in_8_bits(ordered_sum([in_8_bits(row, [100]) for row in rows]), [100])
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


def refuse_and_attach_to_one() -> None:
    """Arguments that differ between replicas are refused; a single replica compresses as without replicas."""
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
    with tb.fsdp.attach(module, optimizer, BYTEGRAD, replicate_group=replicas):
        module(torch.ones(1, 512)).sum().backward()

    # The filter of rank 1 also raises on the other meshes, through the groups that an attachment opens first.
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
    assert 3.9 * sum(event.wire_bytes for event in sent) < sum(event.raw_bytes for event in sent)


def use_different_branches(way: str) -> None:
    """All ranks raise and name the parameters, if replicas differ, if the ranks of a module differ, or one rank does.

    Replicas of a weight algorithm do not add gradients, and may differ. With the backend, torch itself reduces within a
    module.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    by_replica, by_shard = [number // 2 % 2 for number in range(size)], [number % 2 for number in range(size)]
    alone = [int(number == 0) for number in range(size)]
    decentralized = tb.DecentralizedAlgorithm(hierarchical=False)
    trials = {
        "hook": [(algorithm, used) for algorithm in (BYTEGRAD, FLAT) for used in (by_shard, alone, by_replica)]
        + [(decentralized, by_shard), (decentralized, by_replica)],
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


def check_trace(name: str, recorder: tb.observe.Recorder) -> None:
    sent = [event for event in recorder.events if event.phase == "send"]
    scopes = {event.scope for event in sent}
    reduced = {event.scope for event in sent if event.num_elements}
    assert scopes == {"world", "world of replicas"}
    assert reduced == ({"world of replicas"} if name in BOTH_WAYS else scopes)
    assert 0 < sum(event.bytes_sent for event in sent) < sum(event.raw_bytes for event in sent)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    way, *names = sys.argv[1:]
    otherwise = refuse_and_attach_to_one if way == "hook" else use_the_backend_otherwise
    checks = {"otherwise": otherwise, "branches": partial(use_different_branches, way)}
    run_cases(names, lambda name: checks[name]() if name in checks else train(way, name))
    assert not [thread for thread in threading.enumerate() if "torchbagua" in thread.name]


if __name__ == "__main__":
    main()
