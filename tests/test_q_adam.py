"""QAdam with DDP: every step of every rank equals the oracle's, in the warm-up, at the switch and after it.

Its residuals, skipped steps and resuming are in test_error_feedback.py.
"""

import copy
import gc
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oracle
import torchbagua as tb
from pairwise import pairwise
from q_adam_life import (
    NUM_STEPS,
    NUM_WARM,
    SETTINGS,
    Average,
    ChannelsLast,
    Life,
    Tensors,
    Trainer,
    check_lives,
    initial_of,
)
from ranks import run_ranks
from torchbagua._torch import forget_active_ddp
from torchbagua.observe.events import Trace
from training import Tower, build

BLOCKS = {
    "minmax_uint8": (2048, oracle.quantise_block),
    "minmax_uint4": (128, oracle.quantise_block_4_bits),
    "sign1bit": (2048, oracle.sign_block),
}


def mean_with_feedback(compression: str, size: int, nodes: Sequence[int] | None) -> Average:
    return oracle.TwoPhaseResiduals(lambda row: oracle.quantise(row, [size], *BLOCKS[compression]), nodes)


@pairwise(
    compression=[None, *BLOCKS],
    ranks=[(2, None), (4, [0, 0, 1, 1]), (3, [0, 0, 1])],
    bucket_cap_mb=[25, 0.01],
    num_micro_batches=[1, 3],
)
def test_a_whole_run_equals_the_oracle(
    device: torch.device,
    compression: str | None,
    ranks: tuple[int, list[int] | None],
    bucket_cap_mb: float,
    num_micro_batches: int,
) -> None:
    """Without error feedback in 8 bits, and with it in any codec."""
    model, (size, nodes) = build(Tower).to(device), ranks
    arguments: dict[str, Any] = {} if compression is None else {"compression": compression, "error_feedback": True}

    def body(group: dist.ProcessGroup) -> Life:
        trainer = Trainer(group, model, bucket_cap_mb=bucket_cap_mb)
        trainer.num_micro_batches = num_micro_batches
        impl = trainer.hook(nodes, **arguments)
        for _ in range(NUM_STEPS):
            trainer.step()
        impl.close()
        return trainer.life

    means = () if compression is None else (partial(mean_with_feedback, compression),)
    check_lives(run_ranks(size, body, device=device), initial_of(model), nodes, *means)


@pytest.mark.parametrize("as_views", [False, True])
def test_parameters_in_another_memory_order_and_attach(as_views: bool) -> None:
    """DDP flattens them in memory order; each is a single block here. attach equals the standalone hook."""
    model = build(ChannelsLast)
    assert not model.convolution.weight.is_contiguous()
    assert not model.transposed.is_contiguous()

    def body(group: dist.ProcessGroup) -> Life:
        hooked, attached = (Trainer(group, model, gradient_as_bucket_view=as_views) for _ in range(2))
        impl = hooked.hook()
        with tb.attach(attached.ddp, attached.optimizer, tb.QAdamAlgorithm(attached.optimizer)):
            for _ in range(NUM_STEPS):
                hooked.step()
                attached.step()
        impl.close()
        for weights, expected in zip(attached.life.weights, hooked.life.weights, strict=True):
            assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
        return hooked.life

    check_lives(run_ranks(2, body), initial_of(model))


class Sampling(tb.observe.Recorder, Trace):
    """Needs separate passes for the conversion to momenta and for the codec, as GPUs and other codecs do."""

    def samples(self, step: int) -> bool:
        return True


@pytest.mark.parametrize("has_feedback", [False, True])
def test_one_pass_is_bitwise_equal_to_separate_passes(has_feedback: bool) -> None:
    """Also with other betas in a bucket, and a loss scale that is not a power of two."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> tuple[Tensors, Tensors]:
        results = []
        for observers in ([], [Sampling()]):
            trainer = Trainer(group, model)
            own = list(trainer.named.values())
            groups = [{"params": own[::2], "betas": (0.9, 0.99)}, {"params": own[1::2], "betas": (0.75, 0.99)}]
            optimizer = tb.QAdamOptimizer(groups, lr=0.01, warmup_steps=1)
            algorithm = tb.QAdamAlgorithm(optimizer, error_feedback=has_feedback)
            scaler = torch.amp.GradScaler("cpu", init_scale=3.0)
            with tb.attach(trainer.ddp, optimizer, algorithm, grad_scaler=scaler, observers=observers):
                for _ in range(4):
                    optimizer.zero_grad()
                    x = torch.randn(6, 10, generator=trainer.data)
                    scaler.scale(trainer.ddp(x, 0).square().sum()).backward()
                    scaler.step(optimizer)
                    scaler.update()
            results.append(initial_of(trainer.ddp.module))
        return results[0], results[1]

    for at_once, in_turn in run_ranks(3, body):
        assert all(torch.equal(in_turn[name], weight) for name, weight in at_once.items())


def test_gradients_in_full_precision() -> None:
    """Those of parameters in their warm-up, also next to others in a bucket, and those of another optimizer."""
    model = build(lambda: Tower((10, 20, 5, 1)))

    def body(group: dist.ProcessGroup) -> Tensors:
        trainer = Trainer(group, model)
        early, late, of_sgd = (list(layer.parameters()) for layer in trainer.ddp.module.layers)
        groups = [{"params": early}, {"params": late, "warmup_steps": 5}]
        trainer.optimizer = tb.QAdamOptimizer(groups, warmup_steps=2, **SETTINGS)
        sgd = torch.optim.SGD(of_sgd, lr=0.1)
        impl = trainer.hook()
        trainer.named = {name: p for name, p in trainer.named.items() if not name.startswith("layers.2")}
        for _ in range(4):
            sgd.zero_grad()
            trainer.step()
            sgd.step()
        impl.close()
        averaged = {name: p.grad for name, p in trainer.ddp.module.named_parameters()}
        return {name: torch.stack((local, averaged[name])) for name, local in trainer.life.local[3].items()}

    runs = run_ranks(2, body)
    for name in runs[0]:
        mean = (runs[0][name][0] + runs[1][name][0]) / 2
        assert torch.equal(runs[0][name][1], mean) == (not name.startswith("layers.0")), name
        assert torch.allclose(runs[0][name][1], mean, atol=0.05 * float(mean.abs().max()) + 1e-3)


def test_a_state_with_as_many_other_parameters_past_their_warm_up() -> None:
    """The loaded state decides which parameters are sent as momenta, not the number of those past their warm-up."""

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=group)

        def optimizer_with(*warm_ups: int) -> tb.QAdamOptimizer:
            groups = [{"params": [p], "warmup_steps": n} for p, n in zip(ddp.parameters(), warm_ups, strict=True)]
            return tb.QAdamOptimizer(groups, lr=0.01)

        def run(optimizer: tb.QAdamOptimizer, steps: range) -> None:
            for index in steps:
                data = torch.Generator().manual_seed(10 * index + group.rank())
                optimizer.zero_grad()
                ddp(torch.randn(3, 4, generator=data)).square().sum().backward()
                optimizer.step()

        earlier = optimizer_with(100, 1)  # the bias is past its warm-up
        with tb.attach(ddp, earlier, tb.QAdamAlgorithm(earlier)):
            run(earlier, range(3))
        model, state = copy.deepcopy(ddp.module.state_dict()), copy.deepcopy(earlier.state_dict())
        results = []
        for steps_before in (0, 3):  # of an optimizer whose weight is past its warm-up
            own = optimizer_with(1, 100)
            with tb.attach(ddp, own, tb.QAdamAlgorithm(own)):
                run(own, range(steps_before))
                ddp.module.load_state_dict(model)
                own.load_state_dict(copy.deepcopy(state))
                run(own, range(3, 6))
            results.append(initial_of(ddp.module))
        assert all(torch.equal(results[1][name], weight) for name, weight in results[0].items())

    run_ranks(2, body)


@pytest.mark.parametrize("num_steps", [40, pytest.param(2000, marks=pytest.mark.soak)])
def test_nothing_grows_and_no_graph_is_kept(num_steps: int) -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> list[int]:
        trainer = Trainer(group, model)
        algorithm = tb.QAdamAlgorithm(trainer.optimizer, compression="sign1bit", error_feedback=True)
        num_tensors = []
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm) as attachment:
            for step in range(num_steps):
                trainer.step()
                trainer.life = Life()
                if step in (num_steps // 4, num_steps - 1):
                    dist.barrier(group)
                    gc.collect()
                    num_tensors.append(sum(type(item) is torch.Tensor for item in gc.get_objects()))
                    dist.barrier(group)
            states = [*trainer.optimizer.state.values(), *attachment.runner.state_dict().values()]
        kept = [value for state in states if isinstance(state, dict) for value in state.values()]
        assert all(value.grad_fn is None for value in kept if isinstance(value, torch.Tensor))
        return num_tensors

    for before, after in run_ranks(2, body):
        assert after <= before


# Ranks and optimizers that do not fit.


def test_optimizers_that_do_not_fit() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Tower))
        with pytest.raises(ValueError, match="q_adam_optimizer must be a QAdamOptimizer, got SGD"):
            tb.QAdamAlgorithm(torch.optim.SGD(trainer.ddp.parameters()))
        unattached = tb.QAdamOptimizer(trainer.ddp.parameters())
        with pytest.raises(ValueError, match="q_adam_optimizer must be the attached optimizer, got another optimizer"):
            tb.attach(trainer.ddp, trainer.optimizer, tb.QAdamAlgorithm(unattached))
        with (
            tb.attach(trainer.ddp, trainer.optimizer, tb.QAdamAlgorithm(trainer.optimizer)),
            pytest.raises(ValueError, match="q_adam_optimizer is already attached; detach it first"),
        ):
            tb.QAdamAlgorithm(trainer.optimizer).reify(group)
        assert not trainer.optimizer.has_averager
        with pytest.raises(ValueError, match=r"needs exactly one QAdamOptimizer, got \['SGD'\]"):
            tb.attach(trainer.ddp, torch.optim.SGD(trainer.ddp.parameters()), "qadam")
        with tb.attach(trainer.ddp, trainer.optimizer, "qadam") as attachment:
            assert attachment.algorithm == tb.QAdamAlgorithm(trainer.optimizer)

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("warm_up_differs", "message"),
    [(True, r"q_adam_optimizer \(warmup_steps"), (False, r"q_adam_optimizer \(updates of its parameters so far\)")],
)
def test_ranks_with_different_optimizers(warm_up_differs: bool, message: str) -> None:
    """They differ in their warm-ups, or in their updates, as if only rank 0 had loaded the optimizer's state."""

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Tower), warmup_steps=3 + group.rank() * warm_up_differs)
        if group.rank() == 0 and not warm_up_differs:
            for parameter in trainer.named.values():
                parameter.grad = torch.ones_like(parameter)
            trainer.optimizer.step()
        with pytest.raises(ValueError, match=f"disagree on QAdamAlgorithm's argument {message}"):
            tb.QAdamAlgorithm(trainer.optimizer).reify(group)

    run_ranks(2, body)


def test_a_rank_that_skips_a_step_in_the_warm_up() -> None:
    """It would send gradients while others send momenta; messages of different lengths would end the process."""

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Tower))
        with tb.attach(trainer.ddp, trainer.optimizer, tb.QAdamAlgorithm(trainer.optimizer)):
            for step in range(NUM_WARM - 1):
                trainer.optimizer.zero_grad()
                trainer.ddp(torch.ones(6, 10), 0).sum().backward()
                if (group.rank(), step) != (1, NUM_WARM - 2):
                    trainer.optimizer.step()
            message = f"after {NUM_WARM - 1} optimizer steps; rank 1 .* after {NUM_WARM - 2} optimizer steps"
            with pytest.raises(RuntimeError, match=message):
                trainer.ddp(torch.ones(6, 10), 0).sum().backward()

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("saved_after", "message"),
    [
        (1, r"parameters past their warm-up: rank 0 has 0, rank 1 has 6\."),
        (NUM_WARM, r"updates of parameters past their warm-up: rank 0 has 18, rank 1 has 30\."),
    ],
)
def test_a_state_that_one_rank_alone_has_loaded_after_the_warm_up(saved_after: int, message: str) -> None:
    """From the warm-up: it would send gradients while others send momenta. From a later step: its momenta are old."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model)
        with tb.attach(trainer.ddp, trainer.optimizer, tb.QAdamAlgorithm(trainer.optimizer)):
            for step in range(NUM_WARM + 2):
                if step == saved_after:
                    state = copy.deepcopy(trainer.optimizer.state_dict())
                trainer.step()
            if group.rank() == 0:
                trainer.optimizer.load_state_dict(state)
            with pytest.raises(RuntimeError, match=message):
                trainer.step()

    run_ranks(2, body)


def test_nothing_keeps_the_impl_of_a_deleted_hook_alive() -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> bool:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = tb.QAdamOptimizer(ddp.parameters(), warmup_steps=1)
        ddp.register_comm_hook(tb.QAdamAlgorithm(optimizer).reify(group), tb.comm_hook)
        ddp(torch.ones(2, 10), 0).sum().backward()
        assert optimizer.has_averager
        del ddp
        deadline_s = time.monotonic() + 20
        while optimizer.has_averager and time.monotonic() < deadline_s:  # until the lane's thread drops the last job
            forget_active_ddp()  # shared by all ranks, which are threads here (torch 2.13)
            gc.collect()
            time.sleep(0.01)
        return optimizer.has_averager

    assert run_ranks(2, body) == [False, False]
