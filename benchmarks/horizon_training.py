"""Many data-parallel trainings with many workers each, in one process, step by step together.

On a GPU, a CUDA graph contains the forward and backward passes, the averaging of gradients and the inner optimizer.
Methods that average weights run after each replay.

Shapes: S trainings, W workers of each, N elements of a worker's parameters; R = S W replicas; B sequences of a worker.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from convergence_rank import NUM_EVALUATIONS
from convergence_tasks import split_text
from horizon_methods import Method
from horizon_model import StackedGPT
from horizon_optimizers import BETAS, OPTIMIZERS, SLOW_BETA, Tick
from torchbagua.cli.demo.train import CONTEXT, learning_rate_factor

NUM_WORKERS = 4
EVALUATED_SEQUENCES = 2048  # of all trainings together in one forward pass
WARM_UP_STEPS = 3  # before the capture of a CUDA graph


@dataclass(frozen=True)
class Task:
    """The model, and the data on the device.

    Attributes:
        train: the text to train on, uint8.
        held_out: the held-out windows [sequences, T + 1], int64.
    """

    model: StackedGPT
    train: Tensor
    held_out: Tensor

    @classmethod
    def from_text(cls, model: StackedGPT, text: Tensor, device: torch.device, num_held_out: int) -> "Task":
        """Split the text as the convergence benchmark does."""
        train, held_out = split_text(text, num_held_out)
        return cls(model, train.to(device), held_out.to(device))


@dataclass(frozen=True)
class Setup:
    """One training: its seed determines the initial weights and the batches of each worker."""

    seed: int
    rate: float


@dataclass(frozen=True)
class Group:
    """Trainings with the same method."""

    method: Method
    setups: Sequence[Setup]


class Trainings:
    """Trains S models with W workers each. All have the same inner optimizer, steps and batch.

    Args:
        inner: the inner optimizer, of OPTIMIZERS.
        groups: the methods, each with its trainings.
        num_sequences: the batch of a worker.
        use_graph: whether to capture a CUDA graph, if the device is a GPU.

    Attributes:
        weights: [S, W, N].
        evaluated_steps: the steps after which the mean of the workers' weights was evaluated.
        losses: the held-out loss of each training [S] at each of these steps.
        is_captured: whether the steps replay a CUDA graph.
    """

    def __init__(
        self,
        task: Task,
        inner: str,
        groups: Sequence[Group],
        num_sequences: int,
        num_steps: int,
        *,
        use_graph: bool = True,
    ) -> None:
        self._task, self._num_steps = task, num_steps
        model, device = task.model, task.train.device
        setups = [setup for group in groups for setup in group.setups]
        initial_sn = torch.stack([model.initial_weights(setup.seed) for setup in setups]).to(device)
        self.weights = initial_sn[:, None].repeat(1, NUM_WORKERS, 1)
        self._grads = torch.zeros_like(self.weights)
        # Leaves of the graph of autograd that share their memory with the weights.
        self._leaves = [view.detach().requires_grad_() for view in model.views(self.weights.flatten(0, 1))]
        self._optimizer = OPTIMIZERS[inner].create(self.weights, model)
        self._methods: list[tuple[slice, Method]] = []
        first = 0
        for group in groups:
            part = slice(first, first + len(group.setups))
            moments = [moment[part] for moment in self._optimizer.moments]
            group.method.bind(self.weights[part], moments, num_steps, model.parameters)
            self._methods.append((part, group.method))
            first = part.stop
        self._rates = torch.tensor([setup.rate for setup in setups], device=device).view(-1, 1, 1)
        self._schedule = _schedule(num_steps).to(device)
        self._starts = _window_starts(setups, num_steps, num_sequences, len(task.train)).to(device)
        self._offsets = torch.arange(CONTEXT + 1, device=device)
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.evaluated_steps: list[int] = []
        self.losses: list[Tensor] = []
        self._replay: Callable[[], None] = self._step
        self.is_captured = False
        if use_graph and device.type == "cuda":
            self._capture()

    def run(self, on_step: Callable[[int], None] = lambda step: None) -> None:
        """Train to the end, or until all trainings have diverged. `on_step` may raise to stop."""
        evaluation_steps = {round(self._num_steps * share / NUM_EVALUATIONS) for share in range(1, NUM_EVALUATIONS + 1)}
        self.evaluate(0)
        for step in range(1, self._num_steps + 1):
            self.step(step)
            if step in evaluation_steps:
                self.evaluate(step)
                if not self.losses[-1].isfinite().any():
                    return
            on_step(step)

    def step(self, step: int) -> None:
        """Take step number `step`, from 1."""
        self._replay()
        with torch.no_grad():
            for _, method in self._methods:
                method.after_step(step)

    @torch.no_grad()
    def evaluate(self, step: int) -> None:
        """Append the held-out losses of the mean of the workers' weights."""
        views = self._task.model.views(self.weights.mean(1))
        num_trainings = len(self.weights)
        total = torch.zeros(num_trainings, dtype=torch.float64)
        for windows in self._task.held_out.split(max(1, EVALUATED_SEQUENCES // num_trainings)):
            losses = self._task.model.losses(views, windows.expand(num_trainings, -1, -1))
            total += losses.double().cpu() * len(windows)
        self.evaluated_steps.append(step)
        self.losses.append(total / len(self._task.held_out))

    def _step(self) -> None:
        """Compute gradients, average them, and step the inner optimizer."""
        starts_swb = self._starts.index_select(0, self._counter)[0]
        windows = self._task.train[starts_swb.flatten(0, 1).unsqueeze(-1) + self._offsets].long()
        losses = self._task.model.losses(self._leaves, windows)
        grads = torch.autograd.grad(losses.sum(), self._leaves)
        with torch.no_grad():
            torch.cat([grad.flatten(1) for grad in grads], dim=1, out=self._grads.flatten(0, 1))
            factor, *corrections = self._schedule.index_select(0, self._counter)[0].unbind()
            rates = self._rates * factor
            for part, method in self._methods:
                method.average_gradients(self._grads[part], rates[part])
            self._optimizer.step(self._grads, Tick(rates, *corrections))
            self._counter.add_(1)

    def _capture(self) -> None:
        """Capture a step in a CUDA graph. The steps that warm up leave no trace."""
        state = [self.weights, *self._optimizer.moments]
        state += [tensor for _, method in self._methods for tensor in method.state]
        before = [tensor.clone() for tensor in state]
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_STEPS):
                    self._counter.zero_()
                    self._step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
            self._replay, self.is_captured = graph.replay, True
        except RuntimeError as error:
            print(f"NO CUDA GRAPH, steps are slow: {error}", file=sys.stderr, flush=True)
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        self._counter.zero_()


def _schedule(num_steps: int) -> Tensor:
    """Return the factor of the learning rate and the three corrections of `Tick` [steps, 4] of each step."""
    rows = [
        (
            learning_rate_factor(step, num_steps),
            1 - BETAS[0] ** (step + 1),
            math.sqrt(1 - BETAS[1] ** (step + 1)),
            1 - SLOW_BETA ** (step + 1),
        )
        for step in range(num_steps)
    ]
    return torch.tensor(rows)


def _window_starts(setups: Sequence[Setup], num_steps: int, num_sequences: int, num_train: int) -> Tensor:
    """Return the first positions [steps, S, W, B] of all windows: those of `next_batch` in convergence_rank."""
    by_seed: dict[int, Tensor] = {}
    for seed in {setup.seed for setup in setups}:
        by_worker = []
        for worker in range(NUM_WORKERS):
            generator = torch.Generator().manual_seed(seed * NUM_WORKERS + worker)
            by_worker.append(torch.randint(num_train - CONTEXT, (num_steps, num_sequences), generator=generator))
        by_seed[seed] = torch.stack(by_worker, dim=1)
    return torch.stack([by_seed[setup.seed] for setup in setups], dim=1)
