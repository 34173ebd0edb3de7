"""The residuals of error feedback: when they change, how many bytes they cost, and which states are refused."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from q_adam_life import NUM_STEPS, NUM_WARM, Trainer, equal, initial_of, tensors_in
from ranks import run_ranks
from torchbagua.collectives.residuals import Momentum, Residual, VelocityResidual
from training import Branches, Tower, build

ONE_BIT: dict[str, Any] = {"compression": "sign1bit", "error_feedback": True}
pytestmark = pytest.mark.usefixtures("where_commits_are_decided")


@pytest.mark.parametrize(("size", "nodes"), [(2, None), (3, [0, 0, 1])])
def test_a_step_that_amp_skips_leaves_no_trace(size: int, nodes: list[int] | None) -> None:
    """If only one rank has an Inf, weights, moments and residuals change on no rank."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> list[tuple[bool, bool]]:
        trainer = Trainer(group, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        attachment = tb.attach(
            trainer.ddp,
            trainer.optimizer,
            tb.QAdamAlgorithm(trainer.optimizer, **ONE_BIT),
            grad_scaler=scaler,
            process_group=None if nodes is None else tb.BaguaProcessGroup(group, nodes=nodes),
        )

        def states() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            trained = {"weights": trainer.ddp.state_dict(), "optimizer": trainer.optimizer.state_dict()["state"]}
            return list(tensors_in(trained)), list(tensors_in(attachment.runner.state_dict()))

        are_unchanged = []
        with attachment:
            for step in range(NUM_STEPS + 2):
                trainer.optimizer.zero_grad()
                x = torch.randn(6, 10, generator=trainer.data)
                if step == NUM_WARM + 2 and group.rank() == 1:
                    x[0, 0] = torch.inf
                before = states()
                scaler.scale(trainer.ddp(x, 0).square().sum()).backward()
                scaler.step(trainer.optimizer)
                scaler.update()
                after = states()
                assert all(value.isfinite().all() for value in after[1])
                are_unchanged.append((equal(before[0], after[0]), equal(before[1], after[1])))
        return are_unchanged[NUM_WARM:]

    runs = run_ranks(size, body)
    for index in range(NUM_STEPS + 2 - NUM_WARM):
        trained, residuals = zip(*(run[index] for run in runs), strict=True)
        assert set(trained) == {index == 2}
        assert all(residuals) == (index == 2)  # a rank that owns no shard has no residual that could change


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("as_views", [True, False])
def test_unused_parameters_keep_their_residuals(set_to_none: bool, as_views: bool) -> None:
    """Its momentum was sent, and DDP does not write the mean to the gradient, unless the gradient is a view."""
    model = build(Branches)

    def body(group: dist.ProcessGroup) -> tuple[bool, bool]:
        trainer = Trainer(group, model, find_unused_parameters=True, gradient_as_bucket_view=as_views)
        states = []
        with tb.attach(trainer.ddp, trainer.optimizer, tb.QAdamAlgorithm(trainer.optimizer, **ONE_BIT)) as attachment:
            for choice in (0,) * 6 + (1,):  # the same on all ranks
                trainer.optimizer.zero_grad(set_to_none=set_to_none)
                trainer.ddp(torch.randn(6, 10, generator=trainer.data), choice).square().sum().backward()
                gradient = trainer.ddp.module.left.weight.grad
                is_used = gradient is not None and bool(gradient.any())
                trainer.optimizer.step()
                states.append(copy.deepcopy(attachment.runner.state_dict()))
        before, after = states[-2:]
        kept = all(torch.equal(after[kind]["left.weight"], before[kind]["left.weight"]) for kind in ("sent", "mean"))
        assert not torch.equal(after["sent"]["stem.weight"], before["sent"]["stem.weight"])
        assert before["sent"]["left.weight"].any()
        return kept, is_used

    for kept, is_used in run_ranks(2, body):
        assert kept != is_used
        assert is_used == (as_views and not set_to_none)


def test_a_backward_without_a_step_commits_nothing() -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> bool:
        plain, extra = Trainer(group, model), Trainer(group, model)
        impls = [trainer.hook(**ONE_BIT) for trainer in (plain, extra)]
        for step in range(NUM_STEPS):
            plain.step()
            if step > NUM_WARM:
                extra.life.local.append({})
                extra.ddp(torch.ones(6, 10), 0).square().sum().backward()
            extra.step()
        for impl in impls:
            impl.close()
        return equal(list(plain.life.weights[-1].values()), list(extra.life.weights[-1].values()))

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_cleared_gradients_commit_nothing_if_later_gradients_accumulate(set_to_none: bool) -> None:
    """The gradients of one backward are cleared. Two more follow for a step, of which the second is synchronized."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> bool:
        plain, extra = Trainer(group, model), Trainer(group, model)
        impls = [trainer.hook(**ONE_BIT) for trainer in (plain, extra)]
        for step in range(NUM_STEPS):
            for trainer in (plain, extra):
                trainer.life.local.append({})
                if trainer is extra and step > NUM_WARM:
                    trainer.ddp(torch.ones(6, 10), 0).square().sum().backward()
                trainer.optimizer.zero_grad(set_to_none=set_to_none)
                with trainer.ddp.no_sync():
                    trainer.ddp(torch.randn(6, 10, generator=trainer.data), 0).square().sum().backward()
                trainer.ddp(torch.randn(6, 10, generator=trainer.data), 0).square().sum().backward()
                trainer.optimizer.step()
        for impl in impls:
            impl.close()
        return equal(list(initial_of(plain.ddp.module).values()), list(initial_of(extra.ddp.module).values()))

    assert run_ranks(2, body) == [True, True]


def step_after_two_passes(trainer: Trainer, choices: tuple[int, int]) -> None:
    """Take one step after two synchronized backward passes."""
    trainer.optimizer.zero_grad()
    for choice in choices:
        trainer.ddp(torch.ones(6, 10), choice).square().sum().backward()
    trainer.optimizer.step()


def test_buckets_rebuilt_between_two_passes_of_a_step() -> None:
    """This happens in the first step of a run that is resumed after the warm-up."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> None:
        first, second = (Trainer(group, model, bucket_cap_mb=0.01) for _ in range(2))
        for trainer in (first, second):
            with tb.attach(trainer.ddp, trainer.optimizer, tb.QAdamAlgorithm(trainer.optimizer, **ONE_BIT)):
                if trainer is first:
                    for _ in range(NUM_STEPS):
                        step_after_two_passes(trainer, (0, 0))
                    continue
                trainer.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
                with pytest.raises(RuntimeError, match=r"rebuilt its buckets .* Accumulate .* under ddp.no_sync"):
                    step_after_two_passes(trainer, (0, 0))

    run_ranks(2, body)


def test_a_parameter_with_a_gradient_only_in_the_first_pass() -> None:
    """If no rank has a gradient in the second pass, DDP keeps the first mean, so the second mean of it is lost."""
    model = build(Branches)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model, find_unused_parameters=True)
        with tb.attach(trainer.ddp, trainer.optimizer, tb.QAdamAlgorithm(trainer.optimizer, **ONE_BIT)):
            for _ in range(NUM_WARM):
                step_after_two_passes(trainer, (0, 1))
            step_after_two_passes(trainer, (0, 0))
            with pytest.raises(RuntimeError, match=r"left\.weight must have a gradient in every .* or in none"):
                step_after_two_passes(trainer, (0, 1))

    run_ranks(2, body)


def test_parameters_keep_no_hook_of_an_algorithm_that_has_ended() -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> list[int]:
        trainer = Trainer(group, model)
        numbers = []
        with tb.attach(trainer.ddp, trainer.optimizer, tb.QAdamAlgorithm(trainer.optimizer, **ONE_BIT)):
            for _ in range(NUM_STEPS):
                trainer.step()
            numbers.append(sum(len(p._backward_hooks or ()) for p in trainer.named.values()))
        numbers.append(sum(len(p._backward_hooks or ()) for p in trainer.named.values()))
        return numbers

    assert run_ranks(2, body) == [[6, 0], [6, 0]]


def test_a_second_step_commits_nothing_twice() -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> bool:
        trainer = Trainer(group, model)
        impl = trainer.hook(**ONE_BIT)
        for _ in range(NUM_STEPS):
            trainer.step()
        before = list(tensors_in(impl.state_dict()))
        trainer.optimizer.step()
        after = list(tensors_in(impl.state_dict()))
        impl.close()
        return equal(before, after)

    assert run_ranks(2, body) == [True, True]


def test_a_commit_leaves_nothing_staged() -> None:
    """A second commit changes nothing, and a later pass of a new step may encode again."""
    whole = slice(0, 2)
    residual = VelocityResidual(whole, torch.device("cpu"), Momentum(0.5, has_masking=False))
    for value in (1.0, 2.0):
        residual.stage(whole).fill_(value)
        residual.commit([slice(0, 1)])
        assert residual.values[0] == value
        for _ in range(2):
            residual.commit()
            assert residual.values.tolist() == [value] * 2
        residual.continue_from_staged([whole])
    encoded_twice = Residual(whole, torch.device("cpu"))
    encoded_twice.stage(whole).fill_(1.0)
    encoded_twice.continue_from_staged([whole])
    encoded_twice.stage(whole).fill_(2.0)
    encoded_twice.commit()
    assert encoded_twice.added(whole).tolist() == [2.0] * 2


def test_residuals_are_sent_only_if_there_are_any() -> None:
    """The switch sends no more than later steps do; after loading, the residuals of means are summed once."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> list[int]:
        trainer = Trainer(group, model)
        recorder = tb.observe.Recorder()
        algorithm = tb.QAdamAlgorithm(trainer.optimizer, **ONE_BIT)
        sent = []
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm, observers=[recorder]) as attachment:
            for step in range(NUM_STEPS):
                before = recorder.bytes_sent
                trainer.step()
                sent.append(recorder.bytes_sent - before)
                if step == NUM_STEPS - 2:
                    attachment.load_state_dict(copy.deepcopy(attachment.state_dict()))
        return sent

    for sent in run_ranks(2, body):
        in_full, in_one_bit = sent[1], sent[NUM_WARM]
        assert max(sent[NUM_WARM : NUM_STEPS - 1]) - min(sent[NUM_WARM : NUM_STEPS - 1]) < 100
        assert 20 < in_full / in_one_bit < 32
        # The agreement on the loaded state, and the sum: DDP's chunks are cut at blocks, in one bit as in full.
        assert in_full < sent[-1] < in_full + in_one_bit + 100


def test_a_failure_leaves_residuals_unchanged() -> None:
    """The residuals of a bucket that takes over are summed in copies."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> bool:
        trainer = Trainer(group, model)
        impl = trainer.hook([0, 0, 1, 1], **ONE_BIT)
        for _ in range(NUM_STEPS):
            trainer.step()
        impl.load_state_dict(impl.state_dict())
        before = list(tensors_in(impl.state_dict()))
        impl.process_group.world.close()
        with pytest.raises(RuntimeError, match="the group is closed"):
            trainer.step()
        after = list(tensors_in(impl.state_dict()))
        impl.close()
        return equal(before, after)

    assert run_ranks(4, body) == [True] * 4


def test_one_rank_alone_cannot_load() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Tower))
        impl = tb.QAdamAlgorithm(trainer.optimizer, **ONE_BIT).reify(group, timeout=timedelta(seconds=2))
        if group.rank() == 0:
            with pytest.raises(tb.CommunicationError, match="loading the state"):
                impl.load_state_dict(impl.state_dict())
        impl.close()

    run_ranks(2, body)


def test_ranks_that_load_residuals_of_other_parameters() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Tower))
        impl = tb.QAdamAlgorithm(trainer.optimizer, **ONE_BIT).reify(group)
        values = {f"parameter {group.rank()}": list(trainer.named.values())[group.rank()].detach()}
        with pytest.raises(tb.CommunicationError, match="a digest of the names in the state"):
            impl.load_state_dict({**impl.state_dict(), "sent": values, "mean": values})
        impl.close()

    run_ranks(2, body)


def test_refusals() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Tower))
        with pytest.raises(ValueError, match="compression 'sign1bit' needs error_feedback=True"):
            tb.QAdamAlgorithm(trainer.optimizer, compression="sign1bit")
        with pytest.raises(TypeError, match="error_feedback must be True or False, got 1"):
            tb.QAdamAlgorithm(trainer.optimizer, error_feedback=1)
        impl = trainer.hook(error_feedback=True)
        state = impl.state_dict()
        keys = r"must have the keys \['mean', 'num_ranks', 'rank', 'sent'\], got \['sent'\]"
        with pytest.raises(ValueError, match=keys):
            impl.load_state_dict({"sent": {}})
        with pytest.raises(ValueError, match="got a state from rank 7 of 2; every rank saves and loads its own state"):
            impl.load_state_dict({**state, "rank": 7})
        zeros = {"parameter 0": torch.zeros(301, 10)}
        scalar, wrong = torch.zeros(1), "QAdamAlgorithm.load_state_dict: sent and mean must contain .* got others"
        for sent, mean, got in (
            ({"nobody": scalar}, {"nobody": scalar}, r": \['nobody'\]"),
            ({"parameter 0": scalar}, {"parameter 0": scalar}, r": \['parameter 0'\]"),
            (zeros, {}, ""),
            ([1], [1], ""),
            ({"parameter 0": 1.0}, {"parameter 0": 1.0}, ""),
        ):
            with pytest.raises(ValueError, match=wrong + got):
                impl.load_state_dict({**state, "sent": sent, "mean": mean})
        impl.load_state_dict({**state, "sent": zeros, "mean": zeros})
        impl.close()

    run_ranks(2, body)


def test_a_group_of_one_has_no_residuals() -> None:
    def body(group: dist.ProcessGroup) -> dict[str, Any]:
        trainer = Trainer(group, build(Tower))
        impl = trainer.hook(**ONE_BIT)
        for _ in range(NUM_STEPS):
            trainer.step()
        state = impl.state_dict()
        impl.close()
        return state

    (state,) = run_ranks(1, body)
    assert (state["rank"], state["num_ranks"]) == (0, 1)
    assert not any(value.any() for value in tensors_in(state))


def add_to(total: torch.Tensor, gradient: torch.Tensor) -> None:
    total += gradient


def late_flag(ddp: DistributedDataParallel, inputs: list[torch.Tensor]) -> None:
    for index, x in enumerate(inputs):
        with ddp.no_sync() if index > 0 else nullcontext():
            ddp(x, 0).square().sum().backward()


def two_losses(ddp: DistributedDataParallel, inputs: list[torch.Tensor]) -> None:
    output = ddp(inputs[0], 0)
    output.square().sum().backward(retain_graph=True)
    output.sum().backward()


def several_synchronized_passes(ddp: DistributedDataParallel, inputs: list[torch.Tensor]) -> None:
    for x in inputs:
        ddp(x, 0).square().sum().backward()


@pytest.mark.filterwarnings("ignore:torchbagua:RuntimeWarning")
@pytest.mark.parametrize("add_gradients", [late_flag, two_losses, several_synchronized_passes])
@pytest.mark.parametrize(
    "algorithm",
    [tb.CompressedAllReduceAlgorithm(error_feedback=True), tb.TopKAlgorithm(ratio=0.01)],
    ids=["4 bits", "top-k"],
)
def test_nothing_is_lost_if_backward_adds_to_an_average(
    algorithm: tb.Algorithm, add_gradients: Callable[[DistributedDataParallel, list[torch.Tensor]], None]
) -> None:
    """All ranks' gradients sum to the gradients of their steps, which differ, and the residuals."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> list[dict[str, torch.Tensor]]:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        named = dict(ddp.module.named_parameters())
        optimizer = torch.optim.SGD(named.values(), lr=1e-3)
        computed, used, left_out = ({name: torch.zeros(p.shape) for name, p in named.items()} for _ in range(3))
        for name, parameter in named.items():
            parameter.register_hook(partial(add_to, computed[name]))
        data = torch.Generator().manual_seed(group.rank())
        with tb.attach(ddp, optimizer, algorithm, process_group=tb.BaguaProcessGroup(group)) as attachment:
            for step in range(5):
                inputs = [torch.randn(6, 10, generator=data) for _ in range(3)]
                add_gradients(ddp, inputs if step > 0 else inputs[:1])  # DDP rebuilds its buckets after its first pass
                optimizer.step()
                for name, parameter in named.items():
                    used[name] += parameter.grad
                optimizer.zero_grad()
            state = attachment.runner.state_dict()
            for name in named:
                left_out[name] += state["sent"][name] + group.size() * state["mean"][name]
        return [computed, used, left_out]

    runs = run_ranks(2, body)
    for name in runs[0][0]:
        computed, used, left_out = (sum(run[index][name] for run in runs) for index in range(3))
        assert left_out.norm() > 1e-3 * computed.norm() or left_out.numel() == 1
        assert (computed - used - left_out).norm() < 1e-6 * computed.norm()
