"""Train on one rank, and save with torch.distributed.checkpoint, or resume from it; started by torchrun.

Arguments: "save" or "resume", the checkpoint's folder, and the algorithm. Each rank prints a digest of its weights
after step 9; the checkpoint is of step 4, with a round in flight.
"""

import hashlib
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb

STOP, END = 4, 9


def nesterov(shadows: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Make an outer optimizer. The repr of this function differs between processes."""
    return torch.optim.SGD(shadows, lr=0.5, momentum=0.5, nesterov=True)


ALGORITHMS = {
    "shift_one": tb.DecentralizedAlgorithm(peer_selection_mode="shift_one"),
    "diloco": tb.DiLoCoAlgorithm(3, delay=2),
    "own outer optimizer": tb.DiLoCoAlgorithm(2, outer_optimizer=nesterov),
}


def main() -> None:
    mode, folder, name = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Linear(20, 1)))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(rank)

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.randn(4, 10, generator=data)).square().sum().backward()
        optimizer.step()

    with tb.attach(ddp, optimizer, ALGORITHMS[name]) as attachment:

        def checkpoint() -> dict[str, Any]:
            # A key for each rank: with a common key, dcp would save the weights of a single rank.
            own = {
                "model": ddp.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "attachment": attachment.state_dict(),
                "data": data.get_state(),
            }
            return {f"rank{rank}": own}

        if mode == "save":
            for _ in range(STOP):
                step()
            dcp.save(checkpoint(), checkpoint_id=folder)
        else:
            for _ in range(2):  # to create the optimizer states into which dcp loads
                step()
            state = checkpoint()
            dcp.load(state, checkpoint_id=folder)
            own = state[f"rank{rank}"]
            ddp.module.load_state_dict(own["model"])
            optimizer.load_state_dict(own["optimizer"])
            attachment.load_state_dict(own["attachment"])
            data.set_state(own["data"])
        for _ in range(STOP, END):
            step()
        weights = b"".join(tensor.numpy().tobytes() for tensor in ddp.module.state_dict().values())
        print(f"rank {rank} digest {hashlib.sha256(weights).hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
