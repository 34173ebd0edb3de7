"""attach and the standalone hook: the arguments that they refuse, and the state after detach."""

import copy
import gc
import io
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
import torchbagua.native
from ranks import gloo_group, init_default_group, run_ranks
from transports import CollectivesAlone

Body = Callable[[dist.ProcessGroup], None]


def wrap(group: dist.ProcessGroup, module: nn.Module | None = None, **options: object):
    ddp = DistributedDataParallel(module or nn.Linear(4, 2), process_group=group, **options)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


def attach_plain_module(group: dist.ProcessGroup) -> None:
    module = nn.Linear(4, 2)
    own_group = tb.BaguaProcessGroup(group)
    tb.attach(module, torch.optim.SGD(module.parameters()), "bytegrad", process_group=own_group)


def attach_with_foreign_optimizer(group: dist.ProcessGroup) -> None:
    ddp, _ = wrap(group)
    tb.attach(ddp, torch.optim.SGD(nn.Linear(3, 3).parameters()), "bytegrad")


def attach_with_partly_foreign_optimizer(group: dist.ProcessGroup) -> None:
    ddp, _ = wrap(group)
    tb.attach(ddp, torch.optim.SGD([*ddp.parameters(), nn.Parameter(torch.ones(5))]), "decentralized")


def attach_with_no_optimizer(group: dist.ProcessGroup) -> None:
    tb.attach(wrap(group)[0], ["sgd"], "bytegrad")


def attach_with_a_name_for_an_optimizer(group: dist.ProcessGroup) -> None:
    tb.attach(wrap(group)[0], "sgd", "bytegrad")


def attach_python_reducer(group: dist.ProcessGroup) -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        tb.attach(*wrap(group), "bytegrad")


def attach_with_optimizer_in_backward(group: dist.ProcessGroup) -> None:
    ddp, optimizer = wrap(group)
    _apply_optimizer_in_backward(torch.optim.SGD, ddp.parameters(), {"lr": 0.1})
    tb.attach(ddp, optimizer, "decentralized")


def attach_after_own_hook(group: dist.ProcessGroup) -> None:
    ddp, optimizer = wrap(group)
    ddp.register_comm_hook(group, allreduce_hook)
    tb.attach(ddp, optimizer, "bytegrad")


def attach_twice(group: dist.ProcessGroup) -> None:
    ddp, optimizer = wrap(group)
    with tb.attach(ddp, optimizer, "bytegrad"):
        tb.attach(ddp, optimizer, "gradient_allreduce")


def attach_unknown_name(group: dist.ProcessGroup) -> None:
    tb.attach(*wrap(group), "bitegrad")


def attach_inside_of_the_wrapper(group: dist.ProcessGroup) -> None:
    ddp, optimizer = wrap(group)
    with tb.attach(ddp, optimizer, "decentralized"):
        tb.attach(ddp.module, optimizer, "decentralized", process_group=tb.BaguaProcessGroup(group))


def attach_around_an_attached_module(group: dist.ProcessGroup) -> None:
    module = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters())
    with tb.attach(module, optimizer, "decentralized", process_group=tb.BaguaProcessGroup(group)):
        tb.attach(DistributedDataParallel(nn.Sequential(module), process_group=group), optimizer, "bytegrad")


def attach_sharded_optimizer(group: dist.ProcessGroup) -> None:
    ddp, _ = wrap(group)
    sharded = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    tb.attach(ddp, sharded, "decentralized")


def attach_class_instead_of_instance(group: dist.ProcessGroup) -> None:
    tb.attach(*wrap(group), tb.ByteGradAlgorithm)


def attach_with_a_number_for_a_timeout(group: dist.ProcessGroup) -> None:
    tb.attach(*wrap(group), "bytegrad", timeout=5)


def attach_delayed_all_reduce(group: dist.ProcessGroup) -> None:
    module = nn.Linear(4, 2)
    delayed = [("weight", module.weight)]
    ddp = DistributedDataParallel(
        module, process_group=group, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.bias
    )
    tb.attach(ddp, torch.optim.SGD(module.parameters()), "bytegrad")


def attach_sparse(group: dist.ProcessGroup) -> None:
    tb.attach(*wrap(group, nn.Sequential(nn.Embedding(5, 2, sparse=True))), "bytegrad")


def attach_with_group_of_other_ranks(group: dist.ProcessGroup) -> None:
    ddp, optimizer = wrap(gloo_group(dist.HashStore(), 0, 1))
    tb.attach(ddp, optimizer, "bytegrad", process_group=tb.BaguaProcessGroup(group))


def attach_with_a_class_as_observer(group: dist.ProcessGroup) -> None:
    tb.attach(*wrap(group), "bytegrad", observers=[tb.observe.Recorder])


def attach_with_one_observer(group: dist.ProcessGroup) -> None:
    tb.attach(*wrap(group), "bytegrad", observers=tb.observe.Recorder())


def hook_with_wrong_state(group: dist.ProcessGroup) -> None:
    ddp, _ = wrap(group)
    ddp.register_comm_hook(tb.ByteGradAlgorithm(), tb.comm_hook)
    ddp(torch.ones(1, 4)).sum().backward()


def hook_with_sparse_gradients(group: dist.ProcessGroup) -> None:
    ddp, _ = wrap(group, nn.Embedding(5, 2, sparse=True))
    ddp.register_comm_hook(tb.ByteGradAlgorithm().reify(group), tb.comm_hook)
    ddp(torch.tensor([1])).sum().backward()


def hook_with_python_reducer(group: dist.ProcessGroup) -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp, _ = wrap(group)
    ddp.register_comm_hook(tb.ByteGradAlgorithm().reify(group), tb.comm_hook)
    ddp(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (attach_plain_module, TypeError, "attach: module must be a .*DistributedDataParallel, got Linear"),
        (attach_with_foreign_optimizer, ValueError, r"SGD has 2 parameters that are not the .* \(3, 3\)"),
        (attach_with_partly_foreign_optimizer, ValueError, r"SGD has 1 parameters that are not the .* \(5,\)"),
        (attach_with_no_optimizer, TypeError, "attach: optimizer must be a torch.optim.Optimizer, got 'sgd'"),
        (attach_with_a_name_for_an_optimizer, TypeError, "must be a torch.optim.Optimizer, got 'sgd'"),
        (attach_python_reducer, ValueError, "attach: the module was created with .* = \"python_reducer\""),
        (attach_with_optimizer_in_backward, ValueError, "attach: weight has an optimizer that steps it in backward"),
        (attach_after_own_hook, ValueError, "attach: the module has the communication hook allreduce_hook already"),
        (attach_twice, ValueError, "attach: ByteGradAlgorithm is attached to the module already; detach it first"),
        (attach_inside_of_the_wrapper, ValueError, "DecentralizedAlgorithm is attached to the module already"),
        (attach_around_an_attached_module, ValueError, "Algorithm is attached to the module's module.0 already"),
        (attach_sharded_optimizer, ValueError, "steps all weights on every rank, got ZeroRedundancyOptimizer"),
        (attach_unknown_name, KeyError, "no algorithm is named 'bitegrad'; the registered names are .*'bytegrad'"),
        (attach_class_instead_of_instance, TypeError, r"an Algorithm or .*; construct it: ByteGradAlgorithm\(\)"),
        (attach_with_a_number_for_a_timeout, TypeError, "attach: timeout must be a datetime.timedelta, got 5"),
        (attach_delayed_all_reduce, ValueError, "attach: the module was created with delay_all_reduce_named_params"),
        (attach_sparse, ValueError, "attach: 0 of Sequential has sparse=True; create it with sparse=False"),
        (attach_with_a_class_as_observer, TypeError, "an observer must be an object with .* on_comm.*got <class"),
        (attach_with_one_observer, TypeError, "observers must be a list of objects .* got <torchbagua.observe"),
        (hook_with_wrong_state, TypeError, "comm_hook: state must be what .* reify returned, got Byte"),
        (hook_with_python_reducer, TypeError, "got a tuple .* = \"python_reducer\", with which"),
        (hook_with_sparse_gradients, ValueError, "gradients must be dense, got a torch.sparse_coo tensor"),
    ],
)  # fmt: skip
def test_refused(body: Body, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_ranks(1, body)


@pytest.mark.parametrize("algorithm", ["bytegrad", "decentralized"])
def test_sharded_modules_are_refused(algorithm: str) -> None:
    """Parameters of FSDP2 in another module, and an imitated FSDP1 module, which cannot be created without a GPU."""
    init_default_group()
    sharded = fully_shard(nn.Linear(4, 2))
    parts = nn.Module()
    parts.weight = sharded.weight
    flat = nn.Sequential(nn.Linear(4, 2))
    flat[0].__class__ = FullyShardedDataParallel
    for module, name in ((parts, "weight"), (flat, "0")):
        message = f"attach: {name} is sharded .*ranks hold different parts of the weights, which is not supported"
        with pytest.raises(TypeError, match=message):
            tb.attach(module, torch.optim.SGD(sharded.parameters()), algorithm)


@pytest.mark.parametrize("algorithm", [tb.ByteGradAlgorithm(), tb.ByteGradAlgorithm(error_feedback=True)], ids=str)
def test_a_gradient_algorithm_leaves_other_parameters_of_an_optimizer_alone(algorithm: tb.Algorithm) -> None:
    """For example, the parameters of a head outside the module, which every rank trains locally."""

    def body(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        ddp, head = DistributedDataParallel(nn.Linear(4, 2), process_group=group), nn.Linear(2, 1)
        torch.nn.init.ones_(head.weight)
        optimizer = torch.optim.SGD([*ddp.parameters(), *head.parameters()], lr=0.1)
        with tb.attach(ddp, optimizer, algorithm) as attachment:
            for _ in range(2):
                optimizer.zero_grad()
                head(ddp(torch.full((1, 4), 1.0 + group.rank()))).sum().backward()
                optimizer.step()
            state = attachment.runner.state_dict()
        assert state.get("sent", {}).keys() <= {"weight", "bias"}
        return ddp.module.weight.detach(), head.weight.detach()

    (first, first_head), (second, second_head) = run_ranks(2, body)
    assert torch.equal(first, second)
    assert not torch.equal(first_head, second_head)


def test_group_of_other_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="process_group must have the module's ranks: rank 0 of 1, got rank 0 of 2"):
        run_ranks(2, attach_with_group_of_other_ranks)


def test_a_group_that_this_rank_is_not_in_is_refused() -> None:
    module = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters())
    outside = dist.GroupMember.NON_GROUP_MEMBER  # new_group returns it on ranks that are not members
    with pytest.raises(TypeError, match=r"process_group must be .*, got a group of which this rank is not a member"):
        tb.attach(module, optimizer, "decentralized", process_group=outside)


def test_attach_can_be_retried_after_a_failure_on_one_rank() -> None:
    """The other ranks time out with an error that names the failed rank; then all ranks attach."""
    arrived = threading.Barrier(3)

    def body(group: dist.ProcessGroup) -> None:
        ddp, optimizer = wrap(group)
        if group.rank() == 1:
            with pytest.raises(TypeError, match="got 'sgd'"):
                tb.attach(ddp, ["sgd"], "bytegrad")
        else:
            with pytest.raises(TimeoutError, match=r"timed out after 1 s waiting for ranks \[1\] of 3"):
                tb.attach(ddp, optimizer, "bytegrad", timeout=timedelta(seconds=1))
        arrived.wait()
        with tb.attach(ddp, optimizer, "bytegrad"):
            ddp(torch.ones(1, 4)).sum().backward()

    run_ranks(3, body)


def test_a_library_that_fails_on_one_rank_fails_before_groups_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        if threading.current_thread().name == "rank 1":
            raise RuntimeError("the library is broken")

    monkeypatch.setattr(torchbagua.native, "load", load)

    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 1:
            with pytest.raises(RuntimeError, match="the library is broken"):
                tb.ByteGradAlgorithm().reify(group)
        else:
            with pytest.raises(TimeoutError, match=r"waiting for ranks \[1\] of 2"):
                tb.ByteGradAlgorithm().reify(group, timeout=timedelta(seconds=1))

    run_ranks(2, body)


def test_observers_of_a_group_receive_the_events_of_its_attachments() -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp, optimizer = wrap(group)
        group_recorder, attachment_recorder = tb.observe.Recorder(), tb.observe.Recorder()
        bagua_group = tb.BaguaProcessGroup(group, observers=[group_recorder])
        with tb.attach(ddp, optimizer, "bytegrad", process_group=bagua_group, observers=[attachment_recorder]):
            ddp(torch.ones(1, 4)).sum().backward()
        with tb.attach(ddp, optimizer, "bytegrad", process_group=bagua_group) as attachment:
            optimizer.step()
        assert attachment.summary().figures.num_steps == 1, "the group's observers suffice for a summary"
        del group_recorder.events[len(attachment_recorder.events) :]
        assert {event.phase for event in group_recorder.events} >= {"backward", "bucket", "encode", "send"}
        assert group_recorder.events == attachment_recorder.events

    run_ranks(2, body)


def test_number_of_parameters_is_compared() -> None:
    class Fewer(DistributedDataParallel):
        """DDP compares parameters itself; this class shows attach fewer parameters than DDP has."""

        def parameters(self, recurse: bool = True):
            yield from list(super().parameters(recurse))[:1]

    def body(group: dist.ProcessGroup) -> None:
        ddp = (Fewer if group.rank() == 1 else DistributedDataParallel)(nn.Linear(4, 2), process_group=group)
        tb.attach(ddp, torch.optim.SGD([ddp.module.weight]), "bytegrad")

    with pytest.raises(ValueError, match="disagree on the number of parameters: rank 0 has 2, rank 1 has 1"):
        run_ranks(2, body)


def test_detached_ddp_averages_as_plain_ddp() -> None:
    model = nn.Linear(10, 3)

    def gradient(group: dist.ProcessGroup, ddp: DistributedDataParallel) -> torch.Tensor:
        x = torch.randn(5, 10, generator=torch.Generator().manual_seed(group.rank()))
        ddp.zero_grad()
        ddp(x).square().sum().backward()
        return ddp.module.weight.grad.clone()

    def body(group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
        plain = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters())
        expected = gradient(group, plain)
        with tb.attach(ddp, optimizer, "bytegrad") as attachment:
            quantised = gradient(group, ddp)
        attachment.detach()  # a second call has no effect
        detached = gradient(group, ddp)
        with tb.attach(ddp, optimizer, "gradient_allreduce"):
            full = gradient(group, ddp)
        return expected, quantised, detached, full

    for expected, quantised, detached, full in run_ranks(2, body):
        assert torch.equal(detached, expected)
        assert torch.equal(full, expected)
        assert not torch.equal(quantised, expected)
        torch.testing.assert_close(quantised, expected, rtol=0, atol=float(expected.abs().max()) / 50)


def test_state_dict_is_safe_to_load_and_bound_to_its_algorithm() -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp, optimizer = wrap(group)
        with tb.attach(ddp, optimizer, "bytegrad") as attachment:
            file = io.BytesIO()
            torch.save(attachment.state_dict(), file)
            file.seek(0)
            attachment.load_state_dict(torch.load(file, weights_only=True))
            with pytest.raises(ValueError, match=r"must be what Attachment.state_dict returned.*got \[\]"):
                attachment.load_state_dict({})
        with (
            tb.attach(ddp, optimizer, "gradient_allreduce") as other,
            pytest.raises(
                ValueError, match=r"the state was saved by ByteGradAlgorithm.*GradientAllReduceAlgorithm is attached"
            ),
        ):
            other.load_state_dict(attachment.state_dict())

    run_ranks(1, body)


def test_a_copy_of_an_attached_module_is_independent() -> None:
    """Averaged models (EMA, SWA) are such copies. DDP can be copied over the default group only."""

    @dataclass(frozen=True)
    class Counting(tb.Algorithm):
        def make_impl(self, runner: tb.extend.Runner) -> tb.AlgorithmImpl:
            return CountingImpl(runner)

    class CountingImpl(tb.AlgorithmImpl):
        num_buckets = 0

        def init_operations(self, module: nn.Module | None, bucket: tb.extend.BaguaBucket) -> None:
            bucket.append_python_op(self.count)

        def count(self, bucket: tb.extend.BaguaBucket, group: tb.BaguaProcessGroup) -> None:
            self.num_buckets += 1

    init_default_group()
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    with tb.attach(ddp, torch.optim.SGD(ddp.parameters()), Counting()) as attachment:
        twin = copy.deepcopy(ddp)
        with tb.attach(twin, torch.optim.SGD(twin.parameters()), Counting()) as twin_attachment:
            twin(torch.ones(1, 4)).sum().backward()
    assert (attachment.impl.num_buckets, twin_attachment.impl.num_buckets) == (0, 1)


def lanes() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("torchbagua lane")]


def test_no_thread_outlives_attach_or_impl() -> None:
    assert not lanes()

    def body(group: dist.ProcessGroup) -> None:
        ddp, optimizer = wrap(group)
        assert not [lane for lane in lanes() if lane is threading.current_thread()]
        with tb.attach(ddp, optimizer, "bytegrad"):
            ddp(torch.ones(1, 4)).sum().backward()
            assert lanes()
        # The standalone hook, which is never closed.
        hooked, _ = wrap(group)
        hooked.register_comm_hook(tb.ByteGradAlgorithm().reify(group), tb.comm_hook)
        hooked(torch.ones(1, 4)).sum().backward()

    run_ranks(2, body)
    deadline = time.monotonic() + 5
    while lanes():
        gc.collect()
        assert time.monotonic() < deadline, f"threads remain: {lanes()}"
        time.sleep(0.01)


def test_a_plain_module_over_a_transport_without_messages() -> None:
    """It starts from rank 0's weights and optimizer state, and ends with the same weights on all ranks."""

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        module = nn.Linear(4, 3)  # different weights on each rank
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
        own = tb.BaguaProcessGroup(group, transport=CollectivesAlone)
        with tb.attach(module, optimizer, "decentralized", process_group=own):
            module(torch.full((2, 4), group.rank() + 1.0)).square().sum().backward()
            optimizer.step()
        return module.weight.detach()

    weights = run_ranks(3, body)
    assert all(torch.equal(weight, weights[0]) for weight in weights)
