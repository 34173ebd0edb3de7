"""The operations of groups and of buckets that user-defined algorithms call, on CPUs and GPUs, and their events."""

from collections.abc import Callable
from functools import partial
from itertools import combinations, product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from devices import CPU
from oracle import ordered_sum
from ranks import run_ranks

SIZE = 3
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


def values_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(rank)).to(device)


def on_ranks(device: torch.device, body: Callable[[tb.BaguaProcessGroup], Any], **arguments: Any) -> list[Any]:
    def with_group(group: dist.ProcessGroup) -> Any:
        own = tb.BaguaProcessGroup(group, **arguments)
        try:
            return body(own)
        finally:
            own.close()

    return run_ranks(SIZE, with_group, device=device)


def sum_in_rank_order(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in rank order, computed in float32 (float64 in float64), in the dtype of the values."""
    real = [torch.view_as_real(value) if value.is_complex() else value for value in values]
    wide = torch.float64 if real[0].dtype == torch.float64 else torch.float32
    total = torch.as_tensor(ordered_sum([value.cpu().to(wide).numpy() for value in real])).to(real[0].dtype)
    return torch.complex(*total.unbind(-1)) if values[0].is_complex() else total


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*(((5, 700), dtype) for dtype in DTYPES), ((), torch.float32), ((0, 1), torch.complex64)],
    ids=str,
)
def test_all_reduce_reduce_scatter_and_all_gather(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    given = [values_of(rank, (SIZE, *shape), dtype, device) for rank in range(SIZE)]

    def body(group: tb.BaguaProcessGroup) -> dict[str, torch.Tensor]:
        own = given[group.rank]
        results = {}
        for _ in range(2):  # the second time reuses the first call's layout
            results["sum"] = group.all_reduce(own[0].clone())
            results["own sum"] = group.reduce_scatter(own)
            results["all"] = group.all_gather(own[1])
        assert torch.equal(own, values_of(group.rank, (SIZE, *shape), dtype, device))
        return results

    for rank, results in enumerate(on_ranks(device, body)):
        assert torch.equal(results["sum"].cpu(), sum_in_rank_order([values[0] for values in given]))
        assert torch.equal(results["own sum"].cpu(), sum_in_rank_order([values[rank] for values in given]))
        assert torch.equal(results["all"], torch.stack([values[1] for values in given]))


def test_calls_that_differ_in_one_argument_share_no_plan() -> None:
    """A plan is kept by name: the same calls under names of their own have the same results, which all differ."""
    given = [values_of(rank, (5000,), torch.float32, CPU) for rank in range(SIZE)]
    calls: list[dict[str, Any]] = [
        {"average": average, "compression": compression, "hierarchical": hierarchical}
        for average, compression, hierarchical in product((False, True), (None, "minmax_uint8"), (False, True))
    ]

    def body(group: tb.BaguaProcessGroup) -> list[torch.Tensor]:
        x = given[group.rank]
        shared = [group.all_reduce(x.clone(), **call) for call in calls]
        alone = [group.all_reduce(x.clone(), **call, name=str(call)) for call in calls]
        assert all(map(torch.equal, shared, alone))
        assert not any(torch.equal(*pair) for pair in combinations(alone, 2))
        return alone

    for results in on_ranks(CPU, body, nodes=[0, 1, 1]):
        for call, result in zip(calls, results, strict=True):
            expected = sum_in_rank_order(given) / (SIZE if call["average"] else 1)
            assert torch.allclose(result, expected, atol=0.15)  # a hundredth of the range of a block, in each phase


def test_ranks_may_make_a_bucket_before_or_after_a_call() -> None:
    """The training thread makes the buckets, while the lane runs the calls of earlier ones."""
    given = [values_of(rank, (5000,), torch.float32, CPU) for rank in range(SIZE)]

    def body(group: tb.BaguaProcessGroup) -> list[torch.Tensor]:
        own = given[group.rank]

        def make_bucket() -> tb.extend.BaguaBucket:
            bucket = tb.extend.BaguaBucket("numbers", [tb.extend.BaguaTensor("weight", own)], group, own.clone())
            return bucket.append_centralized_synchronous_op(average=False)

        made_before = make_bucket() if group.rank == 0 else None
        total = group.all_reduce(own.clone())
        return [total, (made_before or make_bucket()).run()]

    for results in on_ranks(CPU, body):
        assert all(torch.equal(result, sum_in_rank_order(given)) for result in results)


def test_the_order_of_a_sum_over_nodes() -> None:
    """Hierarchical sums reduce within nodes first; others reduce in rank order."""
    given = [values_of(rank, (5000,), torch.float32, CPU) for rank in range(SIZE)]
    orders = {True: sum_in_rank_order([given[0], sum_in_rank_order(given[1:])]), False: sum_in_rank_order(given)}
    assert not torch.equal(*orders.values())

    def body(group: tb.BaguaProcessGroup) -> None:
        own = given[group.rank]
        for hierarchical, expected in orders.items():
            assert torch.equal(group.all_reduce(own.clone(), hierarchical=hierarchical), expected)
            bucket = tb.extend.BaguaBucket("numbers", [tb.extend.BaguaTensor("weight", own)], group, own.clone())
            found = bucket.append_centralized_synchronous_op(hierarchical=hierarchical, average=False).run()
            assert torch.equal(found, expected)

    on_ranks(CPU, body, nodes=[0, 1, 1])


def test_exchange_and_all_gather_accept_any_dtype_and_observers_receive_every_message(device: torch.device) -> None:
    recorder = tb.observe.Recorder()
    dtypes = [*DTYPES, torch.int16, torch.bool]

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, observers=[recorder] if group.rank() == 0 else [])
        for dtype in dtypes:
            given = [(torch.arange(6, device=device) - rank).view(2, 3).to(dtype) for rank in range(SIZE)]
            received, mine = torch.zeros_like(given[0]), given[own.rank]
            if own.rank != 2:
                own.exchange({1 - own.rank: mine}, {1 - own.rank: received}, name=f"message {dtype}")
                assert torch.equal(received, given[1 - own.rank])
            assert torch.equal(own.all_gather(mine, name=f"gathering {dtype}"), torch.stack(given))
        own.reduce_scatter(torch.ones(SIZE, 2, device=device), name="a scatter")
        own.all_reduce(torch.ones(6, device=device), name="a sum")
        own.close()

    run_ranks(SIZE, body, device=device)
    sent = [(event.bucket, event.operation, event.bytes_sent) for event in recorder.events if event.bytes_sent]
    for dtype in dtypes:
        assert (f"message {dtype}", "peer_exchange", 6 * dtype.itemsize) in sent
        assert (f"gathering {dtype}", "all_gather", 6 * dtype.itemsize) in sent
    assert ("a scatter", "all_to_all", 8) in sent
    assert sum(num_bytes for name, _, num_bytes in sent if name == "a sum") == 24 * 2  # one rank has all six


@pytest.mark.parametrize("num_elements", [4, 100_000])
def test_exchange_on_any_graph(device: torch.device, num_elements: int) -> None:
    """A graph whose ranks receive from other ranks than they send to, a one-way ring, and a graph without edges."""
    graphs = [{0: [1, 2], 1: [], 2: [0]}, {0: [1], 1: [2], 2: [0]}, {0: [], 1: [], 2: []}]

    def body(group: tb.BaguaProcessGroup) -> list[dict[int, torch.Tensor]]:
        results = []
        for targets in graphs:
            own = targets[group.rank]
            sends = {peer: torch.full((num_elements,), 10.0 * group.rank + peer, device=device) for peer in own}
            sources = [source for source in range(SIZE) if group.rank in targets[source]]
            receives = {source: torch.zeros(num_elements, device=device) for source in sources}
            group.exchange(sends, receives, name="a graph")
            results.append(receives)
        return results

    for rank, results in enumerate(on_ranks(device, body)):
        assert [sorted(received) for received in results] == [[[2], [2], []], [[0], [0], []], [[0], [1], []]][rank]
        for received in results:
            assert all(value.unique().tolist() == [10.0 * source + rank] for source, value in received.items())


def test_refusals() -> None:
    def body(group: tb.BaguaProcessGroup) -> None:
        x = torch.ones(SIZE, 4)
        for call, message in [
            (lambda: group.all_reduce(x.T), r"all_reduce: x must be contiguous, got \[4, 3\] with strides"),
            (lambda: group.all_reduce(x.int()), "all_reduce: x must be floating-point or complex, got torch.int32"),
            (
                lambda: group.all_reduce(x.double(), compression="minmax_uint8"),
                "encodes torch.float64, got Min",
            ),
            (
                lambda: group.reduce_scatter(x[:2]),
                r"x must have shape \[3, \.\.\.\], one part for each rank, got \[2, 4\]",
            ),
            (lambda: group.exchange({group.rank: x}, {}), "the keys of sends must be other ranks of 3, got"),
            (lambda: group.exchange({}, {SIZE: x}), "the keys of receives must be other ranks of 3, got 3"),
        ]:
            with pytest.raises(ValueError, match=message):
                call()

    on_ranks(CPU, body)


def halve(bucket: tb.extend.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
    bucket.flat.div_(2)


def bucket_of(group: dist.ProcessGroup, num_elements: int = 6) -> tb.extend.BaguaBucket:
    parameter = torch.full((num_elements,), float(group.rank() + 1))
    return tb.extend.BaguaBucket(
        "b", [tb.extend.BaguaTensor("w", parameter)], tb.BaguaProcessGroup(group), parameter.clone()
    )


def test_operations_are_named_in_reprs_and_profiles() -> None:
    """A debugger shows the repr."""

    def body(group: dist.ProcessGroup) -> None:
        bucket = bucket_of(group)
        spare = torch.zeros(3, 6)
        bucket.append_python_op(halve).append_centralized_synchronous_op(compression="minmax_uint8")
        bucket.append_decentralized_synchronous_op(spare[0], peer_selection_mode=tb.topology.Ring())
        bucket.append_low_precision_decentralized_synchronous_op(*spare, compression=None)
        means = "neighbourhood_mean over Ring(), low_precision_ring in Identity()"
        names = f"python_op halve, centralized_mean in MinMaxUInt8(block=2048), {means}"
        assert repr(bucket) == f"BaguaBucket('b', 6 elements of torch.float32, [{names}])"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            bucket.run()
        assert {f"torchbagua: {name}" for name in names.split(", ")} <= {event.name for event in profile.events()}
        assert bucket.clear_ops().operations == []

    run_ranks(1, body)


def test_the_ring_runs_in_two_parts() -> None:
    """The weights are final before the neighbors receive them; `run` does both parts."""

    def body(group: dist.ProcessGroup) -> None:
        bucket = bucket_of(group)
        own, left, right = torch.zeros(3, 6)
        bucket.append_low_precision_decentralized_synchronous_op(own, left, right, compression=None)
        expected = bucket.flat.clone()
        bucket.start()
        assert torch.equal(bucket.flat, expected)
        assert torch.equal(own, expected)
        assert not left.any()
        bucket.finish()
        assert torch.equal(left, torch.full((6,), float((group.rank() - 1) % 3 + 1)))
        assert torch.equal(right, torch.full((6,), float((group.rank() + 1) % 3 + 1)))
        in_one_part = bucket_of(group)
        replicas = torch.zeros(3, 6)
        in_one_part.append_low_precision_decentralized_synchronous_op(*replicas, compression=None).run()
        assert torch.equal(replicas, torch.stack([own, left, right]))
        assert (bucket.round_index, in_one_part.round_index) == (1, 1)

    run_ranks(3, body)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("topology", ["all", "shift_one", tb.topology.Ring()])
def test_a_mean_may_be_written_in_place(topology: str | tb.extend.Topology, in_place: bool) -> None:
    def body(group: dist.ProcessGroup) -> torch.Tensor:
        bucket = bucket_of(group, num_elements=5000)
        mean = bucket.flat if in_place else torch.zeros(5000)
        before = bucket.flat.clone()
        bucket.append_decentralized_synchronous_op(mean, peer_selection_mode=topology).run()
        assert in_place or torch.equal(bucket.flat, before)
        return mean

    expected = {"all": [2.5] * 4, "shift_one": [2, 3, 2, 3]}.get(str(topology), [7 / 3, 2, 3, 8 / 3])
    for mean, value in zip(run_ranks(4, body), expected, strict=True):
        torch.testing.assert_close(mean, torch.full((5000,), float(value)))


def test_replicas_and_peer_weights_that_do_not_fit() -> None:
    def body(group: dist.ProcessGroup) -> None:
        bucket, x = bucket_of(group), torch.zeros(6)
        average, ring = (
            bucket.append_decentralized_synchronous_op,
            bucket.append_low_precision_decentralized_synchronous_op,
        )
        for call, message in (
            (partial(average, x.half()), r"peer_weight must be contiguous, torch\.float32, \[6\], got torch\.float16"),
            (partial(ring, x, x[1:], x), r"the replica left must be contiguous, torch\.float32, \[6\], got .*\[5\]"),
            (
                partial(bucket.append_asynchronous_model_average_op, "shift_one"),
                "peer_selection_mode must be 'all', got 'shift_one'",
            ),
            (
                partial(average, x, peer_selection_mode="ring"),
                r"peer_selection_mode must be one of \('all', 'shift_one'\), got 'ring'",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                call()

    run_ranks(1, body)
