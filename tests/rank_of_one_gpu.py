"""One rank of a job over NCCL in which all ranks share one GPU; rank 0 compares the results with the oracle's.

Started by torchrun. Arguments: the backend, "nccl", or "gloo" for ranks on the CPU; and the names of the cases. If a
check fails, the error is printed, and the other cases still run. If a body raises, the job ends.
"""

import faulthandler
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import averaging
import q_adam_life
import test_ddp
import test_power_sgd
import torchbagua as tb
from averaging import Normed
from diloco_oracle import check_rounds, fragments_of
from one_gpu import begin_rank
from test_decentralized import check_decentralized, check_low_precision
from training import Tower, build, train

TIMEOUT = timedelta(seconds=60)
STACKS_AFTER_S = 100.0  # the job ends then
NODES = [0, 0, 1, 1]


@dataclass(frozen=True)
class Case:
    """A training on every rank.

    Attributes:
        body: trains on one rank; returns what the check needs. If it raises, no other case runs.
        check: checks the results of all ranks, in rank order.
    """

    body: Callable[[dist.ProcessGroup, torch.device], Any]
    check: Callable[[list[Any]], object]


def by_number_of_ranks() -> dict[int, list[str]]:
    """Return the names of the cases to run on each number of ranks.

    NCCL does not sum in rank order. If a check compares a full-precision mean over all ranks with the oracle, the case
    runs on two ranks, where both orders of summation have the same result. These means are of gradients in QAdam's
    warm-up, of weights, and of the buffers in DiLoCo's rounds, which send weights in 4 bits. All other cases run on
    four ranks.
    """
    return {2: TWO_RANKS, 4: [name for name in CASES if name not in TWO_RANKS]}


def gradients(algorithm: Any, nodes: Sequence[int] | None = None) -> Case:
    """Averaged gradients: every average equals the oracle's."""
    model = build(Tower)

    def body(group: dist.ProcessGroup, device: torch.device) -> Any:
        return train(group, model.to(device), algorithm, nodes=nodes, bucket_cap_mb=0.01)

    averaged_by = nodes if algorithm.hierarchical else None
    return Case(body, partial(test_ddp.check_runs, algorithm=algorithm, nodes=averaged_by))


def power_sgd(nodes: Sequence[int] | None = None) -> Case:
    """PowerSGD: replicas are equal. On a GPU its matrix products have other last bits than the oracle's."""
    algorithm, model = tb.PowerSGDAlgorithm(rank=3, start_step=1), build(Tower)

    def body(group: dist.ProcessGroup, device: torch.device) -> Any:
        return test_power_sgd.run_training(group, model.to(device), algorithm, nodes=nodes, bucket_cap_mb=0.01)

    def check(runs: list[Any]) -> None:
        for step, averaged in enumerate(runs[0].averaged):
            for name, gradient in averaged.items():
                assert gradient.isfinite().all()
                assert all(torch.equal(run.averaged[step][name], gradient) for run in runs), f"{name}, step {step}"

    return Case(body, check)


def sparse() -> Case:
    """TopK: replicas are equal, and the mean is sparse."""
    model = build(Tower)

    def body(group: dist.ProcessGroup, device: torch.device) -> Any:
        return train(group, model.to(device), tb.TopKAlgorithm(0.1), bucket_cap_mb=0.01, tells_optimizer=True)

    def check(runs: list[Any]) -> None:
        for run in runs:
            for name, gradient in run.averaged[-1].items():
                assert torch.equal(gradient, runs[0].averaged[-1][name]), name
        largest = runs[0].averaged[-1]["layers.1.weight"]
        assert 0 < largest.count_nonzero() < 0.8 * largest.numel()

    return Case(body, check)


def qadam() -> Case:
    """QAdam: gradients and steps equal the oracle's."""
    model = build(Tower)

    def body(group: dist.ProcessGroup, device: torch.device) -> Any:
        trainer = q_adam_life.Trainer(group, model.to(device), bucket_cap_mb=0.01)
        impl = trainer.hook()
        for _ in range(q_adam_life.NUM_STEPS):
            trainer.step()
        impl.close()
        return trainer.life

    def check(lives: list[Any]) -> None:
        device = next(iter(lives[0].weights[0].values())).device
        q_adam_life.check_lives(lives, q_adam_life.initial_of(model.to(device)))

    return Case(body, check)


def weights(
    algorithm: tb.Algorithm, check: Callable[[list[Any]], object], nodes: Sequence[int] | None = None, **options: Any
) -> Case:
    """Averaged weights: every step equals the oracle's."""
    model = build(Normed)

    def body(group: dist.ProcessGroup, device: torch.device) -> Any:
        return averaging.train(group, model.to(device), algorithm, nodes=nodes, **options)

    return Case(body, check)


def diloco(algorithm: tb.DiLoCoAlgorithm) -> Case:
    """DiLoCo: every round equals the oracle's."""
    model = build(Normed)
    fragments: dict[str, int] = {}

    def keep_fragments(trainer: averaging.Trainer, attachment: tb.Attachment) -> None:
        fragments.update(fragments_of(attachment.runner))

    def body(group: dist.ProcessGroup, device: torch.device) -> Any:
        return averaging.train(group, model.to(device), algorithm, num_steps=9, lr=0.01, after_step=keep_fragments)

    return Case(body, lambda traces: check_rounds(traces, algorithm, fragments))


def asynchronous() -> Case:
    """Asynchronous averaging: rounds happen, and all ranks end with the same weights."""
    model = build(Normed)

    def body(group: dist.ProcessGroup, device: torch.device) -> Any:
        num_rounds = 0

        def let_rounds_happen(trainer: averaging.Trainer, attachment: tb.Attachment) -> None:
            nonlocal num_rounds
            num_rounds = attachment.impl.num_rounds
            time.sleep(0.05)

        algorithm = tb.AsyncModelAverageAlgorithm(sync_interval_ms=1)
        trace = averaging.train(group, model.to(device), algorithm, num_steps=30, lr=0.01, after_step=let_rounds_happen)
        return num_rounds, trace.final

    def check(results: list[tuple[int, averaging.Weights]]) -> None:
        assert all(num_rounds > 0 for num_rounds, _ in results)
        averaging.assert_same_weights([final for _, final in results])

    return Case(body, check)


def resumed() -> Case:
    """A state on the GPU from the middle of DiLoCo's round: a run resumes bitwise.

    The body checks this, so that a failure ends the job.
    """
    model, algorithm = build(Normed), tb.DiLoCoAlgorithm(3)

    def body(group: dist.ProcessGroup, device: torch.device) -> None:
        averaging.check_resume(group, model.to(device), algorithm, algorithm, 4, lr=0.01)

    return Case(body, lambda nothing: None)


CASES: dict[str, Callable[[], Case]] = {
    "bytegrad": partial(gradients, tb.ByteGradAlgorithm()),
    "bytegrad over nodes": partial(gradients, tb.ByteGradAlgorithm(), NODES),
    "bytegrad flat over nodes": partial(gradients, tb.ByteGradAlgorithm(hierarchical=False), NODES),
    "four bits": partial(gradients, tb.CompressedAllReduceAlgorithm()),
    "four bits over nodes": partial(gradients, tb.CompressedAllReduceAlgorithm(), NODES),
    "topk": sparse,
    "powersgd": power_sgd,
    "powersgd over nodes": partial(power_sgd, NODES),
    "qadam": qadam,
    "all": partial(
        weights,
        tb.DecentralizedAlgorithm(),
        lambda traces: check_decentralized(traces, "all", 1, None),
    ),
    "shift_one": partial(
        weights,
        tb.DecentralizedAlgorithm(True, "shift_one"),
        lambda traces: check_decentralized(traces, "shift_one", 1, None),
    ),
    "low precision": partial(
        weights, tb.LowPrecisionDecentralizedAlgorithm(), lambda traces: check_low_precision(traces, 1, None)
    ),
    "low precision over nodes": partial(
        weights,
        tb.LowPrecisionDecentralizedAlgorithm(True),
        lambda traces: check_low_precision(traces, 1, NODES),
        NODES,
    ),
    "diloco": partial(diloco, tb.DiLoCoAlgorithm(4)),
    "diloco, fragments": partial(diloco, tb.DiLoCoAlgorithm(4, fragments=2, delay=1)),
    "diloco, resumed": resumed,
    "async": asynchronous,
}


TWO_RANKS = ["qadam", "all", "diloco", "diloco, fragments"]


def run_case(name: str, device: torch.device) -> None:
    """Run a case on all ranks; rank 0 prints what is wrong."""
    case = CASES[name]()
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
