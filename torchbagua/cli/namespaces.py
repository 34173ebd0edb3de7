"""Emulated networks: every rank in a separate Linux network namespace, joined by bridges and slowed down by `tc`.

All devices are in namespaces called `tbnet-PID-...`, so that the host's own interfaces are not touched and deleting the
namespaces deletes everything. PID is the process that created them: namespaces whose process no longer exists are left
over from a run that was killed with SIGKILL.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

PREFIX = "tbnet"
SUBNET = "10.77.0"
MAX_RANKS = 200
COMMAND_TIMEOUT_S = 10
BURST = "256kb"  # that pass immediately after a pause: 10 ms worth of 200 Mbit/s
# Slightly more than a packet of the kernel, which has up to 64 KiB. For links that pause in each step, which larger
# bursts would make faster than their rate.
SMALL_BURST = "80kb"


class NetworkError(RuntimeError):
    """An `ip` or `tc` command failed; the message contains the command and its error output."""


def run_command(*command: str) -> str:
    """Run `command` in a separate session, so that Ctrl-C does not interrupt a cleanup, and return its output."""
    try:
        finished = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S, start_new_session=True
        )
    except subprocess.TimeoutExpired as error:
        raise NetworkError(f"`{' '.join(command)}` did not end within {COMMAND_TIMEOUT_S} s") from error
    if finished.returncode != 0:
        raise NetworkError(f"`{' '.join(command)}` failed: {finished.stderr.strip() or finished.returncode}")
    return finished.stdout


def existing_namespaces() -> list[str]:
    """Return the names of all network namespaces of this machine that a demo or a benchmark has created."""
    names = [line.split()[0] for line in run_command("ip", "netns", "list").splitlines() if line]
    return [name for name in names if name.startswith(f"{PREFIX}-")]


def remove_stale_namespaces() -> list[str]:
    """Delete the namespaces of runs whose process has ended; return their names."""
    stale = []
    for name in existing_namespaces():
        match = re.match(rf"{PREFIX}-(\d+)-", name)
        if match and not os.path.exists(f"/proc/{match[1]}"):
            with suppress(NetworkError):  # another run may delete it at the same time
                run_command("ip", "netns", "delete", name)
                stale.append(name)
    return stale


def why_unavailable() -> str | None:
    """Return the reason why this machine cannot emulate a network, or None if it can. Tries it with two ranks."""
    if os.name != "posix" or not os.path.exists("/proc/self/ns/net"):
        return "network namespaces exist only on Linux"
    if os.geteuid() != 0:
        return "creating network namespaces needs root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed (package iproute2)"
    try:
        with EmulatedNetwork([0, 0], rank_rate="1gbit"):
            return None
    except NetworkError as error:
        return str(error)


class EmulatedNetwork:
    """Ranks in namespaces, one bridge per node, and all bridges in one more namespace, the switch.

    Args:
        nodes: node of each rank, 0 or 1. If both occur, one veth pair, the link, joins the two bridges.
        rank_rate: rate of each rank's interface, both directions, in `tc` notation (`200mbit`); None: not shaped.
        link_rate: rate of the link between the nodes, in the same notation.
        congestion_control: TCP congestion control inside the namespaces.
        burst: how much passes immediately after a pause, in the notation of `tc`.

    A context manager: entering builds the network, leaving deletes it (processes inside must have ended).
    Raises NetworkError if the kernel or the tools fail.
    """

    def __init__(
        self,
        nodes: Sequence[int],
        *,
        rank_rate: str | None = None,
        link_rate: str | None = None,
        congestion_control: str = "reno",
        burst: str = BURST,
    ) -> None:
        if not 1 <= len(nodes) <= MAX_RANKS or not set(nodes) <= {0, 1}:
            raise ValueError(f"EmulatedNetwork: nodes must be 1 to {MAX_RANKS} entries of 0 or 1, got {list(nodes)}")
        self.nodes = list(nodes)
        self.rank_rate = rank_rate
        self.link_rate = link_rate
        self.congestion_control = congestion_control
        self.burst = burst
        self.switch = f"{PREFIX}-{os.getpid()}-switch"

    def namespace(self, rank: int | str) -> str:
        """Return the name of a rank's namespace. The rank can be a placeholder, which a launcher replaces."""
        return f"{PREFIX}-{os.getpid()}-rank{rank}"

    def address(self, rank: int) -> str:
        return f"{SUBNET}.{rank + 1}"

    def __enter__(self) -> "EmulatedNetwork":
        try:
            self._build()
        except BaseException:
            self._delete()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._delete()

    def _build(self) -> None:
        run_command("ip", "netns", "add", self.switch)
        for node in sorted(set(self.nodes)):
            self._switch_link("add", f"node{node}", "type", "bridge")
            self._switch_link("set", f"node{node}", "up")
        for rank, node in enumerate(self.nodes):
            self._build_rank(rank, node)
        if len(set(self.nodes)) == 2:
            self._switch_link("add", "link0", "type", "veth", "peer", "name", "link1")
            for node in (0, 1):
                self._switch_link("set", f"link{node}", "master", f"node{node}", "up")
                self._shape(self.switch, f"link{node}", self.link_rate)

    def _build_rank(self, rank: int, node: int) -> None:
        namespace, port = self.namespace(rank), f"port{rank}"
        run_command("ip", "netns", "add", namespace)
        self._switch_link("add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        self._switch_link("set", port, "master", f"node{node}", "up")
        run_command("ip", "-n", namespace, "address", "add", f"{self.address(rank)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            run_command("ip", "-n", namespace, "link", "set", device, "up")
        self._shape(namespace, "eth0", self.rank_rate)
        self._shape(self.switch, port, self.rank_rate)
        # Written through /proc, not with `sysctl`: /proc always exists, the tool does not.
        setting = "/proc/sys/net/ipv4/tcp_congestion_control"
        inside = ("ip", "netns", "exec", namespace)
        run_command(*inside, "sh", "-c", f"echo {self.congestion_control} > {setting}")
        got = run_command(*inside, "cat", setting).strip()
        if got != self.congestion_control:
            raise NetworkError(f"{setting} must be {self.congestion_control} after it was set, got {got}")

    def _switch_link(self, *arguments: str) -> None:
        run_command("ip", "-n", self.switch, "link", *arguments)

    def _shape(self, namespace: str, device: str, rate: str | None) -> None:
        if rate is not None:
            limits = ("rate", rate, "burst", self.burst, "latency", "100ms")
            run_command("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limits)

    def _delete(self) -> None:
        # Deletes the namespaces that exist, not those that were planned, so that it also cleans up interrupted builds.
        for name in existing_namespaces():
            if name.startswith(f"{PREFIX}-{os.getpid()}-"):
                run_command("ip", "netns", "delete", name)
