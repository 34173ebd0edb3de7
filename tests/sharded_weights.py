"""Weights of sharded modules, averaged between the replicas of four ranks in two meshes of two.

Alongside each sharded module, the same algorithm trains an unsharded module over the same two ranks, with the mean of
the gradients of its mesh's ranks. Both are bitwise equal throughout: a sum of two values is the same in any order, all
factors of the optimizers are powers of two, and in the net "even" no block of a codec lies in two shards.
"""

import copy
import io
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, init_device_mesh

import torchbagua as tb
from torchbagua.transport.gloo import GlooTransport

BLOCK = 16
STEPS = 5


class Net(nn.Module):
    """Two layers, a norm with buffers, and a parameter that is not sharded."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, outputs)
        self.plain = nn.Parameter(torch.full((4,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).tanh()) * self.plain.square().sum()


@dataclass
class Case:
    """An algorithm, and the net that it trains."""

    algorithm: tb.Algorithm
    is_even: bool = True  # whether shards are cut between blocks; otherwise first dimensions are odd, or 1
    is_exact: bool = True  # whether the weights are bitwise equal to those of an unsharded module

    def net(self, seed: int) -> Net:
        torch.manual_seed(seed)
        return Net(32, 64) if self.is_even else Net(37, 1)


def diloco(compression: Any = None, inner_steps: int = 2, **options: Any) -> tb.DiLoCoAlgorithm:
    return tb.DiLoCoAlgorithm(
        inner_steps, outer_lr=0.5, outer_momentum=0.5, compression=compression, bucket_cap_mb=0.001, **options
    )


FOUR_BITS = tb.codecs.MinMaxUInt4(BLOCK)
CASES = {
    "decentralized, uneven": Case(tb.DecentralizedAlgorithm(bucket_cap_mb=0.001), is_even=False),
    "shift one": Case(tb.DecentralizedAlgorithm(peer_selection_mode="shift_one", communication_interval=2)),
    "low precision": Case(
        tb.LowPrecisionDecentralizedAlgorithm(compression=tb.codecs.MinMaxUInt8(BLOCK), communication_interval=2)
    ),
    "low precision, uneven": Case(tb.LowPrecisionDecentralizedAlgorithm(), is_even=False, is_exact=False),
    "diloco, uneven": Case(diloco(), is_even=False),
    "streaming diloco": Case(diloco(FOUR_BITS, 4, fragments=2, delay=1)),
    "local sgd": Case(tb.LocalSGDAlgorithm(inner_steps=3, compression=FOUR_BITS)),
}


def data_of(step: int, replica: int, shard: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * replica + shard)
    return torch.randn(6, 8, generator=generator)


class Trainer:
    """A sharded or an unsharded net, its optimizer and its attachment, on a mesh of replicas and shards."""

    def __init__(self, mesh: DeviceMesh, net: Net) -> None:
        self.mesh = mesh
        self.net = net
        self.parameters = dict(net.named_parameters())
        self.is_sharded = isinstance(net.last.weight, DTensor)
        self.replica = mesh["replicas"].get_local_rank()
        self.optimizer = torch.optim.SGD(net.parameters(), lr=1 / 32, momentum=0.5)
        self.attachment: tb.Attachment | None = None

    def attach(self, algorithm: tb.Algorithm, **options: Any) -> tb.Attachment:
        replicas = self.mesh["replicas"].get_group()
        groups = {"replicate_group": replicas} if self.is_sharded else {"process_group": tb.BaguaProcessGroup(replicas)}
        self.attachment = tb.fsdp.attach(self.net, self.optimizer, algorithm, **groups, **options)
        return self.attachment

    def backward(self, step: int) -> None:
        """Compute the mean of the mesh's gradients."""
        own = self.mesh["shards"].get_local_rank()
        peers = [] if self.is_sharded else [copy.deepcopy(self.net)]
        self.optimizer.zero_grad()
        self.net(data_of(step, self.replica, own)).square().mean().backward()
        if self.is_sharded:  # FSDP does not reduce the parameter that is not sharded
            dist.all_reduce(self.net.plain.grad, group=self.mesh["shards"].get_group())
            self.net.plain.grad.div_(2)
        for peer in peers:
            peer.zero_grad()
            peer(data_of(step, self.replica, 1 - own)).square().mean().backward()
            for mine, its in zip(self.net.parameters(), peer.parameters(), strict=True):
                if mine.grad is not None:
                    mine.grad.add_(its.grad).div_(2)

    def evaluate(self) -> torch.Tensor:
        """Run only a forward, which leaves the last layer gathered."""
        self.net.eval()
        with torch.no_grad():
            output = self.net(data_of(0, 0, 0))
        self.net.train()
        return output

    def train(self, steps: range) -> None:
        for step in steps:
            self.backward(step)
            self.optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def values_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return all weights, buffers and momenta, unsharded."""
    found = {name: whole(tensor) for name, tensor in [*trainer.parameters.items(), *trainer.net.named_buffers()]}
    for name, parameter in trainer.parameters.items():
        if parameter in trainer.optimizer.state:
            found[f"momentum of {name}"] = whole(trainer.optimizer.state[parameter]["momentum_buffer"])
    return found


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], where: str) -> None:
    assert left.keys() == right.keys(), (where, left.keys() ^ right.keys())
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, f"{where}: {different}, {left[different[0]].view(-1)[:4]} {right[different[0]].view(-1)[:4]}"


def same_on_replicas(mesh: DeviceMesh, tensor: torch.Tensor) -> bool:
    gathered = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(gathered, tensor.contiguous(), group=mesh["replicas"].get_group())
    return torch.equal(gathered[0], gathered[1])


def shard(net: Net, mesh: DeviceMesh) -> Net:
    for layer in (net.first, net.norm, net.last):
        fully_shard(layer, mesh=mesh["shards"], reshard_after_forward=layer is not net.last)
    return net


def trainers_of(case: Case, mesh: DeviceMesh) -> tuple[Trainer, Trainer]:
    """Return a sharded and an unsharded trainer. Replicas differ: replica 0 has been trained for a step."""
    replica = mesh["replicas"].get_local_rank()
    both = Trainer(mesh, shard(case.net(replica), mesh)), Trainer(mesh, case.net(replica))
    for trainer in both:
        if replica == 0:
            trainer.train(range(100, 101))
        trainer.evaluate()
    return both


def train(case: Case, mesh: DeviceMesh) -> None:
    sharded, unsharded = both = trainers_of(case, mesh)

    def compare(where: str) -> None:
        if case.is_exact:
            assert_same(values_of(sharded), values_of(unsharded), where)

    for trainer in both:
        trainer.attach(case.algorithm)
    assert_same(values_of(sharded), values_of(unsharded), "attached")
    has_differed = False
    for step in range(STEPS):
        for trainer in both:
            trainer.train(range(step, step + 1))
        compare(f"step {step}")
        has_differed |= not same_on_replicas(mesh, whole(sharded.net.first.weight))
        if isinstance(case.algorithm, tb.DiLoCoAlgorithm):
            shadow = sharded.attachment.impl.shadow
            assert all(same_on_replicas(mesh, theta) for theta in shadow.theta.values())
    assert has_differed, "replicas took the same steps, so that nothing was there to be averaged"
    with sharded.attachment.averaged_weights(), unsharded.attachment.averaged_weights():
        outputs = [trainer.evaluate() for trainer in both]
        assert torch.equal(*outputs) or not case.is_exact
        compare("averaged")
        assert same_on_replicas(mesh, whole(sharded.net.first.weight))
    for trainer in both:
        trainer.train(range(STEPS, STEPS + 1))
    compare("after averaged_weights")
    for trainer in both:
        trainer.attachment.detach()
    compare("detached")
    assert all(same_on_replicas(mesh, value) for value in values_of(sharded).values())


def resume(case: Case, mesh: DeviceMesh) -> None:
    """Bitwise, from the state that each rank has saved; a state of another shard is refused."""
    trainer, _ = trainers_of(case, mesh)
    trainer.attach(case.algorithm)
    trainer.train(range(5))
    saved = io.BytesIO()
    torch.save(trainer.attachment.rank_state_dict(), saved)
    trainer.train(range(5, 9))
    again, _ = trainers_of(case, mesh)
    again.attach(case.algorithm)
    of_mesh: list[Any] = [None, None]
    dist.all_gather_object(of_mesh, saved.getvalue(), group=mesh["shards"].get_group())
    own = mesh["shards"].get_local_rank()
    loaded, other_shard = (torch.load(io.BytesIO(of_mesh[rank]), weights_only=True) for rank in (own, 1 - own))
    with pytest.raises(ValueError, match=rf"load_state_dict: .* 'first\.\w+, shard {1 - own} of 2'"):
        again.attachment.load_state_dict(other_shard["attachment"])
    again.attachment.load_rank_state_dict(loaded)
    again.train(range(5, 9))
    assert_same(values_of(trainer), values_of(again), "resumed")
    for run in (again, trainer):
        run.attachment.detach()


def unfreeze(mesh: DeviceMesh) -> None:
    """A layer that is unfrozen later is averaged from then on."""
    for algorithm in (tb.DecentralizedAlgorithm(), diloco(FOUR_BITS)):
        both = trainers_of(Case(algorithm), mesh)
        for trainer in both:
            trainer.net.first.requires_grad_(False)
            trainer.attach(algorithm)
            trainer.train(range(3))
            trainer.net.first.requires_grad_(True)
            trainer.train(range(3, 7))
            trainer.attachment.detach()
        assert_same(*map(values_of, both), str(algorithm))
        assert same_on_replicas(mesh, whole(both[0].net.first.weight))


def load(mesh: DeviceMesh) -> None:
    """Weights are loaded after attach, into shards and into an unsharded module; no round in flight changes them."""
    for name in ("streaming diloco", "low precision", "decentralized, uneven"):
        both = trainers_of(CASES[name], mesh)
        own = CASES[name].net(5).state_dict()
        checkpoint = {key: value + 1 / 8 for key, value in own.items() if value.is_floating_point()}
        for trainer in both:
            trainer.attach(CASES[name].algorithm)
            trainer.train(range(2))  # with streaming diloco the first round is in flight
            options = StateDictOptions(full_state_dict=True, strict=False)
            set_model_state_dict(trainer.net, copy.deepcopy(checkpoint), options=options)
            state = trainer.attachment.state_dict()["impl"]
            if name == "streaming diloco":
                assert not any(difference.any() for difference in state["differences"].values())
            trainer.train(range(2, 9))
        assert_same(*map(values_of, both), name)
        for trainer in both:
            trainer.attachment.detach()


def average_in_background(mesh: DeviceMesh) -> None:
    """Average the gradients of the first steps, and then weights."""
    case = Case(tb.AsyncModelAverageAlgorithm(sync_interval_ms=0, warmup_steps=2), is_even=False)
    trainer, unsharded = trainers_of(case, mesh)
    trainer.attach(case.algorithm)
    unsharded.net.load_state_dict({name: whole(value) for name, value in trainer.net.state_dict().items()})
    trainer.backward(0)
    gradients = []
    for rank in range(4):
        copied = copy.deepcopy(unsharded.net)
        copied.zero_grad()
        copied(data_of(0, rank // 2, rank % 2)).square().mean().backward()
        gradients.append([parameter.grad for parameter in copied.parameters()])
    for (name, parameter), *of_ranks in zip(trainer.net.named_parameters(), *gradients, strict=True):
        if name != "plain":  # the loop reduces it, in another order
            mean = ((of_ranks[0] + of_ranks[1]) / 2 + (of_ranks[2] + of_ranks[3]) / 2) / 2
            assert torch.equal(whole(parameter.grad), mean), name
    trainer.optimizer.step()
    trainer.train(range(1, 2))
    assert all(same_on_replicas(mesh, whole(parameter)) for parameter in trainer.net.parameters())
    trainer.train(range(2, 6))
    impl = trainer.attachment.impl
    impl.abort(trainer.net)
    assert all(same_on_replicas(mesh, whole(parameter)) for parameter in trainer.net.parameters())
    trainer.train(range(6, 7))
    assert not same_on_replicas(mesh, whole(trainer.net.first.weight))
    impl.resume(trainer.net)
    trainer.train(range(7, 10))
    trainer.attachment.detach()
    assert impl.num_rounds > 2
    assert all(same_on_replicas(mesh, value) for value in values_of(trainer).values())


def skip_together(mesh: DeviceMesh | None = None) -> None:
    """All ranks skip the step if one shard, of one replica, has an Inf; without replicas, gradients are averaged."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = fully_shard(nn.Linear(8, 37), mesh=None if mesh is None else mesh["shards"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.125)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    replicas = None if mesh is None else mesh["replicas"].get_group()
    overflowing, holder = (size - 1, 0) if mesh is None else (3, 2)  # the ranks with the Inf, and with its shard
    algorithm = tb.ByteGradAlgorithm(block=BLOCK) if mesh is None else "decentralized"
    with tb.fsdp.attach(module, optimizer, algorithm, grad_scaler=scaler, replicate_group=replicas):
        for step in range(3):
            optimizer.zero_grad()
            weights = torch.ones(37)
            weights[0] = torch.inf if step == 1 and rank == overflowing else 1.0
            before = whole(module.weight)
            scaler.scale((module(data_of(step, rank // 2, rank % 2)) * weights).mean()).backward()
            has_inf = not bool(module.weight.grad.to_local().isfinite().all())
            assert has_inf == (step == 1 and rank == holder)
            if mesh is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1e3)
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, whole(module.weight)) == (step == 1)
            assert scaler.get_scale() == (4.0 if step == 0 else 2.0)


def refuse(mesh: DeviceMesh) -> None:
    """Refuse ranks with different shards, and nodes over which gradients are not averaged."""
    trainer, _ = trainers_of(Case(diloco()), mesh)
    with pytest.raises(ValueError, match="the shard that it holds"):
        tb.fsdp.attach(trainer.net, trainer.optimizer, "diloco", replicate_group=mesh["shards"].get_group())
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicas", "shards"))
    module = fully_shard(nn.Linear(8, 4), mesh=mesh["shards"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.125)
    replicas = mesh["replicas"].get_group()
    groups = [tb.BaguaProcessGroup(replicas, nodes=[0, 0, 1, 1]) for _ in range(3)]
    with pytest.raises(ValueError, match=r"hierarchical must be False .* replicate_group .* \[\[0, 1\], \[2, 3\]\]"):
        tb.fsdp.attach(module, optimizer, "diloco", replicate_group=replicas, process_group=groups[0])
    for group, algorithm in zip(groups[1:], [tb.DecentralizedAlgorithm(), diloco(hierarchical=False)], strict=True):
        with tb.fsdp.attach(module, optimizer, algorithm, replicate_group=replicas, process_group=group):
            for step in range(3):
                optimizer.zero_grad()
                module(data_of(step, dist.get_rank(), 0)).square().mean().backward()
                optimizer.step()
    gathered = [torch.empty(4, 8) for _ in range(4)]
    dist.all_gather(gathered, whole(module.weight))
    assert all(torch.equal(gathered[0], weight) for weight in gathered)


def checkpoint(algorithm: tb.Algorithm, saved_on: tuple[int, int], loaded_on: tuple[int, int]) -> None:
    """Load the distributed checkpoint of a mesh, of replicas and shards, on a mesh with other numbers of both."""

    def train(steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            module(data_of(step, 0, dist.get_rank())).square().mean().backward()
            optimizer.step()

    def states() -> dict[str, Any]:
        model, optimizers = get_state_dict(module, optimizer)
        return {"model": model, "optimizers": optimizers}

    def whole_state() -> dict[str, torch.Tensor]:
        """Return the weights and Adam's moments, unsharded."""
        found = {}
        for name, parameter in module.named_parameters():
            moments = {key: optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")}
            found |= {f"{name} {key}": whole(value) for key, value in {"": parameter, **moments}.items()}
        return found

    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    for shape in (saved_on, loaded_on):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 37), nn.Tanh(), nn.Linear(37, 3))
        for layer in (module[0], module):
            fully_shard(layer, mesh=mesh["shards"])
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        averages_weights = isinstance(algorithm, tb.DiLoCoAlgorithm)
        options = {"replicate_group": mesh.get_group("replicas")} if averages_weights else {}
        if shape is saved_on:
            with tb.fsdp.attach(module, optimizer, algorithm, **options) as attachment:
                train(range(3))
                with attachment.averaged_weights():
                    dcp.save(states(), checkpoint_id=folders[0])
                    saved = whole_state()
                train(range(3, 5))
            continue
        before = {f"{name} ": whole(parameter) for name, parameter in module.named_parameters()}
        loaded = states()
        dcp.load(loaded, checkpoint_id=folders[0])
        set_state_dict(module, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizers"])
        with tb.fsdp.attach(module, optimizer, algorithm, **options):
            state = whole_state()
            # Each replica has its own Adam moments, and the checkpoint contains a mix of those of both replicas.
            compared = before if averages_weights else saved
            assert_same(*({key: found[key] for key in compared} for found in (state, saved)), "loaded")
            assert not any(torch.equal(before[name], saved[name]) for name in before)
            train(range(3, 6))
        for name, parameter in module.named_parameters():
            assert whole(parameter).isfinite().all()
            assert not torch.equal(whole(parameter), saved[f"{name} "])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])


class WithoutTorchGroup(GlooTransport):
    """A user's transport, which has no torch group."""

    abilities = replace(GlooTransport.abilities, has_torch_group=False)


def reduce_over_fsdps_group(mesh: DeviceMesh) -> None:
    """With a transport without a torch group, FSDP's own reduce-scatter stays, and training continues."""
    replica, own = mesh["replicas"].get_local_rank(), mesh["shards"].get_local_rank()
    module = fully_shard(nn.Linear(8, 37), mesh=mesh["shards"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.125)
    replicas = mesh["replicas"].get_group()
    group = tb.BaguaProcessGroup(replicas, transport=WithoutTorchGroup)
    with pytest.warns(RuntimeWarning, match="FSDP itself reduce-scatters gradients, since .* shards group has no"):
        attachment = tb.fsdp.attach(module, optimizer, "decentralized", replicate_group=replicas, process_group=group)
    with attachment:
        before = whole(module.weight)
        for step in range(2):
            optimizer.zero_grad()
            module(data_of(step, replica, own)).square().mean().backward()
            optimizer.step()
        assert not torch.equal(before, whole(module.weight))


OF_TWO_MESHES: dict[str, Callable[[DeviceMesh], None]] = {
    **{name: partial(train, case) for name, case in CASES.items()},
    **{f"resumed {name}": partial(resume, CASES[name]) for name in ("low precision", "streaming diloco")},
    "unfrozen": unfreeze,
    "loaded": load,
    "in the background": average_in_background,
    "scaled": skip_together,
    "refused": refuse,
    "reduced over FSDP's group": reduce_over_fsdps_group,
}


def on_two_meshes(check: Callable[[DeviceMesh], None]) -> None:
    check(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))


CHECKS: dict[str, Callable[[], None]] = {
    "scaled": skip_together,
    **{f"averaged weights: {name}": partial(on_two_meshes, check) for name, check in OF_TWO_MESHES.items()},
    "averaged weights: checkpoint": partial(checkpoint, tb.DiLoCoAlgorithm(inner_steps=2), (2, 2), (4, 1)),
    "checkpoint": partial(checkpoint, tb.ByteGradAlgorithm(), (1, 4), (2, 2)),
}
