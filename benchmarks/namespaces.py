"""Emulated networks: every rank in a Linux network namespace of its own, joined by bridges and slowed down by `tc`.

Everything lives in namespaces called `tbnet-PID-...`, so that nothing touches the host's own interfaces and that
deleting the namespaces deletes everything. PID is the process that made them: what a run that was killed with SIGKILL
has left is recognised by a PID that is gone.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

PREFIX = "tbnet"
SUBNET = "10.77.0"
MAX_RANKS = 200
COMMAND_TIMEOUT_S = 10
BURST = "256kb"  # that pass at once after a pause: 10 ms worth of 200 Mbit/s
# Little more than a packet of the kernel's, which has up to 64 KiB: for links that pause in each step, which could else
# be faster than their rate.
SMALL_BURST = "80kb"


class NetworkError(RuntimeError):
    """An `ip` or `tc` command failed; the message holds the command and what it said."""


def run_command(*command: str) -> str:
    """Run `command` and return its output. In a session of its own, so that Ctrl-C does not cut a clean-up short."""
    finished = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S, start_new_session=True
    )
    if finished.returncode != 0:
        raise NetworkError(f"`{' '.join(command)}` said: {finished.stderr.strip() or finished.returncode}")
    return finished.stdout


def existing_namespaces() -> list[str]:
    """The names of all network namespaces of this machine that any run of this benchmark has made."""
    names = [line.split()[0] for line in run_command("ip", "netns", "list").splitlines() if line]
    return [name for name in names if name.startswith(f"{PREFIX}-")]


def remove_stale_namespaces() -> list[str]:
    """Delete the namespaces of runs whose process is gone; return their names."""
    stale = []
    for name in existing_namespaces():
        match = re.match(rf"{PREFIX}-(\d+)-", name)
        if match and not os.path.exists(f"/proc/{match[1]}"):
            run_command("ip", "netns", "delete", name)
            stale.append(name)
    return stale


def why_unavailable() -> str | None:
    """The reason why this machine cannot emulate a network, or None where it can. Tries it with two ranks."""
    if os.name != "posix" or not os.path.exists("/proc/self/ns/net"):
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "not root: creating network namespaces needs it"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` (package iproute2)"
    try:
        with EmulatedNetwork([0, 0], rank_rate="1gbit"):
            return None
    except NetworkError as error:
        return str(error)


@dataclass(frozen=True)
class Traffic:
    """Interface counters, in bytes since the network was made.

    They include the headers of the packets that the kernel hands to the interface, which have up to 64 KiB: hardly any.
    """

    sent_by_rank: list[int]
    over_link: list[int]  # one entry a direction; empty where there is one node

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        return Traffic(
            [after - before for after, before in zip(self.sent_by_rank, earlier.sent_by_rank, strict=True)],
            [after - before for after, before in zip(self.over_link, earlier.over_link, strict=True)],
        )


def _transmitted_bytes(statistics: str, devices: Sequence[str], direction: str) -> list[int]:
    by_name = {device["ifname"]: device["stats64"][direction]["bytes"] for device in json.loads(statistics)}
    return [int(by_name[device]) for device in devices]


def read_traffic(switch: str, num_ranks: int) -> Traffic:
    """Read the counters of an emulated network from its switch. Any process of the run may call it."""
    statistics = run_command("ip", "-n", switch, "-s", "-j", "link", "show")
    ports = [f"port{rank}" for rank in range(num_ranks)]
    links = [name for name in ("link0", "link1") if f'"{name}"' in statistics]
    # What a port of the switch receives is what its rank sends.
    return Traffic(_transmitted_bytes(statistics, ports, "rx"), _transmitted_bytes(statistics, links, "tx"))


def read_loopback_traffic(num_ranks: int) -> Traffic | None:
    """The same without namespaces: an equal share each of all that crossed the loopback device; None off Linux."""
    try:
        with open("/proc/net/dev") as file:
            fields = next(line for line in file if line.lstrip().startswith("lo:")).split()
    except FileNotFoundError:
        return None
    return Traffic([int(fields[9]) // num_ranks] * num_ranks, [])  # field 9: bytes transmitted


class EmulatedNetwork:
    """Ranks in namespaces, one bridge a node, all bridges in one more namespace, the switch.

    Args:
        nodes: node of each rank, 0 or 1. Where both occur, the two bridges are joined by one veth pair, the link.
        rank_rate: rate of each rank's interface, both directions, as `tc` writes it (`200mbit`); None: not shaped.
        link_rate: the same for the link between the nodes.
        congestion_control: TCP congestion control inside the namespaces.
        burst: how much passes at once after a pause, as `tc` writes it.

    A context manager: entering builds it, leaving deletes it (processes inside must have ended).
    Raises NetworkError where the kernel or the tools refuse.
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

    def namespace(self, rank: int) -> str:
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
        # `tee` rather than `sysctl`: /proc is always there, the tool is not.
        setting = "/proc/sys/net/ipv4/tcp_congestion_control"
        inside = ("ip", "netns", "exec", namespace)
        run_command(*inside, "sh", "-c", f"echo {self.congestion_control} > {setting}")
        got = run_command(*inside, "cat", setting).strip()
        if got != self.congestion_control:
            raise NetworkError(f"asked for congestion control {self.congestion_control}, {setting} says {got}")

    def _switch_link(self, *arguments: str) -> None:
        run_command("ip", "-n", self.switch, "link", *arguments)

    def _shape(self, namespace: str, device: str, rate: str | None) -> None:
        if rate is not None:
            limits = ("rate", rate, "burst", self.burst, "latency", "100ms")
            run_command("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limits)

    def _delete(self) -> None:
        # By what exists, not by what was meant to be built: an interrupted build is deleted all the same.
        for name in existing_namespaces():
            if name.startswith(f"{PREFIX}-{os.getpid()}-"):
                run_command("ip", "netns", "delete", name)
