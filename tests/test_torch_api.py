"""Compare Bagua's `with_bagua` and DistributedDataParallel with `attach` in a plain loop; ranks are threads."""

import copy
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import parallel

import torchbagua as tb
import torchbagua.compat.bagua as bagua
from ranks import run_ranks, without_default_group
from torchbagua.algorithms.weights.rounds import ModelAveragingAlgorithm
from torchbagua.compat.bagua.algorithms import (
    Algorithm,
    GlobalAlgorithmRegistry,
    async_model_average,
    bytegrad,
    decentralized,
    gradient_allreduce,
    q_adam,
)
from torchbagua.compat.bagua.data_parallel import DistributedDataParallel
from torchbagua.compat.bagua.data_parallel.bagua_distributed import buffers_option
from torchbagua.compat.bagua.node_mean import with_node_mean
from training import build

NUM_STEPS = 4

WEIGHTS = ("decentralized", "low_precision_decentralized", "async")

# By name: returns the algorithm for an optimizer.
ALGORITHMS: dict[str, Callable[[Any], Any]] = {
    "gradient_allreduce": lambda optimizer: gradient_allreduce.GradientAllReduceAlgorithm(),
    "bytegrad": lambda optimizer: bytegrad.ByteGradAlgorithm(),
    "decentralized": lambda optimizer: decentralized.DecentralizedAlgorithm(),
    # The hierarchical algorithm differs on one node: see test_low_precision_on_one_node_equals_bagua_s.
    "low_precision_decentralized": lambda optimizer: decentralized.LowPrecisionDecentralizedAlgorithm(False),
    "qadam": q_adam.QAdamAlgorithm,
    # Its rounds end at unpredictable steps, but within the warm-up the weights are deterministic.
    "async": lambda optimizer: async_model_average.AsyncModelAverageAlgorithm(warmup_steps=100),
}


MODEL = build(lambda: nn.Sequential(nn.Linear(10, 33), nn.BatchNorm1d(33), nn.Tanh(), nn.Linear(33, 1)))
UNNORMED = build(lambda: nn.Sequential(nn.Linear(10, 33), nn.Tanh(), nn.Linear(33, 1)))


def make_optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    if name == "qadam":
        return q_adam.QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=2)
    return torch.optim.SGD(module.parameters(), lr=0.1)


def steps(rank: int, module: nn.Module, *optimizers: torch.optim.Optimizer, num_steps: int = NUM_STEPS) -> None:
    """Train, with data that differ by rank and step."""
    data = torch.Generator().manual_seed(1000 + rank)
    for _ in range(num_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        module(torch.randn(6, 10, generator=data)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).clone()


def train_by(wrap: Callable[..., Any], group: dist.ProcessGroup, name: str) -> list[torch.Tensor]:
    """Train a module that `wrap` wraps and attaches; return the weights before and after `detach`, and a buffer."""
    module = copy.deepcopy(MODEL)
    optimizer = make_optimizer(name, module)
    called, detach = wrap(group, module, optimizer, ALGORITHMS[name](optimizer))
    steps(group.rank(), called, optimizer)
    before = weights(module)
    detach()
    return [before, weights(module), module[1].running_mean]


def plain(group: dist.ProcessGroup, module: nn.Module, optimizer: Any, algorithm: Any) -> tuple[nn.Module, Any]:
    """Attach as in a plain loop. Bagua does not synchronize buffers."""
    options = buffers_option(False)
    averages_weights = isinstance(algorithm, ModelAveragingAlgorithm)
    called = module if averages_weights else parallel.DistributedDataParallel(module, process_group=group, **options)
    attachment = tb.attach(called, optimizer, algorithm, process_group=tb.BaguaProcessGroup(group))
    return called, attachment.detach


def with_bagua(
    group: dist.ProcessGroup, module: Any, optimizer: Any, algorithm: Any, do_flatten: bool
) -> tuple[nn.Module, Any]:
    assert module.with_bagua([optimizer], algorithm, group, do_flatten=do_flatten) is module
    assert module.bagua_optimizers == [optimizer]
    made = module.bagua_ddp.attachment.ddp
    assert made is None or made.gradient_as_bucket_view == do_flatten
    assert made is not None or module.bagua_buckets
    return module, module.bagua_ddp.attachment.detach


def in_ddp(
    group: dist.ProcessGroup, module: Any, optimizer: Any, algorithm: Any, with_optimizers: bool
) -> tuple[nn.Module, Any]:
    optimizers = [optimizer] if with_optimizers else []
    options = {"process_group": group, "broadcast_buffers": False}
    ddp = DistributedDataParallel(module, optimizers=optimizers, algorithm=algorithm, **options)
    assert isinstance(ddp, parallel.DistributedDataParallel)
    is_qadam = isinstance(optimizer, q_adam.QAdamOptimizer)
    assert ddp.bagua_optimizers == ([optimizer] if with_optimizers or is_qadam else [])
    return ddp, lambda: ddp.inner and ddp.inner.attachment.detach()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_weights_equal_those_of_a_plain_loop(name: str) -> None:
    def body(group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
        expected = train_by(plain, group, name)
        ways = [partial(with_bagua, do_flatten=name != "bytegrad"), partial(in_ddp, with_optimizers=True)]
        ways += [partial(in_ddp, with_optimizers=False)] if name not in WEIGHTS else []
        found = [train_by(way, group, name) for way in ways]
        assert all(torch.equal(a, b) for tensors in found for a, b in zip(tensors, expected, strict=True))
        return expected

    first, second = run_ranks(2, body)
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[0], second[0]) == ("decentralized" not in name)
    if name in WEIGHTS:
        with pytest.raises(ValueError, match=r"optimizers must be given, since .*Algorithm works after"):
            train_by(partial(in_ddp, with_optimizers=False), dist.group.WORLD, name)


def attach_by(
    group: dist.ProcessGroup, module: nn.Module, optimizer: torch.optim.Optimizer, algorithm: Any, *, in_ddp: bool
) -> tuple[nn.Module, tb.Attachment]:
    """Return the module to call and the attachment, of DistributedDataParallel or with_bagua."""
    if in_ddp:
        ddp = DistributedDataParallel(module, process_group=group, optimizers=[optimizer], algorithm=algorithm)
        return ddp, ddp.inner.attachment
    called = module.with_bagua([optimizer], algorithm, group)
    return called, called.bagua_ddp.attachment


def by_bagua(group: dist.ProcessGroup, algorithm: Any, *, in_ddp: bool = False) -> tuple[torch.Tensor, Any]:
    """Train through the facade; return the weights after `NUM_STEPS`, before `detach`, and the saved state."""
    module = copy.deepcopy(UNNORMED)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    called, attachment = attach_by(group, module, optimizer, algorithm, in_ddp=in_ddp)
    steps(group.rank(), called, optimizer)
    found, state = weights(module), attachment.state_dict()
    attachment.load_state_dict(state)
    attachment.detach()
    return found, state


def train_as_bagua_on_one_node(group: dist.ProcessGroup, interval: int) -> torch.Tensor:
    """Train as Bagua does: average over the node after each step that is due, in full precision, without a codec."""
    module = copy.deepcopy(UNNORMED)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def average(*_: Any) -> None:
        if next(step) % interval:
            return
        for parameter in module.parameters():
            replicas = [torch.empty_like(parameter) for _ in range(group.size())]
            dist.all_gather(replicas, parameter.detach(), group=group)
            parameter.data = sum(replicas[1:], replicas[0]) / torch.tensor(float(group.size()))

    step = itertools.count()
    optimizer.register_step_post_hook(average)
    steps(group.rank(), module, optimizer)
    return weights(module)


@pytest.mark.parametrize(("size", "interval"), [(2, 1), (3, 2)])
def test_low_precision_on_one_node_equals_bagua_s(size: int, interval: int) -> None:
    """Bitwise, as an object, by name, and in a DDP. Outside the facade, the algorithm keeps its own meaning."""
    algorithm = decentralized.LowPrecisionDecentralizedAlgorithm(communication_interval=interval)

    def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
        expected = train_as_bagua_on_one_node(group, interval)
        found = [by_bagua(group, algorithm), by_bagua(group, algorithm, in_ddp=True)]
        if interval == 1:
            found.append(by_bagua(group, "low_precision_decentralized"))
        for ours, state in found:
            assert torch.equal(ours, expected)
            assert state["impl"]["step"] == NUM_STEPS
        flat = by_bagua(group, decentralized.LowPrecisionDecentralizedAlgorithm(False, interval))[0]
        module = copy.deepcopy(UNNORMED)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with tb.attach(module, optimizer, algorithm, process_group=tb.BaguaProcessGroup(group)):
            steps(group.rank(), module, optimizer)
            assert torch.equal(weights(module), flat)
        assert not torch.equal(flat, expected)
        return expected

    first, *rest = run_ranks(size, body)
    if interval == 1:
        assert all(torch.equal(first, found) for found in rest)


def test_low_precision_over_several_nodes_is_the_ring_of_nodes() -> None:
    def body(group: dist.ProcessGroup) -> list[str]:
        algorithm = with_node_mean(tb.LowPrecisionDecentralizedAlgorithm())
        names = []
        for nodes in ([0, 0, 1], [0, 1, 2], [0, 0, 0]):
            runner = algorithm.reify(tb.BaguaProcessGroup(group, nodes=nodes))
            names.append(type(runner.impl).__name__)
            runner.close()
        return names

    ring = "LowPrecisionDecentralizedAlgorithmImpl"
    assert run_ranks(3, body) == [[ring, ring, "NodeMeanImpl"]] * 3
    for algorithm in (tb.LowPrecisionDecentralizedAlgorithm(hierarchical=False), tb.ByteGradAlgorithm()):
        assert with_node_mean(algorithm) is algorithm


def test_a_state_of_the_ring_is_loaded_on_one_node() -> None:
    """The state was saved with `attach`, and contains replicas. Each rank loads its own."""

    def body(group: dist.ProcessGroup) -> int:
        module = copy.deepcopy(UNNORMED)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        own_group = tb.BaguaProcessGroup(group)
        with tb.attach(module, optimizer, tb.LowPrecisionDecentralizedAlgorithm(), process_group=own_group) as ring:
            steps(group.rank(), module, optimizer, num_steps=3)
            state = ring.state_dict()
        module.with_bagua([optimizer], tb.LowPrecisionDecentralizedAlgorithm(), group)
        attachment = module.bagua_ddp.attachment
        attachment.load_state_dict(state)
        steps(group.rank(), module, optimizer, num_steps=1)
        found = attachment.state_dict()["impl"]
        with pytest.raises(ValueError, match=r"state must be of .*'rank': \d.*; every rank saves and loads its own"):
            attachment.impl.load_state_dict({**found, "rank": 1 - group.rank()})
        attachment.detach()
        return int(found["step"])

    assert run_ranks(2, body) == [4, 4]


@pytest.mark.parametrize("in_ddp", [False, True])
def test_all_ranks_get_the_state_of_rank_0_s_optimizer(in_ddp: bool) -> None:
    """As if only rank 0 had loaded a checkpoint."""

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        module = copy.deepcopy(MODEL)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        if group.rank() == 0:
            steps(0, module, optimizer, num_steps=3)
        algorithm = gradient_allreduce.GradientAllReduceAlgorithm()
        called, attachment = attach_by(group, module, optimizer, algorithm, in_ddp=in_ddp)
        steps(group.rank(), called, optimizer, num_steps=2)
        attachment.detach()
        return weights(module)

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)


def test_another_algorithm_takes_over() -> None:
    def body(group: dist.ProcessGroup) -> tuple[list[str], torch.Tensor]:
        module = copy.deepcopy(MODEL)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        names = []
        for name in ("gradient_allreduce", "decentralized", "bytegrad"):
            module.with_bagua([optimizer], ALGORITHMS[name](optimizer), group, grad_scaler=scaler)
            if name == "decentralized":  # whose ranks save the scale
                assert module.bagua_ddp.attachment.rank_state_dict()["grad_scaler"] == scaler.state_dict()
            steps(group.rank(), module, optimizer, num_steps=2)
            names.append(type(module.bagua_algorithm).__name__.removesuffix("AlgorithmImpl"))
        module.bagua_ddp.attachment.detach()
        return names, weights(module)

    (names, first), (_, second) = run_ranks(2, body)
    assert names == ["GradientAllReduce", "Decentralized", "CompressedAllReduce"]
    assert torch.equal(first, second)


def test_abort_and_resume() -> None:
    def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
        module = copy.deepcopy(MODEL)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        module.with_bagua([optimizer], async_model_average.AsyncModelAverageAlgorithm(sync_interval_ms=1), group)
        seen = []
        for _ in range(2):  # as Bagua's example does in each epoch
            module.bagua_algorithm.resume(module)
            steps(group.rank(), module, optimizer, num_steps=5)
            module.bagua_algorithm.abort(module)
            assert module.bagua_algorithm.mode == "stopped"
            seen.append(weights(module))
        module.bagua_ddp.attachment.detach()
        return seen

    assert all(map(torch.equal, *run_ranks(2, body)))


@pytest.mark.parametrize("name", ["gradient_allreduce", "decentralized"])
def test_names_to_ignore_are_bagua_s_or_ddp_s_and_a_copy_has_no_algorithm(name: str) -> None:
    def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
        module = copy.deepcopy(MODEL)
        module._bagua_params_and_buffers_to_ignore = ["3.weight"]
        module._ddp_params_and_buffers_to_ignore = ["3.bias"]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module.with_bagua([optimizer], ALGORITHMS[name](optimizer), group)
        steps(group.rank(), module, optimizer, num_steps=2)
        copied = copy.deepcopy(module)
        assert copied.bagua_ddp is None
        copied(torch.randn(2, 10)).sum().backward()
        assert list(module.state_dict()) == list(MODEL.state_dict())
        module.bagua_ddp.attachment.detach()
        return [parameter.detach() for parameter in module.parameters()]

    first, second = run_ranks(2, body)
    same = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    assert same == [True, True, True, True, False, False]


def test_the_registry_is_this_package_s() -> None:
    assert set(ALGORITHMS) <= set(GlobalAlgorithmRegistry.available_algorithms())
    assert isinstance(Algorithm.init("bytegrad", hierarchical=False), bytegrad.ByteGradAlgorithm)
    assert GlobalAlgorithmRegistry.get("qadam") is q_adam.QAdamAlgorithm
    assert str(GlobalAlgorithmRegistry).startswith("Registered Algorithms: ")
    with pytest.raises(ValueError, match="an algorithm named 'bytegrad' is already registered"):
        GlobalAlgorithmRegistry.register("bytegrad", bytegrad.ByteGradAlgorithm)


def test_groups_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_default_group():
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"):
            monkeypatch.delenv(name, raising=False)
        assert (bagua.get_rank(), bagua.get_world_size()) == (0, 1)
        assert (bagua.get_local_rank(), bagua.get_local_size()) == (0, 1)
        monkeypatch.setenv("RANK", "5")  # Bagua's scripts ask before there is a group
        monkeypatch.setenv("NODE_RANK", "2")
        assert [bagua.get_rank(), bagua.get_node_rank()] == [5, 2]
        with pytest.raises(RuntimeError, match="call init_process_group first"):
            bagua.new_group()
        with pytest.raises(ValueError, match="rank, world_size and local_world_size must be given, got -1, -1 and -1"):
            bagua.init_process_group(dist.HashStore())
        bagua.init_process_group(dist.HashStore(), rank=0, world_size=1, local_world_size=1)
        assert bagua.is_initialized()
        bagua.init_process_group()  # the group exists already
        assert [bagua.get_rank(), bagua.get_world_size(), bagua.get_local_size()] == [0, 1, 1]
        assert bagua.new_group([0]).ranks == [0]
        with pytest.raises(ValueError, match=r"ranks must be below 1, got \[3\]"):
            bagua.new_group([0, 3])
        with pytest.raises(TypeError, match="process_group must be a group from new_group"):
            nn.Linear(1, 1).with_bagua([], gradient_allreduce.GradientAllReduceAlgorithm(), "world")


def test_modules_without_an_algorithm_are_unchanged() -> None:
    """torch.compile reads every attribute of a module, and TorchScript compiles properties."""
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x = torch.ones(1, 2)
    assert {name: getattr(module, name) for name in dir(module)}["bagua_algorithm"] is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from torch.jit
        scripted = torch.jit.script(module)
    assert torch.equal(scripted(x), module(x))
    assert not hasattr(x, "bagua_tensor_name")
