"""Asynchronous averaging in real time: no rank waits for another, and all lanes end in order; votes and states."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchbagua as tb
from averaging import Normed, Trainer, Weights, assert_same_weights, weights_of
from ranks import leave_by_exception, run_ranks
from torchbagua.algorithms.weights.asynchronous import AsyncModelAverageAlgorithmImpl, CompressedMean, Vote, count_votes
from torchbagua.collectives.process_group import PrivateGroups
from torchbagua.runtime.parameters import LayoutWatch
from training import build


def run_async(
    size: int,
    body: Callable[[int, Trainer, tb.Attachment], Any],
    algorithm: tb.Algorithm,
    timeout: timedelta = timedelta(seconds=30),
) -> list[Any]:
    """Run `body(rank, trainer, attachment)` on every rank; no lane may remain."""
    model = build(Normed)

    def run(group: dist.ProcessGroup) -> Any:
        trainer = Trainer(group, model, lr=0.001)
        own = tb.BaguaProcessGroup(group, timeout=timeout)
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm, process_group=own) as attachment:
            result = body(group.rank(), trainer, attachment)
        trainer.trace.final = weights_of(trainer.module)
        return result, trainer.trace.final

    results = run_ranks(size, run)
    assert not [thread.name for thread in threading.enumerate() if "lane of Async" in thread.name]
    assert_same_weights([final for _, final in results])
    return [result for result, _ in results]


def wait_for_rounds(impl: AsyncModelAverageAlgorithmImpl, num_rounds: int) -> None:
    deadline_s = time.monotonic() + 20
    while impl.num_rounds < num_rounds:
        assert time.monotonic() < deadline_s, f"{impl.num_rounds} rounds, not {num_rounds}"
        time.sleep(0.005)


def test_a_rank_that_evaluates_does_not_block_the_others() -> None:
    """While one rank takes no step, the other ranks continue to step, and rounds continue."""
    others_done = threading.Barrier(3)

    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> None:
        if rank == 0:
            others_done.wait(20)  # "evaluates" until the others have had their steps and rounds
        else:
            trainer.step()
            wait_for_rounds(attachment.impl, 3)
            trainer.step()
            others_done.wait(20)

    run_async(3, body, tb.AsyncModelAverageAlgorithm(sync_interval_ms=10))


def test_weights_are_averaged_again_after_a_load() -> None:
    """Differences of rounds from before the load are dropped, and later ones are not."""

    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> None:
        impl = attachment.impl

        def step_for_rounds(num_rounds: int) -> None:
            target = impl.num_rounds + num_rounds
            while impl.num_rounds < target:
                trainer.step()

        trainer.optimizers[0].param_groups[0]["lr"] = 0.0
        weight = trainer.module.first.weight
        trainer.module.load_state_dict(trainer.module.state_dict())
        before = weight.detach().clone()
        step_for_rounds(3)
        with torch.no_grad():
            weight.add_(8.0 * rank)
        step_for_rounds(4)
        impl.abort(trainer.ddp, final_average=False)
        assert torch.allclose(weight, before + 4.0, atol=1e-4)

    run_async(2, body, tb.AsyncModelAverageAlgorithm(sync_interval_ms=1))


def test_a_rank_that_aborts_alone_in_the_warm_up() -> None:
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model)
        algorithm = tb.AsyncModelAverageAlgorithm(warmup_steps=9)
        message = "calls of abort and resume: rank 0 has 0, rank 1 has 1"
        with (
            pytest.raises(tb.CommunicationError, match=message),
            tb.attach(trainer.ddp, trainer.optimizer, algorithm) as attachment,
        ):
            attachment.impl.abort(trainer.ddp) if group.rank() else trainer.step()

    run_ranks(2, body)


def test_a_loaded_state_resets_residuals_and_rebuilt_buckets_free_the_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: dict[str, set[str]] = {}  # by thread
    forget = CompressedMean.forget

    def record(mean: CompressedMean, names: Collection[str]) -> None:
        forgotten.setdefault(threading.current_thread().name, set()).update(names)
        forget(mean, names)

    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> None:
        impl, runner = attachment.impl, attachment.runner
        while impl.num_rounds < 3:
            trainer.step()
        impl.abort(trainer.ddp, final_average=False)
        monkeypatch.setattr(CompressedMean, "forget", record)
        attachment.load_state_dict(attachment.state_dict())
        assert forgotten[f"rank {rank}"] >= {n for n, p in trainer.module.named_parameters() if p.requires_grad}
        replaced = [weakref.ref(bucket) for bucket in runner.buckets]
        trainer.module.frozen.requires_grad_(True)
        trainer.step()
        gc.collect()
        assert not any(bucket() for bucket in replaced)
        impl.resume(trainer.ddp)
        wait_for_rounds(impl, impl.num_rounds + 2)

    run_async(2, body, tb.AsyncModelAverageAlgorithm(sync_interval_ms=1, compression="minmax_uint8"))


def test_an_exception_in_averaged_weights_pauses_averaging_until_the_next_step() -> None:
    """Other ranks may still be in their contexts, so a round would wait for them."""
    all_have_left = threading.Barrier(2)

    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> None:
        impl = attachment.impl
        wait_for_rounds(impl, 1)
        with pytest.raises(ZeroDivisionError), attachment.averaged_weights():
            raise ZeroDivisionError
        num_rounds = impl.num_rounds
        all_have_left.wait(20)
        time.sleep(0.3)  # longer than a round waits for a step
        assert impl.num_rounds == num_rounds
        all_have_left.wait(20)
        trainer.step()
        wait_for_rounds(impl, num_rounds + 1)

    run_async(2, body, tb.AsyncModelAverageAlgorithm(sync_interval_ms=1))


@pytest.mark.parametrize("wanting_ranks", [set(), {1}], ids=["none", "one"])
def test_all_ranks_get_a_last_mean_if_any_requests_it(wanting_ranks: set[int]) -> None:
    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> Weights:
        for _ in range(3):
            trainer.step()
        attachment.impl.abort(trainer.ddp, final_average=rank in wanting_ranks)
        return weights_of(trainer.module)

    first, second = run_async(2, body, tb.AsyncModelAverageAlgorithm(sync_interval_ms=10_000))
    assert torch.equal(first["last.weight"], second["last.weight"]) == bool(wanting_ranks)


def test_warm_up_step_without_backward_through_the_module_raises() -> None:
    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> None:
        for parameter in trainer.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        trainer.optimizer.step()

    with pytest.raises(RuntimeError, match=r"without averaged gradients: .*; set warmup_steps=0 if"):
        run_async(2, body, tb.AsyncModelAverageAlgorithm(warmup_steps=3))


def test_a_rank_that_leaves_by_an_exception_ends_averaging_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not close their groups together, since they would wait for that rank."""
    ended: list[int] = []
    monkeypatch.setattr(PrivateGroups, "end_in_order", lambda groups: ended.append(groups.communicators[0].rank))
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model, lr=0.001)
        attachment = tb.attach(trainer.ddp, trainer.optimizer, tb.AsyncModelAverageAlgorithm(sync_interval_ms=5))
        if group.rank() == 1:
            with pytest.raises(ZeroDivisionError), attachment:
                trainer.step() or 1 / 0
            return

        with attachment:
            while attachment.impl.mode == "running":
                trainer.step()
            assert attachment.impl.mode == "ended"
            trainer.step()
            attachment.impl.abort(trainer.ddp)
            with pytest.raises(RuntimeError, match="cannot be resumed: rank 1 has left"):
                attachment.impl.resume(trainer.ddp)

    with pytest.warns(RuntimeWarning) as warned:  # around all threads, which share the filters
        run_ranks(3, body)
    messages = sorted(str(warning.message) for warning in warned)
    assert len(messages) == 3
    assert "an exception has ended AsyncModelAverageAlgorithm" in messages[0]  # on rank 1
    assert all("rank 1 has left the training" in message for message in messages[1:])
    assert ended == []


def test_ranks_that_stop_for_different_reasons() -> None:
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model)
        attachment = tb.attach(trainer.ddp, trainer.optimizer, tb.AsyncModelAverageAlgorithm(sync_interval_ms=1))
        trainer.step()
        message = "for different reasons: ranks 0 and 2 for abort, rank 1 for detach"
        with pytest.raises(tb.CommunicationError, match=message):
            attachment.detach() if group.rank() == 1 else attachment.impl.abort(trainer.ddp)
        with pytest.raises(RuntimeError):
            attachment.runner.lane.submit(lambda: None) if group.rank() == 1 else trainer.step()
        leave_by_exception(attachment)

    run_ranks(3, body)


def test_a_rank_that_leaves_ends_averaging_for_ranks_that_have_stopped_for_different_reasons() -> None:
    model = build(Normed)
    others_stop = threading.Barrier(3)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model, lr=0.001)
        attachment = tb.attach(trainer.ddp, trainer.optimizer, tb.AsyncModelAverageAlgorithm(sync_interval_ms=1))
        if group.rank() == 2:
            others_stop.wait(20)
            with pytest.raises(ZeroDivisionError), attachment:
                time.sleep(0.2) or 1 / 0
            return
        with attachment:
            others_stop.wait(20)
            if group.rank() == 0:
                attachment.impl.abort(trainer.ddp)
            else:
                left = "weights cannot be averaged: rank 2 has left"
                with pytest.raises(RuntimeError, match=left), attachment.averaged_weights():
                    pass
            assert attachment.impl.mode == "ended"

    with pytest.warns(RuntimeWarning, match="rank 2 has left the training"):
        run_ranks(3, body)


def test_a_layer_that_is_frozen_in_warm_up() -> None:
    """The gradients of the other layers are still averaged: ranks stay equal."""

    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> Weights:
        trainer.step()
        trainer.module.first.requires_grad_(False)
        trainer.module.frozen.requires_grad_(True)
        trainer.step()
        assert all(parameter.grad is not None for parameter in trainer.module.frozen.parameters())
        return {name: p.grad.clone() for name, p in trainer.module.named_parameters() if p.requires_grad}

    assert_same_weights(run_async(2, body, tb.AsyncModelAverageAlgorithm(warmup_steps=9)))


def test_abort_of_a_module_that_was_never_attached() -> None:
    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> None:
        for method in (attachment.impl.abort, attachment.impl.resume):
            with pytest.raises(ValueError, match=r"module must be the module that .*, got another module, Linear"):
                method(nn.Linear(1, 1))

    run_async(2, body, tb.AsyncModelAverageAlgorithm())

    def unattached(group: dist.ProcessGroup) -> None:
        runner = tb.AsyncModelAverageAlgorithm().reify(group)
        with pytest.raises(ValueError, match="abort: module must be the module that the algorithm is attached to"):
            runner.impl.abort(nn.Linear(1, 1))
        runner.close()

    run_ranks(1, unattached)


def test_a_rank_that_is_waited_for_long_is_named() -> None:
    """Its lane takes part in rounds, so their timeouts do not detect that its training is blocked."""

    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> None:
        trainer.step()
        if rank == 1:
            time.sleep(4)
            attachment.impl.abort(trainer.ddp)
            return
        late = "averaged_weights has waited longer than the timeout of 1 s for rank 1; all ranks must enter it"
        with pytest.raises(tb.CommunicationError, match=late), attachment.averaged_weights():
            pass
        trainer.step()  # averaging continues
        with pytest.warns(RuntimeWarning, match="abort has waited longer than the timeout of 1 s for rank 1"):
            attachment.impl.abort(trainer.ddp)

    run_async(2, body, tb.AsyncModelAverageAlgorithm(sync_interval_ms=1), timeout=timedelta(seconds=1))


def test_an_extra_backward_pass_in_the_last_step_of_the_warm_up() -> None:
    """One rank averages gradients once more while the others have begun the rounds; nothing may hang or crash."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model)
        algorithm = tb.AsyncModelAverageAlgorithm(sync_interval_ms=1, warmup_steps=2)
        attachment = tb.attach(trainer.ddp, trainer.optimizer, algorithm)

        def train() -> None:
            with attachment:
                trainer.step()
                if group.rank() == 1:
                    trainer.ddp(torch.randn(6, 10)).sum().backward()
                for _ in range(3):
                    trainer.step()

        with pytest.raises(tb.CommunicationError, match=r"out of step .* has \d"):
            train()

    run_ranks(2, body)


# The votes by which ranks agree on when to stop.

STOPS = Vote(reason="detach")


@pytest.mark.parametrize(
    ("votes", "outcome"),
    [
        ([Vote(), STOPS, Vote()], (None, 2, False)),
        ([STOPS, Vote(reason="detach", wants_mean=True), Vote(wants_mean=True)], (None, 2, False)),
        ([STOPS, STOPS, STOPS], (None, None, False)),
        ([STOPS, Vote(reason="detach", wants_mean=True), STOPS], (None, None, True)),
        ([Vote(), Vote(leaves=True), STOPS], (1, 1, False)),
        # A rank that leaves ends the rounds for all ranks, whatever the other ranks stop for.
        ([Vote(reason="abort", leaves=True), STOPS, STOPS], (0, None, False)),
        ([STOPS, Vote(reason="abort"), Vote()], (None, 2, False)),
        ([STOPS, Vote(num_loads=1), Vote()], (None, 2, False)),
        ([STOPS, Vote(leaves=True, num_loads=1), Vote(gives_up=True)], (1, 2, False)),
    ],
)
def test_all_ranks_come_to_the_same_outcome(votes: list[Vote], outcome: tuple[int | None, int | None, bool]) -> None:
    def body(group: dist.ProcessGroup) -> tuple[int | None, int | None, bool]:
        world = tb.BaguaProcessGroup(group).world
        *found, of_ranks = count_votes(world, votes[group.rank()], LayoutWatch(""), "a round")
        assert of_ranks == votes
        return found[0], found[1], found[2]

    assert run_ranks(3, body) == [outcome] * 3


@pytest.mark.parametrize("other", [Vote(gives_up=True), STOPS], ids=["gives up", "all stop"])
def test_ranks_with_different_numbers_of_loads_all_raise(other: Vote) -> None:
    def body(group: dist.ProcessGroup) -> None:
        vote = (STOPS, Vote(reason="detach", num_loads=1), other)[group.rank()]
        with pytest.raises(tb.CommunicationError, match="number of loads: ranks 0 and 2 have 0, rank 1 has 1"):
            count_votes(tb.BaguaProcessGroup(group).world, vote, LayoutWatch(""), "a round")

    run_ranks(3, body)


# The state: differences that are not yet applied, which only the same rank loads.

Body = Callable[[int, nn.Module, AsyncModelAverageAlgorithmImpl], Any]


def on_ranks(size: int, body: Body, num_features: int = 3) -> list[Any]:
    """Run `body` on ranks that have stopped averaging."""

    def run(group: dist.ProcessGroup) -> Any:
        module = nn.BatchNorm1d(num_features)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        own = tb.BaguaProcessGroup(group)
        with tb.attach(module, optimizer, tb.AsyncModelAverageAlgorithm(), process_group=own) as attachment:
            attachment.impl.abort(module, final_average=False)
            return body(group.rank(), module, attachment.impl)

    return run_ranks(size, run)


def save(rank: int, module: nn.Module, impl: AsyncModelAverageAlgorithmImpl) -> dict[str, Any]:
    """Return a state with pending differences of 10 for rank 0, 11 for rank 1, and so on."""
    state = impl.state_dict()
    assert state["has_differences"] is False
    differences = {name: torch.full_like(part, 10.0 + rank) for name, part in state["differences"].items()}
    snapshots = {name: module.get_buffer(name).clone() for name in state["buffer_snapshots"]}
    return {**state, "step": 7, "has_differences": True, "differences": differences, "buffer_snapshots": snapshots}


def test_pending_differences_of_a_loaded_state_are_applied() -> None:
    states = on_ranks(2, save)
    for rank, state in enumerate(states):
        owner = {key: state[key] for key in ("rank", "num_ranks", "is_enabled")}
        assert owner == {"rank": rank, "num_ranks": 2, "is_enabled": False}
        assert state["differences"].keys() == {"weight", "bias", "running_mean", "running_var"}
        assert state["buffer_snapshots"].keys() == {"running_mean", "running_var"}

    def load(rank: int, module: nn.Module, impl: AsyncModelAverageAlgorithmImpl) -> None:
        for has_differences, difference in ((False, 0.0), (True, 10.0 + rank)):
            before = {name: module.state_dict()[name].clone() for name in states[rank]["differences"]}
            impl.load_state_dict({**states[rank], "has_differences": has_differences})
            for name, value in before.items():
                assert torch.equal(module.state_dict()[name], value + difference)
        assert (impl.step, impl.mode) == (7, "stopped")

    on_ranks(2, load)


def test_a_state_of_another_rank_or_of_other_weights_is_refused() -> None:
    states = on_ranks(2, save)

    def load(rank: int, module: nn.Module, impl: AsyncModelAverageAlgorithmImpl) -> None:
        own = states[rank]
        without = {key: value for key, value in own.items() if key != "buffer_snapshots"}
        fewer = {**own, "differences": {"weight": own["differences"]["weight"]}}
        for state, message in (
            (states[1 - rank], rf"be from rank {rank} of 2, got a state from rank {1 - rank}"),
            (without, r"must have the keys \[.*'buffer_snapshots'.*\], got \['differences'"),
            (fewer, r"weights of this module, 4 tensors, got 1; they differ in \['bias'"),
        ):
            with pytest.raises(ValueError, match=rf"^AsyncModelAverageAlgorithm\.load_state_dict: .*{message}"):
                impl.load_state_dict(state)

    on_ranks(2, load)

    def load_other_shapes(rank: int, module: nn.Module, impl: AsyncModelAverageAlgorithmImpl) -> None:
        with pytest.raises(ValueError, match="weights of this module, 4 tensors, got 4; they differ in shapes"):
            impl.load_state_dict(states[rank])

    on_ranks(2, load_other_shapes, num_features=4)
