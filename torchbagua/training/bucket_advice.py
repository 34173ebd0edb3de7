"""A warning about buckets so large that most of what is sent waits for most of backward."""

import torch
from torch.nn.parallel import DistributedDataParallel

from torchbagua._torch import named_bucket_bytes
from torchbagua._warnings import warn_user

# What a step takes longer, by the share of the gradients in a bucket: measured with 8 bits, two ranks and 1 Gbit/s,
# benchmarks/results/bucket-sizes-20261125.json: shares of 0.16, 0.24, 0.32 and 0.48 cost 4, 7, 9 and 14 %.
_COST_OF_SHARE = 0.29
_WORTH_A_WARNING = 0.10

# Gradients of fewer bytes are sent in a few milliseconds, in buckets of any size.
_FEW_BYTES = 16 << 20


def warn_of_large_buckets(algorithm: str, ddp: DistributedDataParallel) -> None:
    """Warn of a `bucket_cap_mb` with which the first bucket of a backward is full late.

    DDP's default is no such size: its first bucket has 1 MiB.
    """
    bucket_bytes = named_bucket_bytes(ddp)
    total_bytes = sum(_gradient_bytes(parameter) for parameter in ddp.module.parameters())
    if bucket_bytes is None or total_bytes < _FEW_BYTES:
        return
    share = min(1.0, bucket_bytes / total_bytes)
    if (cost := _COST_OF_SHARE * share) > _WORTH_A_WARNING:
        warn_user(
            f"torchbagua: bucket_cap_mb={bucket_bytes / 2**20:g} of DistributedDataParallel puts {share:.0%} of "
            f"{total_bytes / 2**20:.0f} MiB of gradients into one bucket, and {algorithm} sends nothing before it is "
            f"full. At 1 Gbit/s a step takes about {cost:.0%} longer than in small buckets. Leave bucket_cap_mb out, "
            f"or give at most {0.1 * total_bytes / 2**20:.0f}"
        )


def _gradient_bytes(parameter: torch.Tensor) -> int:
    return parameter.nbytes if parameter.requires_grad else 0
