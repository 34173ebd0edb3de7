"""The bytes that the interfaces of an emulated network, or of this machine, have counted."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from torchbagua.cli.namespaces import run_command


@dataclass(frozen=True)
class Traffic:
    """Interface counters, in bytes since the network was created.

    They include the headers of the packets that the kernel passes to the interface. These have up to 64 KiB, so headers
    hardly count.
    """

    sent_by_rank: list[int]
    over_link: list[int]  # one entry per direction; empty with one node

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
    # A port of the switch receives the bytes that its rank sends.
    return Traffic(_transmitted_bytes(statistics, ports, "rx"), _transmitted_bytes(statistics, links, "tx"))


def read_loopback_traffic(num_ranks: int) -> Traffic | None:
    """Without namespaces: count an equal share of the loopback device's bytes for each rank. None except on Linux."""
    try:
        with open("/proc/net/dev") as file:
            fields = next(line for line in file if line.lstrip().startswith("lo:")).split()
    except FileNotFoundError:
        return None
    return Traffic([int(fields[9]) // num_ranks] * num_ranks, [])  # field 9: bytes transmitted
