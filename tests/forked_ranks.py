"""Starts a script on several ranks as torchrun does, but imports torch once, which takes longer than most scripts.

python forked_ranks.py RANKS SCRIPT [ARGUMENT ...]
"""

import importlib
import os
import runpy
import sys

import torch.distributed as dist
import torch.multiprocessing as mp


def run_rank(rank: int, size: int, ports: mp.SimpleQueue, script: str, arguments: list[str]) -> None:
    """Run `script` as in one of torchrun's processes; it meets the other ranks at the launcher's store."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": ports.get(), "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ |= {name: str(value) for name, value in environment.items()}
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    importlib.import_module("torch.distributed.fsdp")  # so that no rank has to import it
    size, (script, *arguments) = int(sys.argv[1]), sys.argv[2:]
    ports = mp.SimpleQueue()
    ranks = mp.start_processes(run_rank, (size, ports, script, arguments), nprocs=size, join=False, start_method="fork")
    # Created after the fork: the store has threads, which a fork does not inherit.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for _ in range(size):
        ports.put(store.port)
    while not ranks.join():
        pass
