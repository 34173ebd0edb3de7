"""Runs thousands of simulated trainings with faults: `make simulate ARGS='--seeds 10000'`.

`--replay SEED` runs one of them again, prints what became of each rank, and writes a trace. `--every-operation` fails
the n-th operation of every rank, for every n, of every algorithm with two and with three ranks. `--elastic` runs
elastic trainings instead, see elastic_trials.py: of seeds, with every way to cut the network, or with every request to
a mailbox failing in turn.
"""

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import elastic_trials
from environment import write_record
from past_bugs import PAST_BUGS
from simulated import SUBJECTS, case, without_fault
from torchbagua._text_table import table as text_table
from torchbagua.testing.simulation.faults import FAULTS, Fault
from torchbagua.testing.simulation.scheduler import Deadlock
from torchbagua.testing.simulation.trace import SimulationTrace
from torchbagua.testing.simulation.trial import Trial, run_trial, simulate

Result = tuple[str, str, str, list[str]]
"""The subject, the column of the table, the arguments that repeat the run, and its violations."""

SEEDS_PER_PROCESS = 1000
# Enough to see the shape of a failure.
MOST_PRINTED = 20


def violations_of(run: Callable[[], list[str]]) -> list[str]:
    """Run a trial by a function that returns what was wrong; return that."""
    gc.collect()
    gc.freeze()  # what an earlier trial has left, such as errors that DDP's reducer refers to
    try:
        return run()
    except Deadlock as error:
        return [str(error).splitlines()[0]]
    except Exception as error:
        return [repr(error)]


def run_seed(seed: int, bug: str | None) -> Result:
    """Run the trial of a seed, with a bug of the past."""
    name, trial = case(seed)
    with ExitStack() as stack:
        if bug is not None:
            stack.enter_context(PAST_BUGS[bug]())
        return (
            name,
            trial.fault.kind,
            f"--replay {seed}{f' --bug {bug}' if bug else ''}",
            violations_of(lambda: run_trial(trial).violations),
        )


def run_failing_operation(which: tuple[str, int, int, int]) -> Result:
    """Run a trial in which one operation fails: of a subject, a number of ranks, a rank and a number."""
    name, size, rank, number = which
    trial = replace(without_fault(name, 0, size), fault=Fault("failed operation", rank=rank, operation=number))
    violations = violations_of(lambda: run_trial(trial).violations)
    return name, f"{size} ranks", f"--operation {name} {size} {rank} {number}", violations


def every_operation() -> Iterator[tuple[str, int, int, int]]:
    """Yield every operation of every rank, in a run without faults."""
    for name, subject in SUBJECTS.items():
        for size in (2, 3):
            if size in subject.sizes:
                simulation = simulate(without_fault(name, 0, size))
                run_trial(without_fault(name, 0, size), simulation)
                for rank, count in sorted(simulation.network.num_operations.items()):
                    yield from ((name, size, rank, number) for number in range(1, count + 1))


def run_elastic(trial: elastic_trials.ElasticTrial) -> Result:
    """Run a trial of elastic training."""
    command = f"--elastic seeds --first {trial.seed} --seeds 1" if trial.failing[0] < 0 else repr(trial)
    return trial.name, trial.kind, command, violations_of(lambda: elastic_trials.run_trial(trial))


def elastic_cases(which: str, seeds: range) -> Sequence[elastic_trials.ElasticTrial]:
    """Return the elastic trials of the command line."""
    if which == "seeds":
        return [elastic_trials.ElasticTrial.drawn(seed) for seed in seeds]
    trials = elastic_trials.cut_trials() if which == "cuts" else elastic_trials.request_trials()
    return list(tqdm(trials, desc="listing trials"))


def prepare(core: int) -> None:
    """Prepare a process: it runs on one core, since its threads run one at a time, and has few objects to collect."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    logging.getLogger("torchbagua.elastic").setLevel(logging.ERROR)
    gc.collect()
    gc.freeze()  # objects of the imports, among which the package would search for referrers


def results_of(run: Callable[[Any], Result], cases: Sequence[Any]) -> Iterator[Result]:
    """Yield the results of all cases, in their order. Each core has a process, which is replaced after some cases."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # for DDP's warning of parameters that are all used
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as pools:
        results = []
        for number, core in enumerate(cores):
            pool = pools.enter_context(context.Pool(1, prepare, (core,), maxtasksperchild=SEEDS_PER_PROCESS))
            results.append(pool.imap(run, cases[number :: len(cores)]))
        for number in range(len(cases)):
            yield next(results[number % len(cores)])


def replay(trial: Trial, path: Path) -> int:
    """Run one trial; print what became of each rank, and where threads wait; write a trace."""
    print(f"{trial.fault}\n{trial.program}\n{trial.cluster}")
    simulation = simulate(trial)
    trace = SimulationTrace(simulation)
    violations: Sequence[str]
    try:
        report = run_trial(trial, simulation)
    except Deadlock as error:
        print(error)
        violations = ["a deadlock"]
    else:
        violations = report.violations
        for rank, (outcome, record) in enumerate(zip(report.outcomes, report.records, strict=True)):
            state = "died" if rank in simulation.dead else "raised" if outcome.error else "ended"
            print(f"\nrank {rank} attached at {record.attached_s} s, took {record.num_steps} steps")
            print(f"and {state} at {outcome.ended_s:.6f} s")
            if outcome.error is not None:
                print("".join(traceback.format_exception(outcome.error)))
        happened = simulation.fault_s is not None
        print(f"the fault {'happened' if happened else 'did not happen, or lasted for the whole run'}")
        print(f"{report.num_turns} turns, digest {report.digest}")
    trace.write(path)
    print(f"trace for https://ui.perfetto.dev, in virtual time: {path}")
    for violation in violations:
        print(f"violation: {violation}")
    return int(bool(violations))


def main() -> int:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="number of runs (default: 1000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (default: 0)")
    parser.add_argument("--bug", choices=PAST_BUGS, help="put a bug of the past back, and stop when it is found")
    parser.add_argument("--json", type=Path, help="write the numbers of runs and violations to this file")
    parser.add_argument(
        "--elastic", choices=["seeds", "cuts", "requests"], help="elastic trainings: of seeds, or of all of a kind"
    )
    parser.add_argument("--every-operation", action="store_true", help="fail each operation in turn")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed, and print what happens")
    parser.add_argument(
        "--operation", nargs=4, metavar=("ALGORITHM", "RANKS", "RANK", "N"), help="replay the failure of an operation"
    )
    parser.add_argument("--trace", type=Path, default=Path("simulation.json"), help="the trace's file, for a replay")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {options.seeds}")
    if options.replay is not None:
        with PAST_BUGS[options.bug]() if options.bug else ExitStack():
            return replay(case(options.replay)[1], options.trace)
    if options.operation is not None:
        name, (size, rank, number) = options.operation[0], map(int, options.operation[1:])
        if name not in SUBJECTS or size not in SUBJECTS[name].sizes or not 0 <= rank < size or number < 1:
            parser.error(f"--operation: no such algorithm, number of ranks, rank or operation; {list(SUBJECTS)}")
        fault = Fault("failed operation", rank=rank, operation=number)
        return replay(replace(without_fault(name, 0, size), fault=fault), options.trace)
    if options.every_operation:
        cases = list(tqdm(every_operation(), desc="counting operations"))
        return run_all(cases, run_failing_operation, ["2 ranks", "3 ranks"], options.json)
    seeds = range(options.first, options.first + options.seeds)
    if options.elastic is not None:
        cases = elastic_cases(options.elastic, seeds)
        columns = sorted({case.kind for case in cases})
        return run_all(cases, run_elastic, columns, options.json, names=elastic_trials.ALGORITHMS)
    return run_all(seeds, partial(run_seed, bug=options.bug), FAULTS, options.json, stops=options.bug is not None)


def run_all(
    cases: Sequence[Any],
    run: Callable[[Any], Result],
    columns: Sequence[str],
    path: Path | None,
    *,
    names: Collection[str] = SUBJECTS,
    stops: bool = False,
) -> int:
    """Run all cases in a pool of processes; print violations with their commands, and a table."""
    runs, bad = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    start_s = time.monotonic()
    results = results_of(run, cases)
    for name, column, command, violations in tqdm(results, total=len(cases), mininterval=1):
        runs[name, column] += 1
        if violations:
            bad[name, column] += 1
            if sum(bad.values()) <= MOST_PRINTED:
                tqdm.write(f"{name}, {column}: {'; '.join(violations)}\n  make simulate ARGS='{command}'")
            if stops:
                break
    results.close()
    print(table(runs, bad, columns, names))
    seconds = time.monotonic() - start_s
    counts = {name: {column: [runs[name, column], bad[name, column]] for column in columns} for name in names}
    about = {"arguments": sys.argv[1:], "seconds": round(seconds), "runs and violations": counts}
    write_record(path, about)
    print(f"{sum(runs.values())} runs in {seconds:.0f} s, {sum(bad.values())} with violations")
    return int(bool(bad) != stops)  # of a bug of the past, a violation is the success


def table(
    runs: Counter[tuple[str, str]], bad: Counter[tuple[str, str]], columns: Sequence[str], names: Collection[str]
) -> str:
    """Return the number of runs, and of bad ones, of each algorithm and fault."""
    rows = [["", *columns]]
    for name in names:
        cells = [
            f"{runs[name, column]}" + (f" ({bad[name, column]} bad)" if bad[name, column] else "") for column in columns
        ]
        rows.append([name, *cells])
    return text_table(rows, num_head_rows=1)


if __name__ == "__main__":
    sys.exit(main())
