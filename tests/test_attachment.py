"""Methods of an attachment: the temporary mean of the weights, and a state for each rank."""

import io
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import oracle
import torchbagua as tb
from averaging import Normed, Trainer, Weights, assert_same_weights, stacked, train, weights_of
from ranks import leave_by_exception, run_ranks
from training import build, flat

SYNCHRONOUS_ALGORITHMS = [
    tb.DecentralizedAlgorithm(),
    tb.DecentralizedAlgorithm(peer_selection_mode="shift_one", communication_interval=2, bucket_cap_mb=0.001),
    tb.LowPrecisionDecentralizedAlgorithm(),
    tb.DiLoCoAlgorithm(3, fragments=2, delay=1),
]
ASYNCHRONOUS_ALGORITHM = tb.AsyncModelAverageAlgorithm(sync_interval_ms=10)


@pytest.mark.parametrize("algorithm", SYNCHRONOUS_ALGORITHMS, ids=str)
def test_averaged_weights_restores_the_weights(algorithm: tb.Algorithm) -> None:
    model = build(Normed)
    seen: dict[int, list[tuple[Weights, Weights, Weights]]] = {rank: [] for rank in range(4)}

    def body(group: dist.ProcessGroup) -> Any:
        def evaluate(trainer: Trainer, attachment: tb.Attachment) -> None:
            before = weights_of(trainer.module)
            with suppress(ZeroDivisionError), attachment.averaged_weights():
                within = weights_of(trainer.module)
                raise ZeroDivisionError  # an error of the evaluation
            seen[group.rank()].append((before, within, weights_of(trainer.module)))

        return train(group, model, algorithm, after_step=evaluate)

    evaluated = run_ranks(4, body)
    plain = run_ranks(4, lambda group: train(group, model, algorithm))
    for evaluated_trace, plain_trace in zip(evaluated, plain, strict=True):
        for step in range(len(evaluated_trace.start)):
            assert_same_weights([evaluated_trace.start[step], plain_trace.start[step]])
        assert_same_weights([evaluated_trace.final, plain_trace.final])
    for times in zip(*seen.values(), strict=True):
        befores, withins, afters = zip(*times, strict=True)
        assert_same_weights(withins)
        for before, after in zip(befores, afters, strict=True):
            assert_same_weights([before, after])
        for name, mean in withins[0].items():
            np.testing.assert_array_equal(flat(mean), oracle.gradient_allreduce(stacked(befores, name)))
    assert any(not torch.equal(seen[0][-1][0][name], mean) for name, mean in seen[0][-1][1].items())


def test_asynchronous_averaging_pauses_for_the_mean_and_continues() -> None:
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> tuple[list[Weights], Weights, int]:
        trainer = Trainer(group, model, lr=0.001)
        means = []
        with tb.attach(trainer.ddp, trainer.optimizer, ASYNCHRONOUS_ALGORITHM) as attachment:
            for evaluation in range(3):
                for _ in range(4 + 3 * group.rank()):  # ranks take different numbers of steps
                    trainer.step()
                with attachment.averaged_weights():
                    means.append(weights_of(trainer.module))
                if evaluation < 2:
                    num_rounds = attachment.impl.num_rounds
                    while attachment.impl.num_rounds == num_rounds:
                        trainer.step()
            attachment.impl.abort(trainer.ddp, final_average=False)
            before = weights_of(trainer.module)
            with attachment.averaged_weights():
                means.append(weights_of(trainer.module))
            assert_same_weights([before, weights_of(trainer.module)])
            assert attachment.impl.mode == "stopped"
        return means, before, attachment.impl.num_rounds

    all_means, befores, all_num_rounds = zip(*run_ranks(2, body), strict=True)
    for means in zip(*all_means, strict=True):
        assert_same_weights(means)
    for name, mean in all_means[0][-1].items():
        np.testing.assert_array_equal(flat(mean), oracle.gradient_allreduce(stacked(befores, name)))
    assert min(all_num_rounds) >= 2


def test_a_rank_that_raises_within_the_block_does_not_wait_for_the_others() -> None:
    """The other rank is in an all-reduce that completes only after this rank leaves the block."""
    limit = timedelta(seconds=30)

    def body(group: dist.ProcessGroup) -> float:
        trainer = Trainer(group, build(Normed), lr=0.001)
        start = 0.0
        attaching = tb.attach(trainer.ddp, trainer.optimizer, ASYNCHRONOUS_ALGORITHM, timeout=limit)
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

    assert run_ranks(2, body)[1] < limit.total_seconds() / 2


@pytest.mark.parametrize(
    "algorithm", [*SYNCHRONOUS_ALGORITHMS, tb.AsyncModelAverageAlgorithm(sync_interval_ms=14_000)], ids=str
)
def test_averaged_weights_averages_replaced_parameters(algorithm: tb.Algorithm) -> None:
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> tuple[Weights, Weights]:
        trainer = Trainer(group, model)
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm) as attachment:
            own = {name: tensor + group.rank() for name, tensor in trainer.module.state_dict().items()}
            trainer.module.load_state_dict(own, assign=True)
            before = weights_of(trainer.module)
            with attachment.averaged_weights():
                within = weights_of(trainer.module)
            assert_same_weights([before, weights_of(trainer.module)])
            leave_by_exception(attachment)  # its optimizer has the old parameters
        return before, within

    befores, withins = zip(*run_ranks(2, body), strict=True)
    assert_same_weights(withins)
    for name, mean in withins[0].items():
        np.testing.assert_array_equal(flat(mean), oracle.gradient_allreduce(stacked(befores, name)))


def test_gradient_algorithms_and_single_ranks_already_have_the_mean() -> None:
    def body(group: dist.ProcessGroup, algorithm: str) -> None:
        trainer = Trainer(group, build(Normed))
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm) as attachment:
            trainer.step()
            before = weights_of(trainer.module)
            with attachment.averaged_weights():
                assert_same_weights([before, weights_of(trainer.module)])

    run_ranks(2, lambda group: body(group, "bytegrad"))
    for algorithm in ("bytegrad", "decentralized", "low_precision_decentralized", "diloco", "async"):
        run_ranks(1, lambda group, algorithm=algorithm: body(group, algorithm))


@pytest.mark.parametrize(
    "algorithm",
    [
        *SYNCHRONOUS_ALGORITHMS,
        tb.AsyncModelAverageAlgorithm(sync_interval_ms=14_000),  # no round starts
        tb.ByteGradAlgorithm(error_feedback=True),
    ],
    ids=str,
)
def test_each_rank_resumes_from_its_own_state(algorithm: tb.Algorithm) -> None:
    """The framework, or DDP, has broadcast rank 0's weights before."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> tuple[Weights, Weights]:
        trainer = Trainer(group, model)
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm) as attachment:
            for _ in range(3):
                trainer.step()
            file = io.BytesIO()
            with attachment.averaged_weights(), attachment.averaged_weights():
                mean = weights_of(trainer.module)
                torch.save(attachment.rank_state_dict(), file)  # contains this rank's own weights nevertheless
                assert_same_weights([mean, weights_of(trainer.module)])
            shared = io.BytesIO()  # a framework saves this: with gradient algorithms it is the same on all ranks
            torch.save((trainer.module.state_dict(), trainer.optimizer.state_dict()), shared)
            data = trainer.data.get_state()
            for _ in range(3):
                trainer.step()
            straight = weights_of(trainer.module)

        resumed = Trainer(group, model)
        for read in (file, shared):
            read.seek(0)
        if not algorithm.averages_weights:
            module, optimizer = torch.load(shared, weights_only=True)
            resumed.module.load_state_dict(module)
            resumed.optimizer.load_state_dict(optimizer)
        resumed.data.set_state(data)
        with tb.attach(resumed.ddp, resumed.optimizer, algorithm) as attachment:
            attachment.load_rank_state_dict(torch.load(file, weights_only=True))
            for _ in range(3):
                resumed.step()
            return straight, weights_of(resumed.module)

    for straight, resumed in run_ranks(2, body):
        assert_same_weights([straight, resumed])


def test_a_rank_state_contains_all_optimizers_and_the_scaler() -> None:
    """With the asynchronous algorithm ranks skip steps independently, so their scales differ."""
    model = build(Normed)

    def start(group: dist.ProcessGroup) -> tuple[Trainer, list[torch.optim.Optimizer], torch.amp.GradScaler]:
        trainer = Trainer(group, model)
        parts = (trainer.module.first, trainer.module.last)
        return trainer, [torch.optim.Adam(part.parameters()) for part in parts], torch.amp.GradScaler("cpu")

    def body(group: dist.ProcessGroup) -> None:
        algorithm = tb.AsyncModelAverageAlgorithm(sync_interval_ms=14_000)
        trainer, optimizers, scaler = start(group)
        with tb.attach(trainer.ddp, optimizers, algorithm, grad_scaler=scaler) as attachment:
            for step in range(3):
                loss = trainer.ddp(torch.randn(6, 10, generator=trainer.data)).square().sum()
                scaler.scale(loss * (float("inf") if step == group.rank() == 1 else 1.0)).backward()
                for optimizer in optimizers:
                    scaler.step(optimizer)
                    optimizer.zero_grad()
                scaler.update()
            file = io.BytesIO()
            torch.save(saved := attachment.rank_state_dict(), file)
            file.seek(0)
            fresh, fresh_optimizers, fresh_scaler = start(group)
            with tb.attach(fresh.ddp, fresh_optimizers, algorithm, grad_scaler=fresh_scaler) as fresh_attachment:
                fresh_attachment.load_rank_state_dict(torch.load(file, weights_only=True))
                loaded = fresh_attachment.rank_state_dict()
                assert loaded["grad_scaler"] == saved["grad_scaler"]
                assert (fresh_scaler.get_scale() < 2.0**16) == (group.rank() == 1)
                for saved_optimizer, loaded_optimizer in zip(saved["optimizers"], loaded["optimizers"], strict=True):
                    for key, moments in saved_optimizer["state"].items():
                        assert all(
                            torch.equal(moments[name], value) for name, value in loaded_optimizer["state"][key].items()
                        )
                assert_same_weights([weights_of(trainer.module), weights_of(fresh.module)])

    run_ranks(2, body)


def test_a_refused_state_of_another_rank_changes_nothing() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build_once)
        with tb.attach(trainer.ddp, trainer.optimizer, "decentralized") as attachment:
            trainer.step()
            state = attachment.rank_state_dict()
            foreign = {**state, "module": {name: tensor + 1 for name, tensor in state["module"].items()}}
            foreign["attachment"] = {**state["attachment"], "impl": {**state["attachment"]["impl"], "rank": 7}}
            before = weights_of(trainer.module)
            with pytest.raises(ValueError, match=r"from rank \d of 2, got a state from rank 7 of 2"):
                attachment.load_rank_state_dict(foreign)
            assert_same_weights([before, weights_of(trainer.module)])

    build_once = build(Normed)
    run_ranks(2, body)


def test_invalid_rank_states_are_refused() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Normed))
        with tb.attach(trainer.ddp, trainer.optimizer, "bytegrad") as attachment:
            bytegrad_state = attachment.state_dict()
        with tb.attach(trainer.ddp, trainer.optimizer, "decentralized") as attachment:
            state = attachment.rank_state_dict()
            for wrong, message in (
                (attachment.state_dict(), "must be what rank_state_dict returned, with the keys .* got .'algorithm'"),
                ({"attachment": bytegrad_state}, "saved by ByteGradAlgorithm, but DecentralizedAlgorithm is attached"),
                ({**state, "optimizers": []}, r"the state has 0 optimizers, but attach was given SGD \(first"),
                (7, "must be what rank_state_dict returned.* got 7"),
            ):
                with pytest.raises(ValueError, match=message):
                    attachment.load_rank_state_dict(wrong)
            with attachment.averaged_weights():
                for call in (
                    attachment.detach,
                    lambda: attachment.load_rank_state_dict(state),
                    lambda: attachment.load_state_dict(state["attachment"]),
                ):
                    with pytest.raises(RuntimeError, match="within averaged_weights, which restores the weights"):
                        call()

    run_ranks(1, body)
