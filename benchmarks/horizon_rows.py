"""The rows of the horizon benchmark, and the trainings of each: rates with one seed, then more seeds at the best rate.

A learning rate is the middle of the inner optimizer's grid times RATE_FACTOR to the power of an integer, its rung.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from convergence_sweep import RATE_FACTOR, TUNING_SEED, Record, best_rung, grow_grid, tuning_losses
from convergence_tasks import SEQUENCES_PER_RANK
from horizon_methods import DDP, Compressed, Method, TopK
from horizon_momentum import DeMo, Dion, SparseMomentum, TwoPhaseDeMo
from horizon_optimizers import OPTIMIZERS
from horizon_weights import Async, Decentralized, DesLoc, DiLoCo, LowPrecision, StreamingDiLoCo

RUNGS = (-2, -1, 0, 1, 2)
SEEDS = (TUNING_SEED, 0, 1)  # the reported seeds; the rate is chosen with the first
MORE_SEEDS = (*SEEDS, 2, 3)  # of the references, for the noise floor


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        inner: the inner optimizer, of OPTIMIZERS.
        method: creates the method.
        sequences: the batch of a worker.
        steps_share: the steps of a training, as a share of the other rows' steps.
        seeds: the reported seeds.
        rate_of: the row whose best rate this row uses; it is then trained with the tuning seed alone.
    """

    label: str
    inner: str
    method: Callable[[], Method]
    sequences: int = SEQUENCES_PER_RANK
    steps_share: float = 1.0
    seeds: Sequence[int] = SEEDS
    rate_of: str | None = None

    def settings(self) -> str:
        """Describe everything that determines a training, apart from the settings of the file."""
        return f"{self.method()}, {self.inner}, {self.sequences} sequences, steps {self.steps_share:g}"


@dataclass(frozen=True)
class Trial:
    """One training."""

    row: str
    rung: int
    seed: int

    @property
    def rate(self) -> float:
        return OPTIMIZERS[ROWS[self.row].inner].middle_rate * RATE_FACTOR**self.rung


def _diloco(inner: str, inner_steps: int, label: str = "", **arguments: Any) -> Row:
    return Row(f"DiLoCo, {inner_steps} steps{label}", inner, partial(DiLoCo, inner_steps, **arguments))


def _two_bits(inner: str, inner_steps: int) -> Row:
    return _diloco(inner, inner_steps, ", 2 bits", codec="two_bits", decay=0.95)


def _topk(inner: str, ratio: float, decay: float = 1.0) -> Row:
    label = f"TopK, ratio {ratio:g}" + f", d = {decay:g}" * (decay != 1)
    return Row(label, inner, partial(TopK, decay=decay, ratio=ratio))


_LOCAL_SGD: dict[str, Any] = {"codec": None, "outer_lr": 1.0, "outer_momentum": 0.0}

MAIN = {
    "adamw_ddp": Row("DDP", "adamw", DDP, seeds=MORE_SEEDS),
    "muon_ddp": Row("DDP", "muon", DDP, seeds=MORE_SEEDS),
    "muon_diloco_30": _diloco("muon", 30),
    "muon_diloco_100": _diloco("muon", 100),
    "muon_diloco_10": _diloco("muon", 10),
    "muon_diloco_30_2bits": _two_bits("muon", 30),
    "muon_diloco_100_2bits": _two_bits("muon", 100),
    "muon_diloco_30_float32": _diloco("muon", 30, ", float32", codec=None),
    "muon_local_sgd_30": Row("LocalSGD, 30 steps", "muon", partial(DiLoCo, 30, **_LOCAL_SGD)),
    "muon_local_sgd_100": Row("LocalSGD, 100 steps", "muon", partial(DiLoCo, 100, **_LOCAL_SGD)),
    "muon_diloco_30_short_last": _diloco("muon", 30, ", 10 in the last tenth", short_last=0.1),
    "muon_bytegrad": Row("ByteGrad", "muon", partial(Compressed, "minmax_uint8")),
    "muon_4bits": Row("CompressedAllReduce, 4 bits", "muon", partial(Compressed, "minmax_uint4")),
    "muon_decentralized": Row("Decentralized, all", "muon", Decentralized),
    "muon_shift_one": Row("Decentralized, shift_one", "muon", partial(Decentralized, mode="shift_one")),
    "muon_async": Row("Async", "muon", Async),
    "adamw_diloco_30": _diloco("adamw", 30),
    "adamw_decentralized": Row("Decentralized, all", "adamw", Decentralized),
    "adamw_decentralized_on_time": Row("Decentralized, all, on time", "adamw", partial(Decentralized, on_time=True)),
    "adamw_decentralized_moments": Row(
        "Decentralized, all, moments every 10", "adamw", partial(Decentralized, moments_every=10)
    ),
    "adamw_decentralized_exact_last": Row(
        "Decentralized, all, last tenth exact", "adamw", partial(Decentralized, exact_last=0.1)
    ),
    "adamw_async": Row("Async", "adamw", Async),
    "adamw_async_exact_last": Row("Async, last tenth exact", "adamw", partial(Async, exact_last=0.1)),
    "adamw_ddp_third": Row("DDP, 3 sequences instead of 8", "adamw", DDP, sequences=3),
    "adamw_ddp_thrice": Row("DDP, 24 sequences, a third of the steps", "adamw", DDP, sequences=24, steps_share=1 / 3),
}

MORE = {
    "muon_ddp_third": Row("DDP, 3 sequences instead of 8", "muon", DDP, sequences=3),
    "muon_ddp_thrice": Row("DDP, 24 sequences, a third of the steps", "muon", DDP, sequences=24, steps_share=1 / 3),
    "adamw_bytegrad": Row("ByteGrad", "adamw", partial(Compressed, "minmax_uint8")),
    "adamw_4bits": Row("CompressedAllReduce, 4 bits", "adamw", partial(Compressed, "minmax_uint4")),
    "muon_4bits_feedback": Row(
        "CompressedAllReduce, 4 bits, error feedback", "muon", partial(Compressed, "minmax_uint4", decay=1.0)
    ),
    "adamw_diloco_10": _diloco("adamw", 10),
    "adamw_diloco_100": _diloco("adamw", 100),
    "muon_diloco_200": _diloco("muon", 200),
    "muon_diloco_10_2bits": _two_bits("muon", 10),
    "muon_diloco_30_2bits_table": _diloco("muon", 30, ", 2 bits and a table", codec="two_bits_table", decay=0.95),
    "muon_diloco_30_2bits_whole": _diloco("muon", 30, ", 2 bits, d = 1", codec="two_bits", decay=1.0),
    "adamw_local_sgd_30": Row("LocalSGD, 30 steps", "adamw", partial(DiLoCo, 30, **_LOCAL_SGD)),
    "adamw_des_loc_30": Row("DES-LOC, 30, 90 and 180 steps", "adamw", partial(DesLoc, 30, **_LOCAL_SGD)),
    "mt_dao_30": Row("MT-DAO, 30 steps", "slow_adamw", partial(DesLoc, 30, moments_every=(30, 30), **_LOCAL_SGD)),
    "adamw_shift_one": Row("Decentralized, shift_one", "adamw", partial(Decentralized, mode="shift_one")),
    "adamw_low_precision": Row("LowPrecisionDecentralized", "adamw", LowPrecision),
    "muon_low_precision": Row("LowPrecisionDecentralized", "muon", LowPrecision),
    "demo": Row("DeMo, 32 coefficients of a chunk", "sign", DeMo),
    "demo_muon": Row("DeMo and Muon, 32 coefficients of a chunk", "muon_of_sums", DeMo),
    "demo_without_dct": Row("DeMo without the DCT, 32 elements of a chunk", "sign", SparseMomentum),
    "demo_16": Row("DeMo, 16 coefficients of a chunk", "sign", partial(DeMo, 16)),
    "demo_muon_16": Row("DeMo and Muon, 16 coefficients of a chunk", "muon_of_sums", partial(DeMo, 16)),
    "demo_muon_two_phase": Row("DeMo and Muon, 32 coefficients, two phases", "muon_of_sums", TwoPhaseDeMo),
    "demo_muon_without_dct": Row("DeMo and Muon without the DCT, 32 elements", "muon_of_sums", SparseMomentum),
    **{f"topk_sign_{ratio}": _topk("sign", ratio) for ratio in (0.005, 0.01, 0.02, 0.05)},
    **{f"topk_muon_{ratio}": _topk("muon_of_sums", ratio) for ratio in (0.01, 0.02, 0.05, 0.1)},
    **{f"topk_sign_{ratio}_decay_0.999": _topk("sign", ratio, 0.999) for ratio in (0.01, 0.05)},
    **{f"topk_muon_{ratio}_decay_0.999": _topk("muon_of_sums", ratio, 0.999) for ratio in (0.01, 0.02, 0.05)},
    "topk_muon_0.01_decay_0.99": _topk("muon_of_sums", 0.01, 0.99),
    "muon_topk": _topk("muon", 0.01),
    "muon_1bit": Row("CompressedAllReduce, 1 bit, error feedback", "muon", partial(Compressed, "sign1bit", decay=1.0)),
    "muon_diloco_3": _diloco("muon", 3),
    "muon_diloco_5": _diloco("muon", 5),
    "muon_diloco_30_delay": Row("DiLoCo, 30 steps, delay 10", "muon", partial(StreamingDiLoCo, 30, delay=10)),
    "muon_diloco_30_fragments": Row(
        "DiLoCo, 30 steps, 4 fragments, delay 5", "muon", partial(StreamingDiLoCo, 30, fragments=4, delay=5)
    ),
    "dion_rank_1": Row("Dion, rank 1", "orthogonal", partial(Dion, 1)),
    "dion_rank_1_full_size": Row("Dion, rank 1, updates 8 times", "orthogonal", partial(Dion, 1, has_full_size=True)),
    "adamw_async_on_time": Row("Async, on time", "adamw", partial(Async, delay=0)),
    "adamw_async_moments": Row("Async, moments every 12", "adamw", partial(Async, moments_every=12)),
}

# At the best rate of a row with the same rounds. The first is plain averaging.
OUTER = {
    f"outer_{inner_steps}_{outer_lr}_{momentum}{'_nesterov' * nesterov}": Row(
        f"rate {outer_lr:g}, {'Nesterov ' * nesterov}momentum {momentum:g}" if momentum else "plain averaging",
        "muon",
        partial(DiLoCo, inner_steps, codec=None, outer_lr=outer_lr, outer_momentum=momentum, nesterov=bool(nesterov)),
        rate_of=f"muon_diloco_{inner_steps}",
    )
    for inner_steps in (10, 30, 100)
    for outer_lr, momentum, nesterov in (
        (1.0, 0.0, 0),
        (1.0, 0.3, 1),
        (1.0, 0.6, 1),
        (0.7, 0.3, 1),
        (0.7, 0.6, 1),
        (0.7, 0.9, 1),
        (0.7, 0.6, 0),
        (0.4, 0.8, 1),
        (0.4, 0.9, 1),
    )
}

OUTER_STEPS = {name: int(name.split("_")[1]) for name in OUTER}  # between rounds

ROWS = MAIN | MORE | OUTER
SETS: dict[str, Iterable[str]] = {"main": MAIN, "more": MORE, "outer": OUTER, **{name: [name] for name in ROWS}}


def is_current(record: Record) -> bool:
    """Return whether a row, as it is now, would train this again."""
    name = record["contestant"]
    if name not in ROWS or record["settings"] != ROWS[name].settings():
        return False
    return math.isclose(record["rate"], Trial(name, record["rung"], record["seed"]).rate)


def missing_trials(row: str, records: Mapping[str, Sequence[Record]], rungs: Sequence[int], grows: bool) -> list[Trial]:
    """Return the trainings that a row lacks now; more may follow. `records` are by row."""
    rate_of = ROWS[row].rate_of
    tuned = tuning_losses(records.get(rate_of or row, ()))
    lacking = [rung for rung in rungs if rung not in tuned] or (grow_grid(tuned) if grows else [])
    best = best_rung(tuned)
    if rate_of is None and lacking:
        return [Trial(row, rung, TUNING_SEED) for rung in lacking]
    if lacking or best is None:
        return []  # the other row is not finished, or the row diverges at every rate
    done = {record["seed"] for record in records.get(row, ()) if record["rung"] == best}
    seeds = [TUNING_SEED] if rate_of else ROWS[row].seeds
    return [Trial(row, best, seed) for seed in seeds if seed not in done]
