"""What the convergence benchmark trains: a GPT on the standard library's sources and a small CNN on digits."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from convergence_contestants import Contestants, averaging, qadam
from torchbagua.cli.demo.model import GPT
from torchbagua.cli.demo.text import read_standard_library
from torchbagua.cli.demo.train import CONTEXT, PEAK_LEARNING_RATE, next_batch

Batch = tuple[Tensor, Tensor]  # inputs and targets
SPLIT_SEED = 0  # the same held-out digits whatever the seed of the training

HELD_OUT_SEQUENCES = 256
DIGITS_BATCH_SIZE = 32
NUM_HELD_OUT_DIGITS = 898  # half


@dataclass(frozen=True)
class Data:
    """Where a rank's batches come from, and what no rank trains on."""

    sample: Callable[[torch.Generator], Batch]
    held_out: Batch


@dataclass(frozen=True)
class Task:
    """A model, its data and its optimizer."""

    title: str
    loss_unit: str
    steps: int
    contestants: Callable[[int], Contestants]  # of the number of steps
    load_data: Callable[[], Data]
    build_model: Callable[[], nn.Module]
    build_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]


def load_text() -> Data:
    """Train on the first nine tenths; hold out evenly spaced sequences of the rest."""
    text = read_standard_library()
    num_train = len(text) * 9 // 10
    train, rest = text[:num_train], text[num_train:]
    starts = torch.linspace(0, len(rest) - CONTEXT - 1, HELD_OUT_SEQUENCES).long().unsqueeze(1)
    windows = rest[starts + torch.arange(CONTEXT + 1)].long()
    return Data(lambda generator: next_batch(train, generator), (windows[:, :-1], windows[:, 1:]))


def load_digits() -> Data:
    """scikit-learn's copy of the UCI digits: 1797 images of 8 x 8 pixels."""
    from sklearn import datasets

    digits = datasets.load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    held_out, train = order[:NUM_HELD_OUT_DIGITS], order[NUM_HELD_OUT_DIGITS:]

    def sample(generator: torch.Generator) -> Batch:
        chosen = train[torch.randint(len(train), (DIGITS_BATCH_SIZE,), generator=generator)]
        return images[chosen], labels[chosen]

    return Data(sample, (images[held_out], labels[held_out]))


def build_cnn() -> nn.Module:
    """Three convolutions with BatchNorm; reads [B, 1, 8, 8], returns logits [B, 10]."""
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(num_inputs, num_outputs, 3, padding=1, bias=False), nn.BatchNorm2d(num_outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (num_outputs > 16)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


GPT_TASK = Task(
    title="GPT on the standard library's sources",
    loss_unit="nats/byte",
    steps=240,
    # The asynchronous algorithm averages every few steps of a task on two cores.
    contestants=lambda num_steps: averaging(num_steps, sync_interval_ms=500),
    load_data=load_text,
    build_model=lambda: GPT(width=160, num_layers=4, num_heads=5),
    build_optimizer=lambda parameters: AdamW(parameters, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95)),
)

TASKS = {
    "gpt": GPT_TASK,
    "qadam": replace(GPT_TASK, title="The same GPT with QAdam", steps=480, contestants=qadam),
    "digits": Task(
        title="CNN with BatchNorm on scikit-learn's digits",
        loss_unit="nats",
        steps=150,
        contestants=lambda num_steps: averaging(num_steps, sync_interval_ms=20),
        load_data=load_digits,
        build_model=build_cnn,
        build_optimizer=lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4),
    ),
}
