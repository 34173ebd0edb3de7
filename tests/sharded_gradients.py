"""Gradients of fully_shard modules are bitwise equal to an oracle's: the cases, by codec and by use of FSDP2.

The oracle: each rank computes the gradients of every rank's data with an unsharded copy. It encodes and decodes its
rows of each gradient, and sums them in rank order over the ranks that share a module. With replicas of the module
(HSDP) it then computes the compressed mean of these sums. The gradients that FSDP stores in `.grad` must be equal. If
weights are quantized, the copy computes with weights whose rows were encoded and decoded.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DeviceMesh, init_device_mesh

import torchbagua as tb
from oracle import ordered_sum, quantise, quantise_block, quantise_block_4_bits
from torchbagua.codecs import Compressor, Identity, MeanCodecs, MinMaxUInt4, MinMaxUInt8
from torchbagua.fsdp._torch import (
    fsdp_all_gather,
    fsdp_computed_with,
    fsdp_param_groups,
    fsdp_reduce_scatter,
    has_gradient_hooks,
)

BLOCK = 16
F32 = np.float32
EIGHT, FOUR = MinMaxUInt8(BLOCK), MinMaxUInt4(BLOCK)
BYTEGRAD = tb.ByteGradAlgorithm(block=BLOCK)
FLAT = tb.ByteGradAlgorithm(hierarchical=False, block=BLOCK)
FOUR_BITS = tb.CompressedAllReduceAlgorithm(FOUR)
FULL = tb.CompressedAllReduceAlgorithm(None)
CAST_WITHIN = tb.CompressedAllReduceAlgorithm(EIGHT, intra_compression="bfloat16")


@dataclass(frozen=True)
class OwnAlgorithm(tb.Algorithm):
    """An algorithm that a user wrote: gradients in 4 bits, in full precision within nodes."""

    def make_codec(self) -> Compressor:
        return FOUR

    def make_shard_codecs(self) -> MeanCodecs:
        return MeanCodecs(self.make_codec(), Identity())

    def make_impl(self, runner: tb.extend.Runner) -> tb.AlgorithmImpl:
        return tb.AlgorithmImpl(runner)


class Net(nn.Module):
    """Layers whose first dimensions do not divide evenly over ranks, a frozen and a skippable layer, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 37)
        self.middle = nn.ModuleList([nn.Linear(37, 37), nn.Linear(37, 37)])
        self.frozen = nn.Linear(37, 37).requires_grad_(False)
        self.last = nn.Linear(37, 3)
        self.register_buffer("scale", torch.randint(1, 100, ()).float())  # exact in bfloat16

    def forward(self, x: torch.Tensor, skips: bool = False) -> torch.Tensor:
        x = self.first(x).tanh()
        x = self.middle[0](x).tanh()
        x = x if skips else self.middle[1](x).tanh()
        return self.last(self.frozen(x)) * self.scale


def exact(x: Any) -> Any:
    return x


def in_8_bits(x: Any) -> Any:
    return quantise(x, [x.size], BLOCK, quantise_block)


def in_4_bits(x: Any) -> Any:
    return quantise(x, [x.size], BLOCK, quantise_block_4_bits)


def in_bfloat16(x: Any) -> Any:
    return torch.from_numpy(x).bfloat16().float().numpy()


def reduce_with(factor: float | None, sums_alone: bool, module: FSDPModule) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(sums_alone)
            if factor is not None:
                part.set_gradient_divide_factor(factor)


divide_by_three = partial(reduce_with, 3.0, False)


@dataclass(frozen=True)
class Case:
    """The differences of a case from plain `fully_shard` with ByteGrad."""

    algorithm: tb.Algorithm = BYTEGRAD
    coded: Callable[[Any], Any] = in_8_bits  # returns a row as the codec of the algorithm decodes it
    within: Callable[[Any], Any] = exact  # the same within a module that has replicas
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    reshards: bool | int = True
    prepare: Callable[[Any], None] = lambda module: None  # called with the sharded module
    # Divide the sum within a module, the sum over replicas, and the result; by default the number of summed rows, the
    # number of replicas, and 1.
    divisors: tuple[float, float, float] | None = None
    # If not empty, two micro-steps: they are summed "before" the reduction, as `set_requires_gradient_sync` does, or
    # "after" it; or the first is reduced only "within" the module.
    accumulates: str = ""
    poison: float = 0.0  # added to the first input of rank 0 in the second step, which is then the last
    skips: bool = False  # whether forward skips a layer, which gets no gradient; all layers then communicate together
    nodes: bool = False  # whether ranks are on two nodes
    compiles: bool = False  # whether a layer is compiled
    freezes: bool = False  # whether a bias is frozen in the second step, and unfrozen in the third
    weights: str | Compressor | None = None  # the argument quantize_weights of fsdp.attach
    replicas: str = ""  # how replicas are averaged: by attach's "hook", or by a "backend"; empty without replicas
    shards: int = 2  # ranks that share a module with replicas; with a backend, 1 stands for torch's `replicate`

    @property
    def dtype(self) -> torch.dtype:
        return self.policy.param_dtype or torch.float32


IN_BFLOAT16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
COMPUTED_IN_BFLOAT16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
PLAIN = {
    "bytegrad": Case(),
    "four bits": Case(FOUR_BITS, in_4_bits),
    "own algorithm": Case(OwnAlgorithm(), in_4_bits),
    "own algorithm, over nodes": Case(OwnAlgorithm(), in_4_bits, nodes=True, weights=EIGHT),
    "premultiplied sum": Case(prepare=divide_by_three, divisors=(3, 1, 1)),
    "sum": Case(prepare=partial(reduce_with, None, True)),
    "reduced in bfloat16": Case(policy=IN_BFLOAT16),
    "accumulated before": Case(accumulates="before"),
    "not a number": Case(poison=float("nan")),
    "left out": Case(skips=True),
    "compiled": Case(compiles=True),
    "frozen for a step": Case(freezes=True),
    "weights in 8 bits": Case(weights=EIGHT),
    "weights in 4 bits, accumulated after": Case(FOUR_BITS, in_4_bits, weights=FOUR, accumulates="after"),
    "weights in bfloat16, full precision": Case(FULL, exact, weights="bfloat16"),
    "weights in 8 bits, not resharded": Case(weights=EIGHT, reshards=False),
    "weights in 8 bits, resharded to two": Case(weights=EIGHT, reshards=2),
    "weights in 8 bits, computed in bfloat16": Case(policy=COMPUTED_IN_BFLOAT16, weights=EIGHT),
    "weights in 8 bits, over nodes": Case(weights=EIGHT, nodes=True),
}
# Without a codec within a module, torch's arithmetic reduces there.
WITH_REPLICAS = {
    "bytegrad": Case(),
    "own algorithm": Case(OwnAlgorithm(), in_4_bits),
    "accumulated": Case(accumulates="after"),
    "a divide factor": Case(prepare=partial(reduce_with, 3.0, True), divisors=(1, 1, 3), accumulates="within"),
    "reduced in bfloat16": Case(policy=IN_BFLOAT16, accumulates="within"),
}
BY_HOOK = {
    **WITH_REPLICAS,
    "compressed within": Case(FLAT, within=in_8_bits, accumulates="within"),
    "cast within": Case(CAST_WITHIN, within=in_bfloat16),
    "premultiplied sum": Case(FLAT, within=in_8_bits, prepare=divide_by_three, divisors=(3, 1, 1)),
    "weights in 8 bits": Case(accumulates="within", weights=EIGHT),
    "one shard": Case(shards=1, accumulates="within"),
}
BY_BACKEND = {**WITH_REPLICAS, "replicated": Case(shards=1, accumulates="within")}
CASES = PLAIN | {
    f"replicas by {way}: {name}": replace(case, replicas=way)
    for way, cases in (("hook", BY_HOOK), ("backend", BY_BACKEND))
    for name, case in cases.items()
}


def row_of(tensor: torch.Tensor, shard: int, shards: int) -> Any:
    """Return the rows of a tensor in one of its shards, flat and padded with zeros."""
    length = -(-tensor.shape[0] // shards)
    padded = torch.zeros(shards * length, *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor.detach().float().cpu()
    return padded[shard * length : (shard + 1) * length].reshape(-1).numpy()


def decode_shards(weights: str | Compressor | None, tensor: torch.Tensor, shards: int) -> None:
    """Encode and decode a weight in place, shard by shard."""
    if weights is None:
        return
    decoded = {EIGHT: in_8_bits, FOUR: in_4_bits, "bfloat16": in_bfloat16}[weights]
    rows = [decoded(row_of(tensor, shard, shards)) for shard in range(shards)]
    tensor.copy_(torch.from_numpy(np.concatenate(rows)[: tensor.numel()]).view_as(tensor))


def rounded(case: Case, x: Any) -> Any:
    return in_bfloat16(x) if case.policy.reduce_dtype is torch.bfloat16 else x


def sum_within(case: Case, rows: list[Any]) -> Any:
    """Return the sum of the rows of the ranks that share a module."""
    if case.replicas:
        return ordered_sum(list(map(case.within, rows)))
    if case.nodes:  # full precision within the two nodes
        half = len(rows) // 2
        rows = [ordered_sum(rows[:half]), ordered_sum(rows[half:])]
    return ordered_sum(list(map(case.coded, rows)))


def mean_over_replicas(case: Case, rows: list[Any], divisor: float) -> Any:
    total = ordered_sum(list(map(case.coded, rows)))
    return rounded(case, case.coded(total / F32(divisor)))


def expected_shard(case: Case, micros: list[list[torch.Tensor]], shards: int) -> Any:
    """Return this rank's shard of a parameter's gradient, from the gradients of all ranks in each reduction."""
    num_replicas = dist.get_world_size() // shards
    divisors = case.divisors or (shards, num_replicas, 1)
    total, stored = F32(0), F32(0)
    for index, gradients in enumerate(micros):
        rows = [row_of(gradient, dist.get_rank() % shards, shards) for gradient in gradients]
        modules = [rows[at : at + shards] for at in range(0, len(rows), shards)]
        sums = [rounded(case, sum_within(case, module) / F32(divisors[0])) for module in modules]
        if case.accumulates == "within" and index == 0:
            stored = sums
            continue
        if case.accumulates == "within":
            sums = [rounded(case, new + before) for new, before in zip(sums, stored, strict=True)]
        total = total + (mean_over_replicas(case, sums, divisors[1]) if case.replicas else sums[0])
    return total / F32(divisors[2])


def data_of(step: int, rank: int, micro: int, case: Case, device: torch.device) -> torch.Tensor:
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(1000 * step + 100 * micro + rank))
    if step == 1 and rank == 0:
        x[0, 0] += case.poison
    return x.to(device, case.dtype)


def gradients_of_all(case: Case, copied: Net, step: int, shards: int, device: torch.device) -> dict[str, Any]:
    """Return for each parameter with a gradient the gradients of all ranks in each reduction of a step."""
    computing = copy.deepcopy(copied).to(case.dtype)
    with torch.no_grad():
        for parameter in computing.parameters():
            decode_shards(case.weights, parameter, shards)
    found: dict[str, list[list[torch.Tensor]]] = {}
    of_ranks = [copy.deepcopy(computing) for _ in range(dist.get_world_size())]
    for micro in range(2 if case.accumulates else 1):
        for rank, unsharded in enumerate(of_ranks):
            if case.accumulates != "before":
                unsharded.zero_grad()
            unsharded(data_of(step, rank, micro, case, device), case.skips).float().square().sum().backward()
        if case.accumulates == "before" and micro == 0:
            continue
        for name, parameter in of_ranks[0].named_parameters():
            if parameter.grad is not None:
                gradients = [unsharded.get_parameter(name).grad.clone() for unsharded in of_ranks]
                found.setdefault(name, []).append(gradients)
    return found


def comms(module: nn.Module) -> list[Any]:
    """Return the objects with which FSDP reduce-scatters and all-gathers."""
    groups = [fsdp_param_groups(part)[0] for part in module.modules() if isinstance(part, FSDPModule)]
    return [comm for group in groups for comm in (fsdp_reduce_scatter(group)[0], fsdp_all_gather(group)[0])]


def shard(case: Case, module: Net, mesh: DeviceMesh) -> None:
    options = {"mesh": mesh, "mp_policy": case.policy}
    wrap: Callable[..., Any] = replicate
    if case.replicas != "backend" or case.shards > 1:
        wrap, options["reshard_after_forward"] = fully_shard, case.reshards
    if not case.skips:
        wrap([module.first, module.middle[0]], **options)
        wrap(module.middle[1], **options)
        if not case.replicas:  # with replicas, a frozen layer communicates together with a trained one
            wrap(module.frozen, **options)
    wrap(module, **options)
    case.prepare(module)


def make_mesh(case: Case, name: str, shards: int, device: torch.device) -> DeviceMesh:
    """Return a mesh of all ranks, with a dimension of replicas if the case has replicas."""
    size = dist.get_world_size()
    if not case.replicas:
        return init_device_mesh(device.type, (size,))
    override = {}
    if case.replicas == "backend":
        override["replicas"] = "torchbagua_" + "".join(filter(str.isalnum, name))
        tb.fsdp.register_backend(case.algorithm, name=override["replicas"])
    dimensions = ("replicas", "shards")
    return init_device_mesh(device.type, (size // shards, shards), mesh_dim_names=dimensions, backend_override=override)


def train(name: str, device: torch.device) -> None:
    """Train in the way of a case, and compare the gradients of each step."""
    case, rank, size = CASES[name], dist.get_rank(), dist.get_world_size()
    shards = case.shards if case.replicas else size
    torch.manual_seed(0)
    copied = Net().to(device)
    torch.manual_seed(rank // shards if case.replicas == "hook" else 0)  # attach broadcasts the first replica's weights
    module = Net().to(device)
    mesh = make_mesh(case, name, shards, device)
    if case.replicas and (case.replicas == "hook" or shards == 1):
        shard(case, module, mesh["shards" if case.replicas == "hook" else "replicas"])
    else:
        shard(case, module, mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    recorder, attachment, before = tb.observe.Recorder(), None, comms(module)
    if case.replicas == "backend":
        tb.fsdp.align_blocks(module)
    else:
        nodes = [peer * 2 // size for peer in range(size)]
        attachment = tb.fsdp.attach(
            module,
            optimizer,
            case.algorithm,
            process_group=tb.BaguaProcessGroup(dist.group.WORLD, nodes=nodes) if case.nodes else None,
            replicate_group=mesh.get_group("replicas") if case.replicas else None,
            quantize_weights=case.weights,
            observers=[recorder],
        )
    if case.compiles:
        module.middle[1].compile(backend="aot_eager")
    parameters = dict(module.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        for bias in (module.first.bias, copied.first.bias):
            bias.requires_grad_(not (case.freezes and step == 1))
        expected = gradients_of_all(case, copied, step, shards, device)
        num_micros = 2 if case.accumulates else 1
        for micro in range(num_micros):
            module.set_requires_gradient_sync(micro == num_micros - 1 or case.accumulates != "before")
            module.set_requires_all_reduce(micro == num_micros - 1 or case.accumulates != "within")
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="torchbagua: .*not all parameters had a gradient")
                module(data_of(step, rank, micro, case, device), case.skips).float().square().sum().backward()
        trained = [key for key, parameter in parameters.items() if parameter.grad is not None]
        assert trained == list(expected)
        for key in trained:
            local = parameters[key].grad.to_local().reshape(-1).cpu()
            row = torch.from_numpy(expected_shard(case, expected[key], shards))[: local.numel()]
            assert torch.equal(local.nan_to_num(7e7), row.nan_to_num(7e7)), f"step {step}, {key}: {local[:5]} {row[:5]}"
        has_nan = any(bool(parameters[key].grad.to_local().isnan().any()) for key in trained)
        assert has_nan == bool(case.poison and step == 1)
        if has_nan:
            break
        optimizer.step()
        with torch.no_grad():
            for key, parameter in copied.named_parameters():
                parameter.copy_(parameters[key].full_tensor())
    if attachment is not None:
        check_trace(case, recorder)
        attachment.detach()
        assert all(map(lambda old, new: old is new, before, comms(module)))
        groups = [fsdp_param_groups(part)[0] for part in module.modules() if isinstance(part, FSDPModule)]
        assert not any(has_gradient_hooks(parameter) for group in groups for parameter in fsdp_computed_with(group))


def check_trace(case: Case, recorder: tb.observe.Recorder) -> None:
    """Check over which groups tensors were sent, and that they were compressed."""
    sent = [event for event in recorder.events if event.phase == "send"]
    scopes = {"inter_node", "intra_node"} if case.nodes else {"world"}
    if case.replicas:
        scopes = {"world of replicas"} | ({"world"} if case.within is not exact or case.weights else set())
    assert {event.scope for event in sent if event.num_elements} == scopes
    kinds = {event.bucket.split(" of ")[0] for event in recorder.events if event.phase == "bucket"}
    assert kinds == ({"gradients"} if case.weights is None else {"gradients", "weights"})
    if not case.nodes:
        assert 0 < sum(event.bytes_sent for event in sent) < sum(event.raw_bytes for event in sent)
