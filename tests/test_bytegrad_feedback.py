"""ByteGrad with error feedback: bitwise equal to the oracle for any buckets, across resume and skipped steps."""

import copy
import io
from collections.abc import Callable, Sequence
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
from pairwise import pairwise
from ranks import run_ranks
from training import Branches, OneElement, Run, Tower, Wide, build, flat, train

WITH = tb.ByteGradAlgorithm(error_feedback=True)
IN_4_BITS = tb.CompressedAllReduceAlgorithm(error_feedback=True)
TOPK = tb.TopKAlgorithm(0.01)
WITH_MOMENTUM = tb.TopKAlgorithm(0.01, momentum=0.9, warmup_steps=8)
BLOCKK = tb.TopKAlgorithm(0.01, selection="block")


train_told = partial(train, tells_optimizer=True)


def feedback_of(size: int, nodes: Sequence[int] | None, algorithm: tb.Algorithm = WITH) -> oracle.TwoPhaseResiduals:
    block, coded = (128, oracle.quantise_block_4_bits) if algorithm is IN_4_BITS else (2048, oracle.quantise_block)
    if algorithm is BLOCKK:
        coded = oracle.largest_run_of(2048, 21)
    if algorithm is TOPK:
        coded = oracle.largest_of(2048, 21)
    return oracle.TwoPhaseResiduals(lambda row: oracle.quantise(row, [size], block, coded), nodes)


def check_runs(runs: Sequence[Run], nodes: Sequence[int] | None = None, algorithm: tb.Algorithm = WITH) -> None:
    """Check that averaged gradients are the oracle's mean of the local gradients plus the previous residuals."""
    feedbacks: dict[str, oracle.TwoPhaseResiduals] = {}
    for step, averaged in enumerate(runs[0].averaged):
        for name, gradient in averaged.items():
            assert all(torch.equal(run.averaged[step][name], gradient) for run in runs), f"replicas differ in {name}"
            dtype = gradient.dtype
            is_short = dtype in (torch.bfloat16, torch.float16)
            rows = [flat(row.float() if is_short else row) for row in (run.local[step][name] for run in runs)]
            if rows[0].dtype == np.float64:
                expected = oracle.gradient_allreduce(rows, nodes)
            else:
                feedback = feedbacks.setdefault(name, feedback_of(rows[0].size, nodes, algorithm))
                expected = feedback(rows)
            if is_short:
                expected, gradient = flat(torch.from_numpy(expected).to(dtype).float()), gradient.float()
            np.testing.assert_array_equal(flat(gradient), expected, err_msg=f"{name}, step {step}")


@pairwise(
    ranks=[(2, None), (4, None), (8, None), (4, [0, 0, 1, 1]), (3, [0, 0, 1]), (1, None)],
    bucket_cap_mb=[25, 0.01],
    options=[{}, {"num_micro_batches": 3}, {"gradient_as_bucket_view": True}, {"static_graph": True}],
    algorithm=[WITH, IN_4_BITS, TOPK, BLOCKK],
)
def test_the_oracle(
    ranks: tuple[int, list[int] | None], bucket_cap_mb: float, options: dict[str, Any], algorithm: tb.Algorithm
) -> None:
    model, (size, nodes) = build(Tower), ranks
    runs = run_ranks(
        size, lambda group: train_told(group, model, algorithm, nodes=nodes, bucket_cap_mb=bucket_cap_mb, **options)
    )
    if size > 1:
        check_runs(runs, nodes, algorithm)
    else:
        for local, averaged in zip(runs[0].local, runs[0].averaged, strict=True):
            assert all(torch.equal(local[name], gradient) for name, gradient in averaged.items())


def mixed() -> nn.Module:
    return Tower(dtypes=(torch.float32, torch.bfloat16, torch.float16))


@pytest.mark.parametrize("make_model", [Branches, OneElement, mixed, Wide])
@pytest.mark.filterwarnings("ignore:torchbagua. ByteGradAlgorithm sends")
def test_the_oracle_for_other_models(device: torch.device, make_model: Callable[[], nn.Module]) -> None:
    """Models with parts that some ranks or no rank uses, with one element, and with other dtypes, even complex."""
    model = build(make_model).to(device)
    unused = {"find_unused_parameters": True} if make_model is Branches else {}
    check_runs(run_ranks(2, lambda group: train_told(group, model, WITH, **unused), device=device))


class Loop:
    """One rank's training with the algorithm attached; parameters are split over `num_optimizers` SGD optimizers."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        model: nn.Module,
        *,
        algorithm: tb.Algorithm = WITH,
        nodes: Sequence[int] | None = None,
        scale: float | None = None,
        num_optimizers: int = 1,
        **ddp_options: Any,
    ) -> None:
        self.ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group, **ddp_options)
        named = [parameter for parameter in self.ddp.module.parameters() if parameter.requires_grad]
        self.optimizers = [torch.optim.SGD(named[i::num_optimizers], lr=0.1) for i in range(num_optimizers)]
        self.scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=scale or 1, growth_interval=2)
        self.data = torch.Generator().manual_seed(1000 + group.rank())
        self.rank = group.rank()
        self.attachment = tb.attach(
            self.ddp,
            self.optimizers,
            algorithm,
            process_group=None if nodes is None else tb.BaguaProcessGroup(group, nodes=nodes),
            grad_scaler=self.scaler,
        )

    def backward(self, choice: int = 0, factor: float = 1.0) -> None:
        x = torch.randn(6, 10, generator=self.data)
        self.scaler.scale(self.ddp(x, choice).square().sum() * factor).backward()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, choice: int = 0, factor: float = 1.0, *, which: Sequence[int] | None = None) -> None:
        self.zero_grad()
        self.backward(choice, factor)
        for index in range(len(self.optimizers)) if which is None else which:
            self.scaler.step(self.optimizers[index])
        self.scaler.update()

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.ddp.parameters()]

    def residuals(self) -> dict[str, dict[str, torch.Tensor]]:
        state = self.attachment.runner.state_dict()
        return {kind: state[kind] for kind in ("sent", "mean", "velocity") if kind in state}


def equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


def tensors(residuals: dict[str, dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    return [by_name[name] for by_name in residuals.values() for name in sorted(by_name)]


@pairwise(
    ranks=[(2, None), (4, [0, 0, 1, 1]), (3, None)],
    stop=[1, 3],
    later_cap_mb=[0.01, 25],
    algorithm=[WITH, TOPK, WITH_MOMENTUM, BLOCKK],
)
def test_resume_bit_for_bit(
    ranks: tuple[int, list[int] | None], stop: int, later_cap_mb: float, algorithm: tb.Algorithm
) -> None:
    """Chunks have other owners after resuming: DDP rebuilds buckets in its first step, and bucket_cap_mb may differ."""
    model, (size, nodes) = build(Tower), ranks

    def body(group: dist.ProcessGroup) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        first = Loop(group, model, algorithm=algorithm, nodes=nodes, bucket_cap_mb=0.01)
        with first.attachment:
            for step in range(5):
                if step == stop:
                    file = io.BytesIO()
                    state = {"model": first.ddp.module.state_dict(), "attachment": first.attachment.state_dict()}
                    torch.save(state | {"data": first.data.get_state()}, file)
                first.step()
        second = Loop(group, model, algorithm=algorithm, nodes=nodes, bucket_cap_mb=later_cap_mb)
        with second.attachment:
            state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            assert any(tensor.any() for tensor in state["attachment"]["impl"]["sent"].values()) or size == 3
            second.ddp.module.load_state_dict(state["model"])
            second.attachment.load_state_dict(state["attachment"])
            second.data.set_state(state["data"])
            for _ in range(stop, 5):
                second.step()
        return first.weights(), second.weights()

    for first, second in run_ranks(size, body):
        assert equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_scale_changes_nothing(dtype: torch.dtype) -> None:
    """Residuals have the unit of unscaled gradients, also when the scale grows between two steps."""
    model = build(lambda: Tower(dtypes=(dtype,) * 3))

    def body(group: dist.ProcessGroup) -> tuple[list[torch.Tensor], ...]:
        plain, scaled = Loop(group, model), Loop(group, model, scale=1024.0)
        for loop in (plain, scaled):
            with loop.attachment:
                for _ in range(5):
                    loop.step()
        assert scaled.scaler.get_scale() > 1024
        return plain.weights(), scaled.weights()

    for plain, scaled in run_ranks(2, body):
        assert equal(plain, scaled)


@pytest.mark.parametrize(("size", "nodes"), [(2, None), (3, [0, 0, 1])])
def test_a_step_that_amp_skips_leaves_no_trace(size: int, nodes: list[int] | None) -> None:
    """Only one rank has an Inf."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> list[tuple[bool, bool]]:
        loop = Loop(group, model, nodes=nodes, scale=1024.0)
        are_unchanged = []
        with loop.attachment:
            for step in range(5):
                before = loop.weights(), tensors(loop.residuals())
                loop.step(factor=float("inf") if (step, loop.rank) == (3, 1) else 1.0)
                after = loop.weights(), tensors(loop.residuals())
                are_unchanged.append((equal(before[0], after[0]), equal(before[1], after[1])))
        return are_unchanged

    runs = run_ranks(size, body)
    for index, ranks in enumerate(zip(*runs, strict=True)):
        trained, residuals = zip(*ranks, strict=True)
        assert set(trained) == {index == 3}
        assert all(residuals) == (index == 3)  # a rank that owns no shard has no residual that could change


@pytest.mark.usefixtures("where_commits_are_decided")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_unused_parameters_keep_their_residuals(set_to_none: bool) -> None:
    model = build(Branches)

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model, find_unused_parameters=True)
        with loop.attachment:
            for choice in (0, 0, 1):  # the same on all ranks
                before = loop.residuals()
                loop.zero_grad(set_to_none=set_to_none)
                loop.backward(choice)
                loop.optimizers[0].step()
            after = loop.residuals()
        for kind in ("sent", "mean"):
            assert torch.equal(after[kind]["left.weight"], before[kind]["left.weight"])
        assert before["sent"]["left.weight"].any()
        assert not torch.equal(after["sent"]["stem.weight"], before["sent"]["stem.weight"])

    run_ranks(2, body)


def test_a_backward_without_a_step_commits_nothing() -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        plain, extra = Loop(group, model), Loop(group, model)
        for loop in (plain, extra):
            with loop.attachment:
                for step in range(4):
                    if loop is extra and step > 1:
                        state = loop.data.get_state()
                        loop.backward(factor=3.0)
                        loop.data.set_state(state)
                    loop.step()
        return plain.weights(), extra.weights()

    for plain, extra in run_ranks(2, body):
        assert equal(plain, extra)


def test_a_step_with_only_local_gradients_commits_nothing() -> None:
    """The gradients that were sent before are cleared and not used."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model)
        with loop.attachment:
            for _ in range(2):
                loop.step()
            loop.zero_grad()
            loop.backward()
            before = tensors(loop.residuals())
            loop.zero_grad()
            with loop.ddp.no_sync():
                loop.backward()
            loop.optimizers[0].step()
            assert equal(tensors(loop.residuals()), before)

    run_ranks(2, body)


@pytest.mark.usefixtures("where_commits_are_decided")
def test_several_synchronized_backward_passes_lose_nothing_and_count_nothing_twice() -> None:
    """Local gradients equal averaged gradients plus residuals. DDP rebuilds its buckets after the very first pass."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
        loop = Loop(group, model)
        named = dict(loop.ddp.module.named_parameters())
        total_in = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in named.items()}
        total_out = copy.deepcopy(total_in)

        def add(gradient: torch.Tensor, name: str) -> None:
            total_in[name] += gradient

        for name, parameter in named.items():
            parameter.register_hook(partial(add, name=name))
        with loop.attachment:
            for step in range(6):
                loop.zero_grad()
                for _ in range(2 if step else 1):
                    loop.backward()
                for name, parameter in named.items():
                    total_out[name] += parameter.grad
                loop.optimizers[0].step()
            return total_in, total_out, loop.residuals()

    runs = run_ranks(2, body)
    for name, total_out in runs[0][1].items():
        total_in = sum(run[0][name] for run in runs) / 2
        residual = sum(run[2]["sent"][name] / 2 + run[2]["mean"][name] for run in runs)
        # The tolerance is for sums of 11 backward passes in float32.
        assert (total_in - total_out - residual).norm() < 4e-6 * total_in.norm()
        assert total_in.numel() == 1 or (total_in - total_out).norm() > 1e-5 * total_in.norm()


@pytest.mark.usefixtures("where_commits_are_decided")
@pytest.mark.parametrize("bucket_cap_mb", [25, 0.01])
def test_several_optimizers_equal_a_single_optimizer(bucket_cap_mb: float) -> None:
    """Each optimizer commits the residuals it used, in any order, and leaves the others' in the same bucket staged."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
        weights = []
        for num_optimizers, order in ((1, [0]), (2, [0, 1]), (3, [2, 0, 1])):
            loop = Loop(group, model, num_optimizers=num_optimizers, bucket_cap_mb=bucket_cap_mb)
            with loop.attachment:
                for _ in range(4):
                    loop.step(which=order)
            weights.append(loop.weights() + tensors(loop.residuals()))
        return weights

    for first, *later in run_ranks(2, body):
        assert all(equal(first, state) for state in later)


@pytest.mark.usefixtures("where_commits_are_decided")
def test_an_optimizer_that_steps_seldom_commits_seldom() -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> list[set[str]]:
        loop = Loop(group, model, num_optimizers=2)
        names = [name for name, _ in loop.ddp.module.named_parameters()]
        changed = []
        with loop.attachment:
            for which in ([0, 1], [0], [1], [], [0, 0, 1]):
                before = loop.residuals()["sent"]
                loop.step(which=which)
                after = loop.residuals()["sent"]
                # In 8 bits, a parameter of one element has no residual.
                changed.append({name for name in names if not torch.equal(after[name], before[name])})
        of_each = [{name for name in names[i::2] if dict(model.named_parameters())[name].numel() > 1} for i in range(2)]
        assert changed == [of_each[0] | of_each[1], of_each[0], of_each[1], set(), of_each[0] | of_each[1]]

    run_ranks(2, body)


@pytest.mark.parametrize("algorithm", [WITH, WITH_MOMENTUM])
def test_a_rank_without_data_continues_from_its_residuals(
    monkeypatch: pytest.MonkeyPatch, algorithm: tb.Algorithm
) -> None:
    """The rank behaves as if its gradients were zero and it took the steps."""
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank())  # torch does not register the tests' groups
    model = build(Tower)

    def body(group: dist.ProcessGroup, joins: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        loop = Loop(group, model, algorithm=algorithm, bucket_cap_mb=0.01)
        num_batches = 2 + 2 * group.rank()
        with loop.attachment:
            if joins:
                with Join([loop.ddp]):
                    for _ in range(num_batches):
                        loop.step()
            else:
                for step in range(4):
                    loop.step(factor=float(step < num_batches))
            return loop.weights(), tensors(loop.residuals())

    joined = run_ranks(2, lambda group: body(group, True))
    expected = run_ranks(2, lambda group: body(group, False))
    for actual, reference in zip(joined, expected, strict=True):
        assert equal(actual[0], reference[0])
        assert equal(actual[1], reference[1])


def test_states_without_error_feedback_and_with_it() -> None:
    def body(group: dist.ProcessGroup) -> None:
        def attach(algorithm: tb.Algorithm) -> tb.Attachment:
            ddp = DistributedDataParallel(nn.Linear(4, 2), process_group=group)
            return tb.attach(ddp, torch.optim.SGD(ddp.parameters()), algorithm)

        with attach(tb.ByteGradAlgorithm()) as without, attach(WITH) as with_feedback:
            states = without.state_dict(), with_feedback.state_dict()
            assert states[0]["impl"] == {}
            assert set(states[1]["impl"]) == {"rank", "num_ranks", "sent", "mean"}
            assert states[1]["impl"]["sent"].keys() == {"weight", "bias"}
            with pytest.raises(
                ValueError, match=r"saved with error_feedback=False, .* attached algorithm has error_feedback=True"
            ):
                with_feedback.load_state_dict(states[0])
            with pytest.raises(
                ValueError, match=r"saved with error_feedback=True, .* attached algorithm has error_feedback=False"
            ):
                without.load_state_dict(states[1])
            # A state of an earlier release, which had no error feedback.
            earlier = {"algorithm": '{"version": 1, "algorithm": "ByteGradAlgorithm", "arguments": {}}', "impl": {}}
            without.load_state_dict(earlier)
            with pytest.raises(
                ValueError, match=r"must have the keys \['mean', 'num_ranks', 'rank', 'sent'\], got \[\]"
            ):
                with_feedback.load_state_dict(earlier)

    run_ranks(1, body)


def test_a_scaler_that_attach_does_not_know_warns() -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(nn.Linear(4, 2), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with tb.attach(ddp, optimizer, WITH):
            scaler.scale(ddp(torch.ones(1, 4)).sum()).backward()
            scaler.step(optimizer)

    with pytest.warns(
        RuntimeWarning, match=r"SGD is stepped by a GradScaler that ByteGrad.* a wrong scale.*grad_scaler=scaler"
    ):
        run_ranks(1, body)
