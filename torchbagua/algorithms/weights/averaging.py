"""What the algorithms that average weights share: their options, and rounds that all ranks make at the same step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch

from torchbagua.algorithms.base import Algorithm, check_at_least, check_flags
from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.algorithms.rank_state import check_rank_state, owner_of
from torchbagua.collectives.agreement import fingerprint
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.bucket import BaguaBucket, BaguaTensor
from torchbagua.runtime.lane import Job
from torchbagua.runtime.weight_buckets import FlatOf, WeightBuckets
from torchbagua.transport.errors import CommunicationError

T = TypeVar("T")
_PART_ELEMENTS = 2**21  # of what is no bucket: the group keeps buffers for each length that it has averaged


@dataclass(frozen=True, kw_only=True)
class ModelAveragingAlgorithm(Algorithm):
    """Options of all algorithms that average weights.

    A state goes on under other arguments, except that `average_buffers` says which tensors are in it.

    Args:
        average_buffers: average floating-point and complex buffers too (BatchNorm's, say), those that `state_dict`
            holds. Integer buffers are left alone.
        final_average: when the attachment ends in order, give all ranks the mean of their weights, and rank 0's
            optimizer state: plain DDP, or another algorithm, can go on from there.
        bucket_cap_mb: size of the buckets that are sent one after the other, in MiB.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """

    averages_weights: ClassVar[bool] = True

    average_buffers: bool = True
    final_average: bool = True
    bucket_cap_mb: float = 8.0

    def __post_init__(self) -> None:
        check_flags(self, "average_buffers", "final_average")
        check_at_least(self, "bucket_cap_mb", 0, float | int)

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return `average_buffers`."""
        return {"average_buffers": self.average_buffers}

    def weights_of(self, impl: AlgorithmImpl) -> WeightBuckets:
        """Return what holds the weights that `impl` averages."""
        return WeightBuckets(
            impl.process_group,
            type(impl).__name__,
            average_buffers=self.average_buffers,
            bucket_cap_mb=self.bucket_cap_mb,
        )


class AveragingImpl(AlgorithmImpl):
    """What runs an algorithm that averages weights, in whatever rounds.

    Attributes:
        weights: what is averaged.
        step: training steps so far.
    """

    algorithm: ModelAveragingAlgorithm

    def __init__(self, process_group: BaguaProcessGroup, algorithm: ModelAveragingAlgorithm) -> None:
        super().__init__(process_group, algorithm)
        self.weights = algorithm.weights_of(self)
        self.step = 0

    @property
    def is_single_rank(self) -> bool:
        """Whether this is a group of one, which communicates nothing and changes nothing."""
        return self.process_group.size == 1

    @property
    def leaves_ranks_apart(self) -> bool:
        return self.algorithm.final_average and not self.is_single_rank

    def init_tensors(self, module: torch.nn.Module) -> list[BaguaTensor]:
        return self.weights.select(module, self.ignored_names)

    def tensors_to_buckets(self, tensors: list[BaguaTensor], do_flatten: bool) -> list[BaguaBucket]:
        return self.weights.make_buckets(tensors)

    def need_reset(self) -> bool:
        needs = self.weights.need_reset()
        if self.weights.layout_watch.has_found_one:
            self.refuse_changed_layout()
        return needs

    def refuse_changed_layout(self) -> None:
        """Have all ranks raise, where they meet next, that a parameter's memory layout has changed on this rank.

        Raises:
            RuntimeError: always; names the parameter.
        """
        try:
            self.submit_in_lockstep(lambda: None, "the comparison of memory layouts").result()
        except CommunicationError as error:  # other ranks were gone, or too far behind
            raise self.weights.layout_watch.own_error(self.process_group.rank) from error

    def progress(self, *, is_last: bool = False) -> dict[str, int]:
        """Return how far this rank has come; whether this is the last time that ranks meet is part of it."""
        raise NotImplementedError

    def submit_in_lockstep(self, run: Callable[[], T], purpose: str | None = None) -> Job[T]:
        """Have the lane run `run` when all ranks have come here; where their progress differs, all ranks raise.

        `purpose` is what for, in errors: by default the round after so many steps.
        """
        purpose = purpose or f"the round after {self.step} steps"
        return self.weights.submit_in_lockstep(self.lane, run, purpose, self.progress())

    def weights_loaded(self, values: Mapping[str, torch.Tensor]) -> None:
        """Note the load, so that ranks compare what they have loaded when they next meet."""
        self.weights.loads.add(values)

    def take_final_mean(self) -> bool:
        """Where the algorithm asks for it, give all ranks the mean of their weights; return whether. Collective."""
        has_mean = self.algorithm.final_average and not self.is_single_rank
        if has_mean:
            with self.tracer.span("detach"):
                self.weights.take_mean(self.lane, self.progress(is_last=True))
        return has_mean

    @torch.no_grad()
    def average_tensors(self, tensors: Sequence[torch.Tensor], purpose: str) -> None:
        """Replace these tensors, which are not the module's, by their mean over the ranks. Collective, between steps.

        Call it within `averaged_weights`, or after `finish`, when no round is under way.

        Args:
            tensors: floating-point or complex, contiguous or not, of the same shapes and dtypes on all ranks.
            purpose: what they are, in errors.
        """
        if self.is_single_rank:
            return
        alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        flats = {key: torch.cat([tensor.reshape(-1) for tensor in members]) for key, members in alike.items()}
        layout = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
        progress = {**self.progress(), "as fingerprint of the tensors to average": fingerprint(layout)}

        def average() -> None:
            for flat in flats.values():
                for part in flat.split(_PART_ELEMENTS):
                    self.process_group.all_reduce(part, average=True, hierarchical=False, name=purpose)

        self.weights.submit_in_lockstep(self.lane, average, f"the mean of {purpose}", progress).result()
        for key, members in alike.items():
            parts = flats[key].split([tensor.numel() for tensor in members])
            for tensor, part in zip(members, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give all ranks the mean of their weights, for as long as the context lasts. Collective."""
        if self.need_reset():  # parameters were unfrozen or replaced since the last step
            self.reset()
        with nullcontext() if self.is_single_rank else self.weights.averaged(self.lane, self.progress()):
            yield

    def own_weights(self) -> AbstractContextManager[None]:
        """Within `averaged_weights`, give this rank its own weights, for as long as the context lasts."""
        return self.weights.own()

    def pending_state(
        self, has_differences: bool, differences: Mapping[str, torch.Tensor], snapshots: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Return whose state it is, its step, and what is averaged and still to be added to the weights, by names.

        Args:
            has_differences: whether there is something to be added; else the tensors hold anything.
            differences: of all weights, mean minus snapshot.
            snapshots: of buffers, which decay, see `WeightBuckets.add`.
        """
        return {
            **owner_of(self.process_group),
            "step": self.step,
            "has_differences": has_differences,
            "differences": differences,
            "buffer_snapshots": snapshots,
        }

    def load_pending(self, state: Mapping[str, Any], difference: FlatOf, snapshot: FlatOf, *other_keys: str) -> None:
        """Copy what `pending_state` has saved of the tensors into these flat ones.

        Raises:
            ValueError: `state` lacks a key, its own or one of the others, or is another rank's or module's.
        """
        keys = ("step", "has_differences", "differences", "buffer_snapshots", *other_keys)
        check_rank_state(type(self).__name__, state, keys, self.process_group)
        self.weights.load_by_name(difference, state["differences"])
        self.weights.load_by_name(snapshot, state["buffer_snapshots"], self.weights.of_buffers)


class SynchronousAveragingImpl(AveragingImpl):
    """Averaging in rounds that all ranks make at the same step; every round compares how far they have come.

    Its algorithm has a `communication_interval`, by which `is_due` goes, or the impl has a schedule of its own.

    Attributes:
        num_rounds: rounds so far.
        num_backwards: backward passes so far. A step that a GradScaler skips on one rank alone shows here: that rank
            makes its next step after one more of them. So they are compared, unless attach was given the scaler.
    """

    # One with a `communication_interval`.
    algorithm: Any

    def __init__(self, process_group: BaguaProcessGroup, algorithm: ModelAveragingAlgorithm) -> None:
        super().__init__(process_group, algorithm)
        self.num_rounds = 0
        self.num_backwards = 0
        self._num_overflow_checks = 0

    @property
    def is_due(self) -> bool:
        """Whether step number `step` communicates.

        DecentralizedAlgorithm asks after counting, for the round beside the next step; the low-precision ring before,
        for the step just taken.
        """
        return not self.is_single_rank and bool(self.step % self.algorithm.communication_interval == 0)

    @property
    def _is_of_nodes(self) -> bool:
        """Whether ranks average by way of nodes, of which one has several of them."""
        return self.algorithm.hierarchical and self.process_group.intra_node is not None

    @property
    def needs_grad_scaler(self) -> bool:
        """True: all ranks skip a step, or none."""
        return not self.is_single_rank

    def after_step(self) -> None:
        """Do what comes after a training step; counts it."""
        raise NotImplementedError

    def finish_round(self) -> None:
        """Wait for what is in flight, bring it into the weights, and tell observers of it."""
        self.receive_round()
        self.tracer.deliver()

    def receive_round(self) -> None:
        """Wait for what is in flight and bring it into the weights."""
        raise NotImplementedError

    def begin_next_step(self) -> None:
        """Have observers notified of submissions to the lane from now on, in `after_step`, as part of the next step.

        For a round that runs beside that step. The lane may be at it before `after_step` has come to its end.
        """
        if self.tracer.is_on:
            self.lane.submit(partial(self.tracer.end_step_of_lane, self.tracer.step))

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None]:
        """Count backward passes."""

        def count() -> None:
            self.num_backwards += 1

        return count

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        """Communicate where it is due."""
        return lambda optimizer: self.after_step()

    def agree_on_overflow(self, found_inf: bool) -> bool:
        """Return whether any rank has found an Inf or NaN in its gradients. Collective."""
        if self.is_single_rank:
            return found_inf
        self._num_overflow_checks += 1
        purpose = f"the search for Inf after {self.step} steps"
        return self.lane.submit(self.weights.comparison(self.progress(), purpose, flag=found_inf)).result()

    def finish(self, *, failed: bool) -> bool:
        """Bring what is in flight into the weights and, where it is asked for, make them equal on all ranks."""
        if failed:
            return False
        self.finish_round()
        has_mean = self.take_final_mean()
        self.ends_in_order = True
        return has_mean

    def progress(self, *, is_last: bool = False) -> dict[str, int]:
        return {
            "ended attachments": int(is_last),
            "optimizer steps": self.step,
            "searches for Inf": self._num_overflow_checks,
            "backward passes": 0 if self._num_overflow_checks else self.num_backwards,
            "rounds": self.num_rounds,
            "as fingerprint of the tensors to average": self.weights.fingerprint,
        }
