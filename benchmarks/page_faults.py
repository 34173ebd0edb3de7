"""Times ways to avoid page faults of training on CPUs: two options of a training loop, and two variables of glibc.

    python benchmarks/page_faults.py [--rounds 3] [--json PATH]

Each combination runs in separate processes for two ranks, over the loopback device, in turns, because glibc decides
once in the life of a process whether freed memory is returned to the system. A figure is the median over the rounds of
a run's median.
"""

import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path

from environment import make_parser, write_record
from page_faults_rank import Settings
from processes import Limits, RankFailure, Stopped, free_port, run_ranks
from table import table

# glibc accepts at most 32 MiB for the second.
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
DEADLINE_S = 1200.0


def main() -> int:
    parser = make_parser(__doc__, rounds=3)
    arguments = parser.parse_args()
    limits = Limits(DEADLINE_S)
    ways = list(itertools.product((False, True), (True, False), (False, True), ("DDP", "ByteGrad")))
    measured: dict[tuple[bool, bool, bool, str], list[dict[str, float]]] = {way: [] for way in ways}
    try:
        for index in range(arguments.rounds):
            for view, to_none, kept, contestant in ways:
                with tempfile.TemporaryDirectory(prefix="torchbagua-page-faults-") as folder:
                    settings = Settings(folder, f"tcp://127.0.0.1:{free_port()}", contestant, view, to_none)
                    environment = {"OMP_NUM_THREADS": "1", **(KEPT if kept else {})}
                    title = f"{contestant}, round {index + 1} of {arguments.rounds}"
                    options = {"prefixes": [[], []], "environment": environment}
                    run_ranks("page_faults_rank.py", settings, Path(folder), limits, title, **options)
                    result = json.loads(Path(folder, "result.json").read_text())
                    measured[view, to_none, kept, contestant].append(result)
    except (RankFailure, Stopped) as error:
        print(f"stopped by {error}", file=sys.stderr)
        return 1
    results, rows = [], []
    for view, to_none, kept in dict.fromkeys(way[:3] for way in ways):
        cells = []
        for contestant in ("DDP", "ByteGrad"):
            runs = measured[view, to_none, kept, contestant]
            way = {"contestant": contestant, "gradient_as_bucket_view": view, "set_to_none": to_none, "kept": kept}
            results.append({**way, "runs": runs})
            medians = {key: statistics.median(run[key] for run in runs) for key in ("ms", "page_faults")}
            cells += [f"{medians['ms']:.0f}", f"{medians['page_faults']:,.0f}"]
        rows.append([str(view), str(to_none), "set" if kept else "not set", *cells])
    head = ["`gradient_as_bucket_view`", "`set_to_none`", "variables"]
    print(table([*head, "DDP, ms", "page faults", "ByteGrad, ms", "page faults"], rows))
    write_record(arguments.json, {"variables": KEPT, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
