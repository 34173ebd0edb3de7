"""Groups, nodes, agreement between ranks, exchanges and their events."""

import functools
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from devices import CPU
from oracle import Coded, LowPrecisionRing, bytegrad, quantise, quantise_block, quantise_block_4_bits, sign_block
from ranks import gloo_group, init_default_group, run_ranks
from torchbagua.codecs import Identity, MinMaxUInt8, TensorSpec
from torchbagua.collectives.agreement import Introduction, Verdict, agree_over_store
from torchbagua.collectives.all_reduce_mean import AllReduceMean
from torchbagua.collectives.broadcast import broadcast_tensors
from torchbagua.collectives.exchange import Exchange, Pipeline
from torchbagua.collectives.mean import TwoPhaseMean
from torchbagua.collectives.neighbourhood_mean import neighbourhood_mean
from torchbagua.runtime.lane import Lane
from torchbagua.transport.base import Members
from torchbagua.transport.communicator import Communicator, Direction
from torchbagua.transport.gloo import GlooTransport
from transports import CollectivesAlone

SHORT = timedelta(seconds=1)


def bucket_of(flat: torch.Tensor, lengths: Sequence[int], group: tb.BaguaProcessGroup) -> tb.extend.BaguaBucket:
    """Return a bucket of tensors with these lengths."""
    parts = enumerate(flat.split(list(lengths)))
    return tb.extend.BaguaBucket("numbers", [tb.extend.BaguaTensor(str(at), part) for at, part in parts], group, flat)


# Groups and nodes


@pytest.mark.parametrize(
    ("given", "nodes", "intra_node", "inter_node"),
    [
        (None, [0, 0, 0], [None] * 3, [None] * 3),  # by host name
        ([2, 7, 5], [0, 1, 2], [None] * 3, [None] * 3),
        (
            ["b", "a", "b", "a", "b"],
            [0, 1, 0, 1, 0],
            [(0, 2, 4), (1, 3), (0, 2, 4), (1, 3), (0, 2, 4)],
            [(0, 1), (0, 1), (2, 3), (2, 3), None],
        ),
    ],
    ids=["one node", "one rank per node", "unequal nodes"],
)
def test_nodes(given: list[str | int] | None, nodes: list[int], intra_node: list[Any], inter_node: list[Any]) -> None:
    groups = run_ranks(len(nodes), lambda group: tb.BaguaProcessGroup(group, nodes=given))
    assert [group.nodes for group in groups] == [nodes] * len(nodes)
    assert [group.world.ranks for group in groups] == [tuple(range(len(nodes)))] * len(nodes)
    assert [group.intra_node and group.intra_node.ranks for group in groups] == intra_node
    assert [group.inter_node and group.inter_node.ranks for group in groups] == inter_node


def test_groups_of_torch() -> None:
    """A hand-made group over two of the ranks numbers its ranks from 0, independently of the world."""
    init_default_group()
    assert tb.BaguaProcessGroup(dist.group.WORLD).size == 1
    store = dist.HashStore()

    def body(group: dist.ProcessGroup) -> tuple[int, ...] | None:
        if group.rank() == 0:
            return None
        return tb.BaguaProcessGroup(gloo_group(store, group.rank() - 1, 2)).world.ranks

    assert run_ranks(3, body) == [None, (0, 1), (0, 1)]


class WithoutDeadline(GlooTransport):
    """A transport whose abilities say that it does not bound its waits."""

    abilities = replace(GlooTransport.abilities, has_deadline=False)

    def __init__(self, members: Members, rail: int = 0) -> None:
        super().__init__(members)


def with_rail(group: dist.ProcessGroup) -> None:
    tb.BaguaProcessGroup(group, transport=functools.partial(WithoutDeadline, rail=group.rank()))


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (
            lambda group: tb.BaguaProcessGroup(group, nodes=[0, group.rank()]),
            r"BaguaProcessGroup's argument nodes: rank 0 has \[0, 0\], rank 1 has \[0, 1\]",
        ),
        (with_rail, r"argument transport.*WithoutDeadline\(rail=0\).*WithoutDeadline\(rail=1\)"),
        (
            lambda group: tb.ByteGradAlgorithm(block=1024 * (1 + group.rank())).reify(group),
            "ByteGradAlgorithm's argument block: rank 0 has '1024', rank 1 has '2048'",
        ),
        (
            lambda group: (tb.ByteGradAlgorithm, tb.GradientAllReduceAlgorithm)[group.rank()]().reify(group),
            "the algorithm: rank 0 has 'ByteGradAlgorithm', rank 1 has 'GradientAllReduceAlgorithm'",
        ),
    ],
    ids=["nodes", "transport", "argument", "algorithm"],
)
def test_ranks_disagree(construct: Callable[[dist.ProcessGroup], object], message: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=message):
            construct(group)

    run_ranks(2, body)


def test_package_version_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def agree(store: dist.Store, rank: int, size: int, own: Introduction, timeout: timedelta) -> Verdict:
        settings = {**own.settings, "the version of torchbagua": f"{rank}.0"}
        return agree_over_store(store, rank, size, own._replace(settings=settings), timeout)

    monkeypatch.setattr("torchbagua.collectives.process_group.agree_over_store", agree)
    with pytest.raises(ValueError, match=r"the version of torchbagua: rank 0 has '0\.0', rank 1 has '1\.0'"):
        run_ranks(2, tb.BaguaProcessGroup)


def test_open_returns_after_all_ranks_have_opened_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a rank that closes them at once, after its algorithm is refused, breaks ranks that still connect."""
    opened_ranks: list[int] = []
    open_group = Communicator.open

    def slowly(communicator: Communicator) -> None:
        time.sleep(0.1 * communicator.rank)
        open_group(communicator)
        opened_ranks.append(communicator.rank)

    monkeypatch.setattr(Communicator, "open", slowly)

    def body(group: dist.ProcessGroup) -> int:
        own = tb.BaguaProcessGroup(group)
        own.open()
        num_open = len(opened_ranks)
        own.close()
        return num_open

    assert run_ranks(3, body) == [3, 3, 3]


def test_missing_rank_is_named() -> None:
    def body(group: dist.ProcessGroup) -> None:
        if group.rank() != 1:
            tb.BaguaProcessGroup(group, timeout=SHORT)

    with pytest.raises(TimeoutError, match=r"timed out after 1 s waiting for ranks \[1\] of 3: .* reify or attach"):
        run_ranks(3, body)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": [0, 1]}, "nodes must have one entry for each of 1 ranks, got 2"),
        ({"nodes": torch.tensor([0])}, r"nodes must be a list of strings or integers, got tensor\(\[0\]\)"),
        ({"nodes": [[0]]}, r"nodes must be a list of strings or integers, got \[\[0\]\]"),
        ({"timeout": 3}, "timeout must be a positive datetime.timedelta, got 3"),
        ({"timeout": timedelta(0)}, "timeout must be a positive datetime.timedelta, got 0 s"),
        (
            {"process_group": None},
            "process_group must be a torch.distributed.ProcessGroup, got None; call init_process_group",
        ),
    ],
    ids=str,
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"BaguaProcessGroup: {message}"):
        run_ranks(1, lambda group: tb.BaguaProcessGroup(**{"process_group": group, **arguments}))


# Means


@pytest.mark.parametrize(
    ("length", "compression", "nodes"),
    [(3, None, None), (3, "minmax_uint8", None), (3, "bfloat16", None), (300_000, None, [0, 0, 1])],
    ids=str,
)
def test_tensors_of_few_blocks_and_nodes_of_one_rank(
    length: int, compression: str | None, nodes: list[int] | None
) -> None:
    def body(group: dist.ProcessGroup) -> torch.Tensor:
        flat = torch.full((length,), 3.0 * group.rank())
        bucket = bucket_of(flat, [length], tb.BaguaProcessGroup(group, nodes=nodes))
        return bucket.append_centralized_synchronous_op(compression=compression).run()

    assert [result.unique().tolist() for result in run_ranks(3, body)] == [[3.0]] * 3


CODECS = {
    "minmax_uint8": (2048, quantise_block),
    "minmax_uint4": (128, quantise_block_4_bits),
    "sign1bit": (2048, sign_block),
}


@pytest.mark.parametrize(
    ("compression", "nodes", "intra_compression"),
    [
        ("minmax_uint8", None, "minmax_uint8"),  # which has no effect on one node
        ("minmax_uint8", [0, 1, 0], "minmax_uint8"),
        ("minmax_uint4", [0, 1, 0], None),
        ("sign1bit", None, None),
    ],
    ids=str,
)
def test_compressed_mean_equals_the_oracle(
    compression: str, nodes: list[int] | None, intra_compression: str | None
) -> None:
    segments = [5000, 1, 333]
    rows = [torch.randn(sum(segments), generator=torch.Generator().manual_seed(rank)) for rank in range(3)]

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        bucket = bucket_of(rows[group.rank()].clone(), segments, tb.BaguaProcessGroup(group, nodes=nodes))
        return bucket.append_centralized_synchronous_op(
            hierarchical=True, compression=compression, intra_compression=intra_compression
        ).run()

    has_levels = nodes is not None and intra_compression is not None
    within: Coded = (lambda row: quantise(row, segments)) if has_levels else lambda row: row
    mean = bytegrad([row.numpy() for row in rows], segments, nodes, *CODECS[compression], within)
    for result in run_ranks(3, body):
        assert torch.equal(result, torch.from_numpy(mean))


def test_the_ring_in_4_bits_equals_the_oracle() -> None:
    segments = [333, 1]
    rows = [torch.randn(3, sum(segments), generator=torch.Generator().manual_seed(rank)) for rank in range(3)]

    def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
        flat, own = torch.zeros(sum(segments)), tb.BaguaProcessGroup(group)
        replicas = [torch.zeros_like(flat) for _ in range(3)]
        first, later = bucket_of(flat, segments, own), bucket_of(flat, segments, own)
        first.append_low_precision_decentralized_synchronous_op(*replicas, compression=None)
        later.append_low_precision_decentralized_synchronous_op(*replicas, compression="minmax_uint4")
        results = []
        for number, values in enumerate(rows[group.rank()]):
            flat.copy_(values)
            results.append((later if number else first).run().clone())
        return results[1:]

    ring = LowPrecisionRing(
        [row[0].numpy() for row in rows], segments, is_buffer=False, block=128, coded=quantise_block_4_bits
    )
    expected = [ring.round([row[number].numpy() for row in rows]) for number in (1, 2)]
    for rank, results in enumerate(run_ranks(3, body)):
        for got, round_results in zip(results, expected, strict=True):
            assert torch.equal(got, torch.from_numpy(round_results[rank]))


def pair_of_three(rank: int, size: int, round: int) -> dict[int, float]:
    return {rank: 1.0} if rank == 2 else {0: 0.5, 1: 0.5}


def test_a_rank_that_is_alone_in_a_round_takes_part_in_its_collective() -> None:
    """Without messages an exchange is one collective, in which the other ranks wait for this rank."""

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, timeout=timedelta(seconds=10), transport=CollectivesAlone)
        x = torch.full((5,), float(own.rank))
        out = torch.empty_like(x)
        spec = TensorSpec((5,), x.dtype, x.device, "x")
        neighbourhood_mean(own, tb.topology.Graph(pair_of_three, 1), spec, hierarchical=False)(x, out, 0)
        assert torch.equal(out, torch.full((5,), 2.0 if own.rank == 2 else 0.5))
        own.close()

    run_ranks(3, body)


def test_events_count_the_payload() -> None:
    """ByteGrad's volume: 2 (n-1)/n bytes an element, and headers. All fields of the events agree on it."""
    num_elements, size = 3 * 2048 * 4, 3

    def body(group: dist.ProcessGroup) -> list[tb.observe.CommEvent]:
        recorder = tb.observe.Recorder()
        bagua_group = tb.BaguaProcessGroup(group, observers=[recorder])
        spec = TensorSpec((num_elements,), torch.float32, torch.device("cpu"), "gradients")
        mean = TwoPhaseMean(bagua_group.world, MinMaxUInt8(), spec, 3.0)
        mean(torch.ones(num_elements))
        return recorder.events

    chunk = num_elements // size
    row_bytes = chunk + 8 * 4  # four blocks a chunk
    for rank, events in enumerate(run_ranks(size, body)):
        peers = {peer for peer in range(size) if peer != rank}
        work = [(event.phase, event.operation) for event in events if event.phase not in ("send", "receive")]
        assert Counter(work) == {("encode", "all_to_all"): 3, ("reduce", "all_to_all"): 1, ("decode", "all_gather"): 3}
        for operation in ("all_to_all", "all_gather"):
            for phase in ("send", "receive"):
                messages = [event for event in events if (event.phase, event.operation) == (phase, operation)]
                assert {event.peers[0] for event in messages} == peers
                assert sum(event.bytes_sent for event in messages) == (phase == "send") * (size - 1) * row_bytes
                assert sum(event.bytes_received for event in messages) == (phase == "receive") * (size - 1) * row_bytes
        for event in events:
            assert (event.scope, event.bucket, event.ranks) == ("world", "gradients", (0, 1, 2))
            assert (event.num_elements, event.raw_bytes, event.wire_bytes) == (chunk, 4 * chunk, row_bytes)
            assert event.bits_per_element == 8 * row_bytes / chunk
            assert 0 < event.start_ns < event.end_ns


# Exchanges


@pytest.mark.parametrize(("num_elements", "fast_ranks"), [(10, (1,)), (100_000, ()), (100_000, (1,))], ids=str)
def test_exchange_delivers_every_tensor_to_its_rank(num_elements: int, fast_ranks: tuple[int, ...]) -> None:
    """Short and long messages, in turns or all at once, also if ranks do not agree on which."""

    def body(group: dist.ProcessGroup) -> None:
        communicator = tb.BaguaProcessGroup(group).world
        rank = communicator.rank
        communicator.link_bytes_per_s = [1e12 if rank in fast_ranks else -1e12] * 4
        for _ in range(2):
            receives = [torch.zeros(num_elements) for _ in range(4)]
            arrived: list[int] = []
            pipeline = Pipeline(communicator, CPU)
            exchange = Exchange(pipeline, "all_to_all", receives, "numbers")
            exchange.send(torch.full((num_elements,), 10.0 * rank + target) for target in exchange.targets)
            arrived.extend(exchange.arrivals())
            pipeline.wait_for_sends()
            for source in range(4):
                assert receives[source].unique().tolist() == [0.0 if source == rank else 10.0 * source + rank]
            assert sorted(arrived) == [source for source in range(4) if source != rank]

    run_ranks(4, body)


def test_link_rate_is_measured_on_long_messages() -> None:
    def body(group: dist.ProcessGroup) -> tuple[float, float]:
        communicator = tb.BaguaProcessGroup(group).world
        rates = []
        for num_elements in (10, 100_000):
            tensors = [torch.zeros(num_elements) for _ in range(4)]
            Exchange(Pipeline(communicator, CPU), "all_to_all", tensors[2:], "numbers").run(tensors)
            rates.append(communicator.link_bytes_per_s[1 - communicator.rank])
        return rates[0], rates[1]

    for after_short, after_long in run_ranks(2, body):
        assert after_short == 0.0
        assert 1e4 < after_long < 1e11  # 400 kB within 40 s, and not faster than memory


# Failures


def test_timeout_names_operation_bucket_and_peer_and_ends_the_other_ranks() -> None:
    """Rank 2 stops taking part. One of the others times out on it; then both raise at once."""
    errors: dict[int, str] = {}
    seconds: dict[int, float] = {}
    done = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        communicator = tb.BaguaProcessGroup(group, timeout=2 * SHORT).world
        tensors = [torch.zeros(100_000) for _ in range(6)]
        Exchange(Pipeline(communicator, CPU), "all_to_all", tensors[3:], "first").run(tensors)
        if group.rank() == 2:
            done.wait(30)
            return
        start = time.monotonic()
        try:
            Exchange(Pipeline(communicator, CPU), "all_to_all", tensors[3:], "second").run(tensors)
        except tb.CommunicationError as error:
            errors[group.rank()] = str(error)
            seconds[group.rank()] = time.monotonic() - start
        if len(errors) == 2:
            done.set()

    run_ranks(3, body)
    assert sorted(errors) == [0, 1]
    assert all("all_to_all of second over the world group failed on rank" in text for text in errors.values())
    assert any("rank 2" in text for text in errors.values())
    assert all(elapsed < 4 * SHORT.total_seconds() + 1 for elapsed in seconds.values())


@pytest.mark.parametrize("operation", ["broadcast of a test", "all_reduce of bucket 0", "all_to_all of bucket 0"])
def test_operations_of_a_group_fail_with_their_own_errors(operation: str) -> None:
    """If torch has a default group, its own functions raise an error about an unknown group for a private group."""

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, timeout=SHORT)
        own.open()
        world = own.world
        if group.rank() == 1:
            world.close()
            return
        x = torch.ones(4)
        if operation.startswith("broadcast"):
            broadcast_tensors(world, [x], "a test")
        elif operation.startswith("all_reduce"):
            AllReduceMean(world, TensorSpec((x.numel(),), x.dtype, x.device, "bucket 0"), 2.0)(x)
        else:
            world.all_to_all([x, x.clone()], [x, x], "all_to_all of bucket 0", list)  # gloo does not support it

    with pytest.raises(tb.CommunicationError, match=f"^torchbagua: {operation} .*failed on rank 0"):
        run_ranks(2, body)


def test_a_rank_that_fails_between_the_phases_ends_the_other_ranks_at_once() -> None:
    """It has already posted its receives for the second phase. They must not keep its connections open."""

    @dataclass(frozen=True)
    class FailsInTheMiddle(Identity):
        fails: bool = False

        def decode_mean_encode(self, *arguments: object) -> None:
            if self.fails:
                raise MemoryError("no room for the mean")
            super().decode_mean_encode(*arguments)

    def body(group: dist.ProcessGroup) -> float:
        own = tb.BaguaProcessGroup(group, timeout=timedelta(seconds=40))
        bucket = bucket_of(torch.ones(3000), [3000], own)
        bucket.append_centralized_synchronous_op(compression=FailsInTheMiddle(fails=group.rank() == 1))
        lane = Lane("failing", on_failure=own.close)
        start = time.monotonic()
        expected = "MemoryError: no room" if group.rank() == 1 else "^torchbagua: all_gather of numbers"
        with pytest.raises(RuntimeError, match=expected):
            lane.submit(bucket.run).future().wait()
        seconds = time.monotonic() - start
        lane.close()
        return seconds

    assert max(run_ranks(2, body)) < 10


def test_exchanges_of_a_closed_group_raise() -> None:
    """Also if `close` dropped their receives: no receive is pending after it, as after an empty tensor."""

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group)
        exchange = Exchange(Pipeline(own.world, CPU), "all_gather", [torch.zeros(3), torch.zeros(3)], "x")

        def close() -> Iterator[torch.Tensor]:
            own.close()
            yield torch.zeros(0)

        with pytest.raises(tb.CommunicationError, match=r"all_gather of x .* the group is closed"):
            exchange.run(close())
        with pytest.raises(tb.CommunicationError, match=r"all_to_all of x over .* on rank \d: the group is closed"):
            Exchange(Pipeline(own.world, CPU), "all_to_all", [torch.ones(1)] * 2, "x")

    run_ranks(2, body)


class LivenessTransport(GlooTransport):
    """Records whether posted tensors are still alive after abort has dropped the operations."""

    def __init__(self, members: Members, alive: list[bool], posted: "list[weakref.ref[torch.Tensor]]") -> None:
        super().__init__(members)
        self._alive = alive
        self._posted = posted

    def abort(self) -> None:
        super().abort()
        self._alive.extend(tensor() is not None for tensor in self._posted)


@pytest.mark.parametrize("ends", ["waited for", "closed"])
def test_a_posted_tensor_lives_until_its_operation_ends(ends: str) -> None:
    """gloo stores only the address: it would send, or write to, memory that is freed earlier."""
    alive: list[bool] = []

    def body(group: dist.ProcessGroup) -> None:
        posted: list[weakref.ref[torch.Tensor]] = []
        transport = functools.partial(LivenessTransport, alive=alive, posted=posted)
        own = tb.BaguaProcessGroup(group, timeout=SHORT, transport=transport)
        own.open()
        peer = 1 - group.rank()
        message: dict[str, Any] = {"tag": 0, "purpose": "a test"}
        directions: tuple[Direction, Direction] = ("receiving from", "sending to")
        for direction in directions:
            tensor = torch.ones(3)
            posted.append(weakref.ref(tensor))
            own.world.post(direction, peer, tensor, **message)
            del tensor
        assert all(tensor() is not None for tensor in posted)
        if ends == "waited for":
            for direction in directions:
                own.world.wait(direction, peer, **message)
            assert all(tensor() is None for tensor in posted)
            posted.clear()
        own.close()
        assert all(tensor() is None for tensor in posted)

    run_ranks(2, body)
    assert alive == ([] if ends == "waited for" else [True] * 4)


def test_a_warning_that_a_filter_turns_into_an_error_closes_the_groups() -> None:
    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, transport=WithoutDeadline)
        with pytest.raises(RuntimeWarning, match="does not bound its waits"):
            own.open()
        with pytest.raises(tb.CommunicationError, match="the group is closed"):
            broadcast_tensors(own.world, [torch.ones(1)], "test tensors")

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        run_ranks(2, body)
