"""A warning about DDP buckets so large that sending hardly overlaps with backward."""

import torch
from torch.nn.parallel import DistributedDataParallel

from torchbagua._torch import named_bucket_bytes
from torchbagua._warnings import warn_user
from torchbagua.codecs.base import Identity
from torchbagua.training.checks import TrainingSetup

# The relative increase of the step time per share of the gradients in one bucket. Measured with 8 bits, two ranks and
# 1 Gbit/s (benchmarks/results/bucket-sizes-20261125.json): shares of 0.16, 0.24, 0.32 and 0.48 cost 4, 7, 9 and 14 %.
_COST_OF_SHARE = 0.29
_WORTH_A_WARNING = 0.10

# Smaller gradients are sent in a few milliseconds, whatever the bucket size.
_FEW_BYTES = 16 << 20


def warn_of_large_buckets(setup: TrainingSetup) -> None:
    """Warn of a `bucket_cap_mb` so large that the first bucket of a backward fills up late.

    DDP's default causes no warning: its first bucket has 1 MiB.
    """
    if not isinstance(setup.algorithm.make_codec(), Identity):
        for ddp in setup.ddps:
            _warn_of_large_buckets(type(setup.algorithm).__name__, ddp)


def _warn_of_large_buckets(algorithm: str, ddp: DistributedDataParallel) -> None:
    bucket_bytes = named_bucket_bytes(ddp)
    total_bytes = sum(_gradient_bytes(parameter) for parameter in ddp.module.parameters())
    if bucket_bytes is None or total_bytes < _FEW_BYTES:
        return
    share = min(1.0, bucket_bytes / total_bytes)
    if (cost := _COST_OF_SHARE * share) > _WORTH_A_WARNING:
        warn_user(
            f"torchbagua: bucket_cap_mb={bucket_bytes / 2**20:g} of DistributedDataParallel puts {share:.0%} of "
            f"{total_bytes / 2**20:.0f} MiB of gradients into one bucket, and {algorithm} sends nothing before it is "
            f"full. At 1 Gbit/s a step takes about {cost:.0%} longer than with small buckets. Omit bucket_cap_mb, or "
            f"pass at most {0.1 * total_bytes / 2**20:.0f}"
        )


def _gradient_bytes(parameter: torch.Tensor) -> int:
    return parameter.nbytes if parameter.requires_grad else 0
