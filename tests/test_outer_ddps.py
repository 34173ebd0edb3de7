"""DistributedDataParallel around an attached module, or around a part of it: found when it calls."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from averaging import RARELY, Normed, batches
from ranks import gloo_group, run_ranks
from training import build

pytestmark = pytest.mark.usefixtures("forwards_in_turn")


OPTIONS: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
WRAPPED: dict[str, Callable[[nn.Module], list[nn.Module]]] = {
    "the module": lambda module: [module],
    "its parts": lambda module: [module.first, module.norm, module.last],
    "a container": lambda module: [nn.Sequential(module)],
    "another of its parts": lambda module: [nn.Sequential(module.first, module.norm), module.last],
}


@pytest.mark.parametrize(
    ("wrapped", "options", "is_later"),
    [
        ("the module", OPTIONS[0], False),
        ("the module", OPTIONS[2], True),
        ("its parts", OPTIONS[1], True),
        ("its parts", OPTIONS[2], True),
        ("a container", OPTIONS[2], False),
        ("another of its parts", OPTIONS[0], True),
        ("another of its parts", OPTIONS[1], False),
    ],
)
def test_a_module_whose_ddps_attach_was_not_given_trains_alone(
    wrapped: str, options: dict[str, Any], is_later: bool
) -> None:
    """Bitwise as without a DDP, from the first step on, no matter whether DDPs were created before or after attach."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> None:
        module, alone = copy.deepcopy(model), copy.deepcopy(model)

        def wrap() -> list[DistributedDataParallel]:
            return [DistributedDataParallel(part, process_group=group, **options) for part in WRAPPED[wrapped](module)]

        def forward(batch: torch.Tensor) -> torch.Tensor:
            if len(ddps) == 1:
                return ddps[0](batch)
            hidden = functools.reduce(lambda x, ddp: ddp(x), ddps[:-1], batch)
            return ddps[-1](module.frozen(hidden.tanh()).tanh())

        ddps = [] if is_later else wrap()
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01)
        optimizer_alone = torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], lr=0.01)
        data = batches(group.rank())
        algorithm = tb.DecentralizedAlgorithm(communication_interval=100, final_average=False)
        with tb.attach(module, optimizer, algorithm, process_group=tb.BaguaProcessGroup(group)):
            if is_later:
                ddps = wrap()
            for _ in range(4):
                batch = data()
                for forward_one, stepped in ((forward, optimizer), (alone, optimizer_alone)):
                    stepped.zero_grad()
                    forward_one(batch).square().sum().backward()
                    stepped.step()
            assert module.state_dict().keys() == alone.state_dict().keys()
            for own, expected in zip(module.state_dict().values(), alone.state_dict().values(), strict=True):
                assert torch.equal(own, expected)
            assert not any(ddp.require_backward_grad_sync for ddp in ddps)
        assert all(ddp.require_backward_grad_sync and ddp.require_forward_param_sync for ddp in ddps)

    run_ranks(2, body)


def test_a_ddp_around_the_ddp_that_attach_was_given_is_silent() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = nn.Linear(3, 3)
        ddp = DistributedDataParallel(module, process_group=group)
        outer = DistributedDataParallel(nn.Sequential(ddp), process_group=group)
        optimizer = torch.optim.SGD(module.parameters())
        with tb.attach(ddp, optimizer, RARELY["decentralized"]):
            outer(torch.full((1, 3), 1.0 + group.rank())).sum().backward()
            assert torch.equal(module.weight.grad, torch.full((3, 3), 1.0 + group.rank()))
            assert not outer.require_backward_grad_sync

    run_ranks(2, body)


@pytest.mark.parametrize("way", ["the module", "the module in place", "a part"])
def test_a_ddp_around_a_compiled_module_is_silent(way: str) -> None:
    """It is found when the module is compiled, and removed hooks do not make torch compile the module again."""
    torch._dynamo.reset()
    num_graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    group = gloo_group(dist.HashStore(), 0, 1)
    module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    optimizer = torch.optim.SGD(module.parameters())
    wrapped: nn.Module = module
    if way == "the module":
        wrapped = torch.compile(module, backend=backend)  # type: ignore[assignment]
    elif way == "the module in place":
        module.forward = torch.compile(module.forward, backend=backend)  # type: ignore[method-assign]
    else:
        wrapped = torch.compile(module[1], backend=backend)  # type: ignore[assignment]
    ddp = DistributedDataParallel(wrapped, process_group=group)
    with tb.attach(module, optimizer, RARELY["decentralized"], process_group=tb.BaguaProcessGroup(group)):
        for step in range(3):
            ddp(torch.ones(1, 3)).sum().backward()
            assert not ddp.require_backward_grad_sync
            optimizer.step()
            if step == 0:
                num_graphs_at_first = num_graphs
        assert num_graphs == num_graphs_at_first > 0


# Refused when they call. Each returns the attached module, what is called in the first step, and the refused DDP.
Scene = tuple[nn.Module, nn.Module | None, nn.Module]


def of_a_part_that_is_called_late(group: dist.ProcessGroup) -> Scene:
    parts = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    return parts, parts[0], DistributedDataParallel(parts[1], process_group=group)


def around_a_ddp_that_was_found(group: dist.ProcessGroup) -> Scene:
    module = nn.Linear(3, 3)
    inner = nn.Sequential(DistributedDataParallel(module, process_group=group))
    outer = DistributedDataParallel(inner, process_group=group)
    return module, outer, outer


def ignoring_what_attach_has_made_equal(group: dist.ProcessGroup) -> Scene:
    container = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(container, ["0.1.bias"])
    return container[0], None, DistributedDataParallel(container, process_group=group)


def over_other_ranks_than_the_default_group(group: dist.ProcessGroup) -> Scene:
    """Tests have a default group of one rank."""
    module = nn.Linear(3, 3)
    return module, None, DistributedDataParallel(module, process_group=group)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (of_a_part_that_is_called_late, RuntimeError, "is called by it only after the first step"),
        (around_a_ddp_that_was_found, RuntimeError, "Sequential was wrapped in DistributedDataParallel after attach"),
        (ignoring_what_attach_has_made_equal, ValueError, r"ignores 0\.1\.bias, which attach did not know"),
        (
            over_other_ranks_than_the_default_group,
            ValueError,
            "process_group must have the ranks of the DistributedDataParallel around Linear: rank . of 2",
        ),
    ],
)
def test_a_ddp_that_is_refused(
    make: Callable[[dist.ProcessGroup], Scene], error: type[Exception], message: str
) -> None:
    def body(group: dist.ProcessGroup) -> None:
        module, first, refused = make(group)
        optimizer = torch.optim.SGD(module.parameters())
        own = None if make is over_other_ranks_than_the_default_group else tb.BaguaProcessGroup(group)
        with tb.attach(module, optimizer, RARELY["decentralized"], process_group=own):
            if first is not None:
                first(torch.ones(1, 3)).sum().backward()
                optimizer.step()
            for _ in range(2):
                with pytest.raises(error, match=message):
                    refused(torch.ones(1, 3))

    run_ranks(2, body)
