"""Bagua's hierarchical low-precision ring on a single node: the mean of the weights, in full precision."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from torchbagua import algorithms, collectives
from torchbagua.algorithms.rank_state import check_rank_state, owner_of
from torchbagua.algorithms.weights.averaging import SynchronousAveragingImpl
from torchbagua.runtime import bucket

_NAME = "low_precision_decentralized"


def is_single_node(group: collectives.BaguaProcessGroup) -> bool:
    """Return whether all ranks of the group, of which there are several, are on one node."""
    return group.size > 1 and len(group.node_ranks) == 1


def with_node_mean(algorithm: algorithms.Algorithm | str) -> algorithms.Algorithm | str:
    """Return `algorithm`, but Bagua's form of the hierarchical low-precision ring if it is this package's.

    Bagua averages the weights of a node in full precision, and uses the codec between nodes only. This package's
    compresses on a single node too.
    """
    if algorithm == _NAME:
        algorithm = algorithms.Algorithm.init(_NAME)
    if type(algorithm) is not algorithms.LowPrecisionDecentralizedAlgorithm or not algorithm.hierarchical:
        return algorithm
    return LowPrecisionDecentralizedAlgorithm(**{one.name: getattr(algorithm, one.name) for one in fields(algorithm)})


@dataclass(frozen=True)
class LowPrecisionDecentralizedAlgorithm(algorithms.LowPrecisionDecentralizedAlgorithm):
    """`torchbagua.LowPrecisionDecentralizedAlgorithm`, except on a single node.

    There the weights become the mean of all ranks, in full precision, after each step that communicates. It has the
    name of that class, which is in states and errors.
    """

    def make_impl(self, process_group: collectives.BaguaProcessGroup) -> SynchronousAveragingImpl:
        """Return the impl over `process_group`."""
        return NodeMeanImpl(process_group, self) if is_single_node(process_group) else super().make_impl(process_group)


class NodeMeanImpl(SynchronousAveragingImpl):
    """Replaces the weights by their mean after each step that is due. Nothing is in flight between two steps."""

    algorithm: LowPrecisionDecentralizedAlgorithm

    def init_operations(self, module: torch.nn.Module | None, bucket: bucket.BaguaBucket) -> None:
        bucket.append_centralized_synchronous_op()

    def after_step(self) -> None:
        """Form the mean, after steps 1, k + 1, 2k + 1 and so on, as the ring does."""
        is_due = self.is_due
        self.step += 1
        if is_due:
            self.weights.read()
            self.submit_in_lockstep(lambda: [one.run() for one in self.buckets]).result()
            self.weights.write()
            self.num_rounds += 1

    def receive_round(self) -> None:
        """Nothing: `after_step` waits for the round."""

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far."""
        return {**owner_of(self.process_group), "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned. The replicas in a state of the ring are not needed."""
        check_rank_state(type(self).__name__, state, ("step",), self.process_group)
        self.step = state["step"]
