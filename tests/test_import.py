"""`import torchbagua` has no side effects, and imports no package of an extra; FSDP2 is imported when it is needed."""

import json
from pathlib import Path

from source_tree import REPOSITORY, copy_sources, fork_python, run_python

IMPORT = """
import json, os, sys, threading
import torch, torch.distributed

asked = []
for name in ("is_available", "device_count", "current_device", "get_device_capability", "_lazy_init", "init"):
    setattr(torch.cuda, name, lambda *arguments, name=name: asked.append(name))

def state():
    return {
        "threads": threading.active_count(),
        "open files": sorted(os.listdir("/proc/self/fd")),
        "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
        "libraries": sorted(torch.ops.loaded_libraries),
    }

before, modules = state(), set(sys.modules)  # torch itself imports some of cuda-python
import torchbagua
new = {name.split(".")[0] for name in set(sys.modules) - modules}
extras = new & {"tensorboard", "matplotlib", "tqdm", "numpy", "cuda"}
patched = [name for one in (torch.nn.Module, torch.Tensor) for name in dir(one) if "bagua" in name]  # by torch_api
print(json.dumps([before, state(), asked, sorted(extras), patched]))
"""


def test_import_starts_opens_compiles_and_asks_nothing(tmp_path: Path) -> None:
    checkout = copy_sources(tmp_path / "checkout")  # no library was built ahead of time there
    status, out, err = run_python(IMPORT, checkout, TORCHBAGUA_CACHE=str(tmp_path / "cache"))
    assert status == 0, err
    before, after, asked_of_cuda, imported, patched = json.loads(out)
    assert after == before
    assert after["libraries"] == []
    assert asked_of_cuda == []
    assert imported == []
    assert patched == []
    assert not (tmp_path / "cache").exists()


FSDP2 = """
import json, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import torchbagua as tb

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def imported():
    return sorted(name for name in sys.modules if name.startswith("torchbagua.fsdp"))

def attached(module, algorithm):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with tb.attach(module, optimizer, algorithm):
        module(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return imported()

ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
unsharded = attached(ddp, "bytegrad") + attached(torch.nn.Linear(3, 2), "decentralized")
sharded = attached(fully_shard(torch.nn.Linear(3, 2)), "bytegrad")
print(json.dumps([unsharded, sharded]))
dist.destroy_process_group()
"""


def test_only_a_sharded_module_imports_what_fsdp2_needs_and_only_replicas_theirs() -> None:
    status, out, err = fork_python(FSDP2, REPOSITORY)
    assert status == 0, err
    unsharded, sharded = json.loads(out)
    assert unsharded == []
    assert "torchbagua.fsdp.attach_sharded" in sharded
    assert "torchbagua.fsdp.replicas" not in sharded
