"""PowerSGD: bitwise equal to the oracle in any buckets, over resume and skipped steps; its wire bytes and errors.

The oracle uses torch's matrix products, as the algorithm does: with one thread (conftest.py), on separate tensors.
"""

import copy
import hashlib
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
from q_adam_life import ChannelsLast
from ranks import run_ranks
from torchbagua.collectives.low_rank_mean import matrix_shape
from training import Branches, OneElement, Run, Tower, Wide, build, flat, train

START_STEP = 1
run_training = partial(train, tells_optimizer=True)


def product(vectors: oracle.Array, matrix: oracle.Array, *, is_transposed: bool) -> oracle.Array:
    operand = torch.tensor(matrix)
    return torch.mm(torch.tensor(vectors), operand.t() if is_transposed else operand).numpy()


def in_bfloat16(x: oracle.Array) -> oracle.Array:
    return torch.from_numpy(x).bfloat16().float().numpy()


def first_factor(seed: str, rank: int, columns: int) -> oracle.Array:
    numbers = np.frombuffer(hashlib.shake_256(seed.encode()).digest(2 * rank * columns), np.int16)
    return ((2 * numbers.astype(np.float32) + 1) / np.float32(65536)).reshape(rank, columns)


def in_memory_order(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    return tensor.permute(order).contiguous()


def check_runs(
    runs: Sequence[Run], model: nn.Module, algorithm: tb.PowerSGDAlgorithm, nodes: Sequence[int] | None = None
) -> int:
    """Compare the averaged gradients with the oracle; return how many means were low-rank."""
    named = dict(model.named_parameters())
    places = {
        name: index for index, name in enumerate(name for name, parameter in named.items() if parameter.requires_grad)
    }
    means: dict[str, oracle.PowerSGD] = {}
    sent = in_bfloat16 if algorithm.compression else lambda x: x
    num_low_rank = 0
    for step, averaged in enumerate(runs[0].averaged):
        for name, gradient in averaged.items():
            assert all(torch.equal(run.averaged[step][name], gradient) for run in runs), f"replicas differ in {name}"
            parameter, dtype = named[name], gradient.dtype
            ordered = [in_memory_order(local, parameter) for local in (run.local[step][name] for run in runs)]
            is_short = dtype in (torch.bfloat16, torch.float16)
            rows = [flat(gradient.float() if is_short else gradient) for gradient in ordered]
            found = flat(in_memory_order(gradient.float() if is_short else gradient, parameter))
            shape = matrix_shape(ordered[0].shape, rows[0].size, algorithm.rank, algorithm.min_rate)
            if rows[0].dtype == np.float64 or step < algorithm.start_step:
                expected = oracle.gradient_allreduce(rows, nodes)
            elif shape is None:
                total = oracle.ordered_sum([sent(row) for row in oracle.node_sums(rows, nodes)])
                expected = sent(total / np.float32(len(rows)))
            else:
                num_low_rank += 1
                if name not in means or not algorithm.warm_start:
                    seed = f"{algorithm.seed} parameter {places[name]}"
                    seed += "" if algorithm.warm_start else f" {step + 1}"
                    first = first_factor(seed, shape.rank, shape.columns)
                    if name in means:
                        means[name].first = first
                    else:
                        means[name] = oracle.PowerSGD(first, product, nodes, sent, keeps_factor=algorithm.warm_start)
                expected = means[name]([row.reshape(shape.rows, shape.columns) for row in rows]).ravel()
            if is_short:
                expected = flat(torch.from_numpy(expected).to(dtype).float())
            np.testing.assert_array_equal(found, expected, err_msg=f"{name}, step {step}")
    return num_low_rank


@pairwise(
    ranks=[(2, None), (4, None), (8, None), (4, [0, 0, 1, 1]), (3, [0, 0, 1])],
    bucket_cap_mb=[25, 0.01],
    arguments=[{}, {"rank": 1, "compression": "bfloat16"}, {"warm_start": False}, {"rank": 7, "min_rate": 1.2}],
    options=[{}, {"gradient_as_bucket_view": True}, {"static_graph": True}],
)
def test_the_oracle(
    ranks: tuple[int, list[int] | None], bucket_cap_mb: float, arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    model, (size, nodes) = build(Tower), ranks
    algorithm = tb.PowerSGDAlgorithm(**{"rank": 3, "start_step": START_STEP, **arguments})
    runs = run_ranks(
        size, lambda group: run_training(group, model, algorithm, nodes=nodes, bucket_cap_mb=bucket_cap_mb, **options)
    )
    assert check_runs(runs, model, algorithm, nodes) > 0


def mixed() -> nn.Module:
    return Tower((10, 101, 47, 20, 1), dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float32))


@pytest.mark.parametrize("make_model", [Branches, OneElement, mixed, Wide, ChannelsLast])
@pytest.mark.filterwarnings("ignore:torchbagua. PowerSGDAlgorithmImpl sends")
def test_the_oracle_for_other_models(make_model: Callable[[], nn.Module]) -> None:
    """Models with parts that some ranks or no rank uses, with one element, and with other dtypes and memory orders."""
    model = build(make_model)
    unused = {"find_unused_parameters": True} if make_model is Branches else {}
    algorithm = tb.PowerSGDAlgorithm(rank=2, start_step=START_STEP, min_rate=1.5)
    # The learning rate of `train` is too high for ChannelsLast, which overflows in its fourth step.
    runs = run_ranks(2, lambda group: run_training(group, model, algorithm, num_steps=3, **unused))
    assert check_runs(runs, model, algorithm) > 0 or make_model is OneElement


def test_one_rank_changes_nothing() -> None:
    model = build(Tower)
    (run,) = run_ranks(1, lambda group: run_training(group, model, tb.PowerSGDAlgorithm(start_step=0)))
    for local, averaged in zip(run.local, run.averaged, strict=True):
        assert all(torch.equal(local[name], gradient) for name, gradient in averaged.items())


class Loop:
    """One rank's training loop with SGD and the attached algorithm."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        model: nn.Module,
        algorithm: tb.PowerSGDAlgorithm = tb.PowerSGDAlgorithm(rank=2, start_step=2),  # noqa: B008  it is frozen
        *,
        nodes: Sequence[int] | None = None,
        scale: float | None = None,
        lr: float = 0.1,
        observers: Sequence[tb.observe.Observer] = (),
        **ddp_options: Any,
    ) -> None:
        self.ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group, **ddp_options)
        self.named = {
            name: parameter for name, parameter in self.ddp.module.named_parameters() if parameter.requires_grad
        }
        self.optimizer = torch.optim.SGD(self.named.values(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=scale or 1, growth_interval=2)
        self.data = torch.Generator().manual_seed(1000 + group.rank())
        self.rank = group.rank()
        self.attachment = tb.attach(
            self.ddp,
            self.optimizer,
            algorithm,
            process_group=None if nodes is None else tb.BaguaProcessGroup(group, nodes=nodes),
            grad_scaler=self.scaler,
            observers=observers,
        )

    def backward(self, choice: int = 0, factor: float = 1.0) -> None:
        x = torch.randn(6, 10, generator=self.data)
        self.scaler.scale(self.ddp(x, choice).square().sum() * factor).backward()

    def step(self, choice: int = 0, factor: float = 1.0, *, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.backward(choice, factor)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        state = self.attachment.runner.state_dict()
        return {kind: state[kind] for kind in ("error", "factor")}

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.ddp.parameters()]


def equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


def same(first: dict[str, dict[str, torch.Tensor]], second: dict[str, dict[str, torch.Tensor]]) -> bool:
    return all(torch.equal(tensor, second[kind][name]) for kind in first for name, tensor in first[kind].items())


@pytest.mark.usefixtures("where_commits_are_decided")
@pytest.mark.parametrize(("scale", "make_model"), [(None, Tower), (1024.0, ChannelsLast)])
def test_nothing_is_lost(scale: float | None, make_model: type[nn.Module]) -> None:
    """Averaged gradients plus residuals sum to the gradients, over rebuilt buckets, with and without a loss scale."""
    model = build(make_model)

    def body(group: dist.ProcessGroup) -> tuple[Any, ...]:
        loop = Loop(group, model, scale=scale, lr=1e-6, bucket_cap_mb=0.01)
        total_in = {name: torch.zeros_like(parameter) for name, parameter in loop.named.items()}
        total_out = copy.deepcopy(total_in)

        def add(gradient: torch.Tensor, name: str) -> None:
            total_in[name] += gradient / loop.scaler.get_scale()

        for name, parameter in loop.named.items():
            parameter.register_hook(partial(add, name=name))
        with loop.attachment:
            for _ in range(6):
                loop.optimizer.zero_grad()
                loop.backward()
                for name, parameter in loop.named.items():
                    total_out[name] += parameter.grad / loop.scaler.get_scale()
                loop.scaler.step(loop.optimizer)
                loop.scaler.update()
            return total_in, total_out, loop.state()

    first, second = run_ranks(2, body)
    for name, total_out in first[1].items():
        total_in = (first[0][name] + second[0][name]) / 2
        residual = (first[2]["error"][name] + second[2]["error"][name]) / 2
        # The tolerance of sums over six steps in float32.
        assert (total_out + residual - total_in).norm() <= 1e-5 * total_in.norm()
        assert torch.equal(first[2]["factor"][name], second[2]["factor"][name])
        has_factors = bool(first[2]["factor"][name].numel())
        assert bool(residual.any()) == has_factors


@pairwise(
    ranks=[(2, None), (4, [0, 0, 1, 1]), (3, None)], stop=[1, 4], later_cap_mb=[0.01, 25], warm_start=[True, False]
)
def test_resume_bit_for_bit(
    ranks: tuple[int, list[int] | None], stop: int, later_cap_mb: float, warm_start: bool
) -> None:
    """Save during the first steps, which have no factors, or later; resume with the same buckets or with others."""
    model, (size, nodes) = build(Tower), ranks
    algorithm = tb.PowerSGDAlgorithm(rank=2, start_step=2, warm_start=warm_start)

    def body(group: dist.ProcessGroup) -> bool:
        first = Loop(group, model, algorithm, nodes=nodes, bucket_cap_mb=0.01)
        with first.attachment:
            for step in range(stop + 4):
                if step == stop:
                    file = io.BytesIO()
                    state = {"model": first.ddp.module.state_dict(), "attachment": first.attachment.state_dict()}
                    torch.save(state | {"data": first.data.get_state()}, file)
                first.step()
            after = first.state()
        second = Loop(group, model, algorithm, nodes=nodes, bucket_cap_mb=later_cap_mb)
        with second.attachment:
            state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            second.ddp.module.load_state_dict(state["model"])
            second.attachment.load_state_dict(state["attachment"])
            second.data.set_state(state["data"])
            for _ in range(4):
                second.step()
            return equal(first.weights(), second.weights()) and same(after, second.state())

    assert all(run_ranks(size, body))


@pytest.mark.usefixtures("where_commits_are_decided")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_skipped_step_and_an_unused_parameter_leave_no_trace(set_to_none: bool) -> None:
    model = build(Branches)

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model, tb.PowerSGDAlgorithm(rank=2, start_step=1), scale=8.0, find_unused_parameters=True)
        with loop.attachment:
            for _ in range(3):
                loop.step()
            before, weights = loop.state(), loop.weights()
            loop.step(factor=float("inf") if loop.rank == 1 else 1.0)
            assert same(loop.state(), before)
            assert equal(loop.weights(), weights)
            assert all(parameter.grad.isnan().all() for name, parameter in loop.named.items() if name == "stem.weight")
            loop.step(choice=1, set_to_none=set_to_none)
            after = loop.state()
        for kind in before:
            changed = {name for name in after[kind] if not torch.equal(after[kind][name], before[kind][name])}
            assert {"stem.weight", "right.weight"} <= changed
            assert "left.weight" not in changed
        assert before["error"]["left.weight"].any()

    run_ranks(2, body)


@pytest.mark.usefixtures("where_commits_are_decided")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("good", [0.0, 0.5])
def test_non_finite_gradients_do_not_enter_the_state_even_if_the_optimizer_steps(bad: float, good: float) -> None:
    """The loop replaces NaN and Inf before the step, as some loops do; all ranks see those of a single rank."""
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model, tb.PowerSGDAlgorithm(rank=2, start_step=0), bucket_cap_mb=0.01)
        with loop.attachment:
            loop.step()
            before = loop.state()

            def spoil(gradient: torch.Tensor) -> torch.Tensor:
                spoiled = gradient.clone()
                spoiled[0, 3] = bad
                return spoiled

            if loop.rank == 1:
                handle = loop.named["layers.1.weight"].register_hook(spoil)
            loop.optimizer.zero_grad()
            loop.backward()
            if loop.rank == 1:
                handle.remove()
            assert loop.named["layers.1.weight"].grad.isnan().all()
            assert loop.named["layers.0.weight"].grad.isfinite().all()
            loop.named["layers.1.weight"].grad.fill_(good)
            loop.optimizer.step()
            after = loop.state()
            for kind in before:
                assert torch.equal(after[kind]["layers.1.weight"], before[kind]["layers.1.weight"])
                assert not torch.equal(after[kind]["layers.0.weight"], before[kind]["layers.0.weight"])
            loop.step()
            assert all(weight.isfinite().all() for weight in loop.weights())

    run_ranks(2, body)


@pytest.mark.usefixtures("where_commits_are_decided")
def test_a_matrix_starts_again_after_zero_gradients() -> None:
    """Its factor became zero, and would stay zero; a gradient of lower rank leaves vectors out."""

    def body(group: dist.ProcessGroup) -> None:
        loop = Loop(group, nn.Linear(40, 50, bias=False), tb.PowerSGDAlgorithm(rank=4, start_step=0))
        weight = loop.ddp.module.weight
        with loop.attachment:

            def step(gradient: torch.Tensor) -> torch.Tensor:
                loop.optimizer.zero_grad()
                (loop.ddp(torch.eye(40)).t() * gradient).sum().backward()
                loop.optimizer.step()
                return weight.grad

            for _ in range(2):
                assert not step(torch.zeros(50, 40)).any()
            of_rank_2 = torch.randn(50, 2, generator=loop.data) @ torch.randn(2, 40, generator=loop.data)
            group_mean = of_rank_2.clone()
            dist.all_reduce(group_mean, group=group)
            for _ in range(3):
                averaged = step(of_rank_2)
            # The mean has rank 4, as the factors have: after a few steps they reproduce it, up to float32 rounding.
            state = loop.state()
            assert state["factor"]["weight"].any(1).all()
            assert (averaged - group_mean / 2).norm() <= 1e-4 * group_mean.norm()

    run_ranks(2, body)


@pytest.mark.parametrize(("size", "compression"), [(2, None), (4, "bfloat16")])
def test_wire_bytes(size: int, compression: str | None) -> None:
    """A rank sends 2 (n-1)/n of r (rows + columns) elements per matrix, and of all elements of other parameters.

    A rank sends at most four messages per peer and bucket.
    """
    model = build(lambda: Tower((10, 300, 40, 1)))
    recorders: dict[int, Recorder] = {}

    def body(group: dist.ProcessGroup) -> None:
        recorder = recorders[group.rank()] = Recorder()
        algorithm = tb.PowerSGDAlgorithm(rank=2, start_step=1, compression=compression)
        loop = Loop(group, model, algorithm, observers=[recorder])
        with loop.attachment:
            for _ in range(3):
                loop.step()

    run_ranks(size, body)
    num_elements = sum(
        2 * (matrix.shape[0] + matrix.shape[1]) for matrix in (torch.empty(300, 10), torch.empty(40, 300))
    )
    num_elements += 300 + 40 + 40 + 1  # biases, and the last weight
    sent = [
        event
        for recorder in recorders.values()
        for event in recorder.events
        if event.phase == "send" and event.step == 2
    ]
    in_buckets = [event for event in sent if event.bucket.startswith("gradient bucket")]
    assert 0 < len(in_buckets) <= size * (size - 1) * 2 * 2
    element_bytes = 4 if compression is None else 2
    expected = 2 * (size - 1) * num_elements * element_bytes
    total = sum(event.wire_bytes for event in in_buckets)
    # A chunk that Cast encodes is padded to 32 bytes.
    assert expected <= total <= expected + (0 if compression is None else 32 * len(in_buckets))


class Recorder:
    def __init__(self) -> None:
        self.events: list[tb.observe.CommEvent] = []

    def on_comm(self, event: tb.observe.CommEvent) -> None:
        self.events.append(event)


@pytest.mark.usefixtures("where_commits_are_decided")
def test_several_backward_passes_add_the_residual_once() -> None:
    model = build(Tower)

    def body(group: dist.ProcessGroup) -> tuple[Any, ...]:
        loop = Loop(group, model, tb.PowerSGDAlgorithm(rank=2, start_step=0), lr=1e-6)
        total_in = torch.zeros(301, 10)
        total_out = torch.zeros(301, 10)

        def add(gradient: torch.Tensor) -> None:
            total_in.add_(gradient)

        weight = loop.named["layers.0.weight"]
        weight.register_hook(add)
        with loop.attachment:
            for num_passes in (1, 3, 1):
                loop.optimizer.zero_grad()
                for _ in range(num_passes):
                    loop.backward()
                total_out += weight.grad
                loop.optimizer.step()
            return total_in, total_out, loop.state()["error"]["layers.0.weight"]

    first, second = run_ranks(2, body)
    total_in, residual = first[0] + second[0], first[2] + second[2]
    assert (2 * first[1] + residual - total_in).norm() <= 1e-5 * total_in.norm()


def test_a_rank_without_data_continues_from_its_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its gradients were zero, and its optimizer stepped."""
    monkeypatch.setattr(
        dist, "get_rank", lambda group: group.rank()
    )  # torch's registry does not know manually created groups
    model = build(Tower)

    def body(group: dist.ProcessGroup, joins: bool) -> Any:
        loop = Loop(group, model, tb.PowerSGDAlgorithm(rank=2, start_step=3), bucket_cap_mb=0.01)
        num_batches = 2 + 4 * loop.rank
        with loop.attachment:
            if joins:
                with Join([loop.ddp]):
                    for _ in range(num_batches):
                        loop.step()
            else:
                for step in range(6):
                    loop.step(factor=float(step < num_batches))
            return loop.weights(), loop.state()

    joined = run_ranks(2, lambda group: body(group, True))
    expected = run_ranks(2, lambda group: body(group, False))
    for found, reference in zip(joined, expected, strict=True):
        assert equal(found[0], reference[0])
        assert same(found[1], reference[1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rank": 0}, ValueError, "rank must be at least 1, got 0"),
        ({"rank": 2.0}, TypeError, "rank must be an integer, got 2.0"),
        ({"start_step": -1}, ValueError, "start_step must be at least 0, got -1"),
        ({"min_rate": 0}, ValueError, "min_rate must be positive and finite, got 0"),
        ({"min_rate": float("nan")}, ValueError, "min_rate must be positive and finite, got nan"),
        ({"min_rate": "2"}, TypeError, "min_rate must be a number, got '2'"),
        ({"warm_start": 1}, TypeError, "warm_start must be True or False, got 1"),
        ({"compression": "float16"}, ValueError, "compression must be None or 'bfloat16', got 'float16'"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^PowerSGDAlgorithm: {message}$"):
        tb.PowerSGDAlgorithm(**arguments)


def test_ranks_that_disagree_and_states_that_do_not_fit_raise() -> None:
    model = build(Tower)

    def disagree(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match="PowerSGDAlgorithm's argument rank"):
            Loop(group, model, tb.PowerSGDAlgorithm(rank=2 + group.rank()))

    def load(group: dist.ProcessGroup) -> None:
        loop = Loop(group, model)
        with loop.attachment:
            state = loop.attachment.state_dict()
        larger = Loop(group, model, tb.PowerSGDAlgorithm(rank=3))
        with larger.attachment, pytest.raises(ValueError, match=r"saved with rank=2.*algorithm has rank=3"):
            larger.attachment.load_state_dict(state)
        again = Loop(group, model)
        state["impl"]["num_backward_passes"] = group.rank()
        with again.attachment, pytest.raises(tb.CommunicationError, match="backward passes so far"):
            again.attachment.load_state_dict(state)

    run_ranks(2, disagree)
    run_ranks(2, load)


def test_float64_warns() -> None:
    def body(group: dist.ProcessGroup) -> None:
        model = nn.Sequential(nn.Linear(10, 30, dtype=torch.float64))
        with pytest.warns(
            RuntimeWarning, match=r"in full precision, because LowRank\(rank=2\) does not encode torch.float64"
        ):
            Loop(group, model).attachment.detach()

    run_ranks(1, body)


def test_by_its_name() -> None:
    algorithm = tb.Algorithm.init("powersgd", rank=2, compression="bfloat16")
    assert algorithm == tb.PowerSGDAlgorithm(rank=2, compression="bfloat16")


def test_a_parameter_unfrozen_at_resume_starts_without_state() -> None:
    """In a resumed run, the other parameters continue from their saved state."""
    model = build(Tower)
    frozen = copy.deepcopy(model)
    frozen.layers[1].weight.requires_grad_(False)

    def body(group: dist.ProcessGroup) -> Any:
        first = Loop(group, frozen, tb.PowerSGDAlgorithm(rank=2, start_step=0))
        with first.attachment:
            for _ in range(3):
                first.step()
            state = copy.deepcopy(first.attachment.state_dict())
        second = Loop(group, model, tb.PowerSGDAlgorithm(rank=2, start_step=0))
        with second.attachment:
            second.attachment.load_state_dict(state)
            loaded = second.state()
            second.step()
            return state["impl"], loaded, second.state(), second.weights()

    first, second = run_ranks(2, body)
    saved, loaded, after, weights = first
    assert "layers.1.weight" not in saved["error"]
    assert not loaded["error"]["layers.1.weight"].any()
    assert torch.equal(loaded["error"]["layers.0.weight"], saved["error"]["layers.0.weight"])
    assert after["error"]["layers.1.weight"].any()
    assert equal(weights, second[3])
