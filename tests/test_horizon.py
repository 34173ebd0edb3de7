"""The horizon benchmark's many trainings in one process, against torch's optimizers and the package's codecs.

test_horizon_methods.py tests its methods.
"""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import warm_python
from source_tree import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))
import horizon_optimizers
import horizon_ranks
from convergence_sweep import TUNING_SEED
from horizon_codecs import RoundTrip, block_runs
from horizon_methods import DDP, Method, TopK
from horizon_model import NUM_HEADS, StackedGPT
from horizon_momentum import DeMo, Dion
from horizon_optimizers import OPTIMIZERS, AdamW, Muon, SlowAdamW, Tick
from horizon_rows import ROWS, RUNGS, Trial, is_current, missing_trials
from horizon_training import NUM_WORKERS, Group, Setup, Task, Trainings
from torchbagua.cli.demo.model import GPT
from torchbagua.cli.demo.train import learning_rate_factor
from torchbagua.codecs.base import TensorSpec, by_name

STEPS = 6


@pytest.fixture(scope="module")
def model() -> StackedGPT:
    return StackedGPT(width=32, num_layers=2)


@pytest.fixture(scope="module")
def task(model: StackedGPT) -> Task:
    text = torch.randint(256, (20_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Task.from_text(model, text, torch.device("cpu"), num_held_out=8)


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


@pytest.mark.parametrize("inner", ["adamw", "slow_adamw", "sign", "muon", "muon_of_sums"])
def test_the_optimizers_are_torchs_with_a_rate_for_each_training(
    model: StackedGPT, inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow AdamW without its two differences from AdamW is AdamW."""
    monkeypatch.setattr(horizon_optimizers, "SLOW_BETA", 0.9)
    monkeypatch.setattr(SlowAdamW, "share", 1.0)
    rates = (1e-3, 3e-3)
    weights = torch.stack([model.initial_weights(seed) for seed in range(2)])[:, None].repeat(1, 2, 1)
    optimizer = OPTIMIZERS[inner].create(weights, model)
    betas = (0.9, 0.95) if inner in ("adamw", "slow_adamw", "muon") else (0.0, 0.0)
    ours, theirs = [], []
    for training, rate in enumerate(rates):
        for worker in range(2):
            parameters = [view[0].clone() for view in model.views(weights[training, worker, None])]
            hidden, rest = parameters[: len(model.hidden_parameters)], parameters[len(model.hidden_parameters) :]
            ours.append((training, worker, parameters))
            if "muon" not in inner:
                theirs.append([torch.optim.AdamW(parameters, lr=rate, betas=betas)])
            else:
                momentum, share = (0.95, 1.0) if inner == "muon" else (0.0, 0.2)
                muon = torch.optim.Muon(hidden, rate, 0.01, momentum=momentum, adjust_lr_fn="match_rms_adamw")
                theirs.append([muon, torch.optim.AdamW(rest, share * rate, betas, weight_decay=0.01 / share)])
    for step in range(1, 4):
        grads = torch.randn_like(weights)
        corrections = torch.tensor([1 - 0.9**step, math.sqrt(1 - 0.95**step), 1 - 0.9**step])
        optimizer.step(grads, Tick(torch.tensor(rates).view(2, 1, 1), *corrections.unbind()))
        for (training, worker, parameters), optimizers in zip(ours, theirs, strict=True):
            for parameter, grad in zip(parameters, model.views(grads[training, worker, None]), strict=True):
                parameter.grad = grad[0]
            for theirs_of_replica in optimizers:
                theirs_of_replica.step()
    # Products of bfloat16 matrices in another order differ by some of its steps of 2^-8.
    # AdamW's eps shrinks steps along signs of gradients that are about as small as it.
    tolerance = {"sign": 1e-4}.get(inner, 1e-6) if "muon" not in inner else 2e-2 * rates[1] * 0.2 * math.sqrt(128) * 3
    for training, worker, parameters in ours:
        flat = torch.cat([parameter.flatten() for parameter in parameters])
        torch.testing.assert_close(weights[training, worker], flat, atol=tolerance, rtol=1e-5)


@pytest.mark.parametrize("name", ["minmax_uint8", "minmax_uint4", "sign1bit", "topk"])
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
        if name == "sign1bit":  # sums magnitudes in another order
            torch.testing.assert_close(decoded, expected, rtol=1e-5, atol=0)
        else:
            assert torch.equal(decoded, expected)
    assert round_trip.wire_bytes == layout.num_bytes


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
        starts = torch.cat(
            [torch.randint(len(task.train) - 64, (2, 1), generator=generator) for generator in generators]
        )
        windows = task.train[starts + torch.arange(65)].long().expand(2, -1, -1)
        leaves = [view.detach().requires_grad_() for view in task.model.views(flat)]
        grads = torch.autograd.grad(task.model.losses(leaves, windows).sum(), leaves)
        rates = torch.tensor([1e-3, 3e-3]).view(2, 1, 1) * learning_rate_factor(step, STEPS)
        corrections = torch.tensor([1 - 0.9 ** (step + 1), math.sqrt(1 - 0.95 ** (step + 1)), math.nan])
        joint = torch.cat([grad.flatten(1) for grad in grads], 1)[:, None]
        optimizer.step(joint, Tick(rates, *corrections.unbind()))
    # Adam divides gradients of about its epsilon by themselves, so rounding changes a few weights by a whole step.
    difference = (trained.weights[:, 0] - flat).abs()
    assert difference.mean() < 1e-5
    assert trained.losses[-1].tolist() == pytest.approx(_losses(task, flat), abs=1e-4)


def _losses(task: Task, flat: Tensor) -> list[float]:
    losses: list[float] = task.model.losses(task.model.views(flat), task.held_out.expand(len(flat), -1, -1)).tolist()
    return losses


@pytest.mark.parametrize(
    ("method", "inner"),
    [(DeMo(), "muon_of_sums"), (TopK(ratio=0.1), "sign"), (Dion(2), "orthogonal")],
)
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
    assert missing_trials("outer_30_1.0_0.0", records, RUNGS, True) == []  # the best rate is not known yet
    records["muon_diloco_30"] = [
        {"rung": rung, "seed": TUNING_SEED, "held_out_losses": [abs(rung - 1)]} for rung in RUNGS
    ]
    assert missing_trials("outer_30_1.0_0.0", records, RUNGS, True) == [Trial("outer_30_1.0_0.0", 1, TUNING_SEED)]


def test_results_of_rows_that_have_changed_are_ignored() -> None:
    row = ROWS["muon_diloco_30"]
    record = {"contestant": "muon_diloco_30", "rung": 1, "seed": 0, "rate": 0.027, "settings": row.settings()}
    assert is_current(record)
    assert not is_current(record | {"contestant": "of_another_revision"})
    assert not is_current(record | {"settings": row.settings().replace("0.6", "0.9")})
    assert not is_current(record | {"rate": 0.03})


def test_the_stored_results_of_separate_ranks_have_their_counterparts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["horizon_ranks.py", "--show"])
    assert horizon_ranks.main() == 0
    stored = json.loads((REPOSITORY / "benchmarks" / "results" / "horizon-ranks.json").read_text())
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(stored["trainings"])


def test_a_short_run_and_its_table(tmp_path: Path) -> None:
    path = tmp_path / "horizon.json"
    program = [REPOSITORY / "benchmarks" / "horizon.py", "--quick", "--width", "32", "--layers", "1"]
    program += ["--json", path, "--rows", "adamw_ddp", "muon_diloco_10"]
    for _ in range(2):  # the second continues: nothing is missing
        finished = warm_python.run(program, cwd=REPOSITORY)
        assert "| DDP | AdamW |" in finished.stdout
    assert len(json.loads(path.read_text())["trainings"]) == 5 + 3
