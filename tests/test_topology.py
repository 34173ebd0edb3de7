"""Topologies: validity, comparison between ranks, and bitwise equal averages of weights."""

import dataclasses
import functools
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import oracle
import torchbagua as tb
from averaging import Normed, Trace, assert_same_weights, is_buffer, stacked, train
from ranks import run_ranks
from torchbagua.collectives.topology import AllRanks, Graph, Ring, ShiftOne, Topology
from torchbagua.transport.communicator import SMALL_MESSAGE_BYTES
from training import Wide, build


def hypercube(rank: int, size: int, round: int) -> Mapping[int, float]:
    """The neighbor is the rank that differs in one bit, a different bit in each round."""
    return {rank: 0.5, rank ^ (1 << round): 0.5}


def num_bits(size: int) -> int:
    return (size - 1).bit_length()


def lopsided(rank: int, size: int, round: int) -> Mapping[int, float]:
    """Rank 0 is the center of a star. In every other round rank 1 has no neighbor."""
    share = 0.8 / size
    leaves = [peer for peer in range(1, size) if round == 0 or peer > 1]
    if rank == 0:
        return dict.fromkeys(leaves, share) | {0: 1 - share * len(leaves)}
    return {rank: 1 - share, 0: share} if rank in leaves else {rank: 1}


@dataclasses.dataclass(frozen=True)
class Ladder(Topology):
    """A subclass with two or three neighbors, and one rung per pair."""

    rung: float = 0.25

    def neighbours(self, rank: int, size: int, round: int) -> Mapping[int, float]:
        along = {peer: 0.125 for peer in (rank - 2, rank + 2) if 0 <= peer < size}
        return {**along, rank ^ 1: self.rung, rank: 1 - self.rung - sum(along.values())}


HYPERCUBE, LOPSIDED = Graph(hypercube, num_bits), Graph(lopsided, 2)


@pytest.mark.parametrize(
    ("topology", "sizes"),
    [
        (AllRanks(), range(1, 9)),
        (ShiftOne(), range(2, 9, 2)),
        (Ring(), range(1, 9)),
        (HYPERCUBE, (2, 4, 8)),
        (LOPSIDED, range(3, 8)),
        (Ladder(), (2, 4, 6)),
    ],
    ids=repr,
)
def test_valid_topologies(topology: Topology, sizes: Sequence[int]) -> None:
    for size in sizes:
        topology.check("test", size)
        Topology.check(topology, "test", size)  # the full check, which built-in topologies skip
    assert pickle.loads(pickle.dumps(topology)) == topology


def empty(rank: int, size: int, round: int) -> Any:
    return [0.5, 0.5]


def beyond(rank: int, size: int, round: int) -> Mapping[int, float]:
    return {rank: 0.5, rank + 1: 0.5}


def one_sided(rank: int, size: int, round: int) -> Mapping[int, float]:
    return {rank: 0.5, (rank + 1) % size: 0.5} if round else {rank: 1}


def negative(rank: int, size: int, round: int) -> Mapping[int, float]:
    return {rank: 1.5, rank ^ 1: -0.5}


def too_little(rank: int, size: int, round: int) -> Mapping[int, float]:
    return {rank: 0.5, rank ^ 1: 0.25}


def biased(rank: int, size: int, round: int) -> Mapping[int, float]:
    return {rank: 0.25, rank ^ 1: 0.75} if rank % 2 else {rank: 0.5, rank ^ 1: 0.5}


INVALID = [
    (empty, r"in round 0: rank 0 of 4 must map its neighbors to weights in a dict, got \[0.5, 0.5\]"),
    (beyond, "in round 0: rank 3 of 4 has neighbor 4, which does not exist"),
    (one_sided, "in round 1: rank 0 of 4 has neighbor 1, which does not have it as a neighbor"),
    (negative, "in round 0: rank 0 of 4 must have positive weights, got -0.5 for 1"),
    (too_little, "in round 0: rank 0 of 4: its weights must sum to 1, got 0.75"),
    (biased, "in round 0: rank 0 of 4: the weights given to it must sum to 1, got 1.25"),
]


@pytest.mark.parametrize(("function", "message"), INVALID)
def test_invalid_topologies_are_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^test: Graph\(\w+.{function.__name__}, 2\) {message}"):
        Graph(function, 2).check("test", 4)


def test_a_period_of_zero_no_neighbours_and_neighbours_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"the period of Graph\(.*\) must be a positive integer, got 0"):
        Graph(hypercube, 0).check("test", 4)
    with pytest.raises(TypeError, match=r"Topology must override Topology\.neighbours"):
        Topology().check("test", 4)

    def body(group: dist.ProcessGroup) -> None:  # all ranks refuse at attach
        algorithm = tb.DecentralizedAlgorithm(peer_selection_mode=Graph(beyond))
        with pytest.raises(ValueError, match=r"DecentralizedAlgorithm: Graph\(\w+.beyond, 1\) in round 0: rank 1 of 2"):
            tb.attach(module := nn.Linear(2, 1), torch.optim.SGD(module.parameters()), algorithm, process_group=group)

    run_ranks(2, body)


@pytest.mark.parametrize("topology_class", [AllRanks, Ring, ShiftOne])
def test_the_check_of_a_valid_class_computes_no_neighbours(topology_class: type[Topology]) -> None:
    """All ranks together may have a quadratic number of neighbors. A subclass with other neighbors is checked."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(topology_class, "neighbours", lambda *arguments: pytest.fail("asked for neighbours"))
        topology_class().check("test", 1024)

    class Wrong(topology_class):  # type: ignore[valid-type, misc]
        def neighbours(self, rank: int, size: int, round: int) -> Mapping[int, float]:
            return {rank: 0.5}

    with pytest.raises(ValueError, match=r"its weights must sum to 1, got 0\.5"):
        Wrong().check("test", 4)


def weighted_mean(rows: Sequence[oracle.Array], weights: Mapping[int, float]) -> oracle.Array:
    """Return the weighted sum in rank order; with equal weights, the sum divided by the number of values."""
    number = rows[0].dtype.type
    if len(set(weights.values())) == 1:
        return oracle.ordered_sum([rows[rank] for rank in sorted(weights)]) / number(len(weights))
    return oracle.ordered_sum([rows[rank] * number(weights[rank]) for rank in sorted(weights)])


def check_averaged(traces: Sequence[Trace], topology: Topology, nodes: Sequence[int]) -> None:
    for step in range(len(traces[0].updated)):
        for name in traces[0].start[0]:
            before = stacked([trace.start[step] for trace in traces], name)
            of_nodes = oracle.node_means(before, nodes)
            round = step % topology.period(len(of_nodes))
            rows = [topology.neighbours(node, len(of_nodes), round) for node in range(len(of_nodes))]
            means = oracle.to_ranks([weighted_mean(of_nodes, row) for row in rows], nodes)
            updated = stacked([trace.updated[step] for trace in traces], name)
            expected = [
                oracle.moved(new, mean - old, old, is_buffer=is_buffer(name))
                for new, mean, old in zip(updated, means, before, strict=True)
            ]
            after = stacked([trace.start[step + 1] for trace in traces], name)
            np.testing.assert_array_equal(after, expected, f"step {step}, {name}")
    assert_same_weights([trace.final for trace in traces])


@pytest.mark.parametrize(
    ("topology", "nodes", "make_model"),
    [
        (Ring(), [0, 1], Normed),
        (Ring(), [0, 1, 2, 3, 4], Wide),
        (HYPERCUBE, [0, 1, 2, 3], Normed),
        (Ring(), [0, 0, 1, 1, 2, 2], Normed),
        (LOPSIDED, [0, 1, 1, 0, 2, 2], Wide),
    ],
    ids=repr,
)
def test_averaged_weights_are_bitwise_equal_to_the_oracle(
    topology: Topology, nodes: list[int], make_model: type[nn.Module]
) -> None:
    model, algorithm = build(make_model), tb.DecentralizedAlgorithm(True, topology, bucket_cap_mb=0.01)
    traces = run_ranks(len(nodes), lambda group: train(group, model, algorithm, nodes=nodes, num_steps=3))
    check_averaged(traces, topology, nodes)


def random_graph(rank: int, size: int, round: int) -> Mapping[int, float]:
    """Each round draws new pairs; the weights are those of Metropolis and Hastings."""
    draw = random.Random(round)
    edges = [(a, b) for a in range(size) for b in range(a) if draw.random() < 0.5]
    peers = {vertex: [a + b - vertex for a, b in edges if vertex in (a, b)] for vertex in range(size)}
    weights = {peer: 1 / (1 + max(len(peers[rank]), len(peers[peer]))) for peer in peers[rank]}
    return {rank: 1 - sum(weights.values()), **weights}


class Slow(list[float]):
    def __setitem__(self, *_: Any) -> None:
        """Discard measured rates: links stay slow."""


def test_one_message_at_a_time_does_not_deadlock() -> None:
    """A rank sends and receives one message at a time over slow links."""
    num_elements, num_rounds, size = SMALL_MESSAGE_BYTES // 2, 6, 7  # in float32, more than a small message

    def body(group: dist.ProcessGroup) -> None:
        own, rank = tb.BaguaProcessGroup(group), group.rank()
        own.world.link_bytes_per_s = Slow([1.0] * size)
        flat = torch.full((num_elements,), float(rank))
        bucket = tb.extend.BaguaBucket("b", [tb.extend.BaguaTensor("w", flat.clone())], own, flat)
        mean = torch.zeros_like(flat)
        bucket.append_decentralized_synchronous_op(mean, peer_selection_mode=Graph(random_graph, num_rounds))
        for round in range(num_rounds):
            bucket.run()
            expected = sum(peer * weight for peer, weight in random_graph(rank, size, round).items())
            torch.testing.assert_close(mean, torch.full((num_elements,), expected), rtol=1e-6, atol=1e-6)

    run_ranks(size, body)


@dataclasses.dataclass(frozen=True)
class Scheduled(tb.Algorithm):
    """A user-defined algorithm with functions among its arguments."""

    schedule: Any = hypercube
    more: Any = ()

    def make_impl(self, runner: tb.extend.Runner) -> tb.AlgorithmImpl:
        return tb.AlgorithmImpl(runner)

    def method(self) -> None:
        """A method of an object that has no name."""


def test_functions_are_recorded_by_name() -> None:
    summary = tb.observe.Summary()
    algorithm = Scheduled(more=[num_bits, {"graph": HYPERCUBE}, (1, 2.5), "text"])

    def body(group: dist.ProcessGroup) -> dict[str, Any]:
        impl = algorithm.reify(group, observers=[summary])
        impl.close()
        return algorithm.state_arguments(impl.process_group)

    (arguments,) = run_ranks(1, body)
    graph = "Graph(test_topology.hypercube, test_topology.num_bits)"
    more = f"[test_topology.num_bits, {{'graph': {graph}}}, (1, 2.5), 'text']"
    assert arguments == {"schedule": "test_topology.hypercube", "more": more}
    assert summary.run is not None
    assert summary.run.description == f"Scheduled(schedule=test_topology.hypercube, more={more})"


@pytest.mark.parametrize(
    "function",
    [lambda rank, size, round: {}, functools.partial(hypercube, 0), Scheduled().method],
    ids=["lambda", "partial", "method"],
)
def test_functions_that_cannot_be_imported_by_name_are_refused(function: Any) -> None:
    for construct, name in (
        (lambda group: Graph(function), "Graph: function"),
        (lambda group: Graph(hypercube, function), "Graph: num_rounds"),
        (Scheduled(function).reify, "Scheduled: schedule"),
        (Scheduled(more=[function]).reify, "Scheduled: more"),
    ):
        with pytest.raises(TypeError, match=f"{name} must be a function that can be imported by its name"):
            run_ranks(1, construct)


def test_an_object_whose_repr_is_an_address_is_refused() -> None:
    with pytest.raises(TypeError, match="Scheduled: more must have a repr that is the same on all ranks"):
        run_ranks(1, Scheduled(more=object()).reify)
