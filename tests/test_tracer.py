"""Events: every phase of every algorithm, on one step clock, and observers that fail."""

import copy
import re
import sys
import threading
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchbagua as tb
from ranks import run_ranks
from torchbagua.codecs.base import WireLayout
from torchbagua.observe.events import Trace
from tracing import NAMES, NUM_STEPS, ON_LANE, TRAINING, check_nested, check_two_at_a_time, record, train_traced
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


def test_samples_are_laid_out_only_if_an_observer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out = WireLayout.beginning
    asked_for: list[str] = []

    def count_and_lay_out(layout: WireLayout, num_elements: int) -> WireLayout:
        asked_for.append(threading.current_thread().name)
        return lay_out(layout, num_elements)

    monkeypatch.setattr(WireLayout, "beginning", count_and_lay_out)

    class Sampler(tb.observe.Recorder, Trace):
        def samples(self, step: int) -> bool:
            return step > 0

    train_traced(2, "bytegrad", lambda group: [tb.observe.Recorder()] if group.rank() == 0 else [])
    assert not asked_for
    sampler = Sampler()
    train_traced(2, "bytegrad", lambda group: [sampler] if group.rank() == 0 else [])
    buckets = {event.bucket for event in sampler.events if event.phase == "measure"}
    assert len(asked_for) == len(buckets) > 0, "once for a bucket"


def test_sampled_values_are_right() -> None:
    """Compare the local chunk's relative error, residuals and staleness with the values they are computed from."""

    class Sampler(tb.observe.Recorder, Trace):
        def samples(self, step: int) -> bool:
            return step == 4

    recorders = [Sampler() for _ in range(2)]
    attachments = train_traced(2, "qadam_1bit", lambda group: [recorders[group.rank()]], num_steps=5)
    for recorder, attachment in zip(recorders, attachments, strict=True):
        measured = [event for event in recorder.events if event.phase == "measure"]
        assert {event.step for event in measured} == {4}
        state = attachment.runner.state_dict()
        for kind, name in (("sent", "residual of what is sent"), ("mean", "residual of the mean")):
            norm = sum(event.values.get(name, 0.0) ** 2 for event in measured) ** 0.5
            expected = torch.cat([values.flatten() for values in state[kind].values()]).double().norm().item()
            assert norm == pytest.approx(expected, rel=1e-5)  # summed in another order
        for event in measured:
            if "encoded" in event.values:
                assert 0 < event.values["left out"] < event.values["encoded"] * 2

    recorders = [Sampler() for _ in range(2)]
    train_traced(2, "bytegrad", lambda group: [recorders[group.rank()]], num_steps=5)
    for recorder in recorders:
        values = [event.values for event in recorder.events if event.phase == "measure"]
        assert len(values) == sum(event.phase == "bucket" and event.step == 4 for event in recorder.events)
        # Half a step of a block is its range / 510, and the range of an almost normal block is about 6 deviations.
        errors = [each["left out"] / each["encoded"] for each in values if each["encoded"]]
        assert all(error < 0.02 for error in errors)
        assert max(errors) > 0.001

    recorders = [Sampler() for _ in range(2)]
    train_traced(2, "async", lambda group: [recorders[group.rank()]], num_steps=40)
    for recorder in recorders:
        rounds = [event.values for event in recorder.events if event.phase == "apply" and event.values]
        assert rounds
        counts = [values["rounds"] for values in rounds]
        assert counts == sorted(counts)
        staleness = [values["staleness in steps"] for values in rounds]
        assert min(staleness) >= 0  # 0 if a rank waits at the end for the others, and takes no steps
        assert max(staleness) >= 1


def test_the_standalone_hook_counts_averaged_backward_passes_as_steps() -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> list[tb.observe.CommEvent]:
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


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Tower(), {"find_unused_parameters": True}),
        (Checkpointed(use_reentrant=True), {"static_graph": True}),
        (Checkpointed(use_reentrant=False), {"gradient_as_bucket_view": True}),
    ],
    ids=["unused", "reentrant", "checkpoint"],
)
def test_step_and_wait_in_every_kind_of_ddp(model: nn.Module, options: dict[str, bool]) -> None:
    def body(group: dist.ProcessGroup) -> list[tb.observe.CommEvent]:
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


def test_the_wait_of_detach_belongs_to_no_step() -> None:
    def body(group: dist.ProcessGroup) -> tb.Attachment:
        ddp = DistributedDataParallel(nn.Linear(64, 64), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        with tb.attach(ddp, optimizer, "decentralized", observers=[tb.observe.Recorder()]) as attachment:
            for _ in range(5):
                ddp(torch.ones(6, 64)).sum().backward()
                optimizer.step()
            if group.rank() == 1:
                time.sleep(1)
        return attachment

    before, _ = run_ranks(2, body)
    figures = before.summary().figures
    assert figures.wait_ns < figures.step_ns
    assert figures.num_steps == 5
    assert before.summary().bytes_after > 0
    note = r"rank 0 sent 0\.\d+ MB more after its last step, 0\.\d+ MB of it during detach"
    assert re.search(note, str(before.summary()))


def test_residuals_are_reported_after_the_last_of_several_backward_passes() -> None:
    class Sampler(tb.observe.Recorder, Trace):
        def samples(self, step: int) -> bool:
            return True

    def body(group: dist.ProcessGroup) -> tuple[float, float]:
        ddp = DistributedDataParallel(build(Tower), process_group=group)
        adam = tb.QAdamOptimizer(ddp.parameters(), warmup_steps=1)
        algorithm = tb.QAdamAlgorithm(adam, compression="sign1bit", error_feedback=True)
        summary = tb.observe.Summary()
        with tb.attach(ddp, adam, algorithm, observers=[Sampler(), summary]) as attachment:
            for step in range(4):
                for _ in range(3):
                    ddp(torch.randn(6, 10), step).square().sum().backward()
                adam.step()
            state = attachment.state_dict()["impl"]
        residuals = [values.flatten() for kind in ("sent", "mean") for values in state[kind].values()]
        norm = summary.figures.residual_norm
        assert norm is not None
        return norm, torch.cat(residuals).double().norm().item()

    for reported, actual in run_ranks(2, body):
        assert reported == pytest.approx(actual, rel=1e-5)  # summed in another order


@dataclass
class Output:
    """An output in which DDP finds tensors, but pytree does not."""

    loss: torch.Tensor
    name: str = "loss"


class WithDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(self.layer(x).sum())


def test_backward_from_a_dataclass() -> None:
    def body(group: dist.ProcessGroup) -> list[tb.observe.CommEvent]:
        recorder = tb.observe.Recorder()
        ddp = DistributedDataParallel(WithDataclass(), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        with tb.attach(ddp, optimizer, "bytegrad", observers=[recorder]):
            ddp(torch.ones(2, 4)).loss.backward()
            optimizer.step()
        return recorder.events

    for events in run_ranks(2, body):
        assert sum(event.phase == "backward" for event in events) == 1
