"""Events: every phase of every algorithm, on one step clock; and the observers that receive them."""

import copy
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchbagua as tb
from ranks import run_ranks
from torchbagua.observe.events import Trace
from tracing import (
    NAMES,
    NUM_STEPS,
    ON_LANE,
    TRAINING,
    algorithm_of,
    check_nested,
    check_two_at_a_time,
    record,
    train_traced,
)
from training import Tower, build


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        *((name, [0, 0]) for name in NAMES),
        ("bytegrad", [0, 0, 0]),
        ("shift_one", [0, 0, 0, 0]),
        *((name, [0, 0, 1, 1]) for name in ("qadam_1bit", "low_precision_decentralized", "decentralized", "diloco")),
    ],
    ids=str,
)
def test_every_algorithm_reports_its_phases(name: str, nodes: list[int]) -> None:
    size = len(nodes)
    ranks = record(size, name, nodes=nodes)
    sent, received = Counter(), Counter()
    for rank, events in enumerate(ranks):
        phases = Counter(event.phase for event in events)
        assert phases["step"] == phases["backward"] == NUM_STEPS
        assert {"bucket", "send", "receive"} <= set(phases)
        assert [event.step for event in events if event.phase == "step"] == list(range(NUM_STEPS))
        assert len({event.algorithm for event in events}) == 1
        for thread in TRAINING, [phase for phase in ON_LANE if phase != "bucket"]:
            check_nested([(event.start_ns, event.end_ns) for event in events if event.phase in thread])
        check_two_at_a_time(event for event in events if event.phase == "bucket")
        for peer in range(size):
            check_two_at_a_time(event for event in events if event.phase == "send" and event.peers == (peer,))
        for event in events:
            if event.phase in ("send", "receive"):
                (peer,) = event.peers
                assert peer != rank
                assert {rank, peer} <= set(event.ranks)
                assert event.wire_bytes > 0
                assert event.num_elements or event.operation == "agreement"
                pair = (rank, peer) if event.phase == "send" else (peer, rank)
                key = (event.scope, event.ranks, *pair, event.message)
                both = (event.operation, event.bucket, event.num_elements, event.raw_bytes, event.wire_bytes)
                (sent if event.phase == "send" else received)[key, both] += 1
    assert sent == received, "every message, its number and size on both sides"
    assert set(sent.values()) == {1}


def test_a_wait_ends_when_the_lane_is_done() -> None:
    for events in record(2, "bytegrad"):
        for step in range(1, NUM_STEPS):
            (backward,) = (event for event in events if (event.phase, event.step) == ("backward", step))
            (whole,) = (event for event in events if (event.phase, event.step) == ("step", step))
            buckets = [event for event in events if (event.phase, event.step) == ("bucket", step)]
            waits = [event for event in events if (event.phase, event.step) == ("wait", step)]
            last_ns = max(event.end_ns for event in buckets)
            assert whole.start_ns <= backward.start_ns <= min(event.start_ns for event in buckets)
            assert bool(waits) == (last_ns > backward.end_ns) or abs(last_ns - backward.end_ns) < 10**6
            for wait in waits:
                assert wait.start_ns >= backward.end_ns
                assert last_ns <= wait.end_ns <= whole.end_ns


class Sampler(tb.observe.Recorder, Trace):
    """Records events, and samples in some steps."""

    def __init__(self, steps: Container[int] = range(1000)) -> None:
        super().__init__()
        self.steps = steps
        self.asked: list[int] = []

    def samples(self, step: int) -> bool:
        self.asked.append(step)
        return step in self.steps


Events = list[tb.observe.CommEvent]


def sampled(name: str, num_steps: int) -> Iterator[tuple[Events, tb.Attachment]]:
    """Train with samples of step 4; yield each rank's events with values, and its attachment."""
    samplers = [Sampler([4]) for _ in range(2)]
    attachments = train_traced(2, name, lambda group: [samplers[group.rank()]], num_steps=num_steps)
    for sampler, attachment in zip(samplers, attachments, strict=True):
        buckets = [event for event in sampler.events if event.phase == "bucket" and event.step == 4]
        measured = [event for event in sampler.events if event.phase == "measure"]
        assert {event.step for event in measured} <= {4}
        assert name != "bytegrad" or len(measured) == len(buckets) > 0
        yield [event for event in sampler.events if event.values], attachment


def norm_of_residuals(state: dict[str, Any], *kinds: str) -> float:
    residuals = [values.flatten() for kind in kinds for values in state[kind].values()]
    return float(torch.cat(residuals).double().norm())


def test_sampled_values_are_right() -> None:
    """Compare the local chunk's relative error, residuals and staleness with the values they are computed from."""
    for events, attachment in sampled("qadam_1bit", 5):
        for kind, name in (("sent", "residual of what is sent"), ("mean", "residual of the mean")):
            norm = sum(event.values.get(name, 0.0) ** 2 for event in events) ** 0.5
            expected = norm_of_residuals(attachment.runner.state_dict(), kind)
            assert norm == pytest.approx(expected, rel=1e-5)  # summed in another order
        for values in (event.values for event in events if "encoded" in event.values):
            assert 0 < values["left out"] < values["encoded"] * 2
    for events, _ in sampled("bytegrad", 5):
        # Half a step of a block is its range / 510, and the range of an almost normal block is about 6 deviations.
        errors = [event.values["left out"] / event.values["encoded"] for event in events if event.values["encoded"]]
        assert all(error < 0.02 for error in errors)
        assert max(errors) > 0.001
    for events, _ in sampled("async", 40):
        rounds = [event.values for event in events if event.phase == "apply"]
        counts, staleness = zip(*((values["rounds"], values["staleness in steps"]) for values in rounds), strict=True)
        assert list(counts) == sorted(counts)
        assert min(staleness) >= 0  # 0 if a rank waits at the end for the others, and takes no steps
        assert max(staleness) >= 1


def test_residuals_are_reported_after_the_last_of_several_backward_passes() -> None:
    def body(group: dist.ProcessGroup) -> tuple[float | None, float]:
        ddp = DistributedDataParallel(build(Tower), process_group=group)
        algorithm, adam = algorithm_of("qadam_1bit", ddp.parameters())
        summary = tb.observe.Summary()
        with tb.attach(ddp, adam, algorithm, observers=[Sampler(), summary]) as attachment:
            for step in range(4):
                for _ in range(3):
                    ddp(torch.randn(6, 10), step).square().sum().backward()
                adam.step()
            state = attachment.state_dict()["impl"]
        return summary.figures.residual_norm, norm_of_residuals(state, "sent", "mean")

    for reported, actual in run_ranks(2, body):
        assert reported == pytest.approx(actual, rel=1e-5)  # summed in another order


def test_the_standalone_hook_counts_averaged_backward_passes_as_steps() -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> Events:
        recorder = tb.observe.Recorder()
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        impl = tb.ByteGradAlgorithm().reify(group, observers=[recorder])
        ddp.register_comm_hook(impl, tb.comm_hook)
        for step in range(4):
            with ddp.no_sync():
                ddp(torch.ones(6, 10), step).sum().backward()
            ddp(torch.ones(6, 10), step).sum().backward()
        impl.close()
        return recorder.events

    for events in run_ranks(2, body):
        assert [event.step for event in events if event.phase == "step"] == [0, 1, 2, 3]
        assert {event.step for event in events if event.phase == "bucket"} == {0, 1, 2, 3}


class Checkpointed(nn.Module):
    """A model that recomputes the forward of a part in backward, in a separate backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 300), nn.Linear(300, 1)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return checkpoint(self.second, self.first(x).tanh(), use_reentrant=self.use_reentrant)


@dataclass
class Output:
    """An output in which DDP finds tensors, but pytree does not."""

    loss: torch.Tensor

    def sum(self) -> torch.Tensor:
        return self.loss


class WithDataclass(Checkpointed):
    def forward(self, x: torch.Tensor, choice: int) -> Output:  # type: ignore[override]
        return Output(super().forward(x, choice).sum())


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Tower(), {"find_unused_parameters": True}),
        (Checkpointed(use_reentrant=True), {"static_graph": True}),
        (Checkpointed(use_reentrant=False), {"gradient_as_bucket_view": True}),
        (WithDataclass(use_reentrant=False), {}),
    ],
    ids=["unused", "reentrant", "checkpoint", "dataclass"],
)
def test_step_and_wait_in_every_kind_of_ddp(model: nn.Module, options: dict[str, bool]) -> None:
    def body(group: dist.ProcessGroup) -> Events:
        recorder = tb.observe.Recorder()
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group, **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        with tb.attach(ddp, optimizer, "bytegrad", observers=[recorder]):
            for step in range(3):
                optimizer.zero_grad()
                ddp(torch.ones(6, 10), step).sum().backward()
                optimizer.step()
        return recorder.events

    for events in run_ranks(2, body):
        phases = Counter(event.phase for event in events)
        assert phases["step"] == phases["backward"] == 3
        check_nested([(event.start_ns, event.end_ns) for event in events if event.phase in TRAINING])


@pytest.mark.parametrize("all_threads", [False, True])
def test_the_profiler_shows_buckets_by_name(all_threads: bool) -> None:
    """If it follows only the training thread, when buckets are passed to the lane; otherwise, every phase."""
    model = build(Tower)
    settings = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
    profiled: list[torch.profiler.profile] = []

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        impl = tb.ByteGradAlgorithm().reify(group)
        ddp.register_comm_hook(impl, tb.comm_hook)
        with torch.profiler.profile(experimental_config=settings) if group.rank() == 0 else nullcontext() as profile:
            for step in range(2):
                ddp(torch.ones(6, 10), step).sum().backward()
        profiled.extend([profile] if profile is not None else [])
        impl.close()

    run_ranks(2, body)
    names = {event.key for event in profiled[0].key_averages()}
    assert "torchbagua: gradient bucket 0" in names
    shown = {phase for phase in ON_LANE if f"torchbagua: gradient bucket 0 {phase}" in names}
    assert shown == (set(ON_LANE) - {"measure"} if all_threads else set())


@pytest.mark.parametrize("name", ["decentralized", "diloco", "async"])
def test_events_end_in_their_step(name: str) -> None:
    """Also when threads switch far more often than usual.

    The lane may already work for a step while the previous step applies the result that it waited for.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        ranks = record(2, name, num_steps=30)
    finally:
        sys.setswitchinterval(interval)
    for events in ranks:
        ends = {event.step: event.end_ns for event in events if event.phase == "step"}
        for event in events:
            if event.phase != "step":
                assert event.step == 0 or event.phase not in TRAINING or ends[event.step - 1] <= event.end_ns
                assert event.step < 2 or ends[event.step - 2] <= event.end_ns
                assert event.step not in ends or event.end_ns <= ends[event.step]


# Observers: how they are called, how their errors are reported, and that they do not change training


class Failing:
    """An observer that raises on its third event."""

    def __init__(self) -> None:
        self.num_heard = 0

    def on_comm(self, event: tb.observe.CommEvent) -> None:
        self.num_heard += 1
        if self.num_heard == 3:
            raise KeyError("of the user's")


def test_an_observer_that_raises_is_dropped_and_training_continues() -> None:
    failing, recorders = [Failing(), Failing()], [tb.observe.Recorder(), tb.observe.Recorder()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attachments = train_traced(
            2, "bytegrad", lambda group: [failing[group.rank()], recorders[group.rank()]], num_steps=3
        )
    assert [observer.num_heard for observer in failing] == [3, 3]
    messages = [str(warning.message) for warning in caught if "observer Failing" in str(warning.message)]
    assert len(messages) == 2, "one warning on each rank"
    for message in messages:
        assert "gets no more events; training continues" in message
        assert "Traceback" in message
        assert "of the user's" in message
    for attachment, recorder in zip(attachments, recorders, strict=True):
        assert sum(event.phase == "step" for event in recorder.events) == 3, "others still hear"
        assert "Failing stopped in step 0: KeyError" in str(attachment.summary())


@pytest.mark.parametrize("method", ["on_start", "samples", "on_end"])
def test_a_trace_that_raises_elsewhere_is_dropped_too(method: str) -> None:
    def fail(self: object, *args: object) -> None:
        raise OSError("no disk")

    broken = type("Broken", (tb.observe.Recorder, Trace), {method: fail})
    with pytest.warns(RuntimeWarning, match="(?s)Broken failed in step .*no disk"):
        attachments = train_traced(2, "bytegrad", lambda group: [broken()], num_steps=2)
    for attachment in attachments:
        assert "Broken stopped in step" in str(attachment.summary())
        assert attachment.summary().figures.num_steps == 2


def test_observers_do_not_change_weights() -> None:
    """Including observers that sample values."""

    def weights(name: str, observed: bool) -> list[torch.Tensor]:
        model = build(Tower)
        attachments = train_traced(2, name, lambda group: [Sampler()] if observed else [], model=model)
        optimizers = [optimizer for attachment in attachments for optimizer in attachment.runner.optimizers]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"]]

    for name in ("bytegrad", "qadam_1bit", "low_precision_decentralized", "diloco"):
        assert all(map(torch.equal, weights(name, True), weights(name, False))), name


def test_without_observers_nothing_is_recorded() -> None:
    (attachment, _) = train_traced(2, "bytegrad", lambda group: [])
    tracer = attachment.runner.tracer
    assert not tracer.is_on
    assert tracer.span("encode") is tracer.span("wait"), "one object that does nothing"
    with pytest.raises(RuntimeError, match=r"without observers nothing is recorded; attach.*observers="):
        attachment.summary()


def test_observers_are_called_one_at_a_time() -> None:
    class Exclusive:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.threads: set[str] = set()

        def on_comm(self, event: tb.observe.CommEvent) -> None:
            assert self.lock.acquire(blocking=False), "called while it is called"
            self.threads.add(threading.current_thread().name)
            self.lock.release()

    observers = [Exclusive(), Exclusive()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_traced(2, "decentralized", lambda group: [observers[group.rank()]], num_steps=10)
    for observer in observers:
        assert len(observer.threads) == 1, "the training thread's, between two steps"


def test_an_observer_given_twice_is_called_once() -> None:
    recorder = tb.observe.Recorder()

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        own = tb.BaguaProcessGroup(group, observers=[recorder])
        with tb.attach(ddp, optimizer, "bytegrad", process_group=own, observers=[recorder, recorder]):
            optimizer.step()

    run_ranks(1, body)
    assert [event.phase for event in recorder.events] == ["step"]


def test_training_continues_if_warnings_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attachments = train_traced(2, "bytegrad", lambda group: [Failing()], num_steps=3)
    assert [attachment.summary().figures.num_steps for attachment in attachments] == [3, 3]
    assert capsys.readouterr().err.count("the observer Failing failed") == 2


# The bytes that observers know of at the end of a step: each round in one step, whole, and nothing of the next


BYTE_STEPS = 7
WIDTH = 96
LAYER_BYTES = 4 * (WIDTH + 1) * WIDTH
NUM_LAYERS = 3
ROUND_BYTES = NUM_LAYERS * LAYER_BYTES  # of two ranks in float32
SLOW_S = 0.01


class Run(SimpleNamespace):
    """One rank's model, optimizer, observers and attachment, and the `result` of its body; `step` trains a step."""

    def step(self) -> None:
        self.ddp(torch.ones(2, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def run_attached(algorithm: tb.Algorithm, body: Callable[[Run], object], *, size: int = 2) -> list[Run]:
    """Attach on threads, with a bucket for each layer; call `body`, and return the detached runs."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))

    def train(group: dist.ProcessGroup) -> Run:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        recorder, summary = Sampler([]), tb.observe.Summary()
        with tb.attach(ddp, optimizer, algorithm, observers=[recorder, summary]) as attachment:
            run = Run(ddp=ddp, optimizer=optimizer, recorder=recorder, summary=summary, attachment=attachment)
            run.result = body(run)
        return run

    return run_ranks(size, train)


def payload(run: Run, step: int | None = None) -> int:
    """Return the bytes of weights that the recorder knows of: of one step, or of all. Agreements are left out."""
    events = run.recorder.events
    return sum(event.bytes_sent for event in events if event.operation != "agreement" and step in (None, event.step))


CAP_MB = LAYER_BYTES / 2**20
# By the number of ended steps, the number of rounds reported by then; and the number of rounds in flight at detach.
ALGORITHMS = {
    "decentralized": (tb.DecentralizedAlgorithm(bucket_cap_mb=CAP_MB), lambda step: step, 1),
    "every third": (
        tb.DecentralizedAlgorithm(bucket_cap_mb=CAP_MB, communication_interval=3),
        lambda step: -(-step // 3),
        0,
    ),
    "diloco": (
        tb.DiLoCoAlgorithm(2, bucket_cap_mb=CAP_MB, compression=None),
        lambda step: step // 2,
        0,
    ),
    "local SGD": (tb.LocalSGDAlgorithm(1, bucket_cap_mb=CAP_MB, compression=None), lambda step: step, 0),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_round_is_reported_at_the_end_of_its_step(name: str) -> None:
    """If the lane is slow, the awaited messages belong to the step; if it is fast, nothing of the next round does."""
    algorithm, rounds_after, num_in_flight = ALGORITHMS[name]

    def body(run: Run) -> list[int]:
        runner = run.attachment.runner

        def slow(bucket: tb.extend.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
            time.sleep(SLOW_S)  # so that the round lasts longer than forward and backward

        add = runner.weights.add

        def slow_add(*arguments: object, **options: object) -> None:
            add(*arguments, **options)
            time.sleep(2 * SLOW_S)  # so that the lane has begun the next round when the step ends

        if name in ("decentralized", "every third"):
            runner.buckets[-1].append_python_op(slow)
            runner.weights.add = slow_add
        totals = []
        for _ in range(BYTE_STEPS):
            run.step()
            totals.append(payload(run))
        return totals

    expected = [ROUND_BYTES * rounds_after(step) for step in range(BYTE_STEPS + 1)]
    for run in run_attached(algorithm, body):
        assert run.result == expected[1:]
        of_steps = [payload(run, step) for step in range(BYTE_STEPS)]
        assert of_steps == [after - before for before, after in pairwise(expected)]
        figures = run.summary.figures
        assert figures.num_steps == BYTE_STEPS
        assert figures.bytes_sent == pytest.approx(sum(of_steps), abs=200 * BYTE_STEPS), "agreements beside them"
        after, in_detaching = run.summary.bytes_after, run.summary.bytes_in_detaching
        assert after == pytest.approx((num_in_flight + 1) * ROUND_BYTES, abs=400)
        assert in_detaching == pytest.approx(ROUND_BYTES, abs=200), "the last mean"
        mb, of_mb = f"{after / 1e6:.3f} MB more after its last step", f"{in_detaching / 1e6:.3f} MB of it during detach"
        assert (f"{mb}, {of_mb}" if num_in_flight else f"{mb}, during detach") in str(run.summary)


def test_a_summary_contains_all_bytes_sent_until_it_is_read() -> None:
    def body(run: Run) -> tuple[int, int]:
        run.step()
        run.attachment.runner.lane.submit(lambda: None).result()  # the round that overlaps the second step is done
        before = payload(run)
        assert run.attachment.summary() is run.summary
        return before, payload(run)

    for run in run_attached(tb.DecentralizedAlgorithm(bucket_cap_mb=CAP_MB), body):
        assert run.result == (ROUND_BYTES, 2 * ROUND_BYTES)
        assert run.summary.figures.num_steps == 1


def test_the_wait_of_detach_belongs_to_no_step() -> None:
    def body(run: Run) -> None:
        for _ in range(5):
            run.step()
        if run.attachment.runner.process_group.rank == 1:
            time.sleep(1)

    before, _ = run_attached(tb.DecentralizedAlgorithm(bucket_cap_mb=CAP_MB), body)
    figures = before.summary.figures
    assert figures.wait_ns < figures.step_ns
    assert figures.num_steps == 5


def test_abort_reports_the_rounds_until_then() -> None:
    def body(run: Run) -> tuple[int, int]:
        run.step()
        run.attachment.impl.abort(run.ddp)
        return run.attachment.impl.num_rounds, payload(run)

    algorithm = tb.AsyncModelAverageAlgorithm(sync_interval_ms=1, bucket_cap_mb=CAP_MB)
    for run in run_attached(algorithm, body):
        num_rounds, num_bytes = run.result
        assert num_rounds >= 1
        assert num_bytes == num_rounds * ROUND_BYTES


def test_observers_are_asked_for_samples_once_a_step() -> None:
    """Also for the next step, if the lane works on it before the last step has ended."""

    def body(run: Run) -> None:
        for _ in range(BYTE_STEPS):
            run.step()

    for name in ("decentralized", "diloco"):
        for run in run_attached(ALGORITHMS[name][0], body):
            assert run.recorder.asked == list(range(BYTE_STEPS + 1))
