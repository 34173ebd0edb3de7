"""Who competes: each contestant wraps the same model for training, in its own way of averaging gradients or weights."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from background_traffic import BackgroundAllReduce

NUM_LAYERS = 12
BATCH_SIZE = 32
POWERSGD_RANK = 2
# Larger than any model here: torch's PowerSGD hook hangs on gloo where there are two buckets (torch 2.13).
ONE_BUCKET_MB = 1 << 20
ASYNC_INTERVAL_MS = 500


def build_model(num_parameters: int) -> nn.Module:
    """A multi-layer perceptron of 12 square layers with about `num_parameters` parameters, the same on every rank."""
    width = max(4, round((num_parameters / NUM_LAYERS) ** 0.5 / 4) * 4)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def build_batch(model: nn.Module, rank: int) -> torch.Tensor:
    """[BATCH_SIZE, width] inputs, different on every rank."""
    width = next(model.parameters()).shape[1]
    return torch.randn(BATCH_SIZE, width, generator=torch.Generator().manual_seed(rank))


@dataclass
class Entry:
    """One contestant at work: the module to train, the bytes it says it has sent so far, and how to end it.

    A block of steps is over when `settle` has returned, which its time includes: nothing is in flight then. Where
    communication is not tied to steps, `resume` and `pause` stand around a block.
    """

    module: nn.Module
    sent_bytes: Callable[[], int] | None = None
    close: Callable[[], None] = lambda: None
    settle: Callable[[], None] = lambda: None
    resume: Callable[[], None] = lambda: None
    pause: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3)

    def train_step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.module(batch).square().mean().backward()
        self.optimizer.step()


Wrap = Callable[[nn.Module, float, list[int]], Entry]  # model, bucket_cap_mb, node of each rank -> Entry


@dataclass(frozen=True)
class Contestant:
    """A row of the table.

    `wire_bytes(numel)` is what one parameter tensor of `numel` elements takes on the wire; a ring or a two-phase mean
    over c ranks sends it 2 (c-1)/c times. None where no such rule holds: then the floor comes from the counters.
    Where communication is not `tied_to_steps`, blocks last as long as a round of it, and a slow rank takes fewer steps.
    """

    label: str
    wrap: Wrap
    wire_bytes: Callable[[int], int] | None
    tied_to_steps: bool = True


def _ddp(model: nn.Module, bucket_cap_mb: float) -> DistributedDataParallel:
    # All ranks build the same model: init_sync would only send it over the slow network.
    return DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=bucket_cap_mb, init_sync=False)


def _wrap_compute_only(model: nn.Module, bucket_cap_mb: float, nodes: list[int]) -> Entry:
    return Entry(copy.deepcopy(model))


def _wrap_background_all_reduce(model: nn.Module, bucket_cap_mb: float, nodes: list[int]) -> Entry:
    entry = Entry(copy.deepcopy(model))
    num_elements = sum(parameter.numel() for parameter in entry.module.parameters())
    background = BackgroundAllReduce(num_elements, ASYNC_INTERVAL_MS / 1000)
    entry.resume, entry.pause = background.resume, background.pause
    return entry


def _wrap_ddp(model: nn.Module, bucket_cap_mb: float, nodes: list[int]) -> Entry:
    return Entry(_ddp(model, bucket_cap_mb))


def _wrap_cast(dtype: torch.dtype) -> Wrap:
    """Plain DDP whose gradients travel as `dtype`. Torch's own bf16_compress_hook does the same, but DDP refuses it on
    the CPU by its name (torch 2.13)."""

    def cast_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        wire = bucket.buffer().to(dtype).div_(dist.get_world_size())
        future = dist.all_reduce(wire, async_op=True).get_future()

        def copy_back(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            return bucket.buffer().copy_(done.value()[0])

        return future.then(copy_back)  # type: ignore[no-any-return]  # Work.get_future is not typed

    def wrap(model: nn.Module, bucket_cap_mb: float, nodes: list[int]) -> Entry:
        module = _ddp(model, bucket_cap_mb)
        module.register_comm_hook(None, cast_hook)
        return Entry(module)

    return wrap


def _wrap_powersgd(model: nn.Module, bucket_cap_mb: float, nodes: list[int]) -> Entry:
    module = _ddp(model, ONE_BUCKET_MB)
    # 2 is the earliest start torch allows: the first steps, before DDP has rebuilt its buckets, are uncompressed.
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=2)
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Entry(module)


def _wrap_torchbagua(algorithm_name: str, **arguments: Any) -> Wrap:
    def wrap(model: nn.Module, bucket_cap_mb: float, nodes: list[int]) -> Entry:
        import torchbagua as tb

        recorder = tb.traces.Recorder()
        assert dist.group.WORLD is not None
        # Network namespaces share a host name, so the nodes cannot be found from it.
        group = tb.BaguaProcessGroup(dist.group.WORLD, nodes=nodes)
        algorithm = getattr(tb, algorithm_name)(**arguments)
        implementation = algorithm.reify(group, observers=(recorder,))
        module = _ddp(model, bucket_cap_mb)
        module.register_comm_hook(implementation, tb.comm_hook)
        return Entry(module, sent_bytes=lambda: int(recorder.bytes_sent), close=implementation.close)

    return wrap


def _attach(entry: Entry, algorithm: Any, nodes: list[int]) -> Any:
    """Attach `algorithm` to the entry's module and optimizer, and let the entry count its bytes and end it."""
    import torchbagua as tb

    recorder = tb.traces.Recorder()
    assert dist.group.WORLD is not None
    group = tb.BaguaProcessGroup(dist.group.WORLD, nodes=nodes)
    attachment = tb.attach(entry.module, entry.optimizer, algorithm, process_group=group, observers=[recorder])
    entry.sent_bytes = lambda: int(recorder.bytes_sent)
    entry.close = attachment.detach
    return attachment


def _wrap_compute_only_adam(model: nn.Module, bucket_cap_mb: float, nodes: list[int]) -> Entry:
    entry = Entry(copy.deepcopy(model))
    entry.optimizer = torch.optim.Adam(entry.module.parameters(), fused=True)
    return entry


def _wrap_qadam(**arguments: Any) -> Wrap:
    def wrap(model: nn.Module, bucket_cap_mb: float, nodes: list[int]) -> Entry:
        import torchbagua as tb

        entry = Entry(_ddp(model, bucket_cap_mb))
        entry.optimizer = tb.QAdamOptimizer(entry.module.parameters(), warmup_steps=1, fused=True)
        _attach(entry, tb.QAdamAlgorithm(entry.optimizer, **arguments), nodes)
        return entry

    return wrap


def _wrap_averaging(algorithm_name: str, **arguments: Any) -> Wrap:
    def wrap(model: nn.Module, bucket_cap_mb: float, nodes: list[int]) -> Entry:
        import torchbagua as tb

        entry = Entry(_ddp(model, bucket_cap_mb))
        algorithm = getattr(tb, algorithm_name)(bucket_cap_mb=bucket_cap_mb, final_average=False, **arguments)
        attachment = _attach(entry, algorithm, nodes)
        if algorithm_name == "AsyncModelAverageAlgorithm":
            entry.resume = lambda: attachment.impl.resume(entry.module)
            entry.pause = lambda: attachment.impl.abort(entry.module)
            entry.pause()
        else:
            entry.settle = attachment.impl.finish_round
            entry.settle()
        return entry

    return wrap


def _uint8_wire_bytes(numel: int) -> int:
    """One byte an element and a header of two float32 for every block of 2048; blocks end with their parameter."""
    return numel + 8 * -(-numel // 2048)


def _one_bit_wire_bytes(numel: int) -> int:
    """One bit an element and a float32 for every block of 2048."""
    return -(-numel // 8) + 4 * -(-numel // 2048)


COMPUTE_ONLY = "compute"
CONTROL = "control"
BASELINE = "ddp"
# Contestants take turns in this order; GradientAllReduce is next to plain DDP, to which it is held most closely.
CONTESTANTS: dict[str, Contestant] = {
    COMPUTE_ONLY: Contestant("compute only", _wrap_compute_only, lambda numel: 0, tied_to_steps=False),
    BASELINE: Contestant("DDP float32", _wrap_ddp, lambda numel: 4 * numel),
    "gradient_allreduce": Contestant(
        "GradientAllReduce", _wrap_torchbagua("GradientAllReduceAlgorithm"), lambda numel: 4 * numel
    ),
    "bf16": Contestant("DDP bf16 hook", _wrap_cast(torch.bfloat16), lambda numel: 2 * numel),
    "fp16": Contestant("DDP fp16 hook", _wrap_cast(torch.float16), lambda numel: 2 * numel),
    "powersgd": Contestant(f"DDP PowerSGD rank {POWERSGD_RANK}, one bucket", _wrap_powersgd, None),
    "bytegrad": Contestant("ByteGrad", _wrap_torchbagua("ByteGradAlgorithm"), _uint8_wire_bytes),
    "compute_adam": Contestant("compute only, Adam", _wrap_compute_only_adam, lambda numel: 0),
    "qadam": Contestant("QAdam", _wrap_qadam(), _uint8_wire_bytes),
    "qadam_1bit": Contestant(
        "QAdam, 1 bit", _wrap_qadam(compression="sign1bit", error_feedback=True), _one_bit_wire_bytes
    ),
    "decentralized": Contestant(
        "Decentralized, all", _wrap_averaging("DecentralizedAlgorithm"), lambda numel: 4 * numel
    ),
    "shift_one": Contestant(
        "Decentralized, shift_one", _wrap_averaging("DecentralizedAlgorithm", peer_selection_mode="shift_one"), None
    ),
    "low_precision": Contestant(
        "LowPrecisionDecentralized", _wrap_averaging("LowPrecisionDecentralizedAlgorithm"), None
    ),
    CONTROL: Contestant(
        "compute only, torch's all-reduce beside it", _wrap_background_all_reduce, lambda numel: 0, tied_to_steps=False
    ),
    "async": Contestant(
        "AsyncModelAverage",
        _wrap_averaging("AsyncModelAverageAlgorithm", sync_interval_ms=ASYNC_INTERVAL_MS),
        lambda numel: 0,
        tied_to_steps=False,
    ),
    "bytegrad_flat": Contestant(
        "ByteGrad flat", _wrap_torchbagua("ByteGradAlgorithm", hierarchical=False), _uint8_wire_bytes
    ),
    "bytegrad_hierarchical": Contestant(
        "ByteGrad hierarchical", _wrap_torchbagua("ByteGradAlgorithm", hierarchical=True), None
    ),
}
FLAT_CONTESTANTS = [name for name in CONTESTANTS if not name.startswith("bytegrad_")]
# The asynchronous algorithm next to what it is held to: the machine's moods last for some seconds.
STRAGGLER_CONTESTANTS = [CONTROL, COMPUTE_ONLY, "async", BASELINE]
HIERARCHICAL_CONTESTANTS = [COMPUTE_ONLY, BASELINE, "bf16", "bytegrad_flat", "bytegrad_hierarchical"]


def ring_payload_bytes(contestant: Contestant, numels: list[int], num_ranks: int) -> float | None:
    """Bytes each of `num_ranks` ranks must send a step, by arithmetic; None where the contestant has no such rule."""
    if contestant.wire_bytes is None:
        return None
    return 2 * (num_ranks - 1) / num_ranks * sum(map(contestant.wire_bytes, numels))
