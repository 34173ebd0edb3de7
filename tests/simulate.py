"""Runs thousands of simulated trainings with faults: `make simulate ARGS='--seeds 10000'`."""

import argparse
import gc
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator

import torch
from tqdm import tqdm

from simulated import ALGORITHMS, FAULTS, Report, run_training
from torchbagua._text_table import table as text_table

SEEDS_PER_PROCESS = 200


def case(seed: int) -> tuple[str, str, int]:
    """Return the algorithm, the fault and the number of ranks of a seed."""
    names = list(ALGORITHMS)
    algorithm, kind = names[seed % len(names)], FAULTS[seed // len(names) % len(FAULTS)]
    sizes = (2, 4) if algorithm == "shift_one" else (2, 3, 4)
    return algorithm, kind, random.Random(seed).choice(sizes)


def run_seed(seed: int) -> Report | tuple[int, str]:
    algorithm, kind, size = case(seed)
    try:
        return run_training(algorithm, kind, size, seed)
    except Exception as error:
        return seed, repr(error)


def prepare() -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # objects of the imports, among which the package would search for referrers


def main() -> int:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="number of runs (default: 1000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (default: 0)")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    runs, bad = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    start_s = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with context.Pool(initializer=prepare, maxtasksperchild=SEEDS_PER_PROCESS) as pool:
        for seed, report in zip(seeds, tqdm(pool.imap(run_seed, seeds, chunksize=1), total=len(seeds)), strict=True):
            algorithm, kind, _ = case(seed)
            runs[algorithm, kind] += 1
            violations = report.violations if isinstance(report, Report) else [report[1]]
            for violation in violations:
                bad[algorithm, kind] += 1
                tqdm.write(f"seed {seed}: {algorithm}, {kind}: {violation}")
    print(table(runs, bad))
    print(f"{len(seeds)} runs in {time.monotonic() - start_s:.0f} s, {sum(bad.values())} violations")
    return int(bool(bad))


def table(runs: Counter[tuple[str, str]], bad: Counter[tuple[str, str]]) -> str:
    def cells() -> Iterator[list[str]]:
        for algorithm in ALGORITHMS:
            yield [
                algorithm,
                *(
                    f"{runs[algorithm, kind]}" + (f" ({bad[algorithm, kind]} bad)" if bad[algorithm, kind] else "")
                    for kind in FAULTS
                ),
            ]

    return text_table([["", *FAULTS], *cells()], num_head_rows=1)


if __name__ == "__main__":
    sys.exit(main())
