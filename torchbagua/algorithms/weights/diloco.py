"""DiLoCo: each rank takes many local steps, and then an outer optimizer steps on the mean progress of all ranks."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchbagua._stable_repr import stable_repr
from torchbagua._warnings import warn_user, warn_user_during_error
from torchbagua.algorithms.base import Algorithm, check_at_least, check_codecs, check_flags, register
from torchbagua.algorithms.gradient.all_reduce import GradientAllReduceAlgorithm
from torchbagua.algorithms.weights.fragments import Fragments
from torchbagua.algorithms.weights.outer_residuals import OuterResiduals, check_residuals
from torchbagua.algorithms.weights.rounds import ModelAveragingAlgorithm, SynchronousRounds
from torchbagua.algorithms.weights.shadow_weights import OuterOptimizer, ShadowWeights
from torchbagua.codecs.base import Compressor
from torchbagua.codecs.cast import Identity
from torchbagua.codecs.lookup import by_name, needs_feedback
from torchbagua.collectives.agreement import all_reduce_max
from torchbagua.collectives.broadcast import broadcast_tensors
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.observe.events import Details
from torchbagua.observe.tracer import Tracer
from torchbagua.runtime.bucket import BaguaBucket, BaguaTensor
from torchbagua.runtime.gradient_runner import GradientRunner
from torchbagua.runtime.lane import Job
from torchbagua.runtime.rank_state import check_keys
from torchbagua.runtime.runner import AlgorithmImpl, Runner
from torchbagua.runtime.weight_buckets import FLAT, SNAPSHOT, WeightBucket
from torchbagua.runtime.weight_runner import WeightRunner

IN_FLIGHT = ("snapshot_step", "fragment", "has_differences", "differences", "buffer_snapshots")
"""The keys of `OuterRound.state_dict`."""


class OuterRound:
    """Averages outer gradients on the lane, steps the outer optimizer on the means, and updates the weights.

    Without overlap, the weights are set to the shadow weights as soon as the outer optimizer has stepped. With overlap,
    the difference between the new shadow weights and the snapshot is added to the weights later.

    Args:
        rounds: counts steps and rounds, and owns the weights.
        shadow: the shadow weights.
        residuals: the residuals of the outer gradients.
        fragments: determines which buckets belong to the same fragment.
        tracer: is notified of each applied round.
        overlaps: whether training continues while a round is in flight.

    Attributes:
        shadow: the shadow weights.
        num_dropped: the number of dropped rounds.
        snapshot_step: the number of steps before the last snapshot.
    """

    def __init__(
        self,
        rounds: SynchronousRounds,
        shadow: ShadowWeights,
        residuals: OuterResiduals,
        fragments: Fragments,
        tracer: Tracer,
        *,
        overlaps: bool,
    ) -> None:
        self.shadow = shadow
        self.num_dropped = 0
        self.snapshot_step = 0
        self._rounds = rounds
        self._weights = rounds.weights
        self._residuals = residuals
        self._fragments = fragments
        self._tracer = tracer
        self._overlaps = overlaps
        self._job: Job[None] | None = None
        # The buckets of the round that is in flight, or received but not yet applied.
        self._buckets: Sequence[WeightBucket] = []
        self._has_differences = False

    @property
    def is_in_flight(self) -> bool:
        """Whether a round is in flight, or received but not yet applied to the weights."""
        return self._job is not None or self._has_differences

    def start(self, due: Sequence[WeightBucket]) -> None:
        """Start the averaging of outer gradients and of buffers on the lane."""
        snapshot = SNAPSHOT if self._overlaps else FLAT
        for bucket in due:  # bucket by bucket, while each is in the caches
            self._weights.read(snapshot, [bucket])
            if not bucket.are_buffers:
                shadow = self.shadow[bucket]
                torch.sub(shadow.theta, snapshot(bucket), out=shadow.gradient.flat)
            elif self._overlaps:
                bucket.flat.copy_(bucket.snapshot)
        averaged = [bucket if bucket.are_buffers else self.shadow[bucket].gradient for bucket in due]

        def average() -> None:
            for bucket in averaged:
                bucket.run()

        self._job = self._rounds.start(average)
        self._buckets, self.snapshot_step = due, self._rounds.step

    def receive(self) -> None:
        """Wait for the means, step the outer optimizer on them, and write the weights or the pending differences."""
        if self._job is None:
            return
        self._job.finish(reads=True)
        self._job = None
        # The result is the same on all ranks, because the means are.
        if not all(map(self._is_valid, self._buckets)):
            self._drop_round()
            return
        self._residuals.commit(self._buckets)
        self.shadow.step([bucket for bucket in self._buckets if not bucket.are_buffers])
        if not self._overlaps:
            self._weights.write(self._new_values, self._buckets)
            self._report_applied()
            return
        for bucket in self._buckets:
            bucket.subtract(self._new_values(bucket), bucket.snapshot, out=self._difference(bucket))
        self._has_differences = True

    def apply(self) -> None:
        """Wait for the round in flight, and apply it to the weights."""
        self.receive()
        if self._has_differences:
            self._weights.add(self._difference, SNAPSHOT, self._buckets)
            self._has_differences = False
            self._report_applied()

    def drop(self, names: Collection[str]) -> None:
        """If any weights were loaded, receive the round in flight and drop its differences for these weights."""
        if names:
            self.receive()
        if self._has_differences:
            for bucket in self._buckets:
                bucket.clear(self._difference(bucket), names)

    def abandon(self) -> None:
        """Wait for the round in flight, but do not apply it to the weights."""
        self.receive()
        self._has_differences = False

    def state_dict(self) -> dict[str, Any]:
        """Return the differences that are not yet applied, and their step and fragment."""
        self.receive()
        return {
            "snapshot_step": self.snapshot_step,
            "fragment": self._fragments.of_bucket(self._buckets[0]) if self._buckets else 0,
            "has_differences": self._has_differences,
            "differences": self._weights.by_name(self._difference),
            "buffer_snapshots": self._weights.by_name(SNAPSHOT, self._weights.of_buffers),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` returned. The state of a single rank contains no tensors."""
        if state["differences"]:
            self._weights.load_by_name(self._difference, state["differences"])
            self._weights.load_by_name(SNAPSHOT, state["buffer_snapshots"], self._weights.of_buffers)
        self.snapshot_step, self._has_differences = state["snapshot_step"], bool(state["has_differences"])
        members = [bucket for bucket in self._weights if self._fragments.of_bucket(bucket) == state["fragment"]]
        self._buckets = members if self._has_differences else []

    def _new_values(self, bucket: WeightBucket) -> torch.Tensor:
        return bucket.flat if bucket.are_buffers else self.shadow[bucket].theta

    def _difference(self, bucket: WeightBucket) -> torch.Tensor:
        return bucket.difference if bucket.are_buffers else self.shadow[bucket].gradient.flat

    def _is_valid(self, bucket: WeightBucket) -> bool:
        flat = bucket.flat if bucket.are_buffers else self.shadow[bucket].gradient.flat
        if not len(flat):
            return True
        low, high = flat.aminmax()  # on CPUs ten times faster than isfinite().all(); both are NaN if an element is NaN
        # A buffer may legitimately contain -inf, such as an attention mask.
        return not bool(low.isnan()) if bucket.are_buffers else bool(low.isfinite() & high.isfinite())

    def _drop_round(self) -> None:
        self.num_dropped += 1
        if self.num_dropped == 1:
            warn_user(
                f"torchbagua: the round after {self.snapshot_step} steps is dropped on all ranks, because a rank's "
                "weights contain NaN or Inf; the number of dropped rounds is reported at the end"
            )

    def _report_applied(self) -> None:
        tracer = self._tracer
        values = {
            "rounds": self._rounds.num_rounds,
            "fragment": self._fragments.of_bucket(self._buckets[0]),
            "staleness in steps": self._rounds.step - self.snapshot_step,
        }
        now = tracer.now()
        tracer.tell("apply", now, now, Details(values=values))


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
    `bucket_cap_mb`. With another number of ranks, or other nodes, residuals are dropped with a RuntimeWarning: the
    residual of one round is lost.

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
        check_keys(owner, state, _KEYS)
        check_residuals(owner, state["residuals"], process_group)

    def make_codec(self) -> Compressor:
        return by_name(self.compression)

    def make_impl(self, runner: Runner) -> "DiLoCoAlgorithmImpl":
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


class DiLoCoAlgorithmImpl(AlgorithmImpl):
    """The `Attachment.impl` while `DiLoCoAlgorithm` is attached.

    Attributes:
        rounds: counts steps and rounds.
    """

    algorithm: DiLoCoAlgorithm
    runner: WeightRunner

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.runner.load_effect = "they become the shadow weights, and their outer momentum and residuals are reset"
        algorithm, group = self.algorithm, runner.process_group
        self._is_of_nodes = algorithm.hierarchical and group.intra_node is not None
        runner.on_close(self._report_dropped)
        if self._is_of_nodes:
            self.runner.open_node_gradients = self._open_node_gradients
        self.rounds = SynchronousRounds(self.runner, algorithm)
        self._weights = self.rounds.weights
        nodes = group.nodes if self._is_of_nodes else None
        has_feedback = algorithm.error_feedback and not isinstance(runner.codec, Identity)
        self._residuals = OuterResiduals(runner, nodes, has_feedback=has_feedback)
        self._fragments = Fragments(algorithm.fragments, algorithm.inner_steps)
        self._round = OuterRound(
            self.rounds,
            self._new_shadow(),
            self._residuals,
            self._fragments,
            runner.tracer,
            overlaps=algorithm.delay > 0,
        )

    @property
    def shadow(self) -> ShadowWeights:
        """The shadow weights. `shadow.optimizer` is the outer optimizer."""
        return self._round.shadow

    @property
    def num_dropped(self) -> int:
        """The number of dropped rounds."""
        return self._round.num_dropped

    def _new_shadow(self) -> ShadowWeights:
        return ShadowWeights(type(self.algorithm).__name__, partial(_outer_optimizer, self.algorithm))

    def _open_node_gradients(self) -> GradientRunner:
        """Return a runner that averages gradients within nodes. It has a separate lane, to not queue behind a round."""
        group = self.runner.process_group.open_gradient_group()
        node_gradients = GradientAllReduceAlgorithm(in_rank_order=True).reify(group)
        assert isinstance(node_gradients, GradientRunner)
        group.close()  # `node_gradients` has opened its own private groups
        self.runner.on_close(node_gradients.close, first=True)  # close it before the groups of this runner
        return node_gradients

    def tensors_to_buckets(self, tensors: list[BaguaTensor], do_flatten: bool) -> list[BaguaBucket]:
        parameters = [tensor for tensor in tensors if tensor.is_parameter]
        num_fragments = self.algorithm.fragments
        if num_fragments > len(parameters) and not self.rounds.is_single_rank:
            raise ValueError(
                f"{type(self.algorithm).__name__}: fragments must be at most the number of trained parameters, "
                f"{len(parameters)}, got {num_fragments}"
            )
        self._fragments.assign(parameters)
        buckets = self._weights.make_buckets(tensors, lambda tensor: f"fragment {self._fragments.of_tensor(tensor)} ")
        self.shadow.rebuild(self._weights)
        return buckets

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        assert isinstance(bucket, WeightBucket)
        if bucket.are_buffers:
            bucket.append_centralized_synchronous_op(self.algorithm.hierarchical)
            return
        gradient = self.shadow[bucket].gradient
        codec, residuals = self.runner.codec_for(gradient), self._residuals.of_bucket(bucket, gradient)
        if not self._is_of_nodes:
            gradient.append_centralized_synchronous_op(hierarchical=False, compression=codec, error_feedback=residuals)
            return
        from torchbagua.collectives.hierarchical import mean_of_nodes

        mean = mean_of_nodes(self.runner.process_group, codec, gradient.spec, residuals=residuals)

        def average_over_nodes(bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
            mean(bucket.flat)

        gradient.append_python_op(average_over_nodes)

    def reset(self) -> None:
        """Rebuild buckets after the round in flight has been applied, and make theta equal on all ranks."""
        self._round.drop(self.runner.loading)
        self._round.apply()
        self._residuals.forget_buckets()
        super().reset()
        if not self.shadow.tensors:
            return
        digest, shadow, world = self.shadow.digest(), self.shadow.tensors, self.runner.process_group.world

        def share() -> None:
            purpose = "the shadow weights"
            # They differ only if weights were changed on a rank before attach, or were unfrozen and have stepped since.
            if sum(all_reduce_max(world, [digest, -digest], purpose)):
                broadcast_tensors(world, shadow, purpose)

        self.rounds.submit(share, "sharing the shadow weights").finish()

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None]:
        return self.rounds.count_backward

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        return self._after_step

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the round in flight if its delay is over, and start the round of the fragment that is due."""
        self.rounds.step += 1
        if self.rounds.is_single_rank:
            return
        step, delay = self.rounds.step, self.algorithm.delay
        due = [bucket for bucket in self._weights if self._fragments.is_due(bucket, step)]
        is_time = step >= self._round.snapshot_step + delay
        # A failure raises at once. A loaded round may follow another schedule and be in flight when the next is due.
        if self._round.is_in_flight and (is_time or due or self.runner.lane.has_failed):
            self._round.apply()
        if due:
            if delay:
                self.rounds.overlap_next_step()
            self._round.start(due)
            if not delay:
                self._round.receive()

    @torch.no_grad()
    def weights_loaded(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set the shadow weights to the loaded weights, and reset their outer momentum and residuals.

        Waits for the round in flight, which remains valid for the other weights.
        """
        self._round.drop(values)
        self.shadow.restart(values)
        self._residuals.clear(values)
        super().weights_loaded(values)

    def finish_round(self) -> None:
        """Wait for the round in flight, apply it to the weights, and notify observers of it."""
        self._round.apply()
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
        return {
            **self._round.state_dict(),
            "step": self.rounds.step,
            "num_rounds": self.rounds.num_rounds,
            "residuals": self._residuals.state_dict(),
            **self.shadow.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` returned, and drop the round in flight. Collective.

        Residuals are dropped with a RuntimeWarning if the number of ranks or the nodes differ, or if the attached
        algorithm uses full precision. The state of a single rank contains no shadow weights, which then start as the
        module's current weights.
        """
        check_keys(self.runner.name, state, _KEYS)
        self._round.abandon()
        self._weights.lockstep.loads.forget()
        if self.rounds.is_single_rank:
            self.rounds.step = state["step"]
            return
        self._residuals.load_state_dict(state["residuals"])
        if state["theta"]:
            self.reset()  # new buckets request the loaded residuals
            self.shadow.load_state_dict(state)
        else:  # a single rank has saved the state, and all ranks start from its weights
            self._round.shadow = self._new_shadow()
            self.reset()
        self._round.load_state_dict(state)
        self.rounds.step, self.rounds.num_rounds = state["step"], state["num_rounds"]
        also = ("a digest of the shadow weights", self.shadow.digest())
        self._weights.lockstep.submit(lambda: None, "loading the state", also=also).result()


_KEYS = ["step", "num_rounds", "theta", "outer", "residuals", *IN_FLIGHT]


def _outer_optimizer(algorithm: DiLoCoAlgorithm, shadows: list[torch.Tensor]) -> torch.optim.Optimizer:
    if algorithm.outer_optimizer is not None:
        return algorithm.outer_optimizer(shadows)
    mu = algorithm.outer_momentum
    optimizer = torch.optim.SGD(shadows, algorithm.outer_lr, mu, nesterov=algorithm.nesterov and mu > 0)
    if mu > 0:  # create momentum now, because torch.distributed.checkpoint loads only into existing tensors
        for shadow in shadows:
            optimizer.state[shadow]["momentum_buffer"] = torch.zeros_like(shadow)
    return optimizer


def streaming_diloco(fragments: int = 4, delay: int = 5, **arguments: Any) -> DiLoCoAlgorithm:
    """Return a `DiLoCoAlgorithm` that sends the parameters in several fragments while training continues."""
    return DiLoCoAlgorithm(fragments=fragments, delay=delay, **arguments)


register("diloco", DiLoCoAlgorithm, "many local steps, then a step of an outer optimizer, in 4 bits")
register("local_sgd", LocalSGDAlgorithm, "many local steps, then the mean of weights, in 4 bits")
register("streaming_diloco", streaming_diloco, "DiLoCo in fragments, each sent while training continues")
