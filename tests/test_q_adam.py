"""QAdam with DDP: every step of every rank equals the oracle's, in the warm-up, at the switch and after it."""

import copy
import gc
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from q_adam_life import (
    NUM_STEPS,
    NUM_WARM,
    SETTINGS,
    ChannelsLast,
    Life,
    Tensors,
    Trainer,
    check_lives,
    equal,
    initial_of,
    tensors_in,
    weights_with_and_without_scale,
)
from ranks import run_ranks
from training import Branches, Tower, build


@pytest.mark.parametrize(
    ("size", "nodes"),
    [(2, None), (4, None), (8, None), (4, [0, 0, 1, 1]), (8, [0, 0, 0, 0, 1, 1, 1, 1]), (3, [0, 0, 1])],
)
@pytest.mark.parametrize("bucket_cap_mb", [25, 0.01])
def test_a_whole_run_equals_the_oracle(
    device: torch.device, size: int, nodes: list[int] | None, bucket_cap_mb: float
) -> None:
    model = build(Tower).to(device)

    def body(group: dist.ProcessGroup) -> Life:
        trainer = Trainer(group, model, bucket_cap_mb=bucket_cap_mb)
        impl = trainer.hook(nodes)
        for _ in range(NUM_STEPS):
            trainer.step()
        impl.close()
        return trainer.life

    check_lives(run_ranks(size, body, device=device), initial_of(model), nodes)


def test_accumulation_moves_the_momentum_once() -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> Life:
        trainer = Trainer(group, model)
        trainer.num_micro_batches = 3
        impl = trainer.hook()
        for _ in range(NUM_STEPS):
            trainer.step()
        impl.close()
        return trainer.life

    check_lives(run_ranks(2, body), initial_of(model))


def test_two_synchronised_backward_passes_before_a_step_move_the_momentum_once() -> None:
    """Each rank sends the mean of the first pass plus its gradient of the second: values are rounded twice."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> dict[str, tuple[torch.Tensor, ...]]:
        trainer = Trainer(group, model)
        trainer.hook()
        for _ in range(NUM_STEPS):
            trainer.step()
        before = {name: trainer.optimizer.state[p]["exp_avg"].clone() for name, p in trainer.named.items()}
        trainer.life.local.append({})
        local = copy.deepcopy(trainer.ddp.module)
        trainer.optimizer.zero_grad()
        local.zero_grad()
        for _ in range(2):
            x = torch.randn(6, 10, generator=trainer.data)
            for module in (trainer.ddp, local):
                module(x, 0).square().sum().backward()
        trainer.optimizer.step()
        return {
            name: (
                p.grad,
                trainer.named[name].grad,
                before[name],
                trainer.optimizer.state[trainer.named[name]]["exp_avg"],
                p,
            )
            for name, p in local.named_parameters()
        }

    first, second = run_ranks(2, body)
    beta1, decay = SETTINGS["betas"][0], SETTINGS["weight_decay"]
    for name, (own, gradient, before, after, weight) in first.items():
        mean = (own + second[name][0]) / 2
        assert torch.equal(gradient, second[name][1])
        # A momentum is rounded to 8 bits twice, and a gradient has 1 / (1 - beta1) of its error.
        momentum = beta1 * before + (1 - beta1) * mean
        step = float(momentum.max() - momentum.min()) / 255 / (1 - beta1)
        assert torch.allclose(gradient, mean, rtol=1e-4, atol=4 * step), name
        torch.testing.assert_close(after, beta1 * before + (1 - beta1) * (gradient + decay * weight.detach()))


@pytest.mark.parametrize("as_views", [False, True])
def test_parameters_in_another_memory_order(as_views: bool) -> None:
    """DDP flattens them in memory order; each is a single block here, whose codes do not depend on the order."""
    model = build(ChannelsLast)
    assert not model.convolution.weight.is_contiguous()
    assert not model.transposed.is_contiguous()

    def body(group: dist.ProcessGroup) -> Life:
        trainer = Trainer(group, model, gradient_as_bucket_view=as_views)
        impl = trainer.hook()
        for _ in range(NUM_STEPS):
            trainer.step()
        impl.close()
        return trainer.life

    check_lives(run_ranks(2, body), initial_of(model))


def test_attach_equals_the_standalone_hook() -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> tuple[Life, Life]:
        hooked, attached = Trainer(group, model), Trainer(group, model)
        impl = hooked.hook()
        with tb.attach(attached.ddp, attached.optimizer, tb.QAdamAlgorithm(attached.optimizer)):
            for _ in range(NUM_STEPS):
                hooked.step()
                attached.step()
        impl.close()
        return hooked.life, attached.life

    for hooked, attached in run_ranks(2, body):
        for step in range(NUM_STEPS):
            assert all(torch.equal(attached.weights[step][n], w) for n, w in hooked.weights[step].items())


def test_only_the_rounding_of_the_mean_differs_from_adam_with_ddp() -> None:
    """With four ranks both means are exact if the sums are: with gradients of few bits the means are equal."""
    model = build(lambda: nn.Linear(10, 3))

    def body(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        results = []
        for is_mine in (True, False):
            ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
            parameters = ddp.parameters()
            optimizer = tb.QAdamOptimizer(parameters, warmup_steps=50) if is_mine else torch.optim.Adam(parameters)
            impl = None
            if is_mine:
                impl = tb.QAdamAlgorithm(optimizer).reify(group)
                ddp.register_comm_hook(impl, tb.comm_hook)
            data = torch.Generator().manual_seed(group.rank())
            for _ in range(40):
                optimizer.zero_grad()
                ddp(torch.randint(-8, 8, (6, 10), generator=data).float()).sum().backward()
                optimizer.step()
            if impl is not None:
                impl.close()
            results.append(ddp.module.weight.detach().clone())
        return results[0], results[1]

    for mine, theirs in run_ranks(4, body):
        assert torch.equal(mine, theirs)


def test_parameters_that_some_or_no_ranks_use() -> None:
    """Each parameter has a separate warm-up, so a bucket may contain parameters in and past their warm-up."""
    model = build(Branches)

    def body(group: dist.ProcessGroup) -> tuple[Tensors, dict[str, bool]]:
        trainer = Trainer(group, model, find_unused_parameters=True)
        # Ranks use both branches in turn, by rank and step; no rank uses "never".
        with tb.attach(trainer.ddp, trainer.optimizer, tb.QAdamAlgorithm(trainer.optimizer)):
            for _ in range(NUM_STEPS):
                trainer.step()
            past = {name: trainer.optimizer.is_past_warmup(p) for name, p in trainer.named.items()}
        return trainer.life.weights[-1], past

    (first, past), *of_other_ranks = run_ranks(2, body)
    for weights, _ in of_other_ranks:
        assert all(torch.equal(weights[name], value) for name, value in first.items())
    assert past["left.weight"]
    assert not past["never.weight"]
    assert torch.equal(first["never.weight"], model.never.weight)


def test_a_bucket_of_parameters_in_and_past_their_warm_up() -> None:
    model = build(lambda: Tower((10, 20, 5, 1)))

    def body(group: dist.ProcessGroup) -> Tensors:
        trainer = Trainer(group, model)
        late = model_part = list(trainer.ddp.module.layers[1].parameters())
        names = [name for name, p in trainer.named.items() if any(p is parameter for parameter in model_part)]
        early = [p for name, p in trainer.named.items() if name not in names]
        trainer.optimizer = tb.QAdamOptimizer(
            [{"params": early}, {"params": late, "warmup_steps": 5}], warmup_steps=2, **SETTINGS
        )
        impl = trainer.hook()
        for _ in range(4):
            trainer.step()
        impl.close()
        # In the fourth step, early parameters were past their warm-up and late parameters in it.
        local, averaged = trainer.life.local[3], trainer.life.gradients[3]
        return {name: torch.stack((local[name], averaged[name])) for name in local}

    runs = run_ranks(2, body)
    for name in runs[0]:
        mean = (runs[0][name][0] + runs[1][name][0]) / 2
        if mean.numel() > 1:  # a block of one element is exact in 8 bits too
            assert torch.equal(runs[0][name][1], mean) == name.startswith("layers.1"), name
        assert torch.allclose(runs[0][name][1], mean, atol=0.05 * float(mean.abs().max()) + 1e-3)


def test_a_state_with_as_many_other_parameters_past_their_warm_up() -> None:
    """The loaded state decides which parameters are sent as momenta, not the number of those past their warm-up."""

    def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
        ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
        weight, bias = ddp.module.weight, ddp.module.bias

        def optimizer_with(warmup_of_weight: int, warmup_of_bias: int) -> tb.QAdamOptimizer:
            groups = [
                {"params": [weight], "warmup_steps": warmup_of_weight},
                {"params": [bias], "warmup_steps": warmup_of_bias},
            ]
            return tb.QAdamOptimizer(groups, lr=0.01)

        def step(optimizer: tb.QAdamOptimizer, index: int) -> None:
            data = torch.Generator().manual_seed(10 * index + group.rank())
            optimizer.zero_grad()
            ddp(torch.randn(3, 4, generator=data)).square().sum().backward()
            optimizer.step()

        def run(optimizer: tb.QAdamOptimizer, steps: range) -> None:
            for index in steps:
                step(optimizer, index)

        # The bias is past its warm-up.
        earlier = optimizer_with(100, 1)
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
            results.append(torch.cat([weight.detach().flatten(), bias.detach()]))
        return results

    for fresh, reloaded in run_ranks(2, body):
        assert torch.equal(fresh, reloaded)


@pytest.mark.parametrize("stop", [NUM_WARM - 1, NUM_WARM, NUM_WARM + 2])
def test_resume_bit_for_bit(stop: int) -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> tuple[Tensors, Tensors]:
        first = Trainer(group, model, bucket_cap_mb=0.01)
        with tb.attach(first.ddp, first.optimizer, tb.QAdamAlgorithm(first.optimizer)) as attachment:
            for step in range(NUM_STEPS):
                if step == stop:
                    file = io.BytesIO()
                    torch.save(
                        {
                            "model": first.ddp.module.state_dict(),
                            "optimizer": first.optimizer.state_dict(),
                            "attachment": attachment.state_dict(),
                            "data": first.data.get_state(),
                        },
                        file,
                    )
                first.step()
        second = Trainer(group, model, bucket_cap_mb=0.01)
        second.life.weights += [{}] * stop
        with tb.attach(second.ddp, second.optimizer, tb.QAdamAlgorithm(second.optimizer)) as attachment:
            state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            second.ddp.module.load_state_dict(state["model"])
            second.optimizer.load_state_dict(state["optimizer"])
            attachment.load_state_dict(state["attachment"])
            second.data.set_state(state["data"])
            for _ in range(stop, NUM_STEPS):
                second.step()
        return first.life.weights[-1], second.life.weights[-1]

    for first, second in run_ranks(2, body):
        assert all(torch.equal(second[name], weight) for name, weight in first.items())


@pytest.mark.parametrize("gives_scaler", [True, False])
def test_a_step_that_amp_skips_leaves_no_trace(gives_scaler: bool) -> None:
    """Only one rank has an Inf: all skip; weights, moments and counters stay. Gradients are in the scaler's unit."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> tuple[float, bool]:
        trainer = Trainer(group, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        given = {"grad_scaler": scaler} if gives_scaler else {}
        changed = []

        def states() -> tuple[list[torch.Tensor], list[int]]:
            tensors = {"weights": initial_of(trainer.ddp.module), "moments": trainer.optimizer.state_dict()["state"]}
            return list(tensors_in(tensors)), trainer.optimizer.num_updates

        with tb.attach(trainer.ddp, trainer.optimizer, tb.QAdamAlgorithm(trainer.optimizer), **given):
            for step in range(NUM_STEPS):
                trainer.optimizer.zero_grad()
                x = torch.randn(6, 10, generator=trainer.data)
                if step == NUM_WARM + 1 and group.rank() == 1:
                    x[0, 0] = torch.inf
                tensors, num_updates = states()
                scaler.scale(trainer.ddp(x, 0).square().sum()).backward()
                scaler.step(trainer.optimizer)
                scaler.update()
                tensors_after, num_updates_after = states()
                changed.append(not equal(tensors, tensors_after))
                assert (num_updates == num_updates_after) == equal(tensors, tensors_after)
        return scaler.get_scale(), changed == [step != NUM_WARM + 1 for step in range(NUM_STEPS)]

    assert run_ranks(2, body) == [(512.0, True)] * 2


def test_the_loss_scale_changes_nothing() -> None:
    """It is a power of two, and the sent momentum is multiplied by it."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> tuple[Tensors, Tensors]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        return weights_with_and_without_scale(group, model, scaler)

    for plain, scaled in run_ranks(2, body):
        assert all(torch.equal(scaled[name], weight) for name, weight in plain.items())


def test_a_group_of_one_sends_nothing_and_trains_past_the_warm_up() -> None:
    model = build(Tower)
    recorder = tb.observe.Recorder()

    def body(group: dist.ProcessGroup) -> None:
        hooked, attached = Trainer(group, model), Trainer(group, model)
        impl = hooked.hook(error_feedback=True)
        algorithm = tb.QAdamAlgorithm(attached.optimizer)
        with tb.attach(attached.ddp, attached.optimizer, algorithm, observers=[recorder]):
            for _ in range(NUM_STEPS):
                hooked.step()
                attached.step()
        impl.close()
        for trainer in (hooked, attached):
            for local, averaged in zip(hooked.life.local, trainer.life.gradients, strict=True):
                assert local.keys() == averaged.keys() == trainer.named.keys()
                assert all(torch.equal(averaged[name], gradient) for name, gradient in local.items())

    run_ranks(1, body)
    assert recorder.bytes_sent == 0
    assert {event.phase for event in recorder.events} <= {"backward", "bucket", "step", "wait"}


def test_another_optimizer_of_the_same_model_is_averaged_in_full_precision() -> None:
    model = build(lambda: Tower((10, 20, 5, 1)))

    def body(group: dist.ProcessGroup) -> Tensors:
        trainer = Trainer(group, model, warmup_steps=1)
        of_sgd = [p for name, p in trainer.named.items() if name.startswith("layers.1")]
        own = [p for name, p in trainer.named.items() if not name.startswith("layers.1")]
        trainer.optimizer = tb.QAdamOptimizer(own, warmup_steps=1, **SETTINGS)
        sgd = torch.optim.SGD(of_sgd, lr=0.1)
        impl = trainer.hook()
        for _ in range(3):
            trainer.step()
            sgd.step()
            sgd.zero_grad()
        impl.close()
        local, averaged = trainer.life.local[2], trainer.life.gradients[2]
        return {name: torch.stack((local[name], averaged[name])) for name in local if name.startswith("layers.1")}

    runs = run_ranks(2, body)
    for name, (local, averaged) in runs[0].items():
        assert torch.equal(averaged, (local + runs[1][name][0]) / 2)


@pytest.mark.parametrize("num_steps", [80, pytest.param(2000, marks=pytest.mark.soak)])
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


@pytest.mark.parametrize(
    ("compression", "least", "most"), [("minmax_uint8", 0.97, 1.03), ("sign1bit", 1.3, float("inf"))]
)
def test_the_norm_that_clipping_sees(compression: str, least: float, most: float) -> None:
    """In 8 bits it is the mean gradient's norm; in one bit it is larger, and QAdamAlgorithm advises not to clip."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> Life:
        trainer = Trainer(group, model)
        impl = trainer.hook(compression=compression, error_feedback=True)
        for _ in range(60):
            trainer.step()
        impl.close()
        return trainer.life

    lives = run_ranks(4, body)

    def norm(gradients: Tensors) -> float:
        return float(torch.cat([gradient.flatten() for gradient in gradients.values()]).norm())

    ratios = []
    for step in range(NUM_WARM, 60):
        mean = {name: sum(life.local[step][name] for life in lives) / 4 for name in lives[0].local[step]}
        ratios.append(norm(lives[0].gradients[step]) / norm(mean))
    assert least < sorted(ratios)[len(ratios) // 2] < most
