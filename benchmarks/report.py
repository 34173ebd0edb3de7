"""Summarizes the blocks that the ranks measured in the table of one network."""

import math
import re
import statistics
from collections.abc import Sequence
from itertools import chain
from typing import Any

from contestants import BASELINE, COMPUTE_ONLY, CONTESTANTS, ring_payload_bytes
from schedule import Schedule, schedule_floor_s, transfer_s
from table import MISSING, table

# The library's own count of bytes and the interface counters may differ by this fraction, due to headers and
# acknowledgements, and by this many bytes per step, due to those of small messages, which PowerSGD sends.
BYTES_TOLERANCE = 0.03
HEADER_BYTES = 24_000
# With at least this many rounds a table shows a confidence interval of the median.
ROUNDS_FOR_INTERVAL = 20

Row = dict[str, Any]  # one contestant of one network, as in the JSON results
Section = dict[str, Any]  # one network: its settings and its rows


def bits_per_second(rate: str) -> float:
    """`200mbit` -> 2e8. Raises ValueError for notations that `tc` might interpret differently."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)
    if match is None:
        raise ValueError(f"rate must be a number and kbit, mbit or gbit, got {rate!r}")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def _quartiles(values: Sequence[float]) -> list[float]:
    """Return first quartile, median and third quartile."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3


def _contestants(results: list[dict[str, Any]]) -> list[str]:
    """Return the contestants in the order of their first blocks."""
    return list(dict.fromkeys(block["contestant"] for block in results[0]["blocks"]))


def _step_ms(result: dict[str, Any], name: str) -> list[float]:
    """Return, for each round, the milliseconds per step on this rank."""
    return [1e3 * block["seconds"] / block["num_steps"] for block in result["blocks"] if block["contestant"] == name]


def _processor_ms(results: list[dict[str, Any]], name: str) -> float:
    """Return the milliseconds of CPU time per step, over all threads of a rank: mean of ranks, median of rounds."""
    by_rank = [[block for block in result["blocks"] if block["contestant"] == name] for result in results]
    return statistics.median(
        statistics.mean(1e3 * block["processor_s"] / block["num_steps"] for block in blocks_of_round)
        for blocks_of_round in zip(*by_rank, strict=True)
    )


def median_interval(values: Sequence[float]) -> list[float]:
    """Return two of the values: a 95 % confidence interval of the population's median, for any distribution.

    With fewer than six values, the smallest and the largest, with less confidence.
    """
    ordered = sorted(values)
    outside, probability = 0, 0.0
    while outside < (len(ordered) - 1) // 2:
        probability += math.comb(len(ordered), outside) / 2 ** len(ordered)
        if probability > 0.025:
            break
        outside += 1
    index = max(0, outside - 1)
    return [ordered[index], ordered[-1 - index]]


def _slowest_ms(results: list[dict[str, Any]], name: str) -> list[float]:
    """Return, for each round, the milliseconds per step on the slowest of these ranks."""
    return list(map(max, zip(*(_step_ms(result, name) for result in results), strict=True)))


def _bytes_a_step(results: list[dict[str, Any]], name: str) -> Row:
    """Return bytes per step: of the average rank by counters and library, and of the link's busier direction."""
    blocks = [block for result in results for block in result["blocks"] if block["contestant"] == name]
    num_steps = blocks[0]["num_steps"]
    traffic = [block["traffic"] for block in blocks if block["traffic"] is not None]
    recorded = [block["recorded_bytes"] for block in blocks if block["recorded_bytes"] is not None]
    row: Row = {"counted_bytes": None, "recorded_bytes": None, "link_bytes": None}
    if traffic:
        row["counted_bytes"] = statistics.mean(statistics.mean(block["sent_by_rank"]) for block in traffic) / num_steps
        directions = list(zip(*(block["over_link"] for block in traffic), strict=True))
        if directions:
            row["link_bytes"] = max(map(statistics.mean, directions)) / num_steps
    if recorded:
        row["recorded_bytes"] = statistics.mean(recorded) / num_steps
    return row


def summarise(network: dict[str, Any], results: list[dict[str, Any]], block_steps: int) -> Section:
    """Compute one network's rows from the results of its ranks, rank 0 first.

    `network` has `bucket_cap_mb`, and `rank_rate` and `link_rate` (None: not shaped); its other entries are copied.
    The floor of a contestant is the time of its bytes at the rate of the network, or the compute-only step if that is
    longer. The schedule floor accounts for the fact that no bucket is sent before its gradients are ready. Speed-ups
    compare blocks of the same round.
    """
    numels, num_ranks = results[0]["numels"], len(results)
    schedule = Schedule(**results[0]["schedule"])
    names = _contestants(results)
    step_ms = {name: _slowest_ms(results, name) for name in names}
    compute_ms = statistics.median(step_ms[COMPUTE_ONLY])
    if schedule.ready_s and max(schedule.ready_s) > compute_ms / 1e3:  # the machine was slower during the recording
        schedule = schedule.scaled_to(compute_ms / 1e3)
    rows = []
    for name in names:
        row = {"contestant": name, "label": CONTESTANTS[name].label, "rounds_ms": step_ms[name]}
        row["step_ms"] = statistics.median(step_ms[name])
        row["processor_ms"] = _processor_ms(results, name)
        row |= _bytes_a_step(results, name)
        if network["link_rate"] is not None:
            floor_bytes, rate = row["link_bytes"], network["link_rate"]
        else:
            payload = ring_payload_bytes(CONTESTANTS[name], numels, num_ranks)
            floor_bytes, rate = row["counted_bytes"] if payload is None else payload, network["rank_rate"]
        network_ms = 0.0 if rate is None else 1e3 * transfer_s(floor_bytes, bits_per_second(rate))
        row["floor_ms"] = row["schedule_floor_ms"] = max(compute_ms, network_ms)
        if rate is not None and CONTESTANTS[name].waits_for_gradients:
            bucket_cap_mb = CONTESTANTS[name].bucket_cap_mb or network["bucket_cap_mb"]
            averaged_s = schedule_floor_s(schedule, numels, bucket_cap_mb, floor_bytes, bits_per_second(rate))
            row["schedule_floor_ms"] = max(compute_ms, 1e3 * averaged_s)
        for floor in ("floor", "schedule_floor"):
            row[f"{floor}_ratio"] = row["step_ms"] / row[f"{floor}_ms"]
        if BASELINE in step_ms:
            speedups = [baseline / own for baseline, own in zip(step_ms[BASELINE], step_ms[name], strict=True)]
            row["speedup_quartiles"] = _quartiles(speedups)
            row["speedup_interval"] = median_interval(speedups)
        rows.append(row)
    numbers = {"num_ranks": num_ranks, "num_parameters": sum(numels), "block_steps": block_steps}
    return network | numbers | {"schedule": results[0]["schedule"], "rows": rows}


def summarise_straggler(network: dict[str, Any], results: list[dict[str, Any]], slow_rank: int) -> Section:
    """Compute the rows of the network with one slow rank.

    The speed of each of the other ranks is compared with its own speed without communication in the same round.
    """
    names = _contestants(results)
    others = [result for rank, result in enumerate(results) if rank != slow_rank]
    rows = []
    for name in names:
        rounds_ms = [_step_ms(result, name) for result in others]
        alone_ms = [_step_ms(result, COMPUTE_ONLY) for result in others]
        pairs = zip(chain(*alone_ms), chain(*rounds_ms), strict=True)
        rows.append(
            {
                "contestant": name,
                "label": CONTESTANTS[name].label,
                "rounds_ms": rounds_ms,
                "step_ms": statistics.median(chain(*rounds_ms)),
                "slow_rank_ms": statistics.median(_step_ms(results[slow_rank], name)),
                "speed_quartiles": _quartiles([alone / own for alone, own in pairs]),
            }
        )
    numbers = {"num_ranks": len(results), "num_parameters": sum(results[0]["numels"]), "slow_rank": slow_rank}
    return network | numbers | {"rows": rows}


def table_of(section: Section) -> str:
    """Return the Markdown table of a section of either kind."""
    return straggler_table(section) if "slow_rank" in section else markdown_table(section)


def straggler_table(section: Section) -> str:
    """Return the rows as a Markdown table under a title line with the slow rank."""
    rows = [
        [row["label"], f"{row['step_ms']:.0f}", f"{row['slow_rank_ms']:.0f}", _with_range(row["speed_quartiles"])]
        for row in section["rows"]
    ]
    num_rounds = len(section["rows"][0]["rounds_ms"][0])
    head = ["", "ms/step: the other ranks", "the slow rank", "speed of the others (quartiles)"]
    return f"{_title(section)}, {num_rounds} rounds\n\n{table(head, rows)}"


def _title(section: Section) -> str:
    title = "{}: {} ranks, {:.1f} M parameters".format(
        section["title"], section["num_ranks"], section["num_parameters"] / 1e6
    )
    return title + ", CPUs idle while gradients are computed" * section.get("is_idle", False)


def _with_range(quartiles: Sequence[float]) -> str:
    low, median, high = quartiles
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def byte_disagreements(section: Section) -> list[str]:
    """Return messages about contestants whose own byte count differs from the interface counters beyond headers."""
    messages = []
    for row in section["rows"]:
        counted, recorded = row["counted_bytes"], row["recorded_bytes"]
        if counted is None or recorded is None:
            continue
        if abs(recorded - counted) > BYTES_TOLERANCE * counted + HEADER_BYTES:
            messages.append(
                f"{row['label']}: bytes per step must agree, got {recorded:.0f} from the library and "
                f"{counted:.0f} from the counters"
            )
    return messages


def _megabytes(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:.2f}"


def _speedup(row: Row) -> str:
    if row["contestant"] == COMPUTE_ONLY or "speedup_quartiles" not in row:
        return ""
    return _with_range(row["speedup_quartiles"])


def _floor_cells(row: Row, floor: str) -> list[str]:
    """Return a floor in ms and the ratio to it. Results from before 2026-11-26 have no schedule floor."""
    if f"{floor}_ms" not in row:
        return [MISSING] * 2
    return [f"{row[f'{floor}_ms']:.0f}", f"{row[f'{floor}_ratio']:.2f}"]


def markdown_table(section: Section) -> str:
    """Return the rows as a Markdown table under a title line that describes the network. MB are 1e6 bytes."""
    with_link = any(row["link_bytes"] is not None for row in section["rows"])
    with_interval = len(section["rows"][0]["rounds_ms"]) >= ROUNDS_FOR_INTERVAL
    head = ["", "ms/step", "CPU ms", "MB sent/step/rank: counters", "library"]
    head += ["MB over the link/step"] * with_link
    head += ["floor ms", "x floor", "schedule floor ms", "x schedule floor", "speed-up (quartiles)"]
    head += ["95 % of its median"] * with_interval
    rows = []
    for row in section["rows"]:
        cells = [row["label"], f"{row['step_ms']:.0f}"]
        cells.append(f"{row['processor_ms']:.0f}" if "processor_ms" in row else MISSING)
        cells += [_megabytes(row["counted_bytes"]), _megabytes(row["recorded_bytes"])]
        cells += [_megabytes(row["link_bytes"])] * with_link
        cells += _floor_cells(row, "floor") + _floor_cells(row, "schedule_floor")
        cells.append(_speedup(row))
        if with_interval:
            cells.append("{:.3f} to {:.3f}".format(*row["speedup_interval"]) if cells[-1] else "")
        rows.append(cells)
    num_rounds = len(section["rows"][0]["rounds_ms"])
    rounds = f"{num_rounds} rounds of {section['block_steps']} steps each"
    others = "of several seconds if communication is not tied to steps"
    if any(CONTESTANTS[row["contestant"]].steps_a_round > 1 for row in section["rows"]):
        others += ", of at least three averaging rounds if weights are averaged once every few steps"
    without_waiting = [
        row["label"] for row in section["rows"] if not CONTESTANTS[row["contestant"]].waits_for_gradients
    ]
    note = f"The schedule floor is the floor of rows that do not wait for gradients: {'; '.join(without_waiting)}."
    return f"{_title(section)}, {rounds}, {others}\n\n{table(head, rows)}\n\n{note}"
