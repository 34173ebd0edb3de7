"""DistributedDataParallel around an attached module: found when it calls, or by a search if a reducer may exist."""

import copy
import gc
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from averaging import RARELY, Normed, alone, batches
from ranks import run_ranks
from torchbagua.training import outer_ddps
from training import build


@pytest.mark.parametrize("is_ddp", [True, False])
@pytest.mark.parametrize("name", RARELY)
def test_attach_and_the_first_step_do_not_search(name: str, is_ddp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search takes tenths of a second if a million objects exist."""
    model = build(Normed)
    num_searches = 0

    def search(*objects: object) -> list[Any]:
        nonlocal num_searches
        num_searches += 1
        return []

    monkeypatch.setattr(outer_ddps, "gc", SimpleNamespace(get_referrers=search, collect=search))

    def body(group: dist.ProcessGroup) -> None:
        module = copy.deepcopy(model)
        called = DistributedDataParallel(module, process_group=group) if is_ddp else module
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01)
        with tb.attach(called, optimizer, RARELY[name], process_group=tb.BaguaProcessGroup(group)):
            for _ in range(2):
                loss = called(batches(group.rank())()).square().sum()
                loss.backward()
                optimizer.step()

    run_ranks(2, body)
    assert num_searches == 0


@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=str,
)
@pytest.mark.parametrize("is_later", [False, True])
def test_another_ddp_around_the_same_module_is_silent(options: dict[str, Any], is_later: bool) -> None:
    """From its first forward on, no matter when it was created."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> None:
        module, twin = copy.deepcopy(model), copy.deepcopy(model)
        first = DistributedDataParallel(module, process_group=group)
        second = None if is_later else DistributedDataParallel(module, process_group=group, **options)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01)
        data = batches(group.rank())

        def step(ddp: nn.Module) -> None:
            batch = data()
            twin.load_state_dict(module.state_dict())
            for called in (ddp, twin):
                called.zero_grad()
                called(batch).square().sum().backward()
            for own, expected in zip(module.parameters(), twin.parameters(), strict=True):
                assert own.grad is expected.grad is None or torch.equal(own.grad, expected.grad)
            optimizer.step()

        with tb.attach(first, optimizer, RARELY["decentralized"]):
            step(first)
            if second is None:
                second = DistributedDataParallel(module, process_group=group, **options)
            step(second)
            alone(group, lambda: step(second))
        assert second.require_backward_grad_sync
        assert second.require_forward_param_sync

    run_ranks(2, body)


def test_another_ddp_that_trains_more_is_refused_when_it_calls() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = nn.Linear(3, 3)
        ddp = DistributedDataParallel(module, process_group=group)
        larger = DistributedDataParallel(nn.Sequential(module, nn.Linear(3, 3)), process_group=group)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        with tb.attach(ddp, optimizer, RARELY["decentralized"]):
            with pytest.raises(ValueError, match="averages gradients of 2 other parameters too"):
                larger(torch.ones(1, 3))
            ddp(torch.ones(1, 3)).sum().backward()
            optimizer.step()

    run_ranks(2, body)


def test_a_module_that_is_wrapped_after_its_first_step() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(module.parameters())
        with tb.attach(module, optimizer, RARELY["decentralized"], process_group=tb.BaguaProcessGroup(group)):
            module(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            ddp = DistributedDataParallel(module, process_group=group)
            with pytest.raises(RuntimeError, match="Linear was wrapped in DistributedDataParallel after attach"):
                ddp(torch.ones(1, 3))

    run_ranks(2, body)


def test_a_ddp_around_a_forward_without_hooks_is_found_by_a_search() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(module.parameters())
        with tb.attach(module, optimizer, RARELY["decentralized"], process_group=tb.BaguaProcessGroup(group)):
            ddp = DistributedDataParallel(module, process_group=group)
            module.forward(torch.ones(1, 3)).sum().backward()
            with pytest.raises(RuntimeError, match="Linear was wrapped in DistributedDataParallel after attach"):
                optimizer.step()
            del ddp

    run_ranks(2, body)


def test_a_ddp_around_one_of_two_modules_whose_forward_calls_no_hooks() -> None:
    def body(group: dist.ProcessGroup) -> None:
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()])
        with tb.attach([first, second], optimizer, RARELY["decentralized"], process_group=tb.BaguaProcessGroup(group)):
            ddp = DistributedDataParallel(second, process_group=group)
            second.forward(first(torch.ones(1, 3))).sum().backward()
            with pytest.raises(RuntimeError, match="Linear was wrapped in DistributedDataParallel after attach"):
                optimizer.step()
            del ddp

    run_ranks(2, body)


def test_a_module_in_an_attached_ddp_can_be_pickled_and_copied() -> None:
    def body(group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(nn.Linear(3, 3), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        with tb.attach(ddp, optimizer, RARELY["decentralized"]):
            pickled = pickle.dumps(ddp.module)
            assert b"torchbagua.outer" not in pickled
            for copied in (pickle.loads(pickled), copy.deepcopy(ddp.module)):
                assert torch.equal(copied(torch.ones(1, 3)), ddp.module(torch.ones(1, 3)))

    run_ranks(1, body)


def test_modules_with_and_without_a_reducer() -> None:
    """Reducers own the nodes that accumulate gradients. This is not documented; torch 2.13 does it."""

    def body(group: dist.ProcessGroup) -> None:
        module = build(Normed)
        module(torch.randn(4, 10)).sum().backward()
        assert not outer_ddps._may_have_reducer(module)
        container = nn.Sequential(module)
        ddp = DistributedDataParallel(container, process_group=group)
        assert outer_ddps._may_have_reducer(module)
        assert outer_ddps.ddps_around([module]) == [ddp]
        ddp.itself = ddp
        del ddp
        assert outer_ddps.ddps_around([module]) == []

    gc.disable()
    try:
        run_ranks(1, body)
    finally:
        gc.enable()
