"""Lets several ranks share one GPU over NCCL, to test what they compute, not how fast."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# NCCL refuses two ranks on one GPU of one host, so every rank claims another host; the ranks then communicate through
# sockets. Their kernels take turns on the GPU, and few thread blocks leave room for training.
_SETTINGS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MAX_CTAS": "2",
    "NCCL_PROTO": "Simple",
}


def begin_rank(backend: str, timeout: timedelta | None = None, **options: Any) -> torch.device:
    """Call `init_process_group`; return this rank's device: the first GPU with NCCL, and the CPU with gloo.

    Call it before anything uses NCCL.

    Args:
        backend, timeout, options: the arguments of `init_process_group`.
    """
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        rank = options.get("rank", os.environ.get("RANK"))
        os.environ |= {**_SETTINGS, "NCCL_HOSTID": f"host{rank}"}
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timeout, **options)
    return device
