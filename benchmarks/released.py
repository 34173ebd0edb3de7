"""Selects the runs of network.py that the documentation shows, and merges them.

docs_build/figures.py writes them into the pages.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environment import RESULTS

NUM_RUNS = 3
# By group of tables: the names of the records that the pages show.
CHOICE = RESULTS / "figures.json"

Record = dict[str, Any]  # a file that network.py has written
SETTINGS = (
    *("title", "num_ranks", "num_parameters", "block_steps", "bucket_cap_mb"),
    *("burst", "nodes", "is_idle", "slow_rank", "congestion_control"),
)
# Entries of the environment that must also be equal: times of two machines have no common median.
MACHINE = ("git_revision", "cpu", "cores", "torch")
# The keys that are read from a row of a record, by their names here; quartiles are replaced by their median.
NUMBERS = {
    **{name: name for name in ("step_ms", "floor_ms", "floor_ratio", "schedule_floor_ms", "schedule_floor_ratio")},
    **{name: name for name in ("counted_bytes", "recorded_bytes", "link_bytes")},
    "speedup": "speedup_quartiles",
    "kept_speed": "speed_quartiles",
}


@dataclass(frozen=True)
class Number:
    """The median over the runs, with the smallest and the largest value."""

    median: float
    smallest: float
    largest: float


@dataclass(frozen=True)
class Row:
    """One contestant of one network.

    Attributes:
        label: as network.py prints it.
        numbers: by the keys of NUMBERS; only those that every run has.
    """

    label: str
    numbers: Mapping[str, Number]


@dataclass(frozen=True)
class Network:
    """One network: its settings, which are equal in all runs, and its rows by contestant."""

    settings: Mapping[str, Any]
    rows: Mapping[str, Row]


@dataclass(frozen=True)
class Figures:
    """Runs of one revision, merged.

    Attributes:
        names: names of the records in benchmarks/results.
        environments: environments of the runs, in the same order.
        networks: the networks by title.
    """

    names: Sequence[str]
    environments: Sequence[Mapping[str, Any]]
    networks: Mapping[str, Network]


def read_choice() -> dict[str, list[str]]:
    return json.loads(CHOICE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]  # JSON


def write_choice(choice: Mapping[str, Sequence[str]]) -> None:
    CHOICE.write_text(json.dumps(choice, indent=1) + "\n", encoding="utf-8")


def newest_runs(folder: Path = RESULTS) -> list[str] | None:
    """Find the newest NUM_RUNS records `figures-*.json` that the pages can show.

    They are of one machine and one revision without uncommitted changes, have the same settings and contestants, and
    ended in different hours. Of the runs of one hour the newest counts.

    Returns:
        Their names, the oldest first; None if no revision has enough runs.
    """
    groups: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob("figures-*.json"), reverse=True):
        record = json.loads(path.read_text(encoding="utf-8"))
        if not record["environment"]["git_revision"].endswith("-dirty"):
            hours = groups.setdefault(json.dumps([machine_of(record), settings_of(record)]), {})
            hours.setdefault(record["environment"]["date_utc"][:13], path.name)
    return next((sorted(list(hours.values())[:NUM_RUNS]) for hours in groups.values() if len(hours) >= NUM_RUNS), None)


def machine_of(record: Record) -> dict[str, Any]:
    """Return the revision and the machine of a run."""
    return {name: record["environment"].get(name) for name in MACHINE}


def settings_of(record: Record) -> list[dict[str, Any]]:
    """Return the values that must be equal in merged runs: for each network its settings and its contestants."""
    return [
        {name: network.get(name) for name in SETTINGS} | {"contestants": [row["contestant"] for row in network["rows"]]}
        for network in record["networks"]
    ]


def load_figures(names: Sequence[str]) -> Figures:
    """Read and merge records of benchmarks/results. Raises ValueError, see `merge`."""
    return merge(names, [json.loads((RESULTS / name).read_text(encoding="utf-8")) for name in names])


def merge(names: Sequence[str], records: Sequence[Record]) -> Figures:
    """Take medians over runs.

    Raises:
        ValueError: the runs are of several revisions or machines, or have other settings or contestants.
    """
    first = records[0]
    for record in records:
        if machine_of(record) != machine_of(first):
            raise ValueError(
                f"{', '.join(names)}: runs must be of one revision and machine, got {machine_of(first)} and "
                f"{machine_of(record)}"
            )
    if any(settings_of(record) != settings_of(first) for record in records):
        raise ValueError(f"{', '.join(names)}: runs must have the same settings and contestants")
    networks = {}
    for sections in zip(*(record["networks"] for record in records), strict=True):
        rows = {
            of_runs[0]["contestant"]: Row(of_runs[0]["label"], _numbers(of_runs))
            for of_runs in zip(*(section["rows"] for section in sections), strict=True)
        }
        settings = {name: value for name, value in sections[0].items() if name != "rows"}
        networks[settings["title"]] = Network(settings, rows)
    return Figures(names, [record["environment"] for record in records], networks)


def _numbers(rows: Sequence[Mapping[str, Any]]) -> dict[str, Number]:
    numbers = {}
    for name, recorded in NUMBERS.items():
        found = [row[recorded] for row in rows if row.get(recorded) is not None]
        if len(found) == len(rows):
            values = [value[1] if isinstance(value, list) else value for value in found]
            numbers[name] = Number(statistics.median(values), min(values), max(values))
    return numbers
