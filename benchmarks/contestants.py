"""The contestants: each wraps the same model for training and averages gradients or weights in a different way."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from background_traffic import BackgroundAllReduce
from idle import IdleModel, IdleOptimizer, IdleQAdamOptimizer, find_idle_model
from schedule import DDP_DEFAULT_MB, Schedule

NUM_LAYERS = 12
BATCH_SIZE = 32
POWERSGD_RANK = 2
# Larger than any model here: torch's PowerSGD hook hangs on gloo with two buckets (torch 2.13).
ONE_BUCKET_MB = 1 << 20
# DDP's default, and sizes to compare it with.
BUCKET_SIZES_MB = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, DDP_DEFAULT_MB)
ASYNC_INTERVAL_MS = 500
INNER_STEPS = 30


def build_model(num_parameters: int) -> nn.Module:
    """Return a multi-layer perceptron of 12 square layers, about `num_parameters` parameters, equal on all ranks."""
    width = max(4, round((num_parameters / NUM_LAYERS) ** 0.5 / 4) * 4)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def build_batch(model: nn.Module, rank: int) -> torch.Tensor:
    """Return inputs [BATCH_SIZE, width], different on every rank."""
    width = next(model.parameters()).shape[1]
    return torch.randn(BATCH_SIZE, width, generator=torch.Generator().manual_seed(rank))


@dataclass(frozen=True)
class Setup:
    """The model and the settings from which every contestant is built.

    Attributes:
        nodes: node of each rank. Network namespaces share a host name, so it does not determine the node.
        idle_schedule: the schedule of models that wait instead of computing; None if they compute.
    """

    model: nn.Module
    bucket_cap_mb: float
    nodes: list[int]
    idle_schedule: Schedule | None = None

    def own_model(self) -> nn.Module:
        return copy.deepcopy(self.model) if self.idle_schedule is None else IdleModel(self.model, self.idle_schedule)

    def ddp(self, bucket_cap_mb: float | None = None) -> DistributedDataParallel:
        # All ranks build the same model: init_sync would only send it over the slow network.
        bucket_cap_mb = bucket_cap_mb or self.bucket_cap_mb
        if bucket_cap_mb == DDP_DEFAULT_MB:  # not passed: DDP's first bucket then has 1 MB
            bucket_cap_mb = None
        # An idle model leaves its gradients in the buckets.
        options = {"init_sync": False, "gradient_as_bucket_view": self.idle_schedule is not None}
        return DistributedDataParallel(self.own_model(), bucket_cap_mb=bucket_cap_mb, **options)

    def mesh(self) -> DeviceMesh:
        """Return a mesh of all ranks by node, for nodes with equally many ranks: shards in a node, replicas across."""
        num_nodes = max(self.nodes) + 1
        shape = (num_nodes, len(self.nodes) // num_nodes)
        return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))

    def sharded(self, policy: MixedPrecisionPolicy, mesh: DeviceMesh | None = None) -> nn.Module:
        """Return the model with every layer sharded over a mesh, by default of all ranks."""
        model = self.own_model()
        mesh = mesh or init_device_mesh("cpu", (len(self.nodes),))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)  # type: ignore[return-value]

    def group(self) -> tb.BaguaProcessGroup:
        assert dist.group.WORLD is not None
        return tb.BaguaProcessGroup(dist.group.WORLD, nodes=self.nodes)


@dataclass
class Entry:
    """A contestant in training: the module, the recorder of its communication, and the functions that end it.

    A block of steps ends when `finish_round` has returned, and its time includes that call: nothing is in flight then.
    If communication is not tied to steps, `resume` and `pause` are called before and after a block.
    """

    module: nn.Module
    recorder: tb.observe.Recorder | None = None
    close: Callable[[], None] = lambda: None
    finish_round: Callable[[], None] = lambda: None
    resume: Callable[[], None] = lambda: None
    pause: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.idle_model = find_idle_model(self.module)
        parameters = self.module.parameters()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(parameters, lr=1e-3) if self.idle_model is None else IdleOptimizer(parameters)
        )

    def train_step(self, batch: torch.Tensor) -> None:
        if self.idle_model is None:
            self.optimizer.zero_grad()
        else:
            self.idle_model.begin_step()
        self.module(batch).square().mean().backward()
        self.optimizer.step()

    def attach(self, algorithm: tb.Algorithm, setup: Setup, **options: Any) -> tb.Attachment:
        """Attach to module and optimizer, record the sent bytes, and detach at `close`."""
        self.recorder = tb.observe.Recorder()
        if "replicate_group" not in options:  # with it, the process group is that of a replica, on one node
            options["process_group"] = setup.group()
        attachment = tb.fsdp.attach(self.module, self.optimizer, algorithm, observers=[self.recorder], **options)
        self.close = attachment.detach
        return attachment


Wrap = Callable[[Setup], Entry]


@dataclass(frozen=True)
class Contestant:
    """A row of the table.

    Attributes:
        wire_bytes: the bytes of one parameter tensor of `numel` elements on the wire. A ring or a two-phase mean over c
            ranks sends them 2 (c-1)/c times. None if no such rule holds: the floor is then computed from the counters.
        tied_to_steps: whether steps communicate. If not, blocks last as long as a round of communication, and a slow
            rank takes fewer steps.
        steps_a_round: steps from one mean to the next; blocks consist of whole rounds.
        is_sharded: whether the contestant shards the model.
        is_extra: whether the contestant runs only if it is named. Contestants that shard the model or have several
            steps per round also run only if they are named.
        waits_for_gradients: whether the contestant sends only gradients: it sends no bucket before its gradients are
            ready, and each step waits for all buckets.
        bucket_cap_mb: DDP's, if it differs from that of the other contestants.
    """

    label: str
    wrap: Wrap
    wire_bytes: Callable[[int], int] | None
    tied_to_steps: bool = True
    steps_a_round: int = 1
    is_sharded: bool = False
    is_extra: bool = False
    waits_for_gradients: bool = True
    bucket_cap_mb: float | None = None

    @property
    def must_be_named(self) -> bool:
        return self.is_sharded or self.is_extra or self.steps_a_round > 1


def _train_alone(setup: Setup) -> Entry:
    return Entry(setup.own_model())


def _train_alone_with_adam(setup: Setup) -> Entry:
    entry = _train_alone(setup)
    if setup.idle_schedule is None:
        entry.optimizer = torch.optim.Adam(entry.module.parameters(), fused=True)
    return entry


def _train_during_all_reduce(setup: Setup) -> Entry:
    entry = _train_alone(setup)
    num_elements = sum(parameter.numel() for parameter in entry.module.parameters())
    background = BackgroundAllReduce(num_elements, ASYNC_INTERVAL_MS / 1000)
    entry.resume, entry.pause = background.resume, background.pause
    return entry


def _use_plain_ddp(setup: Setup) -> Entry:
    return Entry(setup.ddp())


CastHook = Callable[[None, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def cast_hook(dtype: torch.dtype) -> CastHook:
    """Return a hook for plain DDP that sends gradients as `dtype`. Torch's own bf16_compress_hook does the same, but
    DDP rejects it on the CPU by its name (torch 2.13)."""

    def cast_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        wire = bucket.buffer().to(dtype).div_(dist.get_world_size())
        future = dist.all_reduce(wire, async_op=True).get_future()

        def copy_back(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            return bucket.buffer().copy_(done.value()[0])

        return future.then(copy_back)  # type: ignore[no-any-return]  # Work.get_future is not typed

    return cast_hook


def register_powersgd(ddp: DistributedDataParallel, *, rank: int, start_step: int) -> None:
    """Register torch's PowerSGD hook with `ddp`, which has one bucket."""
    # 2 is the earliest start torch allows: the first steps, before DDP has rebuilt its buckets, are uncompressed.
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=max(2, start_step))
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _use_allreduce_hook(setup: Setup) -> Entry:
    module = setup.ddp()
    module.register_comm_hook(None, default_hooks.allreduce_hook)
    return Entry(module)


def _use_cast_hook(dtype: torch.dtype) -> Wrap:
    """Plain DDP that sends gradients as `dtype`."""

    def wrap(setup: Setup) -> Entry:
        module = setup.ddp()
        module.register_comm_hook(None, cast_hook(dtype))
        return Entry(module)

    return wrap


def _use_powersgd(setup: Setup) -> Entry:
    module = setup.ddp(ONE_BUCKET_MB)
    register_powersgd(module, rank=POWERSGD_RANK, start_step=2)
    return Entry(module)


def _use_hook(algorithm: tb.Algorithm, bucket_cap_mb: float | None = None) -> Wrap:
    """A gradient algorithm with the standalone hook."""

    def wrap(setup: Setup) -> Entry:
        recorder = tb.observe.Recorder()
        impl = algorithm.reify(setup.group(), observers=[recorder])
        module = setup.ddp(bucket_cap_mb)
        module.register_comm_hook(impl, tb.comm_hook)
        return Entry(module, recorder, close=impl.close)

    return wrap


def _vary_bucket_size(
    name: str, label: str, algorithm: tb.Algorithm, wire_bytes: Callable[[int], int]
) -> "dict[str, Contestant]":
    """Return contestants of a gradient algorithm with several bucket sizes, by name."""
    return {
        f"{name}_{size:.0f}mb": Contestant(
            f"{label}, buckets of {size:.0f} MB",
            _use_hook(algorithm, size),
            wire_bytes,
            is_extra=True,
            bucket_cap_mb=size,
        )
        for size in BUCKET_SIZES_MB
    }


def _use_attach(algorithm: tb.Algorithm) -> Wrap:
    """A gradient algorithm that must know which steps the optimizer takes."""

    def wrap(setup: Setup) -> Entry:
        entry = Entry(setup.ddp())
        entry.attach(algorithm, setup)
        return entry

    return wrap


def _qadam(**arguments: Any) -> Wrap:
    def wrap(setup: Setup) -> Entry:
        entry = Entry(setup.ddp())
        kind = tb.QAdamOptimizer if setup.idle_schedule is None else IdleQAdamOptimizer
        optimizer = entry.optimizer = kind(entry.module.parameters(), warmup_steps=1, fused=True)
        entry.attach(tb.QAdamAlgorithm(optimizer, **arguments), setup)
        return entry

    return wrap


def _average_weights(algorithm: type[tb.Algorithm], **arguments: Any) -> Wrap:
    """A weight algorithm; every step of a block waits for its round."""

    def wrap(setup: Setup) -> Entry:
        entry = Entry(setup.ddp())
        own = algorithm(bucket_cap_mb=setup.bucket_cap_mb, final_average=False, **arguments)
        entry.finish_round = entry.attach(own, setup).impl.finish_round
        entry.finish_round()
        return entry

    return wrap


def _diloco(label: str, **arguments: Any) -> Contestant:
    """DiLoCo in 4 bits."""
    wrap = _average_weights(tb.DiLoCoAlgorithm, inner_steps=INNER_STEPS, **arguments)
    return Contestant(
        f"DiLoCo, {INNER_STEPS} steps{label}", wrap, _uint4_bytes, steps_a_round=INNER_STEPS, waits_for_gradients=False
    )


def _average_asynchronously(setup: Setup) -> Entry:
    entry = Entry(setup.ddp())
    algorithm = tb.AsyncModelAverageAlgorithm(
        bucket_cap_mb=setup.bucket_cap_mb, final_average=False, sync_interval_ms=ASYNC_INTERVAL_MS
    )
    impl = entry.attach(algorithm, setup).impl
    entry.resume, entry.pause = partial(impl.resume, entry.module), partial(impl.abort, entry.module)
    entry.pause()
    return entry


def _dense(element_bytes: int) -> Callable[[int], int]:
    return lambda numel: element_bytes * numel


def _uint8_bytes(numel: int) -> int:
    """One byte per element and a header of two float32 for every block of 2048; blocks end with their parameter."""
    return numel + 8 * -(-numel // 2048)


def _uint4_bytes(numel: int) -> int:
    """Half a byte per element and a header of two bfloat16 for every block of 128."""
    return -(-numel // 2) + 4 * -(-numel // 128)


def _one_bit_bytes(numel: int) -> int:
    """One bit per element and a float32 for every block of 2048."""
    return -(-numel // 8) + 4 * -(-numel // 2048)


def _sparse_bytes(index_bits: int) -> Callable[[int], int]:
    """A float32 for every block of 2048, and a byte and an index for each of 21 elements. The last block is as long."""
    return lambda numel: -(-numel // 2048) * (4 + 21 + -(-21 * index_bits // 8))


def _shard(
    label: str,
    gradient_bytes: Callable[[int], int],
    *,
    algorithm: tb.Algorithm | None = None,
    policy: MixedPrecisionPolicy | None = None,
    in_8_bits: bool = False,
) -> Contestant:
    """FSDP2 alone or with an algorithm. It gathers weights in forward and in backward, in float32 or in 8 bits."""
    weight_bytes = _uint8_bytes if in_8_bits else _dense(4)

    def wrap(setup: Setup) -> Entry:
        entry = Entry(setup.sharded(policy or MixedPrecisionPolicy()))
        if algorithm is not None:
            entry.attach(algorithm, setup, quantize_weights="minmax_uint8" if in_8_bits else None)
            if not in_8_bits:
                entry.recorder = None  # it is not notified of weights in full precision
        return entry

    def wire_bytes(numel: int) -> int:
        # The bytes of a mean, which a rank sends 2 (c-1)/c times; each of these three is sent (c-1)/c times.
        return (2 * weight_bytes(numel) + gradient_bytes(numel)) // 2

    return Contestant(f"FSDP2, {label}", wrap, wire_bytes, is_sharded=True, waits_for_gradients=False)


def _shard_and_replicate(label: str, algorithm: tb.Algorithm | None = None) -> Contestant:
    """HSDP: sharded within each node, and averaged over the nodes by torch's all-reduce, or by an algorithm."""

    def wrap(setup: Setup) -> Entry:
        policy, mesh = MixedPrecisionPolicy(), setup.mesh()
        if algorithm is None:
            return Entry(setup.sharded(policy, mesh))
        entry = Entry(setup.sharded(policy, mesh["shards"]))
        entry.attach(algorithm, setup, replicate_group=mesh.get_group("replicas"))
        entry.recorder = None  # it is not notified of the weights and gradients that torch sends within nodes
        return entry

    return Contestant(f"HSDP, {label}", wrap, None, is_sharded=True, waits_for_gradients=False)


COMPUTE_ONLY = "compute"
CONTROL = "control"
BASELINE = "ddp"
# Contestants take turns in this order. GradientAllReduce follows plain DDP, with which it is compared most closely.
CONTESTANTS: dict[str, Contestant] = {
    COMPUTE_ONLY: Contestant("compute only", _train_alone, _dense(0), tied_to_steps=False, waits_for_gradients=False),
    BASELINE: Contestant("DDP float32", _use_plain_ddp, _dense(4)),
    "allreduce_hook": Contestant("DDP, torch's allreduce_hook", _use_allreduce_hook, _dense(4), is_extra=True),
    "gradient_allreduce_in_rank_order": Contestant(
        "GradientAllReduce, in rank order",
        _use_hook(tb.GradientAllReduceAlgorithm(in_rank_order=True)),
        _dense(4),
        is_extra=True,
    ),
    "gradient_allreduce": Contestant("GradientAllReduce", _use_hook(tb.GradientAllReduceAlgorithm()), _dense(4)),
    "bf16": Contestant("DDP bf16 hook", _use_cast_hook(torch.bfloat16), _dense(2)),
    "fp16": Contestant("DDP fp16 hook", _use_cast_hook(torch.float16), _dense(2)),
    "powersgd": Contestant(
        f"DDP PowerSGD rank {POWERSGD_RANK}, one bucket", _use_powersgd, None, bucket_cap_mb=ONE_BUCKET_MB
    ),
    "low_rank": Contestant(
        f"PowerSGD rank {POWERSGD_RANK}", _use_attach(tb.PowerSGDAlgorithm(rank=POWERSGD_RANK, start_step=2)), None
    ),
    "low_rank_bf16": Contestant(
        f"PowerSGD rank {POWERSGD_RANK}, bf16",
        _use_attach(tb.PowerSGDAlgorithm(rank=POWERSGD_RANK, start_step=2, compression="bfloat16")),
        None,
    ),
    "bytegrad": Contestant("ByteGrad", _use_hook(tb.ByteGradAlgorithm()), _uint8_bytes),
    "four_bits": Contestant("CompressedAllReduce, 4 bits", _use_hook(tb.CompressedAllReduceAlgorithm()), _uint4_bytes),
    "four_bits_feedback": Contestant(
        "CompressedAllReduce, 4 bits, error feedback",
        _use_attach(tb.CompressedAllReduceAlgorithm(error_feedback=True)),
        _uint4_bytes,
    ),
    "one_bit_feedback": Contestant(
        "CompressedAllReduce, 1 bit, error feedback",
        _use_attach(tb.CompressedAllReduceAlgorithm(compression="sign1bit", error_feedback=True)),
        _one_bit_bytes,
    ),
    "topk": Contestant("TopK, 1 %", _use_attach(tb.TopKAlgorithm(0.01)), _sparse_bytes(11)),
    "compute_adam": Contestant("compute only, Adam", _train_alone_with_adam, _dense(0), waits_for_gradients=False),
    "qadam": Contestant("QAdam", _qadam(), _uint8_bytes),
    "qadam_1bit": Contestant("QAdam, 1 bit", _qadam(compression="sign1bit", error_feedback=True), _one_bit_bytes),
    "decentralized": Contestant(
        "Decentralized, all", _average_weights(tb.DecentralizedAlgorithm), _dense(4), waits_for_gradients=False
    ),
    "shift_one": Contestant(
        "Decentralized, shift_one",
        _average_weights(tb.DecentralizedAlgorithm, peer_selection_mode="shift_one"),
        None,
        waits_for_gradients=False,
    ),
    "low_precision": Contestant(
        "LowPrecisionDecentralized",
        _average_weights(tb.LowPrecisionDecentralizedAlgorithm),
        None,
        waits_for_gradients=False,
    ),
    "diloco": _diloco(""),
    "diloco_delay": _diloco(", delay 5", delay=5),
    "diloco_long_delay": _diloco(", delay 18", delay=18),
    "diloco_longer_delay": _diloco(", delay 24", delay=24),
    "diloco_fragments": _diloco(", 4 fragments, delay 5", fragments=4, delay=5),
    "diloco_fragments_longer": _diloco(", 4 fragments, delay 7", fragments=4, delay=7),
    CONTROL: Contestant(
        "compute only, torch's all-reduce beside it",
        _train_during_all_reduce,
        _dense(0),
        tied_to_steps=False,
        waits_for_gradients=False,
    ),
    "async": Contestant(
        "AsyncModelAverage", _average_asynchronously, _dense(0), tied_to_steps=False, waits_for_gradients=False
    ),
    "bytegrad_flat": Contestant("ByteGrad flat", _use_hook(tb.ByteGradAlgorithm(hierarchical=False)), _uint8_bytes),
    "bytegrad_hierarchical": Contestant(
        "ByteGrad hierarchical", _use_hook(tb.ByteGradAlgorithm(hierarchical=True)), None
    ),
    "four_bits_hierarchical": Contestant(
        "CompressedAllReduce, 4 bits, hierarchical", _use_hook(tb.CompressedAllReduceAlgorithm()), None
    ),
    "fsdp": _shard("float32", _dense(4)),
    "fsdp_bf16": _shard("reduced in bf16", _dense(2), policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)),
    "fsdp_8": _shard("gradients in 8 bits", _uint8_bytes, algorithm=tb.ByteGradAlgorithm()),
    "fsdp_4": _shard("gradients in 4 bits", _uint4_bytes, algorithm=tb.CompressedAllReduceAlgorithm()),
    "fsdp_8_weights_8": _shard(
        "gradients and weights in 8 bits",
        _uint8_bytes,
        algorithm=tb.ByteGradAlgorithm(),
        in_8_bits=True,
    ),
    "hsdp_hierarchical": _shard_and_replicate("float32"),
    "hsdp_8_hierarchical": _shard_and_replicate("8 bits between nodes", tb.ByteGradAlgorithm()),
    "hsdp_4_hierarchical": _shard_and_replicate("4 bits between nodes", tb.CompressedAllReduceAlgorithm()),
}
CONTESTANTS |= _vary_bucket_size("bytegrad", "ByteGrad", tb.ByteGradAlgorithm(), _uint8_bytes)
CONTESTANTS |= _vary_bucket_size("four_bits", "4 bits", tb.CompressedAllReduceAlgorithm(), _uint4_bytes)
FLAT_CONTESTANTS = [name for name in CONTESTANTS if not name.endswith(("_flat", "_hierarchical"))]
# The asynchronous algorithm is next to its reference: fluctuations of the machine last for a few seconds.
STRAGGLER_CONTESTANTS = [CONTROL, COMPUTE_ONLY, "async", BASELINE]
HIERARCHICAL_CONTESTANTS = [
    COMPUTE_ONLY,
    BASELINE,
    "bf16",
    "bytegrad_flat",
    "bytegrad_hierarchical",
    "four_bits_hierarchical",
    *(name for name, contestant in CONTESTANTS.items() if contestant.is_sharded),
]


def ring_payload_bytes(contestant: Contestant, numels: list[int], num_ranks: int) -> float | None:
    """Return the bytes that each of `num_ranks` ranks must send per step, by arithmetic; None if no such rule exists.

    If a round has several steps, its bytes are distributed over them.
    """
    if contestant.wire_bytes is None:
        return None
    return 2 * (num_ranks - 1) / num_ranks * sum(map(contestant.wire_bytes, numels)) / contestant.steps_a_round
