"""A user-defined weight algorithm: the support that attach gives it, and what attach refuses alongside it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from components import running
from ranks import run_ranks
from torchbagua.codecs import MinMaxUInt8
from training import build


@dataclass(frozen=True)
class AveragingAlgorithm(tb.Algorithm):
    """A weight algorithm: each rank steps on its own gradients, and weights are averaged after each step."""

    averages_weights = True

    def make_impl(self, runner: tb.extend.WeightRunner) -> "AveragingImpl":
        return AveragingImpl(runner)


class AveragingImpl(tb.extend.WeightImpl):
    def init_tensors(self, module: torch.nn.Module) -> list[tb.extend.BaguaTensor]:
        return [tb.extend.BaguaTensor(name, parameter) for name, parameter in module.named_parameters()]

    def tensors_to_buckets(self, tensors: list[tb.extend.BaguaTensor], do_flatten: bool) -> list[tb.extend.BaguaBucket]:
        flat = torch.empty(sum(tensor.parameter.numel() for tensor in tensors))
        return [tb.extend.BaguaBucket("weights", tensors, self.runner.process_group, flat)]

    def init_operations(self, module: torch.nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
        bucket.append_centralized_synchronous_op()

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        def average(optimizer: torch.optim.Optimizer) -> None:
            with torch.no_grad():
                for bucket in self.runner.buckets:
                    parameters = [tensor.parameter for tensor in bucket.tensors]
                    bucket.flat.copy_(torch.nn.utils.parameters_to_vector(parameters))
                    self.runner.lane.submit(bucket.run).future().wait()
                    torch.nn.utils.vector_to_parameters(bucket.flat, parameters)

        return average


def test_weight_algorithm() -> None:
    """DDP reduces nothing while attached, so one step from equal weights is one step with the mean gradient."""
    model = build(lambda: torch.nn.Linear(10, 1, bias=False))

    def body(group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        x = torch.randn(4, 10, generator=torch.Generator().manual_seed(group.rank()))
        with tb.attach(ddp, optimizer, AveragingAlgorithm()):
            ddp(x).sum().backward()
            local = ddp.module.weight.grad.clone()
            optimizer.step()
            averaged = ddp.module.weight.detach().clone()
        optimizer.zero_grad()
        ddp(x).sum().backward()
        return x.sum(0, keepdim=True), local, averaged, ddp.module.weight.grad.clone()

    results = run_ranks(2, body)
    for expected_local, local, averaged, reduced in results:
        torch.testing.assert_close(local, expected_local)  # not averaged: DDP sent nothing
        assert torch.equal(averaged, results[0][2])
        assert torch.equal(reduced, results[0][3])  # detached: DDP averages again
    mean = (results[0][1] + results[1][1]) / 2
    torch.testing.assert_close(results[0][2], model.weight - 0.1 * mean)


def test_weight_algorithm_with_static_graph() -> None:
    """DDP averages no gradient, not even in the first backward, where it records the graph."""
    model = build(lambda: torch.nn.Linear(10, 1, bias=False))

    def body(group: dist.ProcessGroup) -> list[bool]:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group, static_graph=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        x = torch.randn(4, 10, generator=torch.Generator().manual_seed(group.rank()))
        is_local = []

        def step() -> None:
            optimizer.zero_grad()
            ddp(x).sum().backward()
            is_local.append(torch.allclose(ddp.module.weight.grad, x.sum(0)))
            optimizer.step()

        for _ in range(2):
            with tb.attach(ddp, optimizer, AveragingAlgorithm()):
                step()
                step()
            step()
        return is_local

    assert run_ranks(2, body) == [[True, True, False, True, True, False]] * 2


class WithoutTensors(AveragingImpl):
    init_tensors = tb.AlgorithmImpl.init_tensors


class WithoutBuckets(AveragingImpl):
    tensors_to_buckets = tb.extend.WeightImpl.tensors_to_buckets


class Calling(tb.AlgorithmImpl):
    def __init__(self, runner: tb.extend.WeightRunner) -> None:
        super().__init__(runner)
        runner.average(tb.extend.WeightBuckets(runner, dict))


class Overriding(tb.AlgorithmImpl):
    init_tensors = AveragingImpl.init_tensors
    tensors_to_buckets = AveragingImpl.tensors_to_buckets


class Hasty(AveragingImpl):
    def __init__(self, runner: tb.extend.WeightRunner) -> None:
        pass


NO_WEIGHT_IMPL = (
    r"{} is not a subclass of torchbagua\.extend\.WeightImpl, but Mixed\.averages_weights is True; derive it"
)


@pytest.mark.parametrize(
    ("cls", "averages", "message"),
    [
        (WithoutTensors, False, "WithoutTensors overrides tensors_to_buckets without init_tensors"),
        (WithoutBuckets, True, "WithoutBuckets overrides init_tensors, so it must override tensors_to_buckets"),
        (
            AveragingImpl,
            False,
            "because it is a WeightImpl or overrides init_tensors, but Mixed.averages_weights is False",
        ),
        (tb.AlgorithmImpl, True, NO_WEIGHT_IMPL.format("AlgorithmImpl")),
        (Calling, True, NO_WEIGHT_IMPL.format("Calling")),
        (Overriding, True, NO_WEIGHT_IMPL.format("Overriding")),
        (tb.extend.WeightImpl, True, "WeightImpl averages no weights, because it neither calls runner.average nor"),
        (Hasty, True, r"Hasty\.__init__ must call AlgorithmImpl\.__init__"),
    ],
)
def test_impls_that_do_not_fit_their_algorithm_are_refused(
    cls: type[tb.AlgorithmImpl], averages: bool, message: str
) -> None:
    class Mixed(tb.Algorithm):
        averages_weights = averages

        def make_impl(self, runner: Any) -> tb.AlgorithmImpl:
            return cls(runner)

    def body(group: dist.ProcessGroup) -> None:
        with running(group, Mixed(), module=torch.nn.Linear(2, 1)):
            pass

    with pytest.raises(TypeError, match=message):
        run_ranks(1, body)


def test_ranks_compare_the_codec_of_an_algorithm() -> None:
    """Ranks compare the codec even if the algorithm is no dataclass: otherwise they would send unequal lengths."""

    class Plain(AveragingAlgorithm):
        def __init__(self, codec: Any) -> None:
            object.__setattr__(self, "codec", codec)

        def make_codec(self) -> Any:
            return self.codec

    with pytest.raises(
        ValueError, match=r"ranks disagree on Plain's codec: rank 0 has 'MinMaxUInt8\(block=64\)', rank 1"
    ):
        run_ranks(2, lambda group: Plain(MinMaxUInt8(64 << group.rank())).reify(group))
    for wrong in ("minmax_uint8", None, MinMaxUInt8):
        with pytest.raises(TypeError, match=r"Plain\.make_codec must return a Compressor, .*, got"):
            run_ranks(1, lambda group, wrong=wrong: Plain(wrong).reify(group))


def test_a_second_attachment_alongside_a_weight_algorithm_is_refused() -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(torch.nn.Linear(3, 1), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters())
        for first, second in ((AveragingAlgorithm(), "bytegrad"), ("bytegrad", AveragingAlgorithm())):
            with (
                tb.attach(ddp, optimizer, first),
                pytest.raises(ValueError, match="Algorithm is attached to the module already; detach it first"),
            ):
                tb.attach(ddp, optimizer, second)
        assert ddp.require_backward_grad_sync

    run_ranks(1, body)
