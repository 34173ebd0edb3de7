"""`torchbagua.testing.simulation.check` reports what must not happen; a trace shows what did."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torchbagua as tb
from simulated import without_fault
from torchbagua import _concurrency
from torchbagua.testing.simulation import Fault, SimulationTrace, Subject, Violation, check, run_trial, simulate

# Trainings with faults give all of the package's warnings.
pytestmark = [pytest.mark.usefixtures("on_one_core"), pytest.mark.filterwarnings("ignore")]


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
