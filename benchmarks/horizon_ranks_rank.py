"""One rank of one training, started by horizon_ranks.py."""

import json
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import torchbagua as tb
from convergence_rank import NUM_EVALUATIONS, Evaluation, check_equal_weights, cross_entropy, finite, written_bytes
from convergence_sweep import Record
from convergence_tasks import load_text
from horizon_model import NUM_HEADS
from horizon_optimizers import BETAS, MUON_MOMENTUM, WEIGHT_DECAY, MuonOfSums
from horizon_rows import ROWS
from horizon_training import NUM_WORKERS
from processes import begin_rank, leave_process_group, report_progress
from torchbagua.cli.demo.model import GPT
from torchbagua.cli.demo.train import learning_rate_factor, mean_over_ranks

REPORTED_STEPS = 10  # between two reports of progress, whose bytes the kernel counts too

# The rows of horizon_rows.py that separate ranks can train. None: DDP alone.
ALGORITHMS: dict[str, tb.Algorithm | None] = {
    "adamw_ddp": None,
    "muon_ddp": None,
    "muon_diloco_30": tb.DiLoCoAlgorithm(30),
    "adamw_decentralized": tb.DecentralizedAlgorithm(),
    "muon_4bits": tb.CompressedAllReduceAlgorithm(),
    "muon_shift_one": tb.DecentralizedAlgorithm(peer_selection_mode="shift_one"),
    "topk_sign_0.02": tb.TopKAlgorithm(0.02),
    "topk_muon_0.05": tb.TopKAlgorithm(0.05),
}


@dataclass(frozen=True)
class Settings:
    """The settings that horizon_ranks.py passes to its ranks, as JSON."""

    scratch: str  # folder of progress.json, and of record.json, which rank 0 writes
    init_method: str
    patience_s: float  # timeout when waiting for another rank
    row: str
    rung: int
    rate: float
    seed: int
    num_steps: int
    width: int
    num_layers: int


def build_optimizers(inner: str, model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Return torch's optimizers: AdamW, or Muon for the matrices in the layers and AdamW for the other parameters.

    The rows with the inner optimizers "sign" and "muon_of_sums" have no momentum. AdamW then steps along the signs.
    """
    hidden, rest = [], []
    for name, parameter in model.named_parameters():
        is_hidden = inner.startswith("muon") and name.startswith("layers") and parameter.ndim == 2
        (hidden if is_hidden else rest).append(parameter)
    if inner in ("adamw", "muon"):
        optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, rate, BETAS)]
    else:
        share = MuonOfSums.share_of_rest if hidden else 1.0
        decay = WEIGHT_DECAY / share  # the decay of a step is the rate times this
        optimizers = [torch.optim.AdamW(rest, share * rate, (0.0, 0.0), weight_decay=decay)]
    if hidden:
        momentum = MUON_MOMENTUM if inner == "muon" else 0.0
        optimizers.append(
            torch.optim.Muon(hidden, rate, WEIGHT_DECAY, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers


def train(settings: Settings, rank: int) -> Record:
    """Train on the batches of horizon_training.py. Return a record like those of horizon.py. Collective."""
    row, algorithm, num_steps = ROWS[settings.row], ALGORITHMS[settings.row], settings.num_steps
    start_s = time.monotonic()
    data = load_text()
    torch.manual_seed(settings.seed)
    model, evaluated_model = (
        GPT(width=settings.width, num_layers=settings.num_layers, num_heads=NUM_HEADS) for _ in range(2)
    )
    batches = torch.Generator().manual_seed(settings.seed * NUM_WORKERS + rank)
    evaluation = Evaluation(evaluated_model, data.held_out)
    before = written_bytes()
    steps, losses = [0], [finite(evaluation.of(model).loss)]
    evaluation_bytes = written_bytes() - before

    ddp = DistributedDataParallel(model, init_sync=False)
    optimizers = build_optimizers(row.inner, model, settings.rate)
    attachment = None if algorithm is None else tb.attach(ddp, optimizers, algorithm)
    schedules = [LambdaLR(each, lambda step: learning_rate_factor(step, num_steps)) for each in optimizers]
    evaluated_steps = {round(num_steps * share / NUM_EVALUATIONS) for share in range(1, NUM_EVALUATIONS)}
    before = written_bytes()
    for step in range(1, num_steps + 1):
        inputs, targets = data.sample(batches)
        loss = cross_entropy(ddp(inputs), targets)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step in evaluated_steps and step < num_steps:
            steps.append(step)
            losses.append(finite(evaluation.of(model).loss))
        if rank == 0 and step % REPORTED_STEPS == 0:
            report_progress(Path(settings.scratch), step, num_steps, f"{settings.row}, {settings.rate:.3g}")
    sent_bytes = written_bytes() - before - evaluation_bytes * (len(losses) - 1)
    if attachment:
        attachment.detach()
    check_equal_weights(model, settings.row)
    return {
        "task": "horizon",
        "contestant": settings.row,
        "label": row.label,
        "settings": f"{algorithm or 'DDP'}, {row.inner}, separate ranks",
        "rung": settings.rung,
        "rate": settings.rate,
        "seed": settings.seed,
        "steps": num_steps,
        "evaluated_steps": [*steps, num_steps],
        "held_out_losses": [*losses, finite(evaluation.of(model).loss)],
        "sent_bytes_a_step": finite(mean_over_ranks([sent_bytes / num_steps])[0]),
        "num_elements": sum(parameter.numel() for parameter in model.parameters()),
        "device": "cpu",
        "seconds": time.monotonic() - start_s,
    }


def main() -> None:
    settings, rank = begin_rank(Settings)
    dist.init_process_group(
        "gloo",
        init_method=settings.init_method,
        rank=rank,
        world_size=NUM_WORKERS,
        timeout=timedelta(seconds=settings.patience_s),
    )
    record = train(settings, rank)
    if rank == 0:
        (Path(settings.scratch) / "record.json").write_text(json.dumps(record))
    leave_process_group()


if __name__ == "__main__":
    main()
