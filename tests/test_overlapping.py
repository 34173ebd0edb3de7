"""Buckets and exchanges that begin while the previous one is in flight: equal results, and the order of messages."""

import itertools
import random
import re
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from devices import CPU
from ranks import on_each_rank, run_ranks
from torchbagua.codecs import Cast, Compressor, Identity, MinMaxUInt4, MinMaxUInt8
from torchbagua.collectives import mean as means
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.exchange import Exchange, Pipeline
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.lane import Job, Lane
from torchbagua.runtime.parameters import BaguaTensor
from torchbagua.transport.communicator import Communicator

LENGTHS = (70 * 2048, 2048 + 5, 30 * 2048, 90 * 2048)
NUM_ROUNDS = 4


class Counted:
    """A bucket that counts how often it begins while another bucket is in flight."""

    def __init__(self, bucket: BaguaBucket) -> None:
        self.bucket = bucket
        self.num_begun = 0

    def may_begin(self) -> bool:
        may_begin = self.bucket.may_begin()
        self.num_begun += may_begin
        return may_begin

    def run_overlapping(self) -> Generator[None, None, torch.Tensor]:
        return self.bucket.run_overlapping()


def bucket_of(group: tb.BaguaProcessGroup, length: int, name: str) -> BaguaBucket:
    flat = torch.zeros(length)
    return BaguaBucket(name, [BaguaTensor(name, flat)], group, flat)


@pytest.mark.parametrize(
    ("size", "compressor", "has_feedback", "is_slow"),
    [
        (2, MinMaxUInt4(), True, True),
        (3, MinMaxUInt8(), True, False),
        (3, Identity(), False, True),
        (4, Cast(), False, False),
    ],
    ids=str,
)
def test_overlapping_buckets_are_bitwise_equal_to_buckets_in_turn(
    size: int, compressor: Compressor, has_feedback: bool, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank begins a different bucket early, or none, and finishes every bucket that it began."""
    monkeypatch.setattr(means, "SMALL_MESSAGE_BYTES", means.SMALL_MESSAGE_BYTES // 9)
    values = torch.randn(NUM_ROUNDS, size, sum(LENGTHS), generator=torch.Generator().manual_seed(0))

    def body(group: dist.ProcessGroup) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
        rank, draw = group.rank(), random.Random(group.rank())

        def means(*, overlaps: bool) -> tuple[list[torch.Tensor], int]:
            own = tb.BaguaProcessGroup(group)
            own.world.link_bytes_per_s = [-1e12 if is_slow else 1e12] * size
            lane = Lane("means", on_failure=own.close)
            buckets, residuals = [], []
            for index, length in enumerate(LENGTHS):
                bucket = bucket_of(own, length, f"bucket {index}")
                state = TwoPhaseResiduals(bucket.flat.device) if has_feedback else None
                bucket.append_local_op(lambda bucket, group: bucket.flat.mul_(2))
                bucket.append_centralized_synchronous_op(
                    hierarchical=False, compression=compressor, error_feedback=state
                )
                bucket.append_local_op(lambda bucket, group: bucket.flat.div_(2))
                buckets.append(Counted(bucket))
                residuals.append(state)
            results = []
            for round in range(NUM_ROUNDS):
                jobs: list[Job[torch.Tensor]] = []
                for counted, part_N in zip(buckets, values[round, rank].split(LENGTHS), strict=True):
                    counted.bucket.flat.copy_(part_N)
                    if overlaps:
                        time.sleep(draw.choice([0, 0, 0.002]))
                        jobs.append(lane.submit_overlapping(counted))
                    else:
                        jobs.append(lane.submit(counted.bucket.run))
                results.append(torch.cat([job.result() for job in jobs]))
                for state in residuals:
                    if state is not None:
                        state.commit()
            lane.close()
            own.close()
            return results, sum(counted.num_begun for counted in buckets)

        in_turn, _ = means(overlaps=False)
        overlapping, num_begun = means(overlaps=True)
        return in_turn, overlapping, num_begun

    for in_turn, overlapping, num_begun in (ranks := run_ranks(size, body)):
        assert all(map(torch.equal, in_turn, overlapping))
        assert all(map(torch.equal, overlapping, ranks[0][1])), "ranks disagree"
        assert 0 < num_begun <= NUM_ROUNDS * (len(LENGTHS) - 1)


def test_buckets_that_may_wait_for_other_ranks_before_their_first_message_begin_alone() -> None:
    def body(group: dist.ProcessGroup) -> set[str]:
        own = tb.BaguaProcessGroup(group)

        def bucket(name: str) -> BaguaBucket:
            return bucket_of(own, 4096, name)

        def mean(bucket: BaguaBucket) -> BaguaBucket:
            return bucket.append_centralized_synchronous_op(hierarchical=False, compression="minmax_uint8")

        buckets = [
            mean(bucket("mean")),
            mean(bucket("local op, mean").append_local_op(lambda bucket, group: None)),
            mean(bucket("python op, mean").append_python_op(lambda bucket, group: None)),
            mean(bucket("mean, python op")).append_python_op(lambda bucket, group: None),
            mean(mean(bucket("two means"))),
            bucket("all-reduce").append_all_reduce_op(),
            bucket("nothing"),
        ]
        may_begin: set[str] = set()
        for in_flight in [mean(bucket("in flight")), mean(bucket("in flight, on the other channel"))]:
            assert not any(bucket.may_begin() for bucket in buckets), "no other mean is in flight"
            steps = in_flight.run_overlapping()
            next(steps)
            assert not in_flight.may_begin()
            may_begin |= {bucket.name for bucket in buckets if bucket.may_begin()}
            assert len(list(steps)) == 1, "it yields after its start, and before each wait for a piece of means"
        own.close()
        return may_begin

    for may_begin in run_ranks(2, body):
        assert may_begin == {"mean", "local op, mean"}


def test_a_failure_names_the_bucket_that_began_early() -> None:
    class Spoilt(MinMaxUInt8):
        """A codec that refuses a number."""

        def encode(self, x_N: torch.Tensor, *args: object) -> None:
            if (x_N == 13).any():
                raise ValueError("13")
            super().encode(x_N, *args)  # type: ignore[arg-type]

    def body(group: dist.ProcessGroup) -> str:
        own = tb.BaguaProcessGroup(group)
        lane = Lane("spoilt", on_failure=own.close)
        buckets = [bucket_of(own, length, f"bucket {index}") for index, length in enumerate(LENGTHS[2:])]
        for bucket in buckets:
            bucket.append_centralized_synchronous_op(hierarchical=False, compression=Spoilt())
        if own.rank == 0:
            buckets[1].flat.fill_(13)
        gate = threading.Event()
        lane.submit(gate.wait)
        jobs = [lane.submit_overlapping(bucket) for bucket in buckets]
        gate.set()
        with pytest.raises((RuntimeError, tb.CommunicationError)) as raised:
            jobs[1].result()
        if own.rank == 0:  # on another rank the first bucket may be complete
            with pytest.raises(RuntimeError, match=re.escape(str(raised.value))):
                jobs[0].result()
        lane.close()
        own.close()
        return str(raised.value)

    of_first, of_second = run_ranks(2, body)
    assert re.match("torchbagua: centralized_mean in .*Spoilt.* on bucket 1 failed on rank 0: ValueError: 13", of_first)
    assert "over the world group failed on rank 1" in of_second


# Exchanges that are in flight together: the order in which they send, receive and compute.

SIZE = 3
LONG, SHORT = 100_000, 10  # elements
PIECES = ("first", "second", "third")


def log_messages(communicator: Communicator) -> list[str]:
    """Return a list to which the communicator appends posted and received messages, with their piece and peer."""
    log: list[str] = []
    post, wait = communicator.post, communicator.wait

    def log_and_post(direction: Any, peer: int, tensor: torch.Tensor, *, tag: int, purpose: str) -> None:
        log.append(f"{'expects' if direction == 'receiving from' else 'sends'} {PIECES[tag // 4]} {peer}")
        post(direction, peer, tensor, tag=tag, purpose=purpose)

    def log_and_wait(direction: Any, peer: int, *, tag: int, purpose: str) -> None:
        wait(direction, peer, tag=tag, purpose=purpose)
        if direction == "receiving from":
            log.append(f"received {PIECES[tag // 4]} {peer}")

    communicator.post, communicator.wait = log_and_post, log_and_wait  # type: ignore[method-assign,assignment]
    return log


def run_two_exchanges(num_elements: int, rate: float) -> list[list[str]]:
    """Run two exchanges in one pipeline, and return each rank's operations in their order."""

    def body(group: dist.ProcessGroup) -> list[str]:
        world = tb.BaguaProcessGroup(group).world
        world.link_bytes_per_s = [rate] * SIZE
        log = log_messages(world)

        def compute(piece: str, exchange: Exchange) -> Iterator[torch.Tensor]:
            for target in exchange.targets:
                log.append(f"computes {piece} {target}")
                yield torch.full((num_elements,), float(world.rank))

        pipeline = Pipeline(world, CPU)
        receives = [[torch.zeros(num_elements) for _ in range(SIZE)] for _ in PIECES[:2]]
        exchanges = [
            Exchange(pipeline, "all_to_all", tensors, "numbers", channel=channel)
            for channel, tensors in enumerate(receives)
        ]
        for name, exchange in zip(PIECES, exchanges, strict=False):
            exchange.send(compute(name, exchange))
        for name, exchange, tensors in zip(PIECES, exchanges, receives, strict=False):
            for source in exchange.arrivals():
                assert tensors[source].unique().tolist() == [float(source)]
                log.append(f"decodes {name} {source}")
        pipeline.wait_for_sends()
        return log

    return run_ranks(SIZE, body)


def test_over_slow_links_a_turn_begins_before_received_values_are_decoded() -> None:
    """And one link at a time carries data, while the next tensor is computed."""
    for rank, log in enumerate(run_two_exchanges(LONG, -1e12)):
        peers = [(rank + 1) % SIZE, (rank - 1) % SIZE]
        turns = [
            (f"{piece} {target}", f"{piece} {source}")
            for piece in PIECES[:2]
            for target, source in zip(peers, peers[::-1], strict=True)
        ]
        expected = [entry for entry in log if entry.startswith(("expects", "received"))]
        assert expected == [f"{verb} {source}" for _, source in turns for verb in ("expects", "received")]
        for (_, source), (target, _) in itertools.pairwise(turns):
            order = [f"computes {target}", f"received {source}", f"sends {target}", f"decodes {source}"]
            assert sorted(order, key=log.index) == order


@pytest.mark.parametrize(("num_elements", "rate"), [(SHORT, -1e12), (LONG, 1e12)])
def test_short_or_fast_messages_are_sent_at_once_in_two_exchanges(num_elements: int, rate: float) -> None:
    """Each as soon as it is computed, after all receives are posted."""
    num_messages = 2 * (SIZE - 1)
    for log in run_two_exchanges(num_elements, rate):
        assert all(entry.startswith("expects") for entry in log[:num_messages])
        sent = log[num_messages : 3 * num_messages]
        assert [entry.split()[0] for entry in sent] == ["computes", "sends"] * num_messages
        assert all(
            computed.split()[1:] == posted.split()[1:] for computed, posted in zip(sent[::2], sent[1::2], strict=True)
        )


@on_each_rank(2)
def test_a_third_exchange_is_sent_when_the_first_has_arrived(group: dist.ProcessGroup) -> None:
    """No more than two messages to a peer are in flight."""
    world = tb.BaguaProcessGroup(group).world
    peer, log = 1 - world.rank, log_messages(world)
    pipeline, receives = Pipeline(world, CPU), [torch.zeros(SHORT) for _ in PIECES]
    exchanges = [
        Exchange(pipeline, "all_to_all", {peer: tensor}, "numbers", [(peer, peer)], channel=channel)
        for channel, tensor in enumerate(receives)
    ]

    def sent() -> list[str]:
        return [entry for entry in log if entry.startswith("sends")]

    for value, exchange in enumerate(exchanges):
        exchange.send([torch.full((SHORT,), 10.0 * value + world.rank)])
    assert len(sent()) == 2
    exchanges[0].wait()
    assert sent() == [f"sends {piece} {peer}" for piece in PIECES]
    for exchange in exchanges[1:]:
        exchange.wait()
    pipeline.wait_for_sends()
    assert [tensor[0].item() for tensor in receives] == [10.0 * value + peer for value in range(3)]
