"""Groups, nodes, agreement between ranks, exchanges and their events."""

import pickle
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from devices import CPU
from ranks import run_ranks
from torchbagua.codecs import Identity, MinMaxUInt8, TensorSpec
from torchbagua.collectives.agreement import Introduction, Verdict, agree_over_store, all_reduce_max
from torchbagua.collectives.all_reduce_mean import AllReduceMean
from torchbagua.collectives.broadcast import broadcast_state, broadcast_tensors
from torchbagua.collectives.exchange import Exchange, Pipeline
from torchbagua.collectives.mean import TwoPhaseMean
from torchbagua.collectives.neighbourhood_mean import neighbourhood_mean
from torchbagua.collectives.row_mean import RowMean
from torchbagua.runtime.lane import Lane
from torchbagua.transport import Transport, TransportError, TransportMaker
from torchbagua.transport.base import Members
from torchbagua.transport.communicator import Communicator, Direction
from torchbagua.transport.gloo import GlooTransport
from transports import CollectivesAlone, PlayedNccl

SHORT = timedelta(seconds=1)


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


class WithoutDeadline(GlooTransport):
    """A transport whose abilities say that it does not bound its waits."""

    abilities = replace(GlooTransport.abilities, has_deadline=False)

    def __init__(self, members: Members, rail: int = 0) -> None:
        super().__init__(members)


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (
            lambda group: tb.BaguaProcessGroup(group, nodes=[0, group.rank()]),
            r"BaguaProcessGroup's argument nodes: rank 0 has \[0, 0\], rank 1 has \[0, 1\]",
        ),
        (
            lambda group: tb.BaguaProcessGroup(group, transport=partial(WithoutDeadline, rail=group.rank())),
            r"argument transport.*WithoutDeadline\(rail=0\).*WithoutDeadline\(rail=1\)",
        ),
        (
            lambda group: tb.ByteGradAlgorithm(block=1024 * (1 + group.rank())).reify(group),
            "ByteGradAlgorithm's argument block: rank 0 has '1024', rank 1 has '2048'",
        ),
        (
            lambda group: (tb.ByteGradAlgorithm, tb.GradientAllReduceAlgorithm)[group.rank()]().reify(group),
            "the algorithm: rank 0 has 'ByteGradAlgorithm', rank 1 has 'GradientAllReduceAlgorithm'",
        ),
        (tb.BaguaProcessGroup, r"the version of torchbagua: rank 0 has '0\.0', rank 1 has '1\.0'"),
    ],
    ids=["nodes", "transport", "argument", "algorithm", "version"],
)
def test_ranks_disagree(
    construct: Callable[[dist.ProcessGroup], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def agree(store: dist.Store, rank: int, size: int, own: Introduction, timeout: timedelta) -> Verdict:
        assert "the version of torchbagua" in own.settings
        settings = {**own.settings, "the version of torchbagua": f"{rank}.0"}
        return agree_over_store(store, rank, size, own._replace(settings=settings), timeout)

    if "version" in message:
        monkeypatch.setattr("torchbagua.collectives.process_group.agree_over_store", agree)

    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=message):
            construct(group)

    run_ranks(2, body)


def test_open_returns_after_all_ranks_have_opened_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a rank that closes them at once, after its algorithm is refused, breaks ranks that still connect."""
    opened_ranks: list[int] = []
    open_group = Communicator.open

    def slowly(communicator: Communicator) -> None:
        time.sleep(0.1 * communicator.rank)
        open_group(communicator)
        opened_ranks.append(communicator.rank)

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group)
        own.open()
        assert len(opened_ranks) == 3
        own.close()

    monkeypatch.setattr(Communicator, "open", slowly)
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


def pair_of_three(rank: int, size: int, round: int) -> dict[int, float]:
    return {rank: 1.0} if rank == 2 else {0: 0.5, 1: 0.5}


def test_a_rank_that_is_alone_takes_part_in_a_collective() -> None:
    """Without messages an exchange is one collective, in which the other ranks wait for this rank."""

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, timeout=timedelta(seconds=10), transport=CollectivesAlone)
        x = torch.full((5,), float(own.rank))
        out = torch.empty_like(x)
        spec = TensorSpec((5,), x.dtype, x.device, "x")
        neighbourhood_mean(own, tb.topology.Graph(pair_of_three, 1), spec, hierarchical=False)(x, out, 0)
        assert torch.equal(out, torch.full((5,), 2.0 if own.rank == 2 else 0.5))
        own.exchange({1: torch.ones(5)} if own.rank == 0 else {}, {0: out} if own.rank == 1 else {})
        assert torch.equal(out, torch.full((5,), [0.5, 1.0, 2.0][own.rank]))
        own.close()

    run_ranks(3, body)


class Opaque:
    """An object that a user's optimizer might store."""


@pytest.mark.parametrize("transport", [None, CollectivesAlone])
def test_broadcast(transport: TransportMaker | None) -> None:
    """Rank 0's values, of any dtype, length and layout, in place; and its state, tensors and numbers."""

    def tensors_of(rank: int) -> list[torch.Tensor]:
        dtypes_by_length = {0: torch.float32, 1: torch.int64, 2: torch.bfloat16, 3: torch.bool, 1001: torch.float32}
        tensors = [torch.full((length,), rank + 0.5).to(dtype) for length, dtype in dtypes_by_length.items()]
        return [*tensors, torch.full((2, 3), 1.5 + rank).t(), torch.tensor(10 + rank)]

    def body(group: dist.ProcessGroup) -> None:
        own, rank = tb.BaguaProcessGroup(group, transport=transport), group.rank()
        tensors = tensors_of(rank)
        addresses = [tensor.data_ptr() for tensor in tensors]
        broadcast_tensors(own.world, tensors, "a test")
        assert all(map(torch.equal, tensors, tensors_of(0)))
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        state = {"state": {0: {"step": torch.tensor(rank), "rank": rank}}, "param_groups": [{"lr": 0.5 + rank}]}
        received = broadcast_state(own.world, state, "a test")
        assert received == {"state": {0: {"step": torch.tensor(0), "rank": 0}}, "param_groups": [{"lr": 0.5}]}
        # A state that is not plain raises the same error on all ranks, and no rank waits.
        with pytest.raises(pickle.UnpicklingError, match="Opaque"):
            broadcast_state(own.world, {"state": Opaque()}, "a test")
        own.close()

    run_ranks(3, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 0, 1]])
def test_a_row_mean_over_nodes(nodes: list[int], dtype: torch.dtype) -> None:
    """As of a layer of FSDP: each rank gets the mean of its own row. Sums within nodes are in float32."""
    values = torch.randn(4, 4 * 138, generator=torch.Generator().manual_seed(0)).to(dtype)
    spec = TensorSpec((100, 1, 37), dtype, CPU, "layer 0")

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        own, out = tb.BaguaProcessGroup(group, nodes=nodes), torch.full((138,), torch.nan, dtype=dtype)
        RowMean(own, Identity(), spec, divisor=4.0, intra_compressor=Identity())(values[group.rank()].clone(), out)
        own.close()
        return out

    first, second = (values[[rank for rank in range(4) if nodes[rank] == node]].float().sum(0) for node in (0, 1))
    assert torch.equal(torch.cat(run_ranks(4, body)), ((first + second) / 4).to(dtype))


def test_the_mean_of_large_float16_values_does_not_overflow() -> None:
    """Their sum would: float16 ends at 65,504."""

    def body(group: dist.ProcessGroup) -> list[float]:
        own, x_N = tb.BaguaProcessGroup(group), torch.full((2,), 40_000.0, dtype=torch.float16)
        AllReduceMean(own.world, TensorSpec((2,), torch.float16, CPU, "x"), 2.0)(x_N)
        own.close()
        return x_N.tolist()

    assert run_ranks(2, body) == [[40_000.0] * 2] * 2


def test_events_count_the_payload() -> None:
    """ByteGrad's volume: 2 (n-1)/n bytes an element, and headers. All fields of the events agree on it."""
    num_elements, size = 3 * 2048 * 4, 3

    def body(group: dist.ProcessGroup) -> list[tb.observe.CommEvent]:
        recorder = tb.observe.Recorder()
        bagua_group = tb.BaguaProcessGroup(group, observers=[recorder])
        spec = TensorSpec((num_elements,), torch.float32, CPU, "gradients")
        TwoPhaseMean(bagua_group.world, MinMaxUInt8(), spec, 3.0)(torch.ones(num_elements))
        return recorder.events

    chunk = num_elements // size
    row_bytes = chunk + 8 * 4  # four blocks a chunk
    for rank, events in enumerate(run_ranks(size, body)):
        peers = {peer for peer in range(size) if peer != rank}
        work = {("encode", "all_to_all"): 3, ("reduce", "all_to_all"): 1, ("decode", "all_gather"): 3}
        for operation in ("all_to_all", "all_gather"):
            for phase in ("send", "receive"):
                work[phase, operation] = len(peers)
                messages = [event for event in events if (event.phase, event.operation) == (phase, operation)]
                assert {event.peers[0] for event in messages} == peers
                assert sum(event.bytes_sent for event in messages) == (phase == "send") * (size - 1) * row_bytes
                assert sum(event.bytes_received for event in messages) == (phase == "receive") * (size - 1) * row_bytes
        assert Counter((event.phase, event.operation) for event in events) == work
        for event in events:
            assert (event.scope, event.bucket, event.ranks) == ("world", "gradients", (0, 1, 2))
            assert (event.num_elements, event.raw_bytes, event.wire_bytes) == (chunk, 4 * chunk, row_bytes)
            assert event.bits_per_element == 8 * row_bytes / chunk
            assert 0 < event.start_ns < event.end_ns


# Exchanges


# Failures


OPERATIONS: dict[str, Callable[[Communicator, torch.Tensor], object]] = {
    "broadcast of a test": lambda world, x: broadcast_tensors(world, [x], "a test"),
    "all_reduce of bucket 0": lambda world, x: AllReduceMean(
        world, TensorSpec((x.numel(),), x.dtype, x.device, "bucket 0"), 2.0
    )(x),
    # gloo does not support it.
    "all_to_all of bucket 0": lambda world, x: world.all_to_all([x, x.clone()], [x, x], "all_to_all of bucket 0", list),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_of_a_group_fail_with_their_own_errors(operation: str) -> None:
    """If torch has a default group, its own functions raise an error about an unknown group for a private group."""

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, timeout=SHORT)
        own.open()
        if group.rank() == 1:
            own.world.close()
        else:
            OPERATIONS[operation](own.world, torch.ones(4))

    with pytest.raises(tb.CommunicationError, match=f"^torchbagua: {operation} .*failed on rank 0"):
        run_ranks(2, body)


@dataclass(frozen=True)
class FailsInTheMiddle(Identity):
    fails: bool = False

    def decode_mean_encode(self, *arguments: object) -> None:
        if self.fails:
            raise MemoryError("no room for the mean")
        super().decode_mean_encode(*arguments)


def test_a_rank_that_fails_between_the_phases_ends_the_other_ranks_at_once() -> None:
    """It has already posted its receives for the second phase. They must not keep its connections open."""

    def body(group: dist.ProcessGroup) -> None:
        own, flat = tb.BaguaProcessGroup(group, timeout=timedelta(seconds=40)), torch.ones(3000)
        bucket = tb.extend.BaguaBucket("numbers", [tb.extend.BaguaTensor("x", flat)], own, flat)
        bucket.append_centralized_synchronous_op(compression=FailsInTheMiddle(fails=group.rank() == 1))
        lane = Lane("failing", on_failure=own.close)
        start = time.monotonic()
        expected = "MemoryError: no room" if group.rank() == 1 else "^torchbagua: all_gather of numbers"
        with pytest.raises(RuntimeError, match=expected):
            lane.submit(bucket.run).future().wait()
        assert time.monotonic() < start + 10
        lane.close()

    run_ranks(2, body)


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


@pytest.mark.parametrize("waits", [True, False])
def test_a_posted_tensor_lives_until_its_operation_ends(waits: bool) -> None:
    """gloo stores only the address: it would send, or write to, memory that is freed earlier."""
    alive: list[bool] = []

    def body(group: dist.ProcessGroup) -> None:
        posted: list[weakref.ref[torch.Tensor]] = []
        own = tb.BaguaProcessGroup(group, transport=partial(LivenessTransport, alive=alive, posted=posted))
        own.open()
        message: dict[str, Any] = {"peer": 1 - group.rank(), "tag": 0, "purpose": "a test"}
        directions: tuple[Direction, Direction] = ("receiving from", "sending to")
        for direction in directions:
            tensor = torch.ones(3)
            posted.append(weakref.ref(tensor))
            own.world.post(direction, tensor=tensor, **message)
            del tensor
        assert all(tensor() is not None for tensor in posted)
        for direction in directions if waits else ():
            own.world.wait(direction, **message)
        assert all((tensor() is None) == waits for tensor in posted)
        own.close()
        assert all(tensor() is None for tensor in posted)

    run_ranks(2, body)
    assert alive == [not waits] * 4


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


# Transports


class WithoutAllGather(GlooTransport):
    name = "some"
    abilities = replace(GlooTransport.abilities, has_messages=False, collectives=frozenset({"all_to_all"}))


class OneThread(GlooTransport):
    """A transport that serves one thread."""

    name = "one"
    twin = Transport.twin  # which raises


class Nameless:
    """An object with abilities, but without a name."""

    abilities = GlooTransport.abilities


@pytest.mark.parametrize(
    ("transport", "message"),
    [
        (WithoutAllGather, "backend some has no all_gather, which ByteGradAlgorithm needs for tensors on cpu"),
        (
            partial(PlayedNccl, calls=[]),
            "a transport in stream order must serve tensors on cuda only, got cpu from gloo",
        ),
        (OneThread, "for one more thread: one serves one thread"),
        *(
            (maker, "^BaguaProcessGroup: transport must return a .* with a name and Abilities")
            for maker in (lambda members: 5, lambda members: object.__new__(Nameless))
        ),
    ],
)
def test_transports_that_lack_something_raise_on_all_ranks(transport: Any, message: str) -> None:
    def use(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, timeout=2 * SHORT, transport=transport)
        try:
            tb.ByteGradAlgorithm().reify(own)
            own.world.silent_twin()
        finally:
            own.close()

    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            use(group)

    run_ranks(2, body)


class CountingTransport(GlooTransport):
    """A transport that records its twins, its ends and its devices."""

    def __init__(self, members: Members, counts: list[str]) -> None:
        super().__init__(members)
        self._counts = counts

    def use_device(self, device: torch.device) -> None:
        self._counts.append(f"use {device}")

    def twin(self) -> "CountingTransport":
        self._counts.append("twin")
        return super().twin()  # type: ignore[return-value]

    def abort(self) -> None:
        self._counts.append("abort")
        super().abort()

    def join(self) -> None:
        self._counts.append("join")


def test_a_twin_is_a_single_transport_that_ends_with_the_communicator() -> None:
    """The host's transport also serves GPUs, but a twin does not send their tensors. A device is prepared once.

    No observer is notified of the twin's messages, which have no common order with the communicator's.
    """

    def body(group: dist.ProcessGroup) -> list[str]:
        counts: list[str] = []
        recorder, transport = tb.observe.Recorder(), partial(CountingTransport, counts=counts)
        own = tb.BaguaProcessGroup(group, timeout=2 * SHORT, transport=transport, observers=[recorder])
        own.open()
        for _ in range(2):
            own.world.use_device(CPU)
        all_reduce_max(own.world.silent_twin(), [group.rank()], "a test")
        own.close()
        assert not recorder.events
        return counts

    for counts in run_ranks(2, body):
        assert [counts.count(name) for name in ("use cpu", "twin", "abort", "join")] == [1, 1, 2, 2], counts


class FailsOnce(GlooTransport):
    """A transport whose collective fails."""

    abilities = replace(GlooTransport.abilities, has_messages=False)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        raise TransportError("Connection closed by peer")


def test_a_failed_collective_closes_the_group_and_later_errors_repeat_the_first() -> None:
    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, timeout=2 * SHORT, transport=FailsOnce, global_ranks=[4])
        own.open()
        where = r"the first over the world group failed on rank 0 \(global rank 4\)"
        first = f"^torchbagua: {where}: Connection closed by peer; a rank has"
        with pytest.raises(tb.CommunicationError, match=first):
            own.world.all_reduce(torch.ones(1), "the first", list)
        for purpose in ("the first", "another"):
            with pytest.raises(tb.CommunicationError, match=first):
                own.world.connect(None, purpose)

    run_ranks(1, body)


def test_errors_name_a_rank_by_its_numbers_in_the_group_and_in_the_job() -> None:
    """Also within a node, where it has a third number."""

    def body(group: dist.ProcessGroup) -> str:
        own = tb.BaguaProcessGroup(group, nodes=[0, 1, 1], global_ranks=[4, 5, 6])
        own.open()
        name = own.intra_node.name_of(own.intra_node.size - 1)
        own.close()
        return name

    assert run_ranks(3, body) == ["rank 0 (global rank 4)", *2 * ["rank 2 (global rank 6)"]]
