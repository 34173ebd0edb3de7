"""Groups, nodes, agreement between ranks, exchanges and their events."""

import functools
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
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
from torchbagua.transport.base import Members, TransportMaker
from torchbagua.transport.communicator import Communicator, Direction
from torchbagua.transport.gloo import GlooTransport
from transports import CollectivesAlone

SHORT = timedelta(seconds=2)


def test_one_node_by_host_name() -> None:
    for group in run_ranks(3, tb.BaguaProcessGroup):
        assert group.nodes == [0, 0, 0]
        assert group.intra_node is None
        assert group.inter_node is None
        assert group.world.ranks == (0, 1, 2)


def test_unequal_nodes() -> None:
    groups = run_ranks(5, lambda group: tb.BaguaProcessGroup(group, nodes=["b", "a", "b", "a", "b"]))
    assert groups[0].nodes == [0, 1, 0, 1, 0]
    assert groups[0].node_ranks == [[0, 2, 4], [1, 3]]
    assert groups[0].num_shards == 2
    assert [group.intra_node.ranks for group in groups if group.intra_node] == [
        (0, 2, 4), (1, 3), (0, 2, 4), (1, 3), (0, 2, 4)
    ]  # fmt: skip
    assert [group.inter_node and group.inter_node.ranks for group in groups] == [(0, 1), (0, 1), (2, 3), (2, 3), None]


def test_long_tensor_if_a_node_has_one_rank() -> None:
    def body(group: dist.ProcessGroup) -> torch.Tensor:
        bagua_group = tb.BaguaProcessGroup(group, nodes=[0, 0, 1])
        flat = torch.full((300_000,), 3.0 * group.rank())
        bucket = tb.extend.BaguaBucket("numbers", [tb.extend.BaguaTensor("weight", flat)], bagua_group, flat)
        return bucket.append_centralized_synchronous_op(hierarchical=True).run()

    assert [result.unique().tolist() for result in run_ranks(3, body)] == [[3.0]] * 3


@pytest.mark.parametrize("compression", [None, "minmax_uint8", "sign1bit", "bfloat16", "float16"])
def test_tensor_of_fewer_blocks_than_ranks(compression: str | None) -> None:
    def body(group: dist.ProcessGroup) -> torch.Tensor:
        flat = torch.full((3,), 3.0 * group.rank())
        bucket = tb.extend.BaguaBucket(
            "numbers", [tb.extend.BaguaTensor("weight", flat)], tb.BaguaProcessGroup(group), flat
        )
        return bucket.append_centralized_synchronous_op(compression=compression).run()

    assert [result.unique().tolist() for result in run_ranks(3, body)] == [[3.0]] * 3


def test_one_rank_per_node_is_flat() -> None:
    for group in run_ranks(3, lambda group: tb.BaguaProcessGroup(group, nodes=[0, 1, 2])):
        assert group.intra_node is None


def test_subgroup_of_ranks() -> None:
    """A hand-made group over two of the ranks numbers its ranks from 0, independently of the world."""
    store = dist.HashStore()

    def body(group: dist.ProcessGroup) -> tuple[int, ...] | None:
        if group.rank() == 0:
            return None
        return tb.BaguaProcessGroup(gloo_group(store, group.rank() - 1, 2)).world.ranks

    assert run_ranks(3, body) == [None, (0, 1), (0, 1)]


def test_group_from_init_process_group() -> None:
    init_default_group()
    assert tb.BaguaProcessGroup(dist.group.WORLD).size == 1


def test_disagreement_names_rank_field_and_values() -> None:
    def nodes(group: dist.ProcessGroup) -> None:
        tb.BaguaProcessGroup(group, nodes=[0, group.rank() == 2, 0])

    with pytest.raises(
        ValueError, match=r"disagree on BaguaProcessGroup's argument nodes: ranks 0-1 have \[0, 0, 0\], rank 2"
    ):
        run_ranks(3, nodes)

    def block(group: dist.ProcessGroup) -> None:
        tb.ByteGradAlgorithm(block=1024 if group.rank() == 1 else 2048).reify(group)

    with pytest.raises(ValueError, match="ByteGradAlgorithm's argument block: rank 0 has '2048', rank 1 has '1024'"):
        run_ranks(2, block)

    def algorithm(group: dist.ProcessGroup) -> None:
        (tb.ByteGradAlgorithm, tb.GradientAllReduceAlgorithm)[group.rank()]().reify(group)

    with pytest.raises(ValueError, match="the algorithm: rank 0 has 'ByteGradAlgorithm', rank 1 has 'GradientAllRed"):
        run_ranks(2, algorithm)


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

    with pytest.raises(TimeoutError, match=r"timed out after 2 s waiting for ranks \[1\] of 3: .* reify or attach"):
        run_ranks(3, body)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": [0, 1]}, "nodes must have one entry for each of 1 ranks, got 2"),
        ({"nodes": torch.tensor([0])}, r"nodes must be a list of strings or integers, got tensor\(\[0\]\)"),
        ({"nodes": 1}, "nodes must be a list of strings or integers, got 1"),
        ({"nodes": [[0]]}, r"nodes must be a list of strings or integers, got \[\[0\]\]"),
        ({"timeout": 3}, "timeout must be a positive datetime.timedelta, got 3"),
        ({"timeout": timedelta(0)}, "timeout must be a positive datetime.timedelta"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        run_ranks(1, lambda group: tb.BaguaProcessGroup(group, **arguments))


def test_not_a_group() -> None:
    with pytest.raises(
        TypeError, match=r"process_group must be a torch.distributed.ProcessGroup, got None; call init_process"
    ):
        tb.BaguaProcessGroup(None)


CODECS = {
    "minmax_uint8": (2048, quantise_block),
    "minmax_uint4": (128, quantise_block_4_bits),
    "sign1bit": (2048, sign_block),
}


@pytest.mark.parametrize("compression", CODECS)
@pytest.mark.parametrize("nodes", [None, [0, 1, 0]], ids=str)
@pytest.mark.parametrize("intra_compression", [None, "minmax_uint8"])
def test_compressed_mean_equals_the_oracle(
    compression: str, nodes: list[int] | None, intra_compression: str | None
) -> None:
    segments = [5000, 1, 333]
    rows = [torch.randn(sum(segments), generator=torch.Generator().manual_seed(rank)) for rank in range(3)]

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        flat = rows[group.rank()].clone()
        tensors = [
            tb.extend.BaguaTensor(str(size), part) for size, part in zip(segments, flat.split(segments), strict=True)
        ]
        bucket = tb.extend.BaguaBucket("numbers", tensors, tb.BaguaProcessGroup(group, nodes=nodes), flat)
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
        flat = torch.zeros(sum(segments))
        tensors = [
            tb.extend.BaguaTensor(str(size), part) for size, part in zip(segments, flat.split(segments), strict=True)
        ]
        bagua_group = tb.BaguaProcessGroup(group)
        bucket = tb.extend.BaguaBucket("weights", tensors, bagua_group, flat)
        replicas = [torch.zeros_like(flat) for _ in range(3)]
        first = tb.extend.BaguaBucket("weights", tensors, bagua_group, flat)
        first.append_low_precision_decentralized_synchronous_op(*replicas, compression=None)
        bucket.append_low_precision_decentralized_synchronous_op(*replicas, compression="minmax_uint4")
        results = []
        for number, values in enumerate(rows[group.rank()]):
            flat.copy_(values)
            results.append((bucket if number else first).run().clone())
        return results[1:]

    ring = LowPrecisionRing(
        [row[0].numpy() for row in rows], segments, is_buffer=False, block=128, coded=quantise_block_4_bits
    )
    expected = [ring.round([row[number].numpy() for row in rows]) for number in (1, 2)]
    for rank, results in enumerate(run_ranks(3, body)):
        for got, round_results in zip(results, expected, strict=True):
            assert torch.equal(got, torch.from_numpy(round_results[rank]))


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


@pytest.mark.parametrize("num_elements", [10, 100_000])
@pytest.mark.parametrize("fast_ranks", [(), (1,), (0, 1, 2, 3)], ids=str)
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


def test_timeout_names_operation_bucket_and_peer_and_ends_the_other_ranks() -> None:
    """Rank 2 stops taking part. One of the others times out on it; then both raise at once."""
    errors: dict[int, str] = {}
    seconds: dict[int, float] = {}
    done = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        communicator = tb.BaguaProcessGroup(group, timeout=SHORT).world
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
    assert all(elapsed < 2 * SHORT.total_seconds() + 1 for elapsed in seconds.values())


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

    seconds: dict[int, float] = {}

    def body(group: dist.ProcessGroup) -> None:
        bagua_group = tb.BaguaProcessGroup(group, timeout=timedelta(seconds=40))
        flat = torch.ones(3000)
        bucket = tb.extend.BaguaBucket("gradients", [tb.extend.BaguaTensor("weight", flat)], bagua_group, flat)
        bucket.append_centralized_synchronous_op(compression=FailsInTheMiddle(fails=group.rank() == 1))
        lane = Lane("failing", on_failure=bagua_group.close)
        start = time.monotonic()
        expected = "MemoryError: no room" if group.rank() == 1 else "^torchbagua: all_gather of gradients"
        with pytest.raises(RuntimeError, match=expected):
            lane.submit(bucket.run).future().wait()
        seconds[group.rank()] = time.monotonic() - start
        lane.close()

    run_ranks(2, body)
    assert max(seconds.values()) < 10, seconds


def test_a_receive_that_close_dropped_raises() -> None:
    """No receive is pending after close, as after an empty tensor."""

    def body(group: dist.ProcessGroup) -> None:
        bagua_group = tb.BaguaProcessGroup(group)
        receives = [torch.zeros(3) for _ in range(2)]
        exchange = Exchange(Pipeline(bagua_group.world, CPU), "all_gather", receives, "x")

        def close() -> Iterator[torch.Tensor]:
            bagua_group.close()
            yield torch.zeros(0)

        exchange.run(close())

    with pytest.raises(tb.CommunicationError, match=r"all_gather of x .* the group is closed"):
        run_ranks(2, body)


def test_closed_group_raises() -> None:
    def body(group: dist.ProcessGroup) -> None:
        bagua_group = tb.BaguaProcessGroup(group)
        bagua_group.close()
        Exchange(Pipeline(bagua_group.world, CPU), "all_to_all", [torch.ones(1)] * 2, "x")

    with pytest.raises(tb.CommunicationError, match=r"all_to_all of x over .* failed on rank 0: the group is closed"):
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


@pytest.mark.parametrize("transport", [None, CollectivesAlone])
def test_a_broadcast_gives_all_ranks_the_bytes_of_rank_0(transport: TransportMaker | None) -> None:
    def tensors_of(rank: int) -> list[torch.Tensor]:
        dtypes_by_length = {0: torch.float32, 1: torch.int64, 2: torch.bfloat16, 1001: torch.float32}
        return [torch.full((length,), rank + 0.5).to(dtype) for length, dtype in dtypes_by_length.items()]

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, transport=transport)
        tensors = tensors_of(own.rank)
        broadcast_tensors(own.world, tensors, "test tensors")
        for tensor, expected in zip(tensors, tensors_of(0), strict=True):
            assert torch.equal(tensor, expected)
        own.close()

    run_ranks(3, body)


def pair_of_three(rank: int, size: int, round: int) -> dict[int, float]:
    return {rank: 1.0} if rank == 2 else {0: 0.5, 1: 0.5}


def test_a_rank_that_is_alone_in_a_round_takes_part_in_its_collective() -> None:
    """Without messages an exchange is one collective, in which the other ranks wait for this rank."""

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, transport=CollectivesAlone)
        x = torch.full((5,), float(own.rank))
        out = torch.empty_like(x)
        spec = TensorSpec((5,), x.dtype, x.device, "x")
        neighbourhood_mean(own, tb.topology.Graph(pair_of_three, 1), spec, hierarchical=False)(x, out, 0)
        assert torch.equal(out, torch.full((5,), 2.0 if own.rank == 2 else 0.5))
        own.close()

    run_ranks(3, body)


class WithoutDeadline(GlooTransport):
    """A transport whose abilities say that it does not bound its waits."""

    abilities = replace(GlooTransport.abilities, has_deadline=False)

    def __init__(self, members: Members, rail: int = 0) -> None:
        super().__init__(members)


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


def test_ranks_compare_the_arguments_of_transports() -> None:
    def body(group: dist.ProcessGroup) -> None:
        rails = [functools.partial(WithoutDeadline, rail=rank) for rank in range(2)]
        expected = r"argument transport.*WithoutDeadline\(rail=0\).*WithoutDeadline\(rail=1\)"
        with pytest.raises(ValueError, match=expected):
            tb.BaguaProcessGroup(group, transport=rails[group.rank()])
        tb.BaguaProcessGroup(group, transport=rails[0]).close()

    run_ranks(2, body)
