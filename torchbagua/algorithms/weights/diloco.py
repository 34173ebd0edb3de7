"""DiLoCo: every rank takes many steps of its own, and then an outer optimizer steps by what all have come to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchbagua._description import describe
from torchbagua.algorithms.base import Algorithm, check_at_least, check_codecs, check_flags, register
from torchbagua.algorithms.gradient.all_reduce import GradientAllReduceAlgorithm
from torchbagua.algorithms.weights.averaging import ModelAveragingAlgorithm
from torchbagua.algorithms.weights.fragments import Fragments
from torchbagua.algorithms.weights.outer_residuals import OuterResiduals, check_residuals
from torchbagua.algorithms.weights.outer_round import IN_FLIGHT, OuterRound
from torchbagua.algorithms.weights.shadow_weights import OuterOptimizer, ShadowWeights
from torchbagua.algorithms.weights.synchronous_rounds import SynchronousRounds
from torchbagua.codecs.base import Compressor
from torchbagua.codecs.cast import Identity
from torchbagua.codecs.lookup import by_name, needs_feedback
from torchbagua.collectives.agreement import all_reduce_max
from torchbagua.collectives.broadcast import broadcast_tensors
from torchbagua.collectives.centralized_mean import mean_of_nodes
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket, BaguaTensor
from torchbagua.runtime.impl import AlgorithmImpl
from torchbagua.runtime.rank_state import check_keys
from torchbagua.runtime.runner import Runner
from torchbagua.runtime.weight_bucket import WeightBucket


@dataclass(frozen=True, repr=False)
class DiLoCoAlgorithm(ModelAveragingAlgorithm):
    """Every rank takes steps of its own; every `inner_steps` an outer optimizer steps by the mean of their progress.

    All ranks hold the same shadow weights theta, in float32. In a round each rank sends its outer gradient, D = theta -
    w for its weights w, and receives the mean. The outer optimizer steps theta by that: by default SGD with Nesterov
    momentum, m = mu m + D; theta -= lr (D + mu m). The weights become theta (DiLoCo, Douillard et al., arXiv
    2311.08105, algorithm 1). The optimizer that you attach with is the inner one, and its state is never averaged.

    With a `delay`, training goes on while a round is under way. So many steps later the change of theta is added to the
    weights, so that steps taken meanwhile are kept. With several `fragments`, each goes in a round of its own, in turn
    (Streaming DiLoCo, Douillard et al., arXiv 2501.18512; there the two are mixed, here the difference is added).

    In each round a rank sends 2 (n-1)/n times the encoded parameters. With 4 bits every 30 steps that is 1/226 of what
    DDP sends in float32. What is NaN or Inf on one rank is in the mean of all: such a round is dropped on all ranks, as
    if it had not been, and a RuntimeWarning says so once.

    A state can be loaded under another `inner_steps`, `compression`, `delay`, `hierarchical`, `final_average` and
    `bucket_cap_mb`. With another number of ranks, or other nodes, residuals are dropped, with a RuntimeWarning: that
    costs what compression left out of one round.

    Args:
        inner_steps: steps between two rounds of a fragment, H. Fragment p of F communicates after step (p + 1) H // F,
            and then every H steps; buffers go with the last.
        outer_lr: learning rate of the outer SGD.
        outer_momentum: momentum of the outer SGD. 0.6 for tens of rounds, up to 0.9 for many hundreds.
        nesterov: whether it is Nesterov's.
        outer_optimizer: takes the place of these three: a function of the list of shadow weights, a float32 tensor for
            each parameter, that returns a torch.optim.Optimizer of them. Ranks compare it by its qualified name, so it
            must have one: no lambda.
        compression: the codec that sends outer gradients: its name, see `torchbagua.codecs`; a Compressor; or None for
            full precision.
        error_feedback: add what compression leaves out to what is sent in the next round.
        fragments: so many parts of the parameters, of about as many bytes.
        delay: steps from the end of a fragment's inner steps until its round is applied, less than `inner_steps` /
            `fragments`. With 0, training waits.
        hierarchical: with several nodes of several ranks: gradients are averaged within a node in every step, and only
            nodes take part in rounds, to which each rank sends its shard.
        average_buffers, final_average, bucket_cap_mb: see `ModelAveragingAlgorithm`. Buffers are sent in full
            precision.

    Raises:
        TypeError, ValueError: an argument does not fit.
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
        if self.outer_optimizer is not None:
            if not callable(self.outer_optimizer):
                raise TypeError(f"{name}: outer_optimizer must be a function or None, got {self.outer_optimizer!r}")
            describe(self.outer_optimizer, f"{name}: outer_optimizer")
        check_codecs(self, "compression")
        if not self.error_feedback and needs_feedback(self.compression):
            raise ValueError(
                f"{name}: compression {self.compression!r} needs error_feedback=True: it leaves so much out that "
                "training fails where that is lost"
            )
        if self.delay and self.delay * self.fragments >= self.inner_steps:
            raise ValueError(
                f"{name}: delay must be less than inner_steps / fragments, {self.inner_steps} / {self.fragments}, so "
                f"that a round is applied before the next, got {self.delay}"
            )

    def __repr__(self) -> str:
        """Return its arguments, a function by its qualified name."""
        return f"{type(self).__qualname__}({', '.join(f'{name}={one}' for name, one in self.arguments().items())})"

    @property
    def averages_gradients_within_nodes(self) -> bool:
        """Return `hierarchical`."""
        return self.hierarchical

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return those that say which tensors there are, and by which outer optimizer they came about."""
        names = ("outer_lr", "outer_momentum", "nesterov", "outer_optimizer", "error_feedback", "fragments")
        every = Algorithm.state_arguments(self, process_group)
        return super().state_arguments(process_group) | {name: every[name] for name in names}

    def check_state(self, saved: Mapping[str, Any], state: Mapping[str, Any], process_group: BaguaProcessGroup) -> None:
        """Raise ValueError for other arguments, or where residuals are those of another rank."""
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
    """Every rank takes steps of its own, and every `inner_steps` the weights become the mean of all ranks' weights.

    That is `DiLoCoAlgorithm` with an outer learning rate of 1 and no momentum (Stich, arXiv 1805.09767). All its other
    arguments are those, and mean the same.
    """

    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = False


class DiLoCoAlgorithmImpl(AlgorithmImpl):
    """What `Attachment.impl` is while `DiLoCoAlgorithm` is attached.

    Attributes:
        rounds: counts steps and rounds.
    """

    algorithm: DiLoCoAlgorithm

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        runner.load_effect = "they become the shadow weights, and their outer momentum and residuals start anew"
        algorithm, group = self.algorithm, runner.process_group
        self._is_of_nodes = algorithm.hierarchical and group.intra_node is not None
        if self._is_of_nodes:
            runner.open_node_gradients = self._open_node_gradients
        self.rounds = SynchronousRounds(runner, algorithm)
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
        """The shadow weights; `shadow.optimizer` is the outer optimizer."""
        return self._round.shadow

    @property
    def num_dropped(self) -> int:
        """How many rounds were dropped, of all rounds."""
        return self._round.num_dropped

    def _new_shadow(self) -> ShadowWeights:
        return ShadowWeights(type(self.algorithm).__name__, partial(_outer_optimizer, self.algorithm))

    def _open_node_gradients(self) -> Runner:
        """Return a runner that averages gradients within nodes. Its own lane keeps it from queueing behind a round."""
        group = self.runner.process_group.open_gradient_group()
        node_gradients = GradientAllReduceAlgorithm(in_rank_order=True).reify(group)
        group.close()  # that runner has groups of its own
        self.runner.on_close(node_gradients.close, first=True)  # its group is one of this runner's
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
        mean = mean_of_nodes(self.runner.process_group, codec, gradient.spec, residuals=residuals)

        def average_over_nodes(bucket: BaguaBucket, group: BaguaProcessGroup) -> None:
            mean(bucket.flat)

        gradient.append_python_op(average_over_nodes)

    def reset(self) -> None:
        """Make buckets again, once the round in flight has been applied, and have all ranks start from one theta."""
        self._round.drop(self.runner.loading)
        self._round.apply()
        self._residuals.forget_buckets()
        super().reset()
        if not self.shadow.tensors:
            return
        digest, shadow, world = self.shadow.digest(), self.shadow.tensors, self.runner.process_group.world

        def share() -> None:
            purpose = "the shadow weights"
            # They seldom differ: where weights were changed on a rank before attach, or set free and stepped since.
            if sum(all_reduce_max(world, [digest, -digest], purpose)):
                broadcast_tensors(world, shadow, purpose)

        self.rounds.submit(share, "sharing the shadow weights").result()

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None]:
        return self.rounds.count_backward

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        return self._after_step

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the round that was in flight when it is time, and start that of the fragment that is due."""
        self.rounds.step += 1
        if self.rounds.is_single_rank:
            return
        step, delay = self.rounds.step, self.algorithm.delay
        due = [bucket for bucket in self._weights if self._fragments.is_due(bucket, step)]
        is_time = step >= self._round.snapshot_step + delay
        # What has failed is heard of at once. A loaded round may come from another schedule, and last until the next.
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
        """Make what was loaded the shadow weights; their outer momentum and residuals start anew.

        Waits for the round in flight, which goes on for the other weights.
        """
        self._round.drop(values)
        self.shadow.restart(values)
        self._residuals.clear(values)
        super().weights_loaded(values)

    def finish_round(self) -> None:
        """Wait for the round in flight, bring it into the weights, and have observers notified of it."""
        self._round.apply()
        self.runner.tracer.deliver()

    def finish(self) -> bool:
        self.finish_round()
        return super().finish()

    def state_dict(self) -> dict[str, Any]:
        """Return what all ranks share, and of this rank the residuals and what is still to be added to its weights."""
        return {
            **self._round.state_dict(),
            "step": self.rounds.step,
            "num_rounds": self.rounds.num_rounds,
            "residuals": self._residuals.state_dict(),
            **self.shadow.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; the round in flight is dropped. Collective.

        Of another number of ranks, of other nodes, or where attached is full precision, residuals are dropped, with a
        RuntimeWarning. Where a single rank has saved it, which keeps no shadow weights, they are what was attached to.
        """
        check_keys(self.runner.name, state, _KEYS)
        self._round.abandon()
        self._weights.lockstep.loads.forget()
        if self.rounds.is_single_rank:
            self.rounds.step = state["step"]
            return
        self._residuals.load_state_dict(state["residuals"])
        if state["theta"]:
            self.reset()  # buckets ask for their residuals
            self.shadow.load_state_dict(state)
        else:  # a single rank has trained alone, and its weights are where all start from
            self._round.shadow = self._new_shadow()
            self.reset()
        self._round.load_state_dict(state)
        self.rounds.step, self.rounds.num_rounds = state["step"], state["num_rounds"]
        also = {"as a digest of the shadow weights": self.shadow.digest()}
        self._weights.lockstep.submit(lambda: None, "loading the state", also=also).result()


_KEYS = ["step", "num_rounds", "theta", "outer", "residuals", *IN_FLIGHT]


def _outer_optimizer(algorithm: DiLoCoAlgorithm, shadows: list[torch.Tensor]) -> torch.optim.Optimizer:
    if algorithm.outer_optimizer is not None:
        return algorithm.outer_optimizer(shadows)
    mu = algorithm.outer_momentum
    optimizer = torch.optim.SGD(shadows, algorithm.outer_lr, mu, nesterov=algorithm.nesterov and mu > 0)
    if mu > 0:  # from the start, since torch.distributed.checkpoint loads into the tensors that there are
        for shadow in shadows:
            optimizer.state[shadow]["momentum_buffer"] = torch.zeros_like(shadow)
    return optimizer


def streaming_diloco(fragments: int = 4, delay: int = 5, **arguments: Any) -> DiLoCoAlgorithm:
    """Return a `DiLoCoAlgorithm` whose parameters go in several fragments, while training goes on."""
    return DiLoCoAlgorithm(fragments=fragments, delay=delay, **arguments)


register("diloco", DiLoCoAlgorithm, "many steps of each rank's own, then one by an outer optimizer, in 4 bits")
register("local_sgd", LocalSGDAlgorithm, "many steps of each rank's own, then the mean of weights, in 4 bits")
register("streaming_diloco", streaming_diloco, "DiLoCo in fragments, each sent while training goes on")
