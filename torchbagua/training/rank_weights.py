"""What differs between ranks with a weight algorithm: loads of weights, states of optimizers, running means."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain

import torch

from torchbagua.runtime.parameters import local_shard
from torchbagua.runtime.weight_runner import WeightRunner
from torchbagua.training.lint.unaveraged_state import UnaveragedState
from torchbagua.training.optimizer_weights import OptimizerWeights
from torchbagua.training.setup import TrainingSetup
from torchbagua.training.weight_loads import WeightLoads


class RankWeights:
    """Averages the weights in optimizer states and running means, and watches loads of weights, until `close`.

    A gradient algorithm, or a group of one rank, needs none of this, since all ranks hold the same weights.

    Attributes:
        loads: the loads of weights since the last step.
    """

    def __init__(self, setup: TrainingSetup, runner: WeightRunner) -> None:
        self._runner = runner
        self._modules: dict[int, torch.nn.Module] = {}  # to average too, by id
        self._in_optimizers = OptimizerWeights(setup.optimizers, runner)
        self._unaveraged_state = UnaveragedState(runner.step_watches, self._in_optimizers.names, runner.name)
        self.loads = WeightLoads(setup, runner)

    def close(self) -> None:
        """Stop watching."""
        self._unaveraged_state.close()
        self.loads.close()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give all ranks the mean of their weights within the block; see `Attachment.averaged_weights`."""
        self._unaveraged_state.examine()
        with self._in_optimizers.averaged(self._runner.impl.averaged_weights()), self.loads.refused():
            self._average_modules()
            yield

    def own(self) -> AbstractContextManager[None]:
        """Give this rank its own weights and optimizer state in a block within `averaged`."""
        return self._in_optimizers.own(self._runner.own_weights())

    def add_module(self, module: torch.nn.Module) -> None:
        """Average the weights of another module too, now and at each later mean. Call it within `averaged`."""
        self._average(module)  # first, since ranks compare the added modules in it
        self._modules[id(module)] = module

    def add_state(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        """Average the state tensors with this name too."""
        self._in_optimizers.add(optimizer, name)

    def are_in(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether state tensors of the optimizer are averaged."""
        return bool(self._in_optimizers.names(optimizer))

    def before_end(self) -> None:
        """Prepare for the last mean. Call it before the runner finishes."""
        self.loads.settle()
        self._unaveraged_state.examine()
        self._in_optimizers.before_end()

    @contextmanager
    def last_means(self) -> Iterator[None]:
        """Average optimizer states before the block, which makes the rest of them equal, and running means after it."""
        self._in_optimizers.average()
        yield
        self._average_modules()

    def _average_modules(self) -> None:
        for module in self._modules.values():
            self._average(module)

    def _average(self, module: torch.nn.Module) -> None:
        weights = self._runner.weights
        if weights is None:
            raise NotImplementedError(f"average_also: {type(self._runner.impl).__name__} must call runner.average")
        tensors = [local_shard(tensor) for tensor in chain(module.parameters(), module.buffers())]
        inexact = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
        weights.means.average_tensors(inexact, f"a {type(module).__name__}'s weights")
