"""Measures the figures of training over slow networks, and writes them into the pages: `make bench-docs`.

    python docs_build/figures.py            # measures another run, in about 20 minutes; root, Linux
    python docs_build/figures.py --write    # writes tables, sentences and charts into the pages

The pages show medians of three runs of one revision that ended in different hours. A run is a record
`benchmarks/results/figures-DATE.json`. `--write` lists the newest three in `benchmarks/results/figures.json`; the pages
show the records that this file lists. benchmarks/released.py implements the rule.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from convergence_report import summarise
from environment import RESULTS, dated, git_revision
from figure_charts import THEMES, draw_losses, draw_speedups, draw_steps, to_svg
from figure_tables import paragraphs
from figure_texts import PARTS, Shown
from horizon_picture import draw
from horizon_ranks import ranks_table
from horizon_report import choices_table, outer_table, rows_table
from markers import fill
from released import NUM_RUNS, load_figures, newest_runs, read_choice, write_choice

ROOT = Path(__file__).parent.parent
PROGRAM = "docs_build/figures.py"  # as markers name it
PICTURES = ROOT / "docs" / "pictures"
PAGES = (
    "README.md",
    "docs/algorithms/async.md",
    "docs/algorithms/bytegrad.md",
    "docs/algorithms/decentralized.md",
    "docs/algorithms/gradient-allreduce.md",
    "docs/algorithms/low-precision-decentralized.md",
    "docs/algorithms/qadam.md",
    "docs/benchmarks.md",
    "docs/algorithms/topk.md",
    "docs/choose.md",
    "docs/guides/muon.md",
    "docs/index.md",
)
# The rows of the horizon benchmark in its picture.
DRAWN = (
    *("adamw_ddp", "muon_ddp", "muon_diloco_10", "muon_diloco_30", "muon_diloco_100"),
    *("adamw_diloco_30", "muon_4bits", "adamw_decentralized", "adamw_async", "topk_sign_0.02"),
)
# The rows on the page about Muon.
WITH_MUON = (
    *("adamw_ddp", "muon_ddp", "muon_diloco_10", "muon_diloco_30", "muon_diloco_30_delay", "muon_diloco_30_fragments"),
    *("muon_diloco_100", "muon_diloco_200"),
    *("adamw_diloco_10", "adamw_diloco_30", "adamw_diloco_100"),
    *("muon_bytegrad", "muon_4bits", "muon_4bits_feedback"),
    *("muon_decentralized", "muon_shift_one", "muon_low_precision", "muon_async"),
)
# The rows on the page about TopK.
WITH_TOPK = (
    *("adamw_ddp", "topk_sign_0.05", "topk_sign_0.02", "topk_sign_0.01", "topk_sign_0.005", "muon_ddp"),
    *("topk_muon_0.1", "topk_muon_0.05", "topk_muon_0.02", "topk_muon_0.01", "muon_topk"),
)
# Arguments of network.py; all others have their defaults.
ARGUMENTS = ("--deadline", "3600")


def load_shown() -> Shown:
    """Read the figures that the pages show, by group of tables."""
    return {group: load_figures(names) for group, names in read_choice().items()}


def load_horizon() -> dict[str, Any]:
    """Read the results of `make bench-horizon`."""
    document: dict[str, Any] = json.loads((RESULTS / "horizon.json").read_text("utf-8"))
    return document


def horizon_rows(document: dict[str, Any]) -> str:
    return paragraphs(rows_table(document))


def horizon_muon(document: dict[str, Any]) -> str:
    return paragraphs(rows_table(document, WITH_MUON))


def horizon_topk(document: dict[str, Any]) -> str:
    return paragraphs(rows_table(document, WITH_TOPK))


def horizon_choices(document: dict[str, Any]) -> str:
    return paragraphs(choices_table(document))


def horizon_outer(document: dict[str, Any]) -> str:
    return paragraphs(outer_table(document))


def horizon_ranks(document: dict[str, Any]) -> str:
    ranks = json.loads((RESULTS / "horizon-ranks.json").read_text("utf-8"))
    return paragraphs(ranks_table(document, ranks["trainings"]))


HORIZON_PARTS = (horizon_rows, horizon_muon, horizon_topk, horizon_choices, horizon_outer, horizon_ranks)


def updated(name: str, shown: Shown) -> str:
    """Return the text that the page `name`, below the root, should have."""
    parts = {make.__name__: partial(make, shown) for make in PARTS}
    horizon = load_horizon()
    parts |= {make.__name__: partial(make, horizon) for make in HORIZON_PARTS}
    return fill((ROOT / name).read_text("utf-8"), PROGRAM, parts)


def charts(shown: Shown) -> Iterator[tuple[Path, bytes]]:
    """Yield each chart with its file."""
    trained = json.loads((RESULTS / "convergence.json").read_text("utf-8"))
    losses = [summarise(task, trained, None) for task in ("gpt", "lstm")]
    yield PICTURES / "horizon.svg", to_svg(draw(load_horizon(), DRAWN))
    for name, theme in THEMES.items():
        for title, figure in {
            "speedups": draw_speedups(shown["gradients"], theme),
            "steps": draw_steps(shown["gradients"], theme),
            "losses": draw_losses(losses, theme),
        }.items():
            yield PICTURES / f"{title}-{name}.svg", to_svg(figure)


def write() -> None:
    """Select the runs, and write each page and chart that is not up to date."""
    if names := newest_runs():
        write_choice(dict.fromkeys(read_choice(), names))
        print(f"The pages show {', '.join(names)}.")
    else:
        print(f"No revision has {NUM_RUNS} runs that ended in different hours. The pages keep the runs that they show.")
    shown = load_shown()
    texts = ((ROOT / name, updated(name, shown).encode()) for name in PAGES)
    for path, content in (*texts, *charts(shown)):
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
            print(f"wrote {path.relative_to(ROOT)}")


def measure() -> int:
    """Measure another run. Returns the exit status of network.py."""
    if git_revision(ROOT).endswith("-dirty"):
        sys.exit("bench-docs: tracked files have changes, but the pages name a revision; commit or stash them first")
    program = [sys.executable, str(ROOT / "benchmarks" / "network.py"), *ARGUMENTS]
    code = subprocess.run([*program, "--json", str(RESULTS / f"{dated('figures')}.json")]).returncode
    print(f"Measure in {NUM_RUNS} different hours. Then run `make bench-docs ARGS=--write` to write the pages.")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="only write the recorded figures into the pages")
    if parser.parse_args().write:
        write()
        return 0
    return measure()


if __name__ == "__main__":
    sys.exit(main())
