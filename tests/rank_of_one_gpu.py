"""One rank of a job over NCCL in which all ranks share one GPU; rank 0 compares the results with the oracle's.

Started by torchrun. Arguments: the backend, "nccl", or "gloo" for ranks on the CPU; and the names of the cases. If a
check fails, the error is printed, and the other cases still run. If a body raises, the job ends.
"""

import faulthandler
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import averaging
import q_adam_life
import test_ddp
import torchbagua as tb
from averaging import Normed
from diloco_oracle import check_rounds, fragments_of
from one_gpu import begin_rank
from test_decentralized import check_decentralized, check_low_precision
from training import Tower, build, train

TIMEOUT = timedelta(seconds=60)
STACKS_AFTER_S = 100.0  # the job ends then


def by_number_of_ranks() -> dict[int, list[str]]:
    """Return the names of the cases to run on each number of ranks.

    NCCL does not sum in rank order. If a check compares a full-precision mean over all ranks with the oracle, the case
    runs on two ranks, where both orders of summation have the same result. These means are of gradients in QAdam's
    warm-up, of weights, and of the buffers in DiLoCo's rounds, which send weights in 4 bits. All other cases run on
    four ranks.
    """
    return {2: TWO_RANKS, 4: [name for name in CASES if name not in TWO_RANKS]}


class Case(NamedTuple):
    """A training on every rank, and the check of the results of all ranks, in rank order.

    If `body` raises, no other case runs.
    """

    body: Callable[[dist.ProcessGroup, torch.device], Any]
    check: Callable[[list[Any]], object]


NODES = [0, 0, 1, 1]


def gradients(
    algorithm: Any, nodes: Sequence[int] | None = None, check: Callable[[list[Any]], object] | None = None
) -> Case:
    """Averaged gradients: every average equals the oracle's."""
    averaged_by = nodes if algorithm.hierarchical else None
    return Case(
        lambda group, device: train(
            group, build(Tower).to(device), algorithm, nodes=nodes, bucket_cap_mb=0.01, tells_optimizer=True
        ),
        check or partial(test_ddp.check_runs, algorithm=algorithm, nodes=averaged_by),
    )


def check_replicas(runs: list[Any]) -> None:
    """Replicas are equal. On a GPU PowerSGD's matrix products have other last bits than the oracle's."""
    for step, averaged in enumerate(runs[0].averaged):
        for name, gradient in averaged.items():
            assert gradient.isfinite().all()
            assert all(torch.equal(run.averaged[step][name], gradient) for run in runs), f"{name}, step {step}"
    largest = runs[0].averaged[-1]["layers.1.weight"]
    assert largest.any()


def qadam(group: dist.ProcessGroup, device: torch.device) -> tuple[q_adam_life.Life, torch.device]:
    trainer = q_adam_life.Trainer(group, build(Tower).to(device), bucket_cap_mb=0.01)
    impl = trainer.hook()
    for _ in range(q_adam_life.NUM_STEPS):
        trainer.step()
    impl.close()
    return trainer.life, device


def check_q_adam(results: list[tuple[q_adam_life.Life, torch.device]]) -> None:
    """Gradients and steps equal the oracle's."""
    q_adam_life.check_lives([life for life, _ in results], q_adam_life.initial_of(build(Tower).to(results[0][1])))


def weights(
    algorithm: tb.Algorithm, check: Callable[[list[Any]], object], nodes: Sequence[int] | None = None, **options: Any
) -> Case:
    """Averaged weights: every step, or round, equals the oracle's."""

    def body(group: dist.ProcessGroup, device: torch.device) -> Any:
        return averaging.train(group, build(Normed).to(device), algorithm, nodes=nodes, **options)

    return Case(body, check)


def diloco(algorithm: tb.DiLoCoAlgorithm) -> Case:
    fragments: dict[str, int] = {}

    def keep_fragments(trainer: averaging.Trainer, attachment: tb.Attachment) -> None:
        fragments.update(fragments_of(attachment.runner))

    check = partial(check_rounds, algorithm=algorithm, fragments=fragments)
    return weights(algorithm, check, num_steps=9, lr=0.01, after_step=keep_fragments)


def asynchronous() -> Case:
    """Rounds happen, and all ranks end with the same weights."""
    num_rounds: list[int] = []

    def let_rounds_happen(trainer: averaging.Trainer, attachment: tb.Attachment) -> None:
        num_rounds.append(attachment.impl.num_rounds)
        time.sleep(0.05)

    def check(traces: list[averaging.Trace]) -> None:
        assert num_rounds[-1] > 0
        averaging.assert_same_weights([trace.final for trace in traces])

    algorithm = tb.AsyncModelAverageAlgorithm(sync_interval_ms=1)
    return weights(algorithm, check, num_steps=30, lr=0.01, after_step=let_rounds_happen)


def resume(group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that a run resumes bitwise from a state on the GPU from the middle of DiLoCo's round."""
    algorithm = tb.DiLoCoAlgorithm(3)
    averaging.check_resume(group, build(Normed).to(device), algorithm, algorithm, 4, lr=0.01)


POWER_SGD, LOW = tb.PowerSGDAlgorithm(rank=3, start_step=1), tb.LowPrecisionDecentralizedAlgorithm()
CASES: dict[str, Case] = {
    "bytegrad": gradients(tb.ByteGradAlgorithm()),
    "bytegrad over nodes": gradients(tb.ByteGradAlgorithm(), NODES),
    "bytegrad flat over nodes": gradients(tb.ByteGradAlgorithm(hierarchical=False), NODES),
    "four bits": gradients(tb.CompressedAllReduceAlgorithm()),
    "four bits over nodes": gradients(tb.CompressedAllReduceAlgorithm(), NODES),
    "topk": gradients(tb.TopKAlgorithm(0.1), None, check_replicas),
    "powersgd": gradients(POWER_SGD, None, check_replicas),
    "powersgd over nodes": gradients(POWER_SGD, NODES, check_replicas),
    "qadam": Case(qadam, check_q_adam),
    "all": weights(tb.DecentralizedAlgorithm(), lambda traces: check_decentralized(traces, "all", 1, None)),
    "shift_one": weights(
        tb.DecentralizedAlgorithm(True, "shift_one"),
        lambda traces: check_decentralized(traces, "shift_one", 1, None),
    ),
    "low precision": weights(LOW, lambda traces: check_low_precision(traces, 1, None)),
    "low precision over nodes": weights(LOW, lambda traces: check_low_precision(traces, 1, NODES), NODES),
    "diloco": diloco(tb.DiLoCoAlgorithm(4)),
    "diloco, fragments": diloco(tb.DiLoCoAlgorithm(4, fragments=2, delay=1)),
    "diloco, resumed": Case(resume, lambda nothing: None),
    "async": asynchronous(),
}


TWO_RANKS = ["qadam", "all", "diloco", "diloco, fragments"]


def run_case(name: str, device: torch.device) -> None:
    """Run a case on all ranks; rank 0 prints what is wrong."""
    case = CASES[name]
    group = dist.group.WORLD
    assert group is not None
    start_s = time.monotonic()
    result = case.body(group, device)
    results: list[Any] = [None] * group.size()
    dist.all_gather_object(results, result)
    if group.rank() == 0:
        seconds = time.monotonic() - start_s
        try:
            case.check(results)
        except Exception:
            print(f"wrong: {name}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"right: {name}\nseconds: {seconds:.1f}", flush=True)


def main() -> None:
    backend, *names = sys.argv[1:]
    faulthandler.dump_traceback_later(STACKS_AFTER_S, exit=True)
    torch.set_num_threads(1)
    device = begin_rank(backend, TIMEOUT)
    for name in names:
        run_case(name, device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
