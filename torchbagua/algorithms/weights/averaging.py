"""The options of all algorithms that average weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchbagua.algorithms.base import Algorithm, check_at_least, check_flags
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.runner import Runner
from torchbagua.runtime.weight_buckets import WeightBuckets


@dataclass(frozen=True, kw_only=True)
class ModelAveragingAlgorithm(Algorithm):
    """The options of all algorithms that average weights.

    A state can be loaded under other arguments, except another `average_buffers`.

    Args:
        average_buffers: average floating-point and complex buffers too, BatchNorm's for instance, if the module's
            `state_dict` holds them. Integer buffers are left alone.
        final_average: when you detach, or leave the `with` block without an error, give all ranks the mean of their
            weights, and rank 0's optimizer state. Plain DDP, or another algorithm, can go on from there.
        bucket_cap_mb: size in MiB of the buckets, which are sent one after the other.

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

    def make_weights(self, runner: Runner, progress: Callable[[], Mapping[str, int]]) -> WeightBuckets:
        """Have `runner` average weights by these options, and return them. For `progress` see `WeightBuckets`."""
        return runner.average(
            WeightBuckets(
                runner,
                progress,
                average_buffers=self.average_buffers,
                final_average=self.final_average,
                bucket_cap_mb=self.bucket_cap_mb,
            )
        )
