"""attach and the standalone hook: what they refuse and warn of, and that a failed attach can be retried."""

import copy
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

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
from averaging import RARELY
from caught import torchbagua_warnings
from ranks import gloo_group, init_default_group, leave_by_exception, on_each_rank, run_ranks
from training import build

Called = nn.Module | list[nn.Module]
Call = Callable[[dist.ProcessGroup], Any]


def wrap(group: dist.ProcessGroup, module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module or nn.Linear(4, 2), process_group=group, **options)


def sgd(called: Called) -> torch.optim.Optimizer:
    modules = [module for module in called if isinstance(module, nn.Module)] if isinstance(called, list) else [called]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return torch.optim.SGD(parameters or [nn.Parameter(torch.ones(1))], lr=0.1)


def attach(called: Any, algorithm: Any = "bytegrad", *, optimizer: Any = None, **options: Any) -> tb.Attachment:
    return tb.attach(called, sgd(called) if optimizer is None else optimizer, algorithm, **options)


def python_reducer(group: dist.ProcessGroup) -> DistributedDataParallel:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return wrap(group)


def delayed(group: dist.ProcessGroup) -> DistributedDataParallel:
    module = nn.Linear(4, 2)
    names = {"delay_all_reduce_named_params": [("weight", module.weight)], "param_to_hook_all_reduce": module.bias}
    return wrap(group, module, **names)


def stepped_in_backward(group: dist.ProcessGroup) -> DistributedDataParallel:
    ddp = wrap(group)
    _apply_optimizer_in_backward(torch.optim.SGD, ddp.parameters(), {"lr": 0.1})
    return ddp


def with_own_hook(group: dist.ProcessGroup) -> DistributedDataParallel:
    ddp = wrap(group)
    ddp.register_comm_hook(group, allreduce_hook)
    return ddp


def attach_twice(first: Any, second: Any, algorithm: str = "decentralized", **options: Any) -> None:
    with attach(first, algorithm, **options):
        attach(second, algorithm, **options)


class Hookless(torch.optim.Optimizer):
    """An optimizer without torch's step hooks, which may wrap another one."""

    def __init__(self, parameters: Any, inner: Any = None) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self._inner = inner


def with_optimizer(group: dist.ProcessGroup, make: Callable[[DistributedDataParallel], Any], name: str = "bytegrad"):
    ddp = wrap(group)
    attach(ddp, name, optimizer=make(ddp))


def copies(size: int) -> torch.optim.Optimizer:
    return tb.QAdamOptimizer([nn.Parameter(torch.ones(size))])


def of_sharded_parameters(algorithm: str) -> None:
    """The parameters of FSDP2 in another module."""
    parts, sharded = nn.Module(), fully_shard(nn.Linear(4, 2))
    parts.weight = sharded.weight
    attach(parts, algorithm, optimizer=sgd(sharded))


def of_fsdp1(group: dist.ProcessGroup) -> None:
    """An imitation, which needs no GPU."""
    module = nn.Sequential(nn.Linear(4, 2))
    module[0].__class__ = FullyShardedDataParallel
    attach(module, "decentralized", optimizer=sgd(nn.Linear(1, 1)))


def copies_of_a_sharded_module(group: dist.ProcessGroup) -> None:
    sharded = fully_shard(nn.Linear(3, 1))
    attach(sharded, optimizer=torch.optim.SGD([nn.Parameter(each.detach().clone()) for each in sharded.parameters()]))


def tied(group: dist.ProcessGroup) -> Called:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    return [wrap(group, first), wrap(group, second)]


def hook(group: dist.ProcessGroup, ddp: DistributedDataParallel, x: torch.Tensor, state: Any = None) -> None:
    """Run a backward with the standalone hook."""
    ddp.register_comm_hook(state or tb.ByteGradAlgorithm().reify(group), tb.comm_hook)
    ddp(x).sum().backward()


X, REIFY = torch.ones(1, 4), tb.ByteGradAlgorithm().reify
OUTSIDE: Any = dist.GroupMember.NON_GROUP_MEMBER  # new_group returns it on ranks that are not members
REFUSED: list[tuple[Call, type[Exception], str]] = [
    # The module.
    (lambda group: attach(nn.Linear(4, 2), process_group=tb.BaguaProcessGroup(group)), TypeError,
     "attach: module must be a .*DistributedDataParallel, got Linear: ByteGradAlgorithm"),
    (lambda group: attach(python_reducer(group)), ValueError, "attach: the module .* = \"python_reducer\""),
    (lambda group: attach(stepped_in_backward(group), "decentralized"), ValueError,
     "attach: weight has an optimizer that steps it in backward"),
    (lambda group: attach(with_own_hook(group)), ValueError,
     "attach: the module has the communication hook allreduce_hook already"),
    (lambda group: attach(delayed(group)), ValueError, "attach: the module was created with delay_all_reduce_named_pa"),
    (lambda group: attach(wrap(group, nn.Sequential(nn.Embedding(5, 2, sparse=True)))), ValueError,
     "attach: 0 of Sequential has sparse=True; create it with sparse=False"),
    (lambda group: attach_twice(ddp := wrap(group), ddp, "bytegrad"), ValueError,
     "attach: ByteGradAlgorithm is attached to the module already; detach it first"),
    (lambda group: attach_twice(ddp := wrap(group), ddp.module, process_group=tb.BaguaProcessGroup(group)), ValueError,
     "DecentralizedAlgorithm is attached to the module already"),
    (lambda group: attach_twice(
        module := nn.Linear(4, 2), wrap(group, nn.Sequential(module)), process_group=tb.BaguaProcessGroup(group)
     ), ValueError, "Algorithm is attached to the module's module.0 already"),
    (lambda group: attach_twice(modules := [wrap(group), nn.Linear(2, 3)], modules[1]), ValueError,
     "DecentralizedAlgorithm is attached to the module already"),
    (lambda group: of_sharded_parameters("bytegrad"), TypeError, "attach: weight is sharded .*which is not supported"),
    (lambda group: of_sharded_parameters("diloco"), TypeError, "attach: weight is sharded .*which is not supported"),
    (of_fsdp1, TypeError, "attach: 0 is sharded .*ranks hold different parts of the weights, which is not supported"),
    (copies_of_a_sharded_module, ValueError, "SGD has 2 parameters that are not the module's"),
    (lambda group: attach(nn.ModuleList([wrap(group)]), "decentralized"), TypeError,
     "pass the DistributedDataParallel, or a list of modules if there are several"),
    # Several modules.
    (lambda group: attach([]), ValueError, "module must be at least one torch.nn.Module, got an empty sequence"),
    (lambda group: attach([nn.Linear(2, 2), "x"]), TypeError, "a torch.nn.Module, or a list of them, got str"),
    (lambda group: attach([nn.Linear(2, 2)] * 2, optimizer=copies(1)), ValueError,
     "module 0 of the list, Linear, is also in module 1, Lin"),
    (lambda group: attach(
        [nn.ModuleList([module := nn.Sequential(nn.Linear(2, 2))]), wrap(group, module[0])], optimizer=copies(1)
     ), ValueError,
     "module 1 of the list, DistributedDataParallel, is also in module 0, ModuleList"),
    (lambda group: attach([wrap(group, module := nn.Linear(2, 2)), wrap(group, module)], optimizer=copies(1)),
     ValueError, "module 0 of the list, DistributedDataParallel, is also in module 1"),
    (lambda group: attach(modules := tied(group), optimizer=sgd(nn.ModuleList(modules))), ValueError,
     "modules 0 and 1 of the list both average the gradient of weight"),
    (lambda group: attach([wrap(group), nn.Sequential(fully_shard(nn.Linear(2, 2)))]), TypeError,
     "module 1 of the list, Sequential, is sharded by fully_shard; attach to it alone"),
    (lambda group: attach([wrap(group), wrap(gloo_group(dist.HashStore(), 0, 1))]), ValueError,
     "process_group must be given if several .* have diff"),
    (lambda group: attach([wrap(group), nn.Linear(2, 2)]), TypeError,
     "module must be a torch.nn.parallel.DistributedDataParallel, got Linear: ByteGradAlgorithm"),
    # The optimizer.
    (lambda group: with_optimizer(group, lambda ddp: sgd(nn.Linear(3, 3))), ValueError,
     r"SGD has 2 parameters that are not the .* \(3, 3\)"),
    (lambda group: with_optimizer(
        group, lambda ddp: torch.optim.SGD([*ddp.parameters(), nn.Parameter(torch.ones(5))]), "decentralized"
     ), ValueError, r"SGD has 1 parameters that are not the .* \(5,\)"),
    (lambda group: attach(ddp := wrap(group), "diloco", optimizer=sgd([ddp, wrap(group)])), ValueError,
     r"2 parameters that are not .*, pass both modules: attach\(\[module, other\]"),
    (lambda group: with_optimizer(group, lambda ddp: ["sgd"]), TypeError, "attach: optimizer must be a .*, got 'sgd'"),
    (lambda group: with_optimizer(group, lambda ddp: "sgd"), TypeError, "must be a torch.optim.Optimizer, got 'sgd'"),
    (lambda group: with_optimizer(
        group, lambda ddp: ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1), "decentralized"
     ), ValueError, "steps all weights on every rank, got ZeroRedundancyOptimizer"),
    (lambda group: with_optimizer(group, lambda ddp: Hookless(ddp.parameters())), ValueError,
     r"step hooks, got a Hookless without .* Pass the optimizer that it wraps"),
    (lambda group: with_optimizer(group, lambda ddp: Hookless(ddp.parameters(), sgd(ddp))), ValueError,
     r"got a Hookless without .*: pass its attribute _inner, a SGD, if"),
    (lambda group: with_optimizer(group, lambda ddp: SimpleNamespace(lr=0.1, opt=sgd(ddp))), TypeError,
     r"(?s)got a SimpleNamespace.*: pass its attribute opt, a SGD, if a step of"),
    # Master copies of 10 parameters; for a weight algorithm, for QAdam, and of another size.
    (lambda group: with_optimizer(group, lambda ddp: copies(10), "decentralized"), ValueError,
     r"attach\(torch.nn.ParameterList\(masters\), ...\), and call the module without Dist"),
    (lambda group: with_optimizer(group, lambda ddp: copies(10), "qadam"), ValueError,
     r"QAdamOptimizer has 1 parameters that are not the module's, the first of shape \(10,\)"),
    (lambda group: with_optimizer(group, lambda ddp: copies(11)), ValueError,
     r"QAdamOptimizer has 1 parameters .* was created before the model was moved or copied"),
    (lambda group: REIFY(group, optimizer=3), TypeError, "reify: optimizer must be a torch.optim.Optim.*, got 3"),
    (lambda group: REIFY(group, optimizer=[None]), TypeError, "reify: optimizer must be a torch.*, got None"),
    (lambda group: REIFY(group, optimizer=Hookless([])), ValueError,
     "ByteGradAlgorithm.reify: optimizer must have torch's step hooks, got a Hookless"),
    # The other arguments.
    (lambda group: attach(wrap(group), "bitegrad"), KeyError,
     "no algorithm is named 'bitegrad'; the registered names are .*'bytegrad'"),
    (lambda group: attach(wrap(group), tb.ByteGradAlgorithm), TypeError,
     r"an Algorithm or .*; construct it: ByteGradAlgorithm\(\)"),
    (lambda group: attach(wrap(group), timeout=5), TypeError, "attach: timeout must be a datetime.timedelta, got 5"),
    (lambda group: attach(wrap(group), grad_scaler=8.0), TypeError,
     r"grad_scaler must be a torch\.amp\.GradScaler, got float"),
    (lambda group: attach(wrap(group), process_group=OUTSIDE), TypeError,
     r"process_group must be .*, got a group of which this rank is not a member"),
    (lambda group: attach(wrap(group), observers=[tb.observe.Recorder]), TypeError,
     "an observer must be an object with .* on_comm.*got <class"),
    (lambda group: attach(wrap(group), observers=tb.observe.Recorder()), TypeError,
     "observers must be a list of objects .* got <torchbagua.observe"),
    # The standalone hook.
    (lambda group: hook(group, wrap(group), X, tb.ByteGradAlgorithm()), TypeError,
     "comm_hook: state must be what .* reify returned, got Byte"),
    (lambda group: hook(group, python_reducer(group), X), TypeError, "got a tuple .* = \"python_reducer\", with which"),
    (lambda group: hook(group, wrap(group, nn.Embedding(5, 2, sparse=True)), torch.tensor([1])), ValueError,
     "gradients must be dense, got a torch.sparse_coo tensor"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[message[:40] for _, _, message in REFUSED])
def test_refused(call: Call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_ranks(1, call)


class Fewer(DistributedDataParallel):
    """DDP compares parameters itself; this class shows attach fewer parameters than DDP has."""

    def parameters(self, recurse: bool = True) -> Any:
        yield from list(super().parameters(recurse))[:1]


def of_fewer_parameters(group: dist.ProcessGroup) -> None:
    ddp = (Fewer if group.rank() == 1 else DistributedDataParallel)(nn.Linear(4, 2), process_group=group)
    attach(ddp, optimizer=torch.optim.SGD([ddp.module.weight]))


def of_another_layout(group: dist.ProcessGroup) -> None:
    """Without DDP, which compares strides itself."""
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(4, 4))
    if group.rank() == 1:
        module.to(memory_format=torch.channels_last)
    attach(module, "decentralized", process_group=tb.BaguaProcessGroup(group))


def over_other_ranks(group: dist.ProcessGroup, several: bool) -> None:
    other = wrap(gloo_group(dist.HashStore(), 0, 1))
    attach([wrap(group), other] if several else other, process_group=tb.BaguaProcessGroup(group))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(over_other_ranks, several=False),
         "process_group must have the module's ranks: rank 0 of 1, got rank 0 of 2"),
        (partial(over_other_ranks, several=True),
         r"process_group must have the module's ranks: rank 0 of 1, got rank . of 2"),
        (of_fewer_parameters, "disagree on the number of parameters: rank 0 has 2, rank 1 has 1"),
        (of_another_layout,
         r"the memory layout of parameters: rank 0 has 'all contiguous', rank 1 has '1 of .*0\.weight with"),
        (lambda group: attach(
            wrap(group), "decentralized", grad_scaler=torch.amp.GradScaler("cpu") if group.rank() else None
         ), "disagree on whether attach was given a grad_scaler: rank 0 has False"),
    ],
    ids=["other ranks", "other ranks of one of several", "fewer parameters", "another layout", "grad_scaler"],
)  # fmt: skip
def test_ranks_that_differ_are_refused(call: Call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(2, call)


def test_a_gradient_algorithm_leaves_other_parameters_of_an_optimizer_alone() -> None:
    """For example, a head that every rank trains locally, or tables that are divided among the ranks."""

    def body(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        ddp, head = wrap(group), nn.Linear(2, 1)
        torch.nn.init.ones_(head.weight)
        tables = [nn.Parameter(torch.ones(3)) for _ in range(group.rank())]
        optimizer = torch.optim.SGD([*tables, *ddp.parameters(), *head.parameters()], lr=0.1)
        with tb.attach(ddp, optimizer, tb.ByteGradAlgorithm(error_feedback=True)) as attachment:
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


def test_attach_can_be_retried_after_a_failure_on_one_rank() -> None:
    """The other ranks time out with an error that names the failed rank; then all ranks attach."""
    arrived = threading.Barrier(3)

    def body(group: dist.ProcessGroup) -> None:
        ddp = wrap(group)
        if group.rank() == 1:
            with pytest.raises(TypeError, match="got 'sgd'"):
                attach(ddp, optimizer=["sgd"])
        else:
            with pytest.raises(TimeoutError, match=r"timed out after 1 s waiting for ranks \[1\] of 3"):
                attach(ddp, timeout=timedelta(seconds=1))
        arrived.wait()
        with attach(ddp):
            ddp(X).sum().backward()

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


@on_each_rank(2)
def test_observers_of_a_group_receive_the_events_of_its_attachments(group: dist.ProcessGroup) -> None:
    ddp = wrap(group)
    optimizer = sgd(ddp)
    group_recorder, attachment_recorder = tb.observe.Recorder(), tb.observe.Recorder()
    bagua_group = tb.BaguaProcessGroup(group, observers=[group_recorder])
    with tb.attach(ddp, optimizer, "bytegrad", process_group=bagua_group, observers=[attachment_recorder]):
        ddp(X).sum().backward()
    with tb.attach(ddp, optimizer, "bytegrad", process_group=bagua_group) as attachment:
        optimizer.step()
    assert attachment.summary().figures.num_steps == 1, "the group's observers suffice for a summary"
    del group_recorder.events[len(attachment_recorder.events) :]
    assert {event.phase for event in group_recorder.events} >= {"backward", "bucket", "encode", "send"}
    assert group_recorder.events == attachment_recorder.events


def test_a_copy_of_an_attached_module_is_independent() -> None:
    """Averaged models (EMA, SWA) are such copies. DDP can be copied over the default group only."""
    init_default_group()
    ddp, recorder = DistributedDataParallel(nn.Linear(4, 2)), tb.observe.Recorder()
    with attach(ddp, observers=[recorder]):
        twin, twin_recorder = copy.deepcopy(ddp), tb.observe.Recorder()
        optimizer = sgd(twin)
        with attach(twin, optimizer=optimizer, observers=[twin_recorder]):
            recorder.clear()
            twin(X).sum().backward()
            optimizer.step()
            assert not recorder.events
            assert [event.phase for event in twin_recorder.events if event.phase in ("backward", "step")]


# Sparse gradients of a function, which attach cannot detect: refused by the name of the parameter.


class Words(nn.Module):
    """An embedding by a function; its table is the first parameter, or not."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        if not is_first:
            self.bias = nn.Parameter(torch.zeros(3))
        self.table = nn.Parameter(torch.randn(7, 3))
        self.last = nn.Linear(3, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        looked_up = nn.functional.embedding(words, self.table, sparse=True)
        return self.last(looked_up + getattr(self, "bias", 0.0))


@pytest.mark.parametrize(
    ("algorithm", "is_first"),
    [
        (tb.DecentralizedAlgorithm(), True),
        (tb.DecentralizedAlgorithm(), False),
        (tb.DiLoCoAlgorithm(100), False),
        (tb.AsyncModelAverageAlgorithm(sync_interval_ms=0), False),
        (tb.AsyncModelAverageAlgorithm(warmup_steps=5), True),
        (tb.GradientAllReduceAlgorithm(), True),
        (tb.ByteGradAlgorithm(error_feedback=True), False),
    ],
    ids=["decentralized", "decentralized, second", "diloco", "async", "async warm-up", "gradients", "error feedback"],
)
def test_a_sparse_gradient_is_refused_on_all_ranks(algorithm: tb.Algorithm, is_first: bool) -> None:
    model = build(lambda: Words(is_first=is_first))

    def body(group: dist.ProcessGroup) -> str:
        ddp = wrap(group, copy.deepcopy(model))
        message = r"parameter table has a sparse gradient.*leave out sparse=True"
        with pytest.raises(ValueError, match=message), attach(ddp, algorithm):
            ddp(torch.arange(3)).sum().backward()
        return "raised"

    assert run_ranks(2, body) == ["raised"] * 2


@on_each_rank(2)
def test_a_sparse_gradient_is_refused_in_a_later_step(group: dist.ProcessGroup) -> None:
    """The first gradient is checked in every backward: reading its address would raise torch's own error."""
    module = Words(is_first=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    attachment = tb.attach(module, optimizer, "decentralized", process_group=tb.BaguaProcessGroup(group))
    module.table.requires_grad_(False)
    module(torch.arange(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    module.table.requires_grad_(True)
    with pytest.raises(ValueError, match="parameter table has a sparse gradient"):
        module(torch.arange(3)).sum().backward()
    leave_by_exception(attachment)


# Combinations that the algorithms' pages advise against: one warning per rank, or none.


optim = torch.optim


class FusedAdam(optim.SGD):
    """An Adam as in another package, which does not derive from torch's Adam."""


momentum = partial(optim.SGD, lr=0.1, momentum=0.9)
signs = partial(optim.AdamW, lr=0.1, betas=(0.0, 0.0))


def muon(parameters: Any, momentum: float = 0.95) -> optim.Optimizer:
    return optim.Muon([parameter for parameter in parameters if parameter.ndim == 2], momentum=momentum)


def two(parameters: Any) -> list[optim.Optimizer]:
    parameters = list(parameters)
    return [optim.SGD(parameters), optim.Adam(parameters[-1:])]


def of_first(number: int) -> Callable[[Any], Any]:
    return lambda parameters: optim.SGD(list(parameters)[:number])


def frozen_bias() -> nn.Module:
    module = nn.Linear(4, 2)
    module.bias.requires_grad_(False)
    return module


def large() -> nn.Module:
    """Has 20 MiB of gradients."""
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(5)))


def half_frozen() -> nn.Module:
    """Has 20 MiB of gradients too."""
    return nn.Sequential(large().requires_grad_(False), large())


TOPK, BLOCKS = tb.TopKAlgorithm(), tb.TopKAlgorithm(0.05, selection="block")
SPARSE, POWERSGD = tb.CompressedAllReduceAlgorithm("topk", error_feedback=True), tb.PowerSGDAlgorithm()
DIVERGES = "Algorithm with the momentum 0.9 of SGD may diverge.*Set that momentum to 0.*TopKAlgorithm.momentum=0.9"
OWN_MOMENTS = "with {} .*QAdamAlgorithm with one bit.*or train with SGD"
HALF = (
    "bucket_cap_mb=10 of DistributedDataParallel puts 50% of 20 MiB of gradients into one bucket"
    ".* about 14% longer.*or pass at most 2$"
)
TWO_LAYERS: dict[str, Any] = {"make_model": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))}


@pytest.mark.parametrize(
    ("algorithm", "make_optimizer", "options", "message"),
    [
        # Sparse means and factors by optimizer.
        (TOPK, momentum, {}, f"TopK{DIVERGES}"),
        (TOPK, momentum, {"is_attached": False}, f"TopK{DIVERGES}"),
        (BLOCKS, momentum, {}, f"TopK{DIVERGES}"),
        (SPARSE, momentum, {}, f"CompressedAllReduce{DIVERGES}"),
        # TopK's own momentum is for SGD, so it is no advice here.
        (TOPK, muon, {}, "momentum 0.95 of Muon may diverge.*Set that momentum to 0, and increase the learning rate$"),
        (TOPK, optim.Adam, {}, "TopKAlgorithm " + OWN_MOMENTS.format("Adam")),
        (SPARSE, optim.AdamW, {}, "CompressedAllReduceAlgorithm " + OWN_MOMENTS.format("AdamW")),
        (POWERSGD, optim.NAdam, {}, "PowerSGDAlgorithm " + OWN_MOMENTS.format("NAdam")),
        (BLOCKS, partial(FusedAdam, lr=0.1, momentum=0.9), {}, OWN_MOMENTS.format("FusedAdam")),
        # Its weight decay would move elements that were not sent.
        (TOPK, partial(optim.Adam, betas=(0.0, 0.0), weight_decay=0.1), {}, OWN_MOMENTS.format("Adam")),
        (TOPK, partial(optim.AdamW, betas=(0.0, 0.9)), {}, OWN_MOMENTS.format("AdamW")),
        *((algorithm, optim.SGD, {}, None) for algorithm in (TOPK, SPARSE, POWERSGD)),
        (POWERSGD, momentum, {}, None),
        (tb.TopKAlgorithm(momentum=0.9), optim.SGD, {}, None),
        (tb.TopKAlgorithm(1.0), momentum, {}, None),
        (TOPK, signs, {}, None),
        (TOPK, partial(muon, momentum=0.0), {}, None),
        (tb.CompressedAllReduceAlgorithm(), optim.AdamW, {}, None),
        (tb.ByteGradAlgorithm(error_feedback=True), momentum, {}, None),
        # Buckets with a large part of the gradients.
        ("bytegrad", optim.SGD, {"make_model": large, "bucket_cap_mb": 10}, HALF),
        ("bytegrad", optim.SGD, {"make_model": half_frozen, "bucket_cap_mb": 10}, HALF),
        (tb.CompressedAllReduceAlgorithm(), optim.SGD, {"make_model": large, "bucket_cap_mb": 1000},
         "puts 100% of 20 MiB"),
        ("bytegrad", optim.SGD, {"make_model": large}, None),  # DDP's default has a small first bucket
        ("bytegrad", optim.SGD, {"make_model": large, "bucket_cap_mb": 5}, None),
        ("gradient_allreduce", optim.SGD, {"make_model": large, "bucket_cap_mb": 10}, None),
        ("decentralized", optim.SGD, {"make_model": large, "bucket_cap_mb": 10}, None),
        ("bytegrad", optim.SGD, {"bucket_cap_mb": 10}, None),
        # Optimizers that do not fit. Weights would be averaged between the steps of two optimizers; gradients are
        # averaged before both.
        ("decentralized", two, {}, "bias is a parameter of both SGD and Adam"),
        ("bytegrad", two, {}, "bias is a parameter of both SGD and Adam"),
        (RARELY["decentralized"], of_first(1), {},
         "no attached optimizer steps bias, although it requires grad.*. If another optimizer steps it, "),
        ("diloco", of_first(2), TWO_LAYERS, r"steps 1.weight \(and 1 more\), although they require gradients"),
        ("diloco", of_first(1), TWO_LAYERS, r"steps 0.bias \(and 2 more\), although they require gradients"),
        ("bytegrad", of_first(1), {}, None),
        ("decentralized", of_first(1), {"make_model": frozen_bias}, None),
        ("bytegrad", optim.LBFGS, {}, "LBFGS calls its closure as often .* mean of the loss over the ranks"),
    ],
)  # fmt: skip
def test_advice(
    algorithm: Any, make_optimizer: Callable[[Any], Any], options: dict[str, Any], message: str | None
) -> None:
    ddp_options = {key: value for key, value in options.items() if key == "bucket_cap_mb"}

    def body(group: dist.ProcessGroup) -> None:
        ddp = wrap(group, options.get("make_model", lambda: None)(), **ddp_options)
        optimizer, own = make_optimizer(ddp.parameters()), tb.BaguaProcessGroup(group)
        if options.get("is_attached", True):
            end = tb.attach(ddp, optimizer, algorithm, process_group=own).detach
        else:
            runner = algorithm.reify(own, optimizer=optimizer)
            ddp.register_comm_hook(runner, tb.comm_hook)
            end = runner.close
        if isinstance(algorithm, tb.Algorithm) and not algorithm.averages_weights and not ddp_options:
            for _ in range(2):
                ddp.zero_grad()
                ddp(X).sum().backward()
                optimizer.step()
        end()

    with torchbagua_warnings() as messages:
        run_ranks(2, body)
    assert len(messages) == (0 if message is None else 2), messages
    assert all(re.search(message or "", each) for each in messages), messages


def test_a_scheduler_that_sets_the_first_beta_is_refused() -> None:
    """AdamW would divide means of gradients by about 1e-8 wherever the last gradient is 0."""

    def body(group: dist.ProcessGroup) -> None:
        ddp = wrap(group)
        optimizer = signs(ddp.parameters())
        with tb.attach(ddp, optimizer, TOPK, process_group=tb.BaguaProcessGroup(group)):
            ddp(X).sum().backward()
            optimizer.step()
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=True)
            ddp(X).sum().backward()

    with pytest.raises(ValueError, match=r"betas must be 0 if the second is, got \(0.95, 0.0\).*cycle_momentum=False"):
        run_ranks(2, body)
