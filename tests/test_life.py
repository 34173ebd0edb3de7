"""The life of an attached algorithm: evaluate, save, resume, leave and drop.

`check_algorithm` tests the plain life of each algorithm, see test_check_algorithm.py. attach is in test_attach.py,
modules that change in test_averaged_weights.py, loads of weights in test_weight_loads.py, several optimizers in
test_optimizer_steps.py, and other cases of a resumed training in test_resume.py and test_saved_states.py.
"""

import copy
import dataclasses
import gc
import io
import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oracle
import programs
import torchbagua as tb
import torchbagua.compat.bagua
from averaging import RARELY, Normed, Trainer, Weights, assert_same_weights, stacked, train, weights_of
from caught import torchbagua_warnings
from ranks import leave_by_exception, on_each_rank, run_ranks
from torchbagua._torch import forget_active_ddp
from training import build, flat

MODEL = build(Normed)
Optimizers = list[torch.optim.Optimizer]


# Evaluate, save and resume: training continues bitwise as without any of it.


@dataclasses.dataclass
class Life:
    """An algorithm that trains on so many ranks, or on these nodes."""

    algorithm: tb.Algorithm
    num_ranks: int = 2
    nodes: list[int] | None = None


NODES = [0, 0, 1, 1]
LIVES = {
    "all": Life(tb.DecentralizedAlgorithm()),
    "shift_one": Life(tb.DecentralizedAlgorithm(peer_selection_mode="shift_one"), 4),
    "shift_one, every 3, nodes": Life(tb.DecentralizedAlgorithm(True, "shift_one", 3), 4, NODES),
    "low precision, every 3": Life(tb.LowPrecisionDecentralizedAlgorithm(communication_interval=3), 4),
    "low precision, nodes": Life(tb.LowPrecisionDecentralizedAlgorithm(), 4, NODES),
    "fragments": Life(tb.DiLoCoAlgorithm(3, fragments=2, delay=1)),
    "async": Life(tb.AsyncModelAverageAlgorithm(sync_interval_ms=14_000)),  # no round starts
    "bytegrad, error feedback": Life(tb.ByteGradAlgorithm(error_feedback=True)),
}
STOP, END = 4, 7


@pytest.mark.parametrize("name", LIVES)
def test_an_evaluated_saved_and_resumed_training_continues(name: str) -> None:
    """It is saved within `averaged_weights`, and resumed with other buckets, since states are keyed by weight name."""
    life = LIVES[name]
    algorithm = resumed = life.algorithm
    if algorithm.averages_weights and name != "low precision, nodes":  # replicas of nodes depend on the buckets
        resumed = dataclasses.replace(algorithm, bucket_cap_mb=0.01)

    def body(group: dist.ProcessGroup) -> tuple[list[Weights], list[Weights]]:
        plain = train(group, MODEL, algorithm, nodes=life.nodes, num_steps=END, lr=0.01)
        befores, means, file = [], [], io.BytesIO()

        def attach(trainer: Trainer, algorithm: tb.Algorithm) -> tb.Attachment:
            own = tb.BaguaProcessGroup(group, nodes=life.nodes)
            return tb.attach(trainer.ddp, trainer.optimizer, algorithm, process_group=own)

        def evaluate(trainer: Trainer, attachment: tb.Attachment, is_last: bool) -> None:
            befores.append(weights_of(trainer.module))
            with suppress(ZeroDivisionError), attachment.averaged_weights():
                means.append(weights_of(trainer.module))
                with attachment.averaged_weights():
                    if is_last:  # this rank's own weights nevertheless
                        torch.save([attachment.rank_state_dict(), trainer.data.get_state()], file)
                assert_same_weights([means[-1], weights_of(trainer.module)])
                raise ZeroDivisionError  # an error of the evaluation
            assert_same_weights([befores[-1], weights_of(trainer.module)])

        first = Trainer(group, MODEL, lr=0.01)
        with attach(first, algorithm) as attachment:
            for step in range(STOP):
                first.step()
                evaluate(first, attachment, step == STOP - 1)
            shared = copy.deepcopy((first.module.state_dict(), first.optimizer.state_dict()))
            first.step()
            assert_same_weights([plain.start[STOP + 1], weights_of(first.module)])
        file.seek(0)
        state, data = torch.load(file, weights_only=True)
        second = Trainer(group, MODEL, lr=0.01)
        with attach(second, resumed) as attachment:
            second.step()  # loading must undo it
            if not algorithm.averages_weights:
                second.module.load_state_dict(shared[0])
                second.optimizer.load_state_dict(shared[1])
            attachment.load_rank_state_dict(state)
            second.data.set_state(data)
            for step in range(STOP, END):
                assert_same_weights([plain.start[step], weights_of(second.module)])
                second.step()
        assert_same_weights([plain.final, weights_of(second.module)])
        return befores, means

    befores, means = zip(*run_ranks(life.num_ranks, body), strict=True)
    if not algorithm.averages_weights:
        assert_same_weights([befores[0][-1], means[0][-1]])
        return
    for own, of_ranks in zip(zip(*befores, strict=True), zip(*means, strict=True), strict=True):
        assert_same_weights(of_ranks)
        for key, mean in of_ranks[0].items():
            np.testing.assert_array_equal(flat(mean), oracle.gradient_allreduce(stacked(own, key)))
    assert not torch.equal(befores[0][-1]["last.weight"], means[0][-1]["last.weight"])


@pytest.mark.parametrize("algorithm", RARELY.values(), ids=RARELY)
@on_each_rank(1)
def test_a_single_rank_has_the_mean(group: dist.ProcessGroup, algorithm: tb.Algorithm) -> None:
    trainer = Trainer(group, MODEL)
    with tb.attach(trainer.ddp, trainer.optimizer, algorithm) as attachment:
        trainer.step()
        before = weights_of(trainer.module)
        with attachment.averaged_weights():
            assert_same_weights([before, weights_of(trainer.module)])


def test_asynchronous_averaging_pauses_for_the_mean_and_continues() -> None:
    def body(group: dist.ProcessGroup) -> list[Weights]:
        trainer, means = Trainer(group, MODEL, lr=0.001), []
        with tb.attach(
            trainer.ddp, trainer.optimizer, tb.AsyncModelAverageAlgorithm(sync_interval_ms=10)
        ) as attachment:
            for _ in range(2):
                for _ in range(4 + 3 * group.rank()):  # ranks take different numbers of steps
                    trainer.step()
                with attachment.averaged_weights():
                    means.append(weights_of(trainer.module))
                num_rounds = attachment.impl.num_rounds
                while attachment.impl.num_rounds == num_rounds:
                    trainer.step()
            attachment.impl.abort(trainer.ddp, final_average=False)
            before = weights_of(trainer.module)
            with attachment.averaged_weights():
                means.append(weights_of(trainer.module))
            assert_same_weights([before, weights_of(trainer.module)])
            assert attachment.impl.mode == "stopped"
        return means

    for means in zip(*run_ranks(2, body), strict=True):
        assert_same_weights(means)


def test_a_rank_that_raises_within_the_mean_does_not_wait_for_the_others() -> None:
    """The other rank is in an all-reduce that completes only after this rank leaves the block."""
    limit = timedelta(seconds=30)

    def body(group: dist.ProcessGroup) -> float:
        trainer = Trainer(group, MODEL, lr=0.001)
        start = 0.0
        algorithm = tb.AsyncModelAverageAlgorithm(sync_interval_ms=10)
        attaching = tb.attach(trainer.ddp, trainer.optimizer, algorithm, timeout=limit)
        with suppress(ZeroDivisionError), attaching as attachment:
            while not attachment.impl.num_rounds:
                trainer.step()
            with attachment.averaged_weights():
                start = time.perf_counter()
                if group.rank() == 0:
                    dist.all_reduce(torch.zeros(1), group=group)
                raise ZeroDivisionError
        elapsed_s = time.perf_counter() - start
        if group.rank() == 1:
            dist.all_reduce(torch.zeros(1), group=group)
        return elapsed_s

    with torchbagua_warnings():
        assert run_ranks(2, body)[1] < limit.total_seconds() / 2


def test_a_state_has_all_optimizers_and_the_scaler() -> None:
    """With the asynchronous algorithm ranks skip steps independently, so their scales differ."""
    algorithm = LIVES["async"].algorithm

    def start(group: dist.ProcessGroup) -> tuple[Trainer, Optimizers, torch.amp.GradScaler]:
        trainer = Trainer(group, MODEL)
        parts = (trainer.module.first, trainer.module.last)
        return trainer, [torch.optim.Adam(part.parameters()) for part in parts], torch.amp.GradScaler("cpu")

    def body(group: dist.ProcessGroup) -> None:
        trainer, optimizers, scaler = start(group)
        with tb.attach(trainer.ddp, optimizers, algorithm, grad_scaler=scaler) as attachment:
            for step in range(2):
                loss = trainer.ddp(torch.randn(6, 10, generator=trainer.data)).square().sum()
                scaler.scale(loss * (float("inf") if step == group.rank() == 1 else 1.0)).backward()
                for optimizer in optimizers:
                    scaler.step(optimizer)
                    optimizer.zero_grad()
                scaler.update()
            saved = copy.deepcopy(attachment.rank_state_dict())
            fresh, others, fresh_scaler = start(group)
            with tb.attach(fresh.ddp, others, algorithm, grad_scaler=fresh_scaler) as other:
                other.load_rank_state_dict(copy.deepcopy(saved))
                loaded = other.rank_state_dict()
                assert loaded["grad_scaler"] == saved["grad_scaler"]
                assert (fresh_scaler.get_scale() < 2.0**16) == (group.rank() == 1)
                for own, expected in zip(loaded["optimizers"], saved["optimizers"], strict=True):
                    for key, moments in expected["state"].items():
                        assert all(torch.equal(own["state"][key][name], value) for name, value in moments.items())
                assert_same_weights([weights_of(trainer.module), weights_of(fresh.module)])

    run_ranks(2, body)


@on_each_rank(2)
def test_refused_states_change_nothing(group: dist.ProcessGroup) -> None:
    trainer, rank = Trainer(group, MODEL), group.rank()
    with tb.attach(trainer.ddp, trainer.optimizer, "bytegrad") as attachment:
        of_bytegrad = attachment.state_dict()
    with tb.attach(trainer.ddp, trainer.optimizer, "decentralized") as attachment:
        trainer.step()
        state = copy.deepcopy(attachment.rank_state_dict())
        own = state["attachment"]
        other_weights = {key: tensor + 1 for key, tensor in state["module"].items()}

        def with_impl(**values: Any) -> dict[str, Any]:
            return {**own, "impl": {**own["impl"], **values}}

        foreign = f"state must be from rank {rank} of 2, got a state from "
        refused: list[tuple[Callable[[Any], None], Any, str]] = [
            (attachment.load_state_dict, {}, r"must be what Attachment.state_dict returned.*got \[\]"),
            (attachment.load_state_dict, of_bytegrad, "saved by ByteGradAlgorithm, but DecentralizedAlgorithm is"),
            (attachment.load_state_dict, with_impl(rank=1 - rank), f"{foreign}rank {1 - rank}; every rank saves"),
            (attachment.load_state_dict, {**own, "impl": {"step": 3}}, r"have the keys \[.*\], got \['step'\]"),
            (attachment.load_state_dict, with_impl(differences={"other": torch.zeros(3)}),
             r"must hold the weights of this module, 8 tensors, got 1; they differ"),
            (attachment.load_rank_state_dict, own, "must be what rank_state_dict .* keys .* got .'algorithm'"),
            (attachment.load_rank_state_dict, 7, "must be what rank_state_dict returned.* got 7"),
            (attachment.load_rank_state_dict, {"attachment": of_bytegrad}, "saved by ByteGradAlgorithm, but Dec"),
            (attachment.load_rank_state_dict, {**state, "module": other_weights, "optimizers": []},
             r"the state has 0 optimizers, but attach was given SGD \(first"),
            (attachment.load_rank_state_dict,
             {**state, "module": other_weights, "attachment": with_impl(rank=7)}, f"{foreign}rank 7"),
        ]  # fmt: skip
        before = weights_of(trainer.module)
        for load, wrong, message in refused:
            with pytest.raises(ValueError, match=message):
                load(wrong)
            assert_same_weights([before, weights_of(trainer.module)])
        with attachment.averaged_weights():
            mean = weights_of(trainer.module)
            for call in (
                attachment.detach,
                attachment.weights_changed,
                lambda: attachment.load_rank_state_dict(state),
                lambda: attachment.load_state_dict(own),
            ):
                with pytest.raises(RuntimeError, match="within averaged_weights, which restores the weights"):
                    call()
            assert_same_weights([mean, weights_of(trainer.module)])
        trainer.step()


# Leave by an exception.


APART = (
    "an exception has ended .*: ranks are left with different weights.*"
    "wrap the model in DistributedDataParallel again, or attach again to a"
)


def weights_after_an_error(algorithm: tb.Algorithm, way: str = "", *, is_ddp: bool = True, steps: int = 1) -> Any:
    """Leave the block by an exception after so many steps, then wrap or attach again, if `way` says so."""
    model = build(lambda: nn.Linear(3, 2))

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        module = copy.deepcopy(model)
        called = DistributedDataParallel(module, process_group=group) if is_ddp else module
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        own = tb.BaguaProcessGroup(group)
        with suppress(ArithmeticError), tb.attach(called, optimizer, algorithm, process_group=own):
            for _ in range(steps):
                called(torch.full((1, 3), 1.0 + group.rank())).square().sum().backward()
                optimizer.step()
            raise ArithmeticError
        if way == "wrap again":
            DistributedDataParallel(module, process_group=group)
        elif way == "attach again":
            leave_by_exception(tb.attach(called, optimizer, algorithm, process_group=own))  # without a mean
        return module.weight.detach().clone()

    return run_ranks(2, body)


@pytest.mark.parametrize(
    ("algorithm", "is_ddp", "way"),
    [
        *((algorithm, True, "") for algorithm in RARELY.values()),
        (RARELY["decentralized"], False, ""),
        # The advice of the warning.
        (RARELY["decentralized"], False, "wrap again"),
        (RARELY["decentralized"], True, "wrap again"),
        (RARELY["decentralized"], False, "attach again"),
    ],
    ids=str,
)
def test_an_exception_leaves_ranks_apart(algorithm: tb.Algorithm, is_ddp: bool, way: str) -> None:
    with pytest.warns(RuntimeWarning, match=APART) as warned:
        weights = weights_after_an_error(algorithm, way, is_ddp=is_ddp)
    assert len(warned) == 2  # one per rank; another attachment warns no more
    assert torch.equal(*weights) == bool(way)


def test_detach_in_a_finally_does_not_wait_for_ranks_that_train() -> None:
    """The user's exception stays, and the others notice that this rank has left."""
    has_left = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(nn.Linear(2, 1), process_group=group)
        attachment = tb.attach(ddp, torch.optim.SGD(ddp.parameters()), "bytegrad")

        def raise_and_detach() -> None:
            try:
                raise ArithmeticError
            finally:
                attachment.detach()

        if group.rank() == 1:
            with pytest.raises(ArithmeticError):
                raise_and_detach()
            has_left.set()
            return
        assert has_left.wait(20)
        with pytest.raises(tb.CommunicationError):
            ddp(torch.ones(1, 2)).sum().backward()
        leave_by_exception(attachment)

    run_ranks(2, body)


def test_the_exception_is_raised_if_warnings_are_errors(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        weights_after_an_error(RARELY["decentralized"])
    assert capfd.readouterr().err.count("ranks are left with different weights") == 2


@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [
        (tb.ByteGradAlgorithm(), 1),
        (tb.DecentralizedAlgorithm(final_average=False), 1),
        (tb.DecentralizedAlgorithm(), 0),  # as if the first forward failed
    ],
    ids=["gradients", "no_final_average", "no_step"],
)
def test_an_exception_without_a_warning(algorithm: tb.Algorithm, steps: int) -> None:
    with torchbagua_warnings() as messages:
        weights_after_an_error(algorithm, steps=steps)
    assert not messages


# Drop the last reference.


def num_lanes() -> int:
    return sum(thread.name.startswith("torchbagua lane") for thread in threading.enumerate())


def wait_for_lanes(most: int) -> None:
    """Collect garbage until there are at most so many."""
    deadline_s = time.monotonic() + 10
    while num_lanes() > most:
        assert time.monotonic() < deadline_s
        gc.collect()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        ("with_bagua", tb.TopKAlgorithm()),
        ("ddp", tb.AsyncModelAverageAlgorithm(sync_interval_ms=1)),
        ("module", tb.DecentralizedAlgorithm()),
        ("standalone hook", tb.ByteGradAlgorithm()),
    ],
)
@pytest.mark.filterwarnings("ignore:torchbagua")
def test_an_unreferenced_attachment_works_and_is_freed(kind: str, algorithm: tb.Algorithm) -> None:
    """With its lane and its groups, as soon as the module is."""
    model = build(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    barrier = threading.Barrier(2, timeout=60)
    wait_for_lanes(0)  # of earlier tests

    def train(group: dist.ProcessGroup) -> None:
        called = copy.deepcopy(model)
        optimizer = torch.optim.SGD(called.parameters(), lr=0.01)
        if kind == "with_bagua":
            called.with_bagua(optimizer, algorithm, group)
        else:
            if kind != "module":
                called = DistributedDataParallel(called, process_group=group)
            if kind == "standalone hook":
                called.register_comm_hook(algorithm.reify(group), tb.comm_hook)
            else:
                tb.attach(called, optimizer, algorithm, process_group=tb.BaguaProcessGroup(group))
        gc.collect()
        for _ in range(3):
            optimizer.zero_grad()
            called(torch.ones(4, 4)).square().sum().backward()
            optimizer.step()
        assert num_lanes() > 0
        barrier.wait()

    def body(group: dist.ProcessGroup) -> int:
        for is_last in (False, True):
            train(group)
            barrier.wait()
            forget_active_ddp()  # shared by all ranks, which are threads here
            wait_for_lanes(0)
            barrier.wait()
            time.sleep(0.1)  # gloo closes connections a little later
            num_open = len(os.listdir("/proc/self/fd"))
            if not is_last:
                num_before = num_open
            barrier.wait()
        deadline_s = time.monotonic() + 10
        while num_open - num_before >= 5 and time.monotonic() < deadline_s:
            time.sleep(0.02)
            gc.collect()
            num_open = len(os.listdir("/proc/self/fd"))
        return num_open - num_before

    assert min(run_ranks(2, body)) < 5  # a leaked group would leave five on each rank


@pytest.mark.parametrize("num_steps", [0, 1])
def test_only_a_dropped_attachment_that_has_trained_warns_of_different_weights(num_steps: int) -> None:
    """A program that fails before its first step leaves equal weights."""

    def body(group: dist.ProcessGroup) -> None:
        module = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        attachment = tb.attach(module, optimizer, tb.DiLoCoAlgorithm(9), process_group=tb.BaguaProcessGroup(group))
        for _ in range(num_steps):
            module(torch.rand(2, 4)).sum().backward()
            optimizer.step()
        del attachment  # the module's hooks keep the runner
        gc.collect()

    with torchbagua_warnings() as messages:
        run_ranks(2, body)
    assert any("was not detached" in message for message in messages) == (num_steps > 0)


SCRIPT = """
import sys, torch, torch.distributed as dist
import torchbagua as tb

dist.init_process_group("gloo")
model = torch.nn.Linear(10, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
attachment = tb.attach(model, optimizer, {algorithm})
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        "tb.DecentralizedAlgorithm()",
        "tb.AsyncModelAverageAlgorithm(sync_interval_ms=5)",  # its lane is always active
    ],
)
def test_exit_without_detach(algorithm: str, tmp_path: Path) -> None:
    """The interpreter first ends the lanes, and the process exits normally."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(algorithm=algorithm))
    done = programs.run(programs.torchrun(script))
    num_warned = done.stderr.count("was not detached, and can no longer be: ranks are left with")
    # A rank that still trains when the other ends is notified of that, and does not warn at its own exit.
    assert num_warned >= 1
    assert num_warned + done.stderr.count("has left the training") == 2
