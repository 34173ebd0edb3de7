"""One rank that trains modules on which fully_shard was called, and compares with an oracle; started by torchrun.

The oracle: each rank forms the gradients of all ranks' data with an unsharded copy, one after the other, codes each row
of each, and adds them in rank order. What FSDP leaves in `.grad` must have these bits. Where weights are quantised, the
copy computes with weights of which each row has been coded.

Arguments: the names of the cases, "scaled" for gradients under a GradScaler, "gathered" for weights alone, "gathered
exactly" for these in full precision, "overlapped", and "uneven nodes".
"""

import copy
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
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
from oracle import ordered_sum, quantise, quantise_block, quantise_block_4_bits
from rank_cases import run_cases
from torchbagua._torch import fsdp_all_gather, fsdp_param_groups, fsdp_reduce_scatter
from torchbagua.codecs import Compressor, Identity, MeanCodecs, MinMaxUInt4, MinMaxUInt8
from torchbagua.training.fsdp2.bounded import BoundedGather

BLOCK = 16
F32 = np.float32
BYTEGRAD = tb.ByteGradAlgorithm(block=BLOCK)
EIGHT, FOUR = MinMaxUInt8(BLOCK), MinMaxUInt4(BLOCK)
FOUR_BITS = tb.CompressedAllReduceAlgorithm(FOUR)
FULL = tb.CompressedAllReduceAlgorithm(None)


@dataclass(frozen=True)
class OwnAlgorithm(tb.Algorithm):
    """One that a user has written: gradients in 4 bits, within nodes in full precision."""

    def make_codec(self) -> Compressor:
        return FOUR

    def make_shard_codecs(self) -> MeanCodecs:
        return MeanCodecs(self.make_codec(), Identity())

    def make_impl(self, runner: tb.Runner) -> tb.AlgorithmImpl:
        return tb.AlgorithmImpl(runner)


OWN = OwnAlgorithm()


class Net(nn.Module):
    """Layers whose first dimensions no number of ranks divides, a frozen one, and one that may be left out."""

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
    """What differs from plain `fully_shard`, with ByteGrad.

    Attributes:
        algorithm: is attached.
        policy, reshards: arguments of `fully_shard`.
        prepare: called with the sharded module.
        divisor: of the sum; by default the number of ranks.
        accumulates: two micro-steps; "before" they are reduced, as `set_requires_gradient_sync` does, or "after" that.
        poison: added to the first input of rank 0 in the second step, the last.
        skips: whether a layer has no part in forward, and no gradient; all layers then communicate together.
        nodes: whether ranks are on two nodes.
        compiles: whether a layer is compiled.
        freezes: whether a bias is frozen in the second step, and free again in the third.
        weights: fsdp.attach's quantize_weights.
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


def coded(case: Case, row: Any, segments: list[int]) -> Any:
    if case.algorithm is FULL:
        return row
    return quantise(row, segments, BLOCK, quantise_block if case.algorithm is BYTEGRAD else quantise_block_4_bits)


def row_of(gradient: torch.Tensor, rank: int, size: int) -> Any:
    """Return what `rank` owns of a gradient, padded with zeros."""
    length = -(-gradient.shape[0] // size)
    padded = torch.zeros(size * length, *gradient.shape[1:])
    padded[: gradient.shape[0]] = gradient.float()
    return padded[rank * length : (rank + 1) * length].reshape(-1).numpy()


def decoded(weights: str | Compressor | None, groups: list[list[torch.Tensor]], size: int) -> None:
    """Code the weights of each FSDP parameter group in place, row by row: one for each of `size` ranks."""
    if weights is None:
        return
    for members in groups:
        for rank in range(size):
            rows = [row_of(one.detach(), rank, size) for one in members]
            segments = [one.size for one in rows]
            row = np.concatenate(rows)
            if weights == "bfloat16":
                row = torch.from_numpy(row).bfloat16().float().numpy()
            else:
                row = quantise(row, segments, BLOCK, quantise_block if weights is EIGHT else quantise_block_4_bits)
            for one, part in zip(members, np.split(row, np.cumsum(segments)[:-1]), strict=True):
                length = -(-one.shape[0] // size)
                own = one.detach()[rank * length : (rank + 1) * length]
                own.copy_(torch.from_numpy(part[: own.numel()]).view_as(own))


def expected_row(case: Case, gradients: list[list[torch.Tensor]], shared: bool) -> Any:
    """Return the mean of own row of the gradients of all ranks, which are those of one FSDP parameter group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [[row_of(one, rank, size) for one in of_rank] for of_rank in gradients]
    segments = [one.size for one in rows[0]]
    whole = [np.concatenate(one) for one in rows]
    if case.nodes:  # full precision within the two nodes
        half = size // 2
        whole = [ordered_sum(whole[:half]), ordered_sum(whole[half:])]
    total = ordered_sum([coded(case, one, [sum(segments)] if shared else segments) for one in whole])
    mean = total / F32(case.divisor or size)
    if case.policy.reduce_dtype is torch.bfloat16:
        mean = torch.from_numpy(mean).bfloat16().float().numpy()
    return np.split(mean, np.cumsum(segments)[:-1])


def data_of(step: int, rank: int, micro: int, case: Case) -> torch.Tensor:
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
    if step == 1 and rank == 0:
        x[0, 0] += case.poison
    return x


def comms(module: nn.Module) -> list[Any]:
    """Return what FSDP reduce-scatters and gathers with."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    groups = [fsdp_param_groups(part)[0] for part in parts]
    return [comm for one in groups for comm in (fsdp_reduce_scatter(one)[0], fsdp_all_gather(one)[0])]


def train(case: Case) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    module, copied = Net(), Net()
    copied.load_state_dict(module.state_dict())
    shard = partial(
        fully_shard,
        mesh=init_device_mesh("cpu", (size,)),
        reshard_after_forward=case.reshards,
        mp_policy=case.policy,
    )
    shard([module.first, module.middle[0]])
    shard(module.middle[1])
    shard(module.frozen)
    groups = [["first", "middle.0"], ["middle.1"], ["frozen"], ["last"]]
    if case.skips:  # one group with a part that is left out
        module = Net()
        module.load_state_dict(copied.state_dict())
        groups = [["first", "middle.0", "middle.1", "frozen", "last"]]
    shard(module)
    case.prepare(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    nodes = [other * 2 // size for other in range(size)]
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
        for one in (module.first.bias, copied.first.bias):
            one.requires_grad_(not (case.freezes and step == 1))
        computing = copy.deepcopy(copied).to(dtype)
        of_groups = [
            [one for name, one in computing.named_parameters() if name.rsplit(".", 1)[0] in names] for names in groups
        ]
        decoded(case.weights, of_groups, dist.get_world_size())
        micros = [0, 1] if case.accumulates else [0]
        # One list of gradients for each reduction: of micro-steps, or of their sum.
        reductions: list[list[dict[str, torch.Tensor]]] = []
        for micro in micros:
            of_ranks = []
            for other in range(size):
                unsharded = copy.deepcopy(computing)
                unsharded(data_of(step, other, micro, case).to(dtype), case.skips).float().square().sum().backward()
                of_ranks.append({name: one.grad for name, one in unsharded.named_parameters() if one.grad is not None})
            if case.accumulates == "before" and reductions:
                for mine, new in zip(reductions[0], of_ranks, strict=True):
                    for name in mine:
                        mine[name] = mine[name] + new[name]
            else:
                reductions.append(of_ranks)
            module.set_requires_gradient_sync(micro == micros[-1] or case.accumulates == "after")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                module(data_of(step, rank, micro, case), case.skips).float().square().sum().backward()
            told = [one for one in caught if "not all parameters had a gradient" in str(one.message)]
            assert len(told) == (case.skips and step == 0), [str(one.message) for one in caught]
        parameters = dict(module.named_parameters())
        for names in groups:
            members = [name for name in parameters if name in reductions[0][0] and name.rsplit(".", 1)[0] in names]
            if not members:  # all are frozen
                continue
            totals: list[Any] = []
            for of_ranks in reductions:
                rows = expected_row(case, [[one[name] for name in members] for one in of_ranks], case.skips)
                totals = [before + new for before, new in zip(totals, rows, strict=True)] if totals else rows
            for name, row in zip(members, totals, strict=True):
                local = parameters[name].grad.to_local().reshape(-1)
                assert torch.equal(local.nan_to_num(7e7), torch.from_numpy(row[: local.numel()]).nan_to_num(7e7)), (
                    f"step {step}, {name}: {local[:5]} {row[:5]}"
                )
        has_nan = any(bool(one.grad.to_local().isnan().any()) for one in parameters.values() if one.grad is not None)
        if case.poison and step == 1:
            assert has_nan
            break
        assert not has_nan
        optimizer.step()
        with torch.no_grad():
            for name, one in copied.named_parameters():
                one.copy_(parameters[name].full_tensor())
    check_trace(case, recorder, attachment)
    attachment.detach()
    assert all(map(lambda one, other: one is other, before, comms(module)))


def scale_gradients() -> None:
    """An Inf that lands in the shard of rank 0 alone has all ranks skip the step."""
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


def gather_weights() -> None:
    """Gathered weights have the oracle's bits, also where one is not a number; what cannot be coded is named."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = fully_shard(nn.Linear(10, 37))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    if rank == size - 1:
        with torch.no_grad():
            module.weight.to_local()[0, 3] = torch.nan
    whole = [one.full_tensor().detach() for one in module.parameters()]
    coded = [one.clone() for one in whole]
    decoded(EIGHT, [coded], size)
    assert coded[0].isnan().sum() == BLOCK
    for async_op in (False, True):
        with torch.no_grad():
            module(torch.ones(1, 10))  # leaves whole weights behind, which were not coded
        with tb.fsdp.attach(module, optimizer, BYTEGRAD, quantize_weights=EIGHT):
            handle = module.unshard(async_op=async_op)
            if handle is not None:
                handle.wait()
            for one, expected in zip(module.parameters(), coded, strict=True):
                assert torch.equal(one.nan_to_num(7e7), expected.nan_to_num(7e7))
        module.unshard()  # by torch again
        for one, expected in zip(module.parameters(), whole, strict=True):
            assert torch.equal(one.nan_to_num(7e7), expected.nan_to_num(7e7))

    with tb.fsdp.attach(module, optimizer, BYTEGRAD, quantize_weights="bfloat16"):
        with torch.inference_mode():
            module(torch.ones(1, 10))
        module(torch.ones(1, 10)).sum().backward()

    with pytest.raises(ValueError, match="ranks disagree in attach's argument quantize_weights"):
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
    whole = [one.full_tensor().detach() for one in mixed.parameters()]
    optimizer = torch.optim.SGD(mixed.parameters(), lr=0.1)
    message = "torchbagua: weights of FSDPLinear are gathered in full precision, because"
    with warnings.catch_warnings():
        # A filter of one rank: all raise, and nothing is installed.
        warnings.simplefilter("error" if rank == 1 else "ignore", tb.UncompressedParametersWarning)
        with pytest.raises(
            tb.UncompressedParametersWarning, match=f"{message}.* filter of rank 1 makes this an error$"
        ):
            tb.fsdp.attach(mixed, optimizer, BYTEGRAD, quantize_weights=EIGHT)
    with pytest.warns(tb.UncompressedParametersWarning, match=message):
        attachment = tb.fsdp.attach(mixed, optimizer, BYTEGRAD, quantize_weights=EIGHT)
    with attachment, warnings.catch_warnings():
        warnings.simplefilter("error")  # attach has said it
        mixed.unshard()
        assert all(map(torch.equal, mixed.parameters(), whole))
        mixed.reshard()


class SentAsBfloat16(torch.Tensor):
    """A shard that says how it is gathered."""

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


def with_a_bias_in_bfloat16() -> nn.Linear:
    """What FSDP gathers as bytes."""
    layer = nn.Linear(10, 37)
    layer.bias = nn.Parameter(layer.bias.detach().bfloat16(), requires_grad=False)
    return fully_shard(layer)


def with_an_extension() -> nn.Linear:
    layer = fully_shard(nn.Linear(10, 36))  # shards of equal length: it does not pad
    weight: Any = layer.weight
    weight._local_tensor = weight._local_tensor.detach().as_subclass(SentAsBfloat16)
    return layer


def gather_exactly() -> None:
    """Weights in full precision have torch's bits, in all ways in which FSDP gathers them; its group is idle."""
    makers = {
        "float32": lambda: fully_shard(nn.Linear(10, 37)),
        "bfloat16": lambda: fully_shard(nn.Linear(10, 37), mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
        "bytes": with_a_bias_in_bfloat16,
        "an extension": with_an_extension,
    }
    for name, make in makers.items():
        torch.manual_seed(0)
        module = make()
        module.unshard()
        whole = [one.detach().clone() for one in module.parameters()]
        module.reshard()
        (param_group,) = fsdp_param_groups(module)
        torchs = fsdp_all_gather(param_group)[0]
        optimizer = torch.optim.SGD([one for one in module.parameters() if one.requires_grad], lr=0.1)
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
        assert fsdp_all_gather(param_group)[0] is torchs


def refuse_to_gather(*_: Any, **__: Any) -> None:
    raise AssertionError("FSDP gathers over its own group")


def watch_gradient(reached: threading.Event, layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    output.register_hook(lambda _: reached.set())


def overlap_with_backward() -> None:
    """Backward goes on while the lane is busy, unless somebody reads the gradient before its end."""
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
    """Over three ranks; without respect to nodes they train."""
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
    # And "wait", unless the lane is always done before this thread looks.
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


CHECKS: dict[str, Callable[[], None]] = {
    "scaled": scale_gradients,
    "gathered": gather_weights,
    "gathered exactly": gather_exactly,
    "overlapped": overlap_with_backward,
    "uneven nodes": refuse_uneven_nodes,
}


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    run_cases(sys.argv[1:], lambda name: train(CASES[name]) if name in CASES else CHECKS[name]())


if __name__ == "__main__":
    main()
