"""The parts of pages with figures of training over slow networks: tables, and the sentences around them."""

from collections.abc import Callable, Mapping, Sequence

from contestants import BASELINE, COMPUTE_ONLY, CONTROL
from figure_tables import (
    FLAT_NETWORKS,
    LABELS,
    SPACE,
    listed,
    median_cell,
    megabytes,
    milliseconds,
    network_name,
    nodes_table,
    paragraphs,
    place_of,
    slow_rank_networks,
    slow_rank_table,
    step_table,
    times,
    value_range,
)
from released import Figures, Number
from table import table

Shown = Mapping[str, Figures]  # the figures that pages show, by the groups of benchmarks/results/figures.json


def _number(figures: Figures, title: str, contestant: str, number: str) -> Number:
    return figures.networks[title].rows[contestant].numbers[number]


def _speedup(figures: Figures, title: str, contestant: str) -> str:
    return times(_number(figures, title, contestant, "speedup").median)


def _same_runs(shown: Shown, group: str) -> str:
    """The provenance of a section of Benchmarks, or a link to it if the section above has the same runs."""
    if shown[group].names == shown["gradients"].names:
        return "Measured in [the same runs](#gradients-over-a-slow-network)."
    return _provenance(shown[group])


def _compute_note(figures: Figures) -> str:
    rows = [figures.networks[title].rows[COMPUTE_ONLY] for title in FLAT_NETWORKS if title in figures.networks]
    taken = value_range((row.numbers["step_ms"].median for row in rows), milliseconds)
    return f"A step without communication took {taken} ms."


def _bytes_note(figures: Figures, names: Sequence[str]) -> str:
    """The largest excess of the bytes that the interfaces counted over those that the library counted."""
    shaped = [network for network in figures.networks.values() if network.settings["rank_rate"]]
    rows = [network.rows[name].numbers for network in shaped for name in names if name in network.rows]
    more = [row["counted_bytes"].median / row["recorded_bytes"].median - 1 for row in rows if "recorded_bytes" in row]
    return f"The interfaces counted at most {100 * max(more):.1f} % more bytes than the library."


def _provenance(figures: Figures) -> str:
    """The number of runs, their dates, the revision, the machine, and the files."""
    ends = [environment["date_utc"][:16].replace("T", " ") for environment in figures.environments]
    several = len(ends) > 1
    runs = f"Medians of {len(ends)} runs" if several else "One run"
    spread = " Small print shows the smallest and the largest of the runs." if several else ""
    machines = listed(dict.fromkeys(map(_machine, figures.environments)))
    files = listed(f"`benchmarks/results/{name}`" for name in figures.names)
    revision = figures.environments[0]["git_revision"]
    finished = f"finished {listed(ends)} UTC"
    return f"{runs} of revision `{revision}`, {finished}.{spread} Machine: {machines}. Recorded in {files}."


def _machine(environment: Mapping[str, str]) -> str:
    kernel = environment["kernel"].partition("-")[0]
    return (
        f"{environment['cpu']}, {environment['cores']} cores, {environment['cpu_capability']}, {kernel}, "
        f"Python {environment['python']}, torch {environment['torch']}"
    )


def _origin(figures: Figures, page: str) -> str:
    """The number of runs, their date and revision, with a link to the details."""
    last, num_runs = figures.environments[-1], len(figures.names)
    runs = f"Medians of {num_runs} runs at different hours, the last on" if num_runs > 1 else "One run on"
    link = f"[Benchmarks]({page}#how-speed-is-measured)"
    return f"{runs} {last['date_utc'][:10]}, of revision `{last['git_revision']}`; see {link}."


# The parts; a marker contains the name of the function


GRADIENTS = (
    *(BASELINE, "gradient_allreduce", "bf16", "fp16", "powersgd", "low_rank", "low_rank_bf16", "bytegrad"),
    *("four_bits", "four_bits_feedback", "one_bit_feedback", "topk"),
)
NODES = (BASELINE, "bf16", "bytegrad_flat", "bytegrad_hierarchical", "four_bits_hierarchical")
MOMENTA = (BASELINE, "bytegrad", "compute_adam", "qadam", "qadam_1bit")
WEIGHTS = (BASELINE, "bf16", "decentralized", "shift_one", "low_precision", CONTROL, "async")


def headline(shown: Shown) -> str:
    """README's table, without ranges."""
    figures = shown["gradients"]
    titles = [title for title in FLAT_NETWORKS if title in figures.networks]
    body = []
    for name in (BASELINE, "bf16", "bytegrad", "four_bits"):
        if name in figures.networks[titles[0]].rows:
            cells = [LABELS[name], median_cell(figures.networks[titles[0]].rows[name], "counted_bytes", megabytes)]
            for title in titles:
                row = figures.networks[title].rows[name]
                speedup = f",{SPACE}{median_cell(row, 'speedup', times)}x" if name != BASELINE else ""
                cells.append(median_cell(row, "step_ms", milliseconds) + speedup)
            body.append(cells)
    networks = [network_name(title).replace(" ", SPACE) for title in titles]
    spread = (
        f"Between runs, speed-ups differ by at most {_largest_spread(figures):.0f} %." if len(figures.names) > 1 else ""
    )
    return paragraphs(
        table(["method", "MB sent per step and rank", *networks], body),
        f"{_origin(figures, 'docs/benchmarks.md')} {spread}".rstrip(),
    )


def _largest_spread(figures: Figures) -> float:
    """The largest difference, in percent, of the speed-ups of README's rows between runs."""
    rows = [figures.networks[title].rows for title in FLAT_NETWORKS if title in figures.networks]
    found = [of[name].numbers["speedup"] for of in rows for name in ("bf16", "bytegrad", "four_bits") if name in of]
    return max(100 * (number.largest / number.smallest - 1) for number in found)


def headline_sentence(shown: Shown) -> str:
    """The sentence of the home page."""
    figures = shown["gradients"]
    of_networks = [
        f"{_number(figures, title, 'bytegrad', 'speedup').median:.1f} times {where}"
        for title, where in (
            ("200mbit", "as fast as DDP in float32 at 200 Mbit/s"),
            ("1gbit", "at 1 Gbit/s"),
            ("unshaped", "on an unlimited network"),
        )
    ]
    sentence = f"With four ranks and 12.5 M parameters, 8-bit gradients make a step {listed(of_networks)}."
    return paragraphs(f"{sentence} {_origin(figures, 'benchmarks.md')}")


def gradients(shown: Shown) -> str:
    figures = shown["gradients"]
    speedup = _speedup(figures, "200mbit", "bytegrad")
    floor = times(_number(figures, "200mbit", "bytegrad", "floor_ratio").median)
    lead = (
        f"At 200 Mbit/s [`ByteGradAlgorithm`](algorithms/bytegrad.md) is {speedup} times as fast as plain DDP, and "
        f"takes {floor} times its floor. The faster the network, the smaller the gain."
    )
    notes = f"{_compute_note(figures)} {_bytes_note(figures, GRADIENTS)} {_provenance(figures)}"
    return paragraphs(lead, step_table(figures, GRADIENTS, bold=["bytegrad", "four_bits"]), notes)


def two_nodes(shown: Shown) -> str:
    figures = shown["gradients"]
    rows = nodes_table(figures, NODES, bold=["bytegrad_hierarchical", "four_bits_hierarchical"])
    return paragraphs(rows, _same_runs(shown, "gradients"))


def momenta(shown: Shown) -> str:
    figures = shown["momenta"]
    speedups = [_speedup(figures, "200mbit", name) for name in ("qadam", "qadam_1bit")]
    lead = (
        f"After its warm-up [QAdam](algorithms/qadam.md) is {speedups[0]} times as fast as plain DDP at 200 Mbit/s in "
        f"8 bits, and {speedups[1]} times in one bit. In one bit the network is not the limit at these rates, and the "
        "step time depends little on them."
    )
    notes = f"{_compute_note(figures)} {_same_runs(shown, 'momenta')}"
    return paragraphs(lead, step_table(figures, MOMENTA, bold=["qadam", "qadam_1bit"]), notes)


def weights(shown: Shown) -> str:
    figures = shown["weights"]
    titles = [title for title in FLAT_NETWORKS if title in figures.networks]
    floors = value_range((_number(figures, title, "async", "floor_ratio").median for title in titles), times)
    decentralized = ("decentralized", "shift_one", "low_precision")
    best, unshaped = (
        [_number(figures, title, name, "speedup").median for name in decentralized] for title in ("200mbit", "unshaped")
    )
    lead = (
        f"With [asynchronous averaging](algorithms/async.md) a step takes {floors} times as long as without "
        "communication. The [decentralized algorithms](algorithms/decentralized.md) are at best "
        f"{times(max(best))} times as fast as plain DDP at 200 Mbit/s, and {value_range(unshaped, times)} times if "
        "the network has no limit."
    )
    sent = {
        name: [megabytes(_number(figures, title, name, "counted_bytes").median) for title in titles]
        for name in (CONTROL, "async")
    }
    where = listed(place_of(network_name(title)) for title in titles)
    rounds = (
        "The last two rows average at intervals of time, not of steps, so a faster network allows more rounds per "
        f"step: {where} the control sent {listed(sent[CONTROL])} MB per step, and `AsyncModelAverageAlgorithm` "
        f"{listed(sent['async'])} MB."
    )
    notes = f"{_compute_note(figures)} {_same_runs(shown, 'weights')}"
    return paragraphs(lead, step_table(figures, WEIGHTS, bold=["async"]), rounds, notes)


def slow_rank(shown: Shown) -> str:
    figures = shown["weights"]
    networks = slow_rank_networks(figures)

    def kept(name: str) -> str:
        of_networks = {title: f"{100 * _number(figures, title, name, 'kept_speed').median:.0f} %" for title in networks}
        return listed(f"{share} {place_of(networks[title])}" for title, share in of_networks.items())

    lead = (
        "One of four ranks is three times as slow as the others. The others keep a fraction of their own speed: with "
        f"DDP {kept(BASELINE)}, with [`AsyncModelAverageAlgorithm`](algorithms/async.md) {kept('async')}."
    )
    return paragraphs(lead, slow_rank_table(figures), _same_runs(shown, "weights"))


def _algorithm_steps(shown: Shown, group: str, names: Sequence[str], bold: Sequence[str] = ()) -> str:
    """The table of a page in docs/algorithms."""
    figures = shown[group]
    return paragraphs(
        step_table(figures, names, bold=bold),
        f"{_compute_note(figures)} {_origin(figures, '../benchmarks.md')}",
    )


def gradient_allreduce_steps(shown: Shown) -> str:
    return _algorithm_steps(shown, "gradients", (BASELINE, "gradient_allreduce"))


def bytegrad_steps(shown: Shown) -> str:
    return _algorithm_steps(shown, "gradients", (BASELINE, "bf16", "bytegrad"), ["bytegrad"])


def bytegrad_nodes(shown: Shown) -> str:
    names = (BASELINE, "bytegrad_flat", "bytegrad_hierarchical")
    return paragraphs(nodes_table(shown["gradients"], names, bold=["bytegrad_hierarchical"]))


def qadam_steps(shown: Shown) -> str:
    return _algorithm_steps(shown, "momenta", MOMENTA, ["qadam", "qadam_1bit"])


def async_steps(shown: Shown) -> str:
    return _algorithm_steps(shown, "weights", (BASELINE, CONTROL, "async"), ["async"])


def async_slow_rank(shown: Shown) -> str:
    return paragraphs(slow_rank_table(shown["weights"]))


def decentralized_steps(shown: Shown) -> str:
    return _algorithm_steps(shown, "weights", (BASELINE, "decentralized", "shift_one"))


def low_precision_steps(shown: Shown) -> str:
    return _algorithm_steps(shown, "weights", (BASELINE, "bf16", "shift_one", "low_precision"))


def without_a_limit(shown: Shown) -> str:
    """The sentence of docs/choose.md about fast networks."""
    bytegrad = _speedup(shown["gradients"], "unshaped", "bytegrad")
    return paragraphs(
        "**Your network is fast.** Compression takes CPU time. With four processes on two cores and an unlimited "
        f"network, `ByteGradAlgorithm` was {bytegrad} times as fast as DDP in float32, and `QAdamAlgorithm` "
        f"{_speedup(shown['momenta'], 'unshaped', 'qadam')} times."
    )


def times_the_bound(shown: Shown) -> str:
    """The sentence of docs/choose.md below the program that computes a bound."""
    groups = {"gradients": (BASELINE, "bf16", "bytegrad"), "momenta": ("qadam",), "weights": ("shift_one", "async")}

    def ratios(title: str) -> str:
        names = [(shown[group], name) for group, names in groups.items() for name in names]
        return value_range((_number(figures, title, name, "floor_ratio").median for figures, name in names), times)

    one_bit = [
        times(_number(shown["momenta"], title, "qadam_1bit", "floor_ratio").median) for title in FLAT_NETWORKS[:2]
    ]
    return paragraphs(
        f"With four ranks on two cores, steps at 200 Mbit/s took {ratios('200mbit')} times this bound, and "
        f"{one_bit[0]} times with 1-bit QAdam. At 1 Gbit/s they took {ratios('1gbit')} times the bound, and "
        f"{one_bit[1]} times with 1-bit QAdam: the two cores, not the network, are then the bottleneck "
        "([Benchmarks](benchmarks.md))."
    )


PARTS: tuple[Callable[[Shown], str], ...] = (
    *(headline, headline_sentence, gradients, two_nodes, momenta, weights, slow_rank),
    *(gradient_allreduce_steps, bytegrad_steps, bytegrad_nodes, qadam_steps, async_steps, async_slow_rank),
    *(decentralized_steps, low_precision_steps, without_a_limit, times_the_bound),
)
