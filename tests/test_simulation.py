"""The parts of a simulation: virtual time, deadlocks, links, cores, channels; its `check`, and its trace."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import torchbagua as tb
from past_bugs import PAST_BUGS
from simulated import without_fault
from torchbagua import _concurrency
from torchbagua.runtime.lane import Lane
from torchbagua.testing.simulation import (
    Cluster,
    Deadlock,
    Fault,
    Rank,
    Simulation,
    SimulationTrace,
    Subject,
    Violation,
    check,
    run_trial,
    simulate,
)

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


@pytest.mark.parametrize("kind", ["silent store", "lost store", "failed operation", "death", "cut link"])
def test_a_fault_happens(kind: str) -> None:
    trial = replace(without_fault("bytegrad", 0, 2), fault=Fault(kind, turn=5, operation=1))
    simulation = simulate(trial)
    assert run_trial(trial, simulation).violations == []
    assert simulation.fault_s is not None


# `check` reports what must not happen; a trace shows what did


class OneOperation(tb.Algorithm):
    """A mean of gradients, and an operation that follows it. Without fields, ranks compare nothing of it."""

    def __init__(self, operation: Callable[[tb.extend.BaguaBucket, tb.BaguaProcessGroup], object]) -> None:
        self.operation = operation

    def make_impl(self, runner: tb.extend.Runner) -> tb.AlgorithmImpl:
        return OneOperationImpl(runner)


class OneOperationImpl(tb.AlgorithmImpl):
    def init_operations(self, module: torch.nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
        bucket.append_centralized_synchronous_op()
        bucket.append_python_op(self.algorithm.operation)


Bucket, Group = tb.extend.BaguaBucket, tb.BaguaProcessGroup


def diverge(bucket: Bucket, group: Group) -> None:
    bucket.flat.add_(group.rank)


def leave_a_thread(bucket: Bucket, group: Group) -> None:
    _concurrency.Thread(target=lambda: _concurrency.sleep(1000), name="forgotten").start()


def send_to_nobody(bucket: Bucket, group: Group) -> None:
    if group.rank == 0:
        group.world.post("sending to", 1, bucket.flat, tag=99, purpose="a test")
        group.world.wait("sending to", 1, tag=99, purpose="a test")


def send_too_much(bucket: Bucket, group: Group) -> None:
    received = torch.empty(7 + group.rank, dtype=torch.uint8)
    for way, tensor in (("receiving from", received), ("sending to", received.clone())):
        group.world.post(way, 1 - group.rank, tensor, tag=99, purpose="a test")
    for way in ("receiving from", "sending to"):
        group.world.wait(way, 1 - group.rank, tag=99, purpose="a test")


def take_long(bucket: Bucket, group: Group) -> None:
    _concurrency.sleep(1)


def fail(bucket: Bucket, group: Group) -> None:
    raise ValueError("a test")


def wait_for_ever(bucket: Bucket, group: Group) -> None:
    lock = _concurrency.Lock()
    lock.acquire()
    lock.acquire()


def look_again_and_again(bucket: Bucket, group: Group) -> None:
    while True:
        _concurrency.sleep(0)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (diverge, "weights differ between ranks after step 0"),
        (leave_a_thread, "rank 0 leaves the thread 'forgotten' behind"),
        (send_to_nobody, "rank 1 has not read a message of rank 0 with tag 99"),
        (send_too_much, "rank 0 received 8 bytes, expected 7 from rank 1"),
        (take_long, "rank 0 ended after"),
        (fail, "rank 0 raised RuntimeError"),
        (wait_for_ever, "threads wait for ever:(.|\n)*in wait_for_ever"),
        (look_again_and_again, "again and again while no time passes:(.|\n)*in look_again_and_again"),
    ],
)
def test_check_reports_what_must_not_happen(operation: Callable[[Bucket, Group], object], message: str) -> None:
    subject = Subject(lambda _: OneOperation(operation), sizes=(2,), faults=("none",))
    with pytest.raises(Violation, match=message) as raised:
        check(subject, seeds=range(3))
    assert str(raised.value).startswith("seed 0, with the fault 'none': ")


def test_check_accepts_what_may_happen() -> None:
    seeds: list[int] = []

    def progress(numbers: Iterable[int]) -> Iterator[int]:
        for number in numbers:
            seeds.append(number)
            yield number

    check(Subject(lambda _: OneOperation(lambda bucket, group: None)), range(5), progress)
    assert seeds == [0, 1, 2, 3, 4]


def test_a_trace_has_the_waits_of_threads_and_all_messages(tmp_path: Path) -> None:
    trial = replace(without_fault("bytegrad", 0, 2), fault=Fault("death", rank=1, turn=250))
    simulation = simulate(trial)
    trace = SimulationTrace(simulation)
    run_trial(trial, simulation)
    trace.write(tmp_path / "trace.json")

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"rank 0", "rank 1", "torchbagua lane of ByteGradAlgorithm"} <= names
    (fault,) = [event for event in events if event["name"] == "fault"]
    assert simulation.fault_s is not None
    assert fault["ts"] == pytest.approx(simulation.fault_s * 1e6)
    assert any(event["name"] == "communicator.wait" and event["dur"] > 0 for event in events if event["ph"] == "X")
    begun = {event["id"]: event for event in events if event["ph"] == "b"}
    ended = {event["id"]: event for event in events if event["ph"] == "e"}
    assert len(begun) == len(ended) > 5
    assert all(begun[number]["ts"] < ended[number]["ts"] for number in begun)
    assert all(event["args"]["bytes"] > 0 for event in begun.values())
