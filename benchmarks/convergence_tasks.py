"""The tasks of the convergence benchmark: GPTs and an LSTM on the standard library's sources, and a CNN on digits."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from torchbagua.cli.demo.model import GPT, VOCABULARY
from torchbagua.cli.demo.text import read_standard_library
from torchbagua.cli.demo.train import CONTEXT, next_batch

Batch = tuple[Tensor, Tensor]  # inputs and targets
SPLIT_SEED = 0  # the held-out digits do not depend on the seed of the training

HELD_OUT_SEQUENCES = 256
SEQUENCES_PER_RANK = 8
DIGITS_BATCH_SIZE = 32
NUM_HELD_OUT_DIGITS = 898  # half


@dataclass(frozen=True)
class Data:
    """A function that samples a rank's batches, and the held-out data, on which no rank trains."""

    sample: Callable[[torch.Generator], Batch]
    held_out: Batch


@dataclass(frozen=True)
class Task:
    """A model, its data and its optimizer.

    Attributes:
        steps: steps of each training.
        step_cost: cost of a step relative to the other tasks, to estimate the remaining time.
        rate: middle of the grid of learning rates.
        rungs: rungs of the grid, which all contestants try; see convergence_sweep.py.
        target_percent: the target loss is this far above the baseline's final loss.
        max_gradient_norm: norm to which gradients are clipped; None: they are not clipped.
    """

    title: str
    loss_unit: str
    steps: int
    step_cost: int
    rate: float
    target_percent: float
    load_data: Callable[[], Data]
    build_model: Callable[[], nn.Module]
    build_optimizer: Callable[[Iterable[nn.Parameter], float], Optimizer]  # of the learning rate
    rungs: Sequence[int] = (-2, -1, 0, 1, 2)
    max_gradient_norm: float | None = None


def split_text(text: Tensor, num_held_out: int) -> tuple[Tensor, Tensor]:
    """Return the first nine tenths, to train on, and evenly spaced windows [num_held_out, CONTEXT + 1] of the rest."""
    num_train = len(text) * 9 // 10
    train, rest = text[:num_train], text[num_train:]
    starts = torch.linspace(0, len(rest) - CONTEXT - 1, num_held_out).long().unsqueeze(1)
    return train, rest[starts + torch.arange(CONTEXT + 1)].long()


def load_text() -> Data:
    """Load the standard library's sources; see `split_text`."""
    train, windows = split_text(read_standard_library(), HELD_OUT_SEQUENCES)
    return Data(lambda generator: next_batch(train, generator, SEQUENCES_PER_RANK), (windows[:, :-1], windows[:, 1:]))


def load_digits() -> Data:
    """Load scikit-learn's copy of the UCI digits: 1797 images of 8 x 8 pixels."""
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
    """Return three convolutions with BatchNorm that read [B, 1, 8, 8] and return logits [B, 10]."""
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(num_inputs, num_outputs, 3, padding=1, bias=False), nn.BatchNorm2d(num_outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (num_outputs > 16)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


class LSTM(nn.Module):
    """Predicts the next byte; reads tokens [B, T] (int64), returns logits [B, T, vocabulary]."""

    def __init__(self, *, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.output = nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        hidden_bth, _ = self.lstm(self.embedding(tokens_bt))
        return self.output(hidden_bth)  # type: ignore[no-any-return]  # nn.Module's __call__ is not typed


def build_adamw(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    return AdamW(parameters, lr=rate, betas=(0.9, 0.95))


TASKS = {
    "gpt": Task(
        title="GPT on the standard library's sources, AdamW",
        loss_unit="nats/byte",
        steps=240,
        step_cost=4,
        rate=6.5e-3,
        target_percent=2,
        load_data=load_text,
        build_model=lambda: GPT(width=96, num_layers=3, num_heads=4),
        build_optimizer=build_adamw,
    ),
    "digits": Task(
        title="CNN with BatchNorm on scikit-learn's digits, SGD with momentum",
        loss_unit="nats",
        steps=150,
        step_cost=1,
        rate=0.05,
        target_percent=20,
        load_data=load_digits,
        build_model=build_cnn,
        build_optimizer=lambda parameters, rate: SGD(parameters, lr=rate, momentum=0.9, weight_decay=5e-4),
    ),
    "lstm": Task(
        title="LSTM on the standard library's sources, SGD with clipping",
        loss_unit="nats/byte",
        steps=300,
        step_cost=4,
        rate=20.0,
        target_percent=2,
        load_data=load_text,
        build_model=lambda: LSTM(width=64, hidden=192),
        build_optimizer=lambda parameters, rate: SGD(parameters, lr=rate),
        max_gradient_norm=0.25,
    ),
    "small_gpt": Task(
        title="small GPT on the standard library's sources, AdamW",
        loss_unit="nats/byte",
        steps=1200,  # forty rounds of contestants that average weights every thirty steps
        step_cost=2,
        rate=2.106e-2,
        target_percent=2,
        load_data=load_text,
        build_model=lambda: GPT(width=64, num_layers=2, num_heads=4),
        build_optimizer=build_adamw,
        rungs=(-1, 0, 1),
    ),
}
