"""Measures the time from `pip install` to the first training step, in an empty environment without a C++ compiler.

    python benchmarks/first_step.py [WHEEL] [--torch 2.13.0] [--rounds 3] [--json PATH]

Each round creates a virtual environment, installs torch, then the wheel, and runs a script of two processes until its
first optimizer step, with plain DDP and with ByteGrad on native kernels. PATH contains only that environment. The cost
of torchbagua is the time of the second `pip install`, and the difference of the scripts' times. An unmeasured run of
each script comes first: the first start in a new environment reads torch from the disk, and compiles Python files.
"""

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from statistics import median

from environment import REPOSITORY, make_parser, write_record
from table import table

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1000, 100))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
if sys.argv[1] == "ByteGrad":
    import torchbagua as tb
    from torchbagua import native

    tb.attach(ddp, optimizer, tb.ByteGradAlgorithm())
ddp(torch.ones(8, 1000)).sum().backward()
optimizer.step()
if sys.argv[1] == "ByteGrad":
    assert {row.path for row in native.status()} == {"aot"}, native.status()
dist.barrier()
os._exit(0)  # plain torch sometimes aborts if a process ends so soon: "terminate called without an active exception"
"""
PIP_ARGS = shlex.split(os.environ.get("PIP_ARGS", ""))


def main() -> None:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("wheel", nargs="?", help="the wheel to install (default: this machine's in dist/)")
    parser.add_argument(
        "--torch", default=metadata.version("torch").partition("+")[0], help="version (default: this environment's)"
    )
    options = parser.parse_args()
    built = sorted((REPOSITORY / "dist").glob(f"*_{platform.machine()}.whl"))
    wheel = options.wheel or (str(built[-1]) if built else parser.error("dist/ has no wheel: run `make wheels`"))

    rounds = [measure(wheel, options.torch) for _ in range(options.rounds)]

    medians = {name: median(parts[name] for parts in rounds) for name in rounds[0]}
    added = medians["pip install WHEEL"] + medians["first step, ByteGrad"] - medians["first step, plain DDP"]
    rows = [[name, f"{seconds:.1f}"] for name, seconds in medians.items()]
    print(table([f"torch {options.torch}", "seconds"], [*rows, ["**added by torchbagua**", f"**{added:.1f}**"]]))
    installed = {"wheel": Path(wheel).name, "sha256": hashlib.sha256(Path(wheel).read_bytes()).hexdigest()}
    write_record(options.json, {"torch": options.torch, **installed, "rounds": rounds, "added_s": added})


def measure(wheel: str, torch: str) -> dict[str, float]:
    """Return the seconds of each part, in a new environment."""
    with tempfile.TemporaryDirectory(prefix="torchbagua-first-step-") as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))
        parts = {
            # numpy, which torchbagua does not need, avoids a warning of torch.
            "pip install torch": ("-m", "pip", "install", "-q", *PIP_ARGS, f"torch=={torch}", "numpy"),
            "pip install WHEEL": ("-m", "pip", "install", "-q", wheel),
            "cold start": (*torchrun, "plain DDP"),
            "cold start, ByteGrad": (*torchrun, "ByteGrad"),
            "first step, plain DDP": (*torchrun, "plain DDP"),
            "first step, ByteGrad": (*torchrun, "ByteGrad"),
        }
        return {name: run_seconds(Path(folder, "bin"), arguments) for name, arguments in parts.items()}


def run_seconds(binaries: Path, arguments: tuple[str, ...]) -> float:
    """Run the environment's Python, with no other program on PATH, and return its wall-clock time."""
    # One thread per rank: with more, the ranks of a small machine wait for each other.
    environment = os.environ | {"PATH": str(binaries), "TORCHBAGUA_NATIVE": "aot", "OMP_NUM_THREADS": "1"}
    for variable in ("CXX", "PYTHONPATH"):
        environment.pop(variable, None)
    start = time.perf_counter()
    subprocess.run([binaries / "python", *arguments], check=True, env=environment)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
