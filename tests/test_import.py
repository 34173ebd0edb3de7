"""`import torchbagua` has no side effects, and imports no package of an extra."""

import json
from pathlib import Path

from source_tree import copy_sources, run_python

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
