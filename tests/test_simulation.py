"""The parts of a simulation: virtual time, deadlocks, exit handlers, links, cores, channels."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from past_bugs import PAST_BUGS
from simulated import without_fault
from torchbagua import _concurrency
from torchbagua.runtime.lane import Lane
from torchbagua.testing.simulation import (
    Cluster,
    Deadlock,
    Rank,
    Simulation,
    run_trial,
    simulate,
)
from torchbagua.testing.simulation.cluster import Streams
from torchbagua.testing.simulation.faults import Fault

# Trainings with faults give all of the package's warnings.
pytestmark = [pytest.mark.usefixtures("on_one_core"), pytest.mark.filterwarnings("ignore")]


def values(simulation: Simulation, body: Callable[[Rank], object]) -> list[object]:
    return [outcome.value for outcome in simulation.run(body)]


def seconds_of_an_hour(rank: Rank) -> float:
    start_s = _concurrency.monotonic()
    rank.compute(3600)
    return _concurrency.monotonic() - start_s


def test_time_is_virtual_and_ranks_share_the_cores_of_a_node() -> None:
    assert values(Simulation(2, seed=0, limit_s=4000), seconds_of_an_hour) == pytest.approx([3600, 3600])
    one_core = Cluster((0, 0), num_cores=1)
    assert values(Simulation(one_core, seed=0, limit_s=8000), seconds_of_an_hour) == pytest.approx([7200, 7200])

    trial = without_fault("bytegrad", 0, 2)
    slow = replace(trial.cluster, encode_rate=1e4, decode_rate=1e5)
    assert run_trial(replace(trial, cluster=slow)).ended_s > run_trial(trial).ended_s + 0.1


def test_a_deadlock_has_the_stack_of_every_thread() -> None:
    locks = {}

    def wait_for_the_other(rank: Rank) -> None:
        locks[rank.number] = _concurrency.Lock()
        with locks[rank.number]:
            rank.compute(1)
            locks[1 - rank.number].acquire()

    with pytest.raises(Deadlock, match="for ever") as raised:
        Simulation(2, seed=0).run(wait_for_the_other)
    assert str(raised.value).count("locks[1 - rank.number].acquire()") == 2
    assert "rank 1 of rank 1" in str(raised.value)

    def wait_again_and_again(rank: Rank) -> None:
        while True:
            rank.compute(1)

    with pytest.raises(Deadlock, match="after 50 s"):
        Simulation(1, seed=0, limit_s=50).run(wait_again_and_again)


def is_deadlocked(seed: int) -> bool:
    """Submit a job of a lane on one thread and close the lane on another; the job runs, or is refused."""

    def body(rank: Rank) -> None:
        lane = Lane("a lane", on_failure=lambda: None)
        lane.submit(lambda: None).result()
        closing = _concurrency.Thread(target=lane.close, name="closing")
        closing.start()
        try:
            lane.submit(lambda: None).result()
        finally:
            closing.join()

    try:
        (outcome,) = Simulation(1, seed).run(body)
    except Deadlock:
        return True
    assert outcome.error is None or "is closed" in str(outcome.error)
    return False


def test_a_lane_that_closes_while_a_job_is_submitted() -> None:
    assert not any(map(is_deadlocked, range(20)))
    with PAST_BUGS["job_is_queued_after_the_stop"]():
        assert any(map(is_deadlocked, range(20)))


def test_a_rank_that_dies_while_settings_are_compared_is_named() -> None:
    timeout = timedelta(seconds=5)
    simulation = Simulation(3, seed=0, timeout=timeout)
    # Rank 0 has introduced itself, and has not decided.
    simulation.scheduler.call_at(5e-4, lambda: simulation.kill(0))

    outcomes = simulation.run(lambda rank: rank.group())

    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, TimeoutError)
        assert "waiting for ranks [0] of 3 to finish comparing settings: they have died" in str(outcome.error)


def test_exit_handlers_run_when_a_rank_ends() -> None:
    ended = []

    def body(rank: Rank) -> None:
        _concurrency.at_exit(lambda: ended.append(("first", rank.number)))
        _concurrency.at_exit(lambda: ended.append(("last", rank.number)))
        lane = Lane("a lane", on_failure=lambda: None)
        lane.submit(lambda: rank.compute(1))
        kept.append(lane)

    kept: list[Lane] = []
    simulation = Simulation(1, seed=0)
    (outcome,) = simulation.run(body)
    assert ended == [("last", 0), ("first", 0)]
    assert outcome.threads == ["a lane"]  # it was not closed; the exit handler waits for its job
    assert simulation.scheduler.now_s == pytest.approx(1)


def test_messages_share_the_links_between_nodes() -> None:
    """Two streams over one network card take twice as long; messages within a node do not slow them down."""
    num_bytes = 1_000_000

    def body(rank: Rank) -> float:
        group = rank.group()
        group.open()
        tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        start_s = _concurrency.monotonic()
        peer = (rank.number + len(group.nodes) // 2) % len(group.nodes)
        group.world.post("sending to", peer, tensor, tag=0, purpose="a send")
        group.world.post("receiving from", peer, torch.zeros_like(tensor), tag=0, purpose="a receive")
        group.world.wait("receiving from", peer, tag=0, purpose="a receive")
        seconds = _concurrency.monotonic() - start_s
        rank.compute(1)
        group.close()
        return seconds

    for nodes, num_cards, expected_s in (((0, 1), 1, 0.1), ((0, 0, 1, 1), 1, 0.2), ((0, 0, 1, 1), 2, 0.1)):
        cluster = Cluster(nodes, rate=1e7, num_cards=num_cards, latency_s=1e-6)
        assert values(Simulation(cluster, seed=0), body) == pytest.approx([expected_s] * len(nodes), rel=1e-3)


def test_a_stream_gets_what_others_cannot_use() -> None:
    """A to B is limited to a quarter of A's card; A to C gets the rest of it."""
    now_s, events = [0.0], list[tuple[float, Callable[[], None]]]()
    capacity = {"card of A": 4.0, "limit to B": 1.0}
    streams = Streams(lambda: now_s[0], lambda at_s, event: events.append((at_s, event)), capacity.__getitem__)
    ended: dict[str, float] = {}
    streams.start(["card of A", "limit to B"], 2.0, lambda: ended.setdefault("B", now_s[0]))
    streams.start(["card of A"], 9.0, lambda: ended.setdefault("C", now_s[0]))
    while events:
        event = min(events, key=lambda entry: entry[0])
        events.remove(event)
        now_s[0] = event[0]
        event[1]()
    # C moves 3 a second for two seconds, and then 4 a second.
    assert ended == pytest.approx({"B": 2.0, "C": 2.75})


def test_a_timeout_of_one_waiter_leaves_the_others_waiting() -> None:
    def body(rank: Rank) -> list[bool]:
        condition, woken = _concurrency.Condition(), list[bool]()

        def wait(timeout: float | None = None) -> None:
            with condition:
                woken.append(condition.wait(timeout))

        thread = _concurrency.Thread(target=wait, name="waiting")
        thread.start()
        wait(timeout=1)
        with condition:
            condition.notify_all()
        thread.join()
        return woken

    assert values(Simulation(1, seed=0), body) == [[False, True]]


def test_the_error_of_an_event_ends_the_run() -> None:
    simulation = Simulation(2, seed=0)

    def event() -> None:
        raise ArithmeticError("an event")

    simulation.scheduler.call_at(0.5, event)
    with pytest.raises(ArithmeticError, match="an event"):
        simulation.run(lambda rank: rank.compute(1))
    with pytest.raises(RuntimeError, match="runs once"):
        simulation.run(lambda rank: None)


def test_each_group_has_its_own_channel() -> None:
    trial = without_fault("bytegrad", 0, 4)
    simulation = simulate(replace(trial, cluster=replace(trial.cluster, nodes=(0, 0, 1, 1))))
    report = run_trial(trial, simulation)
    assert report.violations == []
    members = [frozenset(channel.joined) for channel in simulation.network.channels.values() if channel.joined]
    assert sorted(members, key=sorted) == [{0, 1}, {0, 1, 2, 3}, {0, 2}, {1, 3}, {2, 3}]


@pytest.mark.parametrize("kind", ["silent store", "lost store", "failed operation", "death", "cut link"])
def test_a_fault_happens(kind: str) -> None:
    trial = replace(without_fault("bytegrad", 0, 2), fault=Fault(kind, turn=5, operation=1))
    simulation = simulate(trial)
    assert run_trial(trial, simulation).violations == []
    assert simulation.fault_s is not None
