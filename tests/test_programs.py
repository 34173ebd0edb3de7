"""What tests start ends with its block, and with pytest, however they end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from programs import run, started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")

# As torchrun does it: a child in a session of its own, which outlives its parent.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"], start_new_session=True)
print(child.pid, flush=True)
"""


def is_gone(pid: int) -> bool:
    deadline_s = time.monotonic() + 20
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def test_children_in_sessions_of_their_own_end_with_the_block() -> None:
    with (
        started([sys.executable, "-c", "import time; time.sleep(100)"]) as other,
        started([sys.executable, "-S", "-c", PARENT], stdout=subprocess.PIPE) as parent,
    ):
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.wait(timeout=20)
        assert Path(f"/proc/{child}").exists()
        parent.stdout.close()
        with pytest.raises(ZeroDivisionError), started([sys.executable, "-S", "-c", PARENT]):
            raise ZeroDivisionError
        assert other.poll() is None
    assert is_gone(child)
    assert is_gone(other.pid)


# Stands for a pytest that is killed while a test waits.
KILLED = f"""
import os, signal, subprocess, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from programs import started
with started([sys.executable, "-S", "-c", {PARENT!r}], stdout=subprocess.PIPE) as parent:
    print(parent.stdout.readline(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_outlives_a_pytest_that_is_killed() -> None:
    # Not by `started`, which would end them itself.
    killed = subprocess.run([sys.executable, "-S", "-c", KILLED], stdout=subprocess.PIPE, text=True, timeout=20)
    assert killed.returncode == -signal.SIGKILL
    assert is_gone(int(killed.stdout))


@pytest.fixture
def _interrupts_ignored() -> Iterator[None]:
    """As under nohup, or where a script starts pytest in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts_ignored")
def test_interrupts_reach_processes_where_pytest_ignores_them() -> None:
    with started(["sleep", "100"]) as process:
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) == -signal.SIGINT


def test_what_takes_too_long_shows_what_it_printed() -> None:
    code = "import time; print('here', flush=True); time.sleep(100)"
    with pytest.raises(AssertionError, match=r"(?s)not done after 0.5 s.*here"):
        run([sys.executable, "-S", "-c", code], timeout_s=0.5)
    with pytest.raises(AssertionError, match=r"(?s)ended with 3.*there"):
        run([sys.executable, "-S", "-c", "import sys; print('there', file=sys.stderr); sys.exit(3)"])
