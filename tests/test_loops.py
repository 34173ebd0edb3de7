"""Training loops that use DDP and its module in their own ways: DDP stays silent, or an error says why not."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import _JoinConfig
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from averaging import RARELY, Normed, alone, batches
from ranks import on_each_rank, run_ranks
from training import build

NUM_MICRO_STEPS = 2
MODEL = build(Normed)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in RARELY),
        ("decentralized", {"find_unused_parameters": True}),
        ("decentralized", {"static_graph": True}),
    ],
    ids=str,
)
@on_each_rank(2)
def test_a_loop_that_sets_require_backward_grad_sync_itself(
    group: dist.ProcessGroup, name: str, options: dict[str, Any]
) -> None:
    """As nanoGPT does. DDP stays silent, and gradients are the rank's own, summed over its micro-steps."""
    ddp = DistributedDataParallel(copy.deepcopy(MODEL), process_group=group, **options)
    optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.01)
    twin, data = copy.deepcopy(MODEL), batches(group.rank())

    def steps(num_steps: int) -> None:
        for _ in range(num_steps):
            twin.load_state_dict(ddp.module.state_dict())
            twin.zero_grad()
            for micro_step in range(NUM_MICRO_STEPS):
                ddp.require_backward_grad_sync = micro_step == NUM_MICRO_STEPS - 1
                batch = data()
                for module in (ddp, twin):
                    (module(batch).square().sum() / NUM_MICRO_STEPS).backward()
            for own, expected in zip(ddp.module.parameters(), twin.parameters(), strict=True):
                assert own.grad is expected.grad is None or torch.equal(own.grad, expected.grad)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    with tb.attach(ddp, optimizer, RARELY[name]):
        steps(1)  # DDP learns a static graph in it, on all ranks
        alone(group, lambda: steps(2))
    assert ddp.require_backward_grad_sync
    ddp(data()).sum().backward()
    mean = ddp.module.last.weight.grad.clone()
    dist.all_reduce(mean, group=group)
    torch.testing.assert_close(ddp.module.last.weight.grad, mean / group.size())


@on_each_rank(2)
def test_a_loop_that_has_ddp_average_in_a_backward_without_a_forward(group: dist.ProcessGroup) -> None:
    """As accelerate's trigger_sync_in_backward does: gradients stay the rank's own."""
    ddp = DistributedDataParallel(copy.deepcopy(MODEL), process_group=group)
    twin, batch = copy.deepcopy(MODEL), batches(group.rank())()
    optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.01)

    def backward() -> None:
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
        ddp.reducer.prepare_for_backward([])
        loss.backward()

    with tb.attach(ddp, optimizer, RARELY["decentralized"]):
        loss = ddp(batch).square().sum()
        alone(group, backward)
        twin(batch).square().sum().backward()
        for own, expected in zip(ddp.module.parameters(), twin.parameters(), strict=True):
            assert own.grad is expected.grad is None or torch.equal(own.grad, expected.grad)


@on_each_rank(2)
def test_every_ddp_around_the_module_is_silent(group: dist.ProcessGroup, forwards_in_turn: None) -> None:
    """A model that was wrapped again is trained through the new DDP."""
    module = nn.Linear(10, 3)
    first, second = (DistributedDataParallel(module, process_group=group) for _ in range(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    data = batches(group.rank())

    def step() -> None:
        optimizer.zero_grad()
        second(data()).square().sum().backward()
        optimizer.step()

    for attached in (first, module):
        with tb.attach(attached, optimizer, RARELY["decentralized"], process_group=group):
            step()
            alone(group, step)


def test_parameters_that_a_ddp_around_the_module_ignores_do_not_change(forwards_in_turn: None) -> None:
    def body(group: dist.ProcessGroup) -> list[float]:
        module = nn.Linear(3, 3)
        nn.init.constant_(module.bias, float(group.rank()))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
        ddp = DistributedDataParallel(module, process_group=group)
        optimizer = torch.optim.SGD([module.weight], lr=0.01)
        with tb.attach(module, optimizer, "decentralized", process_group=group):
            ddp(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return module.bias.tolist()

    assert run_ranks(2, body) == [[0.0] * 3, [1.0] * 3]


@on_each_rank(2)
def test_join_is_refused(group: dist.ProcessGroup) -> None:
    """At the first forward within Join, or at attach."""
    ddp = DistributedDataParallel(nn.Linear(3, 3), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with tb.attach(ddp, optimizer, "decentralized"):
        # As Join([ddp]) does, which needs a group in torch's registry.
        ddp._join_config = _JoinConfig(enable=True, throw_on_early_termination=False, is_first_joinable=True)
        with pytest.raises(RuntimeError, match=r"does not support .*Join"):
            ddp(torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"does not support .*Join"):
        tb.attach(ddp, optimizer, "decentralized")
