"""Decentralized training: weights averaged with all ranks or a few peers, in full precision or in eight bits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchbagua.algorithms.base import check_flags, register
from torchbagua.algorithms.model_averaging import ModelAveragingAlgorithm, check_at_least
from torchbagua.algorithms.rank_state import check_rank_state, place_of
from torchbagua.algorithms.synchronous_averaging import SynchronousAveragingImpl
from torchbagua.bucket import BaguaBucket
from torchbagua.collectives import PEER_SELECTION_MODES, BaguaProcessGroup, check_peers
from torchbagua.compressors import Compressor, Identity, MinMaxUInt8, sum_dtype
from torchbagua.lane import Job


@dataclass(frozen=True)
class DecentralizedAlgorithm(ModelAveragingAlgorithm):
    """Every rank takes its own steps, and averages its weights with its peers' while it computes the next gradient.

    After step t: x += mean(x_t) - x_t, where the mean of x_t was formed during step t. With SGD that is D-PSGD,
    x_{t+1} = mean(x_t) - lr g(x_t) (Lian et al., arXiv 1705.09056, algorithm 1; Bagua, arXiv 2107.01499). A rank sends
    8 (n-1)/n bytes a float32 parameter and round with "all", 4 with "shift_one".

    A state goes on under any arguments but another `average_buffers`: the round that it holds is applied as it was
    formed.

    Args:
        hierarchical: where there are several nodes with several ranks: average within the node first, and then with the
            node's peers. With "all" the result is the mean of all ranks, also where nodes are of unequal size.
        peer_selection_mode: "all", or "shift_one" for one peer, another one in each round; that needs an even number of
            ranks (or nodes).
        communication_interval: average every so many steps.
        average_buffers, final_average, bucket_cap_mb: see `ModelAveragingAlgorithm`.

    Raises:
        TypeError, ValueError: an argument is none of these.
    """

    hierarchical: bool = True
    peer_selection_mode: str = "all"
    communication_interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, "hierarchical")
        if self.peer_selection_mode not in PEER_SELECTION_MODES:
            raise ValueError(
                f"DecentralizedAlgorithm: peer_selection_mode must be one of {PEER_SELECTION_MODES}, got "
                f"{self.peer_selection_mode!r}"
            )
        check_at_least(self, "communication_interval", 1)

    def prepare(self) -> None:
        """Nothing: full precision needs no native kernel."""

    def make_impl(self, process_group: BaguaProcessGroup) -> "DecentralizedAlgorithmImpl":
        """Return the impl over `process_group`. Raises ValueError where its ranks cannot be paired."""
        check_peers(type(self).__name__, process_group, self.hierarchical, self.peer_selection_mode)
        return DecentralizedAlgorithmImpl(
            process_group, self.hierarchical, self.peer_selection_mode, self.communication_interval, **self.options
        )


class DecentralizedAlgorithmImpl(SynchronousAveragingImpl):
    """See `DecentralizedAlgorithm`. A bucket's flat tensor holds the snapshot that is being averaged."""

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        communication_interval: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(process_group, communication_interval, **options)
        self.hierarchical = hierarchical
        self.peer_selection_mode = peer_selection_mode
        self._differences: list[torch.Tensor] = []
        self._round: Job[None] | None = None
        self._has_differences = False

    def set_module(self, module: torch.nn.Module, ignored_names: frozenset[str] = frozenset()) -> None:
        """Make buckets, and start the round of step 0."""
        super().set_module(module, ignored_names)
        self._start_round()

    def reset(self) -> None:
        """Make buckets again, once the round in flight has been applied."""
        self.settle()
        self._differences = []
        super().reset()

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        """Append the mean with the peers."""
        peer_weight = torch.zeros_like(bucket.flat)
        self._differences.append(peer_weight)
        bucket.num_runs = self.num_rounds  # which chooses the peer
        bucket.append_decentralized_synchronous_op(peer_weight, self.hierarchical, self.peer_selection_mode)

    def after_step(self) -> None:
        """Apply the round that was in flight, and start the next one where it is due."""
        self.settle()
        self.step += 1
        self._start_round()

    def settle(self) -> None:
        """Wait for the round in flight and add what it changes to the weights."""
        self._wait()
        if self._has_differences:
            self.add_to_weights(self._differences, [bucket.flat for bucket in self.buffer_buckets])
            self._has_differences = False

    def state_dict(self) -> dict[str, Any]:
        """Return step and rounds so far, and the finished round that is still to be added to the weights."""
        self._wait()
        return {
            **place_of(self.process_group),
            "step": self.step,
            "num_rounds": self.num_rounds,
            "has_differences": self._has_differences,
            "differences": self.by_name(self._differences),
            "buffer_snapshots": self.by_name([bucket.flat for bucket in self.buffer_buckets], self.buffer_buckets),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; the round in flight is dropped. Collective."""
        check_rank_state(
            type(self).__name__,
            state,
            ("step", "num_rounds", "has_differences", "differences", "buffer_snapshots"),
            self.process_group,
        )
        self._wait()
        self.load_by_name(self._differences, state["differences"])
        flats = [bucket.flat for bucket in self.buffer_buckets]
        self.load_by_name(flats, state["buffer_snapshots"], self.buffer_buckets)
        self._has_differences = bool(state["has_differences"])
        self.step = state["step"]
        self.num_rounds = state["num_rounds"]
        for bucket in self.buckets:
            bucket.num_runs = self.num_rounds

    def _start_round(self) -> None:
        if not self.is_due:
            return
        self.read_weights(self.flats)

        def average() -> None:
            for bucket, difference in zip(self.buckets, self._differences, strict=True):
                difference.sub_(bucket.run())

        self._round = self.submit_round(average)
        self.num_rounds += 1

    def _wait(self) -> None:
        if self._round is not None:
            self._round.result()
            self._round = None
            self._has_differences = True


@dataclass(frozen=True)
class LowPrecisionDecentralizedAlgorithm(ModelAveragingAlgorithm):
    """Every rank takes its own steps, and tells its two neighbours on a ring in 8 bits how its weights have changed.

    A rank knows bit-equal replicas L and R of its neighbours' last agreed weights, and w of its own. After a step that
    is due: d = x + L/3 + R/3 - (5/3) w; w += Q(d); x = w; and L and R take their owners' Q(d), which travel while the
    next gradient is computed (difference compression: Tang et al., arXiv 1803.06443, DCD-PSGD; Bagua, arXiv
    2107.01499). A rank sends about 2 bytes a parameter and round, and buffers and what is float64 or complex128 in full
    precision; its replicas take 12 bytes a parameter.

    A state, which is the replicas, goes on under another `communication_interval`, `final_average` or `bucket_cap_mb`.
    Where the ring is one of nodes these must be the same ones, and `bucket_cap_mb` too: a rank holds its own shard of
    each bucket's replicas.

    Args:
        hierarchical: where there are several nodes with several ranks: the mean of a node travels on a ring of nodes.
        communication_interval: communicate every so many steps.
        average_buffers, final_average, bucket_cap_mb: see `ModelAveragingAlgorithm`.

    Raises:
        TypeError, ValueError: an argument is none of these.
    """

    hierarchical: bool = True
    communication_interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, "hierarchical")
        check_at_least(self, "communication_interval", 1)

    def make_impl(self, process_group: BaguaProcessGroup) -> "LowPrecisionDecentralizedAlgorithmImpl":
        """Return the impl over `process_group`."""
        return LowPrecisionDecentralizedAlgorithmImpl(
            process_group, self.hierarchical, self.communication_interval, **self.options
        )

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return `average_buffers`, and whose neighbours replicas are of: of nodes, with what decides on shards."""
        arguments = super().state_arguments(process_group)
        if process_group.intra_node is None:
            return arguments | {"nodes": None}
        if not self.hierarchical:
            return arguments | {"hierarchical": False, "nodes": None}
        shards = {"nodes": process_group.nodes, "bucket_cap_mb": self.bucket_cap_mb}
        return arguments | {"hierarchical": True, **shards}


_REPLICAS = ("weight", "left", "right")


class LowPrecisionDecentralizedAlgorithmImpl(SynchronousAveragingImpl):
    """See `LowPrecisionDecentralizedAlgorithm`.

    Attributes:
        replicas: by "weight", "left" and "right", a flat tensor for each bucket, in its `sum_dtype`. Where nodes form
            the ring, a rank uses its own shard of them.
    """

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        hierarchical: bool = True,
        communication_interval: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(process_group, communication_interval, **options)
        self.hierarchical = hierarchical
        self.compressor = MinMaxUInt8()
        self.replicas: dict[str, list[torch.Tensor]] = {}
        self._exchange: Job[None] | None = None

    def reset(self) -> None:
        """Make buckets again, and exchange the weights in full precision for the replicas to start from."""
        self.settle()
        self.replicas = {name: [] for name in _REPLICAS}
        super().reset()
        if self.is_alone:
            return
        self.read_weights(self.flats)

        def exchange_weights() -> None:
            for bucket, *replicas in zip(self.buckets, *self.replicas.values(), strict=True):
                # From replicas of zeros, in full precision: see LowPrecisionRing.
                self._append_ring(bucket, replicas, Identity())
                bucket.run()
                # Buffers stay so: a small variance beside a large one would not survive eight bits.
                if bucket not in self.buffer_buckets:
                    bucket.clear_ops()
                    self._append_ring(bucket, replicas, self.codec_for(bucket))

        self._exchange = self.submit_round(exchange_weights)

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        """Make the replicas; the operations follow when they have been exchanged."""
        for replicas in self.replicas.values():
            replicas.append(torch.zeros_like(bucket.flat, dtype=sum_dtype(bucket.flat.dtype)))

    def after_step(self) -> None:
        """Where it is due, replace the weights by what the neighbours will hear of, and let the lane tell them."""
        is_due = self.is_due
        self.step += 1
        if is_due or (self._exchange is not None and self._exchange.is_done()):
            self.settle()
        if is_due:
            self.read_weights(self.flats)
            # In a ring of ranks that sends nothing yet; nodes form their means first.
            submit = self.submit_round if self._is_of_nodes else self.lane.submit
            finishes = submit(lambda: [bucket.start() for bucket in self.buckets]).result()
            self.write_weights(self.flats)

            def exchange() -> None:
                for finish in finishes:
                    finish()

            self._exchange = self.submit_round(exchange)
            self.num_rounds += 1

    def settle(self) -> None:
        """Wait until the neighbours' replicas are up to date."""
        if self._exchange is not None:
            self._exchange.result()
            self._exchange = None

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far and the replicas."""
        self.settle()
        replicas = {name: self.by_name(flats) for name, flats in self.replicas.items()}
        return {**place_of(self.process_group), "step": self.step, **replicas}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned. Collective."""
        check_rank_state(type(self).__name__, state, ("step", *_REPLICAS), self.process_group)
        self.settle()
        for name, flats in self.replicas.items():
            self.load_by_name(flats, state[name])
        self.step = state["step"]

    @property
    def _is_of_nodes(self) -> bool:
        return self.hierarchical and self.process_group.intra_node is not None

    def _append_ring(self, bucket: BaguaBucket, replicas: Sequence[torch.Tensor], compression: Compressor) -> None:
        weight, left, right = replicas
        bucket.append_low_precision_decentralized_synchronous_op(
            weight, left, right, self.hierarchical, compression, is_bounded=bucket in self.buffer_buckets
        )


register("decentralized", DecentralizedAlgorithm, "weights averaged with all ranks, or with one peer at a time")
register(
    "low_precision_decentralized", LowPrecisionDecentralizedAlgorithm, "changes of weights to two peers, in 8 bits"
)
