"""Modules on which fully_shard was called: equal to an oracle, on real ranks; refusals; one rank in this process."""

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh

import sharded_weights
import torchbagua as tb
import warm_python
from ranks import gloo_group, init_default_group, run_ranks
from sharded_checks import CHECKS
from sharded_gradients import CASES, PLAIN, OwnAlgorithm
from torchbagua.algorithms import base
from torchbagua.codecs import Cast, MeanCodecs, MinMaxUInt4, Sign1Bit, TopK
from torchbagua.fsdp._torch import fsdp_all_reduce_hook, fsdp_param_groups
from torchbagua.fsdp.collectives import GatherRunner
from torchbagua.fsdp.comm_runner import FirstFailure
from torchbagua.fsdp.replicas import open_replicas
from torchbagua.transport.base import Members, MissingOperation
from transports import QueueTransport


def run(ranks: int, names: Iterable[str]) -> None:
    """Run cases in real processes: torch finds a mesh by the names of its groups, which threads of a process share."""
    script = Path(__file__).with_name("sharded_rank.py")
    printed = warm_python.run_ranks(script, *names, ranks=ranks, timeout_s=300).stdout
    assert [line for line in printed.splitlines() if line.startswith("right: ")] == [f"right: {name}" for name in names]


OF_TWO_RANKS = [
    "overlapped",
    "bytegrad",
    "own algorithm",
    "premultiplied sum",
    "sum",
    "reduced in bfloat16",
    "accumulated before",
    "not a number",
    "weights in 8 bits",
    "weights in 4 bits, accumulated after",
    "replicas by hook: one shard",
    "replicas by backend: replicated",
    "scaled",
    "gathered",
    "gathered exactly",
    "another divisor",
    "branches",
]
# With three ranks, a sum is divided by no power of two; with six, there are other numbers of replicas than of shards.
OF_THREE_RANKS = ["bytegrad", "weights in 4 bits, accumulated after", "not a number", "uneven nodes", "branches"]
OF_SIX_RANKS = ["replicas by hook: bytegrad", "replicas by backend: bytegrad"]
ELSEWHERE = {*OF_TWO_RANKS, *OF_SIX_RANKS} - {"gathered", "branches"}
OF_FOUR_RANKS = {
    "gradients": [name for name in [*PLAIN, "gathered", "branches"] if name not in ELSEWHERE],
    "replicas": [name for name in [*CASES, *CHECKS] if name.startswith("replicas") and name not in ELSEWHERE],
    "weights": list(sharded_weights.CHECKS),
}


def test_gradients_equal_the_oracle() -> None:
    run(2, OF_TWO_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "names"),
    [(3, OF_THREE_RANKS), *((4, names) for names in OF_FOUR_RANKS.values()), (6, OF_SIX_RANKS)],
    ids=["three ranks", *OF_FOUR_RANKS, "six ranks"],
)
def test_modules_of_more_ranks_equal_the_oracle(ranks: int, names: list[str]) -> None:
    run(ranks, names)


@pytest.fixture(autouse=True)
def default_group() -> None:
    init_default_group()


def sharded(**options: Any) -> FSDPModule:
    return fully_shard(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), **options)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


# Refusals: (module, algorithm, arguments of fsdp.attach, error, message)

NOT_SUPPORTED = (
    r"\w+Algorithm does not support modules on which fully_shard was called; "
    "ByteGradAlgorithm and CompressedAllReduceAlgorithm do$"
)
NEEDS_REPLICAS = r"Algorithm averages weights .* replicate_group=.* or CompressedAllReduce"


class OwnCodecs(OwnAlgorithm):
    """An algorithm that a user wrote, with other codecs for shards."""

    def __init__(self, codecs: object) -> None:
        object.__setattr__(self, "codecs", codecs)

    def make_shard_codecs(self) -> MeanCodecs:
        return self.codecs  # type: ignore[attr-defined,no-any-return]


class Own:
    """A collective of the user's."""


class GathersItself(torch.Tensor):
    """A shard that defines how it is gathered."""

    def fsdp_pre_all_gather(self) -> None: ...

    def fsdp_post_all_gather(self) -> None: ...


def with_own(setter: str) -> Any:
    module: Any = sharded()
    getattr(module, setter)(Own())
    return module


def of_an_own_class() -> Any:
    module: Any = sharded()
    module[0].weight._local_tensor = module[0].weight._local_tensor.detach().as_subclass(GathersItself)
    return module


def of_two_meshes() -> nn.Module:
    meshes = [dist.DeviceMesh.from_group(dist.new_group([0]), "cpu") for _ in range(2)]
    return nn.Sequential(*(fully_shard(nn.Linear(2, 2), mesh=mesh) for mesh in meshes))


def of_two_dimensions() -> Any:
    return sharded(mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards")))


def part_of_a_group() -> nn.Module:
    layers = [nn.Linear(4, 3), nn.Linear(3, 2)]
    fully_shard(layers)
    return layers[0]


def plain() -> nn.Module:
    return nn.Linear(2, 2)


def without_parameters() -> nn.Module:
    return nn.Sequential(fully_shard(nn.ReLU()), plain())


WORLD = object()  # stands for the default group, which does not exist yet
EIGHT_BITS = {"quantize_weights": "minmax_uint8"}
REPLICAS = {"replicate_group": WORLD}


@pytest.mark.parametrize(
    ("make", "algorithm", "options", "message"),
    [
        *((sharded, name, {}, NOT_SUPPORTED) for name in ("gradient_allreduce", "powersgd", "q_adam")),
        *((sharded, name, {}, NEEDS_REPLICAS) for name in ("decentralized", "low_precision_decentralized", "async")),
        *((sharded, name, {}, NEEDS_REPLICAS) for name in ("diloco", "local_sgd")),
        (sharded, tb.ByteGradAlgorithm(error_feedback=True), {}, "ByteGradAlgorithm: error_feedback must be False"),
        (sharded, tb.CompressedAllReduceAlgorithm("sign1bit", error_feedback=True), {}, "error_feedback must be False"),
        (sharded, tb.ByteGradAlgorithm(average=False), {}, "average must be True .* set_gradient_divide_factor"),
        (sharded, OwnCodecs(MeanCodecs(MinMaxUInt4(16), Sign1Bit())), {}, "that needs error feedback, .* got Sign1Bit"),
        (of_two_dimensions, "bytegrad", {}, r"replicated \(FSDPSequential\).* replicate_group=mesh.*register_backend"),
        (lambda: replicate(plain()), "bytegrad", {}, r"replicated \(Replicate\w+\).*\.register_backend, which repl"),
        (partial(sharded, offload_policy=CPUOffloadPolicy(pin_memory=False)), "bytegrad", {}, "has an OffloadPolicy"),
        (partial(with_own, "set_custom_reduce_scatter"), "bytegrad", {}, "the reduce-scatter Own already; leave out"),
        (of_two_meshes, "bytegrad", {}, "must be sharded over one group, got fully_shard with several meshes"),
        (without_parameters, "bytegrad", {}, "no part on which fully_shard .* has param"),
        (part_of_a_group, "bytegrad", {}, "Linear communicates together with parameters that are not in FSDPLinear"),
        (plain, "decentralized", REPLICAS, "replicate_group must be None since fully_shard was called on no part"),
        (partial(with_own, "set_all_reduce_hook"), "bytegrad", REPLICAS, r"has the all-reduce hook .* already"),
        (sharded, "bytegrad", {"quantize_weights": "MinMaxUInt3"}, "a Compressor or one of .*, got 'MinMaxUInt3'"),
        (sharded, "bytegrad", {"quantize_weights": TopK()}, "codec that needs error feedback, .* got TopK"),
        (plain, "bytegrad", EIGHT_BITS, "None since fully_shard was called on no part of Linear"),
        (partial(with_own, "set_custom_all_gather"), "bytegrad", EIGHT_BITS, "module has the all-gather Own already"),
        (of_an_own_class, "bytegrad", EIGHT_BITS, r"0.weight defines .* \(GathersItself.fsdp_pre_all_gather\)"),
        (sharded, "decentralized", REPLICAS | EIGHT_BITS, "must be None with DecentralizedAlgorithm"),
    ],
)
def test_refusals(
    make: Callable[[], nn.Module],
    algorithm: tb.Algorithm | str,
    options: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before ranks communicate: other ranks may not refuse, and would wait for this rank."""
    module = make()
    optimizer = optimizer_of(module)
    if algorithm == "q_adam":
        optimizer = tb.QAdamOptimizer(module.parameters(), warmup_steps=2)
        algorithm = tb.QAdamAlgorithm(optimizer)
    options = {name: dist.group.WORLD if value is WORLD else value for name, value in options.items()}
    monkeypatch.setattr(tb.Algorithm, "reify", lambda *_, **__: pytest.fail("refused after ranks have communicated"))
    with pytest.raises(ValueError, match=f"attach: .*{message}"):
        tb.fsdp.attach(module, optimizer, algorithm, **options)


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        (OwnCodecs(MinMaxUInt4()), {}, r"OwnCodecs\.make_shard_codecs must return .*codecs\.MeanCodecs, .* got MinM"),
        (OwnCodecs(MeanCodecs(Cast("bfloat16"))), {}, "codecs sends with Cast.*, but make_codec returns MinM"),
        ("bytegrad", {"replicate_group": [0, 1]}, "attach: replicate_group must be a .*ProcessGroup .* got list"),
        ("bytegrad", {"replicate_group": dist.GroupMember.NON_GROUP_MEMBER}, "of which this rank is a member, got"),
    ],
)
def test_refused_types(algorithm: tb.Algorithm | str, options: dict[str, Any], message: str) -> None:
    module = sharded()
    with pytest.raises(TypeError, match=message):
        tb.fsdp.attach(module, optimizer_of(module), algorithm, **options)


def test_the_refusal_names_algorithms_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    tb.extend.register("own", OwnAlgorithm)
    module = sharded()
    with pytest.raises(ValueError, match=r"ByteGradAlgorithm and CompressedAllReduceAlgorithm and OwnAlgorithm do$"):
        tb.attach(module, optimizer_of(module), "powersgd")


def test_micro_steps_without_an_all_reduce() -> None:
    """Discarded ones are in no mean, all must reach the same parameters, and a warning reports those that are lost."""
    module = sharded()
    optimizer = optimizer_of(module)
    full = tb.CompressedAllReduceAlgorithm(None)
    first = tb.fsdp.attach(module, optimizer, full, replicate_group=dist.group.WORLD)

    def backward(value: float, *, reduces: bool) -> None:
        module.set_requires_all_reduce(reduces)
        module(torch.full((1, 4), value)).sum().backward()

    backward(100.0, reduces=False)
    assert not module[0].weight.grad.full_tensor().any()
    optimizer.zero_grad()
    backward(1.0, reduces=True)
    assert module[1].bias.grad.full_tensor().tolist() == [1.0, 1.0]
    backward(1.0, reduces=False)
    with pytest.warns(RuntimeWarning, match="accumulated with set_requires_all_reduce.False. are lost"):
        first.detach()
    (param_group,) = fsdp_param_groups(module)
    assert fsdp_all_reduce_hook(param_group) is None
    second = tb.fsdp.attach(module, optimizer, full, replicate_group=dist.group.WORLD)
    optimizer.zero_grad()
    backward(1.0, reduces=False)
    module[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"must reach the same parameters, got 0.bias, 1.weight, 1.bias after 0.wei"):
        backward(1.0, reduces=True)
    second.detach()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"algorithm": "bytegrad"}, TypeError, "algorithm must be an Algorithm, got 'bytegrad'"),
        ({"algorithm": tb.TopKAlgorithm()}, ValueError, "TopKAlgorithm does not support modules on which fully_shard"),
        ({"algorithm": tb.ByteGradAlgorithm(), "name": "My backend"}, ValueError, "name must be a lower-case identif"),
        ({"algorithm": tb.ByteGradAlgorithm(), "name": "gloo"}, ValueError, "name 'gloo' is taken; use another"),
    ],
)
def test_backends_that_are_refused(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"register_backend: {message}"):
        tb.fsdp.register_backend(**arguments)  # type: ignore[arg-type]


def test_blocks_are_aligned_over_a_backend_only() -> None:
    with pytest.raises(ValueError, match="align_blocks: no part of the module has replicas over a group of register_"):
        tb.fsdp.align_blocks(sharded())


@pytest.fixture
def replicated(request: pytest.FixtureRequest) -> Iterator[tuple[FSDPModule, dist.ProcessGroup]]:
    """A module replicated over a backend, which stays registered, and its group of replicas."""
    backend = f"torchbagua_{request.node.name}"
    tb.fsdp.register_backend(tb.ByteGradAlgorithm(), name=backend)
    names = ("replicas", "shards")
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=names, backend_override={"replicas": backend})
    yield sharded(mesh=mesh), mesh.get_group("replicas")
    for name in names:
        dist.destroy_process_group(mesh.get_group(name))


def test_blocks_are_aligned_after_an_evaluation_that_left_whole_weights(
    replicated: tuple[FSDPModule, dist.ProcessGroup],
) -> None:
    module, _ = replicated
    with torch.no_grad():
        module(torch.ones(2, 4))
    tb.fsdp.align_blocks(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(torch.ones(2, 4)).sum().backward()


def test_an_all_reduce_of_the_users_is_not_taken_for_gradients(
    replicated: tuple[FSDPModule, dist.ProcessGroup],
) -> None:
    module, group = replicated
    tb.fsdp.align_blocks(module)
    module.set_requires_all_reduce(False)
    module(torch.ones(2, 4)).sum().backward()
    with pytest.warns(RuntimeWarning, match="an all-reduce of 5 elements is compressed .* If your code called it"):
        dist.all_reduce(torch.ones(5), group=group)


def test_attached_modules_are_refused() -> None:
    """And an evaluation may have left whole weights, which the root then lists."""
    module = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 3)), nn.Linear(3, 2)))
    optimizer = optimizer_of(module)
    with torch.no_grad():
        module(torch.ones(2, 4))
    assert type(module[1].weight) is nn.Parameter
    with tb.attach(module, optimizer, "bytegrad"):
        assert isinstance(module[1].weight, DTensor)
        with pytest.raises(ValueError, match="ByteGradAlgorithm is attached to the module already"):
            tb.attach(module, optimizer_of(module), "bytegrad")
        match = "the module has the reduce-scatter RowScatter already; .* detach the algorithm of a module around it"
        with pytest.raises(ValueError, match=match):
            tb.attach(module[0], optimizer_of(module[0]), "bytegrad")


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("bytegrad", {}),
        ("bytegrad", EIGHT_BITS),
        ("low_precision_decentralized", REPLICAS),
        ("async", REPLICAS),
        ("diloco", REPLICAS),
    ],
)
def test_one_rank_trains_as_without(algorithm: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(8, 4), []
    options = {name: dist.group.WORLD if value is WORLD else value for name, value in options.items()}
    for is_attached in (False, True):
        torch.manual_seed(1)
        module = sharded()
        optimizer = optimizer_of(module)
        with ExitStack() as stack:
            if is_attached:
                stack.enter_context(tb.fsdp.attach(module, optimizer, algorithm, **options))
            for _ in range(2):
                optimizer.zero_grad()
                module(x).square().sum().backward()
                optimizer.step()
        weights.append([parameter.full_tensor() for parameter in module.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("algorithm", ["bytegrad", "decentralized"])
def test_without_its_own_arguments_attach_takes_any_module(algorithm: str) -> None:
    module = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    with tb.fsdp.attach(module, optimizer_of(module), algorithm) as attachment:
        module(torch.ones(2, 4)).sum().backward()
        assert attachment.ddp is (module if algorithm == "bytegrad" else None)


class WithoutSends(QueueTransport):
    """A transport whose backend lacks an operation in the group of replicas."""

    replicas: dist.ProcessGroup | None = None

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self.is_of_replicas = members.process_group is self.replicas

    def missing_operation(self) -> MissingOperation | None:
        return MissingOperation("queues", "isend", "there is no send") if self.is_of_replicas else None


def test_operations_of_the_replicas_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas, world = dist.new_group([0]), dist.group.WORLD
    assert world is not None
    monkeypatch.setattr(WithoutSends, "replicas", replicas)
    own = tb.BaguaProcessGroup(world, transport=WithoutSends)
    module = sharded()
    with pytest.raises(ValueError, match="backend queues has no isend, which ByteGradAlgorithm needs"):
        tb.fsdp.attach(module, optimizer_of(module), "bytegrad", replicate_group=replicas, process_group=own)
    module.reshard()


def test_replicas_have_the_timeout_of_attach() -> None:
    def body(group: dist.ProcessGroup) -> timedelta:
        shards = tb.BaguaProcessGroup(gloo_group(dist.HashStore(), 0, 1), timeout=timedelta(seconds=7))
        runner = tb.ByteGradAlgorithm().reify(shards)
        with open_replicas(runner, group, {}) as replicas:
            timeout = replicas.timeout
        runner.close()
        return timeout

    assert run_ranks(2, body) == [timedelta(seconds=7)] * 2


def test_a_gather_waits_for_the_one_that_runs_ahead() -> None:
    """Their messages have the same tags."""

    def body(group: dist.ProcessGroup) -> list[str]:
        own, order, may_end = tb.BaguaProcessGroup(group), list[str](), threading.Event()
        runner = GatherRunner(own, FirstFailure([own]))

        def gather_ahead() -> None:
            may_end.wait(10)
            order.append("ahead")

        runner.run(gather_ahead, async_op=True)
        threading.Timer(0.05, may_end.set).start()
        runner.run(lambda: order.append("now"), async_op=False)
        runner.close()
        own.close()
        return order

    assert run_ranks(1, body) == [["ahead", "now"]]
