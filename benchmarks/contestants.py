"""Who competes: each contestant wraps the same model for training, in its own way of averaging gradients or weights."""

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
# Larger than any model here: torch's PowerSGD hook hangs on gloo where there are two buckets (torch 2.13).
ONE_BUCKET_MB = 1 << 20
# DDP's default, and sizes to compare it with.
BUCKET_SIZES_MB = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, DDP_DEFAULT_MB)
ASYNC_INTERVAL_MS = 500
INNER_STEPS = 30


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


@dataclass(frozen=True)
class Setup:
    """What every contestant is made of.

    Attributes:
        nodes: node of each rank. Network namespaces share a host name, so they cannot be found from it.
        idle_schedule: what models wait for instead of computing; None where they compute.
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
        if bucket_cap_mb == DDP_DEFAULT_MB:  # not named: then DDP's first bucket has 1 MB
            bucket_cap_mb = None
        # An idle model leaves its gradients in the buckets.
        options = {"init_sync": False, "gradient_as_bucket_view": self.idle_schedule is not None}
        return DistributedDataParallel(self.own_model(), bucket_cap_mb=bucket_cap_mb, **options)

    def mesh(self) -> DeviceMesh:
        """All ranks, by their nodes, which have equally many: on each a copy of what is sharded within."""
        num_nodes = max(self.nodes) + 1
        shape = (num_nodes, len(self.nodes) // num_nodes)
        return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))

    def sharded(self, policy: MixedPrecisionPolicy, mesh: DeviceMesh | None = None) -> nn.Module:
        """The model, of which every layer is sharded over a mesh, by default of all ranks."""
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
    """One contestant at work: the module to train, the recorder of what it communicates, and how to end it.

    A block of steps is over when `finish_round` has returned, which its time includes: nothing is in flight then. Where
    communication is not tied to steps, `resume` and `pause` stand around a block.
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
        """Attach to module and optimizer; record what is sent, and end it at `close`."""
        self.recorder = tb.observe.Recorder()
        if "replicate_group" not in options:  # whose process group is that of a copy, on one node
            options["process_group"] = setup.group()
        attachment = tb.fsdp.attach(self.module, self.optimizer, algorithm, observers=[self.recorder], **options)
        self.close = attachment.detach
        return attachment


Wrap = Callable[[Setup], Entry]


@dataclass(frozen=True)
class Contestant:
    """A row of the table.

    `wire_bytes(numel)` is what one parameter tensor of `numel` elements takes on the wire; a ring or a two-phase mean
    over c ranks sends it 2 (c-1)/c times. None where no such rule holds: then the floor comes from the counters.
    Where communication is not `tied_to_steps`, blocks last as long as a round of it, and a slow rank takes fewer steps.
    Who averages once every `steps_a_round` steps has blocks of whole rounds.
    Those, who shards the model, and who is extra, compete only where they are named.
    Who `waits_for_gradients` sends nothing else: no bucket before its gradients are ready, and each step waits for all.
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


def _alone(setup: Setup) -> Entry:
    return Entry(setup.own_model())


def _alone_with_adam(setup: Setup) -> Entry:
    entry = _alone(setup)
    if setup.idle_schedule is None:
        entry.optimizer = torch.optim.Adam(entry.module.parameters(), fused=True)
    return entry


def _beside_all_reduce(setup: Setup) -> Entry:
    entry = _alone(setup)
    num_elements = sum(parameter.numel() for parameter in entry.module.parameters())
    background = BackgroundAllReduce(num_elements, ASYNC_INTERVAL_MS / 1000)
    entry.resume, entry.pause = background.resume, background.pause
    return entry


def _plain_ddp(setup: Setup) -> Entry:
    return Entry(setup.ddp())


CastHook = Callable[[None, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def cast_hook(dtype: torch.dtype) -> CastHook:
    """A hook for plain DDP with which gradients travel as `dtype`. Torch's own bf16_compress_hook does the same, but
    DDP refuses it on the CPU by its name (torch 2.13)."""

    def cast_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        wire = bucket.buffer().to(dtype).div_(dist.get_world_size())
        future = dist.all_reduce(wire, async_op=True).get_future()

        def copy_back(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            return bucket.buffer().copy_(done.value()[0])

        return future.then(copy_back)  # type: ignore[no-any-return]  # Work.get_future is not typed

    return cast_hook


def register_powersgd(ddp: DistributedDataParallel, *, rank: int, start_step: int) -> None:
    """Give `ddp`, which has one bucket, torch's PowerSGD hook."""
    # 2 is the earliest start torch allows: the first steps, before DDP has rebuilt its buckets, are uncompressed.
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=max(2, start_step))
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _by_torchs_hook(setup: Setup) -> Entry:
    module = setup.ddp()
    module.register_comm_hook(None, default_hooks.allreduce_hook)
    return Entry(module)


def _cast_to(dtype: torch.dtype) -> Wrap:
    """Plain DDP whose gradients travel as `dtype`."""

    def wrap(setup: Setup) -> Entry:
        module = setup.ddp()
        module.register_comm_hook(None, cast_hook(dtype))
        return Entry(module)

    return wrap


def _powersgd(setup: Setup) -> Entry:
    module = setup.ddp(ONE_BUCKET_MB)
    register_powersgd(module, rank=POWERSGD_RANK, start_step=2)
    return Entry(module)


def _hooked(algorithm: tb.Algorithm, bucket_cap_mb: float | None = None) -> Wrap:
    """A gradient algorithm behind the standalone hook."""

    def wrap(setup: Setup) -> Entry:
        recorder = tb.observe.Recorder()
        impl = algorithm.reify(setup.group(), observers=[recorder])
        module = setup.ddp(bucket_cap_mb)
        module.register_comm_hook(impl, tb.comm_hook)
        return Entry(module, recorder, close=impl.close)

    return wrap


def _in_buckets(
    name: str, label: str, algorithm: tb.Algorithm, wire_bytes: Callable[[int], int]
) -> "dict[str, Contestant]":
    """A gradient algorithm in buckets of several sizes, by name."""
    return {
        f"{name}_{size:.0f}mb": Contestant(
            f"{label}, buckets of {size:.0f} MB",
            _hooked(algorithm, size),
            wire_bytes,
            is_extra=True,
            bucket_cap_mb=size,
        )
        for size in BUCKET_SIZES_MB
    }


def _attached(algorithm: tb.Algorithm) -> Wrap:
    """A gradient algorithm that has to know which steps are taken."""

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


def _averaged(algorithm: type[tb.Algorithm], **arguments: Any) -> Wrap:
    """A weight algorithm, which every step of a block waits for."""

    def wrap(setup: Setup) -> Entry:
        entry = Entry(setup.ddp())
        own = algorithm(bucket_cap_mb=setup.bucket_cap_mb, final_average=False, **arguments)
        entry.finish_round = entry.attach(own, setup).impl.finish_round
        entry.finish_round()
        return entry

    return wrap


def _diloco(label: str, **arguments: Any) -> Contestant:
    """DiLoCo in 4 bits."""
    wrap = _averaged(tb.DiLoCoAlgorithm, inner_steps=INNER_STEPS, **arguments)
    return Contestant(
        f"DiLoCo, {INNER_STEPS} steps{label}", wrap, _uint4_bytes, steps_a_round=INNER_STEPS, waits_for_gradients=False
    )


def _asynchronous(setup: Setup) -> Entry:
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
    """One byte an element and a header of two float32 for every block of 2048; blocks end with their parameter."""
    return numel + 8 * -(-numel // 2048)


def _uint4_bytes(numel: int) -> int:
    """Half a byte an element and a header of two bfloat16 for every block of 128."""
    return -(-numel // 2) + 4 * -(-numel // 128)


def _one_bit_bytes(numel: int) -> int:
    """One bit an element and a float32 for every block of 2048."""
    return -(-numel // 8) + 4 * -(-numel // 2048)


def _sparse_bytes(index_bits: int) -> Callable[[int], int]:
    """A float32 for every block of 2048, and a byte and an index for each of 21 elements. The last block is as long."""
    return lambda numel: -(-numel // 2048) * (4 + 21 + -(-21 * index_bits // 8))


def _sharded(
    label: str,
    gradient_bytes: Callable[[int], int],
    *,
    algorithm: tb.Algorithm | None = None,
    policy: MixedPrecisionPolicy | None = None,
    in_8_bits: bool = False,
) -> Contestant:
    """FSDP2 alone or with an algorithm; it gathers weights in forward and in backward, in float32 or in 8 bits."""
    weight_bytes = _uint8_bytes if in_8_bits else _dense(4)

    def wrap(setup: Setup) -> Entry:
        entry = Entry(setup.sharded(policy or MixedPrecisionPolicy()))
        if algorithm is not None:
            entry.attach(algorithm, setup, quantize_weights="minmax_uint8" if in_8_bits else None)
            if not in_8_bits:
                entry.recorder = None  # it hears nothing of weights in full precision
        return entry

    def wire_bytes(numel: int) -> int:
        # Of a mean, of which a rank sends 2 (c-1)/c; each of these three is sent (c-1)/c times.
        return (2 * weight_bytes(numel) + gradient_bytes(numel)) // 2

    return Contestant(f"FSDP2, {label}", wrap, wire_bytes, is_sharded=True, waits_for_gradients=False)


def _replicated(label: str, algorithm: tb.Algorithm | None = None) -> Contestant:
    """HSDP: sharded within each node, and averaged over the nodes by torch's all-reduce, or by an algorithm."""

    def wrap(setup: Setup) -> Entry:
        policy, mesh = MixedPrecisionPolicy(), setup.mesh()
        if algorithm is None:
            return Entry(setup.sharded(policy, mesh))
        entry = Entry(setup.sharded(policy, mesh["shards"]))
        entry.attach(algorithm, setup, replicate_group=mesh.get_group("replicas"))
        entry.recorder = None  # it hears nothing of the weights and gradients that torch sends within nodes
        return entry

    return Contestant(f"HSDP, {label}", wrap, None, is_sharded=True, waits_for_gradients=False)


COMPUTE_ONLY = "compute"
CONTROL = "control"
BASELINE = "ddp"
# Contestants take turns in this order; GradientAllReduce is next to plain DDP, to which it is held most closely.
CONTESTANTS: dict[str, Contestant] = {
    COMPUTE_ONLY: Contestant("compute only", _alone, _dense(0), tied_to_steps=False, waits_for_gradients=False),
    BASELINE: Contestant("DDP float32", _plain_ddp, _dense(4)),
    "allreduce_hook": Contestant("DDP, torch's allreduce_hook", _by_torchs_hook, _dense(4), is_extra=True),
    "gradient_allreduce_in_rank_order": Contestant(
        "GradientAllReduce, in rank order",
        _hooked(tb.GradientAllReduceAlgorithm(in_rank_order=True)),
        _dense(4),
        is_extra=True,
    ),
    "gradient_allreduce": Contestant("GradientAllReduce", _hooked(tb.GradientAllReduceAlgorithm()), _dense(4)),
    "bf16": Contestant("DDP bf16 hook", _cast_to(torch.bfloat16), _dense(2)),
    "fp16": Contestant("DDP fp16 hook", _cast_to(torch.float16), _dense(2)),
    "powersgd": Contestant(
        f"DDP PowerSGD rank {POWERSGD_RANK}, one bucket", _powersgd, None, bucket_cap_mb=ONE_BUCKET_MB
    ),
    "low_rank": Contestant(
        f"PowerSGD rank {POWERSGD_RANK}", _attached(tb.PowerSGDAlgorithm(rank=POWERSGD_RANK, start_step=2)), None
    ),
    "low_rank_bf16": Contestant(
        f"PowerSGD rank {POWERSGD_RANK}, bf16",
        _attached(tb.PowerSGDAlgorithm(rank=POWERSGD_RANK, start_step=2, compression="bfloat16")),
        None,
    ),
    "bytegrad": Contestant("ByteGrad", _hooked(tb.ByteGradAlgorithm()), _uint8_bytes),
    "four_bits": Contestant("CompressedAllReduce, 4 bits", _hooked(tb.CompressedAllReduceAlgorithm()), _uint4_bytes),
    "four_bits_feedback": Contestant(
        "CompressedAllReduce, 4 bits, error feedback",
        _attached(tb.CompressedAllReduceAlgorithm(error_feedback=True)),
        _uint4_bytes,
    ),
    "one_bit_feedback": Contestant(
        "CompressedAllReduce, 1 bit, error feedback",
        _attached(tb.CompressedAllReduceAlgorithm(compression="sign1bit", error_feedback=True)),
        _one_bit_bytes,
    ),
    "topk": Contestant("TopK, 1 %", _attached(tb.TopKAlgorithm(0.01)), _sparse_bytes(11)),
    "compute_adam": Contestant("compute only, Adam", _alone_with_adam, _dense(0), waits_for_gradients=False),
    "qadam": Contestant("QAdam", _qadam(), _uint8_bytes),
    "qadam_1bit": Contestant("QAdam, 1 bit", _qadam(compression="sign1bit", error_feedback=True), _one_bit_bytes),
    "decentralized": Contestant(
        "Decentralized, all", _averaged(tb.DecentralizedAlgorithm), _dense(4), waits_for_gradients=False
    ),
    "shift_one": Contestant(
        "Decentralized, shift_one",
        _averaged(tb.DecentralizedAlgorithm, peer_selection_mode="shift_one"),
        None,
        waits_for_gradients=False,
    ),
    "low_precision": Contestant(
        "LowPrecisionDecentralized",
        _averaged(tb.LowPrecisionDecentralizedAlgorithm),
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
        _beside_all_reduce,
        _dense(0),
        tied_to_steps=False,
        waits_for_gradients=False,
    ),
    "async": Contestant("AsyncModelAverage", _asynchronous, _dense(0), tied_to_steps=False, waits_for_gradients=False),
    "bytegrad_flat": Contestant("ByteGrad flat", _hooked(tb.ByteGradAlgorithm(hierarchical=False)), _uint8_bytes),
    "bytegrad_hierarchical": Contestant(
        "ByteGrad hierarchical", _hooked(tb.ByteGradAlgorithm(hierarchical=True)), None
    ),
    "four_bits_hierarchical": Contestant(
        "CompressedAllReduce, 4 bits, hierarchical", _hooked(tb.CompressedAllReduceAlgorithm()), None
    ),
    "fsdp": _sharded("float32", _dense(4)),
    "fsdp_bf16": _sharded("reduced in bf16", _dense(2), policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)),
    "fsdp_8": _sharded("gradients in 8 bits", _uint8_bytes, algorithm=tb.ByteGradAlgorithm()),
    "fsdp_4": _sharded("gradients in 4 bits", _uint4_bytes, algorithm=tb.CompressedAllReduceAlgorithm()),
    "fsdp_8_weights_8": _sharded(
        "gradients and weights in 8 bits",
        _uint8_bytes,
        algorithm=tb.ByteGradAlgorithm(),
        in_8_bits=True,
    ),
    "hsdp_hierarchical": _replicated("float32"),
    "hsdp_8_hierarchical": _replicated("8 bits between nodes", tb.ByteGradAlgorithm()),
    "hsdp_4_hierarchical": _replicated("4 bits between nodes", tb.CompressedAllReduceAlgorithm()),
}
CONTESTANTS |= _in_buckets("bytegrad", "ByteGrad", tb.ByteGradAlgorithm(), _uint8_bytes)
CONTESTANTS |= _in_buckets("four_bits", "4 bits", tb.CompressedAllReduceAlgorithm(), _uint4_bytes)
FLAT_CONTESTANTS = [name for name in CONTESTANTS if not name.endswith(("_flat", "_hierarchical"))]
# The asynchronous algorithm next to what it is held to: the machine's moods last for some seconds.
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
    """Bytes each of `num_ranks` ranks must send a step, by arithmetic; None where the contestant has no such rule.

    Who averages weights sends the bytes of a round in its steps together.
    """
    if contestant.wire_bytes is None:
        return None
    return 2 * (num_ranks - 1) / num_ranks * sum(map(contestant.wire_bytes, numels)) / contestant.steps_a_round
