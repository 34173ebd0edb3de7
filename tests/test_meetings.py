"""Meetings: ranks of a gradient algorithm compare their progress in each backward and at the end, and their weights."""

import copy
import re
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from caught import torchbagua_warnings
from ranks import run_ranks
from torchbagua.runtime import meeting
from torchbagua.runtime.meeting import Meetings
from training import build

NUM_STEPS = 6


MODEL = build(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))


class Loop:
    """A rank's training loop; `step` may leave out the whole step, or only the optimizer's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.net, self.group = group.rank(), copy.deepcopy(MODEL), tb.BaguaProcessGroup(group)
        self.ddp = DistributedDataParallel(self.net, process_group=group, bucket_cap_mb=1e-4)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.data = torch.Generator().manual_seed(self.rank)

    def attach(self, algorithm: tb.Algorithm | str = "bytegrad") -> tb.Attachment:
        return tb.attach(self.ddp, self.optimizer, algorithm, process_group=self.group)

    def hook(self, optimizer: torch.optim.Optimizer | None = None) -> tb.extend.Runner:
        runner = tb.ByteGradAlgorithm().reify(self.group, optimizer=optimizer)
        self.ddp.register_comm_hook(runner, tb.comm_hook)
        return runner

    def step(self, *, updates: bool = True) -> None:
        self.optimizer.zero_grad()
        self.ddp(torch.randn(3, 4, generator=self.data)).square().sum().backward()
        if updates:
            self.optimizer.step()

    def follow_the_own_loss(self) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.01 * (1 + self.rank)

    def reset_a_unit(self) -> None:
        if self.rank == 1:
            with torch.no_grad():
                self.net[1].weight[0, 3] = 0.5


def check_raise_both(size: int, body: Callable[[Loop], None], first: str, second: str) -> None:
    """Check that all ranks raise, and name two ranks, one with each progress."""

    def run(group: dist.ProcessGroup) -> str:
        with pytest.raises(tb.CommunicationError) as caught:
            body(Loop(group))
        return str(caught.value)

    for error in run_ranks(size, run):
        found = re.search(r"ranks are out of step: rank (\d) (.*?); rank (\d) (.*?)\. Every rank must run", error)
        assert found is not None, error
        assert {found[2], found[4]} == {first, second}, error


@pytest.mark.parametrize(
    ("algorithm", "size"),
    [
        (tb.GradientAllReduceAlgorithm(), 2),
        (tb.ByteGradAlgorithm(), 4),
        (tb.TopKAlgorithm(ratio=0.1, warmup_steps=2), 2),
        (tb.PowerSGDAlgorithm(rank=1, start_step=2, min_rate=1), 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_rank_that_leaves_out_a_step_raises_on_all_ranks(algorithm: tb.Algorithm, size: int) -> None:
    """Its later steps meet the earlier ones of the others, which have one more in the end."""

    def body(loop: Loop) -> None:
        with loop.attach(algorithm):
            for step in range(NUM_STEPS):
                if (loop.rank, step) != (1, 2):
                    loop.step()

    ended = f"has ended after {NUM_STEPS - 1} synchronized backward passes and {NUM_STEPS - 1} optimizer steps"
    going_on = f"is in synchronized backward pass {NUM_STEPS}, after {NUM_STEPS - 1} optimizer steps"
    check_raise_both(size, body, going_on, ended)


@pytest.mark.parametrize(("size", "skipped"), [(2, 2), (5, 2), (3, NUM_STEPS - 1)])
def test_a_rank_that_does_not_step_its_optimizer(size: int, skipped: int) -> None:
    """All ranks raise in the next backward, or when they detach."""

    def body(loop: Loop) -> None:
        with loop.attach():
            for step in range(NUM_STEPS):
                loop.step(updates=(loop.rank, step) != (1, skipped))
                assert step <= skipped + 1  # a rank whose neighbors are in step learns of it one backward later

    is_last = skipped == NUM_STEPS - 1
    ended = f"has ended after {NUM_STEPS} synchronized backward passes and"
    place = ended if is_last else f"is in synchronized backward pass {skipped + 2}, after"
    check_raise_both(size, body, *(f"{place} {skipped + number} optimizer steps" for number in (0, 1)))


@pytest.mark.parametrize("reports", ["optimizer", "step_taken"])
def test_behind_the_standalone_hook(reports: str) -> None:
    def body(loop: Loop) -> None:
        runner = loop.hook(loop.optimizer if reports == "optimizer" else None)
        for step in range(NUM_STEPS):
            updates = (loop.rank, step) != (1, 2)
            loop.step(updates=updates)
            if updates and reports == "step_taken":
                runner.step_taken()

    check_raise_both(2, body, *(f"is in synchronized backward pass 4, after {n} optimizer steps" for n in (2, 3)))


def test_a_rank_that_closes_the_standalone_hook_early_is_named() -> None:
    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group)
        runner = loop.hook()
        for _ in range(2):  # in the second one, DDP itself communicates, to rebuild its buckets
            loop.step()
        if loop.rank == 1:
            runner.close()
            return
        message = (
            "rank 1 has ended after 2 synchronized backward passes, and other ranks still train. Here, .* on rank 0"
        )
        with pytest.raises(tb.CommunicationError, match=message):
            loop.step()

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("change", "names", "num_steps", "seen_after"),
    [(Loop.follow_the_own_loss, "0.weight, and others.", 8, 8), (Loop.reset_a_unit, "1.weight.", 12, 9)],
    ids=["learning rate, at the end", "reset, in the tenth backward"],
)
def test_weights_that_one_rank_changes_are_reported_once(
    change: Callable[[Loop], None], names: str, num_steps: int, seen_after: int
) -> None:
    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group)
        with loop.attach():
            for step in range(num_steps):
                if step == 3:
                    change(loop)
                loop.step()

    with torchbagua_warnings() as messages:
        run_ranks(2, body)
    assert len(messages) == 2, messages
    for message in messages:
        assert f"rank 0 and rank 1 hold different weights after {seen_after} optimizer steps: {names}" in message


def test_a_comparison_in_an_interval_names_the_ranks_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank compares its weights with those of the rank before it: rank 0 with rank 2's, which are equal here."""
    monkeypatch.setattr(meeting, "_INTERVAL", 4)

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group)
        with loop.attach():
            for step in range(NUM_STEPS):
                if step == 2:
                    loop.reset_a_unit()
                loop.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(3, body)
    differ = "hold different weights after 3 optimizer steps"
    messages = [str(warning.message).split(":")[1] for warning in caught if differ in str(warning.message)]
    assert sorted(messages) == [f" rank 0 and rank 1 {differ}", f" rank 1 and rank 2 {differ}"]


@pytest.mark.parametrize(("size", "num_steps"), [(3, 12), (4, 1)])
def test_a_filter_makes_different_weights_an_error_on_all_ranks(size: int, num_steps: int) -> None:
    """Two ranks see the difference, in a backward or in detach; the others are told, so that none goes on alone."""

    def body(group: dist.ProcessGroup) -> str:
        loop = Loop(group)
        attachment = loop.attach()
        loop.step()
        if loop.rank == 1:
            loop.follow_the_own_loss()

        def go_on() -> None:
            with attachment:
                for _ in range(num_steps):
                    loop.step()

        with pytest.raises((RuntimeWarning, RuntimeError)) as caught:
            go_on()
        return str(caught.value)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        errors = run_ranks(size, body)
    assert any(re.search(r"rank [01] and rank [12] hold different weights", error) for error in errors)
    assert num_steps > 1 or len(set(errors)) == 1


def test_a_lane_that_is_behind_loses_no_comparison() -> None:
    """In stream order, backward may begin before the lane has compared the weights of an earlier one."""

    def body(group: dist.ProcessGroup) -> None:
        own, net = tb.BaguaProcessGroup(group), copy.deepcopy(MODEL)
        own.open()
        with torch.no_grad():
            net[0].bias += group.rank()
        meetings = Meetings(own, dict(net.named_parameters()))
        first = meetings.begin(has_joined=False)
        meetings.report()
        second = meetings.begin(has_joined=False)
        first.run()
        second.run()
        with pytest.warns(RuntimeWarning, match=r"hold different weights after 0 optimizer steps: 0\.bias\. "):
            meetings.report()
        own.close()

    run_ranks(2, body)


def test_a_rank_that_fails_before_the_others_detach() -> None:
    """The others have trained to their end, and only warn that they could not compare it."""

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group)
        with suppress(KeyError), loop.attach():
            loop.step()
            if loop.rank == 1:
                raise KeyError("of the user")

    with pytest.warns(RuntimeWarning, match="rank 0 has detached, but could not compare its progress .* rank 1"):
        run_ranks(2, body)


def test_a_reason_explains_the_disconnects_of_other_ranks_only() -> None:
    is_posted = threading.Event()

    def body(group: dist.ProcessGroup) -> list[str]:
        own = tb.BaguaProcessGroup(group)
        if group.rank() == 0:
            own.post_reason("torchbagua: rank 0 has left")
            is_posted.set()
        assert is_posted.wait(30)
        errors = [tb.CommunicationError("torchbagua: Connection closed by peer"), tb.CommunicationError("timed out")]
        return [str(own.explain(error)) for error in errors]

    first, second = run_ranks(2, body)
    assert first == ["torchbagua: Connection closed by peer", "timed out"]
    assert second == ["torchbagua: rank 0 has left. Here, Connection closed by peer", "timed out"]
