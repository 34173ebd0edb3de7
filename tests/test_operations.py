"""The operations of a bucket: each has a name, and runs in two parts if the caller need not wait for the second."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from ranks import run_ranks


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
