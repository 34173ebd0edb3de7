"""With a gradient algorithm `with_bagua` creates a DDP of a module, while the loop still calls the module."""

import copy
import io
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
import torchbagua.compat.bagua
from ranks import on_each_rank, run_ranks
from torchbagua.compat.bagua.data_parallel.bagua_distributed import BaguaDistributedDataParallel, buffers_option
from torchbagua.compat.bagua.process_groups import from_torch_group
from training import Branches, build

Weights = dict[str, torch.Tensor]


@pytest.mark.parametrize("algorithm", ["bytegrad", "gradient_allreduce"])
def test_it_trains_as_with_a_user_created_ddp(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", str(int(0.01 * 2**20)))
    model = build(Branches)

    def body(group: dist.ProcessGroup) -> tuple[Weights, Weights]:
        results = []
        for is_driven in (False, True):
            module = copy.deepcopy(model)
            optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
            called: nn.Module = module
            if is_driven:
                own = BaguaDistributedDataParallel(
                    module, optimizer, algorithm, from_torch_group(group), find_unused_parameters=True
                )
                attachment = own.attachment
            else:
                options = {"bucket_cap_mb": 0.01, "find_unused_parameters": True, "gradient_as_bucket_view": True}
                called = DistributedDataParallel(module, process_group=group, **options, **buffers_option(False))
                attachment = tb.attach(called, optimizer, algorithm, process_group=tb.BaguaProcessGroup(group))
            data = torch.Generator().manual_seed(group.rank())
            with attachment:
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


def gradients_of(module: nn.Module, rank: int) -> torch.Tensor:
    module.zero_grad()
    module(torch.full((1, 4), 1.0 + rank)).sum().backward()
    return module.weight.grad.clone()


@on_each_rank(2)
def test_a_copy_is_not_driven_and_detach_restores_the_module(group: dist.ProcessGroup) -> None:
    module, rank = nn.Linear(4, 2), group.rank()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    attributes = set(vars(module))
    for algorithm in ("bytegrad", "gradient_allreduce"):  # one after the other
        module.with_bagua(optimizer, algorithm, group)
        assert torch.equal(gradients_of(module, rank), torch.full((2, 4), 1.5))
        pickled = pickle.loads(pickle.dumps(module))
        saved = io.BytesIO()
        torch.save(module, saved)
        saved.seek(0)
        for copied in (copy.deepcopy(module), pickled, torch.load(saved, weights_only=False)):
            assert torch.equal(gradients_of(copied, rank), torch.full((2, 4), 1.0 + rank))
            assert copied.forward.__self__ is copied
        assert torch.equal(gradients_of(module, rank), torch.full((2, 4), 1.5))
        module.bagua_ddp.attachment.detach()
        assert set(vars(module)) == {*attributes, "bagua_ddp"}
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert torch.equal(gradients_of(module, rank), torch.full((2, 4), 1.0 + rank))
    module.with_bagua(optimizer, "decentralized", group)
    assert module.bagua_ddp.attachment.ddp is None  # a weight algorithm needs no DDP
    gradients_of(module, rank)
    optimizer.step()
    module.bagua_ddp.attachment.detach()


@on_each_rank(2)
def test_detach_restores_a_forward_set_on_the_module(group: dist.ProcessGroup) -> None:
    """The user has set it on the module, not on its class."""
    module = nn.Linear(4, 2)
    own = lambda x: 2 * nn.functional.linear(x, module.weight, module.bias)  # noqa: E731
    module.forward = own
    module.with_bagua(torch.optim.SGD(module.parameters(), lr=0.1), "gradient_allreduce", group)
    assert torch.equal(gradients_of(module, group.rank()), torch.full((2, 4), 3.0))
    assert copy.deepcopy(module).forward is own
    module.bagua_ddp.attachment.detach()
    assert module.forward is own


def test_every_hook_is_called_once() -> None:
    """Hooks of the module, and of the DDP, where attach registers its own. `eval` of the module sets the DDP's mode."""
    calls: list[str] = []

    def body(group: dist.ProcessGroup) -> None:
        module = nn.Linear(4, 2)
        module.register_forward_pre_hook(lambda *_: calls.append("pre"))
        module.with_bagua(torch.optim.SGD(module.parameters(), lr=0.1), "bytegrad", group)
        ddp = module.bagua_ddp.attachment.ddp
        ddp.register_forward_pre_hook(lambda ddp, _: calls.append(f"pre of DDP, training={ddp.training}"))
        ddp.register_forward_hook(lambda *_: calls.append("post of DDP"))
        module.register_forward_hook(lambda *_: calls.append("post"))
        module(torch.ones(1, 4)).sum().backward()
        module.eval()
        module(torch.ones(1, 4))
        module.bagua_ddp.attachment.detach()

    run_ranks(1, body)
    expected = [["pre", f"pre of DDP, training={is_on}", "post of DDP", "post"] for is_on in (True, False)]
    assert calls == [*expected[0], *expected[1]]


@pytest.mark.parametrize("is_first", [False, True], ids=["after", "before"])
@on_each_rank(2)
def test_another_ddp_around_the_module_raises_when_called(group: dist.ProcessGroup, is_first: bool) -> None:
    module = nn.Linear(4, 2)
    ddp = DistributedDataParallel(module, process_group=group) if is_first else None
    module.with_bagua(torch.optim.SGD(module.parameters(), lr=0.1), "gradient_allreduce", group)
    ddp = ddp or DistributedDataParallel(nn.Sequential(module), process_group=group)
    with pytest.raises(RuntimeError, match="Linear was wrapped in DistributedDataParallel, which averages"):
        ddp(torch.ones(1, 4))
    assert torch.equal(gradients_of(module, group.rank()), torch.full((2, 4), 1.5))
    module.bagua_ddp.attachment.detach()
    ddp(torch.ones(1, 4)).sum().backward()


def test_the_module_can_be_called_within_the_forward_of_an_unrelated_ddp() -> None:
    """For example, a teacher that another model calls."""

    class Student(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + teachers[0](x)

    teachers: list[nn.Module] = []

    def body(group: dist.ProcessGroup) -> None:
        teacher = nn.Linear(4, 2)
        teacher.with_bagua(torch.optim.SGD(teacher.parameters(), lr=0.1), "bytegrad", group)
        teachers.append(teacher)
        student = DistributedDataParallel(Student(4, 2), process_group=group)
        student(torch.ones(1, 4)).sum().backward()
        assert teacher.weight.grad is not None
        teacher.bagua_ddp.attachment.detach()

    run_ranks(1, body)


@on_each_rank(2)
def test_a_failed_with_bagua_leaves_no_trace_and_can_be_retried(group: dist.ProcessGroup) -> None:
    module = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(KeyError, match="no algorithm is named 'bytegrid'"):
        module.with_bagua(optimizer, "bytegrid", group)
    with pytest.raises(TypeError, match="algorithm must be an Algorithm or a registered name, got 3"):
        module.with_bagua(optimizer, 3, group)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    try:
        module.with_bagua(other, "bytegrad", group)
    except ValueError as error:
        failure = error  # it references the DDP that was created
    assert "parameters that are not the module's" in str(failure)
    assert "forward" not in vars(module)
    module.with_bagua(optimizer, "gradient_allreduce", group)
    assert torch.equal(gradients_of(module, group.rank()), torch.full((2, 4), 1.5))
    module.bagua_ddp.attachment.detach()
