"""Rounds of weight algorithms that all ranks run at the same step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

from torchbagua.algorithms.base import Algorithm, check_at_least, check_flags
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.lane import Job
from torchbagua.runtime.weight_buckets import WeightBuckets
from torchbagua.runtime.weight_runner import WeightRunner

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ModelAveragingAlgorithm(Algorithm):
    """The options of all weight algorithms.

    A state can be loaded with other arguments, except another `average_buffers`.

    Args:
        average_buffers: average floating-point and complex buffers too, such as BatchNorm's, if the module's
            `state_dict` contains them. Integer buffers are not averaged.
        final_average: when you detach, or leave the `with` block without an error, set all ranks' weights to their mean
            and all optimizer states to rank 0's. Plain DDP or another algorithm can continue from there.
        bucket_cap_mb: the size, in MiB, of the buckets, which are sent one after another.

    Raises:
        TypeError, ValueError: an argument is invalid.
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

    def make_weights(
        self, runner: WeightRunner, progress: Callable[[], Mapping[str, int]], **options: Any
    ) -> WeightBuckets:
        """Make `runner` average weights with these options and those of `WeightRunner.average`. Return the buckets.

        For `progress`, see `WeightBuckets`.
        """
        return runner.average(
            WeightBuckets(
                runner,
                progress,
                average_buffers=self.average_buffers,
                final_average=self.final_average,
                bucket_cap_mb=self.bucket_cap_mb,
            ),
            **options,
        )


class SynchronousRounds:
    """Counts the steps and rounds of a weight algorithm, which must be equal on all ranks. Each round compares them.

    Args:
        runner: the impl's runner.
        algorithm: the algorithm, whose options determine which weights are averaged.
        options: see `WeightRunner.average`.

    Attributes:
        weights: the weights that are averaged.
        step: training steps so far.
        num_rounds: rounds so far.
        num_backwards: backward passes so far. Ranks may accumulate different numbers of them in a step, so they compare
            them only if a GradScaler that attach was not given steps the optimizer: it may skip a step on one rank.
    """

    def __init__(self, runner: WeightRunner, algorithm: ModelAveragingAlgorithm, **options: Any) -> None:
        self.step = 0
        self.num_rounds = 0
        self.num_backwards = 0
        self._runner = runner
        self.weights = algorithm.make_weights(
            runner, self._progress, agree_on_overflow=self._agree_on_overflow, **options
        )

    @property
    def is_single_rank(self) -> bool:
        """Whether the group has a single rank, which communicates nothing and changes nothing."""
        return self._runner.process_group.size == 1

    def is_due(self, interval: int) -> bool:
        """Return whether the step after `step` steps communicates, given a round every `interval` steps."""
        return not self.is_single_rank and self.step % interval == 0

    def count_step(self) -> None:
        """Count a training step."""
        self.step += 1

    def load(self, step: int, num_rounds: int = 0) -> None:
        """Continue after so many steps and rounds."""
        self.step, self.num_rounds = step, num_rounds

    def count_backward(self) -> None:
        """Count a backward pass. For `AlgorithmImpl.init_post_backward_hook`."""
        self.num_backwards += 1

    def start(self, run: Callable[[], T]) -> Job[T]:
        """Submit a round to the lane, which runs it when all ranks have submitted it, and count the round.

        `run` may do nothing, so that only the ranks' progress is compared, if the caller submits the buckets itself.
        """
        job = self.submit(run)
        self.num_rounds += 1
        return job

    def submit(self, run: Callable[[], T], purpose: str | None = None) -> Job[T]:
        """Submit `run` to the lane, which runs it when all ranks have submitted it.

        If the ranks' progress differs, all ranks raise. `purpose` names the job in errors. By default, it is "the round
        after `step` steps".
        """
        return self.weights.lockstep.submit(run, purpose or f"the round after {self.step} steps")

    def overlap_next_step(self) -> None:
        """Report later submissions to the lane to observers as part of the next step.

        For a round that runs concurrently with that step. The lane may start it before this step's hook returns.
        """
        tracer = self._runner.tracer
        if tracer.is_on:
            self._runner.lane.submit(partial(tracer.end_step_of_lane, tracer.step))

    def _agree_on_overflow(self, found_inf: bool) -> bool:
        return self.weights.lockstep.agree_on_overflow(found_inf, f"the search for Inf after {self.step} steps")

    def _progress(self) -> dict[str, int]:
        num_backwards = self.num_backwards if self._runner.has_unknown_scaler else 0
        return {
            "optimizer steps": self.step,
            "searches for Inf": self.weights.lockstep.num_overflow_checks,
            f"backward passes in {self.step} steps of the optimizers": num_backwards,
            "rounds": self.num_rounds,
        }
