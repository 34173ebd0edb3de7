"""Bagua's hierarchical low-precision ring on a single node: the mean of the weights, in full precision."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

import torchbagua as tb
from torchbagua import algorithms


def is_single_node(group: tb.BaguaProcessGroup) -> bool:
    """Return whether the group has several ranks, all on one node."""
    return group.size > 1 and len(group.node_ranks) == 1


def with_node_mean(algorithm: tb.Algorithm) -> tb.Algorithm:
    """Return `algorithm`; replace this package's hierarchical low-precision ring with Bagua's variant.

    Bagua averages weights within a node in full precision, and uses the codec only between nodes. This package's ring
    compresses on a single node too.
    """
    if type(algorithm) is not tb.LowPrecisionDecentralizedAlgorithm or not algorithm.hierarchical:
        return algorithm
    arguments = {field.name: getattr(algorithm, field.name) for field in fields(algorithm)}
    return LowPrecisionDecentralizedAlgorithm(**arguments)


@dataclass(frozen=True)
class LowPrecisionDecentralizedAlgorithm(tb.LowPrecisionDecentralizedAlgorithm):
    """`torchbagua.LowPrecisionDecentralizedAlgorithm`, except on a single node.

    On a single node, each step that communicates replaces the weights with the mean of all ranks in full precision. The
    class has the same name, because states and errors contain the name.
    """

    def make_impl(self, runner: tb.extend.WeightRunner) -> tb.extend.WeightImpl:
        return NodeMeanImpl(runner) if is_single_node(runner.process_group) else super().make_impl(runner)


class NodeMeanImpl(tb.extend.WeightImpl):
    """Replaces the weights with their mean after each due step. Nothing is in flight between two steps."""

    algorithm: LowPrecisionDecentralizedAlgorithm

    def __init__(self, runner: tb.extend.WeightRunner) -> None:
        super().__init__(runner)
        self._rounds = algorithms.SynchronousRounds(self.runner, self.algorithm)

    def init_operations(self, module: torch.nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
        bucket.append_centralized_synchronous_op()

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None]:
        return self._rounds.count_backward

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        return self._after_step

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compute the mean after steps 1, k + 1, 2k + 1 and so on, as the ring does."""
        is_due = self._rounds.is_due(self.algorithm.communication_interval)
        self._rounds.count_step()
        if is_due:
            self._rounds.weights.read()
            self._rounds.start(lambda: [bucket.run() for bucket in self.runner.buckets]).finish()
            self._rounds.weights.write()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps so far."""
        return {**self._owner, "step": self._rounds.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`. The replicas in a state of the ring are ignored."""
        keys = [*self._owner, "step"]
        if not isinstance(state, Mapping) or not state.keys() >= set(keys):
            got = sorted(state) if isinstance(state, Mapping) else repr(state)
            raise ValueError(f"{type(self).__name__}.load_state_dict: state must have the keys {keys}, got {got}")
        given = {name: state[name] for name in self._owner}
        if given != self._owner:
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: state must be of {self._owner}, got {given}; every rank saves "
                "and loads its own state. If the number of ranks has changed, load the weights before with_bagua, "
                "and load no state"
            )
        self._rounds.load(state["step"], self._rounds.num_rounds)

    @property
    def _owner(self) -> dict[str, int]:
        return {"rank": self.runner.process_group.rank, "num_ranks": self.runner.process_group.size}
