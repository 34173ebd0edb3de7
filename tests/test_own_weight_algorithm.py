"""Users' own weight algorithms: of docs/extend, with buckets of their own, and impls that attach refuses.

test_check_algorithm.py checks that those of docs/extend resume and that their averaged weights are temporary.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import oracle
import torchbagua as tb
from averaging import Normed, Trace, Trainer, Weights, assert_same_weights, stacked, train, weights_of
from components import running
from documentation import names_in
from ranks import run_ranks
from torchbagua.codecs import MinMaxUInt8
from training import Wide, build

LocalSGD = names_in("extend/algorithm.md", "class LocalSGD", module=__name__)["LocalSGD"]
OverlappedAveraging = names_in("extend/overlapped-rounds.md", "class OverlappedAveraging", module=__name__)[
    "OverlappedAveraging"
]


def check_local_sgd(traces: list[Trace], algorithm: tb.Algorithm) -> None:
    size, num_rounds = len(traces), 0
    for step in range(len(traces[0].updated)):
        is_due = step % algorithm.every == algorithm.every - 1
        for name in traces[0].start[0]:
            updated = stacked([trace.updated[step] for trace in traces], name)
            after = stacked([trace.start[step + 1] for trace in traces], name)
            expected = updated
            if is_due:
                round = num_rounds % algorithm.topology.period(size)
                rows = [sorted(algorithm.topology.neighbours(rank, size, round)) for rank in range(size)]
                number = updated[0].dtype.type
                expected = [oracle.ordered_sum([updated[peer] for peer in row]) / number(len(row)) for row in rows]
            np.testing.assert_array_equal(after, expected, f"step {step}, {name}")
        num_rounds += is_due
    assert_same_weights([trace.final for trace in traces])


@pytest.mark.parametrize(
    ("make_model", "topology"),
    [(Normed, tb.topology.AllRanks()), (Normed, tb.topology.ShiftOne()), (Wide, tb.topology.Ring())],
)
def test_equals_the_oracle(make_model: type[torch.nn.Module], topology: tb.extend.Topology) -> None:
    """Bitwise in every step, for buffers and all dtypes; after detach, all ranks have equal weights."""
    model, algorithm = build(make_model), LocalSGD(2, topology)
    check_local_sgd(run_ranks(4, lambda group: train(group, model, algorithm, num_steps=6)), algorithm)


def test_the_overlapped_mean_equals_the_built_in_algorithm() -> None:
    """Bitwise in every step, buffers too; also if weights are loaded while a round is in flight."""
    model = build(Normed)

    def body(group: dist.ProcessGroup, algorithm: tb.Algorithm) -> tuple[Trace, Weights, Weights]:
        trainer = Trainer(group, model)
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm):
            for _ in range(3):
                trainer.step()
            trainer.module.load_state_dict(copy.deepcopy(model).state_dict())
            for _ in range(3):
                trainer.step()
            last = weights_of(trainer.module)
        return trainer.trace, last, weights_of(trainer.module)

    own = run_ranks(2, lambda group: body(group, OverlappedAveraging()))
    built_in = run_ranks(2, lambda group: body(group, tb.DecentralizedAlgorithm()))
    for (trace, last, final), (reference, reference_last, reference_final) in zip(own, built_in, strict=True):
        for weights, reference_weights in zip(trace.start, reference.start, strict=True):
            assert_same_weights([weights, reference_weights])
        assert_same_weights([last, reference_last])
        assert_same_weights([final, reference_final])


# An algorithm with its own tensors, buckets and hook, as Bagua's users write them.


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


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_own_tensors_buckets_and_hook(options: dict[str, Any]) -> None:
    """DDP averages no gradient while it is attached, not even in a first backward, where it records a static graph."""
    model = build(lambda: torch.nn.Linear(10, 1, bias=False))

    def body(group: dist.ProcessGroup) -> tuple[list[bool], list[torch.Tensor]]:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group, **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        x = torch.randn(4, 10, generator=torch.Generator().manual_seed(group.rank()))
        is_local, weights = [], []

        def step() -> None:
            optimizer.zero_grad()
            ddp(x).sum().backward()
            is_local.append(torch.allclose(ddp.module.weight.grad, x.sum(0)))
            optimizer.step()
            weights.append(ddp.module.weight.detach().clone())

        for _ in range(2):
            with tb.attach(ddp, optimizer, AveragingAlgorithm()):
                step()
                step()
            step()
        return is_local, [x.sum(0, keepdim=True), *weights]

    (is_local, first), (is_local_too, second) = run_ranks(2, body)
    assert is_local == is_local_too == [True, True, False, True, True, False]
    assert all(map(torch.equal, first[1:], second[1:]))
    # From equal weights, one step is a step with the mean gradient.
    torch.testing.assert_close(first[1], model.weight - 0.1 * (first[0] + second[0]) / 2)


class WithoutTensors(AveragingImpl):
    init_tensors = tb.AlgorithmImpl.init_tensors


class WithoutBuckets(AveragingImpl):
    tensors_to_buckets = tb.extend.WeightImpl.tensors_to_buckets


class Calling(tb.AlgorithmImpl):
    def __init__(self, runner: tb.extend.WeightRunner) -> None:
        super().__init__(runner)
        runner.average(None)


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
        (AveragingImpl, False, "because it is a WeightImpl or overrides init_tensors, but Mixed.averages_weights is F"),
        (Calling, False, "Mixed's impl averages weights, because it calls runner.average, but Mixed.averages_weights"),
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
