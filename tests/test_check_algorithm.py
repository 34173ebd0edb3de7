"""check_algorithm passes the algorithms of the package and of the docs, and finds those that break the contract."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

import torchbagua as tb
from documentation import names_in
from torchbagua.algorithms.weights.decentralized import DecentralizedAlgorithmImpl
from torchbagua.testing import AlgorithmFault, algorithms, check_algorithm
from torchbagua.testing.simulation import Subject

SignSGDAlgorithm = names_in("extend/algorithm.md", "class SignSGDAlgorithm", module=__name__)["SignSGDAlgorithm"]
LocalSGD = names_in("extend/algorithm.md", "class LocalSGD", module=__name__)["LocalSGD"]
Overlapped = names_in("extend/overlapped-rounds.md", "class OverlappedAveraging", module=__name__)[
    "OverlappedAveraging"
]

SUBJECTS: dict[str, Subject] = {
    "gradient_allreduce": Subject(lambda _: tb.GradientAllReduce()),
    "bytegrad": Subject(lambda _: tb.ByteGrad()),
    "bytegrad, error feedback": Subject(lambda _: tb.ByteGrad(error_feedback=True)),
    "top_k": Subject(lambda _: tb.TopK(), make_optimizer=partial(torch.optim.SGD, lr=0.05)),
    "power_sgd": Subject(lambda _: tb.PowerSGD()),
    "qadam": Subject(lambda adam: tb.QAdam(adam), make_optimizer=partial(tb.QAdamOptimizer, warmup_steps=2)),
    "decentralized": Subject(lambda _: tb.Decentralized()),
    "low_precision_decentralized": Subject(lambda _: tb.LowPrecisionDecentralized()),
    "local_sgd": Subject(lambda _: tb.LocalSGD(2)),
    "diloco": Subject(lambda _: tb.DiLoCo(2)),
    "async": Subject(lambda _: tb.AsyncModelAverage(sync_interval_ms=1)),
    "signs of the docs": Subject(lambda _: SignSGDAlgorithm()),
    "local SGD of the docs": Subject(lambda _: LocalSGD(2)),
    "overlapped rounds of the docs": Subject(lambda _: Overlapped()),
}


# LocalSGD is DiLoCo without an outer momentum.
RARE = {"local_sgd": pytest.mark.release}


@pytest.mark.parametrize("name", [pytest.param(name, marks=RARE.get(name, ())) for name in SUBJECTS])
def test_algorithms_that_keep_the_contract(name: str) -> None:
    assert len(check_algorithm(SUBJECTS[name], has_fixed_results=name != "async")) == 9


Bucket, Group = tb.extend.BaguaBucket, tb.BaguaProcessGroup


def keeps(impl: "AveragedImpl", bucket: Bucket, group: Group) -> None:
    """Leave the mean as it is."""


@dataclass(frozen=True)
class Averaged(tb.Algorithm):
    """The mean of gradients; `operation` breaks it."""

    operation: Callable[["AveragedImpl", Bucket, Group], None] = keeps
    impl: Callable[[tb.extend.GradientRunner], tb.AlgorithmImpl] | None = None

    def make_impl(self, runner: tb.extend.GradientRunner) -> tb.AlgorithmImpl:
        return (self.impl or AveragedImpl)(runner)


class AveragedImpl(tb.AlgorithmImpl):
    algorithm: Averaged
    num_calls = 0

    def __init__(self, runner: tb.extend.GradientRunner) -> None:
        super().__init__(runner)
        self.last: dict[str, torch.Tensor] = {}

    def init_operations(self, module: torch.nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
        bucket.append_python_op(self.average)

    def average(self, bucket: Bucket, group: Group) -> None:
        group.all_reduce(bucket.flat, average=True)
        self.num_calls += 1
        self.algorithm.operation(self, bucket, group)


NUM_RUNS = iter(range(1 << 30))


def differs_by_rank(impl: AveragedImpl, bucket: Bucket, group: Group) -> None:
    bucket.flat.mul_(1 + group.rank)


def drops(impl: AveragedImpl, bucket: Bucket, group: Group) -> None:
    bucket.flat.zero_()


def depends_on_the_run(impl: AveragedImpl, bucket: Bucket, group: Group) -> None:
    bucket.flat.add_(group.all_reduce(torch.full((1,), float(next(NUM_RUNS)))))


def forgets_what_it_has_counted(impl: AveragedImpl, bucket: Bucket, group: Group) -> None:
    bucket.flat.div_(impl.num_calls)


def remembers(impl: AveragedImpl, bucket: Bucket, group: Group) -> None:
    """Add some of the last gradients, also after an overflow."""
    last = impl.last.get(bucket.name, torch.zeros_like(bucket.flat))
    impl.last[bucket.name] = bucket.flat.clone()
    bucket.flat.add_(0.1 * last) if len(last) == len(bucket.flat) else None


class LeavesHook(AveragedImpl):
    """Changes what the module computes, and does not undo it."""

    def init_forward_pre_hook(self, module: torch.nn.Module) -> Callable[[Any], None]:
        module.register_forward_hook(lambda module, inputs, output: output * 1.5)
        return lambda inputs: None


class LeavesThread(AveragedImpl):
    def __init__(self, runner: tb.extend.GradientRunner) -> None:
        super().__init__(runner)
        threading.Thread(target=threading.Event().wait, args=(60,), name="of the algorithm", daemon=True).start()


class NotRestored(DecentralizedAlgorithmImpl):
    """Leaves the mean in the module after `averaged_weights`."""

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        with super().averaged_weights():
            yield
            means = self._weights.copy()
        self._weights.write(means.__getitem__)


class OwnWeights(DecentralizedAlgorithmImpl):
    """Gives each rank its own weights in `averaged_weights`."""

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        yield


class NoLastMean(DecentralizedAlgorithmImpl):
    """Applies the round in flight, and takes no mean at the end, but says so."""

    def finish(self) -> bool:
        self.finish_round()
        return True


class EndsWithNaN(DecentralizedAlgorithmImpl):
    """Divides by zero at the end."""

    def finish(self) -> bool:
        has_mean = super().finish()
        self._weights.write(lambda bucket: torch.full_like(bucket.flat, torch.nan))
        return has_mean


@dataclass(frozen=True)
class BrokenWeights(tb.Decentralized):
    impl: type[DecentralizedAlgorithmImpl] = DecentralizedAlgorithmImpl

    def make_impl(self, runner: tb.extend.WeightRunner) -> DecentralizedAlgorithmImpl:
        return self.impl(runner)


BROKEN: dict[str, tuple[tb.Algorithm, str, str]] = {
    "differs by rank": (Averaged(differs_by_rank), "training", "weights after step 0, compared with rank 0: expected"),
    "drops": (Averaged(drops), "training", "weights after training: expected other weights than before, got the same"),
    "NaN": (BrokenWeights(impl=EndsWithNaN), "training", "weights after training: expected finite values, got NaN"),
    "run": (Averaged(depends_on_the_run), "repetition", "weights after step 0 of a second training: expected element"),
    "remembers": (Averaged(remembers), "overflow", "the step that follows an overflow: expected other weights than"),
    "forgets": (Averaged(forgets_what_it_has_counted), "resume", "weights after step 3 of a resumed training: expe"),
    "hook": (Averaged(impl=LeavesHook), "detach", "weights after step 0 of plain DDP after the attachment: expected"),
    "no mean": (BrokenWeights(impl=NoLastMean), "training", "weights after detach, compared with rank 0: expected"),
    "not restored": (BrokenWeights(impl=NotRestored), "averaged_weights", "weights after averaged_weights: expected"),
    "own": (BrokenWeights(impl=OwnWeights), "averaged_weights", "weights within averaged_weights, compared with rank"),
    "thread": (Averaged(impl=LeavesThread), "training", r"expected all threads to end, got \['of the algorithm'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_algorithms_that_break_the_contract(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, check, message = BROKEN[name]
    monkeypatch.setattr(algorithms, "_PATIENCE_S", 0.5)
    alone = [each for each in algorithms._CHECKS if each.__name__ == f"_check_{check}"]  # the others take long
    monkeypatch.setattr(algorithms, "_CHECKS", alone)
    with pytest.raises(AlgorithmFault, match=f"^torchbagua: check '{check}' failed.*{message}"):
        check_algorithm(Subject(lambda _: algorithm))


@pytest.mark.parametrize(
    ("subject", "size"),
    [
        (Subject(lambda _: Averaged()), 2),  # the broken algorithms are broken by their changes alone
        (SUBJECTS["decentralized"], 3),
        pytest.param(SUBJECTS["gradient_allreduce"], 4, marks=pytest.mark.release),
    ],
    ids=["averaged", "decentralized", "gradient_allreduce"],
)
def test_other_subjects_and_sizes(subject: Subject, size: int) -> None:
    check_algorithm(subject, size=size)


class RaisesOnOneRank(AveragedImpl):
    """Fails after the step, while rank 0 goes on."""

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        def fail(optimizer: torch.optim.Optimizer) -> None:
            if self.runner.process_group.rank == 1:
                raise ZeroDivisionError("in the impl")

        return fail


def test_the_error_that_came_first_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(AlgorithmFault, match="check 'training' failed on rank 1: ZeroDivisionError: in the impl"):
        check_algorithm(Subject(lambda _: Averaged(impl=RaisesOnOneRank)))


def test_refusals() -> None:
    with pytest.raises(TypeError, match=r"subject must be a torchbagua.testing.simulation.Subject, got ByteGradAlgo"):
        check_algorithm(tb.ByteGrad())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"size must be one of subject.sizes, \(2, 4\), got 3"):
        check_algorithm(replace(SUBJECTS["bytegrad"], sizes=(2, 4)), size=3)
