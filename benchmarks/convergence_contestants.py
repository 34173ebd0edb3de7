"""Who competes in the convergence benchmark. A line of CONTESTANTS adds one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import torchbagua as tb
from contestants import ONE_BUCKET_MB, cast_hook, register_powersgd
from convergence_tasks import TASKS

ASYNC_INTERVAL_MS = 100
Wrap = Callable[[nn.Module], nn.Module]
# Of what is wrapped, which is a DDP for all but those who shard.
Start = Callable[[Any, Optimizer, int], tuple[Optimizer, tb.Attachment | None]]


@dataclass(frozen=True)
class Trainee:
    """A contestant at work on a model. `close` is collective; after it all ranks have the same weights."""

    module: nn.Module
    optimizer: Optimizer
    attachment: tb.Attachment | None

    @property
    def num_rounds(self) -> int | None:
        """Rounds of averaging so far, of the algorithm that goes by the clock; None: of others."""
        goes_by_the_clock = self.attachment and isinstance(self.attachment.algorithm, tb.AsyncModelAverageAlgorithm)
        return self.attachment.impl.num_rounds if goes_by_the_clock else None

    def close(self) -> None:
        if self.attachment:
            self.attachment.detach()


@dataclass(frozen=True)
class Contestant:
    """A row of the tables.

    Attributes:
        label: of the row.
        start: makes what is wrapped average as this contestant does, from a number of warm-up steps on; returns the
            optimizer to train with, and what `tb.attach` returned.
        describe: the settings for a number of warm-up steps. A sweep trains anew whoever has changed them.
        warm_up: share of all steps in which gradients are averaged in full precision.
        tasks: in which it competes.
        bucket_cap_mb: DDP's; None: its default.
        steps_a_round: steps from one mean to the next; a time is of whole rounds.
        wrap: makes of the model what trains it; None: a DDP.
    """

    label: str
    start: Start
    describe: Callable[[int], str]
    warm_up: float = 0.0
    tasks: Sequence[str] = ("gpt", "digits", "lstm")
    bucket_cap_mb: float | None = None
    steps_a_round: int = 1
    wrap: Wrap | None = None

    def warmup_steps(self, num_steps: int) -> int:
        return round(self.warm_up * num_steps)

    def begin(self, model: nn.Module, build_optimizer: Callable[[Any], Optimizer], warmup_steps: int) -> Trainee:
        """Wrap `model`, whose weights are the same on all ranks. Collective."""
        wrap = self.wrap or partial(DistributedDataParallel, bucket_cap_mb=self.bucket_cap_mb, init_sync=False)
        module = wrap(model)
        optimizer, attachment = self.start(module, build_optimizer(module.parameters()), warmup_steps)
        return Trainee(module, optimizer, attachment)


def attached(label: str, algorithm: tb.Algorithm | Callable[[int], tb.Algorithm], **options: Any) -> Contestant:
    """An algorithm, or what makes one of the number of warm-up steps."""

    def of(warmup_steps: int) -> tb.Algorithm:
        return algorithm if isinstance(algorithm, tb.Algorithm) else algorithm(warmup_steps)

    def start(ddp: DistributedDataParallel, optimizer: Optimizer, warmup_steps: int) -> tuple[Optimizer, tb.Attachment]:
        return optimizer, tb.attach(ddp, optimizer, of(warmup_steps))

    return Contestant(label, start, lambda warmup_steps: repr(of(warmup_steps)), **options)


def once_a_round(label: str, algorithm: tb.DiLoCoAlgorithm) -> Contestant:
    """An algorithm that averages weights once in some steps, for the task that is long enough."""
    return attached(label, algorithm, tasks=["small_gpt"], steps_a_round=algorithm.inner_steps)


def sharded(label: str, algorithm: tb.Algorithm | None, **options: Any) -> Contestant:
    """fully_shard of each layer of the GPT and of the rest: torch's own, or with an algorithm and options of attach."""

    def wrap(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)  # type: ignore[return-value]  # it is the model, of another class

    def start(module: nn.Module, optimizer: Optimizer, _: int) -> tuple[Optimizer, tb.Attachment | None]:
        return optimizer, None if algorithm is None else tb.fsdp.attach(module, optimizer, algorithm, **options)

    return Contestant(label, start, lambda _: f"fully_shard, {algorithm}, {options}", tasks=["gpt"], wrap=wrap)


def hooked(label: str, register: Callable[[DistributedDataParallel, int], None], **options: Any) -> Contestant:
    """Plain DDP with a communication hook of torch, or with none."""

    def start(ddp: DistributedDataParallel, optimizer: Optimizer, warmup_steps: int) -> tuple[Optimizer, None]:
        register(ddp, warmup_steps)
        return optimizer, None

    return Contestant(label, start, lambda warmup_steps: f"{label}, warm-up {warmup_steps}", **options)


def qadam(label: str, **arguments: Any) -> Contestant:
    """QAdam in Adam's place. Its warm-up is a fifth of the steps; 1-bit Adam (arXiv 2102.02888) takes 15 to 25 %."""

    def start(ddp: DistributedDataParallel, adam: Optimizer, warmup_steps: int) -> tuple[Optimizer, tb.Attachment]:
        optimizer = tb.QAdamOptimizer.wrap(adam, max(1, warmup_steps))
        return optimizer, tb.attach(ddp, optimizer, tb.QAdamAlgorithm(optimizer, **arguments))

    def describe(warmup_steps: int) -> str:
        return f"QAdamAlgorithm({arguments}), warm-up {warmup_steps}"

    return Contestant(label, start, describe, warm_up=0.2, tasks=["gpt"])


BASELINE = "ddp"
CONTESTANTS: dict[str, Contestant] = {
    BASELINE: hooked("DDP, float32", lambda ddp, _: None, tasks=list(TASKS)),
    # Its records say flat. It runs on one node, where it is flat anyway.
    "gradient_allreduce": attached("GradientAllReduce", tb.GradientAllReduceAlgorithm(in_rank_order=True)),
    "bf16": hooked("DDP, bf16 hook", lambda ddp, _: ddp.register_comm_hook(None, cast_hook(torch.bfloat16))),
    "fp16": hooked("DDP, fp16 hook", lambda ddp, _: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)),
    "powersgd_hook": hooked(
        "DDP, PowerSGD hook of rank 4",
        lambda ddp, warmup_steps: register_powersgd(ddp, rank=4, start_step=warmup_steps),
        warm_up=0.1,
        bucket_cap_mb=ONE_BUCKET_MB,
    ),
    "bytegrad": attached("ByteGrad", tb.ByteGradAlgorithm()),
    "bytegrad_feedback": attached("ByteGrad, error feedback", tb.ByteGradAlgorithm(error_feedback=True)),
    "4bits": attached("CompressedAllReduce, 4 bits", tb.CompressedAllReduceAlgorithm()),
    "4bits_feedback": attached(
        "CompressedAllReduce, 4 bits, error feedback", tb.CompressedAllReduceAlgorithm(error_feedback=True)
    ),
    "topk": attached("TopK, 1 %", tb.TopKAlgorithm(0.01)),
    "powersgd": attached(
        "PowerSGD, rank 4", lambda warmup_steps: tb.PowerSGDAlgorithm(start_step=warmup_steps), warm_up=0.1
    ),
    "qadam": qadam("QAdam"),
    "qadam_1bit": qadam("QAdam, 1 bit", compression="sign1bit", error_feedback=True),
    "decentralized": attached("Decentralized, all", tb.DecentralizedAlgorithm()),
    "shift_one": attached("Decentralized, shift_one", tb.DecentralizedAlgorithm(peer_selection_mode="shift_one")),
    "low_precision": attached("LowPrecisionDecentralized", tb.LowPrecisionDecentralizedAlgorithm()),
    "async": attached(
        f"AsyncModelAverage, {ASYNC_INTERVAL_MS} ms",
        lambda warmup_steps: tb.AsyncModelAverageAlgorithm(
            sync_interval_ms=ASYNC_INTERVAL_MS, warmup_steps=warmup_steps
        ),
        warm_up=0.1,
    ),
    "fsdp": sharded("FSDP2, float32", None),
    "fsdp_gradients_8": sharded("FSDP2, gradients in 8 bits", tb.ByteGradAlgorithm()),
    **{
        f"fsdp_weights_{bits}{'_gradients_8' * (gradients == 8)}": sharded(
            f"FSDP2, weights in {bits} bits, gradients in {gradients}",
            tb.ByteGradAlgorithm() if gradients == 8 else tb.CompressedAllReduceAlgorithm(None),
            quantize_weights=f"minmax_uint{bits}",
        )
        for bits in (8, 4)
        for gradients in (32, 8)
    },
    "diloco": once_a_round("DiLoCo, 30 steps", tb.DiLoCoAlgorithm()),
    "diloco_float32": once_a_round("DiLoCo, 30 steps, float32", tb.DiLoCoAlgorithm(compression=None)),
    "diloco_10": once_a_round("DiLoCo, 10 steps", tb.DiLoCoAlgorithm(10)),
    "diloco_100": once_a_round("DiLoCo, 100 steps", tb.DiLoCoAlgorithm(100)),
    "local_sgd": once_a_round("LocalSGD, 30 steps", tb.LocalSGDAlgorithm(30)),
    "streaming": once_a_round("DiLoCo, 3 fragments, delay 5", tb.DiLoCoAlgorithm(fragments=3, delay=5)),
    **{
        f"diloco_{inner_steps}_momentum_{momentum}": once_a_round(
            f"DiLoCo, {inner_steps} steps, momentum {momentum}",
            tb.DiLoCoAlgorithm(inner_steps, outer_momentum=momentum),
        )
        for inner_steps in (10, 30, 100)
        for momentum in (0.3, 0.9)
    },
}
