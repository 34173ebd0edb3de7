"""Decentralized training: weights averaged with all ranks or a few peers, in full precision."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchbagua.algorithms.base import check_at_least, check_flags, register
from torchbagua.algorithms.weights.averaging import ModelAveragingAlgorithm
from torchbagua.algorithms.weights.pending_state import load_pending_state, pending_state
from torchbagua.algorithms.weights.synchronous_rounds import SynchronousRounds
from torchbagua.collectives.neighbourhood_mean import check_topology
from torchbagua.collectives.topology import Topology, topology_of
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.impl import AlgorithmImpl
from torchbagua.runtime.job import Job
from torchbagua.runtime.runner import Runner
from torchbagua.runtime.weight_bucket import DIFFERENCE, FLAT, WeightBucket


@dataclass(frozen=True)
class DecentralizedAlgorithm(ModelAveragingAlgorithm):
    """Every rank takes its own steps, and averages its weights with its peers' while it computes the next gradient.

    During step t the mean of the weights x_t is formed. After the step it is applied: x += mean(x_t) - x_t. With SGD
    that is D-PSGD, x_{t+1} = mean(x_t) - lr g(x_t) (Lian et al., arXiv 1705.09056, algorithm 1; Bagua, arXiv
    2107.01499). In each round a rank sends 8 (n-1)/n bytes a float32 parameter with "all", 4 with "shift_one", or 4 for
    each neighbour of another topology.

    A state can be loaded under other arguments, except another `average_buffers`. The round that it holds is applied as
    it was formed.

    Args:
        hierarchical: with several nodes of several ranks: average within the node first, and then with other nodes.
            With "all" the result is the mean of all ranks, also where nodes have different numbers of ranks.
        peer_selection_mode: "all"; or "shift_one" for one peer, another one in each round, which needs an even number
            of ranks (or nodes); or a `torchbagua.Topology`.
        communication_interval: average every so many steps. With k, the mean of the weights after steps 0, k, 2k and so
            on is formed while the next step is taken, and applied after steps 1, k + 1, 2k + 1 and so on.
        average_buffers, final_average, bucket_cap_mb: see `ModelAveragingAlgorithm`.

    Raises:
        TypeError, ValueError: an argument does not fit.
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
        """What `peer_selection_mode` stands for."""
        return topology_of(type(self).__name__, self.peer_selection_mode)

    def prepare(self) -> None:
        """Nothing: full precision needs no native kernel."""

    def make_impl(self, runner: Runner) -> "DecentralizedAlgorithmImpl":
        """Return the impl. Raises ValueError if the topology does not fit the ranks."""
        check_topology(type(self).__name__, self.topology, runner.process_group, hierarchical=self.hierarchical)
        return DecentralizedAlgorithmImpl(runner)


class DecentralizedAlgorithmImpl(AlgorithmImpl):
    """See `DecentralizedAlgorithm`. A bucket's flat tensor holds the snapshot that is being averaged.

    Attributes:
        rounds: counts steps and rounds.
    """

    algorithm: DecentralizedAlgorithm

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.rounds = SynchronousRounds(runner, self.algorithm)
        self._weights = self.rounds.weights
        # Of each bucket, while a round is in flight: the job that averages it, or None where the difference is formed.
        self._in_flight: dict[WeightBucket, Job[torch.Tensor] | None] = {}

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        assert isinstance(bucket, WeightBucket)
        bucket.round_index = self.rounds.num_rounds  # which chooses the peers
        # The mean is written to what becomes the difference, once the snapshot is subtracted.
        bucket.append_decentralized_synchronous_op(
            bucket.difference, self.algorithm.hierarchical, self.algorithm.topology
        )

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None]:
        return self.rounds.count_backward

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        """Start the round of step 0, and return what starts the others."""
        self._apply_round(starts_next=self._is_due())
        return self._after_step

    def _is_due(self) -> bool:
        return self.rounds.is_due(self.algorithm.communication_interval)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the round that was in flight, and start the next one where it is due."""
        self.rounds.step += 1
        if self.runner.lane.has_failed:  # which would otherwise be noticed at the next round
            self._apply_round(starts_next=False)
        if self._is_due():
            self.rounds.overlap_next_step()
        self._apply_round(starts_next=self._is_due())

    def _apply_round(self, *, starts_next: bool) -> None:
        """Bucket by bucket, while the lane is at the next: apply the round in flight, and hand over to the new one."""
        if starts_next:
            self.rounds.start(lambda: None)
        for bucket in self._weights:
            if bucket in self._in_flight:
                self._wait_for(bucket)
                self._weights.add(DIFFERENCE, snapshot=FLAT, buckets=[bucket])
                del self._in_flight[bucket]
            if starts_next:
                self._weights.read(buckets=[bucket])
                self._in_flight[bucket] = self.runner.lane.submit_steps(bucket)

    def _wait_for(self, bucket: WeightBucket) -> None:
        """Wait for the mean of a bucket, and form its difference to the snapshot."""
        job = self._in_flight[bucket]
        if job is not None:
            bucket.subtract(bucket.difference, job.result(), out=bucket.difference)
            self._in_flight[bucket] = None

    def reset(self) -> None:
        """Make buckets again, once the round in flight has been applied."""
        self._drop_in_flight(self.runner.loading)
        self._apply_round(starts_next=False)
        super().reset()

    def weights_loaded(self, values: Mapping[str, torch.Tensor]) -> None:
        """Drop what the round in flight would change of the loaded weights."""
        self._drop_in_flight(values)
        super().weights_loaded(values)

    def _drop_in_flight(self, names: Container[str]) -> None:
        for bucket in self._in_flight:
            if bucket.slices_of(names):
                self._wait_for(bucket)
                bucket.clear(bucket.difference, names)

    def finish_round(self) -> None:
        """Wait for the round in flight, bring it into the weights, and have observers notified of it."""
        self._apply_round(starts_next=False)
        self.runner.tracer.deliver()

    def finish(self) -> bool:
        self.finish_round()
        return super().finish()

    def state_dict(self) -> dict[str, Any]:
        """Return step and rounds so far, and the finished round that is still to be added to the weights."""
        for bucket in self._in_flight:
            self._wait_for(bucket)
        differences = self._weights.by_name(DIFFERENCE)
        snapshots = self._weights.by_name(FLAT, self._weights.of_buffers)
        state = pending_state(self.runner, self.rounds.step, bool(self._in_flight), differences, snapshots)
        return {**state, "num_rounds": self.rounds.num_rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; the round in flight is dropped. Collective."""
        for bucket in self._in_flight:
            self._wait_for(bucket)
        load_pending_state(self.runner, self._weights, state, DIFFERENCE, FLAT, "num_rounds")
        self._weights.lockstep.loads.forget()
        self._in_flight = dict.fromkeys(self._weights) if state["has_differences"] else {}
        self.rounds.step = state["step"]
        self.rounds.num_rounds = state["num_rounds"]
        for bucket in self._weights:
            bucket.round_index = self.rounds.num_rounds


register("decentralized", DecentralizedAlgorithm, "weights averaged with all ranks, or with one peer at a time")
