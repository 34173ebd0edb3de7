"""Buckets that begin while the previous bucket is in flight: bitwise equal results, and buckets that may not begin."""

import random
import re
import threading
import time
from collections.abc import Generator

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from ranks import run_ranks
from torchbagua.codecs import Cast, Compressor, Identity, MinMaxUInt4, MinMaxUInt8
from torchbagua.collectives import mean as means
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.lane import Job, Lane
from torchbagua.runtime.parameters import BaguaTensor

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
