"""Users' own algorithms, written only against the documented interface, through the plain hook and through attach."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchbagua as tb
from ranks import run_ranks
from training import Tower, build, train


@dataclass(frozen=True)
class SignSGDAlgorithm(tb.Algorithm):
    """The sign of each gradient element, by majority vote (Bernstein et al., arXiv 1810.05291)."""

    scale: float = 0.01

    def make_impl(self, process_group: tb.BaguaProcessGroup) -> "SignSGDImpl":
        return SignSGDImpl(process_group, self.scale)


class SignSGDImpl(tb.AlgorithmImpl):
    def __init__(self, process_group: tb.BaguaProcessGroup, scale: float) -> None:
        super().__init__(process_group)
        self.scale = scale

    def init_operations(self, module: torch.nn.Module | None, bucket: tb.BaguaBucket) -> None:
        bucket.append_python_op(self.vote)

    def vote(self, bucket: tb.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
        votes = bucket.flat.sign().to(torch.int8)
        dist.all_reduce(votes, group=group.world.process_group)
        bucket.flat.copy_(votes.sign().mul(self.scale))


def majority(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([gradient.sign() for gradient in gradients]).sum(0).sign() * torch.tensor(0.01)


def test_majority_vote_behind_the_plain_hook() -> None:
    model = build(Tower)
    runs = run_ranks(3, lambda group: train(group, model, SignSGDAlgorithm(), bucket_cap_mb=0.01))
    for run in runs:
        assert all(torch.equal(run.weights[name], weight) for name, weight in runs[0].weights.items())
        for step, averaged in enumerate(run.averaged):
            for name, gradient in averaged.items():
                assert torch.equal(gradient, majority([other.local[step][name] for other in runs])), name


def attached_steps(
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


def test_both_doors_give_the_same() -> None:
    model = build(Tower)
    attached = run_ranks(3, lambda group: attached_steps(group, model, SignSGDAlgorithm()))
    hooked = run_ranks(3, lambda group: train(group, model, SignSGDAlgorithm(), num_steps=2))
    for (module, _), run in zip(attached, hooked, strict=True):
        for name, weight in module.named_parameters():
            assert torch.equal(weight, run.weights[name]), name


@dataclass(frozen=True)
class LoggingAlgorithm(tb.Algorithm):
    """Plain averaging that writes down when each method of the interface is called."""

    def make_impl(self, process_group: tb.BaguaProcessGroup) -> "LoggingImpl":
        return LoggingImpl(process_group)


class LoggingImpl(tb.AlgorithmImpl):
    def __init__(self, process_group: tb.BaguaProcessGroup) -> None:
        super().__init__(process_group)
        self.log: list[str] = []
        self.resets = 0

    def need_reset(self) -> bool:
        self.log.append("need_reset")
        self.resets += 1
        return self.resets == 4

    def init_operations(self, module: torch.nn.Module | None, bucket: tb.BaguaBucket) -> None:
        assert module is not None
        names = [tensor.name for tensor in bucket.tensors]
        assert set(names) <= {name for name, _ in module.named_parameters()}
        self.log.append("init_operations")
        bucket.append_centralized_synchronous_op()

    def init_forward_pre_hook(self, module: torch.nn.Module) -> Callable[[Any], None]:
        return lambda inputs: self.log.append("forward")

    def init_backward_hook(self, module: torch.nn.Module) -> Callable[[str, torch.Tensor], None]:
        return lambda name, parameter: self.log.append(name)

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None]:
        return lambda: self.log.append("backward end")

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        return lambda optimizer: self.log.append(type(optimizer).__name__)

    def state_dict(self) -> dict[str, Any]:
        return {"resets": self.resets}

    def load_state_dict(self, state: Any) -> None:
        self.resets = state["resets"]


def test_every_method_is_called_when_it_should() -> None:
    model = build(lambda: torch.nn.Linear(10, 1))

    def body(group: dist.ProcessGroup) -> list[str]:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with tb.attach(ddp, optimizer, LoggingAlgorithm()) as attachment:
            for _ in range(5):
                ddp(torch.ones(2, 10)).sum().backward()
                optimizer.step()
            ddp.eval()(torch.ones(2, 10))
            ddp.train()
            with torch.no_grad():
                ddp(torch.ones(2, 10))
            assert attachment.state_dict()["impl"] == {"resets": 5}
        ddp(torch.ones(2, 10)).sum().backward()
        optimizer.step()
        impl = attachment.impl
        assert isinstance(impl, LoggingImpl)
        return impl.log

    for log in run_ranks(2, body):
        steps = [step.split() for step in " ".join(log).replace("forward", "|forward").split("|")[1:]]
        every_step = {"forward", "need_reset", "weight", "bias", "backward", "end", "SGD"}
        assert [set(step) - {"init_operations"} for step in steps] == [every_step] * 5
        assert all(step[0] == "forward" and step[-3:] == ["backward", "end", "SGD"] for step in steps)
        # First seen; DDP rebuilds its buckets; nothing; need_reset was True; nothing.
        assert ["init_operations" in step for step in steps] == [True, True, False, True, False]


def test_backward_end_is_called_once_with_a_reentrant_checkpoint() -> None:
    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = (torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            for layer in (self.first, self.second):
                x = checkpoint(layer, x, use_reentrant=True)
            return {"y": self.last(x), "z": x.sum()}

    model = build(Checkpointed)

    def body(group: dist.ProcessGroup) -> list[str]:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with tb.attach(ddp, optimizer, LoggingAlgorithm()) as attachment:
            for _ in range(2):
                out = ddp(torch.ones(2, 4, requires_grad=True))
                (out["y"].sum() + out["z"]).backward()
        assert isinstance(attachment.impl, LoggingImpl)
        return attachment.impl.log

    for log in run_ranks(2, body):
        assert log.count("backward end") == 2
        assert log[-1] == "backward end"


def test_ignored_parameters_and_further_optimizers_are_left_alone() -> None:
    """DDP's parameters_to_ignore get no hook; of several optimizers the first is the clock."""

    def body(group: dist.ProcessGroup) -> list[str]:
        module = torch.nn.Linear(10, 1)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
        ddp = DistributedDataParallel(module, process_group=group)
        optimizers = [torch.optim.SGD([module.weight], lr=0.1), torch.optim.Adam([module.bias])]
        with tb.attach(ddp, optimizers, LoggingAlgorithm()) as attachment:
            ddp(torch.ones(2, 10)).sum().backward()
            for optimizer in reversed(optimizers):
                optimizer.step()
        assert isinstance(attachment.impl, LoggingImpl)
        return attachment.impl.log

    for log in run_ranks(1, body):
        assert "weight" in log
        assert "bias" not in log
        assert "SGD" in log
        assert "Adam" not in log


@dataclass(frozen=True)
class AveragingAlgorithm(tb.Algorithm):
    """A weight algorithm: every rank takes its own steps, and weights are averaged after each."""

    def make_impl(self, process_group: tb.BaguaProcessGroup) -> "AveragingImpl":
        return AveragingImpl(process_group)


class AveragingImpl(tb.AlgorithmImpl):
    def init_tensors(self, module: torch.nn.Module) -> list[tb.BaguaTensor]:
        return [tb.BaguaTensor(name, parameter) for name, parameter in module.named_parameters()]

    def tensors_to_buckets(self, tensors: list[tb.BaguaTensor], do_flatten: bool) -> list[tb.BaguaBucket]:
        flat = torch.empty(sum(tensor.parameter.numel() for tensor in tensors))
        return [tb.BaguaBucket("weights", tensors, self.process_group, flat)]

    def init_operations(self, module: torch.nn.Module | None, bucket: tb.BaguaBucket) -> None:
        bucket.append_centralized_synchronous_op()

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        def average(optimizer: torch.optim.Optimizer) -> None:
            with torch.no_grad():
                for bucket in self.buckets:
                    parameters = [tensor.parameter for tensor in bucket.tensors]
                    bucket.flat.copy_(torch.nn.utils.parameters_to_vector(parameters))
                    self.lane.submit(bucket.run).wait()
                    torch.nn.utils.vector_to_parameters(bucket.flat, parameters)

        return average


def test_weight_algorithm() -> None:
    """While it is attached DDP reduces nothing; one step from equal weights is then one step of the mean gradient."""
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
    """DDP averages the first gradient, from which it learns the graph, and no other."""
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

    assert run_ranks(2, body) == [[False, True, False, True, True, False]] * 2


def test_half_a_weight_algorithm_is_refused() -> None:
    class HalfImpl(AveragingImpl):
        init_tensors = tb.AlgorithmImpl.init_tensors

    class HalfAlgorithm(tb.Algorithm):
        def make_impl(self, process_group: tb.BaguaProcessGroup) -> HalfImpl:
            return HalfImpl(process_group)

    with pytest.raises(TypeError, match="HalfImpl overrides tensors_to_buckets without init_tensors"):
        run_ranks(1, lambda group: HalfAlgorithm().reify(group))


def test_impl_and_registered_algorithm_are_checked() -> None:
    class Forgetful(tb.Algorithm):
        def make_impl(self, process_group: tb.BaguaProcessGroup) -> None:
            AveragingImpl(process_group)

    with pytest.raises(TypeError, match=r"Forgetful.make_impl must return an AlgorithmImpl, got None"):
        run_ranks(1, lambda group: Forgetful().reify(group))
    with pytest.raises(TypeError, match="register: algorithm must be a class, or a function that makes one, got 5"):
        tb.register("five", 5)


@pytest.mark.parametrize("algorithm", [tb.ByteGradAlgorithm, tb.GradientAllReduceAlgorithm])
def test_flags_are_flags(algorithm: type[tb.Algorithm]) -> None:
    with pytest.raises(TypeError, match=f"{algorithm.__name__}: average must be True or False, got 'no'"):
        algorithm(average="no")
    with pytest.raises(TypeError, match=f"{algorithm.__name__}: hierarchical must be True or False, got None"):
        algorithm(hierarchical=None)


def test_flat_tensor_of_another_length_is_refused() -> None:
    tensors = [tb.BaguaTensor("weight", torch.zeros(5))]
    for flat, got in ((torch.zeros(8), r"\[8\]"), (torch.zeros(10)[::2], r"non-contiguous \[5\]")):
        with pytest.raises(ValueError, match=rf"flat must be contiguous, \[5\] as its tensors together, got {got}"):
            run_ranks(1, lambda group, flat=flat: tb.BaguaBucket("b", tensors, tb.BaguaProcessGroup(group), flat))


def test_second_attachment_is_refused_beside_a_weight_algorithm() -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(torch.nn.Linear(3, 1), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters())
        for first, second in ((AveragingAlgorithm(), "bytegrad"), ("bytegrad", AveragingAlgorithm())):
            with (
                tb.attach(ddp, optimizer, first),
                pytest.raises(ValueError, match="Impl is attached to the module already; detach it first"),
            ):
                tb.attach(ddp, optimizer, second)
        assert ddp.require_backward_grad_sync

    run_ranks(1, body)


def test_python_op_that_raises_fails_the_step() -> None:
    class FailingImpl(SignSGDImpl):
        def vote(self, bucket: tb.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
            raise ZeroDivisionError("in the user's operation")

    class FailingAlgorithm(tb.Algorithm):
        def make_impl(self, process_group: tb.BaguaProcessGroup) -> FailingImpl:
            return FailingImpl(process_group, 1.0)

    model = build(Tower)
    message = "vote on gradient bucket 0 failed: ZeroDivisionError: in the user's operation"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(1, lambda group: train(group, model, FailingAlgorithm()))


def test_python_op_that_fails_after_communicating_tells_the_others_at_once() -> None:
    """What its frames hold must not keep the connections open until the timeout."""

    class FailingImpl(SignSGDImpl):
        def vote(self, bucket: tb.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
            private = group.world.process_group
            dist.all_reduce(bucket.flat, group=private)
            if private.rank() == 1:
                raise ZeroDivisionError("on one rank")
            dist.all_reduce(bucket.flat, group=private)

    class FailingAlgorithm(tb.Algorithm):
        def make_impl(self, process_group: tb.BaguaProcessGroup) -> tb.AlgorithmImpl:
            return FailingImpl(process_group, 1.0)

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
    """Also one that the impl does not own: peers that wait on it hear at once."""

    class TwoGroupsImpl(SignSGDImpl):
        def init_operations(self, module: torch.nn.Module | None, bucket: tb.BaguaBucket) -> None:
            bucket.append_python_op(self.fail_on_one_rank)
            bucket.append_centralized_synchronous_op(group=self.other)

        def fail_on_one_rank(self, bucket: tb.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
            if group.rank == 1:
                raise ZeroDivisionError("on one rank")

    class TwoGroupsAlgorithm(tb.Algorithm):
        def make_impl(self, process_group: tb.BaguaProcessGroup) -> tb.AlgorithmImpl:
            impl = TwoGroupsImpl(process_group, 1.0)
            impl.other = process_group.duplicate()
            return impl

    seconds: dict[int, float] = {}

    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(torch.nn.Linear(3, 1), process_group=group)
        ddp.register_comm_hook(TwoGroupsAlgorithm().reify(group, timeout=timedelta(seconds=40)), tb.comm_hook)
        start = time.monotonic()
        with pytest.raises(
            RuntimeError, match=r"ZeroDivisionError: on one rank|of gradient bucket 0 over the world group"
        ):
            ddp(torch.ones(1, 3)).sum().backward()
        seconds[group.rank()] = time.monotonic() - start

    run_ranks(2, body)
    assert max(seconds.values()) < 10, seconds


def test_registry() -> None:
    names = tb.available_algorithms()
    assert {"bytegrad", "gradient_allreduce"} <= set(names)
    assert tb.Algorithm.init("bytegrad", hierarchical=False) == tb.ByteGradAlgorithm(hierarchical=False)
    with pytest.raises(
        KeyError, match=r"no algorithm is named 'bytegrade'; there are \['bytegrad', 'gradient_allreduce'"
    ):
        tb.Algorithm.init("bytegrade")
    with pytest.raises(ValueError, match="an algorithm named 'bytegrad' is registered already"):
        tb.register("bytegrad", SignSGDAlgorithm)
    with pytest.raises(TypeError, match="register: name must be a string, got 3"):
        tb.register(3, SignSGDAlgorithm)


def test_descriptions_are_values() -> None:
    import pickle

    algorithm = tb.ByteGradAlgorithm(block=64)
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm
    assert repr(algorithm) == "ByteGradAlgorithm(hierarchical=True, average=True, block=64)"
    with pytest.raises(AttributeError):
        algorithm.average = False
