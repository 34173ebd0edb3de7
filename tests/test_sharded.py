"""attach on modules on which fully_shard was called: gradients are bitwise equal to the oracle's; refusals."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import init_device_mesh

import hsdp_rank
import programs
import torchbagua as tb
from ranks import init_default_group
from sharded_module import assert_trains_as_without, optimizer_of, sharded
from sharded_rank import CASES, OF_FOUR_RANKS, OwnAlgorithm
from torchbagua.algorithms import base
from torchbagua.codecs import Cast, MeanCodecs, MinMaxUInt4, Sign1Bit
from torchbagua.fsdp._torch import fsdp_all_gather, fsdp_all_reduce_hook, fsdp_param_groups, fsdp_reduce_scatter
from torchbagua.fsdp.collectives import BoundedReduceScatter, bound_reduce_scatters
from torchbagua.fsdp.comm_runner import FirstFailure
from torchbagua.fsdp.parts import communicating_parts
from torchbagua.fsdp.same_rows import SameRows
from torchbagua.runtime.parameters import sharded_parts
from torchbagua.transport.base import Members, MissingOperation
from transports import QueueTransport


def run(ranks: int, names: list[str], program: str = "sharded_rank.py", arguments: Sequence[str] = ()) -> None:
    """Run cases in real processes: torch finds a mesh by the names of its groups, which threads of a process share."""
    script = Path(__file__).with_name(program)
    printed = programs.run(programs.forked_ranks(script, *arguments, *names, ranks=ranks), timeout_s=300).stdout
    assert [line for line in printed.splitlines() if line.startswith("right: ")] == [f"right: {name}" for name in names]


CHEAP = [
    "bytegrad",
    "four bits",
    "own algorithm",
    "premultiplied sum",
    "reduced in bfloat16",
    "accumulated before",
    "not a number",
]


def test_gradients_equal_the_oracle() -> None:
    checks = ["scaled", "gathered", "gathered exactly", "another divisor", "branches"]
    run(2, [*CHEAP, "weights in 8 bits", *checks])


def all_cases() -> Iterator[tuple[int, list[str]]]:
    """Yield batches of cases: a case takes seconds on two cores."""
    for ranks, skipped, added in (
        (2, [*CHEAP, "weights in 8 bits", *OF_FOUR_RANKS], ["overlapped"]),
        (3, OF_FOUR_RANKS, ["gathered", "gathered exactly", "uneven nodes", "branches"]),
        (4, [], ["gathered"]),
    ):
        names = [name for name in CASES if name not in skipped] + added
        yield from ((ranks, names[at : at + 8]) for at in range(0, len(names), 8))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "names"), list(all_cases()))
def test_gradients_equal_the_oracle_in_all_cases(ranks: int, names: list[str]) -> None:
    run(ranks, names)


# Three cases at a time, and two cases on six ranks: a case takes tens of seconds on two cores.
OF_REPLICAS = [(way, 4, names[at : at + 3]) for way, names in hsdp_rank.WAYS.items() for at in range(0, len(names), 3)]
OF_REPLICAS += [(way, 6, ["bytegrad", "accumulated within"]) for way in hsdp_rank.WAYS]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "ranks", "names"), OF_REPLICAS)
def test_gradients_of_replicas_equal_the_oracle(way: str, ranks: int, names: list[str]) -> None:
    run(ranks, names, "hsdp_rank.py", [way])


@pytest.fixture(autouse=True)
def default_group() -> None:
    init_default_group()


@pytest.mark.parametrize(
    "algorithm",
    ["gradient_allreduce", tb.TopKAlgorithm(), tb.PowerSGDAlgorithm()],
    ids=lambda algorithm: algorithm if isinstance(algorithm, str) else type(algorithm).__name__,
)
def test_other_gradient_algorithms_are_refused(algorithm: tb.Algorithm | str) -> None:
    module = sharded()
    with pytest.raises(ValueError, match=r"attach: \w+Algorithm does not support modules on which fully_shard"):
        tb.attach(module, optimizer_of(module), algorithm)


def test_q_adam_is_refused() -> None:
    module = sharded()
    optimizer = tb.QAdamOptimizer(module.parameters(), warmup_steps=2)
    with pytest.raises(ValueError, match="attach: QAdamAlgorithm does not support modules on which fully_shard"):
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


def test_the_refusal_names_the_registered_algorithms_that_take_sharded_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = sharded()
    refused = "does not support modules on which fully_shard was called; "
    with pytest.raises(ValueError, match=f"{refused}ByteGradAlgorithm and CompressedAllReduceAlgorithm do$"):
        tb.attach(module, optimizer_of(module), "powersgd")
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    tb.extend.register("own", OwnAlgorithm)
    with pytest.raises(ValueError, match=r"ByteGradAlgorithm and CompressedAllReduceAlgorithm and OwnAlgorithm do$"):
        tb.attach(module, optimizer_of(module), "powersgd")


@pytest.mark.parametrize(
    ("codecs", "error", "message"),
    [
        (MinMaxUInt4(), TypeError, r"Own\.make_shard_codecs must return a torchbagua\.codecs\.MeanCodecs, .* got MinM"),
        (
            MeanCodecs(Cast("bfloat16")),
            TypeError,
            r"Own\.make_shard_codecs sends with Cast.*, but make_codec returns Min",
        ),
        (
            MeanCodecs(MinMaxUInt4(16), Sign1Bit()),
            ValueError,
            r"attach: Own\.make_shard_codecs must not return a codec that needs error feedback, .* got Sign1Bit",
        ),
    ],
    ids=["no MeanCodecs", "another codec", "error feedback"],
)
def test_codecs_of_an_own_algorithm_that_are_refused(codecs: object, error: type[Exception], message: str) -> None:
    class Own(OwnAlgorithm):
        def make_shard_codecs(self) -> MeanCodecs:
            return codecs  # type: ignore[return-value]

    module = sharded()
    with pytest.raises(error, match=message):
        tb.attach(module, optimizer_of(module), Own())


class OwnReduceScatter:
    """A reduce-scatter of the user's."""


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
            r"the module is replicated \(FSDPSequential\).* replicate_group=mesh.* torchbagua\.fsdp\.register_backend",
        ),
        (
            lambda: replicate(nn.Linear(2, 2)),
            r"the module is replicated \(Replicate\w+\).*\.register_backend, which replicate\(\) needs",
        ),
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


@pytest.mark.parametrize("group", [[0, 1], dist.GroupMember.NON_GROUP_MEMBER], ids=["ranks", "not a member"])
def test_replicate_group_must_be_a_group(group: object) -> None:
    module = sharded()
    with pytest.raises(TypeError, match=r"replicate_group must be a torch\.distributed\.ProcessGroup .* got"):
        tb.fsdp.attach(module, optimizer_of(module), "bytegrad", replicate_group=group)  # type: ignore[arg-type]


def test_replicate_group_is_for_sharded_modules() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="replicate_group must be None since fully_shard was called on no part"):
        tb.fsdp.attach(module, optimizer_of(module), "decentralized", replicate_group=dist.group.WORLD)


def test_replicas_need_the_hook_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sharded()
    module.set_all_reduce_hook(hook := lambda gradient: None)
    # Other ranks may have no such hook, and would wait for this rank.
    monkeypatch.setattr(tb.Algorithm, "reify", lambda *_, **__: pytest.fail("refused after ranks have communicated"))
    with pytest.raises(ValueError, match=r"attach: the module has the all-reduce hook .* already"):
        tb.fsdp.attach(module, optimizer_of(module), "bytegrad", replicate_group=dist.group.WORLD)
    (param_group,) = fsdp_param_groups(module)
    assert fsdp_all_reduce_hook(param_group) is hook


def test_gradients_that_were_never_averaged_raise_a_warning() -> None:
    module = sharded()
    attachment = tb.fsdp.attach(module, optimizer_of(module), "bytegrad", replicate_group=dist.group.WORLD)
    module.set_requires_all_reduce(False)
    module(torch.ones(1, 4)).sum().backward()
    assert not module[0].weight.grad.full_tensor().any()
    with pytest.warns(RuntimeWarning, match="accumulated with set_requires_all_reduce.False. are lost"):
        attachment.detach()
    (param_group,) = fsdp_param_groups(module)
    assert fsdp_all_reduce_hook(param_group) is None


def test_discarded_micro_steps_are_in_no_mean() -> None:
    module = sharded()
    optimizer = optimizer_of(module)
    with tb.fsdp.attach(module, optimizer, tb.CompressedAllReduceAlgorithm(None), replicate_group=dist.group.WORLD):
        module.set_requires_all_reduce(False)
        module(torch.full((1, 4), 100.0)).sum().backward()
        optimizer.zero_grad()
        module.set_requires_all_reduce(True)
        module(torch.ones(1, 4)).sum().backward()
        assert module[1].bias.grad.full_tensor().tolist() == [1.0, 1.0]


def test_micro_steps_must_reach_the_same_parameters() -> None:
    module = sharded()
    attachment = tb.fsdp.attach(module, optimizer_of(module), "bytegrad", replicate_group=dist.group.WORLD)
    module.set_requires_all_reduce(False)
    module(torch.ones(1, 4)).sum().backward()
    module.set_requires_all_reduce(True)
    module[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"must reach the same parameters, got 0.bias, 1.weight, 1.bias after 0.wei"):
        module(torch.ones(1, 4)).sum().backward()
    attachment.detach()


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


class OwnAllGather:
    """An all-gather of the user's."""


def with_own_all_gather() -> nn.Module:
    module = sharded()
    module.set_custom_all_gather(OwnAllGather())  # type: ignore[arg-type]
    return module  # type: ignore[return-value]


def with_memory_of_the_group() -> nn.Module:
    module = sharded()
    module.set_allocate_memory_from_process_group_for_comm(True)
    (param_group,) = fsdp_param_groups(fully_shard(nn.Linear(2, 2)))
    module.set_custom_reduce_scatter(fsdp_reduce_scatter(param_group)[0])
    return module  # type: ignore[return-value]


class GathersItself(torch.Tensor):
    """A shard that defines how it is gathered."""

    def fsdp_pre_all_gather(self) -> None: ...

    def fsdp_post_all_gather(self) -> None: ...


def of_an_own_class() -> nn.Module:
    module = sharded()
    module[0].weight._local_tensor = module[0].weight._local_tensor.detach().as_subclass(GathersItself)  # type: ignore[index,union-attr,operator]
    return module  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("make", "quantize_weights", "message"),
    [
        (sharded, "MinMaxUInt3", "must be None, a Compressor or one of .*, got 'MinMaxUInt3'"),
        (sharded, "sign1bit", "must not be a codec that needs error feedback, .* got 'sign1bit'"),
        (sharded, tb.codecs.TopK(), "must not be a codec that needs error feedback, .* got TopK"),
        (lambda: nn.Linear(2, 2), "minmax_uint8", "must be None since fully_shard was called on no part of Linear"),
        (with_own_all_gather, "minmax_uint8", "must be None if the module has the all-gather OwnAllGather already"),
        (with_memory_of_the_group, "minmax_uint8", "must be None if .* all-gather ProcessGroupAllocAllGather"),
        (of_an_own_class, "minmax_uint8", r"must be None if 0.weight defines .* \(GathersItself.fsdp_pre_all_gather\)"),
    ],
)
def test_weights_that_are_not_quantised(make: object, quantize_weights: object, message: str) -> None:
    module = make()  # type: ignore[operator]
    with pytest.raises(ValueError, match=f"attach: quantize_weights {message}"):
        tb.fsdp.attach(module, optimizer_of(module), "bytegrad", quantize_weights=quantize_weights)  # type: ignore[arg-type]


def test_weights_are_not_both_averaged_and_quantised() -> None:
    module, group = sharded(), dist.group.WORLD
    with pytest.raises(ValueError, match="quantize_weights must be None with DecentralizedAlgorithm"):
        tb.fsdp.attach(
            module, optimizer_of(module), "decentralized", replicate_group=group, quantize_weights="minmax_uint8"
        )


def test_weights_that_no_codec_encodes_are_named() -> None:
    module = fully_shard(nn.Linear(4, 3).double())
    message = "weights of FSDPLinear are gathered in full precision, .* does not encode torch.float64"
    full = tb.CompressedAllReduceAlgorithm(None)
    options = {"replicate_group": dist.group.WORLD, "quantize_weights": "minmax_uint8"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", tb.UncompressedParametersWarning)
        with pytest.raises(tb.UncompressedParametersWarning, match=message):
            tb.fsdp.attach(module, optimizer_of(module), full, **options)
    (param_group,) = fsdp_param_groups(module)
    assert fsdp_all_gather(param_group)[1]
    assert fsdp_reduce_scatter(param_group)[1]
    assert fsdp_all_reduce_hook(param_group) is None
    with pytest.warns(tb.UncompressedParametersWarning, match=message) as caught:
        attachment = tb.fsdp.attach(module, optimizer_of(module), full, **options)
    with attachment:
        module(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert len(caught) == 1


def test_parts_that_communicate_together_are_attached_together() -> None:
    layers = [nn.Linear(4, 3), nn.Linear(3, 2)]
    fully_shard(layers)
    with pytest.raises(ValueError, match="Linear communicates together with parameters that are not in FSDPLinear"):
        tb.attach(layers[0], optimizer_of(layers[0]), "bytegrad")
    tb.attach(nn.Sequential(*layers), optimizer_of(nn.Sequential(*layers)), "bytegrad").detach()


def test_attach_after_an_evaluation_that_left_whole_weights() -> None:
    module = sharded()
    optimizer = optimizer_of(module)
    with torch.no_grad():
        module(torch.ones(2, 4))
    tb.attach(module, optimizer, "bytegrad").detach()


def test_two_algorithms_are_refused() -> None:
    module = sharded()
    optimizer = optimizer_of(module)
    match = "ByteGradAlgorithm is attached to the module already"
    with tb.attach(module, optimizer, "bytegrad"), pytest.raises(ValueError, match=match):
        tb.attach(module, optimizer, "bytegrad")


def test_an_algorithm_for_a_part_of_an_attached_module_is_refused() -> None:
    module = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 3)), nn.Linear(3, 2)))
    match = "the module has the reduce-scatter RowScatter already; .* detach the algorithm of a module around it"
    with tb.attach(module, optimizer_of(module), "bytegrad"), pytest.raises(ValueError, match=match):
        tb.attach(module[0], optimizer_of(module[0]), "bytegrad")


@pytest.mark.parametrize("quantize_weights", [None, "minmax_uint8"])
def test_one_rank_trains_as_without(quantize_weights: str | None) -> None:
    assert_trains_as_without("bytegrad", quantize_weights=quantize_weights)


@pytest.mark.parametrize("algorithm", ["bytegrad", "decentralized"])
def test_without_its_own_arguments_attach_takes_any_module(algorithm: str) -> None:
    module = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    with tb.fsdp.attach(module, optimizer_of(module), algorithm) as attachment:
        module(torch.ones(2, 4)).sum().backward()
        assert attachment.ddp is (module if algorithm == "bytegrad" else None)


def test_without_a_torch_group_fsdp_keeps_torchs_reduce_scatter() -> None:
    """It warns, since attach's timeout then does not bound the reduce-scatter."""
    module = sharded()
    (part,) = communicating_parts(module, sharded_parts(module))
    world = dist.group.WORLD
    assert world is not None
    for transport, is_bounded in ((None, True), (QueueTransport, False)):
        own = tb.BaguaProcessGroup(world, transport=transport)
        with ExitStack() as undo, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            bound_reduce_scatters(undo, own, FirstFailure([own]), [part], SameRows(own.world, [part]))
            assert isinstance(fsdp_reduce_scatter(part.param_group)[0], BoundedReduceScatter) == is_bounded
        messages = [str(warning.message).partition(",")[0] for warning in caught]
        assert messages == ([] if is_bounded else ["torchbagua: FSDP itself reduce-scatters gradients"])
        own.close()


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
