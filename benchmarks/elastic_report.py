"""The tables of the benchmark of elastic training. Everything is in seconds unless it says otherwise."""

import statistics
from collections.abc import Sequence
from typing import Any

from elastic_faults import ELASTIC, PLAIN
from report import bits_per_second
from table import MISSING, table

Figures = dict[str, Any]

FAULTS = "faults"
STATES = 3  # float32 tensors of AdamW for each parameter: the weight and two moments


def tables_of(sections: Sequence[Figures]) -> str:
    """Return the tables of the sections that were measured."""
    parts = []
    measured = [section for section in sections if section["name"] != FAULTS]
    if measured:
        head = [
            "change",
            "network",
            "M parameters",
            "rounds",
            "recovery, median",
            "worst",
            "noticed",
            "next generation",
        ]
        parts.append(table([*head, "others lose, median", "worst", "one was behind"], map(row_of_change, measured)))
        joins = [section for section in measured if any("join" in each for each in section["rounds"])]
        head = ["joins after", "network", "step", "lost before ready", "ready to first step, median", "worst"]
        parts.append(table([*head, "state / link rate", "others lose, median", "worst"], map(row_of_join, joins)))
    for section in measured:
        if section["resources"]:
            head = ["process", "changes", "descriptors", "threads", "private MiB"]
            parts.append(table(head, rows_of_resources(section)))
    parts += [table_of_faults(section) for section in sections if section["name"] == FAULTS]
    return "\n\n".join(parts)


def median_and_worst(values: Sequence[float]) -> list[str]:
    return [f"{statistics.median(values):.2f}", f"{max(values):.2f}"]


def row_of_change(section: Figures) -> list[str]:
    rounds = section["rounds"]
    return [
        section["title"],
        section["network"],
        f"{section['num_parameters'] / 1e6:g}",
        str(len(rounds)),
        *median_and_worst([each["recovered_s"] for each in rounds]),
        *(f"{statistics.median(each[key] for each in rounds):.2f}" for key in ("noticed_s", "begun_s")),
        *median_and_worst([each["lost_s"] for each in rounds]),
        f"{sum(each['one_was_behind'] for each in rounds)} of {len(rounds)}",
    ]


def row_of_join(section: Figures) -> list[str]:
    joins = [each["join"] for each in section["rounds"] if "join" in each]
    num_bytes = 4 * STATES * section["num_parameters"]
    return [
        section["title"],
        section["network"],
        f"{statistics.median(each['step_s'] for each in joins):.3f}",
        f"{statistics.median(each['lost_before_ready_s'] for each in joins):.2f}",
        *median_and_worst([each["recovered_s"] for each in joins]),
        MISSING if section["rate"] is None else f"{8 * num_bytes / bits_per_second(section['rate']):.2f}",
        *median_and_worst([each["lost_s"] for each in joins]),
    ]


def rows_of_resources(section: Figures) -> list[list[str]]:
    return [
        [
            str(number),
            f"{figures['generation']}",
            f"{figures['descriptors']}",
            f"{figures['threads']}",
            f"{figures['private_mib']:.1f}",
        ]
        for number, pair in enumerate(section["resources"])
        for figures in pair
    ]


def table_of_faults(section: Figures) -> str:
    times_s = {(run["kind"], run["has_faults"]): run["seconds"] for run in section["runs"]}
    names = {ELASTIC: "elastic", PLAIN: "plain DDP, torchrun"}
    rows = [
        [
            names[run["kind"]],
            str(run["num_faults"]),
            f"{run['seconds']:.1f}",
            f"{run['seconds'] / times_s[run['kind'], False]:.2f}",
            f"{run['seconds'] / times_s[PLAIN, True]:.2f}",
            f"{statistics.median(run['to_next_step_s']):.1f}" if run["to_next_step_s"] else MISSING,
            str(run["num_repeated_steps"]),
            str(run["num_unplanned_ends"]),
        ]
        for run in section["runs"]
    ]
    head = [f"{section['steps']:,} steps", "faults", "seconds", "x no faults", "x torchrun with faults"]
    return table([*head, "fault to next step", "steps repeated", "other ends"], rows)
