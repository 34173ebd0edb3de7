"""Which weights are averaged, and how they change: in place, in any dtype, frozen or unfrozen, buffers too."""

import copy
import re
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from averaging import ALGORITHMS, EVERY, SYNCHRONOUS, Normed, Trainer, Weights, assert_same_weights, train, weights_of
from ranks import leave_by_exception, run_ranks
from training import Tower, build


@EVERY
def test_references_to_parameters_stay_valid(name: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 10)
            self.out = nn.Linear(10, 11, bias=False)
            self.out.weight = self.embedding.weight
            self.scale = nn.Parameter(torch.ones(11, 3).t())  # not contiguous

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.embedding(tokens)) * self.scale.sum(0)

    model = build(Tied)

    def body(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        module = copy.deepcopy(model)
        ddp = DistributedDataParallel(module, process_group=group)
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
        before = {key: (tensor.data_ptr(), tensor.stride()) for key, tensor in module.state_dict().items()}
        tokens = torch.arange(4) + group.rank()
        with tb.attach(ddp, optimizer, ALGORITHMS[name]):
            for _ in range(3):
                optimizer.zero_grad()
                ddp(tokens).square().sum().backward()
                optimizer.step()
        after = {key: (tensor.data_ptr(), tensor.stride()) for key, tensor in module.state_dict().items()}
        assert after == before
        assert module.out.weight is module.embedding.weight
        assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in module.parameters()}
        return weights_of(module)

    first, second = run_ranks(2, body)
    assert_same_weights([first, second])
    assert not torch.equal(first["embedding.weight"], model.embedding.weight)


@EVERY
def test_mixed_dtypes(name: str) -> None:
    model = build(lambda: Tower(dtypes=(torch.float32, torch.bfloat16, torch.float16)))

    def body(group: dist.ProcessGroup) -> Any:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        with tb.attach(ddp, optimizer, ALGORITHMS[name]):
            for _ in range(3):
                optimizer.zero_grad()
                ddp(torch.randn(4, 10, generator=torch.Generator().manual_seed(group.rank())), 0).sum().backward()
                optimizer.step()
        return weights_of(ddp.module)

    weights = run_ranks(2, body)
    assert_same_weights(weights)
    assert {tensor.dtype for tensor in weights[0].values()} == {torch.float32, torch.bfloat16, torch.float16}


@EVERY
def test_parameters_unfrozen_during_training(name: str) -> None:
    """They are averaged from then on, as if the buckets had contained them from the start."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> Any:
        trainer = Trainer(group, model, lr=0.01)
        trainer.optimizer.add_param_group({"params": list(trainer.module.frozen.parameters())})
        with tb.attach(
            trainer.module, trainer.optimizer, ALGORITHMS[name], process_group=tb.BaguaProcessGroup(group)
        ) as attachment:
            trainer.ddp = trainer.module
            trainer.step()
            trainer.module.frozen.requires_grad_(True)
            for _ in range(3):
                trainer.step()
            names = {tensor.name for bucket in attachment.runner.buckets for tensor in bucket.tensors}
            assert {"frozen.weight", "frozen.bias"} <= names
        return weights_of(trainer.module)

    weights = run_ranks(2, body)
    assert_same_weights(weights)
    assert not torch.equal(weights[0]["frozen.weight"], model.frozen.weight)


@EVERY
def test_running_variances_stay_positive(name: str) -> None:
    """One rank sees a batch of large values; its variance then decays while the mean of the ranks is in flight."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x)

    model = build(Two)

    def body(group: dist.ProcessGroup) -> tuple[float, float]:
        module = copy.deepcopy(model)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        smallest, largest = torch.inf, 0.0
        group_of_module = tb.BaguaProcessGroup(group)
        with tb.attach(module, optimizer, ALGORITHMS[name], process_group=group_of_module) as attachment:
            impl: Any = attachment.impl if name == "async" else attachment.impl.rounds
            for step in range(12):
                optimizer.zero_grad()
                num_rounds, deadline_s = impl.num_rounds, time.monotonic() + 1
                for _ in range(4):
                    is_large = group.rank() == 0 and step % 4 == 0
                    x = torch.tensor([[1.0, 0.01], [-1.0, -0.01]]) * (30 if is_large else 0.1)
                    module(x).square().mean().backward()
                optimizer.step()
                while name == "async" and impl.num_rounds == num_rounds and time.monotonic() < deadline_s:
                    time.sleep(0.001)  # so that a round runs between two steps
                smallest = min(smallest, module.norm.running_var.min().item())
                largest = max(largest, module.norm.running_var.max().item())
        return min(smallest, module.norm.running_var.min().item()), largest

    results = run_ranks(4, body)
    assert all(smallest > 0 for smallest, _ in results)
    assert results[0][1] > 100


def test_buffers_are_not_averaged_with_average_buffers_false() -> None:
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> Any:
        return train(group, model, tb.DecentralizedAlgorithm(average_buffers=False)).final

    first, second = run_ranks(2, body)
    assert torch.equal(first["last.weight"], second["last.weight"])
    assert not torch.equal(first["norm.running_mean"], second["norm.running_mean"])


def all_parameters(module: nn.Module) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@EVERY
def test_a_layer_frozen_during_training(name: str) -> None:
    """It differs between ranks by then, and must nevertheless be equal in the end."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> Any:
        trainer = Trainer(group, model, lr=0.01)
        with tb.attach(trainer.ddp, trainer.optimizer, ALGORITHMS[name]):
            trainer.step()
            trainer.module.first.requires_grad_(False)
            for _ in range(3):
                trainer.step()
        return all_parameters(trainer.module)

    assert_same_weights(run_ranks(4, body))


@EVERY
def test_a_parameter_that_the_module_replaces(name: str) -> None:
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> Any:
        trainer = Trainer(group, model, lr=0.01)
        trainer.ddp = trainer.module
        bagua_group = tb.BaguaProcessGroup(group)
        with tb.attach(trainer.module, trainer.optimizer, ALGORITHMS[name], process_group=bagua_group):
            trainer.step()
            trainer.module.last = nn.Linear(47, 1)
            nn.init.constant_(trainer.module.last.weight, group.rank())
            trainer.optimizer.add_param_group({"params": trainer.module.last.parameters()})
            for _ in range(3):
                trainer.step()
        return all_parameters(trainer.module)

    assert_same_weights(run_ranks(2, body))


@EVERY
def test_generator_and_discriminator_that_freeze_each_other(name: str) -> None:
    """The usual loop: one network is frozen while the other's optimizer steps, which is when weights are read."""
    model = build(lambda: nn.ModuleList([nn.Linear(4, 10), nn.Linear(10, 1)]))

    def body(group: dist.ProcessGroup) -> Any:
        generator, discriminator = module = copy.deepcopy(model)
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in module]
        data = torch.Generator().manual_seed(group.rank())
        with tb.attach(module, optimizers, ALGORITHMS[name], process_group=tb.BaguaProcessGroup(group)):
            for _ in range(4):
                for frozen, trained, optimizer in zip(module, reversed(module), reversed(optimizers), strict=True):
                    frozen.requires_grad_(False)
                    trained.requires_grad_(True)
                    optimizer.zero_grad()
                    discriminator(generator(torch.randn(6, 4, generator=data))).square().sum().backward()
                    optimizer.step()
        return all_parameters(module)

    assert_same_weights(run_ranks(2, body))


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_ranks_that_unfreeze_different_layers(name: str) -> None:
    """The layers have the same sizes; only their names distinguish them."""
    model = build(lambda: nn.Sequential(*[nn.Linear(10, 10) for _ in range(3)]))
    model[:2].requires_grad_(False)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model, lr=0.01)
        attachment = tb.attach(trainer.ddp, trainer.optimizer, ALGORITHMS[name])
        trainer.step()
        trainer.module[group.rank()].requires_grad_(True)

        def train() -> None:
            with attachment:
                for _ in range(3):
                    trainer.step()

        with pytest.raises(tb.CommunicationError, match=r"out of step .* the fingerprint of the tensors to average"):
            train()

    run_ranks(2, body)


@EVERY
def test_a_buffer_that_the_module_replaces(name: str) -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(10, 1)
            self.register_buffer("average", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean()
            return self.layer(x)

    model = build(Average)

    def body(group: dist.ProcessGroup) -> Any:
        trainer = Trainer(group, model, lr=0.01)
        with tb.attach(trainer.ddp, trainer.optimizer, ALGORITHMS[name]):
            for _ in range(4):
                trainer.step()
        return weights_of(trainer.module)

    weights = run_ranks(2, body)
    assert_same_weights(weights)
    assert weights[0]["average"] != 0


@EVERY
def test_a_buffer_that_changes_its_shape_is_named(name: str) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(10, 1)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.zeros(len(self.seen) + 1)
            return self.layer(x)

    model = build(Growing)

    def body(group: dist.ProcessGroup) -> str:
        trainer = Trainer(group, model, lr=0.01)
        try:
            with tb.attach(trainer.ddp, trainer.optimizer, ALGORITHMS[name]):
                for _ in range(4):
                    trainer.step()
        except RuntimeError as error:
            return str(error)
        return ""

    errors = run_ranks(2, body)
    named = [re.search(r"buffer seen must keep the shape \[1\] .*, got \[\d\]; detach", error) for error in errors]
    # With asynchronous averaging, a rank may have left before the other one is asked for a snapshot.
    assert any(named) if name == "async" else all(named)


@EVERY
def test_a_parameter_replaced_by_a_frozen_parameter_is_named(name: str) -> None:
    """The new parameter would not be averaged, though its initial values differ between ranks."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model, lr=0.01)
        trainer.ddp = trainer.module
        bagua_group = tb.BaguaProcessGroup(group)
        attachment = tb.attach(trainer.module, trainer.optimizer, ALGORITHMS[name], process_group=bagua_group)
        trainer.step()
        last = trainer.module.last
        last.weight = nn.Parameter(last.weight.detach().clone(), requires_grad=False)
        with pytest.raises(RuntimeError, match=r"parameter last\.weight was averaged, and has been replaced by a"):
            trainer.step()
        leave_by_exception(attachment)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # asynchronous ranks warn that the other rank has left
        run_ranks(2, body)


def test_a_frozen_layer_inserted_in_front_renames_the_other_layers() -> None:
    """No parameter is replaced: the averaged parameters still exist, under other names."""
    model = build(lambda: nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)))

    def body(group: dist.ProcessGroup) -> Any:
        trainer = Trainer(group, model, lr=0.01)
        trainer.ddp = trainer.module
        bagua_group = tb.BaguaProcessGroup(group)
        with tb.attach(trainer.module, trainer.optimizer, SYNCHRONOUS["all"], process_group=bagua_group):
            trainer.step()
            trainer.module.insert(0, nn.Linear(10, 10).requires_grad_(False))
            trainer.step()
        return weights_of(trainer.module[1:])

    assert_same_weights(run_ranks(2, body))
