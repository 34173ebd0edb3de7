"""The processes that a test starts end with its block, and with pytest, however they end."""

import os
import signal
import subprocess
import sys
import time
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
        started([sys.executable, "-S", "-c", "import time; time.sleep(100)"]) as sleeper,
        started([sys.executable, "-S", "-c", PARENT], stdout=subprocess.PIPE) as parent,
    ):
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.wait(timeout=20)
        assert Path(f"/proc/{child}").exists()
        parent.stdout.close()
        assert sleeper.poll() is None
    assert has_ended(child)
    assert has_ended(sleeper.pid)


def test_nothing_of_a_fork_outlives_its_block(tmp_path: Path) -> None:
    code = "import os, time\nprint(os.getpid(), os.fork() or os.getpid(), flush=True)\ntime.sleep(100)"
    with warm_python.started(["-c", f"{PARENT}\n{code}"], out=tmp_path / "out") as fork:
        deadline_s = time.monotonic() + 20
        while len(fork.printed().split()) < 5:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    assert all(has_ended(int(pid)) for pid in fork.printed().split())


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


REPORT = """
import os, sys
import own_module
print(__name__, sys.argv, sys.path[:2], os.getcwd(), os.environ["WORD"], own_module.__file__)
sys.exit(3)
"""


def test_a_fork_has_the_state_of_a_separate_interpreter(tmp_path: Path) -> None:
    (tmp_path / "own_module.py").touch()
    (tmp_path / "own_script.py").write_text(REPORT)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "WORD": "here"}
    options = {"cwd": tmp_path, "env": environment, "check": False}
    of_fork = warm_python.run(["own_script.py", "y"], **options)
    of_own = run([sys.executable, "own_script.py", "y"], **options)
    assert (of_fork.stdout, of_fork.returncode) == (of_own.stdout, 3)
    assert "here" in of_own.stdout
