"""From the blocks that the ranks measured to the table of one network."""

import math
import re
import statistics
from collections.abc import Sequence
from itertools import chain
from typing import Any

from contestants import BASELINE, COMPUTE_ONLY, CONTESTANTS, ring_payload_bytes
from schedule import Schedule, schedule_floor_s, transfer_s
from table import MISSING, table

# The library's own count of bytes and the interface counters may differ by this much: headers and acknowledgements, and
# by so many bytes a step for those of small messages, as PowerSGD sends them.
BYTES_TOLERANCE = 0.03
HEADER_BYTES = 24_000
# From so many rounds on a table says between which values the median lies.
ROUNDS_FOR_INTERVAL = 20

Row = dict[str, Any]  # one contestant of one network, as in the JSON results
Section = dict[str, Any]  # one network: its settings and its rows


def bits_per_second(rate: str) -> float:
    """`200mbit` -> 2e8. Raises ValueError for what `tc` might read differently."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)
    if match is None:
        raise ValueError(f"rate must be a number and kbit, mbit or gbit, got {rate!r}")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def _quartiles(values: Sequence[float]) -> list[float]:
    """First quartile, median, third quartile."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3


def _contestants(results: list[dict[str, Any]]) -> list[str]:
    """In the order of their first blocks."""
    return list(dict.fromkeys(block["contestant"] for block in results[0]["blocks"]))


def _step_ms(result: dict[str, Any], name: str) -> list[float]:
    """Per round: milliseconds a step on this rank."""
    return [1e3 * block["seconds"] / block["num_steps"] for block in result["blocks"] if block["contestant"] == name]


def _processor_ms(results: list[dict[str, Any]], name: str) -> float:
    """Milliseconds of processor time a step, all threads of a rank: mean of the ranks, median of the rounds."""
    by_rank = [[block for block in result["blocks"] if block["contestant"] == name] for result in results]
    return statistics.median(
        statistics.mean(1e3 * block["processor_s"] / block["num_steps"] for block in blocks_of_round)
        for blocks_of_round in zip(*by_rank, strict=True)
    )


def median_interval(values: Sequence[float]) -> list[float]:
    """Two of the values, between which the median of the population lies with 95 % confidence, however distributed.

    Of less than six values, the smallest and the largest, with less.
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
    """Per round: milliseconds a step on the slowest of these ranks."""
    return list(map(max, zip(*(_step_ms(result, name) for result in results), strict=True)))


def _bytes_a_step(results: list[dict[str, Any]], name: str) -> Row:
    """Bytes a step: of the average rank, by the counters and as the library says; of the link's busier direction."""
    blocks = [block for result in results for block in result["blocks"] if block["contestant"] == name]
    num_steps = blocks[0]["num_steps"]
    traffic = [block["traffic"] for block in blocks if block["traffic"] is not None]
    recorded = [block["recorded_bytes"] for block in blocks if block["recorded_bytes"] is not None]
    row: Row = {"counted_bytes": None, "recorded_bytes": None, "link_bytes": None}
    if traffic:
        row["counted_bytes"] = statistics.mean(statistics.mean(one["sent_by_rank"]) for one in traffic) / num_steps
        directions = list(zip(*(one["over_link"] for one in traffic), strict=True))
        if directions:
            row["link_bytes"] = max(map(statistics.mean, directions)) / num_steps
    if recorded:
        row["recorded_bytes"] = statistics.mean(recorded) / num_steps
    return row


def summarise(network: dict[str, Any], results: list[dict[str, Any]], block_steps: int) -> Section:
    """One network's rows, from the results of its ranks, rank 0 first.

    `network` has `bucket_cap_mb`, and `rank_rate` and `link_rate` (None: not shaped); its other entries are kept as
    they are. The floor of a contestant is what its bytes take at the rate of the network, or the compute-only step if
    that is longer. The schedule floor takes into account that no bucket is sent before its gradients are ready.
    Speed-ups compare blocks of the same round.
    """
    numels, num_ranks = results[0]["numels"], len(results)
    schedule = Schedule(**results[0]["schedule"])
    names = _contestants(results)
    step_ms = {name: _slowest_ms(results, name) for name in names}
    compute_ms = statistics.median(step_ms[COMPUTE_ONLY])
    if schedule.ready_s and max(schedule.ready_s) > compute_ms / 1e3:  # the machine was slower when it was recorded
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
    """Rows of the network on which one rank is slow.

    The speed of each of the other ranks is compared with its own without communication in the same round.
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
    """The Markdown table of a section, whichever it is."""
    return straggler_table(section) if "slow_rank" in section else markdown_table(section)


def straggler_table(section: Section) -> str:
    """The rows as a Markdown table under one line that says what was slow."""
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
    return title + ", processors idle while gradients are computed" * section.get("is_idle", False)


def _with_range(quartiles: Sequence[float]) -> str:
    low, median, high = quartiles
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def byte_disagreements(section: Section) -> list[str]:
    """The contestants whose own count of bytes is further from the interface counters than headers explain."""
    messages = []
    for row in section["rows"]:
        counted, recorded = row["counted_bytes"], row["recorded_bytes"]
        if counted is None or recorded is None:
            continue
        if abs(recorded - counted) > BYTES_TOLERANCE * counted + HEADER_BYTES:
            messages.append(f"{row['label']}: the library reports {recorded:.0f} bytes a step, counters {counted:.0f}")
    return messages


def _megabytes(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:.2f}"


def _speedup(row: Row) -> str:
    if row["contestant"] == COMPUTE_ONLY or "speedup_quartiles" not in row:
        return ""
    return _with_range(row["speedup_quartiles"])


def _floor_cells(row: Row, floor: str) -> list[str]:
    """A floor in ms and the ratio to it. Results of before 2026-11-26 have no schedule floor."""
    if f"{floor}_ms" not in row:
        return [MISSING] * 2
    return [f"{row[f'{floor}_ms']:.0f}", f"{row[f'{floor}_ratio']:.2f}"]


def markdown_table(section: Section) -> str:
    """The rows as a Markdown table under one line that says what the network was. MB are 1e6 bytes."""
    with_link = any(row["link_bytes"] is not None for row in section["rows"])
    with_interval = len(section["rows"][0]["rounds_ms"]) >= ROUNDS_FOR_INTERVAL
    head = ["", "ms/step", "processor ms", "MB sent/step/rank: counters", "library"]
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
    others = "of seconds where communication is not tied to steps"
    if any(CONTESTANTS[row["contestant"]].steps_a_round > 1 for row in section["rows"]):
        others += ", of at least three rounds where weights are averaged once in some steps"
    without_waiting = [
        row["label"] for row in section["rows"] if not CONTESTANTS[row["contestant"]].waits_for_gradients
    ]
    note = f"Schedule floor is floor, since they do not wait for gradients: {'; '.join(without_waiting)}."
    return f"{_title(section)}, {rounds}, {others}\n\n{table(head, rows)}\n\n{note}"
