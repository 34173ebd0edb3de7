"""The horizon benchmark's many trainings in one process, against torch's optimizers and the package's codecs."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from source_tree import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))
from convergence_sweep import TUNING_SEED
from horizon_codecs import INNER_LEVEL, OUTER_LEVEL, RoundTrip, block_runs
from horizon_methods import DDP, Async, Compressed, Decentralized, DiLoCo, LowPrecision, Method
from horizon_model import NUM_HEADS, Parameter, StackedGPT
from horizon_momentum import DeMo, Dion, dct
from horizon_optimizers import AdamW, Muon, Tick
from horizon_rows import RUNGS, missing_trials
from horizon_training import NUM_WORKERS, Group, Setup, Task, Trainings
from torchbagua.cli.demo.model import GPT
from torchbagua.cli.demo.train import learning_rate_factor
from torchbagua.codecs.blocks import TensorSpec
from torchbagua.codecs.lookup import by_name

STEPS = 6


@pytest.fixture(scope="module")
def model() -> StackedGPT:
    return StackedGPT(width=32, num_layers=2)


@pytest.fixture(scope="module")
def task(model: StackedGPT) -> Task:
    text = torch.randint(256, (20_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Task.from_text(model, text, torch.device("cpu"), num_held_out=8)


def vector(length: int) -> Parameter:
    return Parameter("vector", torch.Size([length]), 0)


def train(task: Task, method: Method, *, inner: str = "adamw", sequences: int = 2, rates: tuple[float, ...] = (1e-2,)):
    trainings = Trainings(task, inner, [Group(method, [Setup(0, rate) for rate in rates])], sequences, STEPS)
    trainings.run()
    return trainings


def test_losses_and_gradients_are_those_of_the_gpt(model: StackedGPT) -> None:
    windows = torch.randint(256, (3, 2, 17))
    flat = torch.stack([model.initial_weights(seed).double() for seed in range(3)])
    leaves = [view.requires_grad_() for view in model.views(flat)]
    losses = model.losses(leaves, windows)
    grads = torch.autograd.grad(losses.sum(), leaves)
    for replica in range(3):
        torch.manual_seed(replica)
        gpt = GPT(width=32, num_layers=2, num_heads=NUM_HEADS).double()
        logits = gpt(windows[replica, :, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[replica, :, 1:].flatten())
        loss.backward()
        torch.testing.assert_close(losses[replica], loss)
        named = dict(gpt.named_parameters())
        for parameter, grad in zip(model.parameters, grads, strict=True):
            torch.testing.assert_close(grad[replica], named[parameter.name].grad)


@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_the_optimizers_are_torchs_with_a_rate_for_each_training(model: StackedGPT, inner: str) -> None:
    rates = (1e-3, 3e-3)
    weights = torch.stack([model.initial_weights(seed) for seed in range(2)])[:, None].repeat(1, 2, 1)
    optimizer = (AdamW if inner == "adamw" else Muon)(weights, model)
    ours, theirs = [], []
    for training, rate in enumerate(rates):
        for worker in range(2):
            parameters = [view[0].clone() for view in model.views(weights[training, worker, None])]
            hidden, rest = parameters[: len(model.hidden_parameters)], parameters[len(model.hidden_parameters) :]
            ours.append((training, worker, parameters))
            if inner == "adamw":
                theirs.append([torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95))])
            else:
                muon = torch.optim.Muon(hidden, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
                theirs.append([muon, torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95))])
    for step in range(1, 4):
        grads = torch.randn_like(weights)
        corrections = torch.tensor([1 - 0.9**step, math.sqrt(1 - 0.95**step)])
        optimizer.step(grads, Tick(torch.tensor(rates).view(2, 1, 1), *corrections.unbind()))
        for (training, worker, parameters), optimizers in zip(ours, theirs, strict=True):
            for parameter, grad in zip(parameters, model.views(grads[training, worker, None]), strict=True):
                parameter.grad = grad[0]
            for theirs_of_replica in optimizers:
                theirs_of_replica.step()
    # Products of bfloat16 matrices in another order differ by some of its steps of 2^-8.
    tolerance = 1e-6 if inner == "adamw" else 2e-2 * rates[1] * 0.2 * math.sqrt(128) * 3
    for training, worker, parameters in ours:
        flat = torch.cat([parameter.flatten() for parameter in parameters])
        torch.testing.assert_close(weights[training, worker], flat, atol=tolerance, rtol=1e-5)


@pytest.mark.parametrize("name", ["minmax_uint8", "minmax_uint4"])
def test_a_round_trip_equals_the_packages_codec(name: str) -> None:
    lengths = (4096, 3000, 64, 7)
    values = torch.randn(2, sum(lengths)) * torch.logspace(-6, 3, sum(lengths))
    values[0, :64] = 0.0
    values[1, 4096:4200] += 100
    round_trip = RoundTrip(name, lengths)
    codec = by_name(name)
    spec = TensorSpec(lengths, torch.float32, torch.device("cpu"), "values")
    layout = codec.layout(spec, (0, sum(lengths)))
    for row, decoded in zip(values, round_trip(values), strict=True):
        wire, expected = torch.zeros(layout.num_bytes, dtype=torch.uint8), torch.empty_like(row)
        codec.encode(row, layout, wire)
        codec.decode(wire, layout, expected)
        assert torch.equal(decoded, expected)
    assert round_trip.wire_bytes == layout.num_bytes


@pytest.mark.parametrize("name", ["two_bits", "two_bits_table"])
def test_two_bits_of_normal_values_lose_the_known_part_of_their_variance(name: str) -> None:
    values = 3 + 0.1 * torch.randn(4, 128 * 64)
    decoded = RoundTrip(name, (128 * 64,))(values)
    assert ((decoded - values).var() / values.var()).item() == pytest.approx(0.1175, abs=0.01)
    # The bfloat16 mean is 3 or the next number.
    levels = ((decoded[0, :128] - 3).abs() / 0.1).sort().values
    assert levels[0] == pytest.approx(INNER_LEVEL, abs=0.25)
    assert levels[-1] == pytest.approx(OUTER_LEVEL, abs=0.4)
    assert torch.isfinite(RoundTrip(name, (64,))(torch.zeros(1, 64))).all()


def test_blocks_do_not_cross_parameters() -> None:
    assert block_runs((256, 300, 64, 64), 128) == [(0, 4, 128), (512, 1, 44), (556, 2, 64)]


@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_ddp_equals_one_worker_with_the_joint_batch(task: Task, inner: str) -> None:
    trained = train(task, DDP(), inner=inner, rates=(1e-3, 3e-3))
    assert torch.equal(trained.weights, trained.weights[:, :1].expand_as(trained.weights))
    generators = [torch.Generator().manual_seed(worker) for worker in range(NUM_WORKERS)]
    flat = task.model.initial_weights(0)[None].repeat(2, 1)
    optimizer = (AdamW if inner == "adamw" else Muon)(flat[:, None], task.model)
    for step in range(STEPS):
        starts = torch.cat([torch.randint(len(task.train) - 64, (2, 1), generator=one) for one in generators])
        windows = task.train[starts + torch.arange(65)].long().expand(2, -1, -1)
        leaves = [view.detach().requires_grad_() for view in task.model.views(flat)]
        grads = torch.autograd.grad(task.model.losses(leaves, windows).sum(), leaves)
        rates = torch.tensor([1e-3, 3e-3]).view(2, 1, 1) * learning_rate_factor(step, STEPS)
        corrections = torch.tensor([1 - 0.9 ** (step + 1), math.sqrt(1 - 0.95 ** (step + 1))])
        joint = torch.cat([grad.flatten(1) for grad in grads], 1)[:, None]
        optimizer.step(joint, Tick(rates, *corrections.unbind()))
    # Adam divides gradients of about its epsilon by themselves, so rounding changes a few weights by a whole step.
    difference = (trained.weights[:, 0] - flat).abs()
    assert difference.mean() < 1e-5
    assert trained.losses[-1].tolist() == pytest.approx(_losses(task, flat), abs=1e-4)


def _losses(task: Task, flat: Tensor) -> list[float]:
    losses: list[float] = task.model.losses(task.model.views(flat), task.held_out.expand(len(flat), -1, -1)).tolist()
    return losses


def test_diloco_of_one_step_and_rate_1_averages_weights(task: Task) -> None:
    diloco = train(task, DiLoCo(1, codec=None, outer_lr=1.0, outer_momentum=0.0))
    averaged = train(task, Decentralized(on_time=True))
    torch.testing.assert_close(diloco.weights, averaged.weights, atol=1e-6, rtol=1e-5)


def test_late_means_conserve_the_mean_of_the_workers(task: Task) -> None:
    class Alone(Method):
        def bytes_a_step(self) -> float:
            return 0.0

    alone = train(task, Alone())
    for method in (Decentralized(), Decentralized(mode="shift_one"), Async(interval=2, delay=1)):
        trained = train(task, method)
        spread, spread_alone = ((one.weights - one.weights.mean(1, keepdim=True)).norm() for one in (trained, alone))
        assert 0 < spread < spread_alone
        late = trained.weights.clone()
        if isinstance(method, Decentralized):
            late += method._difference
        torch.testing.assert_close(late.mean(1), trained.weights.mean(1), atol=1e-6, rtol=1e-5)


def test_exact_means_make_weights_equal() -> None:
    weights = torch.randn(1, NUM_WORKERS, 256)
    for method in (Decentralized(exact_last=0.1), Async(exact_last=0.1, moments_every=10)):
        method.bind(weights.clone(), [], 10, [vector(256)])
        for step in range(1, 11):
            method.after_step(step)
        torch.testing.assert_close(method.weights, weights.mean(1, keepdim=True).expand_as(weights))
        expected = 8 * 256 * 3 / 4 * (0.9 * (1 if isinstance(method, Decentralized) else 1 / 4) + 0.1)
        assert method.bytes_a_step() == pytest.approx(expected)


def test_shift_one_pairs_every_two_workers_of_different_halves() -> None:
    method = Decentralized(mode="shift_one", on_time=True)
    method.bind(torch.arange(4.0).view(1, 4, 1).clone(), [], 4, [vector(1)])
    assert method._peers(method.weights, 0).flatten().tolist() == [1, 2, 1, 2]
    assert method._peers(method.weights, 1).flatten().tolist() == [1.5, 1.5, 1.5, 1.5]


def test_error_feedback_sends_everything_in_the_end() -> None:
    method = Compressed("minmax_uint4", decay=1.0)
    method.bind(torch.zeros(1, NUM_WORKERS, 256), [], 100, [vector(256)])
    grads = torch.randn(1, NUM_WORKERS, 256)
    total = torch.zeros(1, 1, 256)
    for _ in range(100):
        sent = grads.clone()
        method.average_gradients(sent)
        total += sent[:, :1]
    torch.testing.assert_close(total / 100, grads.mean(1, keepdim=True), atol=0.02, rtol=0)


def test_low_precision_follows_the_ring(task: Task) -> None:
    trained = train(task, LowPrecision())
    assert (trained.weights - trained.weights.mean(1, keepdim=True)).norm() > 0
    assert trained.losses[-1].isfinite().all()


def test_demo_sends_the_largest_coefficients_and_keeps_the_rest() -> None:
    torch.testing.assert_close(dct(64) @ dct(64).mT, torch.eye(64), atol=1e-5, rtol=0)
    shape = torch.Size([128, 64])
    coefficients = torch.zeros(1, NUM_WORKERS, 2, 64, 64)
    large = torch.randperm(64 * 64)[:32]
    coefficients.flatten(-2)[..., large] = torch.randn(1, NUM_WORKERS, 2, 32) + 10
    coefficients.flatten(-2)[:, 0, 0, large[0]] = 1.5  # less than `elsewhere`, which the first worker sends instead
    elsewhere = next(index for index in range(64 * 64) if index not in large)
    coefficients.flatten(-2)[:, 0, 0, elsewhere] = 2.0
    grads = (dct(64).mT @ coefficients @ dct(64)).flatten(2)
    method = DeMo()
    method.bind(torch.zeros_like(grads), [], 1, [Parameter("matrix", shape, 0)])
    method.average_gradients(grads)
    expected = coefficients.mean(1, keepdim=True)
    expected.flatten(-2)[:, 0, 0, large[0]] = coefficients.flatten(-2)[0, 1:, 0, large[0]].mean()
    expected.flatten(-2)[:, 0, 0, elsewhere] = 2.0  # the mean of those that sent it
    result = dct(64) @ grads.view_as(coefficients) @ dct(64).mT
    torch.testing.assert_close(result, expected.expand_as(result), atol=1e-4, rtol=1e-4)
    kept = dct(64) @ method.state[0].view_as(coefficients) @ dct(64).mT
    assert kept[0, 0, 0].flatten()[large[0]].item() == pytest.approx(1.5, abs=1e-4)
    assert kept.abs().sum().item() == pytest.approx(1.5, abs=0.1)
    assert method.bytes_a_step() == 3 * 2 * 32 * 4


def test_dion_of_local_momenta_equals_dion_of_the_mean_gradient() -> None:
    shape = torch.Size([24, 16])
    parameters = [Parameter("layers.0.matrix", shape, 0), Parameter("vector", torch.Size([8]), 384)]
    local, joint = Dion(4), Dion(4)
    local.bind(torch.zeros(1, NUM_WORKERS, 392), [], 1, parameters)
    joint.bind(torch.zeros(1, 1, 392), [], 1, parameters)
    for _ in range(3):
        grads = torch.randn(1, NUM_WORKERS, 392)
        mean = grads.mean(1, keepdim=True)
        local.average_gradients(grads)
        joint.average_gradients(mean)
        torch.testing.assert_close(grads, mean.expand_as(grads), atol=1e-5, rtol=1e-4)
    update = grads[0, 0, :384].view(shape)
    assert torch.linalg.matrix_rank(update) == 4
    assert local.bytes_a_step() == 4 * 1.5 * (4 * 40 + 8)


def test_dion_of_full_rank_orthogonalizes_the_momentum() -> None:
    method = Dion(16)
    shape = torch.Size([16, 16])
    method.bind(torch.zeros(1, 1, 256), [], 1, [Parameter("layers.0.matrix", shape, 0)])
    gradient = torch.randn(1, 1, 256)
    for _ in range(400):  # with one gradient, power iteration converges to the singular vectors
        update = gradient.clone()
        method.average_gradients(update)
    u, _, v = torch.linalg.svd(gradient.view(shape))
    torch.testing.assert_close(update.view(shape), u @ v, atol=0.05, rtol=0)


@pytest.mark.parametrize(("method", "inner"), [(DeMo(), "sign"), (Dion(2), "orthogonal")])
def test_methods_that_send_momentum_keep_weights_equal(task: Task, method: Method, inner: str) -> None:
    trained = train(task, method, inner=inner, rates=(3e-3,))
    assert torch.equal(trained.weights, trained.weights[:, :1].expand_as(trained.weights))
    assert trained.losses[-1] < trained.losses[0]


def test_a_diverged_training_does_not_change_the_others(task: Task) -> None:
    both = train(task, DDP(), rates=(1e-2, math.inf))
    assert not both.losses[-1][1].isfinite()
    assert both.losses[-1][0].item() == pytest.approx(train(task, DDP()).losses[-1].item(), abs=1e-5)


def test_a_row_tries_rates_then_more_seeds() -> None:
    records: dict[str, list[dict[str, object]]] = {"muon_ddp": []}
    done = []
    while trials := missing_trials("muon_ddp", records, RUNGS, True):
        done.append([(trial.rung, trial.seed) for trial in trials])
        for trial in trials:
            loss = abs(trial.rung - 2.4)
            records["muon_ddp"].append({"rung": trial.rung, "seed": trial.seed, "held_out_losses": [loss]})
    assert done == [
        [(rung, TUNING_SEED) for rung in RUNGS],
        [(3, TUNING_SEED)],
        [(2, seed) for seed in (0, 1, 2, 3)],
    ]
    assert [trial.seed for trial in missing_trials("outer_30_1.0_0.0", records, RUNGS, True)] == []


def test_a_short_run_and_its_table(tmp_path: Path) -> None:
    path = tmp_path / "horizon.json"
    command = [sys.executable, REPOSITORY / "benchmarks" / "horizon.py", "--quick", "--width", "32"]
    command += ["--layers", "1", "--json", path, "--rows", "adamw_ddp", "muon_diloco_10"]
    for _ in range(2):  # the second continues: nothing is missing
        finished = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
        assert "| DDP | AdamW |" in finished.stdout
    assert len(json.loads(path.read_text())["trainings"]) == 5 + 3
