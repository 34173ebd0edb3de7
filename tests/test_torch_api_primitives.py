"""Compare Bagua's communication primitives with the expected results; ranks are threads."""

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchbagua.compat.bagua as bagua
from ranks import run_ranks
from torchbagua.compat.bagua.communication import (
    BaguaProcessGroup,
    CommMember,
    allreduce_coalesced_inplace,
    broadcast_coalesced,
)

RANKS = 3


def values(rank: int, num_elements: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers that differ by rank and index; their sums are exact."""
    return (torch.arange(num_elements) + 10 * rank + 1).to(dtype)


def on_ranks(body: Callable[[int, Any], Any], size: int = RANKS) -> list[Any]:
    """Return the result of `body(rank, comm)` on each rank."""

    def run(group: dist.ProcessGroup) -> Any:
        return body(group.rank(), bagua.from_torch_group(group).get_global_communicator())

    return run_ranks(size, run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64], ids=str)
def test_exchanges_support_any_dtype(dtype: torch.dtype) -> None:
    def body(rank: int, comm: Any) -> list[torch.Tensor]:
        own = values(rank, 6, dtype)
        sent = torch.zeros_like(own)
        if rank == 0:
            bagua.send(own, 2, comm=comm)
        elif rank == 2:
            bagua.recv(sent, 0, comm=comm)
        broadcast = own.clone()
        bagua.broadcast(broadcast, 1, comm=comm)
        gathered, in_place = torch.zeros(18, dtype=dtype), torch.zeros(18, dtype=dtype)
        bagua.allgather(own, gathered, comm=comm)
        in_place[6 * rank : 6 * rank + 6] = own
        bagua.allgather_inplace(in_place, comm=comm)
        exchanged, swapped = torch.zeros_like(own), own.clone()
        bagua.alltoall(own, exchanged, comm=comm)
        bagua.alltoall_inplace(swapped, comm=comm)
        return [sent, broadcast, gathered, in_place, exchanged, swapped]

    all_values = torch.cat([values(rank, 6, dtype) for rank in range(RANKS)])
    for rank, (sent, broadcast, gathered, in_place, exchanged, swapped) in enumerate(on_ranks(body)):
        assert torch.equal(sent, values(0, 6, dtype) if rank == 2 else torch.zeros_like(sent))
        assert torch.equal(broadcast, values(1, 6, dtype))
        assert torch.equal(gathered, all_values)
        assert torch.equal(in_place, all_values)
        parts = torch.cat([values(source, 6, dtype).chunk(RANKS)[rank] for source in range(RANKS)])
        assert torch.equal(exchanged, parts)
        assert torch.equal(swapped, parts)


def test_gather_and_scatter() -> None:
    root = 2

    def body(rank: int, comm: Any) -> list[torch.Tensor]:
        own, gathered = values(rank, 2), torch.zeros(6)
        bagua.gather(own, gathered, root, comm=comm)
        in_place = torch.zeros(6) if rank == root else own.clone()
        in_place[2 * rank : 2 * rank + 2] = own if rank == root else in_place[2 * rank : 2 * rank + 2]
        bagua.gather_inplace(in_place, 2, root, comm=comm)
        scattered, parts = torch.zeros(2), values(rank, 6)
        bagua.scatter(parts, scattered, root, comm=comm)
        dealt = parts.clone() if rank == root else torch.zeros(2)
        bagua.scatter_inplace(dealt, 2, root, comm=comm)
        return [gathered, in_place, scattered, dealt]

    all_values = torch.cat([values(rank, 2) for rank in range(RANKS)])
    for rank, (gathered, in_place, scattered, dealt) in enumerate(on_ranks(body)):
        assert torch.equal(gathered, all_values if rank == root else torch.zeros(6))
        assert torch.equal(in_place, all_values if rank == root else values(rank, 2))
        assert torch.equal(scattered, values(root, 6).chunk(RANKS)[rank])
        assert torch.equal(dealt, values(root, 6) if rank == root else scattered)


OPERATIONS: dict[bagua.ReduceOp, Callable[[Any, Any], Any]] = {
    bagua.ReduceOp.SUM: operator.add,
    bagua.ReduceOp.AVG: operator.add,
    bagua.ReduceOp.PRODUCT: operator.mul,
    bagua.ReduceOp.MIN: torch.minimum,
    bagua.ReduceOp.MAX: torch.maximum,
    bagua.ReduceOp.BOR: operator.or_,
    bagua.ReduceOp.BAND: operator.and_,
    bagua.ReduceOp.BXOR: operator.xor,
}


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        *((op, torch.int64) for op in OPERATIONS),
        *((op, dtype) for op in (bagua.ReduceOp.SUM, bagua.ReduceOp.AVG) for dtype in (torch.float32, torch.complex64)),
    ],
    ids=str,
)
def test_reductions(op: bagua.ReduceOp, dtype: torch.dtype) -> None:
    def body(rank: int, comm: Any) -> list[torch.Tensor]:
        own = values(rank, 6, dtype)
        total, rooted, in_place, rooted_in_place = (own.clone() for _ in range(4))
        rooted.zero_()
        bagua.allreduce(own, total, op, comm)
        bagua.allreduce_inplace(in_place, op, comm)
        bagua.reduce(own, rooted, 1, op, comm)
        bagua.reduce_inplace(rooted_in_place, 1, op, comm)
        part, first = torch.zeros(2, dtype=dtype), own.clone()
        bagua.reduce_scatter(own, part, op, comm)
        bagua.reduce_scatter_inplace(first, op, comm)
        assert torch.equal(own, values(rank, 6, dtype))
        return [total, in_place, rooted, rooted_in_place, part, first]

    expected = reduce(OPERATIONS[op], [values(rank, 6, dtype) for rank in range(RANKS)])
    if op is bagua.ReduceOp.AVG:
        expected = expected // RANKS if dtype == torch.int64 else expected / RANKS
    for rank, (total, in_place, rooted, rooted_in_place, part, first) in enumerate(on_ranks(body)):
        assert torch.equal(total, expected)
        assert torch.equal(in_place, expected)
        assert torch.equal(rooted, expected if rank == 1 else torch.zeros_like(expected))
        assert rank != 1 or torch.equal(rooted_in_place, expected)
        assert torch.equal(part, expected.chunk(RANKS)[rank])
        assert torch.equal(first, torch.cat([part, values(rank, 6, dtype)[2:]]))


def test_alltoall_v() -> None:
    """Rank r sends s + 1 elements to each rank s, from the offsets 8, 4 and 0."""
    counts = [1, 2, 3]

    def body(rank: int, comm: Any) -> list[torch.Tensor]:
        received = torch.full((13,), -1.0)
        bagua.alltoall_v(values(rank, 12), counts, [8, 4, 0], received, [rank + 1] * RANKS, [0, 4, 8, 12], comm=comm)
        swapped = values(rank, 6)
        bagua.alltoall_v_inplace(swapped, [2, 2, 2], [4, 2, 0], comm=comm)
        return [received, swapped]

    for rank, (received, swapped) in enumerate(on_ranks(body)):
        expected = torch.full((13,), -1.0)
        for source in range(RANKS):
            start = [8, 4, 0][rank]
            expected[4 * source : 4 * source + rank + 1] = values(source, 12)[start : start + rank + 1]
        assert torch.equal(received, expected)
        parts = [values(source, 6).split(2)[RANKS - 1 - rank] for source in reversed(range(RANKS))]
        assert torch.equal(swapped, torch.cat(parts))


def test_several_tensors_objects_and_a_barrier() -> None:
    def body(rank: int, comm: Any) -> Any:
        broadcast, reduced = [values(rank), values(rank, 2)], [values(rank), values(rank, 2)]
        broadcast_coalesced(broadcast, 2, comm)
        allreduce_coalesced_inplace(reduced, bagua.ReduceOp.MAX, comm)
        bagua.barrier(comm)
        assert all(map(torch.equal, broadcast + reduced, [values(2), values(2, 2)] * 2))
        return bagua.broadcast_object({"of": rank, "step": [1, 2]}, 1, comm)

    assert on_ranks(body) == [{"of": 1, "step": [1, 2]}] * RANKS


def test_communicators_of_nodes() -> None:
    def body(group: dist.ProcessGroup) -> list[Any]:
        own_group = bagua.from_torch_group(group)
        world = own_group.get_global_communicator()
        within = own_group.get_intra_node_communicator()
        assert own_group.get_intra_node_communicator() is within
        between = own_group.get_inter_node_communicator()
        own = torch.tensor([float(group.rank())])
        bagua.allreduce_inplace(own, comm=between)
        return [world.nranks(), within.rank(), within.nranks(), between, own.item()]

    found = run_ranks(2, body)
    assert [result[:3] for result in found] == [[2, 0, 2], [2, 1, 2]]
    assert found[0][3].nranks() == 1
    assert found[1][3] is CommMember.NON_COMM_MEMBER  # calls with it do nothing
    assert [result[4] for result in found] == [0.0, 1.0]


def test_a_rank_that_is_no_member_does_nothing() -> None:
    comm = BaguaProcessGroup(None, [1, 2]).get_global_communicator()
    tensor = values(0)
    bagua.allreduce_inplace(tensor, comm=comm)
    bagua.broadcast(tensor, comm=comm)
    bagua.barrier(comm)
    assert bagua.broadcast_object("own", comm=comm) == "own"
    assert torch.equal(tensor, values(0))


ONES = torch.ones


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("allreduce", (ONES(4), ONES(3)), "recv_tensor must have 4 elements, got 3"),
        ("allgather", (ONES(4), ONES(7)), "recv_tensor must have 8 elements, got 7"),
        ("alltoall_inplace", (ONES(3),), "send_tensor must have a multiple of 2 elements"),
        ("send", (ONES(2, 3).t(), 0), r"tensor must be contiguous, got strides \(1, 3\)"),
        (
            "alltoall_v_inplace",
            (ONES(4), [2, 3], [0, 2]),
            r"send_displs \+ send_counts must be within 4 elements, got \[\(0, 2\), \(2, 3\)\]",
        ),
        ("alltoall_v_inplace", (ONES(4), [2], [0]), "must have 2 numbers, got 1 and 1"),
        (
            "allreduce_inplace",
            (ONES(4, dtype=torch.complex64), bagua.ReduceOp.MAX),
            "op must be SUM or AVG for complex numbers, got MAX",
        ),
    ],
)
def test_bad_tensors(name: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        on_ranks(lambda rank, comm: getattr(bagua, name)(*arguments, comm=comm), 2)


def test_tensors_of_two_dtypes() -> None:
    rooted = ("reduce", "gather", "scatter")

    def body(rank: int, comm: Any) -> None:
        for name in ("allreduce", "allgather", "alltoall", "reduce_scatter", *rooted):
            arguments = (ONES(4), ONES(4, dtype=torch.int32), *[0][: name in rooted])
            with pytest.raises(
                TypeError, match=r"_tensor must be of torch\.(int32|float32), like the other tensor, got"
            ):
                getattr(bagua, name)(*arguments, comm=comm)

    on_ranks(body, 1)


def test_bad_communicator() -> None:
    with pytest.raises(TypeError, match="comm must be a communicator or None, got 'world'"):
        bagua.barrier("world")
