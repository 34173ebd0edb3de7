"""Asynchronous averaging in real time: no rank waits for another, and all lanes end in order."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import oracle
import torchbagua as tb
from averaging import Normed, Trainer, Weights, assert_same_weights, stacked, weights_of
from ranks import leave_by_exception, run_ranks
from torchbagua.algorithms.weights import asynchronous
from torchbagua.algorithms.weights.asynchronous import AsyncModelAverageAlgorithmImpl, CompressedMean
from torchbagua.collectives.process_group import PrivateGroups
from torchbagua.runtime.weight_buckets import WeightBucket
from torchbagua.transport import TransportMaker
from training import build
from transports import MessagesAlone


def run_async(
    size: int,
    body: Callable[[int, Trainer, tb.Attachment], Any],
    algorithm: tb.Algorithm,
    timeout: timedelta = timedelta(seconds=30),
    transport: TransportMaker | None = None,
) -> list[Any]:
    """Run `body(rank, trainer, attachment)` on every rank; no lane may remain."""
    model = build(Normed)

    def run(group: dist.ProcessGroup) -> Any:
        trainer = Trainer(group, model, lr=0.001)
        own = tb.BaguaProcessGroup(group, timeout=timeout, transport=transport)
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


def test_a_snapshot_that_is_sent_again_includes_the_rounds_since() -> None:
    """Without updates, equal weights stay equal, however many rounds a rank does not answer."""
    is_away, is_back = threading.Event(), threading.Event()

    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 0.0
        weight = trainer.module.first.weight
        before = weight.detach().clone()
        if rank == 1:
            trainer.step()
            is_away.set()
            wait_for_rounds(attachment.impl, attachment.impl.num_rounds + 6)
            is_back.set()
            trainer.step()
            assert torch.allclose(weight, before + 4.0, atol=1e-4)
        else:
            assert is_away.wait(20)
            with torch.no_grad():
                weight.add_(8.0)
            while not is_back.is_set():
                trainer.step()
            assert torch.allclose(weight, before + 4.0, atol=1e-4)

    run_async(2, body, tb.AsyncModelAverageAlgorithm(sync_interval_ms=1))


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


def test_ranks_of_different_speed_and_length_end_with_equal_weights() -> None:
    """A rank that has run out of data contributes its weights in detach, until all ranks are done."""

    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> int:
        for _ in range((2, 12)[rank]):
            trainer.step()
            time.sleep(0.005)
        return attachment.impl.num_rounds

    rounds = run_async(2, body, tb.AsyncModelAverageAlgorithm(sync_interval_ms=5))
    assert rounds[1] > rounds[0]


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


@pytest.mark.parametrize("compression", [None, "minmax_uint8"])
def test_abort_and_resume(compression: str | None) -> None:
    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> list[Weights]:
        impl = attachment.impl
        seen = []
        for _ in range(2):
            for _ in range(1 + rank):
                trainer.step()
            wait_for_rounds(impl, impl.num_rounds + 1)
            before = impl.num_rounds
            impl.abort(trainer.ddp)
            assert impl.mode == "stopped"
            assert impl.num_rounds >= before
            impl.abort(trainer.module)
            seen.append(weights_of(trainer.module))
            num_rounds = impl.num_rounds
            trainer.step()
            time.sleep(0.03)
            assert impl.num_rounds == num_rounds  # each rank trains alone
            seen.append({})
            impl.resume(trainer.ddp)
            impl.resume(trainer.ddp)
            assert impl.mode == "running"
            attachment.load_state_dict(attachment.state_dict())
        return seen

    seen = run_async(2, body, tb.AsyncModelAverageAlgorithm(sync_interval_ms=1, compression=compression))
    for weights in zip(*seen, strict=True):
        assert_same_weights(weights)


def test_a_loaded_state_resets_residuals_and_rebuilt_buckets_free_the_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = weakref.WeakKeyDictionary[WeightBucket, set[str]]()

    class Recorded(CompressedMean):
        def __init__(self, bucket: WeightBucket, codec: tb.codecs.Compressor) -> None:
            super().__init__(bucket, codec)
            self.forgotten = forgotten[bucket] = set()

        def forget(self, names: Collection[str]) -> None:  # type: ignore[override]
            super().forget(names)
            self.forgotten.update(names)

    monkeypatch.setattr(asynchronous, "CompressedMean", Recorded)

    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> None:
        impl, runner = attachment.impl, attachment.runner
        while impl.num_rounds < 3:
            trainer.step()
        impl.abort(trainer.ddp, final_average=False)
        names = {bucket: {tensor.name for tensor in bucket.tensors} for bucket in runner.buckets if bucket in forgotten}
        assert names
        assert not any(forgotten[bucket] for bucket in names)
        attachment.load_state_dict(attachment.state_dict())
        assert all(forgotten[bucket] >= names[bucket] for bucket in names)
        names.clear()
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


def test_warm_up_averages_gradients_in_full_precision() -> None:
    """Ranks stay equal and step with the oracle's mean gradient; rounds begin in the first step after the warm-up."""

    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> list[tuple[Weights, Weights]]:
        seen = []
        local: Weights = {}
        for name, parameter in trainer.module.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter, name=name: local.update({name: parameter.grad.clone()})
                )
        for _ in range(2):
            assert attachment.impl.mode == "warm-up"
            assert attachment.impl.num_rounds == 0
            trainer.step()
            averaged = {name: p.grad.clone() for name, p in trainer.module.named_parameters() if p.requires_grad}
            seen.append((dict(local), averaged))
        assert attachment.impl.mode == "running"
        trainer.step()
        wait_for_rounds(attachment.impl, 1)
        return seen

    seen = run_async(
        3, body, tb.AsyncModelAverageAlgorithm(sync_interval_ms=0, warmup_steps=2), transport=MessagesAlone
    )
    for by_rank in zip(*seen, strict=True):
        for name in by_rank[0][0]:
            expected = oracle.gradient_allreduce(stacked([local for local, _ in by_rank], name))
            for _, averaged in by_rank:
                np.testing.assert_array_equal(averaged[name].numpy().ravel(), expected)


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


@pytest.mark.parametrize("num_steps", [0, 1])
def test_an_interval_of_zero(num_steps: int) -> None:
    """Averaging ends, however early it is stopped."""

    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> None:
        for _ in range(num_steps):
            trainer.step()
        attachment.impl.abort(trainer.ddp)
        attachment.impl.resume(trainer.ddp)

    run_async(2, body, tb.AsyncModelAverageAlgorithm(sync_interval_ms=0))


def test_ranks_that_stop_for_different_reasons() -> None:
    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> None:
        trainer.step()
        message = "for different reasons: ranks 0 and 2 for abort, rank 1 for detach"
        with pytest.raises(tb.CommunicationError, match=message):
            attachment.detach() if rank == 1 else attachment.impl.abort(trainer.ddp)
        with pytest.raises(RuntimeError):
            attachment.runner.lane.submit(lambda: None) if rank == 1 else trainer.step()

    model = build(Normed)

    def run(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model)
        attachment = tb.attach(trainer.ddp, trainer.optimizer, tb.AsyncModelAverageAlgorithm(sync_interval_ms=1))
        body(group.rank(), trainer, attachment)
        leave_by_exception(attachment)

    run_ranks(3, run)


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
            time.sleep(2)
            attachment.impl.abort(trainer.ddp)
        else:
            with pytest.warns(RuntimeWarning, match="abort has waited longer than the timeout of 1 s for rank 1"):
                attachment.impl.abort(trainer.ddp)

    run_async(2, body, tb.AsyncModelAverageAlgorithm(sync_interval_ms=1), timeout=timedelta(seconds=1))


def test_averaged_weights_on_one_rank_alone_raises_after_the_timeout() -> None:
    def body(rank: int, trainer: Trainer, attachment: tb.Attachment) -> None:
        trainer.step()
        if rank == 0:
            late = "averaged_weights has waited longer than the timeout of 1 s for rank 1; all ranks must enter it"
            with pytest.raises(tb.CommunicationError, match=late), attachment.averaged_weights():
                pass
            trainer.step()  # averaging continues
        else:
            time.sleep(2)

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
