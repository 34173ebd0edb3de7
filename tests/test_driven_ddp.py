"""`attach(..., ddp_arguments=...)`: attach makes a DDP of a module, which the loop goes on calling."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from ranks import run_ranks
from training import Branches, build

Weights = dict[str, torch.Tensor]
OPTIONS = {"bucket_cap_mb": 0.01, "find_unused_parameters": True}


@pytest.mark.parametrize("algorithm", ["bytegrad", "gradient_allreduce"])
def test_it_trains_as_with_a_ddp_of_ones_own(algorithm: str) -> None:
    model = build(Branches)

    def body(group: dist.ProcessGroup) -> tuple[Weights, Weights]:
        results = []
        for is_driven in (False, True):
            module = copy.deepcopy(model)
            called = module if is_driven else DistributedDataParallel(module, process_group=group, **OPTIONS)
            optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
            data = torch.Generator().manual_seed(group.rank())
            arguments = {"process_group": tb.BaguaProcessGroup(group), "ddp_arguments": OPTIONS} if is_driven else {}
            with tb.attach(called, optimizer, algorithm, **arguments) as attachment:
                assert isinstance(attachment.ddp, DistributedDataParallel)
                for step in range(6):
                    with attachment.ddp.no_sync() if step % 2 == 0 else nullcontext():
                        x = torch.randn(6, 10, generator=data)
                        called(x, choice=step // 2 + group.rank()).square().sum().backward()
                    if step % 2 == 1:
                        optimizer.step()
                        optimizer.zero_grad()
            results.append({name: parameter.detach() for name, parameter in module.named_parameters()})
        return results[0], results[1]

    results = run_ranks(2, body)
    for own, driven in results:
        assert all(torch.equal(driven[name], weight) for name, weight in own.items())
        assert all(torch.equal(driven[name], weight) for name, weight in results[0][1].items())
    assert any(not torch.equal(weight, dict(model.named_parameters())[name]) for name, weight in results[0][1].items())


def test_a_copy_is_not_driven_and_detaching_leaves_nothing() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        own_group = tb.BaguaProcessGroup(group)

        def gradients_of(one: nn.Module) -> torch.Tensor:
            one.zero_grad()
            one(torch.full((1, 4), 1.0 + group.rank())).sum().backward()
            return one.weight.grad.clone()

        for algorithm in ("bytegrad", "gradient_allreduce"):  # one after the other
            with tb.attach(module, optimizer, algorithm, process_group=own_group, ddp_arguments={}) as attachment:
                assert torch.equal(gradients_of(module), torch.full((2, 4), 1.5))
                assert torch.equal(gradients_of(copy.deepcopy(module)), torch.full((2, 4), 1.0 + group.rank()))
            assert attachment.ddp is None
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
            assert torch.equal(gradients_of(module), torch.full((2, 4), 1.0 + group.rank()))
        with tb.attach(module, optimizer, "decentralized", process_group=own_group, ddp_arguments={}) as attachment:
            assert attachment.ddp is None  # it averages weights
            gradients_of(module)
            optimizer.step()

    run_ranks(2, body)


def test_refused() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = nn.Linear(4, 2)
        optimizer, own_group = torch.optim.SGD(module.parameters()), tb.BaguaProcessGroup(group)
        with pytest.raises(TypeError, match="ddp_arguments must be a mapping of names to values, got True"):
            tb.attach(module, optimizer, "bytegrad", process_group=own_group, ddp_arguments=True)
        with pytest.raises(ValueError, match=r"ddp_arguments has \['buckets', 'module'\], .*; allowed"):
            tb.attach(module, optimizer, "bytegrad", ddp_arguments={"buckets": 1, "module": module})
        ddp = DistributedDataParallel(module, process_group=group)
        with pytest.raises(ValueError, match="ddp_arguments is for a module without a DistributedDataParallel"):
            tb.attach(ddp, optimizer, "bytegrad", ddp_arguments={})
        with pytest.raises(ValueError, match="a DistributedDataParallel is around Linear already, and ddp_arguments"):
            tb.attach(module, optimizer, "bytegrad", ddp_arguments={})

    run_ranks(1, body)


def test_ranks_agree_in_the_values() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = nn.Linear(4, 2)
        arguments = {"broadcast_buffers": group.rank() == 0}
        with pytest.raises(ValueError, match=r"ddp_arguments.*'broadcast_buffers': True.*'broadcast_buffers': False"):
            tb.attach(
                module,
                torch.optim.SGD(module.parameters()),
                "bytegrad",
                process_group=tb.BaguaProcessGroup(group),
                ddp_arguments=arguments,
            )

    run_ranks(2, body)


def test_another_ddp_around_it_is_found_and_a_failed_attach_can_be_tried_again() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = nn.Linear(4, 2, dtype=torch.float64)
        optimizer, own_group = torch.optim.SGD(module.parameters(), lr=0.1), tb.BaguaProcessGroup(group)
        arguments = {"process_group": own_group, "ddp_arguments": {}}
        try:
            tb.attach(module, optimizer, "bytegrad", strict=True, **arguments)
        except ValueError:  # which holds the DDP that was made
            attachment = tb.attach(module, optimizer, "gradient_allreduce", **arguments)
        ddp = DistributedDataParallel(module, process_group=group)
        ddp(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        with pytest.raises(RuntimeError, match="Linear was wrapped in DistributedDataParallel after attach"):
            optimizer.step()
        del ddp
        attachment._end(failed=True)

    run_ranks(2, body)
