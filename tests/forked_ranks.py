"""Starts a script on several ranks as torchrun does, but imports torch once, which takes longer than most scripts.

python forked_ranks.py RANKS SCRIPT [ARGUMENT ...]
"""

import ast
import importlib
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

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


def imported_by(script: str) -> Iterator[str]:
    """Yield the modules that a script of the tests imports first."""
    if Path(script).parent == Path(__file__).parent:
        for statement in ast.parse(Path(script).read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Import):
                yield from (alias.name for alias in statement.names)
            elif isinstance(statement, ast.ImportFrom) and statement.module is not None:
                yield statement.module


if __name__ == "__main__":
    size, (script, *arguments) = int(sys.argv[1]), sys.argv[2:]
    for name in ("torch.distributed.fsdp", *imported_by(script)):  # so that no rank has to import it
        importlib.import_module(name)
    ports = mp.SimpleQueue()
    ranks = mp.start_processes(run_rank, (size, ports, script, arguments), nprocs=size, join=False, start_method="fork")
    # Created after the fork: the store has threads, which a fork does not inherit.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for _ in range(size):
        ports.put(store.port)
    while not ranks.join():
        pass
