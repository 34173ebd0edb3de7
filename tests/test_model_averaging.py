"""What all algorithms that average weights promise: DDP is silent, weights change in place and are equal at the end."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from averaging import Normed, Trainer, assert_same_weights, train, weights_of
from ranks import run_ranks
from training import Branches, Tower, build

SYNCHRONOUS = {
    "all": tb.DecentralizedAlgorithm(),
    "shift_one": tb.DecentralizedAlgorithm(True, "shift_one"),
    "low precision": tb.LowPrecisionDecentralizedAlgorithm(),
}
ALGORITHMS = {**SYNCHRONOUS, "async": tb.AsyncModelAverageAlgorithm(sync_interval_ms=1)}
# None of them communicates while this test takes its steps.
RARELY = [
    tb.DecentralizedAlgorithm(communication_interval=100),
    tb.LowPrecisionDecentralizedAlgorithm(communication_interval=100),
    tb.AsyncModelAverageAlgorithm(sync_interval_ms=20_000),
]
ALL = pytest.mark.parametrize("name", ALGORITHMS)


@pytest.mark.parametrize("algorithm", RARELY, ids=lambda algorithm: type(algorithm).__name__)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_ddp_sends_nothing(algorithm: tb.Algorithm, options: dict[str, Any]) -> None:
    """A rank takes steps while the other takes none: whatever DDP sent, gradients, buffers or flags, would wait."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model, lr=0.01, **options)
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm):
            trainer.step()
            if group.rank() == 0:
                for _ in range(3):
                    trainer.step()
            dist.barrier(group=group)
            if group.rank() == 1:
                for _ in range(3):
                    trainer.step()
        assert trainer.ddp.require_backward_grad_sync
        trainer.step()

    run_ranks(2, body)


@ALL
@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
def test_graphs_that_ddp_has_to_be_told_of(name: str, options: dict[str, Any]) -> None:
    model = build(Tower if "static_graph" in options else Branches)

    def body(group: dist.ProcessGroup) -> Any:
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group, **options)
        optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.01)
        data = torch.Generator().manual_seed(group.rank())
        with tb.attach(ddp, optimizer, ALGORITHMS[name]):
            for step in range(4):
                optimizer.zero_grad()
                ddp(torch.randn(4, 10, generator=data), step + group.rank()).square().sum().backward()
                optimizer.step()
        return weights_of(ddp.module)

    weights = run_ranks(2, body)
    assert_same_weights(weights)
    start = dict(model.named_parameters())
    assert not torch.equal(
        weights[0]["layers.0.weight" if "static_graph" in options else "stem.weight"],
        start.get("layers.0.weight", start.get("stem.weight")),
    )


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_plain_module_is_trained_as_one_in_ddp(name: str) -> None:
    """The same bits, though every rank starts with weights, buffers and optimizer state of its own."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> tuple[Any, Any]:
        in_ddp = train(group, model, SYNCHRONOUS[name])
        trainer = Trainer(group, model)
        trainer.ddp = trainer.module
        if group.rank():
            with torch.no_grad():
                for tensor in [*trainer.module.parameters(), *trainer.module.buffers()]:
                    tensor.add_(1)
                for parameter in trainer.optimizer.param_groups[0]["params"]:
                    trainer.optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
        with tb.attach(trainer.module, trainer.optimizer, SYNCHRONOUS[name], process_group=tb.BaguaProcessGroup(group)):
            for _ in range(7):
                trainer.step()
            trainer.trace.start.append(weights_of(trainer.module))
        trainer.trace.final = weights_of(trainer.module)
        return in_ddp, trainer.trace

    for in_ddp, plain in run_ranks(2, body):
        assert_same_weights([in_ddp.final, plain.final])
        for expected, actual in zip(in_ddp.start, plain.start, strict=True):
            assert_same_weights([expected, actual])


def test_plain_module_without_a_group() -> None:
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters())
    with pytest.raises(ValueError, match=r"process_group must be given or torch.distributed.init_process_group"):
        tb.attach(module, optimizer, "decentralized")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with tb.attach(module, optimizer, "decentralized"):
            module(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        with pytest.raises(
            TypeError, match=r"DistributedDataParallel, got Linear: ByteGradAlgorithm averages gradients"
        ):
            tb.attach(module, optimizer, "bytegrad")
    finally:
        dist.destroy_process_group()


@ALL
def test_switching_within_a_run(name: str) -> None:
    """Gradients, weights, gradients again, then plain DDP: replicas are equal wherever gradients are averaged."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> list[Any]:
        trainer = Trainer(group, model, lr=0.001)
        seen = []
        for algorithm in ("bytegrad", ALGORITHMS[name], "gradient_allreduce", ALGORITHMS[name], None):
            attachment = None if algorithm is None else tb.attach(trainer.ddp, trainer.optimizer, algorithm)
            for _ in range(3):
                trainer.step()
            if attachment is not None:
                attachment.detach()
                attachment.detach()
            state = trainer.optimizer.state_dict()["state"]
            momentum = {str(key): value["momentum_buffer"].clone() for key, value in state.items()}
            # Each rank's BatchNorm sees its own batches; under DDP rank 0's buffers are everybody's in a forward only.
            seen.append({key: w for key, w in (weights_of(trainer.module) | momentum).items() if "running" not in key})
        return seen

    for weights in zip(*run_ranks(2, body), strict=True):
        assert_same_weights(weights)


def test_without_the_last_mean_every_rank_keeps_its_own_weights() -> None:
    model = build(Normed)
    algorithm = tb.DecentralizedAlgorithm(True, "shift_one", final_average=False)
    first, second, *_ = run_ranks(4, lambda group: train(group, model, algorithm, num_steps=2).final)
    assert not torch.equal(first["last.weight"], second["last.weight"])


@ALL
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


@ALL
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


@ALL
def test_parameters_set_free_in_the_middle(name: str) -> None:
    """They are averaged from then on, as if buckets had been made so from the start."""
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
            names = {tensor.name for bucket in attachment.impl.buckets for tensor in bucket.tensors}
            assert {"frozen.weight", "frozen.bias"} <= names
        return weights_of(trainer.module)

    weights = run_ranks(2, body)
    assert_same_weights(weights)
    assert not torch.equal(weights[0]["frozen.weight"], model.frozen.weight)


@ALL
def test_running_variances_stay_positive(name: str) -> None:
    """One rank sees one batch of large values, and then decays while the mean of the ranks is on its way."""

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
        with tb.attach(module, optimizer, ALGORITHMS[name], process_group=group_of_module):
            for step in range(12):
                optimizer.zero_grad()
                for _ in range(4):
                    is_large = group.rank() == 0 and step % 4 == 0
                    x = torch.tensor([[1.0, 0.01], [-1.0, -0.01]]) * (30 if is_large else 0.1)
                    module(x).square().mean().backward()
                optimizer.step()
                smallest = min(smallest, module.norm.running_var.min().item())
                largest = max(largest, module.norm.running_var.max().item())
        return min(smallest, module.norm.running_var.min().item()), largest

    for smallest, largest in run_ranks(4, body):
        assert smallest > 0
        assert largest > 100


def test_buffers_are_left_alone_where_that_is_asked_for() -> None:
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> Any:
        return train(group, model, tb.DecentralizedAlgorithm(average_buffers=False)).final

    first, second = run_ranks(2, body)
    assert torch.equal(first["last.weight"], second["last.weight"])
    assert not torch.equal(first["norm.running_mean"], second["norm.running_mean"])


@ALL
def test_a_layer_that_is_frozen_in_the_middle(name: str) -> None:
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> Any:
        trainer = Trainer(group, model, lr=0.01)
        with tb.attach(trainer.ddp, trainer.optimizer, ALGORITHMS[name]) as attachment:
            trainer.step()
            trainer.module.first.requires_grad_(False)
            for _ in range(3):
                trainer.step()
            names = {tensor.name for bucket in attachment.impl.buckets for tensor in bucket.tensors}
            assert not {"first.weight", "first.bias"} & names
        return weights_of(trainer.module)

    assert_same_weights(run_ranks(4, body))


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_ranks_that_freeze_different_layers(name: str) -> None:
    """Of the same sizes: nothing but their names tells them apart."""
    model = build(lambda: nn.Sequential(*[nn.Linear(10, 10) for _ in range(3)]))

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model, lr=0.01)
        attachment = tb.attach(trainer.ddp, trainer.optimizer, ALGORITHMS[name])
        trainer.step()
        trainer.module[group.rank()].requires_grad_(False)

        def train() -> None:
            with attachment:
                for _ in range(3):
                    trainer.step()

        with pytest.raises(tb.CommunicationError, match=r"out of step .* as fingerprint of the tensors to average"):
            train()

    run_ranks(2, body)


def test_ranks_with_different_modules_are_told_so_when_they_attach() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = nn.Linear(2, 3) if group.rank() else nn.Linear(3, 2)
        optimizer = torch.optim.SGD(module.parameters())
        with pytest.raises(ValueError, match="ranks disagree in the shapes, dtypes and requires_grad of parameters"):
            tb.attach(module, optimizer, "decentralized", process_group=tb.BaguaProcessGroup(group))

    run_ranks(2, body)


@ALL
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


def test_forward_and_backward_inside_of_the_optimizers_step() -> None:
    """As Lightning does it, with a closure: the same bits."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> tuple[Any, Any]:
        expected = train(group, model, tb.DecentralizedAlgorithm(), num_steps=4).final
        trainer = Trainer(group, model)
        with tb.attach(trainer.ddp, trainer.optimizer, tb.DecentralizedAlgorithm()):
            for _ in range(4):

                def closure() -> torch.Tensor:
                    trainer.optimizer.zero_grad()
                    loss = trainer.ddp(torch.randn(6, 10, generator=trainer.data)).square().sum()
                    loss.backward()
                    return loss

                trainer.optimizer.step(closure)
        return expected, weights_of(trainer.module)

    for expected, with_closure in run_ranks(2, body):
        assert_same_weights([expected, with_closure])


def test_accumulated_gradients() -> None:
    """Several backward passes a step, under no_sync as DDP wants it or not: one step, one round."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> Any:
        trainer = Trainer(group, model, lr=0.01)
        with tb.attach(trainer.ddp, trainer.optimizer, tb.DecentralizedAlgorithm()) as attachment:
            for _ in range(3):
                trainer.optimizer.zero_grad()
                with trainer.ddp.no_sync():
                    trainer.ddp(torch.randn(6, 10, generator=trainer.data)).square().sum().backward()
                trainer.ddp(torch.randn(6, 10, generator=trainer.data)).square().sum().backward()
                trainer.optimizer.step()
            assert (attachment.impl.step, attachment.impl.num_backwards) == (3, 6)
        assert trainer.ddp.require_backward_grad_sync
        return weights_of(trainer.module)

    assert_same_weights(run_ranks(2, body))


def test_several_optimizers_over_one_model() -> None:
    """The first is the clock; what the others do between its steps is kept."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> Any:
        trainer = Trainer(group, model, lr=0.01)
        first = torch.optim.SGD(trainer.module.first.parameters(), lr=0.01)
        rest = torch.optim.Adam([*trainer.module.norm.parameters(), *trainer.module.last.parameters()], lr=0.01)
        with tb.attach(trainer.ddp, [first, rest], tb.DecentralizedAlgorithm()) as attachment:
            for _ in range(4):
                first.zero_grad()
                rest.zero_grad()
                trainer.ddp(torch.randn(6, 10, generator=trainer.data)).square().sum().backward()
                first.step()
                rest.step()
            assert attachment.impl.step == 4
        moments = rest.state_dict()["state"]
        return weights_of(trainer.module) | {str(key): value["exp_avg"] for key, value in moments.items()}

    assert_same_weights(run_ranks(2, body))


def test_a_copy_of_an_attached_module_is_a_module_of_its_own() -> None:
    """An average of weights for evaluation, say: its passes do not count, and it can be copied at all."""
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, model)
        trainer.ddp = trainer.module
        group_of_module = tb.BaguaProcessGroup(group)
        with tb.attach(trainer.module, trainer.optimizer, "decentralized", process_group=group_of_module) as attachment:
            trainer.step()
            if group.rank() == 0:
                copy.deepcopy(trainer.module)(torch.randn(3, 10)).sum().backward()
            trainer.step()
            assert attachment.impl.num_backwards == 2

    run_ranks(2, body)


def test_compiled_module() -> None:
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> Any:
        module = copy.deepcopy(model)
        ddp = DistributedDataParallel(module, process_group=group)
        optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.01)
        with pytest.raises(TypeError, match=r"must be the DistributedDataParallel itself, got OptimizedModule"):
            tb.attach(torch.compile(ddp, backend="eager"), optimizer, "decentralized")
        with tb.attach(ddp, optimizer, "decentralized") as attachment:
            ddp.compile(backend="eager")
            for _ in range(3):
                optimizer.zero_grad()
                ddp(torch.randn(6, 10, generator=torch.Generator().manual_seed(group.rank()))).sum().backward()
                optimizer.step()
            assert attachment.impl.num_backwards == 3
        return weights_of(module)

    # One rank a process at a time: torch.compile is not made for threads that compile the same code at once.
    run_ranks(1, body)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: tb.DecentralizedAlgorithm(communication_interval=0),
            "communication_interval must be at least 1, got 0",
        ),
        (
            lambda: tb.LowPrecisionDecentralizedAlgorithm(communication_interval=-1),
            "interval must be at least 1, got -1",
        ),
        (lambda: tb.AsyncModelAverageAlgorithm(sync_interval_ms=-1), "sync_interval_ms must be at least 0, got -1"),
        (lambda: tb.AsyncModelAverageAlgorithm(warmup_steps=-1), "warmup_steps must be at least 0, got -1"),
        (lambda: tb.AsyncModelAverageAlgorithm("shift_one"), "peer_selection_mode must be 'all', got 'shift_one'"),
        (lambda: tb.DecentralizedAlgorithm(True, "ring"), r"must be one of \('all', 'shift_one'\), got 'ring'"),
        (lambda: tb.DecentralizedAlgorithm(bucket_cap_mb=-1), "bucket_cap_mb must be at least 0, got -1"),
    ],
)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_types() -> None:
    with pytest.raises(TypeError, match=r"communication_interval must be an integer, got 1\.5"):
        tb.DecentralizedAlgorithm(communication_interval=1.5)
    with pytest.raises(TypeError, match="average_buffers must be True or False, got 1"):
        tb.DecentralizedAlgorithm(average_buffers=1)


@pytest.mark.parametrize(("nodes", "what"), [(None, "ranks"), ([0, 1, 2, 2, 2], "nodes")])
def test_shift_one_needs_an_even_number(nodes: list[int] | None, what: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Normed))
        bagua_group = None if nodes is None else tb.BaguaProcessGroup(group, nodes=nodes)
        with pytest.raises(ValueError, match=f"'shift_one' pairs {what} and needs an even number, got 3"):
            tb.attach(
                trainer.ddp, trainer.optimizer, tb.DecentralizedAlgorithm(True, "shift_one"), process_group=bagua_group
            )
        trainer.step()  # nothing is left behind

    run_ranks(3 if nodes is None else 5, body)


def test_weights_that_cannot_be_averaged() -> None:
    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.register_buffer("total", torch.zeros(1, dtype=torch.float64))

    def body(group: dist.ProcessGroup) -> None:
        module = Double()
        optimizer = torch.optim.SGD(module.parameters())
        bagua_group = tb.BaguaProcessGroup(group)
        with pytest.raises(ValueError, match=r"buffer total must be float32, bfloat16 or float16, got torch\.float64"):
            tb.attach(module, optimizer, "decentralized", process_group=bagua_group)
        without = tb.DecentralizedAlgorithm(average_buffers=False)
        tb.attach(module, optimizer, without, process_group=bagua_group).detach()
        foreign = torch.optim.SGD(nn.Linear(1, 1).parameters())
        with pytest.raises(ValueError, match="SGD has 2 parameters that are not the module's"):
            tb.attach(module, foreign, "decentralized", process_group=bagua_group)

    run_ranks(2, body)


def test_async_interval_that_the_timeout_does_not_allow() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, build(Normed))
        with pytest.raises(ValueError, match=r"at most half the timeout of attach or of the group, 60 s, got 31000"):
            tb.attach(trainer.ddp, trainer.optimizer, tb.AsyncModelAverageAlgorithm(sync_interval_ms=31_000))

    run_ranks(1, body)
