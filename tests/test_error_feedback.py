"""The life of error feedback, for each algorithm that has it: when a residual is stored, kept, saved and refused.

The first tests compare averaged gradients with the oracle. The others are cases over the table `ALGORITHMS`.
"""

import copy
import io
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import oracle
import torchbagua as tb
from devices import decide_on_device
from pairwise import pairwise
from q_adam_life import ChannelsLast
from ranks import leave_by_exception, run_ranks
from torchbagua.algorithms.gradient.function import MeanFunction
from training import Branches, OneElement, Run, Tower, Wide, build, flat, train

Tensors = dict[str, torch.Tensor]

TOWER, BRANCHES, WIDE, CHANNELS_LAST = build(Tower), build(Branches), build(Wide), build(ChannelsLast)
WITH = tb.ByteGradAlgorithm(error_feedback=True)
MOMENTUM = tb.TopKAlgorithm(0.02, block=512, momentum=0.75, warmup_steps=3)


def kept_in_warm_up(step: int) -> int:
    """Return how many of 512 elements MOMENTUM sends."""
    return math.ceil(512 * 0.25 * (0.02 / 0.25) ** (min(4 * step // 3, 4) / 4))


# An algorithm, and the blocks of its codec in each step.
MEANS: dict[str, tuple[Any, Callable[[int], tuple[int, oracle.Coded]]]] = {
    "8 bits": (WITH, lambda step: (2048, oracle.quantise_block)),
    "4 bits": (tb.CompressedAllReduceAlgorithm(error_feedback=True), lambda step: (128, oracle.quantise_block_4_bits)),
    "8 bits, flat": (
        tb.ByteGradAlgorithm(hierarchical=False, error_feedback=True),
        lambda step: (2048, oracle.quantise_block),
    ),
    "top-k": (tb.TopKAlgorithm(0.01), lambda step: (2048, oracle.largest_of(2048, 21))),
    "top-k, flat": (tb.TopKAlgorithm(0.01, hierarchical=False), lambda step: (2048, oracle.largest_of(2048, 21))),
    "runs": (tb.TopKAlgorithm(0.01, selection="block"), lambda step: (2048, oracle.largest_run_of(2048, 21))),
    "momentum": (MOMENTUM, lambda step: (512, oracle.largest_of(512, kept_in_warm_up(step)))),
    "momentum without masking": (
        tb.TopKAlgorithm(0.02, block=512, momentum=0.75, momentum_masking=False),
        lambda step: (512, oracle.largest_of(512, 11)),
    ),
}


def check_runs(runs: Sequence[Run], name: str = "8 bits", nodes: Sequence[int] | None = None) -> None:
    """Check that averaged gradients are the oracle's mean of the local gradients plus the previous residuals."""
    algorithm, blocks_of = MEANS[name]
    nodes = nodes if algorithm.hierarchical else None
    means: dict[str, oracle.TwoPhaseResiduals] = {}
    for step, averaged in enumerate(runs[0].averaged):
        block, coded = blocks_of(step)
        for parameter, gradient in averaged.items():
            assert all(torch.equal(run.averaged[step][parameter], gradient) for run in runs), "replicas differ"
            dtype = gradient.dtype
            is_short = dtype in (torch.bfloat16, torch.float16)
            rows = [flat(row.float() if is_short else row) for row in (run.local[step][parameter] for run in runs)]
            if rows[0].dtype == np.float64:
                expected = oracle.gradient_allreduce(rows, nodes)
            else:
                mean = means.setdefault(parameter, oracle.TwoPhaseResiduals(lambda row: row, nodes))
                mean.momentum = getattr(algorithm, "momentum", None)
                mean.forgets = getattr(algorithm, "momentum_masking", True)
                mean.quantise = partial(oracle.quantise, segments=[rows[0].size], block=block, coded=coded)
                expected = mean(rows)
            if is_short:
                expected, gradient = flat(torch.from_numpy(expected).to(dtype).float()), gradient.float()
            np.testing.assert_array_equal(flat(gradient), expected, err_msg=f"{parameter}, step {step}")


@pairwise(
    name=list(MEANS),
    ranks=[(2, None), (4, [0, 0, 1, 1]), (3, [0, 0, 1])],
    options=[
        {},
        {"num_micro_batches": 2, "bucket_cap_mb": 0.01},
        {"gradient_as_bucket_view": True, "static_graph": True},
    ],
)
def test_the_oracle(name: str, ranks: tuple[int, list[int] | None], options: dict[str, Any]) -> None:
    size, nodes = ranks
    algorithm = MEANS[name][0]
    runs = run_ranks(size, lambda group: train(group, TOWER, algorithm, nodes=nodes, tells_optimizer=True, **options))
    check_runs(runs, name, nodes)


def mixed() -> nn.Module:
    return Tower(dtypes=(torch.float32, torch.bfloat16, torch.float16))


@pytest.mark.parametrize("make_model", [Branches, OneElement, mixed, Wide])
@pytest.mark.filterwarnings("ignore:torchbagua. ByteGradAlgorithm sends")
def test_the_oracle_for_other_models(device: torch.device, make_model: Callable[[], nn.Module]) -> None:
    """Models with parts that some ranks or no rank uses, with one element, and with other dtypes, even complex."""
    model = build(make_model).to(device)
    unused = {"find_unused_parameters": True} if make_model is Branches else {}
    check_runs(run_ranks(2, lambda group: train(group, model, WITH, tells_optimizer=True, **unused), device=device))


# The table. Each loop takes NUM_WARM steps, after which all of them have residuals.
NUM_WARM = 3
BETA1 = 0.8
COLD = "low rank, cold"  # its results depend on the number of backward passes


def make_q_adam(parameters: Sequence[nn.Parameter]) -> tb.QAdamOptimizer:
    """Return an optimizer whose parameters end their warm-ups after one and after two steps."""
    groups = [{"params": parameters[i::2], "warmup_steps": 1 + i} for i in range(2)]
    return tb.QAdamOptimizer(groups, lr=0.01, betas=(BETA1, 0.99), fused=True)  # a fused Adam would skip steps itself


def in_full_precision(flat: torch.Tensor, group: tb.BaguaProcessGroup) -> None:
    group.all_reduce(flat, average=True)


def in_steps(flat: torch.Tensor) -> torch.Tensor:
    return flat.mul(64).round().div(64)


class OwnState:
    """A user's own state, which a device cannot unstage: the residual of a bucket."""

    def __init__(self, bucket: tb.extend.BaguaBucket, held: Sequence[Sequence[torch.Tensor]] | None) -> None:
        self.values = torch.zeros_like(bucket.flat) if held is None else torch.cat([values for (values,) in held])
        self.last, self.staged = self.values.clone(), self.values.clone()

    def continue_from_staged(self, parts: Sequence[slice]) -> None:
        self.last = self.values.clone()
        for part in parts:
            self.last[part] = self.staged[part]

    def commit(self, parts: Sequence[slice] | None = None) -> None:
        for part in [slice(None)] if parts is None else parts:
            self.values[part] = self.staged[part]

    def expand(self, part: slice) -> Sequence[torch.Tensor]:
        return [self.values[part]]


class OwnImpl(tb.AlgorithmImpl):
    """Averages rounded gradients."""

    def __init__(self, runner: tb.extend.GradientRunner) -> None:
        super().__init__(runner)
        state = tb.extend.ParameterState("OwnAlgorithm", OwnState, {"residual": None})
        self.feedback = tb.extend.ErrorFeedback(runner, state)

    def init_operations(self, module: nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
        self.feedback.append(bucket, self.append_mean)

    def append_mean(self, bucket: tb.extend.BaguaBucket) -> None:
        state: OwnState = self.feedback.state.of_bucket(bucket)

        def average(bucket: tb.extend.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
            bucket.flat.add_(state.last)
            sent = in_steps(bucket.flat)
            state.staged = bucket.flat - sent
            in_full_precision(bucket.flat.copy_(sent), group)

        bucket.append_python_op(average)


class OwnAlgorithm(tb.Algorithm):
    def make_impl(self, runner: tb.extend.GradientRunner) -> tb.AlgorithmImpl:
        return OwnImpl(runner)


ALGORITHMS: dict[str, Callable[[Any], tb.Algorithm]] = {
    "8 bits": lambda _: WITH,
    "top-k": lambda _: tb.TopKAlgorithm(0.01),
    "momentum": lambda _: MOMENTUM,
    "low rank": lambda _: tb.PowerSGDAlgorithm(rank=2, start_step=1),
    COLD: lambda _: tb.PowerSGDAlgorithm(rank=2, start_step=1, warm_start=False),
    "QAdam": lambda optimizer: tb.QAdamAlgorithm(optimizer, compression="sign1bit", error_feedback=True),
    "function": lambda _: MeanFunction("in steps", in_full_precision, in_steps),
    "own": lambda _: OwnAlgorithm(),
}
NAMES = [name for name in ALGORITHMS if name != COLD]
WITHOUT_MOMENTUM = [name for name in NAMES if name != "momentum"]  # with it, a step has one synchronized backward
EACH = pytest.mark.parametrize("name", NAMES)


class Loop:
    """One rank's training with an algorithm attached, from the table or given."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        algorithm: str | tb.Algorithm,
        model: nn.Module = TOWER,
        *,
        nodes: Sequence[int] | None = None,
        scale: float | None = None,
        lr: float = 1e-3,
        num_optimizers: int = 1,
        observers: Sequence[tb.observe.Observer] = (),
        **ddp_options: Any,
    ) -> None:
        self.ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group, **ddp_options)
        self.named = {n: parameter for n, parameter in self.ddp.module.named_parameters() if parameter.requires_grad}
        make = make_q_adam if algorithm == "QAdam" else partial(torch.optim.SGD, lr=lr)
        shares = [list(self.named.values())[i::num_optimizers] for i in range(num_optimizers)]
        self.optimizers: list[torch.optim.Optimizer] = list(map(make, shares))
        self.scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=scale or 1, growth_interval=2)
        self.data = torch.Generator().manual_seed(1000 + group.rank())
        self.rank = group.rank()
        self.attachment = tb.attach(
            self.ddp,
            self.optimizers,
            ALGORITHMS[algorithm](self.optimizers[0]) if isinstance(algorithm, str) else algorithm,
            process_group=None if nodes is None else tb.BaguaProcessGroup(group, nodes=nodes),
            grad_scaler=None if scale is None else self.scaler,
            observers=observers,
        )

    def backward(self, choice: int = 0, factor: float = 1.0) -> None:
        x = torch.randn(6, 10, generator=self.data)
        self.scaler.scale(self.ddp(x, choice).square().sum() * factor).backward()

    def update(self, which: Sequence[int] | None = None) -> None:
        for index in range(len(self.optimizers)) if which is None else which:
            self.scaler.step(self.optimizers[index])
        self.scaler.update()

    def step(
        self, choice: int = 0, factor: float = 1.0, *, set_to_none: bool = True, which: Sequence[int] | None = None
    ) -> None:
        self.ddp.zero_grad(set_to_none=set_to_none)
        self.backward(choice, factor)
        self.update(which)

    def kept(self) -> dict[str, Tensors]:
        """Return residuals, velocities and factors by kind and parameter."""
        return {kind: each for kind, each in self.attachment.runner.state_dict().items() if isinstance(each, dict)}

    def residuals_of_sums(self) -> Tensors:
        """Return what this rank has left out of the sums of all ranks' gradients."""
        kept = self.kept()
        sent = next(kept[kind] for kind in ("sent", "error", "residual") if kind in kept)
        share = 1 - BETA1 if isinstance(self.optimizers[0], tb.QAdamOptimizer) else 1
        size = self.attachment.runner.process_group.size
        mean = kept.get("mean", {})
        return {name: (residual + (size * mean[name] if mean else 0)) / share for name, residual in sent.items()}

    def weights(self) -> Tensors:
        return {name: parameter.detach().clone() for name, parameter in self.named.items()}

    def everything(self) -> Tensors:
        """Return weights, the optimizers' moments, and what the algorithm has kept."""
        found = self.weights()
        for kind, tensors in self.kept().items():
            found |= {f"{kind} of {name}": tensor for name, tensor in tensors.items()}
        for name, parameter in self.named.items():
            state = next((each.state[parameter] for each in self.optimizers if parameter in each.state), {})
            found |= {f"{key} of {name}": x.clone() for key, x in state.items() if isinstance(x, torch.Tensor)}
        return found


def same(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pairwise(
    name=NAMES,
    ranks=[(2, None), (3, [0, 0, 1])],
    # set_to_none, gradient_as_bucket_view, and where commits are decided
    way=[(False, False, True), (False, False, False), (False, True, True), (True, True, False)],
)
def test_a_skipped_step_and_an_unused_parameter_leave_no_trace(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    ranks: tuple[int, list[int] | None],
    way: tuple[bool, bool, bool],
) -> None:
    """Only one rank has an Inf. DDP writes no mean to the gradient of an unused parameter, unless that is a view."""
    (size, nodes), (set_to_none, as_views, on_device) = ranks, way
    if on_device:
        decide_on_device(monkeypatch)

    def body(group: dist.ProcessGroup) -> tuple[bool, bool, bool]:
        options = {"find_unused_parameters": True, "gradient_as_bucket_view": as_views}
        loop = Loop(group, name, BRANCHES, nodes=nodes, scale=1024.0, **options)
        with loop.attachment:
            for _ in range(NUM_WARM):
                loop.step()
            before = loop.everything()
            loop.step(factor=torch.inf if loop.rank == 1 else 1.0)
            assert same(loop.everything(), before)
            before = loop.kept()
            loop.step(choice=1, set_to_none=set_to_none)
            after = loop.kept()
            assert all(tensor.isfinite().all() for tensor in loop.everything().values())
        gradient = loop.named["left.weight"].grad
        is_used = gradient is not None and bool(gradient.any())
        left, stem = (
            all(torch.equal(after[kind][weight], before[kind][weight]) for kind in after)
            for weight in ("left.weight", "stem.weight")
        )
        return is_used, left, stem

    are_used, left_is_kept, stem_is_kept = zip(*run_ranks(size, body), strict=True)
    is_rounded_to_zero = name in ("function", "own")  # what they have left out
    assert set(are_used) == {as_views and not set_to_none and not is_rounded_to_zero}
    assert all(left_is_kept) != are_used[0]
    assert not all(stem_is_kept)  # a rank that owns no shard has no residual that could change


@pairwise(name=NAMES, set_to_none=[True, False], on_device=[True, False])
@pytest.mark.filterwarnings("ignore:torchbagua:RuntimeWarning")
def test_gradients_that_no_step_uses_commit_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, set_to_none: bool, on_device: bool
) -> None:
    if on_device:
        decide_on_device(monkeypatch)

    def body(group: dist.ProcessGroup) -> None:
        plain, extra = Loop(group, name), Loop(group, name)
        for loop in (plain, extra):
            for step in range(NUM_WARM + 2):
                if loop is extra and step >= NUM_WARM:  # its gradients are cleared
                    data = loop.data.get_state()
                    loop.backward(factor=3.0)
                    loop.data.set_state(data)
                loop.ddp.zero_grad(set_to_none=set_to_none)
                with loop.ddp.no_sync():
                    loop.backward()
                loop.backward()
                loop.update()
        assert same(plain.everything(), extra.everything())
        before = extra.kept()
        extra.update()  # a second step after the backward
        extra.backward()
        extra.ddp.zero_grad(set_to_none=set_to_none)
        with extra.ddp.no_sync():
            extra.backward()
        extra.update()  # with local gradients
        extra.backward()
        extra.attachment.load_state_dict(copy.deepcopy(extra.attachment.state_dict()))
        for _ in range(1 if name == "momentum" else 2):  # the first is not the second pass of an earlier step
            extra.backward()
        assert all(same(kept, before[kind]) for kind, kept in extra.kept().items())
        for loop in (plain, extra):
            loop.attachment.detach()
            assert not any(parameter._backward_hooks for parameter in loop.named.values())

    run_ranks(2, body)


def add_to(total: torch.Tensor, scaler: torch.amp.GradScaler, gradient: torch.Tensor) -> None:
    total += gradient / scaler.get_scale()


def one_pass(loop: Loop, step: int) -> None:
    loop.backward(step + loop.rank)


def late_flag(loop: Loop, step: int) -> None:
    """Adds local gradients to the average."""
    for number in range(2):
        with loop.ddp.no_sync() if number > 0 else nullcontext():
            loop.backward(step)


def two_losses(loop: Loop, step: int) -> None:
    output = loop.ddp(torch.randn(6, 10, generator=loop.data), step)
    loop.scaler.scale(output.square().sum()).backward(retain_graph=True)
    loop.scaler.scale(output.sum()).backward()


def synchronized_passes(loop: Loop, step: int) -> None:
    """Each sends the averages of those before it again, which contain the residual."""
    for _ in range(3):
        loop.backward(step)


@pairwise(
    name=WITHOUT_MOMENTUM,
    add_gradients=[one_pass, late_flag, two_losses, synchronized_passes],
    setting=[
        {"bucket_cap_mb": 0.01},
        {"nodes": [0, 0, 1], "reloads": True},
        {"scale": 1024.0, "model": CHANNELS_LAST, "lr": 1e-6, "reloads": True},
    ],
    on_device=[True, False],
)
@pytest.mark.filterwarnings("ignore:torchbagua:RuntimeWarning")
def test_nothing_is_lost_and_nothing_counts_twice(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    add_gradients: Callable[[Loop, int], None],
    setting: dict[str, Any],
    on_device: bool,
) -> None:
    if on_device:
        decide_on_device(monkeypatch)
    check_that_nothing_is_lost(name, add_gradients, **setting)


@pytest.mark.parametrize(("name", "model"), [*((name, BRANCHES) for name in WITHOUT_MOMENTUM), ("8 bits", WIDE)])
@pytest.mark.filterwarnings("ignore:torchbagua. ByteGradAlgorithm sends")
def test_nothing_is_lost_of_complex_parameters_and_of_those_that_some_or_no_ranks_use(
    name: str, model: nn.Module
) -> None:
    options = {"find_unused_parameters": True, "bucket_cap_mb": 0.01} if model is BRANCHES else {}
    check_that_nothing_is_lost(name, one_pass, model=model, reloads=True, **options)


def check_that_nothing_is_lost(
    name: str, add_gradients: Callable[[Loop, int], None], *, reloads: bool = False, **options: Any
) -> None:
    """Check that all ranks' gradients sum to the gradients of their steps and the residuals, over several steps."""
    nodes = options.get("nodes")
    size = 2 if nodes is None else len(nodes)

    def body(group: dist.ProcessGroup) -> tuple[Tensors, Tensors, Tensors]:
        loop = Loop(group, name, **options)
        computed, used = ({n: torch.zeros_like(p) for n, p in loop.named.items()} for _ in range(2))
        for parameter_name, parameter in loop.named.items():
            parameter.register_hook(partial(add_to, computed[parameter_name], loop.scaler))
        with loop.attachment:
            for step in range(NUM_WARM + 2):
                loop.ddp.zero_grad()
                # DDP rebuilds its buckets after its first pass.
                (add_gradients if step else one_pass)(loop, step)
                loop.update()  # unscales the gradients
                for parameter_name, parameter in loop.named.items():
                    used[parameter_name] += 0 if parameter.grad is None else parameter.grad
                if reloads and step == NUM_WARM:
                    loop.attachment.load_state_dict(copy.deepcopy(loop.attachment.state_dict()))
            return computed, used, loop.residuals_of_sums()

    runs = run_ranks(size, body)
    shares = []
    for parameter in runs[0][2]:
        computed, used, left_out = (sum(run[index][parameter] for run in runs) for index in range(3))
        # The rounding of sums over the steps in float32.
        assert (computed - used - left_out).norm() <= 1e-5 * computed.norm(), parameter
        shares.append(float(left_out.norm() / computed.norm().clamp_min(1e-30)))
    assert max(shares) > 1e-4 or options.get("model") is CHANNELS_LAST


@pairwise(name=[*NAMES, COLD], ranks=[(2, None), (3, [0, 0, 1])], stop=[1, NUM_WARM], is_new=[True, False])
def test_resume_bit_for_bit(name: str, ranks: tuple[int, list[int] | None], stop: int, is_new: bool) -> None:
    """Chunks then have other owners: DDP rebuilds its buckets after its first step, and bucket_cap_mb may differ."""
    (size, nodes), end = ranks, NUM_WARM + 2

    def body(group: dist.ProcessGroup) -> None:
        first = Loop(group, name, nodes=nodes, bucket_cap_mb=0.01)
        with first.attachment:
            for step in range(end):
                if step == stop:
                    own = {"model": first.ddp.module.state_dict(), "optimizer": first.optimizers[0].state_dict()}
                    state = copy.deepcopy({**own, "data": first.data.get_state()})
                    state["attachment"] = first.attachment.state_dict()
                first.step()
            torch.save(state, file := io.BytesIO())  # later steps have not changed the state
        second = Loop(group, name, nodes=nodes, bucket_cap_mb=25 if is_new else 0.01)
        with second.attachment:
            for _ in range(0 if is_new else NUM_WARM):  # loading discards these steps
                second.step()
            state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            second.ddp.module.load_state_dict(state["model"])
            second.optimizers[0].load_state_dict(state["optimizer"])
            second.attachment.load_state_dict(state["attachment"])
            second.data.set_state(state["data"])
            for _ in range(stop, end):
                second.step()
        assert same(first.weights(), second.weights())
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)["attachment"]["impl"]
        loaded = state["attachment"]["impl"]
        assert all(same(loaded[kind], kept) for kind, kept in saved.items() if isinstance(kept, dict))

    run_ranks(size, body)


@pairwise(name=["8 bits", "momentum", "low rank", "own"], bucket_cap_mb=[25, 0.01], on_device=[True, False])
def test_each_optimizer_commits_its_own_parameters(
    monkeypatch: pytest.MonkeyPatch, name: str, bucket_cap_mb: float, on_device: bool
) -> None:
    """In any order, and seldom or twice. The state of the others in the same bucket remains staged."""
    if on_device:
        decide_on_device(monkeypatch)

    def body(group: dist.ProcessGroup) -> None:
        single = Loop(group, name, bucket_cap_mb=bucket_cap_mb)
        several = Loop(group, name, num_optimizers=3, bucket_cap_mb=bucket_cap_mb)
        with single.attachment:
            for _ in range(NUM_WARM + 1):
                single.step()
            expected = single.everything()
        names = list(several.named)
        with several.attachment:
            for _ in range(NUM_WARM + 1):
                several.step(which=[2, 0, 1])
            assert same(several.everything(), expected)
            changed = []
            for which in ([0, 1, 2], [0], [2, 1], [], [0, 0, 1, 2]):
                before = several.kept()
                several.step(which=which)
                after = several.kept()
                changed.append({n for kind in after for n in names if not torch.equal(after[kind][n], before[kind][n])})
        every = changed[0]
        of_each = [every & set(names[i::3]) for i in range(3)]
        assert all((of_each[0], of_each[2]))
        assert changed == [every, of_each[0], of_each[1] | of_each[2], set(), every]

    run_ranks(2, body)


@EACH
def test_the_loss_scale_changes_nothing(name: str) -> None:
    """Residuals are stored without it, also when it grows between two steps, and in float32 for shorter dtypes."""
    model = build(lambda: Tower(dtypes=(torch.float32, torch.bfloat16, torch.bfloat16)))

    def body(group: dist.ProcessGroup) -> None:
        plain, scaled = Loop(group, name, model), Loop(group, name, model, scale=1024.0)
        for loop in (plain, scaled):
            with loop.attachment:
                for _ in range(NUM_WARM + 2):
                    loop.step()
                assert all(x.dtype == torch.float32 for kept in loop.kept().values() for x in kept.values())
        assert scaled.scaler.get_scale() > 1024
        assert same(plain.weights(), scaled.weights())

    run_ranks(2, body)


@EACH
def test_a_rank_without_data_continues_from_its_residuals(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The rank behaves as if its gradients were zero and it took the steps of the others, but not those they skip."""
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank())  # torch does not register the tests' groups

    def body(group: dist.ProcessGroup, joins: bool) -> Tensors:
        loop = Loop(group, name, scale=8.0, bucket_cap_mb=0.01)
        num_batches = NUM_WARM + 3 * loop.rank

        def factor(step: int) -> float:
            if loop.rank == 1 and step == NUM_WARM + 1:
                return torch.inf
            return float(step < num_batches)

        with loop.attachment, Join([loop.ddp]) if joins else nullcontext():
            for step in range(num_batches if joins else NUM_WARM + 3):
                loop.step(factor=factor(step))
        found = loop.everything()
        return {key: value for key, value in found.items() if "exp_avg_sq" not in key and not key.startswith("step of")}

    joined = run_ranks(2, partial(body, joins=True))
    expected = run_ranks(2, partial(body, joins=False))
    assert all(map(same, joined, expected))


@pytest.mark.parametrize("name", ["8 bits", "top-k", "low rank", "QAdam", "function"])
def test_a_single_rank_sends_nothing_and_has_no_residuals(name: str) -> None:
    def body(group: dist.ProcessGroup) -> int:
        recorder = tb.observe.Recorder()
        loop = Loop(group, name, observers=[recorder])
        with loop.attachment:
            for _ in range(NUM_WARM + 1):
                local = copy.deepcopy(loop.ddp.module)
                data = loop.data.get_state()
                loop.step()
                loop.data.set_state(data)
                local(torch.randn(6, 10, generator=loop.data), 0).square().sum().backward()
                for parameter_name, parameter in local.named_parameters():
                    assert torch.equal(loop.named[parameter_name].grad, parameter.grad)
            assert not any(residual.any() for kept in loop.kept().values() for residual in kept.values())
        return recorder.bytes_sent

    assert run_ranks(1, body) == [0]


@pytest.mark.parametrize("name", ["8 bits", "low rank", "function"])
def test_buckets_rebuilt_between_two_passes_of_a_step_are_refused(name: str) -> None:
    """This happens in the first step of a run, or of a resumed run."""

    def body(group: dist.ProcessGroup) -> None:
        first, second = Loop(group, name), Loop(group, name, bucket_cap_mb=0.01)
        with first.attachment:
            for _ in range(NUM_WARM):
                first.step()
            state = copy.deepcopy(first.attachment.state_dict())
        with second.attachment:
            second.attachment.load_state_dict(state)
            second.backward()
            with pytest.raises(RuntimeError, match=r"rebuilt its buckets .* Accumulate .* under ddp.no_sync"):
                second.backward()

    run_ranks(2, body)


@pytest.mark.parametrize("name", ["8 bits", "QAdam"])
def test_a_gradient_in_the_first_of_two_passes_alone_is_refused(name: str) -> None:
    """If no rank has a gradient in the second pass, DDP keeps the first mean, so the second mean of it is lost."""

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, name, BRANCHES, find_unused_parameters=True)
        with loop.attachment:
            for choice in (0, 1, 0, 1):
                loop.step(choice)
            loop.backward(1)
            loop.update()  # after two passes that reach the same parameters
            loop.ddp.zero_grad()
            loop.backward(0)
            with pytest.raises(RuntimeError, match=r"left\.weight must have a gradient in every .* or in none"):
                loop.backward(1)

    run_ranks(2, body)


def test_a_second_synchronized_backward_with_momentum_is_refused() -> None:
    def body(group: dist.ProcessGroup) -> str:
        loop = Loop(group, "momentum")
        with loop.attachment:
            for _ in range(2):
                loop.step()
                loop.ddp.zero_grad()
                loop.backward()  # without effect: it is cleared
            loop.ddp.zero_grad()
            loop.backward()
            # A slower rank may first notice that the other one has closed its groups.
            with pytest.raises(
                RuntimeError, match=r"one synchronized backward pass.* under ddp\.no_sync|by peer"
            ) as raised:
                loop.backward()
        return str(raised.value)

    assert any("under ddp.no_sync" in error for error in run_ranks(2, body))


def test_residuals_are_sent_once_after_a_load() -> None:
    """The residuals of means are summed in full precision, since chunks may have other owners."""

    def body(group: dist.ProcessGroup) -> list[int]:
        recorder, sent = tb.observe.Recorder(), []
        loop = Loop(group, "QAdam", observers=[recorder])
        with loop.attachment:
            for step in range(NUM_WARM + 4):
                before = recorder.bytes_sent
                loop.step()
                sent.append(recorder.bytes_sent - before)
                if step == NUM_WARM + 1:
                    loop.attachment.load_state_dict(copy.deepcopy(loop.attachment.state_dict()))
        return sent

    for sent in run_ranks(2, body):
        in_full, in_one_bit = sent[0], sent[NUM_WARM]
        assert 20 < in_full / in_one_bit < 32
        assert abs(sent[NUM_WARM + 1] - in_one_bit) < 100
        # The agreement on the loaded state, and the sum.
        assert in_full < sent[NUM_WARM + 2] < in_full + in_one_bit + 200
        assert abs(sent[NUM_WARM + 3] - in_one_bit) < 100


def test_a_failure_leaves_residuals_unchanged() -> None:
    """The residuals of a bucket that takes over are summed in copies."""

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, "8 bits", nodes=[0, 0, 1, 1])
        for _ in range(NUM_WARM):
            loop.step()
        loop.attachment.load_state_dict(loop.attachment.state_dict())
        before = loop.everything()
        loop.attachment.runner.process_group.world.close()
        with pytest.raises(RuntimeError, match="the group is closed"):
            loop.step()
        assert same(loop.everything(), before)
        leave_by_exception(loop.attachment)

    run_ranks(4, body)


def test_an_unfrozen_parameter_starts_without_a_residual() -> None:
    """In a resumed run, the other parameters continue from their saved state."""
    frozen = copy.deepcopy(TOWER)
    frozen.layers[1].weight.requires_grad_(False)

    def body(group: dist.ProcessGroup) -> None:
        first, second = Loop(group, "low rank", frozen), Loop(group, "low rank")
        with first.attachment:
            for _ in range(NUM_WARM):
                first.step()
            state, saved = copy.deepcopy(first.attachment.state_dict()), first.kept()["error"]
        with second.attachment:
            second.attachment.load_state_dict(state)
            loaded = second.kept()["error"]
            second.step()
            assert second.kept()["error"]["layers.1.weight"].any()
        assert "layers.1.weight" not in saved
        assert not loaded["layers.1.weight"].any()
        assert torch.equal(loaded["layers.0.weight"], saved["layers.0.weight"])

    run_ranks(2, body)


# States that are refused. test_saved_states.py loads states of other arguments.


@pytest.mark.parametrize(
    ("saved", "attached", "message"),
    [
        (MOMENTUM, tb.TopKAlgorithm(), r"saved with momentum=0\.75, .* algorithm has momentum=None"),
        (tb.PowerSGDAlgorithm(2), tb.PowerSGDAlgorithm(3), r"saved with rank=2, .* algorithm has rank=3"),
        (tb.PowerSGDAlgorithm(), tb.PowerSGDAlgorithm(min_rate=3), r"with min_rate=2\.0, .* min_rate=3\.0"),
        (tb.PowerSGDAlgorithm(), tb.PowerSGDAlgorithm(warm_start=False), "with warm_start=True, .* warm_start=False"),
        (WITH, tb.ByteGradAlgorithm(), "with error_feedback=True, .* error_feedback=False"),
    ],
)
def test_a_state_of_other_arguments_is_refused(saved: tb.Algorithm, attached: tb.Algorithm, message: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        first, second = (
            tb.attach(ddp, torch.optim.SGD(ddp.parameters()), algorithm)
            for algorithm in (saved, attached)
            for ddp in [DistributedDataParallel(nn.Linear(4, 2), process_group=group)]
        )
        with first, second, pytest.raises(ValueError, match=message):
            second.load_state_dict(first.state_dict())

    run_ranks(1, body)


def test_states_that_do_not_fit_are_refused() -> None:
    """Also if only some ranks load them. A refused state changes nothing."""
    number, zeros = torch.zeros(1), {"layers.0.weight": torch.zeros(301, 10)}
    others = "ByteGradAlgorithm.load_state_dict: sent and mean must contain .* got others"

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, "8 bits")
        runner = loop.attachment.runner
        with loop.attachment:
            loop.step()
            state, before = runner.state_dict(), loop.everything()
            for changes, message in (
                ({"rank": 7}, "got a state from rank 7; every rank saves and loads its own state"),
                ({"rank": 1 - loop.rank}, f"from rank {loop.rank} of 2, got a state from rank {1 - loop.rank}"),
                ({"sent": {"nobody": number}, "mean": {"nobody": number}}, others + r": \['nobody'\]"),
                ({"sent": {"layers.0.weight": number}, "mean": zeros}, others + r": \['layers.0.weight'\]"),
                ({"sent": zeros, "mean": {}}, others),
                ({"sent": [1], "mean": [1]}, others),
                ({"sent": {"layers.0.weight": 1.0}, "mean": zeros}, others),
            ):
                with pytest.raises(ValueError, match=message):
                    runner.load_state_dict({**state, **changes})
            with pytest.raises(ValueError, match=r"the keys \['mean', 'num_ranks', 'rank', 'sent'\], got \['rank'\]"):
                runner.load_state_dict({"rank": loop.rank})
            assert same(loop.everything(), before)
            named = list(loop.named.items())[loop.rank : loop.rank + 1]
            values = {name: torch.zeros_like(parameter) for name, parameter in named}
            with pytest.raises(tb.CommunicationError, match="a digest of the names in the state"):
                runner.load_state_dict({**state, "sent": values, "mean": values})

    run_ranks(2, body)
