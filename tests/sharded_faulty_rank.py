"""One rank of a sharded module. The last rank is killed in a backward. Run by test_sharded_faults.py.

Arguments: rank, world size, a file for the store, and the way: "flat", "weights" (in 8 bits too), "hook" or "backend"
(two replicas of two shards). The other ranks print their error, after how many seconds they raise, and their lanes that
are left.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

import torchbagua as tb

TIMEOUT = timedelta(seconds=20)


def main() -> None:
    rank, size, store_path, way = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=size, timeout=TIMEOUT)
    shape = (1, size) if way in ("flat", "weights") else (2, size // 2)
    if way == "backend":
        tb.fsdp.register_backend(tb.ByteGradAlgorithm())
    override = {"replicas": "torchbagua"} if way == "backend" else None
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"), backend_override=override)
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    for part in (*module, module):
        fully_shard(part, mesh=mesh if way == "backend" else mesh["shards"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    num_backwards = 0

    def die(gradient: torch.Tensor) -> None:
        nonlocal num_backwards
        num_backwards += 1
        if rank == size - 1 and num_backwards == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(layer: nn.Module, inputs: object, output: torch.Tensor) -> None:
        output.register_hook(die)

    module[2].register_forward_hook(watch)
    attachment: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if way == "backend":
        tb.fsdp.align_blocks(module)
    else:
        attachment = tb.fsdp.attach(
            module,
            optimizer,
            "bytegrad",
            replicate_group=mesh.get_group("replicas") if way == "hook" else None,
            quantize_weights="minmax_uint8" if way == "weights" else None,
        )
    start = time.monotonic()
    try:
        with attachment:
            for _ in range(4):
                start = time.monotonic()
                optimizer.zero_grad()
                module(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
    except RuntimeError as error:
        print(f"raised after {time.monotonic() - start:.1f} s: {type(error).__name__}: {error}")
        if way == "backend":
            dist.destroy_process_group()
        print(f"lanes {[thread.name for thread in threading.enumerate() if 'torchbagua' in thread.name]}", flush=True)


if __name__ == "__main__":
    main()
