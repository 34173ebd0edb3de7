"""`torchbagua demo` as users run it: a short run with everything that it writes, and every way it can fail."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import programs
from torchbagua.cli import demo
from torchbagua.cli.demo.model import GPT
from torchbagua.cli.demo.report import Comparison, describe
from torchbagua.cli.demo.text import LIMIT_BYTES, read_standard_library
from torchbagua.cli.demo.train import Settings, summarise
from torchbagua.cli.namespaces import existing_namespaces, why_unavailable
from torchbagua.observe.perfetto import find_files

STEPS = 12
COMMAND = [sys.executable, "-m", "torchbagua.cli", "demo"]
# Starting takes seconds on an idle machine, and far longer while the machine compiles the kernels.
TIMEOUT_S = 150


@pytest.fixture(params=[0, pytest.param(200, marks=pytest.mark.network)], ids=["loopback", "emulated"])
def rate(request: pytest.FixtureRequest) -> int:
    """The value of --rate."""
    rate: int = request.param
    if rate and (reason := why_unavailable()):
        pytest.skip(f"cannot emulate a network: {reason}")
    return rate


@pytest.mark.slow
def test_demo_trains_and_reports(rate: int, tmp_path: Path) -> None:
    command = [*COMMAND, "--nproc", "2", "--steps", str(STEPS), "--seed", "7", "--rate", str(rate)]
    command += ["--output", str(tmp_path / "a" / "b")]

    run = programs.run(command, timeout_s=TIMEOUT_S)

    results = json.loads((tmp_path / "a" / "b" / "results.json").read_text(encoding="utf-8"))
    plain, bytegrad = results["runs"]
    (traces,) = (tmp_path / "a" / "b" / "traces").iterdir()
    assert Settings(**results["settings"]) == Settings(
        nproc=2, steps=STEPS, seed=7, rate_mbit=rate, traces=str(traces), with_tensorboard=True
    )
    assert (plain["name"], bytegrad["name"]) == ("plain DDP", "ByteGrad")
    for summary in plain, bytegrad:
        assert len(summary["losses"]) == len(summary["sent_bytes"]) == len(summary["seconds"]) == STEPS
        assert summary["losses"][-1] < summary["losses"][0] - 1, "it learns"
        assert summary["step_ms"] > 0
    assert plain["losses"][0] == bytegrad["losses"][0], "same weights, same batches"
    assert results["loss_difference"] < results["loss_tolerance"] == 0.01

    elements = plain["num_elements"]
    assert elements == sum(parameter.numel() for parameter in GPT(width=160, num_layers=4, num_heads=5).parameters())
    assert not plain["sent_bytes_measured"]
    assert bytegrad["sent_bytes_measured"]
    # Between two ranks a ring sends each element once, in 4 bytes; ByteGrad in 1, with 8 bytes of range a block.
    assert plain["sent_bytes"] == [4 * elements * (step + 1) for step in range(STEPS)]
    assert plain["bits_per_element"] == 32
    assert 8 < bytegrad["bits_per_element"] < 8.2
    assert bytegrad["ratio"] == pytest.approx(32 / bytegrad["bits_per_element"])

    assert (tmp_path / "a" / "b" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert f"{bytegrad['ratio']:.2f}x" in run.stdout
    assert f"{bytegrad['final_loss']:.4f}" in run.stdout
    assert "less than 1%" in run.stdout
    assert "ring all-reduce" in run.stdout, "it explains where plain DDP's bytes come from"
    assert f"plain DDP {STEPS}/{STEPS} steps" in run.stderr
    assert f"ByteGrad  {STEPS}/{STEPS} steps" in run.stderr
    assert "Warning" not in run.stderr
    assert ("Network: 200 Mbit/s for each rank, emulated." if rate else "Network: loopback.") in run.stdout
    assert ("times faster at 200 Mbit/s" in run.stdout) == bool(rate)

    for line in (
        f"torchbagua trace show {traces}",
        f"tensorboard --logdir {traces.parent}",
        f"{traces}/merged.json.gz",
    ):
        assert line in run.stdout
    assert find_files(traces).files[0].summary().figures.num_steps == STEPS
    assert (traces / "merged.json.gz").is_file()
    assert list(traces.glob("events.out.tfevents.*"))


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--nproc", "1", "an integer from 2 to 64"),
        ("--nproc", "65", "an integer from 2 to 64"),
        ("--nproc", "two", "an integer from 2 to 64"),
        ("--steps", "0", "an integer from 1 to 1000000"),
        ("--steps", "1.5", "an integer from 1 to 1000000"),
        ("--seed", "-1", "an integer from 0 to 4294967296"),
        ("--rate", "fast", "an integer from 0 to 100000"),
        ("--output", os.devnull, "a folder to write to"),
    ],
)
def test_bad_options_are_named(option: str, value: str, allowed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main([f"{option}={value}"])

    assert f"argument {option}: got '{value}', allowed: {allowed}" in capsys.readouterr().err


def test_losses_that_disagree_are_reported() -> None:
    settings = Settings(nproc=4, steps=2, seed=0, rate_mbit=50, traces="", with_tensorboard=False)
    plain = summarise("plain DDP", [5.0, 1.9], None, [0.9, 1.8], num_elements=100, nproc=4)
    bytegrad = summarise("ByteGrad", [5.0, 2.0], [60, 120], [0.3, 0.6], num_elements=100, nproc=4)
    shown = describe(Comparison(plain, bytegrad), settings)
    assert "differ by 5.26%, NOT less than 1%" in shown
    assert "10.00 times fewer bytes, and its steps are 3.0 times faster at 50 Mbit/s" in shown
    assert "differ by 5.00%, NOT less than 1%" in describe(Comparison(bytegrad, plain), settings)
    assert plain.sent_bytes == [600, 1200]  # 2 (n-1)/n x 4 bytes x elements, n = 4


def test_the_text_is_bounded_and_in_order(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        read_standard_library(tmp_path)
    for name, text in {"b.py": b"second", "a.py": b"first ", "c.txt": b"no source"}.items():
        (tmp_path / name).write_bytes(text)
    assert bytes(read_standard_library(tmp_path).tolist()) == b"first second"
    assert 1_000_000 < len(read_standard_library()) <= LIMIT_BYTES


def test_a_machine_that_cannot_emulate_or_load_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "why_unavailable", lambda: "no root")
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--rate", "50", "--output", str(tmp_path)])
    assert "argument --rate: got '50', allowed: 0" in (error := capsys.readouterr().err)
    assert "no root" in error
    monkeypatch.setenv("TORCHBAGUA_NATIVE", "no such path")
    assert demo.main(["--output", str(tmp_path)]) == 1
    output, errors = capsys.readouterr()
    assert "Network: loopback, so steps are not faster. This machine cannot emulate a network: no root." in output
    assert "torchbagua demo: TORCHBAGUA_NATIVE='no such path' is not allowed" in errors


@pytest.mark.slow
def test_without_the_extra_only_pictures_are_missing(tmp_path: Path) -> None:
    extra = ("matplotlib", "numpy", "tensorboard", "tqdm")
    # Python's import system treats a module that is None as missing.
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({extra}))\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    command = [*COMMAND, "--steps", str(STEPS), "--rate", "0", "--output", str(tmp_path / "output")]
    run = programs.run(command, env=environment, timeout_s=TIMEOUT_S)

    assert "install matplotlib and tensorboard: pip install 'torchbagua[demo]'" in run.stdout
    assert "less than 1%" in run.stdout
    written = {path.name for path in (tmp_path / "output").rglob("*") if path.is_file()}
    assert {"results.json", "merged.json.gz"} <= written
    assert "loss.png" not in written


@pytest.mark.slow
def test_a_rank_that_raises_is_reported(tmp_path: Path) -> None:
    command = [*COMMAND, "--steps", "1", "--rate", "0", "--output", str(tmp_path)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "missing0"}
    run = programs.run(command, env=environment, timeout_s=TIMEOUT_S, check=False)
    assert run.returncode == 1
    for part in ("a rank failed", "RuntimeError", "missing0"):
        assert part in run.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def wait_for(condition: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def namespaces_of(process: "subprocess.Popen[str]") -> list[str]:
    return [name for name in existing_namespaces() if name.startswith(f"tbnet-{process.pid}-")]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks' processes in /proc")
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_a_signal_ends_all_processes(rate: int, victim: str, tmp_path: Path) -> None:
    command = ["nohup", *COMMAND, "--steps", "1000", "--rate", str(rate), "--output", str(tmp_path)]
    log = tmp_path / "stderr"
    with (
        log.open("wb") as stderr,
        programs.started(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr) as process,
    ):
        wait_for(lambda: b"loss" in log.read_bytes(), process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        first, second = ranks = [int(child) for child in children.split()]
        assert len(namespaces_of(process)) == (3 if rate else 0), "the switch and two ranks"
        for rank in ranks if rate else []:
            assert os.stat(f"/proc/{rank}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino
        process.send_signal(signal.SIGHUP)  # which nohup makes it ignore
        if victim == "launcher":
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
        else:
            os.kill(second, signal.SIGKILL)
        status = process.wait(timeout=60)
        left = [rank for rank in (first, second) if Path(f"/proc/{rank}").exists()]
    if victim == "launcher":
        assert status == 130
        assert log.read_text().endswith("torchbagua demo: interrupted\n")
        assert "Traceback" not in log.read_text()
    else:
        assert status == 1
        assert f"Signal 9 (SIGKILL) received by PID {second}" in log.read_text()
    assert not left
    assert not rate or not namespaces_of(process)


@pytest.mark.network
@pytest.mark.slow
def test_a_signal_while_the_network_is_built_removes_it(tmp_path: Path) -> None:
    if reason := why_unavailable():
        pytest.skip(reason)
    command = [*COMMAND, "--output", str(tmp_path)]
    with programs.started(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        wait_for(lambda: namespaces_of(process), process)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in stderr
    assert not namespaces_of(process)


def test_attention_sees_only_the_past() -> None:
    torch.manual_seed(0)
    model, tokens = GPT(width=32, num_layers=2, num_heads=2), torch.randint(255, (3, 16))
    changed = tokens.clone()
    changed[:, 9] += 1
    same = (model(tokens) == model(changed)).all(dim=-1).all(dim=0)
    assert same.tolist() == [True] * 9 + [False] * 7
