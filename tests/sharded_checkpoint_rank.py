"""Train a sharded module on one rank, and save or load it with torch.distributed.checkpoint; started by torchrun.

Arguments: "save", or "load" on another number of ranks; the name of the attached algorithm; and a folder.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

import torchbagua as tb


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        module(torch.randn(4, 10, generator=generator)).square().mean().backward()
        optimizer.step()


def whole_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the weights and Adam's moments, unsharded."""
    found = {name: parameter.full_tensor().detach().clone() for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{key} of {name}"] = optimizer.state[parameter][key].full_tensor()
    return found


def states(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, optimizers = get_state_dict(module, optimizer)
    return {"model": model, "optimizers": optimizers}


def main(action: str, name: str, folder: Path) -> None:
    size = dist.get_world_size()
    num_replicas = 2 if name == "diloco" else 1
    mesh = init_device_mesh("cpu", (num_replicas, size // num_replicas), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(10, 37), nn.Tanh(), nn.Linear(37, 3))
    for layer in (module[0], module):
        fully_shard(layer, mesh=mesh["shards"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    if name == "diloco":
        algorithm: tb.Algorithm = tb.DiLoCoAlgorithm(inner_steps=2)
        options: dict[str, Any] = {"replicate_group": mesh["replicas"].get_group()}
    else:
        algorithm, options = tb.ByteGradAlgorithm(), {}
    if action == "save":
        with tb.fsdp.attach(module, optimizer, algorithm, **options) as attachment:
            train(module, optimizer, range(3))
            with attachment.averaged_weights():
                dcp.save(states(module, optimizer), checkpoint_id=folder)
                saved = whole_state(module, optimizer)
            train(module, optimizer, range(3, 5))
        if dist.get_rank() == 0:
            torch.save(saved, folder / "whole.pt")
        return
    before = {key: parameter.full_tensor().detach().clone() for key, parameter in module.named_parameters()}
    loaded = states(module, optimizer)
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizers"])
    expected = torch.load(folder / "whole.pt", weights_only=True)
    with tb.fsdp.attach(module, optimizer, algorithm, **options):
        state = whole_state(module, optimizer)
        assert state.keys() == expected.keys()
        # Each replica has its own Adam moments, and the checkpoint contains a mix of those of both replicas.
        compared = expected if num_replicas == 1 else before
        assert all(torch.equal(state[key], expected[key]) for key in compared)
        assert not any(torch.equal(before[key], expected[key]) for key in before)
        train(module, optimizer, range(3, 6))
    for key, parameter in module.named_parameters():
        assert parameter.full_tensor().isfinite().all()
        assert not torch.equal(parameter.full_tensor(), expected[key])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    if dist.get_rank() == 0:
        print(f"right: {sys.argv[1]}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
