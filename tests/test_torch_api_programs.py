"""Scripts with the calls of Bagua's own examples, with only the import changed, in two processes."""

import re
from pathlib import Path

import pytest

import programs
import warm_python

# A rank that exits immediately after a backward can abort in torch itself; see test_docs.py.
ENDING = """
import time
bagua.barrier()
time.sleep(1)
torch.distributed.destroy_process_group()
"""

TRAIN = """
import logging, sys
import torch, torch.nn as nn, torch.nn.functional as F, torch.optim as optim
import torchbagua.compat.bagua as bagua
from torchbagua.compat.bagua.algorithms import async_model_average, bytegrad, decentralized, gradient_allreduce, q_adam

def train(model, loader, optimizer, scaler):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

def test(model, loader):
    model.eval()
    with torch.no_grad():
        correct = sum(model(data).argmax(dim=1).eq(target).sum().item() for data, target in loader)
    return correct / len(loader.dataset)

assert bagua.get_world_size() == 2 and bagua.get_local_rank() == bagua.get_rank()
bagua.init_process_group()
generator = torch.Generator().manual_seed(0)
centres = torch.randn(10, 1, 12, 12, generator=generator)
target = torch.randint(10, (256,), generator=generator)
pictures = centres[target] + 0.5 * torch.randn(256, 1, 12, 12, generator=generator)
dataset = torch.utils.data.TensorDataset(pictures, target)
if bagua.get_local_rank() == 0:
    torch.distributed.barrier()
else:
    torch.distributed.barrier()
sampler = torch.utils.data.distributed.DistributedSampler(
    dataset, num_replicas=bagua.get_world_size(), rank=bagua.get_rank()
)
train_loader = torch.utils.data.DataLoader(dataset, batch_size=16, sampler=sampler)
test_loader = torch.utils.data.DataLoader(dataset, batch_size=128)

def run(name):
    torch.manual_seed(bagua.get_rank())
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 10), nn.LogSoftmax(dim=1)
    )
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    if name == "qadam":
        optimizer = q_adam.QAdamOptimizer(model.parameters(), lr=0.001, warmup_steps=10)
    algorithm = {
        "gradient_allreduce": lambda: gradient_allreduce.GradientAllReduceAlgorithm(),
        "decentralized": lambda: decentralized.DecentralizedAlgorithm(),
        "low_precision_decentralized": lambda: decentralized.LowPrecisionDecentralizedAlgorithm(),
        "bytegrad": lambda: bytegrad.ByteGradAlgorithm(),
        "qadam": lambda: q_adam.QAdamAlgorithm(optimizer),
        "async": lambda: async_model_average.AsyncModelAverageAlgorithm(sync_interval_ms=5, warmup_steps=3),
    }[name]()
    model = model.with_bagua([optimizer], algorithm, do_flatten=True)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for epoch in range(1, 3):
        if name == "async":
            model.bagua_algorithm.resume(model)
        train(model, train_loader, optimizer, scaler)
        if name == "async":
            model.bagua_algorithm.abort(model)
        accuracy = test(model, test_loader)
        scheduler.step()
    print(f"{name} of rank {bagua.get_rank()}: {accuracy:.2f}", flush=True)
    assert accuracy > 0.9
    return model  # keeps its attachment alive

models = [run(name) for name in sys.argv[1:]]
"""

ELASTIC = """
import os, sys
import torch
import torchbagua.compat.bagua as bagua
from torchbagua.compat.bagua.algorithms import Algorithm

path, num_epochs = sys.argv[1], int(sys.argv[2])
torch.manual_seed(1)
bagua.init_process_group()
model = torch.nn.Linear(10, 1)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
start_epoch = 1
if os.path.exists(path):
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model_state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    start_epoch = checkpoint["epoch"]
bagua.barrier()
model = model.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))
for epoch in range(start_epoch, num_epochs + 1):
    data = torch.Generator().manual_seed(10 * epoch + bagua.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(6, 10, generator=data)).square().sum().backward()
        optimizer.step()
    if bagua.get_rank() == 0:
        torch.save(
            {
                "epoch": epoch + 1,
                "model_state_dict": model.state_dict(),
                "optimizer_state_dict": optimizer.state_dict(),
            },
            path,
        )
        print(epoch, [value.hex() for value in model.weight[0].tolist()], flush=True)
"""


@pytest.mark.slow
def test_training(tmp_path: Path) -> None:
    """The MNIST and synthetic-benchmark examples with each algorithm."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN + ENDING)
    names = ["gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "qadam", "async"]
    done = programs.run(programs.torchrun(script, *names))
    assert sorted(re.findall(r"([a-z_]+) of rank [01]", done.stdout)) == sorted(2 * names)
    # From both decentralized algorithms on both ranks. The asynchronous algorithm was aborted, which takes the mean.
    assert done.stderr.count("Call model.bagua_ddp.attachment.detach() on all ranks when training is done") == 4


@pytest.mark.slow
def test_a_restarted_run_resumes(tmp_path: Path) -> None:
    """The example of elastic training: it resumes from rank 0's file and reaches the same weights."""
    script = tmp_path / "elastic.py"
    script.write_text(ELASTIC + ENDING)
    whole = warm_python.run_ranks(script, str(tmp_path / "whole.pt"), "2").stdout.splitlines()
    first = warm_python.run_ranks(script, str(tmp_path / "parts.pt"), "1").stdout.splitlines()
    second = warm_python.run_ranks(script, str(tmp_path / "parts.pt"), "2").stdout.splitlines()
    assert [*first, *second] == whole
    assert len(whole) == 2
