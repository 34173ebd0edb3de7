"""Ranks whose rows hold gradients of different parameters: all raise and name them, before any gets a result."""

import random
from functools import partial
from typing import Any

import pytest
import torch

import torchbagua as tb
from torchbagua.codecs import Identity, MinMaxUInt8
from torchbagua.codecs.base import TensorSpec
from torchbagua.collectives.agreement import all_reduce_max
from torchbagua.collectives.row_mean import RowMean
from torchbagua.fsdp.comm_runner import FirstFailure
from torchbagua.fsdp.parts import CommunicatingPart, Row
from torchbagua.fsdp.same_rows import SameRows
from torchbagua.runtime.lane import Lane
from torchbagua.testing.simulation.cluster import Cluster
from torchbagua.testing.simulation.run import Rank, Simulation

LENGTHS = [[40, 40, 24], [40, 9]]
NUM_BACKWARDS = 5
DIFFERENT = "ranks have gradients of different parameters, which FSDP would add, got rank"

# The parameters with a gradient, in each row: a part, and the places of its parameters.
Rows = list[tuple[int, tuple[int, ...]]]


def draw_rows(draw: random.Random, before: Rows | None) -> Rows:
    """Return the rows of a backward, most often those of the backward before."""
    if before is not None and draw.random() < 0.5:
        return before
    return [(part, tuple(sorted(draw.sample(range(len(LENGTHS[part])), draw.randint(1, 2))))) for part in (1, 0)]


def other_rows(draw: random.Random, rows: Rows) -> Rows:
    """Return rows of which one lacks a parameter, has another one, or is missing; not the last: nothing follows it."""
    rows = list(rows)
    place = draw.randrange(len(rows))
    part, members = rows[place]
    others = [
        other
        for other in ((0,), (1,), (0, 1), (2,), (0, 2), (1, 2))
        if other != members and max(other) < len(LENGTHS[part])
    ]
    if place == 0 and draw.random() < 0.3:
        return rows[1:]
    rows[place] = part, draw.choice(others)
    return rows


def make_parts() -> list[Any]:
    none: Any = None
    return [
        CommunicatingPart(number, none, none, f"part{number}", [f"{number}.{place}" for place in range(len(lengths))])
        for number, lengths in enumerate(LENGTHS)
    ]


class Reducer:
    """Reduces the rows of a rank, as an FSDP module does."""

    def __init__(self, group: tb.BaguaProcessGroup, codec: Any, lane: Lane | None) -> None:
        self._group = group
        self._parts = make_parts()
        self._codec = codec
        self._failure = FirstFailure([group])
        world = group.world if lane is None else group.world.silent_twin()
        self._same_rows = SameRows(world, self._parts, lane=lane, guard=self._failure.guard)

    def reduce(self, part: int, members: tuple[int, ...], number: int) -> bool:
        """Return whether the result is the mean over the ranks."""
        row = Row((), tuple(LENGTHS[part][place] for place in members), members)
        spec = TensorSpec(row.lengths, torch.float32, torch.device("cpu"), "a row")
        size = self._group.size
        mean = RowMean(self._group, self._codec, spec, divisor=size)
        x_N, out_L = (
            torch.full((size * row.num_elements,), float(number + self._group.rank)),
            torch.empty(row.num_elements),
        )
        with self._failure.guard():
            self._same_rows.reduce(self._parts[part], row, mean, x_N, out_L)
        return out_L.unique().tolist() == [number + (size - 1) / 2]


def run(seed: int, *, differs: bool, on_lane: bool) -> tuple[Simulation, list[Any], list[int], int]:
    """Run ranks of which one may reduce another row; return their outcomes, and how many rows they reduced.

    The last result is the number of rows before the other one.
    """
    draw = random.Random(seed)
    size, codec = draw.choice((2, 3, 4)), draw.choice((Identity(), MinMaxUInt8(16)))
    backwards: list[Rows] = []
    for _ in range(NUM_BACKWARDS):
        backwards.append(draw_rows(draw, backwards[-1] if backwards else None))
    at, culprit = draw.randrange(NUM_BACKWARDS), draw.randrange(size)
    others = other_rows(draw, backwards[at])
    num_equal = 2 * at + int(others[0] == backwards[at][0])
    cluster = Cluster(tuple(range(size)), rate=1e6, latency_s=draw.choice((1e-4, 1e-2)))
    simulation = Simulation(cluster, seed)
    simulation.network.jitter_s = draw.choice((0.0, 1e-2))

    num_reduced = [0] * size

    def body(rank: Rank) -> None:
        group = rank.group()
        group.open()
        lane = Lane("compares rows", on_failure=group.close) if on_lane else None
        reducer = Reducer(group, codec, lane)
        try:
            for number, rows in enumerate(backwards):
                rank.compute(random.Random(seed + rank.number).uniform(0, 1e-2))
                is_other = differs and number == at and rank.number == culprit
                for part, members in others if is_other else rows:
                    is_mean = reducer.reduce(part, members, number)
                    # In stream order, the host has gone on when the lane finds that another rank's row differs.
                    assert is_mean or (on_lane and num_reduced[rank.number] >= num_equal)
                    num_reduced[rank.number] += 1
            if lane is not None:
                lane.submit(lambda: None).result()
        finally:
            if lane is not None:
                lane.close()
            group.close()

    return simulation, simulation.run(body), num_reduced, num_equal


@pytest.mark.parametrize("on_lane", [False, True])
def test_rows_may_change_on_all_ranks(on_lane: bool) -> None:
    for seed in range(8):
        _, outcomes, num_reduced, _ = run(seed, differs=False, on_lane=on_lane)
        assert all(outcome.error is None for outcome in outcomes), (seed, outcomes)
        assert num_reduced == [2 * NUM_BACKWARDS] * len(outcomes), seed


@pytest.mark.parametrize("on_lane", [False, True])
def test_all_ranks_raise_if_a_rank_reduces_another_row(on_lane: bool) -> None:
    """In stream order, on the lane, at their next row."""
    for seed in range(14):
        simulation, outcomes, num_reduced, num_equal = run(seed, differs=True, on_lane=on_lane)
        assert all(isinstance(outcome.error, tb.CommunicationError) for outcome in outcomes), (seed, outcomes)
        # Connections are closed as soon as a lane has compared, while a slower rank may still be using them.
        explained = [DIFFERENT in str(outcome.error) for outcome in outcomes]
        assert any(explained) if on_lane else all(explained), (seed, outcomes)
        assert on_lane or len({str(outcome.error) for outcome in outcomes}) == 1, (seed, outcomes)
        assert simulation.network.wrong_lengths == [], seed
        assert min(num_reduced) == num_equal, (seed, num_reduced)
        assert on_lane or set(num_reduced) == {num_equal}, (seed, num_reduced)


def test_nobody_waits_for_the_records_of_expected_rows() -> None:
    """They are in flight together with the row."""
    simulation = Simulation(Cluster((0, 1), rate=1e6, latency_s=0.1), seed=0)

    def body(rank: Rank) -> float:
        group = rank.group()
        group.open()
        reducer = Reducer(group, Identity(), None)
        begun_s = 0.0
        for number in range(6):
            if number == 1:
                begun_s = simulation.scheduler.now_s
            for part in (1, 0):
                assert reducer.reduce(part, (0, 1), number)
        ended_s = simulation.scheduler.now_s
        group.close()
        return ended_s - begun_s

    for outcome in simulation.run(body):
        assert outcome.value is not None
        assert outcome.value < 15 * 0.1  # of ten rows; two latencies each would be more


@pytest.mark.parametrize("num_steps", [0, 2])
def test_ranks_with_other_shards_raise_too(num_steps: int) -> None:
    """They reduce over their replicas next: after some equal steps, in a row that they expect, and do not wait for."""
    simulation = Simulation(Cluster((0, 0, 1, 1), rate=1e6), seed=0)  # a node holds a replica
    parts = make_parts()

    def body(rank: Rank) -> None:
        group = rank.group()
        group.open()
        assert group.intra_node is not None
        assert group.inter_node is not None
        replicas = SameRows(group.inter_node, parts)
        levels = [
            (group.intra_node, SameRows(group.intra_node, parts, replicas=replicas)),
            (group.inter_node, replicas),
        ]
        try:
            for step in range(num_steps + 1):
                is_other = step == num_steps and rank.number == 1
                row = Row((), (40,), (1,)) if is_other else Row((), (40,), (0,))
                for communicator, same_rows in levels:
                    reduce = partial(all_reduce_max, communicator, [0], "a row")
                    same_rows.reduce(parts[0], row, reduce)
        finally:
            group.close()

    for outcome in simulation.run(body):
        assert isinstance(outcome.error, tb.CommunicationError), outcome
        assert DIFFERENT in str(outcome.error)
