"""Measures two revisions of this repository over emulated slow networks, in turns. Root, Linux.

    python benchmarks/two_revisions.py BEFORE AFTER --runs 5 -- --ranks 2 --rates 1gbit --only ddp bytegrad

BEFORE and AFTER are clones, each built in its directory (`make lint` does that). The arguments after `--` are passed to
network.py, which every run starts in one of the clones, in turns. With `--json` the runs are added to those already
recorded in that file.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from environment import git_revision, write_record
from table import MISSING, table

NAMES = ("before", "after")
TIMES = ("step_ms", "floor_ms", "schedule_floor_ms")
Rows = dict[tuple[int, str, str], dict[str, Any]]  # by number of ranks, network and contestant


def run(clone: Path, arguments: list[str]) -> list[dict[str, Any]]:
    """Run network.py of this clone and return the networks that it has measured."""
    with tempfile.TemporaryDirectory(prefix="torchbagua-revisions-") as folder:
        path = Path(folder, "result.json")
        program = [str(clone / ".venv/bin/python"), "benchmarks/network.py", *arguments, "--json", str(path)]
        environment = {"PYTHONPATH": str(clone), "PATH": os.environ["PATH"]}
        code = subprocess.run(program, cwd=clone, env=environment).returncode
        if not path.exists():  # network.py has printed the reason; results with printed complaints are kept
            raise SystemExit(code or 1)
        return json.loads(path.read_text())["networks"]  # type: ignore[no-any-return]  # JSON


def add_run(rows: Rows, name: str, networks: list[dict[str, Any]]) -> None:
    for network in networks:
        for row in network["rows"]:
            key = (network["num_ranks"], network["title"], row["contestant"])
            entry = rows.setdefault(key, dict(zip(("ranks", "network", "contestant"), key, strict=True)))
            # Revisions from before 2026-11-26 have no schedule floor.
            entry.setdefault(name, []).append({which: round(row[which], 2) for which in TIMES if which in row})


def table_of(rows: Rows) -> str:
    """Return a table of the medians over the runs, compared with `ddp` in the same runs."""
    head = ["ranks", "network", "contestant", *(f"{name}, ms/step" for name in NAMES), "runs", "DDP / after"]
    head += ["x floor", "x schedule floor"]

    def median(key: tuple[int, str, str], name: str, which: str) -> float:
        values = [row[which] for row in rows.get(key, {}).get(name, []) if which in row]
        return statistics.median(values) if values else float("nan")

    def ratio_to(floor: str, key: tuple[int, str, str]) -> str:
        ratio = median(key, "after", "step_ms") / median(key, "after", floor)
        return MISSING if math.isnan(ratio) else f"{ratio:.2f}x"

    cells = [
        [
            str(key[0]),
            *key[1:],
            *(f"{median(key, name, 'step_ms'):.1f}" for name in NAMES),
            "/".join(str(len(rows[key].get(name, []))) for name in NAMES),
            f"{median((*key[:2], 'ddp'), 'after', 'step_ms') / median(key, 'after', 'step_ms'):.2f}x",
            ratio_to("floor_ms", key),
            ratio_to("schedule_floor_ms", key),
        ]
        for key in sorted(rows)
    ]
    return table(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in NAMES:
        parser.add_argument(name, type=Path, metavar=name.upper())
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="PATH", help="the record to which the runs are added")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    arguments = parser.parse_args(own)
    for_network = sys.argv[len(own) + 2 :]
    clones = {name: getattr(arguments, name).resolve() for name in NAMES}
    revisions = {name: git_revision(clone) for name, clone in clones.items()}
    rows: Rows = {}
    if arguments.json is not None and arguments.json.exists():
        known = json.loads(arguments.json.read_text())
        if known["revisions"] != revisions:
            parser.error(f"--json: {arguments.json} must be of the clones' {revisions}, got {known['revisions']}")
        rows = {(row["ranks"], row["network"], row["contestant"]): row for row in known["results"]}
    for number in range(arguments.runs):
        for name in NAMES if number % 2 == 0 else reversed(NAMES):
            add_run(rows, name, run(clones[name], for_network))
            write_record(arguments.json, {"revisions": revisions, "results": list(rows.values())})
    print(table_of(rows))


if __name__ == "__main__":
    main()
