"""`torchbagua trace`: merge the files of PerfettoTrace, show them as a table, or draw a timeline."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchbagua.observe.perfetto import RankFile, events_of_step, find_files, merge
from torchbagua.observe.summary import table_of

_VIEWER = "https://ui.perfetto.dev"


def main(arguments: Sequence[str] = ()) -> int:
    """Runs `merge`, `show` or `draw`; returns 0 if it succeeded, 1 if the files are unusable."""
    parser = argparse.ArgumentParser(prog="torchbagua trace", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    to_merge = commands.add_parser("merge", help="merge the files of all ranks into one for Perfetto, clocks aligned")
    to_show = commands.add_parser("show", help="print a table with one row per rank")
    to_draw = commands.add_parser("draw", help="draw the timeline of one step, with all ranks")
    for command in (to_merge, to_show, to_draw):
        command.add_argument("folder", type=Path, metavar="DIR", help="the path given to PerfettoTrace")
    to_merge.add_argument("--output", type=Path, metavar="FILE", help="a gzip file; default: DIR/merged.json.gz")
    to_draw.add_argument("--output", type=Path, metavar="FILE", help="a .png, .svg or .pdf; default: DIR/timeline.png")
    to_draw.add_argument("--step", type=int, metavar="N", help="default: the middle step")
    options = parser.parse_args(arguments)
    try:
        return {"merge": _merge, "show": _show, "draw": _draw}[options.command](options)
    except (ValueError, OSError, ImportError) as error:
        fix = "; pip install 'torchbagua[traces]'" if isinstance(error, ImportError) else ""
        print(f"torchbagua trace {options.command}: {error}{fix}", file=sys.stderr)
        return 1


def _merge(options: argparse.Namespace) -> int:
    merged = merge(_files(options), options.output or options.folder / "merged.json.gz", _progress)
    print(
        f"wrote {merged.path}: {merged.num_ranks} ranks, {merged.num_messages} messages, clocks aligned to within "
        f"{merged.clock_error_us:.0f} us; open it in {_VIEWER}"
    )
    if merged.num_backwards:
        print(f"{merged.num_backwards} messages seem to arrive before they were sent: a clock did not run evenly")
    return 0


def _progress(files: Iterable[RankFile]) -> Iterable[RankFile]:
    try:
        from tqdm import tqdm
    except ImportError:
        return files
    return tqdm(files, unit="rank", leave=False, disable=None)  # if stderr is a terminal


def _show(options: argparse.Namespace) -> int:
    print(table_of([file.summary() for file in _files(options)]))
    return 0


def _draw(options: argparse.Namespace) -> int:
    from torchbagua.observe.timeline import draw

    ranks = events_of_step(_files(options), options.step)
    output = options.output or options.folder / "timeline.png"
    draw(ranks).savefig(output)
    print(f"wrote {output}")
    return 0


def _files(options: argparse.Namespace) -> list[RankFile]:
    files, problems = find_files(options.folder)
    for problem in problems:
        print(f"torchbagua trace {options.command}: {problem}", file=sys.stderr)
    return files
