"""Who competes in the convergence benchmark: an algorithm, and the optimizer that it is attached with."""

from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Optimizer

import torchbagua as tb
from torchbagua.cli.demo.train import WARMUP_STEPS

# Of all steps; 1-bit Adam (arXiv 2102.02888) takes 15 to 25 %.
QADAM_WARM_UPS = {"8 bits": (0.05, 0.2), "1 bit": (0.05, 0.2, 0.5)}


@dataclass(frozen=True)
class Contestant:
    """`attach` is given the optimizer that `wrap` makes of the task's, and the algorithm for that one."""

    algorithm: Callable[[Optimizer], tb.Algorithm]
    wrap: Callable[[Optimizer], Optimizer] = lambda optimizer: optimizer


Contestants = dict[str, Contestant]  # by label; the first is what the others are compared with


def averaging(num_steps: int, sync_interval_ms: int) -> Contestants:
    """Every algorithm that takes any optimizer."""
    asynchronous = tb.AsyncModelAverageAlgorithm(
        sync_interval_ms=sync_interval_ms, warmup_steps=min(WARMUP_STEPS, num_steps // 4)
    )
    algorithms = {
        "GradientAllReduce": tb.GradientAllReduceAlgorithm(),
        "ByteGrad": tb.ByteGradAlgorithm(),
        "Decentralized, all": tb.DecentralizedAlgorithm(),
        "Decentralized, shift_one": tb.DecentralizedAlgorithm(peer_selection_mode="shift_one"),
        "LowPrecisionDecentralized": tb.LowPrecisionDecentralizedAlgorithm(),
        f"AsyncModelAverage, {sync_interval_ms} ms": asynchronous,
    }
    return {label: Contestant(lambda _, algorithm=algorithm: algorithm) for label, algorithm in algorithms.items()}


def qadam(num_steps: int) -> Contestants:
    """Adam, and QAdam in 8 bits and in one after warm-ups of several lengths, for a task that is trained with AdamW."""
    contestants = {"GradientAllReduce": Contestant(lambda _: tb.GradientAllReduceAlgorithm())}
    arguments = {"8 bits": {}, "1 bit": {"compression": "sign1bit", "error_feedback": True}}
    for label, own in arguments.items():
        for warm_up in QADAM_WARM_UPS[label]:
            warmup_steps = max(1, round(num_steps * warm_up))
            contestants[f"QAdam, {label}, warm-up {warmup_steps}"] = Contestant(
                lambda adam, own=own: tb.QAdamAlgorithm(adam, **own),
                lambda adam, warmup_steps=warmup_steps: tb.QAdamOptimizer.wrap(adam, warmup_steps),
            )
    return contestants
