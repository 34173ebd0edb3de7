"""Users' own algorithms, written only against the documented interface, through the standalone hook and attach."""

import copy
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from documentation import names_in
from ranks import run_ranks
from training import Tower, build, train

NAMES = names_in("extend/algorithm.md", "class SignSGDAlgorithm", module=__name__)
# The sign of each gradient element, by majority vote (Bernstein et al., arXiv 1810.05291).
SignSGDAlgorithm, SignSGDImpl = NAMES["SignSGDAlgorithm"], NAMES["SignSGDImpl"]


def majority(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([gradient.sign() for gradient in gradients]).sum(0).sign() * torch.tensor(0.01)


@pytest.mark.parametrize("size", [3, 4])
def test_majority_vote_with_the_standalone_hook(device: torch.device, size: int) -> None:
    model = build(Tower).to(device)
    runs = run_ranks(size, lambda group: train(group, model, SignSGDAlgorithm(), bucket_cap_mb=0.01), device=device)
    for run in runs:
        assert all(torch.equal(run.weights[name], weight) for name, weight in runs[0].weights.items())
        for step, averaged in enumerate(run.averaged):
            for name, gradient in averaged.items():
                assert torch.equal(gradient, majority([peer.local[step][name] for peer in runs])), name


def train_attached(
    group: dist.ProcessGroup, model: torch.nn.Module, algorithm: tb.Algorithm, num_steps: int = 2, **options: Any
) -> tuple[torch.nn.Module, tb.Attachment]:
    """Train a copy of `model` with an algorithm attached; return it and the attachment, detached."""
    ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1000 + group.rank())
    with tb.attach(ddp, optimizer, algorithm) as attachment:
        for step in range(num_steps):
            optimizer.zero_grad()
            ddp(torch.randn(6, 10, generator=data), group.rank() + step).square().sum().backward()
            optimizer.step()
    return ddp.module, attachment


def test_observers_are_notified_of_every_byte(device: torch.device) -> None:
    model = build(Tower).to(device)
    recorders = [tb.observe.Recorder() for _ in range(3)]

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with tb.attach(ddp, optimizer, SignSGDAlgorithm(), observers=[recorders[group.rank()]]):
            ddp(torch.ones(6, 10, device=device), 0).square().sum().backward()
            optimizer.step()

    run_ranks(3, body, device=device)
    sent = [event for recorder in recorders for event in recorder.events if event.phase == "send"]
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    # In both phases each rank sends to two others, in 16 bits; rows are 32 bytes long, or 64.
    assert sum(event.num_elements for event in sent) == 4 * num_elements
    assert 0 <= sum(event.bytes_sent for event in sent) - 2 * 4 * num_elements <= 32 * len(sent)


def test_attach_and_the_standalone_hook_train_the_same_weights() -> None:
    model = build(Tower)
    attached = run_ranks(3, lambda group: train_attached(group, model, SignSGDAlgorithm()))
    hooked = run_ranks(3, lambda group: train(group, model, SignSGDAlgorithm(), num_steps=2))
    for (module, _), run in zip(attached, hooked, strict=True):
        for name, weight in module.named_parameters():
            assert torch.equal(weight, run.weights[name]), name


def test_impl_and_registered_algorithm_are_checked() -> None:
    class Forgetful(tb.Algorithm):
        def make_impl(self, runner: tb.extend.Runner) -> None:
            tb.AlgorithmImpl(runner)

    with pytest.raises(TypeError, match=r"Forgetful.make_impl must return an AlgorithmImpl, got None"):
        run_ranks(1, lambda group: Forgetful().reify(group))
    with pytest.raises(TypeError, match="register: algorithm must be a class or a function that returns one, got 5"):
        tb.extend.register("five", 5)


@pytest.mark.parametrize("algorithm", [tb.ByteGradAlgorithm, tb.GradientAllReduceAlgorithm])
def test_flags_must_be_booleans(algorithm: type[tb.Algorithm]) -> None:
    with pytest.raises(TypeError, match=f"{algorithm.__name__}: average must be True or False, got 'no'"):
        algorithm(average="no")
    with pytest.raises(TypeError, match=f"{algorithm.__name__}: hierarchical must be True or False, got None"):
        algorithm(hierarchical=None)


def test_flat_tensor_of_another_length_is_refused() -> None:
    tensors = [tb.extend.BaguaTensor("weight", torch.zeros(5))]
    for flat, got in ((torch.zeros(8), r"\[8\]"), (torch.zeros(10)[::2], r"non-contiguous \[5\]")):
        with pytest.raises(ValueError, match=rf"flat must be contiguous, .* length of its tensors, \[5\], got {got}"):
            run_ranks(
                1, lambda group, flat=flat: tb.extend.BaguaBucket("b", tensors, tb.BaguaProcessGroup(group), flat)
            )


def test_python_op_that_raises_fails_the_step() -> None:
    class FailingImpl(SignSGDImpl):
        def vote(self, bucket: tb.extend.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
            raise ZeroDivisionError("in the user's operation")

    class FailingAlgorithm(tb.Algorithm):
        def make_impl(self, runner: tb.extend.Runner) -> FailingImpl:
            return FailingImpl(runner)

    model = build(Tower)
    message = "vote on gradient bucket 0 failed on rank 0: ZeroDivisionError: in the user's operation"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(1, lambda group: train(group, model, FailingAlgorithm()))


def test_python_op_that_fails_after_communicating_fails_the_other_ranks_at_once() -> None:
    """Objects that its frames reference must not keep the connections open until the timeout."""

    class FailingImpl(SignSGDImpl):
        def vote(self, bucket: tb.extend.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
            private = group.world.torch_group
            dist.all_reduce(bucket.flat, group=private)
            if private.rank() == 1:
                raise ZeroDivisionError("on one rank")
            dist.all_reduce(bucket.flat, group=private)

    class FailingAlgorithm(tb.Algorithm):
        def make_impl(self, runner: tb.extend.Runner) -> tb.AlgorithmImpl:
            return FailingImpl(runner)

    seconds: dict[int, float] = {}

    def body(group: dist.ProcessGroup) -> None:
        model = torch.nn.Linear(3, 1)
        ddp = DistributedDataParallel(model, process_group=group)
        ddp.register_comm_hook(FailingAlgorithm().reify(group, timeout=timedelta(seconds=40)), tb.comm_hook)
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="vote on gradient bucket 0 failed"):
            ddp(torch.ones(1, 3)).sum().backward()
        seconds[group.rank()] = time.monotonic() - start

    run_ranks(2, body)
    assert max(seconds.values()) < 10, seconds


def test_failure_closes_the_group_of_every_operation() -> None:
    """Also a group that the impl does not own: peers that wait on it fail at once."""

    class TwoGroupsImpl(SignSGDImpl):
        def init_operations(self, module: torch.nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
            bucket.append_python_op(self.fail_on_one_rank)
            bucket.append_centralized_synchronous_op(group=self.second_group)

        def fail_on_one_rank(self, bucket: tb.extend.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
            if group.rank == 1:
                raise ZeroDivisionError("on one rank")

    class TwoGroupsAlgorithm(tb.Algorithm):
        def make_impl(self, runner: tb.extend.Runner) -> tb.AlgorithmImpl:
            impl = TwoGroupsImpl(runner)
            impl.second_group = runner.process_group.duplicate()
            return impl

    seconds: dict[int, float] = {}

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(torch.nn.Linear(3, 1), process_group=group)
        ddp.register_comm_hook(TwoGroupsAlgorithm().reify(group, timeout=timedelta(seconds=40)), tb.comm_hook)
        start = time.monotonic()
        with pytest.raises(
            RuntimeError, match=r"ZeroDivisionError: on one rank|(of|with) gradient bucket 0 over the world group"
        ):
            ddp(torch.ones(1, 3)).sum().backward()
        seconds[group.rank()] = time.monotonic() - start

    run_ranks(2, body)
    assert max(seconds.values()) < 10, seconds


def refused_impl(call: Callable[[Any], object]) -> tb.Algorithm:
    class RefusedImpl(SignSGDImpl):
        def __init__(self, runner: tb.extend.Runner) -> None:
            super().__init__(runner)
            call(self)

    class Refused(tb.Algorithm):
        def make_impl(self, runner: tb.extend.Runner) -> tb.AlgorithmImpl:
            return RefusedImpl(runner)

    return Refused()


def test_a_gradient_algorithm_cannot_average_weights() -> None:
    message = "Refused's impl averages weights, because it calls runner.average, but Refused.averages_weights is False"
    with pytest.raises(TypeError, match=message):
        run_ranks(1, refused_impl(lambda impl: impl.runner.average(None)).reify)


def test_the_defaults_of_a_gradient_algorithm_have_no_weights() -> None:
    def body(group: dist.ProcessGroup) -> None:
        impl = refused_impl(lambda impl: None).reify(group).impl
        assert not impl.need_reset()
        assert not impl.finish()
        with impl.averaged_weights():
            pass
        impl.weights_loaded({})
        with pytest.raises(TypeError, match="RefusedImpl is a gradient algorithm, so DDP provides its tensors"):
            impl.init_tensors(torch.nn.Linear(1, 1))
        impl.runner.close()

    run_ranks(1, body)


@pytest.mark.parametrize("method", ["keep", "on_step_taken", "require_grad_scaler"])
def test_what_belongs_into_the_constructor_is_refused_later(method: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        runner = SignSGDAlgorithm().reify(group)
        arguments = [] if method == "require_grad_scaler" else [None]
        with pytest.raises(RuntimeError, match=f"Runner.{method} was called too late"):
            getattr(runner, method)(*arguments)
        runner.close()

    run_ranks(1, body)


def test_registry() -> None:
    names = tb.available_algorithms()
    assert {"bytegrad", "gradient_allreduce"} <= set(names)
    assert tb.Algorithm.init("bytegrad", hierarchical=False) == tb.ByteGradAlgorithm(hierarchical=False)
    with pytest.raises(KeyError, match=r"no algorithm is named 'bytegrade'; .*\[.*'bytegrad', 'compressed_allreduce'"):
        tb.Algorithm.init("bytegrade")
    with pytest.raises(ValueError, match="an algorithm named 'bytegrad' is already registered"):
        tb.extend.register("bytegrad", SignSGDAlgorithm)
    with pytest.raises(TypeError, match="register: name must be a string, got 3"):
        tb.extend.register(3, SignSGDAlgorithm)


def test_descriptions_are_values() -> None:
    import pickle

    algorithm = tb.ByteGradAlgorithm(block=64)
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm
    assert repr(algorithm) == "ByteGradAlgorithm(hierarchical=True, average=True, block=64, error_feedback=False)"
    with pytest.raises(AttributeError):
        algorithm.average = False
