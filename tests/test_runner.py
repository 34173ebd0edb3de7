"""Runner and AlgorithmImpl: few names, one runner class for all algorithms, and no leaks of deleted runners."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchbagua as tb
from components import GradientComponent, WeightComponent, backward
from ranks import run_ranks
from torchbagua.algorithms.gradient.feedback import ErrorFeedback
from torchbagua.runtime.parameter_state import residual_state
from torchbagua.runtime.runner import Runner

NO_PROGRESS: dict[str, int] = {}


def append_mean(component: object, bucket: tb.extend.BaguaBucket) -> None:
    bucket.append_centralized_synchronous_op()


def append_feedback(feedback: ErrorFeedback[Any], bucket: tb.extend.BaguaBucket) -> None:
    def append(part: tb.extend.BaguaBucket) -> None:
        residuals = feedback.state.of_bucket(part)
        part.append_centralized_synchronous_op(compression="bfloat16", error_feedback=residuals)

    feedback.append(bucket, append)


# Its runner watches optimizer steps, and registers hooks on parameters.
GRADIENTS = GradientComponent(
    make=lambda runner: ErrorFeedback(runner, residual_state("a test")), append=append_feedback
)
WEIGHTS = WeightComponent(
    make=lambda runner: runner.algorithm.make_weights(runner, lambda: NO_PROGRESS), append=append_mean
)


@pytest.mark.parametrize(
    ("raises", "error", "message"),
    [(True, ZeroDivisionError, "by zero"), (False, TypeError, r"Failing\.make_impl must return an AlgorithmImpl")],
)
def test_functions_to_call_at_close_are_called_if_there_is_no_impl(
    raises: bool, error: type[Exception], message: str
) -> None:
    def body(group: dist.ProcessGroup) -> None:
        called: list[str] = []

        class Failing(tb.Algorithm):
            def make_impl(self, runner: Runner) -> Any:
                runner.on_close(lambda: called.append("first"))
                runner.on_close(lambda: called.append("second"))
                return 1 / 0 if raises else None

        with pytest.raises(error, match=message):
            Failing().reify(group)
        assert called == ["second", "first"]

    run_ranks(2, body)


def test_close_calls_them_once_even_if_one_raises() -> None:
    def body(group: dist.ProcessGroup) -> None:
        runner, called = GRADIENTS.reify(group), []
        runner.on_close(lambda: called.append("first"))
        runner.on_close(lambda: 1 / 0)
        runner.on_close(lambda: called.append("third"))
        thread = lane_of(runner)
        with pytest.raises(ZeroDivisionError):
            runner.close()
        runner.close()
        assert called == ["third", "first"]
        assert not thread.is_alive()

    run_ranks(1, body)


def lane_of(runner: Runner) -> threading.Thread:
    """Start the lane of a runner, and return its thread."""
    thread = runner.lane.submit(threading.current_thread).result()
    assert thread.is_alive()
    return thread


@pytest.mark.parametrize("algorithm", [GRADIENTS, WEIGHTS], ids=["gradients", "weights"])
def test_a_deleted_runner_is_collected_and_its_lane_ends(algorithm: Any) -> None:
    """With its buckets, although the parameters and the optimizer remain."""
    done = threading.Barrier(2, timeout=60)

    def use(group: dist.ProcessGroup, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
        runner = algorithm.reify(group, optimizer=optimizer)
        runner.set_module(module)
        parameters = list(module.parameters())
        if algorithm is GRADIENTS:
            for _ in range(2):
                backward(runner, parameters, [torch.ones_like(parameter) for parameter in parameters])
                optimizer.step()
        else:
            runner.lane.submit(lambda: [bucket.run() for bucket in runner.buckets]).result()
        return weakref.ref(runner), weakref.ref(runner.impl), lane_of(runner)

    def body(group: dist.ProcessGroup) -> None:
        module = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        runner, impl, thread = use(group, module, optimizer)
        done.wait()  # a group that is collected closes its connections
        gc.collect()
        assert runner() is None
        assert impl() is None
        thread.join(timeout=60)
        assert not thread.is_alive()

    run_ranks(2, body)
