"""Train fully_shard modules on one rank, and compare the gradients with an oracle; started by torchrun.

The oracle: each rank computes the gradients of every rank's data with an unsharded copy, encodes and decodes each row
of each gradient, and sums the rows in rank order. The gradients that FSDP stores in `.grad` must be bitwise equal. If
weights are quantized, the copy computes with weights whose rows were encoded and decoded.

Arguments: "nccl" for ranks that share one GPU; the names of the cases, "scaled" for gradients with a GradScaler,
"gathered" for weights only, "gathered exactly" for weights in full precision, "overlapped", and "uneven nodes".
"""

import copy
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import init_device_mesh

import torchbagua as tb
from one_gpu import begin_rank
from oracle import ordered_sum, quantise, quantise_block, quantise_block_4_bits
from rank_cases import run_cases
from torchbagua.codecs import Compressor, Identity, MeanCodecs, MinMaxUInt4, MinMaxUInt8
from torchbagua.fsdp._torch import fsdp_all_gather, fsdp_param_groups, fsdp_reduce_scatter
from torchbagua.fsdp.collectives import BoundedGather

DEVICE = torch.device("cpu")
BLOCK = 16
F32 = np.float32
BYTEGRAD = tb.ByteGradAlgorithm(block=BLOCK)
EIGHT, FOUR = MinMaxUInt8(BLOCK), MinMaxUInt4(BLOCK)
FOUR_BITS = tb.CompressedAllReduceAlgorithm(FOUR)
FULL = tb.CompressedAllReduceAlgorithm(None)


@dataclass(frozen=True)
class OwnAlgorithm(tb.Algorithm):
    """An algorithm that a user wrote: gradients in 4 bits, in full precision within nodes."""

    def make_codec(self) -> Compressor:
        return FOUR

    def make_shard_codecs(self) -> MeanCodecs:
        return MeanCodecs(self.make_codec(), Identity())

    def make_impl(self, runner: tb.extend.Runner) -> tb.AlgorithmImpl:
        return tb.AlgorithmImpl(runner)


OWN = OwnAlgorithm()


class Net(nn.Module):
    """Layers whose first dimensions do not divide evenly over ranks, a frozen layer, and a skippable layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 37)
        self.middle = nn.ModuleList([nn.Linear(37, 37), nn.Linear(37, 37)])
        self.frozen = nn.Linear(37, 37).requires_grad_(False)
        self.last = nn.Linear(37, 3)

    def forward(self, x: torch.Tensor, skips: bool = False) -> torch.Tensor:
        x = self.first(x).tanh()
        x = self.middle[0](x).tanh()
        x = x if skips else self.middle[1](x).tanh()
        return self.last(self.frozen(x))


@dataclass
class Case:
    """The differences of a case from plain `fully_shard` with ByteGrad.

    Attributes:
        algorithm: the attached algorithm.
        policy, reshards: arguments of `fully_shard`.
        prepare: called with the sharded module.
        divisor: divides the sum over ranks; by default the number of ranks.
        accumulates: if not empty, two micro-steps are summed "before" the reduction, as `set_requires_gradient_sync`
            does, or "after" it.
        poison: added to the first input of rank 0 in the second step, which is then the last.
        skips: whether forward skips a layer, which gets no gradient; all layers then communicate together.
        nodes: whether ranks are on two nodes.
        compiles: whether a layer is compiled.
        freezes: whether a bias is frozen in the second step, and unfrozen in the third.
        weights: the argument quantize_weights of fsdp.attach.
    """

    algorithm: tb.Algorithm = BYTEGRAD
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    reshards: bool | int = True
    prepare: Callable[[FSDPModule], None] = lambda module: None
    divisor: float | None = None
    accumulates: str = ""
    poison: float = 0.0
    skips: bool = False
    nodes: bool = False
    compiles: bool = False
    freezes: bool = False
    weights: str | Compressor | None = None


def divide_by_three(module: FSDPModule) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(3.0)


def sum_alone(module: FSDPModule) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)


CASES = {
    "bytegrad": Case(),
    "four bits": Case(FOUR_BITS),
    "full precision": Case(FULL),
    "own algorithm": Case(OWN),
    "own algorithm, over nodes": Case(OWN, nodes=True, weights=EIGHT),
    "premultiplied sum": Case(prepare=divide_by_three, divisor=3.0),
    "sum": Case(prepare=sum_alone),
    "reduced in bfloat16": Case(policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)),
    "computed in bfloat16": Case(policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "accumulated before": Case(accumulates="before"),
    "accumulated after": Case(accumulates="after"),
    "not resharded": Case(reshards=False),
    "resharded to two": Case(reshards=2),
    "not a number": Case(poison=float("nan")),
    "left out": Case(skips=True),
    "over nodes": Case(nodes=True),
    "compiled": Case(compiles=True),
    "frozen for a step": Case(freezes=True),
    "weights in 8 bits": Case(weights=EIGHT),
    "weights in 4 bits": Case(FOUR_BITS, weights=FOUR, accumulates="after"),
    "weights in bfloat16": Case(FULL, weights="bfloat16"),
    "weights in 8 bits, not resharded": Case(weights=EIGHT, reshards=False),
    "weights in 8 bits, resharded to two": Case(weights=EIGHT, reshards=2),
    "weights in 8 bits, computed in bfloat16": Case(
        policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), weights=EIGHT
    ),
    "weights in 8 bits, over nodes": Case(weights=EIGHT, nodes=True),
}
OF_FOUR_RANKS = [
    "resharded to two",
    "over nodes",
    "weights in 8 bits, resharded to two",
    "weights in 8 bits, over nodes",
    "own algorithm, over nodes",
]


def quantize_row(case: Case, row: Any, segments: list[int]) -> Any:
    if case.algorithm is FULL:
        return row
    return quantise(row, segments, BLOCK, quantise_block if case.algorithm is BYTEGRAD else quantise_block_4_bits)


def row_of(gradient: torch.Tensor, rank: int, size: int) -> Any:
    """Return the rows of a gradient that `rank` owns, flat and padded with zeros."""
    length = -(-gradient.shape[0] // size)
    padded = torch.zeros(size * length, *gradient.shape[1:])
    padded[: gradient.shape[0]] = gradient.float().cpu()
    return padded[rank * length : (rank + 1) * length].reshape(-1).numpy()


def decoded(weights: str | Compressor | None, groups: list[list[torch.Tensor]], size: int) -> None:
    """Encode and decode the weights of each FSDP parameter group in place, in one row for each of `size` ranks."""
    if weights is None:
        return
    for members in groups:
        for rank in range(size):
            rows = [row_of(parameter.detach(), rank, size) for parameter in members]
            segments = [row.size for row in rows]
            row = np.concatenate(rows)
            if weights == "bfloat16":
                row = torch.from_numpy(row).bfloat16().float().numpy()
            else:
                row = quantise(row, segments, BLOCK, quantise_block if weights is EIGHT else quantise_block_4_bits)
            for parameter, part in zip(members, np.split(row, np.cumsum(segments)[:-1]), strict=True):
                length = -(-parameter.shape[0] // size)
                own = parameter.detach()[rank * length : (rank + 1) * length]
                own.copy_(torch.from_numpy(part[: own.numel()]).view_as(own))


def expected_row(case: Case, gradients: list[list[torch.Tensor]]) -> Any:
    """Return the mean over ranks of this rank's row of the gradients of one FSDP parameter group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [[row_of(gradient, rank, size) for gradient in rank_gradients] for rank_gradients in gradients]
    segments = [row.size for row in rows[0]]
    whole = [np.concatenate(rank_rows) for rank_rows in rows]
    if case.nodes:  # full precision within the two nodes
        half = size // 2
        whole = [ordered_sum(whole[:half]), ordered_sum(whole[half:])]
    total = ordered_sum([quantize_row(case, row, segments) for row in whole])
    mean = total / F32(case.divisor or size)
    if case.policy.reduce_dtype is torch.bfloat16:
        mean = torch.from_numpy(mean).bfloat16().float().numpy()
    return np.split(mean, np.cumsum(segments)[:-1])


def data_of(step: int, rank: int, micro: int, case: Case) -> torch.Tensor:
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
    if step == 1 and rank == 0:
        x[0, 0] += case.poison
    return x.to(DEVICE)


def comms(module: nn.Module) -> list[Any]:
    """Return the objects with which FSDP reduce-scatters and all-gathers."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    groups = [fsdp_param_groups(part)[0] for part in parts]
    return [comm for group in groups for comm in (fsdp_reduce_scatter(group)[0], fsdp_all_gather(group)[0])]


def train(case: Case) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    module, copied = Net().to(DEVICE), Net().to(DEVICE)
    copied.load_state_dict(module.state_dict())
    shard = partial(
        fully_shard,
        mesh=init_device_mesh(DEVICE.type, (size,)),
        reshard_after_forward=case.reshards,
        mp_policy=case.policy,
    )
    shard([module.first, module.middle[0]])
    shard(module.middle[1])
    shard(module.frozen)
    groups = [["first", "middle.0"], ["middle.1"], ["frozen"], ["last"]]
    if case.skips:  # a single group, with a layer that forward skips
        module = Net().to(DEVICE)
        module.load_state_dict(copied.state_dict())
        groups = [["first", "middle.0", "middle.1", "frozen", "last"]]
    shard(module)
    case.prepare(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    nodes = [peer * 2 // size for peer in range(size)]
    group = tb.BaguaProcessGroup(dist.group.WORLD, nodes=nodes) if case.nodes else None
    recorder = tb.observe.Recorder()
    before = comms(module)
    attachment = tb.fsdp.attach(
        module,
        optimizer,
        case.algorithm,
        process_group=group,
        observers=[recorder],
        quantize_weights=case.weights,
    )
    if case.compiles:
        module.middle[1].compile(backend="aot_eager")
    dtype = case.policy.param_dtype or torch.float32
    for step in range(3):
        optimizer.zero_grad()
        for bias in (module.first.bias, copied.first.bias):
            bias.requires_grad_(not (case.freezes and step == 1))
        computing = copy.deepcopy(copied).to(dtype)
        of_groups = [
            [parameter for name, parameter in computing.named_parameters() if name.rsplit(".", 1)[0] in names]
            for names in groups
        ]
        decoded(case.weights, of_groups, dist.get_world_size())
        micros = [0, 1] if case.accumulates else [0]
        # The gradients of each reduction, by rank: of one micro-step, or the sum of the micro-steps.
        reductions: list[list[dict[str, torch.Tensor]]] = []
        for micro in micros:
            of_ranks = []
            for peer in range(size):
                unsharded = copy.deepcopy(computing)
                unsharded(data_of(step, peer, micro, case).to(dtype), case.skips).float().square().sum().backward()
                of_ranks.append(
                    {
                        name: parameter.grad
                        for name, parameter in unsharded.named_parameters()
                        if parameter.grad is not None
                    }
                )
            if case.accumulates == "before" and reductions:
                for total, new in zip(reductions[0], of_ranks, strict=True):
                    for name in total:
                        total[name] = total[name] + new[name]
            else:
                reductions.append(of_ranks)
            module.set_requires_gradient_sync(micro == micros[-1] or case.accumulates == "after")
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="torchbagua: .*not all parameters had a gradient")
                module(data_of(step, rank, micro, case), case.skips).float().square().sum().backward()
        parameters = dict(module.named_parameters())
        for names in groups:
            members = [name for name in parameters if name in reductions[0][0] and name.rsplit(".", 1)[0] in names]
            if not members:  # all are frozen
                continue
            totals: list[Any] = []
            for rank_gradients in reductions:
                rows = expected_row(case, [[gradients[name] for name in members] for gradients in rank_gradients])
                totals = [before + new for before, new in zip(totals, rows, strict=True)] if totals else rows
            for name, row in zip(members, totals, strict=True):
                local = parameters[name].grad.to_local().reshape(-1).cpu()
                assert torch.equal(local.nan_to_num(7e7), torch.from_numpy(row[: local.numel()]).nan_to_num(7e7)), (
                    f"step {step}, {name}: {local[:5]} {row[:5]}"
                )
        has_nan = any(
            bool(parameter.grad.to_local().isnan().any())
            for parameter in parameters.values()
            if parameter.grad is not None
        )
        if case.poison and step == 1:
            assert has_nan
            break
        assert not has_nan
        optimizer.step()
        with torch.no_grad():
            for name, parameter in copied.named_parameters():
                parameter.copy_(parameters[name].full_tensor())
    check_trace(case, recorder, attachment)
    attachment.detach()
    assert all(map(lambda old, new: old is new, before, comms(module)))


def scale_gradients() -> None:
    """All ranks skip the step if only the shard of rank 0 contains an Inf."""
    rank = dist.get_rank()
    module = fully_shard(nn.Linear(10, 37))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with tb.attach(module, optimizer, BYTEGRAD, grad_scaler=scaler):
        for step in range(3):
            optimizer.zero_grad()
            weights = torch.ones(37)
            weights[0] = torch.inf if step == 1 and rank == dist.get_world_size() - 1 else 1.0
            before = module.weight.full_tensor().clone()
            scaler.scale((module(torch.ones(1, 10)) * weights).sum()).backward()
            assert bool(module.weight.grad.to_local().isnan().any()) == (step == 1 and rank == 0)
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, module.weight.full_tensor()) == (step == 1)
            assert scaler.get_scale() == (4.0 if step == 0 else 2.0)


def change_the_divisor() -> None:
    """The sum is divided by the factor of the step, also if it changes while the algorithm is attached."""
    size = dist.get_world_size()
    module = fully_shard(nn.Linear(10, 37))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    with tb.attach(module, optimizer, FULL):
        for factor in (float(size), 1.0, 2.0 * size):
            module.set_gradient_divide_factor(factor)
            optimizer.zero_grad()
            module(torch.ones(1, 10)).sum().backward()
            assert module.weight.grad.to_local().unique().tolist() == [size / factor]


def gather_weights() -> None:
    """Gathered weights are bitwise equal to the oracle's, NaN included; weights that no codec encodes are named."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = fully_shard(nn.Linear(10, 37))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    if rank == size - 1:
        with torch.no_grad():
            module.weight.to_local()[0, 3] = torch.nan
    whole = [parameter.full_tensor().detach() for parameter in module.parameters()]
    quantized = [weight.clone() for weight in whole]
    decoded(EIGHT, [quantized], size)
    assert quantized[0].isnan().sum() == BLOCK
    for async_op in (False, True):
        with torch.no_grad():
            module(torch.ones(1, 10))  # leaves unsharded weights behind, which were not encoded
        with tb.fsdp.attach(module, optimizer, BYTEGRAD, quantize_weights=EIGHT):
            handle = module.unshard(async_op=async_op)
            if handle is not None:
                handle.wait()
            for parameter, expected in zip(module.parameters(), quantized, strict=True):
                assert torch.equal(parameter.nan_to_num(7e7), expected.nan_to_num(7e7))
        module.unshard()  # with torch's all-gather again
        for parameter, expected in zip(module.parameters(), whole, strict=True):
            assert torch.equal(parameter.nan_to_num(7e7), expected.nan_to_num(7e7))

    with tb.fsdp.attach(module, optimizer, BYTEGRAD, quantize_weights="bfloat16"):
        with torch.inference_mode():
            module(torch.ones(1, 10))
        module(torch.ones(1, 10)).sum().backward()

    with pytest.raises(ValueError, match="ranks disagree on attach's argument quantize_weights"):
        tb.fsdp.attach(module, optimizer, BYTEGRAD, quantize_weights=["minmax_uint8", "minmax_uint4"][rank % 2])

    long = fully_shard(nn.Sequential(nn.Linear(512, 512)))
    recorder = tb.observe.Recorder()
    optimizer = torch.optim.SGD(long.parameters(), lr=0.1)
    with tb.fsdp.attach(long, optimizer, "bytegrad", quantize_weights="minmax_uint8", observers=[recorder]):
        long.unshard()
    sent = [event for event in recorder.events if event.phase == "send"]
    row = -(-512 // size) * 513
    assert {event.bucket for event in sent} == {"weights of FSDPSequential"}
    assert sum(event.raw_bytes for event in sent) == 4 * row * (size - 1)
    assert 3.9 * sum(event.wire_bytes for event in sent) < sum(event.raw_bytes for event in sent)

    mixed = nn.Linear(10, 37)
    mixed.bias = nn.Parameter(mixed.bias.detach().bfloat16(), requires_grad=False)
    fully_shard(mixed)
    whole = [parameter.full_tensor().detach() for parameter in mixed.parameters()]
    optimizer = torch.optim.SGD(mixed.parameters(), lr=0.1)
    message = "torchbagua: weights of FSDPLinear are gathered in full precision, because"
    with warnings.catch_warnings():
        # With the filter on one rank, all ranks raise, and nothing is installed.
        warnings.simplefilter("error" if rank == 1 else "ignore", tb.UncompressedParametersWarning)
        with pytest.raises(
            tb.UncompressedParametersWarning, match=f"{message}.* filter of rank 1 makes this an error$"
        ):
            tb.fsdp.attach(mixed, optimizer, BYTEGRAD, quantize_weights=EIGHT)
    with pytest.warns(tb.UncompressedParametersWarning, match=message):
        attachment = tb.fsdp.attach(mixed, optimizer, BYTEGRAD, quantize_weights=EIGHT)
    with attachment, warnings.catch_warnings():
        warnings.simplefilter("error")  # attach has already warned
        mixed.unshard()
        assert all(map(torch.equal, mixed.parameters(), whole))
        mixed.reshard()


class SentAsBfloat16(torch.Tensor):
    """A shard that defines how FSDP gathers it."""

    def fsdp_pre_all_gather(self, *_: Any) -> tuple[tuple[torch.Tensor], None]:
        return (self.as_subclass(torch.Tensor).bfloat16(),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor], metadata: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        (gathered,) = outputs
        if out is None:
            return gathered.to(dtype).view(-1, 10), outputs
        out.detach().copy_(gathered.view_as(out))
        return None


def make_layer_with_bfloat16_bias() -> nn.Linear:
    """Return a layer of two dtypes, which FSDP gathers as bytes."""
    layer = nn.Linear(10, 37)
    layer.bias = nn.Parameter(layer.bias.detach().bfloat16(), requires_grad=False)
    return fully_shard(layer)


def make_layer_with_extension() -> nn.Linear:
    layer = fully_shard(nn.Linear(10, 36))  # shards of equal length, since the extension does not pad
    weight: Any = layer.weight
    weight._local_tensor = weight._local_tensor.detach().as_subclass(SentAsBfloat16)
    return layer


def gather_exactly() -> None:
    """Full-precision weights are bitwise equal to torch's, in every way that FSDP gathers; its group stays idle."""
    makers = {
        "float32": lambda: fully_shard(nn.Linear(10, 37)),
        "bfloat16": lambda: fully_shard(nn.Linear(10, 37), mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
        "bytes": make_layer_with_bfloat16_bias,
        "an extension": make_layer_with_extension,
    }
    for name, make in makers.items():
        torch.manual_seed(0)
        module = make()
        module.unshard()
        whole = [parameter.detach().clone() for parameter in module.parameters()]
        module.reshard()
        (param_group,) = fsdp_param_groups(module)
        torch_gather = fsdp_all_gather(param_group)[0]
        optimizer = torch.optim.SGD([parameter for parameter in module.parameters() if parameter.requires_grad], lr=0.1)
        with tb.attach(module, optimizer, BYTEGRAD):
            assert type(fsdp_all_gather(param_group)[0]) is BoundedGather
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist, "all_gather_single", refuse_to_gather, raising=False)
                patch.setattr(dist, "all_gather_into_tensor", refuse_to_gather)
                for async_op in (False, True, False):
                    handle = module.unshard(async_op=async_op)
                    if handle is not None:
                        handle.wait()
                    assert all(map(torch.equal, module.parameters(), whole)), name
                    module.reshard()
                with torch.inference_mode():
                    module.unshard()
                assert all(map(torch.equal, module.parameters(), whole)), name
                module.reshard()
        assert fsdp_all_gather(param_group)[0] is torch_gather


def refuse_to_gather(*_: Any, **__: Any) -> None:
    raise AssertionError("FSDP gathers over its own group")


def watch_gradient(reached: threading.Event, layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    output.register_hook(lambda _: reached.set())


def overlap_with_backward() -> None:
    """Backward continues while the lane is busy, unless a hook reads the gradient before backward ends."""
    for reads in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(10, 37), nn.Linear(37, 3))
        fully_shard(module[1])
        fully_shard(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with tb.attach(module, optimizer, BYTEGRAD) as attachment:
            if reads:
                module[1].weight.register_post_accumulate_grad_hook(lambda _: None)
            reached = threading.Event()
            job = attachment.runner.lane.submit(partial(reached.wait, 1.0 if reads else 60.0))
            module[0].register_forward_hook(partial(watch_gradient, reached))
            module(torch.ones(1, 10)).sum().backward()
            assert job.result() != reads
            assert module[1].weight.grad.to_local().abs().sum() > 0


def refuse_uneven_nodes() -> None:
    """Three ranks on two nodes: the hierarchical algorithm is refused, and the flat algorithm trains."""
    module = fully_shard(nn.Linear(10, 37))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    groups = [tb.BaguaProcessGroup(dist.group.WORLD, nodes=["a", "a", "b"]) for _ in range(2)]
    with pytest.raises(ValueError, match=r"hierarchical must be False .* got \[\[0, 1\], \[2\]\]"):
        tb.attach(module, optimizer, BYTEGRAD, process_group=groups[0])
    flat = tb.ByteGradAlgorithm(hierarchical=False)
    with tb.attach(module, optimizer, flat, process_group=groups[1]):
        module(torch.ones(1, 10)).sum().backward()


def check_trace(case: Case, recorder: tb.observe.Recorder, attachment: tb.Attachment) -> None:
    sent = sum(event.bytes_sent for event in recorder.events)
    raw = sum(event.raw_bytes for event in recorder.events if event.phase == "send")
    # "wait" is recorded too, unless the lane always finishes before this thread waits.
    assert {event.phase for event in recorder.events} >= {"bucket", "send", "receive", "step", "backward"}
    kinds = {event.bucket.split(" of ")[0] for event in recorder.events if event.phase == "bucket"}
    assert kinds == ({"gradients"} if case.weights is None else {"gradients", "weights"})
    assert sent > 0
    scopes = {event.scope for event in recorder.events if event.phase == "send" and event.bucket.startswith("weights")}
    assert scopes == (set() if case.weights is None else {"inter_node", "intra_node"} if case.nodes else {"world"})
    if case.algorithm is FULL and case.weights is None:
        assert sent == raw
    elif not case.nodes:
        assert sent < raw


class Experts(nn.Module):
    """Layers of which a step uses some: in one FSDP parameter group, or in separate ones."""

    def __init__(self, widths: Sequence[int], *, separate: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, width, bias=False) for width in widths)
        for layer in self.layers:
            nn.init.ones_(layer.weight)
        if separate:
            for layer in self.layers:
                fully_shard(layer, reshard_after_forward=False)  # or else backward gathers what it uses

    def forward(self, x: torch.Tensor, used: Sequence[int]) -> torch.Tensor:
        """Compute with all layers, and return the sum of those that are used."""
        sums = [layer(x).sum() for layer in self.layers]
        return torch.stack([sums[index] for index in used]).sum()


def branches_of(size: int) -> Iterator[tuple[list[int], bool, list[list[list[int]]]]]:
    """Yield the widths of experts, whether they are separate parts, and those that each rank uses in each step."""
    others = [[0]] * (size - 1)
    yield [16, 16], False, [[[1], *others]]
    yield [16, 48], False, [[[0, 1]] * size] * 2 + [[[1], *others]]
    yield [16, 16, 8], False, [[[0]] * size, [[1]] * size, [[0]] * size, [[1]] * size, [*others, [1]]]
    yield [16, 48], False, [[[0, 1]] * size] * 2 + [[*others, [0, 1]]]
    yield [16, 48], True, [[[0, 1]] * size] * 2 + [[*others, [1]]]


def use_different_branches() -> None:
    """All ranks raise before a gradient is added, and name the parameters; equal branches may alternate."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for algorithm in (BYTEGRAD, FULL):
        for widths, separate, steps in branches_of(size):
            module = Experts(widths, separate=separate)
            fully_shard(module)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
            attachment = tb.attach(module, optimizer, algorithm, timeout=timedelta(seconds=30))
            parameters = list(module.parameters())
            for used in steps[:-1]:
                optimizer.zero_grad()
                module(torch.full((1, 8), rank + 1.0), used[rank]).backward()
                for index, parameter in enumerate(parameters):
                    assert (parameter.grad is not None) == (index in used[rank])
                    if parameter.grad is not None:
                        assert parameter.grad.to_local().unique().tolist() == [(size + 1) / 2]
            optimizer.zero_grad()
            with pytest.raises(tb.CommunicationError) as caught:
                module(torch.full((1, 8), rank + 1.0), steps[-1][rank]).backward()
            for number in (0, size - 1):
                common = set(steps[-1][0]) & set(steps[-1][-1])
                names = ", ".join(f"layers.{index}.weight" for index in steps[-1][number] if index not in common)
                assert f"rank {number}" in str(caught.value)
                assert names in str(caught.value) or separate, (str(caught.value), names)
            assert "ranks have gradients of different parameters" in str(caught.value), caught.value
            attachment.detach()


CHECKS: dict[str, Callable[[], None]] = {
    "branches": use_different_branches,
    "scaled": scale_gradients,
    "another divisor": change_the_divisor,
    "gathered": gather_weights,
    "gathered exactly": gather_exactly,
    "overlapped": overlap_with_backward,
    "uneven nodes": refuse_uneven_nodes,
}


def main() -> None:
    global DEVICE
    backend, *names = sys.argv[1:] if sys.argv[1] == "nccl" else ["gloo", *sys.argv[1:]]
    DEVICE = begin_rank(backend, timedelta(seconds=60))
    torch.set_num_threads(1)
    run_cases(names, lambda name: train(CASES[name]) if name in CASES else CHECKS[name]())


if __name__ == "__main__":
    main()
