"""The contestants of the convergence benchmark. Each has a line in CONTESTANTS."""

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
# The first argument is the wrapped module: a DDP, unless the contestant shards the model.
Start = Callable[[Any, Optimizer, int], tuple[Optimizer, tb.Attachment | None]]


@dataclass(frozen=True)
class Trainee:
    """A contestant that trains a model. `close` is collective; after it all ranks have the same weights."""

    module: nn.Module
    optimizer: Optimizer
    attachment: tb.Attachment | None

    @property
    def num_rounds(self) -> int | None:
        """The averaging rounds so far of the asynchronous algorithm, which averages at intervals of time; else None."""
        is_asynchronous = self.attachment and isinstance(self.attachment.algorithm, tb.AsyncModelAverageAlgorithm)
        return self.attachment.impl.num_rounds if is_asynchronous else None

    def close(self) -> None:
        if self.attachment:
            self.attachment.detach()


@dataclass(frozen=True)
class Contestant:
    """A row of the tables.

    Attributes:
        label: name of the row.
        start: sets up averaging on the wrapped module, after a number of warm-up steps; returns the optimizer to train
            with, and the result of `tb.attach`.
        describe: returns the settings for a number of warm-up steps. A sweep repeats trainings with changed settings.
        warm_up: fraction of all steps in which gradients are averaged in full precision.
        tasks: tasks that the contestant trains.
        bucket_cap_mb: DDP's; None: its default.
        steps_a_round: steps from one mean to the next; times are of whole rounds.
        wrap: wraps the model for training; None: in a DDP.
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
        """Wrap `model`, which has the same weights on all ranks. Collective."""
        wrap = self.wrap or partial(DistributedDataParallel, bucket_cap_mb=self.bucket_cap_mb, init_sync=False)
        module = wrap(model)
        optimizer, attachment = self.start(module, build_optimizer(module.parameters()), warmup_steps)
        return Trainee(module, optimizer, attachment)


def use_attach(label: str, algorithm: tb.Algorithm | Callable[[int], tb.Algorithm], **options: Any) -> Contestant:
    """Return a contestant for an algorithm, or for a function that creates it from the number of warm-up steps."""

    def build(warmup_steps: int) -> tb.Algorithm:
        return algorithm if isinstance(algorithm, tb.Algorithm) else algorithm(warmup_steps)

    def start(ddp: DistributedDataParallel, optimizer: Optimizer, warmup_steps: int) -> tuple[Optimizer, tb.Attachment]:
        return optimizer, tb.attach(ddp, optimizer, build(warmup_steps))

    return Contestant(label, start, lambda warmup_steps: repr(build(warmup_steps)), **options)


def average_once_a_round(label: str, algorithm: tb.DiLoCoAlgorithm) -> Contestant:
    """Return a contestant that averages weights once every few steps, for the task that is long enough."""
    return use_attach(label, algorithm, tasks=["small_gpt"], steps_a_round=algorithm.inner_steps)


def shard_layers(label: str, algorithm: tb.Algorithm | None, **options: Any) -> Contestant:
    """Return a contestant that calls fully_shard on each layer and on the whole GPT: alone, or with an algorithm."""

    def wrap(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)  # type: ignore[return-value]  # it is the model, with another class

    def start(module: nn.Module, optimizer: Optimizer, _: int) -> tuple[Optimizer, tb.Attachment | None]:
        return optimizer, None if algorithm is None else tb.fsdp.attach(module, optimizer, algorithm, **options)

    return Contestant(label, start, lambda _: f"fully_shard, {algorithm}, {options}", tasks=["gpt"], wrap=wrap)


def use_hook(label: str, register: Callable[[DistributedDataParallel, int], None], **options: Any) -> Contestant:
    """Return a contestant for plain DDP with a communication hook of torch, or without a hook."""

    def start(ddp: DistributedDataParallel, optimizer: Optimizer, warmup_steps: int) -> tuple[Optimizer, None]:
        register(ddp, warmup_steps)
        return optimizer, None

    return Contestant(label, start, lambda warmup_steps: f"{label}, warm-up {warmup_steps}", **options)


def qadam(label: str, **arguments: Any) -> Contestant:
    """QAdam instead of Adam. Its warm-up is a fifth of the steps; 1-bit Adam (arXiv 2102.02888) uses 15 to 25 %."""

    def start(ddp: DistributedDataParallel, adam: Optimizer, warmup_steps: int) -> tuple[Optimizer, tb.Attachment]:
        optimizer = tb.QAdamOptimizer.wrap(adam, max(1, warmup_steps))
        return optimizer, tb.attach(ddp, optimizer, tb.QAdamAlgorithm(optimizer, **arguments))

    def describe(warmup_steps: int) -> str:
        return f"QAdamAlgorithm({arguments}), warm-up {warmup_steps}"

    return Contestant(label, start, describe, warm_up=0.2, tasks=["gpt"])


BASELINE = "ddp"
CONTESTANTS: dict[str, Contestant] = {
    BASELINE: use_hook("DDP, float32", lambda ddp, _: None, tasks=list(TASKS)),
    # Its records contain hierarchical=False. On one node the all-reduce is always flat.
    "gradient_allreduce": use_attach("GradientAllReduce", tb.GradientAllReduceAlgorithm(in_rank_order=True)),
    "bf16": use_hook("DDP, bf16 hook", lambda ddp, _: ddp.register_comm_hook(None, cast_hook(torch.bfloat16))),
    "fp16": use_hook("DDP, fp16 hook", lambda ddp, _: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)),
    "powersgd_hook": use_hook(
        "DDP, PowerSGD hook of rank 4",
        lambda ddp, warmup_steps: register_powersgd(ddp, rank=4, start_step=warmup_steps),
        warm_up=0.1,
        bucket_cap_mb=ONE_BUCKET_MB,
    ),
    "bytegrad": use_attach("ByteGrad", tb.ByteGradAlgorithm()),
    "bytegrad_feedback": use_attach("ByteGrad, error feedback", tb.ByteGradAlgorithm(error_feedback=True)),
    "4bits": use_attach("CompressedAllReduce, 4 bits", tb.CompressedAllReduceAlgorithm()),
    "4bits_feedback": use_attach(
        "CompressedAllReduce, 4 bits, error feedback", tb.CompressedAllReduceAlgorithm(error_feedback=True)
    ),
    "topk": use_attach("TopK, 1 %", tb.TopKAlgorithm(0.01)),
    "powersgd": use_attach(
        "PowerSGD, rank 4", lambda warmup_steps: tb.PowerSGDAlgorithm(start_step=warmup_steps), warm_up=0.1
    ),
    "qadam": qadam("QAdam"),
    "qadam_1bit": qadam("QAdam, 1 bit", compression="sign1bit", error_feedback=True),
    "decentralized": use_attach("Decentralized, all", tb.DecentralizedAlgorithm()),
    "shift_one": use_attach("Decentralized, shift_one", tb.DecentralizedAlgorithm(peer_selection_mode="shift_one")),
    "low_precision": use_attach("LowPrecisionDecentralized", tb.LowPrecisionDecentralizedAlgorithm()),
    "async": use_attach(
        f"AsyncModelAverage, {ASYNC_INTERVAL_MS} ms",
        lambda warmup_steps: tb.AsyncModelAverageAlgorithm(
            sync_interval_ms=ASYNC_INTERVAL_MS, warmup_steps=warmup_steps
        ),
        warm_up=0.1,
    ),
    "fsdp": shard_layers("FSDP2, float32", None),
    "fsdp_gradients_8": shard_layers("FSDP2, gradients in 8 bits", tb.ByteGradAlgorithm()),
    **{
        f"fsdp_weights_{bits}{'_gradients_8' * (gradients == 8)}": shard_layers(
            f"FSDP2, weights in {bits} bits, gradients in {gradients}",
            tb.ByteGradAlgorithm() if gradients == 8 else tb.CompressedAllReduceAlgorithm(None),
            quantize_weights=f"minmax_uint{bits}",
        )
        for bits in (8, 4)
        for gradients in (32, 8)
    },
    "diloco": average_once_a_round("DiLoCo, 30 steps", tb.DiLoCoAlgorithm()),
    "diloco_float32": average_once_a_round("DiLoCo, 30 steps, float32", tb.DiLoCoAlgorithm(compression=None)),
    "diloco_10": average_once_a_round("DiLoCo, 10 steps", tb.DiLoCoAlgorithm(10)),
    "diloco_100": average_once_a_round("DiLoCo, 100 steps", tb.DiLoCoAlgorithm(100)),
    "local_sgd": average_once_a_round("LocalSGD, 30 steps", tb.LocalSGDAlgorithm(30)),
    "streaming": average_once_a_round("DiLoCo, 3 fragments, delay 5", tb.DiLoCoAlgorithm(fragments=3, delay=5)),
    **{
        f"diloco_{inner_steps}_momentum_{momentum}": average_once_a_round(
            f"DiLoCo, {inner_steps} steps, momentum {momentum}",
            tb.DiLoCoAlgorithm(inner_steps, outer_momentum=momentum),
        )
        for inner_steps in (10, 30, 100)
        for momentum in (0.3, 0.9)
    },
}
