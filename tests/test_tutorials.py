"""Every tutorial runs with the commands in its docstring, and its output supports its claims."""

import ast
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import programs
from torchbagua.cli import trace

ROOT = Path(__file__).parent.parent


def rows_of(output: str, *names: str) -> dict[str, list[float]]:
    """Return the numbers of the rows that begin with these names."""
    rows = re.findall(rf"^({'|'.join(map(re.escape, names))}) +([\d. ]+)$", output, re.MULTILINE)
    return {name: [float(number) for number in numbers.split()] for name, numbers in rows}


def check_your_own_loop(output: str, rate_mbit: float | None) -> None:
    held_out = [float(loss) for loss in re.findall(r"held-out loss (\S+),", output)]
    assert len(held_out) == 4 + 4 + 2, "the third run evaluates only after the checkpoint"
    # Guessing among ten classes gives ln 10 = 2.3 nats.
    assert max(held_out[0], held_out[4]) < 2
    assert held_out[8:] == held_out[6:8], "the resumed run is bitwise equal"
    assert "ends with the same weights: True" in output
    rows = {
        name: dict(zip(("loss", "sent_mb", "step_ms"), numbers, strict=True))
        for name, numbers in rows_of(output, "plain DDP", "8-bit gradients").items()
    }
    plain, bytegrad = rows["plain DDP"], rows["8-bit gradients"]
    assert bytegrad["loss"] == pytest.approx(plain["loss"], rel=0.02)
    # 8 bits instead of 32, and 8 bytes of range for each block.
    assert 3.9 < plain["sent_mb"] / bytegrad["sent_mb"] < 4
    assert "ByteGradAlgorithm(" in output, "the summary"
    if rate_mbit:  # both ranks send through one interface; the rest of a step does not change
        saved_ms = 2 * 8e3 * (plain["sent_mb"] - bytegrad["sent_mb"]) / rate_mbit
        assert plain["step_ms"] - bytegrad["step_ms"] > 0.5 * saved_ms


def check_ddp_to_bytegrad(output: str, rate_mbit: float | None) -> None:
    first_losses = [float(loss) for loss in re.findall(r"step   0: loss (\S+)", output)]
    last_losses = [float(loss) for loss in re.findall(r"^(?:plain DDP|ByteGrad): +loss (\S+),", output, re.MULTILINE)]
    megabytes = [float(size) for size in re.findall(r"(\S+) MB sent", output)]

    # Guessing all bytes equally gives ln 256 = 5.55 nats; 3.2 is the entropy of single bytes of source code.
    assert first_losses == [pytest.approx(5.5, abs=0.4)] * 2
    assert len(last_losses) == 2
    assert max(last_losses) < 2
    assert last_losses[1] == pytest.approx(last_losses[0], rel=0.01), "ByteGrad promises plain DDP's loss within 1 %"
    # 8 bits instead of 32, and 8 bytes of range for each block.
    assert 3.9 < megabytes[0] / megabytes[1] < 4


def check_decentralized(output: str, rate_mbit: float | None) -> None:
    ((num_ranks, num_parameters),) = [map(int, pair) for pair in re.findall(r"(\d+) ranks, (\d+) parameters", output)]
    rows = rows_of(output, "DDP", "all", "shift_one", "low precision")
    bytes_per_parameter = {name: 1000 * row[0] / num_parameters for name, row in rows.items()}
    losses = {name: row[-1] for name, row in rows.items()}

    # These are the figures of the algorithms' docstrings. Chunks of whole blocks are not quite equal, and blocks have a
    # range. A round may be in flight when the count begins and when it ends, which is one of 45.
    all_ranks = 8 * (num_ranks - 1) / num_ranks
    expected = {"DDP": all_ranks, "all": all_ranks, "shift_one": 4, "low precision": 2}
    assert bytes_per_parameter == pytest.approx(expected, rel=0.04)
    assert rows["DDP"][1:-1] == [0] * 7
    for name in ("all", "shift_one", "low precision"):
        *apart, apart_at_end = rows[name][1:-1]
        assert len(apart) == 6
        # One step changes the weights by about 1 %, and then the ranks are averaged again.
        assert all(0.001 < distance < 0.05 for distance in apart), name
        assert apart_at_end == 0
        assert losses[name] == pytest.approx(losses["DDP"], rel=0.03), name
    assert losses["DDP"] < 2
    assert "shift_one, from the checkpoint: ends with the same weights: True" in output


def check_async_on_a_slow_network(output: str, rate_mbit: float | None) -> None:
    rows = {
        name: [float(number) for number in numbers.split()]
        for name, numbers in re.findall(
            r"^((?:DDP|async), [a-z1 ]*[a-z]) +([\d.]+ +[\d.]+ +[\d.]+) ", output, re.MULTILINE
        )
    }
    assert list(rows) == ["DDP, ranks alike", "DDP, rank 1 slow", "async, ranks alike", "async, rank 1 slow"]
    rounds = re.findall(r"(\d+) rounds; weights differ by (\S+), after abort by (\S+)", output)
    assert len(rounds) == 2
    for num_rounds, difference_before, difference_after in rounds:
        assert int(num_rounds) >= 1
        assert float(difference_before) > 0
        assert float(difference_after) == 0

    # Rank 1 pauses for 0.3 s in each step. The other rank is easily ten times as fast, but machines are noisy.
    slowest = 1 / 0.3
    assert max(rows["DDP, rank 1 slow"][:2]) < 1.02 * slowest, "with DDP the slow rank delays both"
    fast, slow = rows["async, rank 1 slow"][:2]
    assert slow < 1.02 * slowest
    assert fast > 3 * slowest, "the other rank keeps its own speed"
    assert rows["async, rank 1 slow"][2] < rows["DDP, rank 1 slow"][2] < 2.5, "more steps in the same time"
    if rate_mbit:
        # 100 Mbit/s carry the 0.8 MB that each of two ranks sends 7.8 times a second; bursts exceed the limit.
        assert max(rows["DDP, ranks alike"][:2]) < 10
        assert min(rows["async, ranks alike"][:2]) > 20, "no step waits for the network"
        assert rows["async, ranks alike"][2] < rows["DDP, ranks alike"][2]


def check_qadam(output: str, rate_mbit: float | None) -> None:
    rows = rows_of(output, "Adam", "QAdam")
    assert rows["QAdam"][0] == pytest.approx(rows["Adam"][0], rel=0.01), (
        "in its warm-up it averages gradients in float32"
    )
    # 8 bits instead of 32, and 8 bytes of range for each block.
    assert 3.9 < rows["Adam"][1] / rows["QAdam"][1] < 4
    losses = [rows["Adam"][2], rows["QAdam"][2], *map(float, re.findall(r"from there: loss (\S+)", output))]
    assert len(losses) == 3
    # The path differs, because the second moment is frozen. Guessing gives 5.55 nats, single bytes 3.2.
    assert max(losses) < 1.8
    assert "ranks whose weights differ from rank 0's: 0" in output


def check_read_a_trace(output: str, rate_mbit: float | None) -> None:
    tables = re.findall(r"^(large_buckets|small_buckets):(?:.*\n)+?-+\n +0 +(.*)$", output, re.MULTILINE)
    assert [name for name, _ in tables] == ["large_buckets", "small_buckets"]
    rows = {name: [cell.rstrip("x") for cell in row.split()] for name, row in tables}
    for name, (steps, *_, bits, ratio, _) in rows.items():
        assert steps == "40"
        assert float(ratio) == pytest.approx(32 / float(bits), rel=0.01)
        folder = ROOT / "runs" / "traces" / name
        assert list(folder.glob("events.out.tfevents.*"))
        for command in "show", "draw", "merge":
            assert trace.main([command, str(folder)]) == 0
        assert (folder / "timeline.png").is_file()
        assert (folder / "merged.json.gz").is_file()
    waited_ms, overlap, sent_mb, gbit = (
        {name: float(row[column]) for name, row in rows.items()} for column in (2, 3, -4, -1)
    )
    assert sent_mb["large_buckets"] == pytest.approx(sent_mb["small_buckets"], rel=0.01)
    if rate_mbit:
        # One bucket, which is full when backward is done; both ranks send 2.6 MB through one interface of 1 Gbit/s.
        # Small buckets overlap by 70 %, this bucket by 0 to 2 %, and by 6 % on a machine with busy processors.
        assert overlap["large_buckets"] < 15
        assert waited_ms["large_buckets"] > 0.8 * 2 * 8e3 * sent_mb["large_buckets"] / rate_mbit
        assert max(gbit.values()) < 1.1e-3 * rate_mbit
        assert waited_ms["small_buckets"] < 0.75 * waited_ms["large_buckets"]
        assert overlap["small_buckets"] > 30


def check_aggregation(output: str, rate_mbit: float | None) -> None:
    ((num_ranks, num_parameters),) = [map(int, pair) for pair in re.findall(r"(\d+) ranks, (\d+) parameters", output)]
    rows = rows_of(output, "all-reduce", "sparsified", "power", "neighbors")
    kilobytes = {name: row[0] for name, row in rows.items()}
    whole = 8 * (num_ranks - 1) / num_ranks * num_parameters / 1e3
    assert kilobytes["all-reduce"] == pytest.approx(whole, rel=0.01)
    assert kilobytes["neighbors"] == pytest.approx(4 * num_parameters / 1e3, rel=0.01)
    assert kilobytes["sparsified"] < whole / 100
    # PowerSGD sends factors of two vectors each, and the biases.
    assert kilobytes["power"] < whole / 20
    best = rows["all-reduce"][-1]
    assert best > 96
    assert all(abs(row[-1] - best) < 1 for row in rows.values()), (
        "the mean of three seeds is within 1 % of all-reduce's"
    )


def check_diloco(output: str, rate_mbit: float | None) -> None:
    rows = rows_of(output, "DDP", "DiLoCo", "local SGD")
    assert len(re.findall(r"^  step +\d+: loss", output, re.MULTILINE)) == 3 * 10
    # 4 bits instead of 32, and a scale for each block, once in 30 steps; chunks of whole blocks are not quite equal.
    saved = 30 * 32 / 4.25
    for name in ("DiLoCo", "local SGD"):
        assert rows["DDP"][1] / rows[name][1] == pytest.approx(saved, rel=0.03)
        # The loss is higher: by 2 and 3 % when measured, from 5.5 at the start.
        assert rows[name][0] == pytest.approx(rows["DDP"][0], rel=0.06)
    assert rows["DDP"][0] < 2.3
    if rate_mbit:  # bursts exceed the limit
        assert rows["DDP"][2] > 0.95 * 8 * rows["DDP"][1] / rate_mbit
        assert rows["DiLoCo"][2] < rows["DDP"][2] / 3
        ((after_s, loss),) = re.findall(r"; after (\S+) s DDP was at step \d+, with loss (\S+)$", output, re.MULTILINE)
        assert float(after_s) >= rows["DiLoCo"][2]
        assert float(loss) > rows["DiLoCo"][0], "DDP needs longer for the same loss"


def check_muon_diloco(output: str, rate_mbit: float | None) -> None:
    rows = {
        name: [float(number) for number in numbers]
        for name, *numbers in re.findall(
            r"^((?:DDP|DiLoCo), (?:AdamW|Muon)) +([\d.]+) +([+-][\d.]+) % +([\d.]+) +[\d.]+$", output, re.MULTILINE
        )
    }
    assert len(re.findall(r"^  step +\d+: loss", output, re.MULTILINE)) == 4 * 5
    # 4 bits instead of 32, and a scale for each block, once in 30 steps; chunks of whole blocks are not quite equal.
    for name in ("AdamW", "Muon"):
        assert rows[f"DDP, {name}"][2] / rows[f"DiLoCo, {name}"][2] == pytest.approx(30 * 32 / 4.25, rel=0.03)
    # Over three seeds, when measured: -4.3 to -6.7 %, +2.1 to +4.5 %, and -2.6 to -5.1 %.
    relative = {name: row[1] for name, row in rows.items()}
    assert relative["DDP, AdamW"] == 0
    assert relative["DDP, Muon"] < -3
    assert 1 < relative["DiLoCo, AdamW"] < 6
    assert relative["DDP, Muon"] < relative["DiLoCo, Muon"] < -1, "Muon gains more than DiLoCo loses"
    assert rows["DDP, AdamW"][0] < 2.4


def check_fsdp(output: str, rate_mbit: float | None) -> None:
    ((num_ranks, num_parameters),) = [map(int, pair) for pair in re.findall(r"(\d+) ranks, (\d+) parameters", output)]
    rows = rows_of(output, "float32", "8-bit gradients", "8-bit weights too")
    assert len(re.findall(r"^  step +\d+: loss", output, re.MULTILINE)) == 3 * 10
    # Weights are gathered twice; gloo's reduce-scatter sends twice the minimum. In 8 bits a block has a range.
    to_others = (num_ranks - 1) / num_ranks * num_parameters
    expected = {"float32": 16, "8-bit gradients": 9, "8-bit weights too": 3}
    assert {name: 1e6 * row[1] / to_others for name, row in rows.items()} == pytest.approx(expected, rel=0.01)
    # 3.2 nats is the entropy of single bytes of source code. The three losses differed by 0.2 % when measured.
    assert rows["float32"][0] < 2.9
    assert [row[0] for row in rows.values()] == pytest.approx(3 * [rows["float32"][0]], rel=0.02)
    if rate_mbit:  # bursts exceed the limit; the rest of a step, which includes the codec, does not change
        assert rows["float32"][2] > 0.95 * 8e3 * rows["float32"][1] / rate_mbit
        for name in ("8-bit gradients", "8-bit weights too"):
            saved_ms = 8e3 * (rows["float32"][1] - rows[name][1]) / rate_mbit
            assert rows["float32"][2] - rows[name][2] > 0.5 * saved_ms


def check_elastic(output: str, rate_mbit: float | None) -> None:
    assert re.findall(r": (generation \d, \d ranks)", output) == [
        "generation 0, 4 ranks",
        "generation 1, 3 ranks",
        "generation 2, 4 ranks",
    ]
    rows = [
        (int(step), int(ranks), float(loss))
        for step, ranks, loss in re.findall(r"step +(\d+), (\d) ranks, loss (\S+),", output)
    ]
    steps, ranks, losses = zip(*rows, strict=True)
    assert sorted(steps) == list(steps), "no step is lost"
    assert [size for size, before in zip(ranks, (0, *ranks), strict=False) if size != before] == [4, 3, 4]
    # Guessing all bytes equally gives ln 256 = 5.55 nats; 3.2 is the entropy of single bytes of source code.
    assert losses[-1] < 3.2
    weights = re.findall("the sum of the weights is (.*)", output)
    assert len(weights) == 4
    assert len(set(weights)) == 1


CHECKS = {
    "00_your_own_loop": check_your_own_loop,
    "01_ddp_to_bytegrad": check_ddp_to_bytegrad,
    "02_decentralized": check_decentralized,
    "03_async_on_a_slow_network": check_async_on_a_slow_network,
    "04_qadam": check_qadam,
    "05_read_a_trace": check_read_a_trace,
    "06_aggregation": check_aggregation,
    "07_diloco": check_diloco,
    "08_fsdp": check_fsdp,
    "09_muon_diloco": check_muon_diloco,
    "10_elastic": check_elastic,
}
# Of the networks that `unshare` commands emulate.
RATES_MBIT = {"00_your_own_loop": 1000, "03_async_on_a_slow_network": 100, "05_read_a_trace": 1000}
RATES_MBIT |= {"07_diloco": 20, "08_fsdp": 200}


def commands() -> Iterator[object]:
    """Yield the commands in tutorials' docstrings."""
    for tutorial in sorted((ROOT / "tutorials").glob("*.py")):
        docstring = ast.get_docstring(ast.parse(tutorial.read_text(encoding="utf-8"))) or ""
        for command in re.findall(r"^    ((?:torchrun|unshare|python) .*(?:\n {5,}.*)*)", docstring, re.MULTILINE):
            is_emulated = command.startswith("unshare")
            # Claims about times hold only if nothing else runs.
            is_timed = is_emulated or tutorial.stem == "03_async_on_a_slow_network"
            marks = [pytest.mark.alone if is_timed else pytest.mark.slow]
            marks += [pytest.mark.network, pytest.mark.release] if is_emulated else []
            name = f"{tutorial.stem}-{command.split()[0]}"
            yield pytest.param(tutorial.stem, command, is_emulated, marks=marks, id=name)


def skip_without_namespaces() -> None:
    for tool in ("unshare", "ip", "tc"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no `{tool}`")
    shaped = "ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 100ms"
    trial = programs.run(["unshare", "--user", "--map-root-user", "--net", "sh", "-c", shaped], check=False)
    if trial.returncode != 0:
        pytest.skip(f"not permitted to shape a network of one's own: {trial.stderr.strip()}")


@pytest.mark.parametrize(("name", "command", "is_emulated"), list(commands()))
def test_tutorial(name: str, command: str, is_emulated: bool) -> None:
    if is_emulated:
        skip_without_namespaces()
    python = shlex.quote(sys.executable)
    command = re.sub("^python", python, command.replace("torchrun", f"{python} -m torch.distributed.run"))
    run = programs.run(shlex.split(command), cwd=ROOT, timeout_s=200)
    CHECKS[name](run.stdout, RATES_MBIT[name] if is_emulated else None)


def test_every_tutorial_has_a_check() -> None:
    assert list(CHECKS) == sorted(path.stem for path in (ROOT / "tutorials").glob("*.py"))
