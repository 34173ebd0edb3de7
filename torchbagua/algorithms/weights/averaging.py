"""The options of all weight algorithms."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchbagua.algorithms.base import Algorithm, check_at_least, check_flags
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.runner import Runner
from torchbagua.runtime.weight_buckets import WeightBuckets


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

    def make_weights(self, runner: Runner, progress: Callable[[], Mapping[str, int]]) -> WeightBuckets:
        """Make `runner` average weights with these options. Return the buckets. For `progress`, see `WeightBuckets`."""
        return runner.average(
            WeightBuckets(
                runner,
                progress,
                average_buffers=self.average_buffers,
                final_average=self.final_average,
                bucket_cap_mb=self.bucket_cap_mb,
            )
        )
