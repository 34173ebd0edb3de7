"""Decentralized training: weights averaged with all ranks or with a few peers, in full precision.

On rank i, with the symbols of D-PSGD (Lian et al., arXiv 1705.09056, algorithm 1): learning rate gamma, and the matrix
W of the topology. Because of the snapshot s_i, the exchange overlaps with the computation of the gradient.

    for k = 0, 1, 2, ...:
        if k % communication_interval == 0:
            s_i = x_i
            start a round: the lane computes y_i = sum over j of W_ij s_j
        x_i = x_i - gamma * gradient of F_i(x_i)                # the attached optimizer
        if a round is in flight:
            wait for y_i; x_i = x_i + y_i - s_i
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchbagua.algorithms.base import check_at_least, check_flags, register
from torchbagua.algorithms.weights.rounds import ModelAveragingAlgorithm, SynchronousRounds
from torchbagua.collectives.neighbourhood_mean import check_topology
from torchbagua.collectives.topology import Topology, topology_of
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.lane import Job
from torchbagua.runtime.rank_state import check_rank_state, owner_of
from torchbagua.runtime.weight_buckets import DIFFERENCE, FLAT, WeightBucket
from torchbagua.runtime.weight_runner import WeightImpl, WeightRunner

_STATE_KEYS = ("step", "has_differences", "differences", "buffer_snapshots", "num_rounds")


@dataclass(frozen=True)
class DecentralizedAlgorithm(ModelAveragingAlgorithm):
    """Each rank takes its own steps, and averages weights with its peers while it computes the next gradient.

    During step t, the mean of the weights x_t is computed. After the step, it is applied: x += mean(x_t) - x_t. With
    SGD, this is D-PSGD, x_{t+1} = mean(x_t) - lr g(x_t) (Lian et al., arXiv 1705.09056, algorithm 1; Bagua, arXiv
    2107.01499). In each round, a rank sends 8 (n-1)/n bytes per float32 parameter with "all", 4 bytes with "shift_one",
    or 4 bytes to each neighbor of another topology.

    A state can be loaded with other arguments, except another `average_buffers`. The round that it contains is applied
    unchanged.

    Args:
        hierarchical: with multi-node groups that have several ranks per node, average within the node first, and then
            with other nodes. With "all", the result is the mean of all ranks, even if nodes have different numbers of
            ranks.
        peer_selection_mode: "all"; "shift_one" for a single peer, different in each round, with an even number of ranks
            (or nodes); or a `torchbagua.extend.Topology`.
        communication_interval: the number k of steps between rounds. The mean of the weights after steps 0, k, 2k and
            so on is computed during the next step, and applied after steps 1, k + 1, 2k + 1 and so on.
        average_buffers, final_average, bucket_cap_mb: see `ModelAveragingAlgorithm`.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    hierarchical: bool = True
    peer_selection_mode: str | Topology = "all"
    communication_interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, "hierarchical")
        topology_of(type(self).__name__, self.peer_selection_mode)
        check_at_least(self, "communication_interval", 1)

    @property
    def topology(self) -> Topology:
        """The topology that `peer_selection_mode` specifies."""
        return topology_of(type(self).__name__, self.peer_selection_mode)

    def prepare(self) -> None:
        """Do nothing: full precision needs no native kernels."""

    def make_impl(self, runner: WeightRunner) -> "DecentralizedAlgorithmImpl":
        """Return the impl. Raises ValueError if the topology does not support this group."""
        check_topology(type(self).__name__, self.topology, runner.process_group, hierarchical=self.hierarchical)
        return DecentralizedAlgorithmImpl(runner)


class DecentralizedAlgorithmImpl(WeightImpl):
    """See `DecentralizedAlgorithm`. A bucket's flat tensor contains the snapshot that is being averaged.

    Attributes:
        rounds: counts steps and rounds.
    """

    algorithm: DecentralizedAlgorithm

    def __init__(self, runner: WeightRunner) -> None:
        super().__init__(runner)
        self.rounds = SynchronousRounds(self.runner, self.algorithm)
        self._weights = self.rounds.weights
        # For each bucket of a round in flight: the job that averages it, or None if the difference is already computed.
        self._in_flight: dict[WeightBucket, Job[torch.Tensor] | None] = {}

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        assert isinstance(bucket, WeightBucket)
        bucket.set_round(self.rounds.num_rounds)  # selects the peers
        # The mean is written to `difference`, from which the snapshot is subtracted later.
        bucket.append_decentralized_synchronous_op(
            bucket.difference, self.algorithm.hierarchical, self.algorithm.topology
        )

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None]:
        return self.rounds.count_backward

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        """Start the round of step 0, since `attach` calls this once. Return the function that starts later rounds."""
        self._apply_round(starts_next=self._is_due())
        return self._after_step

    def _is_due(self) -> bool:
        return self.rounds.is_due(self.algorithm.communication_interval)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the round in flight, and start the next round if it is due."""
        self.rounds.count_step()
        if self.runner.lane.has_failed:  # otherwise, the failure would be noticed only at the next round
            self._apply_round(starts_next=False)
        if self._is_due():
            self.rounds.overlap_next_step()
        self._apply_round(starts_next=self._is_due())

    def _apply_round(self, *, starts_next: bool) -> None:
        """Apply the round in flight bucket by bucket, and submit each bucket to the next round at once."""
        if starts_next:
            # After the round in flight, the lane compares the ranks' progress. The jobs of the buckets, submitted below
            # one by one, follow and raise its error.
            self.rounds.start(lambda: None)
        for bucket in self._weights:
            if bucket in self._in_flight:
                self._wait_for(bucket)
                self._weights.add(DIFFERENCE, snapshot=FLAT, buckets=[bucket])
                del self._in_flight[bucket]
            if starts_next:
                self._weights.read(buckets=[bucket])
                self._in_flight[bucket] = self.runner.lane.submit_overlapping(bucket)

    def _wait_for(self, bucket: WeightBucket) -> None:
        """Wait for the mean of a bucket, and subtract the snapshot from it."""
        job = self._in_flight[bucket]
        if job is not None:
            job.finish()
            bucket.subtract(bucket.difference, bucket.flat, out=bucket.difference)
            self._in_flight[bucket] = None

    def reset(self) -> None:
        """Rebuild buckets after the round in flight has been applied."""
        self._drop_in_flight(self.runner.loading)
        self._apply_round(starts_next=False)
        super().reset()

    def weights_loaded(self, values: Mapping[str, torch.Tensor]) -> None:
        """Drop the differences of the round in flight for the loaded weights."""
        self._drop_in_flight(values)
        super().weights_loaded(values)

    def _drop_in_flight(self, names: Container[str]) -> None:
        for bucket in self._in_flight:
            if bucket.slices_of(names):
                self._wait_for(bucket)
                bucket.clear(bucket.difference, names)

    def forget_in_flight(self) -> None:
        self._in_flight = {}

    def finish_round(self) -> None:
        """Wait for the round in flight, apply it to the weights, and notify observers of it."""
        self._apply_round(starts_next=False)
        self.runner.tracer.deliver()

    def finish(self) -> bool:
        self.finish_round()
        return super().finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the steps and rounds so far, and the differences that are not yet applied to the weights."""
        for bucket in self._in_flight:
            self._wait_for(bucket)
        return {
            **owner_of(self.runner.process_group),
            "step": self.rounds.step,
            "has_differences": bool(self._in_flight),
            "differences": self._weights.by_name(DIFFERENCE),
            "buffer_snapshots": self._weights.by_name(FLAT, self._weights.of_buffers),
            "num_rounds": self.rounds.num_rounds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` returned, and drop the round in flight. Collective."""
        for bucket in self._in_flight:
            self._wait_for(bucket)
        check_rank_state(self.runner.name, state, _STATE_KEYS, self.runner.process_group)
        if 1 not in (self.runner.process_group.size, state["num_ranks"]):  # a single rank has no differences
            self._weights.load_by_name(DIFFERENCE, state["differences"])
            self._weights.load_by_name(FLAT, state["buffer_snapshots"], self._weights.of_buffers)
        self._weights.lockstep.loads.forget()
        self._in_flight = dict.fromkeys(self._weights) if state["has_differences"] else {}
        self.rounds.load(state["step"], state["num_rounds"])
        for bucket in self._weights:
            bucket.set_round(self.rounds.num_rounds)


register("decentralized", DecentralizedAlgorithm, "weights averaged with all ranks, or with one peer at a time")
