"""Trainings in a simulated network: the bits of gloo, the same events for the same seed, faults, and past bugs."""

import gc
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import oracle
import torchbagua as tb
from past_bugs import PAST_BUGS, job_is_queued_after_the_stop
from ranks import run_ranks
from simulated import SUBJECTS, case, without_fault
from source_tree import REPOSITORY, run_python
from torchbagua import _concurrency
from torchbagua.runtime.lane import Lane
from torchbagua.simulation import (
    Cluster,
    Deadlock,
    Fault,
    Program,
    Rank,
    Simulation,
    SimulationTrace,
    Subject,
    Trial,
    Violation,
    check,
    draw_trial,
    run_trial,
    simulate,
)
from torchbagua.simulation.cluster import Streams
from torchbagua.simulation.faults import FAULTS, UserCode
from torchbagua.simulation.program import Record, ThreeLayers, sgd
from transports import group_like_the_oracle

# Trainings with faults give all of the package's warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

SEEDS_OF_A_BUG = 10_000


@pytest.fixture(autouse=True)
def on_one_core() -> Iterator[None]:
    """Run all threads on one core, since they run one at a time, and collect only new garbage: this is faster."""
    gc.collect()
    gc.freeze()
    cores = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    os.sched_setaffinity(0, {sorted(cores)[worker % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)
    gc.unfreeze()


def violations(trial: Trial) -> list[str]:
    return run_trial(trial).violations


def trials_of(name: str, kind: str, num_seeds: int) -> Iterator[Trial]:
    """Yield the trials of the first seeds with this subject and this fault."""
    num_pairs = len(SUBJECTS) * len(FAULTS)
    place = (list(SUBJECTS).index(name), FAULTS.index(kind))
    first = next(seed for seed in range(num_pairs) if (seed % len(SUBJECTS), seed % len(FAULTS)) == place)
    for number in range(num_seeds):
        own_name, trial = case(first + number * num_pairs)
        assert own_name == name
        yield trial


class GlooRank(Rank):
    """A rank over gloo, as a thread of this process."""

    def group(self, **options: Any) -> tb.BaguaProcessGroup:
        return group_like_the_oracle(self.torch_group)

    def ddp(self, module: torch.nn.Module, **arguments: Any) -> DistributedDataParallel:  # type: ignore[override]
        del arguments["backward_s"]
        return DistributedDataParallel(module, process_group=self.torch_group, **arguments)

    def compute(self, seconds: float) -> None:
        pass


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("name", [name for name in SUBJECTS if name != "async"])  # which depends on times
def test_results_are_those_of_gloo(name: str, accumulates: bool) -> None:
    num_backwards = 2 if accumulates else 1
    program = Program(num_backwards=num_backwards, has_scaler=accumulates, backward_s=0.0, forward_s=0.0)
    trial = replace(without_fault(name, 1, 4), program=program)
    subject = trial.subject

    def over_gloo(group: dist.ProcessGroup) -> Record:
        rank, record = GlooRank(group.rank(), group.size(), simulate(trial), group), Record()
        user = UserCode(Fault(), rank)
        subject.train(rank, program, user, record, subject.make_optimizer, subject.make)
        return record

    report = run_trial(trial)

    assert report.violations == []
    for own, expected in zip(report.records, run_ranks(4, over_gloo), strict=True):
        assert own.result is not None
        assert expected.result is not None
        assert torch.equal(own.result, expected.result)


@pytest.mark.parametrize(
    ("name", "mean_of"),
    [
        ("gradient_allreduce", lambda rows: oracle.gradient_allreduce(rows)),
        ("bytegrad", lambda rows: oracle.bytegrad(rows, [rows[0].size])),
    ],
)
def test_results_are_those_of_the_oracle(name: str, mean_of: Callable[[list[oracle.Array]], oracle.Array]) -> None:
    size, program = 3, Program(backward_s=0.0, forward_s=0.0)
    network = ThreeLayers()
    parameters = list(network.parameters())
    optimizer = sgd(parameters)
    data = [torch.Generator().manual_seed(rank) for rank in range(size)]
    for _ in range(program.num_steps):
        losses = [network(torch.randn(3, 8, generator=own)).square().sum() for own in data]
        gradients = [torch.autograd.grad(loss, parameters) for loss in losses]
        for parameter, rows in zip(parameters, zip(*gradients, strict=True), strict=True):
            mean = mean_of([row.flatten().numpy() for row in rows])
            parameter.grad = torch.from_numpy(mean).view_as(parameter)
        optimizer.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in parameters])

    report = run_trial(replace(without_fault(name, 1, size), program=program))

    assert report.violations == []
    for record in report.records:
        assert record.result is not None
        assert torch.equal(record.result, expected)


@pytest.mark.parametrize("kind", FAULTS)
def test_faults(kind: str) -> None:
    for name in list(SUBJECTS)[FAULTS.index(kind) % 2 :: 2]:
        for trial in trials_of(name, kind, 1):
            assert violations(trial) == [], (name, trial.seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_more_faults(name: str, kind: str) -> None:
    for trial in trials_of(name, kind, 3):
        assert violations(trial) == [], trial.seed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bytegrad", "topk", "qadam", "rows", "diloco", "async"])
def test_each_operation_that_fails(name: str) -> None:
    """`make simulate ARGS=--every-operation` fails all of them, of all algorithms."""
    trial = without_fault(name, 0, 2)
    trial = replace(trial, program=replace(trial.program, num_steps=2))
    simulation = simulate(trial)
    run_trial(trial, simulation)
    for operation in range(1, simulation.network.num_operations[0] + 1):
        fault = Fault("failed operation", rank=0, operation=operation)
        assert violations(replace(trial, fault=fault)) == [], operation


BUGS: dict[str, tuple[str, ...]] = {
    "group_closes_while_others_connect": ("4_bits", "none", "late start", "slow store", "late store"),
    "search_for_inf_sends_one_number": ("local_sgd", "early end"),
    "qadam_compares_only_during_the_warmup": ("qadam_1_bit", "other state"),
    "residual_counts_twice": ("bytegrad_feedback", "none"),
    "rounds_restart_after_an_error": ("async", "error"),
    "failed_attach_cannot_be_retried": ("gradient_allreduce", "late attach"),
    "error_of_a_closed_group_has_no_cause": ("rows", "failed operation"),
    "loaded_weights_are_lost_at_the_next_round": ("diloco", "none"),
    "loaded_weights_are_changed_by_the_outer_round": ("fragments", "none"),
    "loaded_weights_are_changed_by_background_rounds": ("async", "late start", "slow link", "none", "late attach"),
    "calls_are_not_compared": ("diloco", "other call"),
    "late_open_names_no_rank": ("all", "long stall"),
    "skipped_step_leaves_a_load_pending": ("async", "overflow"),
    "errors_of_node_gradients_name_ranks_of_the_node": ("local_sgd", "long stall", "death", "error", "early end"),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_the_past_is_found(bug: str) -> None:
    name, *kinds = BUGS[bug]
    num_seeds = SEEDS_OF_A_BUG // (len(SUBJECTS) * len(FAULTS))
    trials = chain.from_iterable(trials_of(name, kind, num_seeds) for kind in kinds)
    with PAST_BUGS[bug]():
        found = next(trial for trial in trials if violations(trial))
    assert violations(found) == []


class OneOperation(tb.Algorithm):
    """A mean of gradients, and an operation that follows it. Without fields, ranks compare nothing of it."""

    def __init__(self, operation: Callable[[tb.BaguaBucket, tb.BaguaProcessGroup], object]) -> None:
        self.operation = operation

    def make_impl(self, runner: tb.Runner) -> tb.AlgorithmImpl:
        return OneOperationImpl(runner)


class OneOperationImpl(tb.AlgorithmImpl):
    def init_operations(self, module: torch.nn.Module | None, bucket: tb.BaguaBucket) -> None:
        bucket.append_centralized_synchronous_op()
        bucket.append_python_op(self.algorithm.operation)


def diverge(bucket: tb.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
    bucket.flat.add_(group.rank)


def leave_a_thread(bucket: tb.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
    _concurrency.Thread(target=lambda: _concurrency.sleep(1000), name="forgotten").start()


def send_to_nobody(bucket: tb.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
    if group.rank == 0:
        group.world.post("sending to", 1, bucket.flat, tag=99, purpose="a test")
        group.world.wait("sending to", 1, tag=99, purpose="a test")


def send_too_much(bucket: tb.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
    received = torch.empty(7 + group.rank, dtype=torch.uint8)
    group.world.post("receiving from", 1 - group.rank, received, tag=99, purpose="a test")
    group.world.post("sending to", 1 - group.rank, received.clone(), tag=99, purpose="a test")
    group.world.wait("receiving from", 1 - group.rank, tag=99, purpose="a test")
    group.world.wait("sending to", 1 - group.rank, tag=99, purpose="a test")


def take_long(bucket: tb.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
    _concurrency.sleep(1)


def fail(bucket: tb.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
    raise ValueError("a test")


def wait_for_ever(bucket: tb.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
    lock = _concurrency.Lock()
    lock.acquire()
    lock.acquire()


def look_again_and_again(bucket: tb.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
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
def test_check_reports_what_must_not_happen(
    operation: Callable[[tb.BaguaBucket, tb.BaguaProcessGroup], object], message: str
) -> None:
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
    trial = replace(without_fault("bytegrad", 0, 2), fault=Fault("death", rank=1, turn=150))
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


def test_the_error_of_one_operation_reaches_all_ranks() -> None:
    trial = replace(without_fault("bytegrad", 0, 3), fault=Fault("failed operation", rank=1, operation=20))
    report = run_trial(trial)
    assert report.violations == []
    assert "operation 20 of rank 1" in str(report.outcomes[1].error)
    assert all(isinstance(outcome.error, RuntimeError) for outcome in report.outcomes)


@pytest.mark.slow
def test_a_seed_determines_all_events_in_another_process() -> None:
    _, trial = case(1000)
    code = "from simulated import case; from torchbagua.simulation.trial import run_trial; "
    code += "print(run_trial(case(1000)[1]).digest)"
    runs = [
        run_python(code, REPOSITORY, PYTHONPATH=str(REPOSITORY / "tests"), PYTHONHASHSEED=seed) for seed in ("1", "2")
    ]
    assert {out for _, out, _ in runs} == {run_trial(trial).digest + "\n"}, runs


@pytest.mark.parametrize("name", ["fragments", "async", "rows"])
def test_a_seed_determines_all_events(name: str) -> None:
    trial = draw_trial(SUBJECTS[name], 7, "death")
    first, second = run_trial(trial), run_trial(trial)
    assert first.digest == second.digest
    assert first.digest != run_trial(replace(trial, seed=8)).digest


def test_time_is_virtual() -> None:
    def body(rank: Rank) -> float:
        start_s = _concurrency.monotonic()
        rank.compute(3600)
        return _concurrency.monotonic() - start_s

    simulation = Simulation(2, seed=0, limit_s=4000)
    assert [outcome.value for outcome in simulation.run(body)] == pytest.approx([3600, 3600])


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


def test_a_loop_of_waits_is_reported() -> None:
    def wait_again_and_again(rank: Rank) -> None:
        while True:
            rank.compute(1)

    with pytest.raises(Deadlock, match="after 50 s"):
        Simulation(1, seed=0, limit_s=50).run(wait_again_and_again)


def close_while_a_job_is_submitted(seed: int) -> None:
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

    (outcome,) = Simulation(1, seed).run(body)
    assert outcome.error is None or "is closed" in str(outcome.error)


def is_deadlocked(seed: int) -> bool:
    try:
        close_while_a_job_is_submitted(seed)
    except Deadlock:
        return True
    return False


def test_a_lane_that_closes_while_a_job_is_submitted() -> None:
    for seed in range(20):
        close_while_a_job_is_submitted(seed)
    with job_is_queued_after_the_stop():
        assert any(is_deadlocked(seed) for seed in range(20))


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
        times = [outcome.value for outcome in Simulation(cluster, seed=0).run(body)]
        assert times == pytest.approx([expected_s] * len(nodes), rel=1e-3)


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
    def body(rank: Rank) -> bool:
        condition = _concurrency.Condition()
        woken: list[bool] = []

        def wait() -> None:
            with condition:
                woken.append(condition.wait())

        thread = _concurrency.Thread(target=wait, name="waiting")
        thread.start()
        with condition:
            assert not condition.wait(timeout=1)
            condition.notify_all()
        thread.join()
        return woken == [True]

    assert [outcome.value for outcome in Simulation(1, seed=0).run(body)] == [True]


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


def test_codecs_and_ranks_share_the_cores_of_a_node() -> None:
    def body(rank: Rank) -> float:
        rank.compute(1)
        return _concurrency.monotonic()

    one_core = Cluster((0, 0), num_cores=1)
    assert [outcome.value for outcome in Simulation(one_core, seed=0).run(body)] == pytest.approx([2, 2])

    trial = without_fault("bytegrad", 0, 2)
    slow = replace(trial.cluster, encode_rate=1e4, decode_rate=1e5)
    assert run_trial(replace(trial, cluster=slow)).ended_s > run_trial(trial).ended_s + 0.1
