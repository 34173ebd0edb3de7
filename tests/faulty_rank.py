"""One rank of a training run in which a rank misbehaves; test_faults.py runs each rank in a separate process.

Arguments: rank, world size, a file for the store, the fault, the algorithm. The last rank misbehaves in the middle of
the third step, or has no data for more steps ("early"), or is killed in a later round after the ranks have compared
their progress ("between"), or no rank misbehaves ("none"). The other ranks print their error, whether their weights
have changed since their own last update, the seconds since the start of that step, and their remaining lanes. With a
further argument "later", ranks connect at their first message, as in a large group. With "messages" or "collectives",
they communicate with torch's own point-to-point calls or collectives. With "nccl", they communicate over NCCL, and
share one GPU.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial, partialmethod

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from one_gpu import begin_rank
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.transport import gloo
from torchbagua.transport.torch_backend import TorchBackendTransport

TIMEOUT = timedelta(seconds=4)
ON_ONE_GPU = timedelta(seconds=20)  # ranks that share a GPU take turns, also while NCCL connects them
ALGORITHMS = {
    "bytegrad": tb.ByteGradAlgorithm(),
    "gradient_allreduce": tb.GradientAllReduceAlgorithm(),
    "all": tb.DecentralizedAlgorithm(),
    "shift_one": tb.DecentralizedAlgorithm(peer_selection_mode="shift_one"),
    "ring": tb.DecentralizedAlgorithm(peer_selection_mode=tb.topology.Ring()),
    "low_precision": tb.LowPrecisionDecentralizedAlgorithm(),
    "diloco": tb.DiLoCoAlgorithm(2, delay=1),
    "diloco_nodes": tb.DiLoCoAlgorithm(4, fragments=2, delay=1),
    "async": tb.AsyncModelAverageAlgorithm(sync_interval_ms=20),
}
NODES = {"diloco_nodes": [0, 0, 1, 1]}
TRANSPORTS = {
    "messages": TorchBackendTransport,
    "collectives": partial(TorchBackendTransport, has_messages=False),
}


def main() -> None:
    rank, size, store_path, fault, algorithm = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
    if sys.argv[6:] == ["later"]:
        gloo.MOST_CONNECTED_AT_ONCE = 1
    torch.set_num_threads(1)
    uses_nccl = sys.argv[6:] == ["nccl"]
    device = begin_rank(
        "nccl" if uses_nccl else "gloo",
        timeout=ON_ONE_GPU if uses_nccl else None,
        init_method=f"file://{store_path}",
        rank=rank,
        world_size=size,
    )
    model = torch.nn.Sequential(*[torch.nn.Linear(200, 200) for _ in range(6)]).to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.2)
    torch.manual_seed(rank)  # with equal batches ranks would have equal weights without averaging
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    updated: list[torch.Tensor] = []
    optimizer.register_step_post_hook(lambda *_: updated.__setitem__(slice(None), copies(model)))
    is_faulty = rank == size - 1 and fault != "none"
    gradients_seen = 0

    def misbehave(_: torch.Tensor) -> None:
        """Misbehave in the third backward, after some buckets were sent. Called at each parameter's gradient."""
        nonlocal gradients_seen
        gradients_seen += 1
        if gradients_seen != 2 * 12 + 7:
            return
        print("fault", flush=True)
        if fault == "raise":
            raise ArithmeticError("the loss is not what it was")
        if fault == "early":
            return
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "pause": signal.SIGSTOP}[fault])

    if is_faulty and fault == "between":
        die_in_round(5, *(("finish",) if algorithm == "low_precision" else ("start", "run_overlapping")))
    elif is_faulty:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(misbehave)
    start = time.monotonic()
    # A rank that is stopped for longer than the timeout ends the others; a shorter pause does not.
    timeout = TIMEOUT * 10 if fault == "pause" else ON_ONE_GPU if uses_nccl else TIMEOUT
    # Training must outlast a pause.
    num_steps = 3 if is_faulty and fault == "early" else 400 if fault == "pause" else 100
    if fault == "none":  # test_faults.py kills a rank from outside
        num_steps = 100_000
        print("fault", flush=True)
    try:
        group = None
        transport = TRANSPORTS.get("".join(sys.argv[6:]))
        if algorithm in NODES or transport is not None:
            assert dist.group.WORLD is not None
            nodes = NODES.get(algorithm)
            group = tb.BaguaProcessGroup(dist.group.WORLD, nodes=nodes, timeout=timeout, transport=transport)
        with tb.attach(ddp, optimizer, ALGORITHMS[algorithm], process_group=group, timeout=timeout):
            for step in range(num_steps):
                start = time.monotonic()
                optimizer.zero_grad()
                ddp(torch.randn(4, 200).to(device)).square().mean().backward()
                optimizer.step()
                if step == 1:
                    dist.barrier()  # all ranks have completed the slow first step
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        print(f"finished with weights {weights.double().square().sum().item()!r}", flush=True)
    except Exception as error:
        print(f"raised on {threading.current_thread().name}: {type(error).__name__}: {error}", flush=True)
        if uses_nccl:
            torch.cuda.synchronize()
        is_same = all(map(torch.equal, copies(model), updated))
        print(f"weights {'unchanged' if is_same else 'changed'}", flush=True)
    print(f"seconds {time.monotonic() - start:.2f}", flush=True)
    print(f"lanes {[t.name for t in threading.enumerate() if t.name.startswith('torchbagua')]}", flush=True)


def copies(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def die_in_round(number: int, *methods: str) -> None:
    """Have this rank killed before its buckets run one of these methods for the last of `number` times."""
    num_calls = 0

    def run_or_die(run: Callable[[BaguaBucket], object], bucket: BaguaBucket) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == number:
            print("fault", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return run(bucket)

    for method in methods:
        setattr(BaguaBucket, method, partialmethod(partial(run_or_die, getattr(BaguaBucket, method))))


if __name__ == "__main__":
    main()
