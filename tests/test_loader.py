"""Which kernels `torchbagua.native.load` chooses: every case in separate processes, over a copy of the sources."""

import io
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch

from source_tree import (
    build_empty_library,
    compiler_that,
    copy_sources,
    finish,
    fork_python,
    fork_started,
    python_started,
    replace_cpu_sources,
)
from torchbagua.native import build, loader, recipe
from torchbagua.native.build import CompileProgress, read_sealed, seal

# Loads in two threads at once; prints the kind of the loaded library, or None.
LOAD = """
import threading
from torchbagua import native
threads = [threading.Thread(target=native.load) for _ in range(2)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
native.load()
print(native.loader.loaded_path(native.loader.CPU))
"""

LOAD_ONCE = "from torchbagua import native; native.load(); print(native.loader.loaded_path(native.loader.CPU)); "

COMPILING = "torchbagua: compiling the CPU kernels, once per machine\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_sources(tmp_path / "checkout")


@pytest.fixture
def empty_checkout(checkout: Path) -> Path:
    """A copy with an empty library, which compiles quickly; for tests of how a library comes to be loaded."""
    replace_cpu_sources(checkout / "csrc_cuda")
    return checkout


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_processes_at_first_use_wait_for_the_compiling_process(empty_checkout: Path, tmp_path: Path) -> None:
    compiler = compiler_that(tmp_path / "slow-c++", f"echo >>{tmp_path}/calls; sleep 1")
    variables = {"TORCHBAGUA_CACHE": str(tmp_path / "cache"), "CXX": str(compiler)}

    with ExitStack() as stack:
        outs = [tmp_path / f"out {number}" for number in range(2)]
        forks = [stack.enter_context(fork_started(LOAD, empty_checkout, out, **variables)) for out in outs]
        results = [(fork.wait(180), fork.printed()) for fork in forks]

    assert sorted(results) == [(0, "jit\n"), (0, f"{COMPILING}jit\n")]
    assert (tmp_path / "calls").read_text() == "\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_compilation_that_ends_early(empty_checkout: Path, tmp_path: Path, number: signal.Signals) -> None:
    """If its process is killed, it blocks nothing; if it is interrupted, the compiler ends too."""
    announce = f"echo $$ >{tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid"  # atomically
    compiler = compiler_that(tmp_path / "slow-c++", f"[ -e {tmp_path}/fast ] || {{ {announce}; exec sleep 200; }}")
    cache = tmp_path / "cache"
    variables = {"TORCHBAGUA_CACHE": str(cache), "CXX": str(compiler)}

    # Not a fork: a signal to it would end the compiler too.
    with python_started(LOAD_ONCE, empty_checkout, **variables) as first:
        wait_until((tmp_path / "pid").exists)
        first.send_signal(number)
        status, _, err = finish(first)
        if number == signal.SIGINT:
            assert status != 0
            assert err.endswith("KeyboardInterrupt\n")
            wait_until(lambda: not Path("/proc", (tmp_path / "pid").read_text().strip()).exists())
            return
        assert status == -signal.SIGKILL
        (tmp_path / "fast").touch()
        started_s = time.monotonic()
        assert fork_python(LOAD, empty_checkout, **variables) == (0, "jit\n", COMPILING)
    assert time.monotonic() - started_s < 120, "it waited for the process that is gone"
    assert not list(cache.glob("*/build-*")), "what the killed process left is removed"


def test_truncated_library_in_the_cache_is_compiled_again(
    empty_checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading it would end the process with a bus error."""
    compiler = compiler_that(tmp_path / "c++", f"touch {tmp_path}/called")
    monkeypatch.setenv("TORCHBAGUA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    library = build.Build(recipe.CPU, empty_checkout / "csrc_cuda").library_file()
    library.parent.mkdir(parents=True)
    any_library = Path(torch.__file__).with_name("lib") / "libc10.so"
    library.write_bytes(any_library.read_bytes()[:4096])  # the page with the header, which declares more pages

    variables = {"TORCHBAGUA_CACHE": str(tmp_path / "cache"), "CXX": str(compiler)}
    assert fork_python(LOAD, empty_checkout, **variables) == (0, "jit\n", COMPILING)

    assert (tmp_path / "called").exists()


def test_a_library_compiled_at_first_use_is_for_one_instruction_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_cpu_sources(tmp_path)
    files = set()
    for capability, name in {"AVX512": "kAvx512", "AVX2": "kAvx2", "DEFAULT": "kDefault", "SVE256": "kDefault"}.items():
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", partial(str, capability))
        compilation = build.Build(recipe.CPU, tmp_path)
        assert compilation.arguments()["extra_cflags"][-1] == f"-DTORCHBAGUA_INSTRUCTION_SET={name}"
        files.add(compilation.library_file())
    assert len(files) == 3


def test_a_terminal_shows_the_progress_of_a_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = CompileProgress("the CPU kernels", tmp_path, 2)
    for number in range(2):
        (tmp_path / f"{number}.o").touch()
        progress.show()
    progress.end()
    *lines, last = (line.partition(" files,")[0] for line in terminal.getvalue().split("\r"))
    shown = "torchbagua: compiling the CPU kernels, once per machine:"
    assert lines == ["", f"{shown} 1 of 2", f"{shown} 2 of 2"]
    assert last == f"{shown} 2 of 2"
    assert terminal.getvalue().endswith(" s\n")


def test_damage_to_a_sealed_file_is_detected(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert read_sealed(file) is None
    file.write_bytes(b"some bytes")
    seal(file)
    assert read_sealed(file) == b"some bytes"
    whole = file.read_bytes()
    for broken in (b"", b"some bytes", whole[:-1], whole[:5], whole + b"\0", b"S" + whole[1:], whole[:-1] + b"\0"):
        file.write_bytes(broken)
        assert read_sealed(file) is None


def test_cache_folder_that_cannot_be_created_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    to_compile = build.Build(recipe.CPU, tmp_path)
    with pytest.raises(RuntimeError, match="set TORCHBAGUA_CACHE to another one"):
        build.compile_once(tmp_path / "file" / "key" / "library.so", to_compile)


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("a compiler that fails", ["RuntimeError", "no room for jokes", "TORCHBAGUA_NATIVE=reference"]),
        ("a library that does not load", ["RuntimeError", ".abi3.so", "TORCHBAGUA_NATIVE=reference"]),
        ("a variable that is set too late", ["RuntimeError: TORCHBAGUA_NATIVE=reference was set after"]),
    ],
)
def test_what_is_broken_raises(checkout: Path, tmp_path: Path, case: str, parts: list[str]) -> None:
    code, variables = LOAD_ONCE, {"TORCHBAGUA_CACHE": str(tmp_path / "cache")}
    if case == "a compiler that fails":
        compiler = compiler_that(tmp_path / "broken-c++", "echo no room for jokes >&2; exit 1")
        variables["CXX"] = str(compiler)
    elif case == "a library that does not load":
        stem = recipe.stem(recipe.CPU, checkout / "csrc_cuda")
        (checkout / "torchbagua" / "native" / f"{stem}.abi3.so").write_bytes(b"not a library")
    else:
        build_empty_library(checkout)
        variables["TORCHBAGUA_NATIVE"] = "aot"
        code += "import os; os.environ['TORCHBAGUA_NATIVE'] = 'reference'; native.load()"
    status, out, err = fork_python(code, checkout, **variables)
    assert (status, out.strip()) == (1, variables.get("TORCHBAGUA_NATIVE", ""))
    for part in parts:
        assert part in err


def test_without_compiler_the_reference_runs_with_one_warning(checkout: Path) -> None:
    code = f"import warnings; warnings.simplefilter('always'); {LOAD_ONCE * 2}"
    status, out, err = fork_python(code, checkout, CXX="absent-c++")
    assert (status, out) == (0, "None\n" * 2)
    assert err.count("Warning") == 1
    for part in ("no library for cpu was built", "absent-c++ is not on PATH", "TORCHBAGUA_NATIVE=reference"):
        assert part in err
    assert fork_python(code, checkout, CXX="absent-c++", TORCHBAGUA_NATIVE="reference") == (0, "None\n" * 2, "")


def test_cpu_kernels_of_an_own_codec_do_not_count_as_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be registered before `load`. Only kernels for CUDA come without a library, from NVRTC."""
    monkeypatch.setattr(loader, "loaded_library", lambda kernels: None)
    monkeypatch.setattr(loader, "has_kernel", lambda operation, kernels: True)
    assert loader.loaded_path(loader.CPU) is None
    assert loader.loaded_path(loader.CUDA) == "nvrtc"


class TestChoice:
    """`choose` without loading, over an empty package folder, with a compiler that is never called."""

    @pytest.fixture(autouse=True)
    def package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        native = tmp_path / "torchbagua" / "native"
        native.mkdir(parents=True)
        replace_cpu_sources(tmp_path / "csrc_cuda")
        monkeypatch.setattr(loader, "__file__", str(native / "loader.py"))
        monkeypatch.setenv("CXX", "absent-c++")
        monkeypatch.delenv("TORCHBAGUA_NATIVE", raising=False)
        return native

    def test_library_of_other_sources_is_not_chosen(
        self, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        built = package / f"{recipe.stem(recipe.CPU, tmp_path / 'csrc_cuda')}.abi3.so"
        built.touch()
        assert loader.choose(loader.CPU).library == built
        with monkeypatch.context() as forced:
            forced.setenv("TORCHBAGUA_NATIVE", "reference")
            assert loader.choose(loader.CPU) == loader.Choice("reference", "TORCHBAGUA_NATIVE=reference")
            forced.setenv("TORCHBAGUA_NATIVE", "jit")
            forced.setenv("CXX", str(compiler_that(tmp_path / "c++", "exit 1")))
            assert loader.choose(loader.CPU).path == "jit"
        (tmp_path / "csrc_cuda" / "new.h").write_text("// changed\n")
        choice = loader.choose(loader.CPU)
        assert choice.path == "reference"
        assert f"the prebuilt library {built.name} was not built from the sources in" in choice.why

    @pytest.mark.parametrize(
        ("forced", "error", "message"),
        [
            ("jit", RuntimeError, r"TORCHBAGUA_NATIVE=jit, but no C\+\+ compiler was found"),
            ("aot", RuntimeError, "TORCHBAGUA_NATIVE=aot, but no library for cpu was built ahead of time"),
            ("AOT", ValueError, "TORCHBAGUA_NATIVE='AOT' is not allowed: set it to one of aot, jit"),
        ],
    )
    def test_a_forced_path_that_is_unavailable_raises(
        self, forced: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCHBAGUA_NATIVE", forced)
        with pytest.raises(error, match=message):
            loader.choose(loader.CPU)

    def test_sources(self, tmp_path: Path) -> None:
        shutil.rmtree(tmp_path / "csrc_cuda" / "cpu")
        with pytest.raises(FileNotFoundError, match=r"cpu/\*\.cpp is missing"):
            loader.choose(loader.CPU)
        (tmp_path / "torchbagua" / "_csrc").mkdir()  # of an installation, which comes first
        assert loader.sources() == tmp_path / "torchbagua" / "_csrc"
