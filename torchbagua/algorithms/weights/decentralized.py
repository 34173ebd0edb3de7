"""Decentralized training: weights averaged with all ranks or a few peers, in full precision or compressed."""

from collections.abc import Container, Mapping
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter
from typing import Any

import torch

from torchbagua.algorithms.base import check_at_least, check_codecs, check_flags, register
from torchbagua.algorithms.rank_state import check_rank_state, owner_of
from torchbagua.algorithms.weights.averaging import ModelAveragingAlgorithm, SynchronousAveragingImpl
from torchbagua.codecs.base import Compressor
from torchbagua.codecs.cast import Identity
from torchbagua.codecs.lookup import by_name
from torchbagua.collectives.low_precision_ring import check_ring_compression
from torchbagua.collectives.neighbourhood_mean import check_topology
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.topology import Topology, topology_of
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.lane import Job
from torchbagua.runtime.weight_buckets import DIFFERENCE, FLAT, FlatOf, WeightBucket


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
        average_buffers: average floating-point and complex buffers too, BatchNorm's for instance, if the module's
            `state_dict` holds them. Integer buffers are left alone.
        final_average: when you detach, or leave the `with` block without an error, give all ranks the mean of their
            weights, and rank 0's optimizer state.
        bucket_cap_mb: size in MiB of the buckets, which are sent one after the other.

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

    def make_impl(self, process_group: BaguaProcessGroup) -> "DecentralizedAlgorithmImpl":
        """Return the impl over `process_group`. Raises ValueError where the topology does not fit its ranks."""
        check_topology(type(self).__name__, self.topology, process_group, hierarchical=self.hierarchical)
        return DecentralizedAlgorithmImpl(process_group, self)


class DecentralizedAlgorithmImpl(SynchronousAveragingImpl):
    """See `DecentralizedAlgorithm`. A bucket's flat tensor holds the snapshot that is being averaged."""

    algorithm: DecentralizedAlgorithm

    def __init__(self, process_group: BaguaProcessGroup, algorithm: DecentralizedAlgorithm) -> None:
        super().__init__(process_group, algorithm)
        # Of each bucket, while a round is in flight: the job that averages it, or None where the difference is formed.
        self._in_flight: dict[WeightBucket, Job[torch.Tensor] | None] = {}

    def set_module(self, module: torch.nn.Module, ignored_names: frozenset[str] = frozenset()) -> None:
        """Make buckets, and start the round of step 0."""
        super().set_module(module, ignored_names)
        self._apply_round(starts_next=self.is_due)

    def reset(self) -> None:
        """Make buckets again, once the round in flight has been applied."""
        self._drop_in_flight(self.loading)
        self.receive_round()
        super().reset()

    def weights_loaded(self, values: Mapping[str, torch.Tensor]) -> None:
        """Drop what the round in flight would change of the loaded weights."""
        self._drop_in_flight(values)
        super().weights_loaded(values)

    def _drop_in_flight(self, names: Container[str]) -> None:
        for one in self._in_flight:
            if one.slices_of(names):
                self._wait_for(one)
                one.clear(one.difference, names)

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        bucket.round_index = self.num_rounds  # which chooses the peers
        # The mean is written to what becomes the difference, once the snapshot is subtracted.
        bucket.append_decentralized_synchronous_op(
            self.weights[bucket].difference, self.algorithm.hierarchical, self.algorithm.topology
        )

    def after_step(self) -> None:
        """Apply the round that was in flight, and start the next one where it is due."""
        self.step += 1
        if self.lane.has_failed:  # which would otherwise be noticed at the next round
            self.receive_round()
        if self.is_due:
            self.begin_next_step()
        self._apply_round(starts_next=self.is_due)

    def receive_round(self) -> None:
        """Wait for the round in flight and add what it changes to the weights."""
        self._apply_round(starts_next=False)

    def state_dict(self) -> dict[str, Any]:
        """Return step and rounds so far, and the finished round that is still to be added to the weights."""
        for one in self._in_flight:
            self._wait_for(one)
        differences = self.weights.by_name(DIFFERENCE)
        snapshots = self.weights.by_name(FLAT, self.weights.of_buffers)
        return {**self.pending_state(bool(self._in_flight), differences, snapshots), "num_rounds": self.num_rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; the round in flight is dropped. Collective."""
        for one in self._in_flight:
            self._wait_for(one)
        self.load_pending(state, DIFFERENCE, FLAT, "num_rounds")
        self.weights.loads.forget()
        self._in_flight = dict.fromkeys(self.weights) if state["has_differences"] else {}
        self.step = state["step"]
        self.num_rounds = state["num_rounds"]
        for bucket in self.buckets:
            bucket.round_index = self.num_rounds

    def _apply_round(self, *, starts_next: bool) -> None:
        """Bucket by bucket, while the lane is at the next: apply the round in flight, and hand over to the new one."""
        if starts_next:
            self.submit_in_lockstep(lambda: None)
            self.num_rounds += 1
        for one in self.weights:
            if one in self._in_flight:
                self._wait_for(one)
                self.weights.add(DIFFERENCE, snapshot=FLAT, buckets=[one])
                del self._in_flight[one]
            if starts_next:
                self.weights.read(buckets=[one])
                self._in_flight[one] = self.lane.submit(one.bucket.run)

    def _wait_for(self, one: WeightBucket) -> None:
        """Wait for the mean of a bucket, and form its difference to the snapshot."""
        job = self._in_flight[one]
        if job is not None:
            one.subtract(one.difference, job.result(), out=one.difference)
            self._in_flight[one] = None


@dataclass(frozen=True)
class LowPrecisionDecentralizedAlgorithm(ModelAveragingAlgorithm):
    """Every rank takes its own steps, and tells two neighbours on a ring how its weights have changed, in 8 bits.

    A rank holds bit-equal replicas of weights: w of its own, L and R of its two neighbours'. After a step that
    communicates, it quantises d = x + L/3 + R/3 - (5/3) w to Q(d); then w += Q(d) and x = w. The neighbours' Q(d)
    travel while the next gradient is computed, and are added to L and R (difference compression: Tang et al., arXiv
    1803.06443, DCD-PSGD; Bagua, arXiv 2107.01499).

    In each round a rank sends about 2 bytes a parameter. Buffers, and what is float64 or complex128, travel in full
    precision. Replicas take 12 bytes a parameter.

    A state, which is the replicas, can be loaded under another `communication_interval`, `compression`,
    `final_average` or `bucket_cap_mb`. On a ring of nodes a rank holds its own shard of the replicas, so nodes and
    `bucket_cap_mb` must be the same.

    Args:
        hierarchical: with several nodes of several ranks: the mean of a node travels on a ring of nodes.
        communication_interval: communicate every so many steps: with k, after steps 1, k + 1, 2k + 1 and so on.
        compression: the codec that sends changes: its name, see `torchbagua.codecs`; a Compressor, which may be one of
            yours; or None for full precision. One that needs error feedback is refused: weights become what neighbours
            were sent, so what is left out of a change is lost.
        average_buffers: average floating-point and complex buffers too, BatchNorm's for instance, if the module's
            `state_dict` holds them. Integer buffers are left alone.
        final_average: when you detach, or leave the `with` block without an error, give all ranks the mean of their
            weights, and rank 0's optimizer state.
        bucket_cap_mb: size in MiB of the buckets, which are sent one after the other.

    Raises:
        TypeError, ValueError: an argument does not fit.
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

    def make_impl(self, process_group: BaguaProcessGroup) -> SynchronousAveragingImpl:
        """Return the impl over `process_group`."""
        return LowPrecisionDecentralizedAlgorithmImpl(process_group, self)

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return `average_buffers`, and whose neighbours replicas are of: of nodes, with what decides on shards."""
        arguments = super().state_arguments(process_group)
        if process_group.intra_node is None:
            return arguments | {"nodes": None}
        if not self.hierarchical:
            return arguments | {"hierarchical": False, "nodes": None}
        shards = {"nodes": process_group.nodes, "bucket_cap_mb": self.bucket_cap_mb}
        return arguments | {"hierarchical": True, **shards}


_REPLICAS: dict[str, FlatOf] = {name: attrgetter(f"replicas.{name}") for name in ("weight", "left", "right")}


class LowPrecisionDecentralizedAlgorithmImpl(SynchronousAveragingImpl):
    """See `LowPrecisionDecentralizedAlgorithm`. Where nodes form the ring, a rank uses its own shard of replicas."""

    load_effect = "and they become the replicas"
    algorithm: LowPrecisionDecentralizedAlgorithm

    def __init__(self, process_group: BaguaProcessGroup, algorithm: LowPrecisionDecentralizedAlgorithm) -> None:
        super().__init__(process_group, algorithm)
        self._exchange: Job[None] | None = None

    def reset(self) -> None:
        """Make buckets again, and give replicas, which are zeros, the weights by a first round in full precision."""
        self.receive_round()
        super().reset()
        if self.is_single_rank:
            return
        self.weights.read()

        def first_round() -> None:
            for one in self.weights:
                one.bucket.run()
                if not one.are_buffers:  # the ring in full precision has done its work
                    one.bucket.clear_ops()
                    self._append_ring(one.bucket, self.codec_for(one.bucket))

        self._exchange = self.submit_in_lockstep(first_round)

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        # For the first round, which turns replicas of zeros into the ranks' own weights, to the bit only in full
        # precision; then that of parameters is replaced. Buffers keep it: a small variance beside a large one would not
        # survive eight bits.
        self._append_ring(bucket, Identity())

    def after_step(self) -> None:
        """Where it is due, replace the weights by what the neighbours will hear of, and let the lane tell them."""
        is_due = self.is_due
        self.step += 1
        # Between steps that are due, so that an exchange that has failed is heard of at the next step.
        if is_due or (self._exchange is not None and self._exchange.is_done()):
            self.receive_round()
        if is_due:
            self.weights.read()
            # Nodes form their means first, so ranks compare their progress. In a ring of ranks the update sends nothing
            # yet: to compare would be to wait for the others, and the exchange does it.
            submit = self.submit_in_lockstep if self._is_of_nodes else self.lane.submit
            submit(self._update).result()
            self.weights.write()
            self.begin_next_step()
            self._exchange = self.submit_in_lockstep(self._tell_neighbours)
            self.num_rounds += 1

    @torch.no_grad()
    def weights_loaded(self, values: Mapping[str, torch.Tensor]) -> None:
        """Make the replicas what was loaded: all ranks have loaded the same, so nothing need be sent."""
        self.finish_round()
        for one in self.weights:
            for replica in _REPLICAS.values():
                for name, part in one.named(replica(one)).items():
                    if name in values:
                        part.copy_(values[name])
        super().weights_loaded(values)

    def _update(self) -> None:
        for bucket in self.buckets:
            bucket.start()

    def _tell_neighbours(self) -> None:
        for bucket in self.buckets:
            bucket.finish()

    def receive_round(self) -> None:
        """Wait until the neighbours' replicas are up to date."""
        if self._exchange is not None:
            self._exchange.result()
            self._exchange = None

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far and the replicas."""
        self.receive_round()
        replicas = {name: self.weights.by_name(replica) for name, replica in _REPLICAS.items()}
        return {**owner_of(self.process_group), "step": self.step, **replicas}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned. Collective."""
        check_rank_state(type(self).__name__, state, ("step", *_REPLICAS), self.process_group)
        self.receive_round()
        for name, replica in _REPLICAS.items():
            self.weights.load_by_name(replica, state[name])
        self.weights.loads.forget()
        self.step = state["step"]

    def _append_ring(self, bucket: BaguaBucket, compression: Compressor) -> None:
        own = self.weights[bucket]
        bucket.append_low_precision_decentralized_synchronous_op(
            own.replicas.weight,
            own.replicas.left,
            own.replicas.right,
            self.algorithm.hierarchical,
            compression,
            is_bounded=own.are_buffers,
        )


register("decentralized", DecentralizedAlgorithm, "weights averaged with all ranks, or with one peer at a time")
register(
    "low_precision_decentralized", LowPrecisionDecentralizedAlgorithm, "changes of weights to two peers, in 8 bits"
)
