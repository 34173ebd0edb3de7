"""Users' own gradient algorithms, written only against the documented interface, and those from one function."""

import pickle
import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from documentation import names_in
from ranks import run_ranks
from torchbagua.algorithms import base
from torchbagua.testing import check_algorithm
from torchbagua.testing.simulation import Subject, check
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


def test_flat_tensor_of_another_length_is_refused() -> None:
    tensors = [tb.extend.BaguaTensor("weight", torch.zeros(5))]
    for flat, got in ((torch.zeros(8), r"\[8\]"), (torch.zeros(10)[::2], r"non-contiguous \[5\]")):
        with pytest.raises(ValueError, match=rf"flat must be contiguous, .* length of its tensors, \[5\], got {got}"):
            run_ranks(
                1, lambda group, flat=flat: tb.extend.BaguaBucket("b", tensors, tb.BaguaProcessGroup(group), flat)
            )


class FailsAfterCommunicating(SignSGDImpl):
    """Objects that its frames reference must not keep the connections open until the timeout."""

    def vote(self, bucket: tb.extend.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
        private = group.world.torch_group
        dist.all_reduce(bucket.flat, group=private)
        if private.rank() == 1:
            raise ZeroDivisionError("on one rank")
        dist.all_reduce(bucket.flat, group=private)


class FailsBesideASecondGroup(SignSGDImpl):
    """Peers wait on a group that the impl does not own, which is closed too."""

    def __init__(self, runner: tb.extend.GradientRunner) -> None:
        super().__init__(runner)
        self.second_group = runner.process_group.duplicate()

    def init_operations(self, module: torch.nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
        bucket.append_python_op(self.fail_on_one_rank)
        bucket.append_centralized_synchronous_op(group=self.second_group)

    def fail_on_one_rank(self, bucket: tb.extend.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
        if group.rank == 1:
            raise ZeroDivisionError("on one rank")


@pytest.mark.parametrize(
    ("cls", "on_rank_0"),
    [
        (FailsAfterCommunicating, "vote on gradient bucket 0 failed"),
        (FailsBesideASecondGroup, "(of|with) gradient bucket 0 over the world group"),
    ],
)
def test_an_operation_that_raises_fails_the_other_ranks_at_once(cls: type[SignSGDImpl], on_rank_0: str) -> None:
    class Failing(tb.Algorithm):
        def make_impl(self, runner: tb.extend.GradientRunner) -> tb.AlgorithmImpl:
            return cls(runner)

    def body(group: dist.ProcessGroup) -> float:
        ddp = DistributedDataParallel(torch.nn.Linear(3, 1), process_group=group)
        ddp.register_comm_hook(Failing().reify(group, timeout=timedelta(seconds=40)), tb.comm_hook)
        start_s = time.monotonic()
        on_rank_1 = r"\w+ on gradient bucket 0 failed on rank 1: ZeroDivisionError: on one rank"
        with pytest.raises(RuntimeError, match=on_rank_1 if group.rank() else f"{on_rank_0}|{on_rank_1}"):
            ddp(torch.ones(1, 3)).sum().backward()
        return time.monotonic() - start_s

    assert max(run_ranks(2, body)) < 10


def test_the_defaults_of_a_gradient_algorithm_have_no_weights() -> None:
    def body(group: dist.ProcessGroup) -> None:
        impl = SignSGDAlgorithm().reify(group).impl
        assert not impl.need_reset()
        assert not impl.finish()
        with impl.averaged_weights():
            pass
        impl.weights_loaded({})
        with pytest.raises(TypeError, match="SignSGDImpl is a gradient algorithm, so DDP provides its tensors"):
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


class Forgetful(tb.Algorithm):
    def make_impl(self, runner: tb.extend.Runner) -> None:
        tb.AlgorithmImpl(runner)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: run_ranks(1, Forgetful().reify), TypeError, "Forgetful.make_impl must return an AlgorithmImpl, got N"),
        (lambda: tb.extend.register("five", 5), TypeError, "register: algorithm must be a class or a .* one, got 5"),
        (lambda: tb.extend.register(3, SignSGDAlgorithm), TypeError, "register: name must be a string, got 3"),
        (
            lambda: tb.extend.register("bytegrad", SignSGDAlgorithm),
            ValueError,
            "'bytegrad' is already registered",
        ),
        (lambda: tb.Algorithm.init("bytegrade"), KeyError, r"'bytegrade'; .*\[.*'bytegrad', 'compressed_allreduce'"),
        (lambda: tb.ByteGrad(average="no"), TypeError, "ByteGradAlgorithm: average must be True or False, got 'no'"),
        (
            lambda: tb.GradientAllReduce(hierarchical=None),
            TypeError,
            "hierarchical must be True or False, got None",
        ),
    ],
)
def test_wrong_algorithms_are_refused(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_descriptions_are_values() -> None:
    algorithm = tb.Algorithm.init("bytegrad", block=64)
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm
    assert repr(algorithm) == "ByteGradAlgorithm(hierarchical=True, average=True, block=64, error_feedback=False)"
    with pytest.raises(AttributeError):
        algorithm.average = False


# An algorithm from one function. test_error_feedback.py tests its residuals.


def in_full_precision(flat: torch.Tensor, group: tb.BaguaProcessGroup) -> None:
    group.all_reduce(flat, average=True)


def in_halves(flat: torch.Tensor) -> torch.Tensor:
    """Return multiples of 1/2. An element at a time, since a resumed run has other buckets in its first step."""
    return flat.mul(2).round().div(2)


def in_halves_rounded_down(flat: torch.Tensor) -> torch.Tensor:
    return flat.mul(2).floor().div(2)


def failing(flat: torch.Tensor, group: tb.BaguaProcessGroup) -> None:
    raise ArithmeticError("it does not add up")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    tb.extend.mean("exact")(in_full_precision)
    tb.extend.mean("half", error_feedback=in_halves, description="in halves")(in_full_precision)
    tb.extend.mean("other half", error_feedback=in_halves_rounded_down)(in_full_precision)
    tb.extend.mean("failing")(failing)
    tb.extend.mean("anonymous")(lambda flat, group: None)


def test_a_function_is_an_algorithm() -> None:
    """Bitwise the package's own mean in rank order."""
    model, in_order = build(Tower), tb.GradientAllReduceAlgorithm(in_rank_order=True)
    own, expected = (
        run_ranks(2, lambda group, algorithm=algorithm: train(group, model, algorithm, bucket_cap_mb=0.01).weights)
        for algorithm in (tb.Algorithm.init("exact"), in_order)
    )
    for weights, reference in zip(own, expected, strict=True):
        assert all(torch.equal(weight, reference[name]) for name, weight in weights.items())
    assert tb.available_algorithms()["half"] == "in halves"


def test_a_function_keeps_the_contract_of_algorithms() -> None:
    """Residuals are resumed too, into the buckets of a new DDP."""
    check_algorithm(Subject(lambda optimizer: base.get("half")()))


def attach_and_backward(group: dist.ProcessGroup, name: str) -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
    with tb.attach(ddp, torch.optim.SGD(ddp.parameters()), name):
        ddp(torch.ones(1, 3)).sum().backward()


def test_an_error_names_the_function() -> None:
    def body(group: dist.ProcessGroup) -> str:
        with pytest.raises(RuntimeError) as raised:
            attach_and_backward(group, "failing")
        return str(raised.value)

    # If the other rank fails first, a rank may see only that its connection is closed.
    pattern = r"failing.*gradient bucket 0.*it does not add up"
    assert any(re.search(pattern, message, re.DOTALL) for message in run_ranks(2, body))


def test_a_state_of_another_function_is_refused() -> None:
    """Its residuals belong to what another function sends."""

    def body(group: dist.ProcessGroup) -> None:
        states = []
        for name in ("half", "other half"):
            ddp = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
            with tb.attach(ddp, torch.optim.SGD(ddp.parameters()), name) as attachment:
                ddp(torch.ones(1, 3)).sum().backward()
                states.append(attachment.state_dict())
                if name == "other half":
                    with pytest.raises(ValueError, match=r"saved with|in_halves"):
                        attachment.load_state_dict(states[0])

    run_ranks(2, body)


def test_ranks_cannot_compare_a_lambda() -> None:
    with pytest.raises(TypeError, match="a function that can be imported by its name"):
        run_ranks(1, partial(attach_and_backward, name="anonymous"))


@pytest.mark.usefixtures("on_one_core")
@pytest.mark.filterwarnings("ignore")
def test_simulation() -> None:
    check(Subject(lambda optimizer: base.get("half")()), seeds=range(8))
