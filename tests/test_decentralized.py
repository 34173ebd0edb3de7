"""Decentralized algorithms: steps are bitwise equal to the one-process oracle's, and replicas to their originals."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import oracle
import torchbagua as tb
from averaging import Normed, Trace, Trainer, assert_same_weights, check_unchanged, is_buffer, stacked, train
from pairwise import pairwise
from ranks import run_ranks
from training import build

F32 = np.float32
NODES = {"2 x 2": [0, 0, 1, 1], "uneven": [0, 1, 1, 0, 1]}
MODES = ["all", "shift_one"]
INTERVALS = [1, 3]
BUCKET_CAPS_MB = [8.0, 0.001]  # one bucket, several


def check_decentralized(traces: Sequence[Trace], mode: str, interval: int, nodes: Sequence[int] | None) -> None:
    """Check the ranks' records: x += mean(x_t) - x_t after each step t with a round."""
    num_rounds = 0
    for step in range(len(traces[0].updated)):
        for name in traces[0].start[0]:
            before = stacked([trace.start[step] for trace in traces], name)
            updated = stacked([trace.updated[step] for trace in traces], name)
            if step % interval:
                expected = updated
            else:
                if mode == "all":
                    means = [oracle.gradient_allreduce(before, nodes)] * len(traces)
                else:
                    means = oracle.peers_mean(before, nodes, num_rounds)
                expected = [
                    oracle.moved(new, mean - old, old, is_buffer=is_buffer(name))
                    for new, mean, old in zip(updated, means, before, strict=True)
                ]
            after = stacked([trace.start[step + 1] for trace in traces], name)
            np.testing.assert_array_equal(after, expected, f"step {step}, {name}")
        num_rounds += step % interval == 0
    assert_same_weights([trace.final for trace in traces])


@pairwise(size=[2, 4], mode=MODES, interval=INTERVALS, bucket_cap_mb=BUCKET_CAPS_MB)
def test_decentralized(device: torch.device, size: int, mode: str, interval: int, bucket_cap_mb: float) -> None:
    algorithm = tb.DecentralizedAlgorithm(True, mode, interval, bucket_cap_mb=bucket_cap_mb)
    model = build(Normed).to(device)
    traces = run_ranks(size, lambda group: train(group, model, algorithm), device=device)
    check_decentralized(traces, mode, interval, None)


@pairwise(nodes=list(NODES), mode=MODES, interval=INTERVALS, bucket_cap_mb=BUCKET_CAPS_MB)
def test_decentralized_over_nodes(nodes: str, mode: str, interval: int, bucket_cap_mb: float) -> None:
    algorithm = tb.DecentralizedAlgorithm(True, mode, interval, bucket_cap_mb=bucket_cap_mb)
    model, node_of_rank = build(Normed), NODES[nodes]
    traces = run_ranks(len(node_of_rank), lambda group: train(group, model, algorithm, nodes=node_of_rank))
    check_decentralized(traces, mode, interval, node_of_rank)


def test_pairing_continues_when_buckets_are_rebuilt() -> None:
    model = build(Normed)

    def unfreeze(trainer: Trainer, attachment: tb.Attachment) -> None:
        if attachment.impl.rounds.step == 2:  # peers repeat after two rounds; three have begun when buckets are rebuilt
            trainer.module.frozen.requires_grad_(True)

    algorithm = tb.DecentralizedAlgorithm(True, "shift_one")
    traces = run_ranks(4, lambda group: train(group, model, algorithm, after_step=unfreeze))
    check_decentralized(traces, "shift_one", 1, None)


def shift_one_peer(rank: int, size: int, num_before: int) -> int:
    weights = tb.topology.ShiftOne().neighbours(rank, size, num_before)
    assert weights[rank] == 0.5
    (peer,) = weights.keys() - {rank}
    return peer


def test_shift_one_pairs() -> None:
    """The pairing is mutual, between the halves, and every such pair meets once in n / 2 rounds."""
    for size in (2, 4, 6, 8):
        met = set()
        for num_before in range(size // 2):
            peers = [shift_one_peer(rank, size, num_before) for rank in range(size)]
            assert [peers[peer] for peer in peers] == list(range(size))
            met |= {(rank, peer) for rank, peer in enumerate(peers[: size // 2])}
        assert met == set(itertools.product(range(size // 2), range(size // 2, size)))
    # Bagua's formula at s = 1 of 4 ranks, by hand.
    assert [shift_one_peer(rank, 4, 1) for rank in range(4)] == [3, 2, 1, 0]


def check_low_precision(
    traces: Sequence[Trace],
    interval: int,
    nodes: Sequence[int] | None,
    block: int = 2048,
    coded: oracle.Coded = oracle.quantise_block,
) -> None:
    for name in traces[0].start[0]:
        rows = stacked([trace.start[0] for trace in traces], name)
        segments = [rows[0].size]
        ring = oracle.LowPrecisionRing(rows, segments, nodes, is_buffer=is_buffer(name), block=block, coded=coded)
        for step in range(len(traces[0].updated)):
            updated = stacked([trace.updated[step] for trace in traces], name)
            expected = updated if step % interval else ring.round(updated)
            after = stacked([trace.start[step + 1] for trace in traces], name)
            np.testing.assert_array_equal(after, expected, f"step {step}, {name}")
    assert_same_weights([trace.final for trace in traces])


@pairwise(
    ranks=[(2, None), (3, None), (4, None), *((len(nodes), nodes) for nodes in NODES.values())],
    interval=INTERVALS,
    bucket_cap_mb=BUCKET_CAPS_MB,
)
def test_low_precision(ranks: tuple[int, list[int] | None], interval: int, bucket_cap_mb: float) -> None:
    algorithm = tb.LowPrecisionDecentralizedAlgorithm(True, interval, bucket_cap_mb=bucket_cap_mb)
    model, (size, nodes) = build(Normed), ranks
    check_low_precision(run_ranks(size, lambda group: train(group, model, algorithm, nodes=nodes)), interval, nodes)


@pytest.mark.parametrize(
    "algorithm",
    [
        tb.DecentralizedAlgorithm(),
        tb.DecentralizedAlgorithm(True, "shift_one"),
        tb.LowPrecisionDecentralizedAlgorithm(),
        tb.DiLoCoAlgorithm(4, fragments=2, delay=1),
        tb.LocalSGDAlgorithm(1),
    ],
    ids=["all", "shift_one", "low precision", "diloco", "local sgd"],
)
def test_a_group_of_one_changes_nothing(device: torch.device, algorithm: tb.Algorithm) -> None:
    model = build(Normed).to(device)

    def reload(trainer: Trainer, attachment: tb.Attachment) -> None:
        attachment.load_state_dict(attachment.state_dict())

    (trace,) = run_ranks(1, lambda group: train(group, model, algorithm, after_step=reload), device=device)
    check_unchanged(trace)
