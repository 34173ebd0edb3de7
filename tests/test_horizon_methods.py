"""The methods of the horizon benchmark, each against its formula or the one-process oracle."""

import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from oracle import LowPrecisionRing, peers_mean
from source_tree import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))
from horizon_codecs import INNER_LEVEL, OUTER_LEVEL, RoundTrip
from horizon_methods import Compressed, Method, TopK, TwoPhaseMean
from horizon_model import Parameter
from horizon_momentum import DeMo, Dion, TwoPhaseDeMo, dct
from horizon_training import NUM_WORKERS
from horizon_weights import Async, Decentralized, DesLoc, DiLoCo, LowPrecision, StreamingDiLoCo

LENGTH = 256
RATES = torch.ones(1, 1, 1)


def vector(length: int) -> Parameter:
    return Parameter("vector", torch.Size([length]), 0)


def steps_of(
    method: Method, num_steps: int, parameters: Sequence[Parameter] | None = None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each step's number, the workers' weights [W, N] before the method averages them, and after it."""
    weights = torch.randn(1, 1, LENGTH).repeat(1, NUM_WORKERS, 1)
    moments = [torch.randn(1, NUM_WORKERS, LENGTH) for _ in range(2)]
    method.bind(weights, moments, num_steps, parameters or [vector(LENGTH)])
    for step in range(1, num_steps + 1):
        weights.add_(torch.randn_like(weights))
        before = weights[0].clone()
        method.after_step(step)
        yield step, before, weights[0].clone()


def peers(values: Tensor, round_index: int) -> Tensor:
    return torch.from_numpy(np.stack(peers_mean(list(values.numpy()), None, round_index)))


def everyone(values: Tensor, round_index: int) -> Tensor:
    return values.mean(0).expand_as(values)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"nesterov": False}, {"outer_lr": 1.0, "outer_momentum": 0.0}, {"outer_momentum": 0.9, "short_last": 0.25}],
)
def test_diloco_steps_torchs_sgd_with_the_mean_of_the_progress(arguments: dict[str, float]) -> None:
    method = DiLoCo(6, codec=None, **arguments)
    num_steps = 40
    rounds = {6, 12, 18, 24, 30, 36, 40} | ({32, 34, 36, 38, 40} if method.short_last else set())
    theta = torch.zeros(LENGTH)
    sgd = torch.optim.SGD(
        [theta], method.outer_lr, method.outer_momentum, nesterov=method.nesterov and method.outer_momentum > 0
    )
    for step, before, after in steps_of(method, num_steps):
        if step == 1:
            theta.copy_(method._theta[0, 0])
        if step in rounds:
            theta.grad = (theta - before).mean(0)
            sgd.step()
            torch.testing.assert_close(after, theta.expand_as(after), atol=1e-5, rtol=1e-5)
        else:
            assert torch.equal(before, after)
    assert method.bytes_a_step() == pytest.approx(4 * LENGTH * 1.5 * len(rounds) / num_steps)


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (1, 4), (2, 0), (2, 2)])
def test_streaming_diloco_adds_the_change_of_a_fragment_after_the_delay(fragments: int, delay: int) -> None:
    half = LENGTH // 2
    method = StreamingDiLoCo(6, codec=None, fragments=fragments, delay=delay)
    parameters = [vector(half), Parameter("other", torch.Size([half]), half)]
    columns = [slice(0, LENGTH)] if fragments == 1 else [slice(0, half), slice(half, LENGTH)]
    changes: dict[int, Tensor] = {}
    num_steps = 42  # the last round begins in the last step
    for step, before, after in steps_of(method, num_steps, parameters):
        if step == 1:
            thetas = [method._theta[0, 0, part].clone() for part in columns]
            optimizers = [torch.optim.SGD([theta], 0.7, 0.6, nesterov=True) for theta in thetas]
        expected = before.clone()
        for index, part in enumerate(columns):
            if step >= 6 // fragments and (step - (index + 1) * 6 // fragments) % 6 == 0:
                thetas[index].grad = (thetas[index] - before[:, part]).mean(0)
                optimizers[index].step()
                changes[step + delay] = torch.zeros_like(before)
                changes[step + delay][:, part] = thetas[index] - before[:, part]
        for due in [due for due in changes if due == step or step == num_steps]:
            expected += changes.pop(due)
        torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-5)


def test_residuals_decay_from_round_to_round() -> None:
    values = torch.randn(3, 1, NUM_WORKERS, LENGTH)
    two_phase = TwoPhaseMean("two_bits", values[0], [LENGTH], 0.9)
    encode = RoundTrip("two_bits", [LENGTH])
    residual, residual_of_mean = torch.zeros_like(values[0]), torch.zeros(1, 1, LENGTH)
    for value in values:
        with_residual = 0.9 * residual + value
        residual = with_residual - encode(with_residual)
        mean = 0.9 * residual_of_mean + encode(with_residual).mean(1, keepdim=True)
        residual_of_mean = mean - encode(mean)
        torch.testing.assert_close(two_phase(value), encode(mean), atol=1e-5, rtol=1e-5)


def test_des_loc_averages_each_moment_at_its_own_interval() -> None:
    method = DesLoc(2, moments_every=(3, 4))
    for step, _, _ in steps_of(method, 12):
        for moment, interval in zip(method.moments, (3, 4), strict=True):
            assert torch.equal(moment, moment[:, :1].expand_as(moment)) == (step % interval == 0)
            moment.add_(torch.randn_like(moment))
    assert method.bytes_a_step() == pytest.approx(DiLoCo.bytes_a_step(method) + 4 * LENGTH * 1.5 * (1 / 3 + 1 / 4))


@pytest.mark.parametrize(("mode", "average"), [("all", everyone), ("shift_one", peers)])
@pytest.mark.parametrize("on_time", [False, True])
def test_decentralized_averages_on_time_or_a_step_late(
    mode: str, average: Callable[[Tensor, int], Tensor], on_time: bool
) -> None:
    late = torch.zeros(NUM_WORKERS, LENGTH)  # the first round is of equal weights
    for step, before, after in steps_of(Decentralized(mode=mode, on_time=on_time), 5):
        expected = average(before, step - 1) if on_time else before + late
        torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-5)
        late = average(after, step) - after


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_async_adds_the_difference_of_its_snapshot_after_the_delay(delay: int) -> None:
    difference = torch.zeros(NUM_WORKERS, LENGTH)
    for step, before, after in steps_of(Async(interval=3, delay=delay), 12):
        if step % 3 == 0:
            difference = everyone(before, 0) - before
        is_applied = step % 3 == delay and step >= 3
        torch.testing.assert_close(after, before + difference * is_applied, atol=1e-5, rtol=1e-5)


def test_low_precision_is_the_oracles_ring() -> None:
    ring: LowPrecisionRing | None = None
    for _, before, after in steps_of(LowPrecision(), 4):
        if ring is None:  # the first round makes the replicas different
            ring = LowPrecisionRing(list(after.numpy()), [LENGTH], is_buffer=False)
            continue
        difference = (after - torch.from_numpy(np.stack(ring.round(list(before.numpy()))))).abs()
        # A sum in another order moves few elements to the next code.
        assert (difference < 1e-5).float().mean() > 0.97


def test_exact_means_make_weights_equal() -> None:
    weights = torch.randn(1, NUM_WORKERS, 256)
    for method in (Decentralized(exact_last=0.1), Async(exact_last=0.1, moments_every=10)):
        method.bind(weights.clone(), [], 10, [vector(256)])
        for step in range(1, 11):
            method.after_step(step)
        torch.testing.assert_close(method.weights, weights.mean(1, keepdim=True).expand_as(weights))
        expected = 8 * 256 * 3 / 4 * (0.9 * (1 if isinstance(method, Decentralized) else 1 / 4) + 0.1)
        assert method.bytes_a_step() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("method", "largest_error"), [(Compressed("minmax_uint4", decay=1.0), 0.02), (TopK(ratio=0.25), 0.2)]
)
def test_error_feedback_sends_everything_in_the_end(method: Method, largest_error: float) -> None:
    method.bind(torch.zeros(1, NUM_WORKERS, 256), [], 100, [vector(256)])
    grads = torch.randn(1, NUM_WORKERS, 256)
    total = torch.zeros(1, 1, 256)
    for _ in range(100):
        sent = grads.clone()
        method.average_gradients(sent, RATES)
        total += sent[:, :1]
    torch.testing.assert_close(total / 100, grads.mean(1, keepdim=True), atol=largest_error, rtol=0)


@pytest.mark.parametrize("name", ["two_bits", "two_bits_table"])
def test_two_bits_of_normal_values_lose_the_known_part_of_their_variance(name: str) -> None:
    values = 3 + 0.1 * torch.randn(4, 128 * 64)
    decoded = RoundTrip(name, (128 * 64,))(values)
    assert ((decoded - values).var() / values.var()).item() == pytest.approx(0.1175, abs=0.01)
    block = values[0, :128]
    levels = ((decoded[0, :128] - block.mean().bfloat16()).abs() / block.std()).sort().values
    inner_error, outer_error = (
        (0.01, 0.03) if name == "two_bits" else (0.25, 0.4)
    )  # means of bins vary from block to block
    assert levels[0].item() == pytest.approx(INNER_LEVEL, abs=inner_error)
    assert levels[-1].item() == pytest.approx(OUTER_LEVEL, abs=outer_error)
    assert torch.isfinite(RoundTrip(name, (64,))(torch.zeros(1, 64))).all()


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
    method.average_gradients(grads, RATES)
    expected = coefficients.mean(1, keepdim=True)
    expected.flatten(-2)[:, 0, 0, large[0]] = coefficients.flatten(-2)[0, 1:, 0, large[0]].mean()
    expected.flatten(-2)[:, 0, 0, elsewhere] = 2.0  # the mean of those that sent it
    result = dct(64) @ grads.view_as(coefficients) @ dct(64).mT
    torch.testing.assert_close(result, expected.expand_as(result), atol=1e-4, rtol=1e-4)
    kept = dct(64) @ method.state[0].view_as(coefficients) @ dct(64).mT
    assert kept[0, 0, 0].flatten()[large[0]].item() == pytest.approx(1.5, abs=1e-4)
    assert kept.abs().sum().item() == pytest.approx(1.5, abs=0.1)
    assert method.bytes_a_step() == 3 * 2 * 32 * 4


def test_demo_in_two_phases_loses_nothing() -> None:
    """Without decay, all gradients are in what was sent, in the momenta, or in the residual of the mean."""
    method = TwoPhaseDeMo(decay=1.0)
    method.bind(torch.zeros(1, NUM_WORKERS, 64 * 64), [], 1, [Parameter("matrix", torch.Size([64, 64]), 0)])
    given, sent = torch.zeros(64, 64), torch.zeros(64, 64)
    for _ in range(3):
        grads = torch.randn(1, NUM_WORKERS, 64 * 64)
        given += grads.mean(1).view(64, 64)
        method.average_gradients(grads, RATES)
        assert torch.equal(grads, grads[:, :1].expand_as(grads))
        sent += grads[0, 0].view(64, 64)
    momenta, residual = method.state
    kept = momenta.mean(1).view(64, 64) + dct(64).mT @ residual.view(64, 64) @ dct(64)
    torch.testing.assert_close(sent + kept, given, atol=1e-4, rtol=0)
    assert sent.abs().max() > 0.1
    assert method.bytes_a_step() == 1.5 * 4 * 32


def test_dion_of_local_momenta_equals_dion_of_the_mean_gradient() -> None:
    shape = torch.Size([24, 16])
    parameters = [Parameter("layers.0.matrix", shape, 0), Parameter("vector", torch.Size([8]), 384)]
    local, joint = Dion(4), Dion(4)
    local.bind(torch.zeros(1, NUM_WORKERS, 392), [], 1, parameters)
    joint.bind(torch.zeros(1, 1, 392), [], 1, parameters)
    for _ in range(3):
        grads = torch.randn(1, NUM_WORKERS, 392)
        mean = grads.mean(1, keepdim=True)
        local.average_gradients(grads, RATES)
        joint.average_gradients(mean, RATES)
        torch.testing.assert_close(grads, mean.expand_as(grads), atol=1e-5, rtol=1e-4)
    update = grads[0, 0, :384].view(shape)
    assert torch.linalg.matrix_rank(update) == 4
    assert local.bytes_a_step() == 4 * 1.5 * (4 * 40 + 8)


def test_dion_of_full_rank_orthogonalizes_the_momentum() -> None:
    method = Dion(16)
    shape = torch.Size([16, 16])
    method.bind(torch.zeros(1, 1, 256), [], 1, [Parameter("layers.0.matrix", shape, 0)])
    gradient = torch.randn(1, 1, 256)
    for _ in range(200):  # with one gradient, power iteration converges to the singular vectors
        update = gradient.clone()
        method.average_gradients(update, RATES)
    u, _, v = torch.linalg.svd(gradient.view(shape))
    torch.testing.assert_close(update.view(shape) / (0.2 * 16**0.5), u @ v, atol=0.05, rtol=0)
