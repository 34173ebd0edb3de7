"""The command line: `torchbagua doctor`, and the command's arguments."""

import pytest
import torch

import torchbagua
from torchbagua.cli.__main__ import main
from torchbagua.native.loader import status


def test_doctor_reports_every_operation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for word in (torchbagua.__version__, torch.__version__, "gloo", "C++ compiler", "nvcc", "NVRTC", "ninja", "cache"):
        assert word in printed
    lines = [line.split() for line in printed.splitlines()]
    assert {"qadam_update", "minmax_uint8_encode", "ring_advance", "low_rank_solve"} <= {
        row.operation for row in status()
    }
    for row in status():
        (line,) = (line for line in lines if line[:2] == [row.operation, row.device])
        assert line[2:4] == [row.path, row.instruction_set or "-"]
        is_native = row.path in ("aot", "jit")
        assert is_native == (row.library is not None) == (row.instruction_set in ("default", "avx2", "avx512"))
    assert printed.endswith("torchbagua is usable here.\n")
    monkeypatch.setenv("TORCHBAGUA_NATIVE", "fast")
    assert main(["doctor"]) == 1
    assert "NOT USABLE: the native kernels: TORCHBAGUA_NATIVE='fast' is not allowed" in capsys.readouterr().out


def test_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"torchbagua {torchbagua.__version__}\n"
    with pytest.raises(SystemExit, match="2"):
        main(["operate"])
    assert "'operate'" in capsys.readouterr().err


def test_doctor_says_what_page_faults_may_cost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(1 << 40))
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    assert main(["doctor"]) == 0
    assert "costs.md: MALLOC_MMAP_THRESHOLD_ not set" in capsys.readouterr().out
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 25))
    assert main(["doctor"]) == 0
    assert "not set" not in next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("freed memory")
    )
