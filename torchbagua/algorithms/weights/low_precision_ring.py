"""Decentralized training on a ring: each rank sends compressed changes of its weights to two neighbors.

On rank i, with the symbols of DCD-PSGD (Tang et al., arXiv 1803.06443, algorithm 1): codec C, and the replicas w, L and
R of the weights x of ranks i, i - 1 and i + 1, each with the weight 1/3. The documentation calls z and C d and Q.

    w, L, R = x of ranks i, i - 1 and i + 1                     # by a first round in full precision
    for t = 0, 1, 2, ...:
        x = x - gamma * gradient of F_i(x)                      # the attached optimizer
        if t % communication_interval == 0:
            wait for L and R of the last round
            z = (w + L + R) / 3 + (x - w) - w
            w = w + C(z); x = w
            start a round: the lane sends C(z) to both neighbors, and adds the received C(z) to L and R
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter
from typing import Any

import torch

from torchbagua.algorithms.base import check_at_least, check_codecs, check_flags, register
from torchbagua.algorithms.weights.rounds import ModelAveragingAlgorithm, SynchronousRounds
from torchbagua.codecs.base import Compressor, Identity, by_name
from torchbagua.collectives.low_precision_ring import check_ring_compression
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.lane import Job
from torchbagua.runtime.rank_state import check_rank_state, is_of_other_ranks, owner_of
from torchbagua.runtime.weight_buckets import FlatOf, WeightBucket
from torchbagua.runtime.weight_runner import WeightImpl, WeightRunner


@dataclass(frozen=True)
class LowPrecisionDecentralizedAlgorithm(ModelAveragingAlgorithm):
    """Each rank takes its own steps and sends the changes of its weights to two neighbors on a ring, in 8 bits.

    A rank stores bitwise equal replicas of weights: w of its own weights, L and R of its two neighbors' weights. After
    a step that communicates, it quantizes d = x + L/3 + R/3 - (5/3) w to Q(d). Then w += Q(d) and x = w. The neighbors'
    Q(d) are sent during the computation of the next gradient, and are added to L and R (difference compression: Tang et
    al., arXiv 1803.06443, DCD-PSGD; Bagua, arXiv 2107.01499).

    In each round, a rank sends about 2 bytes per parameter. Buffers and float64 and complex128 parameters are sent in
    full precision. Replicas take 12 bytes per parameter, or 8 bytes in a ring of two.

    A state consists of the replicas and can be loaded with another `communication_interval`, `compression`,
    `final_average` or `bucket_cap_mb`. On a ring of nodes, each rank stores a shard of the replicas, so the nodes and
    `bucket_cap_mb` must be the same.

    Args:
        hierarchical: with multi-node groups that have several ranks per node, send the means of nodes on a ring of
            nodes.
        communication_interval: the number k of steps between rounds. Ranks communicate after steps 1, k + 1, 2k + 1 and
            so on.
        compression: the codec for the changes: its name (see `torchbagua.codecs`), a Compressor, which may be your own,
            or None for full precision. A codec that needs error feedback is refused: the weights are set to the values
            sent to neighbors, so the residual of a change is lost.
        average_buffers, final_average, bucket_cap_mb: see `ModelAveragingAlgorithm`.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    hierarchical: bool = True
    communication_interval: int = 1
    _: KW_ONLY
    compression: str | Compressor | None = "minmax_uint8"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, "hierarchical")
        check_at_least(self, "communication_interval", 1)
        check_codecs(self, "compression")
        check_ring_compression(type(self).__name__, self.compression)

    def make_codec(self) -> Compressor:
        return by_name(self.compression)

    def make_impl(self, runner: WeightRunner) -> WeightImpl:
        return LowPrecisionDecentralizedAlgorithmImpl(runner)

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return `average_buffers`, and what determines the replicas: the ring of ranks or of nodes, and its shards."""
        arguments = super().state_arguments(process_group)
        if process_group.intra_node is None:
            return arguments | {"nodes": None}
        if not self.hierarchical:
            return arguments | {"hierarchical": False, "nodes": None}
        shards = {"nodes": process_group.nodes, "bucket_cap_mb": self.bucket_cap_mb}
        return arguments | {"hierarchical": True, **shards}

    def check_state(self, saved: Mapping[str, Any], state: Mapping[str, Any], process_group: BaguaProcessGroup) -> None:
        """Raise ValueError if arguments differ; the ring may be another if the number of ranks has changed."""
        if "num_ranks" in state and is_of_other_ranks(state, process_group):
            saved = {name: value for name, value in saved.items() if name != "nodes"}
        super().check_state(saved, state, process_group)


_REPLICAS: dict[str, FlatOf] = {name: attrgetter(f"replicas.{name}") for name in ("weight", "left", "right")}


class LowPrecisionDecentralizedAlgorithmImpl(WeightImpl):
    """See `LowPrecisionDecentralizedAlgorithm`. On a ring of nodes, each rank uses its own shard of the replicas.

    Attributes:
        rounds: counts steps and rounds.
    """

    algorithm: LowPrecisionDecentralizedAlgorithm

    def __init__(self, runner: WeightRunner) -> None:
        super().__init__(runner)
        self.rounds = SynchronousRounds(self.runner, self.algorithm, load_effect="and they become the replicas")
        self._weights = self.rounds.weights
        self._exchange: Job[None] | None = None

    def reset(self) -> None:
        """Rebuild buckets, and initialize the replicas, which are zeros, by a first round in full precision."""
        self._receive()
        super().reset()
        if self.rounds.is_single_rank:
            return
        self._weights.read()

        def first_round() -> None:
            for bucket in self._weights:
                bucket.run()
                if not bucket.are_buffers:  # replace the full-precision ring, which only the first round needs
                    bucket.clear_ops()
                    self._append_ring(bucket, self.runner.codec_for(bucket))

        self._exchange = self.rounds.submit(first_round)

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        assert isinstance(bucket, WeightBucket)
        group = self.runner.process_group
        is_of_nodes = self.algorithm.hierarchical and group.intra_node is not None
        bucket.make_replicas(len(group.node_ranks) if is_of_nodes else group.size)
        # Full precision for the first round, which must make the zero replicas bitwise equal to the ranks' weights. For
        # parameters, this operation is replaced afterwards. Buffers keep it: a small variance next to a large one would
        # be lost in 8 bits.
        self._append_ring(bucket, Identity())

    def _append_ring(self, bucket: BaguaBucket, compression: Compressor) -> None:
        assert isinstance(bucket, WeightBucket)
        bucket.append_low_precision_decentralized_synchronous_op(
            bucket.replicas.weight,
            bucket.replicas.left,
            bucket.replicas.right,
            self.algorithm.hierarchical,
            compression,
            is_bounded=bucket.are_buffers,
        )

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None]:
        return self.rounds.count_backward

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        return self._after_step

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """If a round is due, apply the quantized update to the weights, and submit its exchange to the lane."""
        rounds = self.rounds
        is_due = rounds.is_due(self.algorithm.communication_interval)
        rounds.count_step()
        if is_due or self.runner.lane.has_failed:  # otherwise, the failure would be noticed only at the next round
            self._receive()
        if is_due:
            self._weights.read()
            # Nodes compute their means first, so ranks compare their progress. In a ring of ranks, the update does not
            # send yet: a comparison would wait for the other ranks, and the exchange compares anyway.
            if self.algorithm.hierarchical and self.runner.process_group.intra_node is not None:
                rounds.submit(self._update).finish()
            else:
                self.runner.lane.submit(self._update).result()
            self._weights.write()
            rounds.overlap_next_step()
            self._exchange = rounds.start(self._send_to_neighbours)

    def _update(self) -> None:
        for bucket in self.runner.buckets:
            bucket.start()

    def _send_to_neighbours(self) -> None:
        for bucket in self.runner.buckets:
            bucket.finish()

    def _receive(self) -> None:
        """Wait until the replicas of the neighbors are up to date."""
        if self._exchange is not None:
            self._exchange.finish()
            self._exchange = None

    @torch.no_grad()
    def weights_loaded(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set the replicas to the loaded weights. All ranks have loaded the same weights, so none are sent."""
        self.finish_round()
        for bucket in self._weights:
            for replica in _REPLICAS.values():
                for name, part in bucket.named(replica(bucket)).items():
                    if name in values:
                        part.copy_(values[name])
        super().weights_loaded(values)

    def forget_in_flight(self) -> None:
        self._exchange = None

    def finish_round(self) -> None:
        """Wait until the replicas of the neighbors are up to date, and notify observers of the round."""
        self._receive()
        self.runner.tracer.deliver()

    def finish(self) -> bool:
        self.finish_round()
        return super().finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far and the replicas."""
        self._receive()
        replicas = {name: self._weights.by_name(replica) for name, replica in _REPLICAS.items()}
        return {**owner_of(self.runner.process_group), "step": self.rounds.step, **replicas}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` returned. Collective."""
        check_rank_state(self.runner.name, state, ("step", *_REPLICAS), self.runner.process_group)
        self._receive()
        if is_of_other_ranks(state, self.runner.process_group):
            self.reset()
        else:
            for name, replica in _REPLICAS.items():
                self._weights.load_by_name(replica, state[name])
        self._weights.lockstep.loads.forget()
        self.rounds.load(state["step"], self.rounds.num_rounds)


register(
    "low_precision_decentralized", LowPrecisionDecentralizedAlgorithm, "weight changes sent to two neighbors, in 8 bits"
)
