"""Attach warns of buckets with so large a part of the gradients that they are full late."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import run_ranks

LARGE = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(5)))  # 20 MiB of gradients


def messages_of(module: nn.Module, algorithm: tb.Algorithm | str, **options: Any) -> list[str]:
    def body(group: dist.ProcessGroup) -> list[str]:
        ddp = DistributedDataParallel(module, process_group=group, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tb.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), algorithm).detach()
        return [message for message in (str(warning.message) for warning in caught) if "bucket_cap_mb" in message]

    return run_ranks(1, body)[0]


def test_a_bucket_of_half_of_the_gradients() -> None:
    (message,) = messages_of(LARGE, "bytegrad", bucket_cap_mb=10)
    assert "bucket_cap_mb=10 of DistributedDataParallel puts 50% of 20 MiB of gradients into one bucket" in message
    assert "about 14% longer" in message
    assert message.endswith("or pass at most 2")


def test_a_bucket_of_all_gradients() -> None:
    (message,) = messages_of(LARGE, tb.CompressedAllReduceAlgorithm(), bucket_cap_mb=1000)
    assert "puts 100% of 20 MiB" in message


@pytest.mark.parametrize(
    ("module", "algorithm", "options"),
    [
        (LARGE, "bytegrad", {}),  # DDP's default has a small first bucket
        (LARGE, "bytegrad", {"bucket_cap_mb": 5}),
        (LARGE, "gradient_allreduce", {"bucket_cap_mb": 10}),
        (LARGE, "decentralized", {"bucket_cap_mb": 10}),
        (nn.Linear(100, 100), "bytegrad", {"bucket_cap_mb": 10}),
    ],
    ids=["default", "small buckets", "full precision", "weights", "small model"],
)
def test_other_buckets_do_not_warn(module: nn.Module, algorithm: str, options: dict[str, Any]) -> None:
    assert messages_of(module, algorithm, **options) == []
