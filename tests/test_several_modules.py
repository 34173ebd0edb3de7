"""attach with a list of modules that one optimizer trains: DDPs, for weight algorithms also plain modules."""

import copy
import io
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import torchbagua as tb
from averaging import RARELY
from caught import torchbagua_warnings
from ranks import leave_by_exception, on_each_rank, run_ranks
from torchbagua.observe.events import CommEvent
from training import build

NUM_STEPS = 5
Modules = Sequence[nn.Module]
Called = nn.Module | Modules


def network() -> nn.Sequential:
    """As a sequential module its parameters have the names that they have in a list of its two parts."""
    return nn.Sequential(nn.Sequential(nn.Linear(10, 67), nn.BatchNorm1d(67), nn.Tanh()), nn.Linear(67, 3))


NETWORK = build(network)


GRADIENTS: dict[str, tb.Algorithm | None] = {
    "bytegrad": tb.ByteGradAlgorithm(),
    "4 bits": tb.CompressedAllReduceAlgorithm(error_feedback=True),
    "topk": tb.TopKAlgorithm(0.2, warmup_steps=4),
    "powersgd": tb.PowerSGDAlgorithm(rank=1, start_step=2, min_rate=1),
    "qadam, 1 bit": None,
}
WEIGHTS: dict[str, tb.Algorithm | None] = {
    "decentralized": tb.DecentralizedAlgorithm(),
    "low precision": tb.LowPrecisionDecentralizedAlgorithm(),
    "diloco": tb.DiLoCoAlgorithm(4, fragments=2, delay=1),
    "async": tb.AsyncModelAverageAlgorithm(sync_interval_ms=20_000, warmup_steps=3),
}


def make(name: str, called: Called) -> tuple[torch.optim.Optimizer, tb.Algorithm]:
    """Return an optimizer of these modules' parameters, and the algorithm of this name."""
    algorithm = (GRADIENTS | WEIGHTS)[name]
    if algorithm is not None:
        return torch.optim.SGD(parameters_of(called), lr=0.05), algorithm
    adam = tb.QAdamOptimizer(parameters_of(called), lr=1e-2, warmup_steps=2)
    return adam, tb.QAdamAlgorithm(adam, compression="sign1bit", error_feedback=True)


def assert_equal(first: Any, second: Any) -> None:
    """Compare nested states bitwise."""
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert_equal(value, second[key])
    elif isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif not isinstance(first, str):
        assert first == second


def train(called: Called, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup, steps: range) -> None:
    """Take these steps, each with one backward through all modules."""
    modules = called if isinstance(called, list) else [called]
    for step in steps:
        optimizer.zero_grad()
        hidden = torch.randn(6, 10, generator=torch.Generator().manual_seed(100 * step + group.rank()))
        for module in modules:
            hidden = module(hidden)
        hidden.square().sum().backward()
        optimizer.step()


def parameters_of(called: Called) -> list[nn.Parameter]:
    modules = called if isinstance(called, list) else [called]
    return [parameter for module in modules for parameter in module.parameters()]


def run(
    group: dist.ProcessGroup, name: str, called: Called, resumed: Called | None = None
) -> tuple[dict[str, Any], list[torch.Tensor], list[CommEvent]]:
    """Train and return the rank's state and the final weights. Continue in other modules in the middle, if given."""
    optimizer, algorithm = make(name, called)
    recorder = tb.observe.Recorder()
    own = tb.BaguaProcessGroup(group)
    half = NUM_STEPS if resumed is None else NUM_STEPS // 2 + 1
    with tb.attach(called, optimizer, algorithm, process_group=own, observers=[recorder]) as attachment:
        train(called, optimizer, group, range(half))
        file = io.BytesIO()
        torch.save((attachment.rank_state_dict(), optimizer.state_dict()), file)
        weights = [parameter.detach().clone() for parameter in parameters_of(called)]
        file.seek(0)
        state, optimizer_state = torch.load(file, weights_only=True)
    if resumed is not None:
        optimizer, algorithm = make(name, resumed)
        if not algorithm.averages_weights:
            for parameter, weight in zip(parameters_of(resumed), weights, strict=True):
                parameter.data.copy_(weight)
            optimizer.load_state_dict(optimizer_state)
        with tb.attach(resumed, optimizer, algorithm, process_group=own) as attachment:
            attachment.load_rank_state_dict(state)
            train(resumed, optimizer, group, range(half, NUM_STEPS))
            state = attachment.rank_state_dict()
            weights = [parameter.detach().clone() for parameter in parameters_of(resumed)]
    return state, weights, recorder.events


def wrap(group: dist.ProcessGroup, module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, process_group=group, **options)


@pytest.mark.parametrize("name", GRADIENTS)
@on_each_rank(2)
def test_two_ddps_in_one_backward_train_as_one_ddp_of_both(group: dist.ProcessGroup, name: str) -> None:
    """Bitwise, with states of the same names and counts; also if resumed in the middle."""

    def one() -> Called:
        return wrap(group, copy.deepcopy(NETWORK))

    def two() -> Called:
        return [wrap(group, part, bucket_cap_mb=0.001) for part in copy.deepcopy(NETWORK)]

    state, weights, _ = run(group, name, one())
    list_state, list_weights, events = run(group, name, two())
    _, resumed_weights, _ = run(group, name, two(), two())
    for index, weight in enumerate(weights):
        assert torch.equal(weight, list_weights[index])
        assert torch.equal(weight, resumed_weights[index])
    own, list_own = state["attachment"]["impl"], list_state["attachment"]["impl"]
    assert own.keys() == list_own.keys()
    for key, value in own.items():  # residuals of the second phase are distributed over the ranks by bucket
        assert list_own[key].keys() == value.keys() if isinstance(value, dict) else list_own[key] == value
    buckets = {event.bucket for event in events if event.phase == "bucket"}
    assert {"gradient bucket 0 of module 0", "gradient bucket 0 of module 1"} <= buckets
    assert sum(event.phase == "backward" for event in events) == NUM_STEPS
    assert sum(event.phase == "step" for event in events) == NUM_STEPS


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decentralized", "ddps"),
        ("low precision", "mixed"),
        ("diloco", "mixed"),
        ("async", "plain"),
    ],
)
def test_weights_of_several_modules_are_averaged_as_those_of_one(name: str, kind: str) -> None:
    """Bitwise, also if resumed in the middle; the ranks of plain modules begin with rank 0's weights."""

    def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
        def one() -> Called:
            return wrap(group, copy.deepcopy(NETWORK))

        def several() -> Called:
            first, second = copy.deepcopy(NETWORK)
            if kind != "ddps":
                with torch.no_grad():
                    second.weight += group.rank()
            wrapped = first if kind == "plain" else wrap(group, first)
            return [wrapped, wrap(group, second) if kind == "ddps" else second]

        state, weights, _ = run(group, name, one())
        list_state, list_weights, events = run(group, name, several())
        assert sum(event.phase == "backward" for event in events) == NUM_STEPS
        _, resumed_weights, _ = run(group, name, several(), resumed := several())
        assert all(ddp.require_backward_grad_sync for ddp in resumed if isinstance(ddp, DistributedDataParallel))
        for index, weight in enumerate(weights):
            assert torch.equal(weight, list_weights[index])
            assert torch.equal(weight, resumed_weights[index])
        assert_equal(state, list_state)
        return weights

    first, second = run_ranks(2, body)
    assert not all(map(torch.equal, first, second)) or name == "async"


@pytest.mark.parametrize("name", ["topk", "powersgd", "qadam, 1 bit"])
def test_modules_with_a_backward_each(name: str) -> None:
    """As two discriminators with one optimizer: the same weights as with an attachment and an optimizer for each."""
    model = build(lambda: nn.ModuleList([nn.Linear(10, 40), nn.Linear(10, 1)]))

    def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
        def run_parts(*lists: list[DistributedDataParallel]) -> list[torch.Tensor]:
            own, attachments, optimizers = tb.BaguaProcessGroup(group), [], []
            for ddps in lists:
                optimizer, algorithm = make(name, ddps)
                optimizers.append(optimizer)
                attachments.append(tb.attach(ddps, optimizer, algorithm, process_group=own))
            for step in range(NUM_STEPS):
                x = torch.randn(6, 10, generator=torch.Generator().manual_seed(100 * step + group.rank()))
                for ddps in lists:
                    for ddp in ddps:
                        ddp(x).square().sum().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            for attachment in attachments:
                attachment.detach()
            return [parameter.detach() for ddps in lists for parameter in parameters_of(ddps)]

        together = run_parts([wrap(group, part) for part in copy.deepcopy(model)])
        separate = run_parts(*([wrap(group, part)] for part in copy.deepcopy(model)))
        if name != "powersgd":  # its first factors depend on the number of backward passes
            assert all(map(torch.equal, together, separate))
        return together

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first, second))


def test_attach_broadcasts_the_modules_without_ddp_and_the_optimizer() -> None:
    """But nothing that a DDP would ignore."""

    def body(group: dist.ProcessGroup) -> list[float]:
        wrapped, plain = wrap(group, nn.Linear(1, 1)), nn.Sequential(nn.Linear(1, 1))
        plain._ddp_params_and_buffers_to_ignore = ["0.bias"]
        plain[0].bias.requires_grad_(False)
        modules = [wrapped, plain]
        optimizer = torch.optim.SGD([p for p in parameters_of(modules) if p.requires_grad], lr=0.0, momentum=0.5)
        for parameter in parameters_of(modules):
            parameter.data.fill_(group.rank())
            parameter.grad = torch.full_like(parameter, group.rank())
        optimizer.step()
        with tb.attach(modules, optimizer, tb.DecentralizedAlgorithm(final_average=False, communication_interval=99)):
            momenta = [state["momentum_buffer"].mean().item() for state in optimizer.state.values()]
            return [parameter.mean().item() for parameter in parameters_of(modules)] + momenta

    assert run_ranks(2, body)[1] == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]


@on_each_rank(2)
def test_an_optimizer_that_never_steps_is_an_error_if_any_module_trains(group: dist.ProcessGroup) -> None:
    modules = [wrap(group, nn.Linear(10, 10)), nn.Linear(10, 3).eval()]
    attached, stepped = (torch.optim.SGD(parameters_of(modules), lr=0.01) for _ in range(2))
    with tb.attach(modules, attached, RARELY["decentralized"]) as attachment:
        with pytest.raises(RuntimeError, match="gradients were cleared 45 times without a step of SGD, which is att"):
            train(modules, stepped, group, range(60))
        leave_by_exception(attachment)


def test_a_scaled_backward_of_two_ddps_is_counted_once() -> None:
    """The counts of backward passes and steps in a state; and an overflow in one module skips the step of both."""

    def body(group: dist.ProcessGroup) -> tuple[int, int]:
        ddps = [wrap(group, part) for part in copy.deepcopy(NETWORK)]
        optimizer = torch.optim.SGD(parameters_of(ddps), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with tb.attach(ddps, optimizer, tb.TopKAlgorithm(0.2), grad_scaler=scaler) as attachment:
            for step in range(NUM_STEPS):
                loss = ddps[1](ddps[0](torch.ones(6, 10))).square().sum()
                scaler.scale(loss * (torch.inf if step == group.rank() == 1 else 1)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            state = attachment.runner.state_dict()
        return state["num_backward_passes"], state["num_steps"]

    assert run_ranks(2, body) == [(NUM_STEPS, NUM_STEPS - 1)] * 2


@on_each_rank(2)
def test_asynchronous_averaging_stops_and_resumes_for_a_list(group: dist.ProcessGroup) -> None:
    modules = [wrap(group, nn.Linear(2, 2)), nn.Linear(2, 3)]
    optimizer = torch.optim.SGD(parameters_of(modules))
    with tb.attach(modules, optimizer, RARELY["async"]) as attachment:
        attachment.impl.abort(modules)
        assert attachment.impl.mode == "stopped"
        attachment.impl.resume(modules[1])
        assert attachment.impl.mode == "running"
        with pytest.raises(ValueError, match="must be the module that the algorithm is attached to"):
            attachment.impl.abort([*modules, nn.Linear(2, 2)])


@on_each_rank(1)
def test_ddps_around_parts_of_the_module_and_more(group: dist.ProcessGroup) -> None:
    """They are refused, unless they share only frozen and ignored parameters."""
    module = nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 10).requires_grad_(False), nn.Linear(10, 3)])
    more = wrap(group, nn.Sequential(module[0], nn.Linear(10, 3)))
    elsewhere = nn.Sequential(*module[1:], nn.Linear(3, 3))
    elsewhere._ddp_params_and_buffers_to_ignore = ["1.weight", "1.bias"]
    other = wrap(group, elsewhere)
    optimizer = torch.optim.SGD([*module[0].parameters(), *module[2].parameters()])

    def step(*called: nn.Module) -> None:
        nn.Sequential(*called)(torch.ones(1, 10)).sum().backward()
        optimizer.step()

    with tb.attach(module, optimizer, RARELY["diloco"], process_group=tb.BaguaProcessGroup(group)):
        with pytest.raises(ValueError, match=r"gradients of 2 other parameters too, the first 1\.weight"):
            more(torch.ones(1, 10))
        step(*module)
        other(torch.ones(1, 10)).sum().backward()
        assert other.require_backward_grad_sync
        late = wrap(group, module[2])
        with pytest.raises(RuntimeError, match=r"Linear was wrapped in .* after attach, .* a list of all modules"):
            step(module[0], late)


def test_hierarchical_rounds_average_gradients_of_all_ddps_within_nodes() -> None:
    model = build(lambda: nn.Sequential(nn.Linear(10, 67), nn.Linear(67, 3)))

    def body(group: dist.ProcessGroup) -> None:
        def final_weights(module: nn.Module, called: Called) -> list[nn.Parameter]:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
            nodes = tb.BaguaProcessGroup(group, nodes=[0, 0, 1, 1])
            with tb.attach(called, optimizer, tb.DiLoCoAlgorithm(3), process_group=nodes):
                train(called, optimizer, group, range(4))
            return list(module.parameters())

        one, parts = copy.deepcopy(model), copy.deepcopy(model)
        expected = final_weights(one, wrap(group, one))
        assert all(map(torch.equal, final_weights(parts, [wrap(group, part) for part in parts]), expected))

    run_ranks(4, body)


def test_a_checkpoint_of_a_module_does_not_begin_a_second_backward() -> None:
    """The forward that it repeats runs within the backward."""

    def body(group: dist.ProcessGroup) -> int:
        modules = [nn.Linear(10, 10), nn.Linear(10, 3)]
        optimizer = torch.optim.SGD(parameters_of(modules), lr=0.01)
        recorder = tb.observe.Recorder()
        own = tb.BaguaProcessGroup(group)
        with tb.attach(modules, optimizer, RARELY["decentralized"], process_group=own, observers=[recorder]):
            hidden = torch.ones(2, 10)
            for module in modules:
                with set_checkpoint_early_stop(False):
                    hidden = checkpoint(module, hidden, use_reentrant=False)
            hidden.sum().backward()
            optimizer.step()
        return sum(event.phase == "backward" for event in recorder.events)

    assert run_ranks(2, body) == [1, 1]


@pytest.mark.parametrize("name", ["bytegrad", "topk"])
def test_ranks_without_data_join_with_all_ddps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they had zero gradients; their traces have the same steps. Torch joins one DDP after the other."""
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank())
    model = build(lambda: nn.ModuleList([nn.Linear(10, 40), nn.Linear(10, 3)]))

    def body(group: dist.ProcessGroup, joins: bool) -> tuple[list[torch.Tensor], int]:
        ddps = [wrap(group, part) for part in copy.deepcopy(model)]
        optimizer, algorithm = make(name, ddps)
        own, recorder = tb.BaguaProcessGroup(group), tb.observe.Recorder()
        num_batches = 2 + 2 * group.rank()
        attachment = tb.attach(ddps, optimizer, algorithm, process_group=own, observers=[recorder])
        with attachment, Join(ddps) if joins else nullcontext():
            for step in range(num_batches if joins else 4):
                optimizer.zero_grad()
                x = torch.randn(6, 10, generator=torch.Generator().manual_seed(100 * step + group.rank()))
                for ddp in ddps:
                    (ddp(x).square().sum() * (step < num_batches)).backward()
                optimizer.step()
        weights = [parameter.detach() for parameter in parameters_of(ddps)]
        return weights, sum(event.phase == "step" for event in recorder.events)

    joined, zeros = (run_ranks(2, lambda group, joins=joins: body(group, joins)) for joins in (True, False))
    assert [num_steps for _, num_steps in joined] == [4, 4]
    assert all(map(torch.equal, joined[1][0], zeros[1][0]))


def test_the_flag_of_accumulation_set_late_in_the_second_of_three_modules() -> None:
    layers = build(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))

    def body(group: dist.ProcessGroup) -> None:
        ddps = [DistributedDataParallel(copy.deepcopy(layer), process_group=group) for layer in layers]
        optimizer = torch.optim.SGD([parameter for ddp in ddps for parameter in ddp.parameters()], lr=0.1)
        data = torch.Generator().manual_seed(group.rank())
        with tb.attach(ddps, optimizer, "bytegrad", process_group=tb.BaguaProcessGroup(group)):
            for _ in range(2):
                optimizer.zero_grad()
                for is_last in (False, True):
                    for ddp in (ddps[0], ddps[2]):
                        ddp.require_backward_grad_sync = is_last
                    loss = nn.Sequential(*ddps)(torch.randn(2, 4, generator=data)).square().sum()
                    ddps[1].require_backward_grad_sync = is_last
                    loss.backward()
                optimizer.step()

    with torchbagua_warnings() as messages:
        run_ranks(2, body)
    assert len(messages) == 2, messages
    assert all("before the forward, not between forward and backward" in message for message in messages)
