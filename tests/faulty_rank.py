"""One rank of a training run in which a rank misbehaves; run by test_faults.py in processes of its own.

Arguments: rank, world size, a file for the store, the fault, the algorithm's name. The last rank goes wrong in the
middle of the third step; the others print what they raise, after how many seconds of that step, and which lanes they
have left.
"""

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb

TIMEOUT = timedelta(seconds=4)


def main() -> None:
    rank, size, store_path, fault, algorithm = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=size)
    model = torch.nn.Sequential(*[torch.nn.Linear(200, 200) for _ in range(6)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    is_faulty = rank == size - 1
    gradients_seen = 0

    def misbehave(_: torch.Tensor) -> None:
        """Called at each parameter's gradient: in the third backward, after some buckets went out."""
        nonlocal gradients_seen
        gradients_seen += 1
        if gradients_seen != 2 * 12 + 7:
            return
        print("fault", flush=True)
        if fault == "raise":
            raise ArithmeticError("the loss is not what it was")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])

    if is_faulty:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(misbehave)
    start = time.monotonic()
    try:
        with tb.attach(ddp, optimizer, algorithm, timeout=TIMEOUT):
            for step in range(10_000):
                start = time.monotonic()
                optimizer.zero_grad()
                ddp(torch.randn(4, 200)).square().mean().backward()
                optimizer.step()
                if step == 1:
                    dist.barrier()  # what is slow in a first step is over for all ranks
    except Exception as error:
        print(f"raised on {threading.current_thread().name}: {type(error).__name__}: {error}", flush=True)
    print(f"seconds {time.monotonic() - start:.2f}", flush=True)
    print(f"lanes {[t.name for t in threading.enumerate() if t.name.startswith('torchbagua')]}", flush=True)


if __name__ == "__main__":
    main()
