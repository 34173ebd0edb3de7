"""attach on modules on which fully_shard was called: bit for bit the oracle's gradients, and what is refused."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import init_device_mesh

import programs
import torchbagua as tb
from ranks import init_default_group
from sharded_rank import CASES


def run(ranks: int, names: list[str]) -> None:
    """In real processes: a mesh is found by the names of its groups, which all threads of a process share."""
    script = Path(__file__).with_name("sharded_rank.py")
    printed = programs.run(programs.torchrun(script, *names, ranks=ranks), timeout_s=300).stdout
    assert [line for line in printed.splitlines() if line.startswith("right: ")] == [f"right: {name}" for name in names]


CHEAP = ["bytegrad", "four bits", "premultiplied sum", "reduced in bfloat16", "accumulated before", "not a number"]


def test_gradients_are_those_of_the_oracle() -> None:
    run(2, [*CHEAP, "scaled"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "without"),
    [(2, [*CHEAP, "resharded to two", "over nodes"]), (3, ["resharded to two", "over nodes"]), (4, [])],
    ids=["2", "3", "4"],
)
def test_gradients_are_those_of_the_oracle_in_all_cases(ranks: int, without: list[str]) -> None:
    run(ranks, [name for name in CASES if name not in without] + ["uneven nodes"] * (ranks == 3))


@pytest.fixture(autouse=True)
def default_group() -> None:
    init_default_group()


def sharded(**options: object) -> FSDPModule:
    return fully_shard(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), **options)  # type: ignore[arg-type]


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "algorithm",
    ["gradient_allreduce", tb.TopKAlgorithm(), tb.RandomKAlgorithm(), tb.PowerSGDAlgorithm()],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
def test_other_gradient_algorithms_are_refused(algorithm: tb.Algorithm | str) -> None:
    module = sharded()
    with pytest.raises(ValueError, match=r"attach: \w+Algorithm does not take modules on which fully_shard was called"):
        tb.attach(module, optimizer_of(module), algorithm)


@pytest.mark.parametrize("name", ["decentralized", "low_precision_decentralized", "async"])
def test_weights_are_not_averaged(name: str) -> None:
    module = sharded()
    with pytest.raises(TypeError, match=r"attach: the module is sharded \(FSDPSequential\): ranks hold"):
        tb.attach(module, optimizer_of(module), name)


def test_q_adam_is_refused() -> None:
    module = sharded()
    optimizer = tb.QAdamOptimizer(module.parameters(), warmup_steps=2)
    with pytest.raises(ValueError, match="attach: QAdamAlgorithm does not take modules on which fully_shard"):
        tb.attach(module, optimizer, tb.QAdamAlgorithm(optimizer))


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (tb.ByteGradAlgorithm(error_feedback=True), "ByteGradAlgorithm: error_feedback must be False"),
        (tb.CompressedAllReduceAlgorithm("sign1bit", error_feedback=True), "error_feedback must be False"),
        (tb.ByteGradAlgorithm(average=False), "ByteGradAlgorithm: average must be True .* set_gradient_divide_factor"),
    ],
)
def test_arguments_that_are_refused(algorithm: tb.Algorithm, message: str) -> None:
    module = sharded()
    with pytest.raises(ValueError, match=message):
        tb.attach(module, optimizer_of(module), algorithm)


class OwnReduceScatter:
    """Somebody else's."""


def with_own_reduce_scatter() -> nn.Module:
    module = sharded()
    module.set_custom_reduce_scatter(OwnReduceScatter())  # type: ignore[arg-type]
    return module  # type: ignore[return-value]


def of_two_meshes() -> nn.Module:
    groups = [dist.new_group([0]) for _ in range(2)]
    meshes = [dist.DeviceMesh.from_group(group, "cpu") for group in groups]
    return nn.Sequential(*(fully_shard(nn.Linear(2, 2), mesh=mesh) for mesh in meshes))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: sharded(mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))),
            r"the module is replicated \(FSDPSequential\).* a mesh of one dimension",
        ),
        (lambda: replicate(nn.Linear(2, 2)), r"the module is replicated \(Replicate\w+\).* an all-reduce that cannot"),
        (
            partial(sharded, offload_policy=CPUOffloadPolicy(pin_memory=False)),
            "the module has an OffloadPolicy",
        ),
        (with_own_reduce_scatter, "the module has the reduce-scatter OwnReduceScatter already; leave out"),
        (of_two_meshes, "all parts must be sharded over one group, got fully_shard with several meshes"),
        (lambda: nn.Sequential(fully_shard(nn.ReLU()), nn.Linear(2, 2)), "no part on which fully_shard .* has param"),
    ],
    ids=["two dimensions", "replicate", "offload", "own comm", "two meshes", "no parameters"],
)
def test_modules_that_are_refused(make: object, message: str) -> None:
    module = make()  # type: ignore[operator]
    with pytest.raises(ValueError, match=f"attach: {message}"):
        tb.attach(module, optimizer_of(module), "bytegrad")


def test_ddp_arguments_are_refused() -> None:
    module = sharded()
    with pytest.raises(ValueError, match="ddp_arguments must be None for a module on which fully_shard was called"):
        tb.attach(module, optimizer_of(module), "bytegrad", ddp_arguments={})


def test_two_algorithms_are_refused() -> None:
    module = sharded()
    optimizer = optimizer_of(module)
    match = "ByteGradAlgorithmImpl is attached to the module already"
    with tb.attach(module, optimizer, "bytegrad"), pytest.raises(ValueError, match=match):
        tb.attach(module, optimizer, "bytegrad")


def test_one_rank_trains_as_without() -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(8, 4), []
    for attached in (False, True):
        torch.manual_seed(1)
        module = sharded()
        optimizer = optimizer_of(module)
        attachment = tb.attach(module, optimizer, "bytegrad") if attached else None
        for _ in range(2):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
        if attachment is not None:
            attachment.detach()
        weights.append([one.full_tensor() for one in module.parameters()])
    assert all(map(torch.equal, *weights))
