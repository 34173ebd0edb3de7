"""Canaries: every private name of torch that torchbagua uses still exists, and behaves as torchbagua expects."""

import copy
import pickle
import re
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._jit_internal import _extract_tensors
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import _JoinConfig
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import torchbagua.native
from ranks import INSIDE_DDP_FORWARD, init_default_group, run_ranks
from torchbagua import _torch
from torchbagua.compat.bagua import _torch as bagua_torch
from torchbagua.compat.mlbench import _torch as mlbench_torch
from torchbagua.fsdp import _torch as fsdp_torch
from torchbagua.fsdp.replicas import ReplicaGroup


@pytest.fixture
def group() -> dist.ProcessGroup:
    """A group of one rank, which is not in torch's registry."""
    store, timeout = dist.HashStore(), timedelta(seconds=7)
    backend = dist.ProcessGroupGloo(store, 0, 1, timeout)
    return _torch.unregistered_group(store, 0, 1, "cpu", dist.ProcessGroup.BackendType.GLOO, backend)


def test_groups(group: dist.ProcessGroup) -> None:
    gathered = torch.zeros(2)
    work = _torch.all_gather_base(group, gathered, torch.ones(2))
    assert work is not None
    work.wait()
    assert gathered.tolist() == [1.0, 1.0]
    _torch.reduce_scatter_base(group, gathered, torch.full((2,), 3.0), dist.ReduceOp.AVG).wait()
    assert gathered.tolist() == [3.0, 3.0]
    assert _torch.timeout_of(group) == timedelta(seconds=7)
    assert isinstance(_torch.backend_of(group), dist.ProcessGroupGloo)
    assert isinstance(_torch.backend_of(group, "cpu"), dist.ProcessGroupGloo)
    assert _torch.backend_of(group, "cuda") is None
    assert not bagua_torch.has_nccl(group)
    assert not bagua_torch.has_nccl(dist.ProcessGroup(dist.HashStore(), 0, 1))


def test_collectives_with_gil() -> None:
    # In the folder c10d, or in c10d/py since torch 2.15.
    (header,) = (Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d").rglob("PyProcessGroup.hpp")
    source = re.sub(r"//.*", "", header.read_text(encoding="utf-8"))
    found = re.findall(r"WORK_OVERRIDE\(\s*ProcessGroup,\s*(?:/\*.*?\*/)?\s*(\w+),", source)
    found += re.findall(r'get_override\(\s*static_cast<const ProcessGroup\*>\(this\),\s*"(\w+)"', source)
    assert len(found) > 8
    # Since torch 2.15. The first is recv_anysource in Python; the others start no collective of gloo.
    names = {*found} - {"recvAnysource", "reconfigure", "start_coalescing", "end_coalescing"}
    assert names <= {*fsdp_torch.COLLECTIVES_WITH_GIL} & {*vars(ReplicaGroup)}


def test_single_facts() -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    work = fsdp_torch.work_of(future)
    assert not work.is_completed()
    future.set_result(1)
    assert work.wait()
    assert work.is_completed()

    parameter = torch.nn.Parameter(torch.ones(2))
    assert not fsdp_torch.has_gradient_hooks(parameter)
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert fsdp_torch.has_gradient_hooks(parameter)

    assert fsdp_torch.premultiplier(dist._make_nccl_premul_sum(0.25)) == 0.25
    assert fsdp_torch.premultiplier(dist.ReduceOp.AVG) is None

    assert not _torch.is_profiling()
    with torch.profiler.profile():
        assert _torch.is_profiling()

    torchbagua.native.load()
    assert _torch.has_kernel("aten::add.Tensor", "CPU")
    assert not _torch.has_kernel("torchbagua::minmax_uint8_encode", "MPS")
    assert _torch.is_forked_from_cuda() is False


class WrittenInPython(dist.ProcessGroup):
    """A group without a C++ backend."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)


def test_registered_groups() -> None:
    init_default_group()
    timeout = timedelta(seconds=7)
    if "python_group" not in dist.Backend.backend_list:
        dist.Backend.register_backend("python_group", WrittenInPython, devices=["cpu"])
    gloo = _torch.registered_group((0,), 0, "gloo", dist.HashStore(), "a name of ours", timeout)
    assert dist.get_backend_config(gloo) == "cpu:gloo,cuda:gloo"
    assert dist.get_process_group_ranks(gloo) == [0]
    assert _torch.timeout_of(gloo) == timeout
    assert _torch.is_gloo(_torch.backend_of(gloo, "cpu"))
    assert _torch.device_types_of(gloo) == ["cuda", "cpu"]
    in_python = _torch.registered_group((0,), 0, "python_group", dist.HashStore(), "another name", timeout)
    assert _torch.device_types_of(in_python) == []
    assert _torch.timeout_of(in_python) == timedelta(minutes=30)
    for group in (gloo, in_python):
        store = _torch.store_of(group)
        assert store is not None
        store.set("key", "value")
    with_abstract_store = dist.ProcessGroup(dist.PrefixStore("a", dist.PrefixStore("b", dist.Store())), 0, 1)
    assert _torch.store_of(with_abstract_store) is None
    with pytest.raises(ValueError, match="process_group must have a store, got a group without one, as mpi creates"):
        torchbagua.BaguaProcessGroup(with_abstract_store)
    dist.destroy_process_group(gloo)


def test_the_number_of_collectives_of_a_group() -> None:
    def body(group: dist.ProcessGroup) -> None:
        first, rows = _torch.num_collectives(group), [torch.empty(2) for _ in range(2)]
        dist.all_reduce(torch.ones(2), group=group)
        dist.broadcast(torch.ones(2), group_src=0, group=group)
        dist.all_gather(rows, torch.ones(2), group=group)
        assert _torch.num_collectives(group) == first + 3

    run_ranks(2, body)
    assert _torch.num_collectives(_torch.group_without_effect(dist.HashStore(), 0, 1)) == 0


def test_fsdp() -> None:
    init_default_group()
    module = fully_shard(torch.nn.Linear(3, 5))
    (part,) = fsdp_torch.fsdp_param_groups(module)
    assert fsdp_torch.fsdp_shard_group(part) is module.weight.device_mesh.get_group()
    shards = fsdp_torch.fsdp_shards(part)
    assert [(id(parameter), length) for parameter, length in shards] == [(id(module.weight), 15), (id(module.bias), 5)]
    assert fsdp_torch.fsdp_modules(part) == [module]
    assert fsdp_torch.fsdp_computed_with(part) == [None, None]
    module.unshard()
    assert list(map(id, fsdp_torch.fsdp_computed_with(part))) == list(map(id, (module.weight, module.bias)))
    module.reshard()
    own = object()
    for get, change in (
        (fsdp_torch.fsdp_reduce_scatter, module.set_custom_reduce_scatter),
        (fsdp_torch.fsdp_all_gather, module.set_custom_all_gather),
    ):
        of_torch, is_torchs = get(part)
        assert is_torchs
        change(own)
        assert get(part) == (own, False)
        change(of_torch)
    for get, change, before, after in (
        (fsdp_torch.fsdp_all_reduce_hook, module.set_all_reduce_hook, None, own),
        (fsdp_torch.fsdp_all_reduces, module.set_requires_all_reduce, True, False),
        (fsdp_torch.fsdp_divide_factor, module.set_gradient_divide_factor, None, 3.0),
    ):
        assert get(part) is before
        change(after)
        assert get(part) == after
    offloaded = fully_shard(torch.nn.Linear(3, 5), offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert fsdp_torch.fsdp_is_offloaded(fsdp_torch.fsdp_param_groups(offloaded)[0])
    assert not fsdp_torch.fsdp_is_offloaded(part)
    assert fsdp_torch.fsdp_param_groups(fully_shard(torch.nn.ReLU())) == []
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))
    (replicated,) = fsdp_torch.fsdp_param_groups(fully_shard(torch.nn.Linear(3, 5), mesh=mesh))
    assert fsdp_torch.fsdp_shard_group(replicated) is None
    assert fsdp_torch.fsdp_replicate_group(replicated) is mesh.get_group("replicas")
    assert fsdp_torch.fsdp_replicate_group(part) is None


WITH_INTEGERS = pytest.param(
    True, marks=pytest.mark.skipif(torch.__version__ < (2, 12), reason="fully_shard of torch 2.11 takes no integers")
)


@pytest.mark.parametrize("has_integers", [False, WITH_INTEGERS], ids=["floating-point", "integers"])
def test_dtypes_and_classes_that_fsdp_gathers(has_integers: bool) -> None:
    init_default_group()
    module = torch.nn.Linear(3, 5)
    module.bias = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    integers = {torch.int8} if has_integers else set()
    if has_integers:
        module.count = torch.nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    for policy, dtypes in (
        (MixedPrecisionPolicy(), {torch.float32, torch.bfloat16} | integers),
        (MixedPrecisionPolicy(param_dtype=torch.float16), {torch.float16} | integers),
    ):
        (part,) = fsdp_torch.fsdp_param_groups(fully_shard(copy.deepcopy(module), mp_policy=policy))
        assert fsdp_torch.fsdp_gathered_dtypes(part) == dtypes
        assert fsdp_torch.fsdp_own_gathers(part) == []
    own_class = type("GathersItself", (torch.Tensor,), {"fsdp_pre_all_gather": None, "fsdp_post_all_gather": None})
    sharded = part.fsdp_params[0].sharded_param  # as after fully_shard of such a parameter
    sharded._local_tensor = sharded._local_tensor.detach().as_subclass(own_class)
    assert fsdp_torch.fsdp_own_gathers(part) == [(sharded, own_class)]


def test_ddp(group: dist.ProcessGroup) -> None:
    module = torch.nn.Linear(2, 2)
    make = partial(DistributedDataParallel, module, process_group=group)
    ddp = make(static_graph=True)
    assert not _torch.comm_hooks_of(ddp)
    assert _torch.named_bucket_bytes(ddp) is None
    assert _torch.named_bucket_bytes(make(bucket_cap_mb=3)) == 3 << 20
    assert not _torch.is_joining(ddp)
    ddp._join_config = _JoinConfig(enable=True, throw_on_early_termination=False, is_first_joinable=True)
    assert _torch.is_joining(ddp)
    ddp._join_config = _JoinConfig.construct_disabled_join_config()
    assert not _torch.has_learnt_graph(ddp)
    ddp(torch.ones(1, 2)).sum().backward()
    assert _torch.has_learnt_graph(ddp)
    hooked = make()
    hooked.register_comm_hook("state", allreduce_hook)
    assert _torch.comm_hooks_of(hooked) == [(allreduce_hook, "state")]
    delayed = {"delay_all_reduce_named_params": [("weight", module.weight)], "param_to_hook_all_reduce": module.bias}
    assert not _torch.has_delayed_all_reduce(ddp)
    assert _torch.has_delayed_all_reduce(make(**delayed))
    assert not _torch.uses_python_reducer(ddp)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        assert _torch.uses_python_reducer(DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group))
    assert not _torch.is_stepped_in_backward(module.weight)
    _apply_optimizer_in_backward(torch.optim.SGD, [module.weight], {"lr": 0.1})
    assert _torch.is_stepped_in_backward(module.weight)


def test_autograd() -> None:
    called: list[object] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: _torch.queue_callback(lambda: called.append("end")))
    x.register_hook(lambda gradient: called.append(_torch.is_in_backward()))
    x.sum().backward()
    assert called == [True, "end"]
    assert not _torch.is_in_backward()
    with pytest.raises(RuntimeError, match="during backward"):
        _torch.queue_callback(lambda: None)

    numbers: list[int] = []
    for y in torch.ones(2, requires_grad=True).unbind():
        y.register_hook(lambda gradient: numbers.append(_torch.current_backward()))
        (y * y).backward()
    together = torch.ones(2, requires_grad=True)
    for part in together.unbind():
        part.register_hook(lambda gradient: numbers.append(_torch.current_backward()))
    together.sum().backward()
    assert len(set(numbers)) == 2
    assert min(numbers) >= 0
    assert _torch.current_backward() == -1

    assert x.grad is not None
    before = _torch.num_writes(x.grad)
    x.grad.zero_()
    assert _torch.num_writes(x.grad) > before
    largest = _torch.foreach_max([torch.tensor([0, 3, 255, 4], dtype=torch.uint8), torch.zeros(5, 2)])
    assert [float(number) for number in largest] == [255, 0]
    assert list(_torch.leaves({"a": [1, (2,)], "b": None})) == [1, 2, None]


def test_a_future_that_raises(group: dist.ProcessGroup) -> None:
    """Every read of its value raises the error, from Python, and from C++ as in DDP's reducer."""

    def fail() -> torch.Tensor:
        raise ConnectionError("a peer is gone")

    done: torch.futures.Future[None] = torch.futures.Future()
    future = _torch.future_of(done, fail)
    done.set_result(None)
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    ddp.register_comm_hook(None, lambda state, bucket: future)
    for read in (lambda: ddp(torch.ones(1, 2)).sum().backward(), future.wait, future.value):
        with pytest.raises(RuntimeError, match=r"^ConnectionError: a peer is gone$"):
            read()
    with pytest.raises(RuntimeError, match="ConnectionError: a peer is gone"):
        future.then(lambda done: done.value() / 2).wait()
    # Torch searches the value of a GPU future for tensors.
    assert _extract_tensors(_torch._Failure(ConnectionError())) == []


@pytest.mark.filterwarnings("error")
def test_optimizers() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    plain, fused = torch.optim.Adam([parameter]), torch.optim.Adam([parameter], fused=True)
    assert _torch.has_step_hooks(plain)
    assert not _torch.has_step_hooks(torch.optim.Adam.__new__(torch.optim.Adam))
    skips: list[bool] = []
    fused.register_step_post_hook(lambda optimizer, *_: skips.append(_torch.is_told_to_skip(optimizer)))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    assert _torch.loss_scale_of(scaler) is None
    for factor in (1.0, float("inf")):
        fused.zero_grad()
        scaler.scale(parameter.sum() * factor).backward()
        scaler.step(fused)
        assert _torch.has_overflown(scaler, fused) == skips[-1]
        scale = _torch.loss_scale_of(scaler)
        assert scale is not None
        before = _torch.num_writes(scale)
        scaler.update()
        assert scale is _torch.loss_scale_of(scaler)
        assert _torch.num_writes(scale) > before
    assert skips == [False, True]
    assert not _torch.is_told_to_skip(fused)

    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1)
    _torch.mark_as_stepped(plain)
    scheduler.step()  # does not warn
    called: list[str] = []
    plain.register_step_post_hook(lambda *_: called.append("hook"))
    parameter.grad = torch.ones(2)
    for unhooked_step in (_torch.unhooked_step, mlbench_torch.unhooked_step):
        unhooked_step(torch.optim.Adam.step)(plain)
        assert unhooked_step(unhooked_step) is unhooked_step
    assert not called
    plain.step()
    assert called == ["hook"]


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"unscales": True}], ids=str)
def test_grad_scaler(options: dict[str, bool]) -> None:
    """Every search for Inf calls the replacement, and undo restores the original."""
    unscales = options.pop("unscales", False)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], **options), torch.amp.GradScaler("cpu", init_scale=8.0)
    original = scaler._unscale_grads_
    seen: list[float] = []

    def replace(find_inf: _torch.FindInf) -> _torch.FindInf:
        def find(*args: object, **kwargs: object) -> _torch.FoundInf:
            found = find_inf(*args, **kwargs)
            for found_inf in found.values():
                seen.append(float(found_inf))
                found_inf.fill_(1.0)
            return found

        return find

    undo = _torch.replace_find_inf(scaler, replace)
    scaler.scale(parameter.sum()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert seen == [0.0]
    assert torch.equal(parameter, torch.ones(2)), "an overflow was found, so the step is skipped"
    undo()
    assert scaler._unscale_grads_ == original
    another = type("Another", (torch.amp.GradScaler,), {"_unscale_grads_": None})
    with pytest.raises(RuntimeError, match=r"Another of torch 2\..* has no _unscale_grads_"):
        _torch.replace_find_inf(another("cpu"), lambda find_inf: find_inf)


def test_the_step_of_a_grad_scaler() -> None:
    """An enabled GradScaler reads `_step_supports_amp_scaling` right before it steps an optimizer that is not fused."""
    parameter, calls = torch.nn.Parameter(torch.ones(2)), list[object]()
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), torch.amp.GradScaler("cpu")
    optimizer.register_step_pre_hook(lambda *_: calls.append("step"))
    undo = [_torch.call_before_scaled_step(optimizer, lambda name=name: calls.append(name)) for name in ("a", "b")]
    scaler.scale(parameter.sum()).backward()
    assert pickle.loads(pickle.dumps(vars(optimizer)["_step_supports_amp_scaling"])) is False
    for expected in (["a", "b", "step"], ["b", "step"], ["step"]):
        scaler.step(optimizer)
        scaler.update()
        assert calls == expected
        calls.clear()
        if undo:
            undo.pop(0)()
    optimizer.step()
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert calls == ["step"] * 2
    assert optimizer._step_supports_amp_scaling is False

    fused, are_scaled = torch.optim.SGD([parameter], lr=0.1, fused=True), list[bool]()
    fused.register_step_pre_hook(lambda *_: are_scaled.append(_torch.is_scaled_in_step(fused)))
    undo_fused = _torch.call_before_scaled_step(fused, lambda: pytest.fail("a fused optimizer is not changed"))
    scaler.step(fused)
    fused.step()
    undo_fused()
    assert are_scaled == [True, False]
    assert fused._step_supports_amp_scaling is True


def test_the_ddp_that_is_running(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedDataParallel, "_inside_ddp_forward", INSIDE_DDP_FORWARD)
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    ddp = DistributedDataParallel(module, process_group=group)
    seen: list[DistributedDataParallel | None] = []
    for watched in (ddp, module, module[0]):
        watched.register_forward_pre_hook(lambda *_: seen.append(_torch.active_ddp()))
    ddp(torch.ones(1, 2))
    module(torch.ones(1, 2))
    assert seen == [None, ddp, ddp, None, None]


def test_a_ddp_that_is_freed_is_not_running() -> None:
    """The cache of the class's attributes still refers to it then, and another thread would crash (CPython 3.11)."""
    seen: list[object] = []

    class Freed:
        def __del__(self) -> None:
            seen.append(_torch.active_ddp())

    DistributedDataParallel._active_ddp_module = Freed()
    DistributedDataParallel._get_active_ddp_module()  # fills the cache
    DistributedDataParallel._active_ddp_module = None
    assert seen == [None]


def test_a_call_at_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has effects on Python's state, is called once, and does not break the graph."""
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", None)  # the compiler splits the graph for a DDP
    torch._dynamo.reset()
    calls: list[bool] = []
    call = _torch.call_at_compilation(lambda: calls.append(torch.compiler.is_compiling()))

    @torch.compile(backend="eager", fullgraph=True)
    def double(x: torch.Tensor) -> torch.Tensor:
        call()
        return 2 * x

    for _ in range(3):
        assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
    assert calls == [True]


def test_names_to_ignore(group: dist.ProcessGroup) -> None:
    module = torch.nn.Linear(2, 2)
    assert _torch.names_to_ignore(module) == []
    assert bagua_torch.ignore_names(module, []) == []
    assert bagua_torch.ignore_names(module, ["bias"]) == ["bias"]
    assert _torch.names_to_ignore(module) == ["bias"]
    assert bagua_torch.ignore_names(module, ["bias"]) == ["bias"]
    assert DistributedDataParallel(module, process_group=group).parameters_to_ignore == {"bias"}


@pytest.mark.gpu
def test_nccl_groups_of_bagua_s_communicators() -> None:
    group = bagua_torch.nccl_group(dist.HashStore(), 0, 1, timedelta(minutes=1))
    assert bagua_torch.has_nccl(group)
    assert _torch.timeout_of(group) == timedelta(minutes=1)
    x = torch.full((3,), 2.0, device="cuda")
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0] * 3
