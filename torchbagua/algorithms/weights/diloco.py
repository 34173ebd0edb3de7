"""DiLoCo: each rank takes many local steps, and then an outer optimizer steps on the mean progress of all ranks.

On rank i of k, with the symbols of DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1) and of Streaming DiLoCo
(arXiv 2501.18512): weights theta_i, shadow weights theta, equal on all ranks, and the residual e_i of the codec Q.

    for step = 1, 2, ...:
        theta_i = InnerOpt(theta_i, gradient)                   # the attached optimizer
        if tau steps have passed since a round of fragment p was started:
            Delta = mean over j of Q(Delta_j + e_j); e_j = Delta_j + e_j - Q(Delta_j + e_j)
            theta = OuterOpt(theta, Delta)                      # in fragment p
            theta_i += theta - x                                # keeps the steps taken since the snapshot x
        if step = (p + 1) H // P modulo H, for a fragment p of P:
            x = theta_i; Delta_i = theta - x                    # in fragment p
            start a round of fragment p: the lane computes the mean
            if tau = 0: wait for Delta, update e_j and theta as above, theta_i = theta
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from torchbagua._warnings import warn_user, warn_user_during_error
from torchbagua.algorithms.base import Algorithm, check_at_least, check_codecs, check_flags, register
from torchbagua.algorithms.gradient.all_reduce import GradientAllReduceAlgorithm
from torchbagua.algorithms.weights.rounds import ModelAveragingAlgorithm, SynchronousRounds
from torchbagua.codecs.base import Compressor, Identity, by_name, needs_feedback, sum_dtype
from torchbagua.collectives.agreement import agree, fingerprint_of_values, stable_repr
from torchbagua.collectives.broadcast import broadcast_tensors
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.observe.events import Details
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.lane import Job
from torchbagua.runtime.parameter_state import ParameterState, residual_state
from torchbagua.runtime.parameters import BaguaTensor
from torchbagua.runtime.rank_state import check_keys, check_rank_state, continued, is_of_other_ranks, owner_of
from torchbagua.runtime.sub_buckets import sub_bucket_of
from torchbagua.runtime.weight_buckets import FLAT, SNAPSHOT, WeightBucket, WeightBuckets
from torchbagua.runtime.weight_runner import WeightImpl, WeightRunner

OuterOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

_ROUND_KEYS = ("snapshot_step", "fragment", "has_differences", "differences", "buffer_snapshots")
_STATE_KEYS = (*_ROUND_KEYS, "step", "num_rounds", "residuals", "theta", "outer")
_OWNER_KEYS = {"rank", "num_ranks", "nodes"}  # in "residuals"


@dataclass(frozen=True, repr=False)
class DiLoCoAlgorithm(ModelAveragingAlgorithm):
    """Each rank takes local steps. Every `inner_steps` steps, an outer optimizer steps on the mean of their progress.

    All ranks store identical shadow weights theta, in float32. In a round, each rank sends its outer gradient, D =
    theta - w for its weights w, and receives the mean. The outer optimizer steps theta on this mean: by default, SGD
    with Nesterov momentum, m = mu m + D; theta -= lr (D + mu m). Then the weights are set to theta (DiLoCo, Douillard
    et al., arXiv 2311.08105, algorithm 1). The optimizer that you attach with is the inner optimizer. Its state is
    never averaged.

    With a `delay`, training continues while a round is in flight. After `delay` steps, the change of theta is added to
    the weights, which preserves the steps taken meanwhile. With several `fragments`, each fragment has its own rounds,
    and the fragments take turns (Streaming DiLoCo, Douillard et al., arXiv 2501.18512, which mixes the two weights,
    whereas this algorithm adds the difference).

    In each round, a rank sends 2 (n-1)/n times the encoded parameters. With 4 bits every 30 steps, that is 1/226 of
    what DDP sends in float32. NaN or Inf on any rank makes the mean NaN or Inf on all ranks. All ranks drop such a
    round without effect. One RuntimeWarning reports the first dropped round, and another, at the end, their number.

    A state can be loaded with another `inner_steps`, `compression`, `delay`, `hierarchical`, `final_average` and
    `bucket_cap_mb`. On other nodes, residuals are dropped with a RuntimeWarning: the residual of one round is lost.

    Args:
        inner_steps: the number of steps between two rounds of a fragment, H. Fragment p of F communicates after step
            (p + 1) H // F, and then every H steps. Buffers are sent with the last fragment.
        outer_lr: the learning rate of the outer SGD.
        outer_momentum: the momentum of the outer SGD, less than 1. With up to 300 rounds, 0.9 increased the loss.
        nesterov: whether the outer SGD uses Nesterov momentum.
        outer_optimizer: replaces the three previous arguments. A function that gets the list of shadow weights, a
            float32 tensor for each parameter, and returns a torch.optim.Optimizer of them. Ranks compare it by its
            qualified name, so a lambda is refused.
        compression: the codec for outer gradients: its name (see `torchbagua.codecs`), a Compressor, or None for full
            precision.
        error_feedback: add the residual to the outer gradient of the next round.
        fragments: the number of parts of the parameters, of about equal size in bytes.
        delay: the number of steps from the end of a fragment's inner steps until its round is applied, less than
            `inner_steps` / `fragments`. With 0, training waits for the round.
        hierarchical: with multi-node groups that have several ranks per node, gradients are averaged within a node at
            every step. Rounds run only between nodes, and each rank sends its shard.
        average_buffers, final_average, bucket_cap_mb: see `ModelAveragingAlgorithm`. Buffers are sent in full
            precision.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    inner_steps: int = 30
    outer_lr: float = 0.7
    outer_momentum: float = 0.6
    nesterov: bool = True
    outer_optimizer: OuterOptimizer | None = None
    compression: str | Compressor | None = "minmax_uint4"
    error_feedback: bool = True
    fragments: int = 1
    delay: int = 0
    hierarchical: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        check_flags(self, "nesterov", "error_feedback", "hierarchical")
        for argument, least in {"inner_steps": 1, "fragments": 1, "delay": 0}.items():
            check_at_least(self, argument, least)
        for argument in ("outer_lr", "outer_momentum"):
            check_at_least(self, argument, 0, float | int)
        if self.outer_momentum >= 1:
            raise ValueError(
                f"{name}: outer_momentum must be less than 1, because outer gradients would otherwise accumulate "
                f"without limit, got {self.outer_momentum!r}"
            )
        if self.outer_optimizer is not None:
            if not callable(self.outer_optimizer):
                is_optimizer = isinstance(self.outer_optimizer, torch.optim.Optimizer)
                got = f"the {type(self.outer_optimizer).__name__} itself" if is_optimizer else self.outer_optimizer
                raise TypeError(
                    f"{name}: outer_optimizer must be None or a function that takes parameters and returns an "
                    f"optimizer, got {got}"
                )
            stable_repr(self.outer_optimizer, f"{name}: outer_optimizer")
        check_codecs(self, "compression")
        if not self.error_feedback and needs_feedback(self.compression):
            raise ValueError(
                f"{name}: compression {self.compression!r} needs error_feedback=True, because training fails if its "
                "large residuals are lost"
            )
        if self.delay and self.delay * self.fragments >= self.inner_steps:
            raise ValueError(
                f"{name}: delay must be less than inner_steps / fragments, {self.inner_steps} / {self.fragments}, so "
                f"that a round is applied before the next round starts, got {self.delay}"
            )

    def __repr__(self) -> str:
        """Return the arguments as text, with functions by their qualified names."""
        return f"{type(self).__qualname__}({', '.join(f'{name}={text}' for name, text in self.arguments().items())})"

    @property
    def averages_gradients_within_nodes(self) -> bool:
        """Return `hierarchical`."""
        return self.hierarchical

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return the arguments that determine the tensors in the state and the outer optimizer that computed them."""
        names = ("outer_lr", "outer_momentum", "nesterov", "outer_optimizer", "error_feedback", "fragments")
        arguments = Algorithm.state_arguments(self, process_group)
        return super().state_arguments(process_group) | {name: arguments[name] for name in names}

    def check_state(self, saved: Mapping[str, Any], state: Mapping[str, Any], process_group: BaguaProcessGroup) -> None:
        """Raise ValueError if arguments differ, or if the residuals are those of another rank."""
        super().check_state(saved, state, process_group)
        owner = type(self).__name__
        check_keys(owner, state, _STATE_KEYS)
        check_rank_state(owner, state["residuals"], ["nodes"], process_group)

    def make_codec(self) -> Compressor:
        return by_name(self.compression)

    def make_impl(self, runner: WeightRunner) -> "DiLoCoAlgorithmImpl":
        return DiLoCoAlgorithmImpl(runner)


@dataclass(frozen=True, repr=False)
class LocalSGDAlgorithm(DiLoCoAlgorithm):
    """Each rank takes local steps. Every `inner_steps` steps, the weights are set to the mean of all ranks' weights.

    This is `DiLoCoAlgorithm` with an outer learning rate of 1 and no momentum (Stich, arXiv 1805.09767). All other
    arguments are the same.
    """

    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = False


class DiLoCoAlgorithmImpl(WeightImpl):
    """The `Attachment.impl` while `DiLoCoAlgorithm` is attached.

    Attributes:
        rounds: counts steps and rounds.
        shadow: the shadow weights. `shadow.optimizer` is the outer optimizer.
        num_dropped: the number of dropped rounds.
    """

    algorithm: DiLoCoAlgorithm

    def __init__(self, runner: WeightRunner) -> None:
        super().__init__(runner)
        algorithm, group = self.algorithm, runner.process_group
        # The node of each rank if ranks send shards to other nodes. None if each rank sends whole outer gradients.
        self._nodes = group.nodes if algorithm.hierarchical and group.intra_node is not None else None
        runner.on_close(self._report_dropped)
        self.rounds = SynchronousRounds(
            self.runner,
            algorithm,
            load_effect="they become the shadow weights, and their outer momentum and residuals are reset",
            open_node_gradients=None if self._nodes is None else self._open_node_gradients,
        )
        self.shadow = ShadowWeights(algorithm)
        self.num_dropped = 0
        self._weights = self.rounds.weights
        self._fragments: dict[str, int] = {}  # by parameter name
        self._residuals = self._new_residuals()
        self._residuals_of: dict[WeightBucket, TwoPhaseResiduals] = {}
        self._overlaps = algorithm.delay > 0
        # The round in flight, or received but not yet applied to the weights.
        self._job: Job[Any] | None = None
        self._has_differences = False
        self._buckets: Sequence[WeightBucket] = []
        self._snapshot_step = 0

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None]:
        return self.rounds.count_backward

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        return self._after_step

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the round in flight if its delay is over, and start the round of the fragment that is due."""
        self.rounds.count_step()
        if self.rounds.is_single_rank:
            return
        due = [bucket for bucket in self._weights if self._is_due(bucket)]
        is_time = self.rounds.step >= self._snapshot_step + self.algorithm.delay
        # A failure raises at once. A loaded round may follow another schedule and be in flight when the next is due.
        if is_time or due or self.runner.lane.has_failed:
            self._apply_round()
        if due:
            if self._overlaps:
                self.rounds.overlap_next_step()
            self._start_round(due)
            if not self._overlaps:
                self._receive_round()

    def _is_due(self, bucket: WeightBucket) -> bool:
        interval, num_fragments = self.algorithm.inner_steps, self.algorithm.fragments
        offset = (self._fragment_of(bucket.tensors[0]) + 1) * interval // num_fragments
        return (self.rounds.step - offset) % interval == 0

    def _fragment_of(self, tensor: BaguaTensor) -> int:
        """Return the fragment of a tensor, and of its bucket. Buffers are sent with the last fragment."""
        return self._fragments.get(tensor.name, self.algorithm.fragments - 1)

    def _start_round(self, due: Sequence[WeightBucket]) -> None:
        """Start the averaging of outer gradients and of buffers on the lane."""
        snapshot = SNAPSHOT if self._overlaps else FLAT
        for bucket in due:  # bucket by bucket, while each is in the caches
            self._weights.read(snapshot, [bucket])
            if not bucket.are_buffers:
                torch.sub(self.shadow.theta[bucket], snapshot(bucket), out=self._averaged(bucket).flat)
            elif self._overlaps:
                bucket.flat.copy_(bucket.snapshot)
        averaged = list(map(self._averaged, due))
        self._job = self.rounds.start(lambda: [bucket.run() for bucket in averaged])
        self._buckets, self._snapshot_step = due, self.rounds.step

    def _receive_round(self) -> None:
        """Wait for the means, step the outer optimizer on them, and write the weights or the pending differences."""
        if self._job is None:
            return
        self._job.finish(reads=True)
        self._job = None
        # The result is the same on all ranks, because the means are.
        if not all(map(self._has_valid_mean, self._buckets)):
            if not self.num_dropped:
                warn_user(
                    f"torchbagua: the round after {self._snapshot_step} steps is dropped on all ranks, because a "
                    "rank's weights contain NaN or Inf; the number of dropped rounds is reported at the end"
                )
            self.num_dropped += 1
            return
        for bucket in self._buckets:
            if bucket in self._residuals_of:
                self._residuals_of[bucket].commit()
        self.shadow.step([bucket for bucket in self._buckets if not bucket.are_buffers])
        if not self._overlaps:
            self._weights.write(self._new_values, self._buckets)
            self._report_applied()
            return
        for bucket in self._buckets:
            bucket.subtract(self._new_values(bucket), bucket.snapshot, out=self._difference(bucket))
        self._has_differences = True

    def _apply_round(self) -> None:
        """Wait for the round in flight, and add its differences to the weights."""
        self._receive_round()
        if self._has_differences:
            self._weights.add(self._difference, SNAPSHOT, self._buckets)
            self._has_differences = False
            self._report_applied()

    def _averaged(self, bucket: WeightBucket) -> BaguaBucket:
        return bucket if bucket.are_buffers else self.shadow.gradient[bucket]

    def _new_values(self, bucket: WeightBucket) -> torch.Tensor:
        return bucket.flat if bucket.are_buffers else self.shadow.theta[bucket]

    def _difference(self, bucket: WeightBucket) -> torch.Tensor:
        return bucket.difference if bucket.are_buffers else self.shadow.gradient[bucket].flat

    def _has_valid_mean(self, bucket: WeightBucket) -> bool:
        flat = self._averaged(bucket).flat
        if not len(flat):
            return True
        low, high = flat.aminmax()  # on CPUs ten times faster than isfinite().all(); both are NaN if an element is NaN
        # A buffer may legitimately contain -inf, such as an attention mask.
        return not bool(low.isnan()) if bucket.are_buffers else bool(low.isfinite() & high.isfinite())

    def _report_applied(self) -> None:
        fragment, staleness = self._fragment_of(self._buckets[0].tensors[0]), self.rounds.step - self._snapshot_step
        values = {"rounds": self.rounds.num_rounds, "fragment": fragment, "staleness in steps": staleness}
        tracer, now = self.runner.tracer, self.runner.tracer.now()
        tracer.tell("apply", now, now, Details(values=values))

    # The buckets.

    def tensors_to_buckets(self, tensors: list[BaguaTensor], do_flatten: bool) -> list[BaguaBucket]:
        parameters = [tensor for tensor in tensors if tensor.is_parameter]
        num_fragments = self.algorithm.fragments
        if num_fragments > len(parameters) and not self.rounds.is_single_rank:
            raise ValueError(
                f"{type(self.algorithm).__name__}: fragments must be at most the number of trained parameters, "
                f"{len(parameters)}, got {num_fragments}"
            )
        self._fragments = assign_fragments(parameters, num_fragments)
        buckets = self._weights.make_buckets(tensors, lambda tensor: f"fragment {self._fragment_of(tensor)} ")
        self.shadow.rebuild(self._weights)
        return buckets

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        assert isinstance(bucket, WeightBucket)
        if bucket.are_buffers:
            bucket.append_centralized_synchronous_op(self.algorithm.hierarchical)
            return
        gradient = self.shadow.gradient[bucket]
        codec, residuals = self.runner.codec_for(gradient), None
        if self._residuals is not None and codec is self.runner.codec:
            residuals = self._residuals_of[bucket] = self._residuals.of_bucket(gradient)
        if self._nodes is None:
            gradient.append_centralized_synchronous_op(hierarchical=False, compression=codec, error_feedback=residuals)
            return
        from torchbagua.collectives.hierarchical import mean_of_nodes

        mean = mean_of_nodes(self.runner.process_group, codec, gradient.spec, residuals=residuals)

        def average_over_nodes(bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
            mean(bucket.flat)

        gradient.append_python_op(average_over_nodes)

    def _open_node_gradients(self) -> GradientRunner:
        """Return a runner that averages gradients within nodes. It has a separate lane, to not queue behind a round."""
        group = self.runner.process_group.open_gradient_group()
        node_gradients = GradientAllReduceAlgorithm(in_rank_order=True).reify(group)
        assert isinstance(node_gradients, GradientRunner)
        group.close()  # `node_gradients` has opened its own private groups
        self.runner.on_close(node_gradients.close, first=True)  # close it before the groups of this runner
        return node_gradients

    def reset(self) -> None:
        """Rebuild buckets after the round in flight has been applied, and make theta equal on all ranks."""
        self._drop_differences(self.runner.loading)
        self._apply_round()
        self._residuals_of.clear()  # the residuals of their parameters are kept for the new buckets
        super().reset()
        if not self.shadow.theta:
            return
        thetas, world = list(self.shadow.theta.values()), self.runner.process_group.world
        digest = fingerprint_of_values(thetas)

        def share() -> None:
            # They differ only if weights were changed on a rank before attach, or were unfrozen and have stepped since.
            digests = agree(world, ShadowDigest(digest), "the shadow weights")
            if any(each != digests[0] for each in digests):
                broadcast_tensors(world, thetas, "the shadow weights")

        self.rounds.submit(share, "sharing the shadow weights").finish()

    # Loads, the end, and the state.

    @torch.no_grad()
    def weights_loaded(self, values: Mapping[str, torch.Tensor]) -> None:
        """Restart from loaded weights. The round in flight remains valid for the other weights."""
        self._drop_differences(values)
        self.shadow.restart(values)
        for bucket, residuals in self._residuals_of.items():
            residuals.clear(bucket.slices_of(values))
        super().weights_loaded(values)

    def _drop_differences(self, names: Collection[str]) -> None:
        """If any weights were loaded, receive the round in flight and drop its differences for these weights."""
        if names:
            self._receive_round()
        if self._has_differences:
            for bucket in self._buckets:
                bucket.clear(self._difference(bucket), names)

    def forget_in_flight(self) -> None:
        self._job = None

    def finish_round(self) -> None:
        """Wait for the round in flight, apply it to the weights, and notify observers of it."""
        self._apply_round()
        self.runner.tracer.deliver()

    def finish(self) -> bool:
        self.finish_round()
        return super().finish()

    def _report_dropped(self) -> None:
        if self.num_dropped:
            warn_user_during_error(  # while a rank raises, the other ranks may wait for it
                f"torchbagua: {self.runner.name} has dropped rounds because a rank's weights contained NaN or Inf: "
                f"{self.num_dropped} in total. If the weights are not finite now, load a checkpoint from before the "
                "first dropped round, and lower the learning rate or clip gradients"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state that all ranks share, and this rank's residuals and differences that are not yet applied."""
        self._receive_round()
        return {
            "snapshot_step": self._snapshot_step,
            "fragment": self._fragment_of(self._buckets[0].tensors[0]) if self._buckets else 0,
            "has_differences": self._has_differences,
            "differences": self._weights.by_name(self._difference),
            "buffer_snapshots": self._weights.by_name(SNAPSHOT, self._weights.of_buffers),
            "step": self.rounds.step,
            "num_rounds": self.rounds.num_rounds,
            "residuals": self._residuals_state(),
            **self.shadow.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` returned, and drop the round in flight. Collective."""
        check_keys(self.runner.name, state, _STATE_KEYS)
        self._receive_round()
        self._has_differences = False
        self._weights.lockstep.loads.forget()
        if self.rounds.is_single_rank:
            self.rounds.load(state["step"], self.rounds.num_rounds)
            return
        self._load_residuals(state["residuals"])
        if state["theta"]:
            self.reset()  # new buckets request the loaded residuals
            self._weights.load_by_name(self.shadow.theta.__getitem__, state["theta"], self.shadow.theta)
            self.shadow.load_outer(state["outer"], state["theta"])
        else:  # a single rank has saved the state, and all ranks start from its weights
            self.shadow = ShadowWeights(self.algorithm)
            self.reset()
        if state["differences"]:
            self._weights.load_by_name(self._difference, state["differences"])
            self._weights.load_by_name(SNAPSHOT, state["buffer_snapshots"], self._weights.of_buffers)
        self._snapshot_step, self._has_differences = state["snapshot_step"], bool(state["has_differences"])
        members = [bucket for bucket in self._weights if self._fragment_of(bucket.tensors[0]) == state["fragment"]]
        self._buckets = members if self._has_differences else []
        self.rounds.load(state["step"], state["num_rounds"])
        also = ("a digest of the shadow weights", fingerprint_of_values(list(self.shadow.theta.values())))
        self._weights.lockstep.submit(lambda: None, "loading the state", also=also).result()

    def _new_residuals(self) -> ParameterState[TwoPhaseResiduals] | None:
        has_feedback = self.algorithm.error_feedback and not isinstance(self.runner.codec, Identity)
        return residual_state(self.runner.name) if has_feedback else None

    def _residuals_state(self) -> dict[str, Any]:
        """Return the residuals by parameter name, and the rank and the nodes that they belong to."""
        state: dict[str, Any] = {**owner_of(self.runner.process_group), "nodes": repr(self._nodes)}
        return state if self._residuals is None else state | self._residuals.state_dict(self._parameters_by_name())

    def _load_residuals(self, state: Mapping[str, Any]) -> None:
        """Load residuals. Drop those of the same number of ranks on other nodes, with a RuntimeWarning."""
        name, group = self.runner.name, self.runner.process_group
        self._residuals = self._new_residuals()
        if not any(state[kind] for kind in state.keys() - _OWNER_KEYS):  # full precision has no residuals
            return
        is_on_other_nodes = state["nodes"] != repr(self._nodes) and not is_of_other_ranks(state, group)
        if self._residuals is not None and not is_on_other_nodes:
            self._residuals.load_state_dict(name, continued(name, state, group), self._parameters_by_name())
            return
        warn_user(
            f"torchbagua: {name}.load_state_dict: residuals of error feedback are dropped: the state was saved by "
            f"{state['num_ranks']} ranks on the nodes {state['nodes']}, but {group.size} ranks on the nodes "
            f"{self._nodes} are attached, with compression={self.algorithm.compression!r}"
        )

    def _parameters_by_name(self) -> dict[str, torch.Tensor]:
        return {tensor.name: tensor.parameter for bucket in self._residuals_of for tensor in bucket.tensors}


def assign_fragments(parameters: Sequence[BaguaTensor], num_fragments: int) -> dict[str, int]:
    """Return the fragment of each parameter: largest first, each is assigned to the currently smallest fragment."""
    fragments, fragment_bytes = {}, [0] * num_fragments
    for tensor in sorted(parameters, key=lambda tensor: tensor.parameter.nbytes, reverse=True):
        fragments[tensor.name] = smallest = fragment_bytes.index(min(fragment_bytes))
        fragment_bytes[smallest] += tensor.parameter.nbytes
    return fragments


@dataclass(frozen=True)
class ShadowDigest:
    """What ranks compare of their shadow weights: a record for `agree`."""

    digest: int


class ShadowWeights:
    """The shadow weights of all parameters. All ranks apply the same received means, so they are bitwise equal.

    Attributes:
        optimizer: the outer optimizer, which steps a view of theta for each parameter; None without parameters.
        theta: the shadow weights of each bucket, in float32, or in float64 for float64 weights.
        gradient: a bucket in theta's dtype for each bucket, which may be the same. Its flat tensor contains the outer
            gradient, then the mean outer gradient, and then the difference to add to the weights.
    """

    def __init__(self, algorithm: DiLoCoAlgorithm) -> None:
        self.optimizer: torch.optim.Optimizer | None = None
        self.theta: dict[WeightBucket, torch.Tensor] = {}
        self.gradient: dict[WeightBucket, BaguaBucket] = {}
        self._algorithm = algorithm
        self._owner = type(algorithm).__name__
        self._views: dict[str, torch.Tensor] = {}

    def rebuild(self, weights: WeightBuckets) -> None:
        """Rebuild the shadow weights for new buckets. Those of new parameters start as this rank's weights."""
        previous = None if self.optimizer is None else self.state_dict()
        self.theta, self.gradient = {}, {}
        for bucket in weights:
            if not bucket.are_buffers:
                flat, dtype = bucket.flat, sum_dtype(bucket.flat.dtype)
                self.theta[bucket] = torch.empty_like(flat, dtype=dtype)
                has_same_dtype = flat.dtype == dtype
                self.gradient[bucket] = bucket if has_same_dtype else sub_bucket_of(bucket, bucket.tensors, dtype)
        weights.read(self.theta.__getitem__, self.theta)
        self._views = {name: view for bucket, theta in self.theta.items() for name, view in bucket.named(theta).items()}
        if self._views:
            self.optimizer = self._make_optimizer()
        if previous is not None:
            theta = previous["theta"]
            known = [name for name, view in self._views.items() if name in theta and theta[name].shape == view.shape]
            for name in known:
                self._views[name].copy_(theta[name])
            self.load_outer(previous["outer"], known)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        algorithm, views = self._algorithm, list(self._views.values())
        if algorithm.outer_optimizer is None:
            mu = algorithm.outer_momentum
            sgd = torch.optim.SGD(views, algorithm.outer_lr, mu, nesterov=algorithm.nesterov and mu > 0)
            if mu > 0:  # create momentum now, as torch.distributed.checkpoint loads only into existing tensors
                for view in views:
                    sgd.state[view]["momentum_buffer"] = torch.zeros_like(view)
            return sgd
        optimizer: object = algorithm.outer_optimizer(views)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{self._owner}: outer_optimizer must return a torch.optim.Optimizer, got {optimizer!r}")
        own = [id(view) for view in views]
        given = [id(view) for group in optimizer.param_groups for view in group["params"]]
        if sorted(given) != sorted(own):
            raise ValueError(
                f"{self._owner}: outer_optimizer must return an optimizer of the {len(own)} given tensors, got "
                f"an optimizer of {len(given)} tensors, including {len(set(own) & set(given))} of these"
            )
        return optimizer

    @torch.no_grad()
    def restart(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replace the shadow weights of the given parameters, and reset their outer optimizer state."""
        loaded = {name: value for name, value in values.items() if name in self._views}
        if self.optimizer is None or not loaded:
            return
        new = self._make_optimizer().state  # some optimizers have state before the first step
        for name, value in loaded.items():
            view = self._views[name]
            view.copy_(value)
            self.optimizer.state.pop(view, None)
            if view in new:
                self.optimizer.state[view] = new[view]

    @torch.no_grad()
    def step(self, buckets: Iterable[WeightBucket]) -> None:
        """Step the outer optimizer on the means in the gradients of these buckets."""
        means = {name: mean for each in buckets for name, mean in each.named(self.gradient[each].flat).items()}
        # A parameter with an all-zero mean gets no gradient, like a frozen parameter: its momentum does not change.
        stepped = {name: mean for name, mean in means.items() if _is_nonzero(mean)}
        for name, mean in stepped.items():
            self._views[name].grad = mean
        if self.optimizer is not None and stepped:
            self.optimizer.step()
        for name in stepped:
            self._views[name].grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return copies of theta and of the outer optimizer's state, by parameter name, and its hyperparameters."""
        if self.optimizer is None:
            return {"theta": {}, "outer": {"state": {}, "param_groups": []}}
        state, names = self.optimizer.state_dict(), self._optimizer_names(self.optimizer)
        groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
        by_name = {names[index]: dict(values) for index, values in state["state"].items()}
        outer: dict[str, Any] = deepcopy({"state": by_name, "param_groups": groups})
        return {"theta": {name: view.clone() for name, view in self._views.items()}, "outer": outer}

    def load_outer(self, outer: Mapping[str, Any], names: Collection[str]) -> None:
        """Load the outer optimizer's state of these parameters, and its hyperparameters."""
        if self.optimizer is None:
            return
        groups = self.optimizer.state_dict()["param_groups"]
        if len(groups) != len(outer["param_groups"]):
            raise ValueError(
                f"{self._owner}: the outer optimizer must have the same number of parameter groups as before, "
                f"{len(outer['param_groups'])}, got {len(groups)}"
            )
        numbers = {name: number for number, name in enumerate(self._optimizer_names(self.optimizer))}
        self.optimizer.load_state_dict(
            {
                "state": {numbers[name]: outer["state"][name] for name in names if name in outer["state"]},
                "param_groups": [{**own, **saved} for own, saved in zip(groups, outer["param_groups"], strict=True)],
            }
        )

    def _optimizer_names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the parameter names of `optimizer`, in the order of the indices in its state."""
        names = {id(view): name for name, view in self._views.items()}
        return [names[id(view)] for group in optimizer.param_groups for view in group["params"]]


def _is_nonzero(tensor: torch.Tensor) -> bool:
    """Return whether any element is nonzero. Checks the first element first, which usually decides."""
    return bool(tensor.numel()) and (bool(tensor[(0,) * tensor.dim()]) or bool(tensor.any()))


def streaming_diloco(fragments: int = 4, delay: int = 5, **arguments: Any) -> DiLoCoAlgorithm:
    """Return a `DiLoCoAlgorithm` that sends the parameters in several fragments while training continues."""
    return DiLoCoAlgorithm(fragments=fragments, delay=delay, **arguments)


register("diloco", DiLoCoAlgorithm, "many local steps, then a step of an outer optimizer, in 4 bits")
register("local_sgd", LocalSGDAlgorithm, "many local steps, then the mean of weights, in 4 bits")
register("streaming_diloco", streaming_diloco, "DiLoCo in fragments, each sent while training continues")
