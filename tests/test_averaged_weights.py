"""Which weights are averaged: of any dtype, tied, unfrozen, frozen and replaced while training; buffers too."""

import copy
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from averaging import ALGORITHMS, EVERY, Normed, Trainer, Weights, assert_same_weights, train, weights_of
from caught import torchbagua_warnings
from ranks import run_ranks
from training import Tower, build

MODEL = build(Normed)


def all_parameters(module: nn.Module) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Tied(nn.Module):
    """Tied weights, one that is not contiguous, some of several dtypes, and a buffer that each forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 10)
        self.out = nn.Linear(10, 11, bias=False)
        self.out.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(11, 3).t())
        self.tower = Tower((11, 7, 5, 1), DTYPES)
        self.register_buffer("average", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out = self.out(self.embedding(tokens)) * self.scale.sum(0)
        self.average = 0.9 * self.average + 0.1 * out.detach().mean()
        return out.mean() + self.tower(out, 0).mean()


@EVERY
def test_references_to_parameters_stay_valid_and_buffers_are_found_by_name(name: str) -> None:
    """Weights of all dtypes are averaged, in place."""
    model = build(Tied)

    def body(group: dist.ProcessGroup) -> Weights:
        module = copy.deepcopy(model)
        ddp = DistributedDataParallel(module, process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        before = {key: (tensor.data_ptr(), tensor.stride()) for key, tensor in module.named_parameters()}
        with tb.attach(ddp, optimizer, ALGORITHMS[name]):
            for _ in range(3):
                optimizer.zero_grad()
                ddp(torch.arange(4) + group.rank()).backward()
                optimizer.step()
        assert {key: (tensor.data_ptr(), tensor.stride()) for key, tensor in module.named_parameters()} == before
        assert module.out.weight is module.embedding.weight
        return weights_of(module)

    first, second = run_ranks(2, body)
    assert_same_weights([first, second])
    assert not torch.equal(first["embedding.weight"], model.embedding.weight)
    assert first["average"] != 0
    assert {tensor.dtype for tensor in first.values()} == {*DTYPES}


@EVERY
def test_layers_that_are_unfrozen_frozen_and_replaced(name: str) -> None:
    """They are averaged from then on, or still: they differ between ranks by then."""

    def body(group: dist.ProcessGroup) -> Weights:
        trainer = Trainer(group, MODEL, lr=0.01)
        module = trainer.ddp = trainer.module
        own = tb.BaguaProcessGroup(group)
        trainer.optimizer.add_param_group({"params": [*module.frozen.parameters()]})
        with tb.attach(module, trainer.optimizer, ALGORITHMS[name], process_group=own) as attachment:
            trainer.step()
            attachment.load_state_dict(attachment.state_dict())  # determines what is averaged until the next step only
            trainer.step()
            module.frozen.requires_grad_(True)
            trainer.step()
            module.first.requires_grad_(False)
            trainer.step()
            module.last = nn.Linear(47, 1)
            nn.init.constant_(module.last.weight, group.rank())
            trainer.optimizer.add_param_group({"params": [*module.last.parameters()]})
            for _ in range(2):
                trainer.step()
            names = {tensor.name for bucket in attachment.runner.buckets for tensor in bucket.tensors}
            assert names >= all_parameters(module).keys()
        return all_parameters(module)

    weights = run_ranks(2, body)
    assert_same_weights(weights)
    assert not torch.equal(weights[0]["frozen.weight"], MODEL.frozen.weight)


@pytest.mark.parametrize("name", ["all", "low precision", "diloco", "async"])
def test_running_variances_stay_positive(name: str) -> None:
    """One rank sees a batch of large values; its variance then decays while the mean of the ranks is in flight."""
    model = build(lambda: nn.Sequential(nn.BatchNorm1d(2)))

    def body(group: dist.ProcessGroup) -> tuple[float, float]:
        module = copy.deepcopy(model)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        smallest, largest = torch.inf, 0.0
        own = tb.BaguaProcessGroup(group)
        with tb.attach(module, optimizer, ALGORITHMS[name], process_group=own) as attachment:
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
                smallest = min(smallest, module[0].running_var.min().item())
                largest = max(largest, module[0].running_var.max().item())
        return min(smallest, module[0].running_var.min().item()), largest

    results = run_ranks(4, body)  # a mean of two is never small enough
    assert all(smallest > 0 for smallest, _ in results)
    assert results[0][1] > 100


def test_buffers_are_not_averaged_with_average_buffers_false() -> None:
    def body(group: dist.ProcessGroup) -> Weights:
        return train(group, MODEL, tb.DecentralizedAlgorithm(average_buffers=False), num_steps=2).final

    first, second = run_ranks(2, body)
    assert torch.equal(first["last.weight"], second["last.weight"])
    assert not torch.equal(first["norm.running_mean"], second["norm.running_mean"])


def test_ranks_that_unfreeze_different_layers() -> None:
    """The layers have the same sizes; only their names distinguish them."""
    model = build(lambda: nn.Sequential(*[nn.Linear(10, 10) for _ in range(3)]))
    model[:2].requires_grad_(False)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model, lr=0.01)
        attachment = tb.attach(trainer.ddp, trainer.optimizer, ALGORITHMS["all"])
        trainer.step()
        trainer.module[group.rank()].requires_grad_(True)

        def train() -> None:
            with attachment:
                for _ in range(3):
                    trainer.step()

        with pytest.raises(tb.CommunicationError, match=r"out of step .* the fingerprint of the tensors to average"):
            train()

    with torchbagua_warnings():
        run_ranks(2, body)


def grow_buffer(module: nn.Module) -> None:
    module.norm.running_mean = torch.zeros(302)
    module.norm.forward = lambda x: x  # it could not use this buffer


def replace_by_frozen(module: nn.Module) -> None:
    """The new parameter would not be averaged, though its initial values differ between ranks."""
    module.last.weight = nn.Parameter(module.last.weight.detach().clone(), requires_grad=False)


@pytest.mark.parametrize("name", ["low precision", "async"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (grow_buffer, r"buffer norm.running_mean must keep the shape \[301\] .*, got \[302\]; detach"),
        (replace_by_frozen, r"parameter last\.weight was averaged, and has been replaced by a"),
    ],
)
def test_changes_that_cannot_be_averaged_are_named(
    name: str, change: Callable[[nn.Module], None], message: str
) -> None:
    def body(group: dist.ProcessGroup) -> str:
        trainer = Trainer(group, MODEL, lr=0.01)
        trainer.ddp = trainer.module.eval()
        own = tb.BaguaProcessGroup(group)
        try:
            with tb.attach(trainer.module, trainer.optimizer, ALGORITHMS[name], process_group=own):
                trainer.step()
                change(trainer.module)
                for _ in range(3):
                    trainer.step()
        except RuntimeError as error:
            return str(error)
        return ""

    with torchbagua_warnings():
        errors = run_ranks(2, body)
    found = [re.search(message, error) for error in errors]
    # With asynchronous averaging, a rank may have left before the other one is asked for a snapshot.
    assert any(found) if name == "async" else all(found), errors


def test_a_frozen_layer_inserted_in_front_renames_the_other_layers() -> None:
    """No parameter is replaced: the averaged parameters still exist, under other names."""
    model = build(lambda: nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)))

    def body(group: dist.ProcessGroup) -> Weights:
        trainer = Trainer(group, model, lr=0.01)
        trainer.ddp = trainer.module
        own = tb.BaguaProcessGroup(group)
        with tb.attach(trainer.module, trainer.optimizer, ALGORITHMS["all"], process_group=own):
            trainer.step()
            trainer.module.insert(0, nn.Linear(10, 10).requires_grad_(False))
            trainer.step()
        return weights_of(trainer.module[1:])

    assert_same_weights(run_ranks(2, body))
