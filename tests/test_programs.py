"""The processes that a test starts end with its block, and with pytest, however they end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm_python
from programs import run, started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")

# Like torchrun: a child in a separate session, which outlives its parent.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"], start_new_session=True)
print(child.pid, flush=True)
"""


def has_ended(pid: int) -> bool:
    deadline_s = time.monotonic() + 20
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def test_children_in_separate_sessions_end_with_the_block() -> None:
    with (
        started([sys.executable, "-c", "import time; time.sleep(100)"]) as sleeper,
        started([sys.executable, "-S", "-c", PARENT], stdout=subprocess.PIPE) as parent,
    ):
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.wait(timeout=20)
        assert Path(f"/proc/{child}").exists()
        parent.stdout.close()
        with pytest.raises(ZeroDivisionError), started([sys.executable, "-S", "-c", PARENT]):
            raise ZeroDivisionError
        assert sleeper.poll() is None
    assert has_ended(child)
    assert has_ended(sleeper.pid)


# Simulates a pytest that is killed while a test waits.
KILLED = f"""
import os, signal, subprocess, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from programs import started
with started([sys.executable, "-S", "-c", {PARENT!r}], stdout=subprocess.PIPE) as parent:
    print(parent.stdout.readline(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_outlives_a_pytest_that_is_killed() -> None:
    # Not with `started`, which would end them itself.
    killed = subprocess.run([sys.executable, "-S", "-c", KILLED], stdout=subprocess.PIPE, text=True, timeout=20)
    assert killed.returncode == -signal.SIGKILL
    assert has_ended(int(killed.stdout))


@pytest.fixture
def _interrupts_ignored() -> Iterator[None]:
    """SIGINT is ignored under nohup, or if a script starts pytest in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts_ignored")
def test_interrupts_reach_processes_if_pytest_ignores_them() -> None:
    with started(["sleep", "100"]) as process:
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) == -signal.SIGINT


def test_a_program_that_takes_too_long_shows_its_output() -> None:
    code = "import time; print('here', flush=True); time.sleep(100)"
    with pytest.raises(AssertionError, match=r"(?s)not done after 0.5 s.*here"):
        run([sys.executable, "-S", "-c", code], timeout_s=0.5)
    with pytest.raises(AssertionError, match=r"(?s)ended with 3.*there"):
        run([sys.executable, "-S", "-c", "import sys; print('there', file=sys.stderr); sys.exit(3)"])


REPORT = """
import os, sys
import own_module
print(__name__, sys.argv, sys.path[:2], os.getcwd(), os.environ["WORD"], own_module.__file__)
"""


def test_a_fork_has_the_state_of_a_separate_interpreter(tmp_path: Path) -> None:
    (tmp_path / "own_module.py").touch()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "own_script.py").write_text(REPORT)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "WORD": "here"}
    ways = (["-c", REPORT, "x"], ["scripts/own_script.py", "y"], ["-m", "scripts.own_script", "z"])
    for arguments in ways:
        of_fork, of_own = (
            start(arguments, cwd=tmp_path, env=environment).stdout
            for start in (warm_python.run, lambda arguments, **options: run([sys.executable, *arguments], **options))
        )
        assert of_fork == of_own
        assert "here" in of_own


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("raise SystemExit('words')", 1),
        ("no_such_name", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        # A fork has neither the modules that only the forking process has imported, nor its names.
        ("import programs", 1),
        ("Fork", 1),
    ],
)
def test_a_fork_ends_as_an_interpreter_does(code: str, status: int) -> None:
    for ends_whole in (False, True):
        done = warm_python.run(["-c", code], check=False, ends_whole=ends_whole, cwd="/")
        assert done.returncode == status
        assert ("words" in done.stderr) == ("words" in code)


def test_a_fork_waits_for_threads_and_runs_exit_handlers() -> None:
    code = """
import atexit, threading, time
atexit.register(print, "third")
threading.Thread(target=lambda: [time.sleep(0.1), print("second")]).start()
print("first")
"""
    assert warm_python.run(["-c", code]).stdout.split() == ["first", "second", "third"]


def test_nothing_of_a_fork_outlives_its_block(tmp_path: Path) -> None:
    code = "import os, time\nprint(os.getpid(), os.fork() or os.getpid(), flush=True)\ntime.sleep(100)"
    with warm_python.started(["-c", f"{PARENT}\n{code}"], out=tmp_path / "out") as fork:
        deadline_s = time.monotonic() + 20
        while len(fork.printed().split()) < 5:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    assert all(has_ended(int(pid)) for pid in fork.printed().split())


def test_a_fork_that_takes_too_long_shows_its_output() -> None:
    code = "import time; print('here', flush=True); time.sleep(100)"
    with pytest.raises(AssertionError, match=r"(?s)not done after 0.5 s.*here"):
        warm_python.run(["-c", code], timeout_s=0.5)
    assert warm_python.run(["-c", "print('again')"]).stdout == "again\n"
