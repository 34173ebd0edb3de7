"""Formats figures of training over slow networks for the pages: numbers, names, tables."""

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence

from contestants import BASELINE, COMPUTE_ONLY, CONTROL
from released import Figures, Row
from table import MISSING, table

FLAT_NETWORKS = ("200mbit", "1gbit", "unshaped")
TWO_NODES = "200mbit between two nodes"
SLOW_RANK = "{}, the last rank takes 3 times as long"
SPACE = "\N{NO-BREAK SPACE}"
LINE_LENGTH = 120

# The names of the contestants of benchmarks/contestants.py on the pages.
LABELS = {
    COMPUTE_ONLY: "without communication",
    BASELINE: "DDP, float32",
    "gradient_allreduce": "`GradientAllReduceAlgorithm`",
    "bf16": "DDP, bf16 hook",
    "fp16": "DDP, fp16 hook",
    "powersgd": "DDP, PowerSGD of rank 2 in one bucket",
    "low_rank": "`PowerSGDAlgorithm` of rank 2",
    "low_rank_bf16": "`PowerSGDAlgorithm` of rank 2, bfloat16",
    "bytegrad": "`ByteGradAlgorithm`",
    "four_bits": "`CompressedAllReduceAlgorithm`, 4 bits",
    "four_bits_feedback": "`CompressedAllReduceAlgorithm`, 4 bits, error feedback",
    "one_bit_feedback": "`CompressedAllReduceAlgorithm`, 1 bit, error feedback",
    "topk": "`TopKAlgorithm` of 1 %",
    "compute_adam": "no communication; torch's fused Adam",
    "qadam": "`QAdamAlgorithm`",
    "qadam_1bit": "`QAdamAlgorithm`, 1 bit",
    "decentralized": "`DecentralizedAlgorithm`, all",
    "shift_one": "`DecentralizedAlgorithm`, shift_one",
    "low_precision": "`LowPrecisionDecentralizedAlgorithm`",
    CONTROL: "control: torch's all-reduce, concurrent",
    "async": "`AsyncModelAverageAlgorithm`",
    "bytegrad_flat": "`ByteGradAlgorithm(hierarchical=False)`",
    "bytegrad_hierarchical": "`ByteGradAlgorithm()`",
    "four_bits_hierarchical": "`CompressedAllReduceAlgorithm()`, 4 bits",
}


# Numbers and names


def network_name(title: str) -> str:
    """`200mbit` -> `200 Mbit/s`."""
    return re.sub(r"(\d+)([mg])bit", lambda found: f"{found[1]} {found[2].upper()}bit/s", title)


def place_of(network: str) -> str:
    return "without a limit" if network == "unshaped" else f"at {network}"


def times(ratio: float) -> str:
    """A ratio with three digits."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def milliseconds(value: float) -> str:
    return f"{value:.0f}"


def megabytes(value: float) -> str:
    return f"{value / 1e6:.1f}" if value >= 50e3 else "0"


def _cell(row: Row, number: str, form: Callable[[float], str], *, bold: bool = False) -> str:
    """The median, and below it in small print the smallest and the largest of the runs if they differ."""
    if number not in row.numbers:
        return MISSING
    value = row.numbers[number]
    median, smallest, largest = map(form, (value.median, value.smallest, value.largest))
    spread = f"<br><small>{smallest} to {largest}</small>" if smallest != largest else ""
    return f"{_bold(median, bold)}{spread.replace(' ', SPACE)}"


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text


def listed(items: Iterable[str]) -> str:
    """`a, b and c`."""
    *others, last = items
    return f"{', '.join(others)} and {last}" if others else last


def value_range(values: Iterable[float], form: Callable[[float], str]) -> str:
    """`a to b`, or only `a` if both have the same text."""
    present = list(values)
    return " to ".join(dict.fromkeys([form(min(present)), form(max(present))]))


def paragraphs(*paragraphs: str) -> str:
    """Format a part of a page: wrapped text, unchanged tables, and blank lines between them."""
    lines = [
        part
        if part.startswith("|")
        else textwrap.fill(part, LINE_LENGTH, break_long_words=False, break_on_hyphens=False)
        for part in paragraphs
        if part
    ]
    return "\n" + "\n\n".join(lines) + "\n\n"


# Tables


def step_table(figures: Figures, names: Sequence[str], *, bold: Sequence[str] = ()) -> str:
    """Each contestant over each network of one node: bytes, times, ratios to the floors, speed-ups."""
    networks = {title: figures.networks[title] for title in FLAT_NETWORKS if title in figures.networks}
    head = ["method", "MB sent per step and rank"]
    for title, network in networks.items():
        head.append(f"{network_name(title)}: ms")
        head += ["x floor", "x schedule floor"] if network.settings["rank_rate"] else []
        head.append("speed-up")
    body = []
    first = next(iter(networks.values()))
    for name in names:
        if name in first.rows:
            cells = [_bold(LABELS[name], name in bold), median_cell(first.rows[name], "counted_bytes", megabytes)]
            for network in networks.values():
                cells += _network_cells(network.rows[name], bool(network.settings["rank_rate"]), name in bold)
            body.append(cells)
    return table(head, body)


def _network_cells(row: Row, has_floor: bool, bold: bool) -> list[str]:
    floors = [median_cell(row, f"{floor}_ratio", times) for floor in ("floor", "schedule_floor")] if has_floor else []
    return [_cell(row, "step_ms", milliseconds), *floors, _cell(row, "speedup", times, bold=bold)]


def median_cell(row: Row, number: str, form: Callable[[float], str]) -> str:
    return form(row.numbers[number].median) if number in row.numbers else MISSING


def nodes_table(figures: Figures, names: Sequence[str], *, bold: Sequence[str]) -> str:
    rows = figures.networks[TWO_NODES].rows
    head = ["method", "MB over the slow link per step", "ms", "x floor", "x schedule floor", "speed-up"]
    body = [
        [
            _bold(LABELS[name], name in bold),
            median_cell(rows[name], "link_bytes", megabytes),
            *_network_cells(rows[name], True, name in bold),
        ]
        for name in names
        if name in rows
    ]
    return table(head, body)


def slow_rank_table(figures: Figures) -> str:
    networks = slow_rank_networks(figures)
    body = [
        [LABELS[name], *(_cell(figures.networks[title].rows[name], "kept_speed", times) for title in networks)]
        for name in (BASELINE, "async", CONTROL)
    ]
    return table(["averaged by", *networks.values()], body)


def slow_rank_networks(figures: Figures) -> dict[str, str]:
    """Return the names of the networks with a slow rank, by title."""
    names = {SLOW_RANK.format(title): network_name(title) for title in FLAT_NETWORKS}
    return {title: name for title, name in names.items() if title in figures.networks}
