"""QAdam with error feedback: what compression leaves out is in what is sent next, and in nothing else."""

import copy
import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import oracle
import torchbagua as tb
from q_adam_life import NUM_STEPS, NUM_WARM, SETTINGS, Average, Life, Tensors, Trainer, check_lives, initial_of
from ranks import run_ranks
from training import Branches, Tower, build

BLOCKS = {"MinMaxUInt8": oracle.quantise_block, "sign1bit": oracle.sign_block}


def feedback(compression: str) -> Any:
    def make_average(size: int, nodes: Sequence[int] | None) -> Average:
        return oracle.ErrorFeedback(lambda row: oracle.quantise(row, [size], coded=BLOCKS[compression]), nodes)

    return make_average


@pytest.mark.parametrize("compression", BLOCKS)
@pytest.mark.parametrize(
    ("size", "nodes"),
    [(2, None), (4, None), (8, None), (4, [0, 0, 1, 1]), (8, [0, 0, 0, 0, 1, 1, 1, 1]), (3, [0, 0, 1])],
)
@pytest.mark.parametrize("bucket_cap_mb", [25, 0.01])
def test_the_whole_life_equals_the_oracle(
    compression: str, size: int, nodes: list[int] | None, bucket_cap_mb: float
) -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> Life:
        trainer = Trainer(group, model, bucket_cap_mb=bucket_cap_mb)
        impl = trainer.hook(nodes, compression=compression, error_feedback=True)
        for _ in range(NUM_STEPS):
            trainer.step()
        impl.close()
        return trainer.life

    check_lives(run_ranks(size, body), initial_of(model), nodes, feedback(compression))


@pytest.mark.parametrize("stop", [NUM_WARM - 1, NUM_WARM, NUM_WARM + 2])
@pytest.mark.parametrize(("size", "nodes"), [(2, None), (4, [0, 0, 1, 1])])
@pytest.mark.parametrize("later_cap_mb", [0.01, 25])
def test_resume_bit_for_bit(stop: int, size: int, nodes: list[int] | None, later_cap_mb: float) -> None:
    """Chunks have other owners then: DDP makes other buckets in its first step, and for another bucket_cap_mb."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> tuple[Tensors, Tensors]:
        first = Trainer(group, model, bucket_cap_mb=0.01)
        impl = first.hook(nodes, compression="sign1bit", error_feedback=True)
        for step in range(NUM_STEPS):
            if step == stop:
                file = io.BytesIO()
                state = {"model": first.ddp.module.state_dict(), "optimizer": first.optimizer.state_dict()}
                torch.save({**state, "impl": impl.state_dict(), "data": first.data.get_state()}, file)
            first.step()
        impl.close()
        second = Trainer(group, model, bucket_cap_mb=later_cap_mb)
        second.life.weights += [{}] * stop
        impl = second.hook(nodes, compression="sign1bit", error_feedback=True)
        state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        second.ddp.module.load_state_dict(state["model"])
        second.optimizer.load_state_dict(state["optimizer"])
        impl.load_state_dict(state["impl"])
        second.data.set_state(state["data"])
        for _ in range(stop, NUM_STEPS):
            second.step()
        impl.close()
        return first.life.weights[-1], second.life.weights[-1]

    for first, second in run_ranks(size, body):
        assert all(torch.equal(second[name], weight) for name, weight in first.items())


def residuals_of(impl: tb.AlgorithmImpl) -> dict[str, Any]:
    return copy.deepcopy(impl.state_dict())


def test_a_step_that_amp_skips_leaves_no_trace() -> None:
    """Inf on one rank alone: on no rank a residual moves."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> list[bool]:
        trainer = Trainer(group, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        algorithm = tb.QAdamAlgorithm(trainer.optimizer, compression="sign1bit", error_feedback=True)
        changed = []
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm, grad_scaler=scaler) as attachment:
            for step in range(NUM_STEPS + 2):
                trainer.optimizer.zero_grad()
                x = torch.randn(6, 10, generator=trainer.data)
                if step == NUM_WARM + 2 and group.rank() == 1:
                    x[0, 0] = torch.inf
                before = repr(residuals_of(attachment.impl))
                scaler.scale(trainer.ddp(x, 0).square().sum()).backward()
                scaler.step(trainer.optimizer)
                scaler.update()
                after = residuals_of(attachment.impl)
                assert all(value.isfinite().all() for kind in ("sent", "mean") for value in after[kind].values())
                changed.append(repr(after) != before)
        return changed[NUM_WARM:]

    expected = [step != 2 for step in range(NUM_STEPS + 2 - NUM_WARM)]
    assert run_ranks(2, body) == [expected] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_scale_changes_nothing(dtype: torch.dtype) -> None:
    """Residuals are kept in the unit of the momentum."""
    model = build(lambda: Tower(dtypes=(dtype,) * 3))

    def body(group: dist.ProcessGroup) -> tuple[Tensors, Tensors]:
        plain, scaled = Trainer(group, model), Trainer(group, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        algorithms = [
            tb.QAdamAlgorithm(trainer.optimizer, compression="sign1bit", error_feedback=True)
            for trainer in (plain, scaled)
        ]
        with (
            tb.attach(plain.ddp, plain.optimizer, algorithms[0]),
            tb.attach(scaled.ddp, scaled.optimizer, algorithms[1], grad_scaler=scaler),
        ):
            for _ in range(NUM_STEPS):
                plain.step()
                scaled.optimizer.zero_grad()
                index = len(plain.life.weights) - 1
                loss = scaled.ddp(torch.randn(6, 10, generator=scaled.data), group.rank() + index).square().sum()
                scaler.scale(loss).backward()
                scaler.step(scaled.optimizer)
                scaler.update()
        assert scaler.get_scale() > 1024
        return plain.life.weights[-1], initial_of(scaled.ddp.module)

    for plain, scaled in run_ranks(2, body):
        assert all(torch.equal(scaled[name], weight) for name, weight in plain.items())


def test_what_is_not_moved_keeps_its_residual() -> None:
    """A parameter that no rank uses has no gradient: its momentum was sent, and nobody took it."""
    model = build(Branches)

    def body(group: dist.ProcessGroup) -> tuple[bool, bool]:
        trainer = Trainer(group, model, find_unused_parameters=True)
        algorithm = tb.QAdamAlgorithm(trainer.optimizer, compression="sign1bit", error_feedback=True)
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm) as attachment:
            states = []
            for choice in (0,) * 6 + (1,):  # all ranks alike
                trainer.optimizer.zero_grad()
                trainer.ddp(torch.randn(6, 10, generator=trainer.data), choice).square().sum().backward()
                trainer.optimizer.step()
                states.append(residuals_of(attachment.impl))
        kept = all(
            torch.equal(states[-1][kind]["left.weight"], states[-2][kind]["left.weight"]) for kind in ("sent", "mean")
        )
        moved = not torch.equal(states[-1]["sent"]["stem.weight"], states[-2]["sent"]["stem.weight"])
        assert states[-2]["sent"]["left.weight"].any()
        return kept, moved

    assert run_ranks(2, body) == [(True, True)] * 2


def test_a_backward_that_no_step_follows_counts_nothing() -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> tuple[Tensors, Tensors]:
        plain, extra = Trainer(group, model), Trainer(group, model)
        impls = [trainer.hook(compression="sign1bit", error_feedback=True) for trainer in (plain, extra)]
        for step in range(NUM_STEPS):
            plain.step()
            if step > NUM_WARM:
                extra.life.local.append({})
                extra.ddp(torch.ones(6, 10), 0).square().sum().backward()
            extra.step()
        for impl in impls:
            impl.close()
        return plain.life.weights[-1], extra.life.weights[-1]

    for plain, extra in run_ranks(2, body):
        assert all(torch.equal(extra[name], weight) for name, weight in plain.items())


def test_nothing_is_lost() -> None:
    """All that was put in has come out or is in the residuals."""
    model = build(Tower)
    beta1 = SETTINGS["betas"][0]

    def body(group: dist.ProcessGroup) -> tuple[Tensors, Tensors, dict[str, Tensors]]:
        trainer = Trainer(group, model)
        total_in = {name: torch.zeros_like(p) for name, p in trainer.named.items()}
        total_out = copy.deepcopy(total_in)
        local: Tensors = {}
        for name, parameter in trainer.named.items():
            parameter.register_hook(lambda gradient, name=name: local.update({name: gradient.clone()}))
        algorithm = tb.QAdamAlgorithm(trainer.optimizer, compression="sign1bit", error_feedback=True)
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm) as attachment:
            for step in range(NUM_WARM + 20):
                history = {name: beta1 * value for name, value in trainer.life.momenta[-1].items()} if step else {}
                trainer.step()
                if step >= NUM_WARM:
                    for name in total_in:
                        total_in[name] += history[name] + (1 - beta1) * local[name]
                        total_out[name] += history[name] + (1 - beta1) * trainer.life.gradients[-1][name]
            state = attachment.impl.state_dict()
        return total_in, total_out, {kind: state[kind] for kind in ("sent", "mean")}

    runs = run_ranks(4, body)
    for name, total_out in runs[0][1].items():
        total_in = sum(run[0][name] for run in runs) / 4
        left_out = sum(run[2]["sent"][name] for run in runs) / 4 + sum(run[2]["mean"][name] for run in runs)
        scale = float(total_in.abs().max())
        # Rounding of float32 in the sums of 20 steps, in the test and in what it tests.
        assert torch.allclose(total_in, total_out + left_out, rtol=0, atol=3e-5 * scale)
        assert total_in.numel() == 1 or not torch.allclose(total_in, total_out, rtol=0, atol=1e-3 * scale)


def test_refusals() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Tower))
        with pytest.raises(ValueError, match="compression 'sign1bit' needs error_feedback=True"):
            tb.QAdamAlgorithm(trainer.optimizer, compression="sign1bit")
        with pytest.raises(ValueError, match=r"compression must be one of \['MinMaxUInt8', 'sign1bit'\], got 'int4'"):
            tb.QAdamAlgorithm(trainer.optimizer, compression="int4", error_feedback=True)
        with pytest.raises(TypeError, match="error_feedback must be True or False, got 1"):
            tb.QAdamAlgorithm(trainer.optimizer, error_feedback=1)
        impl = trainer.hook(error_feedback=True)
        state = impl.state_dict()
        with pytest.raises(
            ValueError, match=r"must have the keys \['mean', 'num_ranks', 'rank', 'sent'\], got \['sent'\]"
        ):
            impl.load_state_dict({"sent": {}})
        with pytest.raises(ValueError, match="got that of rank 7 of 2; every rank saves and loads its own"):
            impl.load_state_dict({**state, "rank": 7})
        with pytest.raises(ValueError, match=r"'sent' must hold residuals .* differs in \['nobody'\]"):
            impl.load_state_dict({**state, "sent": {"nobody": torch.zeros(1)}})
        impl.close()

    run_ranks(2, body)


def test_a_group_of_one_has_no_residuals() -> None:
    def body(group: dist.ProcessGroup) -> dict[str, Any]:
        trainer = Trainer(group, build(Tower))
        impl = trainer.hook(compression="sign1bit", error_feedback=True)
        for _ in range(NUM_STEPS):
            trainer.step()
        state = impl.state_dict()
        impl.close()
        return state

    assert run_ranks(1, body) == [{}]
