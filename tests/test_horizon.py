"""The horizon benchmark against torch and the package's codecs, and its programs from end to end."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

import warm_python
from source_tree import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))
import horizon_ranks
from horizon_codecs import RoundTrip
from horizon_methods import DDP
from horizon_model import StackedGPT
from horizon_optimizers import AdamW, Tick
from horizon_training import NUM_WORKERS, Group, Setup, Task, Trainings
from torchbagua.cli.demo.train import learning_rate_factor
from torchbagua.codecs.base import TensorSpec, by_name

STEPS = 6


def test_ddp_equals_one_worker_with_the_joint_batch() -> None:
    model = StackedGPT(width=32, num_layers=2)
    text = torch.randint(256, (20_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    task = Task.from_text(model, text, torch.device("cpu"), num_held_out=8)
    trained = Trainings(task, "adamw", [Group(DDP(), [Setup(0, rate) for rate in (1e-3, 3e-3)])], 2, STEPS)
    trained.run()
    assert torch.equal(trained.weights, trained.weights[:, :1].expand_as(trained.weights))
    generators = [torch.Generator().manual_seed(worker) for worker in range(NUM_WORKERS)]
    flat = model.initial_weights(0)[None].repeat(2, 1)
    optimizer = AdamW(flat[:, None], model)
    for step in range(STEPS):
        starts = torch.cat(
            [torch.randint(len(task.train) - 64, (2, 1), generator=generator) for generator in generators]
        )
        windows = task.train[starts + torch.arange(65)].long().expand(2, -1, -1)
        leaves = [view.detach().requires_grad_() for view in model.views(flat)]
        grads = torch.autograd.grad(model.losses(leaves, windows).sum(), leaves)
        rates = torch.tensor([1e-3, 3e-3]).view(2, 1, 1) * learning_rate_factor(step, STEPS)
        corrections = torch.tensor([1 - 0.9 ** (step + 1), math.sqrt(1 - 0.95 ** (step + 1)), math.nan])
        joint = torch.cat([grad.flatten(1) for grad in grads], 1)[:, None]
        optimizer.step(joint, Tick(rates, *corrections.unbind()))
    # Adam divides gradients of about its epsilon by themselves, so rounding changes a few weights by a whole step.
    assert (trained.weights[:, 0] - flat).abs().mean() < 1e-5
    losses = model.losses(model.views(flat), task.held_out.expand(len(flat), -1, -1))
    assert trained.losses[-1].tolist() == pytest.approx(losses.tolist(), abs=1e-4)


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
